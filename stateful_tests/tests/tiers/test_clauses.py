"""Every branch of every clause of a tree with a host tier sees a fault that it is the first to see, and what
only resembles one conforms."""

from dataclasses import replace
from pathlib import Path

import pytest

from ci.documents.upstream_reports import TierReport, upstream_reports
from reference.commands import Evict
from reference.tiers.clauses import OF_CONNECTORS, TIER_CLAUSES, TierStep, failed_clauses
from reference.failures import AtCount
from reference.tiers.commands import (
    Arrive,
    Await,
    Complete,
    FailPeer,
    Greet,
    Poll,
    ResetCache,
)
from reference.tiers.facts import (
    TierRequest,
    TierRequestState,
    TierTransfer,
    TierUser,
)
from reference.tiers.locks import TierUsers
from reference.tiers.progress import DecodeProgress
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.tests.support.places import in_words
from stateful_tests.tests.support.planted_faults import planted_faults
from stateful_tests.tests.support.row_files import clause_rows
from stateful_tests.tests.tiers.scenes import (
    A, BACKUP, C, DECODING, DEVICE, FACTS, HELD, HOST, PREFETCH, PREFILLING, RECEIVED,
    RECEIVES, RECURRENT, REST, SENDING, SIZES, STORING, TRANSFERS, WITH_STATES, count, facts,
    failures, failures_of, kv, node, part, together, violated_at,
)  # fmt: skip

ROWS = list(clause_rows(Path(__file__).with_name("clause_rows.txt")))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_a_poll_violates_the_clauses_of_its_row(row):
    failed = failures_of(row)
    first = failed[0][0].id if failed else ""
    assert first == row.clause
    assert {clause.id for clause, _ in failed[1:]} - {row.clause} == row.also
    for _, failure in failed[:1]:
        assert f"{failure.expected}; {failure.observed}".endswith(row.words)
        assert in_words(failure.at) == row.places


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_records_are_judged_in_any_order(row, first):
    failed = [clause.id for clause, _ in failures_of(row, first)]
    assert (failed[0] if failed else "", {*failed} - {row.clause}) == (row.clause, row.also)


def test_a_retracted_request_keeps_its_kv_on_the_host():
    sizes = replace(DECODING, decode="plain", host_pages=2, host_swa_pages=1)
    kept = TierRequest("h3", state="retracted", row=-1, first=-1, slots={}, kept=kv((0,)), writing={})
    for requests in ((RECEIVES, HELD, kept), (kept, RECEIVES, HELD)):
        was = RECEIVED._replace(
            requests=requests, host_free=kv((1,), (0,)), host_memory=kv((A[0], 0), (0,))
        )
        assert violated_at(facts(), was=was, sizes=sizes) == ([], "")
        failed, text = violated_at(facts(host_free=kv((1, 0), (0,))), was=was, sizes=sizes)
        assert failed == ["HOST-1"] and "h3, which is retracted, has it, 1 time in the free list" in text
        assert violated_at(facts(requests=(RECEIVES, HELD)), was=was, sizes=sizes)[0] == ["HOST-1"]


def test_a_lock_of_full_kv_alone_counts_in_one_pool():
    was = RECEIVED._replace(users=(TierUser("h1", host=False, node=1, lock=1, full_only=True),))
    assert violated_at(node(1, locks=count(1, 0)), was=was, sizes=DECODING) == ([], "")
    assert violated_at(node(1, locks=count(1, 1)), was=was, sizes=DECODING)[0] == ["HOST-3"]


def test_nothing_is_being_fetched_at_rest():
    [(clause, failure)] = failures(facts(reserved=3), was=REST)
    assert clause.id == "XFER-3" and failure.observed == "3 do"
    assert failure.at == (AtCount("storage", "tokens being fetched", 0),)


WAITS = SENDING._replace(sends=(), requests=(SENDING.requests[1],))


def waits_with(**changes):
    """Return the facts of a prefill server whose only request waits, changed."""
    return WAITS._replace(requests=(WAITS.requests[0]._replace(**changes),))


