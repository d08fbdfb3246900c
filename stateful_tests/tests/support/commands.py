"""Commands from text, and Hypothesis strategies for every one that a trace file can hold."""

from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from reference.commands import COMMANDS, Piece, Prompt
from stateful_tests.traces.notation import parse
from stateful_tests.traces.schema import MAX_LENGTH


def script(text: str, *kinds: Any) -> tuple[Any, ...]:
    """Commands as reports print them, with semicolons between: "open s1; submit r1 in s1 +4"."""
    return tuple(parse(line, *kinds) for line in text.split(";") if line.strip())


names = st.from_regex(r"[A-Za-z0-9_.-]{1,32}", fullmatch=True)
lengths = st.integers(-MAX_LENGTH, MAX_LENGTH)
prompts = st.lists(
    st.builds(Piece, st.sampled_from("abz"), st.integers(-9999, 9999)), max_size=8
).map(tuple)
_OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: names,
    str | None: st.none() | names,
    int: lengths,
    bool: st.booleans(),
    Prompt: prompts,
}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if hint in _OF_TYPE:
        return _OF_TYPE[hint]
    if get_origin(hint) is tuple:
        return st.lists(_values(get_args(hint)[0]), max_size=4).map(tuple)
    return _made(hint)


def _made(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: _values(hints[field.name]) for field in fields(kind)})


commands = st.one_of(map(_made, COMMANDS))
