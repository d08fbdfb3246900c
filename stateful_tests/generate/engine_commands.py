"""Commands to an engine that schedules by itself: the next one of clients and model.

A run is a loop of Schedule and Update with clients in between, as an engine core is.
"""

from __future__ import annotations


from reference.blocks.commands import (
    Add, End, EngineCommand, Fail, LoadAdapter, More, NewWeights, ResetConnector, Schedule, Update,
)  # fmt: skip
from reference.tiers.commands import ALL, Backup, Complete, Copy, Fetch, ResetCache
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts, StorageJob
from reference.blocks.request_texts import Bearer, RequestTexts
from reference.commands import Abort, Piece, Prompt, prompt_len
from reference.token_ids import is_image
from impl.choices import Choices, once_in, pick
from stateful_tests.generate.engine_profile import (
    EngineProfile, asks_whole_texts, copies_hits,
)  # fmt: skip

DRAFTS = (16, 16, 1, 0)  # the most that a drafter proposes for the next round


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
    prompt, own_tokens = _draw_text(texts, room, source, profile)
    if not texts.config.encodes:
        return prompt, own_tokens
    for _ in range(source.upto(2)):
        prompt = _with_image(texts.config, prompt, room - own_tokens, source)
    return prompt, own_tokens


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
    if asks_whole_texts(texts.config, profile) and once_in(source, 2):
        # A copied hit needs that one block alone where no more of its text is new.
        chosen = profile.texts[:1] if copies_hits(texts.config) else profile.texts
        return (Piece(pick(source, chosen), room),), 0
    own_tokens = source.upto(min(length, 2)) if once_in(source, 2) else 0
    shared = length - own_tokens
    if not shared:
        return (), own_tokens
    cut = source.upto(shared) if once_in(source, 4) else 0
    pieces = ((pick(source, profile.texts), cut), (pick(source, profile.texts), shared - cut))
    return tuple(Piece(text, tokens) for text, tokens in pieces if tokens), own_tokens


def _draw_max_tokens(source: Choices, room: int) -> int:
    return 1 + source.upto(max(0, min(room, 9) - 1))


def _draw_add(texts: RequestTexts, name: str, source: Choices, profile: EngineProfile) -> Add:
    """Draw a request: its prompt, priority, adapter, salt and children, with a part computed by a peer if
    there is one."""
    prompt, own_tokens = _draw_prompt(texts, texts.config.max_model_len - 1, source, profile)
    priority = source.upto(2) if texts.config.priority else 0
    resumable = bool(profile.sessions) and once_in(source, profile.sessions)
    length = sum(piece.tokens for piece in prompt) + own_tokens
    remote = source.upto(length) if texts.config.peer and once_in(source, 2) else 0
    outputs = _draw_max_tokens(source, texts.config.max_model_len)
    if profile.overlong and outputs == 1:  # no server ever has room for an output of it
        prompt = (Piece(profile.texts[0], texts.config.max_model_len),)
        own_tokens = 0
        remote = 0
    adapter = _name_among(profile.adapters, source)
    salt = _name_among(profile.salts, source)
    most = texts.config.children
    children = source.upto(most) if most and once_in(source, 2) else 0
    return Add(
        name,
        max_tokens=outputs,
        tokens=own_tokens,
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
    prompt, own_tokens = _draw_prompt(texts, max(1, room), source, profile)
    return More(bearer.name, _draw_max_tokens(source, room), own_tokens, prompt)


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
