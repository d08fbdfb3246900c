"""The target of a machine: a system, and the configurations that fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from impl.adapter import AnySystem, System, UnusableImplementation
from reference.commands import Mode
from reference.geometry import Geometry
from stateful_tests.check.known_faults.masks import Standing, compare_with_base
from stateful_tests.check.check_plans import fit_sizes
from stateful_tests.lockstep.run_results import Trace, Violation


class MachineConfiguration(NamedTuple):
    """The configuration of a run: sessions, tree or both, on these sizes, in this mode."""

    machine: str
    geometry: Geometry
    mode: Mode


class MachineTarget:
    """The target of a machine. The system is made when the first run begins.

    machines, sizes, modes: what its runs may be, the sizes fitted to the system, or exactly those; no modes
        stands for the system's own.
    vary: one run in four has drawn sizes.
    base: what was there before; a violation that it shows as well fails no run.
    """

    def __init__(
        self,
        make: Callable[[], System],
        machines: Iterable[str],
        sizes: Iterable[Geometry],
        modes: Sequence[Mode] = (),
        vary: bool = False,
        exactly: bool = False,
    ) -> None:
        self._make = make
        self._machines = tuple(machines)
        self._sizes = tuple(sizes)
        self._modes = modes
        self.vary = vary
        self._exactly = exactly
        self.base: AnySystem | None = None

    @cached_property
    def system(self) -> System:
        return self._make()

    def close(self) -> None:
        """Give back what the system and the base hold; the next run makes another system."""
        for made_system in (self.__dict__.pop("system", None), self.base):
            if made_system is not None:
                made_system.close()
        self.base = None

    def is_new(self, trace: Trace, violation: Violation) -> bool:
        """Return whether the base does not show this violation at the end of this trace."""
        return any(
            compare_with_base(self.base, (), trace, violation, clause).stands is not Standing.KNOWN
            for clause in violation.clauses
        )

    @cached_property
    def configurations(self) -> list[MachineConfiguration]:
        """Return the configurations that fit the system; raises UnusableImplementation when nothing does."""
        configurations = []
        for machine in self._machines:
            for sizes in self._sizes:
                try:
                    given = replace(sizes, tree=machine != "sessions")
                    geometry = fit_sizes(self.system, machine, given, self._exactly)
                except UnusableImplementation as error:
                    reason = error
                    continue
                modes = self._modes or self.system.capabilities.modes
                configurations += [MachineConfiguration(machine, geometry, mode) for mode in modes]
        if not configurations:
            raise reason
        return configurations
