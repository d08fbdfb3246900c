"""Logs of a real release's scheduler conform, and what is changed in them is noticed."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from impl.sglang.server.events import Event
from reference.tiers.facts import TierFacts, TierNode, TierOperation, TierUser
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.tests.support import log_changes
from stateful_tests.traces import files
from stateful_tests.traces.notation import format_command
from stateful_tests.tests.support.log_lines import event, events, spoilt
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
)
from stateful_tests.watched import reader
from stateful_tests.watched.beside import TABLE
from stateful_tests.watched.reader import LogError, WatchLog, logs_of
from stateful_tests.watched.results import Validated
from stateful_tests.watched.validator import Validator

FIXTURES = Path(__file__).parents[3] / "fixtures" / "watched"
LOGS = sorted(path for path in FIXTURES.glob("*.jsonl") if "pages" not in path.stem)
Lines = list[dict[str, Any]]


def validate(path: Path) -> Validated:
    (log,) = logs_of([path])
    return Validator(log.header).run(log.lines())


def lines_of(path: Path) -> Lines:
    """The header, and each event by the names of its fields."""
    head, *lines = map(json.loads, path.read_text().splitlines())
    return [
        head,
        *({"event": name, **dict(zip(head["fields"][name], rest))} for name, *rest in lines),
    ]


@pytest.fixture
def written(tmp_path):
    def write(lines):
        path = tmp_path / "log.jsonl"
        rows = [list(line.values()) if "event" in line else line for line in lines]
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in rows))
        return path

    return write


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.jsonl")), ids=lambda p: p.stem)
def test_a_real_scheduler_conforms(path):
    found = validate(path)
    assert not found.found, found.found[0]
    assert found.steps > 25 and found.compared > 200 and not found.skipped
    assert {m.known for m in found.mismatches} <= known_faults().keys()


def test_every_event_has_a_row():
    assert TABLE.keys() == set(get_args(Event))


def test_a_mismatch_names_line_clause_and_both_sides(written):
    lines = lines_of(LOGS[-1])
    at = next(
        n for n, e in enumerate(lines) if e.get("event") == "release" and e["after"] and e["reason"]
    )
    lines[at]["after"][1] += 4  # a tail that finish forgot
    (first, *_) = validate(written(lines)).found
    assert (first.line, first.clause, first.event) == (at + 1, "LEN-2", "release")
    assert "kv_allocated_len" in first.expected and "kv_allocated_len" in first.observed
    assert str(lines[at]["session"]) in first.about


def test_a_count_that_is_off_is_reported_once(written):
    lines = lines_of(LOGS[-1])
    at = next(n for n, e in enumerate(lines) if e.get("event") == "step" and n > 40)
    for line in lines[at:]:
        if line.get("event") == "step":
            line["full"] -= 4  # a page is lost, for good
    found = validate(written(lines)).found
    assert [(p.line, p.clause) for p in found] == [(at + 1, "OWN-3")]
    assert "(-4)" in found[0].observed


def test_a_mismatch_becomes_a_trace(written, tmp_path, monkeypatch):
    lines = lines_of(LOGS[-1])
    at = next(
        n for n, e in enumerate(lines) if e.get("event") == "release" and e["after"] and e["reason"]
    )
    lines[at]["after"][1] += 4
    (log,) = logs_of([written(lines)])
    validator = Validator(log.header)
    validator.run(log.lines())
    trace = validator.trace()
    assert trace is not None and trace.clause == "LEN-2"
    assert trace.expected and all(done.choices for _, done in trace.expected)
    assert format_command(trace.commands[-1]) == validator.result.found[0].command
    for most, fits in ((len(trace.commands), True), (len(trace.commands) - 1, False)):
        monkeypatch.setattr("stateful_tests.watched.beside.MAX_STEPS", most)
        shorter = Validator(log.header)
        shorter.run(log.lines())
        assert (shorter.trace() == trace) is fits and (shorter.trace() is None) is not fits
    monkeypatch.undo()
    lines[[e.get("event") for e in lines].index("step")]["rows"] += 1
    (log,) = logs_of([written(lines)])
    earlier = Validator(log.header)
    earlier.run(log.lines())
    assert len(earlier.trace().commands) < len(trace.commands), "it ends with the first mismatch"
    files.save(trace, tmp_path / "trace.json")
    assert files.load(tmp_path / "trace.json").commands == trace.commands


def test_a_mismatch_in_a_tree_of_unknown_content_has_no_trace():
    log = log_changes.ChangedLog("sglang-0.5.23-tree_under_overlap")
    changed = next(change for change in log.changes() if change.kind == "release left out")
    validator = Validator(log.header)
    assert validator.run(changed.lines).found and validator.trace() is None


def test_a_log_that_begins_in_the_middle_or_conforms_has_no_trace():
    for begins, kind in ((2, "release left out"), (None, None)):
        log = log_changes.ChangedLog("sglang-0.5.23-clients_that_do_not_wait", begins)
        changed = next((each.lines for each in log.changes() if each.kind == kind), log.lines)
        validator = Validator(log.header)
        assert bool(validator.run(changed).found) is (kind is not None)
        validator.header.tree = False
        assert validator.trace() is None


def test_a_claim_has_to_be_stated(written):
    head, *lines = lines_of(FIXTURES / "sglang-0.5.14-rounds_that_claim.jsonl")
    assert head["claims"] == 1
    found = validate(written([{**head, "claims": 0}, *lines])).found
    assert (found[0].event, found[0].clause) == ("step", "LEN-4")


def test_a_mixed_batch_is_logged_whole(written):
    lines = lines_of(FIXTURES / "sglang-0.5.23-mixed_batches.jsonl")
    assert validate(written(lines)).known["mixed-round-not-counted"]
    later = validate(written([{**lines[0], "release": "0.5.24"}, *lines[1:]])).found
    assert ("LEN-2", "release") in {(p.clause, p.event) for p in later}
    events = [line.get("event") for line in lines]
    step = next(
        line for line, before in zip(lines[1:], events) if before == "extend" and line.get("lanes")
    )
    step["lanes"].pop()
    (first, *_) = validate(written(lines)).found
    assert (first.clause, first.observed) == ("OUT-1", f"runs one of {step['batch']}")


SMALL: dict[str, Any] = {
    "window": None, "full_tokens": 64, "swa_tokens": 0, "rows": 6, "width": 64,
}  # fmt: skip

# Two first turns of one session at once, on 0.5.18: the second is rejected, and ends as the session's.
TWO_FIRST_TURNS = events("""
open c1: done
submit c1.1 of c1: tokens 1, new 1
admit c1.1 of c1
extend: c1.1 tokens 1 C1 A1
step 1: batch 1, sessions 1, full 63, rows 5
submit c1.2 of c1: tokens 1, new 1, rejected, why "active request"
admit c1.2 of c1
extend: c1.2 tokens 1 C1 A1
step 2: batch 1, sessions 1, full 62, rows 4
release c1.2 of c1: reason FINISH_ABORT, inserts, outputs 1, before C1 A1, limit 1
step 3: sessions 1, full 62, rows 4
""")


@pytest.mark.parametrize("release, known", [("0.5.18", "rejection-takes-slot"), ("0.5.24", None)])
def test_a_rejected_turn_that_ends_as_the_sessions(release, known, written):
    head = header(**SMALL, release=release, overlap=True)
    found = validate(written([head, *TWO_FIRST_TURNS]))
    assert [(m.clause, m.event, m.known) for m in found.mismatches] == [("SES-2", "release", known)]
    assert found.skipped["events after a mismatch, up to the next snapshot"] == 1


# A turn, a flush, the next turn of its session.
A_FLUSH = events("""
open c1: done
submit c1.1 of c1: tokens 2, new 2
admit c1.1 of c1
extend: c1.1 tokens 2 C2 A2
step 1: batch 1, sessions 1, full 62, rows 5
release c1.1 of c1: reason FINISH_LENGTH, inserts, outputs 1, counted 1, before C2 A2, after C2 A2, limit 1
step 2: sessions 1, full 62, rows 5
flush
step 3: sessions 1, full 64, rows 6
submit c1.2 of c1: tokens 4, new 1
admit c1.2 of c1
extend: c1.2 tokens 4 C4 A4
step 4: batch 1, sessions 1, full 60, rows 5
""")


@pytest.mark.parametrize("at, to, found", [
    (7, 7, []), (7, 5, [("OUT-1", "flush")]),
    (7, None, [
        ("OWN-3", "step"), ("OWN-4", "step"), ("LEN-3", "admit"), ("OWN-3", "step"), ("OWN-4", "step"),
    ]),
])  # fmt: skip
def test_after_a_flush_a_session_keeps_nothing(at, to, found, written):
    """It is in the log, where it was made, or before its turn has ended."""
    lines = [*A_FLUSH]
    flush = lines.pop(at)
    lines = lines if to is None else [*lines[:to], flush, *lines[to:]]
    head = header(**SMALL)
    result = validate(written([head, *lines]))
    assert [(mismatch.clause, mismatch.event) for mismatch in result.found] == found
    assert result.reached["a flush of what sessions keep"] == (to == 7)


def test_a_flush_leaves_nothing_in_the_tree(written):
    head = header(**SMALL, tree=True)
    (found,) = validate(written([head, event("flush: tree 5")])).found
    assert (found.clause, found.event, found.observed) == ("OUT-1", "flush", "5 are there")


@pytest.mark.parametrize("release, known", [
    ("0.5.23", "flush-under-a-waiting-state"), ("0.5.24", None)])  # fmt: skip
def test_a_flush_spares_the_state_of_a_turn_that_waits(release, known, written):
    """Its first look at the tree has given it a slot, and there was no room."""
    lines = events("""
