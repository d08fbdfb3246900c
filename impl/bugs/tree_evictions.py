"""Faults in the radix tree: what was used when, evict, and the counters."""

from __future__ import annotations

from impl.bugs.register import bug
from impl.torch_kv.nodes import FULL, Owed, TreeNode
from impl.torch_kv.radix_tree import RadixTree
from reference.commands import Freed


@bug(
    "pr26615",
    "TREE-11",
    "a match refreshes SWA KV all along its path",
    RadixTree.swa_use_start,
    source="#26615",
)
def _(self: RadixTree, length: int) -> int:
    """Hot SWA KV is evicted first. Every node of a matched path counted as just used for SWA, also those far
    behind the window that nobody reads; so they outlived windows that are read. Visible when the SWA pool is
    under pressure after a long match. Fix: only nodes inside the window of its end were used."""
    return 0


@bug("most-recently-used-first", "TREE-11", "eviction starts at the wrong end", RadixTree.rank)
def _(self: RadixTree, moment: int) -> int:
    """What was just used is evicted. The queue is sorted the other way round. Visible when there is a choice.
    Fix: the oldest first."""
    return -moment


@bug("eviction-ignores-locks", "TREE-8", "a locked leaf is evicted", RadixTree.full_candidate)
def _(self: RadixTree, node: TreeNode) -> bool:
    """A running request reads pages that others write. Full eviction takes any leaf. Visible under pressure
    while a prefix is locked. Fix: not where a lock passes through."""
    return not node.children


@bug(
    "swa-eviction-ignores-locks",
    "TREE-8",
    "the window of a running request is evicted",
    RadixTree.swa_candidate,
)
def _(self: RadixTree, node: TreeNode) -> bool:
    """A running request reads padding. SWA eviction takes any live node. Visible under SWA pressure while a
    prefix is locked. Fix: not what a lock needs."""
    return self.window is not None and node.live


@bug("evicted-leaf-keeps-its-swa-pages", "FREE-2", "a leaf goes without its SWA side")
class _LeafKeepsSwa(RadixTree):
    """The SWA pool leaks under pressure on the full one. Full eviction frees the full pages of a leaf alone.
    Visible when a live leaf is evicted. Fix: free both sides."""

    _dropping = False

    def _drop_leaf(self, node: TreeNode, owed: Owed) -> None:
        self._dropping = True
        super()._drop_leaf(node, owed)
        self._dropping = False

    def make_tombstone(self, node: TreeNode, owed: Owed) -> None:
        if self._dropping:
            self._count_live(node, live=False)
        else:
            super().make_tombstone(node, owed)


@bug(
    "swa-eviction-takes-a-leaf-that-is-read",
    "TREE-8",
    "a leaf goes whose full KV is locked",
    RadixTree.outlives_swa,
)
def _(self: RadixTree, node: TreeNode) -> bool:
    """A running request reads pages that others write. Its window has left its prefix and the SWA part of its
    lock has gone; SWA eviction takes the last node of the prefix for a leaf that nobody reads, both sides.
    Visible under SWA pressure. Fix: a leaf that a lock passes through becomes a tombstone."""
    return bool(node.children)


@bug(
    "locked-tombstones-go-with-their-child",
    "TREE-8",
    "a tombstone goes that a lock ends with",
    RadixTree.remains_without_child,
)
def _(self: RadixTree, node: TreeNode) -> bool:
    """A running request reads pages that others write. A tombstone that has lost its last child is taken
    along, for no match would hand it out; but a lock without an SWA part still ends with it. Visible under
    full pressure. Fix: it stays until the lock goes and pressure comes round to it."""
    return node.live or bool(node.children)


@bug(
    "released-swa-is-never-evicted",
    "TREE-10",
    "SWA eviction passes by a leaf whose full KV is locked",
    RadixTree.swa_candidate,
)
def _(self: RadixTree, node: TreeNode) -> bool:
    """Requests are retracted for want of SWA pages that nobody reads. The queue of SWA eviction leaves out
    leaves that a lock passes through, as they could not be deleted. Visible when the SWA part of a lock has
    gone. Fix: they become tombstones."""
    return RadixTree.swa_candidate(self, node) and bool(node.children or not node.locks[FULL])


@bug("dead-leaves-stay", "TREE-11", "a tombstone outlives its last child", RadixTree.remains_without_child)
def _(self: RadixTree, node: TreeNode) -> bool:
    """The tree fills with prefixes that no match hands out. When the last node below a tombstone is evicted
    the tombstone stays, and is in the way until full pressure comes round to it. Visible when an inner node
    is a tombstone and its child is evicted. Fix: it goes with its child."""
    return True


@bug(
    "eviction-stops-a-page-short",
    "TREE-10",
    "eviction frees a page less than requested",
    RadixTree.evict,
)
def _(self: RadixTree, full: int, swa: int, states: int = 0) -> Freed:
    """The caller fails to allocate. The loop ends when less than a page is missing. Visible when more than
    one page is requested. Fix: continue until all of it is free."""
    return RadixTree.evict(self, full - self.page_size, swa - self.page_size, states)


@bug(
    "eviction-reports-the-amount-requested",
    "TREE-10",
    "eviction says that it freed the amount requested",
    RadixTree.evict,
)
def _(self: RadixTree, full: int, swa: int, states: int = 0) -> Freed:
    """A batch is launched into a pool that is full. Eviction reports the size of the request instead of what
    it found to free. Visible when less is evictable, or a node is larger than needed. Fix: report what was
    freed."""
    RadixTree.evict(self, full, swa, states)
    return Freed(full, swa, states)
