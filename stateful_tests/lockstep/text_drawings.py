"""Rows, radix trees and locks as text: for SPEC.md, `kvspec tree`, step tables and the lines of a replay."""

from collections.abc import Iterable, Mapping, Sequence

from reference.cursors import Cursors, ceil_page, window_start
from reference.failures import count_text
from reference.radix_tree import Lock, Tree
from reference.state import full_pages, swa_pages

LEGEND = {
    "#": "KV of a token of the text",
    "+": "a slot allocated ahead, no token yet",
    "-": "rest of the last page: attached, not allocated",
    "t": "the radix tree's, locked",
    ".": "full KV is there, SWA KV was evicted",
    "~": "the window that the next token reads",
}
_INDENT = "position  "


def row(c: Cursors, page_size: int, window: int | None, target: int | None = None) -> str:
    """Draw a row of req_to_token: its pages in both pools, the window at C, and the cursors."""
    pages = range(-(-c.kv_allocated_len // page_size))
    column = {p: p + p // page_size + 1 for p in range(len(pages) * page_size + 1)}
    ruler = "".join(f" {page * page_size:<{page_size}}" for page in pages)
    lines = [_INDENT + ruler.rstrip()]
    pages_of = {"full KV": full_pages(c, page_size)}
    if window is not None:
        pages_of["SWA KV"] = swa_pages(c, page_size)
    for label, owned in pages_of.items():
        cells = "".join(
            "|" + "".join(_draw_cell(c, at * page_size + i, at in owned) for i in range(page_size))
            for at in pages
        )
        lines.append(f"{label:<{len(_INDENT)}}{cells}|")
    if window is not None:
        window_positions = range(window_start(c.kv_committed_len, window), c.kv_committed_len)
        lines.append("window".ljust(len(_INDENT)) + _cursor_marks({column[p]: "~" for p in window_positions}))
    cursors = {"R": c.cache_protected_len, "E": c.swa_evicted_seqlen, "C": c.kv_committed_len}
    cursors |= {"A": c.kv_allocated_len} | ({"target": target} if target is not None else {})
    for value in sorted({*cursors.values()}):
        names = ", ".join(name for name, at in cursors.items() if at == value)
        lines.append(" " * (len(_INDENT) + column[value]) + f"^ {names} {value}")
    return "\n".join(lines)


def _draw_cell(c: Cursors, position: int, owned: bool) -> str:
    if position < c.cache_protected_len:
        return "t"
    if not owned:
        return "."
    if position < c.kv_committed_len:
        return "#"
    return "+" if position < c.kv_allocated_len else "-"


def _cursor_marks(names_by_position: Mapping[int, str]) -> str:
    return "".join(names_by_position.get(i, " ") for i in range(max(names_by_position, default=-1) + 1))


def legend(*drawings: str) -> str:
    """Explain the signs in some drawings."""
    used = {
        sign
        for drawing in drawings
        for line in drawing.split("\n")[1:4]
        for sign in line[len(_INDENT) :]
    }
    return "; ".join(f"`{sign}` {meaning}" for sign, meaning in LEGEND.items() if sign in used)


def span(start: int, end: int) -> str:
    """Return positions as a range, such as "[0, 4)"."""
    return f"[{start}, {end})"


def swa_of(live: bool | None) -> str:
    """Name a node's SWA KV.

    live: None without a window.
    """
    if live is None:
        return ""
    return "live" if live else "tombstone"


def node(
    place: tuple[int, int],
    text: str,
    live: bool | None = None,
    full: Sequence[str] = (),
    swa: Sequence[str] = (),
) -> str:
    """Draw a node of the tree as a line.

    place: its positions.
    full, swa: holders whose locks pin its KV in that pool.
    """
    parts = [f"{span(*place)} {text}", "SWA live" if live else swa_of(live)]
    for pool, names in ("full", full), ("SWA", swa):
        if names:
            parts.append(f"{pool} pinned by {' '.join(names)}")
    return ", ".join(filter(None, parts))


def tree(nodes: Iterable[tuple[int, Sequence[str]]]) -> str:
    """Draw a tree, each node below its parent.

    nodes: depth of each (0: below the root), and its lines.
    """
    lines = ["radix tree"]
    for depth, (first, *more) in nodes:
        lines.append(f"{'   ' * depth}└─ {first}")
        lines += ["   " * (depth + 1) + line for line in more]
    return "\n".join(lines) if lines[1:] else f"{lines[0]}: empty"


def lock(tree: Tree, lock: Lock, text: str = "") -> str:
    """Draw a lock and the KV that it pins.

    text: its prefix in words, where it is to be shown.
    """
    if not lock.key:
        return "has nothing locked"
    locked = f"locks {span(0, len(lock.key))}{text and f' {text}'}"
    if tree.window is None:
        return locked
    if not (pins := swa_pinned(lock)):
        return f"{locked}: full KV alone"
    return f"{locked}: pins {count_text(pins, 'SWA token')}, a window needs {swa_needed(tree, lock)}"


def swa_pinned(lock: Lock) -> int:
    """Return the SWA KV that a lock pins (tokens)."""
    return len(lock.key) - lock.swa_from


def swa_needed(tree: Tree, lock: Lock) -> int:
    """Return the least SWA KV that whole pages can pin for one window (tokens); 0 without a window."""
    return 0 if tree.window is None else min(ceil_page(tree.window, tree.page_size), len(lock.key))
