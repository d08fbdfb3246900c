"""An engine whose radix tree has rules of its own: what `tree_policy_is_free` says, and what it leaves free.

    kvspec check --impl impl.examples.own_tree_engine:make

It is the built-in one, but for policy. Leaves are a page long, what was used last is evicted first, and a
prefill hands over a page less than it could and rounds the rest. A lock pins one window, in whole pages. It
gives its SWA part back once the window of its request has passed the locked node.
"""

from __future__ import annotations

from dataclasses import replace

from impl.adapter import Capabilities
from impl.torch_kv.cursors import RowCursors
from impl.torch_kv.nodes import TreeNode
from impl.torch_kv.system import TorchKV
from impl.torch_kv.radix_tree import RadixTree
from impl.vocabulary import Played
from reference.commands import Command, Decode, Outcome


class OwnTree(RadixTree):
    """Another shape, another order, and locks of which the SWA part is given back early."""

    def longest_live_leaf(self) -> int:
        return self.page_size

    def rank(self, moment: int) -> int:
        return -moment

    def swa_lock_start(self, node: TreeNode) -> int:
        """Return the first position of the window: a lock pins one window and no more, so the node with
        that position is split there."""
        if self.window is None:
            return node.end
        first = max(0, node.end - self.window) // self.page_size * self.page_size
        for above in list(self._upward(node)):
            if above.start < first < above.end:
                self._split(above, first - above.start)
        return first


class OwnTreeEngine(TorchKV):
    """See the module."""

    name = "own-tree"
    tree_class = OwnTree

    @property
    def capabilities(self) -> Capabilities:
        # No recurrent state: it stands behind all computed tokens, and a prefill hands fewer to the tree.
        return replace(
            super().capabilities, tree_policy_is_free=True, recurrent=False, tracks=False
        )

    def unfinished_length(self, cursors: RowCursors[int]) -> int:
        return max(cursors.cache_protected_len, super().unfinished_length(cursors) - self.page_size)

    def decode(self, command: Decode) -> Played:
        super().decode(command)
        # What the prefill kept back of a prompt; outputs may yet be cut.
        requests = [self.requests[name] for name in command.requests]
        self.insert_unfinished(
            [r for r in requests if r.cursors.kv_committed_len <= r.origin + self.page_size]
        )
        return None

    def apply(self, command: Command) -> Outcome:
        outcome = super().apply(command)
        if isinstance(self.tree, OwnTree) and self.window is not None:
            for request in self.requests.values():
                # a turn may be cut back: its session's stays whole
                lock = self.locks.get(request.name)
                if lock is not None and request.settled - self.window >= lock.node.end:
                    self.tree.unlock_swa(lock)
        return outcome


def make() -> OwnTreeEngine:
    """Make the system that `--impl impl.examples.own_tree_engine:make` names."""
    return OwnTreeEngine()
