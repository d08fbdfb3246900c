"""Actions of admission, prefill and the tree."""

from __future__ import annotations

from impl.sglang.server import events as log
from reference.clauses.step import cursors_text
from reference.commands import Admit, Choice, Chunk, EvictSwa, Extend, Reason
from reference.state import Cursors, Phase, Request, Session
from stateful_tests.watched import deviations
from stateful_tests.watched.actions.batch_rounds import apply_unlogged_result, note_prepared_round
from stateful_tests.watched.log_follower import LogFollower, Diverged, action
from stateful_tests.watched.violated_clauses import Shown


@action(
    log.Admitted,
    guard="as the turn of its session",
    commands="admit, if the session has a slot",
    compared="cursors of the request",
)
def on_admitted(follower: LogFollower, event: log.Admitted) -> None:
    """Follow an admission: restore the cursors that the log shows, of the session's slot or of the tree's
    prefix. Raises Diverged for others."""
    request = follower.request(event.request)
    follower.note_interruption(event.request)
    if request.session is not None and event.session is None:
        request = detach_orphan(follower, request)
    follower.request_seen(event.request).matched = event.prefix
    session = follower.turn_session(request)
    cursors = Cursors(*event.cursors)
    if request.phase not in (Phase.QUEUED, Phase.ADMITTED):
        follower.check_unmoved(event.request, cursors)
        follower.result.next_chunk = request.phase is Phase.EXTENDING
    elif session is not None and session.slot is not None:
        follower.result.reach("a turn that resumes")
        follower.result.reach("a tail that admission frees", session.slot.kv_allocated_len > event.prefix)
        follower.pages.cut(session.name, cursors.kv_committed_len)
        if follower.header.states:
            _check_state_resumes(follower, event.request, session, event.prefix)
        follower.do(Admit(event.request), shown=Shown({event.request: cursors}, {session.name: cursors}))
    else:
        if follower.header.states and event.session and event.prefix:
            follower.request_seen(event.request).has_state = True
        offered = event.cursors[3] if follower.header.tree and event.cursors[3] <= event.prefix else 0
        follower.result.compared += 1
        if cursors != Cursors(0, 0, 0, offered):
            expected = f"{event.request}: {cursors_text(Cursors(0, 0, 0, offered))}"
            known = None
            if follower.request_seen(event.request).interrupted:  # it has the slot of the rejected one
                known = deviations.fault_of_rejected_turn(follower.header)
            raise Diverged("LEN-4", expected, f"shows {cursors_text(cursors)}", known=known)


def _check_state_resumes(follower: LogFollower, name: str, session: Session, prefix: int) -> None:
    """Compare the position at which a turn resumes with that of its session's state, which cannot be
    cut back. Reported once, however often the scheduler looks at the turn before it runs."""
    follower.result.compared += 1
    session_seen = follower.session_seen(session.name)
    wrong = follower.result.wrong_states
    known_fault = session_seen.state_ahead
    resumed = session._replace(state=prefix)
    if (known_fault is None and session.state == prefix) or (name, prefix) in wrong:
        follower.state = follower.state.with_session(resumed)
        return
    hole = (session.name, session.state) in follower.result.holes
    known_fault = known_fault or deviations.fault_of_resumed_state(
        follower.header, prefix - session.state, hole
    )
    wrong[name, prefix] = known_fault or ""
    session_seen.state_ahead = known_fault
    expected = (
        f"{name} resumes at {session.state}, after the tokens that the state of {session.name} has"
    )
    follower.note_deviation(known_fault, "STA-2", expected, f"resumes at {prefix}", Admit(name))
    follower.state = follower.state.with_session(resumed)


