"""The smallest trace that still violates its clause: fewest commands, then smallest sizes, then again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from impl.adapter import AnySystem, UnusableImplementation
from impl.process.failures import kind_of_failure
from impl.process.remote_system import WorkerSystem
from reference.blocks.config import EngineConfig, LayerGroup
from reference.geometry import Geometry, GeometryError
from reference.system_kinds import BLOCKS, PAIRS, ROWS, TIERS, kind_of_config
from reference.pairs.config import PairConfig
from reference.tiers.config import POLICIES, TierConfig
from stateful_tests.lockstep.replays import drive_through, replay
from stateful_tests.lockstep.run_results import Trace, Violation
from stateful_tests.shrink.optional_parts import Failing, without_parts
from stateful_tests.shrink.shrink_passes import BUDGET, StillFails, drop, shrink
from stateful_tests.shrink.command_rewriting import Commands, all_less, numbers, with_scaled_lengths

_ROUNDS = 4  # of fewer commands, then smaller sizes

Allowed = Callable[[Trace, Violation], bool]  # a trace up to the violation that it ends with


def violation_of_clause(system: AnySystem, trace: Trace, clause: str) -> tuple[str, ...] | None:
    """Return the violation of a trace that is about `clause` on a system; None if it cannot be driven
    through it."""
    try:
        lockstep, _ = drive_through(system, replace(trace, clause=clause))
    except UnusableImplementation:
        return None
    violation = lockstep.violation or lockstep.first_violation
    return violation.clauses if violation is not None else ()


def minimise(
    system: AnySystem,
    trace: Trace,
    clause: str,
    *,
    budget: int = BUDGET,
    allowed: Allowed | None = None,
) -> Trace:
    """Return the smallest trace for `clause`: fewest commands, then smallest pools, then again.

    budget: the most candidates of each `shrink`.
    allowed: returns whether a smaller trace may be considered.
    """
    with system.short_timeouts() if isinstance(system, WorkerSystem) else nullcontext():
        return _minimise(system, trace, clause, budget, allowed)


def _minimise(
    system: AnySystem, trace: Trace, clause: str, budget: int, allowed: Allowed | None
) -> Trace:
    smallest = trace
    smaller = partial(shrink, budget=budget)
    kind = _failure_kind(system, trace) if clause == "BROKEN" else None

    def failing(candidate: Trace) -> Commands | None:
        return failing_prefix(system, clause, candidate, kind, allowed)

    smallest = without_parts(failing, smallest)
    smallest = _shrink_sizes(system, failing, _shrink_commands(failing, smallest, drop))
    for _ in range(_ROUNDS):
        smallest = _shrink_commands(failing, smallest, smaller)
        sizes = smallest.geometry
        smallest = _shrink_sizes(system, failing, smallest)
        if smallest.geometry == sizes:
            break  # no command was needed for a size that is smaller now
    return replace(smallest, origin="minimised")


def _failure_kind(system: AnySystem, trace: Trace) -> str | None:
    """Return how the system breaks in this trace: a smaller trace must break alike."""
    violation = replay(system, trace).violation
    if violation is None or "BROKEN" not in violation.clauses:
        return None
    return kind_of_failure(violation.failure_of("BROKEN").observed)


PAGE_SIZES = (1, 2, 4, 8, 16)


def _shrink_commands(
    failing: Failing, trace: Trace, search: Callable[[Commands, StillFails], Commands]
) -> Trace:
    def still_fails(commands: Commands) -> Commands | None:
        return failing(replace(trace, commands=commands))

    return replace(trace, commands=search(trace.commands, still_fails))


def _shrink_sizes(system: AnySystem, failing: Failing, trace: Trace) -> Trace:
    """Return the trace with the smallest sizes, for an engine the plainest configuration, with which
    the clause still fails."""
    smaller = _SMALLER_SIZES.get(kind_of_config(trace.geometry).name)
    return trace if smaller is None else smaller(system, failing, trace)


def _shrink_geometry(system: AnySystem, failing: Failing, trace: Trace) -> Trace:
    """Return the trace with the smallest pools, pages and rows; no tree, states or settings where the
    clause needs none."""
    trace = _shrink_size(failing, trace, "bigram")
    if system.capabilities.no_tree and not trace.sizes(Geometry).bigram:
        trace = _shrink_size(failing, trace, "tree")
    for name in ("states", "page_size", "lazy", "tracks", "window"):
        trace = _shrink_size(failing, trace, name)
    for name in ("full_pages", "swa_pages", "rows", "width"):
        trace = _less_of_both(failing, _shrink_size(failing, trace, name), name)
    for setting in trace.sizes(Geometry).settings:
        others = tuple(other for other in trace.sizes(Geometry).settings if other != setting)
        candidate = replace(trace, geometry=replace(trace.sizes(Geometry), settings=others))
        if (commands := failing(candidate)) is not None:
            trace = replace(candidate, commands=commands)
    return trace


def _less_of_both(failing: Failing, trace: Trace, name: str) -> Trace:
    """Return the trace with a size and the lengths that fill it smaller by as much."""
    now = getattr(trace.sizes(Geometry), name)
    page = trace.sizes(Geometry).page_size
    if name == "width":
        least = page
        unit = 1
    else:
        least = 1
        unit = page
    lengths = sorted({value for c in trace.commands for _, value in numbers(c)}, reverse=True)
    for size in dict.fromkeys((least, now // 2, now - 1)):
        less = (now - size) * unit
        if size < least or size >= now:
            continue
        for length in lengths:
            if length > less:
                candidate = replace(
                    trace,
                    geometry=replace(trace.sizes(Geometry), **{name: size}),
                    commands=tuple(all_less(c, less, length, length) for c in trace.commands),
                )
                if (commands := failing(candidate)) is not None:
                    return replace(candidate, commands=commands)
    return trace


def _shrink_size(failing: Failing, trace: Trace, name: str) -> Trace:
    """Return the trace with the smallest value of a size with which the clause still fails; failing
    need not be monotone in it. A page keeps a size that servers have, and a row holds one at least, so
    that the trace is credible."""
    now = getattr(trace.sizes(Geometry), name)
    page = trace.sizes(Geometry).page_size
    sizes: Iterable[int] = range(page if name == "width" else 1, now or 1)  # no window stays none
    if name == "states":
        sizes = range(now)  # none at all first
    elif name == "page_size":
        sizes = [size for size in PAGE_SIZES if size < now or now not in PAGE_SIZES]
    if isinstance(now, bool):
        sizes = [False] if now else []
    for size in sizes:
        changed: dict[str, Any] = {name: size}
        try:
            geometry = replace(trace.sizes(Geometry), **changed)
        except GeometryError:
            # Without states nothing is tracked, and a longer page needs that it is.
            continue
        smaller = replace(
            trace, geometry=replace(geometry, width=max(geometry.width, geometry.page_size))
        )
        candidates = [smaller]
        if name == "page_size":
            candidates.append(_scaled_lengths(smaller, now))
        for candidate in candidates:
            commands = failing(candidate)
            if commands is not None:
                return replace(candidate, commands=commands)
    return trace


_LENGTHS = (
    "blocks", "max_model_len", "max_batched_tokens", "max_seqs", "drafts", "long_prefill", "chunk_blocks",
    "host_chunks", "image", "encoder_cache", "encoder_budget", "children", "swap",
)  # fmt: skip
_PLAIN = {
    "priority": False, "chunked": True, "eagle": False, "caching": True, "arc": False, "sync_loads": False,
    "prompt_only": False, "fail_requests": False, "whole_images": False, "lazy": False,
}  # fmt: skip

# what only a connector with host memory may have
_NO_CONNECTOR = {"chunk_blocks": 1, "arc": False, "sync_loads": False, "prompt_only": False}


def _shrink_config(_: AnySystem, failing: Failing, trace: Trace) -> Trace:
    """Return the trace with the plainest configuration of an engine with which the clause still fails:
    groups, switches, sizes."""

    def try_changes(**changes: Any) -> bool:
        nonlocal trace
        try:
            simpler = replace(trace, geometry=replace(trace.sizes(EngineConfig), **changes))
            commands = failing(simpler)
        except (GeometryError, UnusableImplementation):
            return False
        if commands is not None:
            trace = replace(simpler, commands=commands)
        return commands is not None

    for index in reversed(range(len(trace.sizes(EngineConfig).groups))):
        try_changes(
            groups=trace.sizes(EngineConfig).groups[:index]
            + trace.sizes(EngineConfig).groups[index + 1 :]
        )
    for name, plain in _PLAIN.items():
        if getattr(trace.sizes(EngineConfig), name) != plain:
            try_changes(**{name: plain})
    for index, group in enumerate(trace.sizes(EngineConfig).groups):
        kinds = [(size, group.window) for size in range(1, group.block_size)]
        kinds += [(group.block_size, window) for window in (None, *range(1, group.window or 1))]
        for size, window in kinds:
            groups = list(trace.sizes(EngineConfig).groups)
            ring = group.ring and window is not None
            groups[index] = LayerGroup(size, window, drafter=group.drafter, ring=ring)
            if groups[index] != group and try_changes(groups=tuple(groups)):
                break
    for name in _LENGTHS:
        for size in range(getattr(trace.sizes(EngineConfig), name)):
            changes: dict[str, Any] = {name: size}
            if changes == {"host_chunks": 0}:
                changes |= _NO_CONNECTOR
            if try_changes(**changes):
                break
    return trace


def _shrink_tiers(_: AnySystem, failing: Failing, trace: Trace) -> Trace:
    """Return the trace with the plainest tree with a host tier with which the clause still fails."""
    config = trace.sizes(TierConfig)
    tries: list[dict[str, Any]] = [
        {"namespaces": False},
        {"bigram": False},
        {"window": None, "swa_pages": 0, "host_swa_pages": 0},
        {"states": 0, "host_states": 0, "tracks": False},
        {"tracks": False},
        *({"policy": policy} for policy in POLICIES[: POLICIES.index(config.policy)]),
    ]
    for changes in tries:
        trace = _with_smaller_sizes(failing, trace, **changes)
    sizes = (
        "page_size",
        "window",
        "full_pages",
        "swa_pages",
        "host_pages",
        "host_swa_pages",
        "width",
        "rows",
        "states",
        "host_states",
    )
    for name in sizes:
        for size in range(1, getattr(trace.sizes(TierConfig), name) or 1):
            smaller = _with_smaller_sizes(failing, trace, **{name: size})
            if smaller is not trace:
                trace = smaller
                break
    return trace


def _shrink_pair(system: AnySystem, failing: Failing, trace: Trace) -> Trace:
    """Return the trace with the plainest pair with which the clause still fails: each server as an
    engine by itself."""
    for name in ("late", "push", "prefill_overlap", "decode_overlap", "host_first"):
        trace = _with_smaller_sizes(failing, trace, **{name: False})
    sizes = trace.sizes(PairConfig)
    for index in reversed(range(len(sizes.prefill.groups))):  # both servers have the same groups
        fewer = {}
        for name in ("prefill", "decode"):
            config = getattr(trace.sizes(PairConfig), name)
            fewer[name] = _without_group(config, index) if len(config.groups) > 1 else config
        trace = _with_smaller_sizes(failing, trace, **fewer)
    if trace.sizes(PairConfig).recurrent:  # a block of state has as many tokens as one of attention
        trace = _with_small_blocks(failing, trace)
    for name in ("prefill", "decode"):
        trace = _shrink_server(system, failing, trace, name)
    return trace


def _without_group(config: EngineConfig, index: int) -> EngineConfig:
    """Return the engine without a group, and without the sizes for recurrent groups if that was the
    last one."""
    groups = config.groups[:index] + config.groups[index + 1 :]
    if any(group.state for group in groups):
        return replace(config, groups=groups)
    return replace(config, groups=groups, retention=0, match=0, checkpoints=0)


def _with_small_blocks(failing: Failing, trace: Trace) -> Trace:
    """Return the trace with smaller blocks in all groups of both servers, if it still fails with them."""
    largest = max(group.block_size for group in trace.sizes(PairConfig).prefill.groups)
    for size in range(1, largest):
        smaller = {}
        for name in ("prefill", "decode"):
            config = getattr(trace.sizes(PairConfig), name)
            groups = tuple(
                replace(group, block_size=min(size, group.block_size)) for group in config.groups
            )
            try:
                smaller[name] = replace(config, groups=groups)
            except GeometryError:
                break
        else:
            resized = _with_smaller_sizes(failing, trace, **smaller)
            if resized is not trace:
                return resized
    return trace


def _shrink_server(system: AnySystem, failing: Failing, trace: Trace, name: str) -> Trace:
    pair = trace.sizes(PairConfig)

    def of_pair(server: Trace) -> Trace:
        config = replace(server.sizes(EngineConfig), peer=getattr(pair, name).peer)
        changed: dict[str, Any] = {name: config}
        return replace(server, geometry=replace(pair, **changed))

    def failing_server(server: Trace) -> Commands | None:
        return failing(of_pair(server))

    alone = replace(trace, geometry=getattr(pair, name))
    return of_pair(_shrink_config(system, failing_server, alone))


def _with_smaller_sizes(failing: Failing, trace: Trace, **changes: Any) -> Trace:
    """Return the trace with other sizes, if it still fails with them."""
    if all(getattr(trace.geometry, name) == value for name, value in changes.items()):
        return trace
    try:
        simpler = replace(trace, geometry=replace(trace.geometry, **changes))
        commands = failing(simpler)
    except (GeometryError, UnusableImplementation):
        return trace
    return trace if commands is None else replace(simpler, commands=commands)


def _scaled_lengths(trace: Trace, was: int) -> Trace:
    """Return the trace with all lengths as many pages long as they were when a page had `was` tokens."""
    size = trace.sizes(Geometry).page_size
    window = trace.sizes(Geometry).window
    window = None if window is None else -(-window * size // was)
    commands = with_scaled_lengths(trace.commands, size, was)
    return replace(trace, geometry=replace(trace.sizes(Geometry), window=window), commands=commands)


_SMALLER_SIZES = {
    ROWS.name: _shrink_geometry,
    BLOCKS.name: _shrink_config,
    TIERS.name: _shrink_tiers,
    PAIRS.name: _shrink_pair,
}


def failing_prefix(
    system: AnySystem,
    clause: str,
    trace: Trace,
    kind: str | None = None,
    allowed: Allowed | None = None,
    *,
    patient: bool = False,
) -> Commands | None:
    """Return the commands up to the step that violates `clause`, if one does, and if that is `allowed`.

    kind: of BROKEN, how the system fails there; None where that does not matter.
    patient: leave out turns that the rules reject, but not the last command.
    """
    try:
        lockstep, commands = drive_through(system, replace(trace, clause=clause), patient=patient)
    except UnusableImplementation:
        return None
    if (violation := lockstep.violation) is None:
        return None
    commands = commands[: lockstep.steps]
    if clause not in violation.clauses:
        return None
    if kind not in (None, kind_of_failure(violation.failure_of(clause).observed)):
        return None
    if allowed is not None and not allowed(replace(trace, commands=commands), violation):
        return None
    return commands
