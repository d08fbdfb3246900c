"""Faults that show in rare places alone, and how soon a check finds them: ci/README.md has five seeds."""

from dataclasses import replace

import pytest

from impl.torch_kv.nodes import FULL, SWA
from impl.torch_kv.system import TorchKV
from impl.torch_kv.radix_tree import RadixTree
from reference.commands import CheckBusy
from stateful_tests.check.campaign import first_violation
from stateful_tests.check.check_plans import plan
from stateful_tests.tests.support.night import NIGHT


class ClampsDrafts(TorchKV):
    """Drafts past the row's width are cut where the accepted tokens still fit."""

    def spec_decode(self, command):
        lanes = []
        for lane in command.lanes:
            request = self.requests.get(lane.request)
            room = (
                self.width - request.cursors.kv_committed_len
                if request is not None
                else lane.allocate
            )
            lanes.append(replace(lane, allocate=max(lane.accept, min(lane.allocate, room))))
        return super().spec_decode(replace(command, lanes=tuple(lanes)))


class WindowNeverBeginsAtTheStart(TorchKV):
    """A window that reaches back to the first token counts as one that does not."""

    def window_live(self, evicted, position):
        if self.window is None or position == 0:
            return True
        return evicted <= max(1, position - self.window)


class RemembersSessions(TorchKV):
    """A reset leaves the sessions of before."""

    def reset(self, geometry):
        sessions = dict(self.sessions)
        super().reset(geometry)
        self.sessions.update(sessions)


class WritesNoEntries(TorchKV):
    """A busy check at level 2 is one at level 1."""

    def check_busy(self, command):
        return super().check_busy(CheckBusy(1) if command.level == 2 else command)


class KeepsASharedLock(TorchKV):
    """A close leaves its lock where others have locked the same nodes."""

    def close_now(self, session):
        lock = self.locks.get(session.name)
        shared = lock is not None and any(node.locks[0] > 1 for node in self.tree.nodes_to_unlock(lock))
        kept_lock = self.locks.pop(session.name) if shared else None
        super().close_now(session)
        if kept_lock is not None:
            self.locks[session.name] = kept_lock


class EvictsForWhoHasLostItsWindow(TorchKV):
    """A round makes room before it looks at the windows, and is refused all the same."""

    def decode(self, command):
        known_requests = [self.requests[name] for name in command.requests if name in self.requests]
        if (
            known_requests
            and self.window_lost(known_requests)
            and self.tree is not None
            and not self.store.full.available
        ):
            self.tree.evict(self.page_size, 0)
        return super().decode(command)


class ForgetsTheTailWithoutAWindow(TorchKV):
    """Without a window a retract leaves what was allocated ahead."""

    def drop_overallocated(self, request, target):
        if self.window is not None:
            super().drop_overallocated(request, target)


class CountsComputedTokens(TorchKV):
    """With results in flight the window is that of the last token computed, not of the last confirmed."""

    def window_lost(self, requests):
        computed = [(r.cursors, r.cursors.kv_committed_len - r.rejected) for r in requests]
        return not all(self.window_live(self.evicted_end(cursors), end) for cursors, end in computed)


class ResumesInWholePages(TorchKV):
    """A resume looks for its window from the end of the prefix's page: too late for a smaller window."""

    def window_live(self, evicted, position):
        page_end = position if evicted % self.page_size == 0 else self.ceil(position)
        return super().window_live(evicted, page_end)


class ForgetsWhenASplitPrefixWasUsed(TorchKV):
    """A split leaves the prefix as if nobody had used it yet."""

    class tree_class(RadixTree):  # noqa: N801
        def inherit_locks_and_use(self, head, tail):
            super().inherit_locks_and_use(head, tail)
            head.used = [0, 0]


class UnlocksByTheWindow(TorchKV):
    """Where a node is locked for full KV alone as well, an unlock looks again for where its window began."""

    class tree_class(RadixTree):  # noqa: N801
        def swa_unlock_start(self, lock):
            nodes = [node for node in self._upward(lock.node) if node.end > lock.swa_from]
            mixed = any(node.locks[FULL] > node.locks[SWA] >= 1 for node in nodes)
            return self.swa_lock_start(lock.node) if mixed else super().swa_unlock_start(lock)


class LosesWhatABatchRecovers(TorchKV):
    """Full pages of a tombstone that an entry recovers are lost where one before it has freed duplicates."""

    class tree_class(RadixTree):  # noqa: N801
        freed = None

        def free_duplicate(self, full, swa, owed):
            super().free_duplicate(full, swa, owed)
            if self.freed is not None:
                self.freed |= full.numel() > 0

        def recover(self, node, slots, owed):
            had = len(owed.full)
            super().recover(node, slots, owed)
            if self.freed:
                del owed.full[had:]

    def insert_unfinished(self, requests):
        if self.tree is not None:
            self.tree.freed = False
        super().insert_unfinished(requests)
        if self.tree is not None:
            self.tree.freed = None


class KeepsTheTailOfASecondRetract(TorchKV):
    """A first turn that is retracted again with results in flight keeps what was allocated ahead."""

    def skip_results(self, request):
        session = request.session
        again = session is not None and session.slot is not None and not session.history
        self.keeps_its_tail = again and bool(request.in_flight)
        super().skip_results(request)

    def drop_overallocated(self, request, target):
        if not self.keeps_its_tail:
            super().drop_overallocated(request, target)


class ResumesFromRAsEvicted(TorchKV):
    """A resume that falls back to the tree's prefix keeps swa_evicted_seqlen."""

    def free_tail(self, slot, prefix):
        was = slot.cursors
        super().free_tail(slot, prefix)
        if was.kv_committed_len > prefix == was.cache_protected_len > 0:
            self.put(slot, slot.cursors._replace(swa_evicted_seqlen=was.swa_evicted_seqlen))


# The clause that names each with seed 0, and the commands before that at most.
RARE: dict[type[TorchKV], tuple[str, int]] = {
    ClampsDrafts: ("OUT-1", 2_000), WindowNeverBeginsAtTheStart: ("OUT-1", 1_000),
    RemembersSessions: ("OUT-1", 1_000), WritesNoEntries: ("CHK-2", 1_000),
    KeepsASharedLock: ("TREE-6", 2_000), EvictsForWhoHasLostItsWindow: ("OUT-2", 20_000),
    ForgetsTheTailWithoutAWindow: ("LEN-2", 2_000), CountsComputedTokens: ("OUT-1", 2_000),
    ResumesInWholePages: ("SWA-2", 2_000), ForgetsWhenASplitPrefixWasUsed: ("TREE-11", 2_000),
    UnlocksByTheWindow: ("TREE-6", 10_000), LosesWhatABatchRecovers: ("FREE-1", 10_000),
    KeepsTheTailOfASecondRetract: ("LEN-2", 10_000), ResumesFromRAsEvicted: ("LEN-3", 4_000),
}  # fmt: skip


@pytest.mark.parametrize("fault", RARE)
def test_a_check_of_tier_pr_finds_the_rare_fault(fault):
    clause, most = RARE[fault]
    if most > 2_000 and not NIGHT:
        pytest.skip("at night: it takes many commands")
    violation = first_violation(fault(), plan("pr", seed=0))
    assert violation is not None and violation[0].clause == clause and violation[1] <= most, violation
