"""Changes of a command in the reference's radix tree, as short sentences."""

from __future__ import annotations

from reference.state import State, state_lens
from reference.prefix_cache import path_text
from reference.radix_tree import Key, Placed, Tree, nodes, path_of
from stateful_tests.lockstep import text_drawings


def tree_changes(was: State, now: State) -> tuple[str, ...]:
    """Return nodes that were added, removed, split, or changed between live and tombstone, then locks;
    empty without a tree."""
    if was.tree is None or now.tree is None or was.tree is now.tree:
        return ()
    before = {p.path: p for p in nodes(was.tree)}
    after = {p.path: p for p in nodes(now.tree)}
    lines: list[str] = []
    for path in sorted({*before, *after}, key=lambda p: (len(p), p)):
        a = before.get(path)
        b = after.get(path)
        if a is not None and b is not None:
            lines += _node_changes(a, b)
        elif b is not None:
            inside = _was_inside_node(was.tree, path)
            lines.append(f"split at {path_text(path)}" if inside else f"+ {_draw_node(b, now.tree)}")
        elif a is not None:
            lines.append(f"- {_draw_node(a, was.tree)}")
    return (*lines, *_lock_changes(was.tree, now.tree))


def _node_changes(was: Placed, now: Placed) -> list[str]:
    """Describe the parts that a node has got or lost."""
    where = text_drawings.node((now.start, now.end), path_text(now.path))
    lines = []
    if was.node.live != now.node.live:
        lines.append(f"{where} {'has SWA KV again' if now.node.live else 'is a tombstone'}")
    if bool(was.node.state_used) != bool(now.node.state_used):
        has = "has a state" if now.node.state_used else "has no state any more"
        lines.append(f"{where} {has}")
    return lines


def _lock_changes(was: Tree, now: Tree) -> list[str]:
    """Describe locks that were removed, then new ones and those on another path."""
    old, new = ({k.holder: k for k in tree.locks if k.key} for tree in (was, now))
    unlocked = sorted(old.keys() - new.keys())
    taken = [k for name, k in new.items() if name not in old or k.key != old[name].key]
    return [
        *(f"{name} unlocks {text_drawings.span(0, len(old[name].key))}" for name in unlocked),
        *(f"{k.holder} {text_drawings.lock(now, k)}" for k in sorted(taken)),
    ]


def state_changes(was: State, now: State) -> tuple[str, ...]:
    """Describe slots of recurrent state that holders have got or given back; empty on a model without."""
    had = state_lens(was).keys()
    has = state_lens(now).keys()
    taken = [f"{name} takes a state slot" for name in sorted(has - had)]
    return (*taken, *(f"{name} has no state slot any more" for name in sorted(had - has)))


def _was_inside_node(tree: Tree, path: Key) -> bool:
    """Return whether the path was in the tree and ended in the middle of a node."""
    placed_nodes = path_of(tree, path)
    return bool(placed_nodes) and placed_nodes[-1].path[: len(path)] == path


def _draw_node(placed: Placed, tree: Tree) -> str:
    dead = tree.window is not None and not placed.node.live
    state = ", with a state" if placed.node.state_used else ""
    node_text = text_drawings.node(
        (placed.start, placed.end), path_text(placed.path), False if dead else None
    )
    return f"{node_text}{state}"
