"""What was found in real releases, which of them have it, and turns that end with a round in flight."""

from impl.adapter import System
from impl.sglang.releases.catalogue import TABLE
from pathlib import Path

from reference.commands import (
    Abort, Admit, CheckBusy, CheckIdle, Chunk, Close, Command, Decode, Draft, Extend, Finish, Open, Retract,
    SpecDecode, Submit,
)  # fmt: skip
from stateful_tests.lockstep.known_faults import KnownFault, traces
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.support.night import NIGHT

RELEASES = list(TABLE)
# Releases between two that are driven: at night only. Posts are as those before them.
_AT_NIGHT = "0.5.12", "0.5.15", "0.5.17", "0.5.19", "0.5.21"
DRIVEN = [v for v in RELEASES if NIGHT or not ("post" in v or v in _AT_NIGHT)]
# The traces of known faults, with their faults; of a tree that is a choice; as commands under overlap alone.
TRACES = [(path, fault) for path, fault in traces("sglang") if "+" not in path.parent.name]
UNIFIED = [
    (path, fault) for path, fault in traces("sglang") if path.parent.name.endswith("+unified")
]
OVERLAP = [
    (path, fault) for path, fault in traces("sglang") if path.parent.name.endswith("+overlap")
]


def since(fault: KnownFault) -> list[str]:
    """Return the releases from the first that has the fault on."""
    return RELEASES[RELEASES.index(fault.first) :]


def overlapped_releases(path: Path) -> list[str]:
    """Return the releases from that of the folder on; the page behind a round is left in that one
    alone."""
    first = RELEASES.index(path.parent.name.removeprefix("sglang-").removesuffix("+overlap"))
    last = first + 1 if path.stem == "a_finish_leaves_entries_behind_a_round" else None
    return RELEASES[first:last]


def fault_shown(system: System, trace: Trace) -> tuple[str, int] | None:
    """Return the clause that a trace violates there, and the step."""
    violation = replay(system, trace).violation
    return None if violation is None else (violation.clause, violation.step)


BEGIN = (Open("s"), Submit("a", "s", 3), Admit("a"), Extend((Chunk("a", 3),)))


def decode(times: int) -> tuple[Command, ...]:
    return (Decode(("a",)),) * times


def verify(*accepted: int) -> tuple[Command, ...]:
    """Rounds of three drafts each."""
    return tuple(SpecDecode((Draft("a", 3, accept),)) for accept in accepted)


AGAIN = (Admit("a"), Extend((Chunk("a", 1),)))
NEXT = (Submit("b", "s", 2), Admit("b"), CheckIdle())
# What becomes of a turn whose last round is in flight: the round before ends it, it is retracted, or aborted.
ENDS: dict[str, tuple[Command, ...]] = {
    "the prefill ends it": (*decode(1), Finish("a", 1), *NEXT),
    "a decode ends it": (*decode(2), Finish("a", 2), *NEXT),
    "the last decode ends it": (*decode(2), Finish("a", 3), *NEXT),
    "a verify round ends it": (*verify(2, 3), Finish("a", 3), *NEXT),
    "a verify round ends it before its last token": (*verify(3, 1), Finish("a", 2), *NEXT),
    "a decode is lost": (*decode(2), Retract("a", 1), *AGAIN, Finish("a", 3), *NEXT),
    "a verify round is lost": (*verify(3, 1), Retract("a", 1), *AGAIN, CheckBusy()),
    "the prefill of a retry is lost": (*decode(2), Retract("a"), *AGAIN, Retract("a", 1), CheckBusy()),
    "it is aborted in a decode": (*decode(2), Abort("a"), Submit("b", "s", 2), Admit("b"), CheckIdle()),
    "it is aborted in a verify round": (*verify(2, 3), Abort("a"), CheckIdle()),
    "it is closed meanwhile": (*decode(2), Close("s"), Finish("a", 2), CheckIdle()),
}  # fmt: skip

# In these no round is launched, so that the prompt is not in the tree yet (see below), or window
# eviction is driven with a length that waits.
NOT_YET = {
    "a_session_inserts_into_another_namespace",
    "a_finish_caches_overshoot",
    "a_leaf_is_shorter_than_a_window",
    "a_leaf_is_too_short_for_the_next_turn",
    "a_leaf_is_too_short_behind_a_swept_window",
    "a_free_that_waits_takes_the_slots_of_a_recovered_tombstone",
    "a_key_swept_to_its_end_becomes_a_live_leaf",
    "a_lock_pins_a_leaf_of_any_length",
    "a_page_in_front_of_the_window_is_not_kept_after_a_round",
    "a_page_in_front_of_the_window_is_not_kept_with_bigrams",
    "an_abort_of_bigrams_behind_a_window_eviction_frees_what_the_tree_keeps",
    "an_aborted_turn_gives_its_swa_lock_back_again",
    "a_prompt_of_bigrams_is_swept_too_far",
    "a_prompt_that_is_swept_too_far_has_two_owners",
    "a_received_prompt_keeps_less_than_a_window",
    "a_received_prompt_of_bigrams_keeps_less_than_a_window",
    "a_received_prompt_stands_behind_a_locked_tombstone",
    "a_received_prompt_is_inserted_as_if_all_of_it_had_swa_kv",
    "a_recovered_tombstone_frees_slots_that_are_read",
    "a_rejected_request_puts_the_slot_below_what_the_tree_owns",
    "one_token_less_than_the_key_overwrites_the_trees_slots",
}
