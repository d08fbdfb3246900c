"""Play a release's scheduler: each command as that release's own scheduler carries it out.

Refusals come first and touch nothing. Names, phases and lengths are the scheduler's business, so
the driver checks them; whether a session takes a turn, the release decides. Everything that
moves memory is the release's own code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from impl.adapter import Capabilities, UnusableImplementation, View
from impl.process import wire
from impl.process.failures import own_errors
from impl.sglang.parts.stand_ins import SERVER_ARGS, UNSET, Bag, ForwardMode
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.releases.names import alias
from impl.sglang.releases.settings import settings_of
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.scheduler.ends import Ends
from impl.sglang.scheduler.results import LateResults, Results
from impl.sglang.scheduler.server import LiveRequest, Result, Server
from impl.sglang.scheduler.tree_commands import TreeCommands
from impl.vocabulary import CommandRefused, Played, RequestPhase, done, require, spelled
from reference import commands as c
from reference.commands import (
    COMMANDS, Choice, Command, Outcome, Reason, Refused, Report, kind_name, prompt_len, token_id,
)  # fmt: skip
from reference.geometry import Geometry

if TYPE_CHECKING:
    from impl.sglang.scheduler.call_log import Calls

class Driver(Ends, TreeCommands):
    """One release in this process; `reset` starts a server, `apply` plays one command.

    overlap: the scheduler launches a batch before it processes the result of the one before (results.py).
    A turn that the session rejects when it is created runs through the one-token prefill that it gets: at
    once if there is room, else never.
    """

    name, capabilities = "", Capabilities()  # SGLangSystem says both

    def __init__(self, release: Release0510, root: Path, *, overlap: bool = False) -> None:
        alias(type(release))
        self.release = release
        self.root = root
        self.overlap = overlap
        self.serial = 0
        self.calls: Calls | None = None
        self.noted = wire.Noted()
        self.results: Results
        self._settings = settings_of(release.version, list(TABLE))
        inherited = {name: os.environ.get(name) for name in self._settings}
        self._environment = {name: value for name, value in inherited.items() if name.startswith("SGLANG_")}

    def reset(self, geometry: Geometry) -> None:
        for name, inherited in self._environment.items():
            os.environ.pop(name, None)
            if (value := dict(geometry.settings).get(name, inherited)) is not None:
                os.environ[name] = value
        with self._own_errors():
            self.server = Server(self.release, geometry, overlap=self.overlap)
            self.results = (LateResults if self.overlap else Results)(self.server)
        self.serial = 0
        if self.calls is not None:
            self.calls.started()

    def apply(self, command: Command) -> Outcome:
        """Carry a command out, or refuse it.

        Raises UnusableImplementation for a run that mixes Decode and SpecDecode, and whatever the
        release raises: then only `reset` may follow.
        """
        outcome: Outcome | None = None
        try:
            with self._own_errors():
                try:
                    outcome = done(_METHODS[type(command)](self, command))
                except CommandRefused as refused:
                    outcome = Refused(refused.reason)
        finally:
            if self.calls is not None:
                self.noted = wire.Noted(self.calls.take(), self.calls.late() if outcome else ())
        return outcome

    def view(self) -> View:
        with self._own_errors():
            return self.server.view()

    def close(self) -> None:
        """Holds nothing outside of this process."""

    def _own_errors(self) -> AbstractContextManager[None]:
        problem = f"is not of the {self.release.version} kind", "SGLang"
        return own_errors(self.root, *problem, "parts/modules.py", _unset, "parts/stand_ins.py")

    # -- refusals ---------------------------------------------------------------------------------

    def _window(self, turns: Iterable[LiveRequest]) -> None:
        """Refuse to decode where a window eviction ran ahead of the commit: no scheduler gets there."""
        window = self.server.geometry.window
        if window is None:
            return
        for turn in turns:
            cursors = self.server.cursors(turn)
            evicted, position = cursors.swa_evicted_seqlen, turn.origin + turn.visible_output - 1
            own = evicted > cursors.cache_protected_len  # a window eviction leaves the tree's prefix alone
            require(not own or evicted <= max(0, position - window), Reason.WINDOW_LOST)

    def _kind_of_run(self, spec: bool) -> None:
        """A server decodes plainly or speculatively; the first round tells which. Who is between two chunks
        of its prefill then was tried first, and did not fit; under overlap its results may be on the way."""
        if self.server.swa_pool is not None and not self.overlap:
            for turn in self.server.turns.values():
                if turn.phase is RequestPhase.EXTENDING:
                    self.release.park(turn.req, self.server.cache)
        server = self.server
        if server.spec is None:
            server.spec = spec
            SERVER_ARGS.speculative_algorithm = "EAGLE" if spec else None
        elif server.spec is not spec:
            raise UnusableImplementation("sglang: a run cannot mix Decode and SpecDecode")

    # -- sessions ---------------------------------------------------------------------------------

    def open(self, command: c.Open) -> None:
        require(not self.server.named(command.session), Reason.SESSION_EXISTS)
        self.server.controller.open(
            Bag(session_id=command.session, capacity_of_str_len=1 << 20, streaming=True, timeout=None)
        )

    def end_session(self, command: c.Close) -> None:
        session = self.server.controller.get(command.session)
        require(session is not None, Reason.UNKNOWN_SESSION)
        require(not self.release.closing(session), Reason.SESSION_CLOSING)
        self.server.controller.close(Bag(session_id=command.session))

    def submit(self, command: c.Submit) -> None:
        server = self.server
        require(command.tokens >= 0 and prompt_len(command.prompt) + command.tokens >= 1, Reason.EMPTY)
        spelled(command.prompt)
        name = command.session
        require(name is None or name in server.controller, Reason.UNKNOWN_SESSION)
        require(not server.named(command.request), Reason.REQUEST_EXISTS)
        session = None if name is None else server.controller.get(name)
        # The scheduler itself turns away turns of a session that is to be closed.
        require(session is None or not self.release.closing(session), Reason.SESSION_CLOSING)
        require(session is not None or command.rewind <= 0, Reason.SHRINKING_PREFIX)
        require(command.rewind >= 0, Reason.BAD_LENGTH)
        history = 0 if session is None else len(self.release.history(session))
        serial = self.serial + 1
        tokens = spelled(command.prompt, history)
        tokens += [token_id(serial, history + len(tokens) + i) for i in range(command.tokens)]
        require(history + len(tokens) <= server.geometry.width, Reason.ROW_TOO_SHORT)
        undo = None
        if command.rewind:
            # An offset of 0 means none to the server, so taking all back is expressed otherwise.
            left = history - command.rewind
            undo = Bag(
                id=name, replace=False, drop_previous_output=left <= 0, offset=left if left > 0 else None
            )
        before = [] if name is None else server.history(name)
        namespace = server.namespace_of([*before, *tokens])
        req = server.new_request(f"{command.request}#{serial}", tokens, name, undo, **namespace)
        if req.to_finish is not None:
            taken_back = command.rewind and not (name is not None and server.in_flight(name))
            if server.has_room_for_one():
                self._one_token_prefill(
                    LiveRequest(self.release, command.request, name, serial, req, history)
                )
            raise CommandRefused(Reason.SHRINKING_PREFIX if taken_back else Reason.TURN_IN_FLIGHT)
        self.serial = serial
        if name is not None:
            server.others[name] = bool(namespace)
        server.turns[command.request] = LiveRequest(
            self.release, command.request, name, serial, req, history, other=bool(namespace)
        )

    # -- prefill ----------------------------------------------------------------------------------

    def admit(self, command: c.Admit) -> None:
        turn = self._turn(command.request)
        require(turn.phase in (RequestPhase.QUEUED, RequestPhase.ADMITTED), Reason.WRONG_PHASE)
        self._let_go(turn)
        turn.req.init_next_round_input(self.server.cache)
        if self.server.tree is not None and self.release.row(turn.req) is None:
            # What was matched is locked from here on: between the two nothing would keep it.
            self.server.tree.lock(turn.req)
            turn.locked = True
        turn.phase = RequestPhase.ADMITTED

    def extend(self, command: c.Extend) -> list[Choice]:
        server, lanes = self.server, command.lanes
        require(lanes and all(lane.tokens >= 1 for lane in lanes), Reason.EMPTY)
        everybody = self._lanes(
            [n.request for n in lanes], RequestPhase.ADMITTED, RequestPhase.EXTENDING, RequestPhase.RUNNING
        )
        decodes = [t for t in everybody if t.phase is RequestPhase.RUNNING]
        turns = [t for t in everybody if t not in decodes]
        require(turns, Reason.WRONG_PHASE)
        tokens_of = {n.request: n.tokens for n in lanes}
        require(all(tokens_of[t.name] == 1 for t in decodes), Reason.BAD_LENGTH)
        ends = [self._chunk_from(t) + tokens_of[t.name] for t in turns]
        require(all(end <= t.fill for t, end in zip(turns, ends, strict=True)), Reason.BAD_LENGTH)
        self._window(decodes)
        require(not (decodes and server.spec), Reason.UNFAITHFUL)
        received = any(lane.tail for lane in lanes)
        require(not received or self._is_received(turns, ends), Reason.UNFAITHFUL)
        fresh = sum(self.release.row(t.req) is None for t in turns)
        spans = [(t.prefix, end) for t, end in zip(turns, ends, strict=True)]
        self.server.require_room([*spans, *((t.fill - 1, t.fill) for t in decodes)], fresh)

        if self.overlap:  # a window eviction keeps clear of the chunk in flight, which is at most that long
            longest = max(tokens_of.values())
            SERVER_ARGS.chunked_prefill_size = max(SERVER_ARGS.chunked_prefill_size, longest)
        if decodes:
            self._kind_of_run(spec=False)
        evicted, spans = self._evicted(everybody), []
        for turn, end in zip(turns, ends, strict=True):
            req = turn.req
            if turn.locked:
                turn.locked = False  # matched when it was admitted; from here on the lock goes with the row
            elif turn.phase is RequestPhase.ADMITTED:
                self._matched(turn)
            else:
                req.init_next_round_input()
            spans.append((turn.prefix, end))
            self.release.set_chunk(req, turn.prefix, end)
            if end < turn.fill:
                self.release.in_chunks(req, 1)
        batch = server.new_batch(turns, ForwardMode.EXTEND)
        if received:
            self._receive(batch, turns[0], *spans[0])
        else:
            batch.prepare_for_extend()
        if decodes:  # Scheduler._get_new_batch_prefill
            for turn in decodes:
                self.results.before_round(turn)
            running = server.new_batch(decodes, ForwardMode.DECODE)
            running.prepare_for_decode()
            batch.mix_with_running(running)
        self._launch(everybody, ForwardMode.EXTEND)
        for turn, (start, end) in zip(turns, spans, strict=True):
            server.forward(turn, start, end)
        launched = self._evicted(everybody)
        last = all(end == t.fill for t, end in zip(turns, ends, strict=True))
        with server.results_of_prefill(last):  # what is no last chunk goes into the tree after it
            for turn, end in zip(turns, ends, strict=True):
                turn.started = True
                if end < turn.fill:
                    self.release.in_chunks(turn.req, -1)
                    turn.phase = RequestPhase.EXTENDING
                    self.release.checkpoint(turn.req, server.cache, chunked=True)
                else:
                    turn.phase = RequestPhase.RUNNING
                    self.results.arrived(turn, Result(server.sample(turn, 1), prefill=True))
            for turn in decodes:
                server.forward(turn, turn.fill - 1, turn.fill)
                self.results.arrived(turn, Result(server.sample(turn, 1)))
        late = {choice.request for choice in self._window_evictions(everybody, launched)}
        window_evictions = self._own_evictions(everybody, evicted, launched)
        if received and not window_evictions:
            window_evictions = [Choice(turns[0].name, evicted[0])]
        return [replace(c, after=c.request in late) for c in window_evictions]

    def _is_received(self, turns: Sequence[LiveRequest], ends: Sequence[int]) -> bool:
        """A whole input by itself, of which nothing is there but what the tree has: as on a server that only
        decodes, and whose pages are longer than a token."""
        [turn, *others] = turns
        new = turn.phase is RequestPhase.ADMITTED and self.release.row(turn.req) is None
        paged = self.server.swa_pool is not None and self.server.geometry.page_size > 1
        return paged and new and not others and ends[0] == turn.fill

    def _receive(self, batch: Any, turn: LiveRequest, start: int, end: int) -> None:
        """disaggregation/decode.py, alloc_for_decode_prealloc: SWA slots for the last window alone."""
        geometry, allocator = self.server.geometry, self.server.allocator
        size, window = geometry.page_size, geometry.window or 0
        first = end - window if self.server.tree is None else end - 1 - max(window, size)  # _swa_tail_len
        live = max(start, first // size * size)

        def alloc_extend(*lengths: Any, num_new_pages: Any = None) -> Any:  # noqa: ARG001
            return allocator.alloc_extend_swa_tail(*lengths, swa_tail_len=end - live)

        allocator.alloc_extend = alloc_extend
        try:
            batch.prepare_for_extend()
        finally:
            del allocator.alloc_extend
        if live > start:
            self.release.eviction_cursor(turn.req, live)

    def _chunk_from(self, turn: LiveRequest) -> int:
        """Where the next chunk is counted from: what is committed, less the token to recompute.

        A release may prefill from earlier (0.5.10 matches one token less than it could); the chunk
        still ends where it was asked to end, as a scheduler that prefills the rest would have it.
        """
        if turn.phase is RequestPhase.EXTENDING or self.release.row(turn.req) is None:
            return turn.prefix
        return min(self.release.cursors(turn.req).kv_committed_len, turn.fill - 1)

    # -- decode -----------------------------------------------------------------------------------

    def decode(self, command: c.Decode) -> list[Choice]:
        server = self.server
        require(command.requests, Reason.EMPTY)
        turns = self._lanes(command.requests, RequestPhase.RUNNING)
        self._window(turns)
        self.server.require_room([(t.fill - 1, t.fill) for t in turns], extend=False)
        self._kind_of_run(spec=False)

        evicted = self._evicted(turns)
        for turn in turns:
            self.results.before_round(turn)
        server.new_batch(turns, ForwardMode.DECODE).prepare_for_decode()
        self._launch(turns, ForwardMode.DECODE)
        launched = self._evicted(turns)
        with server.results_of_prefill():
            for turn in turns:
                server.forward(turn, turn.fill - 1, turn.fill)
                self.results.arrived(turn, Result(server.sample(turn, 1)))
        return self._own_evictions(turns, evicted, launched)

    def spec_decode(self, command: c.SpecDecode) -> list[Choice]:
        return self._verify(command.lanes)

    def launch(self, command: c.Launch) -> list[Choice]:
        return self._verify(command.lanes, late=1)

    def settle(self, command: c.Settle) -> None:
        [turn] = self._lanes([command.request], RequestPhase.RUNNING, late=2)
        require(turn.unsettled, Reason.WRONG_PHASE)
        turn.unsettled[0].visible = True

    def _verify(self, lanes: Sequence[c.Draft], late: int = 0) -> list[Choice]:
        """A verify round; late: of each entry so many results may be in flight, as this one is then."""
        server = self.server
        require(lanes and all(n.allocate >= 1 and n.accept >= 1 for n in lanes), Reason.EMPTY)
        turns = self._lanes([n.request for n in lanes], RequestPhase.RUNNING, late=late)
        require(all(n.accept <= n.allocate for n in lanes), Reason.BAD_LENGTH)
        self._window(turns)
        before = [server.cursors(t) for t in turns]
        # The release allocates up to 2 * draft_len past the commit of every entry, which lacks the result
        # that is not processed by then. The smallest draft_len is taken that gives each entry what it asks
        # for and takes nothing back.
        lags = [server.late(t.pending[-1]) if t.pending and t.pending[-1].visible else 0 for t in turns]
        mosts = [  # past all that rounds in flight may accept
            t.origin + t.visible_output - 1 + sum(r.drafted for r in t.unsettled) + lane.allocate
            for t, lane in zip(turns, lanes, strict=True)
        ]
        draft_len = max(
            -(-(lag + max(most, c.kv_allocated_len) - c.kv_committed_len) // 2)
            for most, c, lag in zip(mosts, before, lags, strict=True)
        )
        ends = [
            self.release.spec_end(
                c._replace(kv_committed_len=c.kv_committed_len - lag), draft_len, server.geometry.page_size
            )
            for c, lag in zip(before, lags, strict=True)
        ]
        self.server.require_room([(c.kv_allocated_len, end) for c, end in zip(before, ends, strict=True)])
        self._kind_of_run(spec=True)

        evicted = self._evicted(turns)
        for turn in turns:
            self.results.before_round(turn)
        batch = server.new_batch(turns, ForwardMode.DECODE)
        SERVER_ARGS.speculative_num_draft_tokens = draft_len
        self.release.prepare_spec(batch, draft_len)
        self._launch(turns, ForwardMode.DECODE)
        launched = self._evicted(turns)
        ahead = []
        with server.results_of_prefill():
            for turn, lane in zip(turns, lanes, strict=True):
                tokens = server.sample(turn, lane.accept)
                allocated = self.release.cursors(turn.req).kv_allocated_len
                # The last accepted token is the bonus: sampled, without KV yet.
                server.forward(turn, turn.fill - 1, allocated, tokens[:-1])
                self.results.arrived(turn, Result(tokens, visible=not late, drafted=lane.allocate))
                claimed = server.cursors(turn).kv_committed_len if late else None
                ahead.append(Choice(turn.name, None, allocated, False, claimed))
        reached = {c.request: c.swa_evicted_seqlen for c in self._own_evictions(turns, evicted, launched)}
        return [replace(c, swa_evicted_seqlen=reached.get(c.request)) for c in ahead]

    # -- window eviction ------------------------------------------------------------------------------

    def evict_swa(self, command: c.EvictSwa) -> list[Choice]:
        turn = self._turn(command.request)
        require(turn.phase in (RequestPhase.EXTENDING, RequestPhase.RUNNING), Reason.WRONG_PHASE)
        require(self.server.swa_pool is not None, Reason.NO_SWA)
        # With a tree no server evicts between the chunks of a prefill (maybe_evict_swa).
        require(self.server.tree is None or turn.phase is RequestPhase.RUNNING, Reason.UNFAITHFUL)
        allocated = self.server.cursors(turn).kv_allocated_len
        require(0 <= command.length <= allocated, Reason.BAD_LENGTH)
        self.results.before_eviction(turn, command.length)
        self.server.new_batch([turn], ForwardMode.DECODE)._evict_swa(turn.req, command.length)
        return [Choice(turn.name, self.release.cursors(turn.req).swa_evicted_seqlen)]

    def _evicted(self, turns: Iterable[LiveRequest]) -> list[int]:
        return [self.release.cursors(t.req).swa_evicted_seqlen for t in turns]

    def _window_evictions(self, turns: Sequence[LiveRequest], before: Sequence[int]) -> list[Choice]:
        """The window evictions that the release made by itself since `before` was noted."""
        after = zip(turns, before, self._evicted(turns), strict=True)
        return [Choice(turn.name, now) for turn, then, now in after if now != then]

    def _own_evictions(
        self, turns: Sequence[LiveRequest], before: Sequence[int], launched: Sequence[int]
    ) -> list[Choice]:
        """The same of a batch; of what the tree has taken over since it was launched nothing was evicted."""
        late = {choice.request for choice in self._window_evictions(turns, launched)}
        now = {turn.name: self.release.cursors(turn.req) for turn in turns}
        given = {name for name, c in now.items() if c.swa_evicted_seqlen <= c.cache_protected_len}
        return [c for c in self._window_evictions(turns, before) if c.request not in late & given]

    # -- memory checks ----------------------------------------------------------------------------

    def check_busy(self, command: c.CheckBusy) -> Report | None:
        require(command.level in (0, 1, 2), Reason.BAD_LENGTH)
        return self.server.scheduler.busy(command.level) if command.level else None

    def check_idle(self, command: c.CheckIdle) -> Report:
        del command
        server, turns = self.server, self.server.turns.values()
        under_way = RequestPhase.EXTENDING, RequestPhase.RUNNING
        require(all(t.phase not in under_way for t in turns), Reason.NOT_IDLE)
        locked = bool(server.lock_holders) or any(t.locked for t in turns)
        report: Report = server.scheduler.idle([t.req for t in turns], locked)
        return report


def _unset() -> str:
    return rf"\b({'|'.join(map(re.escape, sorted(UNSET))) or '(?!)'})\b"


_METHODS: dict[type, Callable[[Driver, Any], Played]] = {
    kind: getattr(Driver, kind_name(kind)) for kind in COMMANDS if hasattr(Driver, kind_name(kind))
} | {c.Close: Driver.end_session}
