"""Faults in the radix tree: what was used when, evict, and the counters."""

from __future__ import annotations

from impl.bugs.register import tree_bug
from impl.torch_kv.nodes import Freed, Node, Owed
from impl.torch_kv.tree import RadixTree


@tree_bug(
    "pr26615",
    "a match refreshes SWA KV all along its path",
    clause="TREE-11",
    source="#26615",
    story="""Hot SWA KV is evicted first. Every node of a matched path counted as just used for SWA, also
    those far behind the window that nobody reads; so they outlived windows that are read. Visible when the
    SWA pool is under pressure after a long match. Fix: only nodes inside the window of its end were
    used.""",
)
class _WholePathRefresh(RadixTree):
    def refresh_from(self, length: int) -> int:  # noqa: ARG002
        return 0


@tree_bug(
    "most-recently-used-first",
    "eviction starts at the wrong end",
    clause="TREE-11",
    story="""What was just used is evicted. The queue is sorted the other way round. Visible when there is a
    choice. Fix: the oldest first.""",
)
class _MostRecentlyUsed(RadixTree):
    def rank(self, moment: int) -> int:
        return -moment


@tree_bug(
    "eviction-ignores-locks",
    "a locked leaf is evicted",
    clause="TREE-8",
    story="""A running request reads pages that others write. Full eviction takes any leaf. Visible under
    pressure while a prefix is locked. Fix: not where a lock passes through.""",
)
class _EvictsLocked(RadixTree):
    def full_candidate(self, node: Node) -> bool:
        return not node.children


@tree_bug(
    "swa-eviction-ignores-locks",
    "the window of a running request is evicted",
    clause="TREE-8",
    story="""A running request reads padding. SWA eviction takes any live node. Visible under SWA pressure
    while a prefix is locked. Fix: not what a lock needs.""",
)
class _EvictsLockedSwa(RadixTree):
    def swa_candidate(self, node: Node) -> bool:
        return self.window is not None and node.live


@tree_bug(
    "evicted-leaf-keeps-its-swa-pages",
    "a leaf goes without its SWA side",
    clause="FREE-2",
    story="""The SWA pool leaks under pressure on the full one. Full eviction frees the full pages of a leaf
    alone. Visible when a live leaf is evicted. Fix: free both sides.""",
)
class _LeafKeepsSwa(RadixTree):
    _dropping = False

    def _drop(self, node: Node, owed: Owed) -> None:
        self._dropping = True
        super()._drop(node, owed)
        self._dropping = False

    def entomb(self, node: Node, owed: Owed) -> None:
        if self._dropping:
            self._count_live(node, False)
        else:
            super().entomb(node, owed)


@tree_bug(
    "dead-leaves-stay",
    "a tombstone outlives its last child",
    clause="TREE-11",
    story="""The tree fills with prefixes that no match hands out. When the last node below a tombstone is
    evicted the tombstone stays, and is in the way until full pressure comes round to it. Visible when an
    inner node is a tombstone and its child is evicted. Fix: it goes with its child.""",
)
class _DeadLeavesStay(RadixTree):
    def stays(self, node: Node) -> bool:  # noqa: ARG002
        return True


@tree_bug(
    "eviction-stops-a-page-short",
    "eviction frees a page less than was asked",
    clause="TREE-10",
    story="""Whoever asked fails to allocate. The loop ends when less than a page is missing. Visible when
    more than one page is asked for. Fix: go on until all of it is there.""",
)
class _StopsShort(RadixTree):
    def evict(self, full: int, swa: int) -> Freed:
        return super().evict(full - self.page_size, swa - self.page_size)


@tree_bug(
    "eviction-reports-what-was-asked",
    "eviction says that it freed what was asked",
    clause="TREE-10",
    story="""A batch is launched into a pool that is full. Eviction reports the size of the request instead
    of what it found to free. Visible when less can be had, or a node is larger than what is needed. Fix:
    report what was freed.""",
)
class _ReportsAsked(RadixTree):
    def evict(self, full: int, swa: int) -> Freed:
        super().evict(full, swa)
        return Freed(full, swa)
