"""What the reference refuses, which choices it follows, and what sizes and texts there are.

What each rule does is in test_rules.py, on every transition of small scopes, and drawn in SPEC.md.
"""

from dataclasses import replace

import pytest

from reference.commands import (
    Abort, Admit, Choice, Chunk, Close, Command, Decode, Done, Draft, EvictSwa, Extend, Finish, Launch, Mode,
    Open, Reason, Refused, Retract, Settle, SpecDecode, Submit,
)  # fmt: skip
from reference.geometry import PRESETS, Geometry, GeometryError, preset
from reference.ledger import Cursors, State, text_cut, text_tokens
from reference.model import ChoiceNotAllowed, initial, step
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.systems import resolve

PAGE4 = Geometry(page_size=4, window=6, full_pages=12, swa_pages=9, rows=3, width=32)


def after(*commands: Command, geometry: Geometry = PAGE4, mode: Mode = Mode.FREE) -> State:
    """The state after commands that must all be done."""
    state = initial(geometry, mode)
    for command in commands:
        state, outcome = step(state, command)
        assert outcome == Done(), f"{command}: {outcome}"
    return state


def turn(request: str, session: str | None, tokens: int, *, fill: int | None = None) -> list[Command]:
    """Submit, admit and prefill in one chunk; `fill`: what is left to prefill, default all."""
    chunk = Chunk(request, tokens if fill is None else fill)
    return [Submit(request, session, tokens), Admit(request), Extend((chunk,))]


def running(state: State, name: str = "r1") -> Cursors:
    return state.request(name).cursors


FIRST = [Open("s1"), *turn("r1", "s1", 10)]


NEARLY_FULL = [*FIRST, *turn("r2", None, 20)]  # 8 of 9 SWA pages are taken

REFUSALS: list[tuple[Reason, list[Command], Command]] = [
    (Reason.EMPTY, [Open("s1")], Submit("r1", "s1", 0)),
    (Reason.EMPTY, [], Extend(())),
    (Reason.DUPLICATE_LANE, FIRST, Decode(("r1", "r1"))),
    (Reason.UNKNOWN_SESSION, [], Submit("r1", "s1", 1)),
    (Reason.UNKNOWN_SESSION, [], Close("s1")),
    (Reason.SESSION_EXISTS, [Open("s1")], Open("s1")),
    (Reason.UNKNOWN_REQUEST, [], Admit("r1")),
    (Reason.REQUEST_EXISTS, FIRST, Submit("r1", None, 1)),
    (Reason.SESSION_CLOSING, [*FIRST, Close("s1")], Close("s1")),
    (Reason.SESSION_CLOSING, [*FIRST, Close("s1")], Submit("r2", "s1", 1)),
    (Reason.TURN_IN_FLIGHT, FIRST, Submit("r2", "s1", 1)),
    (Reason.SHRINKING_PREFIX, [*FIRST, Finish("r1", 1)], Submit("r2", "s1", 4, rewind=2)),
    (Reason.WRONG_PHASE, FIRST, Admit("r1")),
    (Reason.WRONG_PHASE, [*FIRST, Retract("r1")], Abort("r1", marked=True)),
    (Reason.BAD_LENGTH, FIRST, Finish("r1", 2)),
    (Reason.BAD_LENGTH, FIRST, Finish("r1", 0)),
    (Reason.BAD_LENGTH, FIRST, Retract("r1", 2)),
    (Reason.BAD_LENGTH, FIRST, SpecDecode((Draft("r1", 2, 3),))),
    (Reason.BAD_LENGTH, FIRST, EvictSwa("r1", 11)),
    (Reason.ROW_TOO_SHORT, [Open("s1")], Submit("r1", "s1", 33)),
    (Reason.ROW_TOO_SHORT, FIRST, SpecDecode((Draft("r1", 23, 1),))),
    (Reason.NO_ROW, [*turn("r1", None, 1), *turn("r2", None, 1), *turn("r3", None, 1),
                     Submit("r4", None, 1), Admit("r4")], Extend((Chunk("r4", 1),))),
    (Reason.OUT_OF_SWA, NEARLY_FULL, SpecDecode((Draft("r1", 12, 1),))),
    (Reason.OUT_OF_FULL, [*turn("r1", None, 30), EvictSwa("r1", 30), *turn("r2", None, 16)],
     SpecDecode((Draft("r2", 5, 1),))),
]  # fmt: skip