@pytest.mark.parametrize(
    ("clause", "before", "after", "applies"),
    [
        ("PD-1", SENDING, SENDING, True),
        ("PD-6", SENDING, SENDING, True),
        ("PD-1", SENDING, WAITS, False),
        ("PD-6", SENDING, WAITS, False),
        ("PD-6", SENDING, waits_with(due=-1), True),
        ("PD-6", SENDING, waits_with(due=0), False),
        ("PD-6", SENDING, waits_with(due=1), False),
        ("PD-6", SENDING, WAITS._replace(requests=(*WAITS.requests, SENDING.requests[0])), True),
        ("PD-6", WAITS, WAITS._replace(sends=SENDING.sends), True),
    ],
    ids=[
        "PD-1 sends", "PD-6 sends", "PD-1 nobody sends", "PD-6 nobody sends", "nothing is due",
        "0 tokens are due", "1 token is due", "another sends", "a send begins",
    ],
)  # fmt: skip
def test_clauses_of_handovers_apply_where_kv_is_handed_over(clause, before, after, applies):
    step = TierStep(PREFILLING, Poll(), refused=False, before=before, after=after, ranges=[])
    assert bool(TIER_CLAUSES[clause].trigger(step)) is applies


def test_the_scenes_conform():
    assert violated_at(facts()) == ([], "")
    assert violated_at(facts(), was=STORING) == ([], "")
    assert violated_at(facts(), was=RECEIVED, sizes=DECODING) == ([], "")
    assert violated_at(facts(), was=REST) == ([], "")


def test_a_fault_of_two_clauses_is_seen_by_both():
    slots = PREFETCH._replace(slots=kv((4, 5), (5,)), moving=kv((4,)))
    for change in (facts(host_free=kv((5,), ())), facts(operations=(BACKUP, slots))):
        assert violated_at(change, was=STORING)[0] == ["HOST-1", "XFER-2"]
    assert violated_at(facts(host_free=kv((5, 0), (5,))))[0] == ["HOST-1"]


def test_a_parent_and_its_child_leave_the_device_in_one_step():
    """The child counts as it is after the step, not as it was before."""
    both = together(
        node(1, device=kv(), locks=count()), node(2, device=kv()), facts(
            users=(), free=kv((5, 6, 1, 2, 3), (5, 6, 1, 2, 3)), reads=()))  # fmt: skip
    assert violated_at(both, was=REST) == ([], "")


def test_a_device_slot_of_nobody_in_the_tree_may_be_that_of_a_running_request():
    assert violated_at(facts(free=kv((5,), (5, 6))), was=REST) == ([], "")


def test_a_pin_of_full_kv_counts_present_kv_unless_copied_on_eviction():
    transfers = TRANSFERS[0], TierTransfer(2, load=True, parts=part(4, 4)[1:], acks=(4,), sent=True)
    bare = together(
        node(4, host=kv((), (4,)), pins=count(0, 1)),
        facts(host_free=kv((5, 4), (5,)), transfers=transfers),
        facts(memory=kv((*DEVICE[:4], C[0], 0, 0), DEVICE)),
    )
    back = replace(SIZES, policy="write_back")
    for was in (FACTS, bare(FACTS)):  # locked with KV on the host, or without
        assert violated_at(bare, was=was) == ([], "")
        assert violated_at(bare, was=was, sizes=back)[0] == ["HOST-3"]
    assert violated_at(together(bare, node(4, pins=count(2, 1))), was=FACTS)[0] == ["HOST-3"]


def test_a_store_that_has_copied_needs_its_source_no_more():
    memory = (*HOST[:2], A[2], *HOST[3:])
    freed = together(
        node(2, device=kv((3,), ())),
        facts(
            transfers=(TRANSFERS[0]._replace(copied=True), TRANSFERS[1]),
            host_memory=kv(memory, memory),
            free=kv((5, 6), (5, 6, 3)),
        ),
    )
    assert violated_at(freed) == ([], "")


def test_a_transfer_from_before_a_reset_harms_nobody():
    stale = TRANSFERS[0]._replace(stale=True, acks=())
    empty = FACTS._replace(
        nodes=(),
        users=(),
        records=(),
        reads=(),
        transfers=(stale,),
        free=kv(range(1, 7), range(1, 7)),
        host_free=kv(range(6), range(6)),
    )
    assert violated_at(lambda _: empty, command=ResetCache()) == ([], "")


