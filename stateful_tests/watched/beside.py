"""The reference beside a watched server: what the server shows is compared and followed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from impl.sglang.server import events as log
from reference import given, model
from reference.clauses.step import cursors_text
from reference.commands import Choice, Command, Done, Mode, Outcome, Refused
from reference.cursors import in_order
from reference.geometry import Geometry, GeometryError, ServerGeometry
from reference.ledger import Cursors, Request, State, Text, text_len
from stateful_tests.lockstep.results import Trace
from stateful_tests.traces.notation import format_command
from stateful_tests.traces.schema import MAX_STEPS
from stateful_tests.watched import deviations as known
from stateful_tests.watched.judging import PageJudge, Shown, TextJudge, Verdict, verdict
from stateful_tests.watched.reader import Line
from stateful_tests.watched.results import LogParting, Validated

MOST, FEW = 1000, 20  # partings that are kept, unexplained and of each known fault; the others are counted


@dataclass(frozen=True, slots=True)
class Mapping:
    """How one kind of event is read: the commands it becomes, and what is judged besides their outcome. Each
    row of TABLE stands with the method that does it, in `turns`, `rounds` and `validator`."""

    event: type
    commands: str
    judged: str
    read: Callable[[Any, Any], None]


TABLE: dict[type, Mapping] = {}
Reader = TypeVar("Reader")
Read = Callable[[Reader, Any], None]


def reads(event: type, commands: str, judged: str) -> Callable[[Read[Reader]], Read[Reader]]:
    """Register the decorated method as what reads this kind of event."""

    def add(read: Read[Reader]) -> Read[Reader]:
        TABLE[event] = Mapping(event, commands, judged, read)
        return read

    return add


def mapping_row(mapping: Mapping) -> dict[str, str]:
    """A row of the table, in words."""
    event = str(mapping.event.__struct_config__.tag)  # type: ignore[attr-defined]
    return {"event": event, "commands": mapping.commands, "judged": mapping.judged}


class Beside:
    """The reference beside one server, as a log shows that. state: the reference's."""

    def __init__(self, header: log.WatchHeader) -> None:
        size = header.page_size
        self.header = header
        self.geometry = ServerGeometry(
            size,
            header.window,
            header.full_tokens // size,
            header.swa_tokens // size,
            header.rows,
            header.width,
        )
        self.state: State = model.initial(self.geometry, Mode.FAITHFUL)
        self.result = Validated()
        self._line = Line("", 0, log.CloseAsked(""))
        self._sweeps: dict[str, Choice] = {}  # of sweeps before the extend that they belong to
        self._matched: dict[str, int] = {}  # prefix that a request was given when it was last looked at
        # Verify rounds of a request whose results are to come; True: a lane of a mixed batch.
        self._launched: defaultdict[str, list[bool]] = defaultdict(list)
        self._midway: set[str] = set()  # requests that were there when the log began: theirs are not known
        self._lanes: set[str] = set()  # of a round that was prepared since the last step
        self._unpaged = False  # the pages of the last step are to come
        self._closing: dict[str, bool] = {}  # sessions that are to be closed; True: not at once
        self._busy: dict[str, str] = {}  # sessions whose turn was aborted in the queue: a known fault
        self._times_out: set[str] = set()  # sessions that may close by themselves
        self._outside: dict[str, None] = {}  # retracted, and not queued again yet
        self._retracts: Counter[str] = Counter()
        self._orphans: dict[str, str] = {}  # request -> session whose turn it was, and whose text it still is
        self._rejected: dict[str, str] = {}  # request -> session that it was rejected for
        self._interrupted: set[str] = set()  # turns while which a rejected one went through the server
        self._done: list[tuple[Command, tuple[Choice, ...]]] = []  # up to the first parting that counts
        self._conforms = True
        self._kept: dict[str, Text] = {}  # sessions' texts with a turn that was retracted, then aborted
        self._blind = False  # no state follows from what the server did; a snapshot may come
        self._number: int | None = 0  # of the last step; None before the first of a log that begins later
        self._pages, self._texts, self._locked = PageJudge(self.geometry), TextJudge(), 0
        self._off: Counter[str] = Counter()  # counts that differ already, and were told

    def trace(self) -> Trace | None:
        """What was done up to the first parting that no known fault explains, as a trace of ours.

        None where the vocabulary cannot say it: a log that begins in the middle, a tree of unknown content,
        sizes or names that no trace may have.
        """
        if self.result.given or self.header.tree or not self.result.found:
            return None
        g = self.geometry
        try:
            sizes = Geometry(g.page_size, g.window, g.full_pages, g.swa_pages, g.rows, g.width)
        except GeometryError:
            return None
        found, commands = self.result.found[0], tuple(command for command, _ in self._done)
        expected = tuple((at, Done(choices)) for at, (_, choices) in enumerate(self._done) if choices)
        story = f"Recorded from a server, {self.header.engine} {self.header.release}: {found.because}"
        return Trace(
            sizes, Mode.FAITHFUL, commands, "recorded", clause=found.clause, story=story, expected=expected
        )

    def _do(self, command: Command, *choices: Choice, shown: Shown | None = None) -> bool:
        """Carry a command out on the reference; then compare with what the server shows, and follow it."""
        self.result.commands[type(command).__name__] += 1
        if self._conforms and len(self._done) < MAX_STEPS:
            self._done.append((command, choices))
        was, overreach = self.state, ""
        try:
            now, outcome = model.step(was, command, choices)
        except model.ChoiceNotAllowed as error:
            overreach = str(error)
            now, outcome = model.step(was, command)
        if isinstance(outcome, Refused):
            self._part(command, self._refusal(outcome))
            return False
        self.state = now
        shown = shown or Shown({}, {})
        if overreach or not self._same(shown):
            self._judge(command, was, outcome, shown, overreach)
        return True

    def _follow(self, command: Command, was: State, shown: Shown) -> None:
        """Compare after something that no command says, and that `given` has done to the reference."""
        self.result.commands[type(command).__name__] += 1
        if not self._same(shown):
            self._judge(command, was, Done(), shown, "")

    def _reach(self, what: str, whether: bool = True) -> None:
        """Count a decision of the scheduler."""
        if whether:
            self.result.reached[what] += 1

    def _same(self, shown: Shown) -> bool:
        """Whether the reference has the cursors that the server shows."""
        self.result.compared += len(shown.requests) + len(shown.slots)
        for name, got in shown.requests.items():
            request = self.state.request(name)
            if request is None or request.cursors != got:
                return False
        for name, kept in shown.slots.items():
            session = self.state.session(name)
            if session is not None and session.slot != kept:
                return False
        return True

    def _judge(self, command: Command, was: State, outcome: Outcome, shown: Shown, overreach: str) -> None:
        """Tell which clause says that they differ; the reference takes the server's cursors over."""
        found = verdict(command, was, self.state, outcome, shown, overreach)
        deviation = known.explained(self.header, command, was, self.state, shown)
        self._part(command, found, deviation)
        for name, got in shown.requests.items():
            request = self.state.request(name)
            if request is not None and request.cursors is not None and in_order(got):
                self.state = given.with_cursors(self.state, name, got)
        for name, kept in shown.slots.items():
            session = self.state.session(name)
            if session is None:
                continue
            if deviation is not None and kept is not None and session.slot is not None:
                computed = session.slot.kv_committed_len
                self.result.holes.update((name, at) for at in range(computed, kept.kv_committed_len))
            self.state = given.with_slot(self.state, name, kept)

    def _refusal(self, outcome: Refused) -> Verdict:
        return Verdict("OUT-1", f"refused: {outcome.reason.value} ({outcome.reason.says})", "done")

    def _part(self, command: Command | None, found: Verdict, deviation: str | None = None) -> None:
        result = self.result
        if deviation is not None:
            result.known[deviation] += 1
            if result.known[deviation] > FEW:
                return
        else:
            self._conforms = False
            if len(result.found) >= MOST:
                result.more += 1
                return
        event = type(self._line.event).__struct_config__.tag
        text = format_command(command) if command is not None else ""
        because = f"the server: {found.observed}; the rules: {found.expected}"
        result.partings.append(LogParting(
            self._line.file, self._line.number, str(event), text, *found, because, deviation,
            self._about(command),
        ))  # fmt: skip

    def _about(self, command: Command | None) -> str:
        """The request and the session that a command, or the event itself, is about."""
        names = [
            getattr(each, field, None)
            for each in (command, self._line.event)
            for field in ("request", "session")
        ]
        request = next((r for n in names if isinstance(n, str) and (r := self.state.request(n))), None)
        session = next((s for n in names if isinstance(n, str) and (s := self.state.session(n))), None)
        if session is None and request is not None:
            session = self.state.session(request.session)
        said = []
        if request is not None:
            lengths = f"{request.origin} tokens of input, {request.output} outputs"
            said.append(f"{request.name} {request.phase.value}, {lengths}, {cursors_text(request.cursors)}")
        if session is not None:
            turn = f"turn {session.turn}" if session.turn else "no turn"
            history = f"{text_len(session.history)} tokens of history"
            said.append(f"{session.name}: {turn}, {history}, slot: {cursors_text(session.slot)}")
        return "; ".join(said)

    def _request(self, name: str) -> Request | None:
        """The request, or a parting: nobody submitted it."""
        request = self.state.request(name)
        if request is None:
            want = f"requests {sorted(r.name for r in self.state.requests)}"
            self._part(None, Verdict("SES-2", want[:200], f"goes on with {name}"))
        return request

    def _ends(self, command: Command | None, found: Verdict, deviation: str | None) -> None:
        """Tell a parting after which no state follows: two turns have one slot."""
        self._part(command, found, deviation)
        self._blind, self.result.ended = True, deviation or ""

    def _interrupts(self, name: str) -> None:
        """A request goes through the server; was it rejected, so this may clear its session's mark."""
        session = self.state.session(self._rejected.get(name))
        if session is not None and session.turn is not None:
            self._interrupted.add(session.turn)

    def _slot(self, request: Request) -> Cursors | None:
        session = self.state.session(request.session)
        return session.slot if session is not None else None
