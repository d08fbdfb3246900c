"""Adapters as bad as they come: each does its worst when a request is submitted. `--impl MODULE:Raises`."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from impl.adapter import LockHolderView, TreeView, UnusableImplementation
from impl.choices import RandomChoices, once_in
from impl.examples.block_engine import BlockEngine
from impl.examples.example_engine import ExampleEngine
from reference.commands import Admit, Decode, Done, Reason, Refused, Submit
from stateful_tests.lockstep.reference_system import ReferenceSystem


class _AtSubmit(ExampleEngine):
    def apply(self, command):
        if isinstance(command, Submit):
            self.submit()
        return super().apply(command)

    def submit(self): ...


def _raise(error: BaseException) -> None:
    raise error


def _eat() -> None:
    eaten = []
    while True:
        eaten.append(bytearray(1 << 24))


def _at_submit(act: Callable[[], object]) -> type[ExampleEngine]:
    return type("AtSubmit", (_AtSubmit,), {"submit": lambda self: act()})


Raises = _at_submit(lambda: _raise(IndexError("page 99")))
CannotBeAsked = _at_submit(
    lambda: _raise(UnusableImplementation("this checkout has no such thing"))
)
Exits = _at_submit(lambda: sys.exit(0))
LeavesAtOnce = _at_submit(lambda: os._exit(0))
Aborts = _at_submit(os.abort)
Segfaults = _at_submit(lambda: ctypes.string_at(0))
Hangs = _at_submit(lambda: time.sleep(600))
Eats = _at_submit(_eat)


class WrongType(ExampleEngine):
    def apply(self, command):
        return "done"


class Garbage(ExampleEngine):
    def view(self):
        view = super().view()
        return structs.replace(view, free_full=[None]) if self.requests else view


class RaisesInView(ExampleEngine):
    def view(self):
        if self.requests:
            raise KeyError("r1")
        return super().view()


class RaisesInReset(ExampleEngine):
    def reset(self, geometry):
        raise ValueError("no such sizes")


class RaisesAtADoubleFree(_AtSubmit):
    """Frees a page that is in use, and notices."""

    def submit(self):
        used = [
            page
            for page in range(1, len(self.stamps) // self.page_size)
            if page not in self.free_pages
        ]
        if used:
            self.free_pages.append(used[0])
            raise RuntimeError("double free")


class Forgets(ExampleEngine):
    """What was there before a reset is there afterwards."""

    def reset(self, geometry):
        before = dict(getattr(self, "requests", {}))
        super().reset(geometry)
        self.requests |= before


class ComesAndGoes(ExampleEngine):
    """Refuses one command in its whole life."""

    refused = False

    def apply(self, command):
        outcome = super().apply(command)
        if isinstance(outcome, Done) and not self.refused:
            self.refused = True
            return Refused(Reason.NO_ROW)
        return outcome


class AdmitsNobody(ReferenceSystem):
    """Has sessions, and refuses every admission."""

    def apply(self, command):
        return Refused(Reason.NO_ROW) if isinstance(command, Admit) else super().apply(command)


class OffersTooLittle(ExampleEngine):
    capabilities = replace(ExampleEngine.capabilities, commands=frozenset({"Submt"}))


class OffByOne(ExampleEngine):
    """Has room for a page more than there is: the last one is popped from an empty list."""

    def apply(self, command):
        self.free_pages = _OneMore(self.free_pages)
        return super().apply(command)


class _OneMore(list[int]):
    def __len__(self):
        return super().__len__() + 1


class LeavesAChild(ExampleEngine):
    """Starts a process with a session of its own, which notes its id."""

    def reset(self, geometry):
        super().reset(geometry)
        if os.path.exists("child"):
            return
        code = "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(60)"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
        while not os.path.exists("child") or not os.path.getsize("child"):
            time.sleep(0.01)


class FreesTwice(ExampleEngine):
    """A decode puts a page on the free list a second time."""

    def apply(self, command):
        outcome = super().apply(command)
        if isinstance(command, Decode) and isinstance(outcome, Done):
            self.free_pages.append(self.free_pages[0] if self.free_pages else 1)
        return outcome


class CannotBeResetAgain(FreesTwice):
    """Is unusable from the fortieth reset on, after its fault was found."""

    resets = 0

    def reset(self, geometry):
        type(self).resets += 1
        if self.resets > 40:
            raise UnusableImplementation("no more resets")
        super().reset(geometry)


class CannotBeClosed(FreesTwice):
    def close(self):
        raise RuntimeError("close fails")


class WaivesNothingKnown(ExampleEngine):
    capabilities = replace(ExampleEngine.capabilities, waived={"NOPE-1": "harmless"})


class KnowsNothingKnown(ExampleEngine):
    capabilities = replace(ExampleEngine.capabilities, known={"NOPE-2": "a fault"})


class WaivesReads(ExampleEngine):
    capabilities = replace(ExampleEngine.capabilities, waived={"READ-1": "harmless"})


class SaysADictionary(ExampleEngine):
    capabilities = {"commands": ["Submit"]}  # noqa: RUF012


def _saying(of: type, *commands: str, **more: object) -> type:
    """Return an adapter whose capabilities contradict themselves."""
    says = replace(of.capabilities, commands=of.capabilities.commands | {*commands}, **more)
    return type("Contradicts", (of,), {"capabilities": says})


EvictsWithoutAWindow = _saying(ExampleEngine, "EvictSwa")
MatchesWithoutATree = _saying(ExampleEngine, "Match")
IsNoModel = _saying(ExampleEngine, full_only=False)
EndsNoSession = _saying(BlockEngine, "More")
SchedulesAndAdmits = _saying(BlockEngine, "Admit")


class EngineRaisesInReset(BlockEngine):
    def reset(self, geometry):
        raise ValueError("no such sizes")


class EngineRaisesInView(BlockEngine):
    def view(self):
        raise KeyError("r1")


class EngineShowsADictionary(BlockEngine):
    def view(self):
        return {"refs": ()}


class EngineShowsNoRefs(BlockEngine):
    def view(self):
        return super().view()._replace(refs=None)


class EngineShowsOneTable(BlockEngine):
    def view(self):
        facts = super().view()
        requests = {
            name: fact._replace(tables=fact.tables[:1]) for name, fact in facts.requests.items()
        }
        return facts._replace(requests=requests)


class ViewRaisesAfterASubmit(ExampleEngine):
    def view(self):
        assert not self.requests, "no view of requests"
        return super().view()


class ClosesBadly(ExampleEngine):
    def close(self):
        raise RuntimeError("no \x1b[2J end")


def never_made():
    time.sleep(600)


class RefusesNowAndThen(ExampleEngine):
    """Refuses one command in thirty, another one in each run."""

    choices = RandomChoices(1)

    def apply(self, command):
        return Refused(Reason.NO_ROW) if once_in(self.choices, 30) else super().apply(command)


class LosesAPageNowAndThen(RefusesNowAndThen):
    """Shows a page less than is free, in one view of thirty."""

    def apply(self, command):
        return ExampleEngine.apply(self, command)

    def view(self):
        view = super().view()
        fewer = view.free_full[:-1] if once_in(self.choices, 30) else view.free_full
        return structs.replace(view, free_full=fewer)


class ShowsATreeThatIsNotThere(ExampleEngine):
    def view(self):
        return structs.replace(super().view(), tree=TreeView([], {"h": LockHolderView([1])}))


class ShowsNoTree(ReferenceSystem):
    capabilities = replace(ReferenceSystem.capabilities, no_tree=False)

    def view(self):
        return structs.replace(super().view(), tree=None)


class MapsTooLittle(ReferenceSystem):
    capabilities = replace(ReferenceSystem.capabilities, full_only=False)

    def view(self):
        view = super().view()
        return structs.replace(view, full_to_swa=view.full_to_swa[:3])
