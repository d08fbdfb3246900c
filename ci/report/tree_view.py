"""The radix tree at one step of a trace, by the reference alone: `kvspec tree`.

What stands in each node, who pins it, and when it would be evicted. Positions and lengths are tokens.
"""

from rich.console import Console

from reference.geometry import Geometry
from ci import Data
from ci.compare.snapshot import lockers
from ci.report.text_output import say, table
from reference import model
from reference.commands import Outcome
from reference.state import State, free
from reference.prefix_cache import path_text
from reference.radix_tree import Key, Lock, Placed, Tree, nodes, sizes
from reference.tree_eviction import evict
from stateful_tests.lockstep import text_drawings
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.traces.notation import format_command, format_outcome

MAX_NODES = 200  # drawn; --json has them all
MAX_DEPTH = 12  # of a drawing, for the width of a page


class NoTree(Exception):
    """There is nothing to draw: one line says why."""


def collect(file: str, trace: Trace, step: int | None) -> Data:
    """Return everything about the tree after step `step` (the last one: None). Raises NoTree."""
    if not getattr(trace.geometry, "tree", False):  # an engine of its own scheduling has none
        raise NoTree("there is no radix tree in its geometry")
    last = len(trace.commands) - 1
    if last < 0:
        raise NoTree("the trace has no steps")
    shown_step = last if step is None else step
    if not 0 <= shown_step <= last:
        raise NoTree(f"there is no step {shown_step}; the trace has steps 0 to {last}")
    state = model.initial(trace.sizes(Geometry), trace.mode)
    outcome: Outcome
    for command in trace.row_commands[: shown_step + 1]:
        state, outcome = model.step(state, command)
    assert state.tree is not None
    return {
        "format": "kvspec-tree",
        "version": 1,
        "file": file,
        "step": shown_step,
        "command": format_command(trace.commands[shown_step]),
        "outcome": format_outcome(outcome),
        "page_size": trace.sizes(Geometry).page_size,
        "window": trace.sizes(Geometry).window,
        "nodes": _nodes(state.tree),
        "pools": _pool_shares(state, state.tree),
        "locks": [_lock_data(state, state.tree, lock) for lock in state.tree.locks],
    }


def _nodes(tree: Tree) -> list[Data]:
    """Return the nodes, parents before children, siblings in the order of their texts."""
    placed_nodes = sorted(nodes(tree), key=lambda p: p.path)
    index = {p.path: at for at, p in enumerate(placed_nodes)}
    full = _eviction_ranks(tree, full=1)
    swa = _eviction_ranks(tree, swa=1) if tree.window is not None else {}
    return [
        {
            "start": p.start,
            "end": p.end,
            "text": path_text(p.node.key),
            "parent": index.get(p.path[: p.start]),
            "children": [path_text(child.key) for child in p.node.children],
            "pages": len(p.node.key) // tree.page_size,
            "swa": _swa_state(tree, p),
            "full_locked_by": lockers(tree, p)[0],
            "swa_locked_by": lockers(tree, p)[1],
            "full_rank": full.get(p.path),
            "swa_rank": swa.get(p.path),
        }
        for p in placed_nodes
    ]


def _swa_state(tree: Tree, placed: Placed) -> str | None:
    """Return whether a node has its SWA KV; None without a window."""
    if tree.window is None:
        return None
    return "live" if placed.node.live else "tombstone"


def _eviction_ranks(tree: Tree, *, full: int = 0, swa: int = 0) -> dict[Key, int]:
    """Return path -> rank of the node's full (or SWA) KV, 1 first, if one eviction followed the other."""
    ranks: dict[Key, int] = {}
    rank = 0
    while True:
        before = {p.path for p in nodes(tree) if full or p.node.live}
        tree, freed = evict(tree, full, swa)
        if not (freed.full if full else freed.swa):
            return ranks
        rank += 1
        after = {p.path for p in nodes(tree) if full or p.node.live}
        ranks.update((path, rank) for path in before - after)


def _pool_shares(state: State, tree: Tree) -> list[Data]:
    """Return the tree's share of each pool, and the evictable part of it."""
    geometry = state.config.geometry
    counted = sizes(tree)
    left = free(state)
    sums = {"full": (*counted[:2], left.full), "swa": (*counted[2:], left.swa)}
    return [
        {
            "pool": pool,
            "evictable": sums[pool][0],
            "protected": sums[pool][1],
            "free": sums[pool][2] * geometry.page_size,
            "total": geometry.pages(pool) * geometry.page_size,
        }
        for pool in geometry.pools
    ]


def _lock_data(state: State, tree: Tree, lock: Lock) -> Data:
    if state.session(lock.holder) is not None:
        kind = "session"
    elif state.request(lock.holder) is not None:
        kind = "request"
    else:
        kind = "lock owner"
    return {
        "holder": lock.holder,
        "kind": kind,
        "length": len(lock.key),
        "text": path_text(lock.key),
        "pins": text_drawings.swa_pinned(lock),
        "window_needs": text_drawings.swa_needed(tree, lock),
        "says": text_drawings.lock(tree, lock, path_text(lock.key)),
    }


def text(out: Console, data: Data) -> None:
    """Print the drawing, and below it the sums and the locks."""
    head = f"{data['file']} after step {data['step']}: {data['command']} ({data['outcome']})"
    say(out, head, "bold", whole=True)
    depths: dict[int | None, int] = {None: -1}
    tree_lines = []
    for index, node in enumerate(data["nodes"][:MAX_NODES]):
        if depths.get(node["parent"], MAX_DEPTH) < MAX_DEPTH - 1:
            depths[index] = depths[node["parent"]] + 1
            tree_lines.append((depths[index], _node_lines(node)))
    for line in text_drawings.tree(tree_lines).split("\n"):
        say(out, line, whole=True)
    if hidden := len(data["nodes"]) - len(tree_lines):
        say(out, f"{hidden} more nodes are left out here; --json has them all")
    out.print()
    sums = ("evictable", "protected", "free", "total")
    pools = table("tokens", *sums, right=sums)
    for pool in data["pools"]:
        pools.add_row(pool["pool"], *(str(pool[name]) for name in sums))
    out.print(pools)
    if data["locks"]:
        out.print()
    for lock in data["locks"]:
        say(out, f"{lock['kind']} {lock['holder']} {lock['says']}")


def _node_lines(node: Data) -> list[str]:
    """Describe a node, the holders that pin it, and when its unpinned KV is evicted."""
    live = {"live": True, "tombstone": False}.get(node["swa"])
    full = node["full_locked_by"]
    swa = node["swa_locked_by"]
    lines = [text_drawings.node((node["start"], node["end"]), node["text"], live, full, swa)]
    if not full:
        below = f"inner node: {', '.join(node['children'])} below it" if node["children"] else ""
        lines.append(f"full: {_eviction_text(node['full_rank'], below)}")
    if live and not swa:
        then = "leaves a tombstone" if full or node["children"] else "takes the node with it"
        lines.append(f"SWA: {_eviction_text(node['swa_rank'], then)}")
    return lines


def _eviction_text(rank: int, more: str) -> str:
    goes = f"LRU {rank}" + (" (goes first)" if rank == 1 else "")
    return f"{goes}, {more}" if more else goes
