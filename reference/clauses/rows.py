"""Rows of req_to_token: held once, filled with whole pages (OWN)."""

from __future__ import annotations

from reference.clauses.base import Failure, clause
from reference.clauses.step import Step


@clause(
    "OWN-5",
    "rows fill whole pages",
    "The full slots of a row are whole pages, in order; only the last may be open.",
    about="state",
    why="A page is freed by any of its slots: two half pages of one row cannot be given back apart.",
    rule="ledger.full_pages",
    source="#22862 review",
    situation=lambda s: any(
        r is not None and r.cursors is not None
        and r.cursors.kv_allocated_len % s.config.geometry.page_size
        for r in map(s.was.request, s.progress)
    ),
)  # fmt: skip
def _whole_pages(step: Step) -> Failure | None:
    if not step.after.torn:
        return None
    return "slots of a page, in order", step.after.torn[0]


@clause(
    "OWN-4",
    "rows",
    "Every row of req_to_token is free or held by one session or request.",
    about="state",
    why="A row given back twice is lent twice.",
    rule="ledger.holders",
    source="#22790",
    situation=lambda s: len(s.after.free_rows) > len(s.before.free_rows),
)
def _rows(step: Step) -> Failure | None:
    held = [h.row for h in step.after.holders.values()]
    seen = sorted([*step.after.free_rows, *held])
    if len(seen) == step.after.rows and len(set(seen)) == len(seen):
        return None
    return (
        f"{step.after.rows} rows, each free or held once",
        f"free {sorted(step.after.free_rows)}, held {sorted(held)}",
    )
