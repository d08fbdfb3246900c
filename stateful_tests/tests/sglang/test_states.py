"""SGLang with recurrent state: what the release does with slots and states is what the specification says."""

from dataclasses import replace
from pathlib import Path

import pytest

from impl.adapter import UnusableImplementation
from impl.sglang.process.system import SGLangSystem
from reference.commands import Mode
from reference.geometry import preset
from stateful_tests.generate.next_command import finale
from stateful_tests.lockstep.driven_kinds import check_fits
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.replays import replay
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.support.night import some_at_night
from stateful_tests.tests.support.planted_faults import checkout_with, planted_faults
from stateful_tests.traces.trace_files import load

RELEASE = "0.5.23"
REGRESSIONS = Path(__file__).parents[3] / "fixtures" / "regressions"
WITH_STATES = [path for path in sorted(REGRESSIONS.glob("*.json")) if load(path).geometry.states]
HIT = "insert h1 a4; submit r1 (no session) a4 +2; admit r1; extend r1 +1; extend r1 +1; decode r1"
TURNS = "open s1; submit r1 in s1 a3; admit r1; extend r1 +3; decode r1; finish r1 keep 2"
SCENES = {
    "a hit goes on from a copy": HIT,
    "a finished text is matched again": f"{HIT}; finish r1 keep 2; submit r2 (no session) a4 +2; admit r2",
    "a session keeps its state": f"{TURNS}; submit r2 in s1 +2; admit r2; extend r2 +3; decode r2",
    "a retracted request begins again": f"{HIT}; retract r1; admit r1; extend r1 +3; decode r1",
    "a prompt twice in a batch": (
        "submit r1 (no session) a3; admit r1; submit r2 (no session) a3; admit r2; extend r1 +3, r2 +3"
    ),
    "an abort in the queue frees the slot of a match": "insert h1 a2; submit r1 (no session) a3; admit r1;"
    " abort r1",
    "a split leaves the state below": "insert h1 a4; insert h2 a2; match h3 a4; evict full 0 states 1",
    "one decodes while another prefills": (
        f"{HIT}; submit r2 (no session) b3; admit r2; extend r2 +2, r1 +1; extend r2 +1, r1 +1"
    ),
}
# The same where states are tracked, on pages of two tokens.
GOES_ON = "submit r1 (no session) a4; admit r1; extend r1 +4; decode r1"
TRACKED = {
    "a checkpoint of a prompt and one of a decode": f"{GOES_ON}; decode r1; decode r1; finish r1 keep 4;"
    " submit r2 (no session) a5; admit r2; extend r2 +1; finish r2 keep 1",
    "a chunk that goes on": "submit r1 (no session) a7; admit r1; extend r1 +4; extend r1 +3; decode r1;"
    " finish r1 keep 2; submit r2 (no session) a5b2; admit r2; extend r2 +3; retract r2",
    "a verify round that crosses a boundary": "submit r1 (no session) a4; admit r1; extend r1 +4;"
    " spec_decode r1 +2 accept 2; spec_decode r1 +2 accept 2; finish r1 keep 5",
    "a session's first prompt": f"{TURNS}; submit r2 in s1 +2; admit r2; extend r2 +3; finish r2 keep 1;"
    " close s1",
    "a prompt twice": f"{GOES_ON}; submit r2 (no session) a3; submit r3 (no session) a3; admit r2; admit r3;"
    " extend r2 +1; extend r3 +1; finish r1 keep 2; abort r2",
    "a batch of both": f"{GOES_ON}; submit r2 (no session) b4; admit r2; extend r2 +4, r1 +1; decode r1, r2",
    "lock holders": "insert h1 a4; insert h2 a5 (goes on); match h3 a2; insert h3 a2b2;"
    " evict full 0 states 2",
}
# The same where the second slot is taken on demand, which a server does under overlap alone, with four slots
# for each request. On pages of two tokens a boundary is always near.
RUNS = "submit r1 (no session) +3; admit r1; extend r1 +3"
BESIDE = "insert h1 a2; insert h1 b2"  # both states stay in the tree, so no slot is left for a second
LAZY = {
    "boundaries of decodes": f"{RUNS}; decode r1; decode r1; decode r1; decode r1; finish r1 keep 4",
    "no slot is free": f"{BESIDE}; {RUNS}; decode r1; decode r1; decode r1; decode r1; finish r1 keep 4",
    "no slot is free for a prompt": f"{BESIDE}; {RUNS}; decode r1; finish r1 keep 1;"
    " submit r2 (no session) b3; admit r2; extend r2 +1",
    "a retract beside its second slot": f"{RUNS}; decode r1; retract r1; admit r1; extend r1 +2; decode r1",
    "an abort beside its second slot": f"{RUNS}; decode r1; abort r1",
    "rounds that may reach a boundary": f"{RUNS}; spec_decode r1 +2 accept 1; spec_decode r1 +2 accept 2;"
    " spec_decode r1 +2 accept 2; spec_decode r1 +2 accept 1; finish r1 keep 6",
    "a round overwrites the state of the one before": f"{RUNS}; spec_decode r1 +2 accept 1;"
    " spec_decode r1 +2 accept 2; finish r1 keep 4",
    "a third round goes beside them": f"{RUNS}; spec_decode r1 +2 accept 1; spec_decode r1 +2 accept 2;"
    " spec_decode r1 +2 accept 2; finish r1 keep 6",
    "rounds without a free slot": f"{BESIDE}; {RUNS}; spec_decode r1 +2 accept 2; spec_decode r1 +2 accept 2;"
    " spec_decode r1 +2 accept 2; finish r1 keep 5",
}
# Those with what only 0.5.23 does.
LATER = {
    "a prompt behind a hit": "insert h1 a2; submit r1 (no session) a2b3; admit r1; extend r1 +3; decode r1;"
    " decode r1; decode r1; finish r1 keep 3",
    "a boundary in a mixed batch": f"{RUNS}; submit r2 (no session) +1; admit r2; extend r2 +1, r1 +1;"
    " decode r1; decode r1; decode r1; finish r1 keep 4",
}
FAULTS = planted_faults("sglang/faults.toml").values()


