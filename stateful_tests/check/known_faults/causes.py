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
from itertools import cycle, product
from string import ascii_lowercase
from typing import Any

from impl.adapter import AnySystem, UnusableImplementation
from reference.blocks.commands import Add, Fail, LoadAdapter, More, NewWeights, ResetConnector
from reference.blocks.config import BOUNDS, EngineConfig
from reference.commands import (
    Abort, Close, Evict, Extend, Finish, Insert, Launch, Retract, Settle, SpecDecode, Submit, prompt_len,
)  # fmt: skip
from reference.geometry import Geometry, GeometryError
from reference.kinds import kind_of_config
from reference.pairs.commands import Cancel, Drop, Forget, Forward, Lose, Prefill, Serve, Shake
from reference.pairs.config import PairConfig
from reference.tiers.commands import Backup, Fetch, Prefetch, Query, ResetCache
from reference.tiers.config import TierConfig
from reference.token_ids import is_image
from stateful_tests.lockstep.replays import driven_through
from stateful_tests.lockstep.results import Trace
from stateful_tests.shrink.minimise import violated

Needs = tuple[str, ...]  # names, in the order of _NEEDS
_Less = Callable[[AnySystem, Trace], Trace]  # a trace without a need


REJECTED = "a rejected turn"
_SERVERS = "prefill", "decode"  # of a PairConfig
_WHOLE = 1 << 12  # tokens of a chunk that has all that is left of a prompt
_AHEAD = 8  # pages of rounds that a request may have allocated ahead


def _none_of(kinds: type | tuple[type, ...], system: AnySystem, trace: Trace) -> Trace:
    del system
    return replace(trace, commands=tuple(c for c in trace.commands if not isinstance(c, kinds)))


def _no_adapters(system: AnySystem, trace: Trace) -> Trace:
    """No request has an adapter."""
    del system
    made = (replace(c, adapter="") if isinstance(c, Add) else c for c in trace.commands)
    return replace(trace, commands=tuple(made))


def _no_images(system: AnySystem, trace: Trace) -> Trace:
    """Prompts have texts in the places of their images."""
    del system
    made = []
    for command in trace.commands:
        if isinstance(command, Add | More):
            pieces = (replace(p, text="z") if is_image(p.text) else p for p in command.prompt)
            command = replace(command, prompt=tuple(pieces))
        made.append(command)
    return replace(trace, commands=tuple(made))


def _no_salts(system: AnySystem, trace: Trace) -> Trace:
    """No request has a salt."""
    del system
    made = (replace(c, salt="") if isinstance(c, Add) else c for c in trace.commands)
    return replace(trace, commands=tuple(made))


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


