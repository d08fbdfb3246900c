"""How a violation of an engine is reported: a sentence, a page, a story, a unit test, a fixture."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from ci.explain import because
from ci.export import engine_test
from ci.export.recorded_run import NotExportable
from ci.report import report_data as report
from ci.report.pages import trace_page
from impl.process.run_test import FAILS, outcomes
from reference.blocks.clauses import BLOCK_CLAUSES
from reference.system_kinds import BLOCKS
from stateful_tests.lockstep.replays import replay
from stateful_tests.tests.report.test_page import Reader
from stateful_tests.tests.support.modules_run import output_of
from stateful_tests.tests.support.night import at_night, some_at_night
from stateful_tests.tests.support.planted_faults import config_of, planted_faults
from stateful_tests.tests.vllm.test_releases import TRACES
from stateful_tests.traces import trace_files as traces

# a part of what `because` says of each trace
REASONS = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8"))

# the clauses and traces whose page marks a block
DRAWN = {
    "BLK-2", "BLK-3", "DRAFT-1", "HOST-2", "KEY-1", "PUB-1", "XFER-1", "XFER-2", "STA-1", "STA-2", "STA-3",
    "a_sharer_runs_ahead_of_the_recompute",
}  # fmt: skip


def release_of(path):
    return path.parent.name.removeprefix("vllm-")


# A fault's first trace by day, its others at night.
FIRST = {fault.id: path for path, fault in reversed(TRACES)}.values()


@pytest.mark.parametrize(
    "path",
    some_at_night((path for path, _ in TRACES), lambda path: path not in FIRST),
    ids=lambda path: path.stem,
)
def test_the_reason_is_a_true_sentence_and_is_drawn(vllm, path):
    run = replay(vllm(release_of(path)), traces.load(path))
    explained = because(run)
    assert REASONS[path.stem] in explained.text
    for claim in explained.claims:
        held = [claim.holds(moment) for moment in run.history]
        since = claim.since - run.history_start
        assert all(held[since:]) and not any(held[since - 1 : since]), claim.what
    data = report.replay_data(str(path), run) | {"replay": "kvspec replay"}
    shown = Reader(trace_page.page(data, run))
    assert f"step-{len(run.rows) - 1}" in shown.ids and explained.text[1:] in shown.text
    wrong = [
        value for _, name, value in shown.attributes if name == "class" and "wrong" in value.split()
    ]
    drawn = run.violation.clause in DRAWN or path.stem in DRAWN
    assert bool(wrong) == drawn


EXPORTED = "0.26.0+offload", "0.12.0", "0.22.0+offload", "0.15.0+async"


OURS = "kvspec|reference|impl|stateful_tests|ci"


@pytest.mark.parametrize("release", some_at_night(EXPORTED, EXPORTED[1:].__contains__))
def test_unit_tests_fail_where_the_fault_is_and_pass_where_it_is_fixed(vllm, release, tmp_path):
    """On the release's own scheduler; nothing of kvspec is imported."""
    system = vllm(release)
    runs = []
    wanted = []
    for path, fault in (each for each in TRACES if release_of(each[0]) == release):
        fixed = engine_test.target(fault.fixed) if fault.fixed else None
        if path.stem in SHOWN_BY_NO_OBJECT:
            with pytest.raises(NotExportable, match=f"{NO_OBJECT}|new weights|pool of blocks"):
                engine_test.unit_test(traces.load(path), path.name, system, fixed)
            continue
        text = engine_test.unit_test(trace := traces.load(path), path.name, system, fixed)
        assert not re.search(rf"^ *(from|import) ({OURS})\b", text, re.MULTILINE)
        file = tmp_path / f"{path.stem}.py"
        file.write_text(text)
        wanted += [(path.stem, FAILS), (path.stem, 0)][: 1 + (fixed is not None)]
        runs += [(target.root, "", [file]) for target in (system, fixed) if target is not None]
    ends = outcomes(*runs, hook=engine_test.hook(trace))
    assert [(name, code) for (name, _), (code, _) in zip(wanted, ends, strict=True)] == wanted, ends


