"""The memory checks look and change nothing (CHK-3)."""

from __future__ import annotations

from reference.memory_accounts import report
from reference.commands import CheckBusy, CheckIdle, Done, Reason
from reference.state import IN_BATCH, State
from reference.rules.rule_definition import RuleContext, require, rule


@rule(
    CheckBusy,
    "Adds up the pools and the rows; nothing changes. Each row counts once: through its request "
    "if a batch lists it (uncached), else through its slot (session_held). The terms are those "
    "of CHK-2.",
    {Reason.BAD_LENGTH: "a level that is not 0, 1 or 2"},
)
def check_busy(state: State, command: CheckBusy, context: RuleContext) -> State:
    require(command.level in (0, 1, 2), Reason.BAD_LENGTH)
    context.done = Done(report=report(state) if command.level else None)
    return state


@rule(CheckIdle, "Sums as in a busy check.", {Reason.NOT_IDLE: "a request extends or runs"})
def check_idle(state: State, _: CheckIdle, context: RuleContext) -> State:
    require(not any(r.phase in IN_BATCH for r in state.requests), Reason.NOT_IDLE)
    context.done = Done(report=report(state))
    return state
