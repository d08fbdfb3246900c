"""As test_clauses, of sessions, pages, the mapping, what is freed, and locks: a row for each condition."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from reference.clauses import CLAUSES, broken
from reference.clauses.facts import Owned, Torn
from reference.clauses.step import Step
from reference.commands import (
    Abort, Admit, Command, Draft, EvictSwa, Finish, Insert, SpecDecode,
)  # fmt: skip
from reference.ledger import ZERO, Cursors, Round, text_tokens
from reference.prefix_cache import page_name
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.reference.spoilt_facts import (
    ONE, PLAIN, TREE, also_owned, as_refused, changed, fails, freed_less, holds, in_tree, is_told, moved,
    node, one_lost, one_twice, step_of, text,
)  # fmt: skip

BARE = replace(PLAIN, window=None, swa_pages=0)
TURN = script("open s1; submit r1 in s1 +5; admit r1; extend r1 +5")
LATER = (*TURN, *script("finish r1 keep 1; submit r2 in s1 +2"))
SERVE = script("submit r3 (no session) +5; admit r3; extend r3 +5")
LENT = step_of(PLAIN, *LATER, "admit r2; submit r3 (no session) +1")
AGAIN = step_of(PLAIN, *LATER, "admit r2; admit r2")
RUNS = step_of(PLAIN, *TURN, "decode r1")
ENDED = step_of(PLAIN, *TURN, "finish r1 keep 1")
GIVEN_UP = step_of(PLAIN, *LATER, "abort r2")
CLOSING = step_of(PLAIN, *TURN, "retract r1; close s1")
BOTH = step_of(PLAIN, *TURN, *SERVE)
AHEAD = SpecDecode((Draft("r1", 8, 5),))
CUT = step_of(PLAIN, *TURN, AHEAD, "finish r1 keep 2")
SWEPT = (*TURN, AHEAD, EvictSwa("r1", 12))  # up to 8
WAITS = step_of(PLAIN, *TURN, "launch r1 +3 accept 1; finish r1 keep 1")
LAUNCHED = WAITS.was.requests[0]._replace(cursors=Cursors(5, 8, 0, 0), in_flight=(Round(3, 1, 0),))
CUT_BELOW = step_of(PLAIN, *SWEPT, "finish r1 keep 2")
JUST_THERE = step_of(  # resumed at 6, its window begins at 4
    PLAIN, *TURN, "spec_decode r1 +3 accept 1; evict_swa r1 at length 8; finish r1 keep 2")  # fmt: skip
RETRIED = step_of(PLAIN, *TURN, "decode r1; decode r1; retract r1 losing 1; admit r1")
SHORT = step_of(replace(PLAIN, page_size=1), *TURN, "spec_decode r1 +3 accept 1; evict_swa r1 at length 8",
                "finish r1 keep 2")  # fmt: skip
JUST_LOST = (replace(PLAIN, page_size=1), "open s1; submit r1 in s1 +1; admit r1; extend r1 +1",
             "spec_decode r1 +3 accept 1; evict_swa r1 at length 4")  # fmt: skip
RESTARTED = step_of(PLAIN, *SWEPT, "finish r1 keep 2; submit r2 in s1 +2; admit r2")


def has(step: Step, what: str, name: str, *, before: bool = False, **parts: Any) -> Step:
    """The step with other facts of one session or request."""
    return changed(step, before=before, **{what: lambda known: known | {name: known[name]._replace(**parts)}})


def _stay(step: Step, pool: str) -> Iterator[Owned]:
    """Pages of rows that are where they were."""
    before, after = step.before.pools[pool].owned, step.after.pools[pool].owned
    return (o for o in before if o in after and not o.holder.startswith("tree "))


def freed_more(step: Step, pool: str) -> Step:
    """A page that the step left where it was is free."""

    def change(pools: dict) -> dict:
        now = pools[pool]
        page = next(_stay(step, pool))
        kept = [o for o in now.owned if o != page]
        return pools | {pool: now._replace(free=[*now.free, page.page], owned=kept)}

    return changed(step, pools=change)


def free_pages(step: Step, *pages: int, pool: str = "full") -> Step:
    """The free list with other pages at its end."""
    free = step.after.pools[pool].free
    return changed(step, pools=lambda ps: ps | {pool: ps[pool]._replace(free=[*free[: -len(pages)], *pages])})


def without(step: Step, pool: str, page: int) -> Step:
    """Nobody has the page, and it is not free."""

    def change(pools: dict) -> dict:
        now = pools[pool]
        free, owned = [p for p in now.free if p != page], [o for o in now.owned if o.page != page]
        return pools | {pool: now._replace(free=free, owned=owned)}

    return changed(step, pools=change)


def slot(step: Step, **cursors: int) -> Step:
    return changed(step, sessions=moved("s1", **cursors))


def ends_at(step: Step, name: str, length: int, **more: int) -> Step:
    """The request and its session's slot have these cursors."""
    ends = dict.fromkeys(("kv_committed_len", "kv_allocated_len"), length) | more
    return slot(changed(step, requests=moved(name, **ends)), **ends)


