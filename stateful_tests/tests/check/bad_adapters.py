"""Adapters as bad as they come: each does its worst when a request is submitted. `--impl MODULE:Raises`."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from dataclasses import replace
from typing import Any

from impl.adapter import UnusableImplementation, View
from impl.example_engine import ExampleEngine
from reference.commands import Command, Done, Outcome, Reason, Refused, Submit
from reference.geometry import Geometry


class _AtSubmit(ExampleEngine):
    def apply(self, command: Command) -> Outcome:
        if isinstance(command, Submit):
            self.submit()
        return super().apply(command)

    def submit(self) -> None: ...


class Raises(_AtSubmit):
    def submit(self) -> None:
        raise IndexError("page 99")


class CannotBeAsked(_AtSubmit):
    def submit(self) -> None:
        raise UnusableImplementation("this checkout has no such thing")


class Exits(_AtSubmit):
    def submit(self) -> None:
        sys.exit(0)


class LeavesAtOnce(_AtSubmit):
    def submit(self) -> None:
        os._exit(0)


class Aborts(_AtSubmit):
    def submit(self) -> None:
        os.abort()


class Segfaults(_AtSubmit):
    def submit(self) -> None:
        ctypes.string_at(0)


class Hangs(_AtSubmit):
    def submit(self) -> None:
        time.sleep(600)


class Eats(_AtSubmit):
    def submit(self) -> None:
        eaten = []
        while True:
            eaten.append(bytearray(1 << 24))


class WrongType(ExampleEngine):
    def apply(self, command: Command) -> Any:
        return "done"


class Garbage(ExampleEngine):
    def view(self) -> View:
        view = super().view()
        return replace(view, free_full=[None]) if self.requests else view  # type: ignore[list-item]


class RaisesInView(ExampleEngine):
    def view(self) -> View:
        if self.requests:
            raise KeyError("r1")
        return super().view()


class RaisesInReset(ExampleEngine):
    def reset(self, geometry: Geometry) -> None:
        raise ValueError("no such sizes")


class Forgets(ExampleEngine):
    """What was there before a reset is there afterwards."""

    def reset(self, geometry: Geometry) -> None:
        before = dict(getattr(self, "requests", {}))
        super().reset(geometry)
        self.requests |= before


class ComesAndGoes(ExampleEngine):
    """Refuses one command in its whole life."""

    refused = False

    def apply(self, command: Command) -> Outcome:
        outcome = super().apply(command)
        if isinstance(outcome, Done) and not self.refused:
            self.refused = True
            return Refused(Reason.NO_ROW)
        return outcome


class OffersTooLittle(ExampleEngine):
    capabilities = replace(ExampleEngine.capabilities, commands=frozenset({"Submt"}))


class OffByOne(ExampleEngine):
    """Has room for a page more than there is: the last one is popped from an empty list."""

    def apply(self, command: Command) -> Outcome:
        self.free_pages = _OneMore(self.free_pages)
        return super().apply(command)


class _OneMore(list[int]):
    def __len__(self) -> int:
        return super().__len__() + 1
