"""Workers of releases as forks of the tests' process: it has torch, which takes longer to import than most
tests. That they start by their command line is tested where nothing is forked (tests/sglang/test_process.py).
"""

import os
import runpy
import subprocess
import sys
import time
import traceback
from typing import IO, Any


class Forked:
    """What a WorkerSystem needs of `subprocess.Popen`, for `python -m MODULE ARGUMENT...` or `-c CODE`."""

    def __init__(self, command: list[str], *, stderr: IO[bytes], env: dict[str, str], **_: Any) -> None:
        (asks, self_stdin), (self_stdout, answers) = os.pipe(), os.pipe()
        self.returncode: int | None = None
        if not (child := os.fork()):
            try:
                for number, end in enumerate((asks, answers, stderr.fileno())):
                    os.dup2(end, number)
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                os.setsid()
                os.environ.update(env)
                sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
                sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__.split(".")[0] != "_pytest"]
                sys.argv = command[2:]
                if command[1] == "-m":
                    sys.modules.pop(command[2], None)
                    runpy.run_module(command[2], run_name="__main__", alter_sys=True)
                exec(command[2], {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(2)
        self.pid = child
        os.close(asks)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(self_stdin, "wb"), os.fdopen(self_stdout, "rb")

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
