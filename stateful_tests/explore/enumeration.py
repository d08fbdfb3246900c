"""Every command of a scope in a state, by what it is about: one unit, two of them, or none in particular.

A unit is a session with its turn, an ordinary request, or a lock holder of the tree. Where a command is
refused whatever its parameters are, one value stands for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from reference.commands import (
    COMMANDS, Abort, Admit, CheckBusy, CheckIdle, Chunk, Close, Command, Decode, Draft, Evict, EvictSwa,
    Extend, Finish, Insert, Launch, Match, Open, Prompt, Retract, Settle, SpecDecode, Submit, Unlock,
    UnlockSwa, prompt_len,
)  # fmt: skip
from reference.cursors import floor_page
from reference.geometry import Geometry
from reference.state import IN_BATCH, Phase, Request, Session
from reference.prefix_cache import key_of
from reference.radix_tree import Key
from stateful_tests.coverage.scopes import Scope
from stateful_tests.traces.files import prompt_of


class Names(NamedTuple):
    """Names that nobody has."""

    session: str
    request: str
    lock_holder: str


def kinds(scope: Scope) -> list[type]:
    """The kinds of commands that a scope has, in the order of the vocabulary."""
    served = bool(scope.sessions or scope.ordinary)
    used = {
        Open: bool(scope.sessions), Close: bool(scope.sessions),
        Submit: served, Admit: served, Extend: served, Finish: served,
        Decode: served and scope.decode, SpecDecode: served and scope.ahead > 0,
        EvictSwa: served and scope.window_evictions, Retract: served and scope.retracts,
        Abort: served and scope.aborts, CheckBusy: scope.checks, CheckIdle: scope.checks,
        Match: bool(scope.lock_holders), Insert: bool(scope.lock_holders), Unlock: bool(scope.lock_holders),
        UnlockSwa: scope.parts, Evict: scope.evicts and scope.geometry.tree,
        Launch: scope.late, Settle: scope.late,
    }  # fmt: skip
    return [kind for kind in COMMANDS if used[kind]]


def of_session(scope: Scope, session: Session, turn: Request | None, fresh: Names) -> Iterator[Command]:
    """Commands about a session and its turn."""
    name = session.name
    yield Close(name)
    for tokens in scope.submits if turn is None and not session.closing else scope.submits[:1]:
        yield Submit(fresh.request, name, tokens)
    if turn is None and not session.closing:
        for prompt in _prompts(scope):
            yield from (Submit(fresh.request, name, tokens, 0, prompt) for tokens in (0, *scope.submits))
    if scope.invalid:
        yield from (Open(name), Submit(fresh.request, name, 1, 1), Submit(fresh.request, name, 1, -1))
        yield from _as_lock_holder(scope, name)
    if turn is not None:
        yield from of_request(scope, turn)


def of_request(scope: Scope, request: Request) -> Iterator[Command]:
    """Commands about a request."""
    for part in (_prefill, _rounds, _evictions, _ends, _misuses):
        yield from part(scope, request)


def _prefill(scope: Scope, request: Request) -> Iterator[Command]:
    """Admissions, and chunks of every size."""
    name, phase = request.name, request.phase
    if scope.invalid or phase in (Phase.QUEUED, Phase.ADMITTED):
        yield Admit(name)
    if phase in (Phase.ADMITTED, Phase.EXTENDING):
        for tail in {False, scope.tails}:
            yield from (Extend((Chunk(name, n, tail),)) for n in _chunks(scope, request, over=1))
    elif scope.invalid:
        yield Extend((Chunk(name, 1, scope.tails),))


def _rounds(scope: Scope, request: Request) -> Iterator[Command]:
    """Decode and verify rounds, with results at once and later."""
    name, runs = request.name, request.phase is Phase.RUNNING
    if not (runs or scope.invalid):
        return
    drafts = [Draft(name, *draft) for draft in (_drafts(scope) if runs else [(1, 1)])]
    drafts += [Draft(name, 1, 2)] * (runs and scope.invalid)
    if scope.decode:
        yield Decode((name,))
    if scope.ahead:
        yield from (SpecDecode((draft,)) for draft in drafts)
    if scope.late:
        yield from (Launch((draft,)) for draft in drafts)
        yield Settle(name)


def _evictions(scope: Scope, request: Request) -> Iterator[Command]:
    """Window evictions with every length."""
    if scope.window_evictions and request.phase in IN_BATCH:
        assert request.cursors is not None
        lengths = range(request.cursors.kv_allocated_len + 1 + scope.invalid)
        yield from (EvictSwa(request.name, length) for length in lengths)
    elif scope.window_evictions and scope.invalid:
        yield EvictSwa(request.name, 0)


def _ends(scope: Scope, request: Request) -> Iterator[Command]:
    """Finishes, retracts and aborts."""
    name, invalid, runs = request.name, scope.invalid, request.phase is Phase.RUNNING
    for finished in range(1, request.output + 1 + invalid) if runs else [1] * invalid:
        yield Finish(name, finished)
    if scope.parts and (invalid or request.phase in IN_BATCH):
        yield UnlockSwa(name)
    if scope.retracts and (runs or invalid):
        yield from (Retract(name, in_flight) for in_flight in ((0, 1) if runs else (0,)))
    if scope.aborts:
        yield Abort(name)
        waits = request.phase is Phase.QUEUED and not request.started
        if scope.marked and (invalid or waits):
            yield Abort(name, marked=True)


def _misuses(scope: Scope, request: Request) -> Iterator[Command]:
    """Its name, taken for that of another."""
    if scope.invalid:
        yield from (Submit(request.name, None, 1), *_as_lock_holder(scope, request.name))


def of_two(scope: Scope, one: Request, two: Request) -> Iterator[Command]:
    """Batches of two requests. Their order counts only where both go into the radix tree."""
    if not scope.batches:
        return
    names = one.name, two.name
    if all(r.phase in (Phase.ADMITTED, Phase.EXTENDING) for r in (one, two)):
        for tokens in product(*(_chunks(scope, r) for r in (one, two))):
            lanes = tuple(map(Chunk, names, tokens))
            yield Extend(lanes)
            if scope.geometry.tree:
                yield Extend(lanes[::-1])
    running = [r for r in (one, two) if r.phase is Phase.RUNNING]
    if scope.decode and len(running) == 1:  # a mixed batch
        other = two if running[0] is one else one
        if other.phase in (Phase.ADMITTED, Phase.EXTENDING):
            for n in _chunks(scope, other):
                yield Extend((Chunk(other.name, n), Chunk(running[0].name, 1)))
    if len(running) == 2:
        if scope.decode:
            yield Decode(names)
        for a, b in product(_drafts(scope), _drafts(scope)):
            lanes_of_two = Draft(names[0], *a), Draft(names[1], *b)
            yield SpecDecode(lanes_of_two)
            if scope.late:
                yield Launch(lanes_of_two)


def of_lock_holder(scope: Scope, name: str, locked: Key) -> Iterator[Command]:
    """Commands about a lock holder that has `locked` locked."""
    yield Unlock(name)
    if scope.parts:
        yield UnlockSwa(name)
    strangers = 0
    for prompt in _prompts(scope):
        if key_of(prompt)[: len(locked)] == locked:
            yield from _inserts(scope, name, prompt)
        else:
            strangers += 1
            if scope.invalid and strangers == 1:
                yield Insert(name, prompt)
    if scope.invalid:
        yield from (Open(name), Submit(name, None, 1), Match(name, _prompts(scope)[0]))


def of_nobody(
    scope: Scope, sessions: int, ordinary: int, lock_holders: int, fresh: Names
) -> Iterator[Command]:
    """Commands about whoever is not there yet (there are so many), about the tree, about everybody."""
    if sessions < scope.sessions:
        yield Open(fresh.session)
    if ordinary < scope.ordinary:
        for tokens in scope.submits:
            yield Submit(fresh.request, None, tokens)
        for prompt in _prompts(scope):
            yield from (Submit(fresh.request, None, tokens, 0, prompt) for tokens in (0, *scope.submits))
    if lock_holders < scope.lock_holders:
        for prompt in _prompts(scope):
            yield from (Match(fresh.lock_holder, prompt, alone) for alone in {False, scope.parts})
            yield from _inserts(scope, fresh.lock_holder, prompt)
    if scope.evicts and scope.geometry.tree:
        size = scope.geometry.page_size
        for full, swa in product(range(scope.geometry.full_pages + 1), range(scope.geometry.swa_pages + 1)):
            if full or swa:
                yield Evict(full * size, swa * size)
    if scope.checks:
        yield from (CheckBusy(0), CheckBusy(1), CheckBusy(2), CheckIdle())
    if scope.invalid:
        served = set(kinds(scope))
        yield from (command for command in _ill_formed(scope, fresh) if type(command) in served)


def _ill_formed(scope: Scope, fresh: Names) -> Iterator[Command]:
    """What is refused in every state; and what names nobody."""
    session, request, lock_holder = fresh
    if scope.sessions or scope.ordinary:
        yield from (Close(session), Submit(request, session, 1), Submit(request, None, 0))
        yield Submit(request, None, scope.geometry.width + 1)
        yield from (Admit(request), Extend((Chunk(request, 1),)), Extend(()), Extend((Chunk(request, 0),)))
        yield from (Finish(request, 1), Retract(request), Abort(request), Decode((request,)), Decode(()))
        yield from (Decode((request, request)), EvictSwa(request, 0), CheckBusy(3))
        yield from (SpecDecode(()), SpecDecode((Draft(request, 1, 1),)), Settle(request))
        yield from (Launch(()), Launch((Draft(request, 1, 1),)), Launch((Draft(request, 1, 1),) * 2))
        yield from (Extend((Chunk(request, 1),) * 2), SpecDecode((Draft(request, 1, 1),) * 2))
    if scope.lock_holders:
        some = prompt_of("a1")
        yield from (
            Match(lock_holder, ()),
            Match(lock_holder, prompt_of(f"a{scope.geometry.width + 1}")),
            Unlock(lock_holder), UnlockSwa(lock_holder),
        )
        yield from (Insert(lock_holder, ()), Insert(lock_holder, some, 2), Evict(0, 0), Evict(-1))
        if scope.geometry.window is None:
            yield from (Insert(lock_holder, some, 1), Evict(0, 1))


def _as_lock_holder(scope: Scope, name: str) -> Iterator[Command]:
    """A session or a request taken for a lock holder."""
    if scope.lock_holders:
        prompt = _prompts(scope)[0]
        yield from (Match(name, prompt), Insert(name, prompt), Unlock(name))


def _chunks(scope: Scope, request: Request, over: int = 0) -> range:
    """Sizes of the next chunk; `over`: so many too long ones."""
    assert request.cursors is not None
    rest = request.origin + request.output - request.cursors.kv_committed_len
    most = rest if scope.chunks is None else min(rest, scope.chunks)
    return range(1, most + 1 + (over if scope.invalid and most == rest else 0))


def _drafts(scope: Scope) -> list[tuple[int, int]]:
    return [(ahead, accept) for ahead in range(1, scope.ahead + 1) for accept in range(1, ahead + 1)]


_PROMPTS: dict[tuple[str, ...], tuple[Prompt, ...]] = {}


def _prompts(scope: Scope) -> tuple[Prompt, ...]:
    if scope.prompts not in _PROMPTS:
        _PROMPTS[scope.prompts] = tuple(map(prompt_of, scope.prompts))
    return _PROMPTS[scope.prompts]


def _inserts(scope: Scope, name: str, prompt: Prompt) -> Iterator[Command]:
    """A prompt inserted, with each number of its pages evicted; one number inside a page."""
    for chunked in (False, True):
        yield from (Insert(name, prompt, evicted, chunked) for evicted in _evicted(scope.geometry, prompt))


def _evicted(geometry: Geometry, prompt: Prompt) -> Iterator[int]:
    length, size = prompt_len(prompt), geometry.page_size
    if geometry.window is None:
        yield 0
        return
    yield from range(0, floor_page(length, size) + 1, size)
    if size > 1 and length > 1:
        yield 1
