"""The machines as tests of the system that --impl names, and that they find bugs.

Covers what few, deterministic examples reach. Fresh seeds and volume belong to `kvspec check`.
"""

import kvspec
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from reference.commands import Mode
from reference.geometry import PRESETS
from stateful_tests.check.campaign import run
from stateful_tests.check.tiers import plan
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.systems import resolve
from stateful_tests.machines.operations import Operations, MachineTarget, Violated
from stateful_tests.shrink.minimise import minimise
from stateful_tests.tests.support.closing import WaitsForEver

TestSessions = kvspec.machine(machines=["sessions"]).TestCase
TestTree = kvspec.machine(machines=["tree"]).TestCase
TestBoth = kvspec.machine(machines=["both"]).TestCase


@pytest.mark.parametrize(
    "name, bug",
    [
        ("sessions", "pr22897"), ("sessions", "close-forgotten"), ("tree", "split-forgets-locks"),
        ("both", "slot-drops-the-lock"),
    ],
)  # fmt: skip
def test_they_find_bugs(name, bug):

    class Buggy(Operations):
        target = MachineTarget(lambda: resolve(f"torch+{bug}"), [name], [PRESETS["page4"]], [Mode.FREE])

    with pytest.raises(Violated) as found:
        run_state_machine_as_test(Buggy, settings=settings(max_examples=200, phases=[Phase.generate]))
    smallest = minimise(Buggy.target.system, found.value.trace, found.value.violation.clause)
    assert len(smallest.commands) <= 8


class LosesAnyTurn(WaitsForEver):
    """An abort keeps the KV of every turn that has started, until a close: few commands show it."""

    def wipes(self, request):
        if not request.started or request.session is None or request.session.closing:
            return request.started
        self.lost.add(request.session)
        return False


def test_they_ask_for_a_close_past_what_ends_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the traces are saved here
    buggy = kvspec.machine(LosesAnyTurn, machines=["sessions"], presets=["page2"], modes=[Mode.FAITHFUL])
    with pytest.raises(kvspec.ClauseViolated, match=r"1 of 2\): (FREE-1|SES-2)(.|\n)*2 of 2\): SES-4"):
        buggy.TestCase().runTest()


def test_the_model_satisfies_the_clauses():
    """Operational model against declarative clauses, with nothing else in between; all reached."""
    result = run(ReferenceSystem(), plan("smoke", examples=3))
    assert not result.findings
    assert result.unreached == ()
