"""Releases of SGLang with their host tier: what drives them, what they conform to, what cannot be driven."""

import json
from dataclasses import replace

import pytest

from ci.report import data as report
from ci.explain.tiers import facts_at
from ci.report import page
from impl.adapter import UnusableImplementation
from impl.engines import driven_in
from impl.sglang.tiers import api
from impl.sglang.tiers.system import TierSystem
from reference.blocks.config import engine_preset
from reference.commands import Done, Mode, Reason, Refused
from reference.failures import AtSlot
from reference.geometry import GeometryError, preset
from reference.kinds import TIERS
from reference.tiers.commands import Fetch
from reference.tiers.facts import TierRequestState
from reference.tiers.config import TIER_PRESETS, TierConfig, tier_preset
from stateful_tests.check import driving, tiers
from impl.choices import RandomChoices
from stateful_tests.generate.tier_commands import propose_tier_command
from stateful_tests.generate.tier_profile import draw_tier_profile
from stateful_tests.lockstep.kinds import check_fits
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.results import Trace
from stateful_tests.lockstep.systems import resolve
from stateful_tests.lockstep.tiers import TierLockstep
from stateful_tests.shrink.minimise import minimise
from stateful_tests.tests.support.forked_workers import printed_by
from stateful_tests.tests.support.planted_faults import planted_faults
from stateful_tests.traces.files import TraceError, dump, loads
from stateful_tests.traces.notation import parse

NEWEST = "0.5.23"
# A node that was demoted is loaded back, read, split while its load waits to be acknowledged.
ROUND = """
insert h1 a12; send; complete; poll; evict full 12; load h2 a12; insert h2 a12b2; insert h3 a5c2; complete;
poll; unlock h2; match h4 a4; unlock h4; reset_cache"""


def commands(text):
    return tuple(parse(line, TIERS) for line in text.split(";"))


@pytest.fixture(scope="module")
def newest():
    system = TierSystem(NEWEST)
    yield system
    system.close()


@pytest.fixture(scope="module")
def in_rust():
    system = TierSystem(NEWEST, core="rust")
    yield system
    system.close()


def test_the_newest_release_conforms(newest):
    """A run of each kind of sizes, of every other with sizes that no preset has; but for the sessions of a
    server that only decodes, whose faults are known."""
    plan = tiers.plan("smoke", examples=1, steps=20)
    for at, name in enumerate(TIER_PRESETS):
        config, example = driving.unfitted(tiers.TIERED, name, Mode.FAITHFUL), at % 2 * 3
        driven = driving.drive(newest, plan, driving.RunBatch(config, range(example, example + 1)))
        found = driven.runs[0][1]
        assert all(
            "session" in seen.failure.expected for seen, _ in found if name.startswith("decode")
        )
        assert not found or name.startswith("decode")


def test_a_round_trip_through_the_host_is_told_as_it_goes(newest):
    run = replay(newest, Trace(tier_preset("tier-window"), Mode.FAITHFUL, commands(ROUND)))
    assert run.violation is None
    told = [line for row in run.rows for line in row.tree]
    parts = "waits for a store", "store 1 of node 1, ", "is acknowledged", "h2 reads [0, 12)"
    for part in parts:
        assert any(part in line for line in told), (part, told)
    html = page.page(report.replay_data("t.json", run) | {"replay": "kvspec replay t.json"}, run)
    parts = (
        '<span class="tag o1">node 1</span> under the root',
        "host full",
        "(completed), device:host full",
    )
    for part in parts:
        assert part in html, part


def told_by(system, name, lines):
    """What a system tells after each command, however it numbers nodes; locks of full KV alone."""
    system.reset(sizes := tier_preset(name))
    for command in commands(lines):
        outcome, facts, texts = system.apply(command), system.view(), {0: ()}
        found = []
        for node in facts.nodes:
            texts[node.node] = (*texts[node.parent], *node.stamps)
            hashed = node.hashed if sizes.storage else None
            found.append((texts[node.node], node.device, node.host, node.locks["full"], hashed))
        found.sort(key=lambda each: each[0])
        yield outcome, found, facts._replace(nodes=(), transfers=(), records=(), users=())


