"""Actions of admission, prefill and the tree."""

from __future__ import annotations

from impl.sglang.server import events as log
from reference.clauses.step import cursors_text
from reference.commands import Admit, Choice, Chunk, EvictSwa, Extend, Reason
from reference.state import Cursors, Phase, Request, Session
from stateful_tests.watched import deviations
from stateful_tests.watched.actions.batch_rounds import catches_up, prepared
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.violated_clauses import Shown


@action(
    log.Admitted,
    guard="as the turn of its session",
    commands="admit, if the session has a slot",
    compared="cursors of the request",
)
def admitted(beside: LogFollower, e: log.Admitted) -> None:
    request = beside.request(e.request)
    beside.interrupts(e.request)
    if request.session is not None and e.session is None:
        request = orphaned(beside, request)
    beside.of(e.request).matched = e.prefix
    session = beside.session_of(request)
    cursors = Cursors(*e.cursors)
    if request.phase not in (Phase.QUEUED, Phase.ADMITTED):
        beside.stands(e.request, cursors)
        beside.result.next_chunk = request.phase is Phase.EXTENDING
    elif session is not None and session.slot is not None:
        beside.result.reach("a turn that resumes")
        beside.result.reach("a tail that admission frees", session.slot.kv_allocated_len > e.prefix)
        beside.pages.cut(session.name, cursors.kv_committed_len)
        if beside.header.states:
            _state_resumes(beside, e.request, session, e.prefix)
        beside.do(Admit(e.request), shown=Shown({e.request: cursors}, {session.name: cursors}))
    else:
        beside.of(e.request).has_state |= bool(beside.header.states and e.session and e.prefix)
        offered = e.cursors[3] if beside.header.tree and e.cursors[3] <= e.prefix else 0
        beside.result.compared += 1
        if cursors != Cursors(0, 0, 0, offered):
            want = f"{e.request}: {cursors_text(Cursors(0, 0, 0, offered))}"
            known = None
            if beside.of(e.request).interrupted:  # it has the slot of the rejected one
                known = deviations.fault_of_rejected_turn(beside.header)
            raise Diverged("LEN-4", want, f"shows {cursors_text(cursors)}", known=known)


def _state_resumes(beside: LogFollower, name: str, session: Session, prefix: int) -> None:
    """A turn resumes where its session's state is: that cannot be cut back. Told once, however often the
    scheduler looks at the turn before it runs."""
    beside.result.compared += 1
    seen = beside.of_session(session.name)
    wrong = beside.result.wrong_states
    known = seen.state_ahead
    resumed = session._replace(state=prefix)
    if (known is None and session.state == prefix) or (name, prefix) in wrong:
        beside.state = beside.state.with_session(resumed)
        return
    hole = (session.name, session.state) in beside.result.holes
    known = known or deviations.fault_of_resumed_state(beside.header, prefix - session.state, hole)
    wrong[name, prefix], seen.state_ahead = known or "", known
    want = (
        f"{name} resumes at {session.state}, after the tokens that the state of {session.name} has"
    )
    beside.deviates(known, "STA-2", want, f"resumes at {prefix}", Admit(name))
    beside.state = beside.state.with_session(resumed)


def orphaned(beside: LogFollower, request: Request) -> Request:
    """A known fault: the server no longer counts a turn as its session's, whose text it still is."""
    session = beside.session_of(request)
    assert session is not None
    known = deviations.fault_of_orphaned_turn(beside.header, beside.of(request.name))
    want = f"{request.name} goes on as the turn of {session.name}"
    beside.deviates(known, "SES-2", want, "as a request of nobody's", Admit(request.name))
    request = request._replace(session=None)
    beside.state = beside.state.with_request(request).with_session(session._replace(turn=None))
    seen = beside.of_session(session.name)
    seen.text_unknown = True
    seen.stays_busy = known  # a close waits for it
    beside.of(request.name).orphan_of = session.name
    return request


@action(
    log.Extended,
    guard="each was admitted with that prefix",
    commands="admit of those without a slot; extend",
    compared="prefix and cursors of each",
)
def extended(beside: LogFollower, e: log.Extended) -> None:
    names = [name for name, *_ in e.lanes]
    prepared(beside, names)
    for waiting in beside.state.requests:
        if waiting.phase is Phase.EXTENDING and waiting.name not in names:
            beside.of(waiting.name).passed_over = True
    beside.result.next_chunk = False
    for name, prefix, tokens, cells in e.lanes:
        seen = beside.of(name)
        admitted_at = seen.matched
        seen.matched = None
        if admitted_at is None:
            want = f"refused: {Reason.WRONG_PHASE.value}, as nobody admitted {name}"
            raise Diverged("OUT-1", want, f"goes on at {prefix}")
        loaded = prefix > admitted_at and beside.header.tier is not None
        beside.result.reach("a prefix that is loaded from the host", loaded)
        if admitted_at != prefix and not loaded:
            want = f"{name} goes on at {admitted_at}, as it was admitted"
            raise Diverged("OUT-1", want, f"goes on at {prefix}")
        if (known := deviations.fault_of_stale_state(beside.header, seen, prefix)) is not None:
            beside.result.wrong_states[name, prefix] = known
        seen.has_state = False
        if text := beside.texts.inputs.get(name):
            beside.kept_states.begins(name, text[:prefix])
        if beside.request(name).phase is Phase.QUEUED:
            beside.do(Admit(name))
            if beside.header.tree:
                _prefix_from_tree(beside, name, prefix, Cursors(*cells))
        cursors = beside.request(name).cursors
        beside.result.compared += 1
        assert cursors is not None  # it was admitted
        if (have := cursors.kv_committed_len) != prefix:
            raise Diverged("LEN-4", f"{name} goes on at {have}", f"goes on at {prefix}")
        _has_own_text(beside, name, prefix + tokens)
    beside.result.reach("a prefill of several requests", len(e.lanes) > 1)
    evictions = [_eviction(beside, name, Cursors(*cells)) for name, _, _, cells in e.lanes]
    beside.do(
        Extend(tuple(Chunk(name, tokens) for name, _, tokens, _ in e.lanes)),
        *[choice for choice in evictions if choice is not None],
        shown=Shown({name: Cursors(*cells) for name, _, _, cells in e.lanes}, {}),
    )
    phases = [beside.request(name).phase for name, *_ in e.lanes]
    beside.result.reach("a chunked prefill", Phase.EXTENDING in phases)


