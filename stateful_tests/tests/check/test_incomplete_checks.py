"""A check reports that it is incomplete, and why: not reached, refused, cut, excused or ended early."""

import re
import time
from dataclasses import replace
from io import StringIO
from itertools import count

import pytest

from ci.report.check_data import check_data
from ci.report import text_output, check_text
from impl.adapter import Capabilities
from impl.examples.block_engine import BlockEngine
from impl.examples.example_engine import ExampleEngine
from impl.system_spec import SystemSpec
from reference.blocks.clauses import BLOCK_CLAUSES
from reference.blocks.commands import ENGINE_COMMANDS
from reference.commands import (
    Abort, Decode, Done, EvictSwa, Mode, Reason, Refused,
)  # fmt: skip
from reference.tiers.clauses import OF_CONNECTORS
from stateful_tests.check import run_driver
from stateful_tests.check.campaign import run
from stateful_tests.check.run_batches import BatchResult, Named
from stateful_tests.check.executors import Processes
from stateful_tests.check.check_plans import plan
from stateful_tests.check.run_counts import Counted
from stateful_tests.check import corpus
from stateful_tests.lockstep.driven_kinds import new_tallies
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.check_results import CheckResult
from stateful_tests.tests.check.test_campaign import FEW
from stateful_tests.tests.support.night import at_night


@at_night
def test_every_situation_is_reached_on_any_seed_and_the_model_satisfies_all_clauses():
    processes = Processes(2)
    try:
        result = run(
            ReferenceSystem(),
            replace(FEW, seed=4242),
            executor=processes,
            named=Named(SystemSpec("reference")),
        )
    finally:
        processes.close()
    assert (result.findings, result.unreached) == ([], ())
    assert (result.incomplete, result.exit_code) == ([], 0)
    tracked = {text for text in result.unfit if text.startswith("tracked states, ")}
    assert tracked == {*result.unfit}, "the reference tracks none inside a text"
    assert {*result.required} | tracked == {line.situation for line in corpus.load()}
    assert len({*result.required} - tracked) > 430


def test_a_situation_that_is_not_reached_makes_a_check_of_our_own_incomplete(monkeypatch):
    line = next(line for line in corpus.load() if not line.geometry.tree)
    unreachable = line._replace(situation="open, as nobody does")
    monkeypatch.setattr(corpus, "load", lambda: (unreachable,))
    run_driver._lines.cache_clear()
    chosen = replace(FEW, machines=("sessions",))
    result = run(ReferenceSystem(), chosen)
    run_driver._lines.cache_clear()
    assert result.exit_code == 4 and "1 of 1 situations were not met" in result.incomplete
    data = check_data(result, chosen, capabilities=ReferenceSystem.capabilities)
    assert (data["exit_code"], data["situations"]["missing"]) == (4, ["open, as nobody does"])
    result.system = "stranger"  # which situations it reaches is its policy's choice
    assert result.exit_code == 0


def test_features_that_an_engine_does_not_declare_are_not_missing():
    engine = ExampleEngine()
    chosen = replace(plan("smoke"), time_limit_s=0)  # before the first command as well
    data = check_data(run(engine, chosen), chosen, capabilities=engine.capabilities)
    assert data["commands_carried_out"] == 0 and data["situations"]["asked"] < 10
    assert {"a window", "a radix tree", "retract", "check busy"} <= {*data["not_declared"]}
    text = StringIO()
    check_text.check(text_output.console(text), data, detailed=True)
    assert "0 of 30,000 commands; 0 of" in text.getvalue()
    assert "not declared, so not checked: open, " in text.getvalue()
    clauses = {clause["id"] for clause in data["clauses"]}
    assert {"OUT-1", "FREE-1", "LEN-1"} < clauses
    assert not clauses & {"TREE-1", "SWA-1", "STA-1", "CHK-1"}


def test_clauses_of_features_that_an_engine_does_not_declare_are_not_tallied():
    every_command = frozenset(kind.__name__ for kind in ENGINE_COMMANDS)
    everything = Capabilities(commands=every_command, recurrent=True, encodes=True, drafter=True)
    alone = new_tallies(BlockEngine.capabilities)
    all_tallies = new_tallies(everything)
    assert all_tallies.keys() == {*BLOCK_CLAUSES}
    lacks = {"KEY-1", "PUB-3", "STA-1", "STA-2", "STA-3", "STA-4", "STA-5"}
    lacks |= {"ENC-1", "ENC-2", "ENC-3", "ENC-4", "ENC-5", "ENC-6", "DRAFT-1", "DRAFT-2"}
    assert all_tallies.keys() - alone.keys() == lacks | {*OF_CONNECTORS}


class RefusesAll(ReferenceSystem):
    """A system that refuses every command, as its capabilities allow."""

    capabilities = replace(
        ReferenceSystem.capabilities, exact_reasons=False, may_refuse=frozenset(Reason)
    )

    def apply(self, command):
        return Refused(Reason.NO_ROW)


