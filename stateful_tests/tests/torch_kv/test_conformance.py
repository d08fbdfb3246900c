"""torch_kv beside the reference at sizes that no preset has; device and mirror agree after each command."""

from dataclasses import replace
from pathlib import Path

import pytest

from impl.torch_kv import TorchKV
from reference.commands import (
    Admit, Choice, Chunk, Evict, Extend, Insert, Match, Mode, Piece, Reason,
    Refused, Submit, UnlockSwa,
)  # fmt: skip
from reference.geometry import PRESETS, Geometry
from impl.choices import RandomChoices
from stateful_tests.generate.run_profile import MACHINES, draw_geometry
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.torch_kv.random_runs import conforms
from stateful_tests.traces.trace_files import load

REGRESSIONS = Path(__file__).parents[3] / "fixtures" / "regressions"


class CursorChecking(TorchKV):
    """Compares its cursors after each command."""

    compared = 0

    def apply(self, command):
        outcome = super().apply(command)
        slots = [session.slot for session in self.sessions.values() if session.slot is not None]
        for holder in (*slots, *(r for r in self.requests.values() if r.row is not None)):
            line = self.table_of(holder).lines[holder.row].tolist()
            assert line == list(holder.cursors), command
            self.compared += 1
        return outcome


@pytest.mark.parametrize("swa", [True, False], ids=["window", "no window"])
@pytest.mark.parametrize("machine", MACHINES)
def test_torch_kv_agrees_with_the_reference(machine, swa):
    like = replace(PRESETS["page1" if swa else "no-swa"], tree=machine != "sessions")
    system = CursorChecking()
    for seed in range(24):
        name = f"{machine} {swa} {seed}"
        mode = Mode.FREE if seed // 2 % 2 else Mode.FAITHFUL
        conforms(system, name, machine, draw_geometry(RandomChoices(name), like), mode)
    assert system.compared > 100 or machine == "tree"  # whose runs have no rows


def test_without_a_tree_its_commands_are_refused():
    a3 = (Piece("a", 3),)
    served = (Submit("r", None, 4), Admit("r"), Extend((Chunk("r", 4),)))
    tree = Match("h", a3), Insert("h", a3), Evict(1, 1), UnlockSwa("r")
    refused = tuple(
        (index, Refused(Reason.NO_TREE)) for index in range(len(served), len(served) + len(tree))
    )
    trace = Trace(PRESETS["page4"], Mode.FAITHFUL, (*served, *tree), expected=refused)
    assert replay(TorchKV(), trace).violation is None


