"""Campaigns: what they report, and that they survive systems that are worse than wrong."""

import re
import time
from dataclasses import replace
from io import StringIO
from itertools import count, islice
from multiprocessing import active_children
from multiprocessing.connection import wait

import pytest

from ci.report.check_data import check_data
from ci.report import render, render_check
from impl.adapter import Capabilities, UnusableImplementation
from impl.block_engine import BlockEngine
from impl.example_engine import ExampleEngine
from impl.system_spec import SystemSpec
from reference.blocks.clauses import BLOCK_CLAUSES
from reference.blocks.commands import ENGINE_COMMANDS
from reference.commands import (
    Abort, Decode, Done, EvictSwa, Extend, Launch, Mode, Open, Reason, Refused, Retract, SpecDecode,
)  # fmt: skip
from reference.geometry import PRESETS, preset
from reference.state import Phase
from reference.tiers.clauses import OF_CONNECTORS
from stateful_tests.check import driving, finder, turns
from stateful_tests.check.campaign import run
from stateful_tests.check.driving import Driven, Named
from stateful_tests.check.executors import Processes
from stateful_tests.check.tiers import for_system, plan
from stateful_tests.check.causes import needs, to_avoid
from stateful_tests.check.counted import Counted
from stateful_tests.check import corpus
from stateful_tests.lockstep import lockstep
from stateful_tests.lockstep.lockstep import new_tallies, replay, rejected_turns
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import CheckResult, Trace
from stateful_tests.lockstep.systems import resolve
from stateful_tests.shrink.passes import BUDGET
from stateful_tests.tests.support.closing import KeepsOnThreeWays, WaitsForEver
from stateful_tests.tests.support.commands import script
from stateful_tests.traces.files import prompt_of


def test_a_run_ends_before_token_ids_do(monkeypatch):
    for module in (driving, lockstep):
        monkeypatch.setattr(module, "SHARED", 4)
    result = run(
        ReferenceSystem(), plan("smoke", examples=3, machines=["sessions"], presets=["page1"])
    )
    assert (result.examples, result.findings) == (6, [])
    assert result.commands_by_kind["Submit"] > 0


class OneKindOfRounds(ReferenceSystem):
    """A server decodes plainly or speculatively, as SGLang's does."""

    capabilities = replace(ReferenceSystem.capabilities, mixed_decode=False, mixed_batches=True)

    def reset(self, geometry):
        super().reset(geometry)
        self.kinds = set()

    def apply(self, command):
        lanes = command.lanes if isinstance(command, Extend) else ()
        running = [self.state.request(lane.request) for lane in lanes]
        outcome = super().apply(command)
        if isinstance(outcome, Refused):
            return outcome
        if isinstance(command, Decode) or any(r.phase is Phase.RUNNING for r in running):
            self.kinds.add("plain")
        if isinstance(command, SpecDecode | Launch):
            self.kinds.add("with drafts")
        if len(self.kinds) > 1:
            raise UnusableImplementation("a run cannot mix Decode and SpecDecode")
        return outcome


class TakesNoTails(ReferenceSystem):
    """SWA slots are for all that a prompt has, as in SGLang 0.5.10."""

    capabilities = replace(ReferenceSystem.capabilities, swa_tail=False)

    def apply(self, command):
        if isinstance(command, Extend) and any(lane.tail for lane in command.lanes):
            raise UnusableImplementation("takes SWA slots for all that it prefills")
        return super().apply(command)


@pytest.mark.parametrize("kind", [OneKindOfRounds, TakesNoTails])
def test_a_run_that_begins_with_a_line_is_one_that_the_system_can_be_driven_through(kind):
    """Runs 2, 6, 10 and so on begin so."""
    begin_so = range(2, 40, 4)
    for name in ("page1", "page2", "page4", "tight"):
        batch = driving.RunBatch(driving.unfitted("both", name, Mode.FAITHFUL), begin_so)
        driven = driving.drive(kind(), plan("smoke", steps=20), batch)
        assert [found for _, found in driven.runs] == [[]] * len(begin_so)


class Asserts(ReferenceSystem):
    def apply(self, command):
        raise AssertionError  # as of a bare assert, which pytest would give a message