# Two reasons apply; the first in the order of `Reason` is the one.
PAIRS: list[tuple[Reason, list[Command], Command, Geometry]] = [
    (Reason.EMPTY, [], Submit("r1", "s9", 0), PAGE4),  # and unknown_session
    (Reason.UNKNOWN_SESSION, FIRST, Submit("r1", "s9", 1), PAGE4),  # and request_exists
    (Reason.REQUEST_EXISTS, FIRST, Submit("r1", "s1", 1), PAGE4),  # and turn_in_flight
    (Reason.SESSION_CLOSING, [*FIRST, Close("s1")], Submit("r2", "s1", 1), PAGE4),  # and turn_in_flight
    (Reason.TURN_IN_FLIGHT, FIRST, Submit("r2", "s1", 1, rewind=1), PAGE4),  # and shrinking_prefix
    (Reason.WRONG_PHASE, [Submit("r1", None, 1)], EvictSwa("r1", 9), preset("no-swa")),  # and no_swa
    # A tree has the prompt by its result, so that is processed.
    (Reason.BAD_LENGTH, FIRST, Retract("r1", 1), replace(PAGE4, tree=True)),
    (Reason.NO_SWA, turn("r1", None, 4), EvictSwa("r1", 9), preset("no-swa")),  # and bad_length
    (Reason.BAD_LENGTH, FIRST, SpecDecode((Draft("r1", 40, 41),)), PAGE4),  # and row_too_short
    (
        Reason.WINDOW_LOST,
        [*FIRST, SpecDecode((Draft("r1", 20, 1),)), EvictSwa("r1", 30)],
        SpecDecode((Draft("r1", 30, 1),)),  # and row_too_short
        PAGE4,
    ),
    (
        Reason.NO_ROW,  # and out_of_full, out_of_swa
        [*turn("r1", None, 1), Submit("r2", None, 32), Admit("r2")],
        Extend((Chunk("r2", 32),)),
        Geometry(page_size=4, window=6, full_pages=2, swa_pages=2, rows=1, width=32),
    ),
    (
        Reason.OUT_OF_FULL,  # and out_of_swa
        [Submit("r2", None, 32), Admit("r2")],
        Extend((Chunk("r2", 32),)),
        Geometry(page_size=4, window=6, full_pages=2, swa_pages=2, rows=1, width=32),
    ),
    (Reason.REQUEST_EXISTS, [Open("a")], Submit("a", None, 1), PAGE4),  # one space of names
    (Reason.SESSION_EXISTS, [Submit("a", None, 1)], Open("a"), PAGE4),
    (
        Reason.NO_ROW,  # a rejected prefill of a marked request needs a row of its own
        [*turn("r1", None, 1), Submit("r2", None, 1)],
        Abort("r2", marked=True),
        Geometry(page_size=4, window=6, full_pages=9, swa_pages=9, rows=1, width=32),
    ),
]


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("reason", dict.fromkeys(case[0] for case in (*REFUSALS, *PAIRS)))
def test_refused_alike(impl, reason):
    """Each refusal, and of two that apply the first, by the reference and by the torch implementation."""
    for expected, given, command, geometry in [*(case + (PAGE4,) for case in REFUSALS), *PAIRS]:
        if expected is reason:
            lockstep = Lockstep(resolve(impl), geometry, Mode.FREE)
            for each in given:
                assert not isinstance(lockstep.do(each), Refused)
            assert lockstep.do(command) == Refused(reason)
            assert lockstep.violation is None


def test_a_batch_is_all_or_nothing():
    state = after(*FIRST, Submit("r2", None, 32), Admit("r2"), Submit("r3", None, 1), Admit("r3"))
    batch = Extend((Chunk("r3", 1), Chunk("r2", 32)))
    assert step(state, batch) == (state, Refused(Reason.OUT_OF_SWA))


UNFAITHFUL: list[tuple[list[Command], Command]] = [
    ([*FIRST, SpecDecode((Draft("r1", 9, 2),))], EvictSwa("r1", 13)),  # past the commit
    ([*FIRST, SpecDecode((Draft("r1", 9, 9),)), EvictSwa("r1", 19)], Finish("r1", 8)),  # takes it back
    ([*FIRST, Decode(("r1",)), EvictSwa("r1", 11)], Retract("r1", 1)),
]


@pytest.mark.parametrize("given, command", UNFAITHFUL, ids=lambda x: str(x)[:40])
def test_a_faithful_scheduler_would_not(given, command):
    assert step(after(*given), command)[1] == Done()
    state = after(*given, mode=Mode.FAITHFUL)
    assert step(state, command) == (state, Refused(Reason.UNFAITHFUL))


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_faithful_scheduler_ends_with_any_output_of_the_rounds_under_way(kept):
    """It knew of one output when it launched the last round."""
    state = after(*FIRST, Decode(("r1",)), Decode(("r1",)), mode=Mode.FAITHFUL)
    outcome = step(state, Finish("r1", kept))[1]
    assert outcome == (Done() if kept > 1 else Refused(Reason.UNFAITHFUL))


