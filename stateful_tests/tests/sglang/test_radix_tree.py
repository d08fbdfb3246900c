"""Real releases with a radix tree behind the adapter: lock holders, sessions and ordinary requests on it.

Skips, with the reason, where a release can be neither found nor fetched.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from impl.adapter import View
from impl.sglang import SGLangSystem
from impl.sglang.process import wire
from impl.sglang.releases import catalogue as releases
from impl.sglang.scheduler import refusals
from reference.commands import (
    Abort,
    Admit,
    CheckBusy,
    CheckIdle,
    Chunk,
    Close,
    Command,
    Decode,
    Done,
    Evict,
    EvictSwa,
    Extend,
    Finish,
    Freed,
    Insert,
    Match,
    Mode,
    Open,
    Piece,
    Reason,
    Refused,
    Retract,
    Submit,
    Unlock,
    shared_serial,
    token_id,
)  # fmt: skip
from reference.geometry import Geometry, preset
from stateful_tests.lockstep.lockstep import Lockstep


def shared(text: str, start: int, end: int) -> list[int]:
    """Tokens [start, end) of a shared text."""
    return [token_id(shared_serial(text), p) for p in range(start, end)]


# -- without a release ----------------------------------------------------------------------------


def test_a_prompt_is_spelled_by_position():
    assert refusals.spelled((Piece("a", 2), Piece("c", 3)), 4) == [*shared("a", 4, 6), *shared("c", 6, 9)]


@pytest.mark.parametrize("piece", [Piece("a", 0), Piece("A", 1), Piece("ab", 1), Piece("", 1), Piece("ä", 1)])
def test_what_is_no_text_is_refused_as_empty(piece):
    with pytest.raises(refusals.CommandRefused) as caught:
        refusals.spelled((piece,))
    assert caught.value.reason is Reason.EMPTY


def test_commands_for_the_tree_survive_the_wire():
    for command in (
        Match("g", (Piece("a", 3),)), Unlock("g"), Insert("g", (Piece("a", 3), Piece("b", 1)), 2, True),
        Evict(4, 2), Submit("r", None, 0, 0, (Piece("a", 3),)),
    ):  # fmt: skip
        ask = wire.ASKS.decode(wire.msgspec.msgpack.encode(wire.pack_command(command)))
        assert isinstance(ask, wire.Apply)
        assert wire.unpack_command(ask) == command


KINDS = {
    "0.5.13": (
        "session/streaming_session.py", "mem_cache/allocator/paged.py", "mem_cache/swa_radix_cache.py",
        "speculative/eagle_info_v2.py",
    ),
    "0.5.16": (
        "session/streaming_session.py", "mem_cache/allocator/paged.py", "mem_cache/swa_radix_cache.py",
        "mem_cache/unified_cache_components/__init__.py",
    ),
    "0.5.18": ("mem_cache/swa_radix_cache.py", "mem_cache/unified_cache/unified_tree_core.py"),
    "0.5.20": (
        "mem_cache/swa_radix_cache.py", "mem_cache/unified_cache/unified_tree_core.py",
        "mem_cache/rust_tree_core/__init__.py",
    ),
    "0.5.23": (
        "session/streaming_session.py", "mem_cache/allocator/paged.py",
        "mem_cache/unified_cache/unified_tree_core.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", KINDS)
def test_a_newer_checkout_is_recognised_by_its_modules(tmp_path, version):
    for name in KINDS[version]:
        file = tmp_path / "sglang/srt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    assert releases.detect(tmp_path).version == version


# -- the real releases ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[*releases.TABLE, "0.5.23+rust"])
def real(request, release):
    return release(request.param)


def sizes(name: str) -> Geometry:
    return replace(preset(name), tree=True)


def play(system: SGLangSystem, name: str, *commands: Command) -> View:
    system.reset(sizes(name))
    for command in commands:
        outcome = system.apply(command)
        assert isinstance(outcome, Done), (command, outcome)
    return system.view()


def nodes(view: View) -> dict[tuple[int, int], tuple[bool, int, int]]:
    """(start, end) of each node -> whether it has SWA KV, its locks. All of one text, or ends would clash."""
    assert view.tree is not None
    found = {(len(n.path) - len(n.slots), len(n.path)): n for n in view.tree.nodes}
    assert len(found) == len(view.tree.nodes)
    return {at: (bool(n.swa_slots), n.full_locks, n.swa_locks) for at, n in found.items()}


def holds_what_it_says(view: View) -> bool:
    """Every node's slots hold the KV of its own tokens."""
    assert view.tree is not None
    return all(
        [view.full_stamps[s] for s in n.slots] == list(n.path[len(n.path) - len(n.slots) :])
        and [view.swa_stamps[s] for s in n.swa_slots] in ([], list(n.path[len(n.path) - len(n.slots) :]))
        for n in view.tree.nodes
    )