CASES = [
    # Cuts.
    fails("LEN-2", "C", slot(CUT, kv_committed_len=8), "target 7"),
    fails("LEN-2", "A", slot(CUT, kv_allocated_len=8), "target 7"),
    fails("LEN-2", "E", slot(CUT, swa_evicted_seqlen=2), "swa_evicted_seqlen 2"),
    fails("LEN-2", "R", slot(CUT, cache_protected_len=2), "cache_protected_len 2"),
    fails("LEN-2", "stops at a page", slot(CUT, kv_committed_len=6, kv_allocated_len=6), "target 7"),
    fails("LEN-2", "stops at a page, no window", slot(
        step_of(BARE, *TURN, AHEAD, "finish r1 keep 2"), kv_committed_len=6, kv_allocated_len=6), "target 7"),
    fails("LEN-2", "stops at a page, its window just there", slot(
        JUST_THERE, kv_committed_len=6, kv_allocated_len=6), "target 7"),
    fails("LEN-2", "E of a sweep", slot(CUT_BELOW, swa_evicted_seqlen=8), "swa_evicted_seqlen 7"),
    fails("LEN-2", "stops inside a page", slot(
        CUT_BELOW, kv_committed_len=5, kv_allocated_len=5, swa_evicted_seqlen=5), "target 7"),
    fails("LEN-2", "stops at the page past it", slot(
        CUT_BELOW, kv_committed_len=8, kv_allocated_len=8, swa_evicted_seqlen=8), "target 7"),
    holds("LEN-2", "stops at a page, its window lost", slot(
        CUT_BELOW, kv_committed_len=6, kv_allocated_len=6, swa_evicted_seqlen=6)),
    fails("LEN-2", "stops short, its window reaches to the start", slot(step_of(
        replace(PLAIN, page_size=1, window=4), "open s1; submit r1 in s1 +1; admit r1; extend r1 +1",
        "spec_decode r1 +3 accept 1; finish r1 keep 1"), kv_committed_len=1, kv_allocated_len=1), "target 2"),
    holds("LEN-2", "stops at 1, its first token lost", slot(step_of(
        *JUST_LOST, "finish r1 keep 1"), kv_committed_len=1, kv_allocated_len=1, swa_evicted_seqlen=1)),
    *(holds("LEN-2", f"stops at {end}, its window lost by a token", slot(
        SHORT, kv_committed_len=end, kv_allocated_len=end, swa_evicted_seqlen=end)) for end in (0, 5)),
    holds("LEN-2", "all that counts", CUT),
    holds("LEN-2", "what a round in flight computes first, and nobody has claimed", replace(
        WAITS, was=WAITS.was.with_request(LAUNCHED))),
    fails("LEN-2", "the same with no round in flight", replace(
        WAITS, was=WAITS.was.with_request(LAUNCHED._replace(in_flight=()))), "target 6"),
    fails("LEN-2", "more than it computes first", slot(replace(
        WAITS, was=WAITS.was.with_request(LAUNCHED), command=Finish("r1", 2)),
        kv_committed_len=7, kv_allocated_len=7), "target 7: kv_committed_len 6"),
    fails("LEN-2", "less than is settled", slot(replace(
        WAITS, was=WAITS.was.with_request(LAUNCHED)), kv_committed_len=4), "target 6: kv_committed_len 5"),
    holds("LEN-2", "refused", as_refused(slot(CUT, kv_committed_len=8))),
    holds("LEN-2", "no slot", has(CUT, "sessions", "s1", slot=None)),
    holds("LEN-2", "no session", changed(CUT, sessions={})),
    holds("LEN-2", "an ordinary end", step_of(PLAIN, *TURN, *SERVE, "finish r3 keep 1")),
    # Restores.
    fails("LEN-3", "the request", has(RETRIED, "requests", "r1", cursors=ZERO), "request and slot both at"),
    fails("LEN-3", "the slot", slot(RETRIED, kv_allocated_len=7), "prefix 6"),
    fails("LEN-3", "both less", ends_at(RETRIED, "r1", 5), "prefix 6"),
    fails("LEN-3", "both more", ends_at(RETRIED, "r1", 7), "prefix 6"),
    fails("LEN-3", "from R, its window there", ends_at(RETRIED, "r1", 0), "prefix 6"),
    fails("LEN-3", "from R, its window just there", ends_at(step_of(PLAIN, *TURN,
        "spec_decode r1 +3 accept 3; evict_swa r1 at length 8; retract r1; admit r1"),
        "r1", 0, swa_evicted_seqlen=0), "prefix 8"),
    holds("LEN-3", "at its key", RETRIED),
    holds("LEN-3", "from R, its window lost", RESTARTED),
    holds("LEN-3", "at the prefix, its window lost", ends_at(RESTARTED, "r2", 7, swa_evicted_seqlen=7)),
    fails("LEN-3", "at neither", ends_at(RESTARTED, "r2", 6, swa_evicted_seqlen=6), "prefix 7"),
    holds("LEN-3", "from R, one token of its window lost", step_of(*JUST_LOST, "retract r1; admit r1")),
    holds("LEN-3", "no window", step_of(BARE, *TURN, "decode r1; retract r1 losing 1; admit r1")),
    holds("SWA-2", "swept past its commit by one token", step_of(*JUST_LOST)),
    holds("LEN-3", "refused", as_refused(slot(RETRIED, kv_allocated_len=7))),
    holds("LEN-3", "another command", replace(slot(RETRIED, kv_allocated_len=7), command=Abort("r1"))),
    holds("LEN-3", "nobody", changed(RETRIED, requests={})),
    holds("LEN-3", "no slot", has(RETRIED, "sessions", "s1", slot=None)),
    holds("LEN-3", "no session", changed(RETRIED, sessions={})),
    holds("LEN-3", "a first turn", has(step_of(PLAIN, *TURN[:3]), "sessions", "s1", slot=ZERO)),
    holds("LEN-3", "an ordinary request", step_of(PLAIN, *SERVE[:2])),
    # Admitted again.
    fails("SES-3", "something has changed", AGAIN, "the first admission left"),
    holds("SES-3", "nothing has", replace(AGAIN, unchanged=True)),
    holds("SES-3", "refused", as_refused(AGAIN)),
    holds("SES-3", "another command", replace(AGAIN, command=Abort("r2"))),
    holds("SES-3", "nobody", replace(AGAIN, command=Admit("r9"))),
    holds("SES-3", "the first time", step_of(PLAIN, *LATER, "admit r2")),
    holds("SES-3", "no slot", step_of(PLAIN, *TURN[:3], "admit r1")),
    holds("SES-3", "an ordinary request", step_of(PLAIN, *SERVE[:2], "admit r3")),
    # A close that waits.
    fails("SES-4", "for a turn that is gone", changed(CLOSING, requests={}), "s1 is gone"),
    fails("SES-4", "with a slot", changed(CLOSING, requests={}), "with kv_committed_len 5"),
    fails("SES-4", "without one", changed(step_of(PLAIN, *TURN, "close s1"), requests={}), "with no slot"),
    holds("SES-4", "for its turn", CLOSING),
    holds("SES-4", "nobody closes", changed(RUNS, requests={})),
    # Who is there.
    fails("SES-2", "a request less", changed(RUNS, requests={}), "requests {r1}, not requests {}"),
    fails("SES-2", "a request more", changed(RUNS, requests=lambda rs: rs | {"r9": rs["r1"]}), "{r1, r9}"),
    fails("SES-2", "a session less", changed(ENDED, sessions={}), "open sessions {s1}, not open sessions {}"),
    fails("SES-2", "a session more", changed(ENDED, sessions=lambda ss: ss | {"s9": ss["s1"]}), "{s1, s9}"),
    fails("SES-2", "closed", has(ENDED, "sessions", "s1", closing=True), "s1 closing: False"),
    fails("SES-2", "not closed", has(CLOSING, "sessions", "s1", closing=False), "s1 closing: True"),
    fails("SES-2", "no slot", has(ENDED, "sessions", "s1", slot=None), "slot of s1: kv_committed_len 5"),
    fails("SES-2", "a slot", has(RUNS, "sessions", "s1", slot=ZERO), "slot of s1: no cursors"),
    fails("SES-2", "an abort moves it", slot(GIVEN_UP, kv_committed_len=4), "slot of s1 as it was"),
    fails("SES-2", "a submit moves another's", slot(step_of(PLAIN, *TURN,
        "finish r1 keep 1; submit r3 (no session) +1"), kv_committed_len=4), "as it was"),
    holds("SES-2", "of a slot that is lent", slot(LENT, kv_committed_len=4)),
    holds("SES-2", "another command", slot(step_of(
        PLAIN, *TURN, "finish r1 keep 1; open s2"), kv_committed_len=4)),
    holds("SES-2", "not as it should be before", changed(
        slot(GIVEN_UP, kv_committed_len=4), before=True, sessions=moved("s1", kv_committed_len=4))),
    holds("SES-2", "nobody before", changed(slot(GIVEN_UP, kv_committed_len=4), before=True, sessions={})),
    # What the client saw.
    fails("SES-1", "a token less", has(ENDED, "sessions", "s1", history=()), "history of s1: 6 tokens"),
    fails("SES-1", "another token", has(
        ENDED, "sessions", "s1", history=[1, *ENDED.after.sessions["s1"].history[1:]]), "but others"),
    fails("SES-1", "another's turn", has(RUNS, "requests", "r1", session=None), "r1: session s1"),
    fails("SES-1", "more input", has(RUNS, "requests", "r1", origin=6), "5 tokens of input"),
    fails("SES-1", "less text", has(RUNS, "requests", "r1", text=()), "text of r1: 7 tokens"),
    holds("SES-1", "what it saw", ENDED),
    holds("SES-1", "what it sees", RUNS),
    # Rows.
    fails("OWN-5", "torn", changed(RUNS, torn=(Torn("s1", "full", 2, (5, 7)),)), "s1 at [2, 4)"),
    holds("OWN-5", "whole", RUNS),
    fails("OWN-4", "a row less", changed(RUNS, free_rows=RUNS.after.free_rows[1:]), "3 rows, each"),
    fails("OWN-4", "a row more", changed(RUNS, free_rows=lambda rows: (*rows, 3)), "3 rows, each"),
    fails("OWN-4", "held, and free", changed(RUNS, free_rows=lambda rows: (
        *rows[1:], RUNS.after.holders["s1"].row)), "3 rows, each"),
    fails("OWN-4", "held twice", changed(BOTH, holders=lambda hs: hs | {
        "r3": hs["r3"]._replace(row=hs["s1"].row)}), "3 rows, each"),
    holds("OWN-4", "two hold one each", BOTH),
    # The mapping.
    fails("MAP-1", "torn", changed(RUNS, torn_swa=(Torn("s1", "swa", 2, (5, 7)),)), "s1 at [2, 4)"),
    fails("MAP-1", "two lead to one", changed(RUNS, shared=((3, 7), (4, 7))), "SWA slots [7] from several"),
    fails("MAP-2", "no slot", changed(RUNS, unmapped=(("s1", 3), ("s1", 4))), "position 3 of s1"),
    fails("MAP-3", "leads on", changed(RUNS, swept_mapped=((3, 5), (4, 6))), "2 lead on, one to SWA slot 5"),
    fails("MAP-4", "leads on", changed(RUNS, unused_mapped=((3, 5),)), "1 lead on, one to SWA slot 5"),
    *(holds(f"MAP-{number}", "as it should be", RUNS) for number in (1, 2, 3, 4)),
    # Free lists and owners.
    fails("OWN-2", "twice", one_twice(RUNS, "full"), "each page once in the full free list"),
    fails("OWN-2", "twice, SWA", one_twice(RUNS, "swa"), "each page once in the swa free list"),
    fails("OWN-2", "which", changed(RUNS, pools=lambda ps: {
        pool: ps[pool]._replace(free=[3, 4, 4]) for pool in ps}), "pages [4] twice or more"),
    fails("OWN-2", "padding", free_pages(RUNS, 0), "not pages [0]"),
    fails("OWN-2", "none that is there", free_pages(RUNS, 13), "not pages [13]"),
    holds("OWN-2", "the first and the last", changed(RUNS, pools=lambda ps: {
        pool: ps[pool]._replace(free=[1, 12]) for pool in ps})),
    fails("OWN-1", "twice", also_owned(
        RUNS, "full", Owned("r9", 0, RUNS.after.pools["full"].owned[0].page)), "belongs to s1 alone"),
    fails("OWN-1", "free", also_owned(
        RUNS, "swa", Owned("r9", 1, RUNS.after.pools["swa"].free[0])), "page of r9 at [2, 4) is not free"),
    holds("OWN-1", "two have some", BOTH),
    *(fails("OWN-3", f"page {page} of the {pool} pool", without(RUNS, pool, page), f"pages [{page}]")
      for pool in ("full", "swa") for page in (1, 12)),
    fails("OWN-3", "one of the free", one_lost(RUNS, "full"), "are neither"),
    holds("OWN-3", "free or owned", RUNS),
]  # fmt: skip


