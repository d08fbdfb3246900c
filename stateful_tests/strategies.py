"""What to do next: commands drawn from the vocabulary and the reference's state, never from a system.

Mostly commands that apply, sometimes ones that must be refused. A `Chooser` makes the decisions, so
that one generator serves a plain random source (volume) and Hypothesis (shrinking, database).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from impl.adapter import Capabilities
from reference.commands import (
    COMMANDS, Abort, Admit, CheckBusy, CheckIdle, Chunk, Close, Command, Decode, Draft, EvictSwa,
    Extend, Finish, Mode, Open, Retract, SpecDecode, Submit,
)  # fmt: skip
from reference.cursors import ceil_page
from reference.geometry import Geometry
from reference.ledger import Cursors, Phase, Request, Session, State, free

T = TypeVar("T")

SESSIONS = ("s1", "s2", "s3")
REQUESTS = ("r1", "r2", "r3", "r4")


class Chooser(Protocol):
    """A source of decisions."""

    def upto(self, high: int) -> int:
        """A whole number in [0, high]."""
        ...


class RandomChooser:
    """Decisions from a seeded random source."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed).random

    def upto(self, high: int) -> int:
        return int(self._random() * (high + 1))


def pick(chooser: Chooser, items: Sequence[T]) -> T:
    """One of `items`."""
    return items[chooser.upto(len(items) - 1)]


def once_in(chooser: Chooser, n: int) -> bool:
    """True once in `n` times."""
    return chooser.upto(n - 1) == n - 1


@dataclass(frozen=True, slots=True)
class Habits:
    """What a run is like: some commands are off, few or many names, short or long prompts.

    off: names of command classes that this run does not use. rude: once in how many commands the
    generator stops caring whether a command applies. long: prompts of half a row instead of a page.
    sessions, requests: names in use; few make long conversations, many make crowds.
    loved: command classes that this run uses four times as much. ahead: slots are allocated far past
    the commit and, in free mode, sweeps are driven with all of them. gather: requests wait for each
    other, so that batches are large.
    """

    off: frozenset[str] = frozenset()
    rude: int = 12
    long: bool = False
    sessions: tuple[str, ...] = SESSIONS
    requests: tuple[str, ...] = REQUESTS
    loved: frozenset[str] = frozenset()
    ahead: bool = False
    gather: bool = False


# Without these nothing ever runs.
_ESSENTIAL = {"Open", "Submit", "Admit", "Extend"}


