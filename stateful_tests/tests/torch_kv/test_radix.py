"""Requests, sessions and lock holders of torch_kv on the radix tree, by hand; the rules in full are
lockstep's.

Page size 2 and shared text "a" throughout: what is matched, what is locked, what goes.
"""

from __future__ import annotations

import random

import pytest

from impl.adapter import NodeView, TreeView
from impl.torch_kv import TorchKV
from impl.torch_kv.store import KVStore
from impl.torch_kv.tree import RadixTree
from reference import tree as ref
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
    Draft,
    Evict,
    EvictSwa,
    Extend,
    Finish,
    Insert,
    Match,
    Open,
    Outcome,
    Piece,
    Prompt,
    Reason,
    Refused,
    Retract,
    SpecDecode,
    Submit,
    Unlock,
)  # fmt: skip
from reference.geometry import Geometry
from stateful_tests.tests.torch_kv.test_cursors_on_device import Waits, holders

ALL = 10**6
SWA = Geometry(page_size=2, window=3, full_pages=16, swa_pages=12, rows=3, width=24, tree=True)
FULL_ONLY = Geometry(page_size=2, window=None, full_pages=16, swa_pages=0, rows=3, width=24, tree=True)


def a(tokens: int, *more: tuple[str, int]) -> Prompt:
    return (Piece("a", tokens), *(Piece(*piece) for piece in more))


def built(geometry: Geometry = SWA) -> TorchKV:
    system = TorchKV(checked=True)
    system.reset(geometry)
    return system


def do(system: TorchKV, *commands: Command) -> Outcome:
    """Carry all out; the last one's outcome. Every check balances on the way."""
    outcome: Outcome = Done()
    for command in commands:
        outcome = system.apply(command)
        assert isinstance(outcome, Done), (command, outcome)
        checked = system.apply(CheckBusy())
        assert isinstance(checked, Done) and checked.report is not None
        assert not checked.report.alarm, (command, checked.report)
    return outcome


def run(system: TorchKV, name: str, tokens: int, prompt: Prompt = (), session: str | None = None) -> None:
    """Submit, admit and prefill in one chunk: the request runs."""
    do(system, Submit(name, session, tokens, prompt=prompt), Admit(name))
    request = system.requests[name]
    do(system, Extend((Chunk(name, len(request.text) - request.cursors.kv_committed_len),)))


def tree(system: TorchKV) -> TreeView:
    found = system.view().tree
    assert found is not None
    return found


def nodes(system: TorchKV) -> list[NodeView]:
    return sorted(tree(system).nodes, key=lambda node: tuple(node.path))


def shape(system: TorchKV) -> list[tuple[int, bool, int, int]]:
    """(end, live, full locks, SWA locks) of every node."""
    return [(len(n.path), bool(n.swa_slots), n.full_locks, n.swa_locks) for n in nodes(system)]


def cursors(system: TorchKV, name: str) -> tuple[int, ...]:
    view = system.view()
    found = (view.requests[name] if name in view.requests else view.sessions[name]).cursors
    assert found is not None
    return tuple(found)


def everything_goes(system: TorchKV) -> None:
    """All end, the tree is evicted: both pools and the rows are as they were at first."""
    for name in list(system.requests):
        do(system, Abort(name))
    for name in list(system.sessions):
        do(system, Close(name))
    for name in list(system.lock_holders):
        do(system, Unlock(name))
    assert not system.locks
    do(system, Evict(ALL, 0 if system.window is None else ALL), CheckIdle())
    view, store = system.view(), system.store
    assert sorted(view.free_full) == list(range(1, store.full.pages + 1))
    assert sorted(view.free_swa) == list(range(1, (store.swa.pages if store.swa else 0) + 1))
    assert sorted(view.free_rows) == list(range(len(store.req_to_token)))
    assert not any(view.full_to_swa) and not shape(system)


# Admission.


def test_an_admission_locks_what_the_tree_has_and_takes_no_row() -> None:
    system = built()
    do(system, Insert("g", a(6)), Submit("r", None, 3, prompt=a(7)), Admit("r"))
    assert cursors(system, "r") == (6, 6, 0, 6)
    assert system.view().requests["r"].row is None
    assert [full for _, _, full, _ in shape(system)] == [1, 1]
    do(system, Admit("r"))  # it may come to nothing and be repeated: one lock
    assert [full for _, _, full, _ in shape(system)] == [1, 1]
    slots = [slot for node in nodes(system) for slot in node.slots]
    do(system, Extend((Chunk("r", 4),)))
    view = system.view()
    row = view.requests["r"].row
    assert row is not None and list(view.rows[row][:6]) == slots
    assert cursors(system, "r") == (10, 10, 0, 10)
    everything_goes(system)


