"""What the reference refuses, which choices it follows, and what sizes and texts there are.

What each rule does is in test_rules.py, on every transition of small scopes, and drawn in SPEC.md.
"""

import itertools
from dataclasses import replace

import pytest

from reference import radix_tree
from reference.commands import Choice, Done, Freed, Mode, Piece, Reason, Refused, Submit, prompt_of
from reference.cursors import counted_full, counted_swa, has_all_kv, in_order, may_stop_at
from reference.geometry import Geometry, GeometryError, preset
from reference.prefix_cache import extend_text, key_of, path_text, shares_lock
from reference.radix_tree import Insertion
from reference.state import Cursors, State, full_pages, holders, swa_pages, text_cut, text_tokens
from reference.model import ChoiceNotAllowed, initial, step, step_with_effects
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.commands import script

PAGE4 = Geometry(page_size=4, window=6, full_pages=12, swa_pages=9, rows=3, width=32)
WITH_TREE = replace(PAGE4, tree=True)
ONE = Geometry(page_size=1, window=1, full_pages=12, swa_pages=12, rows=2, width=12, tree=True)
STATES = Geometry(page_size=1, window=None, full_pages=12, swa_pages=0, rows=2, width=12, tree=True, states=4)
TRACKS = replace(STATES, page_size=4, states=2, tracks=True)
ONE_ROW = replace(PAGE4, full_pages=2, swa_pages=2, rows=1)


def after(text: str, mode: Mode = Mode.FREE, sizes: Geometry = PAGE4) -> State:
    """Return the state after commands that must all be done."""
    state = initial(sizes, mode)
    for command in script(text):
        state, outcome = step(state, command)
        assert isinstance(outcome, Done), f"{command}: {outcome}"
    return state


def does(state: State, text: str, *choices: Choice) -> Cursors:
    """Return the cursors of r1 after one more command, for which a system chose."""
    return step(state, *script(text), list(choices))[0].request("r1").cursors


FIRST = "open s1; submit r1 in s1 +10; admit r1; extend r1 +10"
ROUND = "launch r1 +1 accept 1"
ORDINARY = "submit r1 (no session) +1; admit r1; extend r1 +1"
SHARED = "submit r1 (no session) a8 +1; admit r1; extend r1 +9"
CACHED = "open s1; submit r1 in s1 a8 +1; admit r1; extend r1 +9"
OTHER = "submit r2 (no session) +1; admit r2; extend r2 +1"

