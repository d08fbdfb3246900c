"""The radix tree: how much can be evicted, what goes first, and where nodes end (TREE)."""

from __future__ import annotations

from collections.abc import Sequence

from reference.clauses.registry import clause
from reference.clauses.facts import TreeFacts, pool_label
from reference.clauses.expected_frees import pages_freed
from reference.clauses.step import Step
from reference.clauses.tree_shape import WITH_TREE, gave_up_pages, gave_up_states, shrank, tree_of
from reference.clauses.tree_locks import locks_anything
from reference.commands import Evict, Freed
from reference.failures import AtCounter, AtNode, Failure, failure
from reference.prefix_cache import pages_of, path_text
from reference.radix_tree import Key, Tree, nodes, state_paths

# the counters of a tree
SIZES = ("full evictable", "full protected", "SWA evictable", "SWA protected")
COUNTERS = (
    ("full", "evictable"),
    ("full", "protected"),
    ("swa", "evictable"),
    ("swa", "protected"),
)


@clause(
    "TREE-9",
    "counters are sums",
    "The counters of evictable and protected tokens equal what a walk over the nodes gives.",
    why="Admission and memory checks ask the counters, never the tree.",
    rule="radix_tree.sizes",
    source="kvspec",
    concerns="cursors and locks",
    scope=f"{WITH_TREE} Systems that show their counters.",
    needs=("tree",),
    trigger=locks_anything,
)
def _counters_are_sums(step: Step) -> Failure | None:
    tree = tree_of(step)
    if tree is None or tree.sizes is None:
        return None
    sums = sizes_by_walk(tree)
    if sums == list(tree.sizes):
        return None
    return failure(
        _sizes_text(sums),
        _sizes_text(tree.sizes),
        *(
            AtCounter(*counter, must)
            for counter, must, has in zip(COUNTERS, sums, tree.sizes)
            if must != has
        ),
    )


def sizes_by_walk(tree: TreeFacts) -> list[int]:
    """Return the tokens in SIZES, counted by a walk over the nodes."""
    sizes = dict.fromkeys(SIZES, 0)
    for node in tree.nodes:
        sizes["full protected" if node.full_locks else "full evictable"] += len(node.slots)
        sizes["SWA protected" if node.swa_locks else "SWA evictable"] += len(node.swa_slots)
    return [*sizes.values()]


def _sizes_text(amounts: Sequence[int]) -> str:
    return ", ".join(f"{name} {amount}" for name, amount in zip(SIZES, amounts))


@clause(
    "TREE-10",
    "eviction frees the amount requested",
    "Evict frees at least the requested tokens of each pool, or all that no lock pins, and "
    "reports what it freed; so of states.",
    why=(
        "The caller allocates next: too high a figure makes it fail, too low a figure makes it "
        "give up."
    ),
    rule="tree_eviction.evict",
    source="kvspec",
    concerns="outcomes, choices and order",
    scope=f"{WITH_TREE} Evict. That a batch gets the room that there is: OUT-1.",
    of=(Evict,),
    needs=("tree",),
    trigger=lambda s: isinstance(s.command, Evict) and s.done and (shrank(s) or gave_up_states(s)),
)
def _frees_requested_amount(step: Step) -> Failure | None:
    """Return the failure of an eviction that frees too little of a pool, or reports another amount than it
    freed."""
    command = step.command
    if not isinstance(command, Evict) or not step.done or step.after.tree is None:
        return None
    assert step.before.tree is not None
    size = step.config.geometry.page_size
    requested = {"full": command.full, "swa": command.swa}
    outcome_freed = getattr(step.outcome, "freed", None)
    for pool in step.after.pools:
        could = sizes_by_walk(step.before.tree)[0 if pool == "full" else 2]
        freed = (
            sum(len(p) for h, p in pages_freed(step)[pool].items() if h.startswith("tree ")) * size
        )
        due = min(requested[pool], could)
        label = pool_label(pool)
        if freed < due:
            expected = f"{due} {label} tokens freed, of {could} that are not locked"
            head = (
                f"frees {freed} {label} tokens and must free {due}, of {could} that are not locked"
            )
            return failure(expected, f"{freed}", head=head)
        if outcome_freed is not None and getattr(outcome_freed, pool) != freed:
            expected = f"{freed} {label} tokens reported, as were freed"
            reported = getattr(outcome_freed, pool)
            head = f"frees {freed} {label} tokens and reports {reported}"
            return failure(expected, f"{reported}", head=head)
    return _states_as_requested(step, command, outcome_freed)


def _states_as_requested(step: Step, command: Evict, reported: Freed | None) -> Failure | None:
    before = step.before.states
    after = step.after.states
    if before is None or after is None:
        return None
    assert step.before.tree is not None
    could = sum(node.state is not None and not node.state_locks for node in step.before.tree.nodes)
    freed = len(before.nodes.keys() - after.nodes.keys())
    due = min(command.states, could)
    if freed < due:
        expected = f"{due} states freed, of {could} that are not locked"
        head = f"frees {freed} states and must free {due}, of {could} that are not locked"
        return failure(expected, f"{freed}", head=head)
    if reported is not None and reported.states != freed:
        head = f"frees {freed} states and reports {reported.states}"
        return failure(f"{freed} states reported, as were freed", f"{reported.states}", head=head)
    return None


