"""Every branch of every clause of engines that schedule by themselves sees a fault that it alone sees first,
and what only resembles one conforms."""

import pytest

from reference.blocks.clauses import BLOCK_CLAUSES
from stateful_tests.tests.vllm.scenes import SIZES, Scene, clause_rows, in_words

ROWS = list(clause_rows())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_the_last_line_violates_its_clause_and_no_line_before_does(row):
    scene = Scene(SIZES[row.sizes])
    for line in row.lines[:-1]:
        assert scene.violation(line) is None, line
    violation = scene.violation(row.lines[-1])
    if not row.clause:
        assert violation is None
        return
    assert violation is not None
    assert (violation.clause, {*violation.also}) == (row.clause, row.also)
    assert f"{violation.expected}; {violation.observed}".endswith(row.words)
    assert in_words(violation.failure.at) == row.places


def test_every_clause_has_a_row():
    assert {row.clause for row in ROWS if row.clause} == {*BLOCK_CLAUSES}


def test_a_waived_clause_is_not_evaluated():
    scene = Scene(SIZES["full"])
    assert scene.violation("add r1 a5 for 4; refs 7 = 1; free - 7", waived=("BLK-1",)) is None


def test_of_who_waits_nothing_is_sure():
    scene = Scene(SIZES["full"])
    assert scene.violation("add r1 a5 for 4") is None
    assert scene.ledger.bearers["r1"].sure == 0
