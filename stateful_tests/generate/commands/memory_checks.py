"""CheckBusy, CheckIdle: the server's memory checks."""

from __future__ import annotations

from reference.commands import CheckBusy, CheckIdle
from reference.state import IN_BATCH, State
from impl.choices import once_in, pick
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, Present, harness
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.exploration_scope import Scope


def _holds_anything(was: State) -> str:
    running = any(r.phase in IN_BATCH for r in was.requests)
    turns = {r.name for r in was.requests if r.phase in IN_BATCH}
    slots = any(s.slot is not None and s.turn not in turns for s in was.sessions)
    if running:
        return "slots and running" if slots else "running"
    return "slots" if slots else "nothing held"


@harness(
    CheckBusy,
    applies=lambda c: c.tree_alone or c.requests_in_batch or c.resumable,
    weight=lambda c: 1 if c.tree_alone else 3,
    is_in=lambda scope: scope.checks,
)
class CheckBusyHarness(Harness[CheckBusy]):
    def draw(self, c: Enabled) -> CheckBusy:
        bad = c.invalid and once_in(c.source, 4)
        return CheckBusy(pick(c.source, (3, -1)) if bad else 2 - c.source.upto(2))

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        return map(CheckBusy, range(3))

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        if scope.served:
            yield CheckBusy(3)

    def case(self, was: State, command: CheckBusy, now: State) -> Labels:
        return f"level {command.level}", _holds_anything(was)


@harness(
    CheckIdle,
    applies=lambda c: c.tree_alone or (bool(c.resumable) and not c.requests_in_batch),
    weight=lambda c: 1 if c.tree_alone else 2,
    is_in=lambda scope: scope.checks,
)
class CheckIdleHarness(Harness[CheckIdle]):
    def draw(self, c: Enabled) -> CheckIdle:
        return CheckIdle()

    def of_nobody(self, scope: Scope, present: Present, fresh: Names) -> Commands:
        yield CheckIdle()

    def case(self, was: State, command: CheckIdle, now: State) -> Labels:
        return (_holds_anything(was),)
