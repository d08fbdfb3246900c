"""Draws for a server that only decodes: its sizes, its next command, and the commands that end a run."""

from __future__ import annotations

from dataclasses import replace

from reference.commands import Abort, Close, Decode, Evict, Piece, Prompt, Retract, prompt_len
from reference.tiers.commands import Arrive, Await, LastToken, Expire, FailPeer, Greet, Poll, TierCommand
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts, TierRequest, TierRequestState
from reference.tiers.locks import TierUsers
from impl.choices import Choices, by_weight, once_in, pick, weight_if
from stateful_tests.generate.tier_profile import TierProfile

OUTPUT = 4  # tokens for which a text leaves room


def draw_decode_config(source: Choices, like: TierConfig) -> TierConfig:
    """Draw sizes of a decode server like `like`, which no preset has."""
    host = like.decode == "plain"
    windowed = like.window is not None
    page = pick(source, (2, 2, 4) if windowed else (1, 2, 4))
    full = 8 + source.upto(16)
    swa = 0
    window = None
    if windowed:
        swa = 6 + source.upto(full)
        window = 1 + source.upto(2 * page + 3)
    return replace(
        like, page_size=page, window=window, full_pages=full, swa_pages=swa, rows=2 + source.upto(3),
        host_pages=2 + source.upto(full) if host else 0, width=max(8, page * min(full, 12)),
        host_swa_pages=2 + source.upto(8) if host and windowed else 0,
    )  # fmt: skip


def propose_decode_command(
    users: TierUsers, facts: TierFacts, source: Choices, profile: TierProfile
) -> TierCommand:
    """Draw the next command."""
    by_state: dict[TierRequestState, list[TierRequest]] = {}
    for request in facts.requests:
        by_state.setdefault(request.state, []).append(request)
    no_requests = (
        TierRequestState.GONE, TierRequestState.IDLE, TierRequestState.OVER, TierRequestState.BUSY,
    )  # fmt: skip
    names_in_use = {request.name for request in facts.requests if request.state not in no_requests}
    absent = [name for name in profile.requests if name not in names_in_use | users.sessions]
    sessions = sorted(users.sessions)
    again = [name for name in sessions if name not in names_in_use]
    waits = by_state.get(TierRequestState.WAITS, [])
    greeted = by_state.get(TierRequestState.GREETED, [])
    receives = by_state.get(TierRequestState.RECEIVES, [])
    runs = by_state.get(TierRequestState.RUNS, [])
    held_requests = by_state.get(TierRequestState.HELD, [])
    writing = [request for request in facts.requests if _awaits_kv(users, request)]
    failing = [*waits, *greeted, *receives]
    # The profile has no weights of this server's commands: await and greet take that of a match, decode and
    # end that of an insert, retract that of a send.
    weights = {
        "await": weight_if(absent, profile.match),
        "greet": weight_if(waits, 2 * profile.match),
        "poll": 2 * profile.poll + weight_if(facts.requests, 4),
        "arrive": weight_if(writing, profile.complete),
        "fail": weight_if(failing, profile.abort),
        "abort": weight_if(names_in_use, 1 + profile.abort),
        "expire": weight_if(held_requests, profile.abort),
        "decode": weight_if(runs, profile.insert),
        "end": weight_if(runs, profile.insert),
        "retract": weight_if(runs, profile.send),
        "evict": weight_if(any(facts.evictable.values()), profile.evict),
        "refused": weight_if(once_in(source, 40), 2),
        "close": weight_if(sessions, 2),
        "again": weight_if(again, 1),
    }
    match by_weight(source, weights):
        case "await":
            # Known faults of sessions end a run early, so that a quarter of the runs has any. `longest` is
            # the same throughout a run.
            resumable = profile.longest % 4 == 0 and once_in(source, 3)
            return Await(pick(source, absent), _draw_prompt(users, source, profile), resumable)
        case "again":
            return Await(pick(source, again), _draw_prompt(users, source, profile), resumable=True)
        case "close":
            return Close(pick(source, sessions))
        case "greet":
            return Greet(pick(source, waits).name)
        case "arrive":
            return Arrive(pick(source, writing).name)
        case "fail":
            return FailPeer(pick(source, failing).name)
        case "abort":
            return Abort(pick(source, sorted(names_in_use)))
        case "expire":
            return Expire()
        case "decode":
            names = [request.name for request in runs if not once_in(source, 3)]
            return Decode(tuple(names) or (pick(source, runs).name,))
        case "end":
            return LastToken(pick(source, runs).name)
        case "retract":
            return Retract(pick(source, runs).name)
        case "evict":
            windowed = users.config.window is not None
            return Evict(1 + source.upto(7), source.upto(4) if windowed else 0)
        case "refused":
            few: tuple[TierCommand, ...] = (
                Greet("h9"), Arrive("h9"), LastToken("h9"), Expire(), Abort("h9"),
            )  # fmt: skip
            return pick(source, few)
    return Poll()


def _draw_prompt(users: TierUsers, source: Choices, profile: TierProfile) -> Prompt:
    """Draw a prompt: an earlier one made longer or with another end, or a new one."""
    most = users.config.width - OUTPUT
    if users.seen and not once_in(source, 3):
        seen_prompt = pick(source, users.seen)
        length = 1 + source.upto(prompt_len(seen_prompt) - 1)
        prompt = cut_prompt(seen_prompt, min(length, most - 1))
    else:
        prompt = ()
    more = 1 + source.upto(most - prompt_len(prompt) - 1)
    return (*prompt, Piece(pick(source, "abcd" if prompt else profile.texts), more))


def cut_prompt(prompt: Prompt, length: int) -> Prompt:
    """Return the first `length` tokens of a prompt."""
    pieces: list[Piece] = []
    for piece in prompt:
        taken = min(piece.tokens, length - prompt_len(tuple(pieces)))
        if taken > 0:
            pieces.append(Piece(piece.text, taken))
    return tuple(pieces)


def _awaits_kv(users: TierUsers, request: TierRequest) -> bool:
    """Return whether the prefill server still has to send KV of a request, or only its first token
    where the tree has all KV."""
    receives = request.state == TierRequestState.RECEIVES and request.name not in users.arrived
    return receives or bool(request.writing)


def decode_finale(users: TierUsers, facts: TierFacts) -> TierCommand | None:
    """Return the next command that ends a run: prefill servers answer and write, requests decode to
    their last token, sessions between turns are closed. No new request comes, so each must end (PRO-1)."""
    if users.expired and facts.in_flight:
        return Poll()
    for request in facts.requests:
        if _awaits_kv(users, request):
            return Arrive(request.name)
        match request.state:
            case TierRequestState.WAITS if request.name not in users.greeted:
                return Greet(request.name)
            case TierRequestState.RUNS:
                return LastToken(request.name)
            case TierRequestState.HELD:
                return Expire()
    idle = {
        request.name.removeprefix("session ")
        for request in facts.requests
        if request.state in (TierRequestState.IDLE, TierRequestState.BUSY)
    }
    if closing := idle & users.sessions:
        return Close(min(closing))
    if facts.in_flight:
        return Poll()
    if users.sessions:
        return Close(min(users.sessions))
    return None
