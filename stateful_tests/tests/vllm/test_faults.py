"""Faults of vLLM 0.33.0: each is seen, and every clause is the first to see one."""

from __future__ import annotations

import json
import subprocess
import sys

from reference.blocks.clauses import BLOCK_CLAUSES
from stateful_tests.tests.support.vllm_faults import RELEASE_FAULTS


def test_a_fault_is_seen_first_by_its_clause_and_the_release_conforms(vllm):
    vllm("0.33.0")  # or it cannot be had
    command = [sys.executable, "-m", "stateful_tests.tests.support.vllm_faults", "--replay"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    seen = json.loads(done.stdout)
    first = {name: with_it and with_it[0] for name, (with_it, _) in seen.items()}
    assert first == {name: fault.clause for name, fault in RELEASE_FAULTS.items()}
    assert [name for name, (_, without) in seen.items() if without] == []


def test_every_clause_is_the_first_to_see_a_fault():
    assert {*BLOCK_CLAUSES} <= {fault.clause for fault in RELEASE_FAULTS.values()}
