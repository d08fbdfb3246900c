"""Commands to a tree with a host tier: the next one, and sizes of its own.

Moods matter: with even odds most commands are refused, and hardly anything is ever loaded.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from reference.commands import Abort, Evict, Insert, Match, Piece, Prompt, Unlock, prompt_len
from reference.tiers.commands import (
    ALL,
    Backup,
    Complete,
    Copy,
    Fetch,
    Load,
    Poll,
    Prefetch,
    Query,
    Reattach,
    ResetCache,
    Send,
    Tick,
    TierCommand,
)
from reference.tiers.config import POLICIES, TierConfig
from reference.tiers.facts import TierFacts, TierNode, TierOperation, TierTransfer
from reference.tiers.locks import TierUsers, path
from reference.token_ids import serial_of, shared_text
from impl.choices import Choices, by_weight, once_in, pick, weight_if
from stateful_tests.generate.decode_commands import (
    cut_prompt,
    decode_finale,
    draw_decode_config,
    propose_decode_command,
)
from stateful_tests.generate.prefill_commands import (
    draw_prefill_config,
    prefill_finale,
    propose_prefill_command,
)
from stateful_tests.generate.tier_profile import TierProfile


_WITHOUT_CLOCK = "best_effort", "wait_complete"  # drawn for each other


def draw_tier_config(source: Choices, like: TierConfig) -> TierConfig:
    """Draw sizes that no preset has, with or without a window as `like` has."""
    if like.decode:
        return draw_decode_config(source, like)
    if like.prefill:
        return draw_prefill_config(source, like)
    page = 1 if like.states and not like.tracks else pick(source, (1, 1, 2, 4, 16))
    full = 6 + source.upto(24 if page < 4 else 8)
    host = 3 + source.upto(36 if page < 4 else 12)
    window = None
    swa = host_swa = 0
    if like.window is not None:
        swa = 4 + source.upto(full)
        host_swa = 2 + source.upto(host)
        window = 1 + source.upto(3 * page + 3)
    return replace(
        like, page_size=page, window=window, full_pages=full,
        swa_pages=swa, host_pages=host, host_swa_pages=host_swa, width=page * max(4, min(full, 24)),
        policy=pick(source, POLICIES),
        storage=pick(source, _WITHOUT_CLOCK) if like.storage in _WITHOUT_CLOCK else like.storage,
        states=like.states and 3 + 8 * like.tracks + source.upto(6),
        host_states=like.states and 1 + source.upto(8),
    )  # fmt: skip


def propose_tier_command(
    users: TierUsers, facts: TierFacts, source: Choices, profile: TierProfile
) -> TierCommand:
    """Draw the next command."""
    if users.config.decode:
        return propose_decode_command(users, facts, source, profile)
    if users.config.prefill:
        return propose_prefill_command(users, facts, source, profile)
    holders = [name for name in profile.names if name in users.prompts]
    absent = [
        name for name in profile.names if name not in users.prompts and name not in users.waiting
    ]
    moving = [job for job in facts.transfers if job.sent and not job.completed]
    queued = [job for job in facts.transfers if not job.sent]
    done = any(job.completed for job in facts.transfers) or _has_queued_results(facts)
    polls = 2 if done else weight_if(queued, 1)
    idle = not holders and not users.waiting
    weights = {
        "match": weight_if(absent and facts.nodes, profile.match),
        "insert": weight_if(holders or absent, profile.insert * (1 if facts.nodes else 2)),
        "unlock": weight_if(holders, profile.unlock),
        "evict": weight_if(any(facts.evictable.values()), profile.evict),
        "send": weight_if(queued, profile.send),
        "poll": profile.poll * polls + once_in(source, 4),
        "copy": weight_if(any(not job.copied for job in moving), profile.copy),
        "complete": weight_if(moving, profile.complete),
        "reset": weight_if(idle and once_in(source, 4), profile.reset),
        "refused": weight_if(once_in(source, 40), 3),
    }
    if users.config.storage:
        asks = [op for op in facts.operations if not op.back]
        weights["poll"] += weight_if(_has_queued_results(facts), 10)
        reading = any(op.state in ("to read", "reads") for op in asks)
        # Admissions and aborts keep their share beside the commands that bring pages back. A text in the tree
        # is not prefetched, and an admitted request gives up the pages under way.
        early = 1 + weight_if(reading, profile.cycle // 20)
        weights |= {
            "prefetch": weight_if(absent and users.seen, profile.prefetch * (1 if facts.nodes else 6)),
            "thread": weight_if(_runnable_threads(facts), profile.threads * (3 if asks else 1)),
            "admit": weight_if(users.waiting, profile.match * early) // (8 if asks else 1),
            "abort": weight_if(users.waiting, profile.abort * early),
            "forget": weight_if(idle and not facts.in_flight, profile.prefetch),
        }
        if users.waits.ends_in_time and idle and not facts.transfers:
            weights["reattach"] = 4 * profile.match if asks else 1
        cycle = profile.cycle
        if users.waits.ends_in_time and asks and users.waiting:
            cycle //= 4
            weights |= _weights_of_slow_storage(users, facts, profile)
        weights[_next_toward_storage_hit(users, facts, asks)] += cycle
    kind = by_weight(source, weights) or "poll"
    return _draw_command(kind, users, facts, source, profile, holders, absent, moving, queued)


def _draw_command(
    kind: str, users: TierUsers, facts: TierFacts, source: Choices, profile: TierProfile,
    holders: list[str], absent: list[str], moving: list[TierTransfer], queued: list[TierTransfer],
) -> TierCommand:  # fmt: skip
    """Draw a command of a kind that the facts allow.

    holders, absent: names with and without a lock.
    moving, queued: transfers on the device and before it.
    """
    match kind:
        case "match":
            prompt = _draw_prompt_to_load(users, facts, source, profile)
            prompt = prompt or _draw_prompt(users, facts, source, profile)
            kind_of_match = Match if once_in(source, profile.loads) else Load
            return kind_of_match(pick(source, absent), prompt)
        case "unlock":
            return Unlock(pick(source, holders))
        case "evict":
            return _draw_evict(users.config, facts, source)
        case "send":
            return Send(pick(source, queued).load)
        case "poll":
            return Poll()
        case "copy":
            return Copy(pick(source, [job for job in moving if not job.copied]).load)
        case "complete":
            return Complete(pick(source, moving).load)
        case "reset" | "forget":
            return ResetCache()
        case "prefetch":
            return Prefetch(pick(source, absent), _draw_stored_prompt(users, source))
        case "thread":
            threads = _runnable_threads(facts)
            reading = [thread for thread in threads if thread is not Backup]
            thread = pick(source, reading if reading and not once_in(source, 4) else threads)
            less = once_in(source, profile.short // (2 if thread is Fetch else 1))
            return thread(source.upto(3) if less else ALL)
        case "admit":
            name = pick(source, [*users.waiting])
            kind_of_match = Match if once_in(source, profile.loads) else Load
            return kind_of_match(name, users.waiting[name])
        case "reattach":
            return Reattach()
        case "tick":
            return Tick(pick(source, (1, 5, 30, 30)))
        case "abort":
            return Abort(pick(source, [*users.waiting]))
        case "refused":
            few: tuple[TierCommand, ...] = Unlock("h9"), Copy(), Copy(load=True), Complete(), Send(load=True)
            if users.config.storage:
                few += Query(), Fetch(), Backup(), Abort("h9")
            return pick(source, (*few, ResetCache()))
        case "insert":
            return _draw_insert(users, facts, source, profile, holders, absent)
    raise AssertionError(f"there is no such kind: {kind}")


def _weights_of_slow_storage(
    users: TierUsers, facts: TierFacts, profile: TierProfile
) -> dict[str, int]:
    """Return weights that bring a run closer to a prefetch that ends by time with some pages read: an attempt
    to admit the request fails, the thread reads, a poll takes the pages over, the time of the request passes.
    """
    held_back = users.waits.waiting_requests
    if not held_back:
        return {"admit": 4 * profile.match}
    if any(held_back.values()):
        return {"admit": 6 * profile.match, "tick": 1, "poll": profile.match}
    reads = any(operation.state == "reads" for operation in facts.operations)
    return {
        "tick": profile.match // (1 if reads else 6),
        "thread": weight_if(_runnable_threads(facts), 4 * profile.match),
        "poll": 2 * profile.match,
    }


Thread = type[Query] | type[Fetch] | type[Backup]
_THREAD_OF: dict[str, Thread] = {
    "to ask": Query,
    "asks": Query,
    "to read": Fetch,
    "reads": Fetch,
    "to write": Backup,
    "writes": Backup,
}


def _runnable_threads(facts: TierFacts) -> list[Thread]:
    """Return the threads of the storage that have work."""
    return [
        *dict.fromkeys(_THREAD_OF[op.state] for op in facts.operations if op.state in _THREAD_OF)
    ]


def _next_toward_storage_hit(users: TierUsers, facts: TierFacts, asks: list[TierOperation]) -> str:
    """Return the kind of command that brings a run closer to a storage hit: everything is stored and
    unlocked, both tiers forget it, a request prefetches it and is admitted with it."""
    if asks:
        return "thread" if any(op.state in _THREAD_OF for op in asks) else "poll"
    if users.waiting:
        return "admit"
    if facts.in_flight:
        if any(job.sent and not job.completed for job in facts.transfers):
            return "complete"
        if any(job.load and not job.sent for job in facts.transfers):
            return "send"
        return "thread" if _runnable_threads(facts) and not _has_queued_results(facts) else "poll"
    if users.prompts:
        return "unlock"
    if not facts.nodes:
        return "prefetch" if users.seen else "insert"
    policy = users.config.policy
    if all(node.host["full"] for node in facts.nodes) or policy == "write_through":
        return "forget"
    return "evict" if policy == "write_back" else "match"


def _has_queued_results(facts: TierFacts) -> bool:
    """Return whether the next Poll takes something from a queue of the storage."""
    waits = any(op.state in ("answered", "done") for op in facts.operations)
    return waits or any(facts.returned.values())


def _draw_stored_prompt(users: TierUsers, source: Choices) -> Prompt:
    """Draw a text that was inserted, cut or a page longer: the last page of a prompt is never
    prefetched."""
    prompt = pick(source, users.seen)
    if once_in(source, 4):
        prompt = cut_prompt(prompt, 1 + source.upto(prompt_len(prompt) - 1))
    return _with_other_text(users, prompt, users.config.page_size, source)


def _draw_evict(config: TierConfig, facts: TierFacts, source: Choices) -> Evict:
    full = pick(source, (0, 1, 3, 8, facts.evictable["full"]))
    swa = pick(source, (0, 0, 1, 4, facts.evictable["swa"])) if config.window is not None else 0
    states = pick(source, (0, 0, 1, facts.evictable["state"])) if config.states else 0
    if not full and not swa and not states:
        full = 1
    return Evict(full, swa, states)


def _draw_insert(
    users: TierUsers,
    facts: TierFacts,
    source: Choices,
    profile: TierProfile,
    holders: list[str],
    absent: list[str],
) -> Insert:
    """Draw an insert by a lock holder, of its own text and often more, or by one that has matched
    nothing."""
    if holders and (not absent or not once_in(source, 3)):
        name = pick(source, holders)
        prompt = users.prompts[name]
        if once_in(source, 2):
            prompt = _extended_prompt(users, prompt, source, profile)
    else:
        name = pick(source, absent)
        prompt = _draw_prompt(users, facts, source, profile)
    chunked = once_in(source, profile.chunks) and not once_in(source, 3)
    evicted = 0
    if users.config.window is not None and not chunked and once_in(source, 3):
        evicted = source.upto(max(0, prompt_len(prompt) - 1 - users.config.window))
        evicted = evicted // users.config.page_size * users.config.page_size
    return Insert(name, prompt, evicted, chunked)


def _draw_prompt(users: TierUsers, facts: TierFacts, source: Choices, profile: TierProfile) -> Prompt:
    """Draw a text that splits a node, an earlier one, cut or longer, or a new one."""
    if facts.nodes and once_in(source, profile.aims):
        return _draw_splitting_prompt(users, facts, source, profile)
    if users.seen and not once_in(source, 4):
        prompt = pick(source, users.seen)
        if once_in(source, 3):
            return prompt
        if once_in(source, 2):
            return cut_prompt(prompt, 1 + source.upto(prompt_len(prompt) - 1))
        return _extended_prompt(users, prompt, source, profile)
    return _extended_prompt(users, (), source, profile)


def _draw_prompt_to_load(
    users: TierUsers, facts: TierFacts, source: Choices, profile: TierProfile
) -> Prompt | None:
    """Draw the text of a node whose KV, or SWA KV, has left the device, made a page longer; None where
    no node has, or another text is due."""
    pools = users.config.pools
    nodes = [n for n in facts.nodes if any(n.host[pool] and not n.device[pool] for pool in pools)]
    if not nodes or not once_in(source, profile.aims):
        return None
    return _with_other_text(users, _node_prompt(pick(source, nodes), facts), users.config.page_size, source)


def _draw_splitting_prompt(
    users: TierUsers, facts: TierFacts, source: Choices, profile: TierProfile
) -> Prompt:
    """Draw the text of a node up to a page in its middle, continued with another; preferably of a node
    that a transfer moves."""
    page = users.config.page_size
    long = [node for node in facts.nodes if len(node.stamps) > page] or [*facts.nodes]
    moving = [n for n in long if n.storing >= 0 or n.loading >= 0 or any(n.pins.values())]
    node = pick(source, moving if moving and not once_in(source, 3) else long)
    length = node.start + page * source.upto(len(node.stamps) // page)
    if not length:
        return _extended_prompt(users, (), source, profile)
    return _with_other_text(users, cut_prompt(_node_prompt(node, facts), length), page, source)


def _with_other_text(users: TierUsers, prompt: Prompt, tokens: int, source: Choices) -> Prompt:
    """Return a prompt with tokens of another text behind it, as many as fit."""
    room = min(tokens, users.config.width - prompt_len(prompt))
    if room < 1:
        return prompt
    others = [text for text in "abcde" if not prompt or text != prompt[-1].text]
    return (*prompt, Piece(pick(source, others), room))


def _node_prompt(node: TierNode, facts: TierFacts) -> Prompt:
    """Return the prompt that ends where a node does."""
    nodes = {node.node: node for node in facts.nodes}
    stamps: list[int] = []
    for ancestor in path(node.node, nodes):
        stamps = [*ancestor.stamps, *stamps]
    texts = [shared_text(serial_of(stamp)) for stamp in stamps]
    return tuple(Piece(text, len([*run])) for text, run in groupby(texts))


def _extended_prompt(users: TierUsers, prompt: Prompt, source: Choices, profile: TierProfile) -> Prompt:
    """Return a prompt continued with the same text or another."""
    page = users.config.page_size
    room = min(profile.longest * page, users.config.width) - prompt_len(prompt)
    if room < 1:
        return prompt
    more = 1 + source.upto(room - 1)
    if page > 1 and not once_in(source, 4):
        more = min(room, -(-more // page) * page)
    text = pick(source, profile.texts)
    if prompt and prompt[-1].text == text:
        return (*prompt[:-1], Piece(text, prompt[-1].tokens + more))
    return (*prompt, Piece(text, more))


def tier_finale(users: TierUsers, facts: TierFacts) -> TierCommand | None:
    """Return the next command that ends a run, until nothing is in flight and nobody holds a lock."""
    if users.config.decode:
        return decode_finale(users, facts)
    if users.config.prefill:
        return prefill_finale(users, facts)
    for job in facts.transfers:
        if not job.sent:
            return Send(job.load)
    for job in facts.transfers:
        if not job.completed:
            return Complete(job.load)
    if threads := _runnable_threads(facts):
        return threads[0]()
    if facts.transfers or _has_queued_results(facts):
        return Poll()
    if users.waiting:
        return Abort(next(iter(users.waiting)))
    if users.prompts:
        return Unlock(next(iter(users.prompts)))
    return None