# What goes back: by name a step, and the pages of the full and of the SWA pool that it frees, by holder.
IN_TREE = script("insert h1 a4; submit r1 (no session) a4 +1; admit r1")
CHUNK = script("submit r1 (no session) a5; admit r1; extend r1 +1")
FULL_TREE = replace(TREE, full_pages=4, swa_pages=4)
TAIL, ALL, ROW = {"s1": [4, 5, 6]}, {"s1": [0, 1, 2]}, {"r3": [0, 1, 2]}
FREEING: dict[str, tuple[Step, dict[str, list[int]], dict[str, list[int]]]] = {
    "finish": (CUT, TAIL, TAIL),
    "a finish behind the sweep": (step_of(PLAIN, *TURN, AHEAD, "evict_swa r1 at length 12; finish r1 keep 1"),
        {"s1": [3, 4, 5, 6]}, TAIL),
    "a finish of all": (step_of(PLAIN, *TURN, "decode r1; finish r1 keep 2"), {}, {}),
    "retract": (step_of(PLAIN, *TURN, AHEAD, "retract r1 losing 1"), {"s1": [5, 6]}, {"s1": [5, 6]}),
    "admit": (step_of(PLAIN, *TURN, "decode r1; decode r1; retract r1 losing 1; admit r1"),
        {"s1": [3]}, {"s1": [3]}),
    "close": (step_of(PLAIN, *TURN, "finish r1 keep 1; close s1"), ALL, ALL),
    "a close of nothing": (step_of(PLAIN, *TURN, "open s2; close s2"), {}, {}),
    "a close that waited": (step_of(PLAIN, *TURN, "close s1; finish r1 keep 1"), ALL, ALL),
    "a close that waits": (step_of(PLAIN, *TURN, "close s1"), {}, {}),
    "a close that waits for a later turn": (step_of(PLAIN, *LATER, "close s1"), {}, {}),
    "abort": (step_of(PLAIN, *TURN, "abort r1"), ALL, ALL),
    "an abort after a retract": (step_of(PLAIN, *TURN, "retract r1; abort r1"), ALL, ALL),
    "an abort that closes": (step_of(PLAIN, *LATER, "close s1; abort r2"), ALL, ALL),
    "an abort before anything": (step_of(PLAIN, *LATER, "abort r2"), {}, {}),
    "an abort of who has nothing": (step_of(PLAIN, *TURN, *SERVE[:1], "abort r3"), {}, {}),
    "an ordinary end": (step_of(PLAIN, *TURN, *SERVE, "finish r3 keep 1"), ROW, ROW),
    "an ordinary retract": (step_of(PLAIN, *TURN, *SERVE, "retract r3"), ROW, ROW),
    "an ordinary abort": (step_of(PLAIN, *TURN, *SERVE, "abort r3"), ROW, ROW),
    "a sweep": (step_of(PLAIN, *TURN, AHEAD, "evict_swa r1 at length 10"), {}, ALL),
    "a second sweep": (step_of(PLAIN, *TURN, AHEAD, "evict_swa r1 at length 8; evict_swa r1 at length 12"),
        {}, {"s1": [2, 3]}),
    "decode": (RUNS, {}, {}),
    "evict": (step_of(TREE, "insert h1 b2; insert h2 a2; evict full 2"), {"tree b2": [0]}, {"tree b2": [0]}),
    "a tombstone": (step_of(TREE, "insert h1 a4; evict full 0 swa 2"), {}, {"tree a2": [0]}),
    "a tombstone recovered": (step_of(TREE, "insert h1 a4; evict full 0 swa 2; insert h2 a4"),
        {"tree a2": [0]}, {}),
    "a prompt in the tree": (step_of(TREE, *CHUNK, "insert h1 a4; extend r1 +4"), {"r1": [0]}, {"r1": [0]}),
    "a prompt in the tree, in part": (step_of(TREE, *CHUNK, "insert h1 a2; extend r1 +4"),
        {"r1": [0]}, {"r1": [0]}),
    "a prompt of two in one batch": (step_of(TREE, *CHUNK, "submit r2 (no session) a5; admit r2",
        "extend r2 +1; extend r1 +4, r2 +4"), {"r2": [0]}, {"r2": [0]}),
    "a prompt taken over": (step_of(TREE, *CHUNK, "extend r1 +4"), {}, {}),
    "a finish into the tree": (step_of(TREE, *IN_TREE,
        "extend r1 +1; decode r1; decode r1; finish r1 keep 2"), {"r1": [3]}, {"r1": [3]}),
    "a close above the tree's": (step_of(TREE, "open s1; submit r1 in s1 a4 +1", *TURN[2:],
        "finish r1 keep 1; close s1"), {"s1": [2]}, {"s1": [2]}),
    "room": (step_of(FULL_TREE, "insert h1 a6; submit r1 (no session) +4; admit r1; extend r1 +4"),
        {"tree a6": [2]}, {"tree a6": [2]}),
}  # fmt: skip