def test_an_assertion_without_a_message_shows_its_source_line():
    violation = replay(Asserts(), Trace(PRESETS["page1"], Mode.FREE, (Open("s1"),))).violation
    assert violation is not None and violation.observed.startswith(
        "AssertionError: raise AssertionError  # as of a bare assert, which pytest would give a message"
        " at test_campaign.py:"
    )


class Stingy(ReferenceSystem):
    """Keeps a reserve of pages, and says so."""

    capabilities = Capabilities(exact_reasons=False, may_refuse=frozenset({Reason.OUT_OF_FULL}))

    def apply(self, command):
        if type(command).__name__ == "Extend" and len(self.free["full"]) < 4:
            return Refused(Reason.OUT_OF_FULL)
        return super().apply(command)


def test_a_declared_reserve_is_policy_and_an_undeclared_one_is_not():
    chosen = plan("smoke", presets=["page4"], examples=9, machines=["sessions"])
    assert not run(Stingy(), chosen).findings
    stingy = Stingy()
    stingy.capabilities = Capabilities(exact_reasons=False)
    assert [f.clause for f in run(stingy, chosen).findings] == ["OUT-1"]


class RetractsNobody(ReferenceSystem):
    def apply(self, command):
        return Refused(Reason.EMPTY) if isinstance(command, Retract) else super().apply(command)


@pytest.mark.parametrize(
    "kind, commands, found", [(RetractsNobody, 5_000, True), (ReferenceSystem, 700, False)]
)
def test_the_same_seed_gives_the_same_check_however_many_processes_run_it(kind, commands, found):
    chosen = plan("smoke", presets=["page1", "page2"], steps=25, seed=4, machines=["sessions"])
    chosen = replace(chosen, after_finding=150, commands=commands)
    name = "reference" if kind is ReferenceSystem else f"{__name__}:{kind.__name__}"
    system, processes = kind(), Processes(2)
    try:
        results = [
            run(system, chosen),
            run(system, chosen, executor=processes, named=Named(SystemSpec(name))),
        ]
    finally:
        processes.close()
    for result in results:
        assert bool(result.findings) is result.stopped is found
        assert found or (700 <= result.done < 1_000 and result.exit_code == 0)
        result.seconds = 0
        result.findings = [replace(f, found_after_s=0) for f in result.findings]
        for machine in result.machines:
            machine.seconds = 0
    assert results[0] == results[1]


FEW = replace(plan("smoke"), examples=1)


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
        commands=frozenset(kind.__name__ for kind in ENGINE_COMMANDS), recurrent=True,
    )))  # fmt: skip
    assert whole.keys() == {*BLOCK_CLAUSES}
    lacks = {"KEY-1", "PUB-3", "STA-1", "STA-2", "STA-3", "STA-4", "STA-5"}
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


def test_what_a_system_cannot_be_driven_through_is_reported():
    system = ReferenceSystem()
    offered = Capabilities().commands - {"Open", "Close"}
    system.capabilities = replace(
        system.capabilities, commands=offered, swa_tail=False, mixed_batches=False
    )
    result = run(system, replace(FEW, presets=("page1", "page4")))
    assert result.exit_code == 0 and 100 < len(result.required) < 400
    whys = {*result.unfit.values()}
    assert "does not offer Open" in whys and "takes SWA slots for all that it prefills" in whys
    assert result.unfit["submit, later turn"] == "does not offer Open"


def test_the_first_twentieth_of_a_plan_covers_each_preset_machine_and_mode():
    """Then no fault that one of them shows waits for the end of a plan."""
    whole = for_system(plan("smoke"), ReferenceSystem())
    planned = turns.batches(
        ReferenceSystem(), whole, turns.configurations(ReferenceSystem(), whole)
    )
    early = [batch.config for batch in islice(planned, 60) if batch.config.machine != "corpus"]
    assert {c.preset for c in early} == {*whole.presets} and {c.mode for c in early} == {*Mode}
    assert {c.machine for c in early} == {*whole.machines}


class ComesApart(ReferenceSystem):
    """Cannot be driven at all."""

    def reset(self, geometry):
        raise UnusableImplementation("no such release")


