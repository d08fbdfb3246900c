"""Commands to a server that only prefills: the next one, and sizes of its own."""

from __future__ import annotations

from dataclasses import replace

from reference.commands import Abort, Chunk, Evict, Extend, Piece, Prompt, prompt_len
from reference.tiers.commands import Arrive, Await, FailPeer, Greet, Poll, TierCommand
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts, TierRequest, TierRequestState
from reference.tiers.locks import TierUsers
from impl.choices import Choices, by_weight, once_in, pick, weight_if
from stateful_tests.generate.decode_commands import cut_prompt
from stateful_tests.generate.tier_profile import TierProfile

WHOLE = 1 << 12  # tokens of a chunk that has all that is left
# States of requests whose decode server may have been told of them, or may be.
_WITH_PEER = (
    TierRequestState.WAITS, TierRequestState.GREETED, TierRequestState.QUEUED, TierRequestState.COMPUTES,
    TierRequestState.LAUNCHED, TierRequestState.PARKED, TierRequestState.SENDS,
)  # fmt: skip


def draw_prefill_config(source: Choices, like: TierConfig) -> TierConfig:
    """Draw sizes of a prefill server like `like`, which no preset has."""
    windowed = like.window is not None
    page = pick(source, (1, 2, 2, 4))
    full = 6 + source.upto(14)
    swa = 0
    window = None
    if windowed:
        swa = 5 + source.upto(full)
        window = 1 + source.upto(2 * page + 3)
    return replace(
        like, page_size=page, window=window, full_pages=full, swa_pages=swa, rows=1 + source.upto(3),
        width=page * min(full, 12), overlap=once_in(source, 2), attempts=source.upto(2),
    )  # fmt: skip


def propose_prefill_command(
    users: TierUsers, facts: TierFacts, source: Choices, profile: TierProfile
) -> TierCommand:
    """Draw the next command. In most runs transfers rest for long, while prompts begin alike and some
    are evicted: a block that is freed too early is then written by another request."""
    names_in_use = {request.name for request in facts.requests}
    absent = [name for name in profile.requests if name not in names_in_use]
    unheard = [
        request
        for request in facts.requests
        if request.name not in users.greeted and request.state in _WITH_PEER
    ]
    runnable = _runnable_requests(facts)
    sending = sorted({send.name for send in facts.sends} & names_in_use)
    failing = [request for request in facts.requests if request.state in _WITH_PEER]
    rests = profile.complete < 9  # transfers of this run
    weights = {
        "await": weight_if(absent, profile.match),
        "greet": weight_if(unheard, profile.match),
        "extend": weight_if(runnable, profile.insert),
        "poll": 2 * profile.poll + weight_if(names_in_use, 4),
        "arrive": weight_if(sending, 1 if rests else profile.complete),
        "fail": weight_if(failing, 1 + profile.abort),
        "abort": weight_if(names_in_use, 1 + profile.abort),
        "evict": weight_if(any(facts.evictable.values()), 2 * profile.evict),
        "refused": weight_if(once_in(source, 40), 2),
    }
    match by_weight(source, weights):
        case "await":
            return Await(pick(source, absent), _draw_prompt(users, source, profile))
        case "greet":
            return _draw_answer(users, pick(source, unheard), source)
        case "extend":
            return _draw_batch(users, runnable, source, profile)
        case "arrive":
            return Arrive(pick(source, sending))
        case "fail":
            return FailPeer(pick(source, failing).name)
        case "abort":
            return Abort(pick(source, sorted(names_in_use)))
        case "evict":
            windowed = users.config.window is not None
            return Evict(1 + source.upto(11), source.upto(4) if windowed else 0)
        case "refused":
            few: tuple[TierCommand, ...] = (
                Greet("h9"), Arrive("h9"), FailPeer("h9"), Abort("h9"), Extend((Chunk("h9", 1),)),
            )  # fmt: skip
            return pick(source, few)
    return Poll()


def _runnable_requests(facts: TierFacts) -> list[TierRequest]:
    """Return the requests that a batch may have, the one between two chunks first."""
    states = TierRequestState.COMPUTES, TierRequestState.QUEUED
    return [request for state in states for request in facts.requests if request.state == state]


def _draw_batch(
    users: TierUsers, runnable: list[TierRequest], source: Choices, profile: TierProfile
) -> Extend:
    """Draw a batch of one request or of several; the last may leave a part of its prompt for later."""
    page = users.config.page_size
    count = 1 + source.upto(len(runnable) - 1)
    if not once_in(source, 3):
        count = 1
    names = [request.name for request in runnable[:count]]
    in_one_batch = once_in(source, 1 + profile.chunks)
    tokens = WHOLE if in_one_batch else page * (1 + source.upto(3))
    return Extend((*(Chunk(name, WHOLE) for name in names[:-1]), Chunk(names[-1], tokens)))


def _draw_answer(users: TierUsers, request: TierRequest, source: Choices) -> Greet:
    """Draw the decode server's answer: it has nothing of the prompt, or the first pages."""
    page = users.config.page_size
    length = users.lengths.get(request.name, 0)
    pages = max(0, length - 1) // page
    prefix = page * source.upto(pages) if once_in(source, 3) else 0
    return Greet(request.name, prefix)


def _draw_prompt(users: TierUsers, source: Choices, profile: TierProfile) -> Prompt:
    """Draw a prompt: an earlier one, the same made longer or with another end, or a new one."""
    config = users.config
    pools = [config.full_pages, *([config.swa_pages] if config.window is not None else [])]
    most = min(config.width, config.page_size * (min(pools) - 1)) - 1
    prompt: Prompt = ()
    if users.seen and not once_in(source, 3):
        seen_prompt = pick(source, users.seen)
        if once_in(source, 2):
            return seen_prompt
        length = 1 + source.upto(prompt_len(seen_prompt) - 1)
        prompt = cut_prompt(seen_prompt, min(length, most - 1))
    more = 1 + source.upto(most - prompt_len(prompt) - 1)
    return (*prompt, Piece(pick(source, "abcd" if prompt else profile.texts), more))


def prefill_finale(users: TierUsers, facts: TierFacts) -> TierCommand | None:
    """Return the next command that ends a run: decode servers answer, the network reads, each prompt is
    computed. No new request comes, so each must end (PRO-1)."""
    names_in_use = {request.name for request in facts.requests}
    for send in facts.sends:
        if send.name in names_in_use:
            return Arrive(send.name)
    for request in facts.requests:
        if request.state in _WITH_PEER and request.name not in users.greeted:
            return Greet(request.name)
    states = {request.state for request in facts.requests}
    if states & {TierRequestState.SENDS, TierRequestState.LAUNCHED, TierRequestState.FAILS}:
        return Poll()
    if runnable := _runnable_requests(facts):
        return Extend((Chunk(runnable[0].name, WHOLE),))
    return Poll() if facts.in_flight else None
