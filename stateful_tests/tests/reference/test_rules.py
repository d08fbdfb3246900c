"""The refusals and tables beside each rule, against `model.step` on every transition of small scopes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import CodeType
from typing import Any

import pytest

from ci.documents import spec
from reference import model
from reference.commands import (
    COMMANDS, TREE_COMMANDS, Abort, Chunk, Close, Command, Decode, Draft, Evict, EvictSwa, Extend,
    Finish, Launch, Mode, Reason, Refused, SpecDecode,
)  # fmt: skip
from reference.cursors import ceil_page, floor_page, lost_below, window_live
from reference.geometry import Geometry
from reference.state import (
    Cursors, ZERO, Phase, Request, Session, State, full_pages, holders, swa_pages,
)  # fmt: skip
from reference.rules import RULES
from reference.rules.rule_definition import Case, Rule
from reference.rules.sessions import TURNS
from stateful_tests.generate.exploration_scope import Scope
from stateful_tests.coverage.situations import kind_name
from stateful_tests.explore import lifecycle as lives
from stateful_tests.explore.search import Explorer

# -- what a command is refused for ----------------------------------------------------------------

_FAITHFUL = Scope(
    "",
    "",
    Geometry(page_size=1, window=1, full_pages=3, swa_pages=2, rows=1, width=2),
    Mode.FAITHFUL,
    sessions=1,
    ordinary=1,
    submits=(1,),
    ahead=2,
    checks=True,
)
_ONE = Scope(
    "",
    "",
    Geometry(page_size=1, window=1, full_pages=4, swa_pages=4, rows=1, width=4),
    sessions=1,
    submits=(1,),
    ahead=3,
)
_TWO = Scope(
    "",
    "",
    Geometry(page_size=1, window=1, full_pages=2, swa_pages=4, rows=2, width=2),
    ordinary=2,
    submits=(1,),
    ahead=1,
    late=True,
)
_LOCKING = Scope(
    "",
    "",
    Geometry(page_size=1, window=None, full_pages=2, swa_pages=0, rows=1, width=2, tree=True),
    lock_holders=1,
    texts="a",
    prompts=("a1",),
    parts=True,
)
_PARTS = Scope(
    "",
    "",
    Geometry(page_size=1, window=1, full_pages=3, swa_pages=3, rows=1, width=3, tree=True),
    sessions=1,
    submits=(),
    texts="a",
    prompts=("a1",),
    parts=True,
    marked=False,
    evicts=False,
)
_REFUSING = (
    _FAITHFUL,
    _ONE,
    replace(_ONE, mode=Mode.FAITHFUL),
    replace(_ONE, late=True),
    _TWO,
    replace(
        _TWO, geometry=Geometry(page_size=1, window=1, full_pages=4, swa_pages=2, rows=2, width=2)
    ),
    replace(
        _TWO,
        geometry=Geometry(page_size=1, window=1, full_pages=6, swa_pages=6, rows=2, width=4),
        ahead=3,
        late=False,
        retracts=False,
        aborts=False,
    ),
    _LOCKING,
    replace(
        _LOCKING,
        geometry=Geometry(page_size=1, window=None, full_pages=2, swa_pages=0, rows=1, width=2),
        sessions=1,
        submits=(1,),
        tails=True,
    ),
    replace(
        _LOCKING,
        geometry=Geometry(
            page_size=1,
            window=None,
            full_pages=3,
            swa_pages=0,
            rows=1,
            width=2,
            tree=True,
            states=1,
        ),
        ordinary=1,
        submits=(1,),
        prompts=("a1", "a2"),
    ),
    _PARTS,
    replace(
        _PARTS,
        geometry=Geometry(page_size=1, window=1, full_pages=3, swa_pages=3, rows=1, width=2),
        sessions=0,
        ordinary=1,
        submits=(1,),
        prompts=(),
    ),
    Scope(
        "",
        "",
        Geometry(page_size=1, window=1, full_pages=2, swa_pages=1, rows=1, width=2, tree=True),
        Mode.FAITHFUL,
        lock_holders=2,
        texts="a",
        prompts=("a1", "a2", "a3", "b1"),
    ),
)
# What the scopes do not say: batches that name a request twice, eviction without a tree.
_SAID = (
    Extend((Chunk("r", 1),) * 2),
    SpecDecode((Draft("r", 1, 1),) * 2),
    Launch((Draft("r", 1, 1),) * 2),
    Evict(1),
    Evict(full=0, swa=0, states=1),
)


def test_each_command_is_refused_for_the_reasons_listed_and_no_other():
    listed = {
        (kind_name(kind), reason.value) for kind, rule in RULES.items() for reason in rule.refused
    }
    reasons_seen = set()
    for scope in _REFUSING:
        explorer = Explorer(scope, clauses=False)
        assert explorer.run() == "fixed point", scope
        for situation in explorer.found.situations:
            kind, refused, reason = situation.partition(", refused: ")
            if refused:
                reasons_seen.add((kind, reason.partition(", ")[0]))
    for command in _SAID:
        _, outcome = model.step(model.initial(_ONE.geometry), command)
        assert isinstance(outcome, Refused), command
        reasons_seen.add((kind_name(type(command)), outcome.reason.value))
    assert reasons_seen == listed
    assert RULES.keys() == set(COMMANDS)
    for rule in RULES.values():
        assert list(rule.refused) == [reason for reason in Reason if reason in rule.refused], (
            "in their order"
        )


# -- formulas -------------------------------------------------------------------------------------


def _value(formula: str, names: dict[str, Any]) -> Any:
    return eval(_compile_formula(formula), names)


@cache
def _compile_formula(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")


def _sizes(state: State) -> dict[str, Any]:
    size = state.config.geometry.page_size
    return {
        "P": size,
        "W": state.config.geometry.window or 0,
        "ceil": lambda n: ceil_page(n, size),
        "floor": lambda n: floor_page(n, size),
    }


# -- rows: which cursors move and what is freed ---------------------------------------------------

_FAR = Scope(
    "",
    "",
    Geometry(page_size=1, window=1, full_pages=5, swa_pages=4, rows=1, width=5),
    sessions=1,
    submits=(1,),
    ahead=4,
    invalid=False,
    marked=False,
)
_MOVING = (
    _FAR,  # a window eviction passes the target
    replace(
        _FAR,
        geometry=Geometry(page_size=2, window=1, full_pages=3, swa_pages=3, rows=1, width=5),
        ahead=3,
    ),
    replace(
        _FAR,
        geometry=Geometry(page_size=2, window=1, full_pages=3, swa_pages=3, rows=1, width=5),
        ahead=2,
        late=True,
    ),
    replace(
        _FAR,
        geometry=Geometry(page_size=2, window=None, full_pages=2, swa_pages=0, rows=1, width=4),
        ahead=2,
    ),
    replace(
        _FAR,
        geometry=Geometry(page_size=1, window=1, full_pages=2, swa_pages=2, rows=2, width=2),
        ordinary=1,
        ahead=1,
        checks=True,
    ),
    replace(
        _FAR,
        geometry=Geometry(page_size=1, window=1, full_pages=4, swa_pages=2, rows=1, width=4),
        submits=(1, 4),
        ahead=1,
        tails=True,
    ),
)


@pytest.fixture(scope="module")
def transitions():
    """All of the scopes without a tree."""
    return [transition for scope in _MOVING for transition in lives.transitions(scope)]


def _lanes(command: Command) -> Iterator[tuple[str, dict[str, int]]]:
    """(request, what the command says of it), of each request that a command is about."""
    if isinstance(command, Extend):
        yield from (
            (lane.request, {"tokens": lane.tokens, "tail": lane.tail}) for lane in command.lanes
        )
    elif isinstance(command, Decode):
        yield from ((name, {}) for name in command.requests)
    elif isinstance(command, (SpecDecode, Launch)):
        yield from (
            (n.request, {"allocate": n.allocate, "accept": n.accept}) for n in command.lanes
        )
    elif hasattr(command, "request"):
        fields = (("finished_len", "finished_len"), ("in_flight", "in_flight"), ("length", "L"))
        present = ((name, into) for name, into in fields if hasattr(command, name))
        yield command.request, {into: getattr(command, name) for name, into in present}


def _names(
    state: State, request: Request | None, session: Session | None, given: dict[str, int]
) -> dict[str, Any]:
    """Return what a formula may use."""
    window = state.config.geometry.window
    slot = session.slot if session is not None else None
    late = request is not None and request.in_flight
    c = request.cursors if request is not None and request.cursors is not None else slot or ZERO
    return {
        **_sizes(state),
        **dict(zip("CAER", c)),
        **given,
        "live": lambda p: window is None or window_live(lost_below(c), p, window),
        "slot": slot is not None,
        "session": session is not None,
        "closing": session is not None and session.closing,
        "turn": session is not None and session.turn is not None,
        "started": request is not None and request.started,
        "runs": request is not None and request.phase is Phase.RUNNING,
        "origin": request.origin if request is not None else 0,
        "output": request.output if request is not None else 0,
        **(dict(zip(("accepted", "claimed"), request.in_flight[0][1:])) if late else {}),
    }


def _case(rule: Rule, names: dict[str, Any]) -> Case:
    for name, formula in rule.where:
        names[name] = _value(formula, names)
    (case,) = [case for case in rule.cases if _value(case.holds, names)] or [Case("nothing moves")]
    return case


def _wrong(rule: Rule, was: State, command: Command, now: State) -> str:
    """Return what a transition does that the rule does not say, in a few words."""
    expected: dict[tuple[str, str], set[int]] = {}
    about = [(was.request(name), given) for name, given in _lanes(command)]
    for request, given in about or [(None, {})]:
        named = (
            command.session if isinstance(command, Close) else request.session if request else None
        )
        session = was.session(named) if named is not None else None
        names = _names(was, request, session, given)
        case = _case(rule, names)
        holder = (
            session.name if session is not None else request.name if request is not None else ""
        )
        for pool, span in (("full", case.full), ("swa", case.swa)):
            start, end = (_value(formula, names) for formula in span)
            size = was.config.geometry.page_size
            expected[holder, pool] = set(range(start // size, end // size))
        if case.after is None:
            if any(h.name == holder for h in holders(now)):
                return "its row is still there"
            continue
        want = [_value(case.after.get(name, name), names) for name in "CAER"]
        if any(list(cursors) != want for cursors in _cursors_in_table(now, request, holder)):
            return f"cursors {want}"
    return _wrong_pages(was, now, expected)


def _cursors_in_table(now: State, request: Request | None, holder: str) -> list[Cursors]:
    """Return the cursors of a request, and those of its session's slot where both show."""
    then = now.request(request.name) if request else None
    slot = now.session(holder)
    cursors_shown = [then.cursors] if then is not None and then.cursors is not None else []
    if slot is not None and slot.slot is not None and (not cursors_shown or then.phase is Phase.ADMITTED):
        cursors_shown.append(slot.slot)
    return cursors_shown


