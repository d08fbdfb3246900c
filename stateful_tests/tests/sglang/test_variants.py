"""Releases with the unified tree, which is a choice there (`+unified`); with overlap scheduling as well.

Skips, with the reason, where a release can be neither found nor fetched. `+rust` is in test_conformance.
"""

from dataclasses import replace

import pytest

from reference.commands import Mode
from reference.geometry import preset
from stateful_tests.lockstep.results import Trace
from stateful_tests.tests.support.release_faults import (
    BEGIN, ENDS, NOT_YET, PATHS, RELEASES, UNIFIED, first, found, last,
)  # fmt: skip
from stateful_tests.traces.files import load

# The first, and the first that splits a fresh leaf.
SYSTEMS = "0.5.11+unified", "0.5.13+unified+overlap"
# Faults of the older trees that this one does not have, and since when.
NEVER = {
    "eviction_reports_fewer_tokens_than_it_freed": "0.5.11",
    "a_lock_pins_a_leaf_of_any_length": "0.5.13",
    "a_merged_node_has_a_bigram_too_many": "0.5.11",  # it joins none
}


@pytest.fixture(scope="module", params=SYSTEMS)
def real(request, release):
    return release(request.param)


def test_the_faults_of_a_release_are_there(real):
    """But for those of the older trees; and the fault of this one."""
    at, overlap = RELEASES.index(real.release), real.name.endswith("+overlap")
    seen, known = {}, {}
    for path in (*PATHS, *UNIFIED):
        if path in UNIFIED:
            has_it = at >= RELEASES.index(path.parent.name.removeprefix("sglang-").removesuffix("+unified"))
        elif first(path) > at or (overlap and path.stem in NOT_YET):
            continue
        else:
            never = path.stem in NEVER and at >= RELEASES.index(NEVER[path.stem])
            has_it = at <= last(path) and not never
        trace = load(path)
        seen[path.stem] = found(real, trace)
        known[path.stem] = (trace.clause, len(trace.commands) - 1) if has_it else None
    assert seen == known


def test_turns_in_a_tree_that_has_the_sessions_conform(real):
    sizes = replace(preset("page4"), width=40, tree=True)
    for end, rest in ENDS.items():
        assert found(real, Trace(sizes, Mode.FAITHFUL, (*BEGIN, *rest))) is None, end
