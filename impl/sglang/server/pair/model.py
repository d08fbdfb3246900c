"""The forward pass of one server of a pair: its stamps stand in the release's own KV tensors, as what crosses
the network is bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from impl.sglang.server.clients import Clients
from impl.sglang.server.fake_model import FakeModel, MOST
from impl.sglang.server.fake_tier import FROM_HOST
from impl.sglang.server.outcome import OUTDATED, UNSENT, Misread
from impl.sglang.server.pair.network import PlayedNetwork
from impl.sglang.server.tier import TOKEN_BITS, stamp


class Region(NamedTuple):
    """Memory that a transfer reads or writes.

    number: index of the tensor, of the row buffer or of the state buffer in its pool.
    item: bytes of a page, of a row of metadata or of a slot of recurrent state.
    tensor: None for metadata and state.
    """

    pool: str
    number: int
    start: int
    size: int
    item: int
    tensor: torch.Tensor | None


def _buffers(pool: str, infos: tuple[Any, Any, Any]) -> list[Region]:
    """Return buffers as memory.

    infos: their addresses, sizes and sizes of an item (bytes).
    """
    return [
        Region(pool, number, start, size, item, None)
        for number, (start, size, item) in enumerate(zip(*infos, strict=True))
    ]


def _regions(pool: str, tensors: Iterable[torch.Tensor], page: int) -> list[Region]:
    """Return the tensors of a pool as memory."""
    return [
        Region(pool, number, tensor.data_ptr(), tensor.nbytes, tensor[0].nbytes * page, tensor)
        for number, tensor in enumerate(tensors)
    ]


class TensorSlots:
    """The stamps of a pool as numbers, 0 for none; its tensors have them by slot."""

    def __init__(self, tensors: list[torch.Tensor], writers: dict[int, str]) -> None:
        self.tensors = tensors
        self.writers = writers

    def __getitem__(self, slot: int) -> int:
        token, position = (int(value) for value in self.tensors[0][slot, 0, :2].tolist())
        return stamp(token, position) if token else 0

    def __setitem__(self, slot: int, number: int) -> None:
        self.writers[slot] = FROM_HOST
        token_and_position = number & (1 << TOKEN_BITS) - 1, (number >> TOKEN_BITS) - 1
        if not number:
            token_and_position = 0, 0
        for tensor in self.tensors:
            tensor[slot, 0, :2] = torch.tensor(token_and_position, dtype=torch.float32)


class ServerModel(FakeModel):
    """The forward pass of `server`.

    regions: its KV tensors and metadata rows.
    unsent: pages of the SWA pool that hold the place of a position of a received prompt, and that nobody has
        written.
    outdated: pages of the full pool whose KV P has sent from a page that it had given back, and that another
        has written to.
    sends_draft: P has the draft model as well, so that D receives its KV, and the hidden state that D drafts
        from.
    notes: called with what a judge would note.
    """

    def __init__(
        self, scheduler: Any, release: Any, clients: Clients, server: str, network: PlayedNetwork,
        draft: int, chunk: int, sends_draft: bool,
    ) -> None:  # fmt: skip
        self.server = server
        self.network = network
        kv = scheduler.token_to_kv_pool_allocator.get_kvcache()
        pools = {"full": getattr(kv, "full_kv_pool", kv), "swa": getattr(kv, "swa_kv_pool", None)}
        self.tensors = {
            name: [*pool.k_buffer, *pool.v_buffer]
            for name, pool in pools.items()
            if pool is not None
        }
        self.sends_draft = sends_draft
        self.target_tensors = len(self.tensors["full"])
        if sends_draft:
            pool = scheduler.draft_worker.primary_draft_kv_pool
            self.tensors["full"] += [*pool.k_buffer, *pool.v_buffer]
        page = scheduler.page_size
        self.regions = [
            region for each in self.tensors.items() for region in _regions(*each, page)
        ]
        if draft and not sends_draft:
            draft_pool = scheduler.draft_worker.primary_draft_kv_pool
            self.regions += _regions("draft", [*draft_pool.k_buffer, *draft_pool.v_buffer], page)
        for tensors in self.tensors.values():
            for tensor in tensors:
                tensor.zero_()
        self.regions += _buffers("metadata", scheduler.disagg_metadata_buffers.get_buf_infos())
        if release.has_states(scheduler.req_to_token_pool):
            self.regions += _buffers("state", scheduler.req_to_token_pool.get_state_buf_infos())
        self.without_draft: set[str] = set()  # retracted, which gives up the KV of the draft model
        self.unsent: set[int] = set()
        self.outdated: set[int] = set()
        self.notes: Callable[[str, str, str], None] = lambda *_: None
        super().__init__(scheduler, release, clients, draft, chunk)
        # The arguments of D's server do not say whether it has a tree.
        self.tree = not scheduler.tree_cache.disable

    def slots(self, pool: str, size: int) -> Any:
        """Return the stamps in a pool as numbers, which a host tier copies."""
        if pool == "state":
            return super().slots(pool, size)
        return TensorSlots(self.tensors[pool], self.writers[pool])

    def free_pages(self, pool: str = "full") -> list[int]:
        """Return the free list of a pool."""
        allocator = self.allocator
        names = {"full": "full_attn_allocator", "swa": "swa_attn_allocator"}
        return self.release.free_pages(getattr(allocator, names[pool], allocator))

    def begin_round(self, batch: Any) -> None:
        super().begin_round(batch)
        if batch.forward_mode.is_extend():
            kind = "computes a prompt part"
            if self.tier is not None and batch.hicache_consumer_index >= 0:
                kind += ", with KV of its host"
        elif self.draft:
            kind = "verifies drafts"
        else:
            kind = "decodes"
        names = ", ".join(request.rid for request in batch.reqs)
        self.network.tell(self.server, f"{kind}: {names}")

    def decode(self, batch: Any) -> list[int]:
        """Decode one token for each request. That token's input has no KV yet."""
        self._register_received_prompts(batch.reqs, [length - 1 for length in batch.seq_lens.tolist()])
        return super().decode(batch)

    def verify(self, batch: Any, draft: int) -> tuple[list[list[int]], list[int]]:
        """Run a verify round, which begins with the hidden state of the newest token."""
        lengths = batch.seq_lens.tolist()
        self._register_received_prompts(batch.reqs, lengths)
        self.without_draft |= {req.rid for req in batch.reqs if req.retracted_stain}
        if self.sends_draft:
            tokens = batch.spec_info.bonus_tokens.tolist()
            hidden = batch.spec_info.hidden_states
            for request, token, length, got in zip(
                batch.reqs, tokens, lengths, hidden[:, :2].tolist()
            ):
                want = [token, length]
                if got != want and not request.retracted_stain:  # else that of its first token
                    says = f"{request.rid} drafts from the hidden state of {got} and not of {want}"
                    self.notes("PD-6 D drafts from another hidden state", request.rid, says)
        return super().verify(batch, draft)

    def _register_received_prompts(
        self, requests: Iterable[Any], lengths: Iterable[int]
    ) -> None:
        """Register requests whose prompt the peer computed.

        lengths: how many tokens of each have KV.
        """
        for request, length in zip(requests, lengths):
            if request.rid not in self._texts:
                text = [*request.origin_input_ids, *request.output_ids]
                self._texts[request.rid] = text[:length]
                self._inputs[request.rid] = len(request.origin_input_ids)
                self._decoded[request.rid] = 0

    def _write(self, slots: torch.Tensor, tokens: Iterable[int], start: int, request: str) -> None:
        places = {"full": slots.to(torch.int64)}
        if self.window:
            places["swa"] = self.allocator.translate_loc_from_full_to_swa(slots).to(torch.int64)
        stamps = [(token, position) for position, token in enumerate(tokens, start)]
        written = torch.tensor(stamps, dtype=torch.float32)
        for pool, pool_slots in places.items():
            for tensor in self.tensors[pool]:
                tensor[pool_slots, 0, :2] = written
            self.writers[pool].update(dict.fromkeys(pool_slots.tolist(), request))
        self.outdated -= set((places["full"] // self.allocator.page_size).tolist())
        if "swa" in places:
            self.unsent -= set((places["swa"] // self.allocator.page_size).tolist())

    def _compare(
        self, pool: str, request: str, first: int, slots: list[int], text: list[int]
    ) -> None:
        expected = [(token, slot_tensor) for slot_tensor, token in enumerate(text[first:], first)]
        if not expected:
            return
        wanted = torch.tensor(expected, dtype=torch.float32)
        slot_tensor = torch.tensor(slots, dtype=torch.int64)
        name = f"{pool} of {self.server}"
        tensors = self.tensors[pool]
        # The tree shares pages of a request without draft KV with others.
        if request in self.without_draft or (self.without_draft and self.tree):
            tensors = tensors[: self.target_tensors]
        for tensor in tensors:
            read_rows = tensor[slot_tensor, 0, :2]
            for mismatch in (read_rows != wanted).any(1).nonzero().flatten().tolist():
                position = expected[mismatch][1]
                key = request, name, position
                if not any(misread[:2] == (request, name) for misread in self.misread):
                    says = f"FOUND {request} reads wrong KV, {name}, at {position}"
                    self.network.tell(self.server, says)
                if key not in self.misread and len(self.misread) < MOST:
                    token, of = (int(value) for value in read_rows[mismatch].tolist())
                    actual = (token, of) if token else None
                    writer = self.writers[pool].get(slots[mismatch], "") or "the peer"
                    page = slots[mismatch] // self.allocator.page_size
                    why = UNSENT if pool == "swa" and page in self.unsent else ""
                    why = OUTDATED if pool == "full" and page in self.outdated else why
                    self.misread[key] = Misread(
                        self.forwards, *key, expected[mismatch], actual, writer, why
                    )