open c1: done
submit c1.1 of c1: tokens 9, new 9
admit c1.1 of c1: prefix 4, R4
step 1: queued 1, sessions 1, full 60, rows 6, tree_full 4, states 7
flush
""")
    head = header(**SMALL, release=release, states=8, tree=True)
    found = validate(written([head, *lines])).mismatches
    assert [(m.clause, m.event, m.known) for m in found] == [("STA-6", "flush", known)]
    others = spoilt(lines, "2 session no; 3 session no; 4 states 8")
    assert not validate(written([head, *others])).mismatches, "only turns of sessions keep the slot"


# An operator pauses the server between two chunks of a turn.
A_PAUSE = events("""
open c1: done
submit c1.1 of c1: tokens 12, new 12
admit c1.1 of c1
extend: c1.1 tokens 8 C8 A8
step 1: batch 1, sessions 1, full 56, rows 5
release c1.1 of c1: before C8 A8, after C8 A8, limit 2
requeue c1.1
admit c1.1 of c1: prefix 8, C8 A8
extend: c1.1 prefix 8 tokens 4 C12 A12
step 2: batch 1, sessions 1, full 52, rows 5
""")


@pytest.mark.parametrize("kept, found", [(8, []), (4, [("LEN-2", "release"), ("LEN-2", "admit")])])
def test_a_turn_that_is_retracted_between_two_chunks_keeps_what_it_has_computed(
    kept, found, written
):
    lines = spoilt(A_PAUSE, f"6 after C{kept} A{kept}")
    head = header(**SMALL)
    result = validate(written([head, *lines]))
    assert [(mismatch.clause, mismatch.event) for mismatch in result.found] == found
    assert result.reached["a retract between two chunks"] == 1
    assert not result.reached["a retract before the first result"]


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
    headline = [(found.clause, found.event) for found in result.found][:1]
    assert headline == ([(clause, "tier")] if clause else []) and not result.skipped
    assert len({found.clause for found in result.found}) == len(result.found)
    again = validate(written([header(**OF_A_TIER), *shown, ["flush", 0], shown[-1]]))
    assert len(again.found) == 2 * len(result.found), "after a flush the tier is another"


def test_what_a_transfer_reads_stays_as_it_was(written):
    """From one step to the next."""
    memory = (0, *A[:2], OTHER, 0, 0, 0)  # the store of node 2 is in flight
    changed = FACTS._replace(memory=kv(memory, FACTS.memory["swa"]))
    for shown, found in (([FACTS, changed], ["HOST-2", "XFER-1"]), ([changed], ["HOST-2"])):
        lines = [["tier", each, []] for each in shown]
        result = validate(written([header(**OF_A_TIER), *lines]))
        assert [each.clause for each in result.found] == found


def test_pools_of_both_tiers_may_end_within_a_page(written):
    free, host = (2, 3, 4, 5), (0, 1, 2, 3)
    empty = TierFacts(
        (), kv(free, free), kv(host, host), count(), kv((0,) * 6, (0,) * 6), kv((0,) * 4, (0,) * 4)
    )
    tier = {"full_tokens": 5, "swa_tokens": 5, "policy": SIZES.policy}
    sizes = {**OF_A_TIER, "page_size": 2, "full_tokens": 5, "swa_tokens": 5, "tier": tier}
    assert not validate(written([header(**sizes), ["tier", empty, []]])).found


@pytest.mark.parametrize("load", [True, False])
def test_what_a_host_tier_has_reached(load, written):
    (one,) = (job for job in FACTS.transfers if job.load is load)
    on_the_device = tuple(each for each in FACTS.nodes if each.device["full"])
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
    whole = TierNode(1, 0, 0, A[:2], locks=count(1, 1), **kept)
    parts = (
        whole._replace(node=2, stamps=A[:1], device=kv((1,), (1,))),
        whole._replace(parent=2, start=1, stamps=A[1:2], device=kv((2,), (2,))),
    )
    sizes = {**OF_A_TIER, "window": 1}
    memory = (0, *A[:2], 0, 0, 0, 0)
    held = REST._replace(
        nodes=parts,
        users=(TierUser("h1", False, 1, 1),),
        memory=kv(memory, memory),
        host_free=kv((*range(6),), (*range(6),)),
        free=kv((3, 4, 5, 6), (3, 4, 5, 6)),
    )
    for paths, clauses in (([(1, False, [whole])], []), ([], ["HOST-3"])):
        result = validate(written([header(**sizes), ["tier", held, paths]]))
        assert [found.clause for found in result.found] == clauses


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
    assert [each.clause for each in result.found] == found
    assert result.reached["a prefix that is loaded from the host"] == loaded


OF_A_TIER_WITH_STATES = {
    "window": None, "full_tokens": WITH_STATES.full_pages, "swa_tokens": 0, "states": WITH_STATES.states,
    "width": WITH_STATES.width, "tree": True,
    "tier": {"full_tokens": WITH_STATES.host_pages, "swa_tokens": 0, "policy": WITH_STATES.policy,
             "states": WITH_STATES.host_states},
}  # fmt: skip
BEHIND_IT = {**OF_A_TIER, "tier": {**OF_A_TIER["tier"], "storage": "best_effort"}}


def test_a_storage_has_records_of_who_waits(written):
    """Who waits is not known after a mismatch."""
    asked, ask = REST._replace(asked=("c1",)), event("submit c1: tokens 6, new 6")
    looks = [ask, event("admit c1: prefix 0")]  # then it may poll the transfers
    for before, found in (
        ([ask], []), (looks, []), ([], ["XFER-3"]), ([event("requeue c2")], ["OUT-1"]),
    ):  # fmt: skip
        result = validate(written([header(**BEHIND_IT), *before, ["tier", asked, []]]))
        assert [each.clause for each in result.found] == found
    reads = TierOperation(1, False, "c1", "reads", kv((0,), ()), kv((0,), ()))
    came, writes = reads._replace(moving=kv()), reads._replace(back=True, name="")
    for shown, name, times in (
        (REST._replace(stored=(PAGE,)), "a page that is stored", 1),
        (REST._replace(operations=(reads,)), "a page that comes from the storage", 1),
        (REST._replace(operations=(came, writes)), "a page that comes from the storage", 0),
    ):
        lines = [header(**BEHIND_IT), ask, ["tier", shown, []], ["tier", REST, []]]
        assert validate(written(lines)).reached[name] == times


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
    shown = RECURRENT._replace(
        nodes=tuple(
            one._replace(**each | {"node": at, "device": {"full": (1, 2)} | each["device"]})
            for at, each in enumerate(nodes, 1)
        ),
        free=RECURRENT.free | {"state": free},
    )
    result = validate(written([header(**OF_A_TIER_WITH_STATES), ["tier", shown, []]]))
    assert result.states_in_stores is pinned


@pytest.mark.parametrize("states, of_the_host, found", [
    (3, 2, []), (4, 2, ["XFER-3"]), (3, 3, ["HOST-1"]), (3, 0, ["HOST-3"]),
])  # fmt: skip
def test_slots_of_states_of_both_tiers_are_counted(states, of_the_host, found, written):
    tier = {**OF_A_TIER_WITH_STATES["tier"], "states": of_the_host}
    head = header(**{**OF_A_TIER_WITH_STATES, "states": states, "tier": tier})
    result = validate(written([head, ["tier", RECURRENT, []]]))
    assert [each.clause for each in result.found] == found


def test_a_turn_that_is_rejected_is_matched_at_once_where_there_is_a_storage(written):
    """So it ends the turn of its session as soon as it is queued, which is a known fault."""
    lines = events("""
