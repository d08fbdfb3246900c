"""Releases of SGLang with their host tier: what drives them, what they conform to, what cannot be driven."""

import json
from dataclasses import replace

import pytest

from ci.report import report_data as report
from ci.report.pages import trace_page
from impl.adapter import UnusableImplementation
from impl.engines import driven_releases
from impl.sglang.tiers import api
from impl.sglang.tiers.system import TierSystem
from reference.blocks.presets import engine_preset
from reference.commands import Done, Mode, Reason, Refused
from reference.geometry import preset
from reference.tiers.config import TIER_PRESETS, tier_preset
from stateful_tests.check import run_driver, check_plans, run_batches
from stateful_tests.lockstep.driven_kinds import check_fits
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.shrink.minimise import minimise
from stateful_tests.tests.support.modules_run import output_of
from stateful_tests.tests.support.night import at_night
from stateful_tests.tests.support.planted_faults import planted_faults
from stateful_tests.tests.tiers.lines import NEWEST, ROUND, STORED, commands


@pytest.fixture(scope="module")
def in_rust():
    system = TierSystem(NEWEST, core="rust")
    yield system
    system.close()


def test_the_newest_release_conforms(newest):
    """A run of each kind of sizes, of every other with sizes that no preset has; but for the sessions of a
    server that only decodes, whose faults are known."""
    plan = check_plans.plan("smoke", examples=1, steps=20)
    for index, name in enumerate(TIER_PRESETS):
        config = run_batches.with_stated_sizes(check_plans.TIERED, name, Mode.FAITHFUL)
        example = index % 2 * 3
        driven = run_driver.drive(newest, plan, run_batches.RunBatch(config, range(example, example + 1)))
        result = driven.runs[0][1]
        assert all(
            "session" in seen.failure.expected for seen, _ in result if name.startswith("decode")
        )
        assert not result or name.startswith("decode")


def test_a_round_trip_through_the_host_is_told_as_it_goes(newest):
    run = replay(newest, Trace(tier_preset("tier-window"), Mode.FAITHFUL, commands(ROUND)))
    assert run.violation is None
    told = [line for row in run.rows for line in row.tree]
    parts = "waits for a store", "store 1 of node 1, ", "is acknowledged", "h2 reads [0, 12)"
    for part in parts:
        assert any(part in line for line in told), (part, told)
    html = trace_page.page(report.replay_data("t.json", run) | {"replay": "kvspec replay t.json"}, run)
    parts = (
        '<span class="tag o1">node 1</span> under the root',
        "host full",
        "(completed), device:host full",
    )
    for part in parts:
        assert part in html, part


def told_by(system, name, lines):
    """Yield what a system tells after each command, however it numbers nodes; locks of full KV
    alone."""
    sizes = tier_preset(name)
    system.reset(sizes)
    for command in commands(lines):
        outcome = system.apply(command)
        facts = system.view()
        texts = {0: ()}
        collected = []
        for node in facts.nodes:
            texts[node.node] = (*texts[node.parent], *node.stamps)
            hashed = node.hashed if sizes.storage else None
            collected.append((texts[node.node], node.device, node.host, node.locks["full"], hashed))
        collected.sort(key=lambda each: each[0])
        yield outcome, collected, facts._replace(nodes=(), transfers=(), records=(), users=())


@pytest.mark.parametrize("name", [
    "tier-window", "tier-window-back", "tier-names", "tier-bigram", "tier-state", "tier-state-window",
    "storage-window", "storage-names",
])  # fmt: skip
def test_the_core_in_rust_shows_what_the_core_in_python_has(newest, in_rust, name):
    lines = STORED if name.startswith("storage") else ROUND
    for was, now in zip(told_by(newest, name, lines), told_by(in_rust, name, lines), strict=True):
        assert was == now


def test_a_core_in_rust_conforms(in_rust):
    test_the_newest_release_conforms(in_rust)


def test_no_more_loads_are_sent_than_batches_wait_for(newest):
    stored = "insert h1 a4; insert h2 b4; insert h3 c4; send; complete; poll; evict full 12"
    loads = "load h1 a3; send (load); load h2 b3; send (load); load h3 c3; send (load)"
    run = replay(newest, Trace(tier_preset("tier"), Mode.FAITHFUL, commands(f"{stored}; {loads}")))
    assert run.violation is None and run.rows[-1].outcome == Refused(Reason.UNFAITHFUL)
    assert run.rows[-3].outcome == Done()


# Locks on the host, which the core in Rust does not tell.
NOT_TOLD = {
    "load-keeps-its-host-lock", "backup-without-a-lock", "backup-keeps-its-lock", "prefetch-keeps-its-lock",
}  # fmt: skip


@pytest.mark.parametrize(
    "core, silent", [("", set()), pytest.param("rust", NOT_TOLD, marks=at_night)]
)
def test_the_faults_are_seen_first_by_their_clauses(core, silent):
    if core:
        suite = "tiers+rust"
        other = "unified_cache/"
    else:
        suite = "tiers"
        other = "rust_tree_core/"
    seen_by = json.loads(output_of("stateful_tests.tests.support.fault_runs", suite, "--replay"))
    assert {name: each["with"][:1] for name, each in seen_by.items()} == {
        name: [] if name in silent else [fault.clause]
        for name, fault in planted_faults("tiers/faults.toml").items()
        if other not in fault.file
    }
    assert [name for name, each in seen_by.items() if each["without"]] == []


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


@pytest.mark.parametrize("version", driven_releases("sglang", ("hicache",)))
def test_a_release_has_the_facts_of_the_table_of_host_tiers(release, version):
    """So that nobody has to look when a release is driven."""
    system = release(f"{version}+hicache")
    api.require_tier_api(system.root, system.name, version)


def test_a_checkout_that_lacks_an_api_is_named(tmp_path, newest):
    file = tmp_path / "sglang/srt/mem_cache/l2_transfer.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "class L2TransferEngine:\n    def __init__(self, io_backend): ...\n", encoding="utf-8"
    )
    missing = r"there is no TransferCompletion.*there is no such file"
    with pytest.raises(UnusableImplementation, match=missing):
        api.require_tier_api(tmp_path, "sglang@checkout+hicache", NEWEST)


def test_traces_of_other_kinds_do_not_fit(newest):
    for sizes in (engine_preset("full"), replace(preset("page1"), tree=True)):
        with pytest.raises(UnusableImplementation):
            check_fits(newest, sizes)
    with pytest.raises(UnusableImplementation, match=r"such as --impl sglang==[0-9.]+\+hicache"):
        check_fits(resolve("reference"), tier_preset("tier"))


def test_a_lock_lost_at_a_split_shrinks_to_its_cause():
    """sglang#38138, in 0.5.18."""
    system = TierSystem("0.5.18")
    lines = "insert h1 a3; complete; poll; evict full 0 swa 1; load h1 a2; insert h1 a2"
    lines += "; insert h2 c2; insert h3 a1"
    trace = Trace(tier_preset("tier-window"), Mode.FAITHFUL, commands(lines))
    try:
        violation = replay(system, trace).violation
        assert violation is not None and violation.clause == "HOST-3"
        smallest = minimise(system, trace, "HOST-3", budget=8)
    finally:
        system.close()
    assert len(smallest.commands) < len(trace.commands)
