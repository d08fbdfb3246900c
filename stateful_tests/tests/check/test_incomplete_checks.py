"""Checks that say that they are incomplete, and why."""

import re
import time
from dataclasses import replace
from io import StringIO
from itertools import count

import pytest

from ci.report.check_data import check_data
from ci.report import render, render_check
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
from stateful_tests.check import driving
from stateful_tests.check.campaign import run
from stateful_tests.check.driving import Driven, Named
from stateful_tests.check.executors import Processes
from stateful_tests.check.tiers import plan
from stateful_tests.check.counted import Counted
from stateful_tests.check import corpus
from stateful_tests.lockstep.kinds import new_tallies
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.check_results import CheckResult
from stateful_tests.tests.check.test_campaign import FEW


def test_every_situation_is_reached_on_any_seed_and_the_model_satisfies_all_clauses():
    processes = Processes(2)
    try:
        found = run(
            ReferenceSystem(),
            replace(FEW, seed=4242),
            executor=processes,
            named=Named(SystemSpec("reference")),
        )
    finally:
        processes.close()
    assert (found.findings, found.unreached) == ([], ())
    assert (found.incomplete, found.exit_code) == ([], 0)
    tracked = {text for text in found.unfit if text.startswith("tracked states, ")}
    assert tracked == {*found.unfit}, "the reference tracks none inside a text"
    assert {*found.required} | tracked == {line.situation for line in corpus.load()}
    assert len({*found.required} - tracked) > 430


def test_a_situation_that_is_not_reached_makes_a_check_of_our_own_incomplete(monkeypatch):
    of_sessions = next(line for line in corpus.load() if not line.geometry.tree)
    nobody = of_sessions._replace(situation="open, as nobody does")
    monkeypatch.setattr(corpus, "load", lambda: (nobody,))
    driving._lines.cache_clear()
    chosen = replace(FEW, machines=("sessions",))
    result = run(ReferenceSystem(), chosen)
    driving._lines.cache_clear()
    assert result.exit_code == 4 and "1 of 1 situations were not met" in result.incomplete
    data = check_data(result, chosen, capabilities=ReferenceSystem.capabilities)
    assert (data["exit_code"], data["situations"]["missing"]) == (4, ["open, as nobody does"])
    result.system = "stranger"  # its policy decides
    assert result.exit_code == 0


def test_what_an_engine_does_not_offer_is_not_missed_whether_or_not_the_plan_is_done():
    engine, chosen = ExampleEngine(), replace(plan("smoke"), time_limit_s=0)
    data = check_data(run(engine, chosen), chosen, capabilities=engine.capabilities)
    assert data["commands_carried_out"] == 0 and data["situations"]["asked"] < 10
    assert {"a window", "a radix tree", "retract", "check busy"} <= {*data["not_declared"]}
    text = StringIO()
    render_check.check(render.console(text), data, detailed=True)
    assert "0 of 30,000 commands; 0 of" in text.getvalue()
    assert "not declared, so not checked: open, " in text.getvalue()
    clauses = {clause["id"] for clause in data["clauses"]}
    assert {"OUT-1", "FREE-1", "LEN-1"} < clauses and not clauses & {
        "TREE-1",
        "SWA-1",
        "STA-1",
        "CHK-1",
    }


def test_clauses_of_what_no_engine_declares_do_not_count():
    alone, whole = (new_tallies(can) for can in (BlockEngine.capabilities, Capabilities(
        commands=frozenset(kind.__name__ for kind in ENGINE_COMMANDS), recurrent=True, encodes=True,
        drafter=True,
    )))  # fmt: skip
    assert whole.keys() == {*BLOCK_CLAUSES}
    lacks = {"KEY-1", "PUB-3", "STA-1", "STA-2", "STA-3", "STA-4", "STA-5"}
    lacks |= {"ENC-1", "ENC-2", "ENC-3", "ENC-4", "ENC-5", "ENC-6", "DRAFT-1", "DRAFT-2"}
    assert whole.keys() - alone.keys() == lacks | {*OF_CONNECTORS}


class RefusesAll(ReferenceSystem):
    """Every answer is a refusal that a policy allows."""

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


def test_a_plan_that_is_cut_is_incomplete(monkeypatch):
    """Only where a limit was given: by itself a plan is counted in commands."""
    seconds = count(time.monotonic(), 6)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    chosen = replace(FEW, machines=("sessions",), presets=("page1",))
    result = run(ReferenceSystem(), replace(chosen, time_limit_s=300.0))
    assert result.timed_out and result.examples and result.exit_code == 4
    assert result.incomplete[0].startswith("the time limit came after")
    assert not run(ReferenceSystem(), chosen).timed_out


class Serves(ReferenceSystem):
    """Refuses commands of some kinds after so many, as its capabilities allow."""

    capabilities = replace(
        ReferenceSystem.capabilities, exact_reasons=False, may_refuse=frozenset(Reason)
    )

    def __init__(self, kinds, until):
        super().__init__()
        self.kinds, self.until, self.served = kinds, until, 0

    def apply(self, command):
        self.served += 1
        if self.served > self.until and isinstance(command, self.kinds):
            return Refused(Reason.UNFAITHFUL)
        return super().apply(command)


@pytest.mark.parametrize(
    "kinds, until, says",
    [
        (object, 300, "only 2.. of 1,000 commands were carried out; refused from command 3"),
        (Decode, 0, "refused every time: decode"),
        (Abort, 400, "refused from command [34].. on: abort"),
        (Decode, 10**6, ""),
    ],
)
def test_a_system_that_stops_serving_is_incomplete(kinds, until, says):
    chosen = plan("smoke", presets=["page2"], machines=["sessions"], steps=50, modes=[Mode.FREE])
    result = run(Serves(kinds, until), replace(chosen, commands=1_000))
    assert not result.findings and result.exit_code == (4 if says else 0)
    assert re.match(says, "; ".join(result.incomplete)), result.incomplete


@pytest.mark.parametrize(
    "carried_out, last, says",
    [
        (lambda run: run % 5 == 0, 12, False),  # seven in a hundred checks end so by chance
        (lambda run: run % 5 == 0, 100, True),
        (lambda run: True, 12, True),
        (lambda run: True, 9, False),
    ],
)
def test_what_is_often_refused_may_end_with_refusals(carried_out, last, says):
    counted = Counted()
    for number in range(100 + last):
        driven = Driven({})
        done = number < 100 and carried_out(number)
        driven.count(EvictSwa("r1", 4), Done() if done else Refused(Reason.UNFAITHFUL), not done)
        counted.add(driven)
        counted.ran(1)
    result = CheckResult("reference", "smoke", 0)
    counted.enter(result, ReferenceSystem(), plan("smoke"), [])
    assert ("evict_swa" in result.declined) == says


def test_a_system_that_excuses_most_clauses_is_incomplete():
    system, chosen = (
        ReferenceSystem(),
        plan("smoke", presets=["page2"], machines=["sessions"], examples=2),
    )
    came_up = [clause for clause, tally in run(system, chosen).tallies.items() if tally.reached]
    for excused, code in ((len(came_up) // 2, 0), (len(came_up) // 2 + 1, 4)):
        waived = dict.fromkeys(came_up[:excused], "harmless")
        system.capabilities = replace(system.capabilities, waived=waived)
        result = run(system, chosen)
        assert result.exit_code == code
    says = f"known or waived are {excused} of the {len(came_up)} clauses that came up"
    assert result.incomplete == [says]


class BreaksOnCommand(ReferenceSystem):
    """Fails on each command from the given one of a run on."""

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
