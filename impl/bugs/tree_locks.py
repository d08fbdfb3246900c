"""Faults in the radix tree: lock, unlock, split and match."""

from __future__ import annotations

from collections.abc import Iterator

from impl.bugs.register import bug
from impl.torch_kv.nodes import Key, MatchedPrefix, NodeLock, TreeNode
from impl.torch_kv.state_slots import StateSlots
from impl.torch_kv.store import KVStore
from impl.torch_kv.radix_tree import RadixTree


# -- lock, unlock and split -----------------------------------------------------------------------


@bug("lock-pins-swa-to-the-root", "TREE-6", "a lock pins SWA KV all the way up", RadixTree.swa_lock_start)
def _(self: RadixTree, node: TreeNode) -> int:
    """The SWA pool fills early. A lock pins the SWA KV of the whole path, as it does with full KV, instead of
    stopping where a window is covered. Visible when the path has more than one node. Fix: stop there, and
    remember where."""
    return 0 if self.window is not None else RadixTree.swa_lock_start(self, node)


@bug(
    "lock-stops-a-node-early",
    "TREE-6",
    "a lock pins the last node's SWA KV alone",
    RadixTree.swa_lock_start,
)
def _(self: RadixTree, node: TreeNode) -> int:
    """A running request loses part of its window under SWA pressure. The lock pins the last node, however
    short, and calls that a window. Visible when the last node is shorter than the window. Fix: go up until a
    window is covered."""
    return max(RadixTree.swa_lock_start(self, node), node.start)


@bug(
    "unlock-forgets-the-top",
    "TREE-6",
    "unlock stops below the first node of the path",
    RadixTree.nodes_to_unlock,
)
def _(self: RadixTree, lock: NodeLock) -> Iterator[TreeNode]:
    """Prefixes near the root are never evicted. The walk of unlock ends when the parent is below the root,
    one node before that of lock. Visible at the first unlock. Fix: walk to the root."""
    return iter(list(RadixTree.nodes_to_unlock(self, lock))[:-1])


@bug(
    "unlock-finds-the-window-again",
    "TREE-6",
    "unlock looks for where lock stopped",
    RadixTree.swa_unlock_start,
)
def _(self: RadixTree, lock: NodeLock) -> int:
    """SWA KV stays pinned for ever. Unlock walks up until a window is covered, as lock did; but where the
    topmost pinned node was split meanwhile it stops a node too early. Visible when a lock pins a node longer
    than it needs and that is split. Fix: the lock remembers where it stopped."""
    return self.swa_lock_start(lock.node)


@bug(
    "split-forgets-locks",
    "TREE-6",
    "the upper half of a split node is not locked",
    RadixTree.inherit_locks_and_use,
)
def _(self: RadixTree, head: TreeNode, tail: TreeNode) -> None:
    """A prefix that a request reads is evicted. The node that a split puts on top starts with counters of 0.
    Visible when a locked node is split. Fix: both halves have the counters of the whole."""
    head.used = list(tail.used)


@bug("split-forgets-use", "TREE-11", "a split node counts as never used", RadixTree.inherit_locks_and_use)
def _(self: RadixTree, head: TreeNode, tail: TreeNode) -> None:
    """A hot prefix goes first. Both halves of a split node start with the oldest moment there is. Visible
    when a node is split by a key that parts from it, and something is evicted. Fix: both halves were used
    when the whole was."""
    head.locks = list(tail.locks)
    tail.used = [0, 0]
    self._queue(tail)


# -- locks with parts -----------------------------------------------------------------------------


@bug(
    "swa-part-given-back-twice",
    "TREE-6",
    "the end of a lock gives its SWA part back again",
    RadixTree.forget_swa_part,
)
def _(self: RadixTree, lock: NodeLock) -> None:
    """A window that somebody else reads is evicted; alone, the counter falls below zero and an assertion ends
    the server. The SWA part of a lock goes back as soon as the window has left the prefix, and again with the
    lock, for nobody has noted that it has gone: so it was with sessions in SGLang up to 0.5.19, with
    SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW. Visible when such a lock goes. Fix: the lock knows what it
    still has."""


