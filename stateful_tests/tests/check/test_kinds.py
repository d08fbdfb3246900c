"""Kinds of systems: each is declared, has its own config and commands, and is driven in its own way."""

import re
from contextlib import closing
from dataclasses import replace
from itertools import permutations
from textwrap import dedent

import pytest

from impl.adapter import Capabilities, UnusableImplementation
from impl.process.failures import WrongShape
from impl.process.wire import checked_capabilities, copied_view
from reference.commands import Mode
from reference.system_kinds import BLOCKS, JUDGED_KINDS, KINDS, ROWS, TIERS, kind_by_commands, kind_of_config
from stateful_tests.check import campaign, check_plans
from stateful_tests.check.plan_order import configurations
from stateful_tests.lockstep.driven_kinds import check_fits, lockstep_of, new_tallies
from stateful_tests.lockstep.system_names import resolve


class DeclaredSystem:
    """A system that declares a kind with all of its commands, and has no engine."""

    name = "broken"

    def __init__(self, kind):
        commands = frozenset(command.__name__ for command in kind.commands)
        self.capabilities = Capabilities(
            kind=kind.name, commands=commands, modes=(Mode.FAITHFUL,), recurrent=True, tracks=True,
            storage=True, receives=True, bigram=True,
        )  # fmt: skip

    def close(self):
        pass


class FailsInReset(DeclaredSystem):
    """A system of any kind whose engine cannot be built."""

    def reset(self, sizes):
        raise RuntimeError("no pool")


@pytest.mark.parametrize("kind", JUDGED_KINDS, ids=lambda kind: kind.name)
def test_a_machine_gets_the_presets_of_its_own_kind(kind):
    """Two kinds have presets called tight, state and state-window."""
    sizes_of_machine = {
        name: check_plans.sizes_for(kind.machine, name) for name in kind.presets
    }
    assert sizes_of_machine == dict(kind.presets)


@pytest.mark.parametrize("version", ["0.20.0", "0.33.0"])
def test_each_preset_of_an_engine_has_its_runs(version, vllm):
    system = vllm(version)
    plan = check_plans.for_system(check_plans.plan("smoke"), system)
    driven = {config.preset for config in configurations(system, plan)}
    assert {*plan.presets} <= driven


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_reset_that_fails_is_a_finding_of_every_kind(kind):
    result = campaign.run(FailsInReset(kind), replace(check_plans.plan("smoke", seed=1), commands=60))
    [finding] = result.findings
    assert result.exit_code == 3
    assert finding.clause == "BROKEN"
    assert len(finding.run.trace.commands) == 1
    assert "reset raises RuntimeError: no pool" in finding.run.violation.failure.observed


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_follows_from_its_config_and_commands(kind):
    assert {kind_of_config(sizes) for sizes in kind.presets.values()} == {kind}
    assert kind_by_commands(frozenset(command.__name__ for command in kind.commands)) is kind
    can = DeclaredSystem(kind).capabilities
    assert replace(can, kind="").system_kind is can.system_kind is kind
    assert {*lockstep_of(kind).presets_for(can)} <= kind.presets.keys()
    assert new_tallies(can).keys() <= lockstep_of(kind).clauses.keys()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_trace_of_its_own_kind_fits(kind):
    sizes = next(iter(kind.presets.values()))
    check_fits(DeclaredSystem(kind), replace(sizes, tree=True) if kind is ROWS else sizes)


@pytest.mark.parametrize(
    ("kind", "other"), [*permutations(KINDS.values(), 2)], ids=lambda kind: kind.name
)
def test_a_trace_of_another_kind_does_not_fit_and_the_message_names_a_system_that_fits(kind, other):
    with pytest.raises(UnusableImplementation) as error:
        check_fits(DeclaredSystem(kind), next(iter(other.presets.values())))
    message = str(error.value)
    assert message.startswith(f"broken {kind.words}: the trace needs ")
    [*_, suitable_name] = re.findall(r"--impl (\S+)", message)
    if suitable_name != "module:factory":  # else no release has the kind
        with closing(resolve(suitable_name)) as suitable:
            assert suitable.capabilities.system_kind is other


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("engine", "capabilities.kind: 'engine'; one of rows, blocks, tiers"),
        (BLOCKS.name, "capabilities.kind: blocks: its commands are those of rows"),
        (TIERS.name, "capabilities.kind: tiers: its commands are those of rows"),
    ],
)
def test_a_kind_that_cannot_be_is_refused(kind, says):
    with pytest.raises(TypeError, match=says):
        checked_capabilities(Capabilities(kind=kind))


@pytest.mark.parametrize("kind", JUDGED_KINDS, ids=lambda kind: kind.name)
def test_a_field_of_facts_of_another_type_is_named(kind):
    fields = kind.facts._fields
    with pytest.raises(WrongShape, match=rf"view\(\)\.{fields[0]}"):
        copied_view(kind, kind.facts(*[1.5] * len(fields)))


def test_an_adapter_that_declares_no_kind_is_told_which_it_has(kvspec, tmp_path):
    module = dedent("""
        from dataclasses import replace
        from impl.examples import example_engine
        def make():
            engine = example_engine.make()
            engine.capabilities = replace(engine.capabilities, kind="")
            return engine
    """)
    (tmp_path / "no_kind.py").write_text(module)
    code, _, errors = kvspec("check", "--impl", "no_kind:make", "--examples", "2", "-j", "1")
    assert code == 0
    assert 'declares no kind. Its commands are of "rows": Capabilities(kind="rows")' in errors
    declaring = "impl.examples.example_engine:make"
    _, _, errors = kvspec("check", "--impl", declaring, "--examples", "2", "-j", "1")
    assert "declares no kind" not in errors
