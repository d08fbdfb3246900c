"""A check in which a run never comes to its end is incomplete."""

from dataclasses import replace

import pytest

from impl.examples.block_engine import BlockEngine
from reference.commands import Abort
from stateful_tests.check import campaign, run_driver, check_plans
from stateful_tests.lockstep.check_results import CheckResult

SOMEBODY_WAITS = "never came to an end: somebody who waits got no answer"


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_leaves_a_request_waiting_makes_a_check_incomplete(ends, monkeypatch):
    draws = run_driver._DRAWS[check_plans.CLIENTS]
    # a command that is refused again and again, in the place of the end phase
    finale = draws.finale if ends else lambda *_: Abort("nobody")
    monkeypatch.setitem(run_driver._DRAWS, check_plans.CLIENTS, draws._replace(finale=finale))
    result = campaign.run(BlockEngine(), check_plans.plan("smoke", presets=["full"], examples=4))
    assert not result.new
    assert bool(result.unanswered) != ends
    assert any(SOMEBODY_WAITS in reason for reason in result.incomplete) != ends


def test_the_runs_are_counted():
    result = replace(CheckResult("x", "smoke", 0), unanswered=1)
    assert f"1 run {SOMEBODY_WAITS}" in result.incomplete
