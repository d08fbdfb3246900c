"""A storage behind the host tier of a release: pages that go there and come back."""

from dataclasses import replace

import pytest

from ci.explain.tier_places import facts_at
from ci.report import report_data as report
from ci.report.pages import trace_page
from impl.adapter import UnusableImplementation
from impl.choices import RandomChoices
from reference.commands import Done, Mode, Reason, Refused
from reference.failures import AtSlot
from reference.tiers.commands import Fetch
from reference.tiers.config import tier_preset
from stateful_tests.check import check_plans
from stateful_tests.generate.tier_commands import propose_tier_command
from stateful_tests.generate.tier_profile import draw_tier_profile
from stateful_tests.lockstep.driven_kinds import check_fits
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.lockstep.tier_lockstep import TierLockstep
from stateful_tests.tests.tiers.lines import STORED, commands

PART_READ = STORED.removesuffix("fetch; fetch; poll") + "fetch; fetch; poll; load h2 a4b1"


def test_pages_go_to_a_storage_and_come_back(newest):
    """A request is admitted with the pages that were read so far. The thread frees the others at its end."""
    lines = commands(STORED + "; load h2 a4b1; insert h2 a4b1; fetch; poll")
    run = replay(newest, Trace(tier_preset("storage"), Mode.FAITHFUL, lines))
    assert run.violation is None
    told = [line for row in run.rows for line in row.tree]
    parts = (
        "backup 3: writes, host full 0-3, the backend still moves host full 2-3",
        "host full 2 is stored under hash 3: a1",
        "backup 3 is over",
        "prefetch 4 of h2: to ask",
        "prefetch 4 of h2: reads, host full 0-3, the backend still moves host full 0-1",
        "node 2 under the root: a2 at 0; ",
        "h2 reads [0, 2)",
        "prefetch 4 of h2 is over",
    )
    for part in parts:
        assert any(part in line for line in told), (part, told)
    html = trace_page.page(report.replay_data("t.json", run) | {"replay": "kvspec replay t.json"}, run)
    assert "prefetch 4 of h2 (reads), host full 0, full 1, full 2, full 3" in html


