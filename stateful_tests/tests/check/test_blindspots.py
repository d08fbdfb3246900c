"""What run-time checks see: nothing of what is right, each its own faults; and partitions that balance."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import permutations
from typing import Any

import pytest

from impl.bugs import broken
from reference.clauses.facts import (
    Facts, HolderFacts, NodeFacts, Owned, Pool, RequestFacts, SessionFacts, TreeFacts,
)  # fmt: skip
from reference.commands import Mode
from reference.geometry import PRESETS, Geometry
from reference.ledger import Cursors
from stateful_tests.blindspots.measure import (
    CHECKS, BugResult, Drive, draw, fixtures, measure, smallest_sets, watch,
)  # fmt: skip
from stateful_tests.blindspots.monitors import MONITORS, Observation
from stateful_tests.blindspots.partitions import KINDS, balanced, kinds, partitions, seen_by, smallest
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.systems import resolve


@cache
def _drawn(mode: Mode, machine: str = "sessions") -> tuple[Drive, ...]:
    return tuple(draw(mode, 0, run, steps=40, machine=machine) for run in range(len(PRESETS)))


@cache
def _row(bug: str, mode: Mode = Mode.FAITHFUL) -> BugResult:
    kept = fixtures().get(bug, [])
    machine = "both" if any(run.geometry.tree for run in kept) else "sessions"
    runs = [*_drawn(mode, machine)[:4], *kept]
    return measure(bug, broken(bug), runs, lambda _: None)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_seen_of_a_healthy_system(impl: str, mode: Mode, machine: str) -> None:
    system = resolve(impl)
    for run in _drawn(mode, machine):
        signs = watch(system, run)
        assert not signs.first, (run.origin, signs)
        assert not signs.wrong
        assert not signs.ended


def test_runs_are_drawn_from_seed_and_mode_alone() -> None:
    assert draw(Mode.FREE, 0, 1, 40) == _drawn(Mode.FREE)[1]
    assert draw(Mode.FREE, 1, 1, 40) != _drawn(Mode.FREE)[1]


@pytest.mark.parametrize(
    ("bug", "cells"),
    [
        ("lanes-share-new-pages", {"sums-busy": "never", "sums-idle": "never", "owned-twice": "at once"}),
        ("pr22213-tail", {"sums-busy": "never", "lost": "never", "cursors": "at once"}),
        ("swa-written-before-mapped", {"contents": "at once", "sums-busy": "never", "mapping": "never"}),
        ("pr20070", {"sums-busy": "later", "lost": "at once"}),
        ("output-not-cut", dict.fromkeys(CHECKS, "never")),
        ("pr22213-double-count", {"sums-busy": "false alarm", "lost": "never"}),
        ("lock-pins-swa-to-the-root", {check: "never" for check in CHECKS if check != "tree"}),
    ],
)
def test_known_cells(bug: str, cells: dict[str, str]) -> None:
    row = _row(bug)
    assert row.shown
    assert {check: row.cells[check].verdict for check in cells} == cells


def test_a_late_cell_says_after_what_and_how_late() -> None:
    cell = _row("pr20070").cells["sums-busy"]
    assert sum(cell.after.values()) == len(cell.delays) == cell.seen - cell.at_once > 0
    assert cell.median_delay is not None and cell.median_delay >= 1


def test_smallest_sets_see_all_and_nothing_smaller_does() -> None:
    rows = [_row("lanes-share-new-pages"), _row("pr22213-tail"), _row("pr22213-double-count")]
    some = smallest_sets(rows)
    assert some
    assert {len(checks) for checks in some} == {2}
    assert all("cursors" in checks for checks in some)
    assert smallest_sets([_row("pr22213-double-count")]) == [()]


# Monitors, one planted fault each. P 2, W 2: r1 of s1 has 4 of its 5 tokens, s2 keeps 2.

GEOMETRY = Geometry(page_size=2, window=2, full_pages=4, swa_pages=4, rows=3, width=8)
TEXT, HISTORY = (11, 12, 13, 14, 15), (21, 22)
RUNNING, SLOT = Cursors(4, 4, 0, 0), Cursors(2, 2, 0, 0)
OWNED = (Owned("r1", 0, 1), Owned("r1", 1, 2), Owned("s2", 0, 3))
RIGHT = Facts(
    {"s2": SessionFacts(HISTORY, False, SLOT)},
    {"r1": RequestFacts(None, 4, TEXT, RUNNING)},
    {
        "r1": HolderFacts(0, RUNNING, TEXT[:4], TEXT[:4]),
        "s2": HolderFacts(1, SLOT, HISTORY, HISTORY),
    },
    {"full": Pool(4, (4,), OWNED), "swa": Pool(4, (4,), OWNED)},
    rows=3,
    free_rows=(2,),
)


def _pool(pool: Pool) -> Facts:
    return RIGHT._replace(pools={**RIGHT.pools, "swa": pool})


def _run(cursors: Cursors, swa_read: tuple[int | None, ...] = TEXT[:4]) -> Facts:
    return RIGHT._replace(
        requests={"r1": RIGHT.requests["r1"]._replace(cursors=cursors)},
        holders={**RIGHT.holders, "r1": HolderFacts(0, cursors, TEXT[:4], swa_read)},
    )


def _slot(slot: Cursors, history: tuple[int, ...] = HISTORY) -> Facts:
    holder = HolderFacts(1, slot, history[: slot[1]], history[: slot[1]])
    return RIGHT._replace(
        sessions={"s2": SessionFacts(HISTORY, False, slot)}, holders={**RIGHT.holders, "s2": holder}
    )


def _signs(facts: Facts, mode: Mode = Mode.FAITHFUL, before: Facts = RIGHT) -> set[str]:
    moment = Observation(GEOMETRY, mode, before, facts)
    return {name for name, monitor in MONITORS.items() if monitor.sign(moment)}


Sizes = tuple[int, int, int, int]


def _node(prefix: tuple[int, ...] = (2, 3), sizes: Sizes = (0, 2, 0, 2), **changes: Any) -> Facts:
    """With a radix tree: one node of a page, locked once, that the row of r1 starts with."""
    node = NodeFacts((11, 12), (2, 3), (2, 3), (2, 3), (11, 12), (11, 12), 1, 1)._replace(**changes)
    holders = {name: h._replace(prefix=prefix) if name == "r1" else h for name, h in RIGHT.holders.items()}
    return RIGHT._replace(tree=TreeFacts([node], {}, sizes, {}), holders=holders)


PLANTED: list[tuple[str, Callable[[], Facts]]] = [
    ("free-list", lambda: _pool(Pool(4, (4, 4), OWNED))),
    ("free-list", lambda: _pool(Pool(4, (0, 4), OWNED))),
    ("free-list", lambda: RIGHT._replace(free_rows=(2, 2))),
    ("free-owned", lambda: _pool(Pool(4, (4, 2), OWNED))),
    ("free-owned", lambda: RIGHT._replace(free_rows=(2, 1))),
    ("owned-twice", lambda: _pool(Pool(4, (4,), (*OWNED, Owned("s2", 1, 1))))),
    ("owned-twice", lambda: RIGHT._replace(torn=("full slots of r1 at [0, 2): [2, 4]",))),
    ("lost", lambda: _pool(Pool(4, (), OWNED))),
    ("lost", lambda: RIGHT._replace(free_rows=())),
    ("mapping", lambda: RIGHT._replace(unmapped=[("r1", 3)])),
    ("mapping", lambda: RIGHT._replace(swept_mapped=[(2, 3)])),
    ("mapping", lambda: RIGHT._replace(shared=[3])),
    ("cursors", lambda: _run(Cursors(4, 3, 0, 0))),
    ("cursors", lambda: _run(Cursors(4, 4, 0, 1))),
    ("cursors", lambda: _slot(Cursors(2, 4, 0, 0))),
    ("window", lambda: _run(RUNNING, (11, 12, None, 14))),
    ("window", lambda: _run(Cursors(4, 4, 4, 0))),
    ("window", lambda: _slot(Cursors(2, 2, 2, 0))),
    ("tree", lambda: _node(slots=(2,))),
    ("tree", lambda: _node(swa_locks=2)),
    ("tree", lambda: _node(sizes=(2, 0, 2, 0))),
    ("tree", lambda: _node(prefix=(4, 5))),
    ("contents", lambda: _slot(SLOT, (21, 99))),
    ("contents", lambda: _run(RUNNING, (11, 99, 13, 14))),
]


def test_what_is_right_gives_no_sign() -> None:
    for mode in Mode:
        assert _signs(RIGHT, mode) == _signs(_node(), mode) == set()


@pytest.mark.parametrize("name, plant", PLANTED, ids=[f"{n}-{i}" for i, (n, _) in enumerate(PLANTED)])
def test_each_monitor_finds_its_fault(name: str, plant: Callable[[], Facts]) -> None:
    extra = {"contents"} if name == "window" else set()  # the KV that was read there is gone, too
    assert name in _signs(plant()) <= {name} | extra


def test_a_slot_and_its_turn_follow_from_each_other() -> None:
    turn = RequestFacts("s2", 3, (*HISTORY, 23), SLOT)

    def lent(cursors: Cursors) -> set[str]:
        holder = HolderFacts(1, cursors, HISTORY, HISTORY)
        facts = RIGHT._replace(
            requests={**RIGHT.requests, "r2": turn._replace(cursors=cursors)},
            holders={**RIGHT.holders, "s2": holder},
        )
        return _signs(facts)

    assert lent(SLOT) == set()
    assert lent(Cursors(1, 1, 0, 0)) == {"cursors"}
    assert lent(Cursors(2, 4, 0, 0)) == {"cursors"}


def test_free_mode_lets_a_turn_be_swept_past_its_commit_but_not_go_on() -> None:
    swept = _run(Cursors(3, 4, 4, 0), (None,) * 4)
    assert _signs(swept, Mode.FREE) == set()
    assert "window" in _signs(swept, Mode.FAITHFUL)
    assert "window" in _signs(_run(Cursors(4, 4, 4, 0), (None,) * 4), Mode.FREE, before=swept)
    waiting = RIGHT._replace(requests={"r1": RIGHT.requests["r1"]._replace(cursors=None)})
    assert "window" in _signs(swept, Mode.FREE, before=waiting)


def test_every_monitor_has_a_planted_fault() -> None:
    assert {name for name, _ in PLANTED} == set(MONITORS)


# Partitions.


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_partitions_that_balance_are_enumerated(size: int) -> None:
    found = list(balanced(size))
    assert len(set(found)) == len(found)
    assert all(p.balanced for p in found)
    shapes = {tuple((place.kind, len(place.pages)) for place in p.places) for p in found}
    assert len(found) == len(shapes) * (size + 1) ** size
    assert sum(p.right for p in found) == len(shapes) * len(list(permutations(range(size))))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_where_sums_balance_a_wrong_page_means_a_lost_page(size: int) -> None:
    for partition in balanced(size):
        assert partition.right == (not kinds(partition)) == (not partition.nowhere)
        assert partition.right == (not seen_by(partition))
        assert partition.right or "OWN-3" in seen_by(partition)


def test_the_smallest_of_each_kind_is_smallest() -> None:
    found = smallest()
    assert tuple(found) == KINDS
    for kind, partition in found.items():
        assert partition.size == (1 if "page" in kind or "padding" in kind else 2)
        assert kinds(partition) == {kind}
        assert not any(kind in kinds(p) for size in range(1, partition.size) for p in balanced(size))


def test_facts_become_partitions() -> None:
    assert all(p.balanced and p.right for _, p in partitions(RIGHT, 2))
    shared = _pool(Pool(4, (4,), (*OWNED[:2], Owned("s2", 0, 2))))
    wrong = dict(partitions(shared, 2))["swa"]
    assert wrong.balanced
    assert kinds(wrong) == {"row & slot"}
    assert wrong.nowhere == [3]
    unmapped = dict(partitions(_pool(Pool(4, (4,), OWNED[:2])), 2))["swa"]
    assert unmapped.balanced
    assert kinds(unmapped) == {"slot without page"}


# The command.


def test_the_command_gives_table_and_json(kvspec: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = kvspec("blindspots", "--bug", "pr22213-tail", "--runs", "1", "--json")
    data = json.loads(out)
    (bug,) = data["bugs"]
    assert (code, bug["bug"], bug["cells"]["cursors"]["verdict"]) == (0, "pr22213-tail", "at once")
    assert {cell["verdict"] for cell in data["healthy"]["cells"].values()} == {"never"}
    assert "What follows" in err
    assert max(map(len, err.splitlines())) <= 100
    assert kvspec("blindspots", "--bug", "nonesuch")[0] == 2
