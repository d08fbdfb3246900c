"""Faults in the radix tree: lock, unlock, split and match."""

from __future__ import annotations

from collections.abc import Iterator

from impl.bugs.register import tree_bug
from impl.torch_kv.nodes import FULL, SWA, Lock, Node
from impl.torch_kv.tree import RadixTree


class Trusting(RadixTree):
    """Locks what it is told to: the fault is to show in the state, not as an exception."""

    def lock(self, node: Node) -> Lock:
        swa_from = self.swa_from(node)
        for above in self._upward(node):
            self._pin(above, FULL)
            if above.end > swa_from:
                self._pin(above, SWA)
        return Lock(node, swa_from)


# Lock, unlock and split.


@tree_bug(
    "lock-pins-swa-to-the-root",
    "a lock pins SWA KV all the way up",
    clause="TREE-6",
    story="""The SWA pool fills early. A lock pins the SWA KV of the whole path, as it does with full KV,
    instead of stopping where a window is covered. Visible when the path has more than one node. Fix: stop
    there, and remember where.""",
)
class _LocksWholePath(Trusting):
    def swa_from(self, node: Node) -> int:
        return 0 if self.window is not None else super().swa_from(node)


@tree_bug(
    "lock-stops-a-node-early",
    "a lock pins the last node's SWA KV alone",
    clause="TREE-6",
    story="""A running request loses part of its window under SWA pressure. The lock pins the last node,
    however short, and calls that a window. Visible when the last node is shorter than the window. Fix: go
    up until a window is covered.""",
)
class _LockStopsEarly(RadixTree):
    def swa_from(self, node: Node) -> int:
        return max(super().swa_from(node), node.start)


@tree_bug(
    "unlock-forgets-the-top",
    "unlock stops below the first node of the path",
    clause="TREE-6",
    story="""Prefixes near the root are never evicted. The walk of unlock ends when the parent is below the
    root, one node before that of lock. Visible at the first unlock. Fix: walk to the root.""",
)
class _UnlockStopsEarly(RadixTree):
    def unlocked(self, lock: Lock) -> Iterator[Node]:
        return iter(list(super().unlocked(lock))[:-1])


@tree_bug(
    "unlock-finds-the-window-again",
    "unlock looks for where lock stopped",
    clause="TREE-6",
    story="""SWA KV stays pinned for ever. Unlock walks up until a window is covered, as lock did; but where
    the topmost pinned node was split meanwhile it stops a node too early. Visible when a lock pins a node
    longer than it needs and that is split. Fix: the lock remembers where it stopped.""",
)
class _UnlockFindsAgain(RadixTree):
    def unlock_from(self, lock: Lock) -> int:
        return self.swa_from(lock.node)


@tree_bug(
    "split-forgets-locks",
    "the upper half of a split node is not locked",
    clause="TREE-6",
    story="""A prefix that a request reads is evicted. The node that a split puts on top starts with
    counters of 0. Visible when a locked node is split. Fix: both halves have the counters of the whole.""",
)
class _SplitForgetsLocks(RadixTree):
    def inherit(self, head: Node, tail: Node) -> None:
        head.used = list(tail.used)


@tree_bug(
    "split-forgets-use",
    "a split node counts as never used",
    clause="TREE-11",
    story="""A hot prefix goes first. Both halves of a split node start with the oldest moment there is.
    Visible when a node is split by a key that parts from it, and something is evicted. Fix: both halves
    were used when the whole was.""",
)
class _SplitForgetsUse(RadixTree):
    def inherit(self, head: Node, tail: Node) -> None:
        head.locks = list(tail.locks)
        tail.used = [0, 0]
        self._queue(tail)


# Match.


@tree_bug(
    "match-ignores-the-window",
    "a match hands out what full attention could read",
    clause="TREE-5",
    story="""The first token of a request reads a window of padding. Match follows the key as far as full KV
    goes and does not look for SWA KV. Visible when a path ends with a tombstone. Fix: the longest prefix
    that has a live window behind its end.""",
)
class _IgnoresWindow(Trusting):
    def usable(self, path: list[Node]) -> int:
        return len(path)


@tree_bug(
    "match-wants-a-page-more",
    "a match wants more than a window of live SWA KV",
    clause="TREE-5",
    story="""Cached prefixes are computed again. The live run behind the end must exceed the window instead
    of covering it. Visible when exactly one window is live past a tombstone. Fix: at least the window.""",
)
class _WantsMore(RadixTree):
    def usable(self, path: list[Node]) -> int:
        best, run, whole = 0, 0, True
        for number, node in enumerate(path, 1):
            run = run + len(node.key) if node.live else 0
            whole = whole and node.live
            if self.window is None or whole or run > self.window:
                best = number
        return best


@tree_bug(
    "match-adds-up-live-runs",
    "a match counts SWA KV on both sides of a tombstone",
    clause="TREE-5",
    story="""A window with a hole is resumed. The live tokens of a path are added up without starting again
    at a tombstone. Visible when a tombstone lies inside the window. Fix: start from 0 at each.""",
)
class _AddsUp(Trusting):
    def usable(self, path: list[Node]) -> int:
        best = run = 0
        for number, node in enumerate(path, 1):
            run += len(node.key) if node.live else 0
            if self.window is None or run == node.end or (run >= self.window and node.live):
                best = number
        return best