open s1: done
submit c1 of s1: tokens 6, new 6
submit c2 of s1: tokens 1, new 1, rejected, why "Streaming session already has an active request."
submit c3 of s1: tokens 8, new 2
""")
    for tier, known in ((BEHIND_IT, "rejection-ends-turn"), (OF_A_TIER, None)):
        (found,) = validate(written([header(**tier, release="0.5.23"), *lines])).mismatches
        assert (found.clause, found.known) == ("OUT-1", known)
    # or the first turn has the row of the rejected one, and is nobody's from then on
    lines[3:] = [
        event("admit c1 of s1: prefix 1, C1 A1"),
        ["tier", REST._replace(asked=("x",), host_free=kv((), (5,))), []],
    ]
    for tier, known in ((BEHIND_IT, "rejection-takes-slot"), (OF_A_TIER, None)):
        head = header(**tier, release="0.5.23")
        found = validate(written([head, *lines])).mismatches
        assert [(each.clause, each.known) for each in found][:1] == [("LEN-4", known)]
        assert len(found) == 1 or known is None


# Recurrent state: slots 8, of which a turn of c1 has one. Its second turn resumes; c2 waits with a slot.
STATES = events("""
open c1: done
submit c1.1 of c1: tokens 3, new 3
admit c1.1 of c1
extend: c1.1 tokens 3 C3 A3
step 1: batch 1, sessions 1, full 61, rows 5, states 7
step 2: batch 1, sessions 1, full 60, rows 5, states 7; c1.1 C4 A4
release c1.1 of c1: reason FINISH_LENGTH, inserts, outputs 2, counted 2, before C4 A4, after C4 A4, limit 2
open c2: done
submit c2.1 of c2: tokens 5, new 5
admit c2.1 of c2: prefix 3, R3
step 3: queued 1, sessions 2, full 60, rows 5, states 6
submit c1.2 of c1: tokens 7, new 2
admit c1.2 of c1: prefix 4, C4 A4
admit c2.1 of c2
extend: c1.2 prefix 4 tokens 3 C7 A7; c2.1 tokens 5 C5 A5
step 4: batch 2, sessions 2, full 52, rows 4, states 6
""")
OF_STATES = {
    "window": None,
    "full_tokens": 64,
    "swa_tokens": 0,
    "rows": 6,
    "width": 64,
    "states": 8,
}


@pytest.mark.parametrize("changes, found", [
    ("", []),
    ("6 states 6", ["STA-6", "STA-6"]),  # lost, and found again
    ("11 states 7; 16 states 7", ["STA-6"]),  # given back though c2.1 waits with it
    ("13 prefix 3, C3 A3", ["STA-2"]),
])  # fmt: skip
def test_states_add_up_and_turns_resume_where_theirs_are(changes, found, written):
    head = header(release="9.9.9", tree=True, **OF_STATES)
    result = validate(written([head, *spoilt(STATES, changes)]))
    assert [each.clause for each in result.found] == found
    assert result.wrong_states == ({("c1.2", 3): ""} if found == ["STA-2"] else {})


@pytest.mark.parametrize(
    "free, found", [(7, []), (6, []), (5, ["STA-6", "STA-6"]), (8, ["STA-6"] * 2)]
)
def test_a_lazy_server_takes_one_slot_more_while_a_state_is_due(free, found, written):
    head = header(release="9.9.9", tree=True, lazy=True, **OF_STATES)
    result = validate(written([head, *spoilt(STATES, f"6 states {free}")]))
    assert [each.clause for each in result.found] == found


# Verify rounds of c1's first turn, and its second. The last round accepts more than the first turn takes.
ROUNDS = events("""
open c1: done
submit c1.1 of c1: tokens 1, new 1
admit c1.1 of c1
extend: c1.1 tokens 1 C1 A1
step 1: batch 1, sessions 1, full 63, rows 5, states 7
step 2: batch 1, sessions 1, full 55, rows 5, states 7; c1.1 C1 A9
result: c1.1 outputs 1 C1 A9
step 3: batch 1, sessions 1, full 55, rows 5, states 7; c1.1 C1 A9
result: c1.1 outputs 2 C2 A9
step 4: sessions 1, full 55, rows 5, states 7
release c1.1 of c1: reason FINISH_LENGTH, inserts, outputs 6, counted 3, before C6 A9, after C4 A4, limit 3
submit c1.2 of c1: tokens 6, new 2
admit c1.2 of c1: prefix 4, C4 A4
step 5: queued 1, sessions 1, full 60, rows 5, states 7
admit c1.2 of c1: prefix 4, C4 A4
extend: c1.2 prefix 4 tokens 2 C6 A6
step 6: batch 1, sessions 1, full 58, rows 5, states 7
release c1.2 of c1: reason FINISH_LENGTH, inserts, outputs 1, counted 1, before C6 A6, after C6 A6, limit 1
submit c1.3 of c1: tokens 9, new 2
admit c1.3 of c1: prefix 6, C6 A6
""")
IN_FLIGHT = "10 batch 1; 10 c1.1 C2 A9; "
LONGER = "turn-goes-on-from-a-longer-state"


@pytest.mark.parametrize("changes, state, found, new", [
    ("", 6, [("STA-2", LONGER)], ["STA-2"]),
    ("11 outputs 4, before C4 A9", 4, [], []),  # it accepts what the turn takes
    # the KV of the last token was not computed, nor is it in the state; with a round in flight it may be
    ("11 outputs 3, before C3 A9", 3,
     [("LEN-2", "last-token"), ("STA-2", "last-token")], ["LEN-2", "STA-2"]),
    (IN_FLIGHT + "11 outputs 3, before C3 A9", 4,
     [("LEN-2", "last-token"), ("STA-2", LONGER)], ["LEN-2", "STA-2"]),
    (IN_FLIGHT + "11 outputs 4, before C4 A9", 5, [("STA-2", LONGER)], []),
])  # fmt: skip
def test_a_turn_resumes_behind_verify_rounds(changes, state, found, new, written):
    """Told once of a turn. What a round in flight adds to a state is not in a log."""
    settings = {"overlap": True, "speculative": True, **OF_STATES}
    lines = spoilt(ROUNDS, changes)
    result = validate(written([header(release="0.5.23", **settings), *lines]))
    assert [(each.clause, each.known) for each in result.mismatches] == found
    for each in result.mismatches:
        assert each.clause != "STA-2" or each.expected.startswith(f"c1.2 resumes at {state}"), each
    wrong = [known for clause, known in found if clause == "STA-2"]
    assert result.wrong_states == dict.fromkeys([("c1.2", 4)] if wrong else [], *wrong)
    result = validate(written([header(release="9.9.9", **settings), *lines]))
    assert [each.clause for each in result.found] == new


def test_a_turn_that_comes_back_resumes_where_it_did(written):
    """It was retracted before its first result; its first admission has told that its state is another."""
    lines = ROUNDS[:11] + events("""
