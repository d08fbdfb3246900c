"""The register of named bugs. That each shows, by its clause, is said by its fixture (tests/traces)."""

import subprocess
import sys

from impl.bugs import BUGS
from reference.clauses import CLAUSES


def test_every_clause_has_a_bug():
    assert {bug.clause for bug in BUGS.values()} - {"BROKEN"} == set(CLAUSES)


def test_reading_about_systems_loads_no_torch():
    modules = "impl.adapter, impl.bugs, impl.sglang.releases.catalogue"
    done = subprocess.run([sys.executable, "-c", f"import {modules}, sys; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0
