"""The radix tree: its shape, and what its nodes hold (TREE)."""

from __future__ import annotations

from reference.clauses.registry import clause
from reference.clauses.attention_reads import stamp_text
from reference.clauses.facts import NodeFacts, TreeFacts, pool_label
from reference.clauses.expected_frees import pages_freed
from reference.clauses.step import Step
from reference.failures import AtEntry, AtNode, AtTreePage, Failure, failure
from reference.prefix_cache import path_text
from reference.radix_tree import Key
from reference.token_ids import token_of

WITH_TREE = "Servers with a radix tree."


def tree_of(step: Step) -> TreeFacts | None:
    return step.after.tree


def node_text(node: NodeFacts) -> str:
    """Return a node in words, such as "[4, 8) of a8"."""
    return f"[{node.start}, {len(node.path)}) of {path_text(node.path)}"


def shrank(step: Step) -> bool:
    """Return whether the tree has given pages back."""
    return any(
        holder.startswith("tree ") for pages in pages_freed(step).values() for holder in pages
    )


@clause(
    "TREE-1",
    "shape",
    "Every node is a run of whole pages, at least one; it hangs below a node that ends where it starts, and"
    " differs from its siblings in its first page.",
    why="A prefix must be found in one way only; two nodes must not share a page.",
    rule="radix_tree.path_of, radix_tree._split",
    source="kvspec",
    scope=WITH_TREE,
    needs=("tree",),
    trigger=lambda s: s.grew,
)
def _tree_shape(step: Step) -> Failure | None:
    """Return the failure of the first node that is not whole pages, has no parent, or shares its first page
    with another."""
    tree = tree_of(step)
    size = step.config.geometry.page_size
    if tree is None:
        return None
    ends = {n.path for n in tree.nodes}
    first_pages: set[Key] = set()
    for node in tree.nodes:
        if not node.slots or node.start < 0 or node.start % size or len(node.path) % size:
            expected = f"nodes of whole pages, {size} tokens each"
            head = f"leaves a node {node_text(node)}, and nodes are whole pages of {size} tokens"
            return failure(expected, f"a node {node_text(node)}", AtNode(node.path), head=head)
        if node.start and node.path[: node.start] not in ends:
            expected = f"a node that ends at {node.start}, above {node_text(node)}"
            above = AtNode(node.path[: node.start])
            head = f"leaves no node that ends at {node.start}, where {node_text(node)} begins"
            return failure(expected, "there is none", AtNode(node.path), above, head=head)
        page = node.path[: node.start + size]
        if page in first_pages:
            twins = [AtNode(n.path) for n in tree.nodes if n.path[: n.start + size] == page]
            expected = f"one node that goes on with {path_text(page)}"
            return failure(
                expected, "there are two", *twins, head=f"must leave {expected}, and leaves two"
            )
        first_pages.add(page)
    return None


@clause(
    "TREE-2",
    "live or tombstone",
    "A node has an SWA slot for each of its tokens, those that the mapping names, or is a tombstone and has"
    " none.",
    why="A window that is matched over a half-dead node reads padding.",
    decision=(
        "An insert whose whole key was evicted leaves a tombstone. Taken for live, its slots are "
        "the padding's, and SWA sizes become negative at eviction (#22470)."
    ),
    assumption="If every window eviction stops a page short of the insert boundary, no key loses all SWA KV.",
    rule="radix_tree._fresh_leaf",
    source="#22470",
    scope=f"{WITH_TREE} Models with SWA.",
    needs=("tree", "window"),
    trigger=lambda s: (
        (t := s.after.tree) is not None
        and s.grew
        and any(not n.live for n in t.nodes)
        and "swa" in s.after.pools
    ),
)
def _live_or_dead(step: Step) -> Failure | None:
    """Return the failure of the first live node whose SWA slots are incomplete, or not those that the mapping
    names."""
    tree = tree_of(step)
    if tree is None or "swa" not in step.after.pools:
        return None
    for node in tree.nodes:
        if not node.live or (all(node.swa_slots) and list(node.swa_slots) == list(node.mapped)):
            continue
        place = AtNode(node.path, "swa")
        have = sum(1 for slot in node.swa_slots if slot)
        if have < len(node.slots) or len(node.swa_slots) != len(node.slots):
            expected = f"{len(node.slots)} SWA slots at {node_text(node)}, or none"
            head = f"must leave {node_text(node)} with SWA KV of all its tokens, or as a tombstone"
            return failure(expected, f"{have}", place, head=head)
        index = next(i for i, (slot, to) in enumerate(zip(node.swa_slots, node.mapped)) if slot != to)
        expected = f"SWA slots of {node_text(node)} as mapped: {list(node.mapped)}"
        slot = node.swa_slots[index]
        head = f"leaves {node_text(node)} with SWA slot {slot} for position {node.start + index}"
        return failure(
            expected, f"{list(node.swa_slots)}", place, AtEntry(node.slots[index]), head=head
        )
    return None


@clause(
    "TREE-3",
    "nodes hold what their path says",
    "The full KV of a node is that of the tokens that its path spells, and so is the SWA KV of a live one.",
    why="Whoever matches the prefix reads it.",
    rule="prefix_cache.page_name",
    source="kvspec",
    scope=WITH_TREE,
    needs=("tree",),
    trigger=lambda s: s.grew,
)
def _nodes_hold_their_path(step: Step) -> Failure | None:
    """Return the failure of the first slot of a node that holds another token than its path has."""
    wrong = wrong_token(step)
    if wrong is None:
        return None
    node, pool, index = wrong
    position = node.start + index
    stamp = (node.full_read if pool == "full" else node.swa_read)[index]
    size = step.config.geometry.page_size
    start = position // size * size
    slot = (node.slots if pool == "full" else node.swa_slots)[index]
    held = stamp_text(stamp) if stamp else "no committed token"
    head = f"leaves {node_text(node)} with {pool_label(pool)} slot {slot} for position {position}"
    head += f", which holds {held} and must hold {stamp_text(token_of(node.path[position]))}"
    return failure(
        f"{pool_label(pool)} KV of {path_text(node.path)} at position {position}",
        f"its slot holds that of {path_text((stamp,)) if stamp else 'no committed token'}",
        AtTreePage(node.path[: start + size], start),
        AtNode(node.path, pool),
        head=head,
    )


def wrong_token(step: Step) -> tuple[NodeFacts, str, int] | None:
    """Return (node, pool, index) of the first slot with another token than its path has; None where each
    slot has its path's."""
    tree = tree_of(step)
    if tree is None:
        return None
    for node in tree.nodes:
        tokens = [*map(token_of, node.path[node.start :])]
        for pool, stamps in (("full", node.full_read), ("swa", node.swa_read)):
            for index, (token, stamp) in enumerate(zip(tokens, stamps)):
                if token != stamp:
                    return node, pool, index
    return None


def gave_up_pages(step: Step) -> bool:
    """Return whether the system's tree has given up pages, or their SWA KV. Both views show the tree."""
    before = step.before.tree
    after = step.after.tree
    assert before is not None and after is not None
    return any(
        path not in after.pages or (page.has_swa and not after.pages[path].has_swa)
        for path, page in before.pages.items()
    )


def gave_up_states(step: Step) -> bool:
    """Return whether the system's tree has given up states. Their nodes may remain."""
    before = step.before.states
    after = step.after.states
    return (
        before is not None and after is not None and not before.nodes.keys() <= after.nodes.keys()
    )
