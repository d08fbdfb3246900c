"""The example adapter conforms, and faults put into it are found: what CONTRIBUTING.md promises of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from impl.example_engine import ExampleEngine
from reference.commands import Command, Decode, Extend, Finish, Outcome, Refused

Kvspec = Callable[..., tuple[int, str, str]]


class LeaksTheLastPage(ExampleEngine):
    """Gives back whole pages alone when a request ends."""

    def apply(self, command: Command) -> Outcome:
        if isinstance(command, Finish) and (request := self.requests.get(command.request)) is not None:
            del request.slots[len(request.slots) // self.page_size * self.page_size :]
        return super().apply(command)


class KeepsTheFirstLane(ExampleEngine):
    """A refused batch leaves its first lane computed."""

    def apply(self, command: Command) -> Outcome:
        outcome = super().apply(command)
        if isinstance(command, Extend) and isinstance(outcome, Refused):
            super().apply(Extend(command.lanes[:1]))
        return outcome


class WritesNothing(ExampleEngine):
    """A decode takes its slot and leaves what was in there."""

    def apply(self, command: Command) -> Outcome:
        before = list(self.stamps)
        outcome = super().apply(command)
        if isinstance(command, Decode):
            self.stamps = before
        return outcome


def test_it_conforms(kvspec: Kvspec) -> None:
    code, out, _ = kvspec("check", "--impl", "impl.example_engine:make", "--examples", "20")
    assert code == 0, out
    assert "example: conforms" in out


@pytest.mark.parametrize(
    "fault, clause", [(LeaksTheLastPage, "FREE-1"), (KeepsTheFirstLane, "OUT-2"), (WritesNothing, "READ-1")]
)
def test_a_fault_is_found(fault: type, clause: str, kvspec: Kvspec) -> None:
    factory = f"{fault.__module__}:{fault.__name__}"
    code, out, _ = kvspec("check", "--impl", factory, "--mode", "free", "--examples", "20")
    assert code == 1
    assert clause in out.splitlines()[-1], out
