"""Logs of a prefill and of a decode server: what each does to KV that crosses, and both joined."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import convert

from ci.cli import run
from impl.adapter import UnusableImplementation
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.server import environment, transfers
from impl.sglang.server.events import (
    VERSION, Event, HookFailed, KVArrived, KVGivenBack, KVNamed, KVSent, Queued, Rested, Snapshot,
    WatchHeader,
)  # fmt: skip
from impl.sglang.server.hooks import around
from impl.sglang.server.runs import WholeScheduler
from impl.sglang.server.transfers import TransferHooks
from impl.sglang.server.watch import Watcher
from impl.sglang.server.worker import Job
from stateful_tests.tests.support.night import at_night
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.watched import log_facts
from stateful_tests.watched.servers import server_pairs
from stateful_tests.watched.log_reader import Line, logs_of
from stateful_tests.watched.actions.transfers import compare_pair_logs
from stateful_tests.watched.validator import Validator

RELEASE = "0.5.23"
PAIR = Path(__file__).parents[3] / "fixtures" / "watched" / "pair"
ASKED = Queued("r1", 7, 6, 1.0)
FIRST = KVSent("r1", room=7, start=0, end=4, last=False, pages=[1, 2])
LAST = KVSent("r1", room=7, start=4, end=6, last=True, pages=[3])
NAMED = KVNamed("r1", 7, 0, 6, [4, 5, 6])
OVER = KVGivenBack("r1", 7, "success", [1, 2, 3])


def test_the_oldest_closed_rooms_are_forgotten(monkeypatch):
    monkeypatch.setattr(log_facts, "MAX_ROOMS", 4)
    seen = log_facts.TransfersSeen()
    for room in range(5):
        seen.add_room(room, log_facts.Crossing("r1", is_open=room == 1))
    assert [*seen.rooms] == [1, 3, 4]


def read_by_validator(role: str, events: Sequence[Event], lost: int = 0, **more: object) -> Validator:
    """Return the validator of a log with these events.

    lost: lines that are missing before the last one.
    """
    about = header(version=VERSION, release=RELEASE, page_size=2, role=role, level="pages")
    validator = Validator(convert({**about, **more}, WatchHeader))
    for number, event in enumerate(events, 2):
        validator.read(Line("a.jsonl", number, event, lost * (number == len(events) + 1)))
    return validator


def rest(tokens: int = 0, kept: dict[str, str] | None = None, **rooms: list[int]) -> Rested:
    return Rested(tokens, kept or {}, rooms, 2.0)


@pytest.mark.parametrize(
    ("role", "events", "found"),
    [
        ("prefill", (ASKED, FIRST, LAST, OVER, rest(), rest()), None),
        ("prefill", (ASKED, FIRST, KVSent("r1", room=7, start=5, end=6, last=True)),
         "PD-6 r1: sends from 4 on"),
        ("prefill", (ASKED, KVSent("r1", room=7, start=0, end=4, last=True)), "PD-6 r1: sends all 6 tokens"),
        ("prefill", (ASKED, FIRST, KVGivenBack("r1", 7, "transferring")), "PD-1 r1: keeps [0, 4)"),
        ("prefill", (ASKED, FIRST, KVGivenBack("r1", 7, "failed", [8, 9])), None),
        ("prefill", (ASKED, FIRST, LAST, KVGivenBack("r1", 7, "success", [1, 9, 3])),
         "PD-1 r1: page 2 at position 2"),
        ("decode", (ASKED, NAMED, KVArrived("r1", 7, [4, 5, 6])), None),
        ("decode", (ASKED, NAMED, KVArrived("r1", 7, [4, 5, 9])), "XFER-2 r1: page 6 at position 4"),
        ("decode", (ASKED, NAMED, KVGivenBack("r1", 7, "waiting")), "XFER-2 r1: keeps [0, 6)"),
        ("decode", (rest(6), rest(6)), "PD-2 keeps nothing"),
        ("decode", (rest(6), rest()), None),
        ("decode", (rest(kept={"rows": "1 of 4"}),) * 2, "PD-5 keeps nothing"),
        ("decode", (ASKED, rest(request_status=[7]), rest(request_status=[7])), "PD-5 keeps nothing"),
        ("decode", (rest(request_status=[7]), rest(request_status=[7])), None),  # its peer was first
        ("prefill", (ASKED, rest(_deferred_ack_targets=[7]), rest(_deferred_ack_targets=[7])), None),
        ("prefill", (ASKED, FIRST, LAST, OVER, *(rest(request_status=[7]),) * 2), "PD-5 keeps nothing"),
    ],
)  # fmt: skip
def test_each_side_is_judged_by_the_log_of_that_side(role, events, found):
    result = read_by_validator(role, events).result
    mismatches = [f"{mismatch.clause} {mismatch.expected}" for mismatch in result.unexplained]
    assert [text[: len(found or "")] for text in mismatches] == ([found] if found else [])
    assert result.events == len(events) and not result.skipped


@pytest.mark.parametrize(
    ("role", "events", "known"),
    [
        ("prefill", (ASKED, FIRST, LAST, KVGivenBack("r1", 7, "success", [1, 9, 3])),
         "sent-page-is-replaced"),
        ("prefill", (ASKED, *(rest(transfer_infos=[7]),) * 2), "aborted-prefill-leaves-its-room"),
        ("prefill", (ASKED, FIRST, *(rest(transfer_infos=[7]),) * 2), "late-metadata-revives-a-room"),
        ("prefill", (ASKED, *(rest(_staging_outstanding=[7]),) * 2), "failed-room-stays-poisoned"),
        ("decode", (ASKED, *(rest(_deferred_abort_ack_tracker=[7]),) * 2),
         "unnamed-pages-wait-for-acknowledgement"),
    ],
)  # fmt: skip
def test_known_faults_of_a_side_are_named(role, events, known):
    result = read_by_validator(role, events, speculative=True).result
    assert [mismatch.known for mismatch in result.mismatches] == [known]


@pytest.mark.parametrize(
    ("role", "events", "situations"),
    [
        ("prefill", (ASKED, FIRST), []),
        ("prefill", (ASKED, FIRST, LAST), ["a prompt that is sent in parts"]),
        ("decode", (ASKED, NAMED), []),
        ("decode", (ASKED, KVNamed("r1", 7, 2, 6, [5, 6])), ["a prefix that the decode server has"]),
        ("decode", (ASKED, NAMED, KVGivenBack("r1", 7, "failed")), ["a transfer that fails"]),
    ],
)  # fmt: skip
def test_situations_of_transfers_are_counted(role, events, situations):
    reached = read_by_validator(role, events).result.reached
    assert [situation for situation, times in reached.items() if times] == situations


@pytest.mark.parametrize("holds_less", [{"speculative": True}, {"states": 8, "tracks": 1}])
def test_a_page_is_replaced_where_the_tree_holds_less_than_a_chunk(holds_less):
    replaced = KVGivenBack("r1", 7, "success", [1, 9, 3])
    result = read_by_validator("prefill", (ASKED, FIRST, LAST, replaced), **holds_less).result
    assert [mismatch.known for mismatch in result.mismatches] == ["sent-page-is-replaced"]


def test_a_rest_that_stays_is_reported_once():
    assert len(read_by_validator("decode", [rest(kept={"rows": "1 of 4"})] * 5).result.unexplained) == 1


@pytest.mark.parametrize("gap", [True, False])
def test_a_lost_line_may_have_closed_a_room(gap):
    early = KVGivenBack("r1", 7, "waiting")
    events = [ASKED, NAMED, *([] if gap else [Snapshot(3, [], [])]), early]
    result = read_by_validator("decode", events, lost=2 * gap).result
    assert not result.unexplained and bool(result.skipped) is gap


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ((FIRST, LAST), None),
        ((FIRST,), "it has not"),
        ((KVSent("r1", room=7, start=2, end=6, last=True),), "the prefill server has sent [2, 6)"),
    ],
)
def test_both_logs_are_joined_by_room(sent, says):
    waits = Queued("r0", 6, 6, 1.0)
    prefill = read_by_validator("prefill", [waits, ASKED, *sent])
    decode = read_by_validator("decode", [waits, ASKED, NAMED, KVArrived("r1", 7, [4, 5, 6])])
    found = [comparison.verdict.observed for comparison in compare_pair_logs(prefill, decode)]
    assert found == ([says] if says else [])
    assert not [*compare_pair_logs(prefill, read_by_validator("decode", [ASKED, NAMED]))], (
        "it has not arrived"
    )


def test_logs_of_a_pair_are_validated_together(capsys):
    assert run(["validate", str(PAIR)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "a prefill server: its transfers, and not its batches" in output
    assert "known faults: sent-page-is-replaced (1)" in output and "steps" not in output
    assert run(["validate", str(PAIR), "-v"]) == 0
    assert "UTC, c2.1, room 2" in " ".join(capsys.readouterr().out.split())


def test_a_log_without_pages_says_that_they_are_not_compared(tmp_path, capsys):
    text = (PAIR / "D.jsonl").read_text().replace('"level":"pages"', '"level":"lengths"')
    (tmp_path / "D.jsonl").write_text(text)
    assert run(["validate", str(tmp_path)]) == 0
    assert "pages not compared: the log has none" in " ".join(capsys.readouterr().out.split())


def test_a_request_that_another_has_is_a_mismatch_of_the_pair(tmp_path, capsys):
    for side in "PD":
        text = (PAIR / f"{side}.jsonl").read_text()
        if side == "P":
            text = text.replace('["send","c1.1",1,0,4', '["send","c1.1",1,4,4')
        (tmp_path / f"{side}.jsonl").write_text(text)
    assert run(["validate", str(tmp_path)]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "PD-6" in output and "has sent [4, 17)" in output


class Written:
    """A log in memory."""

    wants_snapshot = False
    dropped = 0

    def __init__(self):
        self.events = []
        self.put = self.events.append


def server(role, **more):
    """Return a scheduler of a server of a pair, as far as the hooks read it."""
    manager = SimpleNamespace(request_status={7: 3}, deferred_bootstrap=None)
    queue = SimpleNamespace(kv_manager=manager, queue=[], pending_reqs=[], retracted_queue=[])
    return SimpleNamespace(
        disaggregation_mode=SimpleNamespace(value=role), page_size=2, waiting_queue=[], result_queue=[],
        chunked_req=None, last_batch=None, disagg_prefill_bootstrap_queue=queue,
        disagg_decode_prealloc_queue=queue, tree_cache=object(), **more,
    )  # fmt: skip


def request(**more):
    return SimpleNamespace(
        rid="r1", bootstrap_room=7, origin_input_ids=[1] * 6, start_send_idx=0,
        kv=SimpleNamespace(req_pool_idx=None), **more,
    )  # fmt: skip


def hooked(role):
    failures = []
    hooks = TransferHooks(lambda *each: failures.append(each))
    scheduler = server(role)
    hooks.begin(scheduler, Written(), pages=False)
    return hooks, scheduler, failures


def test_the_hooks_of_a_prefill_server_write_the_prefill_side():
    hooks, scheduler, failures = hooked("prefill")
    sent_request = request()

    def sends(*_, **__):
        sent_request.start_send_idx = 6

    around(hooks, "queue")(lambda *_: None, scheduler, sent_request)
    around(hooks, "send")(sends, scheduler, sent_request, last_chunk=True)
    around(hooks, "give_back")(lambda *_: None, sent_request, scheduler.tree_cache)
    around(hooks, "give_back")(lambda *_: None, sent_request, scheduler.tree_cache)
    around(hooks, "queue")(lambda *_: None, server("prefill"), sent_request)  # of another scheduler
    assert [type(event) for event in hooks.log.events] == [Queued, KVSent, KVGivenBack]
    _, sent, back = hooks.log.events
    assert (sent.start, sent.end, sent.last, sent.pages) == (0, 6, True, None)
    assert back.status == "transferring" and not failures


def test_a_rest_is_written_when_it_changes_and_once_more_when_it_stays(monkeypatch):
    hooks, scheduler, failures = hooked("decode")
    now = [100.0]
    keeps = [6]
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    monkeypatch.setattr(transfers, "held_tokens", lambda _: keeps[0])
    monkeypatch.setattr(transfers, "leftovers", lambda *_: [])
    monkeypatch.setattr(transfers, "waits", lambda *_: False)
    monkeypatch.setattr(transfers, "rooms_kept", lambda *_: [("request_status", [7]), ("others", [])])

    def looks(after: float, **plan: object) -> int:
        now[0] += after
        around(hooks, "step")(lambda *_: SimpleNamespace(batch_to_run=None, **plan), scheduler)
        return len(hooks.log.events)

    assert [looks(2), looks(0.1), looks(2), looks(70), looks(70)] == [1, 1, 1, 2, 2]
    keeps[0] = 0
    assert looks(2) == 3 and hooks.log.events[-1] == Rested(0, {}, {"request_status": [7]}, 0.0)
    scheduler.waiting_queue = [request()]
    keeps[0] = 6
    assert looks(2) == 3 and not failures
    hooks.log.wants_snapshot = True
    hooks.log.dropped = 4
    assert looks(0) == 4 and hooks.log.events[-1] == Snapshot(4, [], [])


@pytest.mark.parametrize("release", [RELEASE, "0.5.20"])
def test_a_server_of_a_pair_has_no_batches_in_its_log(release, tmp_path, monkeypatch, caplog):
    watcher = Watcher(TABLE[release](), {"KVSPEC_WATCH": str(tmp_path)})
    begun = []
    monkeypatch.setattr(watcher, "watch_transfers", lambda *each: begun.append(each))
    around(watcher, "queue")(lambda *_: None, server("decode"), request())
    assert not watcher.on and len(begun) == (release == RELEASE)
    assert ("servers of a pair of 0.5.20 are not watched" in caplog.text) is (release != RELEASE)


@at_night
@pytest.mark.parametrize(("seed", "level"), [(1, "pages"), (2, "lengths")])
def test_logs_of_random_pairs_show_nothing_new(seed, level, tmp_path):
    try:
        runner = WholeScheduler(environment.python_of(RELEASE))
    except UnusableImplementation as error:
        pytest.skip(f"no server environment: {error}")
    population = server_pairs.PairPopulation(seed)
    for number in range(30):
        config, clients, of_clients, choices = population.draw()
        folder = tmp_path / str(number)
        watch = {"KVSPEC_WATCH": str(folder), "KVSPEC_WATCH_LEVEL": level}
        runner.run(Job(config, clients, of_clients, watch, choices=choices))
        sides = {}
        for side in "PD":
            (log,) = logs_of([folder / side])
            events = [*log.lines()]
            assert not any(isinstance(line.event, HookFailed) for line in events)
            sides[side] = validator = Validator(log.header)
            assert not validator.run(events).unexplained, (number, side)
        assert not [*compare_pair_logs(sides["P"], sides["D"])], number
    runner.close()
