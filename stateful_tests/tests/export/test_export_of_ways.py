"""Exported tests of releases between the oldest and the newest, and of other ways to run one."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from ci.export import unit_test as export
from ci.export.recorded_run import NotExportable
from impl.adapter import UnusableImplementation
from impl.process import run_test
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases.catalogue import ALIKE as SETS
from impl.sglang.releases.catalogue import TABLE
from stateful_tests.lockstep import system_names as registry
from stateful_tests.tests.support.night import at_night
from stateful_tests.tests.export.exports import ALIKE, assertions_in, run_alike, with_fixes
from stateful_tests.traces.trace_files import load
from stateful_tests.tests.export.test_export import FAULTS, FIXTURES, NEW, OLD, OVERSHOOT, run_alike_all


def release_with_calls(implementation: str) -> SGLangSystem:
    """Return a release that notes its calls; skips where it is unavailable."""
    try:
        system = registry.resolve(f"sglang=={implementation}", calls=True)
    except UnusableImplementation as error:
        pytest.skip(str(error))
    assert isinstance(system, SGLangSystem)
    return system


@at_night
def test_exports_of_intermediate_releases_and_ways_fail_and_pass(tmp_path):
    """And where the driver has come to, the test comes to; also under overlap."""
    runs: list[run_test.Run] = []
    wanted = []  # exit status, and random runs
    for implementation in (*FAULTS, "0.5.20+overlap"):
        system = release_with_calls(implementation)
        faults = FAULTS.get(implementation, {})
        folder = tmp_path / implementation
        folder.mkdir()
        alike = run_alike_all(system, (14, 67, 86), folder)
        assert any("late=" in file.read_text() for file in alike) is system.overlap, implementation
        files = []
        if faults:
            fixed = export.target(str(with_fixes(system.release, folder / "checkout")))
            for name, asserted in faults.items():
                trace = load(FIXTURES / "releases" / f"sglang-{implementation}" / f"{name}.json")
                text = export.unit_test(trace, f"{name}.json", system, fixed)
                assert (assertions_in(text), max(map(len, text.splitlines())) <= 110) == (
                    [asserted],
                    True,
                )
                files.append(folder / f"{name}.py")
                files[-1].write_text(text)
            runs.append((fixed.root, fixed.version, files))
            wanted.append((0, 0))
        runs.append((system.root, system.release, [*files, *alike]))
        wanted.append((run_test.FAILS, len(alike)))
        system.close()
    for (code, output), want in zip(run_test.outcomes(*runs), wanted, strict=True):
        assert (code, output.count(ALIKE) // 2) == want, output


def test_a_crash_is_a_call_that_must_not_raise(tmp_path):
    """And a node of bigrams is known by its tokens, with the one that follows."""
    folder = FIXTURES / "releases" / "sglang-0.5.22"
    of_bigrams = "an_insert_of_bigrams_frees_a_page_that_the_tree_keeps"
    crash = "a_shorter_answer_to_the_same_prompt_fails_an_assertion"
    system = release_with_calls("0.5.22")
    fixed = export.target("0.5.23")
    files = []
    for name in (of_bigrams, crash):
        text = export.unit_test(load(folder / f"{name}.json"), f"{name}.json", system, fixed)
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(text)
    raised = (
        "    hand_in(server, h1)",
        "except Exception as error:",
        '    self.fail(f"it raises {error!r}")',
    )
    assert "\n".join(" " * 8 + line for line in ("try:", *raised)) in text
    runs = [
        (where.root, version, files) for where, version in ((system, "0.5.22"), (fixed, "0.5.23"))
    ]
    (code, output), (passes, _) = run_test.outcomes(*runs)
    assert (code, output.count("FAIL: "), passes) == (run_test.FAILS, 2, 0)
    system.close()


def test_exports_run_on_the_core_in_rust(tmp_path):
    """A trace that needs its nodes is refused."""
    system = release_with_calls("0.5.23+rust")
    files = [run_alike(system, number, tmp_path) for number in (0, 10)]
    twice = load(NEW / "a_turn_retracted_twice_loses_its_session.json")
    twice = replace(twice, clause="TREE-6", geometry=replace(twice.geometry, tree=True))
    with pytest.raises(NotExportable, match="TREE-6: the tree's core in Rust hands out no nodes"):
        export.unit_test(twice, "x", system)
    system.close()
    ((code, output),) = run_test.outcomes((system.root, system.release, files))
    assert (code, output.count(ALIKE) // 2) == (run_test.FAILS, len(files)), output


@at_night
def test_an_older_core_in_rust_tells_no_slots():
    trace = load(OLD / "a_finish_caches_overshoot.json")
    system = release_with_calls("0.5.20+rust")
    with pytest.raises(NotExportable, match="TREE-15: the tree's core in Rust hands out no nodes"):
        export.unit_test(trace, "x", system)
    system.close()


def test_releases_with_too_many_differences_are_refused():
    """Before anything runs."""
    assert [version for alike in SETS for version in alike] == list(TABLE)
    for alike in SETS:
        assert all(TABLE[version].renamed == TABLE[alike[0]].renamed for version in alike), alike
    for alike, others in itertools.pairwise(SETS):
        newer = export.ReleaseTarget(others[0], others[0], Path())
        with pytest.raises(
            NotExportable, match=f"no one test runs on {alike[-1]} and {others[0]}: too many"
        ):
            export.unit_test(load(OVERSHOOT), "x", release_with_calls(alike[-1]), newer)
