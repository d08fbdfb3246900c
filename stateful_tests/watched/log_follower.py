"""The reference that follows a watched server: it carries the commands out, and is compared with the log.

Each kind of event is one guarded action: the guard must hold, the commands are carried out on the reference,
and the event is compared with its state. The modules of `actions` fill TABLE, a row for each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from impl.sglang.server import events as log
from reference import model
from reference.clauses.step import cursors_text
from reference.commands import Choice, Command, Done, Mode, Refused
from reference.geometry import Geometry, GeometryError, ServerGeometry
from reference.state import Cursors, Request, Session, State, text_len
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.traces.notation import format_command
from stateful_tests.traces.schema import MAX_STEPS
from stateful_tests.watched import deviations
from stateful_tests.watched.kept_states import KeptStates
from stateful_tests.watched.violated_clauses import PageJudge, Shown, TextJudge, Verdict, verdict
from stateful_tests.watched.log_reader import Line
from stateful_tests.watched.validation_results import Mismatch, Validated
from stateful_tests.watched.log_facts import RequestSeen, SessionSeen, StepSeen, TierSeen, TransfersSeen

MAX_FOUND = 1000  # unexplained mismatches that are kept
MAX_OF_KNOWN = 20  # mismatches of each known fault that are kept
NOTHING = Shown({}, {})
# Events that are not judged, and why.
AFTER_A_MISMATCH = "events after a mismatch, up to the next snapshot"
AFTER_A_GAP = "events after a gap, up to the next snapshot"
LOST = "lines that are missing"


class Diverged(Exception):
    """The server shows what the reference forbids. No state follows from it, even if the fault is
    `known`."""

    def __init__(
        self,
        clause: str,
        expected: str,
        observed: str,
        command: Command | None = None,
        known: str | None = None,
    ) -> None:
        self.verdict = Verdict(clause, expected, observed)
        self.command = command
        self.known = known


class LogFollower:
    """The reference that follows one server.

    follows: `state` is that of the server; False after a mismatch or a gap, until a snapshot gives the
        state anew.
    skipping: the reason why it does not follow.
    """

    def __init__(self, header: log.WatchHeader) -> None:
        """Begin at an empty server of the sizes in the header of its log."""
        size = header.page_size
        self.header = header
        self.geometry = ServerGeometry(
            size,
            header.window,
            header.full_tokens // size,
            header.swa_tokens // size,
            header.rows,
            header.width,
            states=header.states,
        )
        self.state: State = model.initial(self.geometry, Mode.FAITHFUL)
        self.follows = True
        self.skipping = AFTER_A_MISMATCH
        self.result = Validated()
        self.requests: dict[str, RequestSeen] = {}
        self.sessions: dict[str, SessionSeen] = {}
        self.step = StepSeen()
        self.tier: TierSeen | None = None
        self.transfers = TransfersSeen()
        # counts that differ already, and by how much
        self.reported_offsets: Counter[str] = Counter()
        self.pages = PageJudge(self.geometry)
        self.texts = TextJudge()
        self.kept_states = KeptStates(header)
        self._line = Line("", 0, log.CloseAsked(""))
        # up to the first mismatch that counts, and to one more than a trace may have
        self._commands_done: list[tuple[Command, tuple[Choice, ...]]] = []

    @property
    def tells_results(self) -> bool:
        """Whether the log has the result of every round."""
        return self.header.speculative or self.header.level == "pages"

    # -- what actions use ---------------------------------------------------------------------------

    def do(self, command: Command, *choices: Choice, shown: Shown = NOTHING) -> None:
        """Carry a command out on the reference, and compare. Raises Diverged."""
        self.result.commands[type(command).__name__] += 1
        was = self.state
        beyond = ""
        try:
            now, outcome = model.step(was, command, choices)
        except model.ChoiceNotAllowed as error:
            beyond = str(error)
            now, outcome = model.step(was, command)
        if isinstance(outcome, Refused):
            expected = f"refused: {outcome.reason.value} ({outcome.reason.says})"
            raise Diverged("OUT-1", expected, "done", command)
        if not self.result.unexplained and len(self._commands_done) <= MAX_STEPS:
            self._commands_done.append((command, choices))
        if beyond or not self._same(now, shown):
            divergence = verdict(command, was, now, outcome, shown, beyond)
            known_fault = deviations.fault_of_cursors(self.header, command, was, now, shown)
            shows = None if beyond or known_fault else deviations.adopt_shown_cursors(now, shown)
            if shows is not None:
                self.report(Diverged(*divergence, command))
                now = shows
            else:
                self.note_deviation(known_fault, *divergence, command)
                now = deviations.adopt_shown_slots(now, shown)
        self.state = now

    def follow_to(self, state: State, command: Command, shown: Shown) -> None:
        """Adopt a state that no command leads to exactly, and compare. Raises Diverged."""
        self.result.commands[type(command).__name__] += 1
        if not self._same(state, shown):
            raise Diverged(*verdict(command, self.state, state, Done(), shown), command)
        self.state = state

    def set_cursors(self, name: str, cursors: Cursors) -> None:
        """Set a request's cursors after a move that no command describes, and that was judged already."""
        request = self.state.request(name)
        assert request is not None
        self.state = self.state.with_request(request._replace(cursors=cursors))

    def note_deviation(
        self,
        known: str | None,
        clause: str,
        expected: str,
        observed: str,
        command: Command | None = None,
    ) -> None:
        """Report a deviation that is a known fault, whose effect the caller follows. Raises Diverged
        for any other."""
        deviation = Diverged(clause, expected, observed, command, known)
        if known is None:
            raise deviation
        self.report(deviation)

    def report(self, divergence: Diverged) -> None:
        """Keep a mismatch, or count it where enough are kept."""
        result = self.result
        known_fault = divergence.known
        if known_fault is not None:
            result.known[known_fault] += 1
            if result.known[known_fault] > MAX_OF_KNOWN:
                return
        elif len(result.unexplained) >= MAX_FOUND:
            result.more += 1
            return
        event = type(self._line.event).__struct_config__.tag
        text = format_command(divergence.command) if divergence.command is not None else ""
        result.mismatches.append(Mismatch(
            self._line.file, self._line.number, str(event), text, *divergence.verdict, known_fault,
            self._about(divergence.command), self.step.at,
        ))  # fmt: skip

    def lose_steps(self, missing: str) -> None:
        """Record missing lines since the last step: mismatches since then mean nothing, and up to the
        next snapshot no state is known."""
        result = self.result
        result.skipped[missing] += 1
        since = result.mismatches[self.step.judged :]
        result.mismatches[self.step.judged :] = [mismatch for mismatch in since if mismatch.known is not None]
        self.follows = False
        self.skipping = AFTER_A_GAP

    def lose_lines(self, lines: int) -> None:
        """Record missing lines before this one: up to the next snapshot no state is known.
        Earlier mismatches stay: the numbers of the lines show that all were there."""
        self.result.skipped[LOST] += lines
        self.step.number = None
        self.step.unpaged = False
        self.follows = False
        self.skipping = AFTER_A_GAP

    def request(self, name: str) -> Request:
        """Return a request that goes on. Raises Diverged if it was not submitted."""
        request = self.state.request(name)
        if request is None:
            names = sorted(r.name for r in self.state.requests)
            raise Diverged("SES-2", f"requests {names}"[:200], f"goes on with {name}")
        return request

    def request_seen(self, request: str) -> RequestSeen:
        """Return the log's facts about a request."""
        return self.requests.setdefault(request, RequestSeen())

    def session_seen(self, session: str) -> SessionSeen:
        """Return the log's facts about a session."""
        return self.sessions.setdefault(session, SessionSeen())

    def note_interruption(self, name: str) -> None:
        """Record that a request goes through the server. A rejected one may end the turn of its
        session; a log that begins later does not name the session."""
        by = self.request_seen(name).rejected_by
        for session in self.state.sessions:
            if by in (session.name, "") and session.turn is not None:
                self.request_seen(session.turn).interrupted = True

    def turn_session(self, request: Request) -> Session | None:
        """Return the session whose turn a request is."""
        return self.state.session(request.session)

    def check_unmoved(self, name: str, logged: Cursors) -> None:
        """Compare cursors that nothing has moved. Raises Diverged."""
        self.result.compared += 1
        cursors = self.request(name).cursors
        if cursors is not None and cursors != logged:
            expected = f"{name}: {cursors_text(cursors)}"
            divergence = Diverged("LEN-4", expected, f"shows {cursors_text(logged)}")
            if not deviations.are_row_cursors(logged, cursors):
                raise divergence
            self.report(divergence)
            self.set_cursors(name, logged)

    # -- reports ------------------------------------------------------------------------------------

    def trace(self) -> Trace | None:
        """Return a trace of the commands up to the first mismatch that no known fault explains.

        None where the vocabulary cannot say it: a log that begins in the middle, a tree of unknown content,
        sizes or names that no trace may have, more commands than fit.
        """
        if self.result.given or self.header.tree or not self.result.unexplained:
            return None
        if len(self._commands_done) > MAX_STEPS:
            return None
        g = self.geometry
        try:
            sizes = Geometry(g.page_size, g.window, g.full_pages, g.swa_pages, g.rows, g.width)
        except GeometryError:
            return None
        mismatch = self.result.unexplained[0]
        commands = tuple(command for command, _ in self._commands_done)
        expected = tuple(
            (index, Done(choices)) for index, (_, choices) in enumerate(self._commands_done) if choices
        )
        story = (
            f"Recorded from a server, {self.header.engine} {self.header.release}: {mismatch.sentence}"
        )
        return Trace(
            sizes,
            Mode.FAITHFUL,
            commands,
            "recorded",
            clause=mismatch.clause,
            story=story,
            expected=expected,
        )

    def _same(self, state: State, shown: Shown) -> bool:
        """Return whether the reference has the cursors that the server shows."""
        self.result.compared += len(shown.requests) + len(shown.slots)
        for name, cursors in shown.requests.items():
            request = state.request(name)
            assert request is not None  # such a command leaves it there
            if request.cursors != cursors:
                return False
        for name, slot in shown.slots.items():
            session = state.session(name)
            if session is not None and session.slot != slot:
                return False
        return True

    def _about(self, command: Command | None) -> str:
        """Describe the request and the session of a command, or of the event itself; on a server of a
        pair the request and its room."""
        if self.header.role:
            event: Any = self._line.event
            return f"{event.request}, room {event.room}" if hasattr(event, "room") else ""
        names = [
            getattr(each, name, None)
            for each in (command, self._line.event)
            for name in ("request", "session")
        ]
        request = next(
            (r for n in names if isinstance(n, str) and (r := self.state.request(n))), None
        )
        session = next(
            (s for n in names if isinstance(n, str) and (s := self.state.session(n))), None
        )
        if session is None and request is not None:
            session = self.state.session(request.session)
        parts = []
        if request is not None:
            lengths = f"{request.origin} tokens of input, {request.output} outputs"
            parts.append(
                f"{request.name} {request.phase.value}, {lengths}, {cursors_text(request.cursors)}"
            )
        if session is not None:
            turn = f"turn {session.turn}" if session.turn else "no turn"
            history = f"{text_len(session.history)} tokens of history"
            parts.append(f"{session.name}: {turn}, {history}, slot: {cursors_text(session.slot)}")
        return "; ".join(parts)


E = TypeVar("E")
Action = Callable[[LogFollower, E], None]


@dataclass(frozen=True, slots=True)
class Mapping:
    """The action of one kind of event: what must hold before, the commands, what is compared besides
    their outcome."""

    event: type
    guard: str
    commands: str
    compared: str
    act: Action[Any]


TABLE: dict[type, Mapping] = {}


def action(
    event: type[E], *, guard: str = "", commands: str = "", compared: str = ""
) -> Callable[[Action[E]], Action[E]]:
    """Register the decorated function as the action of this kind of event."""

    def add(act: Action[E]) -> Action[E]:
        TABLE[event] = Mapping(event, guard, commands, compared, act)
        return act

    return add


def mapping_row(mapping: Mapping) -> dict[str, str]:
    """Return a row of the table, in words."""
    event = str(mapping.event.__struct_config__.tag)  # type: ignore[attr-defined]
    return {
        "event": event,
        "guard": mapping.guard,
        "commands": mapping.commands,
        "compared": mapping.compared,
    }
