"""The memory checks: what servers count to watch themselves (CHK)."""

from __future__ import annotations

from collections import Counter

from reference.memory_accounts import HELD, UNCACHED, account_text
from reference.clauses.facts import pool_label
from reference.clauses.registry import clause
from reference.clauses.outcomes import unchanged_failure
from reference.clauses.step import Step, span
from reference.commands import Account, CheckBusy, CheckIdle, Done, Entry, Report
from reference.failures import AtCounter, Failure, count_text, failure
from reference.state import IN_BATCH, Holder

TERMS = ("available", "evictable", "protected", "session_held", "uncached", "total")


def _both_reports(step: Step) -> tuple[Report | None, Report | None]:
    """Return the reports of reference and system for a check that both carried out."""
    if not step.done:
        return None, None
    assert isinstance(step.expected, Done) and isinstance(step.outcome, Done)
    return step.expected.report, step.outcome.report


def _check_counts_something(step: Step) -> bool:
    """Return whether a check is switched on and has something to count."""
    return _both_reports(step)[0] is not None and bool(step.holders_now)


def expected_report(step: Step) -> Report:
    """Return the report that a check must give, from facts: free pages, pages of rows and tree, and
    requests in batches."""
    assert isinstance(step.expected, Done) and step.expected.report is not None
    accounts = []
    entries = []
    for pool in (account.pool for account in step.expected.report.accounts):
        expected_entries = [_expected_entry(step, pool, holder) for holder in step.holders_now]
        held, uncached = (
            sum(e.amount for e in expected_entries if e.term == term) for term in (HELD, UNCACHED)
        )
        free = len(step.after.free_rows)
        total = step.after.rows
        tree = {False: 0, True: 0}
        if pool != "rows":
            size = step.config.geometry.page_size
            free = len(step.after.pools[pool].free) * size
            total = step.after.pools[pool].size * size
            if step.after.tree is not None:
                for node in step.after.tree.nodes:
                    if pool == "full":
                        locks = node.full_locks
                        slots = node.slots
                    else:
                        locks = node.swa_locks
                        slots = node.swa_slots
                    tree[locks > 0] += len(slots)
        accounts.append(
            Account(
                pool,
                available=free,
                evictable=tree[False],
                protected=tree[True],
                session_held=held,
                uncached=uncached,
                total=total,
            )
        )
        entries += expected_entries
    return Report(tuple(accounts), tuple(entries))


def _expected_entry(step: Step, pool: str, holder: Holder) -> Entry:
    """Return a holder's entry: uncached if a batch lists its request, else session_held."""
    size = step.config.geometry.page_size
    request = holder.request
    owned = step.after.pools[pool].owned if pool != "rows" else ()
    amount = sum(o.holder == holder.name for o in owned) * size if pool != "rows" else 1
    if request is not None and request.phase in IN_BATCH:
        return Entry(pool, UNCACHED, request.name, amount)
    return Entry(pool, HELD, holder.name, amount)


def miscount_lines(step: Step, report: Report, account: Account) -> list[str]:
    """Describe the holders whose pages or row an unbalanced account counts twice, wrongly or not at
    all, a line each.

    A report without entries does not tell whom the system counted, unless it counted nobody: then the
        lines say only how each holder should count.
    """
    pool = account.pool
    lines = []
    names = [{h.name, h.request.name if h.request is not None else h.name} for h in step.holders_now]
    is_itemised = bool(report.entries) or account.session_held + account.uncached == 0
    is_itemised = is_itemised and {e.holder for e in report.entries} <= set().union(*names)
    for holder, called in zip(step.holders_now, names):
        expected = _expected_entry(step, pool, holder)
        entries = [e for e in report.entries if e.pool == pool and e.holder in called and e.amount]
        if not expected.amount or (is_itemised and entries == [expected]):
            continue
        holding = _holding_text(step, pool, holder)
        if not is_itemised:
            lines.append(f"{holding}: to be counted once, as {_term_text(expected)}")
        elif not entries:
            lines.append(f"{holding}: counted nowhere, to be counted as {_term_text(expected)}")
        elif len(entries) == 1:
            [entry] = entries
            lines.append(
                f"{holding}: counted with {entry.amount} as {_term_text(entry)}, it is {expected.amount}"
            )
        else:
            as_what = " and as ".join(f"{_term_text(e)} ({_amount_text(pool, e.amount)})" for e in entries)
            lines.append(f"{holding}: counted {len(entries)} times, as {as_what}")
    return lines


