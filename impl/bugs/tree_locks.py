"""Faults in the radix tree: lock, unlock, split and match."""

from __future__ import annotations

from collections.abc import Iterator

from impl.bugs.register import bug
from impl.torch_kv.nodes import Key, MatchedPrefix, NodeLock, TreeNode
from impl.torch_kv.store import KVStore
from impl.torch_kv.tree import RadixTree


# Lock, unlock and split.


@bug("lock-pins-swa-to-the-root", "TREE-6", "a lock pins SWA KV all the way up")
class _LocksWholePath(RadixTree):
    """The SWA pool fills early. A lock pins the SWA KV of the whole path, as it does with full KV, instead of
    stopping where a window is covered. Visible when the path has more than one node. Fix: stop there, and
    remember where."""

    def swa_from(self, node: TreeNode) -> int:
        return 0 if self.window is not None else super().swa_from(node)


@bug("lock-stops-a-node-early", "TREE-6", "a lock pins the last node's SWA KV alone")
class _LockStopsEarly(RadixTree):
    """A running request loses part of its window under SWA pressure. The lock pins the last node, however
    short, and calls that a window. Visible when the last node is shorter than the window. Fix: go up until a
    window is covered."""

    def swa_from(self, node: TreeNode) -> int:
        return max(super().swa_from(node), node.start)


@bug("unlock-forgets-the-top", "TREE-6", "unlock stops below the first node of the path")
class _UnlockStopsEarly(RadixTree):
    """Prefixes near the root are never evicted. The walk of unlock ends when the parent is below the root,
    one node before that of lock. Visible at the first unlock. Fix: walk to the root."""

    def unlocked(self, lock: NodeLock) -> Iterator[TreeNode]:
        return iter(list(super().unlocked(lock))[:-1])


@bug("unlock-finds-the-window-again", "TREE-6", "unlock looks for where lock stopped")
class _UnlockFindsAgain(RadixTree):
    """SWA KV stays pinned for ever. Unlock walks up until a window is covered, as lock did; but where the
    topmost pinned node was split meanwhile it stops a node too early. Visible when a lock pins a node longer
    than it needs and that is split. Fix: the lock remembers where it stopped."""

    def unlock_from(self, lock: NodeLock) -> int:
        return self.swa_from(lock.node)


@bug("split-forgets-locks", "TREE-6", "the upper half of a split node is not locked")
class _SplitForgetsLocks(RadixTree):
    """A prefix that a request reads is evicted. The node that a split puts on top starts with counters of 0.
    Visible when a locked node is split. Fix: both halves have the counters of the whole."""

    def inherit(self, head: TreeNode, tail: TreeNode) -> None:
        head.used = list(tail.used)


@bug("split-forgets-use", "TREE-11", "a split node counts as never used")
class _SplitForgetsUse(RadixTree):
    """A hot prefix goes first. Both halves of a split node start with the oldest moment there is. Visible
    when a node is split by a key that parts from it, and something is evicted. Fix: both halves were used
    when the whole was."""

    def inherit(self, head: TreeNode, tail: TreeNode) -> None:
        head.locks = list(tail.locks)
        tail.used = [0, 0]
        self._queue(tail)


# Locks with parts.


@bug("swa-part-given-back-twice", "TREE-6", "the end of a lock gives its SWA part back again")
class _SwaPartTwice(RadixTree):
    """A window that somebody else reads is evicted; alone, the counter falls below zero and an assertion ends
    the server. The SWA part of a lock goes back as soon as the window has left the prefix, and again with the
    lock, for nobody has noted that it has gone: so it was with sessions in SGLang up to 0.5.19, with
    SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW. Visible when such a lock goes. Fix: the lock knows what it
    still has."""

    def swa_given_back(self, lock: NodeLock) -> None:
        pass


@bug("locks-share-a-receipt", "TREE-6", "a temporary lock is given back by the record of another")
class _SharedReceipt(RadixTree):
    """SWA KV stays pinned for ever, or a window that is read goes. What a lock has pinned is recorded once
    for its node, where a lock that is taken beside it overwrites that; whoever goes gives back what the
    latest has. Visible when of two locks on a node one has no SWA part. Fix: each lock has its own
    receipt."""

    def __init__(self, store: KVStore, window: int | None) -> None:
        super().__init__(store, window)
        self._latest: dict[TreeNode, NodeLock] = {}

    def lock(self, node: TreeNode, full_only: bool = False) -> NodeLock:
        lock = self._latest[node] = super().lock(node, full_only)
        return lock

    def unlock_from(self, lock: NodeLock) -> int:
        return self._latest[lock.node].swa_from


@bug("unlock-gives-back-what-lock-skipped", "TREE-6", "a lock on full KV alone gives back SWA KV")
class _GivesBackSkipped(RadixTree):
    """A window that a request reads is evicted. Who reads full KV alone locks no SWA KV, so that it may pass
    over tombstones; its unlock walks up a window all the same. Visible when such a lock goes. Fix: what a
    lock has skipped its unlock skips."""

    def lock(self, node: TreeNode, full_only: bool = False) -> NodeLock:
        lock = super().lock(node, full_only)
        if full_only:
            lock.swa_from = self.swa_from(node)
        return lock


@bug("lock-on-full-kv-wants-a-window", "TREE-5", "a match for full KV alone stops at a tombstone")
class _WantsWindow(RadixTree):
    """A backup copies too little, and the next visitor computes the rest again. Who reads full KV alone is
    given what a request could resume from. Visible when a prefix ends behind a tombstone. Fix: SWA KV is no
    matter there."""

    def match(self, key: Key, full_only: bool = False) -> MatchedPrefix:  # noqa: ARG002
        return super().match(key)


# Match.


@bug("match-ignores-the-window", "TREE-5", "a match hands out what full attention could read")
class _IgnoresWindow(RadixTree):
    """The first token of a request reads a window of padding. Match follows the key as far as full KV goes
    and does not look for SWA KV. Visible when a path ends with a tombstone. Fix: the longest prefix that has
    a live window behind its end."""

    def usable(self, path: list[TreeNode]) -> int:
        return len(path)


@bug("match-wants-a-page-more", "TREE-5", "a match wants more than a window of live SWA KV")
class _WantsMore(RadixTree):
    """Cached prefixes are computed again. The live run behind the end must exceed the window instead of
    covering it. Visible when exactly one window is live past a tombstone. Fix: at least the window."""

    def usable(self, path: list[TreeNode]) -> int:
        best, run, whole = 0, 0, True
        for number, node in enumerate(path, 1):
            run = run + len(node.key) if node.live else 0
            whole = whole and node.live
            if self.window is None or whole or run > self.window:
                best = number
        return best


@bug("match-adds-up-live-runs", "TREE-5", "a match counts SWA KV on both sides of a tombstone")
class _AddsUp(RadixTree):
    """A window with a hole is resumed. The live tokens of a path are added up without starting again at a
    tombstone. Visible when a tombstone lies inside the window. Fix: start from 0 at each."""

    def usable(self, path: list[TreeNode]) -> int:
        best = run = 0
        for number, node in enumerate(path, 1):
            run += len(node.key) if node.live else 0
            if self.window is None or run == node.end or (run >= self.window and node.live):
                best = number
        return best
