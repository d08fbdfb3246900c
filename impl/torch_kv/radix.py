"""Requests and sessions, with a radix tree or without: what is restored, matched, locked, inserted, let go,
and evicted for room.

Each rule is a method of its own, as in `sessions`. Which pages the tree
takes, keeps and frees it decides on the host; slots move on the device, and nothing here waits for that.

A holder is an ordinary request by its own name, a session by its name, or a lock holder of the tree. It has
one lock at most. R (cache_protected_len) is what a request has locked: the tree's pages, not the row's.
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
    """Admission and ends. The radix tree is for those who have no slot: ordinary requests, and sessions in
    their first turn.

    tree: None without one. locks: by holder. bigram: the tree knows a token with the one that follows it.
    """

    tree: RadixTree | None
    locks: dict[str, NodeLock]
    bigram: bool

    # Locks.

    def holder_of(self, request: KVRequest) -> str:
        """Under whose name a request's prefix is locked: its session's, whose slot carries R on."""
        return request.name if request.session is None else request.session.name

    def relock(self, holder: str, node: TreeNode, full_only: bool = False) -> None:
        """The holder's lock reaches to the end of `node`; what it had is let go after that."""
        assert self.tree is not None
        lock = self.tree.lock(node, full_only)
        self.let_go(holder)
        self.locks[holder] = lock

    def let_go(self, holder: str) -> None:
        """Give back the holder's lock, if it has one, once."""
        lock = self.locks.pop(holder, None)
        if lock is not None:
            assert self.tree is not None
            self.tree.unlock(lock)

    # Admission.

    def restore(self, request: KVRequest) -> None:
        """Lend a session's slot to its request, cut back to the usable prefix. Whoever has none starts at 0,
        or gets what the tree has of its text, with a lock; it has a row when it first extends.

        The slot goes on naming its row, so that a rejected admission can be repeated (SES-3).
        """
        slot = self.slot_of(request)
        if slot is None and self.tree is not None:
            node = self.tree.ending(self.match_key(request))
            self.require_state(request, node)
        if slot is not None:
            prefix = self.resume_length(request, self.key_length(request))
            self.free_tail(slot, prefix)
            self.rewind_state(slot, prefix, self.locks.get(self.holder_of(request)))
            self.lend(request, slot)
        elif self.tree is not None:
            self.match_prefix(request)

    def match_prefix(self, request: KVRequest) -> None:
        """Lock the longest usable prefix, in the place of that of an admission that came to nothing.

        The slots are kept until a row names them. RowCursors: the mirror alone, there is no row yet.
        """
        assert self.tree is not None
        holder = self.holder_of(request)
        found = self.tree.match(self.match_key(request))
        self.relock(holder, found.node)
        self.match_state(request, found.node)
        request.prefix = found.slots
        request.cursors = self.matched(request.cursors, found.length)

    def match_key(self, request: KVRequest) -> Key:
        """Tokens that a prefix may cover: all but the last."""
        return tree_key(request.text[: self.key_length(request)], self.bigram)

    def matched(self, cursors: RowCursors[N], length: N) -> RowCursors[N]:
        """A request with `length` tokens of prefix, whole pages: C = A = R, and nothing evicted."""
        return RowCursors(length, length, cursors.swa_evicted_seqlen, length)

    def take_rows(self, requests: Sequence[KVRequest]) -> None:
        """A row for each of these, which have none and extend now. The caller knows that they are there. Rows
        of those who have matched something name the tree's slots."""
        for request in requests:
            request.row = self.store.free_rows.pop()
        found = [(r, r.prefix) for r in requests if r.prefix is not None and r.prefix.numel()]
        if found:
            started = [request for request, _ in found]
            slots = [prefix for _, prefix in found]
            lengths = [request.cursors.cache_protected_len for request in started]
            lanes = Lanes(self.store.device, started, lengths)
            self.store.cursors.move(lanes, self.matched)
            start = torch.zeros_like(lanes.row)
            self.store.name(
                self.store.span(lanes.row, start, lanes.columns[0], lengths), torch.cat(slots)
            )
        for request in requests:
            request.prefix = None
        self.begin_states(requests)

    # Inserting while the request goes on.

    def insert_unfinished(self, requests: Sequence[KVRequest]) -> None:
        """Insert what a batch has just prefilled into the tree, entry by entry, where it may.

        Each entry that is inserted has its lock and R at the end of its whole pages, and its row names
        the tree's slots up to there; an entry finds what those before it have inserted.
        """
        if self.tree is None:
            return
        lanes = [r for r in requests if self.inserts(r)]
        lengths = [self.unfinished_length(r.cursors) for r in lanes]
        kept, ends, slots = [], [], []
        with self.store.frees_wait():
            for request, length, own in zip(
                lanes, lengths, self.row_slots(lanes, lengths), strict=True
            ):
                key = tree_key(request.text[: length + self.bigram], self.bigram)
                holder = self.holder_of(request)
                owned_from = self.owned_from(request.cursors)
                if self.keep(holder, key, own, *owned_from, partial(self.checkpoint, request)):
                    kept.append(request)
                    ends.append(length)
                    slots.append(self.tree.slots(self.locks[holder].node))
        if kept:
            self.rename(kept, ends, slots)
            self.move(kept, self.protected_to, ends)

    def inserts(self, request: KVRequest) -> bool:
        """Whether an extend inserts what it has so far: not in later turns, nor if all of it is there."""
        whole = self.unfinished_length(request.cursors) > request.cursors.cache_protected_len
        return whole and self.slot_of(request) is None

    def unfinished_length(self, cursors: RowCursors[int]) -> int:
        """Tokens that a request which goes on has for the tree: whole pages."""
        return self.floor(cursors.kv_committed_len - self.bigram)

    def owned_from(self, cursors: RowCursors[int]) -> tuple[int, int]:
        """From where on an inserter brings SWA KV of its own, and full KV: behind its window and R."""
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
        """Insert `key`, whole pages, and move the lock to its end, if that can then be matched again.

        slots: int64 [len(key)] on the device. state: gives a slot with the state after `key`. If not, nothing
        changes, and nothing counts as used.
        """
        assert self.tree is not None
        if not self.may_keep(key, evicted):
            return False
        self.tree.insert(key, slots, evicted, prefix, state())
        self.relock(holder, self.tree.at(key))
        return True

    def may_keep(self, key: Key, evicted: int) -> bool:
        """Whether an inserter that goes on would still have its window.

        Where a tombstone is not recovered, for somebody has locked it, the inserter's own KV is freed
        as a duplicate although it has not ended.
        """
        assert self.tree is not None
        return self.tree.usable_after(key, evicted)

    def rename(
        self, requests: Sequence[KVRequest], lengths: list[int], slots: list[Tensor]
    ) -> None:
        """Rows name the tree's slots up to `lengths`: duplicates of their own are free (FREE-1).

        slots: int64 [lengths[i]] each, on the device.
        """
        self.store.name(self._row_span(requests, lengths), torch.cat(slots))

    def protected_to(self, cursors: RowCursors[N], length: N) -> RowCursors[N]:
        """`length` tokens of the row are the tree's (R)."""
        return cursors._replace(cache_protected_len=length)

    def row_slots(self, requests: Sequence[KVRequest], lengths: list[int]) -> list[Tensor]:
        """Full slots of the first lengths[i] positions of each row: int64 [lengths[i]] each."""
        if not requests:
            return []
        return list(self.store.slots(self._row_span(requests, lengths)).split_with_sizes(lengths))

    def _row_span(self, requests: Sequence[KVRequest], lengths: list[int]) -> BatchSpan:
        lanes = Lanes(self.store.device, requests, lengths)
        return self.store.span(lanes.row, torch.zeros_like(lanes.row), lanes.columns[0], lengths)

    # The end.

    def end_ordinary(self, request: KVRequest, target: int) -> None:
        """An ordinary request has finished with the first `target` tokens of its text: they stay in the tree,
        the rest of its row goes."""
        with self.store.frees_wait():
            if self.tree is not None:
                self.insert_finished(request, target)
            self.drop(request)

    def insert_finished(self, request: KVRequest, target: int) -> None:
        """Hand the whole pages of the text that counts to the tree, unless it has them all (R).

        From then on they are the tree's, and the release of the row leaves them alone.
        """
        assert self.tree is not None
        length = self.tracked_len(request, self.finished_length(request.cursors, target))
        if length > request.cursors.cache_protected_len and self.brings_state(request, length):
            key = tree_key(request.text[: length + self.bigram], self.bigram)
            own = self.row_slots([request], [length])[0]
            self.tree.insert(
                key, own, *self.owned_from(request.cursors), self.donate(request, length)
            )
            self.move([request], self.protected_to, [length])

    def finished_length(self, cursors: RowCursors[int], target: int) -> int:
        """Tokens that a finished request has for the tree: what counts and is committed, whole pages."""
        return self.floor(min(cursors.kv_committed_len, target) - self.bigram)

    def drop(self, request: KVRequest) -> None:
        """An ordinary request ends or is retracted: what it holds goes, and then its lock."""
        if request.row is not None:
            self.release(request)
        self.free_state(request)
        self.detach(request)
        self.let_go(request.name)

    def drop_retracted(self, request: KVRequest) -> None:
        """A retracted ordinary request keeps nothing."""
        self.drop(request)

    def abort_unstarted(self, request: KVRequest) -> None:
        """A session's turn is given up that has written nothing: the slot stays as it is, with its lock; one
        that was taken for this admission goes."""
        if self.slot_of(request) is None:
            self.let_go(self.holder_of(request))
            self.free_state(request)

    def wipe(self, session: KVSession, request: KVRequest) -> None:
        """Midway abort: the session's KV goes, once; its history stays (sgl-project/sglang#22790)."""
        held = self.held_by(session, request)
        assert held is not None  # for it has written some
        self.release(held)
        self.free_state(held)
        session.slot = None
        self.let_go(session.name)

    def close_now(self, session: KVSession) -> None:
        """Release what an idle session holds."""
        if session.slot is not None:
            self.release(session.slot)
            self.free_state(session.slot)
        self.let_go(session.name)

    # Room.

    def room_for(self, pages: int, swa_pages: int, states: int = 0) -> None:
        """Have so many pages free in each pool, and slots of recurrent state, or refuse with nothing evicted.

        All are checked before anything is evicted: whatever no lock pins is evictable.
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
        """By how many the free slots of recurrent state fall short; 0 on a model without."""
        return max(states - len(self.states.free), 0) if self.states is not None else 0

    def evictable_states(self) -> int:
        return self.tree.evictable_states() if self.tree is not None else 0

    def missing(self, pages: int, swa_pages: int) -> tuple[int, int]:
        """Tokens by which either pool falls short of so many free pages; 0 SWA tokens without SWA."""
        full, swa = self.store.full, self.store.swa
        short = max(pages - full.available, 0) * self.page_size
        return short, max(swa_pages - swa.available, 0) * self.page_size if swa is not None else 0

    def sizes(self) -> TreeSizes:
        """Tokens in the tree: what it could give back, what locks pin, each once."""
        return TreeSizes(0, 0, 0, 0) if self.tree is None else self.tree.sizes()