def _amount_text(pool: str, amount: int) -> str:
    return count_text(amount, "row" if pool == "rows" else "token")


def _term_text(entry: Entry) -> str:
    return f"{entry.term} of {entry.holder}"


def _holding_text(step: Step, pool: str, holder: Holder) -> str:
    """Describe what a holder has in a pool, such as "full pages 1, 2 of s1 at [0, 8)"."""
    if pool == "rows":
        return f"the row of {holder.name}"
    pages = [(o.at, o.page) for o in step.after.pools[pool].owned if o.holder == holder.name]
    positions = span([index for index, _ in pages], step.config.geometry.page_size)
    numbers = ", ".join(str(page) for _, page in pages)
    noun = "pages" if len(pages) > 1 else "page"
    return f"{pool_label(pool)} {noun} {numbers} of {holder.name} at {positions}"


@clause(
    "CHK-3",
    "checks only look",
    "A memory check changes no cursor, no row, no page and no text.",
    why="It runs between any two steps of a server.",
    rule="rules.memory_checks.check_busy, rules.memory_checks.check_idle",
    source="kvspec",
    scope="Checks. The order of a free list is not looked at.",
    of=(CheckBusy, CheckIdle),
    trigger=_check_counts_something,
)
def _check_changes_nothing(step: Step) -> Failure | None:
    if step.unchanged or not step.done or not isinstance(step.command, (CheckBusy, CheckIdle)):
        return None
    return unchanged_failure("the same state as before", step, "is a check")


@clause(
    "CHK-1",
    "no false alarm",
    "While every page has one owner, a memory check passes: in each pool available, evictable, "
    "protected, session_held and uncached add up to the total, and so do the rows.",
    why="A check that cries wolf is switched off, or takes a healthy server down.",
    rule="memory_accounts.report",
    source="#22213, #22753",
    concerns="outcomes, choices and order",
    scope=(
        "Checks that are switched on, at any moment. Wrong owners with right sums are left to "
        "OWN-1 to OWN-3. Whether a check alarms when it should is not checked: no correct state "
        "can show it."
    ),
    decision=(
        "A lent slot counts through its turn once a batch lists the turn, else as held; a flag "
        "set by restore goes stale when an admission is rejected (open, submit, admit, extend, "
        "retract, admit, check). SWA tokens are ceil(A) - ceil(max(R, E)): without the second "
        "ceil the sum is off after a finish that caps E inside a page."
    ),
    assumption="If every swa_evicted_seqlen is a page boundary, ceil(A) - max(R, E) will do. A realistic"
    " scheduler keeps it so.",
    of=(CheckBusy, CheckIdle),
    trigger=_check_counts_something,
)
def _no_false_alarm(step: Step) -> Failure | None:
    """Return the failure of a check that alarms, or whose accounts do not add up, while every page has its
    one owner."""
    expected, report = _both_reports(step)
    if report is None or (not report.alarm and all(a.balances for a in report.accounts)):
        return None
    wrong = _wrong_terms(expected_report(step), report) if expected is not None else []
    lines = []
    heads = []
    for account in report.accounts:
        if not account.balances:
            off = account.counted - account.total
            much = f"{_amount_text(account.pool, abs(off))} too {'many' if off > 0 else 'few'}"
            lines.append(f"{account_text(account)}: {much}")
            miscounts = miscount_lines(step, report, account)
            lines += miscounts
            counted = f"{_amount_text(account.pool, account.counted)} of {account.total}"
            sums = f"counts {counted} in {_pool_text(account.pool)}, though every page has its one owner"
            reason = miscounts[0] if miscounts else _wrong_terms_text(report, wrong, account.pool)
            heads.append(f"{sums}: {reason}" if reason else sums)
    if not lines:
        lines = [report.alarm]
    return Failure(
        "every pool adds up, as every page has its one owner",
        "\n".join(["a false alarm", *lines]),
        lambda: wrong,
        next(iter(heads), ""),
    )


