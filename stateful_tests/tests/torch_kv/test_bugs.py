"""The register of named bugs. That each shows, by its clause, is said by its fixture (tests/traces)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from impl.bugs import BUGS, broken
from reference.clauses import CLAUSES


def test_every_clause_has_a_bug() -> None:
    assert {bug.clause for bug in BUGS.values()} - {"BROKEN"} == set(CLAUSES)


def test_a_record_is_complete() -> None:
    for name, record in BUGS.items():
        assert (record.id, broken(name).name) == (name, f"torch+{name}")
        assert record.modes
        assert "Visible" in record.story and "Fix: " in record.story and record.story.endswith("."), name


@pytest.mark.parametrize("module", ["impl.adapter", "impl.bugs", "impl.sglang.releases.catalogue"])
def test_reading_about_systems_loads_no_torch(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {module}, sys; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0
