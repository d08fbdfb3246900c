"""What the reference refuses, which choices it follows, and what sizes and texts there are.

What each rule does is in test_rules.py, on every transition of small scopes, and drawn in SPEC.md.
"""

import itertools
from dataclasses import replace

import pytest

from reference.commands import Choice, Done, Mode, Reason, Refused
from reference.cursors import in_order
from reference.geometry import Geometry, GeometryError, preset
from reference.state import Cursors, State, text_cut, text_tokens
from reference.model import ChoiceNotAllowed, initial, step
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.systems import resolve
from stateful_tests.tests.support.commands import script

PAGE4 = Geometry(page_size=4, window=6, full_pages=12, swa_pages=9, rows=3, width=32)
ONE_ROW = replace(PAGE4, full_pages=2, swa_pages=2, rows=1)


def after(text: str, mode: Mode = Mode.FREE, sizes: Geometry = PAGE4) -> State:
    """The state after commands that must all be done."""
    state = initial(sizes, mode)
    for command in script(text):
        state, outcome = step(state, command)
        assert outcome == Done(), f"{command}: {outcome}"
    return state


def does(state: State, text: str, *choices: Choice) -> Cursors:
    """The cursors of r1 after one more command, for which a system chose."""
    return step(state, *script(text), list(choices))[0].request("r1").cursors


FIRST = "open s1; submit r1 in s1 +10; admit r1; extend r1 +10"
ROUND = "launch r1 +1 accept 1"
ORDINARY = "submit r1 (no session) +1; admit r1; extend r1 +1"

# Two reasons apply; the first in the order of `Reason` is the one. That each comes where it should is in
# test_rules, and on torch in tours.
PAIRS: list[tuple[Reason, str, str, Geometry]] = [
    (Reason.EMPTY, "", "submit r1 in s9 +0", PAGE4),  # and unknown_session
    (Reason.EMPTY, FIRST, "spec_decode r1 +0 accept 1", PAGE4),  # and bad_length
    (Reason.UNKNOWN_SESSION, FIRST, "submit r1 in s9 +1", PAGE4),  # and request_exists
    (Reason.REQUEST_EXISTS, FIRST, "submit r1 in s1 +1", PAGE4),  # and turn_in_flight
    # and turn_in_flight
    (Reason.SESSION_CLOSING, f"{FIRST}; close s1", "submit r2 in s1 +1", PAGE4),
    (Reason.TURN_IN_FLIGHT, FIRST, "submit r2 in s1 +1 rewind 1", PAGE4),  # and shrinking_prefix
    (Reason.WRONG_PHASE, "submit r1 (no session) +1", "evict_swa r1 at length 9", preset("no-swa")),
    # A tree has the prompt by its result, so that is processed.
    (Reason.BAD_LENGTH, FIRST, "retract r1 losing 1", replace(PAGE4, tree=True)),
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
     "extend r2 +1, r1 +1 tail", replace(PAGE4, tree=True)),
    # A rejected prefill of a marked request needs a row of its own.
    (Reason.NO_ROW, f"{ORDINARY}; submit r2 (no session) +1", "abort r2 (marked)", replace(PAGE4, rows=1)),
]  # fmt: skip


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_of_two_reasons_the_first_is_reported(impl):
    for reason, given, command, geometry in PAIRS:
        lockstep = Lockstep(resolve(impl), geometry, Mode.FREE)
        for each in script(given):
            assert not isinstance(lockstep.do(each), Refused)
        assert lockstep.do(*script(command)) == Refused(reason)
        assert lockstep.violation is None


def test_a_batch_is_all_or_nothing():
    state = after(
        f"{FIRST}; submit r2 (no session) +32; admit r2; submit r3 (no session) +1; admit r3"
    )
    assert step(state, *script("extend r3 +1, r2 +32")) == (state, Refused(Reason.OUT_OF_SWA))


AHEAD = f"{FIRST}; spec_decode r1 +9 accept "


