"""Run exported tests on the files of a release, without installing the release.

A run exits with 0 when all tests pass, with FAILS when all fail at an assertion of their own, with STOPS when
one ends in another error; else they could not be run, or only part failed. Where the engine is installed
nothing of this is needed.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import unittest
from collections.abc import Sequence
from pathlib import Path

from impl import HOME
from impl.process import child

FAILS = 3
# an exception, such as an assertion of the release about a state that the test made by hand
STOPS = 4
launch = subprocess.Popen  # what starts a process
Run = tuple[Path, str, Sequence[Path]]  # the files of a release, its version, and tests


def outcomes(
    *runs: Run, hook: str = "impl.sglang.process.testing:hook", timeout_s: float = 180.0
) -> list[tuple[int, str]]:
    """The exit status of each run in a process of its own, and what it said. hook: MODULE:NAME of what has a
    process import the release under a folder, by its version.

    The processes are forked from one that has imported torch, which takes longer than most tests.
    """
    environment = child.environment([HOME, os.environ.get("PYTHONPATH", "")], OMP_NUM_THREADS="1")
    jobs = [[hook, str(root), version, *map(str, files)] for root, version, files in runs]
    with launch(
        [sys.executable, "-m", "impl.process.run_test", json.dumps(jobs)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [(1, f"no end in {timeout_s:g} s")] * len(runs)
    if process.returncode:
        return [(1, f"no test was run: exit status {process.returncode}")] * len(runs)
    ends: list[tuple[int, str]] = [(code, text) for code, text in json.loads(output)]
    return ends


def _forked(arguments: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as captured:
        if not (child := os.fork()):
            os.dup2(captured.fileno(), 1)
            os.dup2(captured.fileno(), 2)
            code = 1
            try:
                code = main(arguments)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        captured.seek(0)
        return os.waitstatus_to_exitcode(status), captured.read().decode(errors="replace")


class TestAssertionError(AssertionError):
    """Raised by the assert methods of a test. A release that asserts raises AssertionError itself."""


class _Result(unittest.TextTestResult):
    """Counts a failure where a test's own assertion fails, and an error for every other exception."""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        test.failureException = TestAssertionError
        super().startTest(test)


def main(arguments: list[str]) -> int:
    """Run tests in this process: HOOK ROOT VERSION FILE..."""
    module_name, _, name = arguments.pop(0).partition(":")
    getattr(importlib.import_module(module_name), name)(Path(arguments[0]), arguments[1])
    tests = unittest.TestSuite()
    for file in arguments[2:]:
        sys.path.insert(0, str(Path(file).parent))  # for the module that tests of one folder share
        module = types.ModuleType("exported")
        vars(module).update(runpy.run_path(file, run_name="exported"))
        tests.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    result = unittest.TextTestRunner(resultclass=_Result).run(tests)  # type: ignore[arg-type]
    if result.errors:
        return STOPS
    if not result.testsRun:
        return 1
    return {0: 0, result.testsRun: FAILS}.get(len(result.failures), 1)


if __name__ == "__main__":
    importlib.import_module("torch")
    print(json.dumps([_forked(run) for run in json.loads(sys.argv[1])]))
