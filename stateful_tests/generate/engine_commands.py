"""Commands to an engine that schedules by itself: the next one of clients and model, and sizes of its own.

A run is a loop of Schedule and Update with clients in between, as an engine core is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from impl.adapter import Capabilities
from reference.blocks.commands import (
    Add, End, EngineCommand, Fail, LoadAdapter, More, NewWeights, ResetConnector, Schedule, Update,
)  # fmt: skip
from reference.tiers.commands import ALL, Backup, Complete, Copy, Fetch, ResetCache
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import BlockFacts, StorageJob
from reference.blocks.request_texts import Bearer, RequestTexts
from reference.commands import Abort, Piece, Prompt, prompt_len
from reference.token_ids import is_image
from impl.choices import Choices, once_in, pick

NAMES = ("r1", "r2", "r3", "r4", "r5")
DRAFTS = (16, 16, 1, 0)
NO_NAME = ("",)
# The names of an adapter and of a salt may be the same.
SOURCE_NAMES = (NO_NAME, ("", "a"), ("a", "b"), ("", "a", "b"))


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The profile of one run (swarm testing). Rates are "once in so many"; 0 stands for never."""

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


def fit_config(config: EngineConfig, profile: EngineProfile) -> EngineConfig:
    """Return the engine for a run. Where the profile says `alike` or `whole`, it has as few blocks as
    possible."""
    if not (profile.alike or profile.whole):
        return config
    budget = max(config.max_batched_tokens, config.max_model_len * profile.whole)
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