@pytest.mark.parametrize(
    ("sizes", "commands"),
    [
        pytest.param(
            Geometry(
                page_size=1,
                window=3,
                full_pages=30,
                swa_pages=30,
                rows=4,
                width=24,
                tree=True,
                bigram=True,
            ),
            "submit r1 (no session) +1; admit r1; extend r1 +1; finish r1 keep 1",
            id="a text of one token has no bigram",
        ),
        pytest.param(
            Geometry(
                page_size=1, window=3, full_pages=30, swa_pages=30, rows=4, width=24, tree=True
            ),
            "submit r1 (no session) a4; submit r2 (no session) a7; admit r1; admit r2; extend r1 +4;"
            "extend r2 +7 tail; finish r1 keep 1; evict full 0 swa 4; decode r2; finish r2 keep 2",
            id="a tombstone in front of R is not cut where E falls into it",
        ),
        pytest.param(
            Geometry(
                page_size=1,
                window=3,
                full_pages=5,
                swa_pages=4,
                rows=1,
                width=4,
                tree=True,
                states=2,
                tracks=True,
            ),
            "insert h1 a2; match h2 a2; insert h2 a4 (goes on); match h1 a1 (full KV alone); insert h1 a2",
            id="a split leaves a node pinned outside of the window, where states are tracked",
        ),
        pytest.param(
            Geometry(
                page_size=1,
                window=None,
                full_pages=8,
                swa_pages=0,
                rows=3,
                width=8,
                tree=True,
                states=1,
            ),
            "submit r1 (no session) +1; admit r1; extend r1 +1; submit r2 (no session) +1; abort r2 (marked)",
            id="a marked request needs a slot for its state",
        ),
        pytest.param(
            Geometry(
                page_size=1,
                window=None,
                full_pages=8,
                swa_pages=0,
                rows=3,
                width=8,
                tree=True,
                states=2,
                tracks=True,
            ),
            "submit r1 (no session) +1; abort r1 (marked)",
            id="a marked request needs three slots where states are tracked",
        ),
        pytest.param(
            Geometry(
                page_size=1,
                window=None,
                full_pages=8,
                swa_pages=0,
                rows=3,
                width=8,
                tree=True,
                states=1,
            ),
            "insert h1 a3; submit r1 (no session) a3 +1; admit r1;"
            "match h2 a3; submit r2 (no session) a1b1; admit r2",
            id="the one state that could go is the one that is copied; another text copies none",
        ),
        pytest.param(
            Geometry(
                page_size=1,
                window=None,
                full_pages=8,
                swa_pages=0,
                rows=3,
                width=8,
                tree=True,
                states=1,
            ),
            "insert h1 a1; match h2 a1 (full KV alone); evict full 0 states 1",
            id="a leaf that is read loses its state and stays",
        ),
        pytest.param(
            Geometry(page_size=1, window=3, full_pages=8, swa_pages=8, rows=3, width=8, tree=True, states=3),
            "insert h1 a1; insert h1 b1; insert h1 b2; submit r1 (no session) a1 +1; admit r1",
            id="for a copy one state goes, and no KV",
        ),
        pytest.param(
            Geometry(
                page_size=1,
                window=None,
                full_pages=8,
                swa_pages=0,
                rows=3,
                width=8,
                tree=True,
                states=3,
            ),
            "submit r1 (no session) +1; admit r1; extend r1 +1; decode r1; finish r1 keep 1",
            id="who ends where its state is hands it to the tree",
        ),
        pytest.param(
            Geometry(
                page_size=2,
                window=None,
                full_pages=12,
                swa_pages=0,
                rows=1,
                width=16,
                tree=True,
                states=4,
                tracks=True,
            ),
            "submit r1 (no session) +1; admit r1; extend r1 +1; launch r1 +3 accept 3;"
            "launch r1 +2 accept 2; settle r1; finish r1 keep 2",
            id="a text ends before the states that are kept",
        ),
        pytest.param(
            Geometry(page_size=1, window=2, full_pages=9, swa_pages=9, rows=2, width=8, tree=True),
            "insert h1 a2; insert h1 a4; evict full 0 swa 1; insert h2 a5 SWA from 4 (goes on)",
            id="a tombstone, a live node and own SWA KV, which make a window with the node",
        ),
        pytest.param(
            Geometry(page_size=2, window=3, full_pages=8, swa_pages=8, rows=3, width=8, tree=True),
            "insert h1 a1 (goes on); unlock_swa h1; evict full 0 states 1",
            id="a lock of nothing has an SWA part; without states none are evicted",
        ),
        pytest.param(
            Geometry(
                page_size=1,
                window=None,
                full_pages=8,
                swa_pages=0,
                rows=3,
                width=8,
                tree=True,
                states=1,
            ),
            "evict full 0 states -1",
            id="less than no state",
        ),
        pytest.param(
            Geometry(
                page_size=1, window=None, full_pages=8, swa_pages=0, rows=3, width=8, states=1
            ),
            "submit r1 (no session) +1; submit r2 (no session) +1; admit r1; admit r2;"
            "extend r1 +1; extend r2 +1",
            id="without a tree there is no state to evict",
        ),
        pytest.param(
            Geometry(page_size=1, window=None, full_pages=8, swa_pages=0, rows=1, width=8),
            "submit r1 (no session) +1; admit r1; extend r1 +1; spec_decode r1 +0 accept 1;"
            "launch r1 +1 accept 1; decode r1; launch r1 +1 accept 1; launch r1 +1 accept 1",
            id="a draft of nothing; a decode and a third round while results are in flight",
        ),
        pytest.param(
            Geometry(page_size=1, window=1, full_pages=9, swa_pages=9, rows=2, width=8, tree=True),
            "insert h1 a2; match h2 a2 (full KV alone); evict full 0 swa 2; insert h1 b1;"
            "match h3 a2 (full KV alone); unlock h2; unlock h3; insert h1 a4; evict full 0 swa 2",
            id="a tombstone that is matched has not used SWA KV",
        ),
        pytest.param(
            Geometry(page_size=1, window=2, full_pages=12, swa_pages=12, rows=2, width=12),
            "submit r1 (no session) +3; submit r2 (no session) +1; admit r1; admit r2; extend r1 +3;"
            "spec_decode r1 +6 accept 1; evict_swa r1 at length 9; extend r1 +1, r2 +1",
            id="whoever has lost its window decodes beside no prefill",
        ),
        pytest.param(
            Geometry(
                page_size=1, window=2, full_pages=12, swa_pages=12, rows=2, width=12, tree=True
            ),
            "submit r1 (no session) +2; submit r2 (no session) +1; admit r1; admit r2; extend r1 +2;"
            "extend r1 +1 tail, r2 +1",
            id="whoever runs receives no tail, though all that it has is the tree's",
        ),
    ],
)
def test_a_rare_scene_conforms(sizes, commands):
    for mode in Mode:
        assert replay(TorchKV(), Trace(sizes, mode, script(commands))).violation is None, mode


