"""The profile of a run of an engine that schedules by itself, and sizes for it that no preset has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from impl.adapter import Capabilities
from impl.choices import Choices, once_in, pick
from reference.blocks.config import EngineConfig, LayerGroup

NAMES = ("r1", "r2", "r3", "r4", "r5")
NO_NAME = ("",)
# The names of an adapter and of a salt may be the same.
SOURCE_NAMES = (NO_NAME, ("", "a"), ("a", "b"), ("", "a", "b"))


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The profile of one run (swarm testing). A rate of n is "once in n"; 0 stands for never."""

    #: requests at a time
    names: tuple[str, ...]
    #: texts with which prompts begin
    texts: str
    #: rate of sessions among added requests
    sessions: int
    #: rates of aborts, resets of the prefix cache and stop tokens
    abort: int
    reset: int
    stop: int
    #: drafts that the model accepts: 0 none, 1 a random number, 2 all
    accept: int
    #: prompts of half of max_model_len
    long: bool
    #: clients send more often
    busy: bool
    #: sessions may grow past max_model_len, and a prompt may leave no output
    overlong: bool
    #: slowness of transfers
    slow: int
    #: rate of resets of host memory
    forget: int
    #: rate of failed loads
    fails: int
    #: all clients send so many tokens of the same text, so that the model answers alike, in a pool of one
    #: longest request; texts differ at 0
    alike: int
    #: half of the prompts leave room for one output, and one step may compute all of it in a pool
    #: that has just the blocks for it
    whole: bool = False
    #: names for requests, "" for none
    adapters: tuple[str, ...] = NO_NAME
    salts: tuple[str, ...] = NO_NAME
    #: rate of adapter loads
    loads: int = 0
    #: rate of new model weights
    weights: int = 0


_COMMAND_OF_RATE = {
    "abort": "Abort",
    "reset": "ResetCache",
    "forget": "ResetConnector",
    "fails": "Fail",
    "loads": "LoadAdapter",
    "weights": "NewWeights",
}


def draw_engine_profile(source: Choices, can: Capabilities) -> EngineProfile:
    """Draw a profile for one run, within what the engine offers."""
    profile = EngineProfile(
        names=NAMES[: 1 + source.upto(len(NAMES) - 1)],
        texts="abc"[: 1 + source.upto(2)],
        sessions=pick(source, (0, 0, 1, 2, 4)),
        abort=pick(source, (0, 0, 12, 40)),
        reset=pick(source, (0, 0, 0, 10, 40)),
        stop=pick(source, (0, 4, 12)),
        accept=source.upto(2),
        long=once_in(source, 3),
        busy=once_in(source, 2),
        overlong=once_in(source, 8),
        slow=pick(source, (1, 2, 4, 12)),
        forget=pick(source, (0, 0, 0, 30)),
        fails=pick(source, (0, 2, 6)),
        alike=1 + source.upto(5) if once_in(source, 4) else 0,
        weights=pick(source, (0, 0, 0, 20)),
    )
    if once_in(source, 3):
        profile = replace(
            profile,
            adapters=pick(source, SOURCE_NAMES),
            salts=pick(source, SOURCE_NAMES),
            loads=pick(source, (0, 6, 12)),
        )
    if profile.alike:
        profile = replace(profile, names=NAMES, busy=True, stop=0)
    else:
        profile = replace(profile, whole=profile.long and profile.stop > 4)
    unoffered: dict[str, Any] = {
        rate: 0 for rate, command in _COMMAND_OF_RATE.items() if command not in can.commands
    }
    return replace(
        profile,
        sessions=profile.sessions if can.sessions else 0,
        adapters=profile.adapters if "adapter" in can.sources else NO_NAME,
        salts=profile.salts if "salt" in can.sources else NO_NAME,
        **unoffered,
    )


def copies_hits(config: EngineConfig) -> bool:
    """Return whether runs are to meet a hit within a block, whose copy takes a block besides, in a full
    pool. Not with drafts: faults of these need room for several requests."""
    return bool(config.match and not config.drafts)


def asks_whole_texts(config: EngineConfig, profile: EngineProfile) -> bool:
    """Return whether prompts are often as long as they may be: in runs that are `whole`, and with busy
    clients where hits are copied."""
    return profile.whole or (copies_hits(config) and profile.busy and not profile.alike)


