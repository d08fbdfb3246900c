"""A trace for others: the text of a bug report, or a unit test against a release's own classes."""

from __future__ import annotations

import ast
import platform
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ci import render, report
from ci import Data
from impl.adapter import UnusableImplementation, View
from impl.sglang import releases
from impl.sglang.fetch import release_root
from impl.sglang.calls import SCHEDULER, ids_text, quoted, variable
from impl.sglang.system import SGLangSystem
from reference.commands import CheckBusy, CheckIdle, Done, Outcome, Refused, Submit
from reference.ledger import Phase, State, free, text_tokens
from reference.model import SPEC_VERSION
from stateful_tests.lockstep import Lockstep, check_fits
from stateful_tests.results import Trace, Violation
from stateful_tests.wording import describe

LEGEND = (
    "C is kv_committed_len, A kv_allocated_len, E swa_evicted_seqlen, R cache_protected_len, P page_size,"
    " W window; lengths are tokens."
)
_CURSORS = ("kv_committed_len", "kv_allocated_len", "swa_evicted_seqlen")


class NotExportable(ValueError):
    """No test can be made of this trace: one line says why."""


def title(file: str) -> str:
    """What a trace's file is called, as a sentence without its full stop."""
    words = " ".join(re.findall(r"[A-Za-z0-9.]+", Path(file).stem))
    return words[:1].upper() + words[1:]


def versions(implementation: str) -> list[str]:
    """What a report was made with."""
    try:
        own = metadata.version("kvspec")
    except metadata.PackageNotFoundError:
        own = "(from a checkout)"
    python, torch = platform.python_version(), metadata.version("torch")
    return [implementation, f"kvspec {own}, specification {SPEC_VERSION}", f"Python {python}, torch {torch}"]


# -- a bug report --------------------------------------------------------------------------------------


def story(data: Data, file: str, options: str) -> str:
    """Markdown from `report.replay_data` of a run with a violation."""
    trace, violation = data["trace"], data["violation"]
    clauses = [(violation["clause"], violation["expected"], violation["observed"])]
    clauses += [(clause, *said) for clause, said in zip(violation["also"], violation["details"])]
    lines = [f"# {title(file)} ({violation['clause']})", "", "## What happens", ""]
    if trace["story"]:
        lines += [*textwrap.wrap(" ".join(trace["story"].split()), 100), ""]
    where = f"`{data['rows'][violation['step']]['command']}` on {data['implementation']}"
    lines += [f"{where} breaks this rule:", ""]
    lines += [f"> {violation['clause']}: {violation['sentence']}", ">", f"> {LEGEND}", ""]
    lines += ["| | expected | observed |", "|---|---|---|"]
    lines += [f"| {clause} | {_cell(want)} | {_cell(got)} |" for clause, want, got in clauses]
    lines += ["", "## The commands", "", "| # | command | by the rules | changes |", "|---|---|---|---|"]
    for row in data["rows"]:
        cells = (str(row["step"]), row["command"], row["outcome"], "; ".join(render.changes(row)))
        marked = [f"**{cell}**" if row["violates"] and cell else cell for cell in map(_cell, cells)]
        lines.append(f"| {' | '.join(marked)} |")
    sizes = ", ".join(f"{k} {'none' if v is None else v}" for k, v in trace["geometry"].items())
    lines += ["", f"Sizes: {sizes} (mode {trace['mode']}).", "", "## How to reproduce", ""]
    lines += [f"Save this as `{Path(file).name}`:", "", "```json", data["text"].strip(), "```", ""]
    lines += ["and run", ""]
    lines += ["```", f"kvspec replay {Path(file).name} {options}", "```", "", "## Versions", ""]
    lines += [f"* {line}" for line in versions(data["implementation"])]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return render.plain(text).replace("|", "\\|")


# -- a unit test ---------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """An expression over the release's objects, what it must be, and what it is."""

    code: str
    want: str
    got: str


class _Played(NamedTuple):
    """A trace played on a release up to its violation: the calls of each command."""

    steps: list[tuple[str, Outcome, tuple[str, ...]]]
    violation: Violation
    accepted: bool  # the release did the last command
    state: State
    view: View