def _room_for_rows(system: AnySystem, trace: Trace) -> Trace:
    """Rows may be full, with rounds allocated ahead."""
    del system
    sizes = trace.sizes(Geometry)
    pages = 1 + sizes.rows * (_AHEAD - 2 * (-sizes.width // sizes.page_size))
    swa = 0 if sizes.window is None else max(sizes.swa_pages, pages)
    return _with_sizes(trace, full_pages=max(sizes.full_pages, pages), swa_pages=swa)


def _room_for_texts(system: AnySystem, trace: Trace) -> Trace:
    """Texts may be as long as the model takes, without a window, as an admission may ask for."""
    del system
    sizes = trace.sizes(EngineConfig)
    texts = sum(isinstance(command, Add) for command in trace.commands)
    whole = (replace(group, window=None) for group in sizes.groups)
    most = (texts + 1) * sum(map(sizes.most_blocks, whole))
    return _with_sizes(trace, blocks=max(sizes.blocks, most))


def _room_for_images(system: AnySystem, trace: Trace) -> Trace:
    """Every image can be kept."""
    del system
    if not trace.sizes(EngineConfig).encodes:
        return trace
    return _with_sizes(trace, encoder_cache=BOUNDS["encoder_cache"][1])


def _no_longer_text(system: AnySystem, trace: Trace) -> Trace:
    """No session goes on with a turn that leaves no room for an output in max_model_len."""
    del system
    kept = []
    length = Counter[str]()
    for command in trace.commands:
        if isinstance(command, Add | More):
            sent = command.tokens + sum(piece.tokens for piece in command.prompt)
            before = 0 if isinstance(command, Add) else length[command.request]
            if isinstance(command, More) and before + sent >= trace.sizes(EngineConfig).max_model_len:
                continue
            length[command.request] = before + sent + command.max_tokens
        kept.append(command)
    return replace(trace, commands=tuple(kept))


def _no_window_of_groups(system: AnySystem, trace: Trace) -> Trace:
    """No layer group of an engine has a window."""
    del system
    sizes = trace.sizes(EngineConfig)
    groups = tuple(replace(group, window=None) for group in sizes.groups)
    more = sum(map(sizes.most_blocks, groups))
    return _with_sizes(trace, groups=groups, blocks=max(sizes.blocks, more))


def _no_window_of_a_tree(system: AnySystem, trace: Trace) -> Trace:
    """A tree with a host tier has no window."""
    del system
    commands = tuple(replace(c, evicted=0) if isinstance(c, Insert) else c for c in trace.commands)
    commands = tuple(replace(c, swa=0) if isinstance(c, Evict) else c for c in commands)
    without = replace(trace, commands=commands)
    return _with_sizes(without, window=None, swa_pages=0, host_swa_pages=0)


def _sized(system: AnySystem, trace: Trace, **sizes: Any) -> Trace:
    del system
    return _with_sizes(trace, **sizes)


def _no_drafts(system: AnySystem, trace: Trace) -> Trace:
    """The engine has no drafter."""
    del system
    sizes = trace.sizes(EngineConfig)
    groups = tuple(replace(group, drafter=False) for group in sizes.groups)
    return _with_sizes(trace, groups=groups, drafts=0, eagle=False)


def _longest_text(trace: Trace) -> int:
    """Tokens of the longest text that a request may have, with all turns and outputs."""
    lengths = Counter[str]()
    for command in trace.commands:
        if isinstance(command, Add | More):
            sent = command.tokens + sum(piece.tokens for piece in command.prompt)
            lengths[command.request] += sent + command.max_tokens
    return max(lengths.values(), default=0)


def _resized(trace: Trace, **sizes: Any) -> Trace:
    """With blocks for the longest text."""
    config = trace.sizes(EngineConfig)
    roomy = replace(config, blocks=BOUNDS["blocks"][1], **sizes)
    most = sum(roomy.most_blocks(group) for group in config.groups)
    return _with_sizes(trace, **sizes, blocks=max(config.blocks, most))


def _whole_prompts(system: AnySystem, trace: Trace) -> Trace:
    """A drafter sees each prompt in one chunk."""
    del system
    sizes = trace.sizes(EngineConfig)
    if sizes.draft_group is None:
        return trace
    budget = max(sizes.max_batched_tokens, sizes.max_seqs * (_longest_text(trace) + sizes.drafts))
    return _resized(trace, max_batched_tokens=budget, long_prefill=0)


def _no_text_near_the_limit(system: AnySystem, trace: Trace) -> Trace:
    """A drafter has room for its drafts behind each text."""
    del system
    sizes = trace.sizes(EngineConfig)
    if sizes.draft_group is None:
        return trace
    longest = _longest_text(trace) + 2 * sizes.drafts + 1
    return _resized(trace, max_model_len=max(sizes.max_model_len, longest))


def _longest_of_a_pair(trace: Trace) -> int:
    """Tokens of the longest text that a request of a pair may have, with its outputs."""
    prompts = [c for c in trace.commands if isinstance(c, Prefill | Serve)]
    longest = max((c.tokens + prompt_len(c.prompt) for c in prompts), default=0)
    outputs = (c.max_tokens for c in trace.commands if isinstance(c, Forward | Serve))
    return longest + max(outputs, default=1)


def _with_drafters(trace: Trace, sizes: Callable[[EngineConfig], dict[str, Any]]) -> Trace:
    """A pair with other sizes where its servers have drafters with KV, and blocks for the longest text."""
    if trace.sizes(PairConfig).prefill.draft_group is None:
        return trace
    servers = {}
    for name in _SERVERS:
        config = getattr(trace.geometry, name)
        roomy = replace(config, blocks=BOUNDS["blocks"][1], **sizes(config))
        most = sum(map(roomy.most_blocks, roomy.groups))
        servers[name] = replace(roomy, blocks=max(config.blocks, most))
    return _with_sizes(trace, **servers)


def _whole_prompts_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """The drafters of a pair see each prompt in one chunk, which states may yet cut."""
    del system
    longest = _longest_of_a_pair(trace)

    def sizes(config: EngineConfig) -> dict[str, Any]:
        budget = max(config.max_batched_tokens, config.max_seqs * (longest + config.drafts))
        return {"max_batched_tokens": budget, "long_prefill": 0}

    return _with_drafters(trace, sizes)


def _no_text_near_the_limit_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """The drafters of a pair have room for their drafts behind each text."""
    del system
    longest = _longest_of_a_pair(trace)

    def sizes(config: EngineConfig) -> dict[str, Any]:
        return {"max_model_len": max(config.max_model_len, longest + 2 * config.drafts + 1)}

    return _with_drafters(trace, sizes)


def _no_drafts_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """Neither server of a pair has a drafter."""
    del system
    servers = {}
    for name in _SERVERS:
        config = getattr(trace.geometry, name)
        groups = tuple(replace(group, drafter=False) for group in config.groups)
        servers[name] = replace(config, groups=groups, drafts=0, eagle=False)
    return _with_sizes(trace, **servers)


def _no_chunks(system: AnySystem, trace: Trace) -> Trace:
    """Each insert into a tree with a host tier is a request's last, and each chunk of a prefill server the
    whole rest of a prompt."""
    del system
    commands: list[Any] = []
    for command in trace.commands:
        if isinstance(command, Insert):
            commands.append(replace(command, chunked=False))
        elif isinstance(command, Extend):
            lanes = tuple(replace(lane, tokens=_WHOLE) for lane in command.lanes)
            commands.append(replace(command, lanes=lanes))
        else:
            commands.append(command)
    return replace(trace, commands=tuple(commands))


def _host_room(system: AnySystem, trace: Trace) -> Trace:
    """Host memory has room for all texts."""
    del system
    sizes = trace.sizes(TierConfig)
    texts = (prompt_len(c.prompt) for c in trace.commands if hasattr(c, "prompt"))
    pages = sum(-(-length // sizes.page_size) for length in texts) + 1
    full = max(sizes.host_pages, pages)
    swa = max(sizes.host_swa_pages, pages) if sizes.host_swa_pages else 0
    return _with_sizes(trace, host_pages=full, host_swa_pages=swa)


def _no_storage(system: AnySystem, trace: Trace, *beside: type) -> Trace:
    """Nothing stands behind the host. beside: further commands that go with it."""
    sizes: Any = trace.geometry
    if not sizes.storage:
        return trace
    without = _none_of((Prefetch, Query, Fetch, Backup, *beside), system, trace)
    return _with_sizes(without, storage=type(sizes.storage)())


def _no_state(system: AnySystem, trace: Trace, **sizes: Any) -> Trace:
    """The model has no recurrent layers. sizes: what goes with them."""
    del system
    assert isinstance(trace.geometry, Geometry | TierConfig)
    if not trace.geometry.states:
        return trace
    kept = (replace(c, states=0) if isinstance(c, Evict) else c for c in trace.commands)
    return _with_sizes(replace(trace, commands=tuple(kept)), states=0, **sizes)


def _of_servers(system: AnySystem, trace: Trace, **sizes: Any) -> Trace:
    """A pair with these sizes on both servers."""
    del system
    try:
        servers = {name: replace(getattr(trace.geometry, name), **sizes) for name in _SERVERS}
    except GeometryError:
        return trace
    return _with_sizes(trace, **servers)


def _uncached_servers(system: AnySystem, trace: Trace) -> Trace:
    """Neither server has prefix caching: a request then has one state, whatever the length of its text."""
    del system
    sizes = trace.sizes(PairConfig)
    servers = {}
    try:
        for name in _SERVERS:
            config = getattr(sizes, name)
            longest = max(config.max_model_len, sizes.prefill.max_model_len)
            groups = tuple(
                replace(group, block_size=longest) if group.state else group
                for group in config.groups
            )
            servers[name] = replace(
                config, groups=groups, caching=False, match=0, retention=0, checkpoints=0
            )
    except GeometryError:
        return trace
    return _with_sizes(trace, **servers)


def _no_state_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """No layers of a pair are recurrent."""
    del system
    servers = {}
    for name in _SERVERS:
        config = getattr(trace.geometry, name)
        groups = tuple(group for group in config.groups if not group.state)
        if not groups:
            return trace
        servers[name] = replace(config, groups=groups, match=0, retention=0, checkpoints=0)
    return _with_sizes(trace, **servers)


def _no_window_of_servers(system: AnySystem, trace: Trace) -> Trace:
    """No layer group of a pair has a window."""
    del system
    servers = {}
    for name in _SERVERS:
        config = getattr(trace.geometry, name)
        groups = tuple(replace(group, window=None) for group in config.groups)
        need = sum(map(config.most_blocks, groups))
        servers[name] = replace(config, groups=groups, blocks=max(config.blocks, need))
    return _with_sizes(trace, **servers)


def _equal_blocks(system: AnySystem, trace: Trace) -> Trace:
    """Both servers have blocks of one size."""
    del system
    sizes = trace.sizes(PairConfig)
    prefill, decode = sizes.prefill, sizes.decode
    need = sum(map(decode.most_blocks, prefill.groups))
    try:
        same = replace(decode, groups=prefill.groups, blocks=max(decode.blocks, need))
    except GeometryError:  # a state without caching has a block as long as the longest text
        return trace
    return _with_sizes(trace, decode=same)


def _room_for_servers(system: AnySystem, trace: Trace) -> Trace:
    """Texts may be as long as the model takes, all of them at once, on both servers."""
    del system
    texts = sum(isinstance(command, Prefill | Serve) for command in trace.commands)
    servers = {}
    for name in _SERVERS:
        config = getattr(trace.geometry, name)
        whole = (replace(group, window=None) for group in config.groups)
        most = (texts + 1) * sum(map(config.most_blocks, whole))
        servers[name] = replace(config, blocks=max(config.blocks, most))
    return _with_sizes(trace, **servers)


def _no_failure(system: AnySystem, trace: Trace) -> Trace:
    """No load fails, on its way or before."""
    without = _none_of((Fail, Lose), system, trace)
    commands = (replace(c, fails=False) if isinstance(c, Shake) else c for c in without.commands)
    return replace(without, commands=tuple(commands))


def _no_shared_load(system: AnySystem, trace: Trace) -> Trace:
    """Where loads are done within a step, no prompt begins as another."""
    del system
    sizes = trace.sizes(EngineConfig)
    if not (sizes.peer and sizes.sync_loads):
        return trace
    letters = cycle(ascii_lowercase)
    made: list[Any] = []
    for command in trace.commands:
        if isinstance(command, Add):
            own = next(letters)
            pieces = (p if is_image(p.text) else replace(p, text=own) for p in command.prompt)
            command = replace(command, prompt=tuple(pieces))
        made.append(command)
    return replace(trace, commands=tuple(made))


def _of_kinds(**less: _Less) -> _Less:
    """A need that traces of some kinds have, by the name of the kind."""

    def of_kind(system: AnySystem, trace: Trace) -> Trace:
        without = less.get(kind_of_config(trace.geometry).name)
        return trace if without is None else without(system, trace)

    return of_kind


# What a trace may need, and the trace without it. Which turns are rejected depends on the ends before.
_NEEDS: dict[str, _Less] = {
    "a retract": partial(_none_of, Retract),
    "an abort": partial(_none_of, (Abort, Cancel)),
    "a finish": partial(_none_of, Finish),
    "a close": partial(_none_of, Close),
    "a verify round": partial(_none_of, (SpecDecode, Launch, Settle)),
    "a received prompt": _nothing_received,
    "a next turn": partial(_none_of, More),
    "a reset of the cache": partial(_none_of, (ResetCache, Forget, NewWeights)),
    "drafts": _of_kinds(
        blocks=_no_drafts,
        pairs=_no_drafts_of_servers,
    ),
    "a window": _of_kinds(
        blocks=_no_window_of_groups, tiers=_no_window_of_a_tree, pairs=_no_window_of_servers
    ),
    "blocks of two sizes": _of_kinds(pairs=_equal_blocks),
    "a cached prefix": _of_kinds(pairs=_uncached_servers),
    "push": _of_kinds(pairs=partial(_sized, push=False)),
    "overlap": _of_kinds(
        tiers=partial(_sized, overlap=False),
        pairs=partial(_sized, prefill_overlap=False, decode_overlap=False),
    ),
    "pairs of tokens": _of_kinds(tiers=partial(_sized, bigram=False)),
    "an answer for two": _of_kinds(pairs=partial(_sized, shared=False)),
    "a client that is late": _of_kinds(pairs=partial(_sized, late=False)),
    "a dropped answer": partial(_none_of, Drop),
    "hits within a block": _of_kinds(blocks=partial(_sized, match=0)),
    "checkpoints within a chunk": _of_kinds(blocks=partial(_sized, checkpoints=0)),
    "chunks of several blocks": _of_kinds(blocks=partial(_sized, chunk_blocks=1)),
    "chunks that go on": _of_kinds(tiers=_no_chunks),
    "a prompt in chunks": _of_kinds(blocks=_whole_prompts, pairs=_whole_prompts_of_servers),
    "a text near max_model_len": _of_kinds(
        blocks=_no_text_near_the_limit, pairs=_no_text_near_the_limit_of_servers
    ),
    "a small host": _of_kinds(tiers=_host_room),
    "a storage": _of_kinds(blocks=_no_storage, tiers=lambda *of: _no_storage(*of, Abort)),
    "recurrent state": _of_kinds(
        rows=partial(_no_state, tracks=False),
        tiers=partial(_no_state, host_states=0),
        pairs=_no_state_of_servers,
    ),
    "a setting": _of_kinds(rows=partial(_sized, settings=())),
    "a reset of host memory": partial(_none_of, (ResetConnector, NewWeights)),
    "a failed load": _no_failure,
    "a load for two": _of_kinds(blocks=_no_shared_load),
    "adapters": _no_adapters,
    "salts": _no_salts,
    "an adapter loaded again": partial(_none_of, LoadAdapter),
    "new weights": partial(_none_of, NewWeights),
    "priorities": _of_kinds(
        blocks=partial(_sized, priority=False), pairs=partial(_of_servers, priority=False)
    ),
    "a limit of a prefill": _of_kinds(
        blocks=partial(_sized, long_prefill=0), pairs=partial(_of_servers, long_prefill=0)
    ),
    "images": _no_images,
    "whole images": _of_kinds(blocks=partial(_sized, whole_images=False)),
    "an encoder cache that runs full": _of_kinds(blocks=_room_for_images),
    "a text longer than the model": _no_longer_text,
    "pools that run full": _of_kinds(
        rows=_room_for_rows, blocks=_room_for_texts, pairs=_room_for_servers
    ),
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
    """Return the needs of a trace of a clause that has no superfluous command."""

    def needed(name: str) -> bool:
        less = avoided(system, smallest, (name,))
        return less != smallest and clause not in (violated(system, less, clause) or ())

    return tuple(filter(needed, among))


def traits(system: AnySystem, trace: Trace) -> set[str]:
    """Return the needs that a trace may have, needed or not, without a rejected turn, which shows when it
    runs."""
    names = (name for name in _NEEDS if name != REJECTED)
    return {name for name in names if not lacks(system, (name,), trace)}


def to_avoid(known: Sequence[Needs]) -> list[Needs]:
    """Return sets of needs to avoid, the smallest first, so that one need of each known trace is missing."""
    each = dict.fromkeys(tuple(need for need in _NEEDS if need in one) for one in product(*known))
    by_size = sorted(each, key=len)
    return [
        one for at, one in enumerate(by_size) if not any({*less} < {*one} for less in by_size[:at])
    ]
