"""Real releases under overlap scheduling: batch N+1 is launched before the result of N is processed.

Skips, with the reason, where a release can be neither found nor fetched.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from impl.sglang import SGLangSystem
from reference.commands import (
    Abort, Admit, CheckIdle, Chunk, Close, Command, Decode, Done, Draft, EvictSwa, Extend, Finish, Insert,
    Launch, Mode, Open, Piece, Reason, Refused, Retract, Settle, Submit,
)  # fmt: skip
from reference.geometry import Geometry, preset
from reference.state import Cursors
from stateful_tests.lockstep.known_faults import KnownFault
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.support.release_faults import (
    AGAIN, BEGIN, ENDS, NEXT, NOT_YET, OVERLAP, RELEASES, TRACES, decode, fault_shown,
    overlapped_releases, since,
    verify,
)  # fmt: skip
from stateful_tests.traces.trace_files import load

SIZES = Geometry(page_size=1, window=2, full_pages=40, swa_pages=40, rows=4, width=40)


def trace_all_done(sizes: Geometry, commands: tuple[Command, ...]) -> Trace:
    """Return a trace that expects Done of every command."""
    return Trace(
        sizes, Mode.FAITHFUL, commands, expected=tuple((n, Done()) for n in range(len(commands)))
    )


class Expected(NamedTuple):
    """Cursors by the rules of a release.

    evicted: swa_evicted_seqlen after two decodes of a prompt of three tokens.
    allocated: kv_allocated_len after two verify rounds of three drafts that accept 3 and 2.
    """

    evicted: int
    allocated: int


# Had the first result been processed before the second launch, one more token would be evicted, and 10
# allocated.
EXPECTED = dict.fromkeys(
    ("0.5.10", "0.5.13", "0.5.16", "0.5.18", "0.5.20", "0.5.23"), Expected(1, 9)
)
EXPECTED["0.5.13"] = Expected(0, 10)  # window evictions keep a page more, a round claims a token


@pytest.fixture(scope="module", params=list(EXPECTED))
def version(request):
    return request.param


@pytest.fixture(scope="module")
def system(version, release):
    sglang = release(f"{version}+overlap")
    assert isinstance(sglang, SGLangSystem)
    return sglang


def play(system: SGLangSystem, *commands: Command) -> Cursors:
    """Return the cursors of `a` after these commands, each of which must be done."""
    system.reset(replace(SIZES, settings=(("SGLANG_SWA_EVICTION_INTERVAL", "1"),)))
    for command in commands:
        outcome = system.apply(command)
        assert isinstance(outcome, Done), (command, outcome)
    return system.view().requests["a"].cursors


def test_window_eviction_ignores_a_result_in_flight(system, version):
    assert play(system, *BEGIN, *decode(2)).swa_evicted_seqlen == EXPECTED[version].evicted


def test_window_eviction_and_finish_refuse_lengths_of_results_in_flight(system):
    play(system, *BEGIN, *verify(1, 3))  # 8 tokens, 3 of them in flight
    assert system.apply(EvictSwa("a", 5)) == Refused(Reason.UNFAITHFUL)
    assert isinstance(system.apply(EvictSwa("a", 4)), Done)
    assert system.apply(Finish("a", 2)) == Refused(Reason.UNFAITHFUL)  # by then it was to go on


def test_allocation_for_a_verify_round_ignores_a_result_in_flight(system, version):
    cursors = play(system, *BEGIN, *verify(3, 2))
    assert (cursors.kv_committed_len, cursors.kv_allocated_len) == (8, EXPECTED[version].allocated)


def test_finish_cannot_end_a_turn_at_an_output_that_was_processed_as_not_its_last(system):
    play(system, *BEGIN, *decode(3))
    assert system.apply(Finish("a", 2)) == Refused(Reason.UNFAITHFUL)
    assert isinstance(system.apply(Finish("a", 3)), Done)


def test_retract_cannot_lose_one_output_of_a_round_that_accepted_two(system):
    play(system, *BEGIN, *verify(1, 2))
    assert system.apply(Retract("a", 1)) == Refused(Reason.UNFAITHFUL)
    assert isinstance(system.apply(Retract("a", 0)), Done)


def test_prompt_enters_the_tree_with_the_first_launched_round(system):
    system.reset(replace(SIZES, tree=True))

    def cached_tokens(*commands):
        """Tokens in the tree after these commands."""
        for command in commands:
            assert isinstance(system.apply(command), Done), command
        tree = system.view().tree
        return sum(len(node.slots) for node in tree.nodes)

    assert cached_tokens(*BEGIN) == 0
    # its prefill is still running
    assert system.apply(EvictSwa("a", 3)) == Refused(Reason.UNFAITHFUL)
    assert system.apply(Retract("a")) == Refused(Reason.UNFAITHFUL)
    assert cached_tokens(*decode(1)) == 3
    second = (Submit("b", None, 2), Admit("b"), Extend((Chunk("b", 2),)))
    assert cached_tokens(Finish("a", 2), *second) == 3
    assert cached_tokens(Finish("b", 1)) == 5  # straight from the result of its prefill


@pytest.mark.parametrize("tokens", [1, 3], ids=["takes nothing", "takes a page more"])
@pytest.mark.parametrize(
    "sizes", [Geometry(2, 1, 6, 6, 2, 8, tree=True), Geometry(1, 2, 9, 9, 2, 8, tree=True)]
)
def test_reference_agrees_on_a_prompt_that_enters_the_tree_late(system, sizes, tokens):
    a2 = (Piece("a", 2),)
    commands = (
        Insert("h", a2),
        Submit("a", None, tokens, 0, a2),
        Admit("a"),
        Extend((Chunk("a", tokens),)),
        *decode(2),
        Finish("a", 1 + tokens // 2),
    )
    assert replay(system, Trace(sizes, Mode.FAITHFUL, commands)).violation is None


def test_reference_agrees_on_an_eviction_past_what_the_tree_takes(system):
    """0.5.23 evicts when it hands a prompt in."""
    a6 = (Piece("a", 6),)
    a3b4 = (Piece("a", 3), Piece("b", 4))
    aborted = (Submit("b", None, 0, 0, a6), Admit("b"), Extend((Chunk("b", 5),)), Abort("b"))
    commands = (
        *aborted,
        Submit("a", None, 0, 0, a3b4),
        Admit("a"),
        Extend((Chunk("a", 7),)),
        *verify(1),
    )
    trace = Trace(Geometry(2, 1, 6, 6, 1, 12, tree=True), Mode.FAITHFUL, commands)
    assert replay(system, trace).violation is None


def launch(*accepted: int) -> tuple[Command, ...]:
    return tuple(Launch((Draft("a", 3, accept),)) for accept in accepted)


LATE: dict[str, tuple[Command, ...]] = {
    "a result ends it, another is in flight": (*launch(2, 1), Settle("a"), Finish("a", 3), *NEXT),
    "a result ends it before its last token": (*launch(3), Settle("a"), Finish("a", 2), *NEXT),
    "it is retracted with two in flight": (
        *launch(2), Settle("a"), *launch(3, 1), Retract("a"), *AGAIN, *launch(1, 1), Settle("a"),
        Finish("a", 5), *NEXT,
    ),
    "it is aborted with one in flight": (*launch(2, 1), Settle("a"), Abort("a"), *NEXT),
    "its session is closed meanwhile": (*launch(3), Close("s"), Settle("a"), Finish("a", 3), CheckIdle()),
}  # fmt: skip


@pytest.mark.parametrize("ends", [ENDS, LATE], ids=["as shown", "launched"])
def test_ends_with_results_in_flight_conform(ends, system, version):
    if version == "0.5.10":
        pytest.skip(
            "it trims nothing and saves what is aborted: see fixtures/releases/sglang-0.5.10"
        )
    for name in ("page1", "page4", "no-swa"):
        sizes = replace(preset(name), width=40)
        for end, rest in ends.items():
            assert replay(system, trace_all_done(sizes, (*BEGIN, *rest))).violation is None, (name, end)


def trace_under_overlap(path: Path, fault: KnownFault, version: str) -> Trace | None:
    """Return the trace of a known fault as this release shows it under overlap; None for another
    release."""
    own = path.parent.name.endswith("+overlap")
    if version not in (overlapped_releases(path) if own else since(fault)) or path.stem in NOT_YET:
        return None
    trace = load(path)
    if own:
        return trace
    if trace.geometry.states:  # with overlap a request takes more slots, or has none
        return None
    if version == "0.5.10" and trace.clause == "MAP-4":
        # Its round in flight has committed nothing yet: the prompt alone must end inside a page.
        sizes = replace(trace.geometry, full_pages=6, swa_pages=6, width=12)
        commands = (Submit("r1", None, 3), *trace.commands[1:2], Extend((Chunk("r1", 3),)))
        return replace(trace, geometry=sizes, commands=(*commands, *trace.commands[3:]))
    return trace


def test_known_faults_of_a_release_show_under_overlap(system, version):
    wrong = {}
    judged = 0
    for path, fault in (*TRACES, *OVERLAP):
        if (trace := trace_under_overlap(path, fault, version)) is None:
            continue
        judged += 1
        clause = fault.clause_shown(trace.clause, version)
        expected = None if clause is None else (clause, len(trace.commands) - 1)
        is_shown = fault_shown(system, trace)
        if clause not in (None, trace.clause):  # another clause than the trace's: at any step
            expected = clause
            is_shown = is_shown and is_shown[0]
        if is_shown != expected:
            wrong[path.stem] = (is_shown, expected)
    assert judged and wrong == {}


A3 = (Piece("a", 3),)
A9 = (Piece("a", 9),)
IN_THE_TREE: dict[str, tuple[Command, ...]] = {
    # The second insert recovers a tombstone, and frees the slots that the row of s names (sizes of one page).
    "TREE-4": (
        Open("s"), Submit("a", "s", 3, 0, A3), Admit("a"), Insert("h", A3), Extend((Chunk("a", 6),)),
        Decode(("a",)), Finish("a", 2), Insert("h", A9),
    ),
    "TREE-7": (Submit("a", None, 6), Admit("a"), Extend((Chunk("a", 6),)), Decode(("a",))),
}  # fmt: skip


@pytest.mark.parametrize("clause", IN_THE_TREE)
def test_known_faults_of_the_tree_show_after_a_launched_round(system, version, clause):
    commands = IN_THE_TREE[clause]
    sizes = Geometry(3, 1, 10, 6, 2, 12, tree=True)
    fixed = RELEASES.index(version) > RELEASES.index("0.5.14")
    expected = None if fixed else (clause, len(commands) - 1)
    assert fault_shown(system, Trace(sizes, Mode.FAITHFUL, commands, clause=clause)) == expected


def test_a_running_request_receives_no_tail(system):
    if not system.capabilities.swa_tail:
        pytest.skip("the release sends no tail of SWA KV")
    commands = (
        Submit("a", None, 1),
        Admit("a"),
        Extend((Chunk("a", 1),)),
        Submit("b", None, 1),
        Admit("b"),
        Extend((Chunk("b", 1), Chunk("a", 1, tail=True))),
    )
    assert fault_shown(system, Trace(SIZES, Mode.FAITHFUL, commands)) is None
