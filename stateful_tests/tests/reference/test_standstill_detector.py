"""When a state that comes again is a standstill."""

import pytest

from reference.standstill_detector import FOR_EVER, StandstillDetector


def visit_states(*states):
    """Return the last standstill of these states: (state, what is due, whether it runs)."""
    detector = StandstillDetector()
    for state, due, runs in states:
        if state == "token":
            detector.restart()
        else:
            still = detector.enter_state(state, due, runs=runs)
    return still


IDLE = ("a", (), False)
RUNS = ("a", (), True)
TOKEN = ("token", (), False)
OTHER = ("b", (), True)


@pytest.mark.parametrize(
    "states, times, turns, ran",
    [
        ([IDLE], 1, 0, 0),
        ([IDLE] * 3, 3, 2, 0),
        ([IDLE, OTHER, IDLE], 2, 2, 1),
        ([RUNS, RUNS, RUNS], 3, 2, 2),
        ([IDLE, TOKEN, IDLE], 1, 0, 0),
        ([("a", [1], False)] * 3, 1, 2, 0),  # it is still due
        ([("a", [1], False), ("a", [2], False), ("a", [3], False)], 3, 2, 0),
        ([("a", [1, 2], False), ("a", [2], False), ("a", [3], False)], 2, 2, 0),
    ],
)
def test_a_state_counts_again_after_its_due_work_is_done(states, times, turns, ran):
    still = visit_states(*states)
    assert (still.times, still.turns, still.ran) == (times, turns, ran)


def test_a_state_says_what_runs_and_what_ran_since_the_last_progress():
    assert not visit_states(OTHER, OTHER, IDLE).runs
    assert visit_states(OTHER, OTHER, IDLE).passes == 2
    assert visit_states(OTHER, TOKEN, RUNS).passes == 1


def test_nothing_counts_while_a_client_could_go_away():
    detector = StandstillDetector()
    for _ in range(FOR_EVER):
        assert detector.enter_state("a", (), runs=False, counts=False).times == 1
    assert detector.enter_state("a", (), runs=False).times == 2