submit c1.2 of c1: tokens 5, new 1
admit c1.2 of c1: prefix 4, C4 A4
extend: c1.2 prefix 4 tokens 1 C5 A5
step 5: batch 1, sessions 1, full 59, rows 5, states 7
release c1.2 of c1: before C5 A5, after C5 A5, limit 3
requeue c1.2
admit c1.2 of c1: prefix 4, C4 A4
""")
    head = header(release="0.5.23", overlap=True, speculative=True, **OF_STATES)
    result = validate(written([head, *lines]))
    assert not result.found and not result.skipped, result.found


@pytest.mark.parametrize("prefix, wrong", [(0, {("c2.1", 0): "waiting-turn-keeps-state"}), (3, {})])
def test_a_turn_that_waited_with_a_slot(prefix, wrong, written):
    """Of 0.5.23, which leaves the slot as it is: the state there is somebody else's if its text begins."""
    head = header(release="0.5.23", tree=True, **OF_STATES)
    changes = f"14 prefix {prefix}, R{prefix}; 15 c2.1 prefix {prefix} tokens {5 - prefix} C5 A5 R{prefix};"
    lines = spoilt(STATES, f"{changes} 16 tree_full {prefix}, tree_locked {prefix}")
    result = validate(written([head, *lines]))
    assert not result.mismatches and result.wrong_states == wrong


