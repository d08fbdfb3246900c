"""The next command: which kind the reference's state calls for, and with which arguments.

Mostly commands that apply; one in N ignores its precondition, and may be refused. `Choices` makes the
decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from impl.adapter import Capabilities
from reference.commands import (
    Abort, Admit, CheckBusy, CheckIdle, Chunk, Close, Command, Decode, Draft, Evict, EvictSwa, Extend, Finish,
    Insert, Launch, Match, Mode, Open, Retract, Settle, SpecDecode, Submit, Unlock, UnlockSwa, prompt_len,
)  # fmt: skip
from reference.cursors import eviction_limit
from reference.state import Request, State, free, text_len
from reference.prefix_cache import key_of, lock_holders
from reference.rules.base import cursors_of
from reference.radix_tree import Key, Sizes, nodes, sizes
from stateful_tests.generate.choice_source import Choices, once_in, pick
from stateful_tests.generate.enabled import Enabled, ahead_of, pages_left, room_of
from stateful_tests.generate.prompts import draw_evicted, draw_prompt, input_of, spelt
from stateful_tests.generate.run_profile import RunProfile
from stateful_tests.generate.weights import kind_weights


def propose(state: State, source: Choices, profile: RunProfile) -> Command:
    """The next command for `state`; one in so many ignores its precondition."""
    invalid = once_in(source, profile.invalid_rate)
    return next_of(Enabled(state, source, profile, invalid))


def next_of(c: Enabled) -> Command:
    """A command of the kinds that may come next, each as often as it is called for."""
    weights = kind_weights(c)
    at = c.source.upto(sum(weights.values()) - 1)
    kind = next(kind for kind, end in zip(weights, accumulate(weights.values())) if at < end)
    return GENERATORS[kind](c)


def finale(state: State, capabilities: Capabilities | None = None) -> list[Command]:
    """Commands that end everything: abort what runs, close what is open, and empty the radix tree."""
    ends: list[Command] = [Abort(r.name) for r in state.requests]
    closing = {s.name for s in state.sessions if s.closing}
    ends += [Close(s.name) for s in state.sessions if s.name not in closing]
    if state.tree is not None:
        geometry = state.config.geometry
        everything = [geometry.pages(pool) * geometry.page_size for pool in geometry.pools]
        ends += [*(Unlock(name) for name in lock_holders(state)), Evict(*everything), CheckIdle()]
    offered = (capabilities or Capabilities()).commands
    return [command for command in ends if type(command).__name__ in offered]


def _open(c: Enabled) -> Open:
    names = c.profile.sessions
    unknown = [s for s in names if c.state.session(s) is None]
    return Open(pick(c.source, names if c.invalid or not unknown else unknown))


def _submit(c: Enabled) -> Submit:
    names = c.profile.requests
    free = [r for r in names if c.state.request(r) is None]
    name = pick(c.source, names if c.invalid or not free else free)
    idle = c.idle
    if c.busy and once_in(c.source, 3):
        return Submit(name, pick(c.source, c.busy).name, 1)
    if c.invalid:
        session = pick(c.source, (*c.profile.sessions, None))
    else:
        # What ordinary requests leave in a radix tree is for everybody.
        often = 5 if c.profile.machine == "sessions" or c.profile.allocate_ahead else 2
        ordinary = not idle or once_in(c.source, often)
        wiped = [s for s in c.wiped if s.turn is None]
        session = None if ordinary else pick(c.source, wiped or idle).name
        if wiped and session is not None and not once_in(c.source, 3):
            return Submit(name, session, 1)
    width = c.state.config.geometry.width
    tokens = c.length(width // (2 if c.profile.long_prompts else 4))
    if c.profile.long_prompts and once_in(c.source, 2):
        tokens = 1 + c.source.upto(width // 2)
    if c.invalid and once_in(c.source, 6):
        tokens = pick(c.source, (0, -1))
    rewind = pick(c.source, (1, -1)) if c.invalid and once_in(c.source, 4) else 0
    plain = Submit(name, session, tokens, rewind)
    return plain if c.profile.machine == "sessions" or once_in(c.source, 6) else _prompted(c, plain)


def _prompted(c: Enabled, plain: Submit) -> Submit:
    """The same with a prompt, mostly instead of tokens of its own."""
    session = c.state.session(plain.session)
    before = text_len(session.history) if session is not None else 0
    # Room for some output, and in a session for later turns: their window evictions pass what the tree has.
    quarters = (3 if c.profile.long_prompts else 2) - (plain.session is not None)
    longest = max(1, (c.state.config.geometry.width - before) * quarters // 4)
    twins = [prompt for r in c.state.requests if (prompt := input_of(r))]
    if twins and not before and once_in(c.source, 4):
        prompt = pick(c.source, twins)
    else:
        prompt = c.prompt(longest, fresh=before > 0)
    tokens = 1 + c.source.upto(1) if c.profile.own_tokens or once_in(c.source, 4) else 0
    return replace(plain, prompt=prompt, tokens=c.source.upto(4) - 1 if c.invalid else tokens)


def _extend(c: Enabled) -> Extend:
    chunks, names, shared = [], c.lanes(c.extending), c.profile.machine != "sessions"
    running = {r.name for r in c.running}
    if c.profile.mixed and running and not once_in(c.source, 3):
        names += [name for name in c.lanes(c.windowless or c.settled) if name not in names]
    elif not c.profile.mixed and not running.issuperset(names):
        names = [name for name in names if name not in running]
    for name in names:
        request = c.state.request(name)
        done = request.cursors.kv_committed_len if request is not None and request.cursors else 0
        left = request.origin + request.output - done if request is not None else 1
        whole = not once_in(c.source, 3)
        tokens = left if whole else c.length(left)
        tail = c.profile.tails and _may_be_tail(c, request) and not once_in(c.source, 3)
        if tail and not whole:
            tokens = max(1, left - 1 - c.source.upto(1))
        elif request is not None and shared and not tail and not once_in(c.source, 3):
            tokens = max(1, min(tokens, room_of(c.state, request.cursors)))
            if tokens == left > 1 and free(c.state).full < 2:  # a chunk for which the tree makes room
                tokens = c.length(left - 1)
        if c.invalid and once_in(c.source, 3):
            tokens = pick(c.source, (left + 1, 0, -1))
        chunks.append(Chunk(name, tokens, tail))
    return Extend(tuple(chunks))


def _may_be_tail(c: Enabled, request: Request | None) -> bool:
    """Nothing of its own has been computed yet, and there is a window; or nobody cares."""
    windowless = c.state.config.geometry.window is None
    if c.invalid or windowless or request is None or request.cursors is None:
        return c.invalid
    started = request.cursors.kv_allocated_len > request.cursors.cache_protected_len
    return request not in c.running and not started


def _drafts(c: Enabled, fitting: list[Request]) -> tuple[Draft, ...]:
    drafts, geometry = [], c.state.config.geometry
    for name in c.lanes(fitting):
        request = c.state.request(name)
        room = room_of(c.state, request.cursors if request is not None else None)
        allocate = c.length(room + c.invalid)
        accept = allocate if once_in(c.source, 4) else 1 + c.source.upto(allocate - 1)
        if c.profile.allocate_ahead and not once_in(c.source, 3):
            allocate = max(1, room - c.source.upto(room // 3))
            begins = request in c.running and cursors_of(request).kv_committed_len < (geometry.window or 0)
            accept = 1 if begins or once_in(c.source, 2) else 1 + c.source.upto(allocate - 1)
        elif c.profile.allocate_ahead and request in c.running and ahead_of(request) > 1:
            allocate = accept = 1  # what is left of the round before stays ahead
        if c.invalid and once_in(c.source, 4):
            allocate, accept = pick(c.source, ((allocate, allocate + 1), (0, 0), (1, 0), (-1, 1)))
        elif request in c.running and once_in(c.source, 16):  # past the row, where what is accepted fits
            left = geometry.width - cursors_of(request).kv_committed_len
            allocate, accept = left + 1 + c.source.upto(1), 1 + c.source.upto(max(0, left - 1))
        drafts.append(Draft(name, allocate, accept))
    return tuple(drafts)


def _launch(c: Enabled) -> Launch:
    """Often a token alone: what is taken back then lies in slots that were ahead."""
    drafts = _drafts(c, c.running if c.invalid else c.launchable)
    if not c.invalid and once_in(c.source, 2):
        drafts = tuple(replace(draft, allocate=1, accept=1) for draft in drafts)
    return Launch(drafts)


def _evict_swa(c: Enabled) -> EvictSwa:
    over = [r for r in c.running if ahead_of(r) > 0] if c.profile.allocate_ahead else []
    name = c.request(over or c.held)
    request = c.state.request(name)
    cursors = request.cursors if request is not None else None
    if cursors is None:
        return EvictSwa(name, c.source.upto(4))
    top = request.settled_len if request is not None and not c.invalid else cursors.kv_committed_len
    if (c.state.config.mode is Mode.FREE or c.invalid) and (c.profile.allocate_ahead or once_in(c.source, 3)):
        top = cursors.kv_allocated_len + (c.invalid and once_in(c.source, 3))
    if c.invalid and once_in(c.source, 8):
        return EvictSwa(name, -1)
    geometry = c.state.config.geometry
    if geometry.window is not None:  # where the first page goes, or does not yet
        first = geometry.window + 2 * geometry.page_size
        if cursors.kv_committed_len <= geometry.window and top >= first:  # and with it the window
            return EvictSwa(name, pick(c.source, (first, first, top)))
        if once_in(c.source, 4):
            return EvictSwa(name, min(top, first - c.source.upto(1)))
    return EvictSwa(name, top if not once_in(c.source, 4) else c.source.upto(top))


def _finish(c: Enabled) -> Finish:
    name = c.request(c.running)
    request = c.state.request(name)
    output = request.output if request is not None else 1
    if c.invalid:
        return Finish(name, c.source.upto(output + 1))
    low = 1
    if request is not None and c.state.config.mode is Mode.FAITHFUL:
        low = max(request.processed_outputs[0] + 1, request.evicted - request.origin)
    if low >= output or once_in(c.source, 6 if c.profile.allocate_ahead else 3):
        return Finish(name, output)
    if once_in(c.source, 2):  # far back: most of what was accepted was past the limit
        return Finish(name, low)
    return Finish(name, low + c.source.upto(output - low))


def _retract(c: Enabled) -> Retract:
    name, lost = c.request(c.running), c.source.upto(3) - 1 if c.invalid else c.source.upto(1)
    return Retract(name, 0 if name in {r.name for r in c.late} and not c.invalid else lost)


def _abort(c: Enabled) -> Abort:
    special = c.abortable
    return Abort(c.request(special if special and not c.invalid else c.state.requests), once_in(c.source, 2))


def _close(c: Enabled) -> Close:
    special = (c.crowded if once_in(c.source, 2) else []) or c.closable
    known = [s.name for s in special or c.state.sessions]
    return Close(pick(c.source, known if known and not c.invalid else c.profile.sessions))


def _check_busy(c: Enabled) -> CheckBusy:
    return CheckBusy(pick(c.source, (3, -1)) if c.invalid and once_in(c.source, 4) else 2 - c.source.upto(2))


def _match(c: Enabled) -> Match:
    staying = lock_holders(c.state)
    name = c.lock_holder([g for g in c.profile.lock_holders if g not in staying])
    prompt, window = c.prompt(c.state.config.geometry.width), c.state.config.geometry.window
    parts = window is not None and "UnlockSwa" not in c.profile.disabled
    return Match(name, prompt, parts and once_in(c.source, 4))


def _insert(c: Enabled) -> Insert:
    """Half the time somebody new inserts, else a lock owner whose lock can be spelt resumes from there."""
    more = c.state.config.geometry.bigram
    locks = lock_holders(c.state).items()
    staying = {name: key for name, key in locks if prompt_len(spelt(key)) == len(key) + (more and bool(key))}
    new = [g for g in c.profile.lock_holders if g not in lock_holders(c.state)]
    name = c.lock_holder(new if new and (not staying or once_in(c.source, 2)) else list(staying))
    locked: Key = staying.get(name, ())
    geometry = c.state.config.geometry
    longest = len(locked) + pages_left(c.state) * geometry.page_size + c.source.upto(geometry.page_size - 1)
    longest = max(1, min(geometry.width, longest))
    if c.invalid:
        prompt = c.prompt(longest)
    else:
        after = spelt(locked) if locked else None
        prompt = draw_prompt(c.state, c.source, c.profile.texts, longest, after=after)
    chunked = once_in(c.source, 2)
    if geometry.window is None or c.state.tree is None:
        return Insert(name, prompt, int(c.invalid and once_in(c.source, 4)), chunked)
    limit = prompt_len(prompt) + c.invalid
    if c.state.config.mode is Mode.FAITHFUL and not c.invalid:
        reach = eviction_limit(prompt_len(prompt), geometry.window, geometry.page_size)
        limit = min(limit, max(len(locked), reach))
    evicted = draw_evicted(c.state, c.source, key_of(prompt, geometry.bigram), len(locked), limit)
    return Insert(name, prompt, -1 if c.invalid and once_in(c.source, 8) else evicted, chunked)


def _evict(c: Enabled) -> Evict:
    """A page, a node, all that is evictable, or more; of one pool or of both."""
    geometry, tree = c.state.config.geometry, c.state.tree
    if c.invalid and once_in(c.source, 2):
        return Evict(*pick(c.source, ((0, 0), (-1, 0), (0, -1), (1, 1))))
    lengths = [len(placed.node.key) for placed in nodes(tree)] if tree is not None else []
    can = sizes(tree) if tree is not None else Sizes(0, 0, 0, 0)

    def amount(evictable: int) -> int:
        node = pick(c.source, lengths or [1])
        return pick(c.source, (*[geometry.page_size] * 2, node, max(1, evictable), evictable + 1))

    # SWA alone leaves tombstones: as often as the other two together.
    pools = pick(c.source, ("full", "swa", "swa", "both")) if geometry.window is not None else "full"
    full = amount(can.full_evictable) if pools != "swa" else 0
    return Evict(full, amount(can.swa_evictable) if pools != "full" else 0)


GENERATORS: dict[type, Callable[[Enabled], Command]] = {
    Open: _open,
    Submit: _submit,
    Admit: lambda c: Admit(c.request(c.waiting)),
    Extend: _extend,
    Decode: lambda c: Decode(tuple(c.lanes(c.running if c.invalid else c.settled))),
    SpecDecode: lambda c: SpecDecode(_drafts(c, c.running if c.invalid else c.settled)),
    EvictSwa: _evict_swa,
    Finish: _finish,
    Retract: _retract,
    Abort: _abort,
    Close: _close,
    CheckBusy: _check_busy,
    CheckIdle: lambda _: CheckIdle(),
    Match: _match,
    Unlock: lambda c: Unlock(c.lock_holder(list(lock_holders(c.state)))),
    Insert: _insert,
    Evict: _evict,
    UnlockSwa: lambda c: UnlockSwa(c.lock_holder(c.swa_unlockable)),
    Launch: _launch,
    Settle: lambda c: Settle(c.request(c.late)),
}
