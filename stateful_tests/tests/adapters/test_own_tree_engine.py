"""A radix tree with rules of its own: the engine conforms, and its faults are named all the same."""

from dataclasses import replace

import pytest

from impl.examples.own_tree_engine import OwnTree, OwnTreeEngine, make
from impl.torch_kv.requests import Slot
from impl.torch_kv.system import TorchKV
from impl.vocabulary import CommandRefused
from reference import radix_tree as radix
from reference.clauses.step import Step
from reference.commands import (
    Admit, Chunk, Command, Decode, Draft, Extend, Freed, Insert, Launch, Mode, Piece, Reason, Refused, Submit,
    UnlockSwa,
)  # fmt: skip
from reference.geometry import PRESETS, Geometry
from reference.state import Cursors
from stateful_tests.check import campaign
from stateful_tests.check.check_plans import plan
from stateful_tests.lockstep.tree_adoption import adopt_tree_shape
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.tests.support.commands import script

PLAN = plan("smoke", presets=["page2"], machines=["both"], examples=40, seed=4)


def test_an_engine_with_another_tree_conforms():
    result = campaign.run(make(), plan("smoke", examples=1))
    assert not result.findings and "tree evicts for room" in str(result.situations)


def test_a_lock_stays_whole_within_the_window_of_settled_tokens():
    insert = Insert("h", (Piece("a", 3),))
    a2 = (Piece("a", 2),)
    prefilled = Submit("r", None, 0, 0, a2), Admit("r"), Extend((Chunk("r", 2),))
    lockstep = Lockstep(make(), Geometry(1, 3, 12, 10, 1, 7, tree=True), Mode.FAITHFUL)
    for command in (*prefilled, insert, Launch((Draft("r", 4, 1),)), insert):
        lockstep.do(command)
    assert lockstep.violation is None


def test_a_new_lock_pins_whole_nodes_of_the_systems_tree():
    """The reference evicts a4, torch b10. So the lock of r1 begins in the node [0, 4) of torch alone, and
    still pins its first half after the split: r2 does not fit."""
    sizes = Geometry(2, 3, 10, 9, 2, 13, tree=True, states=12, tracks=True)
    lockstep = Lockstep(TorchKV("cpu"), sizes, Mode.FAITHFUL)
    for command in script(
        "insert h1 b10; submit r1 (no session) a7; admit r1; insert h1 a4; extend r1 +7; insert h1 a2;"
        "submit r2 (no session) c12; admit r2"
    ):
        lockstep.do(command)
    assert lockstep.do(Extend((Chunk("r2", 12),))) == Refused(Reason.OUT_OF_SWA)
    assert lockstep.violation is None


def test_without_a_window_nothing_is_a_tombstone():
    lockstep = Lockstep(make(), replace(PRESETS["no-swa"], tree=True), Mode.FAITHFUL)
    lockstep.do(Insert("h", (Piece("a", 8),)))
    assert lockstep.violation is None and all(n.node.live for n in radix.nodes(lockstep.state.tree))


class LetsGoTwice(OwnTree):
    def forget_swa_part(self, lock):
        pass


class PinsAPageLess(OwnTree):
    def swa_lock_start(self, node):
        return min(node.end, super().swa_lock_start(node) + self.page_size)


class EvictsWhatIsLocked(OwnTree):
    def full_candidate(self, node):
        return not node.children


class TellsLess(OwnTree):
    def evict(self, full, swa, states=0):
        freed = super().evict(full, swa, states)
        return Freed(max(0, freed.full - 1), freed.swa)


class MatchesLess(OwnTree):
    def match(self, key, full_only=False):
        return super().match(key[: -self.page_size], full_only)


class ForgetsATombstone(OwnTree):
    def first_live_position(self, evicted, end):
        return 0


class KeepsItsOwnSlots(OwnTreeEngine):
    def rename(self, requests, lengths, slots):
        """Rows name what they named."""


class TrimsAPageTooMuch(OwnTreeEngine):
    """Of a later turn: what a first one frees is not distinguished from what its tree has taken."""

    def trim_overshoot(self, request, target):
        later = self.slot_of(request) is not None
        super().trim_overshoot(request, max(0, target - self.page_size) if later else target)


class SweepsTooFar(OwnTreeEngine):
    def eviction_reach(self, cursors, length):
        return super().eviction_reach(cursors, length + 2 * self.page_size)


class ReleasesLessOfASlot(OwnTreeEngine):
    """Of a slot whose first turn has handed pages over, a page stays."""

    def release_pages(self, holder):
        if isinstance(holder, Slot) and holder.cursors.cache_protected_len:
            size = self.page_size
            cursors = holder.cursors
            holder.cursors = cursors._replace(kv_allocated_len=cursors.kv_allocated_len - size)
            self.put(holder, holder.cursors)
        super().release_pages(holder)


class TurnsAwayAndInserts(OwnTreeEngine):
    """A rejected turn takes a row."""

    def submit(self, command):
        try:
            return super().submit(command)
        except CommandRefused:
            if self.store.free_rows:
                self.store.free_rows.pop()
            raise


def _with(tree: type[OwnTree]) -> OwnTreeEngine:
    return type(tree.__name__, (OwnTreeEngine,), {"tree_class": tree})()


