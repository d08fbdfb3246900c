"""The pytest plugin: options that aim `kvspec.machine`, `kvspec.check` and `kvspec.replay` at another system.

Loaded by every pytest that runs where kvspec is installed, so it imports nothing but pytest, and does nothing
where no test uses kvspec.
"""

import sys
from collections.abc import Generator
from typing import NamedTuple

import pytest


class Options(NamedTuple):
    """The options of the command line; None: what the test itself says."""

    impl: str | None = None
    tier: str | None = None
    device: str = "cpu"
    sglang_path: str | None = None
    save: str = "traces"
    base: str | None = None


chosen = Options()
_OPTIONS = {
    "impl": "system to drive, as `kvspec check --impl` takes it",
    "tier": "how much a test does: smoke, pr or nightly",
    "device": "where the torch implementation keeps its pools: cpu, cuda or counting",
    "sglang_path": "a checkout of SGLang, for --kvspec-impl sglang",
    "save": "folder for smallest traces (default: traces)",
    "base": "what was there before, such as sglang==0.5.23: what it violates as well fails no test",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvspec", "kvspec: the specification of KV-cache bookkeeping")
    for name, about in _OPTIONS.items():
        group.addoption(f"--kvspec-{name.replace('_', '-')}", dest=f"kvspec_{name}", help=about)


def pytest_configure(config: pytest.Config) -> None:
    global chosen
    options = {name: config.getoption(f"kvspec_{name}") for name in _OPTIONS}
    if options["tier"] not in (None, "smoke", "pr", "nightly"):
        raise pytest.UsageError(f"--kvspec-tier {options['tier']}: smoke, pr or nightly")
    chosen = Options(**{name: value for name, value in options.items() if value is not None})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a violated clause as its message: its traceback leads through Hypothesis, not to the fault."""
    report = yield
    testing = sys.modules.get("kvspec.testing")
    error = call.excinfo
    if testing is not None and error is not None and error.errisinstance(testing.ClauseViolated):
        report.longrepr = str(error.value)
    return report
