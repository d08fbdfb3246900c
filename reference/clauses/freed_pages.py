"""Clauses on what each command frees, and that nothing is lost at the end (FREE, END)."""

from __future__ import annotations

from reference.clauses.registry import clause
from reference.clauses.expected_frees import pages_freed, pages_owed
from reference.clauses.step import PagesByHolder, Step, span
from reference.clauses.attention_reads import POOL
from reference.failures import AtPage, AtRow, Failure, failure
from reference.state import Phase

_NOBODY = "leaves no owner, so every page and row must be free"


def owed_and_freed(step: Step, pool: str) -> tuple[PagesByHolder, PagesByHolder]:
    """Return the pages that the rules owe, and those that the system freed. A tree with a policy of its
    own decides what it adopts and evicts: then only pages of session slots count, without those that it
    adopted."""
    owed = pages_owed(step)[pool]
    freed = pages_freed(step)[pool]
    if step.tree_policy_is_free and step.after.tree is not None:
        slots = {s.name for s in step.was.sessions if s.slot is not None}
        trees = {o.page for o in step.after.pools[pool].owned if o.holder.startswith("tree ")}
        taken = {(o.holder, o.at) for o in step.before.pools[pool].owned if o.page in trees}
        owed, freed = ({h: p for h, p in pages.items() if h in slots} for pages in (owed, freed))
        owed = {h: [at for at in pages if (h, at) not in taken] for h, pages in owed.items()}
    return owed, freed


def _freed_pages_failure(step: Step, pool: str) -> Failure | None:
    """Return the failure of the first holder whose freed pages are not those that the step owes. None where
    they agree."""
    if (wrong_free := wrongly_freed(step, pool)) is None:
        return None
    holder, owed, freed = wrong_free
    size = step.config.geometry.page_size
    wrong = {*owed} ^ {*freed}

    def pages() -> list[AtPage]:
        had = sorted(step.before.pools[pool].owned)
        return [AtPage(pool, o.page) for o in had if o.holder == holder and o.at in wrong]

    kind = f"{POOL[pool]} page"
    tree = holder.removeprefix("tree ")
    owner_text = f"of the tree at the end of {tree}" if tree != holder else f"of {holder}"
    must = f"the {kind}s {owner_text} at {span(owed, size)}" if owed else f"no {kind} {owner_text}"
    return Failure(
        f"{must} freed",
        f"freed {span(freed, size)}",
        pages,
        f"must free {must} and frees {span(freed, size)}",
    )


def wrongly_freed(step: Step, pool: str) -> tuple[str, list[int], list[int]] | None:
    """Return (holder, pages owed, pages freed) for the first holder for which they differ."""
    if not step.done or pool not in step.after.pools:
        return None
    owed, freed = owed_and_freed(step, pool)
    if owed == freed:
        return None
    for holder in sorted({*owed, *freed}):
        due = owed.get(holder, [])
        freed_indices = sorted(freed.get(holder, []))
        if due != freed_indices:
            return holder, due, freed_indices
    return None


@clause(
    "FREE-1",
    "full pages freed as owed",
    "A cut at target frees the full pages of [ceil(target), ceil(kv_allocated_len)). An end "
    "frees all from cache_protected_len on, except what the radix tree takes over. An insert "
    "frees duplicates, an eviction the removed nodes. Nothing else frees.",
    why=(
        "A page freed too early is read by its old owner; one not freed is lost when its row "
        "entry is overwritten."
    ),
    decision=(
        "The page that target falls into keeps committed tokens: it stays attached until it is "
        "freed whole."
    ),
    assumption="If page_size is 1, the free may start at target itself.",
    rule="cursors.cut, state.full_pages",
    source="#22862, #22862 review",
    scope="Which pages, not how often: a page freed twice in one command is OWN-2. A cut that may keep less"
    " (LEN-2) counts from where it stopped.",
    trigger=lambda s: s.done and bool(pages_owed(s)["full"]),
)
def _full_pages_freed(step: Step) -> Failure | None:
    return _freed_pages_failure(step, "full")


@clause(
    "FREE-2",
    "SWA pages freed as owed",
    "A cut frees the SWA pages of [max(ceil(target), ceil(swa_evicted_seqlen)), "
    "ceil(kv_allocated_len)); window eviction frees those between the old and the new "
    "swa_evicted_seqlen; ends, inserts and evictions free as in FREE-1. Nothing else frees.",
    why="What window eviction freed may belong to somebody else by now.",
    rule="cursors.cut, state.swa_pages",
    source="#22900, #22862",
    scope="Models with SWA. Which pages, not how often, as FREE-1.",
    needs=("window",),
    trigger=lambda s: s.done and "swa" in s.after.pools and bool(pages_owed(s)["swa"]),
)
def _swa_pages_freed(step: Step) -> Failure | None:
    return _freed_pages_failure(step, "swa")


@clause(
    "END-1",
    "nothing lost at the end",
    "When no session keeps anything and no request runs, all rows and pages are free, except the "
    "radix tree's pages.",
    why="A leak of one token per turn is an outage after a day.",
    rule="state.free",
    source="#22862",
    scope="Steps after which nobody holds anything.",
    trigger=lambda s: bool(s.before.holders) and not s.holders_now,
)
def _nothing_lost(step: Step) -> Failure | None:
    """Return the failure of a pool, or of the rows, that is not all free although no request or session holds
    anything."""
    # may have a row already
    if step.holders_now or any(r.phase is Phase.ADMITTED for r in step.now.requests):
        return None
    for name, pool in step.after.pools.items():
        of_tree = {o.page for o in pool.owned if o.holder.startswith("tree ")}
        expected = pool.size - len(of_tree)
        if len(pool.free_pages) < expected:
            missing = sorted({*range(1, pool.size + 1)} - of_tree - pool.free_pages)
            return failure(
                f"{expected} of {pool.size} pages of the {name} pool free",
                f"{len(pool.free_pages)} are",
                *(AtPage(name, page) for page in missing),
                head=_NOBODY,
            )
    if len(set(step.after.free_rows)) < step.after.rows:
        missing = sorted({*range(step.after.rows)} - {*step.after.free_rows})
        return failure(
            f"all {step.after.rows} rows free",
            f"{len(set(step.after.free_rows))} are",
            *map(AtRow, missing),
            head=_NOBODY,
        )
    return None
