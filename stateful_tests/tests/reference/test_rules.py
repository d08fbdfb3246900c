"""The refusals and tables beside each rule, against `model.step` on every transition of small scopes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import pytest

from ci.documents import spec
from reference import model
from reference.commands import (
    COMMANDS, TREE_COMMANDS, Abort, Chunk, Close, Command, Decode, Done, Draft, Evict, EvictSwa, Extend,
    Finish, Freed, Insert, Launch, Match, Mode, Reason, Refused, SpecDecode, Unlock, UnlockSwa,
)  # fmt: skip
from reference.cursors import ceil_page, floor_page, lost_below, window_live
from reference.geometry import Geometry
from reference.ledger import (
    ZERO, Phase, Request, Session, State, free, full_pages, holders, swa_pages, text_tokens,
)  # fmt: skip
from reference.prefix_cache import key_of, lock_holders
from reference.rules import RULES
from reference.rules.base import Case, Fate, PageCase, Rule
from reference.rules.sessions import TURNS
from reference.tree import Key, Placed, nodes
from stateful_tests.coverage.scopes import Scope
from stateful_tests.coverage.situations import kind_name
from stateful_tests.explore import lifecycle as lives
from stateful_tests.explore.search import Explorer

# What a command is refused for.

_FAITHFUL = Scope(
    "", "", Geometry(1, 1, 3, 2, 1, 2), Mode.FAITHFUL, sessions=1, ordinary=1, submits=(1,), ahead=2,
    checks=True,
)  # fmt: skip
_ONE = Scope("", "", Geometry(1, 1, 4, 4, 1, 4), sessions=1, submits=(1,), ahead=3)
_TWO = Scope("", "", Geometry(1, 1, 2, 4, 2, 2), ordinary=2, submits=(1,), ahead=1, late=True)
_LOCKING = Scope(
    "", "", Geometry(1, None, 2, 0, 1, 2, True), lock_holders=1, texts="a", prompts=("a1",), parts=True,
)  # fmt: skip
_PARTS = Scope(
    "", "", Geometry(1, 1, 3, 3, 1, 3, True), sessions=1, submits=(), texts="a", prompts=("a1",), parts=True,
    marked=False, evicts=False,
)  # fmt: skip
_REFUSING = (
    _FAITHFUL,
    _ONE,
    replace(_ONE, mode=Mode.FAITHFUL),
    replace(_ONE, late=True),
    _TWO,
    replace(_TWO, geometry=Geometry(1, 1, 4, 2, 2, 2)),
    replace(_TWO, geometry=Geometry(1, 1, 6, 6, 2, 4), ahead=3, late=False, retracts=False, aborts=False),
    _LOCKING,
    replace(_LOCKING, geometry=Geometry(1, None, 2, 0, 1, 2), sessions=1, submits=(1,), tails=True),
    _PARTS,
    replace(_PARTS, geometry=Geometry(1, 1, 3, 3, 1, 2), sessions=0, ordinary=1, submits=(1,), prompts=()),
    Scope(
        "", "", Geometry(1, 1, 2, 1, 1, 2, True), Mode.FAITHFUL, lock_holders=2, texts="a",
        prompts=("a1", "a2", "a3", "b1"),
    ),
)  # fmt: skip
# What the scopes do not say: batches that name a request twice, eviction without a tree.
_SAID = (
    Extend((Chunk("r", 1),) * 2), SpecDecode((Draft("r", 1, 1),) * 2), Launch((Draft("r", 1, 1),) * 2),
    Evict(1),
)  # fmt: skip


def test_each_command_is_refused_for_the_reasons_listed_and_no_other():
    listed = {(kind_name(kind), reason.value) for kind, rule in RULES.items() for reason in rule.refused}
    met = set()
    for scope in _REFUSING:
        explorer = Explorer(scope, clauses=False)
        assert explorer.run() == "fixed point"
        for situation in explorer.found.situations:
            kind, refused, reason = situation.partition(", refused: ")
            if refused:
                met.add((kind, reason.partition(", ")[0]))
    for command in _SAID:
        _, outcome = model.step(model.initial(_ONE.geometry), command)
        assert isinstance(outcome, Refused)
        met.add((kind_name(type(command)), outcome.reason.value))
    assert met == listed
    assert RULES.keys() == set(COMMANDS)
    for rule in RULES.values():
        assert list(rule.refused) == [reason for reason in Reason if reason in rule.refused], "in their order"


# Formulas.


def _value(formula: str, names: dict[str, Any]) -> Any:
    return eval(_compiled(formula), names)


@cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")


def _sizes(state: State) -> dict[str, Any]:
    size = state.config.geometry.page_size
    return {
        "P": size, "W": state.config.geometry.window or 0,
        "ceil": lambda n: ceil_page(n, size), "floor": lambda n: floor_page(n, size),
    }  # fmt: skip


# Rows: which cursors move and what is freed.

_FAR = Scope("", "", Geometry(1, 1, 5, 4, 1, 5), sessions=1, submits=(1,), ahead=4,
             invalid=False, marked=False)  # fmt: skip
_MOVING = (
    _FAR,  # a sweep passes the target
    replace(_FAR, geometry=Geometry(2, 1, 3, 3, 1, 5), ahead=3),
    replace(_FAR, geometry=Geometry(2, 1, 3, 3, 1, 5), ahead=2, late=True),
    replace(_FAR, geometry=Geometry(2, None, 2, 0, 1, 4), ahead=2),
    replace(_FAR, geometry=Geometry(1, 1, 2, 2, 2, 2), ordinary=1, ahead=1, checks=True),
    replace(_FAR, geometry=Geometry(1, 1, 4, 2, 1, 4), submits=(1, 4), ahead=1, tails=True),
)


@pytest.fixture(scope="module")
def transitions():
    """All of the scopes without a tree."""
    return [transition for scope in _MOVING for transition in lives.transitions(scope)]


def _lanes(command: Command) -> Iterator[tuple[str, dict[str, int]]]:
    """(request, what the command says of it), of each request that a command is about."""
    if isinstance(command, Extend):
        yield from ((lane.request, {"tokens": lane.tokens, "tail": lane.tail}) for lane in command.lanes)
    elif isinstance(command, Decode):
        yield from ((name, {}) for name in command.requests)
    elif isinstance(command, (SpecDecode, Launch)):
        yield from ((n.request, {"allocate": n.allocate, "accept": n.accept}) for n in command.lanes)
    elif hasattr(command, "request"):
        said = (("finished_len", "finished_len"), ("in_flight", "in_flight"), ("length", "L"))
        yield command.request, {into: getattr(command, name) for name, into in said if hasattr(command, name)}


def _names(
    state: State, request: Request | None, session: Session | None, said: dict[str, int]
) -> dict[str, Any]:
    """What a formula may use."""
    window, slot = state.config.geometry.window, session.slot if session is not None else None
    late = request is not None and request.in_flight
    c = request.cursors if request is not None and request.cursors is not None else slot or ZERO
    return {
        **_sizes(state), **dict(zip("CAER", c)), **said,
        "live": lambda p: window is None or window_live(lost_below(c), p, window),
        "slot": slot is not None, "session": session is not None,
        "closing": session is not None and session.closing,
        "turn": session is not None and session.turn is not None,
        "started": request is not None and request.started,
        "runs": request is not None and request.phase is Phase.RUNNING,
        "origin": request.origin if request is not None else 0,
        "output": request.output if request is not None else 0,
        **(dict(zip(("accepted", "claimed"), request.in_flight[0][1:])) if late else {}),
    }  # fmt: skip


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


def test_the_diagrams_have_every_change_of_larger_scopes_and_no_other(transitions):
    assert lives.edges(lives.transitions(spec.LIVES)) == lives.edges(transitions)


def test_who_ends_a_turn_and_clears_its_mark(transitions):
    cleared, touched = set(), set()
    for was, command, now in transitions:
        for session in was.sessions:
            after = now.session(session.name)
            if session.turn is not None and (after is None or after.turn is None):
                cleared.add(type(command))
                assert (after is None) == session.closing and now.request(session.turn) is None
            if after is None or (after.turn, after.closing) != (session.turn, session.closing):
                touched.add(type(command))
    assert cleared == {kind for kind, (ends, *_) in TURNS.items() if ends}
    assert touched <= TURNS.keys()


def test_the_tables_of_rows_do_what_the_model_does(transitions):
    assert {type(command) for _, command, _ in transitions} == set(COMMANDS) - set(TREE_COMMANDS)
    for was, command, now in transitions:
        assert not _wrong(RULES[type(command)], was, command, now), command


def test_a_formula_that_is_not_so_is_found(transitions):
    """Literal rules of the reports, and a case that is left out."""
    finish, evict, abort = RULES[Finish], RULES[EvictSwa], RULES[Abort]
    cut = finish.cases[0]
    for rule in (
        replace(finish, cases=(replace(cut, full=("target", "ceil(A)")), *finish.cases[1:])),
        replace(finish, cases=(replace(cut, swa=("ceil(target)", "ceil(A)")), *finish.cases[1:])),
        replace(finish, cases=(replace(cut, after={**cut.after, "E": "E"}), *finish.cases[1:])),
        replace(evict, where=(("F", "max(E, R, floor(L - W))"),)),
        replace(abort, cases=abort.cases[:1]),
    ):
        mine = [step for step in transitions if type(step[1]) is rule.command]
        assert any(_wrong(rule, *step) for step in mine), rule


# The radix tree: what becomes of each page.

_TREE = Scope(
    "", "", Geometry(1, 1, 3, 2, 1, 3, True), lock_holders=2, texts="ab", prompts=("a1", "a3", "a1b1"),
    invalid=False,
)  # fmt: skip
_TREES = (
    _TREE,
    replace(_TREE, geometry=Geometry(2, 3, 3, 2, 1, 6, True), prompts=("a2", "a6", "a2b2")),
    replace(_TREE, geometry=Geometry(1, None, 3, 0, 1, 3, True)),
    replace(_TREE, geometry=Geometry(1, 1, 2, 2, 1, 2, True), texts="a", prompts=("a1", "a2"), parts=True),
    Scope(
        "", "", Geometry(1, 1, 2, 2, 1, 2, True), ordinary=1, lock_holders=1, texts="a", prompts=("a1", "a2"),
        submits=(1,), decode=False, retracts=False, aborts=False, invalid=False, evicts=False,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def in_trees():
    """All of the scopes with a tree."""
    return [transition for scope in _TREES for transition in lives.transitions(scope)]


class OwnedPages(NamedTuple):
    """Pages of a tree, each by the path to its end: all of them, and those with SWA KV."""

    full: set[Key]
    swa: set[Key]


def _ends(state: State) -> dict[Key, Placed]:
    """The path to the end of each page, and its node."""
    size = state.tree.page_size
    return {
        placed.path[:end]: placed
        for placed in nodes(state.tree)
        for end in range(placed.start + size, placed.end + 1, size)
    }


def _pages(state: State) -> OwnedPages:
    ends, window = _ends(state), state.config.geometry.window
    return OwnedPages(set(ends), {path for path, at in ends.items() if at.node.live and window is not None})


def _pinned(state: State) -> OwnedPages:
    """What stays where everything is evicted that can be."""
    g = state.config.geometry
    return _pages(model.step(state, Evict(g.full_pages * g.page_size, g.swa_pages * g.page_size))[0])


def _locked(state: State, path: Key, *, but: str = "", window: bool = False) -> bool:
    """Whether a lock (of somebody else) passes through the page, or its window reaches up to it."""
    passing = [k for k in state.tree.locks if k.holder != but and k.key[: len(path)] == path]
    return any(not window or lock.swa_from < len(path) for lock in passing)


def _page_case(rule: Rule, names: dict[str, Any]) -> PageCase:
    return next(case for case in rule.pages if _value(case.holds, names))


def _match(rule: Rule, was: State, command: Match, now: State) -> str:
    size, had = was.config.geometry.page_size, _ends(was)
    key = key_of(command.prompt)[: floor_page(len(key_of(command.prompt)), size)]
    there = max((end for end in range(size, len(key) + 1, size) if key[:end] in had), default=0)
    ends = {0, there} | {end for path, at in had.items() if (end := at.end) <= there and path == key[:end]}

    def live(start: int, end: int) -> bool:
        return all(had[key[: at - at % size + size]].node.live for at in range(max(0, start), end))

    names = {**_sizes(was), "ends": ends, "live": live, "full_only": command.full_only}
    names["L"] = _value(dict(rule.where)["L"], names)
    if lock_holders(now)[command.holder] != key[: names["L"]]:
        return "another prefix"
    if {p.path for p in _ends(now).values()} - {p.path for p in had.values()} - {key[:there]}:
        return "another split"
    way = {path: at.end for path, at in _ends(now).items() if path == key[: len(path)]}
    cases = {path: _page_case(rule, {**names, "e": end}) for path, end in way.items()}
    before, after = _pinned(was), _pinned(now)
    for pool in OwnedPages._fields:
        locked = {path for path, case in cases.items() if getattr(case, pool) is Fate.LOCKED}
        if getattr(after, pool) != getattr(before, pool) | locked:
            return f"{pool}: locked {locked}"
    return "freed" if _pages(was) != _pages(now) else ""


def _unlock(rule: Rule, was: State, command: Unlock | UnlockSwa, now: State) -> str:
    size, before, after = was.tree.page_size, _pinned(was), _pinned(now)
    [lock] = [lock for lock in was.tree.locks if lock.holder == command.holder]
    let_go = OwnedPages(set(), set())
    for end in range(size, len(lock.key) + 1, size):
        others, window = (_locked(was, lock.key[:end], but=lock.holder, window=w) for w in (False, True))
        if isinstance(command, Unlock) or end > lock.swa_from:
            case = _page_case(rule, {"others": others, "window": window})
            for pool, pages in zip(OwnedPages._fields, let_go):
                pages |= {lock.key[:end]} if getattr(case, pool) is Fate.LET_GO else set()
    if after != OwnedPages(before.full - let_go.full, before.swa - let_go.swa):
        return "pinned"
    return "freed" if _pages(was) != _pages(now) else ""


def _handed_over(
    rule: Rule, was: State, command: Command, now: State, holder: str, key: Key, evicted: int, goes_on: bool
) -> str:
    """Whoever brings `key`, past its lock, to the tree of `was`, in which there is room for it."""
    size, had = was.config.geometry.page_size, _ends(was)
    prefix = next((len(lock.key) for lock in was.tree.locks if lock.holder == holder), 0)
    brought = [key[:end] for end in range(prefix + size, len(key) + 1, size)]
    names = {**_sizes(was), "goes_on": goes_on, "length": len(key)}

    def fates(matched_again: bool) -> dict[Key, PageCase]:
        return {
            path: _page_case(rule, {
                **names, "matched_again": matched_again, "there": path in had,
                "tombstone": path in had and not had[path].node.live, "locked": _locked(was, path),
                "swept": was.config.geometry.window is not None and len(path) <= ceil_page(evicted, size),
            })
            for path in brought
        }  # fmt: skip

    def live(start: int, end: int) -> bool:
        ends = {at - at % size + size for at in range(max(0, start), end)}
        return all(key[:end] in live_then for end in ends)

    then = fates(True)
    live_then = {path for path, at in had.items() if at.node.live}
    live_then |= {path for path, case in then.items() if case.swa is Fate.TAKEN}
    if not _value(rule.where[0][1], {**names, "live": live}):
        then = fates(False)
    taken = {path for path, case in then.items() if case.full in (Fate.TAKEN, Fate.SWAPPED)}
    taken_swa = {path for path, case in then.items() if case.swa is Fate.TAKEN}
    if was.config.geometry.window is None:
        taken_swa = set()
    before = _pages(was)
    if _pages(now) != OwnedPages(before.full | taken, before.swa | taken_swa):
        return "pages of the tree"
    gone = {path for path, case in then.items() if case.full is Fate.SWAPPED}
    _, _, effects = model.step_with_effects(was, command)
    if {page for _, page in effects.gone["full"]} != {len(path) // size - 1 for path in gone}:
        return "pages that the tree gives back"
    row = not isinstance(command, Insert)
    adopted = [{page for _, page in effects.adopted[pool]} for pool in ("full", "swa")]
    if adopted != [{len(path) // size - 1 for path in pages if row} for pages in (taken, taken_swa)]:
        return "pages that the row gives up"
    lock = [lock.key for lock in now.tree.locks if lock.holder == holder]
    out = any(case.full is Fate.KEPT_OUT for case in then.values())
    return "" if lock == ([key[:prefix] if out else key] if goes_on else []) else "lock"


def _with_room(was: State, pages: int) -> State:
    """Missing pages are evicted first."""
    left, size = free(was), was.config.geometry.page_size
    full, swa = max(0, pages - left.full) * size, max(0, pages - left.swa) * size
    swa = swa if was.config.geometry.window is not None else 0
    return model.step(was, Evict(full, swa))[0] if full or swa else was


def _insert(rule: Rule, was: State, command: Insert, now: State) -> str:
    size, key = was.config.geometry.page_size, key_of(command.prompt)
    key = key[: floor_page(len(key), size)]
    prefix = len(lock_holders(was).get(command.holder, ()))
    was = _with_room(was, (len(key) - prefix) // size)
    swept = max(command.evicted, prefix)
    return _handed_over(rule, was, command, now, command.holder, key, swept, command.chunked)


def _of_request(rule: Rule, was: State, command: Extend | Finish, now: State) -> str:
    """The table of insert, for a request that goes on or ends."""
    size, [(name, said)] = was.config.geometry.page_size, _lanes(command)
    request = was.request(name)
    c = request.cursors
    if isinstance(command, Extend):
        length = c.kv_committed_len + said["tokens"]
        was = _with_room(was, (ceil_page(length, size) - ceil_page(c.kv_allocated_len, size)) // size)
    else:
        length = min(c.kv_committed_len, request.origin + said["finished_len"])
    key = tuple(text_tokens(request.text, floor_page(length, size)))
    swept, goes_on = max(c.swa_evicted_seqlen, c.cache_protected_len), isinstance(command, Extend)
    if len(key) <= c.cache_protected_len:
        return "" if not goes_on or _pages(was) == _pages(now) else "nothing to insert"
    return _handed_over(rule, was, command, now, name, key, swept, goes_on)


def _evict(rule: Rule, was: State, command: Evict, now: State) -> str:
    there = {at.path: at.node for at in nodes(was.tree)}
    short, changed = {"full": command.full, "swa": command.swa}, set()

    def names(path: Key) -> dict[str, Any]:
        return {
            **short, "live": there[path].live, "changed": path in changed,
            "leaf": not any(other[: len(path)] == path and other != path for other in there),
            "locked": _locked(was, path), "window": _locked(was, path, window=True),
        }  # fmt: skip

    while found := next((
        (case, those) for case in rule.pages if (those := [p for p in there if _value(case.holds, names(p))])
    ), None):  # fmt: skip
        case, those = found
        used = "swa_used" if case.full is not Fate.FREED else "full_used"
        path = min(those, key=lambda p: (getattr(there[p], used), len(p), p))
        node = there.pop(path)
        short["swa"] -= len(node.key) if node.live and was.tree.window is not None else 0
        if case.full is Fate.FREED:
            short["full"] -= len(node.key)
            changed.add(path[: -len(node.key)])
        else:
            there[path] = node._replace(live=False)
            changed.add(path)
    if {at.path: at.node.live for at in nodes(now.tree)} != {path: node.live for path, node in there.items()}:
        return "nodes"
    freed = Freed(command.full - short["full"], command.swa - short["swa"])
    return "" if model.step(was, command)[1] == Done(freed=freed) else "tokens freed"


_OF: dict[type, Callable[[Rule, State, Any, State], str]] = {
    Match: _match, Unlock: _unlock, UnlockSwa: _unlock, Insert: _insert, Evict: _evict,
}  # fmt: skip


def test_the_tables_of_pages_do_what_the_model_does(in_trees):
    met = set()
    for was, command, now in in_trees:
        kind = type(command)
        if kind in (*_OF, Extend, Finish):
            met.add(kind)
            wrong = _OF.get(kind, _of_request)(RULES[kind if kind in _OF else Insert], was, command, now)
            assert not wrong, (wrong, command, was, now)
    assert met == {*_OF, Extend, Finish}


def test_a_table_of_pages_that_is_not_so_is_found(in_trees):
    """No case can be left out, nor what the windows ask for."""
    missed = []
    for kind, wrong in _OF.items():
        rule, mine = RULES[kind], [step for step in in_trees if type(step[1]) is kind]
        faults = [replace(rule, pages=tuple(c for c in rule.pages if c is not case)) for case in rule.pages]
        if rule.where:
            faults.append(replace(rule, where=tuple((name, _BLIND[name]) for name, _ in rule.where)))
        missed += [fault for fault in faults if not any(_differs(wrong, fault, *step) for step in mine)]
    assert not missed


_BLIND = {"L": "max(ends)", "matched_again": "True"}


def _differs(wrong: Callable[..., str], rule: Rule, *step: Any) -> bool:
    try:
        return bool(wrong(rule, *step))
    except StopIteration:  # no case is left for a page
        return True