@pytest.mark.parametrize("release, session, reason, wrong", [
    ("0.5.23", None, "FINISH_LENGTH", {("b", 4): LONGER}), ("9.9.9", None, "FINISH_LENGTH", {}),
    ("0.5.23", "s", "FINISH_ABORT", {("b", 4): LONGER}),
])  # fmt: skip
def test_who_matches_a_text_that_ended_with_a_round_in_flight(
    release, session, reason, wrong, written
):
    """Its node has the state of more than that."""
    node, states = [[1, 2, 3, 4], [1, 2, 3, 4], [], 0, 0], {"free": [], "tracked": {}, "nodes": [3]}
    of, count = (f" of {session}", 1) if session else ("", 0)
    opened = events(f"open {session}: done") if session else []
    pages = ["pages", {}, [], [], None, None, [node], states | {"held": {}}]
    lines = [
        *opened,
        *events(f"""
submit a{of}: tokens 3, new 3, ids 1 2 3
admit a{of}: prefix 0
extend: a tokens 3 C3 A3
step 1: batch 1, sessions {count}, full 61, rows 5, states 7
result: a outputs 1 C3 A3 ids 4
step 2: batch 1, sessions {count}, full 59, rows 5, states 7; a C3 A5
step 3: batch 1, sessions {count}, full 57, rows 5, states 7; a C3 A7
release a{of}: reason {reason}, inserts, outputs 2, counted 2, before C4 A7, limit 2, ids 4 5
step 4: sessions {count}, full 60, rows 6, tree_full 4, states 8
"""),
        pages,
        *events(f"""
submit b: tokens 5, new 5, ids 1 2 3 4 9
admit b: prefix 4, R4
extend: b prefix 4 tokens 1 C5 A5 R4
step 5: batch 1, sessions {count}, full 59, rows 5, tree_full 4, tree_locked 4, states 7
"""),
        pages,
    ]
    sizes = {"tree": True, "speculative": True, "overlap": True, **OF_STATES}
    result = validate(written([header(release=release, **sizes), *lines]))
    assert result.wrong_states == wrong


