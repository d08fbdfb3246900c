"""Fixtures that tests of logs share."""

import json

import pytest


@pytest.fixture
def written(tmp_path):
    def write(lines):
        path = tmp_path / "log.jsonl"
        rows = [list(line.values()) if "event" in line else line for line in lines]
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in rows))
        return path

    return write
