"""Lengths: caps, order and progress of the cursors (LEN). Caps come first: they say more."""

from __future__ import annotations

from collections.abc import Iterator

from reference.clauses.registry import clause
from reference.clauses.step import Step, cursors_text, swa_start
from reference.commands import Admit, EvictSwa, Finish, Launch, Retract, Settle, SpecDecode
from reference.failures import AtCursor, Failure, count_text, failure
from reference.geometry import Geometry
from reference.state import ZERO, Cursors


def cursors_off(owner: str, expected: Cursors | None, observed: Cursors | None) -> list[AtCursor]:
    """Return the fields in which the cursors differ from those wanted."""
    fields = zip(Cursors._fields, expected or ZERO, observed or ZERO)
    return [AtCursor(owner, field, must) for field, must, has in fields if must != has]


def cap_cursors(c: Cursors, target: int) -> Cursors:
    """Return C, A and E, each at most `target`."""
    committed, allocated, evicted, protected = c
    return Cursors(min(committed, target), min(allocated, target), min(evicted, target), protected)


@clause(
    "LEN-2",
    "finish and retract cap at target",
    "After finish and retract, kv_committed_len, kv_allocated_len and swa_evicted_seqlen of the "
    "slot are each capped at target = origin + outputs that count, and none goes up. The slot may give "
    "back what has no KV. If the window behind the cut was evicted, it may keep less: a page boundary from "
    "cache_protected_len on. With "
    "results in flight it may count the oldest round's first token.",
    why=(
        "A cursor above target skips freed slots; one that goes up counts tokens that nobody computed,"
        " which the next turn reads."
    ),
    decision=(
        "#22900 caps E too. Without that cap, in unrestricted mode: open, submit 1, admit, "
        "extend 1, spec_decode 12, evict_swa 13, finish 1 (P 1, W 3). A retract cuts as a finish "
        "does; otherwise the slot keeps a tail that should make room (#22213). Where eviction "
        "went past target, nothing past R can be resumed (SWA-2), so a server may keep less; E "
        "stays a page boundary. The slot of the last token, which has no KV yet, may go as well (A = C, as "
        "between 0.5.10 and 0.5.11): the next turn allocates it again."
    ),
    assumption=(
        "If no eviction uses L >= W + 2P + floor(target) tokens, E is not above target and needs "
        "no cap (`kvspec prove`). A realistic scheduler evicts by lengths that the turn keeps, "
        "so it never does."
    ),
    rule="cursors.cut, rules.finish.finish, rules.retract.retract",
    source="#22897, #22900, #22213",
    scope="Turns of sessions that stay open.",
    of=(Finish, Retract),
    trigger=lambda s: (
        (turn_cut := s.cut_at) is not None
        and not isinstance(s.command, Admit)
        and max(turn_cut[1][:3]) > turn_cut[2]
    ),
)
def _caps_at_target(step: Step) -> Failure | None:
    """Return the failure of a session slot whose cursors are not capped at the target of the turn that ended.
    None where nothing was cut."""
    turn_cut = step.cut_at
    if turn_cut is None:
        return None
    holder, before, target = turn_cut
    session = step.after.sessions.get(holder)
    if session is None or session.slot is None:
        return None  # SES-2 says so
    expected = cap_cursors(before, target)
    request = step.named_request
    if request is not None and request.in_flight:  # the token that a round computes first may count
        first_len = min(request.settled_len + 1, target, session.slot.kv_committed_len)
        expected = expected._replace(kv_committed_len=max(expected.kv_committed_len, first_len))
    if session.slot == expected:
        return None
    assert request is not None
    slot = f"slot of {holder}"
    outputs = target - request.origin
    does = "ends the turn" if isinstance(step.command, Finish) else f"queues {request.name} again"
    tokens = f"{count_text(request.origin, 'token')} of input, {outputs} of output"
    return failure(
        f"target {target}: {cursors_text(expected)}",
        f"{slot}: {cursors_text(session.slot)}",
        *cursors_off(slot, expected, session.slot),
        head=f"{does} at target {target} ({tokens})",
    )


