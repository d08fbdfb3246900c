"""Commands to a pair: the next one of its clients, its two loops, its network and its clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from impl.adapter import Capabilities
from reference.blocks.config import EngineConfig, LayerGroup
from reference.commands import Piece, Prompt
from reference.standstill_detector import FOR_EVER
from reference.pairs.pair_record import PairRecord
from reference.pairs.commands import (
    Advance, Cancel, CompleteHost, CopyHost, Deliver, Drop, Forget, Forward, Land, Lose, Move, PairCommand,
    Prefill, ResetHost, Serve, Shake, Write,
)  # fmt: skip
from reference.pairs.config import DECODE, HEARTBEAT, LEASE, PREFILL, SERVERS, PairConfig
from reference.pairs.facts import PairFacts
from reference.tiers.commands import Tick
from impl.choices import Choices, by_weight, once_in, pick, weight_if
from stateful_tests.generate.engine_profile import draw_engine_config


@dataclass(frozen=True, slots=True)
class PairProfile:
    """The profile of one run (swarm testing). A rate of n is "once in n"; 0 stands for never."""

    #: requests of a server at a time
    crowd: int
    #: texts with which prompts begin
    texts: str
    #: weight of requests that one server serves alone
    own: int
    #: rates of aborts, dropped answers, cache resets and failed transfers
    cancel: int
    drop: int
    forget: int
    fails: int
    #: the slowness of the network, which divides its weight
    slow: int
    #: weight of the clock
    tick: int
    #: drafts that the model accepts, as in EngineProfile
    accept: int
    #: rate of stop tokens
    stop: int
    #: prompts of half of what fits
    long: bool
    #: the window of the last token of a prompt begins within a block, where there is a window
    inside: bool


def draw_pair_profile(source: Choices, _: Capabilities) -> PairProfile:
    """Draw a profile for one run."""
    return PairProfile(
        crowd=1 + source.upto(4), texts="abc"[: 1 + source.upto(2)], own=pick(source, (0, 0, 1, 2)),
        cancel=pick(source, (0, 0, 8, 30)), drop=pick(source, (0, 0, 6, 20)),
        forget=pick(source, (0, 0, 0, 40)), fails=pick(source, (0, 0, 0, 6)),
        slow=pick(source, (1, 2, 6, 12)), tick=pick(source, (0, 1, 2, 12)),
        accept=source.upto(2), stop=pick(source, (0, 0, 8)), long=once_in(source, 3),
        inside=not once_in(source, 4),
    )  # fmt: skip


def draw_pair_config(source: Choices, like: PairConfig) -> PairConfig:
    """Draw sizes that no preset has, with the groups of layers that `like` has."""
    if like.recurrent:
        return _draw_with_states(source, like)
    size = pick(source, (1, 2, 3, 4))
    windows = [group.window and 2 + source.upto(3 * size) for group in like.prefill.groups]
    larger = size * (1 if like.push or like.first_token else pick(source, (1, 1, 1, 2)))
    drafter = like.prefill.draft_group
    prefill = _with_block_size(draw_engine_config(source, like.prefill), windows, size, drafter)
    decode = _with_block_size(draw_engine_config(source, like.decode), windows, larger, drafter)
    return replace(
        like, prefill=prefill, decode=replace(decode, peer=True),
        prefill_overlap=once_in(source, 2), decode_overlap=once_in(source, 2),
    )  # fmt: skip


def _draw_with_states(source: Choices, like: PairConfig) -> PairConfig:
    """Draw sizes of a pair with recurrent layers: both servers publish and keep the same, and have room
    of their own. D may have blocks of twice as many tokens, or go without prefix caching: a request
    then has one state, whatever its length."""
    prefill, decode = (draw_engine_config(source, server) for server in (like.prefill, like.decode))
    groups = tuple(
        replace(group, window=group.window and max(2, group.window)) for group in prefill.groups
    )
    larger = 1 if like.push else pick(source, (1, 1, 1, 2))
    caches = like.decode.caching
    of_decode = []
    for group in groups:
        size = group.block_size * larger
        if group.state and not caches:
            size = prefill.max_model_len
        of_decode.append(replace(group, block_size=size))
    own_config = replace(
        prefill, groups=tuple(of_decode), priority=decode.priority, long_prefill=decode.long_prefill,
        max_seqs=decode.max_seqs, caching=caches, fail_requests=False,
        max_batched_tokens=max(decode.max_batched_tokens, decode.max_seqs * (1 + prefill.drafts)),
        blocks=(1 << 10) + decode.blocks, match=prefill.match * caches,
        retention=prefill.retention * caches, checkpoints=prefill.checkpoints * caches,
    )  # fmt: skip
    own_config = _with_groups(own_config, own_config.groups)
    return replace(
        like, prefill=_with_groups(prefill, groups),
        decode=replace(own_config, peer=True, fail_requests=like.decode.fail_requests),
        prefill_overlap=once_in(source, 2), decode_overlap=once_in(source, 2),
    )  # fmt: skip


def _with_block_size(
    config: EngineConfig, windows: list[int | None], size: int, drafter: int | None
) -> EngineConfig:
    """Return the engine with these windows and blocks of one size, as a connector needs them.

    drafter: the group with the drafter's layers.
    """
    groups = (LayerGroup(size, window, drafter=index == drafter) for index, window in enumerate(windows))
    return _with_groups(config, tuple(groups))


def _with_groups(config: EngineConfig, groups: tuple[LayerGroup, ...]) -> EngineConfig:
    """Return the engine with these groups, and blocks for a request of the longest text at least.
    Rounds of drafts are not cut: checks of one server cover that."""
    if config.drafts:
        config = replace(config, long_prefill=0)
    most = replace(config, groups=groups, blocks=1 << 10)
    need = sum(map(most.most_blocks, groups))
    return replace(most, blocks=need + config.blocks % (need + 1))


def propose_pair_command(
    record: PairRecord, facts: PairFacts, source: Choices, profile: PairProfile
) -> PairCommand:
    """Draw the next command."""
    if (rare := _draw_rare_command(record, facts, source, profile)) is not None:
        return rare
    chosen = by_weight(source, _command_weights(record, facts, profile))
    assert chosen is not None  # a loop may always go on
    kind, server = chosen
    if kind is Prefill:
        prompt, own_tokens = _draw_prompt(record, source, profile)
        return Prefill(_fresh_name(record), own_tokens, prompt, _draw_priority(record, PREFILL, source))
    if kind is Forward:
        answer = pick(source, _forwardable_answers(record, facts, profile))
        outputs = 1 + source.upto(3)
        return Forward(_fresh_name(record), answer, outputs, _draw_priority(record, DECODE, source))
    if kind is Serve:
        prompt, own_tokens = _draw_prompt(record, source, profile)
        outputs = 1 + source.upto(3)
        return Serve(
            server, _fresh_name(record), outputs, own_tokens, prompt, _draw_priority(record, server, source)
        )
    if kind is Advance:
        return _draw_advance(record, facts, server, source, profile)
    if kind is Shake:
        return Shake(server, bool(profile.fails) and once_in(source, profile.fails))
    if kind is Land:
        jobs = facts.under_way
        return Land(pick(source, (0, 0, source.upto(len(jobs) - 1))))
    if kind is Move:
        return Move(source.upto(sum(not job.copied for job in facts.under_way) - 1))
    if kind is Tick:
        late = record.config.late
        return Tick(pick(source, (3, 6, 12, LEASE + 1) if late else (1, 3, HEARTBEAT)))
    if kind in (CopyHost, CompleteHost):
        return _draw_host_transfer(facts, server, kind, source)
    made: PairCommand = kind(server)
    return made


def _draw_host_transfer(
    facts: PairFacts, server: str, kind: type, source: Choices
) -> CopyHost | CompleteHost:
    """Draw the direction in which the oldest transfer of a server and its host moves its KV, or ends."""
    waiting = _waiting_copies if kind is CopyHost else _waiting_ends
    made: CopyHost | CompleteHost = kind(server, pick(source, sorted(waiting(facts, server))))
    return made


def _waiting_copies(facts: PairFacts, server: str) -> set[bool]:
    """Return the directions in which a transfer of a server and its host has not moved its KV."""
    jobs = facts.of(server).transfers
    return {job.load for job in jobs if job.submitted and not job.copied}


def _waiting_ends(facts: PairFacts, server: str) -> set[bool]:
    """Return the directions in which a transfer of a server and its host has not completed."""
    jobs = facts.of(server).transfers
    return {job.load for job in jobs if job.submitted and not job.completed}


def _draw_rare_command(
    record: PairRecord, facts: PairFacts, source: Choices, profile: PairProfile
) -> PairCommand | None:
    """Draw an abort, a dropped answer, a reset of a cache or a failed transfer; None in most cases."""
    if profile.cancel and once_in(source, profile.cancel):
        server = pick(source, SERVERS)
        if requests := list(facts.of(server).requests):
            return Cancel(server, pick(source, requests))
    if profile.forget and once_in(source, profile.forget):
        return Forget(pick(source, SERVERS), once_in(source, 2))
    with_host = record.config.with_host
    if with_host and profile.forget and once_in(source, profile.forget):
        return ResetHost(pick(source, with_host))
    if profile.drop and once_in(source, profile.drop):
        if waiting := record.unforwarded(facts):
            return Drop(pick(source, waiting))
    # A server that takes the first token over may end with the first transfer that fails (LMDeploy).
    rarely = 8 if record.config.first_token else 2
    if profile.fails and facts.under_way and once_in(source, rarely * profile.fails):
        return Lose(source.upto(len(facts.under_way) - 1))
    return None


def _command_weights(
    record: PairRecord, facts: PairFacts, profile: PairProfile
) -> dict[tuple[type, str], int]:
    """Return the weight of each kind of command and server."""
    network = 6 // profile.slow + weight_if(profile.slow < 12, 1)
    # A host is slow in other runs than the network.
    host = 1 + 6 // (1 + profile.slow * profile.crowd % 7)
    uncopied = any(not job.copied for job in facts.under_way)
    weights: dict[tuple[type, str], int] = {
        (Forward, ""): weight_if(_forwardable_answers(record, facts, profile), 10),
        (Land, ""): weight_if(facts.under_way, network),
        (Move, ""): weight_if(uncopied, 2),
        (Tick, ""): profile.tick,
    }
    for server in SERVERS:
        server_facts = facts.of(server)
        room = len(server_facts.requests) < profile.crowd and not server_facts.in_step
        weights[Advance, server] = weight_if(server not in facts.idle, 10 if server == DECODE else 8)
        weights[Serve, server] = weight_if(room, profile.own)
        weights[Shake, server] = weight_if(server in facts.handshakes, network + 1)
        has_mail = any(message.to == server for message in facts.messages)
        weights[Deliver, server] = weight_if(has_mail, network + 1)
        weights[Write, server] = weight_if(record.config.push, 6)
        if record.config.of(server).host_chunks:
            weights[CopyHost, server] = weight_if(_waiting_copies(facts, server), 2)
            weights[CompleteHost, server] = weight_if(_waiting_ends(facts, server), host)
    admits = len(facts.prefill.requests) < profile.crowd and not facts.prefill.in_step
    weights[Prefill, ""] = weight_if(admits, 4)
    if not sum(weights.values()):
        weights[Advance, DECODE] = 1
    return weights


def _forwardable_answers(record: PairRecord, facts: PairFacts, profile: PairProfile) -> list[str]:
    """Return the requests of P whose answer the proxy may hand to D now."""
    if facts.decode.in_step or len(facts.decode.requests) >= profile.crowd + 1:
        return []
    if record.config.push:
        asking_requests = [name for name in facts.prefill.requests if name in record.asked]
        return [name for name in asking_requests if not facts.readers_of(name)]
    known = [promise.request for promise in facts.promises if promise.request not in record.dropped]
    most = 2 if record.config.shared else 1
    return [name for name in known if len(facts.readers_of(name)) < most]


def _draw_advance(
    record: PairRecord, facts: PairFacts, server: str, source: Choices, profile: PairProfile
) -> Advance:
    config = record.config.of(server)
    names = list(facts.of(server).requests)
    accept: tuple[int, ...] = ()
    if config.drafts and profile.accept:
        drawn = tuple(source.upto(config.drafts) for _ in names)
        accept = (config.drafts,) if profile.accept == 2 else drawn
    stop = tuple(name for name in names if profile.stop and once_in(source, profile.stop))
    return Advance(server, accept, stop)


def _draw_priority(record: PairRecord, server: str, source: Choices) -> int:
    return source.upto(2) if record.config.of(server).priority else 0


def _fresh_name(record: PairRecord) -> str:
    return f"r{len(record.prompts) + 1}"


def _draw_prompt(record: PairRecord, source: Choices, profile: PairProfile) -> tuple[Prompt, int]:
    """Draw pieces of shared texts and a number of unique tokens."""
    config = record.config
    block = max(group.block_size for group in config.prefill.groups)
    room = config.max_prompt - 2
    length = 1 + source.upto(max(0, min(room, room if profile.long else 4 * block) - 1))
    while profile.inside and length > 1 and not _windows_start_within_blocks(config, length):
        length -= 1
    own_tokens = source.upto(min(length, 3)) if once_in(source, 2) else 0
    shared = length - own_tokens
    if not shared:
        return (), own_tokens
    return (Piece(pick(source, profile.texts), shared),), own_tokens


def _windows_start_within_blocks(config: PairConfig, length: int) -> bool:
    """Return whether every window of the last token of a prompt begins within a block of each server,
    or at the start of the text."""
    starts = [
        (length - group.window, group.block_size)
        for engine in (config.prefill, config.decode)
        for group in engine.groups
        if group.window is not None and length > group.window
    ]
    return all((start + 1) % size for start, size in starts)


def pair_finale(record: PairRecord, facts: PairFacts) -> PairCommand | None:
    """Return the next command that ends a run: no new request comes, the network finishes its work,
    then the clock passes every timeout."""
    if waiting := record.unforwarded(facts):
        return Drop(waiting[0])
    if facts.handshakes:
        return Shake(facts.handshakes[0])
    if facts.under_way:
        return Land()
    if facts.messages:
        return Deliver(facts.messages[0].to)
    for name in record.config.with_host:
        for load in sorted(_waiting_ends(facts, name)):
            return CompleteHost(name, load)
    awake = [name for name in SERVERS if name not in facts.idle]
    if not awake:
        return None
    outcomes = record.done
    if _stands_still(record, facts) and all(record.loops[name] for name in awake):
        return Tick(LEASE + 1 if record.config.late else HEARTBEAT)
    if record.config.push:
        for name in SERVERS:
            # The thread of a server whose loop rests has as many turns as that of the other one.
            turns = outcomes[Advance, name]
            if name not in awake:
                turns = max(outcomes[Write, server] for server in awake)
            if outcomes[Write, name] <= turns:
                return Write(name)
    return Advance(min(awake, key=lambda name: outcomes[Advance, name]))


def _stands_still(record: PairRecord, facts: PairFacts) -> bool:
    """Return whether only a timeout can bring a request further."""
    still = record.progress.in_time
    waits = any(facts.of(name).in_step or facts.of(name).results_due for name in SERVERS)
    return not waits and (record.is_quiet(facts) or (still is not None and still.times >= FOR_EVER))
