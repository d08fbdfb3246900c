"""Run-time checks that look at a system's own state alone; contents take stamps, which no server has.

Most are clauses that read nothing but the facts of this moment. They see less than all clauses do: nothing
here knows what a command should have done. The sums are not among them: those are commands of the system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from reference.clauses import CLAUSES
from reference.clauses.facts import Facts, HolderFacts
from reference.clauses.step import Step
from reference.commands import CheckIdle, Done, Mode
from reference.cursors import lost_below, window_live, window_start
from reference.ledger import Cursors, State


class Monitor(NamedTuple):
    """A check. looks_for: what it finds, in a line; reads: what it has to read for that."""

    name: str
    looks_for: str
    reads: str
    fires: Callable[[State, Facts], bool]


class Held(NamedTuple):
    """Cursors that a system shows, and texts that it may hold KV of. reach: how long one has to be."""

    cursors: Cursors
    reach: int
    row: HolderFacts | None
    texts: list[Sequence[int]]


def _asks(*clauses: str) -> Callable[[State, Facts], bool]:
    """Clauses about facts, asked of this moment. state: an empty one, with the sizes."""

    def fires(state: State, facts: Facts) -> bool:
        step = Step(state.config, CheckIdle(), Done(), Done(), state, state, facts, facts, unchanged=True)
        return any(CLAUSES[clause].check(step) is not None for clause in clauses)

    return fires


def _held(facts: Facts) -> Iterator[Held]:
    """Requests in a batch, and slots that no request has borrowed."""
    lent = {request.session for request in facts.requests.values() if request.cursors is not None}
    for name, request in facts.requests.items():
        if (c := request.cursors) is not None:
            row = facts.holders.get(f"{request.session}/{name}") or facts.holders.get(request.session or name)
            mine = row if row is not None and row.cursors == c else None
            yield Held(c, c.kv_committed_len + 1, mine, [request.text])
    for name, session in facts.sessions.items():
        if (c := session.slot) is not None and name not in lent:
            waiting = [request.text for request in facts.requests.values() if request.session == name]
            yield Held(c, max(c[:3]), facts.holders.get(name), [session.history, *waiting])


def _past_its_text(_: State, facts: Facts) -> bool:
    return any(held.reach > max(map(len, held.texts)) for held in _held(facts))


def _window_lost(state: State, facts: Facts) -> bool:
    """In free mode a sweep may run ahead of the commit: the turn may end then, not go on."""
    window = state.config.geometry.window
    for c, _, row, _ in _held(facts) if window is not None else ():
        assert window is not None
        if not window_live(lost_below(c), c.kv_committed_len, window):
            if state.config.mode is Mode.FAITHFUL:
                return True
        elif row is not None:
            start = window_start(c.kv_committed_len, window)
            if None in row.swa_read[start : c.kv_committed_len]:
                return True
    return False


def _not_in_the_tree(_: State, facts: Facts) -> bool:
    nodes = facts.tree.nodes if facts.tree is not None else ()
    known = {slot for node in nodes for slot in node.slots}
    return facts.tree is not None and any(not known.issuperset(h.prefix) for h in facts.holders.values())


def _misread(state: State, facts: Facts) -> bool:
    """A row that reads other KV than that of a text of its own: full KV up to C, SWA KV from E on."""
    for c, _, row, texts in _held(facts):
        if row is None or row.cursors != c:
            continue
        end = c.kv_committed_len
        live = max(lost_below(c), c.cache_protected_len) if state.config.geometry.window else end
        read = (list(row.full_read[:end]), list(row.swa_read[live:end]))
        if read not in [(list(text[:end]), list(text[live:end])) for text in texts if len(text) >= end]:
            return True
    return False


MONITORS: dict[str, Monitor] = {
    monitor.name: monitor
    for monitor in (
        Monitor("list", "a page twice in its free list, padding, a page out of range", "free lists",
                _asks("OWN-2")),
        Monitor("owner", "a page with two owners, or with one and free", "free lists, rows", _asks("OWN-1")),
        Monitor("lost", "a page neither free nor owned", "free lists, rows", _asks("OWN-3")),
        Monitor("rows", "a row that is held twice, held and free, or lost; a row of broken pages", "rows",
                _asks("OWN-4", "OWN-5")),
        Monitor("map", "a live slot unmapped, a dead one mapped, an SWA slot mapped twice", "rows, mapping",
                _asks("MAP-1", "MAP-2", "MAP-3", "MAP-4")),
        Monitor("order", "cursors out of order, out of bounds or off a page", "lengths", _asks("LEN-1")),
        Monitor("text", "cursors past the text that they are of", "lengths", _past_its_text),
        Monitor("window", "the next token's window swept or unmapped", "lengths, rows, mapping",
                _window_lost),
        Monitor("tree", "a node of half a page or half dead, a counter that is no sum", "tree",
                _asks("TREE-1", "TREE-2", "TREE-9")),
        Monitor("prefix", "a row whose prefix is not the tree's", "tree, rows", _not_in_the_tree),
        Monitor("KV", "KV below kv_committed_len that is not that of the text", "rows, mapping, all KV",
                _misread),
    )
}  # fmt: skip
