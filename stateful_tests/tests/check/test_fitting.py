"""Machines, presets and commands are fitted to what a system takes."""

from dataclasses import replace

import pytest

from impl.adapter import Capabilities, UnusableImplementation
from reference.commands import (
    Decode, Mode, Reason, Refused, SpecDecode,
)  # fmt: skip
from stateful_tests.check.campaign import run
from stateful_tests.check.check_plans import plan
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.tests.check.test_campaign import FEW


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
def test_presets_are_fitted_to_the_limits_of_a_system(takes, offers, presets):
    chosen = replace(plan("smoke", machines=["sessions"], steps=20), commands=300, corpus=False)
    result = run(Takes(takes, **offers), chosen)
    assert (result.findings, result.exit_code) == ([], 0) and result.executed_count >= 300
    assert len({machine.preset for machine in result.machines}) == presets
    assert all(takes(machine.sizes) for machine in result.machines)


def test_a_system_that_fits_no_preset_is_unusable():
    with pytest.raises(UnusableImplementation, match="no such sizes"):
        run(Takes(lambda geometry: False), FEW)
