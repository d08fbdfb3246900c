"""As test_clauses, of sessions, pages, the mapping, what is freed, and locks: a row for each condition."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reference.clauses import CLAUSES, about, failed_clauses, broken_off
from reference.clauses.facts import Owned
from reference.clauses.expected_frees import pages_owed
from reference.clauses.step import Step
from reference.failures import AtNamed
from reference.state import Cursors, Round
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.reference.rows import Rows, spoilt
from stateful_tests.tests.reference.spoilt_facts import (
    TREE, as_refused, assert_clause, change_facts, keep_freed_page, node, step_of, without,
)  # fmt: skip

FILE = Rows(Path(__file__).with_name("clauses_of_owners.txt"))
STEPS = FILE.steps
FREED = FILE.tables["freed"]
LOCKS = FILE.tables["locks"]


@pytest.mark.parametrize("clause, step, says, places", FILE.of_clauses())
def test_a_spoilt_fact_is_reported(clause, step, says, places):
    assert_clause(clause, step, says, places)


def _stay(step: Step, pool: str) -> Iterator[Owned]:
    """Pages of rows that are where they were."""
    before = step.before.pools[pool].owned
    after = step.after.pools[pool].owned
    return (o for o in before if o in after and not o.holder.startswith("tree "))


def freed_more(step: Step, pool: str) -> Step:
    """Return the step with a free page that it left where it was."""

    def change(pools: dict) -> dict:
        now = pools[pool]
        page = next(_stay(step, pool))
        other_pages = [o for o in now.owned if o != page]
        return pools | {pool: now._replace(free=[*now.free, page.page], owned=other_pages)}

    return change_facts(step, pools=change)


def leak_page(step: Step, pool: str) -> Step | None:
    """Return the step with a page that it freed nowhere; None where all are somebody's again."""
    had = {o.page for o in step.before.pools[pool].owned}
    page = next((p for p in step.after.pools[pool].free if p in had), None)
    return None if page is None else without(step, pool, page)


def pages_of(text: str) -> dict[str, list[int]]:
    """Holders and numbers of their pages: "s1 4,5,6"; "-" for nobody."""
    words = iter(text.replace("-", "").split())
    return {holder.replace("_", " "): [int(n) for n in next(words).split(",")] for holder in words}


@pytest.mark.parametrize("clause, pool", [("FREE-1", "full"), ("FREE-2", "swa")])
@pytest.mark.parametrize("name", FREED)
def test_a_page_more_or_less_is_reported(name, clause, pool):
    step, full, swa, _ = FREED[name]
    assert pages_owed(step)[pool] == pages_of(full if pool == "full" else swa)
    assert pages_owed(as_refused(step))[pool] == {}
    assert not as_refused(step).progress
    assert_clause(clause, step, None)
    wrongs = [found] if (found := leak_page(step, pool)) is not None else []
    if any(not holder.startswith("tree ") for holder in pages_owed(step)[pool]):
        wrongs.append(keep_freed_page(step, pool))
    if any(_stay(step, pool)):
        wrongs.append(freed_more(step, pool))
    for wrong in wrongs:
        assert_clause(clause, wrong, "SWA page" if pool == "swa" else "full page")
        assert_clause(clause, as_refused(wrong), None)


@pytest.mark.parametrize(
    ("step", "asked"),
    [("plain: TURN; decode r1", {"SWA-2"}), ("bare: TURN; decode r1", set()),
     ("tree: TURN; finish r1 keep 1", {"SWA-2", "LEN-2", "TREE-14"}),
     ("state: insert h1 a1", {"TREE-3", "STA-3"})],
)  # fmt: skip
def test_a_clause_is_checked_for_its_commands_and_features(step, asked):
    some = {"SWA-2", "LEN-2", "TREE-14", "STA-3", "STA-8"} | asked
    assert some & {clause.id for clause in about(FILE.step(step))} == asked


def test_a_waived_clause_is_not_checked():
    step = spoilt(STEPS["CUT"], "session s1 kv_committed_len=8")
    failed = {clause.id for clause, _ in failed_clauses(step)}
    assert "LEN-2" in failed
    assert "LEN-2" not in {clause.id for clause, _ in failed_clauses(step, frozenset({"LEN-2"}))}
    assert "LEN-2" not in {clause.id for clause, _ in broken_off(step)}, (
        "it asks of what is not done"
    )
    assert CLAUSES["REF-1"].check(step) is not None and "REF-1" not in failed, (
        "another clause speaks"
    )
    shared = spoilt(STEPS["RUNS"], "owned full r9 0 12")
    failed = {clause.id for clause, _ in broken_off(shared)}
    waived = frozenset({"OWN-1"})
    assert "OWN-1" in failed
    assert {clause.id for clause, _ in broken_off(shared, waived)} == failed - waived


