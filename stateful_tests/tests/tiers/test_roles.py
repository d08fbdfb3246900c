"""Releases as a server that only decodes or only prefills: prompts, turns, and what is refused."""

from dataclasses import replace

import pytest

from ci.explain.tier_places import facts_at
from ci.report import report_data as report
from ci.report.pages import trace_page
from impl.adapter import UnusableImplementation
from reference.commands import Mode, Reason, Refused
from reference.failures import AtSlot
from reference.tiers.config import tier_preset
from reference.tiers.facts import TierRequestState
from stateful_tests.lockstep.driven_kinds import check_fits
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.tiers.lines import commands

RECEIVED = "await h1 a6; greet h1; poll; arrive h1; poll"


def test_a_prompt_is_received_decoded_retracted_and_given_up(newest):
    lines = RECEIVED + "; decode h1; retract h1; poll; decode h1; last_token h1"
    lines += "; await h2 a6b1; greet h2; poll; abort h2; poll; arrive h2; poll"
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None
    told = [line for row in run.rows for line in row.tree]
    parts = (
        "h1: waits",
        "h1: receives, row",
        "the prefill server still writes device full 2-7",
        "h1: runs, row",
        "h1 reads [0, 6)",
        "h1 reads [0, 7)",
        "h1: retracted",
        "h1 is gone",
        "h2: held, row",
        "h2 is gone",
    )
    for part in parts:
        assert any(part in line for line in told), (part, told)
    html = trace_page.page(report.replay_data("t.json", run) | {"replay": "kvspec replay t.json"}, run)
    assert "h1 (receives), device full 2" in html and "slots are still to be written" in html
    message = str(facts_at(AtSlot("full", 2, host=False), run.history[3]))
    assert run.history[3].facts.requests[0].writing
    assert "h1" in message
    assert "the prefill server of h1" in message


@pytest.mark.parametrize(("lines", "reason"), [
    ("await h1 a2; await h1 a2", Reason.REQUEST_EXISTS), ("await h1 a29", Reason.ROW_TOO_SHORT),
    ("greet h1", Reason.UNKNOWN_REQUEST), ("await h1 a2; greet h1; greet h1", Reason.WRONG_PHASE),
    ("await h1 a2; arrive h1", Reason.EMPTY), ("expire", Reason.EMPTY),
    ("last_token h1", Reason.UNKNOWN_REQUEST),
    ("await h1 a2; last_token h1", Reason.WRONG_PHASE),
    ("await h1 a2; fail_peer h1; fail_peer h1", Reason.WRONG_PHASE),
    (RECEIVED + "; decode h1, h1", Reason.DUPLICATE_LANE), (RECEIVED + "; fail_peer h1", Reason.WRONG_PHASE),
    (RECEIVED + "; decode h1; decode h1; decode h1; decode h1", Reason.UNFAITHFUL),
    ("abort h1", Reason.UNKNOWN_REQUEST),
    ("insert h1 a2", Reason.UNFAITHFUL),
])  # fmt: skip
def test_commands_that_do_not_apply_to_a_decode_server_are_refused(newest, lines, reason):
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


def test_held_slots_are_freed_when_nobody_will_write_them(newest):
    lines = "await h1 a4; greet h1; poll; fail_peer h1; poll; expire; poll"
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    states = [[request.state for request in moment.facts.requests] for moment in run.history[-5:]]
    assert run.violation is None and states == [["receives"], ["fails"], ["held"], ["held"], []]


SAID = RECEIVED.replace("a6", "a6 (session)") + "; decode h1; last_token h1"


def test_a_session_keeps_the_kv_of_a_turn_until_the_close(newest):
    lines = SAID + "; close h1; await h1 a2; close h2; await h3 b2 (session); abort h3; close h3"
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    kept = [[(r.name, r.state) for r in moment.facts.requests] for moment in run.history[-7:]]
    assert run.violation is None and kept[:2] == [[("session h1", TierRequestState.IDLE)], []]
    assert [row.outcome for row in run.rows[9:10]] == [Refused(Reason.UNKNOWN_SESSION)]


@pytest.mark.parametrize("lines, reason", [
    (SAID + "; await h1 b2", Reason.REQUEST_EXISTS),
    (SAID + "; await h1 b40 (session)", Reason.ROW_TOO_SHORT),
    (RECEIVED.replace("a6", "a6 (session)") + "; close h1; close h1", Reason.SESSION_CLOSING),
])  # fmt: skip
def test_commands_that_do_not_apply_to_a_session_of_a_decode_server_are_refused(newest, lines, reason):
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


SENT = "await h1 a7; greet h1; poll; extend h1 +4; extend h1 +9"