# Two reasons apply; the first in the order of `Reason` is the one. That each comes where it should is in
# test_rules, and on torch in tours.
PAIRS: list[tuple[Reason, str, str, Geometry]] = [
    (Reason.EMPTY, "", "submit r1 in s9 +0", PAGE4),  # and unknown_session
    (Reason.EMPTY, "", "submit r1 (no session) a2 -1", PAGE4),
    (Reason.EMPTY, FIRST, "spec_decode r1 +0 accept 1", PAGE4),  # and bad_length
    (Reason.UNKNOWN_SESSION, FIRST, "submit r1 in s9 +1", PAGE4),  # and request_exists
    (Reason.REQUEST_EXISTS, FIRST, "submit r1 in s1 +1", PAGE4),  # and turn_in_flight
    # and turn_in_flight
    (Reason.SESSION_CLOSING, f"{FIRST}; close s1", "submit r2 in s1 +1", PAGE4),
    (Reason.TURN_IN_FLIGHT, FIRST, "submit r2 in s1 +1 rewind 1", PAGE4),  # and shrinking_prefix
    (Reason.WRONG_PHASE, "submit r1 (no session) +1", "evict_swa r1 at length 9", preset("no-swa")),
    # A tree has the prompt by its result, so that is processed.
    (Reason.BAD_LENGTH, FIRST, "retract r1 losing 1", WITH_TREE),
    (Reason.NO_SWA, ORDINARY, "evict_swa r1 at length 9", preset("no-swa")),  # and bad_length
    # and bad_length
    (Reason.WRONG_PHASE, f"{FIRST}; {ROUND}; {ROUND}", "launch r1 +1 accept 2", PAGE4),
    (Reason.BAD_LENGTH, FIRST, "spec_decode r1 +40 accept 41", PAGE4),  # and row_too_short
    # and row_too_short
    (Reason.WINDOW_LOST, f"{FIRST}; spec_decode r1 +20 accept 1; evict_swa r1 at length 30",
     "spec_decode r1 +30 accept 1", PAGE4),
    # and out_of_full, out_of_swa
    (Reason.NO_ROW, f"{ORDINARY}; submit r2 (no session) +32; admit r2", "extend r2 +32", ONE_ROW),
    # and out_of_swa
    (Reason.OUT_OF_FULL, "submit r2 (no session) +32; admit r2", "extend r2 +32", ONE_ROW),
    (Reason.REQUEST_EXISTS, "open a", "submit a (no session) +1", PAGE4),  # one space of names
    (Reason.SESSION_EXISTS, "submit a (no session) +1", "open a", PAGE4),
    # A running request has no tail, even if all that it has is the tree's.
    (Reason.WRONG_PHASE,
     "submit r1 (no session) a8; admit r1; extend r1 +8; submit r2 (no session) +1; admit r2",
     "extend r2 +1, r1 +1 tail", WITH_TREE),
    # A rejected prefill of a marked request needs a row of its own.
    (Reason.NO_ROW, f"{ORDINARY}; submit r2 (no session) +1", "abort r2 (marked)", replace(PAGE4, rows=1)),
    (Reason.WRONG_PHASE, f"{FIRST}; retract r1", "abort r1 (marked)", PAGE4),
    (Reason.WRONG_PHASE, ORDINARY, "extend r1 +1", PAGE4),  # a decode is no prefill
    (Reason.BAD_LENGTH, FIRST, "finish r1 keep 0", PAGE4),
    (Reason.BAD_LENGTH, FIRST, "retract r1 losing 2", PAGE4),
    (Reason.BAD_LENGTH, f"{FIRST}; {ROUND}", "retract r1 losing 1", PAGE4),
    (Reason.BAD_LENGTH, "", "evict full -1 swa 4", WITH_TREE),
    (Reason.BAD_LENGTH, "", "evict full 4 swa -1", WITH_TREE),
    (Reason.BAD_LENGTH, "", "evict full 4 states -1", replace(preset("state"), tree=True)),
    (Reason.OUT_OF_STATES, f"{ORDINARY}; submit r2 (no session) +1; admit r2", "extend r2 +1",
     replace(preset("state"), states=1)),
    # The first turn of a session needs one as well.
    (Reason.NO_ROW, f"{FIRST}; open s2; submit r2 in s2 +1; admit r2", "extend r2 +1",
     replace(PAGE4, rows=1)),
    # One batch entry is enough.
    (Reason.BAD_LENGTH, f"{FIRST}; {OTHER}", "spec_decode r1 +1 accept 1, r2 +1 accept 2", PAGE4),
]  # fmt: skip


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_first_of_two_refusal_reasons_is_reported(impl):
    for reason, given, command, geometry in PAIRS:
        lockstep = Lockstep(resolve(impl), geometry, Mode.FREE)
        for each in script(given):
            assert not isinstance(lockstep.do(each), Refused), each
        assert lockstep.do(*script(command)) == Refused(reason), reason
        assert lockstep.violation is None, reason


def test_a_batch_is_all_or_nothing():
    state = after(
        f"{FIRST}; submit r2 (no session) +32; admit r2; submit r3 (no session) +1; admit r3"
    )
    assert step(state, *script("extend r3 +1, r2 +32")) == (state, Refused(Reason.OUT_OF_SWA))


AHEAD = f"{FIRST}; spec_decode r1 +9 accept "


@pytest.mark.parametrize(
    "given, command, says",
    [
        (f"{AHEAD} 2", "evict_swa r1 at length 13", Refused(Reason.UNFAITHFUL)),  # past the commit
        # takes it back
        (f"{AHEAD} 9; evict_swa r1 at length 19", "finish r1 keep 8", Refused(Reason.UNFAITHFUL)),
        (f"{AHEAD} 9; evict_swa r1 at length 19", "finish r1 keep 9", Done()),
        (f"{FIRST}; decode r1; evict_swa r1 at length 11", "retract r1 losing 1", Refused(Reason.UNFAITHFUL)),
        (f"{FIRST}; decode r1; evict_swa r1 at length 11", "retract r1", Done()),
        ("", "insert h a12 SWA from 5", Refused(Reason.UNFAITHFUL)),
        ("", "insert h a12 SWA from 4", Done()),
        ("insert h a8 (goes on)", "insert h a12 SWA from 8", Done()),  # that was not its own
    ],
)  # fmt: skip
def test_a_faithful_scheduler_would_not(given, command, says):
    free, faithful = (after(given, mode, WITH_TREE) for mode in Mode)
    assert step(free, *script(command))[1] == Done()
    assert step(faithful, *script(command))[1] == says


