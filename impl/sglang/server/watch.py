"""The watcher: SGLang's own plugin hooks turn what a scheduler does into events, a line of JSON each.

SGLang loads it (entry point `sglang.srt.plugins`) in every process; it is off unless KVSPEC_WATCH names a
folder.

    KVSPEC_WATCH=DIR            where the logs go, a file for each scheduler process
    KVSPEC_WATCH_LEVEL=lengths  cursors and free counts (for production), or `pages`: token ids, rows, free
                                lists, mapping, tree and slots of recurrent state as well (for tests)
    KVSPEC_WATCH_MB=64          a new file when one is larger; the newest KVSPEC_WATCH_FILES=16 are kept
    KVSPEC_WATCH_TIER=1         the tree and its host tier in every round (for tests)
    KVSPEC_WATCH_SNAPSHOT=512   events from one snapshot of the whole state to the next, at least

A hook notes plain numbers and strings before or after SGLang's function, and never changes what that does.
What goes wrong in a hook is noted as an event `failed` and raised nowhere. Cursors are lists: C, A, E, R.
Names of events and fields are explained in fixtures/README.md, how they become commands in
stateful_tests/watched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.server.events import (
    FIELDS, FORMAT, VERSION, Admitted, Cells, Checkpointed, CloseAsked, Event, Extended, Flushed, HookFailed,
    Lane, QueueAborted, Released, Requeued, Resulted, SessionClosed, SessionOpened, Submitted, Swept,
)  # fmt: skip
from impl.sglang.server.log import EventLog
from impl.sglang.server.reading import Reader, session_of, slot_of
from impl.sglang.server.transfers import TransferHooks, role_of

if TYPE_CHECKING:
    from impl.sglang.server.tier import TierReader

_LOG = logging.getLogger("kvspec")
SHARE = 20  # a snapshot has one entry for so many lines
MAX_ENTRIES = 1024  # of a snapshot; each takes 3 us
# What a hook does before the function, and after it with its result. A plain method is given the result.
Steps = Generator[None, Any, None]


class Watcher:
    """The hooks of one process.

    kind: whose names they read by.
    log: None until a scheduler does something: other processes have none.
    """

    def __init__(self, release: Release0510, settings: dict[str, str] | None = None) -> None:
        self.kind = release
        self._cursors = release.cells()
        self.pages = self._wants_tier = self._asks = False
        self._tier_header: dict[str, Any] = {}
        self.tier: TierReader | None = None
        self.log: EventLog | None = None
        self.reader: Reader | None = None
        # before the first step, when there is no header yet
        self._first: list[Event | list[Any]] = []
        self.put: Callable[[Event | list[Any]], None] = self._early  # have an event written
        self.tell_results: Callable[[], None] = lambda: None  # have results hooked
        self._sent_tokens: dict[str, int] = {}  # request -> tokens that its client sent
        self._looked_at: dict[str, Admitted] = {}  # admissions that came to nothing so far
        self._evicted: dict[str, int] = {}  # request -> how far its window evictions were written
        self._retracted: set[str] = set()  # requests, until they are queued again
        self._branching: set[str] = set()  # sessions of the other kind, which are not specified
        self.transfers = TransferHooks(self.note_failure)
        self._steps = self._failures = 0
        self._written = 0  # events up to the last step
        self._next_snapshot = 0  # lines before it is due
        self.on = False
        if settings is not None:
            self.start(settings)

    def start(self, settings: dict[str, str]) -> None:
        """Begin to watch. Raises ValueError for settings that are none."""
        self.folder = Path(settings["KVSPEC_WATCH"])
        self.level = settings.get("KVSPEC_WATCH_LEVEL", "lengths")
        if self.level not in ("lengths", "pages"):
            raise ValueError(f"KVSPEC_WATCH_LEVEL: {self.level!r:.40} is neither lengths nor pages")
        self.most_bytes = _number(settings, "KVSPEC_WATCH_MB", 64) << 20
        self.keep = _number(settings, "KVSPEC_WATCH_FILES", 16)
        self.every = _number(settings, "KVSPEC_WATCH_SNAPSHOT", 512)
        self.pages = self.level == "pages"
        self.on = True
        self._wants_tier = settings.get("KVSPEC_WATCH_TIER") == "1"
        self._next_snapshot = self.every

    # -- events -----------------------------------------------------------------------------------

    def _early(self, event: Event | list[Any]) -> None:
        if len(self._first) < 4096:
            self._first.append(event)

    def note_failure(self, where: str, error: Exception) -> None:
        """Note that a hook failed, the first times."""
        self._failures += 1
        if self._failures <= 20:
            self.put(HookFailed(where, f"{type(error).__name__}: {error}"[:300]))

    def _begin(self, scheduler: Any) -> EventLog:
        self._note_tier(scheduler)
        reader = self.reader = Reader(scheduler, self.kind)
        if self.pages or reader.speculates:  # else a round shows its result
            self.tell_results()
        return self._open(reader)

    def watch_transfers(self, scheduler: Any, hooks: TransferHooks) -> EventLog:
        """Have these hooks write a log of a server of a pair."""
        log = self._open(Reader(scheduler, self.kind), role_of(scheduler))
        hooks.begin(scheduler, log, pages=self.pages)
        return log

    def _open(self, reader: Reader, role: str = "") -> EventLog:
        log = EventLog(self.folder, most_bytes=self.most_bytes, keep=self.keep)
        log.header = {
            "format": FORMAT,
            "version": VERSION,
            "level": self.level,
            "process": os.getpid(),
            **reader.header(),
            **self._tier_header,
            "role": role,
            "fields": FIELDS,
        }
        self.log = log
        self.put = log.put
        self._counts = reader.counts
        self._states = reader.states
        for event in self._first:
            log.put(event)
        self._first.clear()
        _LOG.info("KVSPEC_WATCH: this scheduler is watched, its log is in %s", self.folder)
        return log

    # -- hooks, in the order of a request's life ----------------------------------------------------

    def open_session(self, outcome: Any, _: Any, ask: Any) -> None:
        if ask.streaming:
            self.put(SessionOpened(ask.session_id, bool(outcome.success), ask.timeout is not None))
        elif outcome.success:
            self._branching.add(ask.session_id)

    def close_session(self, controller: Any, ask: Any) -> Steps:
        if ask.session_id in controller.sessions and ask.session_id not in self._branching:
            self.put(CloseAsked(ask.session_id))
        yield

    def session_gone(self, _: Any, controller: Any, session_id: str) -> None:
        if session_id in controller.sessions:
            return  # a turn is in flight, so it goes later
        if session_id in self._branching:
            self._branching.remove(session_id)
        else:
            self.put(SessionClosed(session_id))

    def create_request(self, _: Any, ask: Any, *__: Any, **___: Any) -> Steps:
        sent = len(ask.input_ids)
        request = yield
        if request is not None:
            self._sent_tokens[request.rid] = sent

    def queue(self, scheduler: Any, request: Any, is_retracted: bool = False) -> Steps:
        if self.log is None and role_of(scheduler):  # the hooks of transfers note what it does
            self.on = False
            self._first.clear()
            if self.kind.watches_pairs:
                self.watch_transfers(scheduler, self.transfers)
            else:
                name = type(self.kind).version
                _LOG.error("KVSPEC_WATCH: servers of a pair of %s are not watched", name)
            yield
            return
        self._note_tier(scheduler)
        # an operator's pause queues what it has retracted without saying so
        if is_retracted or request.rid in self._retracted:
            self._retracted.discard(request.rid)
            self.put(Requeued(request.rid))
        else:
            length = len(request.origin_input_ids)
            ends = request.to_finish or request.finished_reason
            new = self._sent_tokens.pop(request.rid, length)
            self.put(Submitted(
                request.rid, session_of(request), tokens=length, new=new,
                rejected=ends is not None, why=str(vars(ends).get("message", ""))[:120] if ends else "",
                ids=list(request.origin_input_ids) if self.pages else None,
            ))  # fmt: skip
        # the queue's limit rejects this request, or one that waits
        limited = scheduler.max_queued_requests is not None
        queued = [*scheduler.waiting_queue, request] if limited else []
        yield
        left = {id(req) for req in scheduler.waiting_queue} if limited else set()
        if rejected := [req.rid for req in queued if id(req) not in left]:
            self._forget_queued(rejected)

    def _forget_queued(self, names: list[str]) -> None:
        for name in names:
            self._looked_at.pop(name, None)
        self.put(QueueAborted(names))

    def _note_tier(self, scheduler: Any) -> None:
        """Once: before the first request has a lock, and before the log has a header."""
        if not self._wants_tier:
            return
        from impl.sglang.server.tier import has_tier, header, tier_reader

        self._wants_tier = False
        try:
            if has_tier(scheduler, self.kind):
                self._tier_header = {"tier": header(scheduler)}
                self.tier = tier_reader(
                    scheduler, self.kind, lambda event: self.put(event), self.note_failure
                )
        except Exception as error:
            self.note_failure("tier", error)

    def ask_storage(self, *_: Any, **__: Any) -> Steps:
        """Note that a request is matched to see what to ask a storage for, and not to be admitted."""
        self._asks = True
        try:
            yield
        finally:
            self._asks = False

    def admit(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        if self._asks:
            return
        name = request.rid
        cursors = self._cursors(request)
        event = Admitted(name, session_of(request), self.kind.prefix(request), cursors)
        if self._looked_at.get(name) != event:  # it waits for room, and is looked at in every round
            self._looked_at[name] = event
            self._evicted[name] = cursors[2]
            self.put(event)

    def extend(self, _: Any, batch: Any) -> None:
        for request in batch.reqs:
            self._looked_at.pop(request.rid, None)
        lanes = zip(batch.reqs, batch.prefix_lens, batch.extend_lens)
        self.put(Extended([(r.rid, int(p), int(n), self._cursors(r)) for r, p, n in lanes]))

    def result(self, _: Any, batch: Any, *__: Any) -> Steps:
        requests = [(r, len(r.output_ids)) for r in batch.reqs]
        yield
        lanes: list[tuple[str, int, Cells, list[int]]] = [
            (
                r.rid,
                len(r.output_ids),
                self._cursors(r),
                list(r.output_ids[had:]) if self.pages else [],
            )
            for r, had in requests
            if self.kind.row(r) is not None
        ]
        if lanes:
            self.put(Resulted(lanes))

    def evict_window(
        self, _: Any, __: Any, request: Any, length: int, *___: Any, **____: Any
    ) -> None:
        cursors = self._cursors(request)
        if self._evicted.get(request.rid, 0) != cursors[2]:
            self._evicted[request.rid] = cursors[2]
            self.put(Swept(request.rid, int(length), cursors))

    def insert(self, request: Any, *_: Any, **__: Any) -> Steps:
        before = self._cursors(request)
        yield
        after = self._cursors(request)
        if after != before:
            self.put(Checkpointed(request.rid, after))

    def release(self, request: Any, tree: Any, *_: Any, **how: Any) -> Steps:
        if self.kind.row(request) is None:  # it waits, with a state at most
            yield
            return
        name = request.rid
        session = session_of(request)
        before = self._cursors(request)
        reason = (
            type(request.finished_reason).__name__ if request.finished_reason is not None else None
        )
        outputs = len(request.output_ids)
        counted = request.finished_len
        ids = list(request.output_ids) if self.pages else None
        yield
        self._looked_at.pop(name, None)
        self._evicted.pop(name, None)
        slot = slot_of(self.kind, tree, session)
        if reason is None:
            self._retracted.add(name)
        self.put(Released(
            name, session, reason, inserts=bool(how.get(self.kind.keeping, True)),
            outputs=outputs, counted=counted, before=before,
            after=None if slot is None else self._cursors(slot),
            limit=request.sampling_params.max_new_tokens, ids=ids,
        ))  # fmt: skip

    def abort(self, scheduler: Any, ask: Any) -> Steps:
        queue = scheduler.waiting_queue
        queued: list[str] = [r.rid for r in queue if ask.abort_all or r.rid.startswith(ask.rid)]
        yield
        if queued:
            self._forget_queued(queued)

    def flush(self, is_done: bool, *_: Any, **__: Any) -> None:
        if is_done and self.log is not None:
            self._looked_at.clear()
            self.put(Flushed(sum(self._counts()[3:5])))
            if self.tier is not None:
                self.tier.again()

    def step(self, plan: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        """Note a forward pass. Every one comes here, so this touches as little as can be."""
        log = self.log
        size = 0
        self._retracted.clear()  # who is not queued by now was given up
        lanes: list[Lane] = []
        batch = self.kind.planned_batch(plan)
        if log is None:
            if batch is None and not self._first:
                return
            log = self._begin(scheduler)
        if batch is not None:
            requests = batch.reqs
            size = len(requests)
            if batch.forward_mode.is_decode():
                lanes = [(r.rid, *self._cursors(r)) for r in requests]
            elif batch.decoding_reqs:  # a mixed batch
                lanes = [(r.rid, *self._cursors(r)) for r in batch.decoding_reqs]
        elif log.events == self._written:
            return  # idle: nothing is noted
        if self.tier is not None:
            self.tier.note(batch)
        self._steps += 1
        if log.dropped:
            self._snapshot(log, plan)  # a step makes no sense to who has not read all before it
            return
        log.put([  # a Stepped, which would take longer to make
            "step", self._steps, size, len(scheduler.waiting_queue),
            len(scheduler.session_controller.sessions) - len(self._branching), *self._counts(), lanes,
            self._states(), round(time.time(), 3),
        ])  # fmt: skip
        if self.pages and self.reader is not None:
            log.put(self.reader.pages(plan))
        if log.wants_snapshot or log.events >= self._next_snapshot > 0:
            self._snapshot(log, plan)
        self._written = log.events

    def _snapshot(self, log: EventLog, plan: Any) -> None:
        """Note the whole state: now and then, where a file begins, and where events were lost.

        One that nothing asks for has at most MAX_ENTRIES sessions and requests, and no more than a SHARE of
        the lines before it.
        """
        assert self.reader is not None
        entries = self.reader.entries()
        self._next_snapshot = log.events + max(self.every, SHARE * entries)
        if entries > MAX_ENTRIES and not log.wants_snapshot and not log.dropped:
            return
        self._looked_at.clear()
        dropped = log.dropped
        log.dropped = 0
        log.wants_snapshot = False
        log.put(self.reader.snapshot(plan, self.pages, dropped))
        log.dropped += dropped if log.dropped else 0  # the snapshot was lost, too
        if self.tier is not None:
            self.tier.again()
        self._written = log.events


def _number(settings: dict[str, str], name: str, default: int) -> int:
    text = settings.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"{name}: {text!r:.40} is no number")
    return int(text)
