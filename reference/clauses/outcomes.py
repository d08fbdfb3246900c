"""Outcomes: what is done, what is refused, what a system may choose (OUT)."""

from __future__ import annotations

from collections.abc import Iterator

from reference.clauses.registry import clause
from reference.clauses.facts import Facts
from reference.clauses.step import Step, cursors_text
from reference.commands import Done, EvictSwa, Launch, Refused, SpecDecode, Submit
from reference.failures import AtCursor, AtNamed, AtPage, AtRow, AtText, Failure, Place, failure
from reference.state import Cursors


@clause(
    "OUT-1",
    "outcome",
    "A command is done or refused exactly as specified, for the first reason that applies.",
    why="An operation that a server wrongly accepts corrupts; one it wrongly refuses starves.",
    rule="model.step",
    source="#22273",
    concerns="outcomes, choices and order",
    scope="The reason is compared only for systems that declare exact reasons.",
    trigger=lambda s: isinstance(s.expected, Refused),
)
def _outcomes_agree(step: Step) -> Failure | None:
    if step.done or step.expected == step.outcome:
        return None
    return failure(_outcome_text(step.expected), _outcome_text(step.outcome))


def _outcome_text(outcome: object) -> str:
    if isinstance(outcome, Refused):
        return f"refused: {outcome.reason.value}"
    return "done" if isinstance(outcome, Done) else str(outcome)


@clause(
    "OUT-2",
    "refusals change nothing",
    "A refused command changes no cursor, no row, no page and no text; a batch is all or nothing.",
    why="The scheduler tries again later and must find what it left.",
    rule="model.step",
    source="kvspec",
    scope=(
        "Rejected commands. The order of a free list does not count. Contents of free pages do "
        "not count if the server runs a one-token prefill of a rejected turn, nor does what a "
        "tree with its own policy makes of them."
    ),
    trigger=lambda s: isinstance(s.expected, Refused) and bool(s.holders_before),
)
def _refusal_changes_nothing(step: Step) -> Failure | None:
    if step.done or step.unchanged or (isinstance(step.command, Submit) and _rejected_turn(step)):
        return None
    return unchanged_failure("the same state as before", step, "is refused")


def _rejected_turn(step: Step) -> bool:
    """Return the failure of a rejected turn that changed KV, a row or a text."""
    before = step.before
    after = step.after
    if (before.sessions, before.requests, before.holders) != (
        after.sessions,
        after.requests,
        after.holders,
    ):
        return False
    its_own = step.tree_policy_is_free and after.tree is not None
    then, now = (
        (sorted(f.free_rows), its_own or [sorted(p.free) for p in f.pools.values()])
        for f in (before, after)
    )
    return then == now


def unchanged_failure(expected: str, step: Step, does: str) -> Failure:
    """Return the failure of a step that should have changed nothing.

    does: the reason, such as "is refused".
    """
    before = step.before
    after = step.after
    observed = difference(before, after)
    cursors = any(word in observed for word in ("kv_committed_len", "changed"))
    head = f"{does} and must change nothing" + ("" if cursors else f" ({observed})")
    return Failure(expected, observed, lambda: _changed_places(before, after), head)


def _changed_places(before: Facts, after: Facts) -> Iterator[Place]:
    """Yield the places that have changed; cursors with their old value."""
    for name in sorted({*before.requests, *after.requests}):
        a = before.requests.get(name)
        b = after.requests.get(name)
        if a is None or b is None:
            yield AtNamed("request", name)
        else:
            yield from _moved_cursors(name, AtNamed("request", name), a.cursors, b.cursors)
            if a.text != b.text:
                yield AtText(name)
    for name in sorted({*before.sessions, *after.sessions}):
        was = before.sessions.get(name)
        now = after.sessions.get(name)
        if was is None or now is None or was.closing != now.closing:
            yield AtNamed("session", name)
        else:
            yield from _moved_cursors(f"slot of {name}", AtNamed("slot", name), was.slot, now.slot)
            if was.history != now.history:
                yield AtText(name)
    for name, pool in after.pools.items():
        pages = {*before.pools[name].free} ^ {*pool.free}
        yield from (AtPage(name, page) for page in sorted(pages))
    yield from map(AtRow, sorted({*before.free_rows} ^ {*after.free_rows}))


def _moved_cursors(
    owner: str, itself: AtNamed, was: Cursors | None, now: Cursors | None
) -> Iterator[Place]:
    if was is not None and now is not None:
        fields = zip(was._fields, was, now)
        yield from (AtCursor(owner, field, must) for field, must, has in fields if must != has)
    elif was is not now:
        yield itself


def difference(before: Facts, after: Facts) -> str:
    for name in sorted({*before.requests, *after.requests}):
        a = before.requests.get(name)
        b = after.requests.get(name)
        if a != b:
            then, now = (cursors_text(x.cursors) if x else "gone" for x in (a, b))
            if then != now:
                return f"{name}: {then} became {now}"
            return f"{name}: its text changed"
    for name in sorted({*before.sessions, *after.sessions}):
        if before.sessions.get(name) != after.sessions.get(name):
            return f"session {name} changed"
    for pool, a_pool in after.pools.items():
        change = len(a_pool.free) - len(before.pools[pool].free)
        if change:
            return f"{pool} pool: {abs(change)} pages {'freed' if change > 0 else 'taken'}"
    if len(before.free_rows) != len(after.free_rows):
        return f"free rows {len(before.free_rows)} became {len(after.free_rows)}"
    return "contents or page assignment changed"


@clause(
    "OUT-3",
    "allowed choices",
    "Where the specification leaves a choice (how far to evict a window, how far to allocate "
    "ahead, how much an unresumable cut keeps), the system stays within it.",
    why="Servers differ in policy; only what no correct server may do is a violation.",
    rule="rules.rule_definition.ChoiceNotAllowed, rules.evict_swa.evict_request_window",
    source="kvspec",
    concerns="outcomes, choices and order",
    scope="Systems that report choices.",
    trigger=lambda s: isinstance(s.command, (EvictSwa, SpecDecode, Launch)) and s.done,
)
def _choice_is_allowed(step: Step) -> Failure | None:
    if not step.overreach:
        return None
    head = f"leaves the bounds of a choice, {step.overreach}"
    return failure("a choice within bounds", step.overreach, head=head)