@pytest.mark.parametrize(
    "given, says", [("", Done()), ("; unlock_swa r1", Refused(Reason.UNFAITHFUL))]
)
def test_a_request_with_an_unlocked_window_is_not_cut_below_it(given, says):
    state = after(FIRST + 4 * "; decode r1" + given, Mode.FAITHFUL, WITH_TREE)
    assert step(state, *script("retract r1 losing 1"))[1] == says


@pytest.mark.parametrize("states, says", [(0, Done()), (8, Refused(Reason.UNFAITHFUL))])
def test_a_turn_on_a_recurrent_model_unlocks_no_window(states, says):
    sizes = replace(PAGE4, tree=True, states=states, tracks=bool(states))
    state = after(FIRST + 4 * "; decode r1", Mode.FAITHFUL, sizes)
    assert step(state, *script("unlock_swa r1"))[1] == says


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_faithful_scheduler_ends_with_any_output_of_the_rounds_under_way(kept):
    """It knew of one output when it launched the last round."""
    state = after(f"{FIRST}; decode r1; decode r1", Mode.FAITHFUL)
    outcome = step(state, *script(f"finish r1 keep {kept}"))[1]
    assert outcome == (Done() if kept > 1 else Refused(Reason.UNFAITHFUL))
    other = "submit r2 (no session) +1; admit r2; extend r2 +1, r1 +1"
    mixed = after(f"{FIRST}; decode r1; {other}", Mode.FAITHFUL)
    assert step(mixed, *script(f"finish r1 keep {kept}"))[1] == outcome


ALL = "evict full 48"


@pytest.mark.parametrize(
    "sizes, given, command, freed",
    [
        # the slot's lock stays
        (WITH_TREE, f"{CACHED}; finish r1 keep 1; submit r2 in s1 +1; abort r2", ALL, Freed(0, 0)),
        (WITH_TREE, f"{CACHED}; retract r1; abort r1", ALL, Freed(8, 8)),
        (WITH_TREE, f"{SHARED}; retract r1", ALL, Freed(8, 8)),
        (WITH_TREE, "insert h a8; open s1; submit r1 in s1 a12; admit r1; abort r1", ALL, Freed(8, 8)),
        (WITH_TREE, "insert g b8 (goes on); insert h a8 (goes on); unlock_swa h", "evict full 0 swa 16",
         Freed(0, 8)),
        (WITH_TREE, f"{SHARED}; spec_decode r1 +5 accept 5; unlock_swa r1", "evict full 0 swa 8",
         Freed(0, 8)),
        # what a reader of full KV uses is no younger when it gets SWA KV again
        (ONE, "insert g a2; evict full 0 swa 1; insert g b1; match h a1 (full KV alone); unlock h;"
         " insert g a2", "evict full 0 swa 1", Freed(0, 1)),
        (STATES, "insert g a1; insert h a2 (goes on)", "evict full 0 states 1",
         Freed(full=0, swa=0, states=1)),
        (STATES, "insert g a1; insert h a2", "evict full 1", Freed(full=1, swa=0, states=1)),
        (STATES, "insert g a2; match h a2 (full KV alone)", "evict full 0 states 1",
         Freed(full=0, swa=0, states=1)),
        (STATES, f"{ORDINARY}; decode r1; finish r1 keep 1", ALL, Freed(full=2, swa=0, states=2)),
        # its state is past the cut
        (STATES, f"{ORDINARY}; decode r1; decode r1; finish r1 keep 1", ALL, Freed(full=1, swa=0, states=1)),
        (TRACKS, f"{ORDINARY}; spec_decode r1 +4 accept 4; finish r1 keep 3", ALL,
         Freed(full=4, swa=0, states=1)),
        # the tree gets a slot that the request has
        (TRACKS, "submit r1 (no session) +8; admit r1; extend r1 +4; extend r1 +4; abort r1", ALL,
         Freed(full=8, swa=0, states=2)),
    ],
)  # fmt: skip
def test_an_eviction_takes_unlocked_nodes(sizes, given, command, freed):
    assert step(after(given, sizes=sizes), *script(command))[1] == Done(freed=freed)


