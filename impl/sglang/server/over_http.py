"""A live server from outside: a process that is started, driven over HTTP and stopped, and its clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from impl.adapter import UnusableImplementation
from impl.sglang.server.clients import Client, Clients, Config, Turn
from impl.sglang.server.runs import HOME, last_words, outside
from impl.sglang.server.whole_scheduler import STRICT

START_S = 300.0
STOP_S = 10.0
# without an answer; idle sessions may hold all memory, so a client then goes away
PATIENCE_S = 20.0
ROUND_S = 0.02  # how long a client takes for a round of its script
_ERROR = re.compile(r"(\w+\.)*\w+(Error|Exception)\b")


class LiveServer:
    """A release's HTTP server on the loopback interface, watched into folder/watch.

    Raises UnusableImplementation when it does not come up.
    """

    def __init__(
        self, python: Path, config: Config, folder: Path, root: Path | None = None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = folder
        self.watch = folder / "watch"
        command = [
            str(python),
            "-m",
            "impl.sglang.server.live",
            msgspec.json.encode(config).decode(),
            str(folder / "model"),
            str(self.port),
        ]
        with (folder / "server.log").open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=HOME,
                env=outside(root, {**STRICT, "KVSPEC_WATCH": str(self.watch)}),
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                reason = self.last_words()
                self.stop()
                raise UnusableImplementation(f"the server did not come up: {reason}")
            time.sleep(0.5)

    @property
    def alive(self) -> bool:
        """Whether the server's first process runs."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return how the server's scheduler failed, otherwise its first error, otherwise its last line."""
        written = (self.folder / "server.log").read_bytes()
        _, failed, trace = written.partition(b"Scheduler hit an exception: ")
        if failed:
            return _in_one_line(trace.decode(errors="replace"))
        errors = [
            line for line in written.splitlines() if _ERROR.match(line.decode(errors="replace"))
        ]
        return last_words(errors[0] if errors else written)

    def stop(self) -> None:
        """End all of its processes."""
        for with_signal, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, with_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)

    def post(self, path: str, body: dict[str, Any], tokens: int | None = None) -> tuple[int, bytes]:
        """Return the status of a request, and what came back: some `tokens` of a stream, or all."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if tokens is None:
                return response.status, response.read()
            return response.status, b"".join(response.readline() for _ in range(2 * tokens))
        finally:
            connection.close()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False


def _in_one_line(trace: str) -> str:
    """Return a traceback, and what follows it, as `whole_scheduler` gives an error: with its last line of
    SGLang."""
    lines = trace.partition("\n\n")[0].splitlines()
    end = max((at for at, line in enumerate(lines) if _ERROR.match(line)), default=len(lines) - 1)
    kind, _, message = " ".join(lines[end:]).partition(":")
    frames = re.findall(r'/sglang/(\S+)", line (\d+)', "\n".join(lines[:end]))
    at = f" at {':'.join(frames[-1])}" if frames else ""
    return f"{kind}: {' '.join(message.split())[:300]}{at}"


class HttpClients:
    """Clients that send over HTTP what their scripts say, a thread for each. Each knows the text of its
    session, and so how long its input must be and how many tokens it is owed.

    counts: what was done, and how often.
    wrong: answers that are not as they should be.
    """

    def __init__(self, server: LiveServer, clients: tuple[Client, ...], seed: int) -> None:
        self.server = server
        self.script = Clients(clients, seed)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._done = {client.name: threading.Event() for client in clients}
        self._threads = [
            threading.Thread(target=self._run, args=(c,), daemon=True) for c in clients
        ]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Whether every client has finished its script."""
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, client: Client) -> None:
        try:
            if client.after in self._done:
                self._done[client.after].wait()
            time.sleep(client.start * ROUND_S)
            try:
                self._talk(client)
            except TimeoutError:
                self.counts["given up by a client"] += 1
                if client.session:
                    self._posts("/close_session", client.name)
        except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
            self.wrong.append(f"{client.name}: {type(error).__name__}: {error}"[:300])
        finally:
            self._done[client.name].set()

    def _talk(self, client: Client) -> None:
        if client.session:
            self._posts("/open_session", client.name, capacity_of_str_len=1 << 20, streaming=True)
        known: int | None = 0  # None: a turn may have ended before its client was gone
        for number, turn in enumerate(client.turns, 1):
            time.sleep(turn.wait * ROUND_S)
            known = self._turn(
                client, f"{client.name}.{number}", turn, known if client.session else 0
            )
        if client.session:
            time.sleep(client.close * ROUND_S)
            self._posts("/close_session", client.name)

    def _posts(self, path: str, session: str, **more: Any) -> None:
        status, content = self.server.post(path, {"session_id": session, **more})
        self.counts[path[1:]] += 1
        if status != 200:
            self.wrong.append(f"{session}: {path} is answered {status}: {content[:200]!r}")

    def _turn(self, client: Client, request: str, turn: Turn, known: int | None) -> int | None:
        """Send a turn and judge its answer. Returns the length of the session's text afterwards, if it is
        known."""
        body: dict[str, Any] = {
            "rid": request,
            "input_ids": self.script.prompt(request),
            "sampling_params": {
                "max_new_tokens": turn.limit,
                "temperature": 0,
                "ignore_eos": turn.ignore_eos,
            },
        }
        if client.session:
            body["session_params"] = {"id": client.name}
        if turn.abort:
            self.counts["disconnects"] += 1
            self.server.post("/generate", {**body, "stream": True}, turn.abort)
            time.sleep(50 * ROUND_S)  # until the server has noticed
            return None
        status, content = self.server.post("/generate", body)
        self.counts["answers"] += 1
        reply = json.loads(content) if status == 200 else {}
        meta = reply.get("meta_info", {})
        if meta.get("finish_reason", {}).get("type", "abort") == "abort":
            self.counts["given up by the server"] += 1  # out of memory, and nobody left to retract
            return known
        self.counts["tokens"] += len(reply["output_ids"])
        got: tuple[int, int] = (meta["prompt_tokens"], len(reply["output_ids"]))
        expected = got[0] if known is None else known + turn.tokens, turn.limit
        if got != expected:
            self.wrong.append(f"{request}: {got} tokens of input and output, {expected} are due")
        return sum(got)
