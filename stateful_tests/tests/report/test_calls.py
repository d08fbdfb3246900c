"""The functions that a finding names: those of its failing command, and not what any command calls."""

from ci.report.called_functions import telling_calls
from impl.process.system_functions import grouped_texts, parse_grouped
from reference.commands import Close, Mode, Open
from reference.failures import Failure
from reference.geometry import preset
from stateful_tests.lockstep.run_results import Run, Trace, Violation

GETTERS = "pool.py: available_size, evictable_size"


def telling_texts(commands, called, step=None):
    trace = Trace(preset("page1"), Mode.FAITHFUL, commands)
    if step is None:
        step = len(commands) - 1
    violation = Violation("LEN-2", step, Failure("x", "y"))
    functions = tuple(tuple(parse_grouped(texts)) for texts in called)
    return grouped_texts(telling_calls(Run(trace, "torch", (), violation, called=functions)))


def test_functions_that_other_commands_call_too_are_left_out():
    called = (("cache.py: open", GETTERS), ("cache.py: open", GETTERS), (
        "cache.py: open, close, free", f"{GETTERS}, free"))  # fmt: skip
    assert telling_texts((Open("s1"), Open("s2"), Close("s1")), called) == [
        "cache.py: close, free", "pool.py: free",
    ]  # fmt: skip


def test_functions_that_commands_of_the_same_kind_call_stay():
    """Behind what it alone called."""
    called = (("cache.py: open", GETTERS), ("cache.py: close", GETTERS), ("cache.py: close, late", GETTERS))
    assert telling_texts((Open("s1"), Close("s1"), Close("s2")), called) == ["cache.py: late, close"]


def test_functions_that_one_command_in_two_calls_stay():
    called = (("a.py: f",), ("a.py: g",), ("a.py: f, h",))
    assert telling_texts((Open("s1"), Open("s2"), Close("s1")), called) == ["a.py: h, f"]


def test_functions_that_every_command_calls_stay_if_nothing_else_is_called():
    assert telling_texts((Open("s1"), Close("s1")), ((GETTERS,), (GETTERS,))) == [GETTERS]
    assert telling_texts((Open("s1"),), ((GETTERS,),)) == [GETTERS]
    assert telling_texts((Open("s1"), Close("s1")), ((GETTERS,),)) == []
