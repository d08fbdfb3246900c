"""What a command changed in the reference's radix tree, as short sentences."""

from __future__ import annotations

from reference.cursors import ceil_page
from reference.state import State
from reference.prefix_cache import path_text
from reference.radix_tree import Key, Lock, Placed, Tree, nodes, path_of


def tree_changes(was: State, now: State) -> tuple[str, ...]:
    """Nodes that came, went, were split, died or revived, then locks; empty without a tree."""
    if was.tree is None or now.tree is None or was.tree is now.tree:
        return ()
    before = {p.path: p for p in nodes(was.tree)}
    after = {p.path: p for p in nodes(now.tree)}
    lines = []
    for path in sorted({*before, *after}, key=lambda p: (len(p), p)):
        a, b = before.get(path), after.get(path)
        if a is None and b is not None:
            inside = _inside(was.tree, path)
            lines.append(f"split at {path_text(path)}" if inside else f"+ {_node(b, now.tree)}")
        elif b is None and a is not None:
            lines.append(f"- {_node(a, was.tree)}")
        elif a is not None and b is not None and a.node.live != b.node.live:
            lines.append(f"{_range(b)} {'has SWA KV again' if b.node.live else 'is a tombstone'}")
    old, new = ({k.holder: k for k in tree.locks if k.key} for tree in (was.tree, now.tree))
    lines += [f"{name} unlocks [0, {len(old[name].key)})" for name in sorted(old.keys() - new.keys())]
    taken = [k for name, k in new.items() if name not in old or k.key != old[name].key]
    lines += [_lock(now.tree, k) for k in sorted(taken)]
    return tuple(lines)


def _inside(tree: Tree, path: Key) -> bool:
    """The path was in the tree, ending in the middle of a node."""
    found = path_of(tree, path)
    return bool(found) and found[-1].path[: len(path)] == path


def _range(placed: Placed) -> str:
    return f"[{placed.start}, {placed.end}) {path_text(placed.path)}"


def _node(placed: Placed, tree: Tree) -> str:
    tombstone = "" if placed.node.live or tree.window is None else ", tombstone"
    return f"{_range(placed)}{tombstone}"


def _lock(tree: Tree, lock: Lock) -> str:
    if tree.window is None:
        return f"{lock.holder} locks [0, {len(lock.key)})"
    need = min(ceil_page(tree.window, tree.page_size), len(lock.key))
    pinned = len(lock.key) - lock.swa_from
    pins = f"pins {pinned} SWA token{'s' * (pinned != 1)}"
    return f"{lock.holder} locks [0, {len(lock.key)}): {pins}, a window needs {need}"
