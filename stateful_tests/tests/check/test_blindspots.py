"""What run-time checks see: nothing of what is right, and each its own faults."""

import json
from functools import cache
from typing import Any

import pytest

from impl.bugs import broken
from reference import model
from reference.clauses.facts import (
    Facts, HolderFacts, NodeFacts, Owned, Pool, RequestFacts, SessionFacts, TreeFacts,
)  # fmt: skip
from reference.commands import Mode
from reference.geometry import PRESETS, Geometry
from reference.ledger import Cursors
from stateful_tests.blindspots.measure import CHECKS, BugResult, Drive, draw, fixtures, measure, watch
from stateful_tests.blindspots.monitors import MONITORS
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.systems import resolve


@cache
def _drawn(mode: Mode, machine: str = "sessions") -> tuple[Drive, ...]:
    return tuple(draw(mode, 0, run, steps=40, machine=machine) for run in range(len(PRESETS)))


@cache
def _row(bug: str) -> BugResult:
    kept = fixtures().get(bug, [])
    machine = "tree" if any(run.geometry.tree for run in kept) else "sessions"
    return measure(bug, broken(bug), [*_drawn(Mode.FAITHFUL, machine)[:4], *kept], lambda _: None)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_seen_of_a_healthy_system(impl, mode, machine):
    for run in _drawn(mode, machine):
        assert not (signs := watch(resolve(impl), run)).first, (run.geometry, signs)


@pytest.mark.parametrize(
    ("bug", "cells"),
    [
        ("lanes-share-new-pages", {"busy": "never", "idle": "never", "owner": "at once"}),
        ("pr22213-tail", {"busy": "never", "lost": "never", "text": "at once"}),
        ("swa-written-before-mapped", {"KV": "at once", "busy": "never", "map": "never"}),
        ("pr20070", {"busy": "later", "lost": "at once"}),
        ("output-not-cut", dict.fromkeys(CHECKS, "never")),
        ("pr22213-double-count", {"busy": "false alarm", "lost": "never"}),
        ("lock-pins-swa-to-the-root", {check: "never" for check in CHECKS if check != "tree"}),
    ],
)
def test_known_cells(bug, cells):
    row = _row(bug)
    assert row.shown
    assert {check: row.cells[check].verdict for check in cells} == cells


def test_a_late_cell_says_after_what_and_how_late():
    cell = _row("pr20070").cells["busy"]
    assert sum(cell.late_after.values()) == cell.seen - cell.at_once > 0
    assert cell.median_commands_late is not None and cell.median_commands_late >= 1


# Monitors, one planted fault each. P 2, W 2: r1 of s1 has 4 of its 5 tokens, s2 keeps 2.

GEOMETRY = Geometry(page_size=2, window=2, full_pages=4, swa_pages=4, rows=3, width=8)
TEXT, HISTORY = (11, 12, 13, 14, 15), (21, 22)
RUNNING, SLOT = Cursors(4, 4, 0, 0), Cursors(2, 2, 0, 0)
OWNED = (Owned("r1", 0, 1), Owned("r1", 1, 2), Owned("s2", 0, 3))
RIGHT = Facts(
    {"s2": SessionFacts(HISTORY, False, SLOT)},
    {"r1": RequestFacts(None, 4, TEXT, RUNNING)},
    {"r1": HolderFacts(0, RUNNING, TEXT[:4], TEXT[:4]), "s2": HolderFacts(1, SLOT, HISTORY, HISTORY)},
    {"full": Pool(4, (4,), OWNED), "swa": Pool(4, (4,), OWNED)},
    rows=3,
    free_rows=(2,),
)


def _pool(*free: int, owned: tuple[Owned, ...] = OWNED) -> Facts:
    return RIGHT._replace(pools={**RIGHT.pools, "swa": Pool(4, free, owned)})


def _run(cursors: Cursors, swa_read: tuple[int | None, ...] = TEXT[:4]) -> Facts:
    return RIGHT._replace(
        requests={"r1": RIGHT.requests["r1"]._replace(cursors=cursors)},
        holders={**RIGHT.holders, "r1": HolderFacts(0, cursors, TEXT[:4], swa_read)},
    )


