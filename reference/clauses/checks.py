"""The memory checks: what servers count to watch themselves (CHK)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from reference.accounts import account_text
from reference.accounts import report as report_of
from reference.clauses.base import Failure, clause
from reference.clauses.facts import TreeFacts
from reference.clauses.outcomes import difference
from reference.clauses.step import Step, span
from reference.commands import Account, CheckBusy, CheckIdle, Done, Entry, Report
from reference.ledger import Holder


def _reports(step: Step) -> tuple[Report | None, Report | None]:
    """The reference's report and the system's, of a check that both carried out."""
    if not isinstance(step.expected, Done) or not isinstance(step.outcome, Done):
        return None, None
    return step.expected.report, step.outcome.report


def _checked(step: Step) -> bool:
    """A check that is switched on has something to count."""
    return _reports(step)[0] is not None and bool(step.held)


def miscounted(step: Step, report: Report, account: Account) -> list[str]:
    """Whose pages or row an unbalanced account counts twice, wrongly or not at all, a line each.

    Without entries nobody can say whom the system counted, unless it counted nobody: then only what
    each holder should count as is told.
    """
    pool = account.pool
    right = [e for e in report_of(step.now).entries if e.pool == pool]
    known = {h.name for h in step.held} | {h.request.name for h in step.held if h.request is not None}
    told = bool(report.entries) or account.session_held + account.uncached == 0
    told = told and all(e.holder in known for e in report.entries)
    lines = []
    for holder in step.held:
        names = {holder.name, holder.request.name if holder.request is not None else holder.name}
        want = [e for e in right if e.holder in names]
        mine = [e for e in report.entries if e.pool == pool and e.holder in names and e.amount]
        if not want or not want[0].amount or (told and mine == want):
            continue
        what, due = _place(step, pool, holder), _as(want[0])
        if not told:
            lines.append(f"{what}: to be counted once, as {due}")
        elif not mine:
            lines.append(f"{what}: counted nowhere, to be counted as {due}")
        elif len(mine) == 1:
            lines.append(f"{what}: counted with {mine[0].amount} as {_as(mine[0])}, it is {want[0].amount}")
        else:
            as_what = " and as ".join(f"{_as(e)} ({_amount(pool, e.amount)})" for e in mine)
            lines.append(f"{what}: counted {len(mine)} times, as {as_what}")
    return lines


def _amount(pool: str, amount: int) -> str:
    return f"{amount} {'row' if pool == 'rows' else 'token'}{'s' * (amount != 1)}"


def _as(entry: Entry) -> str:
    return f"{entry.term} of {entry.holder}"


def _place(step: Step, pool: str, holder: Holder) -> str:
    """What a holder has in a pool, such as "full pages 1, 2 of s1 at [0, 8)"."""
    if pool == "rows":
        return f"the row of {holder.name}"
    pages = [(o.at, o.page) for o in step.after.pools[pool].owned if o.holder == holder.name]
    at = span([index for index, _ in pages], step.config.geometry.page_size)
    numbers = ", ".join(str(page) for _, page in pages)
    return f"{pool} page{'s' * (len(pages) > 1)} {numbers} of {holder.name} at {at}"


@clause(
    "CHK-3",
    "checks only look",
    "A memory check changes no cursor, no row, no page and no text.",
    why="It runs between any two steps of a server.",
    rule="rules.checks.check_busy, rules.checks.check_idle",
    source="kvspec",
    scope="Checks. The order of a free list is not looked at.",
    situation=_checked,
)
def _only_looks(step: Step) -> Failure | None:
    if step.unchanged or not step.done or not isinstance(step.command, (CheckBusy, CheckIdle)):
        return None
    return "the same state as before", difference(step.before, step.after)


@clause(
    "CHK-1",
    "no false alarm",
    "While every page has its one owner, a memory check is satisfied: in each pool available, evictable,"
    " protected, session_held and uncached add up to the total, and so do the rows.",
    why="A check that cries wolf is switched off, or takes a healthy server down.",
    rule="accounts.report",
    source="#22213, #22753",
    scope="Checks that are switched on, at any moment. Pages that are wrong while sums are right are not"
    " seen by sums: OWN-1 to OWN-3 are there for them. Whether a check alarms when it should is not asked"
    " here: no correct state can show it.",
    settled="A lent slot is counted through its turn once a batch lists that, else as held: a flag set by"
    " restore goes stale when the admission is rejected (open, submit, admit, extend, retract, admit,"
    " check). SWA tokens are ceil(A) - ceil(max(R, E)): without the second ceil the sum is off after a"
    " finish that caps E inside a page.",
    assumption="If every swa_evicted_seqlen is a page boundary, ceil(A) - max(R, E) will do. A faithful"
    " scheduler keeps it so.",
    situation=_checked,
)
def _no_false_alarm(step: Step) -> Failure | None:
    _, report = _reports(step)
    if report is None:
        return None
    lines = []
    for account in report.accounts:
        if not account.balances:
            off = account.counted - account.total
            much = f"{_amount(account.pool, abs(off))} too {'many' if off > 0 else 'few'}"
            lines.append(f"{account_text(account)}: {much}")
            lines += miscounted(step, report, account)
    if report.alarm and not lines:
        lines = [report.alarm]
    if not lines:
        return None
    return "every pool adds up, as every page has its one owner", "\n".join(["a false alarm", *lines])


@clause(
    "CHK-2",
    "each term counts what it names",
    "available is what is free; session_held is what the slots hold that no batch uses; uncached is what"
    " the requests in a batch hold. Held are whole pages: ceil(A) - R tokens of the full pool, ceil(A) -"
    " ceil(max(R, E)) of the SWA pool, and a row. Entries, where they are told, say the same by name.",
    why="Terms that are wrong by the same amount balance, and hide the next leak of that size.",
    rule="accounts.report, cursors.counted_full, cursors.counted_swa",
    source="#21499, #22562",
    scope="Checks that are switched on. Requests in a batch: extending and running ones, recomputed at each"
    " check; a finished one that a batch still lists (overlap) has given its KV back and is skipped.",
    situation=_checked,
)
def _terms(step: Step) -> Failure | None:
    want, got = _reports(step)
    if want is None or got is None:
        missing = want is not None and step.done
        return ("a report", "none") if missing else ("none: level 0 is off", "a report") if got else None
    if step.tree_policy_is_free and step.after.tree is not None:
        want = of_own_tree(want, step.after.tree)
    mine = {a.pool: a for a in got.accounts}
    if len(mine) < len(got.accounts):
        return "one account of each pool", f"{len(got.accounts)} accounts of {len(mine)} pools"
    for account in want.accounts:
        if mine.get(account.pool) != account:
            other = mine.get(account.pool)
            return account_text(account), account_text(other) if other else f"{account.pool}: not counted"
    if got.entries and _merged(got) != _merged(want):
        return _entries_text(want), _entries_text(got)
    return None


def of_own_tree(report: Report, tree: TreeFacts) -> Report:
    """What is evictable and what is protected by the counters of the system's nodes."""
    evictable, protected = ({"full": 0, "swa": 0, "rows": 0} for _ in range(2))
    for node in tree.nodes:
        (protected if node.full_locks else evictable)["full"] += len(node.slots)
        (protected if node.swa_locks else evictable)["swa"] += len(node.swa_slots)
    accounts = tuple(
        replace(a, evictable=evictable[a.pool], protected=protected[a.pool]) for a in report.accounts
    )
    return replace(report, accounts=accounts)


def _merged(report: Report) -> Counter[tuple[str, str, str]]:
    """Amounts by pool, term and holder; who adds nothing need not be told."""
    amounts: Counter[tuple[str, str, str]] = Counter()
    for entry in report.entries:
        amounts[entry.pool, entry.term, entry.holder] += entry.amount
    return amounts


def _entries_text(report: Report) -> str:
    return "; ".join(f"{' '.join(key)} {amount}" for key, amount in sorted(_merged(report).items()))