def detach_orphan(follower: LogFollower, request: Request) -> Request:
    """Follow a known fault: the server no longer counts a turn as its session's, although it still has
    its text. Returns the request without its session."""
    session = follower.turn_session(request)
    assert session is not None
    known_fault = deviations.fault_of_orphaned_turn(follower.header, follower.request_seen(request.name))
    expected = f"{request.name} goes on as the turn of {session.name}"
    follower.note_deviation(known_fault, "SES-2", expected, "as a request of nobody's", Admit(request.name))
    request = request._replace(session=None)
    follower.state = follower.state.with_request(request).with_session(session._replace(turn=None))
    session_seen = follower.session_seen(session.name)
    session_seen.text_unknown = True
    session_seen.stays_busy = known_fault  # a close waits for it
    follower.request_seen(request.name).orphan_of = session.name
    return request


@action(
    log.Extended,
    guard="each was admitted with that prefix",
    commands="admit of those without a slot; extend",
    compared="prefix and cursors of each",
)
def on_extended(follower: LogFollower, event: log.Extended) -> None:
    """Follow a prefill: admissions, window evictions and chunks of all entries. Raises Diverged where an
    entry begins elsewhere than it was admitted."""
    names = [name for name, *_ in event.lanes]
    note_prepared_round(follower, names)
    for waiting in follower.state.requests:
        if waiting.phase is Phase.EXTENDING and waiting.name not in names:
            follower.request_seen(waiting.name).passed_over = True
    follower.result.next_chunk = False
    for name, prefix, tokens, cells in event.lanes:
        request_seen = follower.request_seen(name)
        admitted_at = request_seen.matched
        request_seen.matched = None
        if admitted_at is None:
            expected = f"refused: {Reason.WRONG_PHASE.value}, as nobody admitted {name}"
            raise Diverged("OUT-1", expected, f"goes on at {prefix}")
        loaded = prefix > admitted_at and follower.header.tier is not None
        follower.result.reach("a prefix that is loaded from the host", loaded)
        if admitted_at != prefix and not loaded:
            expected = f"{name} goes on at {admitted_at}, as it was admitted"
            raise Diverged("OUT-1", expected, f"goes on at {prefix}")
        if (known := deviations.fault_of_stale_state(follower.header, request_seen, prefix)) is not None:
            follower.result.wrong_states[name, prefix] = known
        request_seen.has_state = False
        if text := follower.texts.inputs.get(name):
            follower.kept_states.note_prefix(name, text[:prefix])
        if follower.request(name).phase is Phase.QUEUED:
            follower.do(Admit(name))
            if follower.header.tree:
                _prefix_from_tree(follower, name, prefix, Cursors(*cells))
        cursors = follower.request(name).cursors
        follower.result.compared += 1
        assert cursors is not None  # it was admitted
        if (have := cursors.kv_committed_len) != prefix:
            raise Diverged("LEN-4", f"{name} goes on at {have}", f"goes on at {prefix}")
        _check_own_text(follower, name, prefix + tokens)
    follower.result.reach("a prefill of several requests", len(event.lanes) > 1)
    evictions = [_apply_prior_eviction(follower, name, Cursors(*cells)) for name, _, _, cells in event.lanes]
    follower.do(
        Extend(tuple(Chunk(name, tokens) for name, _, tokens, _ in event.lanes)),
        *[choice for choice in evictions if choice is not None],
        shown=Shown({name: Cursors(*cells) for name, _, _, cells in event.lanes}, {}),
    )
    phases = [follower.request(name).phase for name, *_ in event.lanes]
    follower.result.reach("a chunked prefill", Phase.EXTENDING in phases)


def _check_own_text(follower: LogFollower, name: str, length: int) -> None:
    """Raise Diverged for a known fault: the next turn of a session writes into the text of one that is
    no longer its turn."""
    request = follower.request(name)
    have = request.origin + request.output
    if follower.request_seen(name).orphan_of and length > have:
        known = deviations.fault_of_orphaned_text(follower.header)
        raise Diverged("SES-1", f"{name} has {have} tokens", f"computes {length}", known=known)


def _apply_prior_eviction(follower: LogFollower, name: str, shown: Cursors) -> Choice | None:
    """Return the window eviction before a request's prefill, as a choice of the extend; None if there
    is none, or if it only moved E."""
    request = follower.request(name)
    choice = follower.step.evictions.pop(name, None)
    if choice is None or choice.swa_evicted_seqlen != shown.swa_evicted_seqlen:
        return choice
    return None if apply_eviction_in_prefix(follower, request, shown) else choice


