"""Traces without something that they may need: a kind of command, a window, states, a pool that runs full.

Each function gives the same trace without it, as far as that shows when it runs on the system. Those of two
servers stand in pair_reductions.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from string import ascii_lowercase
from typing import Any

from impl.adapter import AnySystem, UnusableImplementation
from reference.blocks.commands import Add, Fail, More
from reference.blocks.config import BOUNDS, EngineConfig
from reference.commands import Evict, Extend, Insert, Submit, prompt_len
from reference.geometry import Geometry, GeometryError
from reference.pairs.commands import Lose, Shake
from reference.tiers.commands import Backup, Fetch, Prefetch, Query, Reattach, Tick
from reference.tiers.config import TierConfig
from reference.token_ids import is_image
from stateful_tests.lockstep.driven_kinds import check_fits, lockstep_on
from stateful_tests.lockstep.replays import drive_through
from stateful_tests.lockstep.run_results import Trace

Reduction = Callable[[AnySystem, Trace], Trace]  # a trace without a need

WHOLE = 1 << 12  # tokens of a chunk that has all that is left of a prompt
AHEAD = 8  # pages of rounds that a request may have allocated ahead


def remove_commands(kinds: type | tuple[type, ...], system: AnySystem, trace: Trace) -> Trace:
    del system
    return replace(trace, commands=tuple(c for c in trace.commands if not isinstance(c, kinds)))


def _change_each(trace: Trace, kinds: Any, change: Callable[[Any], Any]) -> Trace:
    """Return the trace with each command of these kinds changed."""
    commands = (change(c) if isinstance(c, kinds) else c for c in trace.commands)
    return replace(trace, commands=tuple(commands))


def set_fields(kinds: Any, system: AnySystem, trace: Trace, **fields: Any) -> Trace:
    """Return the trace with these values of fields in each command of these kinds."""
    del system
    return _change_each(trace, kinds, lambda c: replace(c, **fields))


def remove_images(system: AnySystem, trace: Trace) -> Trace:
    """Replace the images of prompts by texts."""
    del system

    def in_text(command: Add | More) -> Add | More:
        pieces = (replace(p, text="z") if is_image(p.text) else p for p in command.prompt)
        return replace(command, prompt=tuple(pieces))

    return _change_each(trace, Add | More, in_text)


def remove_rejected_turns(system: AnySystem, trace: Trace) -> Trace:
    """Remove rejected turns, but not the last command, with which the trace violates its clause.
    Without one, the trace may get further, to others. Unchanged where it cannot be driven: decodes may
    have got into a run of verify rounds."""
    if not any(isinstance(command, Submit) for command in trace.commands):
        return trace
    try:
        _, driven = drive_through(system, trace, patient=True)
    except UnusableImplementation:
        return trace
    return replace(trace, commands=driven)


def remove_paused_requests(system: AnySystem, trace: Trace) -> Trace:
    """Remove the requests that are paused with their blocks, until none is. Unchanged where the trace
    cannot be driven."""
    while True:
        try:
            paused = _requests_paused(system, trace)
        except UnusableImplementation:
            return trace
        kept = [c for c in trace.commands if getattr(c, "request", None) not in paused]
        if len(kept) == len(trace.commands):
            return trace
        trace = replace(trace, commands=tuple(kept))


def _requests_paused(system: AnySystem, trace: Trace) -> set[str]:
    """Return the requests of an engine that are shown as paused after a command of a trace, up to its
    violation."""
    check_fits(system, trace.geometry, trace.commands)
    lockstep = lockstep_on(system, trace.geometry, trace.mode, trace.clause)
    paused: set[str] = set()
    for command in trace.commands:
        lockstep.do(command)
        facts: Any = lockstep.facts
        paused.update(name for name, fact in facts.requests.items() if fact.status == "PAUSED")
        if lockstep.violation is not None:
            break
    return paused


def receive_nothing(system: AnySystem, trace: Trace) -> Trace:
    """Let each prompt take SWA slots for all of it."""
    del system

    def whole(batch: Extend) -> Extend:
        return replace(batch, lanes=tuple(replace(lane, tail=False) for lane in batch.lanes))

    return _change_each(trace, Extend, whole)


def with_sizes(trace: Trace, **sizes: Any) -> Trace:
    """Return the trace with other sizes; unchanged where they do not fit together."""
    try:
        return replace(trace, geometry=replace(trace.geometry, **sizes))
    except GeometryError:
        return trace


def make_room_for_rows(system: AnySystem, trace: Trace) -> Trace:
    """Let rows be full, with rounds allocated ahead."""
    del system
    sizes = trace.sizes(Geometry)
    pages = 1 + sizes.rows * (AHEAD - 2 * (-sizes.width // sizes.page_size))
    swa = 0 if sizes.window is None else max(sizes.swa_pages, pages)
    return with_sizes(trace, full_pages=max(sizes.full_pages, pages), swa_pages=swa)


def make_room_for_texts(system: AnySystem, trace: Trace) -> Trace:
    """Let texts be as long as the model takes, without a window, as an admission may ask for."""
    del system
    sizes = trace.sizes(EngineConfig)
    texts = sum(isinstance(command, Add) for command in trace.commands)
    whole = (replace(group, window=None) for group in sizes.groups)
    most = (texts + 1) * sum(map(sizes.most_blocks, whole))
    return with_sizes(trace, blocks=max(sizes.blocks, most))


def make_room_for_images(system: AnySystem, trace: Trace) -> Trace:
    """Let the cache keep every image."""
    del system
    if not trace.sizes(EngineConfig).encodes:
        return trace
    return with_sizes(trace, encoder_cache=BOUNDS["encoder_cache"][1])


def remove_too_long_turns(system: AnySystem, trace: Trace) -> Trace:
    """Remove turns of sessions that leave no room for an output in max_model_len."""
    del system
    shorter = []
    length = Counter[str]()
    for command in trace.commands:
        if isinstance(command, Add | More):
            sent = command.tokens + sum(piece.tokens for piece in command.prompt)
            before = 0 if isinstance(command, Add) else length[command.request]
            if isinstance(command, More) and before + sent >= trace.sizes(EngineConfig).max_model_len:
                continue
            length[command.request] = before + sent + command.max_tokens
        shorter.append(command)
    return replace(trace, commands=tuple(shorter))


def remove_windows_of_groups(system: AnySystem, trace: Trace) -> Trace:
    """Remove the windows of an engine's layer groups."""
    del system
    sizes = trace.sizes(EngineConfig)
    groups = tuple(replace(group, window=None, ring=False) for group in sizes.groups)
    more = sum(map(sizes.most_blocks, groups))
    return with_sizes(trace, groups=groups, blocks=max(sizes.blocks, more))