def test_a_mismatch_of_a_gone_session_is_about_its_turn():
    turns = "submit r1 in s1 +5; submit r2 in s2 +5"
    step = FILE.step(f"plain: open s1; open s2; {turns}; submit r3 (no session) +5")
    gone = change_facts(step, sessions=lambda has: {"s2": has["s2"]})
    failure = CLAUSES["SES-2"].check(gone)
    assert failure.at == (AtNamed("session", "s1"), AtNamed("request", "r1"))
    assert failure.head == "must keep session s1"
    more = change_facts(step, sessions=lambda has: {**has, "s9": has["s2"]})
    assert CLAUSES["SES-2"].check(more).head == "must end session s9"


def test_a_refusal_is_about_missing_and_unexpected_owners():
    gone = change_facts(STEPS["TURNED_AWAY"], requests={}, sessions={})
    assert CLAUSES["OUT-2"].check(gone).at == (AtNamed("request", "r1"), AtNamed("session", "s1"))
    kept = spoilt(STEPS["TURNED_AWAY"], "session s1 slot=zero")
    assert CLAUSES["OUT-2"].check(kept).at == (AtNamed("slot", "s1"),)


@pytest.mark.parametrize("shown", [{}, {"r1": None}])
def test_a_request_that_is_not_shown_has_no_cut_and_owes_no_page(shown):
    for step in (STEPS["RETRIED"], FILE.step("tree: CHUNK; extend r1 +4")):
        request_facts = step.after.requests
        hidden = change_facts(
            step, requests={name: request_facts[name]._replace(cursors=at) for name, at in shown.items()}
        )
        assert hidden.cut_at is None and pages_owed(hidden)["full"] == {}, step


def test_a_model_without_a_window_frees_no_swa_page():
    assert_clause("FREE-2", FILE.step("bare: TURN; AHEAD; finish r1 keep 2"), None)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_more_or_less_is_reported(name):
    step, text, *_ = LOCKS[name]
    counters = [tuple(map(int, pair.split(","))) for pair in text.split()]
    assert [(n.full_locks, n.swa_locks) for n in step.after.tree.nodes] == counters
    assert_clause("TREE-6", step, None)
    for number, (full, swa) in enumerate(counters):
        for change in (1, -1):
            assert_clause("TREE-6", node(step, number, full_locks=full + change), f"{full} ")
            if step.config.geometry.window is not None:
                assert_clause("TREE-6", node(step, number, swa_locks=swa + change), f"{swa} ")


# -- rows that no text spells ---------------------------------------------------------------------


def test_a_round_in_flight_computes_one_token_that_nobody_has_claimed():
    step = FILE.step("plain: TURN; launch r1 +3 accept 1; finish r1 keep 1")
    launched = step.was.requests[0]._replace(
        cursors=Cursors(5, 8, 0, 0), in_flight=(Round(3, 1, 0),)
    )
    claimed = replace(step, was=step.was.with_request(launched))
    assert_clause("LEN-2", claimed, None)
    nothing_flies = replace(step, was=step.was.with_request(launched._replace(in_flight=())))
    assert_clause("LEN-2", nothing_flies, "target 6")
    more = "command finish r1 keep 2; session s1 kv_committed_len=7 kv_allocated_len=7"
    assert_clause("LEN-2", spoilt(claimed, more), "target 7: kv_committed_len 6")
    assert_clause(
        "LEN-2", spoilt(claimed, "session s1 kv_committed_len=4"), "target 6: kv_committed_len 5"
    )


def test_a_duplicate_that_stays_is_reported_where_nothing_moves():
    step = keep_freed_page(FILE.step("tree: CHUNK; insert h1 a4; extend r1 +4"), "full")
    assert_clause("FREE-1", change_facts(step, before=True, pools=step.after.pools), "full pages of r1")


def test_a_lock_that_is_split_later_holds_with_another_text_there():
    commands = script("insert h1 a8; insert h1 b4; match h1 a6; match h2 a4")
    before = step_of(TREE, *commands[:-1]).locks
    assert_clause("TREE-6", replace(step_of(TREE, *commands), locks_before=before), None)
