"""`make bench ARGS=watcher`: what the watcher costs a whole scheduler, and how fast its log is validated.

Two runs of the same clients are a pair: every hundred rounds the hooks are put in or taken out, in one run at
first in, in the other out. So the same rounds are compared, once this run with that and once that with this,
and what a process is slower by cancels out. Seconds are the CPU's, of all threads.
"""

import math
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

from ci.commands.shared import ReportOut, Unusable, json_option, unusable
from ci.report import text_output
from impl.choices import RandomChoices, between
from impl.sglang.server import environment
from impl.sglang.server.clients import Client, Config, Turn
from impl.sglang.server.runs import WholeScheduler
from impl.sglang.server.outcome import RunOutcome
from impl.sglang.server.worker import Job
from stateful_tests.watched.log_reader import logs_of
from stateful_tests.watched.validator import Validator

ROUNDS = 100  # of a block
_CONFIGS = [(tree, overlap) for tree in (False, True) for overlap in (False, True)]


def _bench_clients(count: int) -> tuple[Client, ...]:
    """Return clients eight at a time, two of three with a session of three turns."""
    choices = RandomChoices(1)
    results = []
    for i in range(1, count + 1):
        turns = tuple(Turn(1, between(choices, 10, 60), between(choices, 20, 60)) for _ in range(3))
        results.append(
            Client(f"c{i}", i % 4, turns, session=i % 3 != 0, after=f"c{i - 8}" if i > 8 else "")
        )
    return tuple(results)


def _overhead_percent(watched_first: RunOutcome, watched_second: RunOutcome) -> float:
    """Return by how much being watched takes longer, in percent.

    watched_first, watched_second: blocks of rounds of a pair of runs.
    """
    # the first warm up
    first_blocks = watched_first.blocks_s[2:]
    other = watched_second.blocks_s[2:]
    first = sum(first_blocks[::2]) / sum(other[::2])
    second = sum(other[1::2]) / sum(first_blocks[1::2])
    return 100 * (math.sqrt(first * second) - 1)


@click.command()
@click.option("--release", default="0.5.23", show_default=True, help="With an environment.")
@click.option("--pairs", type=click.IntRange(1), default=4, show_default=True, help="Of runs.")
@click.option("--clients", type=click.IntRange(8), default=240, show_default=True)
@json_option
def watcher(out: ReportOut, release: str, pairs: int, clients: int) -> None:
    """Measure what the watcher costs at level `lengths`, and the validator beside it."""
    with unusable():
        runner = WholeScheduler(environment.python_of(release))
    rows: list[dict[str, Any]] = []
    asking = _bench_clients(clients)

    def run(folder: str, blocks: tuple[int, bool] | None = None) -> RunOutcome:
        outcome = runner.run(Job(config, asking, 1, {"KVSPEC_WATCH": folder}, blocks))
        if outcome.error:
            raise Unusable(f"sglang=={release}: the server ended: {outcome.error}")
        return outcome

    for tree, overlap in _CONFIGS:
        config = Config(
            page_size=1, tokens=2048, running=8, chunk=64, window=0, draft=0, overlap=overlap, tree=tree,
            pressure=False,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(folder)
            (log,) = logs_of([Path(folder)])
            validator = Validator(log.header)
            started = time.process_time()
            events = sum(1 for _ in map(validator.read, log.lines()))
            read_s = time.process_time() - started
        more = []
        for _ in range(pairs):
            with tempfile.TemporaryDirectory() as watched, tempfile.TemporaryDirectory() as other:
                more.append(_overhead_percent(run(watched, (ROUNDS, True)), run(other, (ROUNDS, False))))
        rows.append({
            "tree": tree, "overlap": overlap, "forwards": outcome.forwards,
            "watched": round(1e6 * outcome.cpu_s / outcome.forwards, 1), "percent": round(median(more), 1),
            "least": round(min(more), 1), "most": round(max(more), 1), "events": events,
            "validated": round(outcome.cpu_s / read_s, 1),
        })  # fmt: skip
    runner.close()
    headings = (
        "tree", "overlap", "forwards", "us/forward watched", "% more", "least", "most of the pairs", "events",
        "validator, times faster",
    )  # fmt: skip
    text_output.listing(out.console, rows, dict(zip(rows[0], headings)))
    out.end(rows)
