"""A made-up check: what it finds is what a test says."""

from dataclasses import replace
from typing import Any

from reference.commands import Done, Mode, Reason, Refused
from reference.failures import Failure
from reference.geometry import PRESETS
from stateful_tests.lockstep.check_results import CheckResult, Finding, MachineResult, Tally
from stateful_tests.lockstep.run_results import Row, Run, Trace, Violation
from stateful_tests.tests.support.commands import script

COMMANDS = script(
    "open s1; submit r1 in s1 +40; admit r1; extend r1 +40; spec_decode r1 +4 accept 3; finish r1 keep 1"
)
ROWS = (
    Row(COMMANDS[0], Done()),
    Row(COMMANDS[1], Done()),
    Row(COMMANDS[2], Refused(Reason.OUT_OF_FULL)),
    Row(
        COMMANDS[3], Done(), (("s1", "kv_committed_len", 0, 40), ("s1", "kv_allocated_len", 0, 40))
    ),
    Row(COMMANDS[4], Done(), (("s1", "kv_allocated_len", 40, 44),)),
    Row(
        COMMANDS[5],
        Done(),
        (("s1", "kv_allocated_len", 44, 38),),
        (("s1", "full", 38, 44), ("s1", "swa", 42, 44)),
    ),
)
TRACE = Trace(PRESETS["page2"], Mode.FAITHFUL, COMMANDS, "minimised")
BAD = Violation(
    "LEN-2",
    5,
    Failure("swa_evicted_seqlen 38", "swa_evicted_seqlen 40"),
    ("FREE-2",),
    (Failure("swa pages of s1 freed", "freed nothing"),),
)
RUN = Run(TRACE, "torch+pr22900", ROWS, BAD)


def finding(
    clause: str = "LEN-2", run: Run = RUN, modes: tuple[Mode, ...] = (Mode.FREE,)
) -> Finding:
    return Finding(clause, run, modes, 3, 1.25, 1234)


def check_result(*findings: Finding, **more: Any) -> CheckResult:
    result = CheckResult(
        "torch+pr22900",
        "smoke",
        7,
        machines=[MachineResult("sessions", "page2", Mode.FREE, 10, 400, 0.5)],
        tallies={"LEN-2": Tally(400, 21), "FREE-2": Tally(400, 0)},
        refusals={"no_row": 2, "out_of_full": 30},
        commands_by_kind={"Open": 300, "Close": 100},
        findings=list(findings),
        unreached=("FREE-2",),
        planned=10,
        seconds=2.0,
        carried_out={"Open": 300, "Close": 100},
    )
    return replace(result, **more)


def printed_lines(text: str) -> list[str]:
    """Return the lines of what a command printed, without the spaces that align them."""
    return [" ".join(line.split()) for line in text.splitlines()]
