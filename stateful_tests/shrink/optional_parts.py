"""Parts of a system that a fault may not need: a storage, recurrent state, namespaces, a window. They
are dropped first.

A trace without them is easier to read, and a test can be made of more of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

from reference.blocks.config import EngineConfig
from impl.adapter import UnusableImplementation
from reference.blocks.commands import Add
from reference.geometry import Geometry, GeometryError
from reference.system_kinds import BLOCKS, ROWS, TIERS, kind_of_config
from reference.tiers.commands import StorageCommand
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.shrink.command_rewriting import Commands

Failing = Callable[[Trace], Commands | None]


def without_parts(failing: Failing, trace: Trace) -> Trace:
    """Return the trace without each part that the clause does not need."""
    for simpler in _WITHOUT.get(kind_of_config(trace.geometry).name, ()):
        try:
            for candidate in simpler(trace):
                if candidate != trace and (commands := failing(candidate)) is not None:
                    trace = replace(candidate, commands=commands)
                    break
        except (GeometryError, UnusableImplementation):
            continue
    return trace


def _with_config(trace: Trace, **sizes: Any) -> Trace:
    return replace(trace, geometry=replace(trace.geometry, **sizes))


def _no_storage(trace: Trace) -> Iterator[Trace]:
    """Remove the storage behind a host tier."""
    commands = tuple(c for c in trace.commands if not isinstance(c, get_args(StorageCommand)))
    sizes: Any = trace.geometry
    if sizes.storage:
        yield replace(_with_config(trace, storage=type(sizes.storage)()), commands=commands)


def _no_tier_states(trace: Trace) -> Iterator[Trace]:
    yield _with_config(trace, states=0, host_states=0, tracks=False)


def _no_tier_namespaces(trace: Trace) -> Iterator[Trace]:
    yield _with_config(trace, namespaces=False)


def _no_window(trace: Trace) -> Iterator[Trace]:
    """Remove SWA: the model then has one pool."""
    yield _with_config(trace, window=None, swa_pages=0)


def _no_states(trace: Trace) -> Iterator[Trace]:
    yield _with_config(trace, states=0, tracks=False, lazy=False)


def _no_namespaces(trace: Trace) -> Iterator[Trace]:
    """Remove each setting; namespaces are one of them."""
    settings = trace.sizes(Geometry).settings
    for name in ("namespaces", *(name for name, _ in settings)):
        yield _with_config(trace, settings=tuple(setting for setting in settings if setting[0] != name))


def _no_recurrent_groups(trace: Trace) -> Iterator[Trace]:
    """Remove the groups with state, and the sizes for them."""
    groups = tuple(group for group in trace.sizes(EngineConfig).groups if not group.state)
    if groups:
        yield _with_config(trace, groups=groups, retention=0, match=0, checkpoints=0)


def _no_sources(trace: Trace) -> Iterator[Trace]:
    """Remove adapters and salts."""
    plain = (replace(c, adapter="", salt="") if isinstance(c, Add) else c for c in trace.commands)
    yield replace(trace, commands=tuple(plain))


def _no_children(trace: Trace) -> Iterator[Trace]:
    """Remove further answers to a prompt."""
    alone = (replace(c, children=0) if isinstance(c, Add) else c for c in trace.commands)
    yield _with_config(replace(trace, commands=tuple(alone)), children=0)


_WITHOUT: dict[str, tuple[Callable[[Trace], Iterator[Trace]], ...]] = {
    ROWS.name: (_no_states, _no_namespaces, _no_window),
    BLOCKS.name: (_no_storage, _no_recurrent_groups, _no_sources, _no_children),
    TIERS.name: (_no_storage, _no_tier_states, _no_tier_namespaces),
}
