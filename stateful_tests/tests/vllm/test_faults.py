"""Faults of vLLM 0.33.0: each is seen, every clause is the first to see one, and each makes a unit test."""

import json
import subprocess
import sys

from reference.blocks.clauses import BLOCK_CLAUSES
from stateful_tests.tests.vllm.vllm_faults import RELEASE_FAULTS

NO_OBJECT = "# RUN-3: no object of the scheduler shows it"


def test_a_fault_is_seen_first_by_its_clause_and_makes_a_unit_test_and_the_release_conforms(vllm):
    vllm("0.33.0")  # or it cannot be had
    command = [sys.executable, "-m", "stateful_tests.tests.vllm.vllm_faults", "--replay"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    seen = json.loads(done.stdout)
    first = {name: with_it and with_it[0] for name, (with_it, _, _) in seen.items()}
    assert first == {name: fault.clause for name, fault in RELEASE_FAULTS.items()}
    assert [name for name, (_, without, _) in seen.items() if without] == []
    tested = {name: ends for name, (_, _, ends) in seen.items()}
    # What goes wrong in the worker alone, no object of the scheduler shows.
    worker = [name for name, fault in RELEASE_FAULTS.items() if "/worker/" in fault.file]
    of_worker = dict.fromkeys(worker, ["passes"] * 2) | {"session-text-lost-in-the-worker": [NO_OBJECT] * 2}
    assert tested == {name: of_worker.get(name, ["fails", "passes"]) for name in RELEASE_FAULTS}


def test_every_clause_is_the_first_to_see_a_fault():
    assert {*BLOCK_CLAUSES} <= {fault.clause for fault in RELEASE_FAULTS.values()}
