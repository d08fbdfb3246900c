"""Why a server ended, and why a client of it waits."""

from pathlib import Path
from types import SimpleNamespace as Bag

import pytest

from impl.sglang.server import progress
from impl.sglang.server.clients import Client, Clients, Config, Turn
from impl.sglang.server.outcome import RunOutcome
from impl.sglang.server.progress import Room
from stateful_tests.watched.servers import scheduler_runs
from stateful_tests.tests.watched.test_scheduler_runs import RELEASE, WATCHED, FaultyRunner


class RunsOut(FaultyRunner):
    """Runs out of memory after a number of lines of a log."""

    lines = 0

    def run(self, job):
        lines = (
            (WATCHED / "sglang-0.5.23-mixed_batches.jsonl").read_text().splitlines(keepends=True)
        )
        Path(job.watch["KVSPEC_WATCH"], "log.jsonl").write_text("".join(lines[: self.lines]))
        error = "RuntimeError: Prefill out of memory. at srt/mem_cache/allocation.py:9"
        return RunOutcome(10, 20, [], {}, error)


def test_an_end_is_reported_with_the_events_before_it():
    lines = (WATCHED / "sglang-0.5.23-mixed_batches.jsonl").read_text().splitlines()
    runner = RunsOut()
    text_by_kind = {}
    for kind in ("admit", "extend", "step"):
        runner.lines = max(index for index, line in enumerate(lines, 1) if line.startswith(f'["{kind}"'))
        (finding,) = scheduler_runs.serve(runner, scheduler_runs.ServedRun(RELEASE, Config(), (), 1)).new
        assert finding.key == "server RuntimeError srt/mem_cache/allocation.py:"
        text_by_kind[kind] = finding.says.partition("; ")[2]
    assert text_by_kind["admit"] == (
        "since step 52 admission looked at c5.2 (from the queue, input 46); a batch of 1 has run, in which"
        " c6.2 decode; 1 wait; tokens of KV: c6 40, c5 37; 12 were free at that step, SWA 12, 36 evictable"
    )
    assert text_by_kind["extend"].startswith(
        "since step 52 a batch of c5.2 (runs, 46 tokens) was prepared; 0 wait"
    )
    assert text_by_kind["step"].startswith(
        "since step 59 0 wait; tokens of KV: nobody holds any; 92 were free"
    )


SMALL = Room(full=4, swa=4, rows=1)
ROOM = Room(full=9, swa=9, rows=1)
NOTHING = Room(full=0, swa=0, rows=0)
ALL = Room(full=10, swa=10, rows=2)
MORE = Room(full=11, swa=11, rows=1)


@pytest.mark.parametrize(
    "queue, runs, free, idle, prompt, kind",
    [
        (("a.1",), (), ROOM, SMALL, SMALL, "room"),
        (("a.1", "b.1"), (), SMALL, ROOM, SMALL, "sessions"),
        (("a.1",), (), Room(full=9, swa=4, rows=1), Room(full=0, swa=9, rows=0), SMALL, "sessions"),
        (("a.1",), (), SMALL, SMALL, SMALL, "sessions"),
        (("a.1",), (), SMALL, NOTHING, SMALL, "alone"),
        (("a.1",), ("a.1",), SMALL, NOTHING, SMALL, "alone"),
        # what copies on their way lock would not be enough either
        (("a.1",), (), SMALL, NOTHING, ROOM, "margin"),
        (("a.1",), ("b.1",), SMALL, NOTHING, ROOM, "held"),
        (("a.1",), (), SMALL, NOTHING, Room(full=11, swa=9, rows=1), "never"),
        (("a.1",), (), SMALL, NOTHING, Room(full=9, swa=11, rows=1), "chunks"),
        (("a.1",), (), ALL, NOTHING, ROOM, "margin"),
        (("a.1",), (), ALL, NOTHING, SMALL, "strict"),
        (("a.1",), (), SMALL, SMALL, Room(full=9, swa=11, rows=1), "sessions"),
        (("a.1",), (), ROOM, SMALL, Room(full=11, swa=1, rows=1), "room"),
        (("b.1",), (), ROOM, SMALL, SMALL, "lost"),
        ((), ("a.1",), SMALL, SMALL, SMALL, None),
    ],
)
def test_why_a_client_waits(queue, runs, free, idle, prompt, kind, monkeypatch):
    sizes = {"_free_or_evictable": free, "_idle_session_room": idle, "_pool_sizes": ALL, "_input": prompt}
    sizes["_most_ever_held"] = MORE if free == ALL else ROOM
    sizes["_admission_needs"] = ALL if prompt == SMALL else MORE
    for name, found in sizes.items():
        monkeypatch.setattr(progress, name, lambda *_, found=found: found)
    waiting, running = ([Bag(rid=name) for name in names] for names in (queue, runs))
    server = Bag(
        waiting_queue=waiting, chunked_req=None, running_batch=Bag(reqs=running), last_batch=None
    )
    found = progress.explain_stall(Bag(scheduler=server), ["a.1"])
    assert (found and found.kind) == kind


