"""Commands as people type them: what `describe` writes `parse` reads; a wrong line is told in one line."""

from __future__ import annotations

import pytest
from hypothesis import given

from reference.commands import COMMANDS, Abort, CheckBusy, Chunk, Command, Extend, Insert, Piece, Submit
from stateful_tests.tests.traces.test_traces import commands
from stateful_tests.traces.files import tag
from stateful_tests.traces.notation import USAGES, WordingError, describe, parse


@given(commands)
def test_parse_is_the_inverse_of_describe(command: Command) -> None:
    assert parse(describe(command)) == command


def test_every_command_has_a_usage() -> None:
    assert {usage.split()[0] for usage in USAGES} == {tag(kind) for kind in COMMANDS}


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("  extend   r1 +4 ,  r2  3 ", Extend((Chunk("r1", 4), Chunk("r2", 3)))),
        ("insert h1 a12 SWA from 4", Insert("h1", (Piece("a", 12),), 4)),
        ("submit r1 (no session) a8b4 +2", Submit("r1", None, 2, 0, (Piece("a", 8), Piece("b", 4)))),
        ("check_busy", CheckBusy(1)),
        ("abort r1 (marked)", Abort("r1", True)),
    ],
)
def test_what_is_typed(line: str, command: Command) -> None:
    assert parse(line) == command


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("extnd r1 +4", "'extnd' is no command; commands: open, submit, "),
        ("extend r1", "expected: extend REQUEST +TOKENS, ...; got 'extend r1'"),
        ("submit r1 in s1", "expected: submit REQUEST in SESSION +TOKENS"),
        ("check_idle now", "expected: check_idle; got"),
        ("extend r1 +99999", "lanes[0].tokens: expected int <= 16384"),
        ("open " + "x" * 40, "session: expected str of length <= 32"),
        ("evict full ٣", "expected: evict full N [swa N]"),
    ],
)
def test_a_wrong_line_is_told(line: str, says: str) -> None:
    with pytest.raises(WordingError) as caught:
        parse(line)
    assert says in str(caught.value)