def test_a_reset_forgets_the_copies():
    # a copy without SWA KV is one
    bare = together(node(1, host=kv((0, 1), ())), facts(host_free=kv((5,), (5, 0, 1))))
    [(clause, failure)] = failures(bare, was=REST, command=ResetCache())
    assert clause.id == "HOST-4" and failure.observed == "4"
    assert failure.at == (AtCount("host", "hashes", 0),)
    assert violated_at(facts(), was=REST, command=ResetCache(), refused=True) == ([], "")
    step = TierStep(SIZES, ResetCache(), refused=False, before=REST, after=REST._replace(nodes=()), ranges=[])
    assert TIER_CLAUSES["HOST-4"].trigger(step)


FREES_A_PAGE = together(node(2, device=kv((), (3,))), facts(free=kv((5, 6, 3), (5, 6))))


@pytest.mark.parametrize(
    ("command", "evictable", "change", "refused", "violated"),
    [
        (Evict(1), count(2, 1), facts(), False, ["TREE-17"]),
        (Evict(0, 3), count(2, 1), facts(), False, ["TREE-17"]),
        (Evict(1), count(2, 1), facts(), True, []),
        (Evict(1), count(2, 1), FREES_A_PAGE, False, []),
        (Evict(3), count(), facts(), False, []),
    ],
    ids=["no full page", "no SWA page", "refused", "a page", "nothing is evictable"],
)
def test_an_evict_frees_evictable_pages(command, evictable, change, refused, violated):
    was = REST._replace(evictable=evictable)
    failed, text = violated_at(change, was=was, command=command, refused=refused)
    assert failed == violated
    if command == Evict(1) and violated:
        assert text == "1 of 2 evictable full tokens are freed; 0 are"


def recurrent(**changes):
    """Another node, or other facts, of a model with recurrent layers."""

    def change_log(was):
        [only] = was.nodes
        of_node = {name: changes.pop(name) for name in ("host", "locks") if name in changes}
        return was._replace(nodes=(only._replace(**of_node),), **changes)

    return change_log


def test_states_that_are_right_conform_and_an_evict_frees_as_many_as_counted():
    assert violated_at(recurrent(), was=RECURRENT, sizes=WITH_STATES, waiting=()) == ([], "")
    was = RECURRENT._replace(evictable={"full": 0, "state": 1})
    clauses, says = violated_at(
        recurrent(), command=Evict(full=0, swa=0, states=1), was=was, sizes=WITH_STATES, waiting=()
    )
    assert clauses == ["TREE-17"] and says == "1 of 1 evictable states are freed; 0 are"


SENT = RECEIVES._replace(writing={})
ARRIVE = Arrive("h1")
OF_H1 = HELD._replace(name="session h1", state=TierRequestState.IDLE, writing={})


@pytest.mark.parametrize(
    "commands, requests, found",
    [
        ([ARRIVE, *[Poll()] * 3], [SENT], "PRO-1"),
        ([ARRIVE, *[Poll()] * 2], [SENT], None),
        ([Poll()] * 3, [SENT], None),  # its first token has still to come
        ([ARRIVE, *[Poll()] * 3], [RECEIVES], None),  # the prefill server has still to write
        ([Poll()] * 3, [HELD._replace(writing={})], None),  # nobody waits for it
        ([ARRIVE, Poll(), Poll(), Evict(1), Poll()], [SENT], None),
        ([ARRIVE, *[Poll()] * 3], [SENT, HELD._replace(state="runs", writing={})], None),
        ([ARRIVE, *[Poll()] * 3], [SENT, HELD._replace(state=TierRequestState.IDLE, writing={})], None),
        ([ARRIVE, *[Poll()] * 3], [HELD._replace(state=TierRequestState.IDLE, writing={}), SENT], None),
        ([ARRIVE, *[Poll()] * 3], [SENT, OF_H1], "PRO-1"),  # its own turn waits, so it cannot go away
        ([ARRIVE, *[Poll()] * 3], [OF_H1, SENT], "PRO-1"),
        ([Poll()] * 3, [SENT._replace(state="waits")], None),
        ([Greet("h1"), *[Poll()] * 3], [SENT._replace(state="waits")], "PRO-1"),
        ([ARRIVE, Await("h1", ()), *[Poll()] * 3], [SENT], None),
        ([Greet("h1"), Await("h1", ()), *[Poll()] * 3], [SENT._replace(state="waits")], None),
        ([ARRIVE, Poll(), Complete(), Poll(), Poll()], [SENT], "PRO-1"),
    ],
)
def test_a_decode_server_that_repeats_its_state_stands_still(commands, requests, found):
    progress = DecodeProgress()
    beside = TierUsers(DECODING)
    now = RECEIVED._replace(requests=tuple(requests))
    for command in commands:
        beside.note(command)
        still = progress.follow(command, now, beside.greeted, beside.arrived)
    step = TierStep(DECODING, Poll(), refused=False, before=now, after=now, ranges=[], standstill=still)
    failure = {clause.id: failure for clause, failure in failed_clauses(step)}.get("PRO-1")
    assert bool(failure) == bool(found)
    if failure:
        assert failure.observed.startswith("2 calls of the scheduler later nothing has run")
        [waits] = [request for request in requests if request.name == "h1"]
        assert f"h1 {waits.state}" in failure.observed


