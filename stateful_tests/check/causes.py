"""Causes of a violation: what a trace needs of how turns end, and the same run without that.

A fault that is known must not hide another of its clause. The smallest trace of the first says what it needs:
a retract, a rejected turn, pools without room. A run that violates the clause without one of these
has another cause. That is asked where no base says more: of a release, of a replayed trace, of an engine that
schedules by itself, and for a second trace of a clause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from impl.adapter import AnySystem, UnusableImplementation
from reference.blocks.commands import Add, Fail, More, ResetCache, ResetConnector
from reference.blocks.config import EngineConfig
from reference.commands import (
    Abort, Close, Evict, Extend, Finish, Insert, Launch, Retract, Settle, SpecDecode, Submit, prompt_len,
)  # fmt: skip
from reference.geometry import Geometry, GeometryError
from reference.tiers.commands import Backup, Fetch, Prefetch, Query
from reference.tiers.config import TierConfig
from stateful_tests.lockstep.lockstep import driven_through
from stateful_tests.lockstep.results import Trace
from stateful_tests.shrink.minimise import violated

Needs = tuple[str, ...]  # names, in the order of _NEEDS


REJECTED = "a rejected turn"
_AHEAD = 8  # pages of rounds that a request may have allocated ahead


def _none_of(kinds: type | tuple[type, ...], system: AnySystem, trace: Trace) -> Trace:
    del system
    return replace(trace, commands=tuple(c for c in trace.commands if not isinstance(c, kinds)))


def _no_rejected_turn(system: AnySystem, trace: Trace) -> Trace:
    """But for the last command, with which the trace violates its clause. Without one, it may get further,
    to others. As it is where it cannot be driven: decodes may have come into a run of verify rounds."""
    if not any(isinstance(command, Submit) for command in trace.commands):
        return trace
    try:
        _, kept = driven_through(system, trace, patient=True)
    except UnusableImplementation:
        return trace
    return replace(trace, commands=kept)


def _nothing_received(system: AnySystem, trace: Trace) -> Trace:
    """Each prompt takes SWA slots for all of it."""
    del system
    return replace(
        trace,
        commands=tuple(
            replace(c, lanes=tuple(replace(lane, tail=False) for lane in c.lanes))
            if isinstance(c, Extend)
            else c
            for c in trace.commands
        ),
    )


def _with_sizes(trace: Trace, **sizes: Any) -> Trace:
    """As it was where the sizes do not fit together."""
    try:
        return replace(trace, geometry=replace(trace.geometry, **sizes))
    except GeometryError:
        return trace


def _room(system: AnySystem, trace: Trace) -> Trace:
    """Rows may be full, with rounds allocated ahead; of an engine, texts as long as the model takes."""
    del system
    sizes = trace.geometry
    if isinstance(sizes, TierConfig):
        return trace
    if isinstance(sizes, EngineConfig):
        texts = sum(isinstance(command, Add) for command in trace.commands)
        whole = (
            replace(group, window=None) for group in sizes.groups
        )  # as an admission may ask for
        most = (texts + 1) * sum(map(sizes.most_blocks, whole))
        return _with_sizes(trace, blocks=max(sizes.blocks, most))
    pages = 1 + sizes.rows * (_AHEAD - 2 * (-sizes.width // sizes.page_size))
    swa = 0 if sizes.window is None else max(sizes.swa_pages, pages)
    return _with_sizes(trace, full_pages=max(sizes.full_pages, pages), swa_pages=swa)


def _no_longer_text(system: AnySystem, trace: Trace) -> Trace:
    """No session goes on with a turn that leaves no room for an output in max_model_len."""
    del system
    kept, length = [], Counter[str]()
    for command in trace.commands:
        if isinstance(command, Add | More):
            sent = command.tokens + sum(piece.tokens for piece in command.prompt)
            before = 0 if isinstance(command, Add) else length[command.request]
            if isinstance(command, More) and before + sent >= trace.geometry.max_model_len:
                continue
            length[command.request] = before + sent + command.max_tokens
        kept.append(command)
    return replace(trace, commands=tuple(kept))


def _no_window(system: AnySystem, trace: Trace) -> Trace:
    """No group of an engine has a window; nor has a tree with a host tier."""
    if isinstance(trace.geometry, TierConfig):
        commands = tuple(
            replace(c, evicted=0) if isinstance(c, Insert) else c for c in trace.commands
        )
        commands = tuple(replace(c, swa=0) if isinstance(c, Evict) else c for c in commands)
        return _with_sizes(
            replace(trace, commands=commands), window=None, swa_pages=0, host_swa_pages=0
        )
    if not isinstance(trace.geometry, EngineConfig):
        return trace
    groups = tuple(replace(group, window=None) for group in trace.geometry.groups)
    more = sum(map(trace.geometry.most_blocks, groups))
    blocks = max(trace.geometry.blocks, more)
    return _engine_without(system, trace, groups=groups, blocks=blocks)


def _engine_without(system: AnySystem, trace: Trace, **sizes: Any) -> Trace:
    del system
    return _with_sizes(trace, **sizes) if isinstance(trace.geometry, EngineConfig) else trace


def _no_chunks(system: AnySystem, trace: Trace) -> Trace:
    """Each insert into a tree with a host tier is a request's last."""
    del system
    return replace(
        trace,
        commands=tuple(
            replace(c, chunked=False)
            if isinstance(c, Insert) and isinstance(trace.geometry, TierConfig)
            else c
            for c in trace.commands
        ),
    )


