"""The memory checks: what servers count to watch themselves (CHK)."""

from __future__ import annotations

from reference.accounts import account_text
from reference.clauses.base import Failure, clause
from reference.commands import Account, CheckBusy, CheckIdle, Done, Report
from reference.step import Step, span


def _reports(step: Step) -> tuple[Report | None, Report | None]:
    """The reference's report and the system's, of a check that both carried out."""
    if not isinstance(step.expected, Done) or not isinstance(step.outcome, Done):
        return None, None
    return step.expected.report, step.outcome.report


def _checked(step: Step) -> bool:
    """A check that is switched on has something to count."""
    return isinstance(step.expected, Done) and step.expected.report is not None and bool(step.held)


def _twice(step: Step, report: Report, account: Account) -> str:
    """Whose pages the unbalanced account counts more than once, or not at all, as far as is told."""
    pool = account.pool
    owned = step.after.pools[pool].owned if pool in step.after.pools else []
    lines = []
    for holder in step.held:
        names = {holder.name, holder.request.name if holder.request is not None else holder.name}
        mine = [e for e in report.entries if e.pool == pool and e.holder in names and e.amount]
        if len(mine) == 1 or not report.entries:
            continue
        as_what = ", and again as ".join(f"{e.term} of {e.holder} ({e.amount})" for e in mine)
        pages = [(o.at, o.page) for o in owned if o.holder == holder.name]
        if pages:
            at = span([p for p, _ in pages], step.scope.geometry.page_size)
            what = f"pages {', '.join(str(p) for _, p in pages)} of {holder.name} at {at}"
        elif pool == "rows":
            what = f"the row of {holder.name}"
        else:
            continue
        lines.append(f"{what}: counted {'as ' + as_what if mine else 'nowhere'}")
    return "; ".join(lines)


@clause(
    "CHK-1",
    "no false alarm",
    "While every page has its one owner, a memory check is satisfied: in each pool available, evictable,"
    " protected, session_held and uncached add up to the total, and so do the rows.",
    why="A check that cries wolf is switched off, or takes a healthy server down.",
    source="#22213, #22753",
    scope="Checks that are switched on, at any moment. Pages that are wrong while sums are right are not"
    " seen by sums: OWN-1 to OWN-3 are there for them.",
    settled="A lent slot is counted through its turn once a batch lists that, else as held: a flag set by"
    " restore goes stale when the admission is rejected (open, submit, admit, extend, retract, admit,"
    " check). SWA tokens are ceil(A) - ceil(max(R, E)): without the second ceil the sum is off after a"
    " finish that caps E inside a page, which no faithful scheduler reaches.",
    critical=_checked,
)
def _no_false_alarm(step: Step) -> Failure | None:
    _, report = _reports(step)
    if report is None:
        return None
    lines = []
    for account in report.accounts:
        if not account.balances:
            off = account.counted - account.total
            unit = "rows" if account.pool == "rows" else "tokens"
            lines.append(f"{account_text(account)}: {abs(off)} {unit} too {'many' if off > 0 else 'few'}")
            if told := _twice(step, report, account):
                lines.append(told)
    if report.alarm and not lines:
        lines = [report.alarm]
    return ("every pool adds up", "\n".join(lines)) if lines else None


@clause(
    "CHK-2",
    "each term counts what it names",
    "A check counts as available what is free, as session_held ceil(A) - R of every slot that no batch"
    " uses, as uncached the same of every request in a batch (SWA: ceil(A) - ceil(max(R, E))), whole pages.",
    why="Terms that are wrong by the same amount balance, and hide the next leak of that size.",
    source="#21499, #22562",
    scope="Checks that are switched on. Requests in a batch: extending and running ones, recomputed at each"
    " check; a finished one that a batch still lists (overlap) has given its KV back and is skipped.",
    critical=_checked,
)
def _terms(step: Step) -> Failure | None:
    want, got = _reports(step)
    if want is None or not step.done:
        return None
    if got is None:
        return "a report", "none"
    mine = {a.pool: a for a in got.accounts}
    for account in want.accounts:
        if mine.get(account.pool) != account:
            other = mine.get(account.pool)
            return account_text(account), account_text(other) if other else f"{account.pool}: not counted"
    if got.entries and sorted(map(str, got.entries)) != sorted(map(str, want.entries)):
        return _entries_text(want), _entries_text(got)
    return None


def _entries_text(report: Report) -> str:
    return "; ".join(f"{e.pool} {e.term} {e.holder} {e.amount}" for e in sorted(report.entries, key=str))


@clause(
    "CHK-3",
    "checks only look",
    "A memory check changes no cursor, no row, no page and no text.",
    why="It runs between any two steps of a server.",
    source="kvspec",
    scope="Checks. The order of a free list is not looked at.",
    critical=_checked,
)
def _only_looks(step: Step) -> Failure | None:
    if not isinstance(step.command, (CheckBusy, CheckIdle)) or step.unchanged or not step.done:
        return None
    return "the same state as before", "something changed"
