"""Steps with spoilt facts, and what a clause says then, read from clauses.txt and clauses_of_owners.txt.

    script TURN = open s1; submit r1 in s1 +5; admit r1; extend r1 +5
    step DECODED = plain: TURN; decode r1

    LEN-1
      C above A | DECODED | request r1 kv_committed_len=7 -> r1
      E above A | DECODED | request r1 swa_evicted_seqlen=7 -> r1 | at cursor r1 swa_evicted_seqlen
      a full row | DECODED | request r1 kv_allocated_len=16

A step has sizes (SIZES, and what differs) and commands: the last of them is the step. A row has a name,
a step, what is spoilt in it (SPOILS, with semicolons between), and behind an arrow a part of what the clause
says then. Where that is missing, the clause holds. The places of its failure stand behind it, if the row is
about them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reference.clauses import CLAUSES
from reference.clauses.facts import NodeFacts, Owned, Torn, TreePage
from reference.clauses.step import Step
from reference.commands import Choice, Done, Freed
from reference.geometry import Geometry
from reference.state import ZERO, Cursors
from reference.recurrent_states import chained
from stateful_tests.tests.reference.spoilt_facts import (
    ONE, PLAIN, TREE, add_owner, as_refused, change_facts, replace_free_pages, keep_freed_page,
    hand_to_tree, change_tree, with_cursors, node, lose_free_page, double_free_page, pages, path,
    reads, step_of, without,
)  # fmt: skip
from stateful_tests.traces.notation import parse

BARE = replace(PLAIN, window=None, swa_pages=0)
STATE = replace(ONE, window=None, swa_pages=0, states=6)
SIZES = {"plain": PLAIN, "one": ONE, "tree": TREE, "bare": BARE, "state": STATE}
LONG = NodeFacts(
    path("a10"),
    slots=range(1, 11),
    swa_slots=range(1, 11),
    mapped=range(1, 11),
    full_read=path("a10"),
    swa_read=path("a10"),
    full_locks=0,
    swa_locks=0,
)
_NAMED = {"none": None, "zero": ZERO, "yes": True, "no": False, "-": ()}


class Row(NamedTuple):
    """A step, and columns behind it: of a clause what is spoilt, what the clause says then, and where."""

    step: Step
    second: str = ""
    third: str = ""
    fourth: str = ""


def value(text: str, was: Any = None) -> Any:
    """Return a value: a number, a list ("1,2", "2..7", "none*3"; "_" keeps what was there), a path,
    or a name."""
    if text in _NAMED:
        return _NAMED[text]
    if text.lstrip("-").isdigit():
        return int(text)
    if text[0].isalpha() and text[1:].isdigit():
        return path(text)
    values: list[Any] = []
    for part in filter(None, text.split(",")):
        if ".." in part:
            values += range(*map(int, part.split("..")))
            continue
        each, _, times = part.partition("*")
        for _ in range(int(times or 1)):
            values.append(was[len(values)] if each == "_" else value(each))
    return tuple(values)


def _fields(words: list[str], of: Any = None) -> dict[str, Any]:
    pairs = (word.split("=", 1) for word in words)
    return {name: value(text, getattr(of, name, None)) for name, text in pairs}


def _bearer(what: str, step: Step, name: str, *words: str, before: bool = False) -> Step:
    """Other facts of a request or a session, or of its cursors."""
    fields = _fields(list(words), getattr(step.after, what).get(name))
    if fields.keys() <= set(Cursors._fields):
        return change_facts(step, before=before, **{what: with_cursors(name, **fields)})
    return change_facts(step, **{what: lambda has: has | {name: has[name]._replace(**fields)}})


def _follow_step(step: Step, *words: str) -> Step:
    """Return the step as one in which the reference has followed a choice: its first request is
    another, or has other cursors."""
    request = step.now.requests[0]
    fields = _fields(list(words))
    if fields.keys() <= set(Cursors._fields):
        fields = {"cursors": request.cursors._replace(**fields)}
    return replace(step, now=step.now.with_request(request._replace(**fields)))


def _chose(step: Step, name: str, *words: str) -> Step:
    return replace(step, outcome=Done((Choice(name, **_fields(list(words))),)))


def _stamp(text: str) -> int:
    """Return a stamp: a number, or that of the state after a path."""
    return int(text) if text.isdigit() else chained(path(text))[-1]


def _states(step: Step, field: str, key: Any, to: Any, *, before: bool = False) -> Step:
    """Return the facts of recurrent state with one entry that is other, or gone (None)."""
    old = (step.before if before else step.after).states
    other_entries = {k: v for k, v in getattr(old, field).items() if k != key}
    entries = other_entries if to is None else other_entries | {key: to}
    return change_facts(step, before=before, states=old._replace(**{field: entries}))


def _stamp_slots(step: Step, slot: str, text: str) -> Step:
    stamps = [*step.after.states.stamps]
    stamps[int(slot)] = _stamp(text)
    return change_facts(step, states=step.after.states._replace(stamps=stamps))


def _tear_page(step: Step, what: str, holder: str, start: str, slots: str, *end: str) -> Step:
    """Return the step with slots of a page that form none.

    what: torn or torn_swa. end: of the page, if it is the tree's.
    """
    pool = "full" if what == "torn" else "swa"
    whose = holder.replace("_", " ")
    torn = Torn(whose, pool, int(start), value(slots), *map(path, end))
    return change_facts(step, **{what: (torn,)})


def _none(step: Step, what: str, side: str = "after") -> Step:
    nothing = None if what in ("tree", "states") else {}
    return change_facts(step, before=side == "before", **{what: nothing})


SPOILS: dict[str, Callable[..., Step]] = {
    "refused": as_refused,
    "own_tree": lambda step: replace(step, tree_policy_is_free=True),
    "unchanged": lambda step: replace(step, unchanged=True),
    "command": lambda step, *words: replace(step, command=parse(" ".join(words))),
    "told": lambda step, full, swa: replace(step, outcome=Done(freed=Freed(int(full), int(swa)))),
    "told_nothing": lambda step: replace(step, outcome=Done()),
    "chose": _chose,
    "followed": _follow_step,
    "no": _none,
    "request": partial(_bearer, "requests"),
    "session": partial(_bearer, "sessions"),
    "session_before": partial(_bearer, "sessions", before=True),
    "reads": lambda step, name, *words: reads(step, name, **_fields(list(words), step.after.holders[name])),
    "tree": lambda step, *words: change_tree(step, **_fields(list(words))),
    "tree_as_before": lambda step: change_facts(step, tree=step.before.tree),
    "node": lambda step, number, *words: node(
        step, int(number), **_fields(list(words), step.after.tree.nodes[int(number)])),
    "first_node_gone": lambda step: change_tree(step, nodes=lambda nodes: nodes[1:]),
    "long_node": lambda step: change_tree(step, nodes=lambda nodes: [*nodes, LONG]),
    "pages": pages,
    "a_page_before": lambda step, key: change_tree(
        step, before=True, pages={path(key): TreePage((), has_swa=True)}
    ),
    "pages_before": lambda step, pattern: pages(step, pattern, before=True),
    "locks": lambda step, name, slots: change_tree(step, lock_holders={name: value(slots)}),
    "freed_less": keep_freed_page,
    "handed_over": lambda step, holder, at: hand_to_tree(step, holder, int(at)),
    "lost": lose_free_page,
    "twice": double_free_page,
    "nowhere": lambda step, pool, page: without(step, pool, int(page)),
    "free": lambda step, pool, page: replace_free_pages(step, int(page), pool=pool),
    "free_lists": lambda step, listed: change_facts(
        step, pools=lambda pools: {name: pool._replace(free=value(listed)) for name, pool in pools.items()}),
    "free_rows": lambda step, rows: change_facts(step, free_rows=value(rows, step.after.free_rows)),
    "torn": _tear_page,
    "entries": lambda step, what, *pairs: change_facts(step, **{what: tuple(map(value, pairs))}),
    "unmapped": lambda step, name, *at: change_facts(step, unmapped=tuple((name, int(each)) for each in at)),
    "request_more": lambda step, name, like: change_facts(step, requests=lambda has: has | {name: has[like]}),
    "session_more": lambda step, name, like: change_facts(step, sessions=lambda has: has | {name: has[like]}),
    "read": lambda step, name, text: _states(step, "read", name, _stamp(text)),
    "unread": lambda step, name: _states(step, "read", name, None),
    "stamp": _stamp_slots,
    "slot": lambda step, name, slot: _states(step, "holders", name, int(slot)),
    "no_slot": lambda step, name: _states(step, "holders", name, None),
    "node_state": lambda step, key, slot: _states(step, "nodes", path(key), int(slot)),
    "no_node_state": lambda step, key: _states(step, "nodes", path(key), None),
    "a_state_before": lambda step, key: _states(step, "nodes", path(key), 9, before=True),
    "keeps_state": lambda step, key: _states(step, "nodes", path(key), 1),
    "buffer": lambda step, name, *slots: _states(step, "buffers", name, [*map(int, slots)]),
    "buffer_before": lambda step, name, slot: _states(step, "buffers", name, [int(slot)], before=True),
    "tracked": lambda step, name, slot, length: _states(step, "tracked", name, [(int(slot), int(length))]),
    "reached": lambda step, name, *counts: _states(step, "reached", name, (*map(int, counts),)),
    "verifies": lambda step: change_facts(step, states=step.after.states._replace(verifies=True)),
    "free_states": lambda step, listed: change_facts(
        step, states=lambda states: states._replace(free=value(listed))),
    "owned": lambda step, pool, holder, at, page: add_owner(
        step, pool, Owned(holder.replace("_", " "), int(at), int(page))),
}  # fmt: skip


def spoilt(step: Step, spoils: str) -> Step:
    """Return the step with these facts spoilt, one after the other."""
    for spoil in filter(None, (each.strip() for each in spoils.split(";"))):
        kind, *words = spoil.split()
        step = SPOILS[kind](step, *words)
    return step


def _sizes(text: str) -> Geometry:
    name, *words = text.split()
    return replace(SIZES[name], **_fields(words))


class Rows:
    """A file of rows.

    scripts, steps: by name.
    tables: heading (a clause, or another) -> rows by name.
    """

    def __init__(self, file: Path) -> None:
        self.scripts: dict[str, list[str]] = {}
        self.steps: dict[str, Step] = {}
        self.tables: dict[str, dict[str, Row]] = {}
        heading = ""
        for line in file.read_text().splitlines():
            if line.startswith(("script ", "step ")):
                self._define(*line.split(" ", 3))
            elif line.startswith(" "):
                facts, _, says = line.partition(" -> ")
                name, step, *cells = (part.strip() for part in facts.split("|"))
                words, _, places = says.partition(" | at ")
                assert name not in self.tables[heading], f"{file.name}: {heading}: {name}: twice"
                if says:
                    cells = [*(cells or [""]), words, places]
                self.tables[heading][name] = Row(self.step(step), *cells)
            elif line and not line.startswith("#"):
                heading = line
                self.tables[heading] = {}

    def step(self, text: str) -> Step:
        """Return a step by its name, or by its sizes and commands."""
        sizes, colon, commands = text.partition(":")
        return step_of(_sizes(sizes), *self._commands(commands)) if colon else self.steps[text]

    def _commands(self, text: str) -> list[str]:
        """Return each command of a script, those that have a name written out."""
        parts = (part.strip() for part in text.split(";"))
        return [command for part in parts for command in self.scripts.get(part, [part])]

    def _define(self, kind: str, name: str, _: str, text: str) -> None:
        if kind == "script":
            self.scripts[name] = self._commands(text)
            return
        step, _, spoils = text.partition(" | ")
        self.steps[name] = spoilt(self.step(step), spoils)

    def of_clauses(self) -> list[Any]:
        """Parameters of a test: clause, step, what the clause says (None where it holds), and where."""
        return [
            pytest.param(
                clause,
                spoilt(row.step, row.second),
                row.third or None,
                row.fourth,
                id=f"{clause}{'' if row.third else ' holds'}: {name}",
            )
            for clause in self.tables
            if clause in CLAUSES
            for name, row in self.tables[clause].items()
        ]
