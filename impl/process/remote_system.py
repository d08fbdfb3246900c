"""A system in a worker process, seen from outside of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from impl import HOME
from impl.adapter import Capabilities, Misfit, UnusableImplementation
from impl.loading import used_names
from impl.process import child, fork_server, wire
from impl.process.failures import SystemFailed, stack
from impl.process.system_functions import SystemFunction
from impl.process.worker import WHERE
from impl.system_spec import SystemSpec
from reference.commands import Broken, Done, Outcome, Refused
from reference.system_kinds import AnyCommand, AnyConfig

_Process = fork_server.ForkedProcess | subprocess.Popen[bytes]
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAID = 1 << 20  # bytes that a worker may print in a run
_LEAST_START_S = 10.0  # for a factory: a module may load a while, whatever one command may take


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a worker.

    timeout_s: for one command.
    start_s: to load.
    memory_mb: of main memory.
    """

    timeout_s: float = 30.0
    memory_mb: int = 8192
    start_s: float = 180.0


LIMITS = Limits()


class DoesNotStart(UnusableImplementation):
    """No worker of a system has ever started: it does not load."""


class WorkerSystem:
    """A system (or engine that schedules by itself) that a worker drives, which starts with the first
    `reset`.

    Raises DoesNotStart where it cannot start, SystemFailed where it could before.
    """

    name = ""
    capabilities = Capabilities()
    spec: SystemSpec | None = None  # of a release or a checkout
    root: Path | None = None  # where the files of the system are, if that is one folder
    release = ""  # of an engine, which it is or is driven as
    doubts: tuple[str, ...] = ()  # rules that the adapter plays, and that the files have otherwise
    forked = True  # its worker is; a process that has imported nothing otherwise

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.noted = wire.Noted()
        self._calls: set[SystemFunction] | None = None  # while calls are noted
        self._slowest_s = 0.0  # answer so far
        self._started = False  # once, so that it can be
        self._process: _Process | None = None
        self._errors: IO[bytes] | None = None
        self._view: Any = None  # the facts of its kind
        self._broken: str | None = None

    @contextlib.contextmanager
    def short_timeouts(self) -> Iterator[None]:
        """Wait less long for answers: a hang is known, and looked for in many shorter traces. What is left is
        replayed without haste."""
        limits = self.limits
        self.limits = replace(
            limits, timeout_s=min(limits.timeout_s, max(0.2, 20 * self._slowest_s))
        )
        try:
            yield
        finally:
            self.limits = limits

    def command_line(self) -> list[str]:
        """Return the command that starts the worker."""
        raise NotImplementedError

    def reset(self, geometry: AnyConfig) -> None:
        """Start empty with these sizes; a worker that ended is replaced."""
        if not self.alive:
            self.start()
        assert self._errors is not None
        if self._errors.seek(0, os.SEEK_END) > _SAID:
            self._errors.truncate(0)
        self._view = None
        self._broken = None
        reply = self._ask(wire.RESETS[type(geometry)](geometry=geometry))
        if not isinstance(reply, wire.StepReply):
            raise SystemFailed(self._broken)
        self._view = reply.view

    def apply(self, command: AnyCommand) -> Outcome:
        """Carry out one command. Broken, and Broken again until `reset`, once the system failed.

        Raises UnusableImplementation for what the system says it does not support.
        """
        if self._broken is not None:
            return Broken(self._broken)
        if self._process is None:
            raise RuntimeError("reset comes first")
        reply = self._ask(wire.pack_command(command))
        if not isinstance(reply, wire.StepReply):
            return Broken(self._broken or "the worker answered out of turn")
        self._view = reply.view
        if reply.refused is not None:
            return Refused(reply.refused)
        return Done(reply.choices, reply.report, reply.freed)

    @contextlib.contextmanager
    def noting_calls(self) -> Iterator[set[SystemFunction]]:
        """Note which functions of the system resets and commands call, in a set that grows. Noting takes
        several times as long."""
        self._calls = set()
        try:
            yield self._calls
        finally:
            self._calls = None

    @property
    def alive(self) -> bool:
        """Whether the worker has started and not ended."""
        return self._process is not None and self._process.poll() is None

    def functions_called(
        self, geometry: AnyConfig, commands: Sequence[AnyCommand]
    ) -> tuple[tuple[SystemFunction, ...], ...]:
        """Return which functions of the system each command calls, up to one that fails. A command that ends
        the worker has none."""
        calls: list[tuple[SystemFunction, ...]] = []
        with contextlib.suppress(SystemFailed, UnusableImplementation):
            self.reset(geometry)
            for command in commands:
                if self._broken is None:
                    self._ask(msgspec.structs.replace(wire.pack_command(command), called=True))
                    calls.append(self.noted.called if self.alive else ())
        return tuple(calls)

    def view(self) -> Any:
        """Return the facts after the last command that came to an end; costs nothing."""
        if self._view is None:
            raise SystemFailed(self._broken or "reset comes first")
        return self._view

    def close(self) -> None:
        """End the worker. The system can be used again after another `reset`. Raises SystemFailed where the
        worker cannot close its system."""
        if reason := self._end():
            raise SystemFailed(reason)

    def _end(self) -> str:
        """End the worker; why it could not close its system, or ""."""
        alive = self.alive
        unclosed = ""
        process = self._process
        self._process = None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(timeout=0 if self._broken else 2) and alive:  # it closes its system
                    unclosed = self._output_end().strip().split("\n")[-1]
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            child.end_all(self._mark)
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        return unclosed

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()

    # -- the worker -------------------------------------------------------------------------------

    def start(self) -> wire.Ready:
        """Start the worker anew."""
        self._end()
        self._mark = uuid.uuid4().hex
        environment = child.environment(
            [HOME, *sys.path], OMP_NUM_THREADS="1", **{child.MARK: self._mark}
        )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        fcntl.fcntl(self._errors, fcntl.F_SETFL, os.O_APPEND)  # so that it can be cut
        launch = fork_server.launch if self.forked else fork_server.launch_anew
        self._process = launch(self.command_line(), env=environment, stderr=self._errors)
        reply = self._receive(self.limits.start_s, "to start")
        if not isinstance(reply, wire.Ready):
            error = str(reply.error if isinstance(reply, wire.WorkerFailure) else self._broken)
            self._end()
            if self._started:
                raise SystemFailed(error)
            raise DoesNotStart(error if error.startswith(self.name) else f"{self.name}: {error}")
        self._started = True
        return reply

    def _ask(self, message: wire.Ask) -> wire.Reply | None:
        assert self._process is not None
        assert self._process.stdin is not None
        occasion = (
            f"in answer to {message.kind}"
            if isinstance(message, wire.Apply)
            else "in answer to a reset"
        )
        if self._calls is not None:
            message = msgspec.structs.replace(message, called=True)
        with contextlib.suppress(OSError):  # where nobody reads, there is no answer either
            wire.send(self._process.stdin, message)
        reply = self._receive(self.limits.timeout_s, occasion)
        if isinstance(reply, wire.WorkerFailure):
            if reply.misfit:
                raise Misfit(f"{reply.error}{self._also_lost(reply.error)}")
            if reply.unusable:
                raise UnusableImplementation(reply.error)
            self._broken = reply.error
            self._view = reply.view or self._view
        if isinstance(reply, wire.WorkerFailure | wire.StepReply):
            self.noted = reply.noted
            if self._calls is not None:
                self._calls.update(reply.noted.called)
        return reply

    def _also_lost(self, said: str) -> str:
        """Return the further names that a checkout has lost, for a message that has `said` some."""
        if self.spec is None or not self.spec.checkout or self.root is None:
            return ""
        return used_names.also_lost(self.spec.engine, self.root, self.release, said)

    def _receive(self, timeout_s: float, occasion: str) -> wire.Reply | None:
        """Return the worker's next reply; None where there is none, and why stands in `_broken`.

        Its time is counted in looks after it: what stops the whole machine is no hang.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        began = time.monotonic()
        looks = count(1)

        def look() -> None:
            if self._memory_mb() > self.limits.memory_mb:
                raise MemoryError
            if next(looks) * wire.LOOK_S >= timeout_s:
                raise TimeoutError

        try:
            if (body := wire.receive(self._process.stdout.fileno(), look)) is not None:
                self._slowest_s = (
                    max(self._slowest_s, time.monotonic() - began) if self._started else 0.0
                )
                return wire.REPLIES.decode(body)
            reason = self._last_words()
        except TimeoutError:
            reason = f"hang: nothing {occasion} in {timeout_s:g} s{self._where()}"
        except MemoryError:
            reason = f"memory: more than {self.limits.memory_mb} MB {occasion}{self._where()}"
        except (ValueError, OSError) as error:
            reason = f"unreadable: {error}"
        except BaseException:  # an interrupt: what the worker says next would answer this question
            self._break_off("interrupted")
            raise
        self._break_off(reason)
        return None

    def _break_off(self, reason: str) -> None:
        self._broken = reason
        self._end()

    def _memory_mb(self) -> int:
        """Return resident memory of the worker; 0 where that is unknown."""
        assert self._process is not None
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * _PAGE >> 20

    def _where(self) -> str:
        """Say where the worker is, if it can."""
        assert self._process is not None
        for _ in range(10):
            if "most recent call first" not in self._output_end():
                self._process.send_signal(WHERE)
                time.sleep(0.05)
        return stack(self._output_end(), self.root)

    def _last_words(self) -> str:
        """Say how a worker ended: by a signal and where, or with an exit status and its last line on
        stderr."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "unreadable: the worker closed its pipe"
        printed = self._output_end()
        if status < 0:
            return f"{signal.Signals(-status).name}: the process crashed{stack(printed, self.root)}"
        lines = [line.strip() for line in printed.split("\n") if line.strip()]
        return f"exit status {status}: {lines[-1][:200] if lines else 'the process ended'}"

    def _output_end(self) -> str:
        """Return the end of the worker's output."""
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4000))
        return self._errors.read().decode(errors="replace")


class StrangerSystem(WorkerSystem):
    """A system made by `factory` (MODULE:NAME) in a worker, which starts now: its name and capabilities are
    known afterwards. Raises UnusableImplementation."""

    forked = False

    def __init__(self, factory: str, limits: Limits = LIMITS) -> None:
        # a factory may take as long as one command
        if limits.timeout_s != LIMITS.timeout_s:
            limits = replace(limits, start_s=max(_LEAST_START_S, limits.timeout_s))
        super().__init__(limits)
        self.factory = factory
        self.name = f"--impl {factory}"
        ready = self.start()
        self.name = ready.name
        self.capabilities = replace(ready.capabilities, new_views=True)  # read from a message

    def command_line(self) -> list[str]:
        return [sys.executable, "-m", "impl.process.worker", self.factory]
