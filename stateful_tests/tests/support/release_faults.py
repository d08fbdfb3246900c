"""What was found in real releases, which of them have it, and turns that end with a round in flight."""

import os
from pathlib import Path

from impl.adapter import System
from impl.sglang.releases.catalogue import TABLE
from reference.commands import (
    Abort, Admit, CheckBusy, CheckIdle, Chunk, Close, Command, Decode, Draft, Extend, Finish, Open, Retract,
    SpecDecode, Submit,
)  # fmt: skip
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.results import Trace

FOLDER = Path(__file__).parents[3] / "fixtures" / "releases"
PATHS = sorted(FOLDER.glob("sglang-*[0-9]/*.json"))
UNIFIED = sorted(FOLDER.glob("*+unified/*.json"))  # of a tree that is a choice
OVERLAP = sorted(FOLDER.glob("sglang-*[0-9]+overlap/*.json"))  # as commands under overlap alone
RELEASES = list(TABLE)
# Releases between two that are driven: at night only (KVSPEC_EVERY_RELEASE). Posts are as those before them.
_AT_NIGHT = "0.5.12", "0.5.15", "0.5.17", "0.5.19", "0.5.21"
_EVERY = "KVSPEC_EVERY_RELEASE" in os.environ
DRIVEN = [v for v in RELEASES if _EVERY or not ("post" in v or v in _AT_NIGHT)]
# The last release that has it; one that is not here is in the release of its folder alone, and its posts.
LAST = {
    "a_partial_free_leaves_entries_of_its_page": "0.5.13.post1",
    "a_lock_pins_a_leaf_of_any_length": "0.5.15.post1",
    "a_recovered_tombstone_frees_slots_that_are_read": "0.5.14",
    "eviction_reports_fewer_tokens_than_it_freed": "0.5.15.post1",
    "a_close_after_an_abort_in_the_queue_never_happens": "0.5.20",
    "a_close_after_a_retract_and_an_abort_never_happens": "0.5.23",
    "an_abort_in_the_queue_leaves_the_session_busy": "0.5.20",
    "a_prompt_that_is_swept_too_far_has_two_owners": "0.5.22",
    "a_retract_counts_as_a_finish": "0.5.23",
    "a_turned_away_turn_clears_the_mark_of_the_one_that_runs": "0.5.23",
    "a_close_after_a_turned_away_turn_does_not_wait": "0.5.23",
    "a_turn_given_up_as_the_last_resort_is_kept": "0.5.23",
    "a_turn_comes_back_to_nothing": "0.5.23",
    "a_turn_retracted_twice_loses_its_session": "0.5.23",
    "aborting_a_retracted_turn_keeps_its_kv_and_its_text": "0.5.23",
    "aborting_a_retried_turn_keeps_its_text": "0.5.23",
    "a_slot_keeps_a_token_that_nobody_computed": "0.5.23",
    "a_leaf_is_too_short_for_the_next_turn": "0.5.21",
    "a_session_gives_its_swa_lock_back_twice": "0.5.19",
    "a_request_of_one_token_leaves_only_what_it_shared": "0.5.23",
    "a_merged_node_has_a_bigram_too_many": "0.5.15.post1",
}
# Mended, but another fault breaks the same clause there: a_slot_keeps_a_token_that_nobody_computed.
ANOTHER = {
    ("retract_keeps_what_was_allocated_ahead", version) for version in RELEASES[RELEASES.index("0.5.15") :]
} | {("a_leaf_is_too_short_for_the_next_turn", "0.5.22")}  # there row and tree own its pages as well


def first(path: Path) -> int:
    return RELEASES.index(path.parent.name.removeprefix("sglang-").removesuffix("+overlap"))


def last(path: Path) -> int:
    alone = [v for v in RELEASES if v.removesuffix(".post1") == RELEASES[first(path)]]
    return RELEASES.index(LAST.get(path.stem, alone[-1]))


def found(system: System, trace: Trace) -> tuple[str, int] | None:
    """The clause that a trace violates there, and the step."""
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

# In these no round is launched, so that the prompt is not in the tree yet (see below), or a sweep is driven
# with a length that waits.
NOT_YET = {
    "a_leaf_is_too_short_for_the_next_turn",
    "a_free_that_waits_takes_the_slots_of_a_recovered_tombstone",
    "a_key_swept_to_its_end_becomes_a_live_leaf",
    "a_lock_pins_a_leaf_of_any_length",
    "a_prompt_that_is_swept_too_far_has_two_owners",
    "a_recovered_tombstone_frees_slots_that_are_read",
    "one_token_less_than_the_key_overwrites_the_trees_slots",
}
