"""Requests that answer with a shared text: what one has computed, another finds in the tree."""

from dataclasses import replace

import pytest

from impl.adapter import UnusableImplementation
from impl.examples.example_engine import ExampleEngine
from impl.torch_kv.system import TorchKV
from reference.commands import Mode, Reason, Refused, Submit
from reference.geometry import Geometry
from reference.radix_tree import tokens_held
from impl.choices import RandomChoices
from stateful_tests.generate.run_profile import draw_profile
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.support.commands import script

PAGES = Geometry(page_size=2, window=None, full_pages=8, swa_pages=0, rows=2, width=8, tree=True)
# Both compute tokens 3 and 4 of the text: a page that the tree has when the second one ends.
TWINS = script(
    "submit r1 (no session) a3 answers a; submit r2 (no session) a3 answers a; admit r1; admit r2;"
    "extend r1 +3, r2 +3; decode r1, r2; finish r1 keep 2; finish r2 keep 2; check_idle"
)
LATER = script("submit r1 (no session) a4; admit r1")


def lockstep_of(system):
    return Lockstep(system, PAGES, Mode.FAITHFUL)


@pytest.mark.parametrize("system", [ReferenceSystem, TorchKV])
def test_an_answer_that_the_tree_has_is_freed_once_and_matched_by_a_longer_prompt(system):
    lockstep = lockstep_of(system())
    for command in (*TWINS, *LATER):
        lockstep.do(command)
    assert lockstep.violation is None
    assert lockstep.state.request("r1").cursors.cache_protected_len == 2, "all but the last token"
    assert tokens_held(lockstep.state.tree) == (4, 0), "the second one has left nothing more"


class KeepsAnswers(TorchKV):
    """A finish frees no page that the tree has by now, where an answer is in it."""

    def owned_starts(self, cursors):
        swa, full = super().owned_starts(cursors)
        return swa, max(full, cursors.kv_committed_len if cursors.kv_committed_len > 3 else 0)


def test_a_page_of_an_equal_answer_that_is_not_freed_is_lost():
    run = replay(KeepsAnswers(), Trace(PAGES, Mode.FAITHFUL, TWINS))
    assert run.violation is not None and run.violation.clause == "FREE-1"
    own = tuple(replace(c, answers="") if isinstance(c, Submit) else c for c in TWINS)
    assert replay(KeepsAnswers(), Trace(PAGES, Mode.FAITHFUL, own)).violation is None


@pytest.mark.parametrize("answers", ["A", "ab", "1"])
def test_an_answer_that_is_no_text_is_refused(answers):
    command = Submit("r1", None, 1, answers=answers)
    for system in (ReferenceSystem(), TorchKV()):
        assert lockstep_of(system).do(command) == Refused(Reason.EMPTY), system


def test_systems_without_equal_answers_are_not_drawn_any():
    with pytest.raises(UnusableImplementation, match="answers each turn with a text of its own"):
        replay(
            ExampleEngine(),
            Trace(
                Geometry(page_size=1, window=None, full_pages=4, swa_pages=0, rows=1, width=4),
                Mode.FREE,
                TWINS[:1],
            ),
        )


def test_equal_answers_are_drawn_in_some_runs():
    def alike(can):
        return sum(draw_profile(RandomChoices(seed), can, "both").alike for seed in range(60))

    assert 8 < alike(TorchKV().capabilities) < 40
    assert alike(replace(TorchKV().capabilities, answers=False)) == 0
