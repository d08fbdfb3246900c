"""Explanations for outcomes, memory checks and when sessions, slots and requests exist."""

from collections.abc import Callable
from dataclasses import asdict

from ci.compare.differences import CURSORS, POOL
from ci.compare.snapshot import reference_side, system_side
from ci.explain.cursors import has_cursor, lengths
from ci.explain.history import History, some
from reference.clauses.checks import due, miscounted
from reference.clauses.contents import stamp_text
from reference.clauses.facts import Facts
from reference.clauses.step import swept_below
from reference.commands import Done, Reason, Refused, Submit
from reference.ledger import ZERO, Cursors, Phase, text_tokens
from reference.rules import RULES as RULES_OF
from stateful_tests.lockstep.follow import launched
from stateful_tests.lockstep.results import Moment
from stateful_tests.traces.notation import format_outcome as say


def _outcome(past: History) -> str | None:
    """OUT-1: a command that is done or refused, and should not be."""
    got, want = past.step.outcome, past.step.expected
    does = f"refuses ({got.reason.value})" if isinstance(got, Refused) else "carries out"
    return f"the system {does} {past.here}; by the rules it is {say(want)}{_why(past)}"


def _why(past: History) -> str:
    """The fact behind a refusal: the reference's, or what the system says."""
    step, was = past.step, past.before.state
    ours = isinstance(step.expected, Refused)
    refusal = step.expected if ours else step.outcome
    if not isinstance(refusal, Refused):
        return ""
    reason, request = refusal.reason, step.acted
    if reason is Reason.TURN_IN_FLIGHT and isinstance(step.command, Submit):
        session = was.session(step.command.session)
        if session is not None and session.turn is not None:
            name, turn = session.name, session.turn
            is_so = f"{turn} is the turn of {name}"
            since = past.first_since(is_so, lambda m: getattr(m.state.session(name), "turn", "") == turn)
            return f", for {turn} is in flight in {name} {since}"
    if reason is Reason.WINDOW_LOST:
        return _window_lost(past, ours)
    if reason in (Reason.OUT_OF_FULL, Reason.OUT_OF_SWA) and not ours:
        side, pool = reference_side(past.before), "full" if reason is Reason.OUT_OF_FULL else "swa"
        if (left := side["free"][pool]) is None:
            return ""
        unlocked = sum(
            (n["end"] - n["start"]) // past.page_size
            for n in side["nodes"].values()
            if not n[f"{pool}_locks"] and (pool == "full" or n["live"])
        )
        pages = some(left, f"{POOL[pool]} page")
        return f", for {pages} can be had at once and {unlocked} more from the tree"
    condition = f" ({RULES_OF[type(step.command)].refused[reason]})" if ours else ""
    if request is not None and reason is (Reason.WRONG_PHASE if ours else Reason.UNKNOWN_REQUEST):
        name, phase = request.name, request.phase
        is_so = f"{name} is {phase.value}{' again' * (phase is Phase.QUEUED and request.started)}"
        so = past.first_since(is_so, lambda m: getattr(m.state.request(name), "phase", None) is phase)
        since = f" {so}" if ours else ""
        return f"{condition}, for {is_so}{since}"
    return condition


def _window_lost(past: History, ours: bool) -> str:
    window = past.step.config.geometry.window
    one = past.step.acted
    for name in [one.name] if one is not None else launched(past.step.command):
        was = past.before.state.request(name)
        if was is None or was.cursors is None or window is None:
            continue
        c = was.cursors
        start, at = max(0, c.kv_committed_len - window), f", for the window of {name} at {c.kv_committed_len}"
        if not ours:
            return f"{at} is there: it starts at {start}"
        if swept_below(c) > start:
            since = past.first_since(f"E of {name}", has_cursor, name, "E", c.swa_evicted_seqlen)
            return f"{at} starts at {start} and its SWA KV below {c.swa_evicted_seqlen} is gone {since}"
    return ""


def _unchanged(past: History) -> str | None:
    """OUT-2, CHK-3, SES-3: something changed that may not."""
    step = past.step
    does = {"OUT-2": "is refused", "CHK-3": "is a check", "SES-3": "admits again"}[past.violation.clause]
    moved = [
        f"\0{letter}\0 of {name} goes from {a} to {b}"
        for name in sorted(step.after.requests)
        for letter, a, b in zip(CURSORS, _cursors(step.before, name), _cursors(step.after, name))
        if a != b
    ]
    changes = ", ".join(moved[:3]) or past.violation.observed
    return f"{past.here} {does} and must change nothing, but {changes}"


def _cursors(facts: Facts, name: str) -> Cursors:
    request = facts.requests.get(name)
    return (request.cursors if request is not None else None) or ZERO


def _alarm(past: History) -> str | None:
    """CHK-1: an account that does not add up although every page has its one owner."""
    outcome = past.step.outcome
    report = outcome.report if isinstance(outcome, Done) else None
    for account in report.accounts if report is not None else ():
        if account.balances:
            continue
        unit = "rows" if account.pool == "rows" else f"{POOL[account.pool]} tokens"
        lines = miscounted(past.step, report, account) if report is not None else []
        counts = f"counts {account.counted} {unit} of {account.total}"
        told = f"every page has its one owner, but {past.here} {counts}"
        off = lines[0].replace("swa page", "SWA page") if lines else _terms_off(past, account.pool)
        since = past.violation.since
        then = f"; the check fails from {past.command(since)} on" if since is not None else ""
        return f"{told}: {off}{then}" if off else told + then
    return None


