"""Lives as Mermaid state diagrams."""

from collections.abc import Iterable

from reference.commands import DescribedEnum
from stateful_tests.explore.lifecycle import NOWHERE, Edge


def states(edges: Iterable[Edge], names: type[DescribedEnum]) -> str:
    """Return a Mermaid state diagram, in the order of the names; commands between two states share an
    arrow."""
    order = [NOWHERE, *names]
    arrows: dict[tuple[str, str], list[str]] = {}
    for edge in sorted(
        edges, key=lambda e: (order.index(e.before), order.index(e.after), e.command)
    ):
        arrows.setdefault((edge.before, edge.after), []).append(edge.command)
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{name.replace("_", " ")}: {name.says}" as {name}' for name in names]
    lines += [f"    {a} --> {b}: {', '.join(commands)}" for (a, b), commands in arrows.items()]
    return "\n".join(lines)