def test_the_last_token_is_always_computed() -> None:
    system = built()
    do(system, Insert("g", a(6)), Submit("r", None, 0, prompt=a(6)), Admit("r"))
    assert cursors(system, "r") == (4, 4, 0, 4)


def test_an_abort_before_the_start_lets_the_lock_go_and_a_slot_keeps_its_own() -> None:
    system = built()
    do(system, Insert("g", a(6)), Open("s"), Submit("r", "s", 3, prompt=a(6)), Admit("r"), Abort("r"))
    assert not system.locks
    run(system, "r", 2, a(6), "s")
    do(system, Finish("r", 1), Submit("q", "s", 2), Admit("q"), Abort("q"))
    assert list(system.locks) == ["s"] and shape(system)[-1][2] == 1
    do(system, Close("s"))
    assert not system.locks
    everything_goes(system)


# Inserting while the request goes on.


def test_each_chunk_goes_into_the_tree_as_far_as_its_pages_are_whole() -> None:
    system = built()
    do(system, Submit("r", None, 9), Admit("r"), Extend((Chunk("r", 5),)))
    assert cursors(system, "r") == (5, 5, 0, 4)
    do(system, Extend((Chunk("r", 4),)))
    assert cursors(system, "r") == (9, 9, 0, 8)
    assert [end for end, *_ in shape(system)] == [4, 8]
    do(system, Decode(("r",)), SpecDecode((Draft("r", 5, 2),)))
    assert cursors(system, "r") == (12, 15, 0, 8)  # outputs wait for the end
    do(system, Finish("r", 3))
    assert [end for end, *_ in shape(system)] == [4, 8, 12]
    everything_goes(system)


def test_two_lanes_with_one_prompt_share_its_pages() -> None:
    system = built()
    for name in ("r", "q"):
        do(system, Submit(name, None, 1, prompt=a(8)), Admit(name))
    do(system, Extend((Chunk("r", 9), Chunk("q", 9))))
    view = system.view()
    first, second = (view.rows[row] for r in view.requests.values() if (row := r.row) is not None)
    assert first[:8] == second[:8] and first[8] != second[8]
    assert {full for _, _, full, _ in shape(system)} == {2}
    assert len(view.free_full) == SWA.full_pages - 4 - 2
    everything_goes(system)


def test_later_turns_and_outputs_of_a_session_stay_outside_the_tree() -> None:
    system = built()
    do(system, Open("s"))
    run(system, "r", 1, a(4), "s")
    do(system, Decode(("r",)), Finish("r", 2))
    run(system, "q", 5, (), "s")
    assert [end for end, *_ in shape(system)] == [4]
    assert cursors(system, "q") == (12, 12, 0, 4) and cursors(system, "s")[3] == 4
    do(system, Retract("q"), Admit("q"))
    assert cursors(system, "q")[3] == 4 and list(system.locks) == ["s"]
    everything_goes(system)


def test_what_could_not_be_matched_again_is_not_inserted() -> None:
    # The example of reference/tree.py: a locked tombstone refuses the KV of another.
    system = built(Geometry(page_size=1, window=1, full_pages=8, swa_pages=8, rows=2, width=8, tree=True))
    do(system, Insert("g", a(2), evicted=1, chunked=True))
    assert shape(system) == [(1, False, 1, 0), (2, True, 1, 1)]
    do(system, Submit("r", None, 1, prompt=a(1)), Admit("r"))
    clock = system.tree.clock if system.tree is not None else 0
    do(system, Extend((Chunk("r", 1),)))
    assert cursors(system, "r") == (1, 1, 0, 0) and system.tree is not None and system.tree.clock == clock
    do(system, Insert("h", a(1), chunked=True))  # and neither is a lock holder's
    assert tree(system).lock_holders["h"].slots == [] and shape(system) == [(1, False, 1, 0), (2, True, 1, 1)]
    do(system, Unlock("g"), Extend((Chunk("r", 1),)))  # nobody reads through it: recovered
    assert cursors(system, "r")[3] == 2
    everything_goes(system)


def draw(rng: random.Random, size: int) -> tuple[int, ...]:
    return tuple(2 if rng.random() < 0.2 else 1 for _ in range(rng.randrange(1, 6) * size))