def test_what_a_process_cannot_use_is_reported_in_this_one():
    processes = Processes(2)
    try:
        with pytest.raises(UnusableImplementation, match="no such release"):
            run(
                ReferenceSystem(),
                plan("smoke"),
                executor=processes,
                named=Named(SystemSpec(f"{__name__}:ComesApart")),
            )
    finally:
        processes.close()


def test_a_plan_that_is_cut_is_incomplete(monkeypatch):
    """Only where a limit was given: by itself a plan is counted in commands."""
    seconds = count(time.monotonic(), 6)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    chosen = replace(FEW, machines=("sessions",), presets=("page1",))
    result = run(ReferenceSystem(), replace(chosen, time_limit_s=300.0))
    assert result.timed_out and result.examples and result.exit_code == 4
    assert result.incomplete[0].startswith("the time limit came after")
    assert not run(ReferenceSystem(), chosen).timed_out


def test_a_clause_that_comes_beside_another_is_shrunk_with_less_effort(monkeypatch):
    budgets: dict[str, int] = {}

    def minimise(system, trace, clause, *, budget, base=None, **_):
        budgets.setdefault(clause, budget)
        return trace

    monkeypatch.setattr(finder, "minimise", minimise)
    monkeypatch.setattr(finder, "failing_prefix", lambda *_: None)
    run(resolve("torch+pr22900"), replace(plan("smoke", machines=["sessions"]), after_finding=0))
    first, *others = budgets.values()
    assert first == BUDGET and others and set(others) == {finder._BESIDE_BUDGET}


RETRACTED_ABORTED_CLOSED = script(
    "open s1; submit r1 in s1 +2; admit r1; extend r1 +2; retract r1; abort r1; close s1"
)


def test_a_fault_that_comes_first_does_not_hide_a_close_that_never_happens():
    chosen = plan(
        "smoke", presets=["page1"], machines=["sessions"], modes=[Mode.FAITHFUL], examples=40
    )
    result = run(WaitsForEver(), chosen)
    closed = next(f.run for f in result.findings if f.clause == "SES-4")
    violation = closed.violation
    assert (violation.clauses, violation.first_violation.clause) == (("SES-4",), "SES-2")
    assert [type(c) for c in closed.trace.commands] == [type(c) for c in RETRACTED_ABORTED_CLOSED]
    another = run(resolve("torch+abort-keeps-retracted-kv"), chosen)
    assert [f.clause for f in another.findings] == ["SES-2"]


@pytest.mark.parametrize(
    ("system", "clause", "ends"),
    [
        (WaitsForEver(), None, ("SES-2", 5)),
        (WaitsForEver(), "SES-1", ("SES-2", 5)),
        (WaitsForEver(), "SES-4", ("SES-4", 6)),
        (resolve("torch+abort-keeps-retracted-kv"), "SES-4", ("SES-2", 5)),
        (resolve("torch"), "SES-4", None),
    ],
)
def test_a_trace_of_a_close_that_never_happens_is_replayed_past_other_violations(
    system, clause, ends
):
    trace = Trace(preset("page1"), Mode.FAITHFUL, RETRACTED_ABORTED_CLOSED, clause=clause)
    seen = replay(system, trace)
    assert seen.trace == trace
    assert ends == (
        None if seen.violation is None else (seen.violation.clause, seen.violation.step)
    )
    assert len(seen.rows) == (7 if ends is None else ends[1] + 1)


@pytest.mark.parametrize(
    ("commands", "needed"),
    [
        (RETRACTED_ABORTED_CLOSED[:-1], ("a retract", "an abort")),
        (
            script("open s1; submit r1 in s1 +1; submit r2 in s1 +1; close s1"),
            ("a close", "a rejected turn"),
        ),
        (
            script("open s1; submit r1 in s1 +24; admit r1; extend r1 +24; abort r1"),
            ("an abort", "pools that run full"),
        ),
    ],
)
def test_a_trace_says_what_it_needs(commands, needed):
    geometry = replace(preset("page1"), full_pages=24, width=24)
    trace = Trace(geometry, Mode.FAITHFUL, commands)
    assert needs(KeepsOnThreeWays(), trace, "SES-2") == needed


