"""Faults in the radix tree: insert, split, recovery, lock, unlock, match, evict, and its counters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from impl.bugs.register import tree_bug
from impl.torch_kv.tree import FULL, SWA, Freed, Inserted, Key, Lock, Node, Owed, RadixTree

_EVERYTHING = 1 << 30  # tokens


class Trusting(RadixTree):
    """Locks what it is told to: the fault is to show in the state, not as an exception."""

    def lock(self, node: Node) -> Lock:
        swa_from = self.swa_from(node)
        for above in self._upward(node):
            self._pin(above, FULL)
            if above.end > swa_from:
                self._pin(above, SWA)
        return Lock(node, swa_from)


# Insert.


@tree_bug(
    "pr26919",
    "a fresh leaf is as long as it comes",
    clause="TREE-7",
    source="#26919",
    story="""The SWA pool fills early and requests are retracted. A lock pins nodes whole, and a prompt of
    thousands of tokens was one leaf: a request that needs one window pinned all of it. Visible as soon as a
    leaf longer than a window is inserted. Fix: split it on insert, so that the last node is one window of
    whole pages.""",
)
class _NoCap(RadixTree):
    def leaf_cap(self) -> int:
        return _EVERYTHING


@tree_bug(
    "leaf-rounds-its-window-down",
    "the last node is a window of whole pages, rounded down",
    clause="TREE-13",
    story="""A lock pins a page more than it needs. The window is rounded down to pages, so the last node
    covers less than a window and the lock goes on to the node above. Visible when the window is no whole
    number of pages. Fix: round up.""",
)
class _CapRoundsDown(RadixTree):
    def leaf_cap(self) -> int:
        assert self.window is not None
        return max(self.window // self.page_size, 1) * self.page_size


@tree_bug(
    "pr22470",
    "a key without SWA KV becomes a live leaf",
    clause="TREE-2",
    source="#22470",
    story="""SWA sizes go negative and padding is freed. Insert knew leaves that are live and leaves that
    are live past a tombstone; one whose SWA KV was swept altogether was taken for live, though its slots
    lead nowhere. The sweep reached the insert boundary when page_size > window. Visible when the whole key
    was swept. Fix: a third case, a tombstone, and a sweep that stops a page short.""",
)
class _NoThirdCase(RadixTree):
    def live_from(self, evicted: int, end: int) -> int:
        live_from = super().live_from(evicted, end)
        return live_from if live_from < end else 0


@tree_bug(
    "split-inside-a-page",
    "a node ends where two keys part, page or not",
    clause="TREE-1",
    story="""Half a page belongs to one node and half to another. Where a key leaves a node, the common
    prefix is counted in tokens and not in whole pages. Visible with page_size > 1 when two prompts part
    inside a page. Fix: round down to whole pages.""",
)
class _SplitsInsidePages(RadixTree):
    def _shared(self, mine: Key, theirs: Key) -> int:
        parted = (at for at, (a, b) in enumerate(zip(mine, theirs)) if a != b)
        return next(parted, min(len(mine), len(theirs)))


@tree_bug(
    "leaf-takes-the-first-slots",
    "a fresh leaf takes slots from the front of the row",
    clause="TREE-3",
    story="""A prefix answers with another part of the prompt. The new leaf gets the first slots of the row
    instead of those past what was matched. Visible when an insert finds a part of its key. Fix: count from
    the matched length.""",
)
class _WrongSlots(RadixTree):
    def _grow(self, path: list[Node], key: Key, slots: Tensor, live_from: int) -> None:
        matched = path[-1].end if path else 0
        shifted = torch.cat((slots[:matched], slots[: len(key) - matched]))
        super()._grow(path, key, shifted, live_from)


@tree_bug(
    "duplicates-freed-twice",
    "an insert frees its duplicates twice",
    clause="OWN-2",
    story="""A page is handed out to two requests. Pages that the tree has already are freed while the tree
    is walked and once more at the end. Visible when an insert finds a part of its key. Fix: free each
    once.""",
)
class _DuplicatesTwice(RadixTree):
    def duplicate(self, full: Tensor, swa: Tensor, owed: Owed) -> None:
        super().duplicate(full, swa, owed)
        super().duplicate(full, swa[:0], owed)


@tree_bug(
    "duplicates-leak",
    "an insert drops its duplicates",
    clause="END-1",
    story="""The pools leak by a prompt whenever two requests compute the same one. What the tree has
    already is passed over and belongs to nobody. Visible when an insert finds a part of its key. Fix: free
    it.""",
)
class _DuplicatesLeak(RadixTree):
    def duplicate(self, full: Tensor, swa: Tensor, owed: Owed) -> None:
        """They are forgotten."""


@tree_bug(
    "duplicate-swa-leaks",
    "duplicates keep their SWA side",
    clause="END-1",
    story="""The SWA pool leaks by a prompt whenever two requests compute the same one. Duplicates are freed
    in the full pool alone. Visible when an insert finds a part of its key, on models with SWA. Fix: free
    both sides.""",
)
class _DuplicateSwaLeaks(RadixTree):
    def duplicate(self, full: Tensor, swa: Tensor, owed: Owed) -> None:
        super().duplicate(full, swa[:0], owed)


@tree_bug(
    "insert-refreshes-nothing",
    "an insert does not count as use",
    clause="TREE-11",
    story="""What a request has just computed is evicted before what nobody asked for in an hour. Insert
    leaves the moments of the nodes that it found as they were. Visible when an old prefix is inserted again
    and then something is evicted. Fix: refresh the path.""",
)
class _InsertRefreshesNothing(RadixTree):
    _known: dict[Node, list[int]]

    def _grow(self, path: list[Node], key: Key, slots: Tensor, live_from: int) -> None:
        self._known = {node: list(node.used) for node in path}
        super()._grow(path, key, slots, live_from)

    def insert(self, key: Key, slots: Tensor, evicted: int = 0, prefix: int = 0) -> Inserted:
        inserted = super().insert(key, slots, evicted, prefix)
        for node, used in self._known.items():
            node.used = used
            self._queue(node)
        return inserted


# Tombstones and recovery.


@tree_bug(
    "recovery-under-a-lock",
    "a tombstone is recovered while it is read",
    clause="TREE-4",
    story="""A running request reads somebody else's KV. Recovery gives a tombstone the inserter's slots and
    frees its own, although another request has it locked and names them in its row. Visible when a locked
    path has a tombstone and its prompt is computed again. Fix: recover what no lock passes through.""",
)
class _RecoversLocked(RadixTree):
    def unread(self, node: Node) -> bool:
        return not node.live


@tree_bug(
    "recovery-without-swa-kv",
    "a tombstone is recovered by who has no SWA KV",
    clause="TREE-2",
    story="""A window is matched that is not there. An insert whose window was swept recovers tombstones
    below its frontier all the same. Visible when a key with a long swept part meets a tombstone. Fix: only
    from the frontier on.""",
)
class _RecoversWithoutSwa(RadixTree):
    def recoverable(self, node: Node, live_from: int) -> bool:  # noqa: ARG002
        return self.unread(node)


@tree_bug(
    "recovery-leaks-the-old-pages",
    "a recovered tombstone drops its own pages",
    clause="FREE-1",
    story="""The full pool leaks. The tombstone takes the inserter's slots and its own are nobody's. Visible
    at the first recovery. Fix: free them.""",
)
class _RecoveryLeaks(RadixTree):
    def recover(self, node: Node, slots: Tensor, owed: Owed) -> None:  # noqa: ARG002
        super().recover(node, slots, Owed())


@tree_bug(
    "recovery-of-half-a-node",
    "a tombstone is recovered whole by half a key",
    clause="TREE-2",
    story="""Half of a live node leads nowhere. A tombstone that the inserter's frontier falls into is not
    cut there, and is recovered as a whole. Visible when the frontier is inside a tombstone. Fix: split it
    at the frontier, recover the rest.""",
)
class _RecoversHalf(RadixTree):
    def _cut_tombstone(self, path: list[Node], live_from: int) -> list[Node]:  # noqa: ARG002
        return path

    def recoverable(self, node: Node, live_from: int) -> bool:
        return self.unread(node) and node.end > live_from


@tree_bug(
    "tombstone-keeps-its-mapping",
    "a tombstone's SWA pages are counted as freed and kept",
    clause="TREE-10",
    story="""SWA eviction frees nothing. The node is marked a tombstone and its size taken off the counters,
    but its pages stay mapped. Visible at the first tombstone. Fix: give them back.""",
)
class _TombstoneKeepsSwa(RadixTree):
    def entomb(self, node: Node, owed: Owed) -> None:
        super().entomb(node, Owed())
        owed.tokens[SWA] += len(node.key)


@tree_bug(
    "tombstone-still-counts",
    "a tombstone counts as evictable SWA KV",
    clause="TREE-9",
    story="""Admission trusts room that is not there. The counter of evictable SWA tokens is not lowered
    when a node becomes a tombstone. Visible at the first tombstone. Fix: lower it.""",
)
class _TombstoneStillCounts(RadixTree):
    def entomb(self, node: Node, owed: Owed) -> None:
        super().entomb(node, owed)
        self._evictable[SWA] += len(node.key)


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


# Evict.


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