@pytest.mark.parametrize(
    "sizes, given, nodes",
    [
        (WITH_TREE, "insert h a6 SWA from 6", [("a4", False)]),
        # a live node is not split where the SWA KV of others begins
        (ONE, "insert g a3; insert h a4 SWA from 1", [("a2", True), ("a3", True), ("a4", True)]),
    ],
)  # fmt: skip
def test_an_insert_leaves_each_node_live_or_a_tombstone(sizes, given, nodes):
    nodes_found = radix_tree.nodes(after(given, sizes=sizes).tree)
    assert [(path_text(placed.path), placed.node.live) for placed in nodes_found] == nodes


def test_evicted_pages_are_given_back():
    was = after("insert h a4", sizes=WITH_TREE)
    [evict] = script("evict full 4")
    evicted = step_with_effects(was, evict)[2].gone
    assert evicted["full"] == evicted["swa"] == {("tree a4", 0)}


def test_tombstones_alone_are_recovered():
    tree = after("insert g a2; evict full 0 swa 1", sizes=ONE).tree
    key = key_of(prompt_of("a3"))
    assert radix_tree.insert(tree, key, 0)[1] == Insertion(2, 3, ((0, 1),))


@pytest.mark.parametrize(
    "given, holder, shares",
    [
        ("insert h b8 (goes on)", "s1", False),
        ("insert h a12 (goes on)", "s1", True),
        ("insert g b8 (goes on); insert h a12 (goes on)", "s1", True),
        ("insert h a12 (goes on)", "g", False),  # who has locked nothing
    ],
)
def test_a_holder_shares_a_lock_if_others_hold_its_prefix(given, holder, shares):
    assert shares_lock(after(f"{CACHED}; {given}", sizes=WITH_TREE), holder) == shares


TWENTY = "open s1; submit r1 in s1 +20; admit r1"


def test_choices_are_followed_within_their_bounds():
    state = after(f"{TWENTY}; extend r1 +20")
    evict = "evict_swa r1 at length 20"
    ahead = "spec_decode r1 +2 accept 1"
    for chosen in (0, 4, 8, 12):  # less than the default, the default, all that no window reaches
        assert (
            does(state, evict, Choice("r1", swa_evicted_seqlen=chosen)).swa_evicted_seqlen == chosen
        )
    shared = after(SHARED, sizes=WITH_TREE)
    for chosen in (0, 8):  # nothing, or up to the tree's pages
        assert does(
            shared, "evict_swa r1 at length 9", Choice("r1", swa_evicted_seqlen=chosen)
        ) == Cursors(9, 9, chosen, 8)
    for chosen in (28, 32):  # 32 is the width of a row
        allocates = Choice("r1", kv_allocated_len=chosen)
        assert does(state, ahead, allocates) == Cursors(21, chosen, 0, 0), chosen
    full = after(f"{TWENTY}; extend r1 +20", sizes=replace(PAGE4, swa_pages=5))
    evicted = does(full, "decode r1", Choice("r1", swa_evicted_seqlen=12))
    assert evicted == Cursors(21, 21, 12, 0), "what it evicts is there for the round"
    grown = after(f"{SHARED}; spec_decode r1 +16 accept 16", sizes=WITH_TREE)
    at_r = does(grown, "evict_swa r1 at length 25", Choice("r1", swa_evicted_seqlen=8))
    assert at_r == Cursors(25, 25, 8, 8), "it may stop exactly where the tree's pages end"
    for text, choice in (
        (evict, {"swa_evicted_seqlen": 16}),
        (evict, {"swa_evicted_seqlen": 6}),
        (ahead, {"kv_allocated_len": 21}),
        ("decode r1", {"kv_allocated_len": 28}),
    ):
        with pytest.raises(ChoiceNotAllowed):
            does(state, text, Choice("r1", **choice))
    with pytest.raises(ChoiceNotAllowed):  # what was evicted does not come back
        does(after(f"{TWENTY}; extend r1 +20; {evict}"), evict, Choice("r1", swa_evicted_seqlen=4))
    with pytest.raises(ChoiceNotAllowed):  # the tree's pages are not its own
        does(grown, "evict_swa r1 at length 25", Choice("r1", swa_evicted_seqlen=4))
    bare = after(ORDINARY, sizes=preset("no-swa"))
    with pytest.raises(ChoiceNotAllowed):
        does(bare, "decode r1", Choice("r1", swa_evicted_seqlen=4))


