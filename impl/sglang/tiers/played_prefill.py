"""A played prefill server for the decode side: the receivers that it polls, and the slots of first tokens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from impl.lazy import torch

from impl.sglang.parts.stand_ins import Bag
from reference.tiers.config import TierConfig


_UNUSED_BUFFERS = 11  # between the token and the room, in MetadataBuffers.get_buf


@dataclass
class Writing:
    """Writes that a prefill server has still to make.

    name: of the request.
    slots: pool, slot, and the token whose KV is written there.
    first: index of the slot for the request's first token.
    """

    name: str
    slots: list[tuple[str, int, int]]
    first: int


class Peer:
    """The receiver of one request: what the decode server sees of the prefill server.

    state: of KVPoll.
    """

    supports_host_destination = False
    bootstrap_infos = (1,)  # ranks of the prefill server
    conclude_state = None

    def __init__(self, mgr: Peers, bootstrap_addr: str, bootstrap_room: int) -> None:
        del bootstrap_addr
        self.kv_mgr = mgr
        self.room = bootstrap_room
        self.told = False
        self.abort_notified = False
        self.state = mgr.poll.Bootstrapping
        mgr.by_room[bootstrap_room] = self

    def init(self, prefill_dp_rank: int) -> None: ...

    def poll(self) -> int:
        return int(self.state)

    def send_metadata(
        self,
        page_indices: Any,
        aux_index: int,
        state_indices: Any = None,
        *,
        decode_prefix_len: int = 0,
    ) -> None:
        self.told = True
        if self.state == self.kv_mgr.poll.WaitingForInput:  # else it has failed meanwhile
            self.state = self.kv_mgr.poll.Transferring
        self.kv_mgr.tell(
            self.room, page_indices.tolist(), aux_index, state_indices or (), decode_prefix_len
        )

    def failure_exception(self) -> None:
        raise RuntimeError("the prefill server failed")

    def abort(self) -> None:
        self.state = self.kv_mgr.poll.Failed
        self.ensure_abort_notified()

    def ensure_abort_notified(self, force_arm: bool = False) -> None:
        del force_arm
        self.abort_notified = self.abort_notified or self.told

    def clear(self) -> None: ...


class Peers:
    """The manager of transfers.

    writing: for each room, the writes still outstanding.
    drained: for each room, the number of ranks of the prefill server that have acknowledged that they write
        no more.
    texts: for each room, the request's name and tokens.
    """

    enable_deferred_decode_kv_release = True

    def __init__(
        self, config: TierConfig, memory: dict[str, list[int]], poll: Any, swa: Any
    ) -> None:
        self.config = config
        self.memory = memory
        self.poll = poll
        self.prefill_info_table = Bag(get=lambda _: Bag(dp_size=1))
        self.kv_args = Bag(state_types=[swa] if config.window is not None else [])
        self.by_room: dict[int, Peer] = {}
        self.writing: dict[int, Writing] = {}
        self.drained: Counter[int] = Counter()
        self.texts: dict[int, tuple[str, list[int]]] = {}

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        return self.drained[room] >= required_acks

    def clear_deferred_abort_state(self, room: int) -> None:
        self.drained.pop(room, None)

    def tell(
        self, room: int, pages: Sequence[int], first: int, states: Sequence[Any], prefix: int
    ) -> None:
        """Note the slots to which the KV of a request is written: whole pages, of SWA those of its window."""
        name, text = self.texts[room]
        size = self.config.page_size
        window = self.config.window or 0
        begin = max(prefix, len(text) - window) // size * size
        parts = [("full", pages, prefix)]
        parts += [("swa", state.tolist(), begin) for state in states if state is not None]
        padded = [*text, *[0] * size]  # the last page may be longer than the text
        slots = []
        for pool, pool_slots, start in parts:
            for position, page in zip(range(start, len(text), size), pool_slots):
                tokens = padded[position : position + size]
                slots += [(pool, page * size + index, token) for index, token in enumerate(tokens)]
        for pool, slot, _ in slots:
            self.memory[pool][slot] = 0
        self.writing[room] = Writing(name, slots, first)


class FirstTokens:
    """ReqToMetadataIdxAllocator and MetadataBuffers: slots for the first tokens, which the prefills sample.

    rows: for each slot, the token and the room of its request.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots = deque(range(size))
        self.rows: dict[int, tuple[int, int]] = {}

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self) -> int | None:
        return self.free_slots.popleft() if self.free_slots else None

    def free(self, index: int) -> None:
        self.free_slots.append(index)

    def clear_slot(self, index: int) -> None:
        self.rows.pop(index, None)

    @property
    def bootstrap_room(self) -> FirstTokens:
        """The buffer in which a 0 clears a slot, up to 0.5.22."""
        return self

    def __setitem__(self, index: int, room: int) -> None:
        assert room == 0
        self.clear_slot(index)

    def get_buf(self, index: int) -> tuple[Any, ...]:
        token, room = self.rows.get(index, (0, 0))
        unused = torch.zeros(8, dtype=torch.int64)
        return (torch.tensor([token]), *[unused] * _UNUSED_BUFFERS, None, torch.tensor([room]))
