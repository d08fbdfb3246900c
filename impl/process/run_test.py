"""Run exported tests on the files of a release, without installing the release.

A run exits with 0 when all tests pass, with FAILS when all fail at an assertion of their own, with STOPS when
one ends in another error; else they could not be run, or only part failed. Where the engine is installed
nothing of this is needed.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import unittest
from collections.abc import Sequence
from pathlib import Path

from impl import HOME
from impl.process import child, fork_server

FAILS = 3
# an exception, such as an assertion of the release about a state that the test made by hand
STOPS = 4
Run = tuple[Path, str, Sequence[Path]]  # the files of a release, its version, and tests


def outcomes(
    *runs: Run, hook: str = "impl.sglang.process.testing:hook", timeout_s: float = 180.0
) -> list[tuple[int, str]]:
    """Return the exit status of each run in a process of its own, and what it said.

    hook: MODULE:NAME of what has a process import the release under a folder, by its version.
    timeout_s: for each run.
    """
    return [_outcome(run, hook, timeout_s) for run in runs]


def _outcome(run: Run, hook: str, timeout_s: float) -> tuple[int, str]:
    root, version, files = run
    tests = [str(file) for file in files]
    environment = child.environment([HOME, os.environ.get("PYTHONPATH", "")], OMP_NUM_THREADS="1")
    with tempfile.TemporaryFile() as output_file:
        process = fork_server.launch(
            [sys.executable, "-m", "impl.process.run_test", hook, str(root), version, *tests],
            env=environment,
            stderr=output_file,
        )
        with process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return 1, f"no end in {timeout_s:g} s"
        output_file.seek(0)
        return code, output_file.read().decode(errors="replace")


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
    os.dup2(2, 1)  # what tests print stands among what unittest says
    sys.exit(main(sys.argv[1:]))
