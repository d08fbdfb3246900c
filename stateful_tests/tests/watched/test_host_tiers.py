"""Logs of servers with a host tier, and with a storage behind it."""

import pytest

from reference.tiers.facts import TierFacts, TierNode, TierOperation, TierUser
from stateful_tests.tests.support.log_lines import event, events
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.tests.tiers.scenes import (
    A,
    FACTS,
    HOST,
    OTHER,
    PAGE,
    RECURRENT,
    REST,
    SIZES,
    WITH_STATES,
    count,
    facts,
    kv,
    node,
    violated_at,
)
from stateful_tests.tests.support.written_logs import validate


OF_A_TIER = {
    "window": SIZES.window, "full_tokens": SIZES.full_pages, "swa_tokens": SIZES.swa_pages,
    "width": SIZES.width, "tree": True,
    "tier": {"full_tokens": SIZES.host_pages, "swa_tokens": SIZES.host_swa_pages, "policy": SIZES.policy},
}  # fmt: skip


@pytest.mark.parametrize("change, clause", [
    (facts(), None), (node(1, locks=count(1, 2)), "HOST-3"), (facts(host_free=kv((), (5,))), "HOST-1"),
    (node(2, storing=-1), "XFER-4"), (facts(host_memory=kv((A[0], OTHER, *HOST[2:]), HOST)), "HOST-2"),
])  # fmt: skip
def test_a_host_tier_is_judged_by_the_clauses_of_tiers(change, clause, written):
    """At each step; a clause is reported once."""
    shown = [["tier", FACTS, []], ["tier", change(FACTS), []], ["tier", change(FACTS), []]]
    result = validate(written([header(**OF_A_TIER), *shown]))
    headline = [
        (found.clause, found.event, f"{found.expected}; {found.observed}")
        for found in result.unexplained[:1]
    ]
    words = violated_at(change)[1]
    assert headline == ([(clause, "tier", words)] if clause else []) and not result.skipped
    assert len({found.clause for found in result.unexplained}) == len(result.unexplained)
    again = validate(written([header(**OF_A_TIER), *shown, ["flush", 0], shown[-1]]))
    assert len(again.unexplained) == 2 * len(result.unexplained), "after a flush the tier is another"


# The store of node 2 is in flight, and its source has other KV.
CHANGED = FACTS._replace(memory=kv((0, *A[:2], OTHER, 0, 0, 0), FACTS.memory["swa"]))


@pytest.mark.parametrize(
    ("shown", "found"),
    [([FACTS, CHANGED], ["HOST-2", "XFER-1"]), ([CHANGED], ["HOST-2"])],
    ids=["from one step to the next", "in the first step"],
)
def test_sources_of_a_transfer_keep_their_kv(shown, found, written):
    lines = [["tier", each, []] for each in shown]
    result = validate(written([header(**OF_A_TIER), *lines]))
    assert [mismatch.clause for mismatch in result.unexplained] == found


def test_pools_of_both_tiers_may_end_within_a_page(written):
    free = (2, 3, 4, 5)
    host = (0, 1, 2, 3)
    empty = TierFacts(
        (), kv(free, free), kv(host, host), count(), kv((0,) * 6, (0,) * 6), kv((0,) * 4, (0,) * 4)
    )
    tier = {"full_tokens": 5, "swa_tokens": 5, "policy": SIZES.policy}
    sizes = {**OF_A_TIER, "page_size": 2, "full_tokens": 5, "swa_tokens": 5, "tier": tier}
    assert not validate(written([header(**sizes), ["tier", empty, []]])).unexplained


@pytest.mark.parametrize("load", [True, False])
def test_situations_of_a_host_tier_are_counted(load, written):
    (one,) = (job for job in FACTS.transfers if job.load is load)
    on_the_device = tuple(node for node in FACTS.nodes if node.device["full"])
    shown = FACTS, FACTS._replace(transfers=(one,)), FACTS._replace(nodes=on_the_device)
    lines = [["tier", facts, []] for facts in shown]
    result = validate(written([header(**OF_A_TIER), *lines]))
    reached = result.reached
    assert result.compared == sum(len(facts.nodes) for facts in shown)
    assert {name: times for name, times in reached.items() if times} == {
        "KV that is only on the host": 2,
        "a load in flight": 3 if load else 2,
        "a store in flight": 2 if load else 3,
    }


