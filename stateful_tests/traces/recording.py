"""Traces as they happen: command by command, or from the log of a server."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from reference import model
from reference.commands import Command, Done, Mode, Outcome, Refused
from reference.geometry import Geometry
from stateful_tests.lockstep.lockstep import check_serial, row_of
from stateful_tests.lockstep.results import Row, Trace
from stateful_tests.traces import files as traces
from stateful_tests.traces.files import TraceError
from stateful_tests.traces.schema import LOG_FORMAT, LOG_IGNORED, MAX_STEPS, VERSION, AnyStep, LogHeader


class Recorder:
    """A trace that grows; the reference answers every command at once. rows: one for each command."""

    def __init__(self, geometry: Geometry, mode: Mode) -> None:
        self.states = [model.initial(geometry, mode)]
        self.rows: list[Row] = []

    def do(self, command: Command) -> Row:
        was = self.states[-1]
        now, outcome = model.step(was, command)
        check_serial(now)
        self.states.append(now)
        self.rows.append(row_of(command, outcome, was, now))
        return self.rows[-1]

    def undo(self) -> Row | None:
        """Take the last command back, if there is one."""
        if not self.rows:
            return None
        self.states.pop()
        return self.rows.pop()

    def trace(self, origin: str) -> Trace:
        """Everything so far; each step states what the reference said."""
        scope = self.states[0].config
        commands = tuple(row.command for row in self.rows)
        expected = tuple((at, plain(row.outcome)) for at, row in enumerate(self.rows))
        return Trace(scope.geometry, scope.mode, commands, origin, expected=expected)


def plain(outcome: Outcome) -> Outcome:
    """Done or refused, without what a system chose or counted."""
    return Done() if isinstance(outcome, Done) else outcome


def stated(trace: Trace) -> Trace:
    """The trace with the reference's own outcome at every step."""
    recorder = Recorder(trace.geometry, trace.mode)
    for command in trace.commands:
        recorder.do(command)
    return replace(trace, expected=recorder.trace("").expected)


class Parting(NamedTuple):
    """A line of a log where the reference does otherwise than the server."""

    line: int
    command: Command
    server: Outcome
    reference: Outcome


def read_log(path: str | os.PathLike[str]) -> tuple[Trace, list[Parting]]:
    """The trace that a log in JSON Lines tells, and where the reference parts from it.

    An event without `expect` happened: it was done. Raises TraceError that names the line.
    """
    name = os.fspath(path)
    data = traces.read(path)
    traces.check_size(data, name)
    lines = [(number, line) for number, line in zip(count(1), data.split(b"\n")) if line.strip()]
    if not lines:
        raise TraceError(name, "", "is empty")
    number, first = lines.pop(0)
    if len(lines) > MAX_STEPS:
        raise TraceError(name, "", f"more than {MAX_STEPS} events")
    where = f"{name}: line {number}"
    header: LogHeader = traces.loads_as(LogHeader, first, where, LOG_IGNORED)
    if (header.format, header.version) != (LOG_FORMAT, VERSION):
        raise TraceError(where, "", f'the first line must say "format": "{LOG_FORMAT}", "version": {VERSION}')
    recorder = Recorder(traces.geometry_of(header.geometry, where), header.mode)
    expected, partings = [], []
    for at, (number, line) in enumerate(lines):
        step = traces.loads_as(AnyStep, line, f"{name}: line {number}", LOG_IGNORED)
        command, outcome = traces.step_of(step)
        said = outcome if outcome is not None else Done()
        row = recorder.do(command)
        expected.append((at, said))
        if _refusal(said) != _refusal(row.outcome):
            partings.append(Parting(number, command, said, row.outcome))
    return replace(recorder.trace("recorded"), expected=tuple(expected)), partings


def _refusal(outcome: Outcome) -> str | None:
    return outcome.reason.value if isinstance(outcome, Refused) else None
