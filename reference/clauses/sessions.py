"""Sessions: when they and their slots exist, and their text (SES)."""

from __future__ import annotations

from collections.abc import Iterable

from reference.clauses.registry import clause
from reference.clauses.cursor_bounds import cursors_off
from reference.clauses.outcomes import unchanged_failure
from reference.clauses.step import Step, cursors_text
from reference.commands import Abort, Admit, Close, Finish, Submit
from reference.failures import AtNamed, AtText, Failure, count_text, failure
from reference.state import Phase, text_tokens


@clause(
    "SES-3",
    "restore is idempotent",
    "Admitting again, after the scheduler rejected the admission, changes nothing.",
    why="The slot names its row while it is lent, so that chunked prefill and budgets may retry.",
    rule="rules.admit.admit",
    source="kvspec",
    of=(Admit,),
    trigger=lambda s: _readmitted_request(s),
)
def _restore_is_idempotent(step: Step) -> Failure | None:
    if not _readmitted_request(step) or step.unchanged:
        return None
    return unchanged_failure("the state that the first admission left", step, "admits again")


def _readmitted_request(step: Step) -> bool:
    request = step.named_request
    if not isinstance(step.command, Admit) or request is None or not step.done:
        return False
    session = step.was.session(request.session)
    return request.phase is Phase.ADMITTED and session is not None and session.slot is not None


@clause(
    "SES-4",
    "a deferred close happens",
    "A session that is closed while a turn is in flight ends with that turn.",
    alone=True,
    why="Nobody can close it again; its row and pages are lost until the server ends.",
    rule="rules.sessions.end_turn",
    source="kvspec, #31765",
    concerns="cursors and locks",
    scope=(
        "Every step; the clause reads only which sessions and requests exist. After another "
        "violation a check ends every turn, closes every session and checks this clause again; a "
        "replay of such a trace continues past other violations."
    ),
    trigger=lambda s: (
        s.done
        and s.named_request is not None
        and (old := s.was.session(s.named_request.session)) is not None
        and old.closing
        and s.now.session(old.name) is None
    ),
)
def _close_happens(step: Step) -> Failure | None:
    requests = step.after.requests.values()
    for name in sorted([name for name, session in step.after.sessions.items() if session.closing]):
        if name not in {request.session for request in requests}:
            slot = step.after.sessions[name].slot
            has = "no slot" if slot is None else "a slot"
            return failure(
                f"{name} is gone: it is closed, and no turn is left",
                f"it is there, with {has}",
                AtNamed("session", name),
                *([AtNamed("slot", name)] if slot is not None else []),
                head=f"must close {name}, which waits for a turn that is gone",
            )
    return None


@clause(
    "SES-2",
    "a session's life",
    "Sessions, slots and requests exist exactly as long as specified. A slot exists from the "
    "first finish or retract until the close, or an abort of a turn that has KV. A close is "
    "deferred while a turn is in flight. An abort before admission leaves the slot alone.",
    why=(
        "Ownership moves between slot and request; a forgotten move leaks, a repeated one frees "
        "twice."
    ),
    decision=(
        "An abort of a turn that waits after a retract frees the slot's KV too; otherwise the "
        "next turn would resume on tokens that the history does not have."
    ),
    rule="rules.sessions.end_turn, rules.abort.abort, rules.sessions.close",
    source="#22273, #22790",
    concerns="cursors and locks",
    trigger=lambda s: isinstance(s.command, (Abort, Close)) and s.done and bool(s.was.requests),
)
def _sessions_live_and_end(step: Step) -> Failure | None:
    """Return the first difference in which requests and sessions exist, and which sessions close or have a
    slot."""
    after = step.after
    now = step.now
    names = {r.name for r in now.requests}
    if names != after.requests.keys():
        return _name_differences(step, "request", "requests", names, after.requests)
    names = {s.name for s in now.sessions}
    if names != after.sessions.keys():
        return _name_differences(step, "session", "open sessions", names, after.sessions)
    for session in now.sessions:
        facts = after.sessions[session.name]
        if facts.closing != session.closing:
            return failure(
                f"{session.name} closing: {session.closing}",
                f"closing: {facts.closing}",
                AtNamed("session", session.name),
            )
        if (facts.slot is None) != (session.slot is None):
            return failure(
                f"slot of {session.name}: {cursors_text(session.slot)}",
                cursors_text(facts.slot),
                AtNamed("slot", session.name),
                AtText(session.name),
                head=f"must {'leave no' if session.slot is None else 'keep the'} slot of {session.name}",
            )
        before = step.before.sessions.get(session.name)
        if isinstance(step.command, (Abort, Submit)) and before and session.turn is None:
            if facts.slot != session.slot and before.slot == session.slot:
                return failure(
                    f"slot of {session.name} as it was: {cursors_text(session.slot)}",
                    cursors_text(facts.slot),
                    *cursors_off(f"slot of {session.name}", session.slot, facts.slot),
                )
    return None


