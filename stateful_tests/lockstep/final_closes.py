"""The end of a run: its violation, and past that the one clause that can still be checked.

A fault that is known must not hide a session that can no longer be closed (SES-4).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from impl.adapter import UnusableImplementation
from reference.commands import Abort, Close, Command
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.run_results import Trace, Violation

_CLOSED = "SES-4"


def violations(
    lockstep: AnyLockstep, commands_run: Sequence[Any], origin: str
) -> list[tuple[Violation, Trace]]:
    """Return the violation at the end of a run, if any, and a close that does not happen when
    everything is closed then; each with its trace. The run takes no command afterwards."""
    geometry, mode = lockstep.config
    closes = []
    if lockstep.violation is not None:
        closes.append((lockstep.violation, Trace(geometry, mode, tuple(commands_run), origin)))
        if not isinstance(lockstep, Lockstep):
            return closes
        commands_run = (*commands_run, *_sessions_all_close(lockstep))
        if lockstep.violation is not None:
            closes.append((lockstep.violation, Trace(geometry, mode, commands_run, origin)))
    return closes


def _sessions_all_close(lockstep: Lockstep) -> list[Command]:
    """End every turn that the system shows, then close its sessions, and check that they are gone."""
    violation = lockstep.violation
    facts = lockstep.moment().facts
    ends: list[Command] = []
    if violation is not None and not {"BROKEN", _CLOSED} & {*violation.clauses, *lockstep.waived}:
        ends += [Abort(name) for name in sorted(facts.requests)]
        ends += [
            Close(name) for name, session in sorted(facts.sessions.items()) if not session.closing
        ]
    offered = lockstep.system.capabilities.commands
    ends = [command for command in ends if type(command).__name__ in offered]
    lockstep.go_on(_CLOSED)
    # What was violated may leave a state in which no adapter can drive the system.
    with suppress(UnusableImplementation):
        for command in ends:
            if lockstep.violation is None:
                lockstep.do(command)
    if lockstep.violation is lockstep.first_violation:  # it broke on the way
        lockstep.violation = None
    return ends
