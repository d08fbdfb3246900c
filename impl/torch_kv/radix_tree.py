"""The radix tree: cached prefixes whose nodes own pages of the full pool, and of the SWA pool or not.

As servers keep it: nodes on the host, what they own as tensors of slots on the device. A node is a run
of whole pages. It is live, when its full slots lead to SWA slots through full_to_swa, or a tombstone,
when they lead nowhere. Locks are counters in nodes; how much may be evicted and how much is pinned is
kept as it changes and never counted by a walk.

Nothing here but `view` waits for the device. An operation frees with one call per pool at its end.
Each rule is a method of its own, so that a named bug is one method put back as it once was.

Lengths and positions are tokens, clocks are numbers of operations. Where rules changed in servers the
method names the pull request of sgl-project/sglang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from impl.adapter import NodeView, TreeSizes
from impl.lazy import Tensor, torch
from impl.torch_kv.eviction_queues import EvictionQueues
from impl.torch_kv.nodes import FULL, SWA, Entry, Key, MatchedPrefix, NodeLock, Owed, TreeNode
from impl.torch_kv.state_slots import NodeStates, StateSlots
from impl.torch_kv.store import KVStore
from reference.commands import Freed


class RadixTree(NodeStates, EvictionQueues):
    """A radix tree over the pools of a KVStore.

    store: the pools; slots that are inserted come from it and evicted ones go back to it.
    window: tokens of SWA attention, None for a model without; then `live` is always true and asked by
        nobody.
    root: the empty prefix; owns nothing and is never locked. states: slots of recurrent state, or None.
    """

    def __init__(
        self, store: KVStore, window: int | None, states: StateSlots | None = None
    ) -> None:
        self.store = store
        self.page_size = store.page_size
        self.window = window
        self.clock = 0
        self._empty = torch.zeros(0, dtype=torch.int64, device=store.device)
        self.root = TreeNode((), self._empty, None, 0)
        self.states, self.with_state = states, set()
        self._count = 0
        self._evictable, self._protected = [0, 0], [0, 0]
        self._queues: tuple[list[Entry], list[Entry]] = ([], [])

    # The operations.

    def match(self, key: Key, full_only: bool = False) -> MatchedPrefix:
        """The longest prefix of `key`, whole pages, that a request may resume from, or (full_only) who reads
        full KV alone; marks it used.

        The node where the key leaves the tree is split there. Lock the node before anything else is
        inserted or evicted: until then nothing keeps the slots.
        """
        path = self._enter(self._whole_pages(key))
        path = path if full_only else path[: self.usable(path)]
        self.refresh(path)
        if not path:
            return MatchedPrefix(0, self._empty, self.root)
        return MatchedPrefix(path[-1].end, torch.cat([node.slots for node in path]), path[-1])

    def lock(self, node: TreeNode, full_only: bool = False) -> NodeLock:
        """Pin the prefix that ends with `node`, as a match has just handed it out.

        Full KV all the way, SWA KV (but full_only) until a window is covered. Nodes are pinned whole, so that
        may be up to a node more than one window.
        """
        swa_from = node.end if full_only else self.swa_from(node)
        for above in self._upward(node):
            self._pin(above, FULL)
            if above.end > swa_from:
                self._pin(above, SWA)
        state = self.states is not None and not full_only
        if state:
            self.pin_state(node)
        return NodeLock(node, swa_from, state)

    def unlock(self, lock: NodeLock) -> None:
        """Give back what `lock` took, node by node, whatever was split since. To be done once."""
        swa_from = self.unlock_from(lock)
        for node in self.unlocked(lock):
            self._unpin(node, FULL)
            if node.end > swa_from:
                self._unpin(node, SWA)
            self._queue(node)
        if lock.state:
            self.unpin_state(lock)

    def unlock_swa(self, lock: NodeLock) -> None:
        """Give back the SWA part of `lock`, once; what is left pins full KV alone."""
        for node in self._upward(lock.node):
            if node.end > lock.swa_from:
                self._unpin(node, SWA)
                self._queue(node)
        self.swa_given_back(lock)

    def insert(
        self, key: Key, slots: Tensor, evicted: int = 0, prefix: int = 0, state: int | None = None
    ) -> None:
        """Hand `key`, whole pages, over to the tree.

        slots: int64 [at least len(key)] on the device, the full slots of the tokens; of the first `prefix`
        tokens they are the tree's, on which the caller still holds a lock, and the others belong to the
        caller alone. evicted: SWA pages of the tokens below it, rounded up to whole pages, are gone; the
        mapping says so.

        What the tree has is kept and the caller's pages freed; but a tombstone that nobody has locked
        takes the caller's slots when they have SWA KV, and its own are freed. What is new becomes a
        leaf: a tombstone below `evicted`, live from there on (#22470), at most a window of it in one
        node (#26919). state: a slot with the state after `key`.
        """
        live_from = self.live_from(evicted, len(key))
        path = self._cut_tombstone(self._enter(key), live_from)
        owed = Owed()
        for node in path:
            if self.recoverable(node, live_from):
                self.recover(node, slots[node.start : node.end], owed)
            elif node.start >= prefix:  # where a node ends, for it is locked
                first = max(node.start, live_from)
                self.duplicate(slots[node.start : node.end], slots[first : node.end], owed)
        self._grow(path, key, slots, live_from)
        if state is not None:
            self.take_state(path[-1], state)
        self.refresh(path)
        self._settle(owed)

    def usable_after(self, key: Key, evicted: int) -> bool:
        """Whether all of `key`, whole pages, could be matched once it is inserted. Changes nothing.

        It could not where SWA KV is missing in the window of its end: below `evicted`, and where the tree
        has a tombstone and keeps it, because of a lock.
        """
        if self.window is None:
            return True
        live = 0  # how many tokens before where we are have SWA KV, without a gap
        for start, stop, first in self._runs_after(key, self.live_from(evicted, len(key))):
            live = live + stop - start if first == start else stop - first
        return live == len(key) or live >= self.window

    def _runs_after(self, key: Key, live_from: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, from where on it has SWA KV) of the nodes that an insert of `key` leaves behind."""
        node, end = self.root, 0
        while (
            end == node.end
            and (child := node.children.get(key[end : end + self.page_size])) is not None
        ):
            start, node = end, child
            end += self._shared(child.key, key[start : start + len(child.key)])
            first = start if child.live else max(start, live_from) if self.unread(child) else end
            yield start, end, min(first, end)
        yield end, len(key), max(end, live_from)

    def ending(self, key: Key) -> TreeNode:
        """The node that a match of `key` ends with on a recurrent model: one that is there, for a state is at
        the end of a node. Changes nothing."""
        path, node = [self.root], self.root
        while (child := node.children.get(key[node.end : node.end + self.page_size])) is not None:
            if key[node.end : child.end] != child.key:
                break
            path.append(child)
            node = child
        return path[self.usable(path[1:])]

    def at(self, key: Key) -> TreeNode:
        """The node that ends with `key`, which has just been inserted or matched."""
        node = self.root
        while node.end < len(key):
            node = node.children[key[node.end : node.end + self.page_size]]
        return node

    def slots(self, node: TreeNode) -> Tensor:
        """Full slots of the tokens up to the end of `node`: int64 [node.end], a copy."""
        return torch.cat([self._empty, *reversed([above.slots for above in self._upward(node)])])

    def evict(self, full: int, swa: int, states: int = 0) -> Freed:
        """Free at least `full` and `swa` tokens and `states` states, least recently used first, or all that
        is evictable.

        For the full pool unlocked leaves go, with their SWA side. For the SWA pool an unlocked leaf goes, and
        any other node that no window reaches becomes a tombstone; so for states. Of nodes last used at one
        moment the one nearer to the root goes first.
        """
        owed = Owed()
        while owed.tokens[FULL] < full and (node := self._next(FULL)) is not None:
            self._drop(node, owed)
        while owed.tokens[SWA] < swa and (node := self._next(SWA)) is not None:
            if self.outlives_swa(node):
                self.entomb(node, owed)
            else:
                self._drop(node, owed)
        while owed.states < states and (node := self.next_state()) is not None:
            if self.outlives_state(node):
                owed.states += self.free_node_state(node)
            else:
                self._drop(node, owed)
        self._settle(owed)
        full_tokens, swa_tokens = owed.tokens
        return Freed(full_tokens, swa_tokens, owed.states)

    def sizes(self) -> TreeSizes:
        """Tokens per pool, evictable and protected: host numbers, kept as they change."""
        full, swa = zip(self._evictable, self._protected)
        return TreeSizes(*full, *swa)

    def view(self, full_to_swa: Sequence[int]) -> list[NodeView]:
        """All nodes, parents first. Walks the tree and waits for the device: for tests and reports."""
        found, waiting = [], list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            slots = tuple(node.slots.tolist())
            swa = (
                tuple(full_to_swa[s] for s in slots)
                if node.live and self.window is not None
                else ()
            )
            full_locks, swa_locks = node.locks
            locked = (full_locks, swa_locks, node.state, node.state_locks)
            found.append(NodeView(node.path(), slots, swa, *locked))
            waiting += node.children.values()
        return found

    # The rules.

    def usable(self, path: list[TreeNode]) -> int:
        """How many nodes of `path` a request may resume from.

        The window behind the end must be live, or everything back to the root; a recurrent model has a state
        there.
        """
        best, live_run, whole = 0, 0, True
        for number, node in enumerate(path, 1):
            live_run = live_run + len(node.key) if node.live else 0
            whole = whole and node.live
            if (self.window is None or whole or live_run >= self.window) and self.ends_a_match(
                node
            ):
                best = number
        return best

    def refresh_from(self, length: int) -> int:
        """The position from which on a use of a prefix used SWA KV: one window before its end (#26615)."""
        assert self.window is not None
        return length - self.window

    def swa_from(self, node: TreeNode) -> int:
        """How far up a lock on `node` pins SWA KV: where nodes from its end on cover a window."""
        at = node
        while self.window is not None and node.end - at.end < self.window and at.parent is not None:
            at = at.parent
        return at.end

    def unlock_from(self, lock: NodeLock) -> int:
        """How far up the lock pinned SWA KV."""
        return lock.swa_from

    def swa_given_back(self, lock: NodeLock) -> None:
        """The lock has no SWA part any more."""
        lock.swa_from = lock.node.end

    def unlocked(self, lock: NodeLock) -> Iterator[TreeNode]:
        """The nodes that the lock pinned."""
        return self._upward(lock.node)

    def inherit(self, head: TreeNode, tail: TreeNode) -> None:
        """A split: whoever pinned or used the node did so with both halves."""
        head.locks = list(tail.locks)
        head.used = list(tail.used)

    def live_from(self, evicted: int, end: int) -> int:
        """From where on an insert brings SWA KV; `end`: nowhere, all of it a tombstone (#22470)."""
        return min(self._ceil(evicted), end)

    def leaf_cap(self) -> int:
        """Most live tokens of a fresh leaf: a window of whole pages, for a lock pins it whole (#26919)."""
        assert self.window is not None
        return self._ceil(self.window)

    def recoverable(self, node: TreeNode, live_from: int) -> bool:
        """Whether an insert gives this node its slots: a tombstone through which no lock reads."""
        return self.unread(node) and node.start >= live_from

    def unread(self, node: TreeNode) -> bool:
        """A tombstone through which no lock reads."""
        return not node.live and not node.locks[FULL]

    def recover(self, node: TreeNode, slots: Tensor, owed: Owed) -> None:
        """A tombstone takes the inserter's slots, int64 [len(node.key)]; its own full pages are freed."""
        owed.full.append(self._pages(node.slots))
        node.slots = slots.clone()
        self._count_live(node, True)

    def duplicate(self, full: Tensor, swa: Tensor, owed: Owed) -> None:
        """Slots of the inserter that the tree has no use for; `swa`: those that have an SWA side."""
        owed.full.append(self._pages(full))
        if self.window is not None:
            owed.swa.append(self._pages(swa))

    def entomb(self, node: TreeNode, owed: Owed) -> None:
        """The node loses its SWA KV and stays."""
        self._count_live(node, False)
        owed.swa.append(self._pages(node.slots))
        owed.tokens[SWA] += len(node.key)

    def outlives_swa(self, node: TreeNode) -> bool:
        """Whether a node stays whose SWA KV goes: not a leaf, but where a lock reads its full KV."""
        return bool(node.children or node.locks[FULL])

    def stays(self, node: TreeNode) -> bool:
        """Whether a node stays that has lost a child: not where no match ends and none is left, it serves
        nobody, but where a lock reads its full KV."""
        return (node.live and self.ends_a_match(node)) or bool(node.children or node.locks[FULL])

    # Walking and splitting.

    def _whole_pages(self, key: Key) -> Key:
        return key[: len(key) // self.page_size * self.page_size]

    def _ceil(self, length: int) -> int:
        return -(-length // self.page_size) * self.page_size

    def _pages(self, slots: Tensor) -> Tensor:
        """The first slot of each page of `slots`, whole pages: a view."""
        return slots[:: self.page_size]

    def _upward(self, node: TreeNode) -> Iterator[TreeNode]:
        """`node` and those above it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _enter(self, key: Key) -> list[TreeNode]:
        """The nodes that spell as much of `key` (whole pages) as is there; the last is split to end there."""
        path: list[TreeNode] = []
        node = self.root
        while (child := node.children.get(key[node.end : node.end + self.page_size])) is not None:
            same = self._shared(child.key, key[node.end : node.end + len(child.key)])
            if same < len(child.key):
                return [*path, self._split(child, same)]
            path.append(child)
            node = child
        return path

    def _shared(self, mine: Key, theirs: Key) -> int:
        """Length of the common prefix, whole pages. theirs: not longer."""
        if mine == theirs:
            return len(mine)
        unlike = (at for at, (a, b) in enumerate(zip(mine, theirs)) if a != b)
        length = next(unlike, len(theirs))
        return length // self.page_size * self.page_size

    def _split(self, tail: TreeNode, at: int) -> TreeNode:
        """Put a new node with the first `at` tokens of `tail` above it, and return that."""
        parent, first = tail.parent, tail.key[: self.page_size]
        assert parent is not None
        head = TreeNode(tail.key[:at], tail.slots[:at], parent, tail.start + at, tail.live)
        self.inherit(head, tail)
        tail.key, tail.slots, tail.parent = tail.key[at:], tail.slots[at:], head
        head.children[tail.key[: self.page_size]] = tail
        parent.children[first] = head
        self._count += 1
        self._queue(head)
        return head

    def _cut_tombstone(self, path: list[TreeNode], live_from: int) -> list[TreeNode]:
        """`path` with a tombstone that `live_from` falls into cut there: the rest may be recovered."""
        for number, node in enumerate(path):
            if not node.live and node.start < live_from < node.end:
                return [*path[:number], self._split(node, live_from - node.start), *path[number:]]
        return path

    def _grow(self, path: list[TreeNode], key: Key, slots: Tensor, live_from: int) -> None:
        """Add fresh nodes for what of `key` lies past `path`, cut where SWA KV begins and at the cap."""
        at, end = path[-1].end if path else 0, len(key)
        if at == end:
            return
        slots = slots[:end].clone()  # the caller may go on with its own
        cuts = {live_from, end}
        if self.window is not None:
            cuts.add(max(live_from, end - self.leaf_cap()))
        for cut in sorted(cut for cut in cuts if cut > at):
            parent = path[-1] if path else self.root
            node = TreeNode(key[at:cut], slots[at:cut], parent, cut, at >= live_from)
            node.used[SWA] = self.clock + 1  # as all of the path will be used in full KV
            parent.children[node.key[: self.page_size]] = node
            self._count += 1
            self._evictable[FULL] += len(node.key)
            self._evictable[SWA] += len(node.key) * (node.live and self.window is not None)
            path.append(node)
            at = cut

    # Use.

    def refresh(self, path: list[TreeNode]) -> None:
        """A new moment: full KV of `path` was used, and SWA KV inside the window of its end."""
        self.clock += 1
        if not path:
            return
        length = path[-1].end
        first = self.refresh_from(length) if self.window is not None else length
        for node in path:
            node.used[FULL] = self.clock
            if node.live and node.end > first:
                node.used[SWA] = self.clock
            self._queue(node)
        path[-1].state_used = self.clock

    # Freeing.

    def _drop(self, node: TreeNode, owed: Owed) -> None:
        """Take out a leaf, and the nodes above it that do not stay without it."""
        while True:
            parent = node.parent
            assert parent is not None
            del parent.children[node.key[: self.page_size]]
            node.gone = True
            self._count -= 1
            self._evictable[FULL] -= len(node.key)
            owed.tokens[FULL] += len(node.key)
            owed.full.append(self._pages(node.slots))
            owed.states += self.free_node_state(node)
            if node.live and self.window is not None:
                self.entomb(node, owed)
            node.slots = self._empty
            if parent.parent is None or self.stays(parent):
                break
            node = parent
        if parent.parent is not None:
            self._queue(parent)

    def _settle(self, owed: Owed) -> None:
        """Free what is owed: one call per pool."""
        full, swa = (torch.cat(parts) if parts else self._empty for parts in (owed.full, owed.swa))
        self.store.free_starts(full, swa)
