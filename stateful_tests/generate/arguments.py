"""A command of each kind, drawn for what a state offers. Drawn when rude, it may be one that is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from reference.commands import (
    Abort,
    Admit,
    CheckBusy,
    CheckIdle,
    Chunk,
    Close,
    Command,
    Decode,
    Draft,
    Evict,
    EvictSwa,
    Extend,
    Finish,
    Insert,
    Match,
    Mode,
    Open,
    Retract,
    SpecDecode,
    Submit,
    Unlock,
    prompt_len,
)  # fmt: skip
from reference.cursors import sweep_limit
from reference.ledger import free, text_len
from reference.prefix_cache import guests, key_of
from reference.tree import Key, Sizes, nodes, sizes
from stateful_tests.generate.choice_source import once_in, pick
from stateful_tests.generate.enabled import Offers, ahead_of, pages_left, room_of
from stateful_tests.generate.prompts import asked, draw_evicted, draw_prompt, spelt


def _make_open(c: Offers) -> Open:
    names = c.habits.sessions
    unknown = [s for s in names if c.state.session(s) is None]
    return Open(pick(c.chooser, names if c.rude or not unknown else unknown))


def _make_submit(c: Offers) -> Submit:
    names = c.habits.requests
    free = [r for r in names if c.state.request(r) is None]
    name = pick(c.chooser, names if c.rude or not free else free)
    idle = c.idle
    if c.rude:
        session = pick(c.chooser, (*c.habits.sessions, None))
    else:
        # What ordinary requests leave in a radix tree is for everybody.
        often = 5 if c.habits.machine == "sessions" or c.habits.ahead else 2
        ordinary = not idle or once_in(c.chooser, often)
        wiped = [s for s in c.wiped if s.turn is None]
        session = None if ordinary else pick(c.chooser, wiped or idle).name
        if wiped and session is not None and not once_in(c.chooser, 3):
            return Submit(name, session, 1)
    width = c.state.scope.geometry.width
    tokens = c.length(width // (2 if c.habits.long else 4))
    if c.habits.long and once_in(c.chooser, 2):
        tokens = 1 + c.chooser.upto(width // 2)
    if c.rude and once_in(c.chooser, 6):
        tokens = pick(c.chooser, (0, -1))
    rewind = pick(c.chooser, (1, -1)) if c.rude and once_in(c.chooser, 4) else 0
    plain = Submit(name, session, tokens, rewind)
    return plain if c.habits.machine == "sessions" or once_in(c.chooser, 6) else _prompted(c, plain)


def _prompted(c: Offers, plain: Submit) -> Submit:
    """The same with a prompt, mostly instead of tokens of its own."""
    session = c.state.session(plain.session)
    before = text_len(session.history) if session is not None else 0
    # Room for some output, and in a session for later turns: their sweeps pass what the tree has.
    quarters = (3 if c.habits.long else 2) - (plain.session is not None)
    longest = max(1, (c.state.scope.geometry.width - before) * quarters // 4)
    twins = [prompt for r in c.state.requests if (prompt := asked(r))]
    if twins and not before and once_in(c.chooser, 4):
        prompt = pick(c.chooser, twins)
    else:
        prompt = c.prompt(longest, fresh=before > 0)
    tokens = 1 + c.chooser.upto(1) if c.habits.own or once_in(c.chooser, 4) else 0
    return replace(plain, prompt=prompt, tokens=c.chooser.upto(4) - 1 if c.rude else tokens)


def _make_admit(c: Offers) -> Admit:
    return Admit(c.request(c.waiting))


def _make_extend(c: Offers) -> Extend:
    chunks = []
    for name in c.lanes(c.extending):
        request = c.state.request(name)
        done = request.cursors.kv_committed_len if request is not None and request.cursors else 0
        left = request.origin + request.output - done if request is not None else 1
        whole = not once_in(c.chooser, 3)
        tokens = left if whole else c.length(left)
        if c.habits.machine != "sessions" and request is not None and not once_in(c.chooser, 3):
            tokens = max(1, min(tokens, room_of(c.state, request.cursors)))
            if tokens == left > 1 and free(c.state).full < 2:  # a chunk for which the tree makes room
                tokens = c.length(left - 1)
        if c.rude and once_in(c.chooser, 3):
            tokens = pick(c.chooser, (left + 1, 0, -1))
        chunks.append(Chunk(name, tokens))
    return Extend(tuple(chunks))


def _make_decode(c: Offers) -> Decode:
    return Decode(tuple(c.lanes(c.running)))


def _make_spec_decode(c: Offers) -> SpecDecode:
    drafts = []
    for name in c.lanes(c.running):
        request = c.state.request(name)
        room = room_of(c.state, request.cursors if request is not None else None)
        allocate = c.length(room + c.rude)
        accept = allocate if once_in(c.chooser, 4) else 1 + c.chooser.upto(allocate - 1)
        if c.habits.ahead and not once_in(c.chooser, 3):
            allocate = max(1, room - c.chooser.upto(room // 3))
            accept = 1 if once_in(c.chooser, 2) else 1 + c.chooser.upto(allocate - 1)
        elif c.habits.ahead and request in c.running and ahead_of(request) > 1:
            allocate = accept = 1  # what is left of the round before stays ahead
        if c.rude and once_in(c.chooser, 4):
            allocate, accept = pick(c.chooser, ((allocate, allocate + 1), (0, 0), (1, 0), (-1, 1)))
        drafts.append(Draft(name, allocate, accept))
    return SpecDecode(tuple(drafts))


def _make_evict_swa(c: Offers) -> EvictSwa:
    over = [r for r in c.running if ahead_of(r) > 0] if c.habits.ahead else []
    name = c.request(over or c.held)
    request = c.state.request(name)
    cursors = request.cursors if request is not None else None
    if cursors is None:
        return EvictSwa(name, c.chooser.upto(4))
    top = cursors.kv_committed_len
    if (c.state.scope.mode is Mode.FREE or c.rude) and (c.habits.ahead or once_in(c.chooser, 3)):
        top = cursors.kv_allocated_len + (c.rude and once_in(c.chooser, 3))
    if c.rude and once_in(c.chooser, 8):
        return EvictSwa(name, -1)
    return EvictSwa(name, top if not once_in(c.chooser, 4) else c.chooser.upto(top))


def _make_finish(c: Offers) -> Finish:
    name = c.request(c.running)
    request = c.state.request(name)
    output = request.output if request is not None else 1
    if c.rude:
        return Finish(name, c.chooser.upto(output + 1))
    low = 1
    if request is not None and c.state.scope.mode is Mode.FAITHFUL:
        low = max(request.known[0] + 1, request.swept - request.origin)
    if low >= output or once_in(c.chooser, 6 if c.habits.ahead else 3):
        return Finish(name, output)
    if once_in(c.chooser, 2):  # far back: most of what was accepted was past the limit
        return Finish(name, low)
    return Finish(name, low + c.chooser.upto(output - low))


def _make_retract(c: Offers) -> Retract:
    return Retract(c.request(c.running), c.chooser.upto(3) - 1 if c.rude else c.chooser.upto(1))


def _make_abort(c: Offers) -> Abort:
    special = c.abortable
    return Abort(c.request(special if special and not c.rude else c.state.requests), once_in(c.chooser, 2))


def _make_close(c: Offers) -> Close:
    known = [s.name for s in c.closable or c.state.sessions]
    return Close(pick(c.chooser, known if known and not c.rude else c.habits.sessions))


def _make_check_busy(c: Offers) -> CheckBusy:
    return CheckBusy(pick(c.chooser, (3, -1)) if c.rude and once_in(c.chooser, 4) else 2 - c.chooser.upto(2))


def _make_check_idle(c: Offers) -> CheckIdle:  # noqa: ARG001
    return CheckIdle()


def _make_match(c: Offers) -> Match:
    staying = guests(c.state)
    name = c.guest([g for g in c.habits.guests if g not in staying])
    return Match(name, c.prompt(c.state.scope.geometry.width))


def _make_unlock(c: Offers) -> Unlock:
    return Unlock(c.guest(list(guests(c.state))))


def _make_insert(c: Offers) -> Insert:
    """Half the time somebody new inserts, else a guest whose lock can be spelt goes on from there."""
    staying = {name: key for name, key in guests(c.state).items() if prompt_len(spelt(key)) == len(key)}
    new = [g for g in c.habits.guests if g not in guests(c.state)]
    name = c.guest(new if new and (not staying or once_in(c.chooser, 2)) else list(staying))
    locked: Key = staying.get(name, ())
    geometry = c.state.scope.geometry
    longest = len(locked) + pages_left(c.state) * geometry.page_size + c.chooser.upto(geometry.page_size - 1)
    longest = max(1, min(geometry.width, longest))
    if c.rude:
        prompt = c.prompt(longest)
    else:
        after = spelt(locked) if locked else None
        prompt = draw_prompt(c.state, c.chooser, c.habits.texts, longest, after=after)
    chunked = once_in(c.chooser, 2)
    if geometry.window is None or c.state.tree is None:
        return Insert(name, prompt, int(c.rude and once_in(c.chooser, 4)), chunked)
    limit = prompt_len(prompt) + c.rude
    if c.state.scope.mode is Mode.FAITHFUL and not c.rude:
        reach = sweep_limit(prompt_len(prompt), geometry.window, geometry.page_size)
        limit = min(limit, max(len(locked), reach))
    evicted = draw_evicted(c.state, c.chooser, key_of(prompt), len(locked), limit)
    return Insert(name, prompt, -1 if c.rude and once_in(c.chooser, 8) else evicted, chunked)


def _make_evict(c: Offers) -> Evict:
    """A page, a node, all that can be had, or more; of one pool or of both."""
    geometry, tree = c.state.scope.geometry, c.state.tree
    if c.rude and once_in(c.chooser, 2):
        return Evict(*pick(c.chooser, ((0, 0), (-1, 0), (0, -1), (1, 1))))
    lengths = [len(placed.node.key) for placed in nodes(tree)] if tree is not None else []
    can = sizes(tree) if tree is not None else Sizes(0, 0, 0, 0)

    def amount(evictable: int) -> int:
        node = pick(c.chooser, lengths or [1])
        return pick(c.chooser, (*[geometry.page_size] * 2, node, max(1, evictable), evictable + 1))

    # SWA alone leaves tombstones: as often as the other two together.
    pools = pick(c.chooser, ("full", "swa", "swa", "both")) if geometry.window is not None else "full"
    full = amount(can.full_evictable) if pools != "swa" else 0
    return Evict(full, amount(can.swa_evictable) if pools != "full" else 0)


MAKERS: dict[type, Callable[[Offers], Command]] = {
    Open: _make_open,
    Submit: _make_submit,
    Admit: _make_admit,
    Extend: _make_extend,
    Decode: _make_decode,
    SpecDecode: _make_spec_decode,
    EvictSwa: _make_evict_swa,
    Finish: _make_finish,
    Retract: _make_retract,
    Abort: _make_abort,
    Close: _make_close,
    CheckBusy: _make_check_busy,
    CheckIdle: _make_check_idle,
    Match: _make_match,
    Unlock: _make_unlock,
    Insert: _make_insert,
    Evict: _make_evict,
}
