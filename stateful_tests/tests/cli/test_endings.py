"""Exit codes: what they are, and which counts where several things hold."""

import pytest

from stateful_tests.lockstep.exit_codes import Ending, ending, gravest


def test_exit_codes_are_as_documented():
    codes = {
        0: "conforms",
        1: "violated",
        2: "unusable",
        3: "broke",
        4: "incomplete",
        130: "interrupted",
    }
    assert {int(ending): ending.word for ending in Ending} == codes
    assert f"{Ending.BROKE}" == "3"


@pytest.mark.parametrize(
    ("what", "end"),
    [
        ({}, Ending.CONFORMS),
        ({"broke": True, "violated": True}, Ending.BROKE),
        ({"violated": True, "interrupted": True, "incomplete": True}, Ending.VIOLATED),
        ({"interrupted": True, "incomplete": True}, Ending.INTERRUPTED),
        ({"incomplete": True}, Ending.INCOMPLETE),
    ],
)
def test_a_finding_outweighs_an_incomplete_part(what, end):
    assert ending(**what) is end


def test_of_several_runs_the_gravest_ending_counts():
    assert gravest([0, 4]) is Ending.INCOMPLETE
    assert gravest([0, 4, 2]) is Ending.UNUSABLE
    assert gravest([0, 130, 1]) is Ending.VIOLATED
    assert gravest([1, 3]) is Ending.BROKE
