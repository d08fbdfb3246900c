"""kvspec export: tests of releases between the oldest and the newest, and of other ways to run one."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from ci.export import unit_test as export
from ci.export.assertions import NotExportable
from impl.adapter import UnusableImplementation
from impl.process import run_test
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases.catalogue import ALIKE, TABLE
from stateful_tests.lockstep import systems as registry
from stateful_tests.tests.export.exports import ALIKE as RAN_ALIKE
from stateful_tests.tests.export.exports import Mends, asserted_in, mended, run_alike
from stateful_tests.traces.files import load

RELEASES = Path(__file__).parents[3] / "fixtures" / "releases"
NEW = RELEASES / "sglang-0.5.11"
OVERSHOOT = RELEASES / "sglang-0.5.10" / "overshoot_stays_after_a_finish.json"
# The faults of a release that has no other fixtures here, and what the test of each asserts.
FAULTS = {
    "0.5.18": {
        "a_free_that_waits_takes_the_slots_of_a_recovered_tombstone":
            "self.assertEqual(swa.tolist(), swa_slots(server, full).tolist(), path)",
        "a_prompt_that_is_swept_too_far_has_two_owners":
            "self.assertEqual(owned & pages_of(server, slots_in_tree(server.cache)), set())",
    },
    "0.5.13+unified": {
        "a_leaf_split_at_a_window_frees_slots_that_are_read":
            "self.assertEqual(h1.prefix_indices.tolist(),"
            " tree_slots(server.cache, [*range(90000000, 90000002)]))",
    },
}  # fmt: skip
MENDS: Mends = {
    "0.5.13": {
        "mem_cache/unified_cache_components/swa_component.py": [(
            "        if not is_tombstone:\n            return prefix_len\n\n        swa_evicted_seqlen",
            "        if not is_tombstone or node.component_data[BASE_COMPONENT_TYPE].lock_ref:\n"
            "            return prefix_len\n\n        swa_evicted_seqlen",
        )],
    },
    "0.5.18": {
        "mem_cache/allocator/swa.py": [(
            "        if not self.is_not_in_free_group:\n"
            "            self.swa_free_group.append(self._copy_for_free_group(free_index))\n"
            "            return\n",
            "",
        )],
        "mem_cache/common.py": [(
            "pre_len - max(sliding_window_size, page_size)\n",
            "pre_len - ceil_align(max(sliding_window_size, page_size), page_size)\n",
        )],
    },
}  # fmt: skip


def driven(implementation: str) -> SGLangSystem:
    """A release that notes its calls; skips where it cannot be had."""
    try:
        system = registry.resolve(f"sglang=={implementation}", calls=True)
    except UnusableImplementation as error:
        pytest.skip(str(error))
    assert isinstance(system, SGLangSystem)
    return system


def test_they_fail_where_the_fault_is_and_pass_where_it_is_mended(tmp_path):
    """And where the driver has come to, the test comes to; also under overlap."""
    runs: list[run_test.Run] = []
    wanted = []  # exit status, and random runs
    for implementation in (*FAULTS, "0.5.20+overlap"):
        system, faults = driven(implementation), FAULTS.get(implementation, {})
        (folder := tmp_path / implementation).mkdir()
        alike = [run_alike(system, number, folder) for number in (1, 9)]
        assert any("late=" in file.read_text() for file in alike) is system.overlap
        files = []
        if faults:
            fixed = export.target(str(mended(system.release, folder / "checkout", MENDS)))
            for name, asserted in faults.items():
                trace = load(RELEASES / f"sglang-{implementation}" / f"{name}.json")
                text = export.unit_test(trace, f"{name}.json", system, fixed)
                assert (asserted_in(text), max(map(len, text.splitlines())) <= 110) == ([asserted], True)
                files.append(folder / f"{name}.py")
                files[-1].write_text(text)
            runs.append((fixed.root, fixed.version, files))
            wanted.append((0, 0))
        runs.append((system.root, system.release, [*files, *alike]))
        wanted.append((run_test.FAILS, len(alike)))
        system.close()
    for (code, said), want in zip(run_test.outcomes(*runs), wanted, strict=True):
        assert (code, said.count(RAN_ALIKE) // 2) == want, said


def test_with_the_core_in_rust(tmp_path):
    """What needs its nodes is refused."""
    system = driven("0.5.23+rust")
    files = [run_alike(system, number, tmp_path) for number in (0, 10)]
    twice = load(NEW / "a_turn_retracted_twice_loses_its_session.json")
    twice = replace(twice, clause="TREE-6", geometry=replace(twice.geometry, tree=True))
    with pytest.raises(NotExportable, match="TREE-6: the tree's core in Rust hands out no nodes"):
        export.unit_test(twice, "x", system)
    system.close()
    ((code, said),) = run_test.outcomes((system.root, system.release, files))
    assert (code, said.count(RAN_ALIKE) // 2) == (run_test.FAILS, len(files)), said


def test_what_stands_in_no_one_file_is_refused():
    """Before anything runs."""
    assert [version for alike in ALIKE for version in alike] == list(TABLE)
    for alike, others in itertools.pairwise(ALIKE):
        newer = export.ReleaseTarget(others[0], others[0], Path())
        with pytest.raises(NotExportable, match=f"no one test runs on {alike[-1]} and {others[0]}: too many"):
            export.unit_test(load(OVERSHOOT), "x", driven(alike[-1]), newer)