def test_a_lock_has_the_range_of_the_path_that_it_was_taken_on(written):
    """A window of 2 was in one node when h1 locked it: the split leaves the lock on both parts."""
    kept = {"device": kv((1, 2), (1, 2)), "host": kv((), ()), "pins": count()}
    whole = TierNode(1, parent=0, start=0, stamps=A[:2], locks=count(1, 1), **kept)
    parts = (
        whole._replace(node=2, stamps=A[:1], device=kv((1,), (1,))),
        whole._replace(parent=2, start=1, stamps=A[1:2], device=kv((2,), (2,))),
    )
    sizes = {**OF_A_TIER, "window": 1}
    memory = (0, *A[:2], 0, 0, 0, 0)
    locked_facts = REST._replace(
        nodes=parts,
        users=(TierUser("h1", host=False, node=1, lock=1),),
        memory=kv(memory, memory),
        host_free=kv((*range(6),), (*range(6),)),
        free=kv((3, 4, 5, 6), (3, 4, 5, 6)),
    )
    for paths, clauses in (([(1, False, [whole])], []), ([], ["HOST-3"])):
        result = validate(written([header(**sizes), ["tier", locked_facts, paths]]))
        assert [found.clause for found in result.unexplained] == clauses


@pytest.mark.parametrize("matched, has_tier, found, loaded", [
    (2, True, [], 1), (4, True, [], 0), (2, False, ["OUT-1"], 0), (4, False, [], 0),
])  # fmt: skip
def test_with_a_host_tier_a_prefix_grows_by_what_is_loaded(
    matched, has_tier, found, loaded, written
):
    lines = events(f"""
submit c1: tokens 6, new 6
admit c1: prefix {matched}, R{matched}
extend: c1 prefix 4 tokens 2 C6 A6 R4
""")
    tier = OF_A_TIER["tier"] if has_tier else None
    sizes = {**OF_A_TIER, "tier": tier, "full_tokens": 32, "swa_tokens": 32}
    result = validate(written([header(**sizes), *lines]))
    assert [mismatch.clause for mismatch in result.unexplained] == found
    assert result.reached["a prefix that is loaded from the host"] == loaded


OF_A_TIER_WITH_STATES = {
    "window": None, "full_tokens": WITH_STATES.full_pages, "swa_tokens": 0, "states": WITH_STATES.states,
    "width": WITH_STATES.width, "tree": True,
    "tier": {"full_tokens": WITH_STATES.host_pages, "swa_tokens": 0, "policy": WITH_STATES.policy,
             "states": WITH_STATES.host_states},
}  # fmt: skip
WITH_STORAGE = {**OF_A_TIER, "tier": {**OF_A_TIER["tier"], "storage": "best_effort"}}


ASKS = event("submit c1: tokens 6, new 6")


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ([ASKS], []),
        ([ASKS, event("admit c1: prefix 0")], []),  # then it may poll the transfers
        ([], ["XFER-3"]),
        ([event("requeue c2")], ["OUT-1"]),  # a mismatch leaves the requests that wait unknown
    ],
    ids=["waits", "was admitted", "nobody waits", "after a mismatch"],
)
def test_a_storage_has_records_of_who_waits(before, found, written):
    asked_facts = REST._replace(asked=("c1",))
    result = validate(written([header(**WITH_STORAGE), *before, ["tier", asked_facts, []]]))
    assert [mismatch.clause for mismatch in result.unexplained] == found


READS = TierOperation(1, back=False, name="c1", state="reads", slots=kv((0,), ()), moving=kv((0,), ()))
HAS_READ = READS._replace(moving=kv())
WRITES = READS._replace(back=True, name="")