def test_of_known_traces_one_need_each_is_avoided():
    assert to_avoid([("a retract", "an abort")]) == [("a retract",), ("an abort",)]
    known = [("a retract", "an abort"), ("an abort", "pools that run full")]
    assert to_avoid(known) == [("an abort",), ("a retract", "pools that run full")]
    assert to_avoid([("an abort",), ()]) == [], "one that needs nothing cannot be avoided"


def test_a_fault_hides_no_other_of_its_clause(monkeypatch):
    chosen = plan(
        "smoke",
        presets=["page1", "tight"],
        machines=["sessions"],
        modes=[Mode.FAITHFUL],
        seed=1,
        examples=13,
    )
    close, abort = run(KeepsOnThreeWays(), chosen).findings
    assert (close.name, abort.name) == ("SES-2", "SES-2 (2)")
    assert abort.without == ("a close",)
    assert rejected_turns(close.run) and not rejected_turns(abort.run)
    assert [type(c) for c in abort.run.trace.commands][-2:] == [Retract, Abort]
    monkeypatch.setattr(finder, "MAX_TRACES_PER_CLAUSE", 1)
    assert [f.name for f in run(KeepsOnThreeWays(), chosen).findings] == ["SES-2"]


class RefusesDecode(ReferenceSystem):
    """Refuses to decode: always, or while no session is open."""

    def __init__(self, always):
        super().__init__()
        self.always = always

    def apply(self, command):
        outcome = super().apply(command)
        wrong = isinstance(command, Decode) and isinstance(outcome, Done)
        return (
            Refused(Reason.NO_ROW)
            if wrong and (self.always or not self.view().sessions)
            else outcome
        )


def test_what_was_there_before_hides_no_other_fault_of_its_clause_and_ends_nothing(monkeypatch):
    monkeypatch.setattr(finder, "_SHORT", 0)  # all traces are shrunk, also after the best is found
    chosen = plan(
        "smoke", presets=["page2"], machines=["sessions"], modes=[Mode.FAITHFUL], examples=13
    )
    change, base = RefusesDecode(always=True), RefusesDecode(always=False)
    for before, kinds in ((None, []), (base, [Open])):
        [finding] = run(change, chosen, base=before).findings
        assert finding.clause == "OUT-1"
        assert [type(c) for c in finding.run.trace.commands if isinstance(c, Open)] == kinds
    same = run(base, replace(chosen, after_finding=0), base=RefusesDecode(always=False))
    assert len(same.findings) == 1 and not same.stopped


@pytest.mark.parametrize(
    "options, says",
    [
        ({"tier": "huge"}, "tier: unknown 'huge'"),
        ({"tier": "smoke", "presets": ["page3"]}, "preset: unknown 'page3'"),
        ({"tier": "smoke", "machines": ["m"]}, "machine: unknown 'm'"),
        ({"tier": "smoke", "examples": 0}, "examples: must be between"),
    ],
)
def test_bad_plans_say_what_is_wrong(options, says):
    with pytest.raises(ValueError, match=says):
        plan(**options)


@pytest.mark.parametrize(
    "offers, driven",
    [
        ({}, {"sessions", "tree", "both"}),
        ({"tree": False}, {"sessions"}),
        ({"no_tree": False}, {"tree", "both"}),
        ({"commands": Capabilities().commands - {"Insert"}}, {"sessions", "both"}),
    ],
)
def test_machines_that_do_not_fit_are_left_out(offers, driven):
    system = ReferenceSystem()
    system.capabilities = Capabilities(**offers)
    result = run(system, plan("smoke", presets=["page4"], modes=[Mode.FREE], examples=1))
    assert {machine.name for machine in result.machines} == driven
    assert not result.findings


class ForgetsPieces(ReferenceSystem):
    """Refuses prompts of more than one piece, which are there with a radix tree alone."""

    def apply(self, command):
        if len(getattr(command, "prompt", ())) > 1:
            return Refused(Reason.EMPTY)
        return super().apply(command)