def test_choices_are_followed_within_their_bounds():
    state = after(Open("s1"), *turn("r1", "s1", 20))
    for chosen in (0, 4, 8, 12):  # less than the default, the default, all that no window reaches
        swept, _ = step(state, EvictSwa("r1", 20), [Choice("r1", swa_evicted_seqlen=chosen)])
        assert running(swept).swa_evicted_seqlen == chosen
    for chosen in (16, 6):
        with pytest.raises(ChoiceNotAllowed):
            step(state, EvictSwa("r1", 20), [Choice("r1", swa_evicted_seqlen=chosen)])
    further, _ = step(
        state, SpecDecode((Draft("r1", 2, 1),)), [Choice("r1", kv_allocated_len=28)]
    )
    assert running(further) == Cursors(21, 28, 0, 0)
    with pytest.raises(ChoiceNotAllowed):
        step(state, SpecDecode((Draft("r1", 2, 1),)), [Choice("r1", kv_allocated_len=21)])
    with pytest.raises(ChoiceNotAllowed):
        step(state, Decode(("r1",)), [Choice("r1", kv_allocated_len=28)])


def test_a_server_may_claim_less_of_a_round_in_flight():
    state, launch = after(Open("s1"), *turn("r1", "s1", 20)), Launch((Draft("r1", 3, 2),))
    for claimed in (20, 21, 23):  # nothing, a token, all of it
        first, _ = step(state, launch, [Choice("r1", kv_committed_len=claimed)])
        second, _ = step(first, launch, [Choice("r1", kv_committed_len=claimed)])
        assert running(second) == Cursors(claimed, 26, 0, 0), "slots for both, whatever is claimed"
        settled = running(step(second, Settle("r1"))[0])
        assert settled.kv_committed_len == 22, "of the first all is known now"
        kept, _ = step(first, Finish("r1", 1), [Choice("r1", kv_committed_len=21)])
        assert kept.sessions[0].slot == Cursors(21, 21, 0, 0), "the round computes that token first"
    for claimed in (19, 24):
        with pytest.raises(ChoiceNotAllowed):
            step(state, launch, [Choice("r1", kv_committed_len=claimed)])
    with pytest.raises(ChoiceNotAllowed):  # with nothing in flight nobody computes it
        step(state, Finish("r1", 1), [Choice("r1", kv_committed_len=21)])


def test_a_prefill_may_be_swept_after_its_forward_pass():
    state = after(Open("s1"), Submit("r1", "s1", 20), Admit("r1"))
    command = Extend((Chunk("r1", 20),))
    swept, _ = step(state, command, [Choice("r1", swa_evicted_seqlen=12, after=True)])
    assert running(swept) == Cursors(20, 20, 12, 0)
    for choice in (Choice("r1", swa_evicted_seqlen=16, after=True), Choice("r1", swa_evicted_seqlen=12)):
        with pytest.raises(ChoiceNotAllowed):
            step(state, command, [choice])


def test_texts():
    text = ((1, 3), (4, 5))
    assert text_tokens(text) == (1 << 20, 1 << 20 | 1, 1 << 20 | 2, 4 << 20 | 3, 4 << 20 | 4)
    assert [text_cut(text, n) for n in (0, 2, 3, 4)] == [(), ((1, 2),), ((1, 3),), ((1, 3), (4, 4))]


@pytest.mark.parametrize(
    "field, value",
    [("page_size", 0), ("window", 0), ("rows", True), ("width", 10**9), ("swa_pages", 0),
     ("full_pages", "x")],
)
def test_bad_geometries_name_the_field(field, value):
    sizes = {f: getattr(PAGE4, f) for f in PAGE4.__slots__} | {field: value}
    with pytest.raises(GeometryError) as caught:
        Geometry(**sizes)
    assert caught.value.field == field


def test_presets_cover_what_the_issue_names():
    assert {g.page_size for g in PRESETS.values()} >= {1, 2, 4, 16}
    windows = [(g.page_size, g.window) for g in PRESETS.values() if g.window is not None]
    assert any(p > w for p, w in windows) and any(w % p for p, w in windows)
    assert any(g.window is None for g in PRESETS.values())
    with pytest.raises(GeometryError, match="unknown 'nope'"):
        preset("nope")