def draw_geometry(chooser: Chooser, like: Geometry) -> Geometry:
    """Sizes that no preset has, with a window if `like` has one."""
    page_size = pick(chooser, (1, 2, 3, 4, 5, 8, 16))
    window = None if like.window is None else 1 + chooser.upto(4 * page_size - 1)
    width = page_size * (3 + chooser.upto(4)) + chooser.upto(page_size)
    pages = -(-width // page_size)
    full = pages + chooser.upto(2 * pages)
    swa = 0 if window is None else 2 + chooser.upto(full - 2)
    return Geometry(page_size, window, full, swa, 1 + chooser.upto(4), width)


def draw_habits(chooser: Chooser, capabilities: Capabilities) -> Habits:
    """Habits for one run, within what the system can do."""
    off = {
        name
        for name in sorted(capabilities.commands - _ESSENTIAL)
        if once_in(chooser, 6)
    }
    if not capabilities.mixed_decode or once_in(chooser, 3):
        off.add(pick(chooser, ("Decode", "SpecDecode")))
    if {"Decode", "SpecDecode"} <= off:
        off.discard("Decode")
    ahead = once_in(chooser, 2)
    if ahead:
        off -= {"SpecDecode", "EvictSwa", "Finish"}
        if not capabilities.mixed_decode:
            off.add("Decode")
    off |= {c.__name__ for c in _MAKERS} - capabilities.commands
    return Habits(
        frozenset(off),
        pick(chooser, (6, 12, 30)),
        once_in(chooser, 3) and not ahead,
        SESSIONS[: 1 + chooser.upto(len(SESSIONS) - 1)],
        REQUESTS[: 1 + chooser.upto(len(REQUESTS) - 1)],
        frozenset(pick(chooser, COMMANDS).__name__ for _ in range(chooser.upto(3))),
        ahead,
        once_in(chooser, 4),
    )


def propose(state: State, chooser: Chooser, habits: Habits) -> Command:
    """The next command for `state`."""
    rude = once_in(chooser, habits.rude)
    context = _Context(state, chooser, habits, rude)
    weights = _weights(context)
    kinds = [k for k in _MAKERS if k.__name__ not in habits.off and (rude or weights[k])]
    total = [max(1, weights[k]) * (4 if k.__name__ in habits.loved else 1) for k in kinds]
    at = chooser.upto(sum(total) - 1)
    while at >= total[0]:
        at -= total.pop(0)
        kinds.pop(0)
    return _MAKERS[kinds[0]](context)


def applies(kind: type, state: State) -> bool:
    """Whether a command of this kind has something to work on."""
    return bool(_weights(_Context(state, RandomChooser(0), Habits(), rude=False))[kind])


def draw_command(kind: type, state: State, chooser: Chooser) -> Command:
    """A command of one kind; once in a while one that does not apply."""
    return _MAKERS[kind](_Context(state, chooser, Habits(), once_in(chooser, 8)))


def _weights(c: _Context) -> dict[type, int]:
    """How much each kind of command is called for; 0 where it has nothing to work on."""
    state, habits = c.state, c.habits
    resumable = [s for s in c.idle if s.slot is not None]
    admitted = any(r.phase is Phase.ADMITTED for r in state.requests)
    queued = any(r.phase is Phase.QUEUED for r in state.requests)
    crowded = len(state.requests) >= len(habits.requests)
    free_mode = state.scope.mode is Mode.FREE
    # In a run that allocates ahead: sweep over it, then take it back.
    ahead = habits.ahead and free_mode and any(_ahead(r) > 0 for r in c.running)
    swept = habits.ahead and free_mode and any(_cursors(r).swa_evicted_seqlen > r.origin for r in c.running)
    # A frontier inside a page (free mode alone) is there for as long as the slot is idle: count it.
    page_size = state.scope.geometry.page_size
    odd = any(s.slot is not None and s.slot.swa_evicted_seqlen % page_size for s in resumable)
    submit = 9 if resumable else 6 if c.idle or len(state.requests) < 2 else 0
    weights = {
        Open: 4 * (len(state.sessions) < len(habits.sessions)),
        Submit: 0 if crowded else submit,
        Admit: 8 * queued + 2 * admitted,
        Extend: 10 * bool(c.extending),
        Decode: 5 * bool(c.running),
        SpecDecode: 6 * bool(c.running),
        EvictSwa: (20 if ahead else 5) * bool(c.held) * (state.scope.geometry.window is not None),
        Finish: (20 if swept else 6) * bool(c.running),
        Retract: (10 if swept else 3) * bool(c.running),
        Abort: 1 * bool(state.requests),
        Close: 1 * bool(state.sessions),
        CheckBusy: (30 if odd else 6 if habits.ahead else 3) * bool(resumable or c.held),
        CheckIdle: 2 * (bool(resumable) and not c.held),
    }
    if habits.gather:
        weights[Submit] *= 2
        if queued:
            weights[Extend] = min(1, weights[Extend])
        if queued or c.extending:
            for kind in (Decode, SpecDecode, Finish, Retract):
                weights[kind] = min(1, weights[kind])
    return weights


def _cursors(request: Request) -> Cursors:
    """Cursors of a request that has some."""
    assert request.cursors is not None
    return request.cursors


def _ahead(request: Request) -> int:
    """Tokens that are allocated past the commit and were not swept."""
    c = _cursors(request)
    return c.kv_allocated_len - max(c.kv_committed_len, c.swa_evicted_seqlen)


@dataclass(slots=True)
class _Context:
    """What the makers below look at."""

    state: State
    chooser: Chooser
    habits: Habits
    rude: bool

    def _in(self, *phases: Phase) -> list[Request]:
        return [r for r in self.state.requests if r.phase in phases]

    @property
    def waiting(self) -> list[Request]:
        return self._in(Phase.QUEUED, Phase.ADMITTED)

    @property
    def extending(self) -> list[Request]:
        return self._in(Phase.ADMITTED, Phase.EXTENDING)

    @property
    def running(self) -> list[Request]:
        return self._in(Phase.RUNNING)

    @property
    def held(self) -> list[Request]:
        return self._in(Phase.EXTENDING, Phase.RUNNING)

    @property
    def idle(self) -> list[Session]:
        return [s for s in self.state.sessions if s.turn is None and not s.closing]

    def request(self, fitting: Sequence[Request]) -> str:
        """A request that fits; any name at all when rude or when none does."""
        if fitting and not (self.rude and once_in(self.chooser, 2)):
            return pick(self.chooser, fitting).name
        return pick(self.chooser, self.habits.requests)

    def lanes(self, fitting: Sequence[Request]) -> list[str]:
        """Distinct requests that fit, often all of them; when rude, perhaps one twice or none."""
        if self.rude and once_in(self.chooser, 8):
            return []
        rest = [r.name for r in fitting]
        count = len(rest) if once_in(self.chooser, 2) else 1 + self.chooser.upto(max(0, len(rest) - 1))
        names = [rest.pop(self.chooser.upto(len(rest) - 1)) for _ in range(min(count, len(rest)))]
        if not names or (self.rude and once_in(self.chooser, 3)):
            names.append(pick(self.chooser, self.habits.requests))
        return names

    def length(self, high: int) -> int:
        """A length in [1, high], often at a page or window boundary, give or take one."""
        high = max(1, high)
        geometry = self.state.scope.geometry
        if once_in(self.chooser, 2):
            return 1 + self.chooser.upto(min(high, 2 * geometry.page_size + 1) - 1)
        edge = pick(self.chooser, (geometry.page_size, geometry.window or 1, 2 * geometry.page_size))
        return max(1, min(high, edge - 1 + self.chooser.upto(2)))


def _room(state: State, cursors: Cursors | None) -> int:
    """Tokens past the commit that still fit row and pools."""
    geometry = state.scope.geometry
    if cursors is None:
        return geometry.width
    left = free(state)
    pages = left.full if geometry.window is None else min(left.full, left.swa)
    reach = ceil_page(cursors.kv_allocated_len, geometry.page_size) + pages * geometry.page_size
    return min(geometry.width, reach) - cursors.kv_committed_len


def _make_open(c: _Context) -> Open:
    names = c.habits.sessions
    unknown = [s for s in names if c.state.session(s) is None]
    return Open(pick(c.chooser, names if c.rude or not unknown else unknown))


def _make_submit(c: _Context) -> Submit:
    names = c.habits.requests
    free = [r for r in names if c.state.request(r) is None]
    name = pick(c.chooser, names if c.rude or not free else free)
    idle = c.idle
    if c.rude:
        session = pick(c.chooser, (*c.habits.sessions, None))
    else:
        session = pick(c.chooser, [s.name for s in idle]) if idle and not once_in(c.chooser, 5) else None
    width = c.state.scope.geometry.width
    tokens = c.length(width // (2 if c.habits.long else 4))
    if c.habits.long and once_in(c.chooser, 2):
        tokens = 1 + c.chooser.upto(width // 2)
    if c.rude and once_in(c.chooser, 6):
        tokens = pick(c.chooser, (0, -1))
    return Submit(name, session, tokens, pick(c.chooser, (1, -1)) if c.rude and once_in(c.chooser, 4) else 0)


def _make_admit(c: _Context) -> Admit:
    return Admit(c.request(c.waiting))


def _make_extend(c: _Context) -> Extend:
    chunks = []
    for name in c.lanes(c.extending):
        request = c.state.request(name)
        done = request.cursors.kv_committed_len if request is not None and request.cursors else 0
        left = request.origin + request.output - done if request is not None else 1
        whole = not once_in(c.chooser, 3)
        tokens = left if whole else c.length(left)
        if c.rude and once_in(c.chooser, 3):
            tokens = pick(c.chooser, (left + 1, 0, -1))
        chunks.append(Chunk(name, tokens))
    return Extend(tuple(chunks))


def _make_decode(c: _Context) -> Decode:
    return Decode(tuple(c.lanes(c.running)))


def _make_spec_decode(c: _Context) -> SpecDecode:
    drafts = []
    for name in c.lanes(c.running):
        request = c.state.request(name)
        room = _room(c.state, request.cursors if request is not None else None)
        allocate = c.length(room + c.rude)
        accept = allocate if once_in(c.chooser, 4) else 1 + c.chooser.upto(allocate - 1)
        if c.habits.ahead and not once_in(c.chooser, 3):
            allocate = max(1, room - c.chooser.upto(room // 2))
            accept = 1 if once_in(c.chooser, 2) else 1 + c.chooser.upto(allocate - 1)
        if c.rude and once_in(c.chooser, 4):
            allocate, accept = pick(c.chooser, ((allocate, allocate + 1), (0, 0), (1, 0), (-1, 1)))
        drafts.append(Draft(name, allocate, accept))
    return SpecDecode(tuple(drafts))


def _make_evict_swa(c: _Context) -> EvictSwa:
    name = c.request(c.held)
    request = c.state.request(name)
    cursors = request.cursors if request is not None else None
    if cursors is None:
        return EvictSwa(name, c.chooser.upto(4))
    top = cursors.kv_committed_len
    if c.state.scope.mode is Mode.FREE and (c.habits.ahead or once_in(c.chooser, 3)):
        top = cursors.kv_allocated_len + (c.rude and once_in(c.chooser, 3))
    if c.rude and once_in(c.chooser, 8):
        return EvictSwa(name, -1)
    return EvictSwa(name, top if not once_in(c.chooser, 4) else c.chooser.upto(top))


def _make_finish(c: _Context) -> Finish:
    name = c.request(c.running)
    request = c.state.request(name)
    output = request.output if request is not None else 1
    if c.rude:
        return Finish(name, c.chooser.upto(output + 1))
    low = 1
    if request is not None and c.state.scope.mode is Mode.FAITHFUL:
        low = max(request.known[0] + 1, request.swept - request.origin)
    if low >= output or once_in(c.chooser, 3):
        return Finish(name, output)
    if once_in(c.chooser, 2):  # far back: most of what was accepted was past the limit
        return Finish(name, low)
    return Finish(name, low + c.chooser.upto(output - low))


def _make_retract(c: _Context) -> Retract:
    return Retract(c.request(c.running), c.chooser.upto(3) - 1 if c.rude else c.chooser.upto(1))


def _make_abort(c: _Context) -> Abort:
    return Abort(c.request(c.state.requests), once_in(c.chooser, 3))


def _make_close(c: _Context) -> Close:
    known = [s.name for s in c.state.sessions]
    return Close(pick(c.chooser, known if known and not c.rude else c.habits.sessions))


def _make_check_busy(c: _Context) -> CheckBusy:
    return CheckBusy(pick(c.chooser, (3, -1)) if c.rude and once_in(c.chooser, 4) else 2 - c.chooser.upto(2))


def _make_check_idle(c: _Context) -> CheckIdle:  # noqa: ARG001
    return CheckIdle()


_MAKERS: dict[type, Callable[[_Context], Command]] = {
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
}


def finale(state: State) -> list[Command]:
    """Commands that end everything: abort what runs, close what is open."""
    ends: list[Command] = [Abort(r.name) for r in state.requests]
    closing = {s.name for s in state.sessions if s.closing}
    return ends + [Close(s.name) for s in state.sessions if s.name not in closing]
