"""What to do next: commands drawn from the vocabulary and the reference's state, never from a system.

Mostly commands that apply, sometimes ones that must be refused. A `Chooser` makes the decisions, so
that one generator serves a plain random source (volume) and Hypothesis (shrinking, database).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from impl.adapter import Capabilities
from reference.caching import guests, key_of
from reference.commands import (
    COMMANDS, TREE_COMMANDS, Abort, Admit, CheckBusy, CheckIdle, Chunk, Close, Command, Decode, Draft, Evict,
    EvictSwa, Extend, Finish, Insert, Match, Mode, Open, Piece, Prompt, Retract, SpecDecode, Submit, Unlock,
    prompt_len,
)  # fmt: skip
from reference.cursors import ceil_page, sweep_limit
from reference.geometry import Geometry
from reference.ledger import Cursors, Phase, Request, Session, State, free, text_len
from reference.tree import Key, Sizes, nodes, sizes
from stateful_tests.choosers import Chooser, RandomChooser, once_in, pick
from stateful_tests.prompts import asked, draw_evicted, draw_length, draw_prompt, spelt

SESSIONS = ("s1", "s2", "s3")
REQUESTS = ("r1", "r2", "r3", "r4")
GUESTS = ("h1", "h2", "h3")
TEXTS = "abc"

# What is driven, by name: sessions and requests without a radix tree, the tree by itself, both together.
MACHINES: dict[str, tuple[type, ...]] = {
    "sessions": tuple(c for c in COMMANDS if c not in TREE_COMMANDS),
    "tree": (*TREE_COMMANDS, CheckBusy, CheckIdle),
    "both": COMMANDS,
}


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
    machine: str = "sessions"
    guests: tuple[str, ...] = GUESTS
    texts: str = TEXTS
    own: bool = False


# Without these nothing ever runs.
_ESSENTIAL = {"Open", "Submit", "Admit", "Extend", "Insert"}


def draw_geometry(chooser: Chooser, like: Geometry) -> Geometry:
    """Sizes that no preset has, with a window and a radix tree if `like` has one."""
    page_size = pick(chooser, (1, 2, 3, 4, 5, 8, 16))
    window = None if like.window is None else 1 + chooser.upto(4 * page_size - 1)
    width = page_size * (3 + chooser.upto(4)) + chooser.upto(page_size)
    pages = -(-width // page_size)
    full = pages + chooser.upto(2 * pages)
    swa = 0 if window is None else 2 + chooser.upto(full - 2)
    return Geometry(page_size, window, full, swa, 1 + chooser.upto(4), width, like.tree)


def draw_habits(chooser: Chooser, capabilities: Capabilities, machine: str = "sessions") -> Habits:
    """Habits for one run of a machine, within what the system can do."""
    kinds = {c.__name__ for c in MACHINES[machine]}
    off = {name for name in sorted((capabilities.commands & kinds) - _ESSENTIAL) if once_in(chooser, 6)}
    if not capabilities.mixed_decode or once_in(chooser, 3):
        off.add(pick(chooser, ("Decode", "SpecDecode")))
    if {"Decode", "SpecDecode"} <= off:
        off.discard("Decode")
    ahead = once_in(chooser, 2)
    if ahead:
        off -= {"SpecDecode", "EvictSwa", "Finish"}
        if not capabilities.mixed_decode:
            off.add("Decode")
    off |= {c.__name__ for c in _MAKERS} - (capabilities.commands & kinds)
    habits = Habits(
        frozenset(off),
        pick(chooser, (6, 12, 30)),
        once_in(chooser, 3) and not ahead,
        SESSIONS[: 1 + chooser.upto(len(SESSIONS) - 1)],
        REQUESTS[: 1 + chooser.upto(len(REQUESTS) - 1)],
        frozenset(pick(chooser, MACHINES[machine]).__name__ for _ in range(chooser.upto(3))),
        ahead,
        once_in(chooser, 4),
        machine,
    )
    if machine == "sessions":
        return habits
    crowd = 1 + chooser.upto(len(GUESTS) - 1)
    if machine == "both":  # whoever stays takes room from the others
        crowd = min(crowd, chooser.upto(2))
        habits = replace(habits, sessions=habits.sessions[:2])
    texts = TEXTS[: 1 + chooser.upto(len(TEXTS) - 1)]
    return replace(habits, guests=GUESTS[:crowd], texts=texts, own=once_in(chooser, 4))


def propose(state: State, chooser: Chooser, habits: Habits) -> Command:
    """The next command for `state`."""
    rude = once_in(chooser, habits.rude)
    context = _Context(state, chooser, habits, rude)
    weights = _weights(context)
    used = [k for k in _MAKERS if k.__name__ not in habits.off]
    kinds = [k for k in used if rude or weights[k]] or used  # a small engine may have come to a stop
    total = [max(1, weights[k]) * (4 if k.__name__ in habits.loved else 1) for k in kinds]
    at = chooser.upto(sum(total) - 1)
    while at >= total[0]:
        at -= total.pop(0)
        kinds.pop(0)
    return _MAKERS[kinds[0]](context)


def applies(kind: type, state: State, machine: str = "sessions") -> bool:
    """Whether a command of this kind has something to work on."""
    return bool(_weights(_Context(state, RandomChooser(0), Habits(machine=machine), rude=False))[kind])


def draw_command(kind: type, state: State, chooser: Chooser, machine: str = "sessions") -> Command:
    """A command of one kind; once in a while one that does not apply."""
    return _MAKERS[kind](_Context(state, chooser, Habits(machine=machine), once_in(chooser, 8)))


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
    # A turn that may overshoot: let it, before it ends.
    short = habits.ahead and free_mode and any(_may_overshoot(state, r) for r in c.running)
    submit = 9 if resumable else 6 if c.idle or len(state.requests) < 2 else 0
    weights = {
        Open: 4 * (len(state.sessions) < len(habits.sessions)),
        Submit: 0 if crowded else submit,
        Admit: 8 * queued + (8 if c.wiped else 2) * admitted,
        Extend: 10 * bool(c.extending),
        Decode: 5 * bool(c.running),
        SpecDecode: (24 if short else 6) * bool(c.running),
        EvictSwa: (20 if ahead else 5) * bool(c.held) * (state.scope.geometry.window is not None),
        Finish: (20 if swept else 1 if short else 6) * bool(c.running),
        Retract: (30 if swept else 3) * bool(c.running),
        Abort: 1 * bool(state.requests) + 5 * bool(c.abortable),
        Close: 1 * bool(state.sessions) + 2 * bool(c.closable),
        CheckBusy: (30 if odd else 6 if habits.ahead else 3) * bool(resumable or c.held),
        CheckIdle: 2 * (bool(resumable) and not c.held),
    }
    if habits.machine != "sessions":
        weights |= _tree_weights(c)
    if habits.gather:
        weights[Submit] *= 2
        if queued:
            weights[Extend] = min(1, weights[Extend])
        if queued or c.extending:
            for kind in (Decode, SpecDecode, Finish, Retract):
                weights[kind] = min(1, weights[kind])
    return weights


def _tree_weights(c: _Context) -> dict[type, int]:
    """The same for the commands of the radix tree, and for the checks where it is alone."""
    assert c.state.tree is not None
    alone = c.habits.machine == "tree"
    staying, names = len(guests(c.state)), len(c.habits.guests)
    cached = bool(c.state.tree.children)
    weights: dict[type, int] = {
        Match: (6 if alone else 2) * (staying < names) * (1 + cached),
        Unlock: (4 if alone else 2) * min(staying, 2),
        Insert: 12 if alone else 4 * bool(names),
        Evict: (5 if alone else 1) * cached,
    }
    if alone:
        weights |= dict.fromkeys((CheckBusy, CheckIdle), 1)
    elif _pages_left(c.state) < 2 or not free(c.state).rows:  # nothing gets on: somebody has to go
        weights |= {kind: weight * bool(c.running) for kind, weight in ((Finish, 12), (Retract, 8))}
        weights |= {Extend: 3 * bool(c.extending), Close: 3 * bool(c.state.sessions)}
        weights[Unlock] *= 3
    return weights


def _cursors(request: Request) -> Cursors:
    """Cursors of a request that has some."""
    assert request.cursors is not None
    return request.cursors


def _may_overshoot(state: State, request: Request) -> bool:
    """A turn that has less allocated ahead than a sweep needs to pass its end, and room for that much."""
    c, geometry = _cursors(request), state.scope.geometry
    need = (geometry.window or 0) + 2 * geometry.page_size
    if request.session is None or c.swa_evicted_seqlen > request.origin:
        return False
    return c.kv_allocated_len - c.kv_committed_len <= need < _room(state, c)


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

    @property
    def abortable(self) -> list[Request]:
        """Requests of which an abort must give back something out of the ordinary: a lock alone, the lock
        of a slot, what a closing session has; or for which it must evict."""
        return [r for r in self.state.requests if self._abortable(r)]

    def _abortable(self, r: Request) -> bool:
        session = self.state.session(r.session)
        if not r.started and r.phase is Phase.QUEUED:
            return (session is not None and session.closing) or not free(self.state).full
        later = not r.started or (session is not None and bool(session.history))
        return bool(r.cursors and r.cursors.cache_protected_len) and later

    @property
    def wiped(self) -> list[Session]:
        """Sessions that an abort has left without a slot: the next turn computes their history again."""
        return [s for s in self.state.sessions if s.history and s.slot is None and not s.closing]

    @property
    def closable(self) -> list[Session]:
        """Sessions whose turn waits, and has not begun."""
        waiting = {r.session for r in self._in(Phase.QUEUED) if not r.started}
        return [s for s in self.state.sessions if s.name in waiting and not s.closing]

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

    def prompt(self, longest: int, *, fresh: bool = False) -> Prompt:
        """A prompt; when rude, perhaps an empty one or one with a piece of no tokens. fresh: it goes on
        where no other prompt ends, so that meeting what is known is of no use."""
        if self.rude and once_in(self.chooser, 3):
            return pick(self.chooser, ((), (Piece("a", 0),), (Piece("a", 4), Piece("b", -1))))
        if fresh:
            length = draw_length(self.state, self.chooser, longest)
            text = pick(self.chooser, self.habits.texts)
            others = [other for other in TEXTS if other != text]
            if length > 1 and once_in(self.chooser, 6):
                return (Piece(text, length - 1), Piece(pick(self.chooser, others), 1))
            return (Piece(text, length),)
        if self.rude and once_in(self.chooser, 3):
            longest += self.state.scope.geometry.width
        return draw_prompt(self.state, self.chooser, self.habits.texts, longest)

    def guest(self, fitting: Sequence[str]) -> str:
        """A guest that fits; any name at all when rude or when none does."""
        if fitting and not (self.rude and once_in(self.chooser, 2)):
            return pick(self.chooser, fitting)
        others = (*(r.name for r in self.state.requests), *(s.name for s in self.state.sessions))
        return pick(self.chooser, (*self.habits.guests, *others) or GUESTS)

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
    pages = _pages_left(state)
    reach = ceil_page(cursors.kv_allocated_len, geometry.page_size) + pages * geometry.page_size
    return min(geometry.width, reach) - cursors.kv_committed_len


def _pages_left(state: State) -> int:
    """Pages that can be had in every pool, by eviction too."""
    geometry, left = state.scope.geometry, free(state)
    more = sizes(state.tree) if state.tree is not None else Sizes(0, 0, 0, 0)
    full = left.full + more.full_evictable // geometry.page_size
    return full if geometry.window is None else min(full, left.swa + more.swa_evictable // geometry.page_size)


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


def _prompted(c: _Context, plain: Submit) -> Submit:
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
        if c.habits.machine != "sessions" and request is not None and not once_in(c.chooser, 3):
            tokens = max(1, min(tokens, _room(c.state, request.cursors)))
            if tokens == left > 1 and free(c.state).full < 2:  # a chunk for which the tree makes room
                tokens = c.length(left - 1)
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
            allocate = max(1, room - c.chooser.upto(room // 3))
            accept = 1 if once_in(c.chooser, 2) else 1 + c.chooser.upto(allocate - 1)
        elif c.habits.ahead and request in c.running and _ahead(request) > 1:
            allocate = accept = 1  # what is left of the round before stays ahead
        if c.rude and once_in(c.chooser, 4):
            allocate, accept = pick(c.chooser, ((allocate, allocate + 1), (0, 0), (1, 0), (-1, 1)))
        drafts.append(Draft(name, allocate, accept))
    return SpecDecode(tuple(drafts))


def _make_evict_swa(c: _Context) -> EvictSwa:
    over = [r for r in c.running if _ahead(r) > 0] if c.habits.ahead else []
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


def _make_finish(c: _Context) -> Finish:
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


def _make_retract(c: _Context) -> Retract:
    return Retract(c.request(c.running), c.chooser.upto(3) - 1 if c.rude else c.chooser.upto(1))


def _make_abort(c: _Context) -> Abort:
    special = c.abortable
    return Abort(c.request(special if special and not c.rude else c.state.requests), once_in(c.chooser, 2))


def _make_close(c: _Context) -> Close:
    known = [s.name for s in c.closable or c.state.sessions]
    return Close(pick(c.chooser, known if known and not c.rude else c.habits.sessions))


def _make_check_busy(c: _Context) -> CheckBusy:
    return CheckBusy(pick(c.chooser, (3, -1)) if c.rude and once_in(c.chooser, 4) else 2 - c.chooser.upto(2))


def _make_check_idle(c: _Context) -> CheckIdle:  # noqa: ARG001
    return CheckIdle()


def _make_match(c: _Context) -> Match:
    staying = guests(c.state)
    name = c.guest([g for g in c.habits.guests if g not in staying])
    return Match(name, c.prompt(c.state.scope.geometry.width))


def _make_unlock(c: _Context) -> Unlock:
    return Unlock(c.guest(list(guests(c.state))))


def _make_insert(c: _Context) -> Insert:
    """Half the time somebody new inserts, else a guest whose lock can be spelt goes on from there."""
    staying = {name: key for name, key in guests(c.state).items() if prompt_len(spelt(key)) == len(key)}
    new = [g for g in c.habits.guests if g not in guests(c.state)]
    name = c.guest(new if new and (not staying or once_in(c.chooser, 2)) else list(staying))
    locked: Key = staying.get(name, ())
    geometry = c.state.scope.geometry
    longest = len(locked) + _pages_left(c.state) * geometry.page_size + c.chooser.upto(geometry.page_size - 1)
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


def _make_evict(c: _Context) -> Evict:
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
    Match: _make_match,
    Unlock: _make_unlock,
    Insert: _make_insert,
    Evict: _make_evict,
}


def finale(state: State, capabilities: Capabilities | None = None) -> list[Command]:
    """Commands that end everything: abort what runs, close what is open, and empty the radix tree."""
    ends: list[Command] = [Abort(r.name) for r in state.requests]
    closing = {s.name for s in state.sessions if s.closing}
    ends += [Close(s.name) for s in state.sessions if s.name not in closing]
    if state.tree is not None:
        geometry = state.scope.geometry
        everything = [geometry.pages(pool) * geometry.page_size for pool in geometry.pools]
        ends += [*(Unlock(name) for name in guests(state)), Evict(*everything), CheckIdle()]
    offered = (capabilities or Capabilities()).commands
    return [command for command in ends if type(command).__name__ in offered]
