"""The watcher of a prefill or a decode server: what it does to KV that crosses to its peer.

Batches of such a server are not replayed. Its log has what it sends or names, what it counts as received,
what it gives back while a room is open, and what it keeps while it has nothing to do. Pages stand in logs of
level `pages` alone: reading them waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from typing import Any

from impl.loading.optional import optional
from impl.sglang.server.events import (
    Event, KVArrived, KVGivenBack, KVNamed, KVSent, Queued, Rested, Snapshot,
)  # fmt: skip
from impl.sglang.server.log import EventLog
from impl.sglang.server.server_leftovers import held_tokens, leftovers, rooms_kept, waits
from reference.pairs.config import DECODE, PREFILL

ROLES = {"prefill": PREFILL, "decode": DECODE}
STATUS = ("failed", "bootstrapping", "waiting", "transferring", "success")  # by KVPoll
_LOOKS_S = 1.0  # how often a server that rests is looked at
_STAYS_S = 60.0  # after which what it keeps is written once more
# Under sglang.srt: module, name, and the hook.
POINTS: tuple[tuple[str, str, str], ...] = (
    ("managers.scheduler", "Scheduler._add_request_to_queue", "queue"),
    ("managers.scheduler", "Scheduler.send_kv_chunk", "send"),
    ("disaggregation.decode", "DecodePreallocQueue._send_kv_metadata", "name_pages"),
    ("disaggregation.decode", "DecodeTransferQueue._commit_transfer_to_req", "arrive"),
    ("mem_cache.common", "release_kv_cache", "give_back"),
    ("managers.scheduler", "Scheduler.get_next_disagg_prefill_batch_to_run", "step"),
    ("managers.scheduler", "Scheduler.get_next_disagg_decode_batch_to_run", "step"),
)
Steps = Generator[None, Any, None]


def role_of(scheduler: Any) -> str:
    """Return the role of a scheduler's server: "prefill" or "decode", "" of a server that does both."""
    mode = optional(scheduler, "Scheduler.disaggregation_mode")
    return mode.value if mode is not None and mode.value in ROLES else ""


class TransferHooks:
    """The hooks of one server of a pair.

    note_failure: notes that a hook failed.
    """

    on = False

    def __init__(self, note_failure: Callable[[str, Exception], None]) -> None:
        self.note_failure = note_failure
        self._rooms: dict[int, tuple[int, int]] = {}  # open ones -> tokens that cross
        self._changed = False
        self._looked_s = 0.0
        self._keeps: tuple[object, ...] | None = None  # as it was last written
        self._kept_s = 0.0  # since when it keeps that; inf once this is written again

    def begin(self, scheduler: Any, log: EventLog, *, pages: bool) -> None:
        """Begin to watch this scheduler's server."""
        self.scheduler = scheduler
        self.log = log
        self.pages = pages
        self.server = ROLES[role_of(scheduler)]
        self.on = True

    # -- hooks, in the order of a request's life ----------------------------------------------------

    def queue(self, _: Any, scheduler: Any, request: Any, *__: Any, **___: Any) -> None:
        if scheduler is self.scheduler and request.bootstrap_room is not None:
            tokens = len(request.origin_input_ids)
            now = round(time.time(), 3)
            self._put(Queued(request.rid, int(request.bootstrap_room), tokens, now))

    def send(
        self, scheduler: Any, request: Any, last_chunk: bool = False, *_: Any, **__: Any
    ) -> Steps:
        start = int(request.start_send_idx)
        yield
        end = int(request.start_send_idx)
        room = request.bootstrap_room
        if scheduler is not self.scheduler or (end == start and not last_chunk):
            return
        begin = self._rooms.get(room, (start, end))[0]
        self._rooms[room] = begin, end
        self._put(KVSent(request.rid, room, start, end, last_chunk, self._pages(request, start, end)))

    def name_pages(self, _: Any, queue: Any, waiting: Any, *__: Any, **how: Any) -> None:
        request = waiting.req
        if queue.scheduler is not self.scheduler:
            return
        start = int(how.get("decode_prefix_len", 0))
        end = len(request.origin_input_ids)
        self._rooms[request.bootstrap_room] = start, end
        pages = self._pages(request, start, end)
        self._put(KVNamed(request.rid, request.bootstrap_room, start, end, pages))

    def arrive(self, _: Any, queue: Any, waiting: Any, *__: Any, **___: Any) -> None:
        request = waiting.req
        crossed = self._rooms.pop(request.bootstrap_room, None)
        if queue.scheduler is self.scheduler and crossed is not None:
            pages = self._pages(request, *crossed)
            self._put(KVArrived(request.rid, request.bootstrap_room, pages))

    def give_back(self, request: Any, tree: Any, *_: Any, **__: Any) -> Steps:
        room = request.bootstrap_room
        crossed = self._rooms.pop(room, None) if tree is self.scheduler.tree_cache else None
        if crossed is not None:
            status = self._manager().request_status.get(room)
            said = STATUS[int(status)] if status is not None else ""
            self._put(KVGivenBack(request.rid, room, said, self._pages(request, *crossed)))
        yield

    def step(self, plan: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        if scheduler is not self.scheduler:
            return
        if self.log.wants_snapshot:  # a new file begins here, or events were lost
            self.log.wants_snapshot = False
            dropped = self.log.dropped
            self.log.dropped = 0
            self.log.put(Snapshot(dropped, [], []))
        now = time.monotonic()
        if plan.batch_to_run is not None:
            return
        if not self._changed and now - self._looked_s < _LOOKS_S:
            return
        self._looked_s = now
        at_work = scheduler.waiting_queue, scheduler.result_queue, scheduler.chunked_req
        if any(at_work) or scheduler.last_batch or waits(scheduler, self.server):
            return
        self._changed = False
        rooms = {table: sorted(names) for table, names in rooms_kept(self._manager(), self.server)}
        left = dict(leftovers(scheduler, self.server))
        keeps = held_tokens(scheduler), left, {table: of for table, of in rooms.items() if of}
        stays = keeps == self._keeps
        if not stays or (any(keeps) and self._kept_s < now - _STAYS_S):
            self._keeps = keeps
            self._kept_s = math.inf if stays else now
            self.log.put(Rested(*keeps, round(time.time(), 3)))

    # -- what they read -----------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        self._changed = True
        self._keeps = None
        self.log.put(event)

    def _manager(self) -> Any:
        scheduler = self.scheduler
        if self.server == PREFILL:
            return scheduler.disagg_prefill_bootstrap_queue.kv_manager
        return scheduler.disagg_decode_prealloc_queue.kv_manager

    def _pages(self, request: Any, start: int, end: int) -> list[int] | None:
        """Return the pages of the full pool that a request's row has for these tokens; None where it has no
        row, or at level `lengths`."""
        row = request.kv.req_pool_idx
        if not self.pages or row is None:
            return None
        size = self.scheduler.page_size
        slots = self.scheduler.req_to_token_pool.req_to_token[int(row), start:end:size].tolist()
        return [slot // size for slot in slots]
