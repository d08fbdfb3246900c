"""SPEC.md is what the code says; what it says of commands and lives is so in every state of small scopes."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from ci import cli
from ci.documents import spec
from impl.bugs import BUGS
from reference import model
from reference.clauses import CLAUSES, Clause
from reference.commands import (
    COMMANDS,
    TREE_COMMANDS,
    Abort,
    Chunk,
    Close,
    Command,
    Decode,
    Draft,
    Evict,
    EvictSwa,
    Extend,
    Finish,
    Mode,
    Reason,
    Refused,
    SpecDecode,
)  # fmt: skip
from reference.cursors import ceil_page, floor_page, window_live
from reference.geometry import Geometry
from reference.ledger import ZERO, Phase, Request, Session, State, full_pages, holders, swa_pages
from reference.rules import RULES, Case, Rule
from stateful_tests.coverage.scopes import Scope
from stateful_tests.coverage.situations import kind_name
from stateful_tests.explore import lifecycle as lives
from stateful_tests.explore import search
from stateful_tests.explore.lifecycle import Transition
from stateful_tests.traces import files as traces

ROOT = Path(__file__).parents[3]
DOCUMENTS = (
    "SPEC.md", "README.md", "CONTRIBUTING.md", "ci/README.md", "fixtures/README.md",
    "fixtures/releases/README.md",
)  # fmt: skip
Kvspec = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def text() -> str:
    return spec.text()


# The document.


def test_it_is_up_to_date(text: str) -> None:
    assert (ROOT / "SPEC.md").read_text(encoding="utf-8") == text, "kvspec spec --out SPEC.md"


def test_the_command_prints_writes_and_compares(
    kvspec: Kvspec, monkeypatch: pytest.MonkeyPatch, text: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(spec, "text", lambda: text)
    assert kvspec("spec") == (0, text, "")
    assert kvspec("spec", "--check") == (0, "", "")
    assert kvspec("spec", "--out", "S.md") == (0, "", "")
    assert (tmp_path / "S.md").read_text(encoding="utf-8") == text
    monkeypatch.setattr(spec, "text", lambda: text + "more")
    code, out, _ = kvspec("spec", "--out", "S.md", "--check")
    assert (code, out) == (1, "S.md is not what the code says: kvspec spec --out S.md\n")
    assert kvspec("spec", "--out", "missing.md", "--check")[0] == 1
    code, _, err = kvspec("spec", "--out", "no/folder.md")
    assert code == 2
    assert "no/folder.md" in err


def test_a_bug_without_a_fixture_is_said(
    kvspec: Kvspec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(spec.FIXTURES / f"{spec.EXAMPLE}.json", tmp_path)
    monkeypatch.setattr(spec, "FIXTURES", tmp_path)
    assert kvspec("spec") == (2, "", f"kvspec: spec: no fixture shows the bug {min(BUGS)}\n")


def test_it_has_every_command_reason_and_clause(text: str) -> None:
    for kind in COMMANDS:
        assert f"\n### {kind_name(kind)}\n" in text
    for clause in CLAUSES:
        assert f"\n### {clause}\n" in text
    for reason in Reason:
        assert any(reason in rule.refused for rule in RULES.values()), reason
        assert f"\n| `{reason.value}` | {reason.says} |" in text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    said = (ROOT / name).read_text(encoding="utf-8")
    headings = [spec.anchor(heading) for heading in re.findall(r"^#+ (.*)$", said, re.MULTILINE)]
    assert len(set(headings)) == len(headings), "a second heading of one name gets another anchor"
    for link in re.findall(r"\]\(([^)\s]+)\)", said):
        path, _, part = link.partition("#")
        if path.startswith("https:"):
            continue
        assert not path or (ROOT / name).parent.joinpath(path).exists(), link
        assert path or part in headings, link
    for command in re.findall(r"`kvspec ([\w-]+)", said):
        assert command in cli.cli.commands, command
    for test in re.findall(r"stateful_tests/test_\w+\.py", said):
        assert (ROOT / test).is_file(), test


def test_a_clause_is_told_with_its_assumption_and_its_rule(kvspec: Kvspec) -> None:
    code, out, _ = kvspec("clauses", "FREE-1")
    assert code == 0
    assert CLAUSES["FREE-1"].assumption in out
    assert CLAUSES["FREE-1"].rule in out
    for bug in BUGS.values():
        assert (f"{bug.id}:" in out) == (bug.clause == "FREE-1")


def test_tables_are_tables(text: str) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1, table


@pytest.fixture(scope="module")
def shown() -> dict[str | None, str | None]:
    """Bug -> the clause by which its fixture shows it; test_fixtures.py replays them."""
    return {(trace := traces.load(path)).bug: trace.clause for path in spec.FIXTURES.glob("*.json")}


@pytest.mark.parametrize("clause", CLAUSES.values(), ids=CLAUSES)
def test_a_clause_has_a_rule_a_property_and_a_fault_that_it_catches(
    clause: Clause, shown: dict[str | None, str | None]
) -> None:
    for rule in clause.rule.split(", "):
        module, name = rule.split(".")
        assert hasattr(importlib.import_module(f"reference.{module}"), name), rule
    assert callable(clause.check)
    caught = {bug.id for bug in BUGS.values() if bug.clause == clause.id}
    assert caught, "no named bug violates it first"
    assert all(shown.get(bug) == clause.id for bug in caught), "a bug without a fixture that shows it"


# Commands: what they are refused for.

_FAITHFUL = Scope(
    "", "", Geometry(1, 1, 3, 2, 1, 2), Mode.FAITHFUL, sessions=1, ordinary=1, submits=(1,), ahead=2,
    checks=True,
)  # fmt: skip
_ONE = Scope("", "", Geometry(1, 1, 4, 4, 1, 4), sessions=1, submits=(1,), ahead=3)
_TWO = Scope("", "", Geometry(1, 1, 2, 4, 2, 2), ordinary=2, submits=(1,), ahead=1)
_GUEST = Scope("", "", Geometry(1, None, 2, 0, 1, 2, True), lock_holders=1, texts="a", prompts=("a1",))
_REFUSING = (
    _FAITHFUL,
    _ONE,
    replace(_ONE, mode=Mode.FAITHFUL),
    _TWO,
    replace(_TWO, geometry=Geometry(1, 1, 4, 2, 2, 2)),
    _GUEST,
    replace(_GUEST, geometry=Geometry(1, None, 2, 0, 1, 2), sessions=1, submits=(1,)),
    Scope(
        "", "", Geometry(1, 1, 2, 1, 1, 2, True), Mode.FAITHFUL, lock_holders=2, texts="a",
        prompts=("a1", "a2", "a3", "b1"),
    ),
)  # fmt: skip
# What the scopes do not say: batches that name a request twice, eviction without a tree.
_SAID = (Extend((Chunk("r", 1),) * 2), SpecDecode((Draft("r", 1, 1),) * 2), Evict(1))


def test_each_command_is_refused_for_the_reasons_told_and_no_other() -> None:
    told = {(kind_name(rule.command), reason.value) for rule in RULES.values() for reason in rule.refused}
    met = set()
    for scope in _REFUSING:
        explored = search.run(scope)
        assert explored.complete
        for situation in explored.situations:
            kind, refused, reason = situation.partition(", refused: ")
            if refused:
                met.add((kind, reason))
    for command in _SAID:
        _, outcome = model.step(model.initial(_ONE.geometry), command)
        assert isinstance(outcome, Refused)
        met.add((kind_name(type(command)), outcome.reason.value))
    assert met == told
    for rule in RULES.values():
        assert list(rule.refused) == [reason for reason in Reason if reason in rule.refused], "in their order"


# Commands: which cursors move and what is freed, by the formulas.

_FAR = Scope("", "", Geometry(1, 1, 5, 4, 1, 5), sessions=1, submits=(1,), ahead=4,
             invalid=False, marked=False)  # fmt: skip
_MOVING = (
    _FAR,  # a sweep passes the target
    replace(_FAR, geometry=Geometry(2, 1, 3, 3, 1, 5), ahead=3),
    replace(_FAR, geometry=Geometry(2, None, 2, 0, 1, 4), ahead=2),
    replace(_FAR, geometry=Geometry(1, 1, 2, 2, 2, 2), ordinary=1, ahead=1, checks=True),
)


def _lanes(command: Command) -> Iterator[tuple[str, dict[str, int]]]:
    """(request, what the command says of it), of each request that a command is about."""
    if isinstance(command, Extend):
        yield from ((lane.request, {"tokens": lane.tokens}) for lane in command.lanes)
    elif isinstance(command, Decode):
        yield from ((name, {}) for name in command.requests)
    elif isinstance(command, SpecDecode):
        yield from ((n.request, {"allocate": n.allocate, "accept": n.accept}) for n in command.lanes)
    elif hasattr(command, "request"):
        told = (("finished_len", "finished_len"), ("in_flight", "in_flight"), ("length", "L"))
        yield command.request, {into: getattr(command, name) for name, into in told if hasattr(command, name)}


def _names(
    state: State, request: Request | None, session: Session | None, said: dict[str, int]
) -> dict[str, Any]:
    """What a formula may use."""
    g, slot = state.config.geometry, session.slot if session is not None else None
    c = request.cursors if request is not None and request.cursors is not None else slot or ZERO
    lost = c.swa_evicted_seqlen if c.swa_evicted_seqlen > c.cache_protected_len else 0
    return {
        **dict(zip("CAER", c)), **said, "P": g.page_size, "W": g.window or 0, "min": min, "max": max,
        "ceil": lambda n: ceil_page(n, g.page_size), "floor": lambda n: floor_page(n, g.page_size),
        "live": lambda p: g.window is None or window_live(lost, p, g.window),
        "slot": slot is not None, "session": session is not None,
        "closing": session is not None and session.closing,
        "turn": session is not None and session.turn is not None,
        "started": request is not None and request.started,
        "origin": request.origin if request is not None else 0,
        "output": request.output if request is not None else 0,
    }  # fmt: skip


def _value(formula: str, names: dict[str, Any]) -> Any:
    return eval(_compiled(formula), {}, names)


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")


def _case(rule: Rule, names: dict[str, Any]) -> Case:
    for name, formula in rule.where:
        names[name] = _value(formula, names)
    (case,) = [case for case in rule.cases if _value(case.holds, names)] or [Case("nothing moves")]
    return case


def _wrong(rule: Rule, was: State, command: Command, now: State) -> str:
    """What a transition does that the rule does not say, in a few words."""
    size, window = was.config.geometry.page_size, was.config.geometry.window
    before, after = ({h.name: h.cursors for h in holders(state)} for state in (was, now))
    expected: dict[tuple[str, str], set[int]] = {}
    about = [(was.request(name), said) for name, said in _lanes(command)]
    for request, said in about or [(None, {})]:
        named = command.session if isinstance(command, Close) else request.session if request else None
        session = was.session(named) if named is not None else None
        names = _names(was, request, session, said)
        case = _case(rule, names)
        holder = session.name if session is not None else request.name if request is not None else ""
        for pool, span in (("full", case.full), ("swa", case.swa)):
            start, end = (_value(formula, names) for formula in span)
            expected[holder, pool] = set(range(start // size, end // size))
        if case.after is None:
            if holder in after:
                return "its row is still there"
            continue
        want = [_value(case.after.get(name, name), names) for name in "CAER"]
        then, slot = now.request(request.name) if request else None, now.session(holder)
        shown = [then.cursors] if then is not None and then.cursors is not None else []
        if slot is not None and slot.slot is not None and (not shown or then.phase is Phase.ADMITTED):
            shown.append(slot.slot)
        if any(list(cursors) != want for cursors in shown):
            return f"cursors {want}"
    for holder, cursors in before.items():
        for pool, pages in (("full", full_pages), ("swa", swa_pages)):
            kept = set(pages(after[holder], size)) if holder in after else set()
            gone = set(pages(cursors, size)) - kept
            if (pool == "full" or window is not None) and gone != expected.get((holder, pool), set()):
                return f"{pool} pages"
    return ""


@pytest.fixture(scope="module")
def transitions() -> list[Transition]:
    """All of the scopes."""
    return [transition for scope in _MOVING for transition in lives.transitions(scope)]


def test_the_diagrams_have_every_change_of_larger_scopes_and_no_other(transitions: list[Transition]) -> None:
    assert lives.edges(lives.transitions(spec.LIVES)) == lives.edges(transitions)


def test_the_rules_in_words_do_what_the_model_does(transitions: list[Transition]) -> None:
    assert {type(command) for _, command, _ in transitions} == set(COMMANDS) - set(TREE_COMMANDS)
    for was, command, now in transitions:
        assert not _wrong(RULES[type(command)], was, command, now), command


def test_a_formula_that_is_not_so_is_found(transitions: list[Transition]) -> None:
    """Literal rules of the reports, and a case that is left out."""
    finish, evict, abort = RULES[Finish], RULES[EvictSwa], RULES[Abort]
    cut = finish.cases[0]
    assert cut.after is not None
    for rule in (
        replace(finish, cases=(replace(cut, full=("target", "ceil(A)")), *finish.cases[1:])),
        replace(finish, cases=(replace(cut, swa=("ceil(target)", "ceil(A)")), *finish.cases[1:])),
        replace(finish, cases=(replace(cut, after={**cut.after, "E": "E"}), *finish.cases[1:])),
        replace(evict, where=(("F", "max(E, R, floor(L - W))"),)),
        replace(abort, cases=abort.cases[:1]),
    ):
        mine = [step for step in transitions if type(step[1]) is rule.command]
        assert any(_wrong(rule, *step) for step in mine), rule
