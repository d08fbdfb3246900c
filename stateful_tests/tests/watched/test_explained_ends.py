"""Which known fault explains the end of a server: each is named for what it causes alone."""

import pytest

from impl.sglang.server.clients import Config
from reference import model
from reference.commands import Finish, Mode
from reference.geometry import PRESETS
from reference.state import Cursors
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.watched.deviations import fault_of_cursors, fault_of_end
from stateful_tests.watched.violated_clauses import Shown
from stateful_tests.watched.validation_results import Validated

REUSED = "AssertionError: a reused row must carry allocated KV at srt/mem_cache/memory_pool.py:423"
PREFIXED = "AssertionError:  at srt/managers/schedule_policy.py:1368"


SLOT = "c1 already has a slot"
LEAK = "Full Pool Mem Leak Detected!"
OTHER = "KeyError: 1 at srt/a.py:1"
PINNED = "RuntimeError: Out of memory. Try to allocate 8 tokens. Available full tokens: 81 (1 + 80)"
STAND_IN = (
    "KeyError: <sglang.srt.session.streaming_session._VirtualNode object at 0x7f> at srt/a.py:1"
)
IN_RUST = "TypeError: '_VirtualNode' object cannot be interpreted as an integer at srt/a.py:1"
NO_ROW = "RuntimeError: alloc_req_slots runs out of memory. num_reqs=1, at srt/mem_cache/allocation.py:344"
SECOND = "AssertionError:  at srt/managers/scheduler.py:4326"
PREEMPTED = "a preemption by priority", "a retract of a session's turn"
NO_STATE = "AssertionError: Can not alloc mamba cache at srt/mem_cache/a.py:1"
# of the errors by which a grant ends
POOLS = {
    NO_ROW: "rows",
    NO_STATE: "states",
    "Decode out of memory.": "full",
    "Prefill out of memory.": "full",
}
FLAGS = "parked", "prepared", "next_chunk", "states_in_stores"
MIXED = Config(mixed=True, tree=False)
ALONE = Config(tree=False)
RETRACTED = "a retract before the first result"
RESUMED = "a turn that resumes"
REJECTED = "a second turn that is rejected"


