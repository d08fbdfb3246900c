"""`make bench ARGS=watcher`: what the watcher costs a whole scheduler, and how fast its log is validated.

Runs with and without it alternate in one worker, each some 6,500 forward passes long; seconds are the CPU's.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

from ci.commands.shared import Unusable, json_option, text_out, writable_json, write_json
from ci.report import render
from impl.adapter import UnusableImplementation
from impl.sglang.server import environment
from impl.sglang.server.clients import Client, Config, Turn
from impl.sglang.server.runs import WholeScheduler
from impl.sglang.server.worker import Job
from stateful_tests.watched.reader import logs_of
from stateful_tests.watched.validator import Validator

_CONFIGS = [(tree, overlap) for tree in (False, True) for overlap in (False, True)]


def _clients(count: int) -> tuple[Client, ...]:
    """Eight at a time, two of three with a session of three turns."""
    rng, found = random.Random(1), []
    for i in range(1, count + 1):
        turns = tuple(Turn(1, rng.randint(10, 60), rng.randint(20, 60)) for _ in range(3))
        found.append(Client(f"c{i}", i % 4, turns, session=i % 3 != 0, after=f"c{i - 8}" if i > 8 else ""))
    return tuple(found)


@click.command()
@click.option("--release", default="0.5.23", show_default=True, help="With an environment.")
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True, help="Of runs, on and off.")
@click.option("--clients", type=click.IntRange(8), default=320, show_default=True)
@json_option
def watcher(release: str, pairs: int, clients: int, json_file: str | None) -> None:
    """Measure what the watcher costs at level `lengths`, and the validator beside it."""
    writable_json(json_file)
    try:
        runner = WholeScheduler(environment.python_of(release))
    except UnusableImplementation as error:
        raise Unusable(str(error)) from error
    rows: list[dict[str, Any]] = []
    asking = _clients(clients)
    for tree, overlap in _CONFIGS:
        config = Config(
            page_size=1, tokens=2048, running=8, chunk=64, window=0, draft=0, overlap=overlap, tree=tree,
            pressure=False,
        )  # fmt: skip
        spent: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * pairs):
            watched = number % 4 in (0, 3)
            with tempfile.TemporaryDirectory() as folder:
                done = runner.run(Job(config, asking, 1, {"KVSPEC_WATCH": folder} if watched else None))
                if done.error:
                    raise Unusable(f"sglang=={release}: the server ended: {done.error}")
                spent[watched].append(1e6 * done.cpu_s / done.forwards)
                if watched:
                    (log,) = logs_of([Path(folder)])
                    validator, begun = Validator(log.header), time.process_time()
                    events = sum(1 for _ in map(validator.read, log.lines()))
                    read_s = time.process_time() - begun
        on, off = median(spent[True]), median(spent[False])
        rows.append({
            "tree": tree, "overlap": overlap, "forwards": done.forwards, "off": round(off, 1),
            "on": round(on, 1), "percent": round(100 * (on / off - 1), 1), "events": events,
            "validated": round(done.cpu_s / read_s, 1),
        })  # fmt: skip
    runner.close()
    headings = (
        "tree", "overlap", "forwards", "us/forward", "watched", "% more", "events", "validator, times faster",
    )  # fmt: skip
    render.listing(render.console(text_out(json_file)), rows, dict(zip(rows[0], headings)))
    write_json(json_file, rows)