@pytest.mark.parametrize(
    ("shown", "situation", "times"),
    [
        (REST._replace(stored=(PAGE,)), "a page that is stored", 1),
        (REST._replace(operations=(READS,)), "a page that comes from the storage", 1),
        (REST._replace(operations=(HAS_READ, WRITES)), "a page that comes from the storage", 0),
    ],
    ids=["stored", "read", "has been read, or written"],
)
def test_situations_of_a_storage_are_counted(shown, situation, times, written):
    lines = [header(**WITH_STORAGE), ASKS, ["tier", shown, []], ["tier", REST, []]]
    assert validate(written(lines)).reached[situation] == times


STORED = {"device": {"state": (1,)}, "locks": {"full": 1, "state": 1}, "storing": 1}
LOCKED, LOOSE, IN_RUST = (
    {"device": {"state": (2,)}, "locks": locks, "storing": -1}
    for locks in ({"state": 1}, {"state": 0}, {"full": 1})
)


@pytest.mark.parametrize("free, nodes, pinned", [
    ((), [STORED], True), ((3,), [STORED], False), ((), [LOCKED], False), ((), [STORED, LOCKED], True),
    ((), [STORED, LOOSE], False), ((), [STORED, IN_RUST], True), ((), [], False),
    ((), [STORED, LOOSE | {"device": {"state": ()}}], True),
    ((), [STORED | {"storing": 0, "locks": {"state": 0}}], True),
])  # fmt: skip
def test_stores_may_pin_every_state(free, nodes, pinned, written):
    """The core in Rust does not tell who locks a state."""
    (one,) = RECURRENT.nodes
    tier_facts = RECURRENT._replace(
        nodes=tuple(
            one._replace(**each | {"node": index, "device": {"full": (1, 2)} | each["device"]})
            for index, each in enumerate(nodes, 1)
        ),
        free=RECURRENT.free | {"state": free},
    )
    result = validate(written([header(**OF_A_TIER_WITH_STATES), ["tier", tier_facts, []]]))
    assert result.states_in_stores is pinned


@pytest.mark.parametrize("states, of_the_host, found", [
    (3, 2, []), (4, 2, ["XFER-3"]), (3, 3, ["HOST-1"]), (3, 0, ["HOST-3"]),
])  # fmt: skip
def test_slots_of_states_of_both_tiers_are_counted(states, of_the_host, found, written):
    tier = {**OF_A_TIER_WITH_STATES["tier"], "states": of_the_host}
    head = header(**{**OF_A_TIER_WITH_STATES, "states": states, "tier": tier})
    result = validate(written([head, ["tier", RECURRENT, []]]))
    assert [mismatch.clause for mismatch in result.unexplained] == found


# A turn that is rejected is matched at once where there is a storage.
REJECTED = events("""
open s1: done
submit c1 of s1: tokens 6, new 6
submit c2 of s1: tokens 1, new 1, rejected, why "Streaming session already has an active request."
""")


@pytest.mark.parametrize(
    ("tier", "known_fault"), [(WITH_STORAGE, "rejection-ends-turn"), (OF_A_TIER, None)]
)
def test_with_a_storage_a_rejected_turn_ends_that_of_its_session(tier, known_fault, written):
    lines = [*REJECTED, event("submit c3 of s1: tokens 8, new 2")]
    (mismatch,) = validate(written([header(**tier, release="0.5.23"), *lines])).mismatches
    assert (mismatch.clause, mismatch.known) == ("OUT-1", known_fault)


@pytest.mark.parametrize(
    ("tier", "known_fault"), [(WITH_STORAGE, "rejection-takes-slot"), (OF_A_TIER, None)]
)
def test_with_a_storage_a_turn_has_the_row_of_a_rejected_one(tier, known_fault, written):
    """And is nobody's from then on."""
    lines = [
        *REJECTED,
        event("admit c1 of s1: prefix 1, C1 A1"),
        ["tier", REST._replace(asked=("x",), host_free=kv((), (5,))), []],
    ]
    mismatches = validate(written([header(**tier, release="0.5.23"), *lines])).mismatches
    assert [(mismatch.clause, mismatch.known) for mismatch in mismatches][:1] == [("LEN-4", known_fault)]
    assert len(mismatches) == 1 or known_fault is None
