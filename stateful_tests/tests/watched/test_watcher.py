"""The watcher harms no server: its hooks and its files."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Bag
from typing import Any

import pytest
import torch

from ci.bench.watcher_costs import _overhead_percent
from impl.adapter import UnusableImplementation
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.server import hooks, tier
from impl.sglang.server.events import (
    VERSION,
    QueueAborted,
    Flushed,
    HookFailed,
    Released,
    Requeued,
    Snapshot,
    Stepped,
    Submitted,
)
from impl.sglang.server.hooks import POINTS, around
from impl.sglang.server.log import EventLog
from impl.sglang.server.watch import Watcher
from impl.sglang.server.outcome import RunOutcome
from impl.sglang.tiers.copy_engine import CopyEngine, CopyJob, Event
from stateful_tests.tests.support.watched_logs import header
from stateful_tests.watched.log_reader import logs_of

RELEASE = TABLE["0.5.23"]()  # its names; nothing is loaded
HEADER = header(version=VERSION, release="0.5.23", window=None, full_tokens=8, swa_tokens=0, rows=2, width=8)


def log_in(folder: Path, **options: int) -> EventLog:
    log = EventLog(folder, **{"most_bytes": 1 << 20, "keep": 4, **options})
    log.header = HEADER
    return log


def step(number: int) -> Stepped:
    return Stepped(
        number=number,
        batch=1,
        queued=0,
        sessions=0,
        full=8,
        swa=0,
        rows=2,
        tree_full=0,
        tree_swa=0,
        tree_locked=0,
        lanes=[],
    )


def test_a_log_is_read_back(tmp_path):
    log = log_in(tmp_path)
    for number in range(1, 4):
        log.put(step(number))
    log.close()
    (log_file,) = logs_of([tmp_path])
    assert [line.event.number for line in log_file.lines()] == [1, 2, 3]


def test_files_rotate_at_a_snapshot_and_the_newest_stay(tmp_path):
    log = log_in(tmp_path, most_bytes=200, keep=2)
    for number in range(1, 6):
        log.put(step(number))
        log.flush()
        if log.wants_snapshot:
            log.wants_snapshot = False
            log.put(Snapshot(0, [], []))
    log.close()
    files = sorted(tmp_path.glob("*.jsonl"))
    assert len(files) == 2 and not files[0].name.endswith("0001.jsonl")
    for file in files:
        head, first, *_ = file.read_text().splitlines()
        assert json.loads(head)["part"] > 1 and json.loads(first)[1][0] == "snapshot"


def test_a_full_queue_drops_and_asks_for_a_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr("impl.sglang.server.log.MAX_QUEUED_EVENTS", 2)
    monkeypatch.setattr("impl.sglang.server.log.FLUSH_PERIOD_S", 60.0)
    log = log_in(tmp_path)
    for number in range(5):
        log.put(step(number))
    assert log.dropped == 3 and log.wants_snapshot
    log.close()


def test_a_snapshot_replaces_a_step_whose_events_were_lost(tmp_path):
    watcher = Watcher(RELEASE)
    log = log_in(tmp_path)
    watcher.every = 512
    watcher.log = log
    watcher._counts = lambda: (8, 0, 2, 0, 0, 0)
    watcher._states = lambda: 0
    watcher.reader = Bag(
        snapshot=lambda _, __, dropped: Snapshot(dropped, [], []), entries=lambda: 0
    )
    batch = Bag(reqs=[Bag()], forward_mode=Bag(is_decode=lambda: False), decoding_reqs=None)
    scheduler = Bag(waiting_queue=[], session_controller=Bag(sessions={}))
    for dropped in (0, 3, 0):
        log.dropped = dropped
        watcher.step(Bag(batch_to_run=batch), scheduler)
    log.wants_snapshot = True  # a file is full
    watcher.step(Bag(batch_to_run=batch), scheduler)
    log.close()
    assert log.dropped == 0 and not log.wants_snapshot
    (log_file,) = logs_of([tmp_path])
    events = [getattr(line.event, "dropped", "step") for line in log_file.lines()]
    assert events == ["step", 3, "step", "step", 0]


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = log_in(tmp_path / "file" / "logs")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            log.put(step(number))
            log.flush()
    log.close()
    assert [r.message[:26] for r in caplog.records] == ["kvspec watches no longer: "]


FULL = """
import resource, sys
from pathlib import Path
from impl.sglang.server.events import VERSION, Stepped
from impl.sglang.server.log import EventLog
from stateful_tests.tests.support.watched_logs import header
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
log = EventLog(Path(sys.argv[1]), most_bytes=1 << 20, keep=4)
sizes = {"window": None, "full_tokens": 8, "swa_tokens": 0, "rows": 2, "width": 8}
log.header = header(version=VERSION, release="0.5.23", **sizes)
for number in range(1, 201):
    log.put(Stepped(number, 1, 0, 0, 8, 0, 2, 0, 0, 0, []))
    if not number % 50:
        log.flush()