@clause(
    "CHK-2",
    "each term counts what it names",
    "available counts the free pages, session_held those of slots that no batch uses, uncached "
    "those of requests in a batch. Whole pages count: ceil(A) - R tokens of the full pool, "
    "ceil(A) - ceil(max(R, E)) of the SWA pool, and a row. At level 2 the same is listed by "
    "name.",
    why="Terms that are wrong by the same amount balance, and hide the next leak of that size.",
    rule="memory_accounts.report, cursors.counted_full, cursors.counted_swa",
    source="#21499, #22562",
    concerns="outcomes, choices and order",
    scope=(
        "Checks that are switched on. Requests in a batch are recomputed at each check: "
        "extending and running ones; a finished one that a batch still lists (overlap) is "
        "skipped. Names are checked where the system reports them."
    ),
    of=(CheckBusy, CheckIdle),
    trigger=_check_counts_something,
)
def _terms_are_right(step: Step) -> Failure | None:
    """Return the failure of the first account of a check that differs from the reference's, or of its list of
    holders."""
    expected, reported = _both_reports(step)
    if expected is None:
        return failure("none: level 0 is off", "a report") if reported else None
    if reported is None:
        return failure("a report", "none")
    listed = isinstance(step.command, CheckBusy) and step.command.level == 2 and expected.entries
    expected = expected_report(step)
    expected_accounts = {a.pool: a for a in reported.accounts}
    if len(expected_accounts) < len(reported.accounts):
        observed = f"{len(reported.accounts)} accounts of {len(expected_accounts)} pools"
        return failure("one account of each pool", observed)
    for account in expected.accounts:
        if expected_accounts.get(account.pool) != account:
            other = expected_accounts.get(account.pool)
            observed = account_text(other) if other else f"{account.pool}: not counted"
            wrong = _wrong_terms(expected, reported)
            off = _wrong_terms_text(reported, wrong, account.pool)
            head = f"counts wrong terms in {_pool_text(account.pool)}: {off}" if off else ""
            return failure(account_text(account), observed, *wrong, head=head)
    if (reported.entries or listed) and _merged_amounts(reported) != _merged_amounts(expected):
        return failure(_entries_text(expected), _entries_text(reported))
    return None


def _wrong_terms(expected: Report, observed: Report) -> list[AtCounter]:
    """Return the terms in which a report differs from the expected one."""
    own_accounts = {account.pool: account for account in observed.accounts}
    return [
        AtCounter(account.pool, term, must)
        for account in expected.accounts
        if account.pool in own_accounts
        for term in TERMS
        if (must := getattr(account, term)) != getattr(own_accounts[account.pool], term)
    ]


def _wrong_terms_text(report: Report, wrong: list[AtCounter], pool: str) -> str:
    """Describe the wrong terms of a pool."""
    accounts = {account.pool: account for account in report.accounts}
    return ", ".join(
        f"{term.name} is {getattr(accounts[pool], term.name)}, not {term.must}"
        for term in wrong
        if term.pool == pool
    )


def _pool_text(pool: str) -> str:
    return {"rows": "the rows", "swa": "the SWA pool"}.get(pool, f"the {pool} pool")


def _merged_amounts(report: Report) -> Counter[tuple[str, str, str]]:
    """Return amounts by pool, term and holder. A holder that adds nothing may be left out."""
    amounts: Counter[tuple[str, str, str]] = Counter()
    for entry in report.entries:
        amounts[entry.pool, entry.term, entry.holder] += entry.amount
    return amounts


def _entries_text(report: Report) -> str:
    return "; ".join(f"{' '.join(key)} {amount}" for key, amount in sorted(_merged_amounts(report).items()))
