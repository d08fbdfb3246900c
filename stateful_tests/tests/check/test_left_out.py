"""What runs on the base and not on the tree is in the verdict, with exit code 4."""

from dataclasses import replace

import pytest

from ci.report.check_data import check_data
from impl.adapter import UnusableImplementation
from reference.commands import Mode, Retract
from stateful_tests.check import campaign, corpus, tiers
from stateful_tests.check import left_out as left_out_module
from stateful_tests.check.bases import Base, BaseKind
from stateful_tests.check.left_out import left_out
from stateful_tests.lockstep.reference_system import ReferenceSystem

PLAN = tiers.plan("smoke", presets=["page1", "page2"], modes=[Mode.FREE], machines=["sessions"])


class Tree(ReferenceSystem):
    """A checkout that cannot be built with some sizes."""

    def __init__(self, name="sglang@checkout", refused=None):
        super().__init__()
        self.name, self.refused = name, refused

    def reset(self, geometry):
        if self.refused is not None and self.refused(geometry):
            raise UnusableImplementation(f"{self.name}: its config has no such pages")
        super().reset(geometry)


def checked(system, plan=PLAN, **more):
    base = Tree("git:3f2a1b9ab")
    result = campaign.run(system, plan, base=base, **more)
    chosen = Base(base, BaseKind.HISTORY, "merge base with origin/main", 12)
    return check_data(result, plan, capabilities=system.capabilities, base=chosen)


def test_a_preset_that_the_tree_alone_refuses_is_named():
    plan = replace(PLAN, examples=5, corpus=False)
    data = checked(
        Tree(refused=lambda sizes: sizes.page_size != 1), replace(plan, presets=("page1",))
    )
    assert data["left_out"] == {}
    gone = Tree(refused=lambda sizes: sizes.window is None)
    data = checked(gone, replace(plan, presets=("page1", "no-swa")))
    why = "sglang@checkout: its config has no such pages"
    assert data["left_out"] == {"preset no-swa": why} and data["exit_code"] == 4
    said = f"left out: preset no-swa: on the base and not here: {why}"
    assert said in data["verdict"]
    assert "base: git:3f2a1b9ab (merge base with origin/main), 12 lines differ (" in data["verdict"]


def test_a_command_that_the_tree_alone_lacks_is_named():
    tree = Tree()
    can = tree.capabilities
    tree.capabilities = replace(can, commands=can.commands - {"Retract"})
    data = checked(tree, replace(PLAN, examples=5, corpus=False))
    assert data["exit_code"] == 4 and [*data["left_out"]] == ["commands Retract"]


def test_lines_of_the_corpus_that_the_tree_alone_refuses_are_counted():
    lines = [
        line for line in corpus.load() if line.geometry.page_size == 4 and line.mode is Mode.FREE
    ]
    unfit = {line.situation for line in lines if line.machine == "sessions"}
    tree, base = Tree(refused=lambda sizes: sizes.page_size == 4), Tree("git:3f2a1b9ab")
    [(what, why)] = left_out(tree, base, PLAN, unfit).items()
    assert what.endswith("of the corpus") and why == "its config has no such pages"
    assert left_out(base, tree, PLAN, unfit) == {}


def test_what_a_tree_between_releases_does_not_offer_is_no_loss():
    """It is so by the facts that the tree has; what it offers and refuses is a loss all the same."""
    lines = [line for line in corpus.load() if any(isinstance(c, Retract) for c in line.commands)]
    unfit = {line.situation for line in lines if line.machine == "sessions"}
    tree, base = Tree(), Tree("sglang==0.5.12")
    can = tree.capabilities
    tree.capabilities = replace(can, commands=can.commands - {"Retract"})
    assert {*left_out(tree, base, PLAN, unfit)} > {"commands Retract"}
    assert left_out(tree, base, PLAN, unfit, guessed=True) == {}
    small = Tree(refused=lambda sizes: sizes.page_size == 4)
    assert left_out(small, base, PLAN, unfit, guessed=True)


@pytest.mark.parametrize("alike", [True, False])
def test_what_a_release_around_refuses_for_the_same_reason_is_no_loss(monkeypatch, alike):
    def refused(sizes):
        return sizes.window is None

    class Older(Tree):
        def reset(self, geometry):
            if refused(geometry) and not alike:
                raise UnusableImplementation("it has another reason")
            super().reset(geometry)

    resolved = []

    def resolve(name):
        resolved.append(name)
        return Older(name, refused)

    monkeypatch.setattr(left_out_module.systems, "resolve", resolve)
    tree, base = Tree(refused=refused), Tree("sglang==0.5.12")
    tree.release = "0.5.12"
    plan = replace(PLAN, presets=("page1", "no-swa"))
    assert bool(left_out(tree, base, plan, (), guessed=True)) is not alike
    assert resolved and "sglang==0.5.12" not in resolved
    assert left_out(tree, base, plan, ()), "a base of the tree's history has it"


@pytest.mark.parametrize("name", ["sglang==0.5.23", "torch"])
def test_a_release_beside_another_is_not_compared(name):
    tree = Tree(name, refused=lambda sizes: sizes.window is None)
    assert not checked(tree, replace(PLAN, examples=5, presets=("page1", "no-swa")))["left_out"]
