"""The machines as tests of the system that --impl names, and that they find bugs.

Covers what few, deterministic examples reach. Fresh seeds and volume belong to `kvspec check`.
"""

from types import MethodType, SimpleNamespace

import kvspec
import pytest
from hypothesis import Phase, reporting, settings
from hypothesis.stateful import INVARIANT_MARKER, RULE_MARKER, run_state_machine_as_test

from reference.clauses import CLAUSES
from reference.commands import COMMANDS, Mode, kind_name
from reference.geometry import PRESETS
from stateful_tests.generate.commands import HARNESSES
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.machines import shrinking
from stateful_tests.machines.server_machine import ServerMachine, Violated
from stateful_tests.machines.targets import MachineTarget
from stateful_tests.shrink.minimise import minimise
from stateful_tests.tests.support.closing import WaitsForEver
from stateful_tests.tests.support.night import at_night

TestSessions = kvspec.machine(machines=["sessions"]).TestCase
TestTree = kvspec.machine(machines=["tree"]).TestCase
TestBoth = kvspec.machine(machines=["both"]).TestCase


@pytest.mark.parametrize(
    "name, bug",
    [
        ("sessions", "pr22897"),
        ("sessions", "close-forgotten"),
        ("tree", "split-forgets-locks"),
        ("both", "slot-drops-the-lock"),
    ],
)
def test_machines_find_bugs(name, bug):

    class Buggy(ServerMachine):
        target = MachineTarget(
            lambda: resolve(f"torch+{bug}"), [name], [PRESETS["page4"]], [Mode.FREE]
        )

    with pytest.raises(Violated):
        run_state_machine_as_test(
            Buggy, settings=settings(max_examples=200, phases=[Phase.generate])
        )
    [(clause, (_, trace))] = Buggy.found.items()
    assert len(minimise(Buggy.target.system, trace, clause).commands) <= 8


@pytest.mark.parametrize("seconds, most", [(60, 3), (0, 60)], ids=["to the end", "not at all"])
def test_hypothesis_shrinks_for_a_bounded_time(seconds, most, monkeypatch, capsys):

    class Buggy(ServerMachine):
        target = MachineTarget(
            lambda: resolve("torch+pr22470"), ["tree"], [PRESETS["page4"]], [Mode.FREE]
        )

    monkeypatch.setattr(shrinking, "SECONDS", seconds)
    phases = [Phase.generate, Phase.shrink]
    once = settings(database=None, deadline=None, max_examples=300, phases=phases)
    with shrinking.bounded_shrinking(), pytest.raises(Violated):
        run_state_machine_as_test(Buggy, settings=once)
    [(_, trace)] = Buggy.found.values()
    assert len(trace.commands) <= most
    assert "WARNING" not in capsys.readouterr().out


def test_each_command_has_a_harness():
    assert HARNESSES.keys() == set(COMMANDS)


@pytest.mark.parametrize("kind", COMMANDS)
def test_each_command_is_a_rule(kind):
    method = getattr(ServerMachine, kind_name(kind))
    assert method.__doc__ == kind.__doc__
    assert repr(getattr(method, RULE_MARKER).arguments["command"]) == f"commands({kind.__name__})"


@pytest.mark.parametrize("clause", ["BROKEN", *CLAUSES])
def test_each_clause_is_in_one_invariant(clause):
    failed = []
    violated = SimpleNamespace(violation=SimpleNamespace(clause=clause))
    machine = SimpleNamespace(lockstep=violated, _fail=lambda: failed.append(clause))
    machine._conforms = MethodType(ServerMachine._conforms, machine)
    invariants = [member for member in vars(ServerMachine).values() if hasattr(member, INVARIANT_MARKER)]
    for invariant in invariants:
        invariant(machine)
    assert failed == [clause] and len(invariants) == 11


class LosesAnyTurn(WaitsForEver):
    """An abort keeps the KV of every turn that has started, until a close: few commands show it."""

    def wipes(self, request):
        if not request.started or request.session is None or request.session.closing:
            return request.started
        self.lost.add(request.session)
        return False


@at_night
def test_machines_close_sessions_after_the_end_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the traces are saved here
    buggy = kvspec.machine(
        LosesAnyTurn, machines=["sessions"], presets=["page2"], modes=[Mode.FAITHFUL]
    )
    with pytest.raises(
        kvspec.ClauseViolated, match=r"1 of 2\): (FREE-1|SES-2)(.|\n)*2 of 2\): SES-4"
    ):
        buggy.TestCase().runTest()


def test_a_bounded_search_does_not_print_its_bound(capsys):
    with shrinking.bounded_shrinking():
        reporting.report("it took too long to shrink")
        reporting.report("a failure")
    assert capsys.readouterr().out == "a failure\n"
