"""A step of a run as text: rows, radix tree and pools before it and after it, what is as it was left out."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from reference.geometry import Geometry
from ci.compare.snapshot import lockers
from reference import model
from reference.commands import Command, Done, Outcome
from reference.state import Session, State, free, holders
from reference.prefix_cache import path_text
from reference.radix_tree import Placed, Tree, nodes
from stateful_tests.lockstep import text_drawings
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.traces.notation import format_command, format_outcome

_WIDTH = 108  # of two columns and the gap between them
_GAP = 6
Blocks = dict[str, str]  # what is drawn -> how


class DrawnStep(NamedTuple):
    """A command, and the states around it."""

    command: Command
    before: State
    after: State
    outcome: Outcome

    def draw(self) -> str:
        """Draw the changes of the command, before and after, side by side where that fits."""
        then = blocks(self.before)
        now = blocks(self.after)
        names = list(then | now)
        changed = [name for name in names if then.get(name) != now.get(name)]
        heading = f"{format_command(self.command)}: {format_outcome(self.outcome)}"
        if not changed:
            return "\n\n".join([f"{heading}, and nothing changes", *then.values()])
        left = "\n\n".join(then.get(name, _missing_text(name)) for name in changed)
        right = "\n\n".join(now.get(name, _missing_text(name)) for name in changed)
        return f"{heading}\n\n{_side_by_side(left, right)}"

    @property
    def changes(self) -> bool:
        return isinstance(self.outcome, Done) and blocks(self.before) != blocks(self.after)

    @property
    def frees(self) -> bool:
        then = free(self.before)
        now = free(self.after)
        return now.full > then.full or now.swa > then.swa


def steps(trace: Trace) -> Iterator[DrawnStep]:
    """Return the steps of a trace on the reference."""
    state = model.initial(trace.sizes(Geometry), trace.mode)
    for command in trace.row_commands:
        before = state
        state, outcome = model.step(state, command)
        yield DrawnStep(command, before, state, outcome)


def _missing_text(name: str) -> str:
    return f"{name}: none"


def _side_by_side(left: str, right: str) -> str:
    """Return two drawings with their titles; one below the other where they are too wide."""
    wide = max(map(len, left.splitlines()))
    if wide + _GAP + max(map(len, right.splitlines())) > _WIDTH:
        return f"before\n\n{left}\n\nafter\n\n{right}"
    columns = (
        ["before", "", *_align_blocks(left, right)],
        ["after", "", *_align_blocks(right, left)],
    )
    pairs = zip_longest(*columns, fillvalue="")
    return "\n".join(f"{a:<{wide + _GAP}}{b}".rstrip() for a, b in pairs)


def _align_blocks(text: str, other: str) -> list[str]:
    """Return the lines, with each block as high as its neighbour."""
    lines: list[str] = []
    for mine, other_block in zip_longest(text.split("\n\n"), other.split("\n\n"), fillvalue=""):
        block = mine.splitlines()
        lines += block + [""] * (max(len(block), len(other_block.splitlines())) + 1 - len(block))
    return lines[:-1]


def blocks(state: State) -> Blocks:
    """Return each row, the radix tree, sessions and requests without a row, and what is free."""
    geometry = state.config.geometry
    drawn_blocks = Blocks()
    for holder in holders(state):
        title = f"row of {holder.name}"
        if holder.request and holder.request.session:
            title += f", lent to {holder.request.name}"
        row = text_drawings.row(holder.cursors, geometry.page_size, geometry.window)
        drawn_blocks[f"row of {holder.name}"] = f"{title}\n{row}"
    for session in state.sessions:
        drawn_blocks[f"session {session.name}"] = _session_text(session)
    for request in state.requests:
        tokens = f"input {request.origin}"
        if request.output:
            tokens += f" + output {request.output}"
        drawn_blocks[f"request {request.name}"] = (
            f"request {request.name}: {request.phase.value}, {tokens}"
        )
    if state.tree is not None:
        drawn_blocks["radix tree"] = tree(state.tree)
    left = free(state)
    pools = f"{left.full} full"
    if geometry.window is not None:
        pools += f", {left.swa} SWA"
    drawn_blocks["free pages"] = f"free pages: {pools}; rows: {left.rows}"
    return drawn_blocks


def _session_text(session: Session) -> str:
    turn = f"turn {session.turn}" if session.turn is not None else "no turn"
    return f"session {session.name}: {turn}" + (", closes after it" if session.closing else "")


def tree(radix_tree: Tree) -> str:
    """Draw the radix tree: a node a line, below its parent, with the holders that pin it."""
    placed_nodes = sorted(nodes(radix_tree), key=lambda placed: placed.path)
    return text_drawings.tree(
        (_node_depth(placed, placed_nodes), [_node_text(placed, radix_tree)])
        for placed in placed_nodes
    )


def _node_depth(placed: Placed, others: list[Placed]) -> int:
    """Return the number of nodes above a node."""
    return sum(
        len(other.path) < placed.end and placed.path[: other.end] == other.path for other in others
    )


def _node_text(placed: Placed, tree: Tree) -> str:
    full, swa = map(sorted, lockers(tree, placed))
    live = None if tree.window is None else placed.node.live
    return text_drawings.node((placed.start, placed.end), path_text(placed.node.key), live, full, swa)