@pytest.mark.parametrize("name", [
    "tier-window", "tier-window-back", "tier-names", "tier-bigram", "tier-state", "tier-state-window",
    "storage-window", "storage-names",
])  # fmt: skip
def test_the_core_in_rust_tells_what_the_one_in_python_has(newest, in_rust, name):
    lines = STORED if name.startswith("storage") else ROUND
    for was, now in zip(told_by(newest, name, lines), told_by(in_rust, name, lines), strict=True):
        assert was == now


def test_a_core_in_rust_conforms(in_rust):
    test_the_newest_release_conforms(in_rust)


STORED = """
insert h1 a4; poll; complete; poll; backup; backup; backup; poll; reset_cache; prefetch h2 a4b1; query; query;
poll; fetch; fetch; poll"""


def test_pages_go_to_a_storage_and_come_back(newest):
    """The request is admitted with what has been read so far; the thread frees the rest when it is over."""
    lines = commands(STORED + "; load h2 a4b1; insert h2 a4b1; fetch; poll")
    run = replay(newest, Trace(tier_preset("storage"), Mode.FAITHFUL, lines))
    assert run.violation is None
    told = [line for row in run.rows for line in row.tree]
    parts = (
        "backup 3: writes, host full 0-3, the backend still moves host full 2-3",
        "host full 2 is stored under hash 3: a1",
        "backup 3 is over",
        "prefetch 4 of h2: to ask",
        "prefetch 4 of h2: reads, host full 0-3, the backend still moves host full 0-1",
        "node 2 under the root: a2 at 0; ",
        "h2 reads [0, 2)",
        "prefetch 4 of h2 is over",
    )
    for part in parts:
        assert any(part in line for line in told), (part, told)
    html = page.page(report.replay_data("t.json", run) | {"replay": "kvspec replay t.json"}, run)
    assert "prefetch 4 of h2 (reads), host full 0, full 1, full 2, full 3" in html


