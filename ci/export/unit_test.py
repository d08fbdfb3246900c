"""A trace for others: the text of a bug report, or a unit test against a release's own classes."""

from __future__ import annotations

import itertools
import os
import platform
import re
import subprocess
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ci import Data
from ci.export.assertions import asserted
from ci.export.recorded_run import NotExportable, RecordedRun
from ci.export.template_parts import definitions
from ci.report import data as report
from ci.report import render
from impl.sglang.parts.fetch import checkout_root, release_root
from impl.process.wire import Noted
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases import catalogue as releases
from reference.commands import CheckBusy, CheckIdle, Open, Outcome, Refused, kind_name
from reference.model import SPEC_VERSION
from stateful_tests.check.fixtures import NotPossible, check_name
from stateful_tests.lockstep.lockstep import Lockstep, check_fits
from stateful_tests.lockstep.results import Trace
from stateful_tests.traces.notation import format_command

LEGEND = (
    "C is kv_committed_len, A kv_allocated_len, E swa_evicted_seqlen, R cache_protected_len, P page_size,"
    " W window; lengths are tokens."
)
STARTED = ["server = Server()", "self.addCleanup(server.settings.close)"]
# Calls that stand in the test as one, by what they are together.
_TOGETHER = {
    r"server\.allocator\.free_group_begin\(\)\n"  # nothing is freed in it
    r"((?:sampled\(.*\)\n|.*kv_committed_len \+= .*\n)*)"
    r"server\.allocator\.free_group_end\(\)(?:\n|$)": r"\1",
    r"chunk\((\w+), end=(\d+)\)\n"
    r"batch = server\.batch\(ForwardMode\.EXTEND, \1\)\n"
    r"batch\.prepare_for_extend\(\)\n"
    r"(?:server\.allocator\.free_group_begin\(\)\n)?"
    r"sampled\(\1, \[(\d+)\]\)\n"
    r"checkpoint\(\1, server\.cache\)"
    r"(?:\nserver\.allocator\.free_group_end\(\))?": r"prefill(server, \1, end=\2, token=\3)",
    r"chunk\((\w+), end=(\d+)\)\n"
    r"middle_chunks\(\1, \+1\)\n"
    r"batch = server\.batch\(ForwardMode\.EXTEND, \1\)\n"
    r"batch\.prepare_for_extend\(\)\n"
    r"middle_chunks\(\1, -1\)\n"
    r"checkpoint\(\1, server\.cache(?:, chunked=True)?\)": r"prefill_chunk(server, \1, end=\2)",
    r"batch = server\.batch\(ForwardMode\.DECODE, (\w+)\)\n"
    r"batch\.prepare_for_decode\(\)\n"
    r"sampled\(\1, \[(\d+)\]\)": r"decode(server, \1, token=\2)",
    r"server\.allocator\.free_group_begin\(\)\n"
    r"check_finished\((\w+)\)\n"
    r"release_kv_cache\(\1, server\.cache(?:, \w+=True)?\)\n"
    r"server\.allocator\.free_group_end\(\)": r"finish(server, \1)",
    r"batch = (server\.batch\(.*\))\nbatch\.(release_req|_evict_swa)": r"\1.\2",
}


class Titles(NamedTuple):
    """What is asked for instead of names that are made. checkout: the folder of the release, if it is one."""

    name: str | None = None
    title: str | None = None
    checkout: str | None = None

    def words(self, file: str, clause: str, command: str) -> str:
        """The name as words: as asked, or the file's if that is a clause of a sentence, such as new-fixture
        wants it, or else what the clause is about, and in which command."""
        stem = Path(file).stem
        with suppress(NotPossible):
            return check_name(stem).replace("_", " ") if self.name is None else self.name
        return f"{report.title(clause)} in {command}"

    def heading(self, words: str) -> str:
        return self.title or words[:1].upper() + words[1:].replace("_", " ")

    def of(self, implementation: str) -> str:
        """The implementation, with what git calls the commit of its checkout."""
        return f"{implementation}{described(self.checkout) if self.checkout else ''}"


AS_MADE = Titles()


def described(checkout: str) -> str:
    """What git calls the commit of a checkout, in brackets; nothing where git does not know it."""
    folder = Path(checkout).resolve()
    if not any((each / ".git").exists() for each in (folder, *list(folder.parents)[:2])):
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        asked = ["git", "-C", str(folder), "describe", "--always", "--tags", "--dirty"]
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
        return f" ({done.stdout.strip()})"
    return ""


