"""Which clause a difference between rules and server violates, by the clauses themselves.

A log of lengths shows cursors, not pages. So the facts after a command are the reference's, but for what the
log shows otherwise; the clauses that read nothing else are asked of these.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.clauses import CLAUSES
from reference.clauses.facts import Facts, RequestFacts, SessionFacts
from reference.clauses.step import Step, cursors_text
from reference.commands import Command, Done, Outcome
from reference.ledger import Cursors, State, text_tokens

# In the order of evaluation; the others read pages, contents or the tree.
ASKED = tuple(
    each for name, each in CLAUSES.items()
    if name in ("OUT-1", "OUT-3", "LEN-2", "LEN-3", "LEN-1", "LEN-4", "SES-2", "SES-1", "SWA-1")
)  # fmt: skip


class Verdict(NamedTuple):
    """A clause that does not hold: what it expects, what the server shows."""

    clause: str
    expected: str
    observed: str


class Shown(NamedTuple):
    """What a log shows after a command: cursors of requests, of slots (None: it keeps none)."""

    requests: dict[str, Cursors]
    slots: dict[str, Cursors | None]


def verdict(
    command: Command, was: State, now: State, expected: Outcome, shown: Shown, overreach: str = ""
) -> Verdict:
    """The first clause that the server violates with what it shows; REF-1 if none of these says so."""
    before, after = _facts(was, Shown({}, {})), _facts(now, shown)
    step = Step(
        was.config, command, expected, Done(), was, now, before, after, False, overreach,
        tree_policy_is_free=True, locks_before={},
    )  # fmt: skip
    for clause in ASKED:
        failure = clause.check(step)
        if failure is not None:
            return Verdict(clause.id, *failure)
    for name, got in shown.requests.items():
        request = now.request(name)
        if request is not None and request.cursors is not None and request.cursors != got:
            return Verdict("REF-1", f"{name}: {cursors_text(request.cursors)}", cursors_text(got))
    for name, kept in shown.slots.items():
        session = now.session(name)
        want = session.slot if session is not None else None
        if want != kept:
            return Verdict("REF-1", f"slot of {name}: {cursors_text(want)}", cursors_text(kept))
    return Verdict("REF-1", "the reference's state", "another")


def _facts(state: State, shown: Shown) -> Facts:
    requests = {}
    for r in state.requests:
        cursors = shown.requests.get(r.name, r.cursors)
        requests[r.name] = RequestFacts(r.session, r.origin, text_tokens(r.text), cursors)
    sessions = {}
    for s in state.sessions:
        slot = shown.slots.get(s.name, s.slot)
        sessions[s.name] = SessionFacts(text_tokens(s.history), s.closing, slot)
    return Facts(sessions, requests, {}, {}, state.config.geometry.rows, ())
