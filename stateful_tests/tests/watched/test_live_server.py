"""A live server's clients, and how its log is judged while it grows; with a server that pretends."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from ci.report import server_reports as report
from impl.sglang.server.clients import Client, Config, Turn
from impl.sglang.server.over_http import LiveServer
from stateful_tests.watched.servers.live_server import LiveRun, watch_live

LOG = Path(__file__).parents[3] / "fixtures" / "watched" / "sglang-0.5.23-tree_under_overlap.jsonl"
TURNS_OF_A = (
    Turn(wait=0, tokens=5, limit=3),
    Turn(wait=0, tokens=2, limit=4),
    Turn(wait=0, tokens=1, limit=9, abort=1),
    Turn(wait=0, tokens=1, limit=2),
)
TURNS_OF_B = (Turn(wait=0, tokens=4, limit=2), Turn(wait=0, tokens=4, limit=2))
CLIENTS = (Client("a", 0, TURNS_OF_A), Client("b", 0, TURNS_OF_B, session=False, after="a"))


class PretendedServer(LiveServer):
    """A stand-in that answers as a server does.

    forgets: it leaves the last output out of a session's history.
    dies: number of answers after which it is gone.
    """

    written = "loads\nIndexError: of 154\n[1] SIGQUIT received\n"

    def __init__(self, folder, forgets=False, dies=100):
        self.folder = folder
        self.watch = folder / "watch"
        self.port = 1
        self.left = dies
        self.watch.mkdir()
        self.log = LOG.read_text().splitlines(keepends=True)
        (self.watch / "log.jsonl").write_text("".join(self.log[:40]))
        (folder / "server.log").write_text(self.written)
        self.forgets = forgets
        self.stopped = False
        self.texts = dict[str, int]()
        self.lock = threading.Lock()

    @property
    def alive(self):
        return self.left > 0

    def stop(self):
        self.stopped = True

    def post(self, path, body, tokens=None):
        with self.lock:
            self.left -= 1
            if self.left < 0:
                raise ConnectionResetError(104, "gone")
            with (self.watch / "log.jsonl").open("a") as log:
                log.writelines(self.log[40:70])
            del self.log[40:70]
        if path != "/generate" or tokens is not None:
            return 200, b""
        session = body.get("session_params", {}).get("id", body["rid"])
        limit = body["sampling_params"]
        prompt = self.texts.get(session, 0) + len(body["input_ids"])
        forgotten = 1 if self.forgets else 0
        self.texts[session] = prompt + limit["max_new_tokens"] - forgotten
        meta = {"prompt_tokens": prompt, "finish_reason": {"type": "length"}}
        answer = {"output_ids": [1] * limit["max_new_tokens"], "meta_info": meta}
        return 200, json.dumps(answer).encode()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("impl.sglang.server.over_http.ROUND_S", 0.0)
    monkeypatch.setattr("stateful_tests.watched.servers.live_server.REST_S", 0.2)


def run_clients(tmp_path: Path, **how: Any) -> LiveRun:
    def start(folder: Path) -> PretendedServer:
        return PretendedServer(folder, **how)

    return watch_live(
        start, Config(tree=False), CLIENTS, 1, 20.0, lambda _: None, tmp_path / "kept"
    )


def test_a_server_that_answers_as_specified_conforms(tmp_path):
    run = run_clients(tmp_path)
    assert not run.wrong
    assert not run.died
    assert not (tmp_path / "kept").exists()
    assert (run.counts["answers"], run.counts["disconnects"], run.counts["tokens"]) == (5, 1, 13)
    assert run.validated.events > 200 and not run.validated.unexplained


def test_a_history_that_lacks_an_output_is_noticed_by_its_client(tmp_path):
    run = run_clients(tmp_path, forgets=True)
    assert run.wrong == ["a.2: (9, 4) tokens of input and output, (10, 4) are due"]
    assert (tmp_path / "kept" / "server.log").exists()


def test_a_server_that_dies_says_why(tmp_path):
    run = run_clients(tmp_path, dies=3)
    assert (run.died, run.known) == ("IndexError: of 154", "")


FAILS = """ConnectionError: to say so early means nothing
[12:00] Scheduler hit an exception: Traceback (most recent call last):
  File "/some/sglang/srt/managers/schedule_policy.py", line 1368, in add_one_req_ignore_eos
    assert req.prefix_len == 0
           ^^^^^^^^^^^^^^^^^^^
AssertionError

[12:01] SIGQUIT received
"""


def test_a_known_fault_explains_the_end_of_its_server(tmp_path, monkeypatch):
    monkeypatch.setattr(PretendedServer, "written", FAILS)
    run = run_clients(tmp_path, dies=3)
    assert run.died == "AssertionError:  at srt/managers/schedule_policy.py:1368"
    data = report.live_report(run, 1, tmp_path)
    assert (run.known, data["exit_code"]) == ("ignored-end-token-in-chunks", 4)