def versions(implementation: str) -> list[str]:
    """What a report was made with."""
    try:
        own = metadata.version("kvspec")
    except metadata.PackageNotFoundError:
        own = "(from a checkout)"
    python, torch = platform.python_version(), metadata.version("torch")
    return [implementation, f"kvspec {own}, specification {SPEC_VERSION}", f"Python {python}, torch {torch}"]


# -- a bug report --------------------------------------------------------------------------------------


def story(data: Data, file: str, options: str, asked: Titles = AS_MADE) -> str:
    """Markdown from `report.replay_data` of a run with a violation."""
    trace, violation = data["trace"], data["violation"]
    clauses = [(violation["clause"], violation["expected"], violation["observed"])]
    clauses += [(clause, *said) for clause, said in zip(violation["also"], violation["details"])]
    command = data["rows"][violation["step"]]["command"]
    heading = asked.heading(asked.words(file, violation["clause"], command.split()[0]))
    lines = [f"# {_markdown(heading)} ({violation['clause']})", "", "## What happens", ""]
    if trace["story"]:
        lines += [*_paragraph(trace["story"]), ""]
    where = f"`{command}` on {data['implementation']}"
    if data["argument"]:
        lines += [*_paragraph(data["argument"][:1].upper() + data["argument"][1:]), ""]
    lines += [f"{where} breaks this rule:", ""]
    lines += [f"> {violation['clause']}: {violation['sentence']}", ">", f"> {LEGEND}", ""]
    lines += ["| | expected | observed |", "|---|---|---|"]
    lines += [f"| {clause} | {_markdown(want)} | {_markdown(got)} |" for clause, want, got in clauses]
    lines += ["", "## The commands", "", "| # | command | by the rules | changes |", "|---|---|---|---|"]
    for row in data["rows"]:
        cells = (str(row["step"]), row["command"], row["outcome"], "; ".join(render.changes(row)))
        marked = [f"**{cell}**" if row["violates"] and cell else cell for cell in map(_markdown, cells)]
        lines.append(f"| {' | '.join(marked)} |")
    sizes = render.sizes(render.sized(trace)) + (f" (mode {trace['mode']})." if "mode" in trace else ".")
    lines += ["", f"Sizes: {sizes}", "", "## How to reproduce", ""]
    lines += [f"Save this as `{Path(file).name}`:", "", "```json", data["text"].strip(), "```", ""]
    lines += ["and run", ""]
    lines += ["```", f"kvspec replay {Path(file).name} {options}", "```", "", "## Versions", ""]
    lines += [f"* {line}" for line in versions(asked.of(data["implementation"]))]
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    """Plain text as Markdown: nothing in it is a table's bar, a tag, a link, code or emphasis."""
    return re.sub(r"[\\`*<|~]|(?<!\w)_|_(?!\w)|\](?=[(\[])", r"\\\g<0>", render.plain(text))


def _paragraph(text: str) -> list[str]:
    """The same in lines, none of which begins a heading, a quote or a list."""
    lines = textwrap.wrap(_markdown(" ".join(text.split())), 100)
    return [re.sub(r"^(\d*)(#(?=[# ])|[>+=-]|(?<=\d)[.)](?= ))", r"\1\\\2", line) for line in lines]


# -- a unit test ---------------------------------------------------------------------------------------


class ReleaseTarget(NamedTuple):
    """A release to run a test on: what it is called, whose kind it is of, where its files are."""

    name: str
    version: str
    root: Path


def target(text: str) -> ReleaseTarget:
    """A release by its version, or a checkout by its folder. Raises UnusableImplementation."""
    if os.path.isdir(text):
        root, name = checkout_root(text), f"a checkout{described(text)} that mends it"
        return ReleaseTarget(name, releases.detect(root).release.version, root)
    version = releases.supported(text.removeprefix("sglang==")).version
    return ReleaseTarget(f"sglang=={version}", version, release_root(version))