@clause(
    "LEN-3",
    "restore caps at the prefix",
    "After admit, request and slot hold the same cursors: C and A are the prefix, E at most that, R"
    " the slot's; the prefix is min(C, key), or R if the window behind that was evicted or the recurrent"
    " state is not the one after it.",
    why="The next extend writes from the prefix on; what it overwrites must have been given back.",
    decision=(
        "key is one token short already (#22862). In unrestricted mode the window behind min(C, "
        "key) may be evicted; then the turn restarts at R (SWA-2)."
    ),
    assumption="Under a realistic scheduler the prefix is min(C, key), always.",
    rule="cursors.resume, cursors.cut, rules.admit.admit",
    source="#22862, #20070",
    scope="Turns of sessions that have a slot; R is 0 without a radix tree."
    " That min(C, key) is not taken on an evicted window: SWA-2; without its state: STA-2.",
    of=(Admit,),
    trigger=lambda s: (
        isinstance(s.command, Admit)
        and (at := s.cut_at) is not None
        and at[1].kv_allocated_len > at[2]
    ),
)
def _restore_caps_at_prefix(step: Step) -> Failure | None:
    """Return the failure of an admission whose cursors, or whose session's, are not the slot's capped at the
    prefix that can be resumed."""
    if not isinstance(step.command, Admit) or not step.done:
        return None
    request = step.named_request
    assert request is not None
    session = step.was.session(request.session)
    if session is None or session.slot is None:
        return None
    slot_after = step.after.sessions.get(session.name)
    request_after = step.after.requests.get(request.name)
    if slot_after is None or slot_after.slot is None or request_after is None:
        return None  # SES-2 says so
    restored = request_after.cursors
    key = request.origin + request.output - 1
    literal = min(session.slot.kv_committed_len, key)
    expected = cap_cursors(session.slot, literal)
    allowed = [expected]
    committed = session.slot.kv_committed_len
    reason = f"the smaller of kv_committed_len {committed} and a key of {key} (the text less its last token)"
    window = step.config.geometry.window
    if window is not None and swa_start(session.slot) > max(0, literal - window):
        allowed.append(cap_cursors(session.slot, session.slot.cache_protected_len))
        expected = allowed[-1]
        reason = f"for the window behind {literal} was evicted"
    elif step.config.geometry.states and session.state != literal:
        allowed.append(cap_cursors(session.slot, session.slot.cache_protected_len))
        expected = allowed[-1]
        reason = f"for the recurrent state is the one after {session.state} tokens"
    if restored in allowed and slot_after.slot == restored:
        return None
    return failure(
        f"request and slot both at prefix {expected.kv_committed_len}: {cursors_text(expected)}",
        f"request: {cursors_text(restored)}; slot: {cursors_text(slot_after.slot)}",
        *cursors_off(request.name, expected, restored),
        *cursors_off(f"slot of {session.name}", expected, slot_after.slot),
        head=f"must resume at {expected.kv_committed_len}, {reason}",
    )


@clause(
    "LEN-5",
    "slots for every round in flight",
    "kv_allocated_len covers all that the rounds in flight may accept, from what is committed by results that"
    " are there.",
    why=(
        "A round is launched before the end of the previous one is known, and the device writes "
        "there."
    ),
    decision="SGLang takes slots for two rounds from the commit that lags (get_alloc_reserve_per_decode);"
    " with what is drafted counted as committed, one from there is the same.",
    rule="rules.decode.launch",
    source="kvspec",
    scope="Requests with results in flight (Launch).",
    trigger=lambda s: any(len(r.in_flight) > 1 for r in s.now.requests),
)
def _slots_for_rounds_in_flight(step: Step) -> Failure | None:
    for request in step.now.requests:
        facts = step.after.requests.get(request.name)
        if not request.in_flight or facts is None or facts.cursors is None:
            continue
        most = request.settled_len + sum(r.allocate for r in request.in_flight)
        if facts.cursors.kv_allocated_len < most:
            return failure(
                f"{request.name}: kv_allocated_len {most} or more",
                cursors_text(facts.cursors),
                AtCursor(request.name, "kv_allocated_len", most),
            )
    return None