def test_usable_after_is_what_an_insert_and_a_match_would_say() -> None:
    rng = random.Random(1)
    seen = {True: 0, False: 0}
    for _ in range(300):
        size, window = rng.choice([(1, 1), (1, 3), (2, 1), (2, 3), (2, 5)])
        store = KVStore(Geometry(size, window, 200, 200, rows=1, width=8), built().device)
        mine, other = RadixTree(store, window), ref.Tree(size, window)

        for step in range(8):
            key, evicted = draw(rng, size), rng.randrange(8)
            trial, _ = ref.insert(other, key, evicted)
            expected = ref.usable(trial, key) == len(key)
            before = mine.view()
            assert mine.usable_after(key, evicted) == expected, (size, window, other, key, evicted)
            assert mine.view() == before
            seen[expected] += 1
            slots = store.alloc_pages(len(key) // size)
            store.free_starts(slots[:0], slots[: min(mine.live_from(evicted, len(key)), len(key)) : size])
            mine.insert(key, slots, evicted)
            other_key = draw(rng, size)
            found, (other, length) = mine.match(other_key), ref.match(trial, other_key)
            if rng.random() < 0.6:
                mine.lock(found.node)
                other = ref.lock(other, f"h{step}", other_key[:length])
            count = rng.randrange(4)
            mine.evict(0, count)
            other, _ = ref.evict(other, 0, count)
    assert min(seen.values()) > 50, seen


# Sweeps.


def test_a_sweep_leaves_the_prefix_to_the_tree() -> None:
    system = built()
    run(system, "r", 1, a(8))
    do(system, EvictSwa("r", 9))
    assert cursors(system, "r") == (9, 9, 8, 8)
    do(system, Decode(("r",)))  # its window lies behind R, and is locked
    for _ in range(6):
        do(system, Decode(("r",)))
    do(system, EvictSwa("r", 16))
    assert cursors(system, "r") == (16, 16, 10, 8)
    do(system, Finish("r", 8))
    # [8, 10) was swept, and of what follows one window of whole pages is a node.
    assert [live for _, live, *_ in shape(system)] == [True, True, False, True, True]
    everything_goes(system)


# The end.


def test_a_finish_hands_over_what_counts_once() -> None:
    system = built()
    run(system, "r", 2, a(2))
    do(system, SpecDecode((Draft("r", 6, 5),)), Finish("r", 3))
    assert [end for end, *_ in shape(system)] == [4, 6]  # target 7: the overshoot is gone
    assert len(system.view().free_full) == SWA.full_pages - 3
    run(system, "q", 3, a(2))
    do(system, Retract("q"))
    assert not system.locks and len(system.view().free_full) == SWA.full_pages - 4
    everything_goes(system)


def test_a_wiped_session_begins_anew_with_the_tree() -> None:
    system = built()
    do(system, Open("s"))
    run(system, "r", 1, a(4), "s")
    do(system, Abort("r"))
    assert not system.locks and len(system.view().free_rows) == SWA.rows
    do(system, Submit("q", "s", 1, prompt=a(4)), Admit("q"))
    assert cursors(system, "q") == (4, 4, 0, 4)
    everything_goes(system)


# Room.


@pytest.mark.parametrize(
    "window, fits, reason", [(3, 4, Reason.OUT_OF_SWA), (None, 8, Reason.OUT_OF_FULL)]
)
def test_room_is_made_by_eviction_and_a_refusal_evicts_nothing(
    window: int | None, fits: int, reason: Reason
) -> None:
    system = built(Geometry(2, window, 8, 6 if window else 0, rows=2, width=16, tree=True))
    texts = [a(4), (Piece("b", 4),), (Piece("c", 4),)]
    do(system, *(Insert("g", text) for text in texts), Match("h", a(4)))
    do(system, Submit("r", None, fits), Admit("r"), Submit("q", None, 10 if window else 14), Admit("q"))
    before = system.view().tree, system.tree and system.tree.clock
    assert system.apply(Extend((Chunk("q", 10 if window else 14),))) == Refused(reason)
    assert (system.view().tree, system.tree and system.tree.clock) == before
    do(system, Extend((Chunk("r", fits),)))
    do(system, *(Match(f"h{text[0].text}", text) for text in texts))
    found = [len(tree(system).lock_holders[f"h{text[0].text}"].slots) for text in texts]
    assert found == [4, 0, 4]  # one is locked, one the oldest that is not, of one no page was needed
    everything_goes(system)


def test_a_marked_abort_needs_a_page_of_the_tree() -> None:
    system = built(Geometry(page_size=2, window=3, full_pages=2, swa_pages=2, rows=1, width=8, tree=True))
    do(system, Insert("g", a(4)), Submit("r", None, 2), Abort("r", marked=True))
    assert len(system.view().free_full) == 2  # a leaf goes whole
    do(system, Insert("g", a(4)), Match("g", a(4)), Submit("r", None, 2))
    assert system.apply(Abort("r", marked=True)) == Refused(Reason.OUT_OF_FULL)
    everything_goes(system)


# Lock holders.


def test_guests_share_names_with_everybody_else() -> None:
    system = built()
    do(system, Insert("g", a(4)), Match("g", a(5)), Open("s"), Submit("r", "s", 1))
    for command, reason in (
        (Open("g"), Reason.SESSION_EXISTS),
        (Submit("g", None, 1), Reason.REQUEST_EXISTS),
        (Match("g", a(1)), Reason.REQUEST_EXISTS),
        (Match("s", a(1)), Reason.REQUEST_EXISTS),
        (Insert("r", a(1)), Reason.REQUEST_EXISTS),
        (Insert("g", (Piece("b", 9),)), Reason.SHRINKING_PREFIX),
        (Insert("g", a(3)), Reason.SHRINKING_PREFIX),
        (Insert("g", a(9), evicted=10), Reason.BAD_LENGTH),
        (Insert("g", a(25)), Reason.ROW_TOO_SHORT),
        (Match("h", a(25)), Reason.ROW_TOO_SHORT),
        (Unlock("r"), Reason.UNKNOWN_REQUEST),
        (Evict(0, 0), Reason.EMPTY),
        (Evict(-1, 0), Reason.BAD_LENGTH),
        (Match("h", ()), Reason.EMPTY),
        (Match("h", (Piece("A", 1),)), Reason.EMPTY),
        (Submit("q", None, 0), Reason.EMPTY),
        (Submit("q", None, 9, prompt=(Piece("a", 0),)), Reason.EMPTY),
    ):
        assert system.apply(command) == Refused(reason), command
    assert tree(system).lock_holders.keys() == {"g"} and len(tree(system).lock_holders["g"].slots) == 4
    everything_goes(system)


def test_without_a_tree_and_without_a_window() -> None:
    system = built(Geometry(page_size=2, window=None, full_pages=8, swa_pages=0, rows=2, width=8))
    for command, reason in (
        (Match("g", a(1)), Reason.NO_TREE),
        (Unlock("g"), Reason.UNKNOWN_REQUEST),
        (Insert("g", a(1)), Reason.NO_TREE),
        (Insert("g", a(1), evicted=1), Reason.NO_SWA),
        (Evict(1, 1), Reason.NO_SWA),
        (Evict(1), Reason.NO_TREE),
    ):
        assert system.apply(command) == Refused(reason), command
    do(system, Submit("r", None, 0, prompt=a(5)), Admit("r"))  # prompts are for everybody
    assert cursors(system, "r") == (0, 0, 0, 0) and system.view().tree is None


def test_a_guest_goes_on_from_what_it_inserted() -> None:
    system = built()
    do(system, Insert("g", a(5), chunked=True), Insert("g", a(9), evicted=3, chunked=True))
    assert len(tree(system).lock_holders["g"].slots) == 8 and list(system.locks) == ["g"]
    outcome = do(system, Evict(ALL, ALL))
    assert isinstance(outcome, Done) and outcome.freed is not None
    assert outcome.freed.full == 0  # all locked; SWA KV behind its window may go
    do(system, Insert("g", a(12)))
    assert not system.lock_holders and [full for _, _, full, _ in shape(system)] == [0] * len(nodes(system))
    everything_goes(system)


# Costs.


def test_nothing_waits_for_the_device_and_the_mirror_is_what_it_has() -> None:
    system = TorchKV()
    waits = Waits()
    for geometry in (SWA, FULL_ONLY):
        system.reset(geometry)
        swa = geometry.window is not None
        commands: list[Command] = [Insert("g", a(7), evicted=2 * swa), Match("g", a(6)), Open("s")]
        for name in ("r", "q"):
            commands += [Submit(name, None, 2, prompt=a(8)), Admit(name)]
        commands += [Submit("t", "s", 3, prompt=a(3)), Admit("t"), Extend((Chunk("r", 4), Chunk("q", 2)))]
        commands += [Extend((Chunk("t", 4), Chunk("q", 2))), Decode(("r", "q")), Finish("r", 1)]
        commands += [EvictSwa("q", 8)] if swa else []
        commands += [Insert("g", a(12), chunked=True), Evict(2, 2 * swa), Retract("q"), Unlock("g")]
        commands += [Admit("q"), Abort("q"), Abort("t"), Close("s")]
        for command in commands:
            with waits:
                outcome = system.apply(command)
            assert isinstance(outcome, Done), (command, outcome)
            for holder in holders(system):
                assert holder.row is not None
                assert system.table_of(holder).lines[holder.row].tolist() == list(holder.cursors), command
        everything_goes(system)
    assert waits.found == []
