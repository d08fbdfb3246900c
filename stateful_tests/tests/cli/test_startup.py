"""Commands that drive nothing start at once: they import no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stateful_tests.tests.check import bad_adapters

ROOT = Path(__file__).parents[3]
CODE = """
import sys
from ci.cli import run
code = run(sys.argv[1:])
heavy = sorted({"torch", "numpy", "triton"} & set(sys.modules))
sys.exit(f"imports {', '.join(heavy)}" if heavy else code)
"""


@pytest.mark.parametrize(
    "line",
    [
        "--help", "check --help", "clauses FREE-1", "bugs", "spec", "explore --list", "prove --list",
        "replay fixtures/regressions/close_frees_each_page_once.json --impl reference",
        "tree fixtures/regressions/a_split_keeps_pages_whole.json",
        f"export @what_is_handed_out_is_not_free --as story --impl {bad_adapters.__name__}:Raises",
    ],
)  # fmt: skip
def test_no_torch(line: str) -> None:
    command = [sys.executable, "-c", CODE, *line.split()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
