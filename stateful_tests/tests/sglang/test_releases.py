"""What was found in real releases, replayed on them: the fixtures under fixtures/releases.

A folder is the first release that can be driven and has the fault. Skips, with the reason, where a release
can be neither found nor fetched.
"""

from dataclasses import replace

import pytest

from ci.explain import because
from reference.commands import Abort, Admit, Chunk, Draft, Extend, Mode, Open, SpecDecode, Submit
from reference.geometry import Geometry, preset
from stateful_tests.lockstep.known_faults import FOLDER, known_faults
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.release_faults import (
    BEGIN, DRIVEN, ENDS, NOT_YET, TRACES, UNIFIED, fault_shown, since,
)  # fmt: skip
from stateful_tests.traces.trace_files import load


@pytest.mark.parametrize(
    "path", [path for path, _ in (*TRACES, *UNIFIED)], ids=lambda path: path.stem
)
def test_torch_conforms(path):
    assert replay(resolve("torch"), load(path)).violation is None


@pytest.mark.parametrize(
    ("path", "fault", "version"),
    [
        pytest.param(path, fault, version, id=f"{version}/{path.stem}")
        for path, fault in TRACES
        for version in since(fault)
        if version in DRIVEN
    ],
)
def test_a_release_has_the_fault_until_it_is_fixed(path, fault, version, release):
    trace = load(path)
    run = replay(release(version), trace)
    clause_shown = fault.clause_shown(trace.clause, version)
    assert (run.violation and run.violation.clause) == clause_shown
    if clause_shown == trace.clause and fault.is_in(version):
        assert run.violation.step == len(trace.commands) - 1
        assert "; observed: " not in because(run).text, "told from the facts of the run"


@pytest.mark.parametrize(
    ("version", "value", "shows"), [("0.5.22", "0", False), ("0.5.17", "1", True)]
)
def test_a_setting_of_the_trace_is_that_of_the_release(version, value, shows, release):
    trace = load(FOLDER / "sglang-0.5.18" / "a_prompt_that_is_swept_too_far_has_two_owners.json")
    [name] = (n for n in release(version).capabilities.settings if "FREE_OUT_OF_WINDOW" in n)
    switched = replace(
        trace, geometry=replace(trace.geometry, settings=((name, value), ("PATH", "x")))
    )
    for played, fault in ((trace, not shows), (switched, shows), (trace, not shows)):
        is_shown = fault_shown(release(version), played) is not None
        assert is_shown is fault, played.geometry.settings


@pytest.mark.parametrize("name", ["0.5.13+overlap", "0.5.14", "0.5.18", "0.5.23", "0.5.23+overlap"])
def test_the_last_resort_is_taken_where_the_next_verify_round_does_not_fit(name, release):
    rounds = SpecDecode((Draft("a", 2, 2),)), Abort("a")
    turn = Open("s"), Submit("a", "s", 1), Admit("a"), Extend((Chunk("a", 1),)), *rounds
    for pages, expected in ((4, ("SES-2", 5)), (9, None)):
        sizes = Geometry(1, None, pages, 0, 2, 12)
        assert fault_shown(release(name), Trace(sizes, Mode.FAITHFUL, turn)) == expected, f"{pages} pages"


def test_the_cause_of_a_page_with_two_owners_is_reported(release):
    trace = load(FOLDER / "sglang-0.5.18" / "a_prompt_that_is_swept_too_far_has_two_owners.json")
    why = because(replay(release("0.5.18"), trace))
    assert why.text == (
        "full page 1 has 2 owners: r1 has it at [0, 3) since command 2 (extend r1 +8) and the tree has it at"
        " [0, 3) of #1:3 since command 2; R (cache_protected_len) of r1 is 0 since command 1 (admit r1);"
        " expected: full page 1 belongs to r1 alone."
    )


# -- faults that a check passes over -----------------------------------------------------------------


@pytest.mark.parametrize("fault", [fault for fault in known_faults().values() if fault.passed_over])
def test_only_a_trace_that_names_the_clause_is_checked_for_it(fault, release):
    for path in fault.traces:
        trace = load(FOLDER / path)
        system = release(path.partition("/")[0].removeprefix("sglang-"))
        assert system.capabilities.known.keys() >= {trace.clause}, path
        assert replay(system, replace(trace, clause=None)).violation is None, path


class Known:
    """A system that is known to violate a clause, and splits nodes as it likes."""

    def __init__(self, system, clause):
        self._system = system
        self.capabilities = replace(
            system.capabilities, tree_policy_is_free=True, known={clause: "#1, some_trace.json"}
        )

    def __getattr__(self, name):
        return getattr(self._system, name)


def test_a_run_goes_on_past_a_known_fault():
    trace = load(FOLDER.parent / "regressions" / "a_fresh_leaf_pins_one_window.json")
    faulty = Known(resolve(f"torch+{trace.bug}"), "TREE-7")
    assert replay(faulty, replace(trace, clause=None)).violation is None
    violation = fault_shown(faulty, trace)
    assert violation is not None and violation[0] == "TREE-7"


# -- the unified tree, where it is a choice (`+unified`), with overlap scheduling as well; `+rust`:
# -- test_conformance

# The first that has it, and the first that splits a fresh leaf.
SYSTEMS = "0.5.11+unified", "0.5.13+unified+overlap"


@pytest.fixture(scope="module", params=SYSTEMS)
def real(request, release):
    return release(request.param)


def test_the_faults_of_a_release_are_there(real):
    """But for those of the older trees; and the fault of this one."""
    overlap = real.name.endswith("+overlap")
    actual = {}
    expected = {}
    for path, fault in (*TRACES, *UNIFIED):
        if real.release not in since(fault) or (overlap and path.stem in NOT_YET):
            continue
        trace = load(path)
        actual[path.stem] = fault_shown(real, trace)
        clause = fault.on("unified").clause_shown(trace.clause, real.release)
        expected[path.stem] = None if clause is None else (clause, len(trace.commands) - 1)
    assert actual == expected


def test_turns_in_a_tree_that_has_the_sessions_conform(real):
    sizes = replace(preset("page4"), width=40, tree=True)
    for end, rest in ENDS.items():
        assert fault_shown(real, Trace(sizes, Mode.FAITHFUL, (*BEGIN, *rest))) is None, end