@pytest.mark.parametrize(
    "release, known", [("0.5.23", "queued-abort-finishes-turn"), ("9.9.9", None)]
)
def test_an_abort_in_the_queue_that_counts_as_a_finish(release, known, written):
    """The turn of c1 waits: it gives back a slot that is its session's, and counts."""
    ends = events("""
step 4: queued 2, sessions 2, full 60, rows 5, states 6
release c1.2 of c1: before C4 A4, after C4 A4, limit 2
abort: queued c1.2
step 5: queued 1, sessions 2, full 60, rows 5, states 6
submit c1.3 of c1: tokens 9, new 2
""")
    head = header(release=release, tree=True, **OF_STATES)
    result = validate(written([head, *STATES[:13], *ends]))
    found = [(each.clause, each.event, each.known) for each in result.mismatches]
    assert found == [("SES-2", "release", known)]
    assert result.skipped.total() == (0 if known else 3), (
        "its input is text of the session from then on"
    )


# Level `pages`.

PAGES = FIXTURES / "sglang-0.5.23-pages.jsonl"


def test_a_page_that_is_owned_and_free_is_noticed(written):
    lines = lines_of(PAGES)
    at = next(n for n, line in enumerate(lines) if line.get("owners"))
    slots = next(iter(lines[at]["owners"].values()))[2]
    lines[at]["free_full"].append(slots[-1] // lines[0]["page_size"])
    assert validate(written(lines)).found[0].clause == "OWN-1"


def test_a_mapping_to_a_slot_behind_the_swa_pool_is_none(written):
    lines = lines_of(PAGES)
    at = next(n for n, line in enumerate(lines) if line.get("owners"))
    slot = next(iter(lines[at]["owners"].values()))[2][-1]
    lines[at]["mapping"][slot] = lines[0]["swa_tokens"] + lines[0]["page_size"]
    assert validate(written(lines)).found[0].clause == "MAP-2"


STATES_IN_PAGES = FIXTURES / "sglang-0.5.23-pages_and_states.jsonl"


@pytest.mark.parametrize("change", ["free again", "lost", "of two", "of a node"])
def test_slots_of_recurrent_state_are_free_or_have_one_owner(change, written):
    lines = lines_of(STATES_IN_PAGES)
    states = next(n["states"] for n in lines[1:] if n.get("owners") and any(n["states"]["nodes"]))
    [first, *_] = states["held"].values()
    if change == "free again":
        states["free"].append(first[0])
    elif change == "lost":
        states["free"].pop()
    elif change == "of two":
        first[0] = first[1]
    else:
        states["nodes"] = [first[0], *states["nodes"][1:]]
    assert "STA-6" in {each.clause for each in validate(written(lines)).found}


# Bad input.


def test_a_cut_log_validates_up_to_there(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_bytes(LOGS[0].read_bytes()[:-20])
    (log,) = logs_of([path])
    found = Validator(log.header).run(log.lines())
    assert not found.found and log.cut is not None and "has no end" in log.cut


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda lines: lines[1:], "no watcher's log"),
        (lambda lines: [{**lines[0], "format": "other"}, *lines[1:]], "no watcher's log"),
        (lambda lines: [{**lines[0], "version": 9}, *lines[1:]], "version 9 is not supported"),
        (lambda lines: [*lines[:5], lines[0], *lines[5:]], "line 6: a second header"),
        (lambda lines: [*lines[:5], {"event": "step", "number": "x"}], "line 6: "),
        (lambda lines: [*lines[:5], {"event": "grow"}], "line 6: "),
        (lambda lines: [], "is empty"),
    ],
)
def test_unusable_logs_are_one_line(change, says, written):
    with pytest.raises(LogError, match=says):
        validate(written(change(lines_of(LOGS[0]))))


