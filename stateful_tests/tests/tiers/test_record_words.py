"""Changes of facts in words: what a line changes, and what is wrong with it."""

import pytest

from stateful_tests.tests.support.record_words import RecordWordsError
from stateful_tests.tests.tiers.scenes import (
    A, B, FACTS, HOST, NODES, NOTATION, OTHER, RECEIVED, RECORDS, TRANSFERS, kv, node,
)  # fmt: skip
from reference.tiers.facts import TierPart, TierRecord, TierTransfer


def nodes(*instead):
    return FACTS._replace(nodes=instead)


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("host_free full 5 0", FACTS._replace(host_free=kv((5, 0), (5,)))),
        ("host_free full - swa 1", FACTS._replace(host_free=kv((), (1,)))),
        ("host_memory swa 1=other 0=b2",
         FACTS._replace(host_memory=kv(HOST, (B[2], OTHER, *HOST[2:])))),
        ("evictable swa 3", FACTS._replace(evictable={"full": 1, "swa": 3})),
        ("loose tombstones more", FACTS._replace(loose=("tombstones", "more"))),
        ("complaint leaf: [1]", FACTS._replace(complaint="leaf: [1]")),
        ("node 2: storing 7, host full -, hashed no",
         node(2, storing=7, host=kv((), (2,)), hashed=None)(FACTS)),
        ("node 3: stamps a0 b2 0", node(3, stamps=(A[0], B[2], 0))(FACTS)),
        ("no node 4", nodes(*(NODES[at] for at in (1, 2, 3)))),
        ("transfer 2: parts full:4>4 swa:5>6, copied, sent no",
         FACTS._replace(transfers=(TRANSFERS[0], TRANSFERS[1]._replace(
             parts=(TierPart("full", 4, 4), TierPart("swa", 5, 6)), copied=True, sent=False)))),
        ("new transfer: job 3, parts full:6>5, sent",
         FACTS._replace(transfers=(*TRANSFERS, TierTransfer(
             3, load=False, parts=(TierPart("full", 6, 5),), acks=(), sent=True)))),
        ("record 1: nodes 2 8",
         FACTS._replace(records=(TierRecord(load=False, ack=2, nodes=(2, 8)), RECORDS[1]))),
        ("no record 2", FACTS._replace(records=RECORDS[:1])),
    ],
)  # fmt: skip
def test_a_line_changes_the_records_that_it_names(line, other):
    assert NOTATION.change_facts(FACTS, line) == other


def test_a_record_is_called_by_its_name():
    held = NOTATION.change_facts(RECEIVED, "request h2: name session h2, writing none")
    assert [(request.name, request.writing) for request in held.requests][1] == ("session h2", {})
    assert NOTATION.change_facts(held, "request session h2: row 9").requests[1].row == 9


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("host_fre full 5", "'host_fre' is no field; one of nodes, free, host_free"),
        ("node 2: storin 5", "'storin' is no field; one of node, parent"),
        ("node 9: storing 5", "'9' is not in list"),
        ("no record 3", "index out of range"),
        ("node 2: storing q7", "invalid literal"),
        ("host_free 5", "'5' stands before the name of a pool"),
    ],
)
def test_a_line_that_changes_nothing_says_why(line, says):
    with pytest.raises(RecordWordsError, match=says) as error:
        NOTATION.change_facts(FACTS, line)
    assert str(error.value).startswith(repr(line))
