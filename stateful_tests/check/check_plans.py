"""Plans of a check: its tiers, and plans for systems that offer less or are driven in another way."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain, product
from typing import Any

from impl.adapter import AnySystem, Misfit, UnusableImplementation
from reference.commands import Mode
from reference.geometry import PRESETS, Geometry, GeometryError, preset
from reference import system_kinds
from reference.system_kinds import JUDGED_KINDS, KINDS, kind_of_config
from stateful_tests.check.corpus import CorpusLine
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.driven_kinds import check_fits, lockstep_of

CLIENTS = system_kinds.BLOCKS.machine
TIERED = system_kinds.TIERS.machine
# Of kinds that only facts and clauses judge.
JUDGED = tuple(kind.machine for kind in system_kinds.KINDS.values() if kind.machine)
_PAGE_SIZES = [1 << power for power in range(9)]
CORPUS = "corpus"  # the lines of the directed corpus, in the place of a machine


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a check."""

    tier: str
    #: commands that the system carries out, those of the corpus included; configurations share them
    commands: int
    #: the most commands of a run; one run in 32 is eight times as long, every fourth has drawn
    #: sizes, and every fourth begins with a line of the corpus, where there is one
    steps: int
    #: commands after the last new finding that end the check
    after_finding: int
    #: runs of each configuration, if the user asked for a number; `commands` is ignored then
    examples: int | None = None
    #: drive the lines of the directed corpus
    corpus: bool = True
    #: the plan has everything that its tier does
    whole: bool = True
    #: time after which the rest of the plan is left, if one was given (s)
    time_limit_s: float | None = None
    presets: tuple[str, ...] = tuple(PRESETS)
    #: empty for the system's own
    modes: tuple[Mode, ...] = ()
    machines: tuple[str, ...] = tuple(MACHINES)
    seed: int = 0
    #: those that are driven before others
    first: frozenset[CorpusLine] = frozenset()
    #: configurations by name, such as "both page2", that get as many runs as all others together
    favoured: frozenset[str] = frozenset()


_TIERS = {
    "smoke": Plan("smoke", commands=30_000, steps=40, after_finding=4_000),
    "pr": Plan("pr", commands=200_000, steps=50, after_finding=15_000),
    "nightly": Plan("nightly", commands=5_000_000, steps=80, after_finding=1_000_000),
}
TIERS = tuple(_TIERS)


_EVERY_PRESET = list(dict.fromkeys(name for kind in KINDS.values() for name in kind.presets))


def _presets_like(name: str) -> str:
    """Describe the presets with similar names, or else all, by their purpose."""
    if close := get_close_matches(name, _EVERY_PRESET, 3):
        return f"is it {' or '.join(close)}?"
    others = (f"; of {kind.noun} {_first_names(kind.presets)}" for kind in JUDGED_KINDS)
    return f"one of {_first_names(PRESETS)}{''.join(others)}"


def _first_names(names: Collection[str], most: int = 6) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join([*names][:most]) + more


