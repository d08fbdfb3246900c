"""The memory checks: what a server counts of each pool, while busy and while idle (#21499, #22562).

Per pool `available + evictable + protected + session_held + uncached == total`, and for the request rows
`free + held by sessions + running == total`. available is what the state says is free; the other terms are
counted from cursors and from the nodes of the radix tree, as a server counts them. That both agree is a
theorem (CHK-1).
"""

from __future__ import annotations

from reference.commands import Account, Entry, Report
from reference.cursors import counted_full, counted_swa
from reference.state import IN_BATCH, Cursors, Request, State, free
from reference.radix_tree import sizes

HELD = "session_held"
UNCACHED = "uncached"


def in_batch(request: Request) -> bool:
    """Return whether a running batch lists the request, so that its KV counts as its own. Computed anew
    at each check, never stored (#22753)."""
    return request.phase in IN_BATCH


def counted_rows(state: State) -> list[tuple[str, str, Cursors]]:
    """Return (term, holder, cursors) for every row in use.

    A lent slot counts once: through its turn, as soon as the turn is in a batch (#22213). A rejected
        admission puts nothing into a batch, so the slot still counts.
    """
    entries = []
    for session in state.sessions:
        turn = state.request(session.turn)
        if session.slot is not None and not (turn is not None and in_batch(turn)):
            entries.append((HELD, session.name, session.slot))
    for request in state.requests:
        if in_batch(request):
            assert request.cursors is not None
            entries.append((UNCACHED, request.name, request.cursors))
    return entries


def report(state: State) -> Report:
    """Return what a check finds now, with the share of each holder. It never alarms (CHK-1)."""
    geometry = state.config.geometry
    size = geometry.page_size
    left = free(state)
    rows = counted_rows(state)
    available = {"full": left.full * size, "swa": left.swa * size, "rows": left.rows}
    totals = {
        **{pool: geometry.pages(pool) * size for pool in geometry.pools},
        "rows": geometry.rows,
    }
    amounts = {"full": counted_full, "swa": counted_swa, "rows": lambda *_: 1}
    entries = tuple(
        Entry(pool, term, holder, amounts[pool](cursors, size))
        for pool in totals
        for term, holder, cursors in rows
    )
    cached = () if state.tree is None else sizes(state.tree)
    tree = {"full": cached[:2], "swa": cached[2:]}
    accounts = []
    for pool, total in totals.items():
        held, uncached = (
            sum(e.amount for e in entries if e.pool == pool and e.term == term)
            for term in (HELD, UNCACHED)
        )
        accounts.append(
            Account(pool, available[pool], *(tree.get(pool) or (0, 0)), held, uncached, total)
        )
    return Report(tuple(accounts), entries)


def account_text(account: Account) -> str:
    """Return an account as one line, such as "full: available 24 + session_held 8 = 32 of 32"."""
    terms = ("available", "evictable", "protected", HELD, UNCACHED)
    shown = [f"{t} {getattr(account, t)}" for t in terms if t == "available" or getattr(account, t)]
    total = f" = {account.counted}" if len(shown) > 1 else ""
    return f"{account.pool}: {' + '.join(shown)}{total} of {account.total}"