def remove_window_of_tree(system: AnySystem, trace: Trace) -> Trace:
    """Remove the window of a tree with a host tier."""
    without = set_fields(Insert, system, trace, evicted=0)
    without = set_fields(Evict, system, without, swa=0)
    return with_sizes(without, window=None, swa_pages=0, host_swa_pages=0)


def set_sizes(system: AnySystem, trace: Trace, **sizes: Any) -> Trace:
    del system
    return with_sizes(trace, **sizes)


def remove_drafter(system: AnySystem, trace: Trace) -> Trace:
    """Remove the drafter of an engine."""
    del system
    sizes = trace.sizes(EngineConfig)
    groups = tuple(replace(group, drafter=False) for group in sizes.groups)
    return with_sizes(trace, groups=groups, drafts=0, eagle=False)


def longest_text(trace: Trace) -> int:
    """Return the length of the longest text that a request may have, with all turns and outputs
    (tokens)."""
    lengths = Counter[str]()
    for command in trace.commands:
        if isinstance(command, Add | More):
            sent = command.tokens + sum(piece.tokens for piece in command.prompt)
            lengths[command.request] += sent + command.max_tokens
    return max(lengths.values(), default=0)


def with_room_for_texts(trace: Trace, **sizes: Any) -> Trace:
    """Return the trace with other sizes, and blocks for the longest text."""
    config = trace.sizes(EngineConfig)
    roomy = replace(config, blocks=BOUNDS["blocks"][1], **sizes)
    most = sum(roomy.most_blocks(group) for group in config.groups)
    return with_sizes(trace, **sizes, blocks=max(config.blocks, most))