def plan(
    tier: str,
    *,
    presets: Sequence[str] | None = None,
    modes: Sequence[Mode] | None = None,
    examples: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    machines: Sequence[str] | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """Return the tier's plan with the given options. Raises ValueError with a one-line reason."""
    if tier not in _TIERS:
        raise ValueError(f"tier: unknown {tier!r}; one of {', '.join(TIERS)}")
    for name in presets or ():
        if name not in _EVERY_PRESET:
            raise ValueError(f"preset: unknown {name!r}; {_presets_like(name)}")
    for name in machines or ():
        if name not in (*MACHINES, *JUDGED):
            raise ValueError(f"machine: unknown {name!r}; one of {', '.join(MACHINES)}")
    for option, value in (("examples", examples), ("steps", steps)):
        if value is not None and not 1 <= value <= 10**7:
            raise ValueError(f"{option}: must be between 1 and 10000000, not {value}")
    base = _TIERS[tier]
    if seed is None:
        seed = time.time_ns() % 10**9 if tier == "nightly" else base.seed
    half = modes is not None and {*modes} != {*Mode}
    return replace(
        base,
        examples=examples,
        corpus=not any((presets, examples, steps)),
        whole=not any((presets, half, examples, steps, machines, time_limit_s)),
        time_limit_s=time_limit_s,
        presets=tuple(presets or base.presets),
        modes=tuple(modes or base.modes),
        steps=steps or base.steps,
        seed=seed,
        machines=tuple(machines or base.machines),
    )


def for_system(plan: Plan, system: AnySystem) -> Plan:
    """Return the plan for this kind of system, without machines and presets of other kinds that nobody
    named."""
    can = system.capabilities
    if plan.presets == tuple(PRESETS):
        plan = replace(plan, presets=lockstep_of(can.system_kind).presets_for(can))
    machine = can.system_kind.machine
    if machine and plan.machines == tuple(MACHINES):
        plan = replace(plan, machines=(machine,))
    return plan


def sizes_for(machine: str, name: str) -> Any:
    """Return the preset called `name`, with a radix tree for the machines that drive one; engines have
    presets of their own."""
    if machine in JUDGED:
        presets = next(kind.presets for kind in JUDGED_KINDS if kind.machine == machine)
        if name not in presets:
            raise GeometryError("preset", f"{name} is of another kind of system")
        return presets[name]
    return replace(preset(name), tree=machine != "sessions")


def fit_sizes(system: AnySystem, machine: str, sizes: Any, exactly: bool = False) -> Any:
    """Return these sizes with the smallest change that lets this machine drive the system: the window,
    the size of a page, rows, the width. Raises UnusableImplementation where nothing helps.

    exactly: change nothing.
    """
    can = system.capabilities
    missing = {"Match", "Insert"} - can.commands
    if machine == "tree" and missing:
        raise UnusableImplementation(f"{system.name} does not offer {', '.join(sorted(missing))}")
    if exactly or not kind_of_config(sizes).modelled or not can.system_kind.modelled:
        check_fits(system, sizes)
        return first_fitting(system, [sizes])
    if sizes.window is not None and not can.swa:
        sizes = replace(sizes, window=None, swa_pages=0)
    elif sizes.window is None and not can.full_only:
        sizes = replace(sizes, window=sizes.page_size + 1, swa_pages=max(2, sizes.full_pages - 2))
    check_fits(system, sizes)
    return first_fitting(system, chain([sizes], _similar_sizes(sizes)))


def first_fitting(system: AnySystem, candidates: Iterable[Any]) -> Any:
    """Return the first of these sizes that the system can be built with. Raises UnusableImplementation,
    with the reason for the first, where there is none."""
    reason: UnusableImplementation | None = None
    for sizes in candidates:
        try:
            system.reset(sizes)
        except Misfit:
            raise
        except UnusableImplementation as error:
            reason = reason or error
        except (Exception, SystemExit):
            # The first command of a run meets it as well, and reports it.
            return sizes
        else:
            return sizes
    assert reason is not None
    raise reason


def _similar_sizes(sizes: Geometry) -> Iterator[Geometry]:
    """Yield sizes with other pages, the nearest first; then with other widths, and with one row as
    well."""

    def far(page_size: int) -> int:
        return max(page_size, sizes.page_size) // min(page_size, sizes.page_size)

    page_sizes = sorted(_PAGE_SIZES, key=far)
    if sizes.states and not sizes.tracks:
        page_sizes = [1]
    for rows, pages in product(dict.fromkeys((sizes.rows, 1)), (0, 8, 2)):
        for page_size in page_sizes:
            wide = pages or max(2, -(-sizes.width // page_size))
            full = max(sizes.full_pages, wide)
            yield replace(
                sizes, page_size=page_size, rows=rows, width=wide * page_size, full_pages=full
            )
