"""Presets, commands and lines of the corpus that run on the base and not on the tree: the verdict names them,
and the exit code is 4."""

from dataclasses import replace

import pytest

from ci.report.check_data import check_data
from impl.adapter import UnusableImplementation
from reference.commands import Mode, Retract
from stateful_tests.check import campaign, corpus, check_plans
from stateful_tests.check import undriven_parts
from stateful_tests.check.undriven_parts import parts_left_out
from stateful_tests.check.trees.base_selection import Base, BaseKind
from stateful_tests.lockstep.reference_system import ReferenceSystem

PLAN = check_plans.plan("smoke", presets=["page1", "page2"], modes=[Mode.FREE], machines=["sessions"])


class Checkout(ReferenceSystem):
    """A checkout that cannot be built with some sizes.

    refused: whether it refuses a geometry.
    """

    def __init__(self, name="sglang@checkout", refused=None):
        super().__init__()
        self.name = name
        self.refused = refused

    def reset(self, geometry):
        if self.refused is not None and self.refused(geometry):
            raise UnusableImplementation(f"{self.name}: its config has no such sizes")
        super().reset(geometry)


def check_report(system, plan=PLAN, **more):
    """Check a system against a base that refuses nothing, and return the data of the report."""
    base = Checkout("git:3f2a1b9ab")
    result = campaign.run(system, plan, base=base, **more)
    chosen = Base(base, BaseKind.HISTORY, "merge base with origin/main", 12)
    return check_data(result, plan, capabilities=system.capabilities, base=chosen)


def test_a_refused_preset_that_the_plan_lacks_is_not_left_out():
    plan = replace(PLAN, examples=5, corpus=False, presets=("page1",))
    data = check_report(Checkout(refused=lambda sizes: sizes.page_size != 1), plan)
    assert data["left_out"] == {}


def test_a_preset_that_the_tree_alone_refuses_is_named():
    plan = replace(PLAN, examples=5, corpus=False, presets=("page1", "no-swa"))
    data = check_report(Checkout(refused=lambda sizes: sizes.window is None), plan)
    reason = "sglang@checkout: its config has no such sizes"
    assert data["left_out"] == {"preset no-swa": reason}
    assert data["exit_code"] == 4
    assert f"left out: preset no-swa: on the base and not here: {reason}" in data["verdict"]
    assert "base: git:3f2a1b9ab (merge base with origin/main), 12 lines differ" in data["verdict"]


def test_a_command_that_the_tree_alone_lacks_is_named():
    data = check_report(tree_without_retract(), replace(PLAN, examples=5, corpus=False))
    assert data["exit_code"] == 4
    assert [*data["left_out"]] == ["commands Retract"]


def tree_without_retract():
    tree = Checkout()
    offered = tree.capabilities
    tree.capabilities = replace(offered, commands=offered.commands - {"Retract"})
    return tree


def test_lines_of_the_corpus_that_the_tree_alone_refuses_are_counted():
    unfit = {
        line.situation
        for line in corpus.load()
        if (line.geometry.page_size, line.mode, line.machine) == (4, Mode.FREE, "sessions")
    }
    tree = Checkout(refused=lambda sizes: sizes.page_size == 4)
    base = Checkout("git:3f2a1b9ab")
    [(what, reason)] = parts_left_out(tree, base, PLAN, unfit).items()
    assert what.endswith("of the corpus")
    assert reason == "its config has no such sizes"
    assert parts_left_out(base, tree, PLAN, unfit) == {}


def test_a_command_that_a_tree_between_releases_does_not_offer_is_not_left_out():
    """Nor are its lines of the corpus: a base that is only the nearest release says little of what the tree
    should offer."""
    unfit = situations_with_retract()
    tree = tree_without_retract()
    base = Checkout("sglang==0.5.12")
    assert {*parts_left_out(tree, base, PLAN, unfit)} > {"commands Retract"}
    assert parts_left_out(tree, base, PLAN, unfit, guessed=True) == {}


def test_a_part_that_an_intermediate_tree_offers_and_refuses_is_left_out():
    tree = Checkout(refused=lambda sizes: sizes.page_size == 4)
    base = Checkout("sglang==0.5.12")
    assert parts_left_out(tree, base, PLAN, situations_with_retract(), guessed=True)


def situations_with_retract():
    return {
        line.situation
        for line in corpus.load()
        if line.machine == "sessions" and any(isinstance(c, Retract) for c in line.commands)
    }


@pytest.mark.parametrize("same_reason", [True, False])
def test_a_part_that_a_neighbour_refuses_for_the_same_reason_is_not_left_out(monkeypatch, same_reason):
    def refused(sizes):
        return sizes.window is None

    class Older(Checkout):
        def reset(self, geometry):
            if refused(geometry) and not same_reason:
                raise UnusableImplementation("it has another reason")
            super().reset(geometry)

    resolved = []

    def resolve(name):
        resolved.append(name)
        return Older(name, refused)

    monkeypatch.setattr(undriven_parts.system_names, "resolve", resolve)
    tree = Checkout(refused=refused)
    tree.release = "0.5.12"
    base = Checkout("sglang==0.5.12")
    plan = replace(PLAN, presets=("page1", "no-swa"))
    assert bool(parts_left_out(tree, base, plan, (), guessed=True)) is not same_reason
    assert resolved and "sglang==0.5.12" not in resolved, "the base itself is not asked again"
    assert parts_left_out(tree, base, plan, ()), "a base of the tree's history has the preset"


@pytest.mark.parametrize("name", ["sglang==0.5.23", "torch"])
def test_a_system_that_is_no_checkout_leaves_nothing_out(name):
    tree = Checkout(name, refused=lambda sizes: sizes.window is None)
    assert not check_report(tree, replace(PLAN, examples=5, presets=("page1", "no-swa")))["left_out"]
