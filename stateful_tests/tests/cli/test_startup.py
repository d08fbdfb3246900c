"""Commands that drive nothing start at once: they import no torch."""

import os
import subprocess
import sys
from pathlib import Path

from stateful_tests.tests.check import bad_adapters

ROOT = Path(__file__).parents[3]
LINES = (
    "--help", "check --help", "clauses FREE-1", "bugs", "spec", "explore --list", "prove --list",
    "replay fixtures/regressions/close_frees_each_page_once.json --impl reference",
    "tree fixtures/regressions/a_split_keeps_pages_whole.json",
    f"export @what_is_handed_out_is_not_free --as story --impl {bad_adapters.__name__}:Raises",
)  # fmt: skip
CODE = """
import sys
from ci.cli import run
for line in sys.argv[1:]:
    code = run(line.split())
    if code or (heavy := sorted({"torch", "numpy", "triton"} & set(sys.modules))):
        sys.exit(f"{line}: {code or f'imports {heavy}'}")
"""


def test_no_torch():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CODE, *LINES]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