@pytest.mark.parametrize(
    "commands, state, sends, found",
    [
        ([Greet("h1")], "sends", (), "PRO-1"),
        ([Greet("h1")], "sends", SENDING.sends, None),  # the network has still to read
        ([Greet("h1")], "sends", SENDING.sends[:1], None),
        ([Greet("h1")], "parked", (), "PRO-1"),
        ([FailPeer("h1")], "parked", (), "PRO-1"),
        ([Greet("h1")], "launched", (), "PRO-1"),
        ([Greet("h1")], "fails", (), "PRO-1"),
        ([], "parked", (), None),  # its decode server has not answered
        ([Greet("h1")], "queued", (), None),  # no batch has had it
        ([Greet("h1")], "computes", (), None),
    ],
)
def test_a_prefill_server_that_repeats_its_state_stands_still(commands, state, sends, found):
    progress = DecodeProgress()
    beside = TierUsers(PREFILLING)
    request = SENDING.requests[0]._replace(state=TierRequestState(state))
    now = SENDING._replace(requests=(request,), sends=sends)
    for command in (*commands, *[Poll()] * 3):
        beside.note(command)
        still = progress.follow(command, now, beside.greeted, beside.arrived)
    step = TierStep(PREFILLING, Poll(), refused=False, before=now, after=now, ranges=[], standstill=still)
    assert bool(TIER_CLAUSES["PRO-1"].check(step)) == bool(found)


def test_every_clause_has_a_row_or_a_test_of_its_own():
    tested_here = {"HOST-4", "TREE-17", "PRO-1", "STORE-3"}
    assert {row.clause for row in ROWS if row.clause} | tested_here == {*TIER_CLAUSES}
    assert {*OF_CONNECTORS} <= {*TIER_CLAUSES}


def test_a_waived_clause_is_not_evaluated():
    ranges = TierUsers(SIZES)
    now = node(1, locks=count(1, 2))(FACTS)
    step = TierStep(SIZES, Poll(), refused=False, before=FACTS, after=now, ranges=ranges.follow(now))
    assert failed_clauses(step, {"HOST-3"}) == []


def test_each_reported_fault_is_shown_or_planted():
    planted = planted_faults("tiers/faults.toml")
    for report in upstream_reports():
        assert not report.planted or report.planted in planted, report.numbers
        known = [known_faults()[fault] for fault in report.faults]
        said = {number for fault in known for number in (*fault.reports, *fault.cause)}
        assert not said or {*report.numbers} <= said, report.numbers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"verdict": "gone", "faults": ("split-below-a-backup",)},
            r"\(1,\): `faults` go with the verdict shown",
        ),
        (
            {"verdict": "not met", "called": {"load_back": 0}},
            r"\(1,\): `called` goes with the verdict not met",
        ),
        ({"verdict": "shown", "faults": ("nothing",)}, r"known\.toml has no 'nothing'"),
    ],
)
def test_a_report_that_contradicts_itself_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        TierReport(numbers=(1,), says="", **fields)
