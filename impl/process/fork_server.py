"""Workers as forks of one process that has imported torch: a fork takes a tenth of what the import takes.

The first `launch` starts that process, the server. It ends with the last process that has used it; a process
that was forked from a user of it uses it too. Only workers of releases on a CPU are forks: a stranger's
adapter may need a process that has imported nothing, and a fork cannot use a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import IO, NoReturn

from impl import HOME
from impl.process import child

_NUMBER = struct.Struct("!i")
_START_S = 180.0  # for the import of torch on a busy machine
_MOST_FILES = 4
_server: socket.socket | None = None  # our end; what is sent on it are the files of a process to be


class ForkedProcess:
    """A process that the server has forked, with the methods of `subprocess.Popen` that are used here."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], end: socket.socket) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._end = end  # has the exit status, once there is one

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.stdout.close()

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises TimeoutExpired where it still runs after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([], timeout or 0.0)
            status = self._end.recv(_NUMBER.size)
            # without a status the server was killed, and its forks with it
            self.returncode = _NUMBER.unpack(status)[0] if status else -signal.SIGKILL
            self._end.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def launch(
    command: Sequence[str], *, env: dict[str, str], stderr: IO[bytes]
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENT...` in a session of its own, with pipes for stdin and stdout.

    The server imports MODULE first, and what it names in PRELOADED. The process is no fork where there is no
    server: on another system than Linux, or where torch cannot be imported.
    """
    if sys.platform == "linux" and command[:2] == [sys.executable, "-m"]:
        try:
            return _fork_process(command[2:], env, stderr)
        except (OSError, EOFError):
            _forget_server()
    return launch_anew(command, env=env, stderr=stderr)


def launch_anew(
    command: Sequence[str], *, env: dict[str, str], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command in the same way as `launch`, as a process that has imported nothing."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )


def _fork_process(arguments: Sequence[str], env: dict[str, str], stderr: IO[bytes]) -> ForkedProcess:
    server = start()
    asks, stdin = os.pipe()
    stdout, answers = os.pipe()
    ours, its = socket.socketpair()
    try:
        socket.send_fds(server, [b"fork"], [asks, answers, stderr.fileno(), its.fileno()])
        its.close()
        ours.settimeout(_START_S)
        order = json.dumps([arguments, env, os.getcwd()]).encode()
        ours.sendall(_NUMBER.pack(len(order)) + order)
        [pid] = _NUMBER.unpack(_read(ours, _NUMBER.size))
    except BaseException:
        os.close(stdin)
        os.close(stdout)
        ours.close()
        raise
    finally:
        os.close(asks)
        os.close(answers)
        its.close()
    return ForkedProcess(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), ours)


def start() -> socket.socket:
    """Start the server if there is none, so that processes forked from now on use it. Return our end."""
    global _server
    if _server is None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            subprocess.Popen(
                [sys.executable, "-m", "impl.process.fork_server", str(its.fileno())],
                env=child.environment([HOME, *sys.path], OMP_NUM_THREADS="1"),
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        _server = ours
    return _server


def start_early() -> None:
    """Start the server where there can be one, so that it imports torch while others do something else."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            start()


def _forget_server() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _read(stream: socket.socket, size: int) -> bytes:
    """Return `count` bytes. Raises EOFError if the other end is closed before."""
    received = b""
    while len(received) < size:
        if not (part := stream.recv(size - len(received))):
            raise EOFError
        received += part
    return received


# -- the server -----------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Fork what is asked for on `control`, until everybody has closed the other end."""
    importlib.import_module("torch")
    gc.disable()  # a collection would copy pages that forks share; nor do forks look at what is frozen
    running: dict[int, socket.socket] = {}  # process -> who waits for its exit status
    wakes, woken = socket.socketpair()
    for end in (wakes, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if woken in ready:
            woken.recv(4096)
            _report_ended(running)
        if control in ready:
            message, files, _, _ = socket.recv_fds(control, 16, _MOST_FILES)
            if not message:
                return
            _fork(files, running)


def _report_ended(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as waiting, contextlib.suppress(OSError):
            waiting.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _fork(files: list[int], running: dict[int, socket.socket]) -> None:
    waiting = socket.socket(fileno=files[-1])
    try:
        [size] = _NUMBER.unpack(_read(waiting, _NUMBER.size))
        arguments, env, folder = json.loads(_read(waiting, size))
        with contextlib.suppress(Exception):  # the fork fails alike, and says so
            module = importlib.import_module(arguments[0])
            for name in getattr(module, "PRELOADED", ()):
                importlib.import_module(name)
        gc.freeze()
        if not (pid := os.fork()):
            _become(arguments, files[:-1], env, folder)
        running[pid] = waiting
        waiting.sendall(_NUMBER.pack(pid))
    except (OSError, EOFError):  # nobody waits for it any more
        waiting.close()
    finally:
        for file in files[:-1]:
            os.close(file)


def _become(arguments: list[str], files: list[int], env: dict[str, str], folder: str) -> NoReturn:
    """Run a module in this process, with these files for its standard streams, and end."""
    code = 2
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        search = env.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder for folder in search if folder not in sys.path]
        gc.enable()
        sys.stdout = os.fdopen(1, "w", 1)
        sys.stderr = os.fdopen(2, "w", 1)
        sys.argv = arguments[:]
        sys.modules.pop(arguments[0], None)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
