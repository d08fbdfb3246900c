"""Processes as forks of the tests' process: it has torch, which takes longer to import than most tests. That
workers start by their command line is tested where nothing is forked (tests/sglang/test_process.py).
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import IO, Any


class Forked:
    """What is needed here of `subprocess.Popen`, for `python -m MODULE ARGUMENT...` or `-c CODE`."""

    def __init__(
        self,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        stderr: IO[bytes] | None = None,
        **_: Any,
    ) -> None:
        (asks, self_stdin), (self_stdout, answers) = os.pipe(), os.pipe()
        self.returncode: int | None = None
        if not (child := os.fork()):
            ends = asks, answers, 2 if stderr is None else stderr.fileno()
            _become(command, ends, env or {})
        self.pid = child
        os.close(asks)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(self_stdin, "wb"), os.fdopen(self_stdout, "rb")

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stdin.close()
        self.stdout.close()
        self.wait()

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        """What it prints until it ends. Raises TimeoutExpired when it is killed after `timeout` seconds."""
        self.stdin.close()
        timer = threading.Timer(timeout, os.killpg, (self.pid, signal.SIGKILL))
        timer.start()
        output = self.stdout.read()
        timer.cancel()
        if self.wait() == -signal.SIGKILL:
            raise subprocess.TimeoutExpired("", timeout)
        return output, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        until = time.monotonic() + timeout
        while (ended := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("", timeout)
            time.sleep(0.005)
        return ended

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _become(command: list[str], ends: tuple[int, int, int], env: dict[str, str]) -> None:
    """Run the command in this process, with these for its standard streams, and leave."""
    code = 2
    try:
        for number, end in enumerate(ends):
            os.dup2(end, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        os.environ.update(env)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        sys.meta_path[:] = [
            f for f in sys.meta_path if type(f).__module__.split(".")[0] != "_pytest"
        ]
        sys.argv = command[2:]
        if command[1] == "-m":
            sys.modules.pop(command[2], None)
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            exec(command[2], {"__name__": "__main__"})
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 2 * (left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def printed_by(module: str, *arguments: str) -> str:
    """What `python -m MODULE ARGUMENT...` prints. Raises CalledProcessError where it does not end with 0."""
    command = [sys.executable, "-m", module, *arguments]
    with Forked(command) as process:
        output, _ = process.communicate(timeout=300)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return output.decode()
