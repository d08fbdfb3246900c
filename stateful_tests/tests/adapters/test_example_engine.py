"""The example adapter as its author would test it; copy this file for an engine of yours.

The last test is the important one: faults put into the adapter are found.
"""

from __future__ import annotations

from pathlib import Path

import kvspec
import pytest
from hypothesis import Phase, settings

from impl.examples.example_engine import ExampleEngine, make

TestExampleEngine = kvspec.machine(make).TestCase


def test_the_example_engine_conforms() -> None:
    kvspec.check(make, examples=6)


class LeaksTheLastPage(ExampleEngine):
    """Gives back whole pages alone when a request ends."""

    def apply(self, command: kvspec.Command) -> kvspec.Outcome:
        request = self.requests.get(command.request) if isinstance(command, kvspec.Finish) else None
        slots = list(request.slots) if request is not None else []
        if request is not None:
            del request.slots[len(slots) // self.page_size * self.page_size :]
        outcome = super().apply(command)
        if request is not None and isinstance(outcome, kvspec.Refused):
            request.slots[:] = slots
        return outcome


class KeepsTheFirstLane(ExampleEngine):
    """A refused batch leaves its first lane computed."""

    def apply(self, command: kvspec.Command) -> kvspec.Outcome:
        outcome = super().apply(command)
        if isinstance(command, kvspec.Extend) and isinstance(outcome, kvspec.Refused):
            super().apply(kvspec.Extend(command.lanes[:1]))
        return outcome


class WritesNothing(ExampleEngine):
    """A decode takes its slot and leaves what was in there."""

    def apply(self, command: kvspec.Command) -> kvspec.Outcome:
        before = list(self.stamps)
        outcome = super().apply(command)
        if isinstance(command, kvspec.Decode):
            self.stamps = before
        return outcome


@pytest.mark.parametrize(
    "fault, clause",
    [(LeaksTheLastPage, "FREE-1"), (KeepsTheFirstLane, "OUT-2"), (WritesNothing, "READ-1")],
)
def test_a_fault_is_found(
    fault: type[ExampleEngine], clause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    machine = kvspec.machine(fault, modes=[kvspec.Mode.FREE])
    # The first failure ends it; it is shrunk by kvspec alone.
    machine.TestCase.settings = settings(max_examples=500, phases=[Phase.generate])
    with pytest.raises(kvspec.ClauseViolated) as error:
        machine.TestCase("runTest").debug()
    saved = [file for file in tmp_path.glob("traces/*.json") if clause.lower() in file.name]
    message = str(error.value)
    assert "because" in message
    replay = f"kvspec replay {saved[0].relative_to(tmp_path)} --impl {__name__}:{fault.__name__}"
    assert f"replay  {replay}" in message
    with pytest.raises(kvspec.ClauseViolated, match=f"violates .*{clause}"):
        kvspec.replay(saved[0], fault)