@pytest.mark.parametrize("lengths, found", [
    ([8] * 301, None), ([8] * 302, "livelock"), ([8, 16] + [8, 16] * 150, None), ([8, 16] * 152, "livelock"),
    ([*range(400)], None),
])  # fmt: skip
def test_a_chunk_that_is_computed_again_and_again(lengths, found):
    headway = progress.RequestHeadway()
    for forwards, length in enumerate(lengths, 1):
        headway.note_computed("a.1", length, forwards)
    stall = headway.livelock(len(lengths))
    assert (stall and stall.kind) == found
    headway.note_computed("b.1", 1, len(lengths))
    assert headway.livelock(len(lengths)) is None, "another request got further"


@pytest.mark.parametrize("release, kind, window, known", [
    (RELEASE, "sessions", 0, "idle-sessions-keep-all"), (RELEASE, "room", 0, ""),
    ("9.9.9.dev", "sessions", 0, ""), ("0.5.20", "room", 0, "admission-stays-shut"),
    ("0.5.20", "swa", 0, ""), ("0.5.20", "never", 4, ""), (RELEASE, "alone", 4, ""),
    ("0.5.14", "chunks", 4, "prompt-above-the-swa-pool-waits"), ("0.5.14", "never", 4, ""),
    (RELEASE, "chunks", 4, "own-prefix-is-waited-for"), (RELEASE, "chunks", 0, ""),
    (RELEASE, "chunks", -4, ""),
    ("0.5.14", "margin", 4, "prompt-above-the-swa-pool-waits"),
    ("0.5.14", "margin", 0, "prompt-a-page-below-the-pool-waits"),
    (RELEASE, "margin", 0, "prompt-a-page-below-the-pool-waits"), ("9.9.9.dev", "margin", 0, ""),
])  # fmt: skip
def test_known_faults_say_why_a_client_waits(release, kind, window, known):
    """window: without a tree where it is below 0."""
    outcome = RunOutcome(1, 1, [], {}, stalls=[progress.Stall(kind, "a.1", "waits")])
    run = scheduler_runs.ServedRun(release, Config(window=abs(window), tree=window >= 0), (), 1)
    (finding,) = scheduler_runs._findings(run, outcome, scheduler_runs.Validated())
    assert (finding.judge, finding.key, finding.known) == ("progress", f"stalls: {kind}", known)
    clause = {"never": "PRO-3: waits", "swa": "waits"}.get(kind, "PRO-1: waits")
    assert finding.says == clause


def test_requests_that_wait_for_long_are_reported():
    stalled = []
    waiting = (
        Client("a", 0, (Turn(wait=0, tokens=3, limit=3),)),
        Client("b", 500, (Turn(wait=0, tokens=3, limit=3),)),
    )
    clients = Clients(waiting, 1, stalled.append)
    losing = []
    for now in range(90):
        clients.round(now, 0)
        losing.append(clients.loses_patience)
    assert stalled == [["a.1"]]
    assert losing.index(True) > 30, "copies are slow for some time"
    assert losing[losing.index(True) : 80] == [True] * (80 - losing.index(True)), "then they complete"


@pytest.mark.parametrize("tokens, outputs, full, swa", [(19, 2, 30, 33), (16, 9, 34, 34)])
def test_admission_asks_the_swa_pool_for_whole_pages(tokens, outputs, full, swa):
    request = Bag(origin_input_ids=[1] * tokens, sampling_params=Bag(max_new_tokens=outputs))
    reader = Bag(scheduler=Bag(page_size=8), swa=True)
    assert progress._admission_needs(reader, request) == Room(full, swa, 1)
