"""A trace as the text of a bug report."""

import platform
import re
import subprocess
import textwrap
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ci import Data
from ci.report import report_data as report
from ci.report import text_output
from impl.system_spec import SystemSpec
from reference.model import SPEC_VERSION
from stateful_tests.check.fixtures import NotPossible, check_name
from stateful_tests.lockstep.known_faults import known_faults

LEGEND = (
    "C is kv_committed_len, A kv_allocated_len, E swa_evicted_seqlen, R cache_protected_len, P page_size,"
    " W window; lengths are tokens."
)

INSTALL = (
    "kvspec is an executable specification of KV-cache bookkeeping. In a clone of its repository:"
    " `pip install '.[torch]'`."
)


class Titles(NamedTuple):
    """Given names, used instead of generated ones.

    checkout: the folder of the release, if it is one.
    """

    name: str | None = None
    title: str | None = None
    checkout: str | None = None

    def words(self, file: str, clause: str, command: str) -> str:
        """Return the title in words: the given name, or the file's if that is a clause of a sentence as
        new-fixture wants it, or else the command and the title of the clause."""
        if self.name is not None:
            return self.name
        with suppress(NotPossible):
            return check_name(Path(file).stem.removeprefix("@")).replace("_", " ")
        return f"{command}: {report.title(clause)}"

    def heading(self, words: str) -> str:
        return self.title or sentence_case(words).replace("_", " ")

    def with_commit(self, implementation: str) -> str:
        """Return the implementation, with what git calls the commit of its checkout."""
        return implementation + (git_description(self.checkout) if self.checkout else "")


GENERATED_TITLES = Titles()


def sentence_case(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def git_description(checkout: str) -> str:
    """Return git's name for the commit of a checkout, in brackets; nothing where git does not know it."""
    folder = Path(checkout).resolve()
    if not any((parent / ".git").exists() for parent in (folder, *list(folder.parents)[:2])):
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        describe = ["git", "-C", str(folder), "describe", "--always", "--tags", "--dirty"]
        done = subprocess.run(describe, capture_output=True, text=True, check=True, timeout=30)
        return f" ({done.stdout.strip()})"
    return ""


def versions(implementation: str) -> list[str]:
    """Return the versions that a report was made with."""
    try:
        kvspec_version = metadata.version("kvspec")
    except metadata.PackageNotFoundError:
        kvspec_version = "(from a checkout)"
    spec = SystemSpec.parse(implementation)
    if spec.engine == "sglang" and "overlap" not in spec.ways:
        implementation += ", run without overlap (`+overlap` has it)"
    python = f"Python {platform.python_version()}"
    with suppress(metadata.PackageNotFoundError):
        python += f", torch {metadata.version('torch')}"
    return [implementation, f"kvspec {kvspec_version}, specification {SPEC_VERSION}", python]


def story(data: Data, file: str, options: str, titles: Titles = GENERATED_TITLES) -> str:
    """Return Markdown from `report.replay_data` of a run with a violation."""
    trace = data["trace"]
    violation = data["violation"]
    clauses = [(violation["clause"], violation["expected"], violation["observed"])]
    clauses += [(clause, *sides) for clause, sides in zip(violation["also"], violation["details"])]
    command = data["rows"][violation["step"]]["command"]
    heading = titles.heading(titles.words(file, violation["clause"], command.split()[0]))
    lines = [f"# {_markdown(heading)} ({violation['clause']})", "", "## What happens", ""]
    if trace["story"]:
        lines += [*_paragraph(trace["story"]), ""]
    where = f"`{command}` on {data['implementation']}"
    if data["because"]:
        lines += [*_paragraph(sentence_case(data["because"])), ""]
    lines += [f"{where} breaks this rule:", ""]
    engine = "config" in trace  # which schedules by itself, and has no cursors
    lines += [f"> {violation['clause']}: {violation['sentence']}"]
    if reason := report.why(violation["clause"]):
        lines += [">", f"> Why it matters: {reason}"]
    if not engine:
        lines += [">", f"> {LEGEND}"]
    lines += ["", "| | expected | observed |", "|---|---|---|"]
    lines += [
        f"| {clause} | {_markdown(want)} | {_markdown(got)} |" for clause, want, got in clauses
    ]
    if known := data["known"]:
        lines += ["", _known_fault(known["id"], known["source"])]
        if trace["story"] not in known["story"]:
            lines += [
                "",
                *_paragraph(f"The numbers here are of its own trace: {known['story'][0]}"),
            ]
    if engine:
        outcome_label = "outcome"
        changes = "changes"
    else:
        outcome_label = "expected"
        changes = "changes in the reference"
    lines += [
        "",
        "## The commands",
        "",
        f"| # | command | {outcome_label} | {changes} |",
        "|---|---|---|---|",
    ]
    for row in data["rows"]:
        cells = (str(row["step"]), row["command"], row["outcome"], "; ".join(text_output.changes(row)))
        marked = [
            f"**{cell}**" if row["violates"] and cell else cell for cell in map(_markdown, cells)
        ]
        lines.append(f"| {' | '.join(marked)} |")
    mode = f" (mode {trace['mode']})" if "mode" in trace else ""
    sizes = f"{text_output.sizes(text_output.sizes_of_trace(trace))}{mode}."
    lines += ["", f"Sizes: {sizes}", "", "## How to reproduce", ""]
    saved = f"{Path(file).stem.removeprefix('@')}.json"
    lines += [INSTALL, ""]
    lines += [f"Save this as `{saved}`:", "", "```json", data["text"].strip(), "```", ""]
    lines += ["and run", ""]
    lines += ["```", f"kvspec replay {saved} {options}", "```", "", "## Versions", ""]
    lines += [f"* {line}" for line in versions(titles.with_commit(data["implementation"]))]
    return "\n".join(lines) + "\n"


def _known_fault(name: str, source: str) -> str:
    """Return the paragraph on a known fault. It leaves out notes on the search: it is for upstream's
    readers."""
    fault = known_faults()[name]
    numbers = ", ".join(f"#{number}" for number in fault.reports or fault.cause)
    where = source
    if numbers:
        where += f"; {'reported in' if fault.reports else 'the cause is in'} {numbers}"
    return f"Known fault `{name}` ({where}): {_with_code(fault.says)}"


def _with_code(text: str) -> str:
    """Return Markdown as `_markdown` does, for a text whose code is in backticks already."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(piece if piece.startswith("`") else _markdown(piece) for piece in pieces)


def _markdown(text: str) -> str:
    """Escape plain text so that Markdown reads no table bar, tag, link, code or emphasis in it."""
    return re.sub(r"[\\`*<|~]|(?<!\w)_|_(?!\w)|\](?=[(\[])", r"\\\g<0>", text_output.printable(text))


def _paragraph(text: str) -> list[str]:
    """Return the text in lines, none of which begins a heading, a quote or a list."""
    lines = textwrap.wrap(_markdown(" ".join(text.split())), 100)
    return [re.sub(r"^(\d*)(#(?=[# ])|[>+=-]|(?<=\d)[.)](?= ))", r"\1\\\2", line) for line in lines]