log.close()
print("goes on")
"""


def test_a_full_disk_is_one_warning_and_leaves_a_readable_log(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True
    )
    assert process.stdout == "goes on\n" and process.stderr.count("kvspec watches no longer") == 1, (
        process.stderr
    )
    assert process.stderr.count("\n") == 1
    (log_file,) = logs_of([tmp_path])
    assert len(list(log_file.lines())) > 20
    assert log_file.cut is not None
    assert log_file.bytes == 4000


def watching() -> tuple[Watcher, list[Any]]:
    watcher = Watcher(RELEASE)
    noted = []
    watcher.on = True
    watcher.put = noted.append
    return watcher, noted


def four_tokens() -> Bag:
    """Return what a request keeps."""
    return Bag(
        req_pool_idx=0,
        kv_committed_len=4,
        kv_allocated_len=4,
        max_evicted_seqlen=0,
        cache_protected_len=0,
    )


def test_a_hook_that_fails_harms_nobody():
    watcher, noted = watching()
    hooked = around(watcher, "queue")
    # no origin_input_ids: the hook breaks
    assert hooked(lambda *_: "done", None, Bag(rid="r1")) == "done"
    assert [type(n) for n in noted] == [HookFailed] and "origin_input_ids" in noted[0].error


def test_exceptions_of_the_server_pass_through_the_hooks():
    watcher, noted = watching()

    def breaks(*_):
        raise RuntimeError("own")

    with pytest.raises(RuntimeError, match="own"):
        around(watcher, "abort")(breaks, Bag(waiting_queue=[]), Bag(abort_all=False, rid="r"))
    assert not noted


def test_idle_steps_are_not_written():
    watcher, noted = watching()
    around(watcher, "step")(lambda *_: Bag(batch_to_run=None), Bag())
    assert not noted


def test_a_flush_is_noted_once_it_is_done(tmp_path):
    watcher, noted = watching()
    flush = around(watcher, "flush")
    flush(lambda *_: True, Bag())  # nothing has run: there was nothing to empty
    watcher.log = log_in(tmp_path)
    watcher._counts = lambda: (5, 4, 3, 2, 1, 0)
    for done in (False, True):
        assert flush(lambda *_, done=done: done, Bag()) is done
    watcher.log.close()
    assert noted == [Flushed(2 + 1)]


def test_requests_retracted_by_a_pause_are_queued_again():
    """SGLang queues it without saying so."""
    watcher, noted = watching()
    kv = four_tokens()
    limit = Bag(max_new_tokens=3)
    request = Bag(
        rid="r1", session=None, kv=kv, finished_reason=None, to_finish=None, output_ids=[7],
        finished_len=None, sampling_params=limit, origin_input_ids=[1, 2, 3, 4],
    )  # fmt: skip
    around(watcher, "release")(lambda *_, **__: None, request, None, checkpoint=False)
    scheduler = Bag(max_queued_requests=None)
    for _ in range(2):
        around(watcher, "queue")(lambda *_: None, scheduler, request)
    assert [type(event) for event in noted] == [Released, Requeued, Submitted]
    around(watcher, "release")(lambda *_, **__: None, request, None, checkpoint=False)
    around(watcher, "step")(lambda *_: Bag(batch_to_run=None), Bag())
    around(watcher, "queue")(lambda *_: None, scheduler, request)
    assert [type(event) for event in noted[3:]] == [Released, Submitted], "its name is used again"


@pytest.mark.parametrize("left, rejected", [(("r1", "r2"), None), (("r2",), "r1"), (("r1",), "r2")])
def test_the_limit_of_the_queue_rejects_who_comes_or_who_waits(left, rejected):
    watcher, noted = watching()
    waits, comes = (
        Bag(rid=name, session=None, to_finish=None, finished_reason=None, origin_input_ids=[1])
        for name in ("r1", "r2")
    )
    scheduler = Bag(max_queued_requests=1, waiting_queue=[waits])

    def queues(*_):
        scheduler.waiting_queue = [req for req in (waits, comes) if req.rid in left]

    around(watcher, "queue")(queues, scheduler, comes)
    aborted = [QueueAborted([rejected])] if rejected else []
    assert noted[1:] == aborted and isinstance(noted[0], Submitted)


def test_a_request_that_waits_for_room_is_written_once():
    watcher, noted = watching()
    kv = four_tokens()
    request = Bag(rid="r1", session=None, prefix_len=4, kv=kv)
    for _ in range(3):
        around(watcher, "admit")(lambda *_: None, request)
    kv.kv_allocated_len = 5
    around(watcher, "admit")(lambda *_: None, request)
    assert [n.cursors for n in noted] == [(4, 4, 0, 0), (4, 5, 0, 0)]


@pytest.mark.parametrize("name", sorted({name for *_, name in POINTS}))
def test_every_point_has_a_hook(name):
    assert callable(getattr(Watcher(RELEASE), name))


def test_a_server_whose_names_are_not_known_is_not_watched(monkeypatch, caplog):
    """One line says what it lacks, and it serves."""

    def lacks():
        raise UnusableImplementation("managers/scheduler.py: Scheduler has no waiting_queue")

    monkeypatch.setenv("KVSPEC_WATCH", "logs")
    monkeypatch.setattr(hooks, "installed_release", lacks)
    hooks.register()
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert "not watched: managers/scheduler.py: Scheduler has no waiting_queue" in record.message


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("LEVEL", "all", "neither lengths nor pages"),
        ("MB", "64M", "KVSPEC_WATCH_MB: '64M' is no number"),
    ],
)
def test_settings_that_are_none_end_no_server(name, value, says, monkeypatch, caplog):
    monkeypatch.setenv("KVSPEC_WATCH", "logs")
    monkeypatch.setenv(f"KVSPEC_WATCH_{name}", value)
    monkeypatch.setattr(hooks, "installed_release", lambda: RELEASE)
    hooks.register()
    [record] = caplog.records
    assert says in record.message


def test_a_server_says_where_its_log_is(tmp_path, caplog):
    caplog.set_level("INFO")
    watcher = Watcher(RELEASE, {"KVSPEC_WATCH": str(tmp_path)})
    watcher._open(Bag(header=dict, counts=tuple, states=tuple)).close()
    assert f"this scheduler is watched, its log is in {tmp_path}" in caplog.text


def test_the_overhead_excludes_what_one_process_is_slower_by():
    rounds = [1.0, 1.0, 3.0, 0.5, 2.0, 1.5, 3.0, 0.7]
    # the second is slower
    runs = [[1.2 * s if second else s for s in rounds] for second in (False, True)]
    for index in range(len(rounds)):
        runs[index % 2][index] *= 1.03  # the first is watched at first
    first, second = (RunOutcome(0, 0, [], {}, blocks_s=blocks) for blocks in runs)
    assert _overhead_percent(first, second) == pytest.approx(3.0)
    assert _overhead_percent(second, first) == pytest.approx(100 / 1.03 - 100)


def test_numbers_of_other_libraries_are_written(tmp_path):
    class Scalar:
        def __int__(self):
            return 7

    log = log_in(tmp_path)
    log.put(
        Stepped(
            number=1,
            batch=1,
            queued=0,
            sessions=0,
            full=Scalar(),
            swa=0,
            rows=2,
            tree_full=0,
            tree_swa=0,
            tree_locked=0,
            lanes=[],
        )
    )
    log.close()
    (log_file,) = logs_of([tmp_path])
    assert [line.event.full for line in log_file.lines()] == [7]


def test_a_free_list_has_two_parts_up_to_0_5_19():
    pool = Bag(free_pages=torch.tensor([3, 1]), release_pages=torch.tensor([2]))
    assert TABLE["0.5.19"]().free_pages(pool) == [3, 1, 2]


def test_transfers_of_the_release_s_own_engine_are_noted():
    """Each is there with its slots once it is submitted; its event says when it is over."""
    event = Event()
    pool = object()
    event.moving = CopyEngine(), CopyJob(load=False, parts=[], finish=event)
    engine = Bag(
        submit_device_to_host=lambda transfers: Bag(finish_event=event, count=len(transfers)),
        submit_host_to_device=None,
    )
    moved = Bag(
        device_pool=pool, device_indices=torch.tensor([1, 2]), host_indices=torch.tensor([2, 0])
    )
    noted = tier._Noted(engine, {"full": (pool, 3, 3)})
    assert engine.submit_device_to_host([moved]).count == 1
    (job,) = noted.completed
    assert job.parts == [("full", 1, 2), ("full", 2, 0)]
    assert not (job.load or job.copied or job.completed)
    event.moving = None
    assert job.copied
    assert job.completed
    assert noted.memory == noted.host == {"full": [0, 0, 0]}
