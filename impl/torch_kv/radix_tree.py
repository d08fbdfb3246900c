"""The radix tree: cached prefixes, whose nodes own pages of the full pool and, while live, of the SWA pool.

The layout is that of servers: nodes are on the host, their slots are tensors on the device. A node holds a
run of whole pages. A live node's full slots map to SWA slots through full_to_swa; a tombstone's map to
none. Locks are counters in nodes. The sizes that are evictable and protected are updated with each change,
never counted by a walk.

Only `view` waits for the device. Each operation frees its slots with one call per pool at its end.
Each rule is a method of its own, so that a named bug replaces one method by its faulty form.

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
    window: tokens of SWA attention; None for a model without it, whose nodes are all live.
    root: the empty prefix; it owns nothing and is never locked.
    states: slots of recurrent state, or None.
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
        self.states = states
        self.with_state = set()
        self._count = 0
        self._evictable = [0, 0]  # tokens, by pool
        self._protected = [0, 0]
        self._queues: tuple[list[Entry], list[Entry]] = ([], [])

    # Operations

    def match(self, key: Key, full_only: bool = False) -> MatchedPrefix:
        """Return the longest prefix of `key`, in whole pages, that a request may resume from; mark it used.

        full_only: the request reads only full KV, so tombstones count as well.
        The node where the key leaves the tree is split there. The caller locks the returned node before the
        next insert or eviction: nothing else keeps its slots.
        """
        path = self._walk_and_split(self._whole_pages(key))
        if not full_only:
            path = path[: self.usable_count(path)]
        self.refresh(path)
        if not path:
            return MatchedPrefix(0, self._empty, self.root)
        return MatchedPrefix(path[-1].end, torch.cat([node.slots for node in path]), path[-1])

    def lock(self, node: TreeNode, full_only: bool = False) -> NodeLock:
        """Pin the prefix that ends with `node`, which a match has just returned.

        Full KV is pinned up to the root, SWA KV (unless full_only) until a window is covered. Nodes are
        pinned whole, so the pinned SWA KV may exceed the window by the rest of a node.
        """
        swa_from = node.end if full_only else self.swa_lock_start(node)
        for above in self._upward(node):
            self._pin(above, FULL)
            if above.end > swa_from:
                self._pin(above, SWA)
        state = self.states is not None and not full_only
        if state:
            self.pin_state(node)
        return NodeLock(node, swa_from, state)

    def unlock(self, lock: NodeLock) -> None:
        """Release everything that `lock` pins, also in nodes that were split since. Call it once per lock."""
        swa_from = self.swa_unlock_start(lock)
        for node in self.nodes_to_unlock(lock):
            self._unpin(node, FULL)
            if node.end > swa_from:
                self._unpin(node, SWA)
            self._queue(node)
        if lock.state:
            self.unpin_state(lock)

    def unlock_swa(self, lock: NodeLock) -> None:
        """Release the SWA KV that `lock` pins; it then pins only full KV. Call it once per lock."""
        for node in self._upward(lock.node):
            if node.end > lock.swa_from:
                self._unpin(node, SWA)
                self._queue(node)
        self.forget_swa_part(lock)

    def insert(
        self, key: Key, slots: Tensor, evicted: int = 0, prefix: int = 0, state: int | None = None
    ) -> None:
        """Give the tree the KV of `key`, whole pages.

        slots: int64 [at least len(key)] on the device, the full slots of the tokens. Those of the first
            `prefix` tokens are the tree's, locked by the caller; the others belong only to the caller.
        evicted: position below which, rounded up to whole pages, the caller's SWA pages are evicted; the
            mapping shows it.
        state: a slot with the state after `key`.

        Where the tree already has a node, the node stays and the caller's pages are freed. An unlocked
        tombstone instead takes the caller's slots if these have SWA KV, and its own are freed. New tokens
        become leaves: a tombstone below `evicted`, live nodes from there on (#22470), of at most a window
        each (#26919).
        """
        live_from = self.first_live_position(evicted, len(key))
        path = self._cut_tombstone(self._walk_and_split(key), live_from)
        owed = Owed()
        for node in path:
            if self.is_recoverable(node, live_from):
                self.recover(node, slots[node.start : node.end], owed)
            elif node.start >= prefix:  # the prefix ends with a node, because it is locked
                live_begin = max(node.start, live_from)
                self.free_duplicate(slots[node.start : node.end], slots[live_begin : node.end], owed)
        self._add_leaves(path, key, slots, live_from)
        if state is not None:
            self.take_state(path[-1], state)
        self.refresh(path)
        self._free_owed(owed)

    def usable_after(self, key: Key, evicted: int) -> bool:
        """Return whether a match would find all of `key`, whole pages, after an insert. Changes nothing.

        It would not if SWA KV is missing in the window before the key's end: below `evicted`, or in a
        tombstone that the insert keeps because it is locked.
        """
        if self.window is None:
            return True
        live = 0  # tokens with SWA KV before this position, without a gap
        for start, stop, live_begin in self._runs_after(key, self.first_live_position(evicted, len(key))):
            live = live + stop - start if live_begin == start else stop - live_begin
        return live == len(key) or live >= self.window

    def _runs_after(self, key: Key, live_from: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, first position with SWA KV) of each node that `key` has after an insert."""
        node = self.root
        end = 0
        while (
            end == node.end
            and (child := node.children.get(key[end : end + self.page_size])) is not None
        ):
            start = end
            node = child
            end += self._common_length(child.key, key[start : start + len(child.key)])
            live_begin = end
            if child.live:
                live_begin = start
            elif self.is_unread_tombstone(child):
                live_begin = min(max(start, live_from), end)
            yield start, end, live_begin
        yield end, len(key), max(end, live_from)

    def state_match_end(self, key: Key) -> TreeNode:
        """Return the node at which a match of `key` ends on a recurrent model: a state stands at the end of a
        node, so no node is split. Changes nothing."""
        path = [self.root]
        node = self.root
        while (child := node.children.get(key[node.end : node.end + self.page_size])) is not None:
            if key[node.end : child.end] != child.key:
                break
            path.append(child)
            node = child
        return path[self.usable_count(path[1:])]

    def node_ending_at(self, key: Key) -> TreeNode:
        """Return the node that ends with `key`, which was just inserted or matched."""
        node = self.root
        while node.end < len(key):
            node = node.children[key[node.end : node.end + self.page_size]]
        return node

    def slots(self, node: TreeNode) -> Tensor:
        """Return the full slots of all tokens up to the end of `node`: int64 [node.end], a copy."""
        return torch.cat([self._empty, *reversed([above.slots for above in self._upward(node)])])

    def evict(self, full: int, swa: int, states: int = 0) -> Freed:
        """Free at least `full` and `swa` tokens and `states` states, least recently used first, or all that
        is evictable.

        For the full pool unlocked leaves are dropped, with their SWA KV. For the SWA pool an unlocked leaf is
        dropped, and any other node that no lock's window reaches becomes a tombstone; likewise for states. Of
        nodes with the same last use the one nearer to the root is first.
        """
        owed = Owed()
        while owed.tokens[FULL] < full and (node := self._next(FULL)) is not None:
            self._drop_leaf(node, owed)
        while owed.tokens[SWA] < swa and (node := self._next(SWA)) is not None:
            if self.outlives_swa(node):
                self.make_tombstone(node, owed)
            else:
                self._drop_leaf(node, owed)
        while owed.states < states and (node := self.next_state()) is not None:
            if self.outlives_state(node):
                owed.states += self.free_node_state(node)
            else:
                self._drop_leaf(node, owed)
        self._free_owed(owed)
        full_tokens, swa_tokens = owed.tokens
        return Freed(full_tokens, swa_tokens, owed.states)

    def sizes(self) -> TreeSizes:
        """Return the evictable and the protected tokens of each pool. The host keeps them: no wait."""
        full, swa = zip(self._evictable, self._protected)
        return TreeSizes(*full, *swa)

    def view(self, full_to_swa: Sequence[int]) -> list[NodeView]:
        """Return all nodes, parents first. It walks the tree and waits for the device."""
        nodes = []
        waiting = list(self.root.children.values())
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
            nodes.append(NodeView(node.path(), slots, swa, *locked))
            waiting += node.children.values()
        return nodes

    # Rules

    def usable_count(self, path: list[TreeNode]) -> int:
        """Return the number of nodes of `path` that a request may resume behind.

        The window before the last of them must be live, or all of them; on a recurrent model the last one
        has a state.
        """
        count = 0
        live_run = 0  # live tokens up to the node, without a gap
        for number, node in enumerate(path, 1):
            live_run = live_run + len(node.key) if node.live else 0
            covered = self.window is None or live_run >= min(self.window, node.end)
            if covered and self.ends_a_match(node):
                count = number
        return count

    def swa_use_start(self, length: int) -> int:
        """Return the first position whose SWA KV the use of a prefix reads, a window before its end
        (#26615)."""
        assert self.window is not None
        return length - self.window

    def swa_lock_start(self, node: TreeNode) -> int:
        """Return the position from which a lock on `node` pins SWA KV: nodes from there cover a window."""
        current = node
        while self.window is not None and node.end - current.end < self.window and current.parent is not None:
            current = current.parent
        return current.end

    def swa_unlock_start(self, lock: NodeLock) -> int:
        """Return the position from which the lock has pinned SWA KV."""
        return lock.swa_from

    def forget_swa_part(self, lock: NodeLock) -> None:
        """Note that the lock pins no SWA KV any more."""
        lock.swa_from = lock.node.end

    def nodes_to_unlock(self, lock: NodeLock) -> Iterator[TreeNode]:
        """Yield the nodes that the lock has pinned."""
        return self._upward(lock.node)

    def inherit_locks_and_use(self, head: TreeNode, tail: TreeNode) -> None:
        """Copy locks and last use of a split node to its new first half: both halves have the same."""
        head.locks = list(tail.locks)
        head.used = list(tail.used)

    def first_live_position(self, evicted: int, end: int) -> int:
        """Return the first position with SWA KV in an insert; `end` if there is none (#22470)."""
        return min(self._round_up_to_page(evicted), end)

    def longest_live_leaf(self) -> int:
        """Return the most live tokens of a new leaf: a window in whole pages, because a lock pins it whole
        (#26919)."""
        assert self.window is not None
        return self._round_up_to_page(self.window)

    def is_recoverable(self, node: TreeNode, live_from: int) -> bool:
        """Return whether an insert replaces the node's slots by its own: an unread tombstone, all of it at
        positions with SWA KV."""
        return self.is_unread_tombstone(node) and node.start >= live_from

    def is_unread_tombstone(self, node: TreeNode) -> bool:
        """Return whether the node is a tombstone whose full KV no lock reads."""
        return not node.live and not node.locks[FULL]

    def recover(self, node: TreeNode, slots: Tensor, owed: Owed) -> None:
        """Make a tombstone live with the inserter's slots, int64 [len(node.key)]; its own full pages are
        freed."""
        owed.full.append(self._pages(node.slots))
        node.slots = slots.clone()
        self._count_live(node, live=True)

    def free_duplicate(self, full: Tensor, swa: Tensor, owed: Owed) -> None:
        """Free the inserter's slots that the tree does not take.

        full: int64, all of them.
        swa: int64, those with SWA KV.
        """
        owed.full.append(self._pages(full))
        if self.window is not None:
            owed.swa.append(self._pages(swa))

    def make_tombstone(self, node: TreeNode, owed: Owed) -> None:
        """Free the node's SWA KV; the node stays in the tree."""
        self._count_live(node, live=False)
        owed.swa.append(self._pages(node.slots))
        owed.tokens[SWA] += len(node.key)

    def outlives_swa(self, node: TreeNode) -> bool:
        """Return whether the node stays when its SWA KV is freed: it has children, or a lock reads its full
        KV."""
        return bool(node.children or node.locks[FULL])

    def remains_without_child(self, node: TreeNode) -> bool:
        """Return whether the node stays when a child is dropped: a match may end there, it has another child,
        or a lock reads its full KV."""
        return (node.live and self.ends_a_match(node)) or bool(node.children or node.locks[FULL])

    # Walks and splits

    def _whole_pages(self, key: Key) -> Key:
        return key[: len(key) // self.page_size * self.page_size]

    def _round_up_to_page(self, length: int) -> int:
        return -(-length // self.page_size) * self.page_size

    def _pages(self, slots: Tensor) -> Tensor:
        """Return the first slot of each page of `slots`, whole pages: a view."""
        return slots[:: self.page_size]

    def _upward(self, node: TreeNode) -> Iterator[TreeNode]:
        """Yield `node` and its ancestors, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _walk_and_split(self, key: Key) -> list[TreeNode]:
        """Return the path of the longest prefix of `key` (whole pages) in the tree; the last node is split to
        end with it."""
        path: list[TreeNode] = []
        node = self.root
        while (child := node.children.get(key[node.end : node.end + self.page_size])) is not None:
            same = self._common_length(child.key, key[node.end : node.end + len(child.key)])
            if same < len(child.key):
                return [*path, self._split(child, same)]
            path.append(child)
            node = child
        return path

    def _common_length(self, mine: Key, theirs: Key) -> int:
        """Return the length of the common prefix in whole pages.

        theirs: not longer than mine.
        """
        if mine == theirs:
            return len(mine)
        unlike = (index for index, (a, b) in enumerate(zip(mine, theirs)) if a != b)
        length = next(unlike, len(theirs))
        return length // self.page_size * self.page_size

    def _split(self, tail: TreeNode, count: int) -> TreeNode:
        """Move the first `count` tokens of `tail` to a new parent of it, and return that."""
        parent = tail.parent
        first_page = tail.key[: self.page_size]
        assert parent is not None
        head = TreeNode(tail.key[:count], tail.slots[:count], parent, tail.start + count, tail.live)
        self.inherit_locks_and_use(head, tail)
        tail.key = tail.key[count:]
        tail.slots = tail.slots[count:]
        tail.parent = head
        head.children[tail.key[: self.page_size]] = tail
        parent.children[first_page] = head
        self._count += 1
        self._queue(head)
        return head

    def _cut_tombstone(self, path: list[TreeNode], live_from: int) -> list[TreeNode]:
        """Return `path`, with the tombstone that contains `live_from` split there: the insert may recover its
        second half."""
        for number, node in enumerate(path):
            if not node.live and node.start < live_from < node.end:
                return [*path[:number], self._split(node, live_from - node.start), *path[number:]]
        return path

    def _add_leaves(self, path: list[TreeNode], key: Key, slots: Tensor, live_from: int) -> None:
        """Add leaves for the tokens of `key` behind `path`, split where SWA KV begins and at the longest live
        leaf."""
        begin = path[-1].end if path else 0
        end = len(key)
        if begin == end:
            return
        slots = slots[:end].clone()  # the caller may reuse its own tensor
        cuts = {live_from, end}
        if self.window is not None:
            cuts.add(max(live_from, end - self.longest_live_leaf()))
        for cut in sorted(cut for cut in cuts if cut > begin):
            parent = path[-1] if path else self.root
            node = TreeNode(key[begin:cut], slots[begin:cut], parent, cut, begin >= live_from)
            node.used[SWA] = self.clock + 1  # the insert uses all of the path's full KV next
            parent.children[node.key[: self.page_size]] = node
            self._count += 1
            self._evictable[FULL] += len(node.key)
            if node.live and self.window is not None:
                self._evictable[SWA] += len(node.key)
            path.append(node)
            begin = cut

    # Use

    def refresh(self, path: list[TreeNode]) -> None:
        """Advance the clock, and mark the full KV of `path` and the SWA KV in the window before its end as
        used."""
        self.clock += 1
        if not path:
            return
        length = path[-1].end
        use_start = self.swa_use_start(length) if self.window is not None else length
        for node in path:
            node.used[FULL] = self.clock
            if node.live and node.end > use_start:
                node.used[SWA] = self.clock
            self._queue(node)
        path[-1].state_used = self.clock

    # Frees

    def _drop_leaf(self, node: TreeNode, owed: Owed) -> None:
        """Remove a leaf, and the ancestors that do not remain without it."""
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
                self.make_tombstone(node, owed)
            node.slots = self._empty
            if parent.parent is None or self.remains_without_child(parent):
                break
            node = parent
        if parent.parent is not None:
            self._queue(parent)

    def _free_owed(self, owed: Owed) -> None:
        """Free everything owed, with one call per pool."""
        full, swa = (torch.cat(parts) if parts else self._empty for parts in (owed.full, owed.swa))
        self.store.free_starts(full, swa)
