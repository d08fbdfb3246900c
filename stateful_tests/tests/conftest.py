"""Hypothesis profiles, loaded before any machine is imported; real releases, and the command line."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from impl.adapter import EngineSystem, System

# A shell's background jobs ignore SIGINT, nohup's SIGHUP; the commands that tests start inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Tests make much, and little of it is garbage: syntax trees of releases, states of a search.
gc.set_threshold(200_000, 50, 50)
_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=_QUIET,
    max_examples=15,
)
_NIGHTLY = settings(deadline=None, print_blob=True, suppress_health_check=_QUIET)
if url := os.environ.get("KVSPEC_REDIS"):  # one failure database for all who run: redis://host:port
    from hypothesis.extra.redis import RedisExampleDatabase
    from redis import Redis

    _NIGHTLY = settings(_NIGHTLY, database=RedisExampleDatabase(Redis.from_url(url)))
settings.register_profile("nightly", _NIGHTLY)
settings.load_profile(os.environ.get("KVSPEC_HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
    """Collections of garbage pass over the collected tests: thousands of items that stay."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """xdist interrupts a worker that is slow to end: that is no reason for a traceback below the summary.
    Nor does it collect what is left then."""
    gc.freeze()
    if hasattr(session.config, "workerinput"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture(scope="session")
def release() -> Iterator[Callable[[str], System]]:
    """Gives a real release by its version (`+overlap`), each started once for all tests; skips without it."""
    yield from _releases("sglang")


def _releases(package: str) -> Iterator[Callable[[str], Any]]:
    from impl.adapter import UnusableImplementation
    from stateful_tests.lockstep.system_names import resolve

    systems: dict[str, Any] = {}

    def start(version: str) -> Any:
        if version not in systems:
            try:
                systems[version] = resolve(f"{package}=={version}")
            except UnusableImplementation as error:
                pytest.skip(str(error))
        return systems[version]

    yield start
    for system in systems.values():
        system.close()


@pytest.fixture(scope="session")
def vllm() -> Iterator[Callable[[str], EngineSystem]]:
    """Gives a vLLM release by its version (`+async`), each started once for all tests; skips without it."""
    yield from _releases("vllm")


@pytest.fixture
def kvspec(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in an empty folder; gives (exit code, stdout, stderr)."""
    from ci import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(arguments)
        captured = capsys.readouterr()
        for text in captured:
            assert text.replace("\n", "").isprintable(), "control characters in a pipe"
            assert "Traceback" not in text
        return code, captured.out, captured.err

    return run