@bug("locks-share-a-receipt", "TREE-6", "a temporary lock is given back by the record of another")
class _SharedReceipt(RadixTree):
    """SWA KV stays pinned for ever, or a window that is read goes. What a lock has pinned is recorded once
    for its node, where a lock that is taken beside it overwrites that; whoever goes gives back what the
    latest has. Visible when of two locks on a node one has no SWA part. Fix: each lock has its own
    receipt."""

    def __init__(
        self, store: KVStore, window: int | None, states: StateSlots | None = None
    ) -> None:
        super().__init__(store, window, states)
        self._latest: dict[TreeNode, NodeLock] = {}

    def lock(self, node: TreeNode, full_only: bool = False) -> NodeLock:
        lock = self._latest[node] = super().lock(node, full_only)
        return lock

    def swa_unlock_start(self, lock: NodeLock) -> int:
        return self._latest[lock.node].swa_from


@bug(
    "unlock-gives-back-what-lock-skipped",
    "TREE-6",
    "a lock on full KV alone gives back SWA KV",
    RadixTree.lock,
)
def _(self: RadixTree, node: TreeNode, full_only: bool = False) -> NodeLock:
    """A window that a request reads is evicted. Who reads full KV alone locks no SWA KV, so that it may pass
    over tombstones; its unlock walks up a window all the same. Visible when such a lock goes. Fix: what a
    lock has skipped its unlock skips."""
    lock = RadixTree.lock(self, node, full_only)
    if full_only:
        lock.swa_from = self.swa_lock_start(node)
    return lock


@bug(
    "lock-on-full-kv-wants-a-window",
    "TREE-5",
    "a match for full KV alone stops at a tombstone",
    RadixTree.match,
)
def _(self: RadixTree, key: Key, full_only: bool = False) -> MatchedPrefix:
    """A backup copies too little, and the next visitor computes the rest again. Who reads full KV alone is
    given what a request could resume from. Visible when a prefix ends behind a tombstone. Fix: SWA KV is no
    matter there."""
    return RadixTree.match(self, key)


# -- match ----------------------------------------------------------------------------------------


@bug(
    "match-ignores-the-window",
    "TREE-5",
    "a match hands out what full attention could read",
    RadixTree.usable_count,
)
def _(self: RadixTree, path: list[TreeNode]) -> int:
    """The first token of a request reads a window of padding. Match follows the key as far as full KV goes
    and does not look for SWA KV. Visible when a path ends with a tombstone. Fix: the longest prefix that has
    a live window behind its end."""
    return len(path)


@bug(
    "match-wants-a-page-more",
    "TREE-5",
    "a match wants more than a window of live SWA KV",
    RadixTree.usable_count,
)
def _(self: RadixTree, path: list[TreeNode]) -> int:
    """Cached prefixes are computed again. The live run behind the end must exceed the window instead of
    covering it. Visible when exactly one window is live past a tombstone. Fix: at least the window."""
    best = 0
    run = 0  # live tokens since the last tombstone
    whole = True  # no tombstone yet
    for number, node in enumerate(path, 1):
        run = run + len(node.key) if node.live else 0
        whole = whole and node.live
        if self.window is None or whole or run > self.window:
            best = number
    return best


@bug(
    "match-adds-up-live-runs",
    "TREE-5",
    "a match counts SWA KV on both sides of a tombstone",
    RadixTree.usable_count,
)
def _(self: RadixTree, path: list[TreeNode]) -> int:
    """A window with a hole is resumed. The live tokens of a path are added up without starting again at a
    tombstone. Visible when a tombstone lies inside the window. Fix: start from 0 at each."""
    best = run = 0
    for number, node in enumerate(path, 1):
        run += len(node.key) if node.live else 0
        if self.window is None or run == node.end or (run >= self.window and node.live):
            best = number
    return best