@pytest.mark.parametrize("name", ["storage", "storage-back", "storage-window", "storage-names"])
def test_random_runs_take_pages_back_from_a_storage(newest, name):
    source = RandomChoices("a storage")
    profile = replace(draw_tier_profile(source), cycle=120)
    run = TierLockstep(newest, tier_preset(name))
    fetched = 0
    for _ in range(120):
        command = propose_tier_command(run.users, run.facts, source, profile)
        if isinstance(run.do(command), Done) and isinstance(command, Fetch):
            fetched += 1
        assert run.violation is None
    assert fetched >= 3


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("prefetch h1 a2; prefetch h1 a2", Reason.REQUEST_EXISTS),
        ("prefetch h1 a2; insert h1 a2", Reason.WRONG_PHASE),
        ("prefetch h1 a2; load h1 a3", Reason.WRONG_PHASE),
        ("prefetch h1 a2; reset_cache", Reason.NOT_IDLE),
        ("prefetch h1 a17", Reason.ROW_TOO_SHORT),
        ("query", Reason.EMPTY),
        ("fetch", Reason.EMPTY),
        ("backup", Reason.EMPTY),
        ("insert h1 a2; load h2 a2; abort h2", Reason.UNKNOWN_REQUEST),
        ("insert h1 a2; poll; complete; poll; reset_cache", Reason.NOT_IDLE),
        (STORED.replace("storage", "wait") + "; abort h2; abort h2", Reason.UNKNOWN_REQUEST),
    ],
)
def test_a_command_that_does_not_apply_is_refused_with_a_reason(newest, lines, reason):
    run = replay(newest, Trace(tier_preset("storage"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


def test_a_request_that_waits_for_all_of_its_pages_is_not_admitted_before(newest):
    lines = commands(STORED + "; load h2 a4b1")
    run = replay(newest, Trace(tier_preset("storage-wait"), Mode.FAITHFUL, lines))
    assert run.violation is None and run.rows[-1].outcome == Refused(Reason.WRONG_PHASE)


def test_without_a_storage_its_commands_are_refused(newest):
    for line in ("prefetch h1 a2", "query", "fetch", "backup"):
        run = replay(newest, Trace(tier_preset("tier"), Mode.FAITHFUL, commands(line)))
        assert run.rows[-1].outcome == Refused(Reason.UNFAITHFUL)


def test_facts_of_a_slot_name_its_prefetch_backup_and_free(newest):
    def fact_of_host_slot(slot, lines):
        run = replay(newest, Trace(tier_preset("storage"), Mode.FAITHFUL, commands(lines)))
        [fact] = facts_at(AtSlot("full", slot, host=True), run.history[-1])
        return str(fact)

    read = fact_of_host_slot(0, STORED)
    assert "prefetch 4 of h2" in read and "has it" in read
    assert "writes it" in fact_of_host_slot(3, STORED)
    assert "waits to be freed" in fact_of_host_slot(0, STORED + "; abort h2")


def test_a_release_whose_thread_frees_what_it_has_not_read_is_driven_without_a_storage():
    system = resolve("sglang==0.5.19+hicache")
    with pytest.raises(
        UnusableImplementation, match="is not driven with a storage behind the host"
    ):
        check_fits(system, tier_preset("storage"))
    plan = check_plans.for_system(check_plans.plan("smoke"), system)
    assert not any(name.startswith("storage") for name in plan.presets) and "tier" in plan.presets


def test_functions_that_threads_of_the_storage_run_are_noted(newest):
    with newest.noting_calls() as called:
        replay(newest, Trace(tier_preset("storage"), Mode.FAITHFUL, tuple(commands(STORED))))
    assert "HiCacheController._page_transfer" in {function.name for function in called}


def test_a_storage_is_detached_only_where_nothing_is_in_progress(newest):
    """It keeps its pages: what was stored before comes back after."""
    lines = STORED.replace("reset_cache;", "reset_cache; reattach;") + "; load h2 a4b1"
    run = replay(newest, Trace(tier_preset("storage"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and isinstance(run.rows[-1].outcome, Done)
    assert any("node 2 under the root: a2 at 0" in line for line in run.rows[-1].tree)


@pytest.mark.parametrize(
    ("name", "lines", "reason"),
    [
        ("tier", "reattach", Reason.UNFAITHFUL),
        ("storage", "insert h1 a2; reattach", Reason.NOT_IDLE),
        ("storage", "insert h1 a2; poll; complete; poll; reattach", Reason.NOT_IDLE),
        ("storage", "prefetch h1 a2; reattach", Reason.NOT_IDLE),
        ("storage", "insert h1 a2 (goes on); poll; complete; reattach", Reason.NOT_IDLE),
    ],
)
def test_a_storage_in_use_is_not_detached(newest, name, lines, reason):
    run = replay(newest, Trace(tier_preset(name), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


def play_commands(system, name, lines):
    return replay(system, Trace(tier_preset(name), Mode.FAITHFUL, commands(lines)))


def test_a_prefetch_that_ends_by_time_gives_the_pages_read_so_far(newest):
    """It takes as long as the trace says. Slots of pages that the thread still reads are freed at its end."""
    early = play_commands(newest, "storage-timeout", PART_READ + "; tick seconds 5; load h2 a4b1")
    assert early.violation is None
    assert early.rows[-1].outcome == early.rows[-3].outcome == Refused(Reason.WRONG_PHASE)
    run = play_commands(
        newest,
        "storage-timeout",
        PART_READ + "; tick seconds 7; load h2 a4b1; insert h2 a4b1; fetch; poll; poll",
    )
    assert run.violation is None and isinstance(run.rows[-5].outcome, Done)
    assert "node 2 under the root: a2 at 0" in run.rows[-5].tree[0]
    assert "h2 reads [0, 2)" in run.rows[-4].tree
    assert any("prefetch 4 of h2 is over" in line for line in run.rows[-2].tree)


@pytest.mark.parametrize("name", ["storage-timeout-window", "storage-timeout-back"])
def test_what_came_short_is_discarded_or_kept_in_whole_pages(newest, name):
    lines = PART_READ.replace("a4", "a8") + "; tick seconds 30; load h2 a8b1; fetch; fetch; poll; poll"
    run = play_commands(newest, name, lines)
    assert run.violation is None


@pytest.mark.parametrize("name", ["storage", "storage-wait", "tier"])
def test_time_passes_only_where_waits_end_in_time(newest, name):
    assert play_commands(newest, name, "tick").rows[-1].outcome == Refused(Reason.UNFAITHFUL)


def test_time_does_not_go_back(newest):
    outcome = play_commands(newest, "storage-timeout", "tick seconds 0").rows[-1].outcome
    assert outcome == Refused(Reason.BAD_LENGTH)
