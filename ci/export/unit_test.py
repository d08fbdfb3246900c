"""A trace as a unit test against a release's own classes."""

import ast
import itertools
import json
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ci.export.bug_report import GENERATED_TITLES, LEGEND, Titles, git_description
from ci.export.recorded_run import Asserts, NotExportable, RecordedRun, not_raising
from ci.export.template_parts import definitions, head_of, imports, server, shared_definitions
from ci.report import report_data as report
from ci.report import text_output
from ci.shown_kinds import shown_kind_of
from impl.sglang.parts.fetch import checkout_root, release_root
from impl.process.wire import Noted
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases import catalogue as releases
from impl.sglang.releases.names import in_code
from impl.sglang.tiers.system import TierSystem
from reference.commands import CheckBusy, CheckIdle, Extend, Open, Outcome, Refused, kind_name
from stateful_tests.lockstep.driven_kinds import check_fits, lockstep_on
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.traces.notation import format_command

ENGINE = "sglang"
# Calls that stand in the test as one: that, and their lines. {NAME} is the same in all of them; a line that
# begins with ? may be missing.
_TOGETHER = (
    (
        "prefill(server, {req}, end={end}, token={token})",
        "chunk({req}, end={end})",
        "batch = server.batch(ForwardMode.EXTEND, {req})",
        "batch.prepare_for_extend()",
        "?server.allocator.free_group_begin()",
        "sampled({req}, [{token}])",
        "checkpoint({req}, server.cache)",
        "?server.allocator.free_group_end()",
    ),
    (
        "match_and_prefill(server, {req}, end={end}, token={token})",
        "{req}.init_next_round_input(server.cache)",
        "lock({req}, server.cache)",
        "prefill(server, {req}, end={end}, token={token})",
    ),
    (
        "prefill_chunk(server, {req}, end={end})",
        "chunk({req}, end={end})",
        "middle_chunks({req}, +1)",
        "batch = server.batch(ForwardMode.EXTEND, {req})",
        "batch.prepare_for_extend()",
        "middle_chunks({req}, -1)",
        "checkpoint({req}, server.cache{chunked})",
    ),
    (
        "decode(server, {req}, token={token})",
        "batch = server.batch(ForwardMode.DECODE, {req})",
        "batch.prepare_for_decode()",
        "sampled({req}, [{token}])",
    ),
    (
        "finish(server, {req})",
        "server.allocator.free_group_begin()",
        "check_finished({req})",
        "release_kv_cache({req}, server.cache{kept})",
        "server.allocator.free_group_end()",
        "?server.reap()",
    ),
    (
        "server.batch({of}).release_req({how})",
        "batch = server.batch({of})",
        "batch.release_req({how})",
    ),
    (
        "server.batch({of})._evict_swa({how})",
        "batch = server.batch({of})",
        "batch._evict_swa({how})",
    ),
)
_OF_ONE_VALUE = ("True", "False", "IsNone", "IsNotNone")  # assertions
_BELOW = "# What stands in for a server, on a CPU. Nothing below is about this bug."
_STANDS_FOR = {
    "req": r"\w+",
    "end": r"\d+",
    "token": r"\d+",
    "of": ".*",
    "how": ".*",
    "chunked": "(?:, chunked=True)?",
    "kept": r"(?:, \w+=True)?",
}


