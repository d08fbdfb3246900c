"""Play a release's scheduler: each command as that release's own scheduler carries it out.

Refusals come first and touch nothing. Names, phases and lengths are the scheduler's business, so
the driver checks them; whether a session takes a turn, the release decides. Everything that
moves memory is the release's own code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from impl.adapter import Capabilities, View
from impl.process import wire
from impl.process.failures import raising_misfit
from impl.sglang.parts import namespaces
from impl.sglang.parts.stand_ins import SERVER_ARGS, Bag, ForwardMode, checkpoint_grid, unset
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.releases.names import alias
from impl.sglang.releases.settings import settings_of
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.scheduler.ends import Ends
from impl.sglang.scheduler.live_requests import LiveRequest, Result
from impl.sglang.scheduler.prefills import Prefills
from impl.sglang.scheduler.results import LateResults, Results
from impl.sglang.scheduler.server import Server
from impl.sglang.scheduler.tree_commands import TreeCommands
from impl.vocabulary import CommandRefused, Played, RequestPhase, done, require, serial_of_turn, spelled
from reference import commands as c
from reference.commands import (
    COMMANDS, Choice, Command, Outcome, Reason, Refused, Report, kind_name, prompt_len,
)  # fmt: skip
from reference.geometry import Geometry
from reference.token_ids import token_id


class CallLog(Protocol):
    """Notes what the driver calls of a release, as Python (call_log.py)."""

    def begin_server(self) -> None:
        """Note that the driver has started another server."""

    def take(self) -> tuple[str, ...]:
        """Return the lines since the last call."""

    def late(self) -> tuple[tuple[str, str], ...]:
        """Return the effect of the waiting results on each request, by its name."""


class Driver(Prefills, Ends, TreeCommands):
    """One release in this process; `reset` starts a server, `apply` plays one command.

    overlap: the scheduler launches a batch before it processes the result of the one before (results.py).
    A turn that the session rejects when it is created runs through the one-token prefill that it gets: at
    once if there is room, else never.
    """

    # SGLangSystem has the real values of both.
    name = ""
    capabilities = Capabilities()

    def __init__(self, release: Release0510, root: Path, *, overlap: bool = False) -> None:
        alias(type(release))
        self.release = release
        self.root = root
        self.overlap = overlap
        self.serial = 0
        self.calls: CallLog | None = None
        self.noted = wire.Noted()
        self.results: Results
        self._settings = settings_of(release.version, list(TABLE))
        inherited = {name: os.environ.get(name) for name in self._settings}
        self._environment = {
            name: value for name, value in inherited.items() if name.startswith("SGLANG_")
        }

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
            self.calls.begin_server()

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
        """Do nothing: nothing outside this process is held."""

    def _own_errors(self) -> AbstractContextManager[None]:
        misfit = f"is not of the {self.release.version} kind"
        return raising_misfit(
            self.root, misfit, "SGLang", "parts/modules.py", unset(), "parts/stand_ins.py"
        )

    # -- sessions ---------------------------------------------------------------------------------

    def open(self, command: c.Open) -> None:
        require(not self.server.is_name_taken(command.session), Reason.SESSION_EXISTS)
        self.server.open_session(command.session)

    def end_session(self, command: c.Close) -> None:
        session = self.server.controller.get(command.session)
        require(session is not None, Reason.UNKNOWN_SESSION)
        require(not self.release.closing(session), Reason.SESSION_CLOSING)
        self.server.controller.close(Bag(session_id=command.session))

    def submit(self, command: c.Submit) -> None:
        server = self.server
        require(
            command.tokens >= 0 and prompt_len(command.prompt) + command.tokens >= 1, Reason.EMPTY
        )
        spelled(command.prompt)
        name = command.session
        require(name is None or name in server.controller, Reason.UNKNOWN_SESSION)
        require(not server.is_name_taken(command.request), Reason.REQUEST_EXISTS)
        session = None if name is None else server.controller.get(name)
        # The scheduler itself turns away turns of a session that is to be closed.
        require(session is None or not self.release.closing(session), Reason.SESSION_CLOSING)
        require(session is not None or command.rewind <= 0, Reason.SHRINKING_PREFIX)
        require(command.rewind >= 0, Reason.BAD_LENGTH)
        history = 0 if session is None else len(self.release.history(session))
        counted = self.serial + 1
        serial = serial_of_turn(command, counted)
        tokens = spelled(command.prompt, history)
        tokens += [token_id(serial, history + len(tokens) + i) for i in range(command.tokens)]
        require(history + len(tokens) <= server.geometry.width, Reason.ROW_TOO_SHORT)
        undo = None
        if command.rewind:
            # An offset of 0 means none to the server, so taking all back is expressed otherwise.
            left = history - command.rewind
            undo = Bag(
                id=name,
                replace=False,
                drop_previous_output=left <= 0,
                offset=left if left > 0 else None,
            )
        before = [] if name is None else server.history(name)
        namespace = server.namespace_of([*before, *tokens])
        in_namespace = server.is_in_namespace([*before, *tokens])
        ids = namespaces.exchange_texts(tokens) if in_namespace else tokens
        req = server.new_request(f"{command.request}#{counted}", ids, name, undo, **namespace)
        if req.to_finish is not None:
            taken_back = command.rewind and not (name is not None and server.in_flight(name))
            if server.has_room_for_one():
                self._one_token_prefill(
                    LiveRequest(self.release, command.request, name, serial, req, history)
                )
            raise CommandRefused(Reason.SHRINKING_PREFIX if taken_back else Reason.TURN_IN_FLIGHT)
        self.serial = counted
        if name is not None:
            server.session_in_namespace[name] = in_namespace
        server.turns[command.request] = LiveRequest(
            self.release, command.request, name, serial, req, history, in_namespace=in_namespace
        )

    # -- decode -----------------------------------------------------------------------------------

    def decode(self, command: c.Decode) -> list[Choice]:
        server = self.server
        require(command.requests, Reason.EMPTY)
        turns = self._lanes(command.requests, RequestPhase.RUNNING)
        self._window(turns)
        self.server.require_room([(t.fill - 1, t.fill) for t in turns], extend=False)
        self._kind_of_run(spec=False)

        evicted = self._eviction_lengths(turns)
        for turn in turns:
            self.results.before_round(turn)
        batch = server.new_batch(turns, ForwardMode.DECODE)
        batch.prepare_for_decode()
        self._launch(turns, ForwardMode.DECODE)
        launched = self._eviction_lengths(turns)
        with server.results_of_prefill():
            server.forward_batch(batch, turns, [(turn.fill - 1, turn.fill) for turn in turns])
            for at, turn in enumerate(turns):
                result = Result(server.sample(turn, 1), batch=batch, batch_index=at)
                self.results.note_launch(turn, result)
        return self._own_evictions(turns, evicted, launched)

    def spec_decode(self, command: c.SpecDecode) -> list[Choice]:
        return self._verify(command.lanes)

    def launch(self, command: c.Launch) -> list[Choice]:
        return self._verify(command.lanes, late=1)

    def settle(self, command: c.Settle) -> None:
        [turn] = self._lanes([command.request], RequestPhase.RUNNING, late=2)
        require(turn.unsettled_results, Reason.WRONG_PHASE)
        turn.unsettled_results[0].visible = True

    def _verify(self, lanes: Sequence[c.Draft], late: int = 0) -> list[Choice]:
        """Run a verify round.

        late: number of results of each entry that may be in flight; the round's own result then is, too.
        """
        server = self.server
        require(lanes and all(n.allocate >= 1 and n.accept >= 1 for n in lanes), Reason.EMPTY)
        turns = self._lanes([n.request for n in lanes], RequestPhase.RUNNING, late=late)
        require(all(n.accept <= n.allocate for n in lanes), Reason.BAD_LENGTH)
        # no_buffer has no drafts; a round crosses one boundary at most
        if self.server.states is not None:
            tracks = self.server.tracker is not None
            most_accepted = max(lane.accept for lane in lanes)
            limit = server.geometry.lazy_round if server.geometry.lazy else checkpoint_grid()
            require(tracks and most_accepted <= limit, Reason.UNFAITHFUL)
        self._window(turns)
        before = [server.cursors(t) for t in turns]
        # The release allocates up to 2 * draft_len past the commit of every entry, which lacks the result
        # that is not processed by then. The smallest draft_len is taken that gives each entry what it asks
        # for and takes nothing back.
        newest = [t.pending[-1] if t.pending else None for t in turns]
        lags = [
            server.commits_when_processed(result) if result is not None and result.visible else 0
            for result in newest
        ]
        needed_lens = [  # past all that rounds in flight may accept
            t.origin + t.visible_output - 1 + sum(r.drafted for r in t.unsettled_results) + lane.allocate
            for t, lane in zip(turns, lanes, strict=True)
        ]
        draft_len = max(
            -(-(lag + max(needed_len, c.kv_allocated_len) - c.kv_committed_len) // 2)
            for needed_len, c, lag in zip(needed_lens, before, lags, strict=True)
        )
        ends = [
            self.release.spec_end(
                c._replace(kv_committed_len=c.kv_committed_len - lag),
                draft_len,
                server.geometry.page_size,
            )
            for c, lag in zip(before, lags, strict=True)
        ]
        self.server.require_room(
            [(c.kv_allocated_len, end) for c, end in zip(before, ends, strict=True)]
        )
        self._kind_of_run(spec=True)

        evicted = self._eviction_lengths(turns)
        for turn in turns:
            self.results.before_round(turn)
        batch = server.new_batch(turns, ForwardMode.DECODE)
        SERVER_ARGS.speculative_num_draft_tokens = draft_len
        self.release.prepare_spec(batch, draft_len)
        state_choices = [(0, 0)] * len(lanes)
        if server.tracker is not None:
            state_choices = self.release.verify(batch, [lane.accept for lane in lanes])
        self._launch(turns, ForwardMode.DECODE)
        launched = self._eviction_lengths(turns)
        ahead = []
        with server.results_of_prefill():
            for lane_index, (turn, lane) in enumerate(zip(turns, lanes, strict=True)):
                tokens = server.sample(turn, lane.accept)
                allocated = self.release.cursors(turn.req).kv_allocated_len
                # The last accepted token is the bonus: sampled, without KV yet.
                server.forward(turn, turn.fill - 1, allocated, tokens[:-1], state_choices[lane_index])
                result = Result(
                    tokens, visible=not late, drafted=lane.allocate, batch=batch, batch_index=lane_index
                )
                self.results.note_launch(turn, result)
                claimed = server.cursors(turn).kv_committed_len if late else None
                ahead.append(Choice(turn.name, None, allocated, False, claimed))
        reached = {
            c.request: c.swa_evicted_seqlen for c in self._own_evictions(turns, evicted, launched)
        }
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

    # -- memory checks ----------------------------------------------------------------------------

    def check_busy(self, command: c.CheckBusy) -> Report | None:
        require(command.level in (0, 1, 2), Reason.BAD_LENGTH)
        return self.server.scheduler.busy(command.level) if command.level else None

    def check_idle(self, command: c.CheckIdle) -> Report:
        del command
        server = self.server
        turns = self.server.turns.values()
        under_way = RequestPhase.EXTENDING, RequestPhase.RUNNING
        require(all(t.phase not in under_way for t in turns), Reason.NOT_IDLE)
        locked = bool(server.lock_holders) or any(t.locked for t in turns)
        report: Report = server.scheduler.idle([t.req for t in turns], locked)
        return report


_METHODS: dict[type, Callable[[Driver, Any], Played]] = {
    kind: getattr(Driver, kind_name(kind)) for kind in COMMANDS if hasattr(Driver, kind_name(kind))
} | {c.Close: Driver.end_session}
