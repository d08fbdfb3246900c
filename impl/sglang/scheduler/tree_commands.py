"""The commands for the radix tree, Match, Unlock, Insert and Evict, as a release's own requests do them.

A lock holder is the release's Req without a session. What it inserts goes through cache_unfinished_req and
cache_finished_req, so the release itself frees duplicates, recovers tombstones and moves the lock. Only a
request in a batch has a row; a lock holder works in one row that the server keeps for this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from impl.lazy import Tensor
from impl.sglang.parts import namespaces
from impl.sglang.parts.trees import ReleaseTree
from impl.sglang.scheduler.live_requests import LockHolder
from impl.sglang.scheduler.on_server import OnServer
from impl.vocabulary import require, spelled
from reference.commands import Evict, Freed, Insert, Match, Reason, Unlock


class TreeCommands(OnServer):
    """Commands of lock holders."""

    def match(self, command: Match) -> None:
        server = self.server
        tokens = spelled(command.prompt)
        require(tokens, Reason.EMPTY)
        require(not server.is_name_taken(command.holder), Reason.REQUEST_EXISTS)
        tree = self._tree()
        # for backups to the host, which is not driven
        require(not command.full_only, Reason.UNFAITHFUL)
        require(len(tokens) <= server.geometry.width, Reason.ROW_TOO_SHORT)
        if server.states is not None and (server.owed_states() or server.geometry.lazy):
            server.states.require(1 + server.owed_states())  # the state that it locks stays
        holder = self._new_lock_holder(command.holder)
        tree.unlock(holder.req)
        self._enter(holder, tokens)
        holder.slots = self._match_prefix(holder, self.release.ids(self.named_tokens(tokens)))
        self.release.put(holder.req, "cache_protected_len", len(holder.slots))
        tree.lock(holder.req)
        holder.tokens = self._spelling(tokens, len(holder.slots))
        server.lock_holders[command.holder] = holder

    def _match_prefix(self, holder: LockHolder, ids: Any) -> Tensor:
        """Return the slots of what the tree has of a text."""
        return self._tree().match(holder.req, ids)

    def unlock(self, command: Unlock) -> None:
        require(command.holder in self.server.lock_holders, Reason.UNKNOWN_REQUEST)
        self._tree().unlock(self.server.lock_holders.pop(command.holder).req)

    def insert(self, command: Insert) -> None:
        server = self.server
        release = self.release
        geometry = self.server.geometry
        tokens = spelled(command.prompt)
        require(tokens, Reason.EMPTY)
        holder = server.lock_holders.get(command.holder)
        require(holder is not None or not server.is_name_taken(command.holder), Reason.REQUEST_EXISTS)
        locked = [] if holder is None else holder.tokens
        prefix = 0 if holder is None else len(holder.slots)
        require(tokens[: len(locked)] == locked, Reason.SHRINKING_PREFIX)
        require(geometry.window is not None or command.evicted == 0, Reason.NO_SWA)
        self._tree()
        require(0 <= command.evicted <= len(tokens), Reason.BAD_LENGTH)
        if command.evicted > prefix and geometry.window is not None:
            # Between the chunks of a prefill a tree's server does not evict; afterwards no further than this.
            limit = release.eviction_limit(len(tokens), geometry.window, geometry.page_size)
            require(not command.chunked and command.evicted <= limit, Reason.UNFAITHFUL)
        require(len(tokens) <= geometry.width, Reason.ROW_TOO_SHORT)
        computed = self._spelling(tokens, self._whole(len(tokens)))
        end = len(computed)
        server.require_room([(prefix, end)])
        if server.states is not None:
            slots = 2 + server.states.buffers + server.owed_states()
            server.states.require(slots, int(holder is None))

        holder = holder or self._new_lock_holder(command.holder)
        self._enter(holder, computed)
        self._compute(holder, computed, command.evicted)
        if server.states is not None and computed:
            server.states.compute(holder.req, computed, self._tracked(prefix, end))
        if not command.chunked:
            release.hand_in(holder.req, server.cache, server.rows, self._tree())
            server.lock_holders.pop(command.holder, None)
            return
        release.checkpoint(holder.req, server.cache, chunked=True)
        if server.states is not None and computed:
            server.states.free_slot(holder.req)
        locked_len = release.cursors(holder.req).cache_protected_len
        holder.tokens = self._spelling(tokens, locked_len)
        # A request would go on with what the tree did not take; a lock holder has nothing of its own.
        holder.slots = server.rows.req_to_token[server.spare_row, :locked_len].long()
        if locked_len < end:
            release.drop(holder.req, server.cache, locked_len, end)
        server.lock_holders[command.holder] = holder

    def evict(self, command: Evict) -> Freed:
        require(command.full or command.swa or command.states, Reason.EMPTY)
        require(self.server.geometry.window is not None or command.swa == 0, Reason.NO_SWA)
        require(self.server.states is not None or command.states == 0, Reason.NO_STATES)
        tree = self._tree()
        require(command.full >= 0 and command.swa >= 0 and command.states >= 0, Reason.BAD_LENGTH)
        return tree.evict(command.full, command.swa, command.states)

    def _tracked(self, prefix: int, end: int) -> int:
        """Return after how many tokens of a text that was matched up to `prefix` a state is kept for the
        tree, 0 for none."""
        del prefix
        return end

    def _tree(self) -> ReleaseTree:
        tree = self.server.tree
        require(tree is not None, Reason.NO_TREE)
        assert tree is not None
        return tree

    def _whole(self, tokens: int) -> int:
        """Return the number of these tokens that the tree can know: whole pages."""
        page = self.server.geometry.page_size
        return max(0, tokens - self.server.geometry.bigram) // page * page

    def _spelling(self, tokens: list[int], length: int) -> list[int]:
        """Return the tokens that tell the first `length` positions of a text: of bigrams one more."""
        return tokens[: length + self.server.geometry.bigram] if length else []

    def _enter(self, holder: LockHolder, tokens: list[int]) -> None:
        """Put a lock holder's request into the namespace of these tokens."""
        names = namespaces.key_fields_of(self.server.namespace, tokens)
        for field in namespaces.key_fields(self.server.namespace):
            if getattr(holder.req, field) != names.get(field):
                setattr(holder.req, field, names.get(field))

    def named_tokens(self, tokens: list[int]) -> list[int]:
        """Return the tokens in the release's ids."""
        return namespaces.exchange_texts(tokens) if self.server.is_in_namespace(tokens) else tokens

    def _new_lock_holder(self, name: str) -> LockHolder:
        """Return a lock holder without a lock."""
        req = self.server.new_request(f"lock holder {name}", [], None, None)
        self._tree().reset_match(req)
        return LockHolder(req, [], self.server.rows.req_to_token[0, :0].long())

    def _compute(self, holder: LockHolder, tokens: Sequence[int], evicted: int) -> None:
        """Give the lock holder the row of a request that has computed `tokens`, whole pages for the tree.

        evicted: a window eviction has freed its SWA pages below this, as far as they are its own.
        """
        server = self.server
        req = holder.req
        row = self.server.spare_row
        prefix = len(holder.slots)
        end = len(tokens)
        page = server.geometry.page_size
        cells = server.rows.req_to_token[row]
        cells[:prefix] = holder.slots.to(cells.dtype)
        if prefix < end:
            slots = self.release.take(server.cache, prefix, end, holder.slots)
            cells[prefix:end] = slots.to(cells.dtype)
            server.stamp(slots, tokens[prefix:])
        boundary = -(-evicted // page) * page if evicted > prefix else 0
        if boundary:
            server.allocator.free_swa(cells[prefix : min(boundary, self._whole(end))].long())
        self.release.mark_computed(req, self.named_tokens(list(tokens)), row, boundary)