def _lines_pattern(lines: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches these lines of _TOGETHER."""
    names_seen = set[str]()
    text = ""
    for line in lines:
        parts = re.split(r"\{(\w+)\}", line.removeprefix("?"))
        for index, part in enumerate(parts):
            group = f"(?P={part})" if part in names_seen else f"(?P<{part}>{_STANDS_FOR.get(part)})"
            parts[index] = group if index % 2 else re.escape(part)
            names_seen |= {part} if index % 2 else set()
        pattern = "".join(parts) + "\n"
        text += f"(?:{pattern})?" if line[0] == "?" else pattern
    return re.compile(f"^{text}", re.MULTILINE)


_PHRASES = [(re.sub(r"\{(\w+)\}", r"\\g<\1>", one), _lines_pattern(lines)) for one, *lines in _TOGETHER]
# Results between these two are processed in a group in which nothing is freed.
_EMPTY_GROUP = re.compile(
    r"server\.allocator\.free_group_begin\(\)\n"
    r"((?:sampled\(.*\)\n|\w+\.\S+ \+= .*\n)*)"
    r"server\.allocator\.free_group_end\(\)\n"
)


class ReleaseTarget(NamedTuple):
    """A release to run a test on: its name, its kind, its files."""

    name: str
    version: str
    root: Path


def target(text: str) -> ReleaseTarget:
    """Return a release by its version, or a checkout by its folder. Raises UnusableImplementation."""
    if os.path.isdir(text):
        root = checkout_root(text)
        name = f"a checkout{git_description(text)}"
        return ReleaseTarget(name, releases.detect(root).release.version, root)
    version = releases.supported_release(text).version
    return ReleaseTarget(f"sglang=={version}", version, release_root(version))


def unit_test(
    trace: Trace,
    file: str,
    system: SGLangSystem | TierSystem,
    fixed: ReleaseTarget | None = None,
    named: Titles = GENERATED_TITLES,
    shares_module: bool = False,
) -> str:
    """Return the text of a test that performs the trace on the classes of `system`, which records its calls.

    It asserts the expectation of the violated clause. Raises NotExportable, UnusableImplementation.

    fixed: a system on which it passes.
    shares_module: its server is in the module that `shared_module` makes.
    """
    versions = _versions(system, fixed)
    lines_of_start(trace.geometry, "")  # raises what it can before the run
    run = _record_run(trace, system)
    violation = run.violation
    clause = run.clause
    wanted = violation.expected
    observed = violation.observed
    if clause != violation.clause:
        wanted, observed = violation.details[violation.also.index(clause)]
    command, outcome, calls = run.steps[-1]
    raised = clause == "BROKEN" and not isinstance(run.last, (CheckBusy, CheckIdle))
    of_kind = shown_kind_of(trace.geometry).server_asserts()
    asserts = Asserts(not_raising(calls[-1:])) if raised else of_kind.assert_violation(run)
    text = "\n".join(asserts.assertions)
    by_nodes = "nodes|node_at|swa_slots_in_tree|owners"
    by_nodes += "|tree_slots|slots_in_tree" if system.kind.keeps_slots else ""
    if system.kind.core == "rust" and re.search(rf"\b({by_nodes})\(", text):
        raise NotExportable(f"{clause}: the tree's core in Rust hands out no nodes to inspect")
    sessions = any(isinstance(command, Open) for command in trace.commands)
    steps = [*run.steps[:-1], (command, outcome, asserts.calls_with_notes(calls[:-1] if raised else calls))]
    body = [*itertools.chain(*(lines_of_command(*step, sessions=sessions) for step in steps))]
    late = [line for name, line in system.noted.late if re.search(rf"\b{name}\b", text)]
    body += ["", "# the results that are still to come", *late] if late else []
    body += with_message(asserts.assertions, failure_message(clause, wanted, system.name, observed))
    code = "\n".join([*lines_of_start(trace.geometry, "\n".join(body)), "", *body])
    if shares_module:
        needed = imports(code, system, versions)
    else:
        needed = definitions(code, run.geometry, system, versions, sessions=sessions)
    text = assemble(
        trace,
        file,
        clause,
        run.last,
        needed,
        code,
        named,
        named.with_commit(system.name),
        fixed and fixed.name,
    )
    return in_code(text, system.kind)


def assemble(
    trace: Trace, file: str, clause: str, last: object, needed: str, code: str, named: Titles, faulty: str,
    fixed: str | None,
) -> str:  # fmt: skip
    """Return the text of a test.

    last: the command that violates `clause`.
    needed: definitions before the test.
    """
    words = named.words(file, clause, kind_name(type(last)))
    name = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_") or "trace"
    camel = "".join(word.capitalize() for word in name.split("_"))
    imports, scaffolding = head_of(needed)
    return "\n".join([
        _docstring(named.heading(words), trace, file, faulty, fixed, clause),
        "",
        imports, "", "",
        f"class Test{camel}(unittest.TestCase):",
        f"    def test_{name}(self):",
        textwrap.indent(re.sub(r"\n{3,}", "\n\n", code), " " * 8), "", "",
        *([_BELOW, "", "", scaffolding, "", ""] if scaffolding else []),
        'if __name__ == "__main__":', "    unittest.main()", "",
    ])  # fmt: skip


def hook(trace: Trace) -> str:
    """Return the code that loads a release for a test."""
    return shown_kind_of(trace.geometry).server_asserts().HOOK


def shared_module(system: SGLangSystem | TierSystem, fixed: ReleaseTarget | None = None) -> str:
    """Return the text of the module that the tests of one folder import. Raises NotExportable."""
    return in_code(shared_definitions(system, _versions(system, fixed)), system.kind)


def lines_of_start(config: Any, code: str) -> list[str]:
    """Return the lines before the first command. Raises NotExportable."""
    of_kind = shown_kind_of(config).server_asserts()
    host = of_kind.host_arguments(config)
    device = of_kind.device_sizes(config)
    if device.states:
        raise NotExportable("recurrent state is no part of the exported tests")
    return [server(device, code, host), "self.addCleanup(server.settings.close)"]


def _versions(system: SGLangSystem | TierSystem, fixed: ReleaseTarget | None) -> set[str]:
    versions = {system.release, *([fixed.version] if fixed else ())}
    if not any(versions <= {*alike} for alike in releases.ALIKE):
        other = [r for alike in releases.ALIKE if system.release in alike for r in alike]
        other.remove(system.release)
        runs = (
            f"a test of {system.release} runs on {', '.join(other)} as well"
            if other
            else "none of them does"
        )
        raise NotExportable(
            f"no one test runs on {' and '.join(sorted(versions))}: too many names differ; {runs}."
            " --fixed also takes the folder of a checkout with the mend, and may be left out"
        )
    return versions


def _record_run(trace: Trace, system: SGLangSystem | TierSystem) -> RecordedRun:
    """Run a trace on a release up to its violation and return the calls of each command. Raises NotExportable
    where the run conforms, or has a prompt that another server computes."""
    check_fits(system, trace.geometry, trace.commands)
    if any(
        isinstance(each, Extend) and any(lane.tail for lane in each.lanes)
        for each in trace.commands
    ):
        raise NotExportable(
            "a prompt that another server has computed is no part of the exported tests"
        )
    of_kind = shown_kind_of(trace.geometry).server_asserts()
    geometry = of_kind.device_sizes(trace.geometry)
    lockstep = lockstep_on(system, trace.geometry, trace.mode, trace.clause)
    steps: list[tuple[str, Outcome, tuple[str, ...]]] = []
    for command in trace.commands:
        system.noted = Noted()
        before = lockstep.moment()
        outcome = lockstep.do(command)
        check = isinstance(command, (CheckBusy, CheckIdle))
        last = lockstep.violation is not None
        if not check or last:  # a check that is content only looks
            steps.append((format_command(command), outcome, system.noted.calls))
        if (violation := lockstep.violation) is not None:
            clause = trace.clause if trace.clause in violation.clauses else violation.clause
            if "BROKEN" in violation.clauses and not check:
                clause = "BROKEN"  # nothing else of the release can be asked any more
            kind = system.kind
            after = lockstep.moment()
            unified = of_kind.is_unified(kind, trace.geometry)
            return RecordedRun(
                steps=steps,
                last=command,
                violation=violation,
                clause=clause,
                was=before,
                now=after,
                kind=kind,
                unified=unified,
                geometry=geometry,
            )
    raise NotExportable(f"conforms on {system.name}: there is no fault to test")


def lines_of_command(command: str, outcome: Outcome, calls: Sequence[str], *, sessions: bool) -> list[str]:
    """Return the lines that carry a command out. The command is a comment above them, unless one line
    is clear without it."""
    refused = f" (refused: {outcome.reason.value})" if isinstance(outcome, Refused) else ""
    text = "".join(f"{call}\n" for call in calls if sessions or call != "server.reap()")
    text = _EMPTY_GROUP.sub(r"\1", text)
    for phrase, pattern in _PHRASES:
        text = pattern.sub(f"{phrase}\n", text)
    lines = text.splitlines()
    if len(lines) == 1 and not refused:
        return lines
    return ["", *comment(command + refused), *lines, ""]


def with_message(assertions: Sequence[str], message: str) -> list[str]:
    """Return assertions with the expected and observed values as their message; where there is none,
    with a comment."""
    text = "\n".join(assertions)
    if not re.search(r"^ *self\.assert", text, re.MULTILINE):
        return ["", *comment(message), *text.split("\n")]
    rows = textwrap.wrap(text_output.printable(message), 90, drop_whitespace=False)
    rows = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines = ["message = (", *(f"    {row}" for row in rows), ")"]
    if len(rows) == 1:
        lines = [f"message = {rows[0]}"]
    return ["", *lines, *itertools.chain(*(_with_message(line) for line in text.split("\n")))]


def _with_message(line: str) -> list[str]:
    """Return a line of assertions, with the message in the place of any other."""
    assertion = re.fullmatch(r"( *)(self\.assert(\w+))\(.*\)", line)
    if assertion is None:
        return [line]
    indent, function, kind = assertion.groups()
    code = line.strip()
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    values = [ast.get_source_segment(code, argument) or "" for argument in call.args]
    values = [*values[: 1 if kind in _OF_ONE_VALUE else 2], "message"]
    call_text = f"{indent}{function}({', '.join(values)})"
    if len(call_text) <= 100:
        return [call_text]
    return [f"{indent}{function}(", *(f"{indent}    {value}," for value in values), f"{indent})"]


def failure_message(clause: str, wanted: str, name: str, observed: str) -> str:
    """Return the message of a failing test.

    name: of the system on which it was observed; a checkout has none that a reader knows.
    """
    where = "" if name.endswith("@checkout") else f" on {name}"
    return f"{clause}: expected {wanted}; observed{where}: {observed}"


def comment(text: str) -> list[str]:
    return textwrap.wrap(text_output.printable(text), 98, initial_indent="# ", subsequent_indent="# ")


def _docstring(
    heading: str, trace: Trace, file: str, faulty: str, fixed: str | None, clause: str
) -> str:
    sentence = report.sentence(clause)
    paragraphs = [
        f"{heading}.",
        trace.story,
        f"Fails on {faulty}" + (f", passes on {fixed}." if fixed else "."),
        f"{clause}: {sentence}" + (f" {LEGEND}" if re.search(r"\b[CERPW]\b", sentence) else ""),
        f"Made by kvspec from {Path(file).name}. No GPU is needed.",
    ]
    plain = [text_output.printable(" ".join(text.split())).replace("\\", "/") for text in paragraphs if text]
    text = "\n\n".join("\n".join(textwrap.wrap(text, 100)) for text in plain)
    return '"""' + text.replace('"', "'") + '\n"""'