def _terms_off(past: History, pool: str) -> str:
    """The terms of an account that are not what they must be."""
    got = system_side(past.now)["accounts"].get(pool, {})
    want = next((asdict(a) for a in due(past.step).accounts if a.pool == pool), {})
    off = [term for term, n in want.items() if term != "pool" and got.get(term) != n]
    return ", ".join(f"{term} is {got.get(term)}, not {want[term]}" for term in off)


def _terms(past: History) -> str | None:
    """CHK-2: terms that balance and are wrong."""
    for pool in reference_side(past.now)["accounts"]:
        if off := _terms_off(past, pool):
            unit = "rows" if pool == "rows" else f"{POOL[pool]} tokens"
            return f"the sums of {past.here} add up, but not their terms: of the {unit}, {off}"
    return None


def _life(past: History) -> str | None:
    """SES-2: a session, slot or request that is there and should not be, or the other way round."""
    state, facts = past.now.state, past.now.facts
    for kind, ours, theirs in (
        ("request", {r.name for r in state.requests}, set(facts.requests)),
        ("session", {s.name for s in state.sessions}, set(facts.sessions)),
    ):
        for name in sorted(ours ^ theirs):
            if name in theirs:
                since = past.first_since(
                    f"{kind} {name} is there", lambda m, k, n: n in getattr(m.facts, f"{k}s"), kind, name
                )
                return f"{kind} {name} is there {since}; by the rules it ends with {past.here}"
            session = state.session(name)
            turn = f": its turn {session.turn} is in flight" if session is not None and session.turn else ""
            return f"{past.here} ends {kind} {name}, which goes on by the rules{turn}"
    for session in state.sessions:
        slot = facts.sessions[session.name].slot
        if (slot is None) != (session.slot is None):
            if slot is None:
                return f"{past.here} leaves {session.name} without a slot; by the rules it keeps one"
            since = past.first_since(f"slot of {session.name}", _has, session.name, "slot", slot)
            history = some(len(facts.sessions[session.name].history), "token")
            return (
                f"the slot of {session.name} keeps {some(slot.kv_committed_len, 'committed token')} {since};"
                f" by the rules {past.here} leaves none, and the history of {session.name} has {history}"
            )
    return lengths(past)


def _stays(past: History) -> str | None:
    """SES-4: a closed session that waits for nobody."""
    facts = past.now.facts
    busy = {request.session for request in facts.requests.values()}
    for name, session in sorted(facts.sessions.items()):
        if session.closing and name not in busy:
            slot = session.slot
            has = f", and its slot keeps {some(slot.kv_committed_len, 'committed token')}" if slot else ""
            since = past.first_since(f"{name} is closing", _has, name, "closing", True)
            return f"{name} waits {since} for a turn to end, and has none: nothing closes it any more{has}"
    return None


def _has(m: Moment, name: str, field: str, value: object) -> bool:
    """A session as the system shows it has this."""
    session = m.facts.sessions.get(name)
    return session is not None and getattr(session, field) == value


def _history(past: History) -> str | None:
    """SES-1: text that the client did not see."""
    facts = past.now.facts
    for session in past.now.state.sessions:
        got, want = tuple(facts.sessions[session.name].history), text_tokens(session.history)
        if got == want:
            continue
        name = session.name
        since = past.first_since(f"history of {name}", _has, name, "history", facts.sessions[name].history)
        if len(got) != len(want):
            has = f"the history of {name} has {some(len(got), 'token')} {since}"
            return f"{has}; the client saw {len(want)}, with which the next turn starts"
        at, theirs, ours = _first_apart(got, want)
        return f"position {at} of the history of {name} is {theirs} {since}; the client saw {ours}"
    for request in past.now.state.requests:
        name, text = request.name, tuple(facts.requests[request.name].text)
        want = text_tokens(request.text)
        if len(text) != len(want):
            has = some(len(text), "token")
            return f"after {past.here} {name} has {has} of text; by the rules it has {len(want)}"
        if text != want:
            at, theirs, ours = _first_apart(text, want)
            return f"after {past.here} position {at} of {name} is {theirs}; by the rules it is {ours}"
    return None


def _first_apart(got: tuple[int, ...], want: tuple[int, ...]) -> tuple[int, str, str]:
    """Where two texts of one length part, and what stands there in each."""
    at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    return at, stamp_text(got[at]) if got[at] else "a token that nobody sent", stamp_text(want[at])


def _choice(past: History) -> str:
    return f"{past.here} leaves the bounds of a choice, {past.violation.observed}"


RULES: dict[str, Callable[[History], str | None]] = {
    "OUT-1": _outcome, "OUT-2": _unchanged, "OUT-3": _choice,
    "CHK-1": _alarm, "CHK-2": _terms, "CHK-3": _unchanged,
    "SES-1": _history, "SES-2": _life, "SES-3": _unchanged,
    "SES-4": _stays,
}  # fmt: skip