@pytest.mark.parametrize("release, error, seen, config, name", [
    ("0.5.23", REUSED, RETRACTED, ALONE, "nothing-to-resume"),
    ("0.5.23", REUSED, "", ALONE, ""),
    ("0.5.23", OTHER, RETRACTED, ALONE, ""),
    ("0.5.23", SLOT, REJECTED, ALONE, "rejection-takes-slot"),
    ("0.5.23", "AssertionError:  at srt/session/x.py:1", REJECTED, ALONE, "rejection-takes-slot"),
    ("0.5.23", "AssertionError: a word at srt/session/x.py:1", REJECTED, ALONE, ""),
    ("0.5.23", SLOT, "", ALONE, ""),
    ("0.5.24", SLOT, REJECTED, ALONE, ""),
    ("0.5.23", NO_ROW, PREEMPTED, ALONE, "preempted-turn-keeps-its-row"),
    ("0.5.23", NO_ROW, PREEMPTED[:1], ALONE, ""),
    ("0.5.23", NO_ROW, PREEMPTED[1:], ALONE, ""),
    ("0.5.23", OTHER, PREEMPTED, ALONE, ""),
    ("0.5.23", SECOND, PREEMPTED, Config(window=4), "preemption-admits-a-second-chunk"),
    ("0.5.23", SECOND, PREEMPTED, ALONE, ""),
    ("0.5.23", SECOND, PREEMPTED[1:], Config(window=4), ""),
    ("0.5.23", PREFIXED, RESUMED, ALONE, "ignored-end-token-in-chunks"),
    ("0.5.23", PREFIXED, "", ALONE, ""),
    ("0.5.23", PREFIXED, RESUMED, Config(), ""),
    ("0.5.23", PREFIXED.replace("policy", "batch"), RESUMED, ALONE, ""),
    ("0.5.23", f"KeyError: {PREFIXED}", RESUMED, ALONE, ""),
    ("0.5.20", LEAK, "parked", ALONE, "parked-chunk"),
    ("0.5.20", LEAK, "", ALONE, ""),
    ("0.5.20", OTHER, "parked", ALONE, ""),
    ("0.5.23", LEAK, "parked", ALONE, ""),
    ("0.5.21", "Decode out of memory.", "prepared", MIXED, "mixed-without-room"),
    ("0.5.21", "Decode out of memory.", "prepared", ALONE, ""),
    ("0.5.21", "Decode out of memory.", "", MIXED, ""),
    ("0.5.21", OTHER, "prepared", MIXED, ""),
    ("0.5.22", "Decode out of memory.", "prepared", MIXED, ""),
    ("0.5.23", "Prefill out of memory.", "next_chunk", MIXED, "chunk-without-room"),
    ("0.5.23", "Prefill out of memory.", "next_chunk", ALONE, ""),
    ("0.5.23", "Prefill out of memory.", "next_chunk", Config(mixed=True, window=4), ""),
    ("0.5.23", "Out of memory.", "prepared", MIXED, ""),
    ("0.5.23", OTHER, "next_chunk", MIXED, ""),
    ("0.5.22", LEAK, "", Config(window=5, page_size=4), "swept-too-far"),
    ("0.5.22", LEAK, "", Config(window=5, page_size=4, tree=False), ""),
    ("0.5.22", OTHER, "", Config(window=5, page_size=4), ""),
    ("0.5.23", PINNED, "", Config(hicache=True, storage=1, policy=2), "evictable-above-a-backup"),
    ("0.5.23", PINNED, "", Config(hicache=True, storage=1, policy=1), ""),
    ("0.5.23", PINNED, "", Config(hicache=True, policy=2), ""),
    ("0.5.23", PINNED.replace("8 tokens", "82 tokens"), "", Config(hicache=True, storage=1, policy=2), ""),
    ("0.5.23", PINNED.replace("8 tokens", "81 tokens"), "", Config(hicache=True, storage=1, policy=2),
     "evictable-above-a-backup"),
    ("0.5.23", STAND_IN, "", Config(hicache=True, storage=1), "session-asks-the-storage"),
    ("0.5.23", STAND_IN, "", Config(hicache=True), ""),
    ("0.5.23", IN_RUST, "", Config(hicache=True, storage=1), "session-asks-the-storage"),
    ("0.5.23", NO_STATE, "states_in_stores", Config(hicache=True, states=20), "stores-pin-every-state"),
    ("0.5.23", NO_STATE, "", Config(hicache=True, states=20), ""),
    ("0.5.23", OTHER, "states_in_stores", Config(hicache=True, states=20), ""),
    ("0.5.23", "KeyError: 3", "", Config(hicache=True, storage=1), ""),
])  # fmt: skip
def test_known_faults_explain_only_their_own_ends(release, error, seen, config, name):
    """Each condition of fault_of_end: without it an unrelated end would be one of a known fault."""
    validated = Validated(**{flag: seen == flag for flag in FLAGS})
    validated.reached.update([seen] if isinstance(seen, str) else seen)
    assert fault_of_end(release, error, config, validated, POOLS.get(error, "")) == name


@pytest.mark.parametrize(
    "window, far",
    [(2, False), (3, False), (4, False), (5, True), (6, True), (7, False), (8, False)],
)
def test_a_window_that_a_tree_evicts_too_far(window, far):
    leak = "Full Pool Mem Leak Detected!"
    name = "swept-too-far" if far else ""
    assert fault_of_end("0.5.22", leak, Config(window=window, page_size=4), Validated()) == name


def state_after(text):
    state = model.initial(PRESETS["page1"], Mode.FREE)
    for command in script(text):
        state, _ = model.step(state, command)
    return state


@pytest.mark.parametrize(
    "turn, ended", [("open s1; submit r1 in s1", "open s1"), ("submit r1 (no session)", "")]
)
def test_a_slot_that_nobody_should_keep_is_explained_by_nothing(turn, ended):
    finish = Finish("r1", 1)
    before, after = map(state_after, (f"{turn} +2; admit r1; extend r1 +2", ended))
    shown = Shown({}, {"s1": Cursors(2, 2, 0, 0)})
    assert fault_of_cursors(header(), finish, before, after, shown) is None
