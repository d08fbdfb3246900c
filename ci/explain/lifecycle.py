"""Explanations for outcomes, memory checks and when sessions, slots and requests exist."""

from collections.abc import Callable, Sequence

from ci.compare.differences import CURSORS, POOL
from ci.explain.cursors import has_cursor, lengths
from ci.explain.history import History, some
from reference.clauses.checks import miscounted
from reference.clauses.contents import stamp_text
from reference.clauses.facts import Facts
from reference.clauses.step import swept_below
from reference.commands import Account, Done, Reason, Refused, Submit
from reference.failures import AtCounter, AtNamed, AtText
from reference.ledger import ZERO, Cursors, Phase, free, text_tokens
from reference.rules import RULES as RULES_OF
from reference.tree import sizes
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
        pool, at = ("full", 0) if reason is Reason.OUT_OF_FULL else ("swa", 2)
        left, evictable = free(was), sizes(was.tree)[at] if was.tree is not None else 0
        if min(left.full, left.swa) < 0:
            return ""  # row and tree, each with pages of its own, had more than there are
        pages = some(getattr(left, pool), f"{POOL[pool]} page")
        return f", for {pages} can be had at once and {evictable // past.page_size} more from the tree"
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
    for account in _accounts(past):
        if account.balances:
            continue
        unit = "rows" if account.pool == "rows" else f"{POOL[account.pool]} tokens"
        lines = miscounted(past.step, report, account) if report is not None else []
        counts = f"counts {account.counted} {unit} of {account.total}"
        told = f"every page has its one owner, but {past.here} {counts}"
        off = lines[0] if lines else _terms_off(past, account.pool)
        since = past.violation.since
        then = f"; the check fails from {past.command(since)} on" if since is not None else ""
        return f"{told}: {off}{then}" if off else told + then
    return None


def _terms_off(past: History, pool: str) -> str:
    """The terms of an account that are not what they must be."""
    accounts = {account.pool: account for account in _accounts(past)}
    off = [p for p in past.violation.failure.at if isinstance(p, AtCounter) and p.pool == pool]
    return ", ".join(f"{p.name} is {getattr(accounts[pool], p.name)}, not {p.must}" for p in off)


def _accounts(past: History) -> Sequence[Account]:
    """What the last command counted."""
    report = past.step.outcome.report if isinstance(past.step.outcome, Done) else None
    return report.accounts if report is not None else ()


def _terms(past: History) -> str | None:
    """CHK-2: terms that balance and are wrong."""
    pool = next((p.pool for p in past.violation.failure.at if isinstance(p, AtCounter)), None)
    if pool is None:
        return None
    unit = "rows" if pool == "rows" else f"{POOL[pool]} tokens"
    off = _terms_off(past, pool)
    return f"the sums of {past.here} add up, but not their terms: of the {unit}, {off}"


def _life(past: History) -> str | None:
    """SES-2: a session, slot or request that is there and should not be, or the other way round."""
    match past.violation.failure.at[0]:
        case AtNamed("slot", name):
            return _slot(past, name)
        case AtNamed(kind, name):
            return _named(past, kind, name)
    return lengths(past)


def _is_there(m: Moment, kind: str, name: str) -> bool:
    return name in getattr(m.facts, f"{kind}s")


def _named(past: History, kind: str, name: str) -> str | None:
    """A request or session that one side alone has."""
    if _is_there(past.now, kind, name):
        if name in {one.name for one in getattr(past.now.state, f"{kind}s")}:
            return None
        since = past.first_since(f"{kind} {name} is there", _is_there, kind, name)
        return f"{kind} {name} is there {since}; by the rules it ends with {past.here}"
    session = past.now.state.session(name)
    turn = session.turn if session is not None else None
    why = f": its turn {turn} is in flight" if turn is not None else ""
    return f"{past.here} ends {kind} {name}, which goes on by the rules{why}"


def _slot(past: History, name: str) -> str:
    """A slot that is there, or is not."""
    session = past.now.facts.sessions[name]
    if session.slot is None:
        return f"{past.here} leaves {name} without a slot; by the rules it keeps one"
    since = past.first_since(f"slot of {name}", _has, name, "slot", session.slot)
    return (
        f"the slot of {name} keeps {some(session.slot.kv_committed_len, 'committed token')} {since}; by the"
        f" rules {past.here} leaves none, and the history of {name} has {some(len(session.history), 'token')}"
    )


def _stays(past: History) -> str | None:
    """SES-4: a closed session that waits for nobody."""
    place = past.violation.failure.at[0]
    if not isinstance(place, AtNamed):
        return None
    name, slot = place.name, past.now.facts.sessions[place.name].slot
    has = f", and its slot keeps {some(slot.kv_committed_len, 'committed token')}" if slot else ""
    since = past.first_since(f"{name} is closing", _has, name, "closing", True)
    return f"{name} waits {since} for a turn to end, and has none: nothing closes it any more{has}"


def _has(m: Moment, name: str, field: str, value: object) -> bool:
    """A session as the system shows it has this."""
    session = m.facts.sessions.get(name)
    return session is not None and getattr(session, field) == value


def _history(past: History) -> str | None:
    """SES-1: text that the client did not see."""
    place, state, facts = past.violation.failure.at[0], past.now.state, past.now.facts
    if not isinstance(place, AtText) or place.at is None:
        return None
    name, session, request = place.owner, state.session(place.owner), state.request(place.owner)
    if session is not None:
        got, want = tuple(facts.sessions[name].history), text_tokens(session.history)
        since = past.first_since(f"history of {name}", _has, name, "history", facts.sessions[name].history)
        if len(got) != len(want):
            has = f"the history of {name} has {some(len(got), 'token')} {since}"
            return f"{has}; the client saw {len(want)}, with which the next turn starts"
        theirs = _token(got[place.at])
        told = f"position {place.at} of the history of {name} is {theirs} {since}"
        return f"{told}; the client saw {_token(want[place.at])}"
    assert request is not None
    got, want = tuple(facts.requests[name].text), text_tokens(request.text)
    if len(got) != len(want):
        has = some(len(got), "token")
        return f"after {past.here} {name} has {has} of text; by the rules it has {len(want)}"
    told = f"after {past.here} position {place.at} of {name} is {_token(got[place.at])}"
    return f"{told}; by the rules it is {_token(want[place.at])}"


def _token(token: int) -> str:
    return stamp_text(token) if token else "a token that nobody sent"


def _choice(past: History) -> str:
    return f"{past.here} leaves the bounds of a choice, {past.violation.observed}"


RULES: dict[str, Callable[[History], str | None]] = {
    "OUT-1": _outcome, "OUT-2": _unchanged, "OUT-3": _choice,
    "CHK-1": _alarm, "CHK-2": _terms, "CHK-3": _unchanged,
    "SES-1": _history, "SES-2": _life, "SES-3": _unchanged,
    "SES-4": _stays,
}  # fmt: skip
