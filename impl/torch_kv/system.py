"""TorchKV: the commands behind the adapter. A command is refused before it changes anything.

The host has names, tokens, phases and a mirror of the cursors; store.py and cursors.py have what is on the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from impl import adapter
from impl.torch_kv.cursors import ZERO
from impl.lazy import torch
from impl.torch_kv.lock_holders import LockHolders
from impl.torch_kv.requests import KVRequest, KVSession
from impl.torch_kv.state_slots import StateSlots
from impl.torch_kv.states import BUFFERS
from impl.torch_kv.store import KVStore
from impl.torch_kv.radix_tree import RadixTree
from impl.vocabulary import (
    CommandRefused,
    Played,
    RequestPhase,
    done,
    require,
    serial_of_turn,
    spelled,
    well_formed,
)
from reference import commands as c
from reference.commands import Command, Outcome, Reason, Refused, kind_name, prompt_len
from reference.geometry import Geometry
from reference.system_kinds import ROWS
from reference.token_ids import token_id

REFUSED = {reason: Refused(reason) for reason in Reason}


class TorchKV(LockHolders):
    """Our implementation. `device`: any torch device. Call `reset` before the first command.

    A wrong free goes through and shows in `view`, where it is judged. TorchKV does not know the mode of a
    run, and never answers UNFAITHFUL. Methods of one line, such as `close_is_due`, are decisions that a bug
    of impl/bugs gets wrong.
    """

    name = "torch"
    store_class = KVStore
    tree_class = RadixTree
    states_class = StateSlots
    #: serial of the last turn that was submitted
    serial: int
    store: KVStore
    window: int | None

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._inference = torch.inference_mode()
        self.sessions: dict[str, KVSession] = {}
        self.requests: dict[str, KVRequest] = {}
        self.lock_holders = {}
        self.locks = {}
        # `close` is the adapter's method, and `launch` notes a batch for the memory checks
        method_names = {c.Launch: "launch_ahead", c.Close: "end_session"}
        self._methods: dict[type, Callable[[Any], Played]] = {
            kind: getattr(self, method_names.get(kind, kind_name(kind))) for kind in c.COMMANDS
        }

    @property
    def capabilities(self) -> adapter.Capabilities:
        return adapter.Capabilities(
            kind=ROWS.name,
            mixed_batches=True,
            swa_tail=True,
            answers=True,
            bigram=True,
            recurrent=True,
            tracks=True,
            new_views=True,
        )

    def reset(self, geometry: Geometry) -> None:
        """Make new tensors of these sizes on the device, and forget all sessions and requests."""
        self.store = self.store_class(geometry, self.device)
        self.page_size = geometry.page_size
        self.window = geometry.window
        self.width = geometry.width
        self.states = self.states_class(geometry.states) if geometry.states else None
        self.tree = (
            self.tree_class(self.store, geometry.window, self.states) if geometry.tree else None
        )
        self.bigram = geometry.bigram
        self.tracks = geometry.tracks and geometry.tree
        self.last_batch = []
        self.running_batch = []
        self.sessions.clear()
        self.requests.clear()
        self.lock_holders.clear()
        self.locks.clear()
        self.serial = 0

    def apply(self, command: Command) -> Outcome:
        """Execute a command, or refuse it."""
        if self.states is not None:
            self.states.read = {}
        try:
            # no autograd bookkeeping: a fifth of the time of such small steps
            with self._inference:
                return done(self._methods[type(command)](command))
        except CommandRefused as refused:
            return REFUSED[refused.reason]

    def close(self) -> None:
        """Do nothing: nothing outside this process is held."""

    # -- clients ----------------------------------------------------------------------------------

    def open(self, command: c.Open) -> None:
        require(not self.is_taken(command.session), Reason.SESSION_EXISTS)
        self.sessions[command.session] = KVSession(command.session)

    def submit(self, command: c.Submit) -> Played:
        """Queue a request whose text is its session's history and its prompt."""
        new = prompt_len(command.prompt) + command.tokens
        require(command.tokens >= 0 and well_formed(command.prompt) and new >= 1, Reason.EMPTY)
        session = None if command.session is None else self.sessions.get(command.session)
        require(session is not None or command.session is None, Reason.UNKNOWN_SESSION)
        require(not self.is_taken(command.request), Reason.REQUEST_EXISTS)
        require(session is None or not session.closing, Reason.SESSION_CLOSING)
        require(session is None or not self.turn_in_flight(session), Reason.TURN_IN_FLIGHT)
        require(command.rewind <= 0, Reason.SHRINKING_PREFIX)
        require(command.rewind >= 0, Reason.BAD_LENGTH)
        text = list(session.history) if session is not None else []
        origin = len(text) + new
        require(origin <= self.width, Reason.ROW_TOO_SHORT)
        serial = serial_of_turn(command, self.serial + 1)
        self.serial += 1
        text.extend(spelled(command.prompt, len(text)))
        text.extend(token_id(serial, position) for position in range(len(text), origin))
        request = KVRequest(command.request, session, serial, text, origin)
        self.requests[command.request] = request
        if session is not None:
            session.turn = request
        return None

    def turn_in_flight(self, session: KVSession) -> bool:
        """Return whether a second turn of the session must wait."""
        return session.turn is not None

    def end_session(self, command: c.Close) -> None:
        require(command.session in self.sessions, Reason.UNKNOWN_SESSION)
        session = self.sessions[command.session]
        require(not session.closing, Reason.SESSION_CLOSING)
        if self.must_defer_close(session):
            session.closing = True
        else:
            self.forget(session)

    def must_defer_close(self, session: KVSession) -> bool:
        """Return whether a turn in flight uses the session's KV, which is then freed at the turn's end
        (SES-2)."""
        return session.turn is not None

    def forget(self, session: KVSession) -> None:
        self.close_now(session)
        del self.sessions[session.name]

    def end_turn(self, request: KVRequest) -> None:
        """Remove the request, and close its session if a close has waited for it (SES-2)."""
        self.detach(request)
        del self.requests[request.name]
        session = request.session
        if session is not None:
            session.turn = None
            if self.close_is_due(session):
                self.forget(session)

    def close_is_due(self, session: KVSession) -> bool:
        return session.closing

    # -- ends of a turn ---------------------------------------------------------------------------

    def finish(self, command: c.Finish) -> Played:
        [request] = self._lanes((command.request,), RequestPhase.RUNNING)
        require(1 <= command.finished_len <= len(request.text) - request.origin, Reason.BAD_LENGTH)
        target = request.origin + command.finished_len
        session = request.session
        if session is None:
            self.end_ordinary(request, target)
        else:
            self.trim_overshoot(request, target)
            session.history = self.history_after(request, target)
            self.save(session, request)
        self.end_turn(request)
        return None

    def history_after(self, request: KVRequest, target: int) -> list[int]:
        """Return the client's text: outputs past the finished length are not part of it (SES-1)."""
        return request.text[:target]

    def retract(self, command: c.Retract) -> Played:
        [request] = self._lanes((command.request,), RequestPhase.RUNNING)
        lost = command.in_flight
        kept_len = len(request.text) - lost
        # the tree has its prompt by its result
        is_prompt_only = kept_len == request.origin and self.tree is not None
        most_lost = 0 if request.in_flight else 1  # results in flight are the lost ones
        require(0 <= lost <= most_lost and not is_prompt_only, Reason.BAD_LENGTH)
        del request.text[kept_len:]
        self.skip_results(request)
        if request.session is None:
            self.drop_retracted(request)
        else:
            self.drop_overallocated(request, kept_len)
            self.save(request.session, request)
        request.phase = RequestPhase.QUEUED
        self.leave(request)
        return None

    def skip_results(self, request: KVRequest) -> None:
        """Skip the results still in flight of a retracted request."""
        request.in_flight.clear()

    def abort(self, command: c.Abort) -> None:
        require(command.request in self.requests, Reason.UNKNOWN_REQUEST)
        request = self.requests[command.request]
        if command.marked:
            require(
                not request.started and request.phase is RequestPhase.QUEUED, Reason.WRONG_PHASE
            )
            states = 1 + BUFFERS if self.tracks else 1
            self.make_room(rows=[None], starts=[0], ends=[1], states=states)
            self.run_marked(request)
        elif request.session is None:
            self.drop(request)
        elif self.wipes(request):
            self.wipe(request.session, request)
        else:
            self.abort_unstarted(request)
        self.end_turn(request)

    def run_marked(self, request: KVRequest) -> None:
        """Prefill one token of a request that is marked aborted. The request is detached from its session
        before, so that its cursors reach no slot (SES-2, sgl-project/sglang#22273)."""
        self.drop(self.prefill_marked(request))

    def prefill_marked(self, request: KVRequest) -> KVRequest:
        """Return a request without a session in the place of a marked one, with a prefill of one token."""
        detached = KVRequest(request.name, None, request.serial, [token_id(request.serial, 0)], 1)
        detached.row = self.store.free_rows.pop()
        self.begin_states([detached])
        self.prefill([detached], [1])
        return detached

    # -- looking in -------------------------------------------------------------------------------

    def view(self) -> adapter.View:
        """Read the tensors, which waits for the device, and the objects of the host.

        Cursors of a request with a row are read from the device, not from the host's mirror.
        """
        store = self.store
        lines = store.cursors.lines.tolist()
        slot_lines = store.slot_cursors.lines.tolist()
        sessions = {}
        requests = {}
        extent: dict[int, int] = {}  # row -> slots to show
        for name, session in self.sessions.items():
            row = cursors = None
            if session.slot is not None:
                row = session.slot.row
                cursors = adapter.Cursors(*slot_lines[row])
                extent[row] = max(extent.get(row, 0), cursors.kv_allocated_len)
            sessions[name] = adapter.SessionView(
                tuple(session.history), session.closing, row, cursors
            )
        for name, request in self.requests.items():
            row = request.row
            cursors = None
            if row is not None:
                cursors = adapter.Cursors(*lines[row])
                extent[row] = max(extent.get(row, 0), cursors.kv_allocated_len)
            elif request.phase is not RequestPhase.QUEUED or request.cursors != ZERO:
                # it is admitted, and has no row yet
                cursors = adapter.Cursors(*request.cursors)
            bearer = None if request.session is None else request.session.name
            requests[name] = adapter.RequestView(
                bearer, request.origin, tuple(request.text), row, cursors
            )
        swa = store.swa
        full_to_swa = store.full_to_swa.tolist()
        cells = store.req_to_token.tolist() if extent else []
        return adapter.View(
            sessions=sessions,
            requests=requests,
            free_full=store.full.free_list(),
            free_rows=tuple(store.free_rows),
            rows={row: cells[row][:length] for row, length in extent.items()},
            full_stamps=store.full.stamps.tolist(),
            free_swa=[] if swa is None else swa.free_list(),
            full_to_swa=full_to_swa,
            swa_stamps=[] if swa is None else swa.stamps.tolist(),
            tree=self.view_tree(full_to_swa),
            states=self.view_states(),
        )

    def view_states(self) -> adapter.StatesView | None:
        """Return the slots of recurrent state with their owners; None on a model without."""
        if self.states is None:
            return None
        slots = {name: session.slot for name, session in self.sessions.items()}
        of_requests = {
            name: request.state
            for name, request in self.requests.items()
            if request.state is not None
        }
        of_sessions = {
            name: slot.state
            for name, slot in slots.items()
            if slot is not None and slot.state is not None
        }
        buffers = {name: request.buffers for name, request in self.requests.items()}
        return adapter.StatesView(
            free=[*self.states.free],
            stamps=[*self.states.stamps],
            requests=of_requests,
            sessions=of_sessions,
            read=self.states.read,
            buffers={name: [slot for slot, _ in pairs] for name, pairs in buffers.items()},
            tracked={
                name: [(slot, length) for slot, length in pairs if length]
                for name, pairs in buffers.items()
            },
        )
