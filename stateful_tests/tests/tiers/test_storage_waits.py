"""Waits for a storage that end in time: how they are timed, and STORE-3. No release is loaded."""

from dataclasses import replace

import pytest

from reference.commands import Abort, Done, Match, Piece, Reason, Refused
from reference.failures import AtNamed
from reference.tiers.clauses import TIER_CLAUSES, TierStep
from reference.tiers.commands import Load, Poll, Prefetch, Tick
from reference.tiers.config import TIER_PRESETS, tier_preset
from reference.tiers.facts import TierOperation
from reference.tiers.storage_waits import StorageWaits
from impl.choices import RandomChoices
from stateful_tests.generate.tier_commands import draw_tier_config
from stateful_tests.tests.tiers.scenes import STORING

SIZES = tier_preset("storage-timeout")
TEXT = (Piece("a", 4),)  # of four pages: it may be held back for five seconds
PREFETCHING = STORING._replace(
    operations=(
        TierOperation(4, back=False, name="h2", state="to ask", slots={}, moving={}),
        *STORING.operations[:1],
    )
)
NO_PREFETCH = STORING._replace(operations=STORING.operations[:1])


def test_sizes_that_no_preset_has_keep_to_the_clock():
    for name in ("storage-timeout", "storage-timeout-window", "storage", "storage-wait"):
        drawn = {
            draw_tier_config(RandomChoices(f"{name} {index}"), TIER_PRESETS[name]).storage
            for index in range(20)
        }
        assert drawn == (
            {"timeout"} if "timeout" in name else {"best_effort", "wait_complete"}
        )


def attempt(*steps, sizes=SIZES):
    """Return the last attempt of these steps, each with its outcome and the facts before it."""
    waits = StorageWaits(sizes)
    found = None
    for command, outcome, before in steps:
        after = PREFETCHING if isinstance(command, Prefetch) else before
        found = waits.follow(command, outcome, before, after)
    return found


DONE = Done()
WRONG_PHASE = Refused(Reason.WRONG_PHASE)
ASKED = (Prefetch("h2", TEXT), Done(), NO_PREFETCH)
HELD_BACK = (Load("h2", TEXT), WRONG_PHASE, PREFETCHING)


def seconds(number, outcome=DONE):
    return (Tick(number), outcome, PREFETCHING)


def test_attempts_to_admit_a_request_are_timed():
    refused = seconds(9, Refused(Reason.UNFAITHFUL))
    result = attempt(ASKED, seconds(2), HELD_BACK, seconds(4), refused, HELD_BACK)
    assert result is not None
    assert (result.name, result.waited, result.blocked, result.most) == ("h2", 6, 4, 5)
    assert result.pages_due
    pages = attempt(ASKED, HELD_BACK, sizes=tier_preset("storage-timeout-back"))
    assert pages is not None and pages.most == 3


@pytest.mark.parametrize(
    "steps",
    [
        [HELD_BACK],
        [ASKED, (Load("h2", TEXT[:0]), WRONG_PHASE, PREFETCHING)],
        [ASKED, (Load("h2", TEXT), Refused(Reason.OUT_OF_STATES), PREFETCHING)],
        [ASKED, (Match("h2", TEXT, full_only=True), WRONG_PHASE, PREFETCHING)],
        [ASKED, (Abort("h2"), Done(), PREFETCHING), HELD_BACK],
        [ASKED, (Load("h2", TEXT), Done(), PREFETCHING), HELD_BACK],
        [ASKED, (Poll(), Done(), PREFETCHING)],
    ],
)
def test_other_commands_are_no_attempts(steps):
    assert attempt(*steps) is None
    assert attempt(ASKED, HELD_BACK, sizes=tier_preset("storage-wait")) is None


@pytest.mark.parametrize(
    "before, due",
    [
        (PREFETCHING, True),
        (NO_PREFETCH, False),
        # the prefetch of an earlier request of that name
        (
            NO_PREFETCH._replace(
                operations=(
                    TierOperation(1, back=False, name="h2", state="reads", slots={}, moving={}),
                )
            ),
            False,
        ),
        (
            NO_PREFETCH._replace(
                operations=(
                    TierOperation(4, back=False, name="h2", state="reads", slots={}, moving={}),
                )
            ),
            True,
        ),
        (
            NO_PREFETCH._replace(
                operations=(
                    TierOperation(4, back=False, name="h2", state="done", slots={}, moving={}),
                )
            ),
            False,
        ),
    ],
)
def test_pages_are_due_while_the_prefetch_of_the_request_is_in_progress(before, due):
    result = attempt(ASKED, (Match("h2", TEXT), WRONG_PHASE, before))
    assert result is not None and result.pages_due is due