def _with_encoder(source: Choices, made: EngineConfig) -> EngineConfig:
    """Draw the sizes for images: a cache of one to three images, and a step that may compute one or
    two."""
    image = 1 + source.upto(max(1, made.max_model_len // 2 - 1))
    whole = once_in(source, 3)
    return replace(
        made,
        image=image,
        encoder_cache=image + source.upto(2 * image),
        encoder_budget=image + source.upto(image),
        whole_images=whole,
        max_batched_tokens=max(made.max_batched_tokens, image * whole),
    )


def _with_states(source: Choices, made: EngineConfig, like: EngineConfig) -> EngineConfig:
    """Draw the sizes for prefix caching of recurrent groups; without caching a request has one state."""
    if not like.caching:
        sizes = [made.max_model_len if group.state else group.block_size for group in made.groups]
        groups = (replace(group, block_size=size) for group, size in zip(made.groups, sizes))
        return replace(made, groups=tuple(groups))
    size = made.groups[0].block_size
    parts = [part for part in (1, 2, 4) if part < size and size % part == 0]
    match = pick(source, parts) if parts and like.match else 0
    return replace(
        made,
        match=match,
        retention=pick(source, (0, 0, -1, size, 2 * size)),
        checkpoints=like.checkpoints and (match or size),
    )


def propose_engine_command(
    texts: RequestTexts, facts: BlockFacts, source: Choices, profile: EngineProfile
) -> EngineCommand:
    """Draw the next command."""
    bearers = [texts.bearers[name] for name in profile.names if name in texts.bearers]
    bearers += [bearer for name, bearer in texts.bearers.items() if name not in profile.names]  # children
    if facts.unheard:
        return _draw_schedule(texts, bearers, source, profile)
    client = once_in(source, 3 if profile.busy else 6) or not bearers
    if profile.abort and bearers and once_in(source, profile.abort):
        return Abort(pick(source, bearers).name)
    fails = profile.fails if _loads_may_fail(texts, facts) else 0
    if facts.host is not None and (moved := _transfer_command(facts, source, profile, fails)) is not None:
        return moved
    if facts.in_step:
        return Update(pick(source, DRAFTS))
    if profile.reset and once_in(source, profile.reset):
        return ResetCache(once_in(source, 2))
    if (replaced := _weight_update(texts, facts, source, profile)) is not None:
        return replaced
    # Clients wait until the device is idle, so that new weights can come.
    drains = bool(profile.weights and not bearers and facts.steps_in_flight) and once_in(source, 2)
    if not drains and (sent := _client_command(texts, bearers, client, source, profile)) is not None:
        return sent
    if facts.results_due:
        return Update(pick(source, DRAFTS))
    if texts.config.peer and texts.config.sync_loads and fails and once_in(source, 2 * fails):
        return Fail(source.upto(2))
    return _draw_schedule(texts, bearers, source, profile)


def _loads_may_fail(texts: RequestTexts, facts: BlockFacts) -> bool:
    """Return whether a load may find less than it asks for: from a peer, or from a store without host memory
    in front of it. Host memory has all that is loaded from it."""
    if facts.host is None or texts.config.storage:
        return False
    return texts.config.peer or bool(facts.host.stored)


def _weight_update(
    texts: RequestTexts, facts: BlockFacts, source: Choices, profile: EngineProfile
) -> EngineCommand | None:
    """Draw new weights of the model or of an adapter, where they can be loaded now; None otherwise."""
    seldom = profile.weights if texts.bearers else 4
    if profile.weights and not facts.steps_in_flight and once_in(source, seldom):
        return NewWeights()
    if not profile.loads or not once_in(source, profile.loads):
        return None
    used = {bearer.source.adapter for bearer in texts.bearers.values()}
    unused = [name for name in profile.adapters if name and name not in used]
    if not unused:
        return None
    return LoadAdapter(pick(source, unused))


def _client_command(
    texts: RequestTexts, bearers: list[Bearer], client: bool, source: Choices, profile: EngineProfile
) -> EngineCommand | None:
    """Draw what a client sends now, if it is a client's turn or no request can run; None otherwise."""
    idle = [bearer for bearer in bearers if bearer.idle]
    sessions = [b for b in bearers if b.resumable and None not in b.turns and len(b.turns) < 2]
    if idle and (client or len(idle) == len(bearers)):
        return _continue_session(texts, pick(source, idle), source, profile)
    if client and sessions and once_in(source, 4):
        return _continue_session(texts, pick(source, sessions), source, profile)
    # No client uses a name again while children of its last request run.
    parents = {name.rpartition(".")[0] for name in texts.bearers}
    absent = [name for name in profile.names if name not in texts.bearers.keys() | parents]
    if not client or not absent:
        return None
    return _draw_add(texts, pick(source, absent), source, profile)


def _transfer_command(
    facts: BlockFacts, source: Choices, profile: EngineProfile, fails: int
) -> EngineCommand | None:
    """Draw the next action of the copy engine or the storage, or a reset of host memory; None
    otherwise.

    fails: rate of failed loads.
    """
    moving = [job for job in facts.transfers if job.submitted and not job.completed]
    if moving and once_in(source, profile.slow):
        job = pick(source, moving)
        if fails and job.load and not job.copied and once_in(source, fails):
            return Fail(source.upto(len(job.parts)))
        return Complete(job.load) if job.copied or once_in(source, 2) else Copy(job.load)
    if (storing := _pending_storage_jobs(facts)) and once_in(source, profile.slow):
        due = pick(source, storing)
        fails = bool(profile.fails) and once_in(source, profile.fails)
        chunks = source.upto(len(due.chunks) - 1) if fails else ALL
        return Fetch(chunks) if due.load else Backup(chunks)
    if not facts.in_step and profile.forget and once_in(source, profile.forget):
        return ResetConnector()
    return None


def _pending_storage_jobs(facts: BlockFacts) -> list[StorageJob]:
    """Return the jobs that threads of the storage still have to do."""
    if facts.host is None:
        return []
    return [job for job in facts.host.jobs if not job.done]


def _draw_schedule(
    texts: RequestTexts, bearers: list[Bearer], source: Choices, profile: EngineProfile
) -> Schedule:
    most = texts.config.drafts
    accept: tuple[int, ...] = ()
    if most and profile.accept:
        accept = (most,) if profile.accept == 2 else tuple(source.upto(most) for _ in bearers)
    stop = tuple(b.name for b in bearers if profile.stop and once_in(source, profile.stop))
    return Schedule(accept, stop)


def _draw_prompt(
    texts: RequestTexts, room: int, source: Choices, profile: EngineProfile
) -> tuple[Prompt, int]:
    """Draw pieces of shared texts and images, and a number of unique tokens, in `room` tokens."""
    prompt, own = _draw_text(texts, room, source, profile)
    if not texts.config.encodes:
        return prompt, own
    for _ in range(source.upto(2)):
        prompt = _with_image(texts.config, prompt, room - own, source)
    return prompt, own


def _with_image(config: EngineConfig, prompt: Prompt, room: int, source: Choices) -> Prompt:
    """Return the prompt with another image in it, if it fits into `room` tokens. Every use of an image
    has the same size."""
    sizes = {"A": config.image, "B": max(1, config.image // 2), "C": 1}
    name = pick(source, tuple(sizes))
    image = Piece(name, sizes[name])
    length = prompt_len(prompt)
    position = pick(source, (0, length, source.upto(length)))
    if length + image.tokens > room:
        return prompt
    head, tail = _split_prompt(prompt, position)
    return (*head, image, *tail)


def _split_prompt(prompt: Prompt, position: int) -> tuple[Prompt, Prompt]:
    """Split a prompt at a position; an image there goes to the second part as a whole."""
    head: list[Piece] = []
    for number, piece in enumerate(prompt):
        if position < piece.tokens:
            if position == 0 or is_image(piece.text):
                return tuple(head), prompt[number:]
            parts = Piece(piece.text, position), Piece(piece.text, piece.tokens - position)
            return (*head, parts[0]), (parts[1], *prompt[number + 1 :])
        head.append(piece)
        position -= piece.tokens
    return tuple(head), ()


def _draw_text(
    texts: RequestTexts, room: int, source: Choices, profile: EngineProfile
) -> tuple[Prompt, int]:
    """Draw pieces of shared texts, and a number of unique tokens."""
    shortest = texts.config.groups[0].block_size
    most = max(1, min(room, texts.config.max_model_len // 2 if profile.long else 2 * shortest + 2))
    length = 1 + source.upto(most - 1)
    if profile.alike:
        return (Piece(profile.texts[0], min(profile.alike, room)),), 0
    if profile.whole and once_in(source, 2):
        return (Piece(pick(source, profile.texts), room),), 0
    own = source.upto(min(length, 2)) if once_in(source, 2) else 0
    shared = length - own
    if not shared:
        return (), own
    cut = source.upto(shared) if once_in(source, 4) else 0
    pieces = ((pick(source, profile.texts), cut), (pick(source, profile.texts), shared - cut))
    return tuple(Piece(text, tokens) for text, tokens in pieces if tokens), own


def _draw_max_tokens(source: Choices, room: int) -> int:
    return 1 + source.upto(max(0, min(room, 9) - 1))


def _draw_add(texts: RequestTexts, name: str, source: Choices, profile: EngineProfile) -> Add:
    """Draw a request: its prompt, priority, adapter, salt and children, with a part computed by a peer if
    there is one."""
    prompt, own = _draw_prompt(texts, texts.config.max_model_len - 1, source, profile)
    priority = source.upto(2) if texts.config.priority else 0
    resumable = bool(profile.sessions) and once_in(source, profile.sessions)
    length = sum(piece.tokens for piece in prompt) + own
    remote = source.upto(length) if texts.config.peer and once_in(source, 2) else 0
    outputs = _draw_max_tokens(source, texts.config.max_model_len)
    if profile.overlong and outputs == 1:  # no server ever has room for an output of it
        prompt = (Piece(profile.texts[0], texts.config.max_model_len),)
        own = 0
        remote = 0
    adapter = _name_among(profile.adapters, source)
    salt = _name_among(profile.salts, source)
    most = texts.config.children
    children = source.upto(most) if most and once_in(source, 2) else 0
    return Add(
        name,
        max_tokens=outputs,
        tokens=own,
        prompt=prompt,
        priority=priority,
        resumable=resumable,
        remote=remote,
        adapter=adapter,
        salt=salt,
        children=children,
    )


def _name_among(names: tuple[str, ...], source: Choices) -> str:
    return pick(source, names) if len(names) > 1 else names[0]


def _continue_session(
    texts: RequestTexts, bearer: Bearer, source: Choices, profile: EngineProfile
) -> EngineCommand:
    """Draw another turn of a session, or its end. Turns that were sent and not started count towards
    its length."""
    sent = sum(len(turn[0]) + turn[1] for turn in bearer.turns if turn is not None)
    outputs = 0 if bearer.idle else bearer.max_tokens - bearer.outputs
    room = texts.config.max_model_len - len(bearer.text) - sent - outputs - 1
    if once_in(source, 4) or (room < 2 and not profile.overlong):
        return End(bearer.name)
    prompt, own = _draw_prompt(texts, max(1, room), source, profile)
    return More(bearer.name, _draw_max_tokens(source, room), own, prompt)


def engine_finale(texts: RequestTexts, facts: BlockFacts) -> EngineCommand | None:
    """Return the next command that ends a run, until no request is left."""
    if facts.in_step:
        return Update()
    if facts.unheard:
        return Schedule()
    moving = [job for job in facts.transfers if job.submitted and not job.completed]
    if moving:
        return Complete(moving[0].load)
    if storing := _pending_storage_jobs(facts):
        return Fetch() if storing[0].load else Backup()
    for bearer in texts.bearers.values():
        if bearer.resumable and None not in bearer.turns:
            return End(bearer.name)
    if facts.results_due:
        return Update()
    moves = facts.kv_moves and not texts.config.lazy  # an idle engine may store lazily for ever
    if texts.bearers or facts.steps_in_flight or moves:
        return Schedule()
    return None