def prefill_in_one_chunk(system: AnySystem, trace: Trace) -> Trace:
    """Give each prompt to the drafter in one chunk."""
    del system
    sizes = trace.sizes(EngineConfig)
    if sizes.draft_group is None:
        return trace
    budget = max(sizes.max_batched_tokens, sizes.max_seqs * (longest_text(trace) + sizes.drafts))
    return with_room_for_texts(trace, max_batched_tokens=budget, long_prefill=0)


def raise_longest_text(system: AnySystem, trace: Trace) -> Trace:
    """Leave room for the drafts behind each text."""
    del system
    sizes = trace.sizes(EngineConfig)
    if sizes.draft_group is None:
        return trace
    longest = longest_text(trace) + 2 * sizes.drafts + 1
    return with_room_for_texts(trace, max_model_len=max(sizes.max_model_len, longest))


def join_chunks(system: AnySystem, trace: Trace) -> Trace:
    """Make each insert into a tree with a host tier a request's last, and each chunk of a prefill
    server the whole rest of a prompt."""

    def whole(batch: Extend) -> Extend:
        return replace(batch, lanes=tuple(replace(lane, tokens=WHOLE) for lane in batch.lanes))

    return _change_each(set_fields(Insert, system, trace, chunked=False), Extend, whole)


def make_room_on_host(system: AnySystem, trace: Trace) -> Trace:
    """Give host memory room for all texts."""
    del system
    sizes = trace.sizes(TierConfig)
    texts = (prompt_len(c.prompt) for c in trace.commands if hasattr(c, "prompt"))
    pages = sum(-(-length // sizes.page_size) for length in texts) + 1
    full = max(sizes.host_pages, pages)
    swa = max(sizes.host_swa_pages, pages) if sizes.host_swa_pages else 0
    states = max(sizes.host_states, pages) if sizes.host_states else 0
    return with_sizes(trace, host_pages=full, host_swa_pages=swa, host_states=states)


def remove_storage(system: AnySystem, trace: Trace, *more_kinds: type) -> Trace:
    """Remove the storage behind the host. beside: further commands that need it."""
    sizes: Any = trace.geometry
    if not sizes.storage:
        return trace
    without = remove_commands((Prefetch, Query, Fetch, Backup, Tick, Reattach, *more_kinds), system, trace)
    return with_sizes(without, storage=type(sizes.storage)())


def remove_states(system: AnySystem, trace: Trace, **sizes: Any) -> Trace:
    """Remove the recurrent layers. sizes: sizes that depend on them."""
    recurrent: Any = trace.geometry
    if not recurrent.states:
        return trace
    return with_sizes(set_fields(Evict, system, trace, states=0), states=0, **sizes)


def remove_failures(system: AnySystem, trace: Trace) -> Trace:
    """Remove failures of loads."""
    without = remove_commands((Fail, Lose), system, trace)
    return set_fields(Shake, system, without, fails=False)


def separate_prompts(system: AnySystem, trace: Trace) -> Trace:
    """Let no prompt begin as another, where loads are done within a step."""
    del system
    sizes = trace.sizes(EngineConfig)
    if not (sizes.peer and sizes.sync_loads):
        return trace
    letters = cycle(ascii_lowercase)

    def of_own_text(command: Add) -> Add:
        own = next(letters)
        pieces = (p if is_image(p.text) else replace(p, text=own) for p in command.prompt)
        return replace(command, prompt=tuple(pieces))

    return _change_each(trace, Add, of_own_text)
