"""Cases that the rows of test_clauses.py cannot tell apart: facts before or after the command, the last node,
the first record, the place that is named."""

from reference.commands import Evict
from reference.failures import AtCount, AtTreeNode
from reference.tiers.clauses import TierStep
from reference.tiers.commands import Poll
from reference.tiers.facts import TierRead, TierRecord, TierRequestState
from stateful_tests.tests.tiers.scenes import (
    A, BACKUP, DECODING, HELD, NODES, PREFETCH, RECEIVED, RECEIVES, RECORDS, REST, STORING,
    count, facts, failures, kv, node, together,
)  # fmt: skip


def places(change, **scene):
    """Return the places of the failure of each violated clause."""
    return {clause.id: failure.at for clause, failure in failures(change, **scene)}


def test_a_read_without_a_slot_is_told_by_its_position():
    places_of = places(facts(reads=(TierRead("h1", pool="swa", position=3, slot=0, found=0, wanted=A[0]),)))
    assert places_of["LOAD-1"] == (AtCount("h1", "position", 3),)


def test_tree16_checks_the_last_node():
    above = NODES[1]._replace(device=kv())
    places_of = places(facts(nodes=(above, NODES[3], NODES[4], NODES[2])))
    assert places_of["TREE-16"] == (AtTreeNode(2), AtTreeNode(1))


def test_tree17_reads_evictable_pages_from_before_the_evict():
    was = REST._replace(evictable=count(2, 0))
    evict = Evict(2, 0)
    short = together(node(2, device=kv((), (3,))), facts(evictable=count(1, 0), free=kv((5, 6, 3), (5, 6))))
    assert places(short, was=was, command=evict)["TREE-17"] == (AtCount("tree", "full evictable", 2),)
    done = together(short, facts(evictable=count(0, 0), free=kv((5, 6, 3, 2), (5, 6))))
    assert "TREE-17" not in places(done, was=was, command=evict)


def test_xfer4_checks_the_first_record():
    places_of = places(facts(records=(TierRecord(load=True, ack=3, nodes=(3,)), *RECORDS)))
    assert places_of["XFER-4"] == (AtTreeNode(3),)


def test_unanswered_reads_requests_after_the_command():
    gone = RECEIVED._replace(requests=(HELD,))

    def unanswered(was, now):
        return TierStep(DECODING, Poll(), refused=False, before=was, after=now, ranges=[]).unanswered

    assert RECEIVES.name in unanswered(gone, RECEIVED)
    assert RECEIVES.name not in unanswered(RECEIVED, gone)


def test_a_backup_needs_no_source_after_its_read():
    left = together(node(1, host=kv((0, 1), ())), facts(host_free=kv((), (0, 1))))
    was = STORING._replace(operations=(BACKUP._replace(moving=kv((0, 1), ())), PREFETCH))
    assert "XFER-1" in places(left, was=STORING)
    assert "XFER-1" not in places(left, was=was)


def test_a_backup_that_is_gone_needs_no_source():
    left = together(node(1, host=kv((0, 1), ())), facts(host_free=kv((), (0, 1)), operations=(PREFETCH,)))
    assert "XFER-1" not in places(left, was=STORING)


def test_a_request_in_no_queue_is_told_by_its_name():
    lost = facts(requests=(RECEIVES, HELD._replace(state=TierRequestState.NOWHERE)))
    assert places(lost, was=RECEIVED, sizes=DECODING)["XFER-3"] == (AtCount("h2", "state"),)
    with_requests = facts(requests=RECEIVED.requests)
    assert "XFER-3" not in places(with_requests, was=RECEIVED, sizes=DECODING)