def _host_room(system: AnySystem, trace: Trace) -> Trace:
    """Host memory has room for all texts."""
    del system
    if not isinstance(trace.geometry, TierConfig):
        return trace
    sizes, size = trace.geometry, trace.geometry.page_size
    pages = (
        sum(-(-prompt_len(c.prompt) // size) for c in trace.commands if hasattr(c, "prompt")) + 1
    )
    most = max(sizes.host_pages, pages), sizes.host_swa_pages and max(sizes.host_swa_pages, pages)
    return _with_sizes(trace, host_pages=most[0], host_swa_pages=most[1])


def _no_storage(system: AnySystem, trace: Trace) -> Trace:
    """Nothing stands behind the host."""
    if not isinstance(trace.geometry, TierConfig) or not trace.geometry.storage:
        return trace
    return _with_sizes(_none_of((Prefetch, Query, Fetch, Backup, Abort), system, trace), storage="")


def _no_state(system: AnySystem, trace: Trace) -> Trace:
    """The model has no recurrent layers."""
    del system
    if isinstance(trace.geometry, EngineConfig) or not trace.geometry.states:
        return trace
    kept = (replace(c, states=0) if isinstance(c, Evict) else c for c in trace.commands)
    no_more = {"host_states": 0} if isinstance(trace.geometry, TierConfig) else {"tracks": False}
    return _with_sizes(replace(trace, commands=tuple(kept)), states=0, **no_more)


def _no_setting(system: AnySystem, trace: Trace) -> Trace:
    """Each switch of a release is where it is by default."""
    del system
    return _with_sizes(trace, settings=()) if isinstance(trace.geometry, Geometry) else trace


# What a trace may need, and the trace without it. Which turns are rejected depends on the ends before.
_NEEDS: dict[str, Callable[[AnySystem, Trace], Trace]] = {
    "a retract": partial(_none_of, Retract),
    "an abort": partial(_none_of, Abort),
    "a finish": partial(_none_of, Finish),
    "a close": partial(_none_of, Close),
    "a verify round": partial(_none_of, (SpecDecode, Launch, Settle)),
    "a received prompt": _nothing_received,
    "a next turn": partial(_none_of, More),
    "a reset of the cache": partial(_none_of, ResetCache),
    "drafts": partial(_engine_without, drafts=0, eagle=False),
    "a window": _no_window,
    "hits within a block": partial(_engine_without, match=0),
    "checkpoints within a chunk": partial(_engine_without, checkpoints=0),
    "chunks of several blocks": partial(_engine_without, chunk_blocks=1),
    "chunks that go on": _no_chunks,
    "a small host": _host_room,
    "a storage": _no_storage,
    "recurrent state": _no_state,
    "a setting": _no_setting,
    "a reset of host memory": partial(_none_of, ResetConnector),
    "a failed load": partial(_none_of, Fail),
    "priorities": partial(_engine_without, priority=False),
    "a limit of a prefill": partial(_engine_without, long_prefill=0),
    "a text longer than the model": _no_longer_text,
    "pools that run full": _room,
    REJECTED: _no_rejected_turn,
}


def avoided(system: AnySystem, trace: Trace, without: Needs) -> Trace:
    """The trace without these, as far as they show when it runs on the system."""
    for name in without:
        trace = _NEEDS[name](system, trace)
    return trace


def lacks(system: AnySystem, without: Needs, trace: Trace) -> bool:
    """Nothing of these is in the trace."""
    return avoided(system, trace, without) == trace


def needs(system: AnySystem, smallest: Trace, clause: str, among: Iterable[str] = _NEEDS) -> Needs:
    """What a trace of a clause needs, of which no command can go."""

    def needed(name: str) -> bool:
        less = avoided(system, smallest, (name,))
        return less != smallest and clause not in (violated(system, less, clause) or ())

    return tuple(filter(needed, among))


def to_avoid(known: Sequence[Needs]) -> list[Needs]:
    """What to avoid, the least first, so that one need of each known trace is missing."""
    each = dict.fromkeys(tuple(need for need in _NEEDS if need in one) for one in product(*known))
    by_size = sorted(each, key=len)
    return [
        one for at, one in enumerate(by_size) if not any({*less} < {*one} for less in by_size[:at])
    ]