def leaked(step: Step, pool: str) -> Step | None:
    """A page that the step freed is nowhere; none where all are somebody's again."""
    had = {o.page for o in step.before.pools[pool].owned}
    page = next((p for p in step.after.pools[pool].free if p in had), None)
    return None if page is None else without(step, pool, page)


@pytest.mark.parametrize("clause, pool", [("FREE-1", "full"), ("FREE-2", "swa")])
@pytest.mark.parametrize("name", FREEING)
def test_a_page_more_or_less_is_told(name, clause, pool):
    step, *goes = FREEING[name]
    assert step.owed[pool] == goes[pool == "swa"] and as_refused(step).owed[pool] == {}
    assert not as_refused(step).progress
    is_told(clause, step, None)
    spoilt = [found] if (found := leaked(step, pool)) is not None else []
    if any(not holder.startswith("tree ") for holder in step.owed[pool]):
        spoilt.append(freed_less(step, pool))
    if any(_stay(step, pool)):
        spoilt.append(freed_more(step, pool))
    for wrong in spoilt:
        is_told(clause, wrong, f"{pool} pages of ")
        is_told(clause, as_refused(wrong), None)


def test_what_is_waived_is_not_asked():
    step = slot(CUT, kv_committed_len=8)
    told = {clause.id for clause, _ in broken(step)}
    assert "LEN-2" in told and "LEN-2" not in {clause.id for clause, _ in broken(step, frozenset({"LEN-2"}))}
    assert CLAUSES["REF-1"].check(step) is not None and "REF-1" not in told, "another clause speaks"


