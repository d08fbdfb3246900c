"""Every comparison in a clause has a row that makes it fail, and a row beside it in which it holds.

A step of the reference is what every clause accepts. Each row of clauses.txt spoils facts of one, by hand.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from reference.clauses import CLAUSES
from reference.clauses.tree_locks import usable_length
from reference.failures import AtNode, AtPage, AtPosition, AtTreePage
from stateful_tests.tests.reference.rows import Rows, spoilt
from stateful_tests.tests.reference.spoilt_facts import ONE, assert_clause, change_facts, node, pages, path

CLAUSE_ROWS = Rows(Path(__file__).with_name("clauses.txt"))
STATE_ROWS = Rows(Path(__file__).with_name("clauses_of_states.txt"))
STEPS = CLAUSE_ROWS.steps


@pytest.mark.parametrize("clause, step, says, places", [*CLAUSE_ROWS.of_clauses(), *STATE_ROWS.of_clauses()])
def test_a_spoilt_fact_is_reported(clause, step, says, places):
    assert_clause(clause, step, says, places)


def test_the_twins_of_a_tree_are_the_nodes_that_begin_alike():
    twins = spoilt(STEPS["TWO"], "long_node")
    failure = CLAUSES["TREE-1"].check(twins)
    assert failure is not None
    assert failure.at == (AtNode(path("a2")), AtNode(path("a10")))


def test_a_wrong_slot_of_a_node_is_located_by_its_page():
    read = STEPS["INSERTED"].after.tree.nodes[0].full_read
    wrong = node(STEPS["INSERTED"], 0, full_read=[*read[:3], 0, *read[4:]])
    failure = CLAUSES["TREE-3"].check(wrong)
    assert failure is not None
    assert failure.at == (AtTreePage(path("a4"), 2), AtNode(path("a6"), "full"))


def test_a_lost_page_is_located_by_its_number_or_by_its_place_in_the_row():
    assert CLAUSES["END-1"].check(spoilt(STEPS["EMPTY"], "lost full")).at == (AtPage("full", 10),)
    of_row, of_tree = (spoilt(STEPS[name], "nowhere full 12") for name in ("DECODED", "INSERTED"))
    assert CLAUSES["REF-1"].check(of_row).at == (AtPosition("s1", "full", 0),)
    assert CLAUSES["REF-1"].check(of_tree).at == ()


def test_swa_2_ignores_a_request_without_cursors():
    queued = CLAUSE_ROWS.step("plain: submit r1 (no session) +5")
    prefilled = STEPS["PREFILLED"].after
    assert_clause(
        "SWA-2", change_facts(queued, requests=prefilled.requests, holders=prefilled.holders), None
    )


@pytest.mark.parametrize(
    "window, pattern, length",
    [
        (2, "LLLLL", 5), (2, "L", 1), (2, "LLTL", 2), (2, "LLTLL", 5), (3, "LLTLL", 2), (2, "TLL", 3),
        (2, "TL", 0), (1, "TL", 2), (2, "T", 0), (None, "TTT", 3), (2, "LL-LL", 2), (2, "-LL", 0),
        (3, "LTLLL", 5),
    ],
)  # fmt: skip
def test_the_usable_prefix_ends_where_the_window_is_live(window, pattern, length):
    step = pages(STEPS["MATCHED"], pattern, before=True)
    config = step.config._replace(
        geometry=replace(ONE, window=window, swa_pages=12 if window else 0)
    )
    assert usable_length(replace(step, config=config), path("a5")[: len(pattern)]) == length