def test_the_older_of_two_states_serves_a_text_that_ends_there():
    system = TorchKV()
    system.reset(
        Geometry(
            page_size=2,
            window=None,
            full_pages=12,
            swa_pages=0,
            rows=1,
            width=16,
            tree=True,
            states=4,
            tracks=True,
        )
    )
    served = (
        "submit r1 (no session) +1; admit r1; extend r1 +1; decode r1; spec_decode r1 +2 accept 2"
    )
    for command in script(f"{served}; spec_decode r1 +2 accept 2; finish r1 keep 3"):
        system.apply(command)
    assert [len(node.path) for node in system.view().tree.nodes] == [4]


class KeepsLess(TorchKV):
    """Trims at the page boundary below target if window eviction is past target, as SGLang 0.5.20 does."""

    stopped = 0
    kept = None

    def finish(self, command):
        return self._cut(command.request, super().finish(command))

    def retract(self, command):
        return self._cut(command.request, super().retract(command))

    def _cut(self, name, verdict):
        kept = self.kept
        self.kept = None
        return verdict if kept is None else (Choice(name, kv_allocated_len=kept),)

    def _trim(self, request, target):
        floor = self.floor(target)
        if target < request.cursors.swa_evicted_seqlen and floor < target:
            target = self.kept = floor
            self.stopped += 1
        super()._trim(request, target)


def test_keeping_less_conforms_where_nothing_can_be_resumed():
    system = KeepsLess()
    like = Geometry(page_size=4, window=1, full_pages=9, swa_pages=9, rows=2, width=36)
    for seed in range(40):
        if seed % 4 == 3:
            machine = "both"
            tree = True
        else:
            machine = "sessions"
            tree = False
        conforms(system, f"less {seed}", machine, replace(like, tree=tree), Mode.FREE)
    assert system.stopped > 4


def test_keeping_less_is_reported_where_something_can_be_resumed():
    trace = load(REGRESSIONS / "a_turn_whose_window_is_there_is_kept_up_to_target.json")

    class Eager(KeepsLess):
        def _trim(self, request, target):
            self.kept = self.floor(target)
            super()._trim(request, self.kept)

    violation = replay(Eager(), trace).violation
    assert violation is not None and violation.clause == "LEN-2"
    assert violation.clauses[-1] == "OUT-3"