STATES = {
    "a_step_behind_a_prompt_names_the_running_state": "STA-3",
    "a_step_behind_a_prompt_names_the_state_that_it_overwrites": "STA-3",
    "a_session_publishes_a_state_under_the_hash_of_a_dropped_token": "STA-3",
    "a_turn_that_stops_with_a_step_in_flight_leaves_a_state_that_is_too_far": "STA-2",
    "a_request_preempted_in_its_own_step_leaves_a_published_state": "STA-3",
}


@pytest.mark.parametrize("name", STATES)
def test_a_fault_of_recurrent_state_makes_a_test_of_the_scheduler(vllm, name, tmp_path):
    """A state is the tokens that were folded into it, in the block where a worker would have it."""
    [(path, fault)] = [each for each in TRACES if each[0].stem == name]
    system = vllm(release_of(path))
    text = engine_test.unit_test(trace := traces.load(path), path.name, system)
    assert f'"{STATES[name]}: expected ' in text
    file = tmp_path / "test_it.py"
    file.write_text(text)
    runs = [(system.root, "", [file])]
    if fault.fixed:
        runs.append((engine_test.target(fault.fixed).root, "", [file]))
    codes = [code for code, _ in outcomes(*runs, hook=engine_test.hook(trace))]
    assert codes == [FAILS, 0][: len(runs)]


PUBLISHED = "a_request_preempted_in_its_own_step_leaves_a_published_block"


def test_the_command_line_shows_a_finding(vllm, kvspec, tmp_path):
    vllm("0.33.0")
    [path] = [path for path, _ in TRACES if path.stem == PUBLISHED]
    code, out, _ = kvspec("replay", str(path), "--impl", "vllm==0.33.0", "--html", "page.html")
    assert code == 1
    assert "what it did" in out
    assert "because" in out
    assert (tmp_path / "page.html").exists()
    assert "calls" in out and "vllm/v1/core/sched/scheduler.py: " in out
    code, out, _ = kvspec("replay", str(path), "--impl", "vllm==0.33.0", "--json", "-")
    called = json.loads(out)["replays"][0]["called"]
    [functions] = (line for line in called if line.startswith("vllm/v1/core/sched/scheduler.py"))
    assert "Scheduler.schedule" in functions
    code, out, _ = kvspec("export", str(path), "--as", "story", "--impl", "vllm==0.33.0")
    assert code == 0
    assert "slot 0 of block 8 is" in " ".join(out.split())
    assert "kv_committed_len" not in out
    named = ("--name", "a_name_of_four_words", "--story", "A story of what happens.", "--out", ".")
    code, out, _ = kvspec("new-fixture", str(path), "--impl", "vllm==0.33.0", *named)
    made = traces.load(tmp_path / "a_name_of_four_words.json")
    assert code == 0 and len(made.expected) == len(made.commands)
    code, _, err = kvspec("new-fixture", str(path), *named, "--force")
    assert code == 2 and "no system that violates it" in err


# Faults of vLLM 0.33.0: each is seen, every clause is the first to see one, and each makes a unit test.
FAULTS = planted_faults("vllm/faults.toml")