def unit_test(trace: Trace, file: str, system: SGLangSystem, fixed: str | None = None) -> str:
    """The text of a test that performs the trace on the classes of `system`, which notes its calls.

    It asserts what the violated clause is about. fixed: what it passes on, to be told. Raises
    NotExportable, UnusableImplementation.
    """
    _check(trace, system)
    played = _play(trace, system)
    clause = played.violation.clause
    facts = _telling(list(_facts(trace, played)), clause)
    body = ["", "without_kernels()"] if trace.geometry.page_size > 1 else []
    for command, outcome, calls in played.steps:
        refused = f" (refused: {outcome.reason.value})" if isinstance(outcome, Refused) else ""
        body += ["", *_comment(command + refused), *calls]
    body += ["", *_comment(f"{clause}. Expected {played.violation.expected}")]
    body += _comment(f"{system.name} has {played.violation.observed}")
    body += [_assertion(fact) for fact in facts]
    g = trace.geometry
    swa = None if g.window is None else g.swa_pages * g.page_size
    server = (
        f"server = Server(\n    page_size={g.page_size}, window={g.window},"
        f" full_tokens={g.full_pages * g.page_size}, swa_tokens={swa}, rows={g.rows}, width={g.width}\n)"
    )
    name = re.sub(r"[^a-z0-9]+", "_", Path(file).stem.lower()).strip("_") or "trace"
    code = "\n".join([server, *body])
    camel = "".join(word.capitalize() for word in name.split("_"))
    return "\n".join([
        _docstring(trace, file, system.name, fixed, clause), "", _parts(code), "", "",
        f"class Test{camel}(unittest.TestCase):",
        f"    def test_{name}(self):",
        textwrap.indent(code, " " * 8), "", "",
        'if __name__ == "__main__":', "    unittest.main()", "",
    ])  # fmt: skip


def _check(trace: Trace, system: SGLangSystem) -> None:
    if system.release not in releases.TOLD:
        told = ", ".join(releases.TOLD)
        raise NotExportable(f"a test can be made against sglang {told}, not {system.release}")
    if trace.geometry.tree:
        raise NotExportable("a test can be made of traces without a radix tree (geometry.tree)")
    if any(isinstance(c, (CheckBusy, CheckIdle)) for c in trace.commands):
        raise NotExportable("a memory check is the scheduler's own; its classes alone cannot run one")


def _play(trace: Trace, system: SGLangSystem) -> _Played:
    check_fits(system, trace.geometry, trace.commands)
    lockstep = Lockstep(system, trace.geometry, trace.mode, clause=trace.clause)
    steps: list[tuple[str, Outcome, tuple[str, ...]]] = []
    for command in trace.commands:
        system.calls = ()
        outcome = lockstep.do(command)
        if SCHEDULER in system.calls:
            raise NotExportable(f"{describe(command)}: that is done by the scheduler, not by its classes")
        steps.append((describe(command), outcome, system.calls))
        if (violation := lockstep.violation) is not None:
            if violation.clause == "BROKEN":
                raise NotExportable(f"the release breaks at {describe(command)}: {violation.observed}")
            accepted = isinstance(outcome, Done) != (violation.clause == "OUT-1")
            return _Played(steps, violation, accepted, lockstep.state, system.view())
    raise NotExportable(f"conforms on {system.name}: there is no fault to test")


def _facts(trace: Trace, played: _Played) -> Iterator[tuple[str, Fact]]:
    """What can be asked of the release's objects at the end, each with the kind of fact that it is."""
    state, view, page = played.state, played.view, trace.geometry.page_size
    last = trace.commands[len(played.steps) - 1]
    if isinstance(last, Submit) and played.violation.clause == "OUT-1":
        code, got = f"{variable(last.request)}.to_finish is None", played.accepted
        yield "OUT", Fact(code, str(not got), str(got))
    names = {s.name for s in state.sessions} | set(view.sessions)
    for name in sorted(names):
        want, got = state.session(name) is not None, name in view.sessions
        yield "SES", Fact(f"{quoted(name)} in server.sessions", str(want), str(got))
    for session in state.sessions:
        seen = view.sessions.get(session.name)
        turn = state.request(session.turn) if session.turn is not None else None
        if seen is None:
            continue
        if turn is None or turn.phase in (Phase.QUEUED, Phase.ADMITTED):
            code = f"holds_kv(server, {quoted(session.name)})"
            yield "SES", Fact(code, str(session.slot is not None), str(seen.cursors is not None))
            if session.slot is not None and seen.cursors is not None:
                for cursor in _CURSORS:
                    code = f"server.cache.slots[{quoted(session.name)}].{cursor}"
                    want_, got_ = getattr(session.slot, cursor), getattr(seen.cursors, cursor)
                    yield _kind("LEN", cursor), Fact(code, str(want_), str(got_))
        if turn is None:
            code = f"history(server.sessions.get({quoted(session.name)}))"
            yield "SES-1", Fact(code, ids_text(text_tokens(session.history)), ids_text(seen.history))
    for request in state.requests:
        ours = view.requests.get(request.name)
        if ours is None:
            continue
        name = variable(request.name)
        want, got = request.cursors is not None, ours.row is not None
        yield "REQ", Fact(f"{name}.req_pool_idx is not None", str(want), str(got))
        if request.cursors is not None and ours.cursors is not None:
            for cursor in _CURSORS:
                want_, got_ = getattr(request.cursors, cursor), getattr(ours.cursors, cursor)
                yield _kind("REQ", cursor), Fact(f"{name}.{cursor}", str(want_), str(got_))
    full, swa, rows = free(state)
    yield "OWN", Fact("server.full_pool.available_size()", str(full * page), str(len(view.free_full) * page))
    if trace.geometry.window is not None:
        yield "SWA", Fact("server.swa_pool.available_size()", str(swa * page), str(len(view.free_swa) * page))
    yield "OWN", Fact("len(server.rows.free_slots)", str(rows), str(len(view.free_rows)))


