"""The process that serves runs of a whole scheduler: loads the release once, then a fork for each run.

    PYTHON -m impl.sglang.server.worker        a job a line on stdin, an answer a line on stdout

PYTHON is the server environment's. Each run has a fresh process, so that it depends on its job alone.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from impl.sglang.server.clients import Client, Config
from impl.sglang.server.outcome import RunOutcome
from impl.sglang.server.pair.choices import NetworkChoice


_HOME = Path(__file__).resolve().parents[3]  # the folder that `impl` and `reference` are imported from


class Job(msgspec.Struct, frozen=True):
    """One run of a scheduler, or of a pair.

    watch: settings of the watcher; None where the run is not watched.
    blocks: rounds between taking the watcher's hooks out and putting them back, and whether they are in at
    first; None where they stay.
    limit_s: time after which the run is killed (seconds).
    canary: the release's own KV canary checks each forward pass.
    choices: what the network of a pair does, decided before the run.
    """

    config: Config
    clients: tuple[Client, ...]
    seed: int
    watch: dict[str, str] | None = None
    blocks: tuple[int, bool] | None = None
    limit_s: float = 120.0
    canary: bool = False
    choices: tuple[NetworkChoice, ...] = ()


def main() -> int:
    """Serve until stdin ends."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a release may print, and stdout has answers alone
    from impl.sglang.server import whole_scheduler
    from impl.sglang.server.pair import run as pair

    whole_scheduler.prepare()
    pair.prepare()
    out.write(b'"ready"\n')
    decoder = msgspec.json.Decoder(Job)
    for line in sys.stdin.buffer:
        out.write(msgspec.json.encode(_outcome_of_child(decoder.decode(line))) + b"\n")
    return 0


def _outcome_of_child(job: Job) -> RunOutcome:
    """Run a job in a forked process, which an alarm kills after `limit_s`."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.close(read)
        try:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(msgspec.json.encode(_run_or_unusable(job)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        body = pipe.read()
    _, status = os.waitpid(child, 0)
    if not body:
        reason = f"exit status {status}"
        if status == signal.SIGALRM:  # waitpid's status is the number of the signal that killed it
            reason = f"no answer in {job.limit_s:g} s"
        return RunOutcome(0, 0, [], {}, f"the scheduler's process ended: {reason}")
    return msgspec.json.decode(body, type=RunOutcome)


def own_failure(error: BaseException) -> str:
    """Return an exception of kvspec's own code in one line, with its place; "" for one of the release."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not Path(frames[-1].filename).is_relative_to(_HOME):
        return ""
    place = f"{Path(frames[-1].filename).relative_to(_HOME)}:{frames[-1].lineno}"
    return f"{type(error).__name__}: {error} at {place}, in code of kvspec"


def _run_or_unusable(job: Job) -> RunOutcome:
    """Run a job. An exception of kvspec's own code, which is no fault of the release, makes it unusable."""
    try:
        return _run(job)
    except Exception as error:
        if not (reason := own_failure(error)):
            raise
        traceback.print_exc()
        return RunOutcome(0, 0, [], {}, unusable=reason)


def _run(job: Job) -> RunOutcome:
    """Run a job in this process, within its time limit."""
    from impl.sglang.server import whole_scheduler

    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, job.limit_s)
    if job.config.pair:
        from impl.sglang.server.pair import run

        outcome = run.run(job.config, job.clients, job.choices, job.seed, job.watch)
    else:
        outcome = whole_scheduler.run(
            job.config, job.clients, job.seed, job.watch, job.blocks, job.canary
        )
    signal.setitimer(signal.ITIMER_REAL, 0)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