def _name_differences(
    step: Step, kind: str, noun: str, expected: Iterable[str], observed: Iterable[str]
) -> Failure:
    """Return the places of names that only one side has, and of the turn of a session that ended too
    early."""
    names = sorted({*expected} ^ {*observed})
    turns = [s.turn for s in step.now.sessions if s.turn is not None and s.name in names]
    does = f"must keep {kind} {names[0]}" if names[0] in expected else f"must end {kind} {names[0]}"
    places = [AtNamed(kind, name) for name in names] + [AtNamed("request", turn) for turn in turns]
    return failure(f"{noun} {_name_list(expected)}", f"{noun} {_name_list(observed)}", *places, head=does)


def _name_list(names: Iterable[str]) -> str:
    return "{" + ", ".join(sorted(names)) + "}"


@clause(
    "SES-1",
    "history is what the client saw",
    "A session's history is the text of its finished turns, each cut to the outputs that count. "
    "The next turn's input starts with it. An aborted turn leaves no trace.",
    why="KV of tokens outside the text would answer with another request's words.",
    rule="rules.finish.finish, state.text_cut",
    source="#22897, #22790",
    trigger=lambda s: (
        (
            isinstance(s.command, Finish)
            and (r := s.named_request) is not None
            and s.command.finished_len < r.output
        )
        or (isinstance(s.command, Abort) and (r := s.named_request) is not None and r.started)
    ),
)
def _history_is_what_client_saw(step: Step) -> Failure | None:
    """Return the failure of the first session or request whose text is not the one that the client knows."""
    for session in step.now.sessions:
        actual = tuple(step.after.sessions[session.name].history)
        if actual != text_tokens(session.history):
            expected = text_tokens(session.history)
            return _text_failure(f"history of {session.name}", session.name, expected, actual)
    for request in step.now.requests:
        facts = step.after.requests[request.name]
        actual = tuple(facts.text)
        expected = text_tokens(request.text)
        if facts.session != request.session or facts.origin != request.origin:
            first = _first_difference(expected, actual)
            expected_text, observed_text = (
                f"in {one.session or 'no session'} with {count_text(one.origin, 'token')} of input"
                for one in (request, facts)
            )
            return failure(
                f"{request.name}: session {request.session}, {count_text(request.origin, 'token')} of input",
                f"session {facts.session}, {facts.origin} tokens",
                AtText(request.name, first, expected[first] if first < len(expected) else None),
                head=f"must leave {request.name} {expected_text}, and leaves it {observed_text}",
            )
        if actual != expected:
            return _text_failure(f"text of {request.name}", request.name, expected, actual)
    return None


def _first_difference(expected: tuple[int, ...], observed: tuple[int, ...]) -> int:
    """Return the first position at which two texts differ."""
    return next(
        (index for index, (a, b) in enumerate(zip(expected, observed)) if a != b),
        min(len(expected), len(observed)),
    )


def _text_failure(text_name: str, owner: str, expected: tuple[int, ...], actual: tuple[int, ...]) -> Failure:
    """Return the failure of a text.

    owner: a request, or the session that has it as its history.
    """
    observed = f"{len(actual)} tokens" if len(actual) != len(expected) else "as many, but others"
    position = _first_difference(expected, actual)
    token = expected[position] if position < len(expected) else None
    head = f"must leave the {text_name} with {count_text(len(expected), 'token')}"
    place = AtText(owner, position, token)
    return failure(f"{text_name}: {len(expected)} tokens", observed, place, head=head)