def _wrong_pages(was: State, now: State, expected: dict[tuple[str, str], set[int]]) -> str:
    """Return a pool in which other pages went back than expected."""
    size = was.config.geometry.page_size
    window = was.config.geometry.window
    before, after = ({h.name: h.cursors for h in holders(state)} for state in (was, now))
    for holder, cursors in before.items():
        for pool, pages in (("full", full_pages), ("swa", swa_pages)):
            kept_pages = set(pages(after[holder], size)) if holder in after else set()
            freed_pages = set(pages(cursors, size)) - kept_pages
            if (pool == "full" or window is not None) and freed_pages != expected.get(
                (holder, pool), set()
            ):
                return f"{pool} pages"
    return ""


def test_the_diagrams_have_every_change_of_larger_scopes_and_no_other(transitions):
    assert lives.edges(lives.transitions(spec.LIVES)) == lives.edges(transitions)


def test_the_table_of_turns_lists_the_commands_that_end_them(transitions):
    cleared = set()
    touched = set()
    for was, command, now in transitions:
        for session in was.sessions:
            after = now.session(session.name)
            if session.turn is not None and (after is None or after.turn is None):
                cleared.add(type(command))
                assert (after is None) == session.closing and now.request(session.turn) is None, session
            if after is None or (after.turn, after.closing) != (session.turn, session.closing):
                touched.add(type(command))
    assert cleared == {kind for kind, (ends, *_) in TURNS.items() if ends}
    assert touched <= TURNS.keys()


def test_the_tables_of_rows_agree_with_the_model(transitions):
    assert {type(command) for _, command, _ in transitions} == set(COMMANDS) - set(TREE_COMMANDS)
    for was, command, now in transitions:
        assert not _wrong(RULES[type(command)], was, command, now), command


def test_a_formula_that_is_not_so_is_found(transitions):
    """Literal rules of the reports, and a case that is left out."""
    finish = RULES[Finish]
    evict = RULES[EvictSwa]
    abort = RULES[Abort]
    cut = finish.cases[0]
    for rule in (
        replace(finish, cases=(replace(cut, full=("target", "ceil(A)")), *finish.cases[1:])),
        replace(finish, cases=(replace(cut, swa=("ceil(target)", "ceil(A)")), *finish.cases[1:])),
        replace(finish, cases=(replace(cut, after={**cut.after, "E": "E"}), *finish.cases[1:])),
        replace(evict, where=(("F", "max(E, R, floor(L - W))"),)),
        replace(abort, cases=abort.cases[:1]),
    ):
        rule_steps = [step for step in transitions if type(step[1]) is rule.command]
        assert any(_wrong(rule, *step) for step in rule_steps), rule