@pytest.mark.parametrize(
    "fault, clause",
    [
        (LetsGoTwice, "TREE-6"), (PinsAPageLess, "TREE-6"), (EvictsWhatIsLocked, "TREE-8"),
        (TellsLess, "TREE-10"), (MatchesLess, "TREE-5"), (ForgetsATombstone, "TREE-2"),
        (KeepsItsOwnSlots, "TREE-4"), (SweepsTooFar, "SWA-1"), (TrimsAPageTooMuch, "LEN-2"),
        (ReleasesLessOfASlot, "FREE-1"), (TurnsAwayAndInserts, "OUT-2"),
    ],
)  # fmt: skip
def test_planted_faults_of_the_engine_are_named(fault, clause):
    violation = campaign.first_violation(_with(fault) if issubclass(fault, OwnTree) else fault(), PLAN)
    assert violation is not None and clause in violation[0].clauses, violation


def step_of(*commands: Command) -> Step:
    """Return the last step of a run with pages of two tokens."""
    lockstep = Lockstep(make(), replace(PRESETS["page2"], tree=True), Mode.FREE)
    for command in commands:
        lockstep.do(command)
    step = lockstep.moment().step
    assert step is not None and lockstep.violation is None
    return step


BEGUN = Submit("r", None, 7), Admit("r"), Extend((Chunk("r", 6),))
ENDED = (*BEGUN, Extend((Chunk("r", 1),)), Decode(("r",)))


def follow_cursors(step: Step, rules: dict[str, int], system: dict[str, int]) -> Cursors:
    """r's cursors in the reference, which follows a system, where both have these."""
    request = step.now.request("r")
    request_facts = step.after.requests["r"]
    state = step.now.with_request(request._replace(cursors=request.cursors._replace(**rules)))
    shown = request_facts.cursors._replace(**system)
    requests = step.after.requests | {"r": request_facts._replace(cursors=shown)}
    now = adopt_tree_shape(step.was, state, step.command, step.after._replace(requests=requests))
    cursors = now.request("r").cursors
    # it has moved, and the lock with it
    if cursors.cache_protected_len != rules.get("cache_protected_len"):
        assert len(radix.lock_of(now.tree, "r").key) == cursors.cache_protected_len
    return cursors


@pytest.mark.parametrize(
    "commands, length, taken",
    [
        (BEGUN, 0, True), (BEGUN, 4, True), (BEGUN, 6, True), (BEGUN, 3, False), (BEGUN, 8, False),
        (ENDED, 0, False), (ENDED, 4, True), (ENDED, 6, True), (ENDED, 8, False),
    ],
)  # fmt: skip
def test_the_amount_inserted_is_followed_within_bounds(commands, length, taken):
    step = step_of(*commands)
    here = {"cache_protected_len": 2}
    found = follow_cursors(step, here, {"cache_protected_len": length})
    assert found.cache_protected_len == (length if taken else 2)


@pytest.mark.parametrize("length, followed_to", [(2, 8), (4, 4), (5, 8), (6, 6)])
def test_the_length_of_a_lock_holder_is_followed_within_bounds(length, followed_to):
    step = step_of(*(Insert("h", (Piece("a", end),), 0, True) for end in (4, 8)))
    facts = step.after._replace(tree=step.after.tree._replace(lock_holders={"h": range(length)}))
    now = adopt_tree_shape(step.was, step.now, step.command, facts)
    assert len(radix.lock_of(now.tree, "h").key) == followed_to


def test_a_later_turn_is_outside_of_the_tree():
    first = script("open s; submit q in s +4; admit q; extend q +4; finish q keep 1")
    step = step_of(*first, *script("submit r in s +4; admit r; extend r +4"))
    found = follow_cursors(step, {"cache_protected_len": 4}, {"cache_protected_len": 6})
    assert found.cache_protected_len == 4


@pytest.mark.parametrize("shown", [{}, {"r": None}])
def test_requests_that_a_system_does_not_show_are_not_followed(shown):
    step = step_of(*BEGUN)
    requests = {
        name: step.after.requests[name]._replace(cursors=cursors) for name, cursors in shown.items()
    }
    now = adopt_tree_shape(step.was, step.now, step.command, step.after._replace(requests=requests))
    assert now.requests == step.now.requests


@pytest.mark.parametrize("rounds, given_back", [(0, False), (1, False), (2, True), (3, True)])
def test_pages_behind_a_window_may_be_given_back(rounds, given_back):
    step = step_of(*BEGUN, Extend((Chunk("r", 1),)), *[Decode(("r",))] * rounds)
    tree = step.after.tree
    facts = step.after._replace(
        tree=tree._replace(nodes=[n._replace(swa_locks=0) for n in tree.nodes])
    )
    lock = radix.lock_of(adopt_tree_shape(step.was, step.now, step.command, facts).tree, "r")
    assert (lock.swa_from == len(lock.key) == 6) is given_back


def test_a_lock_pins_no_more_than_its_window():
    tree = step_of(Insert("h", (Piece("a", 8),), 0, chunked=True)).now.tree
    assert radix.lock_of(tree, "h").swa_from == 5


def test_an_unmoved_lock_keeps_its_given_back_pages():
    insert = Insert("h", (Piece("a", 4),), 0, chunked=True)
    tree = step_of(insert, UnlockSwa("h"), insert).now.tree
    assert radix.lock_of(tree, "h").swa_from == 4


@pytest.mark.parametrize(
    "rules, system, want", [(0, 4, 4), (4, 0, 0), (6, 0, 6), (0, 6, 0), (6, 8, 6)]
)
def test_a_window_eviction_is_followed_inside_of_the_prefix_alone(rules, system, want):
    found = follow_cursors(
        step_of(*BEGUN), {"swa_evicted_seqlen": rules}, {"swa_evicted_seqlen": system}
    )
    assert (found.cache_protected_len, found.swa_evicted_seqlen) == (4, want)
