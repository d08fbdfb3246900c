"""Pictures for documents: a row with its pages and cursors as text, lives as Mermaid state diagrams."""

from collections.abc import Iterable, Mapping

from reference.commands import DescribedEnum
from reference.cursors import Cursors, window_start
from reference.state import full_pages, swa_pages
from stateful_tests.explore.lifecycle import NOWHERE, Edge

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
    """A row of req_to_token: its pages in both pools, the window at C, and where the cursors point."""
    pages = range(-(-c.kv_allocated_len // page_size))
    column = {p: p + p // page_size + 1 for p in range(len(pages) * page_size + 1)}
    ruler = "".join(f" {page * page_size:<{page_size}}" for page in pages)
    lines = [_INDENT + ruler.rstrip()]
    kept = {"full KV": full_pages(c, page_size)}
    if window is not None:
        kept["SWA KV"] = swa_pages(c, page_size)
    for label, owned in kept.items():
        cells = "".join(
            "|" + "".join(_cell(c, at * page_size + i, at in owned) for i in range(page_size)) for at in pages
        )
        lines.append(f"{label:<{len(_INDENT)}}{cells}|")
    if window is not None:
        seen = range(window_start(c.kv_committed_len, window), c.kv_committed_len)
        lines.append("window".ljust(len(_INDENT)) + _marks({column[p]: "~" for p in seen}))
    named = {"R": c.cache_protected_len, "E": c.swa_evicted_seqlen, "C": c.kv_committed_len}
    named |= {"A": c.kv_allocated_len} | ({"target": target} if target is not None else {})
    for value in sorted({*named.values()}):
        names = ", ".join(name for name, at in named.items() if at == value)
        lines.append(" " * (len(_INDENT) + column[value]) + f"^ {names} {value}")
    return "\n".join(lines)


def _cell(c: Cursors, position: int, owned: bool) -> str:
    if position < c.cache_protected_len:
        return "t"
    if not owned:
        return "."
    if position < c.kv_committed_len:
        return "#"
    return "+" if position < c.kv_allocated_len else "-"


def _marks(at: Mapping[int, str]) -> str:
    return "".join(at.get(i, " ") for i in range(max(at, default=-1) + 1))


def legend(*drawings: str) -> str:
    """What the signs in some drawings mean."""
    used = {sign for drawing in drawings for line in drawing.split("\n")[1:4] for sign in line[len(_INDENT):]}
    return "; ".join(f"`{sign}` {meaning}" for sign, meaning in LEGEND.items() if sign in used)


def states(edges: Iterable[Edge], names: type[DescribedEnum]) -> str:
    """A Mermaid state diagram, in the order of the names; commands between two states share an arrow."""
    order = [NOWHERE, *names]
    arrows: dict[tuple[str, str], list[str]] = {}
    for edge in sorted(edges, key=lambda e: (order.index(e.before), order.index(e.after), e.command)):
        arrows.setdefault((edge.before, edge.after), []).append(edge.command)
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{name.replace("_", " ")}: {name.says}" as {name}' for name in names]
    lines += [f"    {a} --> {b}: {', '.join(commands)}" for (a, b), commands in arrows.items()]
    return "\n".join(lines)


__all__ = ["LEGEND", "legend", "row", "states"]