@clause(
    "TREE-11",
    "least recently used first",
    "Eviction takes the least recently used KV, and no more nodes than needed. For the full pool "
    "these are leaves that no lock passes through, with their SWA KV; for the SWA pool it is the "
    "SWA KV of any node that no lock needs, and a leaf goes whole; so for states. A match or an insert uses "
    "full KV along its whole path, SWA KV only in its last window, the state only at its end. Of equally "
    "old nodes the one nearer to the root goes first. A node without children goes too if no match can end"
    " with it.",
    why="The next request most likely needs what the last ones used.",
    rule="radix_tree._mark_used, tree_eviction._oldest",
    source="#26615",
    concerns="outcomes, choices and order",
    scope=f"{WITH_TREE} Not of systems that pick by rules of their own. The reference remembers what was used"
    " when: it says which nodes must go.",
    needs=("tree",),
    trigger=lambda s: shrank(s) or gave_up_states(s),
)
def _evicts_in_lru_order(step: Step) -> Failure | None:
    if step.tree_policy_is_free or step.after.tree is None:
        return None
    assert step.was.tree is not None and step.now.tree is not None
    if (
        not gave_up_pages(step)
        and not gave_up_states(step)
        and not _must_shrink(step.was.tree, step.now.tree)
    ):
        return None
    reference_nodes = {(p.path, p.node.live) for p in nodes(step.now.tree)}
    system_nodes = {(n.path, n.live or "swa" not in step.after.pools) for n in step.after.tree.nodes}
    return _first_different_node(reference_nodes, system_nodes) or _states_differ(
        step.now.tree, step.after.tree
    )


def _states_differ(now: Tree, states: TreeFacts) -> Failure | None:
    system_states = {node.path for node in states.nodes if node.state is not None}
    for path in sorted(state_paths(now) ^ system_states):
        if path not in system_states:
            must = "has a state"
            has = "it has none"
        else:
            must = "has no state"
            has = "it has one"
        return failure(f"the node that ends {path_text(path)} {must}", has, AtNode(path, "state"))
    return None


def _must_shrink(was: Tree, now: Tree) -> bool:
    if was is now:
        return False
    has_shrunk = any(not had <= pages_of(now)[pool] for pool, had in pages_of(was).items())
    return has_shrunk or not state_paths(was) <= state_paths(now)


def _first_different_node(expected: set[tuple[Key, bool]], observed: set[tuple[Key, bool]]) -> Failure | None:
    """Return the first node that differs: the expected one and the observed one."""
    for path, live in sorted(expected ^ observed):
        name = path_text(path)
        kind = "live" if live else "a tombstone"
        if (path, live) in expected:
            others = [is_live for p, is_live in observed if p == path]
            other = "not there"
            if others:
                other = "live" if others[0] else "a tombstone"
            return failure(f"the node that ends {name} is {kind}", f"it is {other}", AtNode(path))
        if not any(p == path for p, _ in expected):
            return failure(f"no node ends {name}", f"one does, {kind}", AtNode(path))
    return None


@clause(
    "TREE-13",
    "nodes end where they must",
    "A node ends where a matched or inserted key left it or ended, where an insert's SWA KV "
    "begins, and one window of whole pages before the end of a fresh leaf; nowhere else.",
    why="Locks and evictions take nodes whole.",
    rule="radix_tree._with_node_at, radix_tree._fresh_leaf",
    source="#26919",
    concerns="outcomes, choices and order",
    scope=f"{WITH_TREE} Not where a tree splits by its own rules. The reference says where nodes end,"
    " also where server and reference have evicted to different lengths.",
    needs=("tree",),
    trigger=lambda s: s.grew,
)
def _node_boundaries(step: Step) -> Failure | None:
    if step.tree_policy_is_free or step.after.tree is None or _window_eviction_differs(step):
        return None
    assert step.now.tree is not None
    reference_ends = {p.path for p in nodes(step.now.tree)}
    system_ends = {n.path for n in step.after.tree.nodes}
    for path in sorted(reference_ends ^ system_ends):
        expected = f"a node ends {path_text(path)}", "none does"
        does = "must end a node at" if path in reference_ends else "must end no node at"
        head = f"{does} {path_text(path)}"
        return failure(*(expected if path in reference_ends else expected[::-1]), AtNode(path), head=head)
    return None


def _window_eviction_differs(step: Step) -> bool:
    """Return whether the system's swa_evicted_seqlen of a request differs from the reference's: SWA-1,
    OUT-3 or REF-1 report that."""
    own = [
        (r.name, r.cursors.swa_evicted_seqlen) for r in step.now.requests if r.cursors is not None
    ]
    return any(step.frontier(name) != evicted for name, evicted in own)
