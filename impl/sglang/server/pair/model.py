"""The forward pass of one server of a pair: its stamps stand in the release's own KV tensors, as what crosses
the network is bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from impl.sglang.server.clients import Clients
from impl.sglang.server.fake_model import FakeModel, MOST
from impl.sglang.server.outcome import UNSENT, Misread
from impl.sglang.server.pair.network import PlayedNetwork


class Region(NamedTuple):
    """Memory that a transfer reads or writes. item: bytes of a page, or of a row of metadata; tensor: None of
    metadata; number: which of its pool's."""

    pool: str
    number: int
    start: int
    size: int
    item: int
    tensor: torch.Tensor | None


class ServerModel(FakeModel):
    """The forward pass of `server`. regions: its KV tensors and metadata rows. unsent: pages of the SWA pool
    that hold the place of a position of a received prompt, and that nobody has written."""

    def __init__(
        self, scheduler: Any, release: Any, clients: Clients, server: str, network: PlayedNetwork
    ) -> None:
        self.server, self.network = server, network
        kv = scheduler.token_to_kv_pool_allocator.get_kvcache()
        pools = {"full": getattr(kv, "full_kv_pool", kv), "swa": getattr(kv, "swa_kv_pool", None)}
        self.tensors = {
            name: [*pool.k_buffer, *pool.v_buffer]
            for name, pool in pools.items()
            if pool is not None
        }
        page = scheduler.page_size
        self.regions = [
            Region(name, number, tensor.data_ptr(), tensor.nbytes, tensor[0].nbytes * page, tensor)
            for name, tensors in self.tensors.items()
            for number, tensor in enumerate(tensors)
        ]
        for tensors in self.tensors.values():
            for tensor in tensors:
                tensor.zero_()
        rows = zip(*scheduler.disagg_metadata_buffers.get_buf_infos(), strict=True)
        self.regions += [
            Region("metadata", number, start, size, item, None)
            for number, (start, size, item) in enumerate(rows)
        ]
        self.unsent: set[int] = set()
        super().__init__(scheduler, release, clients, 0)

    def free_pages(self, pool: str = "full") -> list[int]:
        """The free list of a pool."""
        allocator = self.allocator
        names = {"full": "full_attn_allocator", "swa": "swa_attn_allocator"}
        return self.release.free_pages(getattr(allocator, names[pool], allocator))

    def begins(self, batch: Any) -> None:
        super().begins(batch)
        kind = "computes a prompt part" if batch.forward_mode.is_extend() else "decodes"
        names = ", ".join(request.rid for request in batch.reqs)
        self.network.tell(self.server, f"{kind}: {names}")

    def decode(self, batch: Any) -> list[int]:
        """A request whose prompt the peer has computed comes with its first token."""
        for request, length in zip(batch.reqs, batch.seq_lens.tolist()):
            if request.rid not in self._texts:
                text = [*request.origin_input_ids, *request.output_ids]
                self._texts[request.rid] = text[: length - 1]
                self._inputs[request.rid] = len(request.origin_input_ids)
                self._decoded[request.rid] = 0
        return super().decode(batch)

    def _write(self, slots: torch.Tensor, tokens: Iterable[int], start: int, request: str) -> None:
        places = {"full": slots.to(torch.int64)}
        if self.window:
            places["swa"] = self.allocator.translate_loc_from_full_to_swa(slots).to(torch.int64)
        stamps = [(token, at) for at, token in enumerate(tokens, start)]
        written = torch.tensor(stamps, dtype=torch.float32)
        for pool, at in places.items():
            for tensor in self.tensors[pool]:
                tensor[at, 0, :2] = written
            self.writers[pool].update(dict.fromkeys(at.tolist(), request))
        if "swa" in places:
            self.unsent -= set((places["swa"] // self.allocator.page_size).tolist())

    def _compare(
        self, pool: str, request: str, first: int, slots: list[int], text: list[int]
    ) -> None:
        want = [(token, at) for at, token in enumerate(text[first:], first)]
        if not want:
            return
        wanted, at = torch.tensor(want, dtype=torch.float32), torch.tensor(slots, dtype=torch.int64)
        name = f"{pool} of {self.server}"
        for tensor in self.tensors[pool]:
            found = tensor[at, 0, :2]
            for number in (found != wanted).any(1).nonzero().flatten().tolist():
                key = request, name, want[number][1]
                if not any(each[:2] == key[:2] for each in self.misread):
                    self.network.tell(
                        self.server, f"FOUND {request} reads wrong KV, {name}, at {key[2]}"
                    )
                if key not in self.misread and len(self.misread) < MOST:
                    token, position = (int(value) for value in found[number].tolist())
                    got = (token, position) if token else None
                    writer = self.writers[pool].get(slots[number], "") or "the peer"
                    page = slots[number] // self.allocator.page_size
                    why = UNSENT if pool == "swa" and page in self.unsent else ""
                    self.misread[key] = Misread(self.forwards, *key, want[number], got, writer, why)
