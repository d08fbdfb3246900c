"""Campaigns: what they report, and that they survive systems that are worse than wrong."""

from dataclasses import replace
from itertools import islice
from multiprocessing import active_children
from multiprocessing.connection import wait

import pytest

from impl.adapter import Capabilities, UnusableImplementation
from impl.system_spec import SystemSpec
from reference.commands import (
    Decode, Extend, Launch, Mode, Open, Reason, Refused, Retract, SpecDecode,
)  # fmt: skip
from reference.geometry import PRESETS
from reference.state import Phase
from stateful_tests.check import run_driver, plan_order, run_batches
from stateful_tests.check.campaign import run
from stateful_tests.check.run_batches import Named
from stateful_tests.check.executors import Processes
from stateful_tests.check.check_plans import for_system, plan
from stateful_tests.check.run_counts import Counted
from stateful_tests.lockstep import lockstep
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.traces.trace_files import prompt_of

FEW = replace(plan("smoke"), examples=1)


def test_a_run_ends_before_token_ids_do(monkeypatch):
    for module in (run_driver, lockstep):
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
def test_runs_begin_only_with_lines_that_the_system_supports(kind):
    """Runs 2, 6, 10 and so on begin so."""
    begin_so = range(2, 40, 4)
    for name in ("page1", "page2", "page4", "tight"):
        batch = run_batches.RunBatch(run_batches.with_stated_sizes("both", name, Mode.FAITHFUL), begin_so)
        driven = run_driver.drive(kind(), plan("smoke", steps=20), batch)
        assert [found for _, found in driven.runs] == [[]] * len(begin_so), name


class Asserts(ReferenceSystem):
    def apply(self, command):
        raise AssertionError  # as of a bare assert, which pytest would give a message


def test_an_assertion_without_a_message_shows_its_source_line():
    violation = replay(Asserts(), Trace(PRESETS["page1"], Mode.FREE, (Open("s1"),))).violation
    assert violation is not None
    assert violation.observed.startswith(
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
    small_plan = plan("smoke", presets=["page1", "page2"], steps=25, seed=4, machines=["sessions"])
    small_plan = replace(small_plan, after_finding=150, commands=commands)
    name = "reference" if kind is ReferenceSystem else f"{__name__}:{kind.__name__}"
    system = kind()
    processes = Processes(2)
    try:
        results = [
            run(system, small_plan),
            run(system, small_plan, executor=processes, named=Named(SystemSpec(name))),
        ]
    finally:
        processes.close()
    for result in results:
        assert bool(result.findings) is result.stopped is found, result
        assert found or (700 <= result.executed_count < 1_000 and result.exit_code == 0), result
        result.seconds = 0
        result.findings = [replace(f, found_after_s=0) for f in result.findings]
        for machine in result.machines:
            machine.seconds = 0
    assert results[0] == results[1]


def test_undrivable_parts_of_a_plan_are_reported():
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
    whole_plan = for_system(plan("smoke"), ReferenceSystem())
    planned = plan_order.batches(
        ReferenceSystem(), whole_plan, plan_order.configurations(ReferenceSystem(), whole_plan)
    )
    early = [batch.config for batch in islice(planned, 60) if batch.config.machine != "corpus"]
    assert {c.preset for c in early} == {*whole_plan.presets} and {c.mode for c in early} == {*Mode}
    assert {c.machine for c in early} == {*whole_plan.machines}


class ComesApart(ReferenceSystem):
    """Cannot be driven at all."""

    def reset(self, geometry):
        raise UnusableImplementation("no such release")


def test_an_unusable_system_in_a_process_is_reported_by_the_parent():
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


def test_lines_of_the_corpus_that_were_not_driven_are_no_runs():
    system = ReferenceSystem()
    system.capabilities = replace(system.capabilities, commands=frozenset({"Open", "Close"}))
    result = run(system, replace(FEW, machines=("sessions",), modes=(Mode.FREE,)))
    corpus_runs, *others = result.machines
    assert corpus_runs.examples < 30 and corpus_runs.commands >= corpus_runs.examples
    assert {*result.carried_out} == {"Open", "Close"}
    assert [
        machine.examples for machine in others
    ] == [1] * 10


def test_an_interrupt_while_processes_end_leaves_none(monkeypatch):
    """Python waits for them at its exit."""
    before = {*active_children()}
    processes = Processes(1)
    [process] = {*active_children()} - before

    def interrupt_check(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes._pool, "shutdown", interrupt_check)
    with pytest.raises(KeyboardInterrupt):
        processes.close()
    assert wait([process.sentinel], 10)  # not exitcode: the pool's thread may be the one that reaps it
    monkeypatch.undo()
    processes.close()  # the pool's own pipes and thread


def test_lines_of_the_corpus_take_no_effort_from_the_runs_after_them():
    """A share of a plan is as small as the corpus: its short lines would be all that is driven."""
    counted = Counted()
    for _ in range(1000):
        counted.count_run(5, directed=True)
    assert not counted.enough(10_000)
    for _ in range(1000):
        counted.count_run(5)
    assert counted.enough(10_000)