def test_a_trace_of_the_tree_shrinks_to_pages_of_one_token():
    chosen = plan("smoke", presets=["page16"], modes=[Mode.FREE], examples=6, machines=["tree"])
    [finding] = run(ForgetsPieces(), chosen).findings
    trace = finding.run.trace
    assert trace.geometry.page_size == 1 and len(trace.commands) == 1
    assert trace.commands[0].prompt == prompt_of("a1a1")


class Takes(ReferenceSystem):
    """Takes some sizes alone."""

    def __init__(self, takes, **offers):
        super().__init__()
        self.takes, self.capabilities = takes, replace(self.capabilities, **offers)

    def reset(self, geometry):
        if not self.takes(geometry):
            raise UnusableImplementation("no such sizes")
        super().reset(geometry)


class WithoutDrafts(ReferenceSystem):
    """A recurrent model has no drafts here."""

    capabilities = replace(
        ReferenceSystem.capabilities, exact_reasons=False, may_refuse=frozenset({Reason.UNFAITHFUL})
    )
    kind = SpecDecode

    def apply(self, command):
        return (
            Refused(Reason.UNFAITHFUL) if isinstance(command, self.kind) else super().apply(command)
        )


class WithoutDecodes(WithoutDrafts):
    """Nor does it decode otherwise, which no policy explains."""

    kind = Decode


@pytest.mark.parametrize("system, exit_code", [(WithoutDrafts, 0), (WithoutDecodes, 4)])
def test_drafts_on_a_recurrent_model_may_be_refused(system, exit_code):
    chosen = plan("smoke", machines=["sessions"], presets=["state"], examples=12)
    result = run(system(), chosen)
    assert (result.findings, result.exit_code) == ([], exit_code)


@pytest.mark.parametrize(
    "takes, offers, presets",
    [
        (lambda g: g.page_size == 16, {}, 8),
        (lambda g: g.page_size >= 4 and g.page_size % 4 == 0, {}, 8),
        (lambda g: g.rows == 1, {}, 10),
        (lambda g: g.width <= 16, {}, 10),
        (lambda g: g.page_size == 64 and g.width >= 512, {}, 8),
        (lambda g: g.window is None, {"swa": False}, 8),
        (lambda g: g.window is not None, {"full_only": False}, 10),
    ],
)
def test_presets_are_fitted_to_what_a_system_takes(takes, offers, presets):
    chosen = replace(plan("smoke", machines=["sessions"], steps=20), commands=600, corpus=False)
    result = run(Takes(takes, **offers), chosen)
    assert (result.findings, result.exit_code) == ([], 0) and result.done >= 600
    assert len({machine.preset for machine in result.machines}) == presets
    assert all(takes(machine.sizes) for machine in result.machines)


def test_a_system_that_fits_no_preset_is_unusable():
    with pytest.raises(UnusableImplementation, match="no such sizes"):
        run(Takes(lambda geometry: False), FEW)


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


def test_lines_of_the_corpus_that_were_not_driven_are_no_runs():
    system = ReferenceSystem()
    system.capabilities = replace(system.capabilities, commands=frozenset({"Open", "Close"}))
    result = run(system, replace(FEW, machines=("sessions",), modes=(Mode.FREE,)))
    corpus_runs, *others = result.machines
    assert corpus_runs.examples < 30 and corpus_runs.commands >= corpus_runs.examples
    assert {*result.carried_out} == {"Open", "Close"} and [
        machine.examples for machine in others
    ] == [1] * 10


def test_an_interrupt_while_processes_end_leaves_none(monkeypatch):
    """Python waits for them at its exit."""
    before = {*active_children()}
    processes = Processes(1)
    [mine] = {*active_children()} - before

    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes._pool, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.close()
    assert wait([mine.sentinel], 10)  # not exitcode: the pool's thread may be the one that reaps it
    monkeypatch.undo()
    processes.close()  # the pool's own pipes and thread


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


def test_lines_of_the_corpus_take_no_effort_from_the_runs_after_them():
    """A share of a plan is as small as the corpus: its short lines would be all that is driven."""
    counted = Counted()
    for _ in range(1000):
        counted.ran(5, directed=True)
    assert not counted.enough(10_000)
    for _ in range(1000):
        counted.ran(5)
    assert counted.enough(10_000)