def _has_own_text(beside: LogFollower, name: str, length: int) -> None:
    """A known fault: the next turn of a session writes into the text of one that is no longer its turn."""
    request = beside.request(name)
    have = request.origin + request.output
    if beside.of(name).orphan_of and length > have:
        known = deviations.fault_of_orphaned_text(beside.header)
        raise Diverged("SES-1", f"{name} has {have} tokens", f"computes {length}", known=known)


def _eviction(beside: LogFollower, name: str, shown: Cursors) -> Choice | None:
    """The window eviction that came before the prefill of a request."""
    request = beside.request(name)
    choice = beside.step.evictions.pop(name, None)
    if choice is None or choice.swa_evicted_seqlen != shown.swa_evicted_seqlen:
        return choice
    return None if evicts_nothing(beside, request, shown) else choice


def evicts_nothing(beside: LogFollower, request: Request, got: Cursors) -> bool:
    """A window eviction inside what is the tree's frees nothing, and moves E alone."""
    mine = request.cursors
    assert mine is not None
    if max(got.swa_evicted_seqlen, mine.swa_evicted_seqlen) > mine.cache_protected_len:
        return False
    beside.moves(request.name, mine._replace(swa_evicted_seqlen=got.swa_evicted_seqlen))
    return True


def _prefix_from_tree(beside: LogFollower, name: str, prefix: int, got: Cursors) -> None:
    """The tree gave an admitted request its prefix: how much is the tree's choice."""
    protected = got.cache_protected_len
    beside.result.reach("a prefix from the tree", bool(prefix))
    if protected % beside.header.page_size or protected > prefix:
        want = f"cache_protected_len of whole pages, at most {prefix}"
        raise Diverged("LEN-1", want, str(protected))
    beside.moves(name, Cursors(prefix, prefix, 0, protected))


@action(
    log.Checkpointed,
    guard="it has KV",
    commands="evict_swa, if E moves beyond what the tree takes",
    compared="only cache_protected_len moves, up and by whole pages (E inside of it)",
)
def checkpointed(beside: LogFollower, e: log.Checkpointed) -> None:
    got = Cursors(*e.cursors)
    catches_up(beside, e.request, got)  # a request that ends inserts before its release is written
    mine = beside.request(e.request).cursors
    length = got.cache_protected_len
    beside.result.compared += 1
    if mine is None:
        raise Diverged("OUT-1", f"{e.request} waits, and has no KV", "the tree takes KV of it over")
    if got.swa_evicted_seqlen > max(length, mine.swa_evicted_seqlen):
        choice = Choice(e.request, swa_evicted_seqlen=got.swa_evicted_seqlen)
        beside.do(EvictSwa(e.request, mine.kv_committed_len), choice)
        mine = beside.request(e.request).cursors
        assert mine is not None
    whole_pages = not length % beside.header.page_size
    grows = mine.cache_protected_len <= length <= mine.kv_committed_len
    want = mine._replace(cache_protected_len=length)
    if mine.swa_evicted_seqlen <= got.swa_evicted_seqlen <= length:
        want = want._replace(swa_evicted_seqlen=got.swa_evicted_seqlen)
    if not (whole_pages and grows and want == got):
        expected = (
            f"{cursors_text(mine)}, but cache_protected_len from there to a page boundary up to"
            f" {mine.kv_committed_len}"
        )
        raise Diverged(
            "TREE-12" if want == got else "LEN-4", expected, f"shows {cursors_text(got)}"
        )
    beside.moves(e.request, got)


@action(
    log.Swept,
    guard="it has KV, or its prefill follows in this step",
    commands="evict_swa, or a choice of the extend that follows",
    compared="how far; cursors",
)
def evicted(beside: LogFollower, e: log.Swept) -> None:
    beside.result.reach("a window eviction")
    request = beside.request(e.request)
    got = Cursors(*e.cursors)
    choice = Choice(e.request, swa_evicted_seqlen=got.swa_evicted_seqlen)
    if request.cursors is not None:
        beside.stands(
            e.request, got._replace(swa_evicted_seqlen=request.cursors.swa_evicted_seqlen)
        )
    if request.phase not in (Phase.EXTENDING, Phase.RUNNING):
        beside.step.evictions[e.request] = choice
    elif not evicts_nothing(beside, request, got):
        beside.do(EvictSwa(e.request, e.length), choice, shown=Shown({e.request: got}, {}))
