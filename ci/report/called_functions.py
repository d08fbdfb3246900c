"""Functions of the system that the failing command called, without those that any command calls."""

from __future__ import annotations

from collections import Counter

from impl.process.system_functions import SystemFunction
from stateful_tests.lockstep.run_results import Run


def telling_calls(run: Run) -> list[SystemFunction]:
    """Return the functions that the failing command of a run called, file by file.

    Functions that most of the earlier commands of other kinds call as well, such as getters and
    counters, are left out, unless there are no others. In a file the functions that no earlier command
    called are first.
    """
    violation = run.violation
    if violation is None or violation.step >= len(run.called):
        return []
    failing = run.called[violation.step]
    kind = type(run.trace.commands[violation.step])
    before = list(zip(run.trace.commands, run.called))[: violation.step]
    others = [functions for command, functions in before if type(command) is not kind]
    times = Counter(function for functions in others for function in functions)
    telling = [function for function in failing if 2 * times[function] <= len(others)]
    earlier = {function for _, functions in before for function in functions}
    files = list(dict.fromkeys(function.file for function in failing))
    return sorted(
        telling or failing,
        key=lambda function: (files.index(function.file), function in earlier),
    )