@pytest.fixture(scope="module")
def real(release):
    return release(RELEASE)


@pytest.mark.parametrize("path", WITH_STATES, ids=lambda path: path.stem)
def test_traces_of_named_bugs_conform(real, path):
    trace = replace(load(path), clause=None, expected=())
    assert replay(real, trace).violation is None


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23", "0.5.23+overlap"])
@pytest.mark.parametrize("text", TRACKED.values(), ids=TRACKED.keys())
def test_scenes_with_tracked_states_conform(release, version, text):
    lockstep = Lockstep(release(version), replace(preset("state-track"), tree=True), Mode.FAITHFUL)
    for command in (*script(text), *finale(lockstep.state, lockstep.system.capabilities)):
        if version == "0.5.22" and len(getattr(command, "lanes", ())) == 2:
            return  # mixed-batch-forgets-states
        lockstep.do(command)
        assert lockstep.violation is None, (command, lockstep.violation)


def _lazily(system, text, page_size):
    """Return a run of a scene, with slots for as many requests as it has."""
    states = 8 if "r2" in text else 4
    sizes = replace(preset("state-lazy-tight"), tree=True, states=states, page_size=page_size)
    lockstep = Lockstep(system, sizes, Mode.FAITHFUL)
    for command in script(text):
        if lockstep.violation is None:
            lockstep.do(command)
    return lockstep


@pytest.mark.parametrize("version, text", [
    *(("0.5.22+overlap", text) for text in LAZY.values()),
    *(("0.5.23+overlap", text) for text in [*LAZY.values(), *LATER.values()]),
])  # fmt: skip
def test_scenes_with_a_second_slot_on_demand_conform(release, version, text):
    for page_size in (2, 4):
        lockstep = _lazily(release(version), text, page_size)
        assert lockstep.violation is None, lockstep.violation
        for command in finale(lockstep.state, lockstep.system.capabilities):
            lockstep.do(command)
        assert lockstep.violation is None, lockstep.violation


def test_a_slot_on_demand_needs_overlap(release):
    for spec in ("0.5.23", "0.5.21+overlap"):
        with pytest.raises(UnusableImplementation, match="with a second slot on demand"):
            check_fits(release(spec), preset("state-lazy"))


@pytest.mark.parametrize("text", SCENES.values(), ids=SCENES.keys())
def test_scenes_conform(real, text):
    lockstep = Lockstep(real, replace(preset("state"), tree=True), Mode.FAITHFUL)
    for command in (*script(text), *finale(lockstep.state, real.capabilities)):
        lockstep.do(command)
        assert lockstep.violation is None, (command, lockstep.violation)
    for command in finale(lockstep.state, real.capabilities):
        lockstep.do(command)
        assert lockstep.violation is None, (command, lockstep.violation)


def test_other_ways_to_run_have_no_state(release):
    for spec in ("0.5.21", "0.5.23+overlap"):
        with pytest.raises(UnusableImplementation, match="has no recurrent state"):
            check_fits(release(spec), preset("state"))


@pytest.mark.parametrize(
    "fault", some_at_night(FAULTS, [*FAULTS][3:].__contains__), ids=lambda fault: fault.name
)
def test_a_fault_in_a_copy_is_named(real, tmp_path, fault):
    sizes = replace(preset(fault.sizes), tree=True)
    clauses = set()
    root = checkout_with(real.root, tmp_path / "root", fault)
    system = SGLangSystem(path=root, overlap=sizes.lazy)
    runs = []
    if sizes.lazy:
        runs = [_lazily(system, text, page) for text in {**LAZY, **LATER}.values() for page in (2, 4)]
    for text in () if sizes.lazy else (TRACKED if sizes.tracks else SCENES).values():
        lockstep = Lockstep(system, sizes, Mode.FAITHFUL)
        for command in script(text):
            if lockstep.violation is None:
                lockstep.do(command)
        runs.append(lockstep)
    for lockstep in runs:
        clauses |= {*lockstep.violation.clauses} if lockstep.violation is not None else set()
    system.close()
    assert {*fault.caught_by} <= clauses, clauses