@pytest.mark.parametrize("name", ["storage", "storage-back", "storage-window", "storage-names"])
def test_random_runs_take_pages_back_from_a_storage(newest, name):
    source = RandomChoices("a storage")
    profile = replace(draw_tier_profile(source), cycle=120)
    run, fetched = TierLockstep(newest, tier_preset(name)), 0
    for _ in range(120):
        command = propose_tier_command(run.beside, run.facts, source, profile)
        fetched += isinstance(run.do(command), Done) and isinstance(command, Fetch)
        assert run.violation is None
    assert fetched >= 3


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("prefetch h1 a2; prefetch h1 a2", Reason.REQUEST_EXISTS),
        ("prefetch h1 a2; insert h1 a2", Reason.WRONG_PHASE),
        ("prefetch h1 a2; load h1 a3", Reason.WRONG_PHASE),
        ("prefetch h1 a2; reset_cache", Reason.NOT_IDLE),
        ("prefetch h1 a17", Reason.ROW_TOO_SHORT),
        ("query", Reason.EMPTY),
        ("fetch", Reason.EMPTY),
        ("backup", Reason.EMPTY),
        ("insert h1 a2; load h2 a2; abort h2", Reason.UNKNOWN_REQUEST),
        ("insert h1 a2; poll; complete; poll; reset_cache", Reason.NOT_IDLE),
        (STORED.replace("storage", "wait") + "; abort h2; abort h2", Reason.UNKNOWN_REQUEST),
    ],
)
def test_what_does_not_apply_with_a_storage_is_refused(newest, lines, reason):
    run = replay(newest, Trace(tier_preset("storage"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


def test_no_more_loads_are_sent_than_batches_wait_for(newest):
    stored = "insert h1 a4; insert h2 b4; insert h3 c4; send; complete; poll; evict full 12"
    loads = "load h1 a3; send (load); load h2 b3; send (load); load h3 c3; send (load)"
    run = replay(newest, Trace(tier_preset("tier"), Mode.FAITHFUL, commands(f"{stored}; {loads}")))
    assert run.violation is None and run.rows[-1].outcome == Refused(Reason.UNFAITHFUL)
    assert run.rows[-3].outcome == Done()


def test_a_request_that_waits_for_all_of_its_pages_is_not_admitted_before(newest):
    lines = commands(STORED + "; load h2 a4b1")
    run = replay(newest, Trace(tier_preset("storage-wait"), Mode.FAITHFUL, lines))
    assert run.violation is None and run.rows[-1].outcome == Refused(Reason.WRONG_PHASE)


def test_without_a_storage_nobody_asks_one(newest):
    for line in ("prefetch h1 a2", "query", "fetch", "backup"):
        run = replay(newest, Trace(tier_preset("tier"), Mode.FAITHFUL, commands(line)))
        assert run.rows[-1].outcome == Refused(Reason.UNFAITHFUL)


def test_a_slot_says_what_the_storage_has_to_do_with_it(newest):
    run = replay(newest, Trace(tier_preset("storage"), Mode.FAITHFUL, commands(STORED)))
    said = [
        str(fact) for at in (0, 3) for fact in facts_at(AtSlot("full", at, True), run.history[-1])
    ]
    assert "prefetch 4 of h2" in said[0] and "has it" in said[0] and "writes it" in said[1]
    run = replay(
        newest, Trace(tier_preset("storage"), Mode.FAITHFUL, commands(STORED + "; abort h2"))
    )
    assert "waits to be freed" in str(facts_at(AtSlot("full", 0, True), run.history[-1]))


def test_a_release_whose_thread_frees_what_it_has_not_read_is_driven_without_a_storage():
    system = resolve("sglang==0.5.19+hicache")
    with pytest.raises(
        UnusableImplementation, match="is not driven with a storage behind the host"
    ):
        check_fits(system, tier_preset("storage"))
    plan = tiers.for_system(tiers.plan("smoke"), system)
    assert not any(name.startswith("storage") for name in plan.presets) and "tier" in plan.presets


RECEIVED = "await h1 a6; greet h1; poll; arrive h1; poll"


def test_a_prompt_is_received_decoded_retracted_and_given_up(newest):
    lines = RECEIVED + "; decode h1; retract h1; poll; decode h1; last_token h1"
    lines += "; await h2 a6b1; greet h2; poll; abort h2; poll; arrive h2; poll"
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None
    told = [line for row in run.rows for line in row.tree]
    parts = (
        "h1: waits",
        "h1: receives, row",
        "the prefill server still writes device full 2-7",
        "h1: runs, row",
        "h1 reads [0, 6)",
        "h1 reads [0, 7)",
        "h1: retracted",
        "h1 is gone",
        "h2: held, row",
        "h2 is gone",
    )
    for part in parts:
        assert any(part in line for line in told), (part, told)
    html = page.page(report.replay_data("t.json", run) | {"replay": "kvspec replay t.json"}, run)
    assert "h1 (receives), device full 2" in html and "slots are still to be written" in html
    said = str(facts_at(AtSlot("full", 2, False), run.history[3]))
    assert (
        run.history[3].facts.requests[0].writing
        and "h1" in said
        and "the prefill server of h1" in said
    )


@pytest.mark.parametrize(("lines", "reason"), [
    ("await h1 a2; await h1 a2", Reason.REQUEST_EXISTS), ("await h1 a29", Reason.ROW_TOO_SHORT),
    ("greet h1", Reason.UNKNOWN_REQUEST), ("await h1 a2; greet h1; greet h1", Reason.WRONG_PHASE),
    ("await h1 a2; arrive h1", Reason.EMPTY), ("expire", Reason.EMPTY),
    ("last_token h1", Reason.UNKNOWN_REQUEST),
    ("await h1 a2; last_token h1", Reason.WRONG_PHASE),
    ("await h1 a2; fail_peer h1; fail_peer h1", Reason.WRONG_PHASE),
    (RECEIVED + "; decode h1, h1", Reason.DUPLICATE_LANE), (RECEIVED + "; fail_peer h1", Reason.WRONG_PHASE),
    (RECEIVED + "; decode h1; decode h1; decode h1; decode h1", Reason.UNFAITHFUL),
    ("abort h1", Reason.UNKNOWN_REQUEST),
    ("insert h1 a2", Reason.UNFAITHFUL),
])  # fmt: skip
def test_what_does_not_apply_on_a_server_that_only_decodes_is_refused(newest, lines, reason):
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


def test_slots_that_are_held_are_freed_when_nobody_will_write_them(newest):
    lines = "await h1 a4; greet h1; poll; fail_peer h1; poll; expire; poll"
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    states = [[request.state for request in moment.facts.requests] for moment in run.history[-5:]]
    assert run.violation is None and states == [["receives"], ["fails"], ["held"], ["held"], []]


SAID = RECEIVED.replace("a6", "a6 (session)") + "; decode h1; last_token h1"


def test_a_session_keeps_what_a_turn_leaves_until_it_is_closed(newest):
    lines = SAID + "; close h1; await h1 a2; close h2; await h3 b2 (session); abort h3; close h3"
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    kept = [[(r.name, r.state) for r in moment.facts.requests] for moment in run.history[-7:]]
    assert run.violation is None and kept[:2] == [[("session h1", TierRequestState.IDLE)], []]
    assert [row.outcome for row in run.rows[9:10]] == [Refused(Reason.UNKNOWN_SESSION)]


@pytest.mark.parametrize("lines, reason", [
    (SAID + "; await h1 b2", Reason.REQUEST_EXISTS),
    (SAID + "; await h1 b40 (session)", Reason.ROW_TOO_SHORT),
    (RECEIVED.replace("a6", "a6 (session)") + "; close h1; close h1", Reason.SESSION_CLOSING),
])  # fmt: skip
def test_what_does_not_apply_to_a_session_of_a_decode_server_is_refused(newest, lines, reason):
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


SENT = "await h1 a7; greet h1; poll; extend h1 +4; extend h1 +9"


def test_a_prompt_is_computed_in_chunks_sent_and_given_up(newest):
    lines = SENT + "; arrive h1; poll; await h2 a4b1; greet h2 prefix 2; poll; extend h2 +9; abort h2; poll"
    run = replay(newest, Trace(tier_preset("prefill"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None
    told = [line for row in run.rows for line in row.tree]
    parts = (
        "h1: greeted",
        "h1: queued, row 0 of metadata",
        "h1: computes, row ",
        "device full 2-5 is handed in as [0, 4) of h1",
        "h1: sends, row ",
        "is handed in as [4, 7) of h1",
        "what was handed in of h1 is read, or given up",
        "h1 is gone",
        "h2 reads [0, 4)",
        "device full 4-5 is handed in as [2, 4) of h2",
        "h2: fails, row ",
        "h2 is gone",
    )
    for part in parts:
        assert any(part in line for line in told), (part, told)
    assert any(
        "is handed in as [0, 4)" in line for line in run.rows[4].tree
    )  # before the next chunk
    html = page.page(report.replay_data("t.json", run) | {"replay": "kvspec replay t.json"}, run)
    assert "to be read for h1, from position 4 on" in html and "row 0 of metadata" in html
    said = str(facts_at(AtSlot("full", 2, False), run.history[5]))
    assert "the decode server of h1" in said and "reads it" in said


@pytest.mark.parametrize(("preset", "lines", "states"), [
    ("prefill", "await h1 a7; greet h1; poll; extend h1 +4; abort h1; poll", ["computes", None]),
    ("prefill", "await h1 a4; greet h1; poll; fail_peer h1; poll", ["fails", None]),
    ("prefill-overlap", SENT + "; abort h1; poll", ["launched", None]),
    ("prefill-overlap", SENT + "; poll; fail_peer h1; poll", ["fails", None]),
    ("prefill-early", SENT.replace("greet h1; ", "") + "; poll; greet h1; poll", ["parked", "sends"]),
    ("prefill-early", SENT.replace("greet h1; ", "") + "; poll; fail_peer h1; poll", ["fails", None]),
    ("prefill-plain", SENT + "; poll; arrive h1; poll", ["sends", None]),
    ("prefill-window", SENT + "; poll; arrive h1; poll", ["sends", None]),
])  # fmt: skip
def test_a_prompt_comes_to_an_end_on_a_server_that_only_prefills(newest, preset, lines, states):
    """Its state before the last command, and after."""
    run = replay(newest, Trace(tier_preset(preset), Mode.FAITHFUL, commands(lines)))
    found = [[*moment.facts.requests, None][0] for moment in run.history[-2:]]
    assert run.violation is None
    assert [request and request.state for request in found] == states


def test_a_prompt_that_yields_is_computed_again(newest):
    """Only one row is there, and its request waits for a decode server that does not answer."""
    sizes = replace(tier_preset("prefill"), rows=1, attempts=1)
    lines = "await h1 a4; poll; extend h1 +4; await h2 b4; greet h2; poll; extend h2 +4"
    run = replay(newest, Trace(sizes, Mode.FAITHFUL, commands(lines)))
    states = [[request.state for request in moment.facts.requests] for moment in run.history[-3:]]
    assert run.violation is None and states[0] == ["parked", "greeted"]
    assert states[1:] == [["waits", "queued"], ["waits", "sends"]]


@pytest.mark.parametrize(("lines", "reason"), [
    ("await h1 a2; await h1 a2", Reason.REQUEST_EXISTS), ("await h1 a26", Reason.ROW_TOO_SHORT),
    ("await h1 a2 (session)", Reason.UNFAITHFUL), ("greet h1", Reason.UNKNOWN_REQUEST),
    ("await h1 a4; greet h1 prefix 1", Reason.BAD_LENGTH),
    ("await h1 a4; greet h1 prefix 4", Reason.BAD_LENGTH),
    ("await h1 a2; greet h1; greet h1", Reason.WRONG_PHASE), ("await h1 a2; arrive h1", Reason.EMPTY),
    ("await h1 a2; extend h1 +1", Reason.WRONG_PHASE), ("extend h1 +1", Reason.UNKNOWN_REQUEST),
    ("await h1 a2; fail_peer h1; fail_peer h1", Reason.WRONG_PHASE),
    ("await h1 a4; greet h1; await h2 b4; greet h2; poll; extend h1 +2; extend h2 +2", Reason.WRONG_PHASE),
    ("await h1 a4; greet h1; poll; extend h1 +2, h1 +2", Reason.DUPLICATE_LANE),
    ("await h1 a4; abort h1; abort h1", Reason.WRONG_PHASE), ("abort h1", Reason.UNKNOWN_REQUEST),
    ("decode h1", Reason.UNFAITHFUL), ("insert h1 a2", Reason.UNFAITHFUL),
])  # fmt: skip
def test_what_does_not_apply_on_a_server_that_only_prefills_is_refused(newest, lines, reason):
    run = replay(newest, Trace(tier_preset("prefill"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


def test_a_prefix_is_no_part_of_an_answer_to_a_decode_server(newest):
    lines = commands("await h1 a4; greet h1 prefix 2")
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, lines))
    assert run.rows[-1].outcome == Refused(Reason.UNFAITHFUL)


def test_a_release_whose_prefill_server_is_not_driven_says_so():
    with pytest.raises(UnusableImplementation, match="is not driven as a server that only prefills"):
        check_fits(resolve("sglang==0.5.22+hicache"), tier_preset("prefill"))


def test_a_release_whose_queues_are_not_driven_says_so():
    with pytest.raises(UnusableImplementation, match="is not driven as a server that only decodes"):
        check_fits(resolve("sglang==0.5.21+hicache"), tier_preset("decode"))


# Locks on the host, which the core in Rust does not tell.
NOT_TOLD = {
    "load-keeps-its-host-lock", "backup-without-a-lock", "backup-keeps-its-lock", "prefetch-keeps-its-lock",
}  # fmt: skip


@pytest.mark.parametrize("core, silent", [("", set()), ("rust", NOT_TOLD)])
def test_the_faults_are_seen_first_by_their_clauses(core, silent):
    suite, other = ("tiers+rust", "unified_cache/") if core else ("tiers", "rust_tree_core/")
    seen = json.loads(printed_by("stateful_tests.tests.support.fault_runs", suite, "--replay"))
    assert {name: each["with"][:1] for name, each in seen.items()} == {
        name: [] if name in silent else [fault.clause]
        for name, fault in planted_faults("tiers/faults.toml").items()
        if other not in fault.file
    }
    assert [name for name, each in seen.items() if each["without"]] == []


def test_a_release_before_the_copy_engine_is_not_driven():
    with pytest.raises(UnusableImplementation, match=r"0\.5\.17\+hicache: driven from 0\.5\.18 on"):
        resolve("sglang==0.5.17+hicache")
    with pytest.raises(UnusableImplementation, match=r"19\+rust\+hicache: driven from 0\.5\.20 on"):
        resolve("sglang==0.5.19+rust+hicache")


@pytest.mark.parametrize("name", [
    "sglang==0.5.23+hicache+overlap", "sglang==0.5.23+hicache+rust", "sglang==0.5.23+rust+overlap+hicache",
])  # fmt: skip
def test_nothing_else_goes_with_a_host_tier(name):
    with pytest.raises(UnusableImplementation, match=r"or \+hicache"):
        resolve(name)


@pytest.mark.parametrize("version", driven_in("sglang", ("hicache",)))
def test_a_release_has_what_the_table_of_host_tiers_says(release, version):
    """So that nobody has to look when a release is driven."""
    system = release(f"{version}+hicache")
    api.require(system.root, system.name, version)


def test_a_checkout_that_lacks_an_api_is_named(tmp_path, newest):
    file = tmp_path / "sglang/srt/mem_cache/l2_transfer.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "class L2TransferEngine:\n    def __init__(self, io_backend): ...\n", encoding="utf-8"
    )
    missing = r"there is no TransferCompletion.*there is no such file"
    with pytest.raises(UnusableImplementation, match=missing):
        api.require(tmp_path, "sglang@checkout+hicache", NEWEST)


def test_traces_of_other_kinds_do_not_fit(newest):
    for sizes in (engine_preset("full"), replace(preset("page1"), tree=True)):
        with pytest.raises(UnusableImplementation):
            check_fits(newest, sizes)
    with pytest.raises(UnusableImplementation, match=r"such as --impl sglang==[0-9.]+\+hicache"):
        check_fits(resolve("reference"), tier_preset("tier"))


def test_a_trace_is_written_and_read():
    trace = Trace(tier_preset("tier-page4-back"), Mode.FAITHFUL, commands(ROUND))
    assert loads(dump(trace).encode(), "trace") == trace
    wrong = dump(trace).replace('"policy": "write_back"', '"policy": "never"')
    with pytest.raises(TraceError, match=r"\$\.config\.policy: must be one of 'write_through'"):
        loads(wrong.encode(), "trace")


@pytest.mark.parametrize(("field", "value"), [
    ("page_size", 0), ("window", 0), ("full_pages", 0), ("swa_pages", 5000), ("host_pages", 0),
    ("host_swa_pages", 0), ("width", 0), ("policy", "never"), ("storage", "never"), ("decode", "never"),
    ("rows", 2),
])  # fmt: skip
def test_sizes_that_cannot_be_are_named(field, value):
    with pytest.raises(GeometryError) as error:
        replace(tier_preset("tier-window"), **{field: value})
    assert error.value.field == field


def test_a_server_that_only_decodes_has_rows_and_no_storage():
    for changes, field in (
        ({"rows": 0}, "rows"),
        ({"storage": "best_effort"}, "storage"),
        ({"host_pages": 3}, "host_pages"),
        ({"prefill": "radix"}, "prefill"),
    ):
        with pytest.raises(GeometryError) as error:
            replace(tier_preset("decode"), **changes)
        assert error.value.field == field


def test_a_server_that_only_prefills_has_rows_and_no_host_tier():
    for changes, field in (
        ({"rows": 0}, "rows"),
        ({"storage": "best_effort"}, "storage"),
        ({"host_pages": 3}, "host_pages"),
        ({"attempts": 9}, "attempts"),
        ({"attempts": -1}, "attempts"),
        ({"prefill": "never"}, "prefill"),
        ({"states": 2, "host_states": 2, "page_size": 1}, "states"),
    ):
        with pytest.raises(GeometryError) as error:
            replace(tier_preset("prefill"), **changes)
        assert error.value.field == field
    for changes, field in (({"overlap": True}, "overlap"), ({"attempts": 1}, "attempts")):
        with pytest.raises(GeometryError) as error:
            replace(tier_preset("tier"), **changes)
        assert error.value.field == field


def test_a_tree_without_a_window_has_no_swa_pool():
    for pages, field in (((3, 0), "swa_pages"), ((0, 3), "host_swa_pages")):
        with pytest.raises(GeometryError) as error:
            TierConfig(1, None, 4, pages[0], 4, pages[1], 8)
        assert error.value.field == field


def test_a_lock_lost_at_a_split_shrinks_to_its_cause():
    """sglang#38138, in 0.5.18."""
    system = TierSystem("0.5.18")
    lines = "insert h1 a3; complete; poll; evict full 0 swa 1; load h1 a2; insert h1 a2"
    lines += "; insert h2 c2; insert h3 a1"
    trace = Trace(tier_preset("tier-window"), Mode.FAITHFUL, commands(lines))
    try:
        found = replay(system, trace).violation
        assert found is not None and found.clause == "HOST-3"
        smallest = minimise(system, trace, "HOST-3", budget=8)
    finally:
        system.close()
    assert len(smallest.commands) < len(trace.commands)