def fit_config(config: EngineConfig, profile: EngineProfile) -> EngineConfig:
    """Return the engine for a run. Where the profile says `alike`, or asks for whole texts, it has as few
    blocks as possible."""
    whole = asks_whole_texts(config, profile)
    if not (profile.alike or whole):
        return config
    budget = max(config.max_batched_tokens, config.max_model_len * whole)
    # blocks that are enough for any budget, while it is another
    config = replace(config, max_batched_tokens=budget, blocks=1 << 10)
    return replace(config, blocks=sum(map(config.most_blocks, config.groups)))


def draw_engine_config(source: Choices, like: EngineConfig) -> EngineConfig:
    """Draw sizes that no preset has, with the kinds of groups that `like` has."""
    equal = len({g.block_size for g in like.groups}) == 1
    base = pick(source, (1, 2, 3, 4, 8, 16))
    sizes = [
        base if equal or index else base * pick(source, (1, 2, 4)) for index in range(len(like.groups))
    ]
    if like.recurrent and like.drafts:
        sizes = [max(base, 5)] * len(sizes)  # a round of drafts ends in the next block at most
    windows = [group.window and 1 + source.upto(3 * base) for group in like.groups]
    if like.simple:  # a hit in host memory has a block of a window, and one of a token needs none
        windows = [window and max(window, 2) for window in windows]
    states = [group.state for group in like.groups]
    drafters = [group.drafter for group in like.groups]
    rings = [group.ring for group in like.groups]
    groups = tuple(map(LayerGroup, sizes, windows, states, drafters, rings))
    first_group = source.upto(len(groups) - 1)
    groups = groups[first_group:] + groups[:first_group]  # an engine may number them in any order
    longest = max(4, base * (3 + source.upto(5)) + source.upto(base))
    seqs = 1 + source.upto(3)
    drafts = like.drafts and 1 + source.upto(3)
    tokens = 2 + source.upto(longest)
    if once_in(source, 2):
        # A long text, also one that was computed before, then runs in chunks of whole blocks.
        tokens = base * (1 + source.upto(2))
    budget = max(seqs * (1 + drafts), tokens, 0 if like.chunked else longest)
    config = replace(
        like, groups=groups, max_model_len=longest, max_batched_tokens=budget, max_seqs=seqs,
        drafts=drafts, blocks=1 << 10, priority=once_in(source, 3),
        long_prefill=pick(source, (0, 0, 2, 5, base)), match=0, checkpoints=0, retention=0,
        whole_images=False,
    )  # fmt: skip
    if like.recurrent:
        config = _with_states(source, config, like)
    if like.encodes:
        config = _with_encoder(source, config)
    need = sum(config.most_blocks(group) for group in config.groups)
    config = replace(config, blocks=need + source.upto(need))
    if like.swap:
        config = replace(config, swap=1 + source.upto(need))
    if not like.host_chunks:
        return config
    if like.simple:
        return replace(config, host_chunks=1 + source.upto(2 * need), lazy=once_in(source, 2))
    chunk = 1 if not equal else pick(source, (1, 1, 2, 3))
    return replace(
        config,
        host_chunks=1 + source.upto(2 * need),
        chunk_blocks=chunk,
        arc=once_in(source, 2),
        sync_loads=once_in(source, 3),
        prompt_only=once_in(source, 4),
    )


def _with_encoder(source: Choices, config: EngineConfig) -> EngineConfig:
    """Draw the sizes for images: a cache of one to three images, and a step that may compute one or
    two."""
    image = 1 + source.upto(max(1, config.max_model_len // 2 - 1))
    whole = once_in(source, 3)
    return replace(
        config,
        image=image,
        encoder_cache=image + source.upto(2 * image),
        encoder_budget=image + source.upto(image),
        whole_images=whole,
        max_batched_tokens=max(config.max_batched_tokens, image * whole),
    )


def _with_states(source: Choices, config: EngineConfig, like: EngineConfig) -> EngineConfig:
    """Draw the sizes for prefix caching of recurrent groups; without caching a request has one state."""
    if not like.caching:
        sizes = [config.max_model_len if group.state else group.block_size for group in config.groups]
        groups = (replace(group, block_size=size) for group, size in zip(config.groups, sizes))
        return replace(config, groups=tuple(groups))
    size = config.groups[0].block_size
    parts = [part for part in (1, 2, 4) if part < size and size % part == 0]
    match = pick(source, parts) if parts and like.match else 0
    return replace(
        config,
        match=match,
        retention=pick(source, (0, 0, -1, size, 2 * size)),
        checkpoints=like.checkpoints and (match or size),
    )
