"""Files of rows: paragraphs of text, each a test.

    a title, on what is special
    lines
    -> what must be found, or "conforms"
       at the places of it

A paragraph without an outcome is a piece that others name; its head ends with a colon. Lines that begin with
# are comments.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Paragraph(NamedTuple):
    """A paragraph of a file of rows.

    on: what the head has behind ", on ".
    outcome: "" of a piece.
    places: "" where none are stated.
    """

    title: str
    on: str
    lines: tuple[str, ...]
    outcome: str
    places: str


def paragraphs(path: Path) -> Iterator[Paragraph]:
    """Yield the paragraphs of a file, in order."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for paragraph in re.split(r"\n{2,}", text.strip()):
        paragraph, _, places = paragraph.partition("\n   at ")
        head, *lines = paragraph.splitlines()
        if head.endswith(":"):
            yield Paragraph(head[:-1], "", tuple(lines), "", "")
            continue
        title, _, on = head.partition(", on ")
        *lines, last = lines
        if not last.startswith("-> "):
            raise ValueError(f"{path}: {title}: no outcome behind '-> '")
        yield Paragraph(title, on, tuple(lines), last.removeprefix("-> "), places)


class ClauseRow(NamedTuple):
    """What the last line violates.

    clause: the headline, "" if all lines conform.
    also: further clauses, in any order.
    words: how the headline's expected and observed end.
    places: of the headline's failure.
    """

    title: str
    on: str
    lines: tuple[str, ...]
    clause: str
    also: frozenset[str]
    words: str
    places: str


def clause_rows(path: Path) -> Iterator[ClauseRow]:
    """Yield the rows of a file whose outcomes are "CLAUSE (further clauses): words" or "conforms"."""
    for title, on, lines, outcome, places in paragraphs(path):
        match = re.fullmatch(r"(?:conforms|(\S+?)(?: \((.*?)\))?: (.*))", outcome)
        if match is None:
            raise ValueError(f"{path}: {title}: {outcome}")
        clause, also, words = (part or "" for part in match.groups())
        yield ClauseRow(title, on, lines, clause, frozenset(also.split()), words, places)
