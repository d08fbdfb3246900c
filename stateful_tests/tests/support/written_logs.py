"""Logs in the repository: they are read, changed, written and validated again."""

import json
from pathlib import Path
from typing import Any

from stateful_tests.watched.log_reader import logs_of
from stateful_tests.watched.validation_results import Validated
from stateful_tests.watched.validator import Validator


FIXTURES = Path(__file__).parents[3] / "fixtures" / "watched"
LOGS = sorted(path for path in FIXTURES.glob("*.jsonl") if "pages" not in path.stem)
Lines = list[dict[str, Any]]


def validate(path: Path) -> Validated:
    (log,) = logs_of([path])
    return Validator(log.header).run(log.lines())


def lines_of(path: Path) -> Lines:
    """Return the header, and each event by the names of its fields."""
    head, *lines = map(json.loads, path.read_text().splitlines())
    return [
        head,
        *({"event": name, **dict(zip(head["fields"][name], values))} for name, *values in lines),
    ]
