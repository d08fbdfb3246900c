"""Queues of what may be evicted from a radix tree, and their counters: kept as they change."""

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
        """Whether full pressure may take the node."""
        return not node.children and not node.locks[FULL]

    def swa_candidate(self, node: TreeNode) -> bool:
        """Whether SWA pressure may take the node's SWA KV."""
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

    def _count_live(self, node: TreeNode, live: bool) -> None:
        """An unlocked node becomes live, or a tombstone."""
        node.live = live
        self._evictable[SWA] += len(node.key) if live else -len(node.key)

    def _queue(self, node: TreeNode) -> None:
        """Queue a node for each component that may take it. Queued wherever one may have started to.

        Entries are not taken out when a node is used, locked or dropped; `_next` passes over them.
        """
        for component, may in enumerate((self.full_candidate, self.swa_candidate)):
            if may(node):
                queue = self._queues[component]
                heappush(queue, (self.rank(node.used[component]), node.end, node))
                if len(queue) > 2 * self._count + 64:
                    queue[:] = dict.fromkeys(e for e in queue if self._current(e, component, may))
                    heapify(queue)

    def _current(self, entry: Entry, component: int, may: Callable[[TreeNode], bool]) -> bool:
        """Whether the entry still says when its node was last used, and the node may go."""
        rank, _, node = entry
        return not node.gone and rank == self.rank(node.used[component]) and may(node)

    def _next(self, component: int) -> TreeNode | None:
        """The node that goes first for this component, off its queue; None when none may go."""
        queue = self._queues[component]
        may = (self.full_candidate, self.swa_candidate)[component]
        while queue:
            if self._current(entry := heappop(queue), component, may):
                return entry[2]
        return None
