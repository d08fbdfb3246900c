"""Eviction queues of a radix tree and its counters of tokens, updated with each change of a node."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from impl.torch_kv.nodes import FULL, SWA, Entry, TreeNode


class EvictionQueues:
    """A queue and two counters for each component of nodes; see RadixTree."""

    window: int | None
    _count: int
    _evictable: list[int]
    _protected: list[int]
    _queues: tuple[list[Entry], list[Entry]]

    def rank(self, moment: int) -> int:
        """Return the rank in the queue of a node last used at `moment`; the lowest is evicted first."""
        return moment

    def full_candidate(self, node: TreeNode) -> bool:
        """Return whether an eviction for the full pool may drop the node."""
        return not node.children and not node.locks[FULL]

    def swa_candidate(self, node: TreeNode) -> bool:
        """Return whether an eviction for the SWA pool may free the node's SWA KV."""
        return self.window is not None and node.live and not node.locks[SWA]

    def _pin(self, node: TreeNode, component: int) -> None:
        if not node.locks[component]:
            self._evictable[component] -= len(node.key)
            self._protected[component] += len(node.key)
        node.locks[component] += 1

    def _unpin(self, node: TreeNode, component: int) -> None:
        node.locks[component] -= 1
        if not node.locks[component]:
            self._protected[component] -= len(node.key)
            self._evictable[component] += len(node.key)

    def _count_live(self, node: TreeNode, *, live: bool) -> None:
        """Make an unlocked node live, or a tombstone, and count its tokens accordingly."""
        node.live = live
        self._evictable[SWA] += len(node.key) if live else -len(node.key)

    def _queue(self, node: TreeNode) -> None:
        """Queue a node for each component that may evict it. Call it whenever a node may have become
        evictable.

        Entries stay when their node is used, locked or dropped; `_next` skips them.
        """
        for component, may in enumerate((self.full_candidate, self.swa_candidate)):
            if may(node):
                queue = self._queues[component]
                heappush(queue, (self.rank(node.used[component]), node.end, node))
                if len(queue) > 2 * self._count + 64:
                    queue[:] = dict.fromkeys(e for e in queue if self._current(e, component, may))
                    heapify(queue)

    def _current(self, entry: Entry, component: int, may: Callable[[TreeNode], bool]) -> bool:
        """Return whether the entry has its node's last use, and the node is evictable."""
        rank, _, node = entry
        return not node.gone and rank == self.rank(node.used[component]) and may(node)

    def _next(self, component: int) -> TreeNode | None:
        """Remove and return the node that is evicted first for a component; None if none is evictable."""
        queue = self._queues[component]
        may = (self.full_candidate, self.swa_candidate)[component]
        while queue:
            entry = heappop(queue)
            if self._current(entry, component, may):
                return entry[2]
        return None
