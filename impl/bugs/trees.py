"""Faults in the radix tree: insert, tombstones and their recovery."""

from __future__ import annotations

from impl.bugs.register import bug
from impl.lazy import Tensor, torch
from impl.torch_kv.nodes import SWA, Key, Owed, TreeNode
from impl.torch_kv.radix_tree import RadixTree

_EVERYTHING = 1 << 30  # tokens


# -- insert ---------------------------------------------------------------------------------------


@bug(
    "pr26919", "TREE-7", "a fresh leaf is as long as it comes", RadixTree.longest_live_leaf, source="#26919"
)
def _(self: RadixTree) -> int:
    """The SWA pool fills early and requests are retracted. A lock pins nodes whole, and a prompt of thousands
    of tokens was one leaf: a request that needs one window pinned all of it. Visible as soon as a leaf longer
    than a window is inserted. Fix: split it on insert, so that the last node is one window of whole pages."""
    return _EVERYTHING


@bug(
    "leaf-rounds-its-window-down",
    "TREE-13",
    "the last node is a window of whole pages, rounded down",
    RadixTree.longest_live_leaf,
)
def _(self: RadixTree) -> int:
    """A lock pins a page more than it needs. The window is rounded down to pages, so the last node covers
    less than a window and the lock goes on to the node above. Visible when the window is no whole number of
    pages. Fix: round up."""
    assert self.window is not None
    return max(self.window // self.page_size, 1) * self.page_size


@bug(
    "pr22470",
    "TREE-2",
    "a key without SWA KV becomes a live leaf",
    RadixTree.first_live_position,
    source="#22470",
)
def _(self: RadixTree, evicted: int, end: int) -> int:
    """SWA sizes go negative and padding is freed. Insert knew leaves that are live and leaves that are live
    past a tombstone; one whose SWA KV was evicted altogether was taken for live, though its slots lead
    nowhere. Window eviction reached the insert boundary when page_size > window. Visible when the whole key
    was evicted. Fix: a third case, a tombstone, and a window eviction that stops a page short."""
    live_from = RadixTree.first_live_position(self, evicted, end)
    return live_from if live_from < end else 0


@bug(
    "split-inside-a-page",
    "TREE-1",
    "a node ends where two keys part, page or not",
    RadixTree._common_length,
)
def _(self: RadixTree, mine: Key, theirs: Key) -> int:
    """Half a page belongs to one node and half to another. Where a key leaves a node, the common prefix is
    counted in tokens and not in whole pages. Visible with page_size > 1 when two prompts part inside a page.
    Fix: round down to whole pages."""
    parted = (index for index, (a, b) in enumerate(zip(mine, theirs)) if a != b)
    return next(parted, min(len(mine), len(theirs)))


@bug(
    "leaf-takes-the-first-slots",
    "TREE-3",
    "a fresh leaf takes slots from the front of the row",
    RadixTree._add_leaves,
)
def _(self: RadixTree, path: list[TreeNode], key: Key, slots: Tensor, live_from: int) -> None:
    """A prefix answers with another part of the prompt. The new leaf gets the first slots of the row instead
    of those past what was matched. Visible when an insert finds a part of its key. Fix: count from the
    matched length."""
    matched = path[-1].end if path else 0
    shifted = torch.cat((slots[:matched], slots[: len(key) - matched]))
    RadixTree._add_leaves(self, path, key, shifted, live_from)


@bug("duplicates-freed-twice", "OWN-2", "an insert frees its duplicates twice", RadixTree.free_duplicate)
def _(self: RadixTree, full: Tensor, swa: Tensor, owed: Owed) -> None:
    """A page is handed out to two requests. Pages that the tree has already are freed while the tree is
    walked and once more at the end. Visible when an insert finds a part of its key. Fix: free each once."""
    RadixTree.free_duplicate(self, full, swa, owed)
    RadixTree.free_duplicate(self, full, swa[:0], owed)


@bug("duplicates-leak", "END-1", "an insert drops its duplicates", RadixTree.free_duplicate)
def _(self: RadixTree, full: Tensor, swa: Tensor, owed: Owed) -> None:
    """The pools leak by a prompt whenever two requests compute the same one. What the tree has already is
    passed over and belongs to nobody. Visible when an insert finds a part of its key. Fix: free it."""


@bug("duplicate-swa-leaks", "END-1", "duplicates keep their SWA side", RadixTree.free_duplicate)
def _(self: RadixTree, full: Tensor, swa: Tensor, owed: Owed) -> None:
    """The SWA pool leaks by a prompt whenever two requests compute the same one. Duplicates are freed in
    the full pool alone. Visible when an insert finds a part of its key, on models with SWA. Fix: free both
    sides."""
    RadixTree.free_duplicate(self, full, swa[:0], owed)


@bug(
    "batch-frees-what-its-last-row-did",
    "OWN-3",
    "the last row of a batch that frees is the only one",
    RadixTree._free_owed,
)
def _(self: RadixTree, owed: Owed) -> None:
    """The pools leak where clients send the same prompt at once. What the rows of a prefill batch free waits
    for its end, and each row that has duplicates forgets those of the rows before. Visible when two requests
    of a batch compute what the tree has. Fix: keep what waits."""
    for pool, pages in zip(self.store.pools, (owed.full, owed.swa)):
        if pool._waiting and pages:
            pool._waiting.clear()
    RadixTree._free_owed(self, owed)


@bug(
    "batch-frees-its-first-row-again", "OWN-2", "each row of a batch frees what the rows before did"
)
class _FreesFirstRowAgain(RadixTree):
    """A page is handed out to two requests. What the rows of a prefill batch free is noted in one list, which
    is freed after each row. Visible when two requests of a batch compute what the tree has. Fix: free it
    once, at the end."""

    _noted = Owed()

    def _free_owed(self, owed: Owed) -> None:
        waiting = self.store.full._waiting
        if waiting is None:
            return super()._free_owed(owed)
        if not waiting:
            self._noted = Owed()
        self._noted.full += owed.full
        self._noted.swa += owed.swa
        return super()._free_owed(self._noted)


@bug("insert-refreshes-nothing", "TREE-11", "an insert does not count as use")
class _InsertRefreshesNothing(RadixTree):
    """What a request has just computed is evicted before what nobody has used for an hour. Insert leaves the
    moments of the nodes that it found as they were. Visible when an old prefix is inserted again and then
    something is evicted. Fix: refresh the path."""

    _known: dict[TreeNode, list[int]]

    def _add_leaves(self, path: list[TreeNode], key: Key, slots: Tensor, live_from: int) -> None:
        self._known = {node: list(node.used) for node in path}
        super()._add_leaves(path, key, slots, live_from)

    def insert(
        self, key: Key, slots: Tensor, evicted: int = 0, prefix: int = 0, state: int | None = None
    ) -> None:
        super().insert(key, slots, evicted, prefix, state)
        for node, used in self._known.items():
            node.used = used
            self._queue(node)


# -- tombstones and recovery ----------------------------------------------------------------------


@bug(
    "recovery-under-a-lock", "TREE-4", "a tombstone is recovered while it is read",
    RadixTree.is_unread_tombstone,
)
def _(self: RadixTree, node: TreeNode) -> bool:
    """A running request reads somebody else's KV. Recovery gives a tombstone the inserter's slots and frees
    its own, although another request has it locked and names them in its row. Visible when a locked path has
    a tombstone and its prompt is computed again. Fix: recover what no lock passes through."""
    return not node.live


@bug(
    "recovery-without-swa-kv",
    "TREE-2",
    "a tombstone is recovered by who has no SWA KV",
    RadixTree.is_recoverable,
)
def _(self: RadixTree, node: TreeNode, live_from: int) -> bool:
    """A window is matched that is not there. An insert whose window was evicted recovers tombstones below its
    frontier all the same. Visible when a key with a long evicted part meets a tombstone. Fix: only from the
    frontier on."""
    return self.is_unread_tombstone(node)


@bug(
    "recovery-leaks-the-old-pages",
    "FREE-1",
    "a recovered tombstone drops its own pages",
    RadixTree.recover,
)
def _(self: RadixTree, node: TreeNode, slots: Tensor, owed: Owed) -> None:
    """The full pool leaks. The tombstone takes the inserter's slots and its own are nobody's. Visible at the
    first recovery. Fix: free them."""
    RadixTree.recover(self, node, slots, Owed())


@bug("recovery-of-half-a-node", "TREE-2", "a tombstone is recovered whole by half a key")
class _RecoversHalf(RadixTree):
    """Half of a live node leads nowhere. A tombstone that the inserter's frontier falls into is not cut
    there, and is recovered as a whole. Visible when the frontier is inside a tombstone. Fix: split it at the
    frontier, recover the rest."""

    def _cut_tombstone(self, path: list[TreeNode], live_from: int) -> list[TreeNode]:
        return path

    def is_recoverable(self, node: TreeNode, live_from: int) -> bool:
        return self.is_unread_tombstone(node) and node.end > live_from


@bug(
    "tombstone-keeps-its-mapping",
    "FREE-2",
    "a tombstone's SWA pages are counted as freed and kept",
    RadixTree.make_tombstone,
)
def _(self: RadixTree, node: TreeNode, owed: Owed) -> None:
    """SWA eviction frees nothing. The node is marked a tombstone and its size taken off the counters, but its
    pages stay mapped. Visible at the first tombstone. Fix: give them back."""
    RadixTree.make_tombstone(self, node, Owed())
    owed.tokens[SWA] += len(node.key)


@bug("tombstone-still-counts", "TREE-9", "a tombstone counts as evictable SWA KV", RadixTree.make_tombstone)
def _(self: RadixTree, node: TreeNode, owed: Owed) -> None:
    """Admission trusts room that is not there. The counter of evictable SWA tokens is not lowered when a node
    becomes a tombstone. Visible at the first tombstone. Fix: lower it."""
    RadixTree.make_tombstone(self, node, owed)
    self._evictable[SWA] += len(node.key)
