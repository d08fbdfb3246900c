"""Faults in the radix tree: what was used when, evict, and the counters."""

from __future__ import annotations

from impl.bugs.register import bug
from impl.torch_kv.nodes import Owed, TreeNode
from impl.torch_kv.tree import RadixTree
from reference.commands import Freed


@bug("pr26615", "TREE-11", "a match refreshes SWA KV all along its path", source="#26615")
class _WholePathRefresh(RadixTree):
    """Hot SWA KV is evicted first. Every node of a matched path counted as just used for SWA, also those far
    behind the window that nobody reads; so they outlived windows that are read. Visible when the SWA pool is
    under pressure after a long match. Fix: only nodes inside the window of its end were used."""

    def refresh_from(self, length: int) -> int:  # noqa: ARG002
        return 0


@bug("most-recently-used-first", "TREE-11", "eviction starts at the wrong end")
class _MostRecentlyUsed(RadixTree):
    """What was just used is evicted. The queue is sorted the other way round. Visible when there is a choice.
    Fix: the oldest first."""

    def rank(self, moment: int) -> int:
        return -moment


@bug("eviction-ignores-locks", "TREE-8", "a locked leaf is evicted")
class _EvictsLocked(RadixTree):
    """A running request reads pages that others write. Full eviction takes any leaf. Visible under pressure
    while a prefix is locked. Fix: not where a lock passes through."""

    def full_candidate(self, node: TreeNode) -> bool:
        return not node.children


@bug("swa-eviction-ignores-locks", "TREE-8", "the window of a running request is evicted")
class _EvictsLockedSwa(RadixTree):
    """A running request reads padding. SWA eviction takes any live node. Visible under SWA pressure while a
    prefix is locked. Fix: not what a lock needs."""

    def swa_candidate(self, node: TreeNode) -> bool:
        return self.window is not None and node.live


@bug("evicted-leaf-keeps-its-swa-pages", "FREE-2", "a leaf goes without its SWA side")
class _LeafKeepsSwa(RadixTree):
    """The SWA pool leaks under pressure on the full one. Full eviction frees the full pages of a leaf alone.
    Visible when a live leaf is evicted. Fix: free both sides."""

    _dropping = False

    def _drop(self, node: TreeNode, owed: Owed) -> None:
        self._dropping = True
        super()._drop(node, owed)
        self._dropping = False

    def entomb(self, node: TreeNode, owed: Owed) -> None:
        if self._dropping:
            self._count_live(node, False)
        else:
            super().entomb(node, owed)


@bug("dead-leaves-stay", "TREE-11", "a tombstone outlives its last child")
class _DeadLeavesStay(RadixTree):
    """The tree fills with prefixes that no match hands out. When the last node below a tombstone is evicted
    the tombstone stays, and is in the way until full pressure comes round to it. Visible when an inner node
    is a tombstone and its child is evicted. Fix: it goes with its child."""

    def stays(self, node: TreeNode) -> bool:  # noqa: ARG002
        return True


@bug("eviction-stops-a-page-short", "TREE-10", "eviction frees a page less than was asked")
class _StopsShort(RadixTree):
    """Whoever asked fails to allocate. The loop ends when less than a page is missing. Visible when more than
    one page is asked for. Fix: go on until all of it is there."""

    def evict(self, full: int, swa: int) -> Freed:
        return super().evict(full - self.page_size, swa - self.page_size)


@bug("eviction-reports-what-was-asked", "TREE-10", "eviction says that it freed what was asked")
class _ReportsAsked(RadixTree):
    """A batch is launched into a pool that is full. Eviction reports the size of the request instead of what
    it found to free. Visible when less can be had, or a node is larger than what is needed. Fix: report what
    was freed."""

    def evict(self, full: int, swa: int) -> Freed:
        super().evict(full, swa)
        return Freed(full, swa)