def apply_eviction_in_prefix(follower: LogFollower, request: Request, logged: Cursors) -> bool:
    """Follow a window eviction inside the tree's prefix, which frees nothing and only moves E. Returns
    whether it was one."""
    cursors = request.cursors
    assert cursors is not None
    if max(logged.swa_evicted_seqlen, cursors.swa_evicted_seqlen) > cursors.cache_protected_len:
        return False
    follower.set_cursors(request.name, cursors._replace(swa_evicted_seqlen=logged.swa_evicted_seqlen))
    return True


def _prefix_from_tree(follower: LogFollower, name: str, prefix: int, logged: Cursors) -> None:
    """Give an admitted request its prefix from the tree: its length is the tree's choice."""
    protected = logged.cache_protected_len
    follower.result.reach("a prefix from the tree", bool(prefix))
    if protected % follower.header.page_size or protected > prefix:
        expected = f"cache_protected_len of whole pages, at most {prefix}"
        raise Diverged("LEN-1", expected, str(protected))
    follower.set_cursors(name, Cursors(prefix, prefix, 0, protected))


@action(
    log.Checkpointed,
    guard="it has KV",
    commands="evict_swa, if E moves beyond what the tree takes",
    compared="only cache_protected_len moves, up and by whole pages (E inside of it)",
)
def on_checkpointed(follower: LogFollower, event: log.Checkpointed) -> None:
    """Follow an insert of a request that goes on. Raises Diverged where more than cache_protected_len and the
    evicted length moved."""
    logged = Cursors(*event.cursors)
    # A request that ends inserts before its release is written.
    apply_unlogged_result(follower, event.request, logged)
    cursors = follower.request(event.request).cursors
    length = logged.cache_protected_len
    follower.result.compared += 1
    if cursors is None:
        raise Diverged("OUT-1", f"{event.request} waits, and has no KV", "the tree takes KV of it over")
    if logged.swa_evicted_seqlen > max(length, cursors.swa_evicted_seqlen):
        choice = Choice(event.request, swa_evicted_seqlen=logged.swa_evicted_seqlen)
        follower.do(EvictSwa(event.request, cursors.kv_committed_len), choice)
        cursors = follower.request(event.request).cursors
        assert cursors is not None
    whole_pages = not length % follower.header.page_size
    grows = cursors.cache_protected_len <= length <= cursors.kv_committed_len
    due = cursors._replace(cache_protected_len=length)
    if cursors.swa_evicted_seqlen <= logged.swa_evicted_seqlen <= length:
        due = due._replace(swa_evicted_seqlen=logged.swa_evicted_seqlen)
    if not (whole_pages and grows and due == logged):
        expected = (
            f"{cursors_text(cursors)}, but cache_protected_len from there to a page boundary up to"
            f" {cursors.kv_committed_len}"
        )
        raise Diverged(
            "TREE-12" if due == logged else "LEN-4", expected, f"shows {cursors_text(logged)}"
        )
    follower.set_cursors(event.request, logged)


@action(
    log.Swept,
    guard="it has KV, or its prefill follows in this step",
    commands="evict_swa, or a choice of the extend that follows",
    compared="how far; cursors",
)
def on_swept(follower: LogFollower, event: log.Swept) -> None:
    follower.result.reach("a window eviction")
    request = follower.request(event.request)
    logged = Cursors(*event.cursors)
    choice = Choice(event.request, swa_evicted_seqlen=logged.swa_evicted_seqlen)
    if request.cursors is not None:
        follower.check_unmoved(
            event.request, logged._replace(swa_evicted_seqlen=request.cursors.swa_evicted_seqlen)
        )
    if request.phase not in (Phase.EXTENDING, Phase.RUNNING):
        follower.step.evictions[event.request] = choice
    elif not apply_eviction_in_prefix(follower, request, logged):
        follower.do(EvictSwa(event.request, event.length), choice, shown=Shown({event.request: logged}, {}))