def test_two_processes_in_one_log_part_ways(written):
    one, other = lines_of(LOGS[0]), lines_of(LOGS[1])
    mixed = [line for pair in zip(one[1:], other[1:]) for line in pair]
    found = validate(written([one[0], *mixed]))
    assert found.found and any("come" in what or "missing" in what for what in found.skipped)


def test_missing_steps_are_reported(written):
    lines = [line for line in lines_of(LOGS[0]) if line.get("number") not in (5, 6)]
    assert "steps 5 to 6 are missing" in validate(written(lines)).skipped


def test_parts_of_one_process_are_one_log(tmp_path):
    lines = LOGS[0].read_text().splitlines(keepends=True)
    (tmp_path / "kvspec-7-0001.jsonl").write_text("".join(lines[:50]))
    (tmp_path / "kvspec-7-0002.jsonl").write_text("".join([lines[0], *lines[50:]]))
    found: list[WatchLog] = logs_of([tmp_path])
    assert len(found) == 1 and found[0].bytes == sum(
        path.stat().st_size for path in tmp_path.iterdir()
    )
    assert Validator(found[0].header).run(found[0].lines()).events == len(lines) - 1
    (first,) = logs_of([tmp_path / "kvspec-7-0001.jsonl"])
    assert Validator(first.header).run(first.lines()).events == 49, "the requested part"


def test_parts_of_two_processes_are_no_log(tmp_path):
    head, *lines = LOGS[0].read_text().splitlines(keepends=True)
    other = json.dumps({**json.loads(head), "process": 7}) + "\n"
    (tmp_path / "kvspec-7-0001.jsonl").write_text("".join([head, *lines[:5]]))
    (tmp_path / "kvspec-7-0002.jsonl").write_text("".join([other, *lines[5:9]]))
    (log,) = logs_of([tmp_path])
    with pytest.raises(LogError, match=r"0002\.jsonl: line 1: of another process than"):
        Validator(log.header).run(log.lines())


