"""What was found in real releases, replayed on them: the fixtures under fixtures/releases.

Skips, with the reason, where a release can be neither found nor fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from impl.adapter import System, UnusableImplementation
from stateful_tests.lockstep import replay
from stateful_tests.registry import resolve
from stateful_tests.traces import load

FOLDER = Path(__file__).parent.parent / "fixtures" / "releases"
# 0.5.12 has what was found in 0.5.11, each of it.
ALSO = {"sglang-0.5.11": ("sglang-0.5.11", "sglang-0.5.12")}
FIXTURES = [
    pytest.param(path, name, id=f"{name}/{path.stem}")
    for path in sorted(FOLDER.glob("*/*.json"))
    for name in ALSO.get(path.parent.name, (path.parent.name,))
]


@pytest.fixture(scope="module")
def releases() -> Iterator[dict[str, System]]:
    """Systems by folder name, each started once."""
    started: dict[str, System] = {}
    yield started
    for system in started.values():
        system.close()


@pytest.mark.parametrize(("path", "name"), FIXTURES)
def test_a_release_still_violates_the_clause(path: Path, name: str, releases: dict[str, System]) -> None:
    trace = load(path)
    assert replay(resolve("torch"), trace).violation is None
    if name not in releases:
        try:
            releases[name] = resolve(name.replace("-", "==", 1))
        except UnusableImplementation as error:
            pytest.skip(str(error))
    violation = replay(releases[name], trace).violation
    assert violation is not None
    assert (violation.clause, violation.step) == (trace.clause, len(trace.commands) - 1)
