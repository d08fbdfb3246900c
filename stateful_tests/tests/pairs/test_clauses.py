"""Every branch of every clause of pairs sees a fault first, and what only resembles one conforms."""

from dataclasses import replace
from pathlib import Path

import pytest

from reference.pairs import clauses
from reference.blocks.facts import Published
from reference.pairs.clauses import OF_PAIRS, broken_off, failed_clauses
from stateful_tests.tests.pairs.scenes import LIFE, PAIR, failures, life_of, steps
from stateful_tests.tests.support.places import in_words
from stateful_tests.tests.support.row_files import clause_rows

ROWS = list(clause_rows(Path(__file__).with_name("clause_rows.txt")))
SIZES = {"": PAIR, "late": replace(PAIR, late=True)}
FORGOTTEN = LIFE[-1][1]._replace(records=("D recving_metadata: r2",))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_the_last_step_violates_its_clause_and_no_step_before_does(row):
    life = life_of(row.lines)
    assert failures(life[:-1], SIZES[row.on]) == []
    failed = failures(life, SIZES[row.on])
    assert [name for name, _ in failed][:1] == ([row.clause] if row.clause else [])
    assert {name for name, _ in failed[1:]} == row.also
    for _, failure in failed[:1]:
        assert f"{failure.expected}; {failure.observed}".endswith(row.words)
        assert in_words(failure.at) == row.places


def test_a_whole_life_conforms_and_reaches_its_situations():
    reached = {
        name for step in steps(LIFE) for name, each in OF_PAIRS.items() if each.trigger(step)
    }
    assert failures(LIFE) == []
    assert reached == {"PD-1", "PD-2", "PD-4", "PD-5", "PD-6", "PRO-1"}


def test_every_clause_has_a_row():
    assert {row.clause for row in ROWS if row.clause} == OF_PAIRS.keys() - {"PRO-2"}


def test_a_failure_on_a_server_names_it():
    *_, step = steps(life_of(["life 10", "advance D; as at 10; decode has_nothing"]))
    told = {each.id: failure for each, failure in failed_clauses(step)}["RUN-4"]
    assert told.expected.startswith("D: a batch must come")
    assert told.observed.startswith("D: no batch comes")
    assert [place.server for place in told.at] == ["D", "D"]


def test_kv_of_who_is_gone_hides_none_behind_it():
    *_, step = steps(life_of(["life 9", "advance D; as at 10; decode other"]))
    there = step.after.decode.requests
    aborted = {"r0": there["r2"], **there}
    before, after = (
        facts._replace(readers=(facts.readers[0]._replace(request="r0"), *facts.readers))
        for facts in (step.before, step.after)
    )
    after = after._replace(decode=after.decode._replace(requests=aborted))
    beside = replace(step, before=before, after=after)
    assert [*beside.wrongly_sent()] == [*step.wrongly_sent()] != []


def test_who_waits_at_either_server_is_named():
    waits = [step.unanswered for step in steps(LIFE[:4])]
    assert (waits[0], waits[3]) == ({"r1": "at P WAITING"}, {"r2": "at D WAITING"})


def test_all_that_a_server_has_left_wrong_is_told_where_a_pair_fails():
    *_, step = steps(LIFE)
    side = step.sides["D"]
    wrong = side.after._replace(published=(Published(1, 0, (9, 9)),))
    step = replace(step, sides={**step.sides, "D": replace(side, after=wrong)})
    told = [(each.id, failure.observed) for each, failure in broken_off(step)]
    assert told == [
        ("PUB-1", "D: slot 0 of block 1 holds KV of another token"),
        ("PUB-2", "D: the map names block 1 0 times"),
    ]
    assert broken_off(step, {"PUB-1", "PUB-2"}) == []


def test_a_waived_clause_is_not_evaluated():
    *_, step = steps([*LIFE, (LIFE[-1][0], FORGOTTEN)])
    failed = [{each.id for each, _ in failed_clauses(step, waived)} for waived in ((), {"PD-5"})]
    assert failed[0] - failed[1] == {"PD-5"}


def test_every_clause_is_checked(monkeypatch):
    checked = []
    noting = {name: replace(each, check=checked.append) for name, each in OF_PAIRS.items()}
    monkeypatch.setattr(clauses, "OF_PAIRS", noting)
    *_, step = steps(LIFE)
    failed_clauses(step)
    assert len(checked) == len(OF_PAIRS)


def test_nothing_is_asked_of_a_refused_command():
    step = [*steps(LIFE)][-1]
    refused = replace(step, refused=True, after=FORGOTTEN, before=FORGOTTEN)
    assert [clause for clause in OF_PAIRS.values() if clause.check(refused) is not None] == []
