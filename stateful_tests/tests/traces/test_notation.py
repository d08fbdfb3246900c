"""The line notation of commands: parse and format are inverse, and a wrong line is refused with its usage."""

import pytest
from hypothesis import given

from reference.commands import (
    Abort, CheckBusy, Choice, Chunk, Done, Draft, Evict, EvictSwa, Extend, Finish, Freed,
    Insert, Match, Piece, Reason, Refused, Retract, SpecDecode, Submit,
)  # fmt: skip
from stateful_tests.tests.support.commands import commands
from stateful_tests.traces.notation import NotationError, format_command, format_outcome, parse

A8 = (Piece("a", 8),)


@given(commands)
def test_parse_is_the_inverse_of_format(command):
    assert parse(format_command(command)) == command


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (Submit("r1", "s1", 4, 2), "submit r1 in s1 +4 rewind 2"),
        (Submit("r1", None, 0, prompt=(*A8, Piece("b", 4))), "submit r1 (no session) a8b4"),
        (Submit("r1", "s1", 2, prompt=A8), "submit r1 in s1 a8 +2"),
        (Extend((Chunk("r1", 4), Chunk("r2", -1))), "extend r1 +4, r2 -1"),
        (Extend(()), "extend (no lanes)"),
        (SpecDecode((Draft("r1", 3, 2),)), "spec_decode r1 +3 accept 2"),
        (EvictSwa("r1", 12), "evict_swa r1 at length 12"),
        (Finish("r1", 2), "finish r1 keep 2"),
        (Retract("r1", 1), "retract r1 losing 1"),
        (Abort("r1", marked=True), "abort r1 (marked)"),
        (Match("h1", ()), "match h1 (empty)"),
        (CheckBusy(1), "check_busy level 1"),
        (Insert("h1", A8, 4, chunked=True), "insert h1 a8 SWA from 4 (goes on)"),
        (Evict(0, 8), "evict full 0 swa 8"),
    ],
)
def test_a_command_is_written_as_one_line(command, text):
    assert format_command(command) == text


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Done((Choice("r1", swa_evicted_seqlen=4),)), "done; r1 chose swa_evicted_seqlen 4"),
        (Done(freed=Freed(8, 4)), "done; freed full 8 swa 4"),
        (Refused(Reason.NO_ROW), "refused: no_row"),
    ],
)
def test_an_outcome_is_written_as_one_line(outcome, text):
    assert format_outcome(outcome) == text


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("  extend   r1 +4 ,  r2  3 ", Extend((Chunk("r1", 4), Chunk("r2", 3)))),
        ("check_busy", CheckBusy(1)),
        ("insert h1 a8 SWA from 4", Insert("h1", A8, 4)),
    ],
)
def test_parse_takes_extra_spaces_and_omitted_defaults(line, command):
    assert parse(line) == command


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("extnd r1 +4", "'extnd' is no command; commands: open, submit, "),
        ("extend r1", "expected: extend REQUEST +TOKENS [tail], ...; got 'extend r1'"),
        (
            "submit r1 in s1",
            "submit REQUEST in SESSION or (no session) [a8b4] +TOKENS [rewind N] [answers NAME]; got",
        ),
        ("check_idle now", "expected: check_idle; got"),
        ("extend r1 +99999", "lanes[0].tokens: expected int <= 16384"),
        ("open " + "x" * 40, "session: expected str of length <= 32"),
        ("evict full ٣", "expected: evict full N [swa N]"),
    ],
)
def test_parse_of_a_wrong_line_names_the_expected_syntax(line, message):
    with pytest.raises(NotationError) as caught:
        parse(line)
    assert message in str(caught.value)