def unit_test(
    trace: Trace, file: str, system: SGLangSystem, fixed: ReleaseTarget | None = None, named: Titles = AS_MADE
) -> str:
    """The text of a test that performs the trace on the classes of `system`, which notes its calls.

    It asserts what the violated clause is about. fixed: what it runs on besides, and is said to pass on.
    Raises NotExportable, UnusableImplementation.
    """
    versions = {system.release, *([fixed.version] if fixed else ())}
    if not any(versions <= {*alike} for alike in releases.ALIKE):
        raise NotExportable(f"no one test runs on {' and '.join(sorted(versions))}: too many names differ")
    run = _record(trace, system)
    violation = run.violation
    clause, wanted, observed = run.clause, violation.expected, violation.observed
    if clause != violation.clause:
        wanted, observed = violation.details[violation.also.index(clause)]
    asked = asserted(trace, run)
    text = "\n".join(asked.assertions)
    if system.kind.core == "rust" and re.search(r"\b(nodes|node_at|swa_slots_in_tree)\(", text):
        raise NotExportable(f"{clause}: the tree's core in Rust hands out no nodes that could be asked")
    sessions = any(isinstance(command, Open) for command in trace.commands)
    command, outcome, calls = run.steps[-1]
    steps = [*run.steps[:-1], (command, outcome, asked.among(calls))]
    body = [*STARTED, *itertools.chain(*(commented(*step, sessions=sessions) for step in steps))]
    late = [line for name, line in system.late if re.search(rf"\b{name}\b", text)]
    body += ["", "# the results that are still to come", *late] if late else []
    body += ["", *_comment(f"{clause}. Expected {wanted}"), *_comment(f"{system.name}: {observed}")]
    code = "\n".join([*body, text])
    words = named.words(file, clause, kind_name(type(run.last)))
    name = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_") or "trace"
    camel = "".join(word.capitalize() for word in name.split("_"))
    return "\n".join([
        _docstring(named.heading(words), trace, file, named.of(system.name), fixed and fixed.name, clause),
        "",
        definitions(code, trace.geometry, system, versions, sessions=sessions), "", "",
        f"class Test{camel}(unittest.TestCase):",
        f"    def test_{name}(self):",
        textwrap.indent(code, " " * 8), "", "",
        'if __name__ == "__main__":', "    unittest.main()", "",
    ])  # fmt: skip


def _record(trace: Trace, system: SGLangSystem) -> RecordedRun:
    check_fits(system, trace.geometry, trace.commands)
    lockstep = Lockstep(system, trace.geometry, trace.mode, clause=trace.clause)
    steps: list[tuple[str, Outcome, tuple[str, ...]]] = []
    for command in trace.commands:
        system.noted = Noted()
        before = lockstep.moment()
        outcome = lockstep.do(command)
        check, last = isinstance(command, (CheckBusy, CheckIdle)), lockstep.violation is not None
        if not check or last:  # a check that is content only looks
            steps.append((format_command(command), outcome, system.calls))
        if (violation := lockstep.violation) is not None:
            if violation.clause == "BROKEN" and not check:
                raise NotExportable(f"the release breaks at {format_command(command)}: {violation.observed}")
            clause = trace.clause if trace.clause in violation.clauses else violation.clause
            kind, after = system.kind, lockstep.moment()
            unified = kind.is_unified(trace.geometry)
            return RecordedRun(steps, command, violation, clause, before, after, kind, unified)
    raise NotExportable(f"conforms on {system.name}: there is no fault to test")


def commented(command: str, outcome: Outcome, calls: Sequence[str], *, sessions: bool) -> list[str]:
    """A command as a comment, after an empty line, and the lines that carry it out."""
    refused = f" (refused: {outcome.reason.value})" if isinstance(outcome, Refused) else ""
    text = "\n".join(call for call in calls if sessions or call != "server.reap()")
    for pattern, one in _TOGETHER.items():
        text = re.sub(pattern, one, text)
    text = text.strip("\n")
    if sessions:
        text = re.sub(r"(finish\(server, \w+\))\nserver\.reap\(\)", r"\1", text)
    return ["", *_comment(command + refused), *(text.split("\n") if text else ())]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(render.plain(text), 98, initial_indent="# ", subsequent_indent="# ")


def _docstring(
    heading: str, trace: Trace, file: str, faulty: str, fixed: str | None, clause: str
) -> str:
    sentence = report.sentence(clause)
    said = [
        f"{heading}.", trace.story,
        f"Fails on {faulty}" + (f", passes on {fixed}." if fixed else "."),
        f"{clause}: {sentence}" + (f" {LEGEND}" if re.search(r"\b[CERPW]\b", sentence) else ""),
        f"Made by kvspec from {Path(file).name}. Each comment is a command of it; below stand the calls that"
        " carry it out. No GPU is needed.",
    ]  # fmt: skip
    plain = [render.plain(" ".join(text.split())).replace("\\", "/") for text in said if text]
    text = "\n\n".join("\n".join(textwrap.wrap(text, 100)) for text in plain)
    return '"""' + text.replace('"', "'") + '\n"""'