def _kind(usual: str, cursor: str) -> str:
    return "SWA" if cursor == "swa_evicted_seqlen" else usual


def _telling(facts: Sequence[tuple[str, Fact]], clause: str) -> list[Fact]:
    """The facts that differ, of the kind that the clause is about if there are such.

    What is kept of SWA KV tells last: how far a sweep goes is policy, and another release may have another.
    """
    differing = [(kind, fact) for kind, fact in facts if fact.want != fact.got]
    if not differing:
        raise NotExportable(f"{clause} shows in nothing that the release's classes can be asked for")
    differing.sort(key=lambda found: found[0] == "SWA")
    kind = next((k for k, _ in differing if clause.startswith(k)), differing[0][0])
    return [fact for k, fact in differing if k == kind]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(render.plain(text), 98, initial_indent="# ", subsequent_indent="# ")


def _assertion(fact: Fact) -> str:
    if fact.want in ("True", "False"):
        return f"self.assert{fact.want}({fact.code})"
    return f"self.assertEqual({fact.code}, {fact.want})"


def _docstring(trace: Trace, file: str, faulty: str, fixed: str | None, clause: str) -> str:
    said = [
        f"{title(file)}.", trace.story,
        f"Fails on {faulty}" + (f", passes on {fixed}." if fixed else "."),
        f"{clause}: {report.sentence(clause)} {LEGEND}",
        f"Made by kvspec from {Path(file).name}. Each comment is a command of it; below stand the calls that"
        f" carry it out. Runs where one of sglang {', '.join(releases.TOLD)} is installed, on a CPU.",
    ]  # fmt: skip
    plain = [render.plain(" ".join(text.split())).replace("\\", "/") for text in said if text]
    text = "\n\n".join("\n".join(textwrap.wrap(text, 100)) for text in plain)
    return '"""' + text.replace('"', "'") + '\n"""'


def _parts(code: str) -> str:
    """The definitions of impl/sglang/parts.py that `code` uses, with what those use."""
    source = Path(releases.__file__).with_name("parts.py").read_text(encoding="utf-8")
    lines = source.split("\n")
    nodes = ast.parse(source).body[1:]  # without the docstring
    wanted = _names(ast.parse(code)) | {"unittest"}
    used: set[int] = set()
    while more := {i for i, node in enumerate(nodes) if i not in used and _bound(node) & wanted}:
        used |= more
        wanted |= set().union(*(_names(nodes[i]) for i in more))
    parts: list[str] = []
    blank, end = 0, nodes[0].lineno - 1
    for i, node in enumerate(nodes):
        blank = max(blank, node.lineno - 1 - end)
        end = node.end_lineno or node.lineno
        if i in used:
            parts += [""] * (min(blank, 2) if parts else 0) + lines[node.lineno - 1 : end]
            blank = 0
    return "\n".join(parts)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _bound(node: ast.stmt) -> set[str]:
    """The names that a statement at the top of a file defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Try):
        return set().union(*map(_bound, node.body))
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def root_of(version: str) -> Path:
    """The files of a release that a test can be made against. Raises UnusableImplementation."""
    if version not in releases.TOLD:
        raise UnusableImplementation(f"sglang=={version:.40}: not one of {', '.join(releases.TOLD)}")
    return release_root(version)
