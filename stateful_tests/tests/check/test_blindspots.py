"""What run-time checks see: nothing of what is right, and each its own faults."""

import json
from functools import cache

import pytest

from impl.bugs import broken
from reference.commands import Mode
from reference.geometry import PRESETS
from stateful_tests.blindspots.measure import CHECKS, BugResult, Drive, draw, fixtures, measure, watch
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


# Each check, and bugs of different kinds that it sees at once.
SEES = {
    "busy": "alloc-takes-a-page-too-many", "idle": "free-list-duplicate",
    "list": "free-list-duplicate group-looks-up-at-its-end",
    "owner": "save-mixes-rows finish-frees-what-it-inserted", "lost": "alloc-takes-a-page-too-many",
    "rows": "pr22790-row-twice pr22790-row-never", "map": "sweep-keeps-mapping release-keeps-mapping",
    "order": "decode-commits-without-slot insert-protects-half-a-page", "text": "match-takes-the-last-token",
    "window": "tail-cuts-the-window sweep-into-window",
    "tree": "split-forgets-locks match-ignores-the-window",
    "prefix": "row-keeps-its-duplicates insert-protects-half-a-page", "KV": "decode-trusts-rejected-drafts",
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_sees_its_bugs_at_once(check):
    for bug in SEES[check].split():
        assert _row(bug).cells[check].verdict == "at once", bug


def test_the_command_gives_table_and_json(kvspec):
    code, out, err = kvspec("blindspots", "--bug", "pr22213-tail", "--runs", "1", "--json")
    data = json.loads(out)
    (bug,) = data["bugs"]
    assert (code, bug["bug"], bug["cells"]["text"]["verdict"]) == (0, "pr22213-tail", "at once")
    assert {cell["verdict"] for cell in data["healthy"]["cells"].values()} == {"never"}
    assert "What follows" in err
    assert max(map(len, err.splitlines())) <= 100
    assert kvspec("blindspots", "--bug", "nonesuch")[0] == 2