def test_a_system_that_refuses_everything_conforms_to_nothing():
    result = run(
        RefusesAll(), replace(FEW, machines=("sessions",), presets=("page1",), corpus=True)
    )
    assert not result.findings and result.exit_code == 4
    assert any(reason.startswith("never carried out: abort, admit") for reason in result.incomplete)
    assert "only 0 commands were carried out" in result.incomplete


def test_a_plan_that_reaches_its_time_limit_is_incomplete(monkeypatch):
    """A plan without a time limit ends after its number of commands."""
    seconds = count(time.monotonic(), 6)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    small_plan = replace(FEW, machines=("sessions",), presets=("page1",))
    result = run(ReferenceSystem(), replace(small_plan, time_limit_s=300.0))
    assert result.timed_out
    assert result.examples
    assert result.exit_code == 4
    assert result.incomplete[0].startswith("the time limit came after")
    assert not run(ReferenceSystem(), small_plan).timed_out


class StopsServing(ReferenceSystem):
    """A system that refuses commands of some kinds, as its capabilities allow, after its first commands.

    accepted: how many commands it serves before.
    """

    capabilities = replace(
        ReferenceSystem.capabilities, exact_reasons=False, may_refuse=frozenset(Reason)
    )

    def __init__(self, kinds, accepted):
        super().__init__()
        self.kinds = kinds
        self.accepted = accepted
        self.commands = 0

    def apply(self, command):
        self.commands += 1
        if self.commands > self.accepted and isinstance(command, self.kinds):
            return Refused(Reason.UNFAITHFUL)
        return super().apply(command)


@pytest.mark.parametrize(
    "kinds, accepted, says",
    [
        (object, 300, "only 2.. of 1,000 commands were carried out; refused from command 3"),
        (Decode, 0, "refused every time: decode"),
        (Abort, 400, "refused from command [34].. on: abort"),
        (Decode, 10**6, ""),
    ],
)
def test_a_check_of_a_system_that_stops_serving_is_incomplete(kinds, accepted, says):
    chosen = plan("smoke", presets=["page2"], machines=["sessions"], steps=50, modes=[Mode.FREE])
    result = run(StopsServing(kinds, accepted), replace(chosen, commands=1_000))
    assert not result.findings and result.exit_code == (4 if says else 0)
    assert re.match(says, "; ".join(result.incomplete)), result.incomplete


@pytest.mark.parametrize(
    "carried_out, last_refused, is_declined",
    [
        (lambda run: run % 5 == 0, 12, False),  # seven in a hundred checks end so by chance
        (lambda run: run % 5 == 0, 100, True),
        (lambda run: True, 12, True),
        (lambda run: True, 9, False),
    ],
)
def test_a_command_that_is_often_refused_may_end_with_refusals(
    carried_out, last_refused, is_declined
):
    counted = Counted()
    for number in range(100 + last_refused):
        driven = BatchResult({})
        done = number < 100 and carried_out(number)
        driven.count(EvictSwa("r1", 4), Done() if done else Refused(Reason.UNFAITHFUL), not done)
        counted.add(driven)
        counted.count_run(1)
    result = CheckResult("reference", "smoke", 0)
    counted.enter(result, ReferenceSystem(), plan("smoke"), [])
    assert ("evict_swa" in result.declined) == is_declined


def test_a_check_that_excuses_most_clauses_is_incomplete():
    system = ReferenceSystem()
    chosen = plan("smoke", presets=["page2"], machines=["sessions"], examples=2)
    came_up = [clause for clause, tally in run(system, chosen).tallies.items() if tally.reached]
    for excused, code in ((len(came_up) // 2, 0), (len(came_up) // 2 + 1, 4)):
        waived = dict.fromkeys(came_up[:excused], "harmless")
        system.capabilities = replace(system.capabilities, waived=waived)
        result = run(system, chosen)
        assert result.exit_code == code
    says = f"known or waived are {excused} of the {len(came_up)} clauses that came up"
    assert result.incomplete == [says]


class BreaksOnCommand(ReferenceSystem):
    """A system that raises an exception at every command of a run after the first `number`."""

    def __init__(self, number):
        super().__init__()
        self.number = self.count = number

    def reset(self, geometry):
        super().reset(geometry)
        self.count = 0

    def apply(self, command):
        self.count += 1
        if self.count > self.number:
            raise ValueError("too many commands")
        return super().apply(command)


@pytest.mark.parametrize("number, code", [(1, 4), (20, 0)])
def test_known_faults_that_end_runs_at_once_make_a_check_incomplete(number, code):
    chosen = plan("smoke", presets=["page2", "page1"], machines=["sessions"], examples=8)
    result = run(BreaksOnCommand(number), chosen, base=BreaksOnCommand(number))
    assert not result.new and result.exit_code == code, result.incomplete
    says = "runs end in the first 4 commands, by BROKEN: sessions on page2, sessions on page1"
    early = [reason for reason in result.incomplete if reason.startswith("runs end")]
    assert early == ([says] if code else [])