def nothing_is_left(view: View, name: str) -> bool:
    """All pages and rows are free, and the tree is empty."""
    geometry = sizes(name)
    assert view.tree is not None
    return (
        not view.tree.nodes
        and sorted(view.free_full) == list(range(1, geometry.full_pages + 1))
        and sorted(view.free_swa) == list(range(1, geometry.swa_pages + 1))
        and len(view.free_rows) == geometry.rows
        and not any(view.full_to_swa)
    )


@pytest.mark.parametrize("name", ["page1", "page4", "page16", "no-swa"])
def test_what_a_guest_inserts_another_matches(real, name):
    page = sizes(name).page_size
    view = play(
        real, name, Insert("g", (Piece("a", 3 * page),)), Match("h", (Piece("a", 2 * page), Piece("b", 5)))
    )
    assert view.tree is not None
    assert {n: len(g.slots) for n, g in view.tree.lock_holders.items()} == {"h": 2 * page}
    assert {locks[1] for (_, end), locks in nodes(view).items() if end <= 2 * page} == {1}
    assert {locks[1] for (_, end), locks in nodes(view).items() if end > 2 * page} == {0}
    assert view.tree.sizes is not None
    assert view.tree.sizes[:2] == (page, 2 * page)
    assert holds_what_it_says(view)
    assert isinstance(real.apply(Unlock("h")), Done)
    everything = Evict(8 * page, 0 if name == "no-swa" else 8 * page)
    assert real.apply(everything) == Done(freed=Freed(3 * page, 0 if name == "no-swa" else 3 * page))
    assert nothing_is_left(real.view(), name)


def test_a_guest_that_goes_on_keeps_its_lock(real):
    view = play(
        real, "page2",
        Insert("g", (Piece("a", 5),), chunked=True), Insert("g", (Piece("a", 8),), chunked=True),
    )  # fmt: skip
    assert view.tree is not None
    assert len(view.tree.lock_holders["g"].slots) == 8
    assert nodes(view) == {(0, 4): (True, 1, 0), (4, 8): (True, 1, 1)}
    view = play(real, "page2", Insert("g", (Piece("a", 5),), chunked=True), Insert("g", (Piece("a", 9),)))
    assert view.tree is not None
    assert view.tree.lock_holders == {}
    assert {locks[1] for locks in nodes(view).values()} == {0}


def test_what_was_swept_is_a_tombstone(real):
    view = play(real, "page1", Insert("g", (Piece("a", 12),), evicted=6))
    assert {end: live[0] for (_, end), live in nodes(view).items() if end in (6, 12)} == {6: False, 12: True}
    assert len(view.free_swa) == sizes("page1").swa_pages - 6
    assert holds_what_it_says(view)
    assert real.apply(Match("h", (Piece("a", 6), Piece("b", 1)))) == Done()  # no window behind it
    lock_holders = real.view().tree.lock_holders
    assert len(lock_holders["h"].slots) == 0


def test_a_sweep_that_no_scheduler_makes_is_refused(real):
    play(real, "page1")
    before = real.view()
    assert real.apply(Insert("g", (Piece("a", 12),), evicted=12)) == Refused(Reason.UNFAITHFUL)
    assert real.apply(Insert("g", (Piece("a", 12),), evicted=2, chunked=True)) == Refused(Reason.UNFAITHFUL)
    assert real.view() == before


