"""Traces of a tree with a host tier as tests of the release's own classes."""

import re
from dataclasses import replace

import pytest

from ci.export import unit_test as export
from ci.export.recorded_run import NotExportable
from impl.process import run_test
from impl.sglang.tiers.system import TierSystem
from reference.system_kinds import TIERS
from stateful_tests.tests.export.exports import assertions_in, root_of
from stateful_tests.tests.support.night import some_at_night
from stateful_tests.tests.support.planted_faults import checkout_with, planted_faults, trace_of
from stateful_tests.traces.trace_files import load
from stateful_tests.tests.export.test_export import FIXTURES

TIER_FAULTS = planted_faults("tiers/faults.toml")
VERSION = "0.5.23"
OTHER_KEYS = " of other keys"
HOOK = "impl.sglang.process.testing:import_tiered"
NODE = "server.cache, text), text"
# What the test of a planted fault asserts.
PLANTED = {
    "swa-host-lock-lost-at-a-split": "node.component_data[ComponentType.SWA].host_lock_ref, 1",
    "lost-host-free": 'len(owners(server, "swa", 0, host=True)), 1',
    "mark-stays": "node.write_through_pending_id",
    "mark-lost-at-a-split":
        "node.write_through_pending_id is not None, node.id in named_by_stores(server)",
    "store-without-a-lock": "node.component_data[ComponentType.FULL].value",
    "swa-is-not-moved": f'kv_of(server, node_at({NODE}, "swa", host=True), text',
    "acknowledges-the-newest": f'kv_of(server, node_at({NODE}, "full", host=True), text',
    "load-acknowledged-before-its-copy": f'kv_of(server, node_at({NODE}, "full", host=False), text',
    "load-back-of-the-wrong-nodes": f'kv_of(server, node_at({NODE}, "full", host=False), text',
    "load-acknowledged-before-its-copy of other keys":
        'kv_of(server, node_at(server.cache, text, extra_key="kvspec"), text[:-1], "full", host=False),'
        " text[:-1]",
    "load-without-a-lock": "node.component_data[ComponentType.FULL].lock_ref, 2",
}  # fmt: skip
KNOWN = {
    "0.5.18+hicache/an_acknowledged_store_takes_the_lock_of_a_request":
        "node.component_data[ComponentType.SWA].lock_ref, 1",
    "0.5.18+hicache/a_load_that_fails_hides_a_leaf_from_eviction": "",
    "0.5.18+hicache/a_split_loses_the_lock_on_swa_kv_of_the_host":
        "node.component_data[ComponentType.SWA].host_lock_ref, 1",
    "0.5.20+rust+hicache/a_prefill_of_pages_counts_on_swa_kv_that_is_never_evicted": "",
    "0.5.20+rust+hicache/swa_kv_that_comes_back_above_a_load_is_never_evicted":
        "server.allocator.swa_available_size() - before, 1",
    "0.5.22+hicache/an_insert_behind_a_window_frees_slots_that_the_tree_keeps":
        'len(owners(server, "full", 4, host=False)), 1',
}  # fmt: skip
DAILY = ("lost-host-free", "load-acknowledged-before-its-copy of other keys",
         "0.5.18+hicache/a_split_loses_the_lock_on_swa_kv_of_the_host",
         "0.5.20+rust+hicache/swa_kv_that_comes_back_above_a_load_is_never_evicted")  # fmt: skip


def of_other_keys(fault):
    """Its commands on texts in a namespace; of bigrams the same length needs a token more."""
    other = {"a": "b", "b": "a"}
    commands = re.sub(
        r"\b([ab])(\d+)", lambda text: f"{other[text[1]]}{int(text[2]) + 1}", fault.commands
    )
    trace = trace_of(TIERS, commands, fault.sizes)
    return replace(trace, geometry=replace(trace.geometry, bigram=True, namespaces=True))


def write_test(system, trace, name, folder):
    """The test's file, and what it asserts."""
    text = export.unit_test(trace, f"{name}.json", system)
    system.close()
    file = folder / f"test_{re.sub(r'[^a-z]+', '_', name)}.py"
    file.write_text(text, encoding="utf-8")
    return file, [re.sub(r"^self\.assert\w+\((.*)\)$", r"\1", line) for line in assertions_in(text)]


@pytest.mark.parametrize("at_night", some_at_night((False, True), bool))
def test_exported_tests_fail_with_planted_faults_and_pass_without(at_night, tmp_path):
    root = root_of(VERSION)
    runs = []
    for name in PLANTED:
        if (name in DAILY) == at_night:
            continue
        fault = TIER_FAULTS[name.removesuffix(OTHER_KEYS)]
        trace = of_other_keys(fault) if name.endswith(OTHER_KEYS) else fault.trace()
        faulty = checkout_with(root, tmp_path / name, fault)
        file, asserts = write_test(TierSystem(path=faulty, calls=True), trace, name, tmp_path)
        assert asserts == [PLANTED[name]], name
        runs += [(faulty, VERSION, [file]), (root, VERSION, [file])]
    ends = run_test.outcomes(*runs, hook=HOOK)
    assert [code for code, _ in ends] == [run_test.FAILS, 0] * (len(runs) // 2), ends


@pytest.mark.parametrize("at_night", some_at_night((False, True), bool))
def test_exported_tests_show_known_faults(at_night, tmp_path):
    runs = []
    for name in KNOWN:
        if (name in DAILY) == at_night:
            continue
        release = name.split("+")[0]
        core = "rust" if "+rust" in name else ""
        trace = load(FIXTURES / "releases" / f"sglang-{name}.json")
        root = root_of(release)
        file, asserts = write_test(TierSystem(release, core=core, calls=True), trace, name, tmp_path)
        assert "".join(asserts) == KNOWN[name], name
        runs.append((root, release, [file]))
    ends = run_test.outcomes(*runs, hook=HOOK)
    assert [code for code, _ in ends] == [run_test.FAILS] * len(runs), ends


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        ("0.5.20+hicache/a_slow_storage_ends_the_server", "a storage is no part"),
        (
            "0.5.22+hicache/a_received_prompt_has_two_owners",
            "a server that only decodes is no part",
        ),
    ],
)
def test_a_trace_without_a_test_says_why(trace, why):
    root_of(VERSION)
    trace = load(FIXTURES / "releases" / f"sglang-{trace}.json")
    with pytest.raises(NotExportable, match=why):
        export.unit_test(trace, "trace.json", TierSystem(VERSION, calls=True))