def test_a_server_may_claim_less_of_a_round_in_flight():
    state = after(f"{TWENTY}; extend r1 +20")
    launch, finish, settle = script("launch r1 +3 accept 2; finish r1 keep 1; settle r1")
    for claimed in (20, 21, 23):  # nothing, a token, all of it
        first, _ = step(state, launch, [Choice("r1", kv_committed_len=claimed)])
        second, _ = step(first, launch, [Choice("r1", kv_committed_len=claimed)])
        both = second.request("r1").cursors
        assert both == Cursors(claimed, 26, 0, 0), "slots for both, whatever is claimed"
        settled, _ = step(second, settle)
        assert settled.request("r1").cursors.kv_committed_len == 22, "of the first all is known now"
        after_finish, _ = step(first, finish, [Choice("r1", kv_committed_len=21)])
        assert after_finish.sessions[0].slot == Cursors(21, 21, 0, 0), "the round computes that token first"
        for ends, wrong in ((first, 19), (settled, 23)):
            with pytest.raises(ChoiceNotAllowed):
                step(ends, finish, [Choice("r1", kv_committed_len=wrong)])
    for claimed in (19, 24):
        with pytest.raises(ChoiceNotAllowed):
            step(state, launch, [Choice("r1", kv_committed_len=claimed)])
    more = after(f"{TWENTY}; extend r1 +20; spec_decode r1 +3 accept 3")
    after_finish, _ = step(more, finish, [Choice("r1", kv_committed_len=21)])
    assert after_finish.sessions[0].slot == Cursors(21, 21, 0, 0), "all that the cut keeps"
    first, _ = step(state, launch, [Choice("r1", kv_allocated_len=23)])
    assert first.request("r1").cursors.kv_committed_len == 23, "without a claim all of it"
    with pytest.raises(ChoiceNotAllowed):  # with nothing in flight nobody computes it
        step(state, finish, [Choice("r1", kv_committed_len=21)])


def test_a_prefill_may_be_evicted_after_its_forward_pass():
    state = after(TWENTY)
    command = "extend r1 +20"
    evicted = does(state, command, Choice("r1", swa_evicted_seqlen=12, after=True))
    assert evicted == Cursors(20, 20, 12, 0)
    assert does(state, f"{command} tail", Choice("r1", swa_evicted_seqlen=12)) == evicted
    for choice in (
        Choice("r1", swa_evicted_seqlen=16, after=True),
        Choice("r1", swa_evicted_seqlen=12),
    ):
        with pytest.raises(ChoiceNotAllowed):
            does(state, command, choice)


def test_a_cut_may_keep_less_where_its_window_was_evicted():
    ahead = f"{TWENTY}; extend r1 +20; spec_decode r1 +9 accept 1"
    evict = "evict_swa r1 at length 29"
    finish, later = script("finish r1 keep 1; finish r1 keep 2")
    live = after(ahead)
    evicted = after(f"{ahead}; {evict}")
    # or past the cut, where all is accepted and live; or with a window of 1
    past = after(f"{TWENTY}; extend r1 +20; spec_decode r1 +9 accept 9; {evict}")
    short = after(f"{ahead}; {evict}", sizes=replace(PAGE4, window=1))
    cuts = (evicted, finish), (evicted, later), (past, finish), (short, finish)
    for (state, ends), stop in itertools.product(cuts, (0, 16, 20)):
        kept, _ = step(state, ends, [Choice("r1", kv_allocated_len=stop)])
        evicted_to = state.request("r1").cursors.swa_evicted_seqlen
        assert kept.sessions[0].slot == Cursors(stop, stop, min(stop, evicted_to), 0), stop
    assert may_stop_at(past.request("r1").cursors, 20, 20, 6, 4), "all up to the cut"
    kept, _ = step(live, finish, [Choice("r1", kv_allocated_len=21)])
    assert kept.sessions[0].slot == Cursors(21, 21, 0, 0), "what it keeps anyway"
    bare = after(ahead, sizes=preset("no-swa"))
    for state, stop in ((live, 20), (bare, 20), (evicted, 18), (evicted, 24)):
        with pytest.raises(ChoiceNotAllowed):
            step(state, finish, [Choice("r1", kv_allocated_len=stop)])


