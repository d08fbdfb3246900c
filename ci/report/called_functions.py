"""Functions of the system that the failing command called, without those that any command calls."""

from __future__ import annotations

from collections import Counter

from stateful_tests.lockstep.run_results import Run

_Function = tuple[str, str]  # file, and name in it


def telling_calls(run: Run) -> list[str]:
    """Return the functions that the failing command of a run called, as `Run.called` has them: "FILE:
    FUNCTION, ...".

    Functions that most of the earlier commands of other kinds call as well, such as getters and
    counters, are left out, unless there are no others. In a file the functions that no earlier command
    called are first.
    """
    violation = run.violation
    if violation is None or violation.step >= len(run.called):
        return []
    last = _functions(run.called[violation.step])
    kind = type(run.trace.commands[violation.step])
    before = list(zip(run.trace.commands, run.called))[: violation.step]
    others = [_functions(called) for command, called in before if type(command) is not kind]
    times = Counter(each for called in others for each in called)
    telling = [each for each in last if 2 * times[each] <= len(others)] if others else last
    earlier = {function for _, called in before for function in _functions(called)}
    files: dict[str, list[str]] = {}
    for file, name in sorted(telling or last, key=earlier.__contains__):
        files.setdefault(file, []).append(name)
    in_order = dict.fromkeys(file for file, _ in last)
    return [f"{file}: {', '.join(files[file])}" for file in in_order if file in files]


def _functions(called: tuple[str, ...]) -> list[_Function]:
    """Return the functions of one command, in the order of their first calls."""
    lines = [line.partition(": ") for line in called]
    return [(file, name) for file, _, names in lines for name in names.split(", ")]