@pytest.mark.parametrize(
    "given, command",
    [
        (f"{AHEAD} 2", "evict_swa r1 at length 13"),  # past the commit
        (f"{AHEAD} 9; evict_swa r1 at length 19", "finish r1 keep 8"),  # takes it back
        (f"{FIRST}; decode r1; evict_swa r1 at length 11", "retract r1 losing 1"),
    ],
)
def test_a_faithful_scheduler_would_not(given, command):
    assert step(after(given), *script(command))[1] == Done()
    state = after(given, Mode.FAITHFUL)
    assert step(state, *script(command)) == (state, Refused(Reason.UNFAITHFUL))


@pytest.mark.parametrize(
    "given, says", [("", Done()), ("; unlock_swa r1", Refused(Reason.UNFAITHFUL))]
)
def test_who_has_unlocked_its_window_is_not_cut_below(given, says):
    state = after(FIRST + 4 * "; decode r1" + given, Mode.FAITHFUL, replace(PAGE4, tree=True))
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


TWENTY = "open s1; submit r1 in s1 +20; admit r1"
SHARED = "submit r1 (no session) a8 +1; admit r1; extend r1 +9"


def test_choices_are_followed_within_their_bounds():
    state = after(f"{TWENTY}; extend r1 +20")
    evict, ahead = "evict_swa r1 at length 20", "spec_decode r1 +2 accept 1"
    for chosen in (0, 4, 8, 12):  # less than the default, the default, all that no window reaches
        assert (
            does(state, evict, Choice("r1", swa_evicted_seqlen=chosen)).swa_evicted_seqlen == chosen
        )
    shared = after(SHARED, sizes=replace(PAGE4, tree=True))
    assert does(shared, "evict_swa r1 at length 9", Choice("r1", swa_evicted_seqlen=0)) == Cursors(
        9, 9, 0, 8
    )
    assert does(state, ahead, Choice("r1", kv_allocated_len=28)) == Cursors(21, 28, 0, 0)
    grown = after(f"{SHARED}; spec_decode r1 +16 accept 16", sizes=replace(PAGE4, tree=True))
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
        kept, _ = step(first, finish, [Choice("r1", kv_committed_len=21)])
        assert kept.sessions[0].slot == Cursors(21, 21, 0, 0), "the round computes that token first"
        for ends, wrong in ((first, 19), (settled, 23)):
            with pytest.raises(ChoiceNotAllowed):
                step(ends, finish, [Choice("r1", kv_committed_len=wrong)])
    for claimed in (19, 24):
        with pytest.raises(ChoiceNotAllowed):
            step(state, launch, [Choice("r1", kv_committed_len=claimed)])
    first, _ = step(state, launch, [Choice("r1", kv_allocated_len=23)])
    assert first.request("r1").cursors.kv_committed_len == 23, "without a claim all of it"
    with pytest.raises(ChoiceNotAllowed):  # with nothing in flight nobody computes it
        step(state, finish, [Choice("r1", kv_committed_len=21)])


def test_a_prefill_may_be_evicted_after_its_forward_pass():
    state, command = after(TWENTY), "extend r1 +20"
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
    live, evicted = after(ahead), after(f"{ahead}; evict_swa r1 at length 29")
    [finish] = script("finish r1 keep 1")
    for stop in (0, 16, 20):
        kept, _ = step(evicted, finish, [Choice("r1", kv_allocated_len=stop)])
        assert kept.sessions[0].slot == Cursors(stop, stop, min(stop, 16), 0)
    for state, stop in ((live, 20), (evicted, 18), (evicted, 24)):
        with pytest.raises(ChoiceNotAllowed):
            step(state, finish, [Choice("r1", kv_allocated_len=stop)])


def test_cursors_are_in_order():
    for c in itertools.starmap(Cursors, itertools.product(range(-1, 3), repeat=4)):
        committed, allocated, evicted, protected = c
        chains = [0, protected, committed, allocated], [0, evicted, allocated]
        assert in_order(c) == all(chain == sorted(chain) for chain in chains), c


def test_texts():
    text = ((1, 3), (4, 5))
    assert text_tokens(text) == (1 << 20, 1 << 20 | 1, 1 << 20 | 2, 4 << 20 | 3, 4 << 20 | 4)
    assert [text_cut(text, n) for n in (0, 2, 3, 4)] == [(), ((1, 2),), ((1, 3),), ((1, 3), (4, 4))]


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
    with pytest.raises(GeometryError) as caught:
        Geometry(**sizes)
    assert caught.value.field == field
