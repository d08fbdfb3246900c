"""What holds of the whole house: a word means one thing, what is right depends on nothing else, commands that
drive nothing start at once, and benchmarks run."""

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from ci.bench import __main__ as bench
from impl.examples.example_engine import ExampleEngine
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.adapters import bad_adapters
from stateful_tests.tests.support.night import at_night
from stateful_tests.generate.run_profile import MACHINES

ROOT = Path(__file__).parents[3]
PACKAGES = "reference", "impl", "stateful_tests", "ci", "kvspec"


def test_no_public_class_name_occurs_twice():
    homes = defaultdict(list)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if not path.is_relative_to(ROOT / "stateful_tests" / "tests"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 100
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_the_reference_imports_the_standard_library_alone():
    known = {"reference", *sys.stdlib_module_names}
    for path in (ROOT / "reference").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in named} <= known, (path, named)


LINES = (
    "--help", "check --help", "clauses FREE-1", "bugs", "spec", "explore --list", "prove --list",
    "replay fixtures/regressions/close_frees_each_page_once.json --impl reference",
    "tree fixtures/regressions/a_split_keeps_pages_whole.json",
    f"export @what_is_handed_out_is_not_free --as story --impl {bad_adapters.__name__}:Raises",
)  # fmt: skip
CODE = """
import sys
from ci.cli import run
from contextlib import suppress
from impl.adapter import UnusableImplementation
from impl.engines import ENGINES, engine
from stateful_tests.lockstep.system_names import resolve
def start_of_a_check(name):
    with suppress(UnusableImplementation):  # such as a wheel that cannot be fetched
        resolve(name)
ends = [(name, way) for name in ENGINES for way in {*engine(name).ways[:1], *engine(name).ways[-1:]}]
starts = [str(engine(name).newest(way)) for name, way in ends]
for done, lines in ((lambda line: run(line.split()), sys.argv[1:]), (start_of_a_check, starts)):
    for line in lines:
        code = done(line)
        if code or (heavy := sorted({"torch", "numpy", "triton"} & set(sys.modules))):
            sys.exit(f"{line}: {code or f'imports {heavy}'}")
"""


def test_commands_that_drive_no_system_import_no_torch():
    """Nor does the process that a release is driven from: its worker does."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CODE, *LINES]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@at_night
def test_a_bench_says_what_a_command_costs():
    options = ["--impl", "reference", "--runs", "1", "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "ci.bench", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["machine"] for row in rows} == {*MACHINES}
    assert all(row["us_per_command"] > 0 for row in rows)


def test_a_bench_keeps_to_what_an_engine_can_do():
    can = bench._common_capabilities([resolve("reference"), ExampleEngine()])
    assert can.commands == ExampleEngine.capabilities.commands and not can.swa_tail
