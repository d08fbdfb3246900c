"""Lists of names with what they stand for, and the name that somebody meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ci.commands.shared import ReportOut, Unusable

if TYPE_CHECKING:
    from ci import Data


def similar_names(name: str, names: Iterable[str]) -> str:
    """Suggest known names for an unknown one, for the end of a line."""
    close = get_close_matches(name, names, 3)
    return f"; is it {' or '.join(close)}?" if close else ""


def quoted_text(text: str, most: int = 40) -> str:
    """Return a text in quotation marks, cut to `most` characters."""
    return repr(text if len(text) <= most else f"{text[: most - 3]}...")


def _mentions(row: Data, word: str) -> bool:
    """Return whether the word, or another form of it, occurs in a text of the row, or of a list in it."""
    stem = re.sub("(?<=.{4})(?:ion|ing|ed|es|s)$", "", word.lower())
    lists = (value if isinstance(value, list) else [value] for value in row.values())
    texts = (text for values in lists for text in values)
    return any(stem in text.lower() for text in texts if isinstance(text, str))


def _as_spelled(name: str, known_names: Iterable[str]) -> str:
    """Return a name as it is written, where only capitals and hyphens differ: free-1 and free1 are
    FREE-1."""
    alike_names = [known for known in known_names if _without_hyphens(known) == _without_hyphens(name)]
    return alike_names[0] if len(alike_names) == 1 else name


def _without_hyphens(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.casefold())


def list_rows(
    rows: list[Data],
    out: ReportOut,
    columns: dict[str, str],
    names: tuple[str, ...] = (),
) -> int:
    """List rows as a table, or those called `names` in full. A name that no row has lists the rows that
    mention it; FREE lists those that begin with FREE-."""
    from ci.report import text_output

    rows_by_id = {row["id"]: row for row in rows}
    names = tuple(_as_spelled(name, rows_by_id) for name in names)
    if names and not rows_by_id.keys() & {*names}:
        family = [row for row in rows if row["id"].startswith(f"{names[0]}-") and len(names) == 1]
        matching = family or [row for row in rows if all(_mentions(row, word) for word in names)]
        if matching:
            text_output.listing(out.console, matching, columns)
            return out.end(matching)
        if len(names) > 1:
            counts = {word: sum(_mentions(row, word) for row in rows) for word in names}
            each = ", ".join(f"{word:.40} {count}" for word, count in counts.items())
            raise Unusable(f"no {columns['id']} mentions all of these words; of each: {each}")
    for name in names:
        if name not in rows_by_id:
            listed = f"without a name all are listed{similar_names(name, rows_by_id)}"
            raise Unusable(
                f"no {columns['id']} has the name or mentions {quoted_text(name)}; {listed}"
            )
    if out.file in rows_by_id:
        raise Unusable(
            f"--json {out.file}: is a {columns['id']}, not a file; names come before --json"
        )
    for name in names:
        text_output.record(out.console, rows_by_id[name])
        out.console.print()
    if not names:
        text_output.listing(out.console, rows, columns)
    return out.end([rows_by_id[name] for name in names] or rows)
