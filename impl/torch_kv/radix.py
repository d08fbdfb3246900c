"""Rules of requests and sessions that involve the radix tree: restore, match, lock, insert, release, evict.

Each rule is a method of its own, as in `sessions`. The tree decides on the host which pages it takes, keeps
and frees; slots move on the device, and nothing waits for it.

A holder of a lock is an ordinary request or a session, by its name, or a lock holder of the tree. It has at
most one lock. R (cache_protected_len) is the length of a request's locked prefix: pages of the tree, not of
the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from impl.adapter import TreeSizes
from impl.torch_kv.cursors import Lanes, N, RowCursors
from impl.lazy import Tensor, torch
from impl.torch_kv.nodes import Key, NodeLock, TreeNode
from impl.torch_kv.requests import KVRequest, KVSession
from impl.torch_kv.sessions import SessionRules
from impl.torch_kv.store import BatchSpan
from impl.torch_kv.radix_tree import RadixTree
from impl.vocabulary import require
from reference.commands import Reason
from reference.token_ids import tree_key


class PrefixRules(SessionRules):
    """Admission and end of requests. Only requests without a slot use the radix tree: ordinary requests, and
    sessions in their first turn.

    tree: the radix tree, None without one.
    locks: the lock of each holder.
    bigram: the tree's keys are pairs of a token and the next one.
    """

    tree: RadixTree | None
    locks: dict[str, NodeLock]
    bigram: bool

    # Locks

    def holder_of(self, request: KVRequest) -> str:
        """Return the holder of a request's lock: its session, whose slot keeps R between turns, or itself."""
        return request.name if request.session is None else request.session.name

    def relock(self, holder: str, node: TreeNode, full_only: bool = False) -> None:
        """Lock the prefix up to `node` for the holder, and then release the lock that it had."""
        assert self.tree is not None
        lock = self.tree.lock(node, full_only)
        self.let_go(holder)
        self.locks[holder] = lock

    def let_go(self, holder: str) -> None:
        """Release the holder's lock, if it has one."""
        lock = self.locks.pop(holder, None)
        if lock is not None:
            assert self.tree is not None
            self.tree.unlock(lock)

    # Admission

    def restore(self, request: KVRequest) -> None:
        """Lend the session's slot to its request, trimmed to the usable prefix. A request without a slot
        starts at 0, or with a lock on the prefix that the tree has; it gets a row when it first extends.

        The slot still names its row, so that a rejected admission can be repeated (SES-3).
        """
        slot = self.slot_of(request)
        if slot is None and self.tree is not None:
            node = self.tree.state_match_end(self.match_key(request))
            self.require_state(request, node)
        if slot is not None:
            prefix = self.resume_length(request, self.key_length(request))
            self.free_tail(slot, prefix)
            self.rewind_state(slot, prefix, self.locks.get(self.holder_of(request)))
            self.lend(request, slot)
        elif self.tree is not None:
            self.match_prefix(request)

    def match_prefix(self, request: KVRequest) -> None:
        """Lock the longest usable prefix, in place of the lock of an earlier admission that was rejected.

        The request keeps the slots until its row names them. Only the host's cursors change: there is no row
        yet.
        """
        assert self.tree is not None
        holder = self.holder_of(request)
        node = self.tree.match(self.match_key(request))
        self.relock(holder, node.node)
        self.match_state(request, node.node)
        request.prefix = node.slots
        request.cursors = self.cursors_after_match(request.cursors, node.length)

    def match_key(self, request: KVRequest) -> Key:
        """Return the tokens that a prefix may cover: all but the last."""
        return tree_key(request.text[: self.key_length(request)], self.bigram)

    def cursors_after_match(self, cursors: RowCursors[N], length: N) -> RowCursors[N]:
        """Return the cursors behind a matched prefix of `length` tokens, whole pages: C = A = R."""
        return RowCursors(length, length, cursors.swa_evicted_seqlen, length)

    def take_rows(self, requests: Sequence[KVRequest]) -> None:
        """Give each request a row: they have none and extend now. The caller has checked that the rows are
        free. The row of a request with a matched prefix names the tree's slots."""
        for request in requests:
            request.row = self.store.free_rows.pop()
        with_prefix = [(r, r.prefix) for r in requests if r.prefix is not None and r.prefix.numel()]
        if with_prefix:
            started = [request for request, _ in with_prefix]
            slots = [prefix for _, prefix in with_prefix]
            lengths = [request.cursors.cache_protected_len for request in started]
            lanes = Lanes(self.store.device, started, lengths)
            self.store.cursors.move(lanes, self.cursors_after_match)
            start = torch.zeros_like(lanes.row)
            self.store.name(
                self.store.span(lanes.row, start, lanes.columns[0], lengths), torch.cat(slots)
            )
        for request in requests:
            request.prefix = None
        self.begin_states(requests)

    # Inserts of unfinished requests

    def insert_unfinished(self, requests: Sequence[KVRequest]) -> None:
        """Insert the KV that a batch has just prefilled into the tree, entry by entry.

        An inserted entry's lock and R move to the end of its whole pages, and its row names the tree's slots
        up to there. An entry finds the inserts of the entries before it.
        """
        if self.tree is None:
            return
        lanes = [r for r in requests if self.inserts(r)]
        lengths = [self.unfinished_length(r.cursors) for r in lanes]
        holders = []
        ends = []
        slots = []
        with self.store.frees_wait():
            for request, length, row_slots in zip(
                lanes, lengths, self.row_slots(lanes, lengths), strict=True
            ):
                key = tree_key(request.text[: length + self.bigram], self.bigram)
                holder = self.holder_of(request)
                owned_from = self.owned_starts(request.cursors)
                if self.keep(holder, key, row_slots, *owned_from, partial(self.checkpoint, request)):
                    holders.append(request)
                    ends.append(length)
                    slots.append(self.tree.slots(self.locks[holder].node))
        if holders:
            self.rename(holders, ends, slots)
            self.move(holders, self.with_protected_len, ends)

    def inserts(self, request: KVRequest) -> bool:
        """Return whether an extend inserts the request's KV: it has no slot, and whole pages behind R."""
        has_whole_page = self.unfinished_length(request.cursors) > request.cursors.cache_protected_len
        return has_whole_page and self.slot_of(request) is None

    def unfinished_length(self, cursors: RowCursors[int]) -> int:
        """Return the number of tokens that an unfinished request may insert: whole pages."""
        return self.floor(cursors.kv_committed_len - self.bigram)

    def owned_starts(self, cursors: RowCursors[int]) -> tuple[int, int]:
        """Return the first position with SWA KV of the inserter's own, and the first with full KV."""
        return max(
            cursors.swa_evicted_seqlen, cursors.cache_protected_len
        ), cursors.cache_protected_len

    def keep(
        self,
        holder: str,
        key: Key,
        slots: Tensor,
        evicted: int,
        prefix: int,
        state: Callable[[], int | None],
    ) -> bool:
        """Insert `key`, whole pages, and move the lock to its end, if a match would find all of it then.
        Otherwise nothing changes, and nothing counts as used.

        slots: int64 [len(key)] on the device.
        state: returns a slot with the state after `key`.
        """
        assert self.tree is not None
        if not self.may_keep(key, evicted):
            return False
        self.tree.insert(key, slots, evicted, prefix, state())
        self.relock(holder, self.tree.node_ending_at(key))
        return True

    def may_keep(self, key: Key, evicted: int) -> bool:
        """Return whether the inserter, which is unfinished, still has its window after the insert.

        A locked tombstone is not recovered: the inserter's own KV is freed as a duplicate, although the
        inserter still needs it.
        """
        assert self.tree is not None
        return self.tree.usable_after(key, evicted)

    def rename(
        self, requests: Sequence[KVRequest], lengths: list[int], slots: list[Tensor]
    ) -> None:
        """Have the rows name the tree's slots up to `lengths`; their own duplicates are free (FREE-1).

        slots: int64 [lengths[i]] each, on the device.
        """
        self.store.name(self._row_span(requests, lengths), torch.cat(slots))

    def with_protected_len(self, cursors: RowCursors[N], length: N) -> RowCursors[N]:
        """Return the cursors of a row whose first `length` tokens are the tree's (R)."""
        return cursors._replace(cache_protected_len=length)

    def row_slots(self, requests: Sequence[KVRequest], lengths: list[int]) -> list[Tensor]:
        """Return the full slots of the first lengths[i] positions of each row: int64 [lengths[i]] each."""
        if not requests:
            return []
        return list(self.store.slots(self._row_span(requests, lengths)).split_with_sizes(lengths))

    def _row_span(self, requests: Sequence[KVRequest], lengths: list[int]) -> BatchSpan:
        lanes = Lanes(self.store.device, requests, lengths)
        return self.store.span(lanes.row, torch.zeros_like(lanes.row), lanes.columns[0], lengths)

    # End

    def end_ordinary(self, request: KVRequest, target: int) -> None:
        """End an ordinary request with the first `target` tokens of its text: the tree keeps these, the
        rest of the row is freed."""
        with self.store.frees_wait():
            if self.tree is not None:
                self.insert_finished(request, target)
            self.drop(request)

    def insert_finished(self, request: KVRequest, target: int) -> None:
        """Insert the whole pages of the first `target` tokens into the tree, unless it has them all (R).

        They are then the tree's, and the release of the row does not free them.
        """
        assert self.tree is not None
        length = self.tracked_len(request, self.finished_length(request.cursors, target))
        if length > request.cursors.cache_protected_len and self.brings_state(request, length):
            key = tree_key(request.text[: length + self.bigram], self.bigram)
            row_slots = self.row_slots([request], [length])[0]
            self.tree.insert(
                key, row_slots, *self.owned_starts(request.cursors), self.donate(request, length)
            )
            self.move([request], self.with_protected_len, [length])

    def finished_length(self, cursors: RowCursors[int], target: int) -> int:
        """Return the number of tokens that a finished request inserts: committed, up to `target`, whole
        pages."""
        return self.floor(min(cursors.kv_committed_len, target) - self.bigram)

    def drop(self, request: KVRequest) -> None:
        """Free everything that an ordinary request holds, and then release its lock."""
        if request.row is not None:
            self.release(request)
        self.free_state(request)
        self.detach(request)
        self.let_go(request.name)

    def drop_retracted(self, request: KVRequest) -> None:
        """Free everything that a retracted ordinary request holds."""
        self.drop(request)

    def abort_unstarted(self, request: KVRequest) -> None:
        """Abort a turn that has written nothing: the session's slot stays, with its lock. Without a slot the
        lock and the state of this admission are released."""
        if self.slot_of(request) is None:
            self.let_go(self.holder_of(request))
            self.free_state(request)

    def wipe(self, session: KVSession, request: KVRequest) -> None:
        """Abort a running turn: the session's KV is freed, its history stays (sgl-project/sglang#22790)."""
        held = self.holder_of_session(session, request)
        assert held is not None  # the turn has written KV
        self.release(held)
        self.free_state(held)
        session.slot = None
        self.let_go(session.name)

    def close_now(self, session: KVSession) -> None:
        """Free everything that an idle session holds."""
        if session.slot is not None:
            self.release(session.slot)
            self.free_state(session.slot)
        self.let_go(session.name)

    # Room

    def room_for(self, pages: int, swa_pages: int, states: int = 0) -> None:
        """Evict until that many pages and slots of recurrent state are free, or refuse and evict nothing.

        All are checked before the first eviction: everything that no lock pins is evictable.
        """
        full, swa = self.missing(pages, swa_pages)
        short = self.missing_states(states)
        if full or swa or short:
            sizes = self.sizes()
            require(full <= sizes.full_evictable, Reason.OUT_OF_FULL)
            require(swa <= sizes.swa_evictable, Reason.OUT_OF_SWA)
            require(short <= self.evictable_states(), Reason.OUT_OF_STATES)
            assert self.tree is not None
            self.tree.evict(full, swa, short)

    def missing_states(self, states: int) -> int:
        """Return the number of states to evict for `states` free slots; 0 on a model without states."""
        return max(states - len(self.states.free), 0) if self.states is not None else 0

    def evictable_states(self) -> int:
        return self.tree.evictable_states() if self.tree is not None else 0

    def missing(self, pages: int, swa_pages: int) -> tuple[int, int]:
        """Return the tokens to evict from each pool for that many free pages; 0 SWA tokens without SWA."""
        full = self.store.full
        swa = self.store.swa
        short = max(pages - full.available, 0) * self.page_size
        return short, max(swa_pages - swa.available, 0) * self.page_size if swa is not None else 0

    def sizes(self) -> TreeSizes:
        """Return the evictable and the protected tokens of the tree."""
        return (
            TreeSizes(full_evictable=0, full_protected=0, swa_evictable=0, swa_protected=0)
            if self.tree is None
            else self.tree.sizes()
        )
