"""Stand-ins for the decode server of a server that only prefills: senders of transfers, rows of metadata."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from impl.sglang.parts.stand_ins import Bag
from impl.sglang.tiers.played_prefill import FirstTokens
from reference.tiers.config import TierConfig
from reference.tiers.facts import METADATA


@dataclass
class HandedPart:
    """Slots of one pool that the network has still to read.

    position: of the first.
    wanted: the stamps of the request's text there, fewer than slots at the end of the text; of metadata the
        room of the request.
    early: slots that were handed in before a forward pass had written them, and without an event to wait
        for.
    """

    job: int
    pool: str
    position: int
    slots: list[int]
    wanted: list[int]
    early: frozenset[int] = frozenset()


class Sender:
    """The sender of one request: what the prefill server sees of the decode server and the network.

    name, text: the request, and its prompt.
    state: of KVPoll.
    prefix: tokens that the decode server has already.
    pages: how many it expects, None until it is told.
    handed: how many it was given.
    parts: what is not read yet.
    """

    supports_host_tensor_indices = False
    _early_send_wait_event: Any = None

    def __init__(
        self, mgr: Senders, bootstrap_addr: str, bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:  # fmt: skip
        del bootstrap_addr, req_has_disagg_prefill_dp_rank
        self.kv_mgr = mgr
        self.room = bootstrap_room
        self.name, self.text = mgr.prompts[bootstrap_room]
        self.state = mgr.poll.Bootstrapping
        self.prefix = 0
        self.pages: int | None = None
        self.handed = 0
        self.row = -1
        self.parts: list[HandedPart] = []
        mgr.by_room[bootstrap_room] = self

    @property
    def due(self) -> int:
        """The pages that it expects and was not given."""
        return 0 if self.pages is None else self.pages - self.handed

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        assert aux_index is not None
        self.pages = num_kv_indices
        self.row = aux_index

    def pop_decode_prefix_len(self) -> int:
        return self.prefix

    def get_max_transfer_tokens(self) -> None: ...

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None
    ) -> None:
        """Take pages; the decode server puts the next of them where its next is expected, so the place of a
        page says of which tokens it has to be."""
        del num_kv_tokens
        poll = self.kv_mgr.poll
        if self.state in (poll.Success, poll.Failed):
            return
        self.state = poll.Transferring
        size = self.kv_mgr.config.page_size
        waits = self._early_send_wait_event is not None
        self._early_send_wait_event = None
        self._take("full", self.prefix + self.handed * size, kv_indices.tolist(), waits)
        self.handed += len(kv_indices)
        if self.due == 0:
            window = self.kv_mgr.config.window or 0
            begin = max(self.prefix, len(self.text) - window) // size * size
            for pages in state_indices or ():
                if pages is not None:
                    self._take("swa", begin, pages.tolist())
            self.parts.append(HandedPart(self.kv_mgr.next_job(), METADATA, 0, [self.row], [self.room]))

    def _take(self, pool: str, position: int, pages: list[int], waits: bool = False) -> None:
        size = self.kv_mgr.config.page_size
        slots = [page * size + index for page in pages for index in range(size)]
        # before its window nothing is read
        window_start = len(self.text) - (self.kv_mgr.config.window or 0) if pool == "swa" else 0
        skip = max(0, window_start - position)
        wanted = self.text[position + skip : position + len(slots)]
        if slots:
            early = self.kv_mgr.unfinished(pool) & {*slots} if not waits else frozenset()
            job = self.kv_mgr.next_job()
            self.parts.append(
                HandedPart(job, pool, position + skip, slots[skip:], wanted, frozenset(early))
            )

    def poll(self) -> int:
        return int(self.state)

    def failure_exception(self) -> None:
        raise RuntimeError("the decode server failed")

    def give_up(self) -> None:
        """Stop reading: the decode server uses nothing of a failed transfer."""
        self.state = self.kv_mgr.poll.Failed
        self.parts.clear()

    def abort(self) -> None:
        self.give_up()

    def clear(self) -> None: ...

    def get_transfer_metric(self) -> None: ...


class Senders:
    """The manager of the transfers.

    prompts: the name and the prompt of the request in each room.
    unfinished: slots of a pool that a forward pass has still to write.
    """

    enable_all_cp_ranks_for_transfer = False
    is_dummy_cp_rank = False

    def __init__(
        self, config: TierConfig, poll: Any, swa: Any, unfinished: Callable[[str], set[int]]
    ) -> None:
        self.config = config
        self.unfinished = unfinished
        self.poll = poll
        self.kv_args = Bag(state_types=[swa] if config.window is not None else [])
        self.by_room: dict[int, Sender] = {}
        self.prompts: dict[int, tuple[str, list[int]]] = {}
        self._jobs = 0

    def next_job(self) -> int:
        self._jobs += 1
        return self._jobs


class MetadataRows(FirstTokens):
    """ReqToMetadataIdxAllocator and MetadataBuffers of a server that only prefills."""

    def set_buf(self, req: Any) -> None:
        self.rows[req.metadata_buffer_index] = req.output_ids[0], req.bootstrap_room

    def room_in(self, row: int) -> int:
        """Return the room whose metadata a row has, 0 for none."""
        return self.rows.get(row, (0, 0))[1]
