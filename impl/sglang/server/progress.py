"""Explains why waiting clients get no answer. Called after they have waited long without a computed batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from impl.adapter import Cursors
from impl.sglang.server.reading import Reader

LIVELOCK = 300  # forward passes in which no request gets further than before


class StallKind(StrEnum):
    """Why a server makes no progress."""

    LOST = "lost"
    """The server no longer has the request that a client waits for."""
    ROOM = "room"
    """All waiting requests would fit into what is free or evictable."""
    SESSIONS = "sessions"
    """A request might fit if idle sessions gave up what they hold."""
    NEVER = "never"
    """Nobody holds anything, and a request asks for more than the pools have and was not refused."""
    CHUNKS = "chunks"
    """Nobody holds anything, and a request asks for more SWA KV at once than the pool has."""
    MARGIN = "margin"
    """Everything is free and the request fits, but admission asks for one page more."""
    STRICT = "strict"
    """Everything is free and the request fits, but admission asks for more than one page more."""
    ALONE = "alone"
    """The request would fit, and nobody else holds anything."""
    HELD = "held"
    """Requests in a batch hold the rest, and none of them is computed."""
    LIVELOCK = "livelock"
    """The server computes, and no request gets further."""
    SWA = "swa"
    """A request keeps SWA KV that it does not read any more (#28246)."""
    FLUSH = "flush"
    """The cache is not flushed although nothing runs or waits."""


class Stall(NamedTuple):
    """Clients wait, and nothing will happen unless one of them goes away.

    request: name of a request that waits; "" where the kind is of no single one.
    says: the reason in words.
    """

    kind: StallKind
    request: str
    says: str

    @property
    def clause(self) -> str:
        """The clause that it violates; "" for kinds in which every client gets an answer."""
        others = {
            StallKind.LIVELOCK: "PRO-2",
            StallKind.NEVER: "PRO-3",
            StallKind.SWA: "",
            StallKind.FLUSH: "",
        }
        return others.get(self.kind, "PRO-1")


class Room(NamedTuple):
    """Tokens of each pool, and rows."""

    full: int
    swa: int
    rows: int

    def holds(self, needed: Room) -> bool:
        return all(mine >= wanted for mine, wanted in zip(self, needed, strict=True))

    def plus(self, more: Room) -> Room:
        """Return both together."""
        return Room(*(mine + other for mine, other in zip(self, more, strict=True)))

    def minus(self, other: Room) -> Room:
        """Return what is left of it."""
        return Room(*(max(0, mine - taken) for mine, taken in zip(self, other, strict=True)))


class RequestHeadway:
    """How far each request has come (tokens of its text), and in which forward pass one last got further."""

    def __init__(self) -> None:
        self._furthest: dict[str, int] = {}
        self._last = 0

    def note_computed(self, request: str, length: int, forwards: int) -> None:
        """Note that forward pass number `forwards` computes a request's text up to `length`."""
        if length > self._furthest.get(request, 0):
            self._furthest[request] = length
            self._last = forwards

    def livelock(self, forwards: int) -> Stall | None:
        """Return the livelock after `forwards` passes; None if a request got further in the last LIVELOCK of
        them."""
        if (without := forwards - self._last) <= LIVELOCK:
            return None
        return Stall(StallKind.LIVELOCK, "", f"{without} forward passes, and no request got further")


def explain_stall(reader: Reader, waited_for: Sequence[str]) -> Stall | None:
    """Return why these requests get no answer, as nothing was computed for long. None where nobody waits."""
    scheduler = reader.scheduler
    waiting = {r.rid: r for r in (*scheduler.waiting_queue, scheduler.chunked_req) if r is not None}
    batches = (scheduler.running_batch, scheduler.last_batch)
    running = {r.rid for batch in batches if batch is not None for r in batch.reqs}
    for name in waited_for:
        if name not in waiting and name not in running:
            says = f"the client of {name} waits, and the server has no such request"
            return Stall(StallKind.LOST, name, says)
    if not waiting:
        return None
    free = _free_or_evictable(reader)
    pool_sizes = _pool_sizes(reader)
    idle = _idle_session_room(reader, running)
    for request in waiting.values():
        held_between_chunks = _held_between_chunks(reader, request, scheduler.chunked_req)
        needed = _most_ever_held(reader, request).minus(held_between_chunks)
        if free.holds(needed):
            continue
        says = f"{request.rid} waits for {_text(needed)}; {_text(free)} are free or evictable"
        says += f", idle sessions hold {_text(idle)}"
        if free.plus(idle).holds(needed) or any(idle):
            return Stall(StallKind.SESSIONS, request.rid, says)
        if not pool_sizes.holds(_input(reader, request)):
            at_once = _input(reader, request)._replace(swa=0)
            kind = StallKind.CHUNKS if pool_sizes.holds(at_once) else StallKind.NEVER
            return Stall(kind, request.rid, f"{says}, and there are {_text(pool_sizes)} in all")
        holders = sorted(running - waiting.keys())
        too_large = not pool_sizes.holds(_admission_needs(reader, request))
        if free == pool_sizes or (too_large and not holders):  # copies on their way to the host lock the rest
            says += f", and there are {_text(pool_sizes)} in all"
            return Stall(StallKind.MARGIN if too_large else StallKind.STRICT, request.rid, says)
        if holders:
            says += f"; {', '.join(holders)} keep the rest, and are not computed"
            return Stall(StallKind.HELD, request.rid, says)
        return Stall(StallKind.ALONE, request.rid, f"{says}, and nobody else is there")
    says = (
        f"{request.rid} waits for {_text(needed)} at most, and {_text(free)} are free or evictable"
    )
    return Stall(StallKind.ROOM, request.rid, says)


def stalled_flush(scheduler: Any) -> Stall | None:
    """Return the client that has asked for a flush, without a timeout, and has no answer; None while a
    request runs or waits, because those keep the cache."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    there = [
        r.rid for batch in batches if batch is not None for r in batch.reqs if not r.finished()
    ]
    if there or scheduler.waiting_queue or scheduler.chunked_req is not None:
        return None
    return Stall(StallKind.FLUSH, "", "the cache is not flushed, and nothing runs or waits")


def excess(name: str, cursors: Cursors, window: int, page: int, draft: int) -> Stall | None:
    """Return the SWA KV that a request keeps of its own after some rounds of decode, beyond what window
    eviction leaves in each round; None where it keeps no more than that."""
    _, allocated, evicted, protected = cursors
    window_pages = _whole_pages(max(window, page), page)
    rounds_ahead = 2 * (max(1, draft) + 1)  # two rounds in flight, each with the token that it begins with
    # A page that the window begins in, and one that is evicted only when whole.
    most = window_pages + 2 * page + rounds_ahead
    if (kept_len := allocated - max(evicted, protected)) <= most:
        return None
    return Stall(StallKind.SWA, name, f"{name} keeps {kept_len} tokens of SWA KV, and {most} are the most")


def _whole_pages(tokens: int, page: int) -> int:
    """Round a number of tokens up to whole pages."""
    return -(-tokens // page) * page


def _free_or_evictable(reader: Reader) -> Room:
    """Return what is free, and what the tree could give back."""
    full, swa, rows, tree, _, locked = reader.counts()
    if reader.shares and reader.swa:
        swa += int(reader.tree.swa_evictable_size())
    return Room(full + tree - locked, swa, rows)


def _idle_session_room(reader: Reader, running: Collection[str]) -> Room:
    """Return what sessions hold, less what is the tree's, while none of their turns runs: the next one may
    wait itself. A turn that is gone and does not count as finished keeps its session busy: SES-4 says
    so."""
    full = swa = rows = 0
    for name, session in reader.scheduler.session_controller.sessions.items():
        turns = [node.req for node in session.req_nodes.values()]
        slot = reader.slot(name)
        if slot is not None and all(turn.finished() or turn.rid not in running for turn in turns):
            _, allocated, evicted, protected = reader.release.cursors(slot)
            full += allocated - protected
            rows += 1
            swa += allocated - max(evicted, protected)
    return Room(full, swa if reader.swa else 0, rows)


def _pool_sizes(reader: Reader) -> Room:
    """Return the sizes of the pools."""
    sizes = reader.header()
    return Room(sizes["full_tokens"], sizes["swa_tokens"], sizes["rows"])


def _input(reader: Reader, request: Any) -> Room:
    """Return whole pages for the text that a request has now: its next prefill computes it."""
    page = reader.scheduler.page_size
    tokens = _whole_pages(len(request.origin_input_ids) + len(request.output_ids), page)
    return Room(tokens, tokens if reader.swa else 0, 1)


def _held_between_chunks(reader: Reader, request: Any, chunked: Any) -> Room:
    """Return what a request holds between two chunks of its prefill."""
    if request is not chunked:
        return Room(0, 0, 0)
    _, allocated, evicted, protected = reader.release.cursors(request)
    swa = allocated - max(evicted, protected) if reader.swa else 0
    return Room(allocated - protected, swa, 1)


def _most_ever_held(reader: Reader, request: Any) -> Room:
    """Return the most tokens that a request can ever hold: its text to the last output, and the tokens that
    rounds allocate ahead."""
    page = reader.scheduler.page_size
    tokens = len(request.origin_input_ids) + request.sampling_params.max_new_tokens
    drafts = 2 * (reader.scheduler.server_args.speculative_num_draft_tokens or 0)
    tokens = _whole_pages(tokens, page) + 2 * page + drafts
    return Room(tokens, tokens if reader.swa else 0, 1)


def _admission_needs(reader: Reader, request: Any) -> Room:
    """Return the tokens that admission asks for: a request's text, in the SWA pool in whole pages, all its
    outputs, a page, and one token that stays free."""
    page = reader.scheduler.page_size
    text = len(request.origin_input_ids)
    tokens = text + request.sampling_params.max_new_tokens + page + 1
    swa = max(tokens, _whole_pages(text, page) + page + 1)
    return Room(tokens, swa if reader.swa else 0, 1)


def _text(room: Room) -> str:
    swa = f", {room.swa} SWA" if room.swa else ""
    rows = "row" if room.rows == 1 else "rows"
    return f"{room.full} tokens{swa} and {room.rows} {rows}"