@pytest.mark.parametrize("sizes, length", [(PAGE4, 0), (preset("state"), 10)])
def test_a_session_knows_where_its_state_is(sizes, length):
    for ends in ("retract r1", "finish r1 keep 1"):
        assert after(f"{FIRST}; {ends}", sizes=sizes).session("s1").state == length, ends


def test_cursors_are_in_order():
    for c in itertools.starmap(Cursors, itertools.product(range(-1, 3), repeat=4)):
        committed, allocated, evicted, protected = c
        chains = [0, protected, committed, allocated], [0, evicted, allocated]
        assert in_order(c) == all(chain == sorted(chain) for chain in chains), c


def test_a_memory_check_counts_what_a_row_owns():
    for c in itertools.starmap(Cursors, itertools.product(range(5), range(5), range(5), (0, 2, 4))):
        if in_order(c):
            assert counted_full(c, 2) == 2 * len(full_pages(c, 2)), c
            assert counted_swa(c, 2) == 2 * len(swa_pages(c, 2)), c


def test_texts_are_cut_and_extended_piece_by_piece():
    text = ((1, 3), (4, 5))
    assert text_tokens(text) == (1 << 20, 1 << 20 | 1, 1 << 20 | 2, 4 << 20 | 3, 4 << 20 | 4)
    assert text_cut((*text, (5, 7)), 4) == ((1, 3), (4, 4))
    assert extend_text(text, prompt_of("a2a3b1")) == (*text, (4000, 10), (4001, 11))
    assert [text_cut(text, n) for n in (0, 2, 3, 4)] == [(), ((1, 2),), ((1, 3),), ((1, 3), (4, 4))]


@pytest.mark.parametrize("given", ["retract r1", "finish r1 keep 1; submit r2 in s1 +1"])
def test_a_slot_holds_text_of_a_turn_that_has_started(given):
    assert [holder.text for holder in holders(after(f"{FIRST}; {given}"))] == [((1, 11),)]


@pytest.mark.parametrize(
    "rounds, length", [("", 11), (f"; {ROUND}", 11), (f"; {ROUND}; {ROUND}", 12)]
)
def test_tokens_accepted_on_the_device_count_as_computed(rounds, length):
    assert after(f"{FIRST}{rounds}").request("r1").computed_text == ((1, length),)


@pytest.mark.parametrize(
    "text, says",
    [
        ("a", Done()),
        ("z", Done()),
        *((text, Refused(Reason.EMPTY)) for text in ("", "A", "{", "ab")),
    ],
)
def test_a_prompt_is_of_texts_that_there_are(text, says):
    assert step(initial(PAGE4), Submit("r1", None, 0, 0, (Piece(text, 1),)))[1] == says


@pytest.mark.parametrize(
    "field, value",
    [
        ("page_size", 0),
        ("window", 0),
        ("rows", True),
        ("width", 10**9),
        ("swa_pages", 0),
        ("full_pages", "x"),
    ],
)
def test_bad_geometries_name_the_field(field, value):
    sizes = {f: getattr(PAGE4, f) for f in PAGE4.__slots__} | {field: value}
    with pytest.raises(GeometryError) as error:
        Geometry(**sizes)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("committed", "evicted", "target", "stops"),
    [(5, 0, 8, {5, 6, 7, 8}), (5, 7, 8, {7, 8}), (5, 0, 3, {3}), (5, 0, 12, {5, 6, 7, 8, 9})],
    ids=["a reserve behind C", "evicted past C", "cut below C", "target past A"],
)
def test_a_cut_may_give_back_what_has_no_kv(committed, evicted, target, stops):
    """A cut keeps each token below C and below the end of window eviction, and none past itself."""
    cursors = Cursors(committed, 9, evicted, 1)
    assert {stop for stop in range(14) if has_all_kv(cursors, target, stop)} == stops
