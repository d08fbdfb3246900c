"""Lock holders of the radix tree: they match, lock and insert, and are neither request nor session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from impl import adapter
from impl.lazy import Tensor, torch
from impl.torch_kv.nodes import Key
from impl.torch_kv.requests import KVSession
from impl.torch_kv.steps import Steps
from impl.torch_kv.radix_tree import RadixTree
from impl.vocabulary import RequestPhase, require, spelled, well_formed
from reference.commands import Evict, Freed, Insert, Match, Reason, Unlock, UnlockSwa, prompt_len
from reference.token_ids import token_of, tree_key


@dataclass(slots=True, eq=False)
class LockedPrefix:
    """The prefix of a lock holder.

    slots: int64 [len(key)] on the device, as the tree handed them out.
    """

    key: Key
    slots: Tensor


class LockHolders(Steps):
    """The commands that concern only the tree. A lock holder's lock is kept under its name, of any length."""

    lock_holders: dict[str, LockedPrefix]
    sessions: dict[str, KVSession]

    def is_taken(self, name: str) -> bool:
        """Return whether somebody has the name: sessions, requests and lock holders share one space."""
        return name in self.sessions or name in self.requests or name in self.lock_holders

    def require_tree(self) -> RadixTree:
        """Return the radix tree; refused where there is none."""
        require(self.tree is not None, Reason.NO_TREE)
        assert self.tree is not None
        return self.tree

    def match(self, command: Match) -> None:
        require(command.prompt and well_formed(command.prompt), Reason.EMPTY)
        require(not self.is_taken(command.holder), Reason.REQUEST_EXISTS)
        tree = self.require_tree()
        require(prompt_len(command.prompt) <= self.width, Reason.ROW_TOO_SHORT)
        key = tree_key(spelled(command.prompt), self.bigram)
        node = tree.match(key, command.full_only)
        self.relock(command.holder, node.node, command.full_only)
        self.lock_holders[command.holder] = LockedPrefix(key[: node.length], node.slots)

    def unlock(self, command: Unlock) -> None:
        require(command.holder in self.lock_holders, Reason.UNKNOWN_REQUEST)
        self.dismiss(command.holder)

    def unlock_swa(self, command: UnlockSwa) -> None:
        holder = command.holder
        request = self.requests.get(command.holder)
        require(request is not None or holder in self.lock_holders, Reason.UNKNOWN_REQUEST)
        waits = request is not None and request.phase in (
            RequestPhase.QUEUED,
            RequestPhase.ADMITTED,
        )
        require(not waits, Reason.WRONG_PHASE)
        require(self.window is not None, Reason.NO_SWA)
        tree = self.require_tree()
        if request is not None:
            holder = self.holder_of(request)
            assert self.window is not None
            left = request.settled - self.window >= request.cursors.cache_protected_len
            require(left, Reason.BAD_LENGTH)
        tree.unlock_swa(self.locks[holder])

    def insert(self, command: Insert) -> None:
        """Insert a text for a holder, and keep its path locked if the text is a chunk of a longer one
        (`chunked`)."""
        length = prompt_len(command.prompt)
        lock_holder = self.lock_holders.get(command.holder)
        require(command.prompt and well_formed(command.prompt), Reason.EMPTY)
        require(lock_holder is not None or not self.is_taken(command.holder), Reason.REQUEST_EXISTS)
        locked: Key = () if lock_holder is None else lock_holder.key
        known = tree_key(spelled(command.prompt, most=len(locked) + self.bigram), self.bigram)
        require(known[: len(locked)] == locked, Reason.SHRINKING_PREFIX)
        require(not command.evicted or self.window is not None, Reason.NO_SWA)
        tree = self.require_tree()
        require(0 <= command.evicted <= length, Reason.BAD_LENGTH)
        require(length <= self.width, Reason.ROW_TOO_SHORT)
        key = tree_key(spelled(command.prompt), self.bigram)
        key = key[: self.floor(len(key))]
        pages = (len(key) - len(locked)) // self.page_size
        self.room_for(pages, pages, int(pages > 0))
        if lock_holder is None:
            lock_holder = self.lock_holders[command.holder] = LockedPrefix(
                (), tree.slots(tree.root)
            )
            self.relock(command.holder, tree.root)
        if len(key) > len(locked):
            self.insert_computed(command.holder, lock_holder, key, command.evicted, command.chunked)
        if not command.chunked:
            self.dismiss(command.holder)

    def evict(self, command: Evict) -> Freed:
        require(command.full or command.swa or command.states, Reason.EMPTY)
        require(not command.swa or self.window is not None, Reason.NO_SWA)
        require(not command.states or self.states is not None, Reason.NO_STATES)
        tree = self.require_tree()
        require(command.full >= 0 and command.swa >= 0 and command.states >= 0, Reason.BAD_LENGTH)
        return tree.evict(command.full, command.swa, command.states)

    # -- the rules --------------------------------------------------------------------------------

    def dismiss(self, holder: str) -> None:
        """Remove the lock holder, and release its lock."""
        self.let_go(holder)
        del self.lock_holders[holder]

    def insert_computed(
        self, holder: str, lock_holder: LockedPrefix, key: Key, evicted: int, chunked: bool
    ) -> None:
        """Compute `key`, whole pages, past what the lock holder has locked, and hand it to the tree.

        evicted: window eviction has freed its own SWA pages below (tokens). Room is there. chunked: what it
        could not match again is not inserted, and its own pages are freed.
        """
        assert self.tree is not None
        prefix = len(lock_holder.key)
        computed = self.compute(key[prefix:])
        evicted = max(evicted, prefix)
        live_from = self.ceil(evicted) - prefix
        self.free_own(computed[:0], computed[:live_from])
        slots = torch.cat((lock_holder.slots, computed))
        if not chunked:
            self.tree.insert(key, slots, evicted, prefix, self.computed_state(key))
        elif self.keep(holder, key, slots, evicted, prefix, partial(self.computed_state, key)):
            lock_holder.key = key
            lock_holder.slots = self.tree.slots(self.locks[holder].node)
        else:
            self.free_own(computed, computed[live_from:])

    def compute(self, tokens: Key) -> Tensor:
        """Take pages of both pools for `tokens`, whole pages, and write them: full slots, int64."""
        slots = self.store.alloc_pages(len(tokens) // self.page_size)
        known = [token_of(token) for token in tokens]
        self.store.write(
            slots, torch.tensor(known, dtype=torch.int64).to(slots.device, non_blocking=True)
        )
        return slots

    def free_own(self, full: Tensor, swa: Tensor) -> None:
        """Free the pages of slots that no row names, int64 whole pages: `full` itself, SWA pages of `swa`
        (none without SWA)."""
        self.store.free_starts(full[:: self.page_size], swa[:: self.page_size])

    def view_tree(self, full_to_swa: list[int]) -> adapter.TreeView | None:
        """Return nodes, lock holders and counters; waits for the device.

        full_to_swa: the mapping on the host.
        """
        if self.tree is None:
            return None
        held = {
            name: adapter.LockHolderView(lock_holder.slots.tolist())
            for name, lock_holder in self.lock_holders.items()
        }
        return adapter.TreeView(self.tree.view(full_to_swa), held, self.tree.sizes())