@pytest.mark.parametrize("shown", [{}, {"r1": None}])
def test_who_is_not_shown_is_cut_nowhere_and_hands_nothing_over(shown):
    for step in (RETRIED, step_of(TREE, *CHUNK, "extend r1 +4")):
        seen = step.after.requests
        hidden = changed(step, requests={name: seen[name]._replace(cursors=at) for name, at in shown.items()})
        assert hidden.cut_at is None and hidden.owed["full"] == {}


def test_a_model_without_a_window_frees_no_swa_page():
    is_told("FREE-2", step_of(BARE, *TURN, AHEAD, "finish r1 keep 2"), None)


# Locks: of these nodes, in the order of paths, the counters (full, SWA).
LOCKS: dict[str, tuple[Step, list[tuple[int, int]]]] = {
    "nobody's": (step_of(TREE, "insert h1 a8"), [(0, 0), (0, 0)]),
    "up to a window": (step_of(TREE, "insert h1 a8 (goes on)"), [(1, 0), (1, 1)]),
    "of two": (step_of(TREE, "insert h1 a4 (goes on); insert h2 a4b2 (goes on)"), [(2, 0), (2, 1), (1, 1)]),
    "of a request": (step_of(TREE, *IN_TREE), [(1, 0), (1, 1)]),
    "that a window has left behind": (step_of(TREE, *IN_TREE,
        "extend r1 +1; decode r1; decode r1; decode r1"), [(1, 0), (1, 1)]),
    "of a session": (step_of(TREE, "open s1; submit r1 in s1 a4", *TURN[2:3],
        "extend r1 +4; finish r1 keep 1"), [(1, 0), (1, 1)]),
    "of who was matched again": (step_of(TREE, *IN_TREE, "admit r1"), [(1, 0), (1, 1)]),
    "of who was matched again after a split": (step_of(TREE, "insert h1 a8", *IN_TREE[1:],
        "match h2 a2; admit r1"), [(2, 1), (1, 1), (0, 0), (0, 0)]),
    "of a first turn that was matched again after a split": (step_of(TREE, "insert h1 a8; open s1",
        "submit r1 in s1 a4 +1; admit r1; match h2 a2; admit r1"), [(2, 1), (1, 1), (0, 0), (0, 0)]),
    "over a node that was split": (step_of(TREE, "insert h1 a8 (goes on); match h2 a4"),
        [(2, 1), (1, 0), (1, 1)]),
    "given back": (step_of(TREE, "insert h1 a8 (goes on); unlock h1"), [(0, 0), (0, 0)]),
    "no window": (step_of(replace(TREE, window=None, swa_pages=0), "insert h1 a8 (goes on)"), [(1, 0)]),
    "pages of one token": (step_of(ONE, "insert h1 a5; match h2 a3"), [(1, 1), (0, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_more_or_less_is_told(name):
    step, counters = LOCKS[name]
    assert [(n.full_locks, n.swa_locks) for n in step.after.tree.nodes] == counters
    is_told("TREE-6", step, None)
    for number, (full, swa) in enumerate(counters):
        for change in (1, -1):
            is_told("TREE-6", node(step, number, full_locks=full + change), f"{full} ")
            if step.config.geometry.window is not None:
                is_told("TREE-6", node(step, number, swa_locks=swa + change), f"{swa} ")


def of_its_own(step: Step) -> Step:
    return replace(step, tree_policy_is_free=True)


def by_itself(*commands: Command) -> Step:
    """The last step, with the locks as the step before it left them."""
    return replace(step_of(TREE, *commands), locks_before=step_of(TREE, *commands[:-1]).locks)


ORDINARY = script("submit r1 (no session) a4 +1; admit r1; extend r1 +5")
BEGUN = script("submit r1 (no session) a3c1; admit r1")
ALIKE = step_of(  # r2 splits what r1 has locked
    ONE, "submit r2 (no session) a1b2; admit r2; insert h1 a5", *BEGUN, "extend r1 +1, r2 +3"
)
UNLIKE = step_of(TREE, "submit r2 (no session) b8; admit r2", *BEGUN, "extend r1 +4, r2 +8")
OF_A_SESSION = step_of(
    TREE, "open s1; submit r1 in s1 a4; admit r1; extend r1 +4; decode r1; decode r1; decode r1")
A8, A1 = (step_of(sizes, Insert("h1", text(key), 0, True)) for sizes, key in ((TREE, "a8"), (ONE, "a1")))
SPLIT = by_itself(*script("insert h1 a8; insert h1 b4; match h1 a6; match h2 a4"))
KEPT = in_tree(node(step_of(TREE, "insert h1 a8"), 0, full_locks=1), lock_holders={"h1": range(8)})
UNLOCKED = step_of(TREE, "insert h1 a8 (goes on); unlock h1")
OF_TREE = UNLOCKED.after.pools["full"].owned[0].page
DUPLICATE = freed_less(step_of(TREE, *CHUNK, "insert h1 a4; extend r1 +4"), "full")


def handed_over(step: Step, holder: str, at: int) -> Step:
    """A full page that the step freed is the tree's."""
    page = next(o.page for o in step.before.pools["full"].owned if o[:2] == (holder, at))
    text = next(h.text for h in step.held_before if h.name == holder)
    name = page_name(tuple(text_tokens(text))[: 2 * at + 2])
    return also_owned(without(step, "full", page), "full", Owned(name, at, page))


CLOSED = of_its_own(step_of(
    TREE, "open s1; submit r1 in s1 a4 +1; admit r1; extend r1 +5; finish r1 keep 1; close s1"))
TURNED_AWAY, REFUSED = (step_of(TREE, *TURN, command) for command in ("submit r1 in s1 +1", "decode r9"))
FREED_TWICE = free_pages(TURNED_AWAY, 1)
LOCKED = [
    fails("OUT-2", "cursors", changed(TURNED_AWAY, requests=moved("r1", kv_committed_len=4)), "r1: "),
    fails("OUT-2", "pages", FREED_TWICE, "page assignment"),
    fails("OUT-2", "another command", REFUSED, "contents"),
    holds("OUT-2", "contents of what is free", TURNED_AWAY),
    holds("OUT-2", "a tree's own pages", of_its_own(FREED_TWICE)),
    fails("OUT-2", "pages, without a tree", of_its_own(free_pages(step_of(
        PLAIN, *TURN, "submit r1 in s1 +1"), 1)), "page assignment"),
    fails("FREE-1", "a slot's, by a tree's own", freed_less(CLOSED, "full"), "full pages of s1"),
    holds("FREE-1", "a slot's, by a tree's own", CLOSED),
    fails("FREE-1", "a duplicate stays, and nothing moves", changed(
        DUPLICATE, before=True, pools=DUPLICATE.after.pools), "full pages of r1"),
    fails("FREE-1", "what an abort hands over", handed_over(step_of(
        TREE, *SERVE, "decode r3; abort r3"), "r3", 2), "full pages of r3"),
    fails("FREE-1", "the tree's, by an unlock", free_pages(without(UNLOCKED, "full", OF_TREE), OF_TREE),
          "full pages of tree"),
    fails("FREE-1", "what is still there", free_pages(RUNS, RUNS.after.pools["full"].owned[0].page),
          "full pages of s1"),
    holds("FREE-1", "what a slot hands over, to a tree's own", handed_over(CLOSED, "s1", 2)),
    fails("FREE-1", "an ordinary row's, without a tree", freed_less(of_its_own(step_of(
        PLAIN, *SERVE, "finish r3 keep 1")), "full"), "full pages of r3"),
    holds("FREE-1", "a first turn's, by a tree's own", freed_less(of_its_own(step_of(
        TREE, "open s1; submit r1 in s1 a4 +1; admit r1; extend r1 +5", AHEAD, "finish r1 keep 1")), "full")),
    holds("FREE-1", "an ordinary row's, by a tree's own", freed_less(of_its_own(step_of(
        TREE, *SERVE, "finish r3 keep 1")), "full")),
    holds("TREE-6", "a node that another of the batch has split", ALIKE),
    fails("TREE-6", "pinned by more than the batch", node(ALIKE, 0, swa_locks=3), "2 (r1, r2) full, 0 SWA"),
    fails("TREE-6", "prompts that begin otherwise", node(UNLIKE, 0, swa_locks=1), "1 (r1) full, 0 SWA"),
    holds("TREE-6", "the window of an ordinary request is given back", step_of(
        TREE, *ORDINARY, "spec_decode r1 +8 accept 5; unlock_swa r1")),
    holds("TREE-6", "a tree that gives it back", node(of_its_own(step_of(
        TREE, *ORDINARY, "decode r1")), 1, swa_locks=0)),
    holds("TREE-6", "a tree without a lock", of_its_own(step_of(TREE, *SERVE[:1], "admit r3; extend r3 +1"))),
    holds("TREE-6", "a tree without a window", of_its_own(step_of(
        replace(TREE, window=None, swa_pages=0), *ORDINARY))),
    holds("TREE-6", "a tree, and its holder waits", of_its_own(step_of(TREE, "open s1; submit r1 in s1 a4",
        "admit r1; extend r1 +4; finish r1 keep 1; submit r2 in s1 +2"))),
    holds("TREE-6", "a tree that pins a window alone", of_its_own(A8)),
    holds("TREE-6", "a tree that pins the first token", of_its_own(A1)),
    holds("TREE-6", "a tree's own split", node(of_its_own(A8), 0, swa_locks=1)),
    fails("TREE-6", "a tree that pins no window", node(of_its_own(A8), 1, swa_locks=0), "1 (h1) SWA"),
    fails("TREE-6", "a tree that pins too little", node(of_its_own(A1), 0, swa_locks=0), "1 (h1) SWA"),
    fails("TREE-6", "given back too early", node(
        of_its_own(step_of(TREE, *IN_TREE)), 1, swa_locks=0), "1 (r1) SWA"),
    holds("TREE-6", "given back behind the window", node(of_its_own(OF_A_SESSION), 1, swa_locks=0)),
    fails("TREE-6", "kept by who goes", KEPT, "[0, 6) of a6: 0 full"),
    holds("TREE-8", "no tree at all", BOTH),
    holds("TREE-6", "split later, with another text there", SPLIT),
]  # fmt: skip


@pytest.mark.parametrize("clause, step, says", [*CASES, *LOCKED])
def test_a_spoilt_fact_is_told(clause, step, says):
    is_told(clause, step, says)
