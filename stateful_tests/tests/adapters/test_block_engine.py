"""The example adapter of an engine that schedules by itself: it conforms, faults put into it are found, and
it is given what it offers alone."""

from collections import Counter
from dataclasses import replace

import pytest

from impl.adapter import Capabilities
from impl.examples.block_engine import NULL, BlockEngine
from reference.blocks.commands import Add
from reference.tiers.commands import ResetCache
from reference.commands import Reason, Refused
from stateful_tests.check import campaign, check_plans
from stateful_tests.lockstep.engine_lockstep import EngineLockstep
from reference.blocks.presets import engine_preset

PLAN = replace(check_plans.plan("smoke"), commands=1200)


class Noting(BlockEngine):
    """Notes what it is given. One that declares four commands need not expect a fifth."""

    def __init__(self):
        self.given = Counter()

    def apply(self, command):
        assert not (isinstance(command, Add) and command.resumable)
        self.given[type(command).__name__] += 1
        return super().apply(command)


def test_an_engine_is_driven_only_through_offered_commands():
    engine = Noting()
    result = campaign.run(engine, PLAN)
    assert (result.exit_code, result.findings) == (0, [])
    assert engine.given.keys() == engine.capabilities.commands == result.commands_by_kind.keys()
    assert not result.unreached
    lockstep = EngineLockstep(engine, engine_preset("full"))
    for command in (ResetCache(), Add("r1", 1, 1, resumable=True)):
        assert lockstep.do(command) == Refused(Reason.UNFAITHFUL), command


def test_without_abort_nobody_aborts():
    engine = Noting()
    engine.capabilities = Capabilities(
        commands=frozenset({"Add", "Schedule", "Update"}), modes=engine.capabilities.modes
    )
    campaign.run(engine, PLAN)
    assert engine.given.keys() == engine.capabilities.commands


class EvictsATokenEarly(BlockEngine):
    """A query does not see the first token of its window any more."""

    def _leave_behind(self, request):
        request.computed += 1
        super()._leave_behind(request)
        request.computed -= 1


class SharesWithoutCounting(BlockEngine):
    """A hit leaves the ref count as it is."""

    def _share(self, block):
        count = self.refs[block]
        super()._share(block)
        self.refs[block] = count or 1
        return block


class KeepsTheHash(BlockEngine):
    """A block that is handed out again bears its old hash on."""

    def _take(self):
        block = self.free.popleft()
        self.refs[block] = 1
        return block


class HitsAWholeWindowOnly(BlockEngine):
    """A hit is good where full attention has it."""

    def _find_hit(self, group, stamps, length):
        if self.groups[group].window is not None:
            return [NULL] * (length // self.groups[group].block_size)
        return super()._find_hit(group, stamps, length)


@pytest.mark.parametrize(
    ("fault", "clause"),
    [
        (EvictsATokenEarly, "WIN-1"),
        (SharesWithoutCounting, "BLK-1"),
        (KeepsTheHash, "HIT-1"),
        (HitsAWholeWindowOnly, "HIT-1"),
    ],
)
def test_a_fault_is_found(fault, clause):
    violation = campaign.first_violation(fault(), PLAN)
    assert violation is not None and clause in violation[0].clauses