def test_a_prefetch_that_was_there_before_is_another_requests():
    before = NO_PREFETCH._replace(
        operations=(TierOperation(2, back=False, name="h3", state="reads", slots={}, moving={}),)
    )
    own = TierOperation(4, back=False, name="h2", state="done", slots={}, moving={})
    after = before._replace(operations=(*before.operations, own))
    waits = StorageWaits(SIZES)
    waits.follow(Prefetch("h2", TEXT), Done(), before, after)
    result = waits.follow(Load("h2", TEXT), WRONG_PHASE, after, after)
    assert result is not None and not result.pages_due


@pytest.mark.parametrize(
    "refused, waited, blocked, due, observed",
    [
        (True, 9, 5, True, ""),
        (True, 9, 6, True, "it is held back after 6 s"),
        (True, 9, 6, False, ""),
        (True, 9, -1, True, ""),
        (False, 1, -1, True, "it is admitted without them after 1 s"),
        (False, 1, -1, False, ""),
        (False, 2, -1, True, ""),
        (False, 9, 6, True, ""),
        (True, 1, 0, True, ""),
    ],
)
def test_a_wait_ends_in_time_and_not_before(refused, waited, blocked, due, observed):
    tried = attempt(ASKED, HELD_BACK)
    assert tried is not None
    tried = replace(tried, waited=waited, blocked=blocked, pages_due=due)
    command = Load("h2", TEXT)
    step = TierStep(SIZES, command, refused, STORING, STORING, [], admission_attempt=tried)
    clause = TIER_CLAUSES["STORE-3"]
    assert clause.trigger(step)
    failure = clause.check(step)
    assert (failure.observed if failure else "") == observed
    assert failure is None or failure.at == (AtNamed("request", "h2"),)
    none = TierStep(SIZES, command, refused, STORING, STORING, [])
    assert clause.check(none) is None and not clause.trigger(none)


def test_requests_that_were_held_back_are_known_to_be_over_in_time():
    waits = StorageWaits(SIZES)
    for command, outcome, before in (ASKED, HELD_BACK):
        waits.follow(command, outcome, before, PREFETCHING)
    assert waits.waiting_requests == {"h2": False}
    waits.follow(Tick(6), Done(), PREFETCHING, PREFETCHING)
    assert waits.waiting_requests == {"h2": True}
    assert not StorageWaits(tier_preset("storage")).ends_in_time


def test_the_first_attempt_begins_the_time():
    first = attempt(ASKED, HELD_BACK)
    assert first is not None and (first.waited, first.blocked) == (0, -1)
    later = attempt(seconds(2), ASKED, HELD_BACK, seconds(2), HELD_BACK, seconds(3), HELD_BACK)
    assert later is not None and (later.waited, later.blocked) == (5, 5)
    at_start = attempt(ASKED, HELD_BACK, seconds(2), HELD_BACK, seconds(3), HELD_BACK)
    assert at_start is not None and (at_start.waited, at_start.blocked) == (5, 5)
    odd = (Prefetch("h2", (Piece("a", 5),)), DONE, NO_PREFETCH)
    tried = (Load("h2", (Piece("a", 5),)), WRONG_PHASE, PREFETCHING)
    pages = attempt(odd, tried, sizes=tier_preset("storage-timeout-back"))
    assert pages is not None and pages.most == 4


def test_the_prefetch_of_a_request_is_the_one_that_came_with_it():
    """Others, and a backup that came at once, are not."""
    old, late = (
        TierOperation(job, back=False, name="h2", state="reads", slots={}, moving={})
        for job in (2, 6)
    )
    back, own = (TierOperation(job, job == 3, "h2", "reads", {}, {}) for job in (3, 4))
    for before, due in (((old, own), True), ((old, back), False), ((late,), False)):
        waits = StorageWaits(SIZES)
        was = NO_PREFETCH._replace(operations=(old, *NO_PREFETCH.operations))
        now = was._replace(operations=(old, back, own))
        waits.follow(Prefetch("h2", TEXT), DONE, was, now)
        result = waits.follow(Load("h2", TEXT), WRONG_PHASE, now._replace(operations=before), now)
        assert result is not None and result.pages_due is due


def test_only_attempts_hold_a_request_back():
    waits = StorageWaits(SIZES)
    waits.follow(Tick(1), DONE, PREFETCHING, PREFETCHING)
    waits.follow(Prefetch("h2", TEXT), DONE, NO_PREFETCH, PREFETCHING)
    assert waits.waiting_requests == {}
    waits.follow(Load("h2", TEXT), WRONG_PHASE, PREFETCHING, PREFETCHING)
    for number, over in ((5, False), (1, True)):
        waits.follow(Tick(number), DONE, PREFETCHING, PREFETCHING)
        assert waits.waiting_requests == {"h2": over}