# they compare host memory with what is in flight
UNSEEN = {"HOST-1", "HOST-3", "XFER-1", "XFER-2", "XFER-3"}
NO_OBJECT = "no object of the scheduler shows it"
NO_DRAFTER = "# a drafter has KV of its own, and the test of a scheduler has no drafter"
# Rounds of drafts, checkpoints within a chunk, and the states that a request keeps.
OF_THE_WORKER = "recurrent state is the worker's, and the test has a scheduler alone"
KEPT_BY_THE_WORKER = {
    "count-of-another-request",
    "window-does-not-move-with-its-state",
    "boundary-state-is-not-saved",
    "checkpoint-one-hash-early",
    "running-state-counts-as-skipped",
    "boundary-state-goes-over-the-running-one",
    "chunk-of-a-prompt-keeps-drafts",
}
SHOWN_BY_NO_OBJECT = {
    "an_eviction_gives_up_beside_idle_copies",
    "new_weights_find_old_copies_in_host_memory",
    "new_weights_find_old_copies_in_host_memory_in_time",
    "a_next_turn_stores_blocks_of_two_groups_twice",
    "two_requests_preempt_each_other_for_ever",
    "a_running_request_preempts_itself_for_ever_beside_a_waiting_turn",
    "a_turn_that_ends_twice_leaves_its_session_without_a_schedule",
    "a_turn_that_ends_twice_leaves_another_request_without_a_schedule",
    "a_turn_that_ends_twice_leaves_a_running_request_without_a_schedule",
    "a_turn_that_ends_inside_a_round_gets_a_token_of_the_step_in_flight",
    "a_reset_of_host_memory_keeps_the_record_of_a_finished_request",
    "a_reset_of_host_memory_keeps_the_record_of_a_finished_request_in_time",
}


# By day each branch of each clause has its rows (test_clause_rows.py).
@at_night
def test_a_fault_is_seen_first_by_its_clause_and_makes_a_unit_test_and_the_release_conforms(vllm):
    vllm("0.33.0")  # or it is unavailable
    seen = {}
    for suite in ("vllm", "vllm+images"):
        text = output_of("stateful_tests.tests.support.fault_runs", suite, "--replay")
        seen |= json.loads(text)
    first = {name: each["with"][:1] for name, each in seen.items()}
    assert first == {name: [fault.clause] for name, fault in FAULTS.items()}
    assert [name for name, each in seen.items() if each["without"]] == []
    tested = {name: each["exported"] for name, each in seen.items()}
    # What goes wrong in the worker alone, no object of the scheduler shows.
    worker = [name for name, fault in FAULTS.items() if "/worker/" in fault.file]
    not_shown = dict.fromkeys(worker, ["passes"] * 2)
    for name, fault in FAULTS.items():
        if {*seen[name]["with"]} <= UNSEEN or name == "session-text-lost-in-the-worker":
            not_shown[name] = [f"# {fault.clause}: {NO_OBJECT}"] * 2
    for name in KEPT_BY_THE_WORKER:
        not_shown[name] = [f"# {FAULTS[name].clause}: {OF_THE_WORKER}"] * 2
    for name in ("new-weights-beside-running-requests", "new-weights-leave-host-memory"):
        not_shown[name] = [
            "# new weights: the test of a scheduler has no server that loads them"
        ] * 2
    for name in (
        "a-preemption-drops-what-was-computed-and-begins-anew",
        "a-preempted-request-is-not-queued",
    ):
        not_shown[name] = [f"# {FAULTS[name].clause}: {NO_OBJECT}"] * 2
    for name, fault in FAULTS.items():
        sizes = config_of(BLOCKS, fault.sizes)
        if sizes.draft_group is not None:
            not_shown[name] = [NO_DRAFTER] * 2
        if sizes.storage or sizes.simple:
            of_pool = "host memory is a pool of blocks"
            what = "a storage stands behind host memory" if sizes.storage else of_pool
            not_shown[name] = [f"# {what}, and the test of a scheduler has none"] * 2
    for name in (name for name, fault in FAULTS.items() if "images" in fault.spec.ways):
        not_shown[name] = [
            "# prompts have images, and the test of a scheduler has no encoder"
        ] * 2
    assert tested == {name: not_shown.get(name, ["fails", "passes"]) for name in FAULTS}


def test_every_clause_is_the_first_to_see_a_fault():
    # whom the front end of vLLM refuses is played; LMDeploy's own bound is driven
    assert {*BLOCK_CLAUSES} - {"PRO-3"} <= {fault.clause for fault in FAULTS.values()}
    of_lmdeploy = planted_faults("lmdeploy/faults.toml").values()
    assert any("PRO-3" in fault.caught_by for fault in of_lmdeploy)