def test_a_prompt_is_computed_in_chunks_sent_and_given_up(newest):
    lines = SENT + "; arrive h1; poll; await h2 a4b1; greet h2 prefix 2; poll; extend h2 +9; abort h2; poll"
    run = replay(newest, Trace(tier_preset("prefill"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None
    told = [line for row in run.rows for line in row.tree]
    parts = (
        "h1: greeted",
        "h1: queued, row 0 of metadata",
        "h1: computes, row ",
        "device full 2-5 is handed in as [0, 4) of h1",
        "h1: sends, row ",
        "is handed in as [4, 7) of h1",
        "what was handed in of h1 is read, or given up",
        "h1 is gone",
        "h2 reads [0, 4)",
        "device full 4-5 is handed in as [2, 4) of h2",
        "h2: fails, row ",
        "h2 is gone",
    )
    for part in parts:
        assert any(part in line for line in told), (part, told)
    assert any(
        "is handed in as [0, 4)" in line for line in run.rows[4].tree
    )  # before the next chunk
    html = trace_page.page(report.replay_data("t.json", run) | {"replay": "kvspec replay t.json"}, run)
    assert "to be read for h1, from position 4 on" in html and "row 0 of metadata" in html
    message = str(facts_at(AtSlot("full", 2, host=False), run.history[5]))
    assert "the decode server of h1" in message and "reads it" in message


@pytest.mark.parametrize(("preset", "lines", "states"), [
    ("prefill", "await h1 a7; greet h1; poll; extend h1 +4; abort h1; poll", ["computes", None]),
    ("prefill", "await h1 a4; greet h1; poll; fail_peer h1; poll", ["fails", None]),
    ("prefill-overlap", SENT + "; abort h1; poll", ["launched", None]),
    ("prefill-overlap", SENT + "; poll; fail_peer h1; poll", ["fails", None]),
    ("prefill-early", SENT.replace("greet h1; ", "") + "; poll; greet h1; poll", ["parked", "sends"]),
    ("prefill-early", SENT.replace("greet h1; ", "") + "; poll; fail_peer h1; poll", ["fails", None]),
    ("prefill-plain", SENT + "; poll; arrive h1; poll", ["sends", None]),
    ("prefill-window", SENT + "; poll; arrive h1; poll", ["sends", None]),
])  # fmt: skip
def test_a_prompt_comes_to_an_end_on_a_server_that_only_prefills(newest, preset, lines, states):
    """Its state before the last command, and after."""
    run = replay(newest, Trace(tier_preset(preset), Mode.FAITHFUL, commands(lines)))
    found = [[*moment.facts.requests, None][0] for moment in run.history[-2:]]
    assert run.violation is None
    assert [request and request.state for request in found] == states


def test_a_prompt_that_yields_is_computed_again(newest):
    """Only one row is there, and its request waits for a decode server that does not answer."""
    sizes = replace(tier_preset("prefill"), rows=1, attempts=1)
    lines = "await h1 a4; poll; extend h1 +4; await h2 b4; greet h2; poll; extend h2 +4"
    run = replay(newest, Trace(sizes, Mode.FAITHFUL, commands(lines)))
    states = [[request.state for request in moment.facts.requests] for moment in run.history[-3:]]
    assert run.violation is None and states[0] == ["parked", "greeted"]
    assert states[1:] == [["waits", "queued"], ["waits", "sends"]]


@pytest.mark.parametrize(("lines", "reason"), [
    ("await h1 a2; await h1 a2", Reason.REQUEST_EXISTS), ("await h1 a26", Reason.ROW_TOO_SHORT),
    ("await h1 a2 (session)", Reason.UNFAITHFUL), ("greet h1", Reason.UNKNOWN_REQUEST),
    ("await h1 a4; greet h1 prefix 1", Reason.BAD_LENGTH),
    ("await h1 a4; greet h1 prefix 4", Reason.BAD_LENGTH),
    ("await h1 a2; greet h1; greet h1", Reason.WRONG_PHASE), ("await h1 a2; arrive h1", Reason.EMPTY),
    ("await h1 a2; extend h1 +1", Reason.WRONG_PHASE), ("extend h1 +1", Reason.UNKNOWN_REQUEST),
    ("await h1 a2; fail_peer h1; fail_peer h1", Reason.WRONG_PHASE),
    ("await h1 a4; greet h1; await h2 b4; greet h2; poll; extend h1 +2; extend h2 +2", Reason.WRONG_PHASE),
    ("await h1 a4; greet h1; poll; extend h1 +2, h1 +2", Reason.DUPLICATE_LANE),
    ("await h1 a4; abort h1; abort h1", Reason.WRONG_PHASE), ("abort h1", Reason.UNKNOWN_REQUEST),
    ("decode h1", Reason.UNFAITHFUL), ("insert h1 a2", Reason.UNFAITHFUL),
])  # fmt: skip
def test_commands_that_do_not_apply_to_a_prefill_server_are_refused(newest, lines, reason):
    run = replay(newest, Trace(tier_preset("prefill"), Mode.FAITHFUL, commands(lines)))
    assert run.violation is None and run.rows[-1].outcome == Refused(reason)


def test_a_prefix_is_no_part_of_an_answer_to_a_decode_server(newest):
    lines = commands("await h1 a4; greet h1 prefix 2")
    run = replay(newest, Trace(tier_preset("decode"), Mode.FAITHFUL, lines))
    assert run.rows[-1].outcome == Refused(Reason.UNFAITHFUL)


def test_a_release_whose_prefill_server_is_not_driven_says_so():
    with pytest.raises(UnusableImplementation, match="is not driven as a server that only prefills"):
        check_fits(resolve("sglang==0.5.22+hicache"), tier_preset("prefill"))


def test_a_release_whose_queues_are_not_driven_says_so():
    with pytest.raises(UnusableImplementation, match="is not driven as a server that only decodes"):
        check_fits(resolve("sglang==0.5.21+hicache"), tier_preset("decode"))