@clause(
    "LEN-1",
    "cursors in order",
    "0 <= cache_protected_len <= kv_committed_len <= kv_allocated_len <= row width,"
    " 0 <= swa_evicted_seqlen <= kv_allocated_len, and cache_protected_len is whole pages.",
    why="Every free and every sum is a difference of two cursors.",
    rule="cursors.in_order",
    source="#20070",
    trigger=lambda s: any(
        h.cursors.swa_evicted_seqlen > 0 or h.cursors.kv_allocated_len > h.cursors.kv_committed_len
        for h in s.holders_now
    ),
)
def _cursors_in_order(step: Step) -> Failure | None:
    geometry = step.config.geometry
    shown_cursors = [("", n, r.cursors) for n, r in step.after.requests.items() if r.cursors is not None]
    shown_cursors += [("slot of ", n, s.slot) for n, s in step.after.sessions.items() if s.slot is not None]
    for owner, name, c in shown_cursors:
        for field, bound, rule in _out_of_bounds(c, geometry):
            return failure(
                "cursors in order and in bounds",
                f"{owner}{name}: {cursors_text(c)}",
                AtCursor(f"{owner}{name}", field),
                *([AtCursor(f"{owner}{name}", bound)] if bound else []),
                head=f"must not leave {field} of {owner}{name} {rule}",
            )
    return None


def _out_of_bounds(c: Cursors, geometry: Geometry) -> Iterator[tuple[str, str, str]]:
    """Return (field, its bounding cursor, the fault in words) for each cursor out of bounds."""
    bounds = {
        "cache_protected_len": "kv_committed_len",
        "kv_committed_len": "kv_allocated_len",
        "swa_evicted_seqlen": "kv_allocated_len",
    }
    for field, bound in bounds.items():
        if getattr(c, field) > getattr(c, bound):
            yield field, bound, f"above {bound}"
    for field, value in zip(c._fields, c):
        if value < 0:
            yield field, "", "below 0"
    if c.kv_allocated_len > geometry.width:
        yield "kv_allocated_len", "", f"above the row's width, {geometry.width}"
    if c.cache_protected_len % geometry.page_size:
        yield "cache_protected_len", "", f"inside a page of {geometry.page_size} tokens"


@clause(
    "LEN-4",
    "progress",
    "Prefill and decode move kv_committed_len and kv_allocated_len by the computed tokens, a "
    "launch the former by what it counts as committed; a result keeps the accepted part. Window "
    "eviction moves neither. Cursors of other requests do not move.",
    why="Committed without a slot reads padding; a slot without a commit is never given back.",
    rule="rules.extend.extend, rules.decode.decode, rules.decode.spec_decode, rules.decode.settle",
    source="#22753",
    concerns="cursors and locks",
    trigger=lambda s: (
        len(s.progress) > 1 or (isinstance(s.command, (SpecDecode, Launch, Settle)) and s.done)
    ),
)
def _commits_progress(step: Step) -> Failure | None:
    """Return the failure of the first request whose cursors did not move by what the step committed and
    allocated."""
    if not step.done:
        return None
    progress = step.progress
    named_request = getattr(step.command, "request", None)
    for was in step.was.requests:
        facts = step.after.requests.get(was.name)
        if facts is None or was.cursors is None:
            continue
        due = was.cursors
        if was.name in progress:
            committed, allocated = progress[was.name]
            now = step.now.request(was.name)
            assert now is not None and now.cursors is not None
            # to allocate further is a choice
            allocated = max(allocated, now.cursors.kv_allocated_len)
            protected = due.cache_protected_len
            if step.now.tree is not None and facts.cursors is not None:
                session = step.was.session(was.session)
                if session is None or session.slot is None:  # of later turns R is the slot's
                    # what the tree has taken: TREE-12, REF-1
                    protected = facts.cursors.cache_protected_len
            due = Cursors(
                due.kv_committed_len + committed, allocated, step.frontier(was.name), protected
            )
        elif isinstance(step.command, EvictSwa) and was.name == named_request:
            due = due._replace(swa_evicted_seqlen=step.frontier(was.name))
        elif isinstance(step.command, Settle) and was.name == named_request:
            result = was.in_flight[0]
            committed = due.kv_committed_len - result.claimed + result.accept
            due = due._replace(kv_committed_len=committed)
        elif was.name == named_request:
            continue
        if (facts.cursors or ZERO) != due:  # admitted without a slot: nothing either way
            return failure(
                f"{was.name}: {cursors_text(due)}",
                cursors_text(facts.cursors),
                *cursors_off(was.name, due, facts.cursors),
            )
    return None
