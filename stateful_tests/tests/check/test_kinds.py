"""Kinds of systems: each is declared, has its own config and commands, and is driven in its own way."""

import re
from contextlib import closing
from dataclasses import replace

import pytest

from impl.adapter import Capabilities, UnusableImplementation
from impl.process.wire import checked_capabilities
from reference.commands import Mode
from reference.system_kinds import BLOCKS, JUDGED_KINDS, KINDS, ROWS, TIERS, kind_by_commands, kind_of_config
from stateful_tests.check import campaign, check_plans
from stateful_tests.check.plan_order import configurations
from stateful_tests.lockstep.driven_kinds import check_fits, lockstep_of, new_tallies
from stateful_tests.lockstep.system_names import resolve


class FailsInReset:
    """A system of any kind whose engine cannot be built."""

    name = "broken"

    def __init__(self, kind):
        commands = frozenset(command.__name__ for command in kind.commands)
        self.capabilities = Capabilities(
            kind=kind.name, commands=commands, modes=(Mode.FAITHFUL,), recurrent=True, tracks=True,
            storage=True, receives=True, bigram=True,
        )  # fmt: skip

    def reset(self, sizes):
        raise RuntimeError("no pool")

    def close(self):
        pass


@pytest.mark.parametrize("kind", JUDGED_KINDS, ids=lambda kind: kind.name)
def test_a_preset_that_two_kinds_name_has_the_sizes_of_the_machines_kind(kind):
    """tight, state and state-window are names of batch-by-batch systems and of engines."""
    drawn = {name: check_plans.sizes_for(kind.machine, name) for name in kind.presets}
    assert drawn == dict(kind.presets)


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
    assert (result.exit_code, finding.clause, len(finding.run.trace.commands)) == (3, "BROKEN", 1)
    assert "reset raises RuntimeError: no pool" in finding.run.violation.failure.observed


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_follows_from_its_config_and_commands(kind):
    assert {kind_of_config(sizes) for sizes in kind.presets.values()} == {kind}
    assert kind_by_commands(frozenset(command.__name__ for command in kind.commands)) is kind
    can = FailsInReset(kind).capabilities
    assert replace(can, kind="").system_kind is can.system_kind is kind
    assert {*lockstep_of(kind).presets_for(can)} <= kind.presets.keys()
    assert new_tallies(can).keys() <= lockstep_of(kind).clauses.keys()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_trace_of_another_kind_does_not_fit(kind):
    system = FailsInReset(kind)
    for other in KINDS.values():
        sizes = other.presets[next(iter(other.presets))]
        if other is kind:
            check_fits(system, replace(sizes, tree=True) if kind is ROWS else sizes)
            continue
        with pytest.raises(UnusableImplementation) as caught:
            check_fits(system, sizes)
        assert str(caught.value).startswith(f"broken {kind.words}: the trace needs ")
        named = re.findall(r"--impl (\S+)", str(caught.value))
        if named == ["module:factory"]:  # no release has the kind
            continue
        with closing(resolve(named[-1])) as suitable:
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


def test_an_adapter_that_declares_no_kind_is_told_which_it_has(kvspec, tmp_path):
    engine = "from kvspec import *\nfrom impl.examples import example_engine as e\n"
    engine += "from dataclasses import replace\ndef make():\n    made = e.make()\n"
    engine += '    made.capabilities = replace(made.capabilities, kind="")\n    return made\n'
    (tmp_path / "no_kind.py").write_text(engine)
    code, _, said = kvspec("check", "--impl", "no_kind:make", "--examples", "2", "-j", "1")
    assert code == 0
    assert 'declares no kind. Its commands are of "rows": Capabilities(kind="rows")' in said
    _, _, said = kvspec("check", "--impl", "impl.examples.example_engine:make", "--examples", "2", "-j", "1")
    assert "kind" not in said
