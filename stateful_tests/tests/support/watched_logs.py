"""The logs of fixtures/watched, made anew by the release's own scheduler.

python -m stateful_tests.tests.support.watched_logs [NAME...]
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from impl.choices import RandomChoices
from impl.sglang.server import environment
from impl.sglang.server.events import FORMAT, NUMBERED
from impl.sglang.server.runs import WholeScheduler
from impl.sglang.server.worker import Job
from stateful_tests.watched.servers import population, random_clients

FOLDER = Path(__file__).parents[3] / "fixtures" / "watched"
# release and name: a seed of its clients, how many they are, and the server; `pages` is the level of one
LOGS: dict[str, tuple[int, int, dict[str, int | bool]]] = {
    "0.5.14-rounds_that_claim": (4, 4, {"page_size": 4, "window": 8, "overlap": True, "draft": 4}),
    "0.5.23-window_and_chunk_cache": (14, 9, {"page_size": 4, "window": 8, "tokens": 96, "tree": False}),
    "0.5.23-tree_under_overlap": (14, 9, {"page_size": 1, "window": 8, "tokens": 96, "overlap": True}),
    "0.5.23-speculation_under_overlap": (9, 9, {"page_size": 4, "window": 8, "overlap": True, "draft": 4}),
    "0.5.23-mixed_batches": (7, 6, {"page_size": 4, "window": 8, "overlap": True, "draft": 4, "mixed": True}),
    "0.5.23-recurrent_states": (12, 9, {
        "page_size": 2, "tokens": 64, "overlap": True, "states": 24, "track": 8,
    }),
    "0.5.23-pages": (18, 3, {"page_size": 4, "window": 8, "tokens": 64, "tree": False}),
    "0.5.23-clients_that_do_not_wait": (10, 6, {
        "page_size": 2, "window": 3, "tokens": 96, "overlap": True, "draft": 4, "mixed": True, "chunk": 8,
    }),
    "0.5.23-pages_of_a_tree": (10, 3, {
        "page_size": 4, "window": 8, "tokens": 64, "overlap": True, "draft": 4, "mixed": True,
    }),
    "0.5.23-pages_and_states": (10, 3, {
        "page_size": 4, "window": 0, "tokens": 64, "overlap": True, "states": 14, "track": 8,
    }),
}  # fmt: skip
# and a snapshot every few steps
IMPATIENT = {"0.5.23-clients_that_do_not_wait", "0.5.23-pages_of_a_tree"}


def header(**changes: Any) -> dict[str, Any]:
    """Return the first line of a log whose lines have no numbers, of a small server; with these
    changes."""
    return {
        "format": FORMAT, "version": NUMBERED - 1, "level": "lengths", "process": 1, "engine": "sglang",
        "release": "9.9.9", "page_size": 1, "window": 2, "full_tokens": 32, "swa_tokens": 32,
        "rows": 4, "width": 32, "tree": False, "overlap": False, "speculative": False, **changes,
    }  # fmt: skip


def job(name: str, seed: int, count: int, fixed: dict[str, int | bool], folder: str) -> Job:
    """Return the run that a log is of."""
    choices = RandomChoices(seed)
    plain: dict[str, int | bool] = {
        "draft": 0,
        "overlap": False,
        "tree": True,
        "pressure": True,
        "mixed": False,
    }
    config = population.configuration(
        choices, **{**plain, "running": 3, "tokens": 128, "chunk": 16, **fixed}
    )
    impatient = name in IMPATIENT
    watch = {
        "KVSPEC_WATCH": folder,
        "KVSPEC_WATCH_LEVEL": "pages" if "pages" in name else "lengths",
    }
    if impatient:
        watch["KVSPEC_WATCH_SNAPSHOT"] = "6"
    return Job(
        config, random_clients.clients(choices, config, count=count, impatient=impatient), seed, watch
    )


def main(*names: str) -> None:
    """Write them; those of `names` alone, if there are any."""
    for name in names or LOGS:
        seed, count, fixed = LOGS[name]
        runner = WholeScheduler(environment.python_of(name.partition("-")[0]))
        with tempfile.TemporaryDirectory() as folder:
            outcome = runner.run(job(name, seed, count, fixed, folder))
            assert not outcome.error, outcome.error
            (file,) = Path(folder).iterdir()
            shutil.copy(file, FOLDER / f"sglang-{name}.jsonl")
        runner.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