@pytest.mark.parametrize(
    "command",
    [
        Match("g", ()), Match("g", (Piece("a", 0),)), Match("h", (Piece("a", 1),)),
        Match("s", (Piece("a", 1),)), Match("g", (Piece("a", 99),)), Unlock("g"), Unlock("s"),
        Insert("s", (Piece("a", 1),)), Insert("h", (Piece("b", 9),)),
        Insert("g", (Piece("a", 2),), evicted=3), Insert("g", (Piece("a", 99),)),
        Evict(0), Evict(-1, 2), Open("h"), Submit("h", None, 1), Submit("r", None, 0),
        Submit("r", None, 0, 0, (Piece("A", 1),)), Submit("r", "s", 9, 0, (Piece("a", 9),)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_refused_command_changes_nothing(real, command):
    before = play(
        real, "page2",
        Insert("g", (Piece("a", 8),)), Match("h", (Piece("a", 4),)),
        Open("s"), Submit("t", "s", 5, 0, (Piece("a", 3),)), Admit("t"), Extend((Chunk("t", 6),)),
        Finish("t", 1),
    )  # fmt: skip
    assert isinstance(real.apply(command), Refused)
    assert real.view() == before


def test_without_a_tree_its_commands_are_refused(real):
    real.reset(preset("page2"))
    for command in (
        Match("g", (Piece("a", 1),)), Unlock("g"), Insert("g", (Piece("a", 1),)), Evict(1),
    ):  # fmt: skip
        assert isinstance(real.apply(command), Refused)
    assert real.view().tree is None


def test_a_request_starts_where_the_tree_ends(real):
    view = play(
        real, "page4", Insert("g", (Piece("a", 8),)), Submit("r", None, 3, 0, (Piece("a", 8),)), Admit("r")
    )
    assert tuple(view.requests["r"].cursors) == (8, 8, 0, 8)
    assert view.requests["r"].row is None
    assert nodes(view)[0, 8][1] == 1
    cached = view.tree.nodes[0].slots
    assert isinstance(real.apply(Extend((Chunk("r", 3),))), Done)
    view = real.view()
    assert tuple(view.requests["r"].cursors)[:2] == (11, 11)
    assert view.rows[view.requests["r"].row][:8] == cached
    for command in (Decode(("r",)), Finish("r", 2)):
        assert isinstance(real.apply(command), Done)
    view = real.view()
    assert max(end for _, end in nodes(view)) == 12
    assert {locks[1:] for locks in nodes(view).values()} == {(0, 0)}
    assert holds_what_it_says(view)


def test_an_admission_that_is_repeated_locks_once(real):
    begin = Insert("g", (Piece("a", 8),)), Submit("r", None, 3, 0, (Piece("a", 8),))
    view = play(real, "page4", *begin, Admit("r"), Admit("r"))
    assert nodes(view)[0, 8][1] == 1
    view = play(real, "page4", *begin, Admit("r"), Abort("r"))
    assert nodes(view)[0, 8][1] == 0


def test_two_requests_of_one_batch_share_what_the_first_has_inserted(real):
    view = play(
        real, "page4",
        Submit("p", None, 1, 0, (Piece("a", 8),)), Submit("q", None, 1, 0, (Piece("a", 8),)),
        Admit("p"), Admit("q"), Extend((Chunk("p", 9), Chunk("q", 9))),
    )  # fmt: skip
    rows = [view.rows[view.requests[n].row][:8] for n in ("p", "q")]
    assert rows[0] == rows[1] == list(view.tree.nodes[0].slots)
    assert nodes(view)[0, 8][1] == 2
    assert (
        len(view.free_full) == sizes("page4").full_pages - 2 - 2
    )  # the prompt, and a page of its own for each


def test_a_session_carries_the_lock_of_its_first_turn(real):
    first = Open("s"), Submit("a", "s", 2, 0, (Piece("a", 8),)), Admit("a"), Extend((Chunk("a", 10),))
    view = play(real, "page4", *first, Finish("a", 1))
    assert view.sessions["s"].cursors.cache_protected_len == 8
    assert nodes(view)[0, 8][1] == 1
    for command in (Submit("b", "s", 1), Admit("b"), Extend((Chunk("b", 2),)), Retract("b"), Admit("b")):
        assert isinstance(real.apply(command), Done)
        assert nodes(real.view())[0, 8][1] == 1
    play(real, "page4", *first, Finish("a", 1), Close("s"))
    assert nodes(real.view()) == {(0, 8): (True, 0, 0)}
    real.apply(Evict(8))
    assert nothing_is_left(real.view(), "page4")


@pytest.mark.parametrize("name", ["tight", "no-swa"])
def test_room_is_made_by_eviction(real, name):
    geometry = sizes(name)
    page = geometry.page_size
    pages = min(geometry.full_pages, geometry.swa_pages or geometry.full_pages, geometry.width // page) - 1
    begin = Submit("r", None, page * pages - 1), Admit("r")
    full = play(real, name, Insert("g", (Piece("a", page * pages),)), *begin)
    assert len(full.free_full) < pages
    assert isinstance(real.apply(Extend((Chunk("r", page * pages - 1),))), Done)
    view = real.view()
    assert holds_what_it_says(view)
    # What is locked cannot be had: the command is refused, and nothing is evicted for it.
    before = play(real, name, Insert("g", (Piece("a", page * pages),), chunked=True), *begin)
    assert isinstance(real.apply(Extend((Chunk("r", page * pages - 1),))), Refused)
    assert real.view() == before


def test_between_chunks_a_tree_is_not_swept(real):
    begin = Submit("r", None, 12), Admit("r"), Extend((Chunk("r", 8),))
    play(real, "page1", *begin)
    assert real.apply(EvictSwa("r", 8)) == Refused(Reason.UNFAITHFUL)
    for command in (Extend((Chunk("r", 4),)), Decode(("r",)), EvictSwa("r", 13)):
        assert isinstance(real.apply(command), Done)
    # All of it is the tree's: its lock, not the sweep, says what becomes of it.
    assert tuple(real.view().requests["r"].cursors)[2:] == (12, 12)


def test_the_idle_check_counts_the_tree(real):
    session = Open("s"), Submit("a", "s", 2, 0, (Piece("a", 8),)), Admit("a"), Extend((Chunk("a", 10),))
    play(real, "page4", Insert("g", (Piece("b", 4),)), *session, Finish("a", 1))
    outcome = real.apply(CheckIdle())
    assert isinstance(outcome, Done)
    assert outcome.report.alarm == ""
    accounts = {a.pool: a for a in outcome.report.accounts}
    assert (accounts["full"].evictable, accounts["full"].protected, accounts["full"].session_held) == (
        4,
        8,
        4,
    )
    assert all(a.balances for a in accounts.values())


def test_locks_of_guests_are_no_reason_for_an_alarm(real):
    play(real, "page4", Insert("g", (Piece("a", 8),), chunked=True))
    outcome = real.apply(CheckIdle())
    assert isinstance(outcome, Done)
    assert outcome.report.alarm == ""


def test_the_busy_check_counts_a_prefix_once(real):
    both = (
        Submit("p", None, 1, 0, (Piece("a", 8),)),
        Submit("q", None, 1, 0, (Piece("a", 8),)),
        Admit("p"),
        Admit("q"),
    )
    play(real, "no-swa", *both, Extend((Chunk("p", 9), Chunk("q", 9))))
    outcome = real.apply(CheckBusy())
    assert isinstance(outcome, Done)
    [full] = [a for a in outcome.report.accounts if a.pool == "full"]
    assert (full.evictable, full.protected, full.uncached) == (0, 8, 8)
    assert outcome.report.alarm == ""


# -- beside the reference, which follows the release's own tree -----------------------------------


def conforms(system: SGLangSystem, name: str, *commands: Command) -> Lockstep:
    """Run a system beside the reference; nothing may be violated."""
    lockstep = Lockstep(system, sizes(name), Mode.FAITHFUL)
    for command in commands:
        lockstep.do(command)
        assert lockstep.violation is None, (command, lockstep.violation)
    return lockstep


def test_a_refused_insert_moves_no_lock(real):
    lockstep = conforms(real, "page4", Insert("g", (Piece("a", 4),), chunked=True))
    assert lockstep.do(Insert("g", (Piece("b", 4),), chunked=True)) == Refused(Reason.SHRINKING_PREFIX)
    assert lockstep.violation is None


@pytest.mark.parametrize("name", ["page2", "no-swa"])
def test_a_turn_that_is_aborted_may_be_handed_to_the_tree(real, name):
    if real.name == "sglang==0.5.10":
        pytest.skip("a_midway_abort_is_saved_as_a_turn")
    first = Open("s"), Submit("a", "s", 5), Admit("a"), Extend((Chunk("a", 5),)), Finish("a", 1)
    second = Submit("b", "s", 5), Admit("b"), Extend((Chunk("b", 6),)), Decode(("b",)), Abort("b")
    conforms(real, name, *first, *second)


@pytest.mark.parametrize(("version", "stays"), [("0.5.13", "a"), ("0.5.14", "b"), ("0.5.16", "b")])
def test_who_inserts_at_an_abort_between_two_chunks(release, version, stays):
    """Who does has used its pages last: what was inserted meanwhile is evicted before them."""
    begun = Submit("r", None, 8, prompt=(Piece("a", 8),)), Admit("r"), Extend((Chunk("r", 8),))
    rest = Insert("g", (Piece("b", 8),)), Abort("r"), Evict(8)
    [node] = play(release(version), "no-swa", *begun, *rest).tree.nodes
    assert list(node.path) == shared(stays, 0, 8)


def test_a_prefill_is_swept_by_some_before_it_goes_into_the_tree(real):
    lockstep = conforms(real, "page1", Submit("r", None, 14), Admit("r"), Extend((Chunk("r", 14),)))
    request = lockstep.state.request("r")
    assert request is not None
    assert request.cursors == real.view().requests["r"].cursors
    assert request.cursors.cache_protected_len == 14
    assert request.cursors.swa_evicted_seqlen < 14