def test_a_folder_without_logs_is_one_line(tmp_path):
    with pytest.raises(LogError, match=r"there is no \.jsonl in this folder"):
        logs_of(iter([tmp_path]))
    with pytest.raises(LogError, match="none: there is no such file or folder"):
        logs_of([tmp_path / "none"])


@pytest.mark.parametrize("before", [0, 5])
def test_a_part_that_ends_with_its_header_has_no_lines(before, tmp_path):
    """Its server was killed while it wrote."""
    head, *lines = LOGS[0].read_text().splitlines(keepends=True)
    if before:
        (tmp_path / "kvspec-7-0001.jsonl").write_text("".join([head, *lines[:before]]))
    (tmp_path / "kvspec-7-0002.jsonl").write_text(head.rstrip())
    (log,) = logs_of([tmp_path])
    assert len(list(log.lines())) == before and log.cut is None


def test_a_growing_log_is_followed(tmp_path):
    whole, path = LOGS[0].read_bytes(), tmp_path / "kvspec-7-0001.jsonl"
    path.write_bytes(whole[:1500])
    rest = [whole[1500:3000], whole[3000:]]

    def growing():
        if not rest:
            return False
        with path.open("ab") as file:
            file.write(rest.pop(0))
        return True

    (log,) = logs_of([path])
    found = Validator(log.header).run(log.lines(growing))
    assert found.events == whole.count(b"\n") - 1 and not found.found and log.cut is None


def test_what_a_growing_log_has_is_read_before_more_is_waited_for(tmp_path):
    head, *lines = LOGS[0].read_text().splitlines(keepends=True)
    (tmp_path / "kvspec-7-0001.jsonl").write_text("".join([head, *lines[:5]]))
    (tmp_path / "kvspec-7-0002.jsonl").write_text("".join([head, *lines[5:9]]))
    read, waited = [], []
    (log,) = logs_of([tmp_path])
    for line in log.lines(lambda: bool(waited.append(len(read)))):
        read.append(line)
    assert waited[0] == len(read) == 9


def test_a_growing_log_rotates(tmp_path):
    """A part is written whole before the next one exists, which is without a header for a moment."""
    head, *lines = LOGS[0].read_bytes().splitlines(keepends=True)
    parts = [tmp_path / f"kvspec-7-{number:04}.jsonl" for number in (1, 2, 3)]
    parts[0].write_bytes(head + lines[0] + lines[1][:20])
    writes = [
        {0: lines[1][20:] + lines[2], 1: b""},
        {1: head[:30]},
        {1: head[30:] + lines[3][:9]},
        {1: lines[3][9:] + b"".join(lines[4:20]), 2: head + b"".join(lines[20:])},
    ]

    def growing():
        for part, text in (writes.pop(0) if writes else {}).items():
            with parts[part].open("ab") as file:
                file.write(text)
        return bool(writes)  # it has ended after it has written

    (log,) = logs_of([parts[0]])
    found = Validator(log.header).run(log.lines(growing))
    assert found.events == len(lines) and not found.found and log.cut is None and not writes
    assert log.files == parts


def test_a_line_that_ends_just_before_the_next_part_begins_is_read_whole(tmp_path, monkeypatch):
    head, *lines = LOGS[0].read_bytes().splitlines(keepends=True)
    path, following = tmp_path / "kvspec-7-0001.jsonl", tmp_path / "kvspec-7-0002.jsonl"
    path.write_bytes(head + lines[0][:20])
    looks = iter((False, False, True))
    later = reader._later

    def writes_meanwhile(part):
        if next(looks, False):
            path.write_bytes(head + lines[0])
            following.write_bytes(head + b"".join(lines[1:]))
        return later(part)

    monkeypatch.setattr(reader, "_later", writes_meanwhile)
    (log,) = logs_of([path])
    found = Validator(log.header).run(log.lines(lambda: not following.exists()))
    assert found.events == len(lines) and log.cut is None


def test_a_growing_log_that_is_no_part_ends_with_its_server(tmp_path):
    whole, path = LOGS[0].read_bytes(), tmp_path / "server.jsonl"
    path.write_bytes(whole[:-5])
    (log,) = logs_of([path])
    alive = iter((True, False))
    found = Validator(log.header).run(log.lines(lambda: next(alive)))
    assert found.events == whole.count(b"\n") - 2 and log.cut is not None and log.files == [path]


def test_a_line_that_is_too_long_is_not_waited_for(tmp_path, monkeypatch):
    waited, path = [], tmp_path / "long.jsonl"
    path.write_bytes(LOGS[0].read_bytes().splitlines(keepends=True)[0] + b"[" * 3_000)
    monkeypatch.setattr(reader, "MAX_LINE", 2_000)
    (log,) = logs_of([path])
    with pytest.raises(LogError, match="line 2: longer than 2000 bytes"):
        Validator(log.header).run(log.lines(lambda: waited.append(1)))
    assert not waited
