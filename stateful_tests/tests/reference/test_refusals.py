"""Every refusal of the reference's table on every built-in system, and pairs of reasons in their order."""

from __future__ import annotations

import pytest

from reference.commands import (
    Abort,
    Admit,
    Chunk,
    Close,
    Command,
    Draft,
    EvictSwa,
    Extend,
    Mode,
    Open,
    Reason,
    Refused,
    SpecDecode,
    Submit,
)  # fmt: skip
from reference.geometry import Geometry, preset
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.systems import resolve
from stateful_tests.tests.reference.test_model import FIRST, PAGE4, REFUSALS, turn

# Two reasons apply; the first in the order of `Reason` is the one.
PAIRS: list[tuple[Reason, list[Command], Command, Geometry]] = [
    (Reason.EMPTY, [], Submit("r1", "s9", 0), PAGE4),  # and unknown_session
    (Reason.UNKNOWN_SESSION, FIRST, Submit("r1", "s9", 1), PAGE4),  # and request_exists
    (Reason.REQUEST_EXISTS, FIRST, Submit("r1", "s1", 1), PAGE4),  # and turn_in_flight
    (Reason.SESSION_CLOSING, [*FIRST, Close("s1")], Submit("r2", "s1", 1), PAGE4),  # and turn_in_flight
    (Reason.TURN_IN_FLIGHT, FIRST, Submit("r2", "s1", 1, rewind=1), PAGE4),  # and shrinking_prefix
    (Reason.WRONG_PHASE, [Submit("r1", None, 1)], EvictSwa("r1", 9), preset("no-swa")),  # and no_swa
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
CASES = [(reason, given, command, PAGE4) for reason, given, command in REFUSALS] + PAIRS


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("reason, given, command, geometry", CASES, ids=lambda x: str(x)[:30])
def test_refused_alike(
    impl: str, reason: Reason, given: list[Command], command: Command, geometry: Geometry
) -> None:
    lockstep = Lockstep(resolve(impl), geometry, Mode.FREE)
    for each in given:
        assert not isinstance(lockstep.do(each), Refused)
    assert lockstep.do(command) == Refused(reason)
    assert lockstep.violation is None
