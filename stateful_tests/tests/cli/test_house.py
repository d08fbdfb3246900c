"""What holds of the whole house: a word means one thing, and what is right depends on nothing else."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

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