def _slot(slot: Cursors, read: tuple[int, ...] = HISTORY) -> Facts:
    holders = {**RIGHT.holders, "s2": HolderFacts(1, slot, read, read)}
    return RIGHT._replace(sessions={"s2": SessionFacts(HISTORY, False, slot)}, holders=holders)


def _node(prefix: tuple[int, ...] = (2, 3), sizes: tuple[int, ...] = (0, 2, 0, 2), **changes: Any) -> Facts:
    """With a radix tree: one node of a page, locked once, that the row of r1 starts with."""
    node = NodeFacts((11, 12), (2, 3), (2, 3), (2, 3), (11, 12), (11, 12), 1, 1)._replace(**changes)
    holders = {name: h._replace(prefix=prefix) if name == "r1" else h for name, h in RIGHT.holders.items()}
    return RIGHT._replace(tree=TreeFacts([node], {}, sizes, {}), holders=holders)


PLANTED: list[tuple[str, Facts]] = [
    ("list", _pool(4, 4)), ("list", _pool(0, 4)), ("rows", RIGHT._replace(free_rows=(2, 2))),
    ("owner", _pool(4, 2)), ("rows", RIGHT._replace(free_rows=(2, 1))),
    ("owner", _pool(4, owned=(*OWNED, Owned("s2", 1, 1)))),
    ("rows", RIGHT._replace(torn=("full slots of r1 at [0, 2): [2, 4]",))),
    ("lost", _pool()), ("rows", RIGHT._replace(free_rows=())),
    ("map", RIGHT._replace(unmapped=[("r1", 3)])), ("map", RIGHT._replace(swept_mapped=[(2, 3)])),
    ("map", RIGHT._replace(shared=[3])),
    ("order", _run(Cursors(4, 3, 0, 0))), ("order", _run(Cursors(4, 4, 0, 1))),
    ("text", _slot(Cursors(2, 4, 0, 0))),
    ("window", _run(RUNNING, (11, 12, None, 14))), ("window", _run(Cursors(4, 4, 4, 0))),
    ("window", _slot(Cursors(2, 2, 2, 0))),
    ("tree", _node(slots=(2,))), ("tree", _node(sizes=(2, 0, 2, 0))), ("prefix", _node(prefix=(4, 5))),
    ("KV", _slot(SLOT, (21, 99))), ("KV", _run(RUNNING, (11, 99, 13, 14))),
]  # fmt: skip


def _signs(facts: Facts, mode: Mode = Mode.FAITHFUL) -> set[str]:
    state = model.initial(GEOMETRY, mode)
    return {name for name, monitor in MONITORS.items() if monitor.fires(state, facts)}


def test_what_is_right_gives_no_sign():
    for mode in Mode:
        assert _signs(RIGHT, mode) == _signs(_node(), mode) == set()


@pytest.mark.parametrize("name, facts", PLANTED, ids=[f"{n}-{i}" for i, (n, _) in enumerate(PLANTED)])
def test_each_monitor_finds_its_fault(name, facts):
    follows = {"KV"} if name == "window" else {"prefix"} if name == "tree" else set()
    assert name in _signs(facts) <= {name} | follows


def test_every_monitor_has_a_planted_fault():
    assert {name for name, _ in PLANTED} == set(MONITORS)


def test_free_mode_lets_a_turn_be_swept_past_its_commit():
    swept = _run(Cursors(3, 4, 4, 0), (None,) * 4)
    assert (_signs(swept, Mode.FREE), "window" in _signs(swept)) == (set(), True)


def test_the_command_gives_table_and_json(kvspec):
    code, out, err = kvspec("blindspots", "--bug", "pr22213-tail", "--runs", "1", "--json")
    data = json.loads(out)
    (bug,) = data["bugs"]
    assert (code, bug["bug"], bug["cells"]["text"]["verdict"]) == (0, "pr22213-tail", "at once")
    assert {cell["verdict"] for cell in data["healthy"]["cells"].values()} == {"never"}
    assert "What follows" in err
    assert max(map(len, err.splitlines())) <= 100
    assert kvspec("blindspots", "--bug", "nonesuch")[0] == 2
