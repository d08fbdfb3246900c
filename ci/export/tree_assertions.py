"""What an exported test asks of a release's radix tree, for each clause about it."""

from collections.abc import Callable, Sequence

from ci.export.pool_assertions import ownership
from ci.export.recorded_run import MAPPING, Asserts, RecordedRun
from impl.adapter import NodeView, TreeView, View
from impl.sglang.scheduler.call_log import ids_text, quoted, variable
from reference.clauses.tree import wrong_token
from reference.clauses.tree_locks import match_of, usable_length
from reference.commands import Finish, Insert
from reference.cursors import ceil_page
from reference.failures import AtCounter, AtLock, AtNode, AtPosition, AtTreePage
from reference.prefix_cache import key_of, lock_holders

_EACH = "for node, path in nodes(server.cache):"


def asserted(run: RecordedRun) -> Asserts | None:
    """What shows the clause that is violated, if anything does.

    Not here: TREE-11 to TREE-13, as a release's tree splits and evicts by rules of its own
    (tree_policy_is_free).
    """
    asserts = _TREE.get(run.clause)
    return asserts(run) if asserts is not None else None


def _shape(run: RecordedRun) -> Asserts:
    """A node that ends inside a page, or has other than a slot for each token."""
    size = run.page_size
    if any(len(node.path) % size for node in _tree(run.after.view).nodes):
        return Asserts([_EACH, f"    self.assertEqual(len(path) % {size}, 0, path)"])
    value = run.of_node("node", "full", "value")
    return Asserts([_EACH, f"    self.assertEqual(len({value}), len(node.key), path)"])


def _half_dead(run: RecordedRun) -> Asserts:
    """A live node without an SWA slot for each token, or with others than are mapped."""
    if not run.unified:
        mapped = f"self.assertTrue({MAPPING}[node.value].all(), path)"
        return Asserts([_EACH, f"    if {run.live('node')}:", f"        {mapped}"])
    line = "self.assertEqual(swa.tolist(), swa_slots(server, full).tolist(), path)"
    if any(0 in node.swa_slots for node in _tree(run.after.view).nodes):
        line = "self.assertTrue(swa.all(), path)"
    return Asserts([
        _EACH,
        "    full, swa = (node.component_data[of].value for of in (ComponentType.FULL, ComponentType.SWA))",
        "    if swa is not None:", f"        {line}",
    ])  # fmt: skip


def _contents(run: RecordedRun) -> Asserts | None:
    """A token whose slot in the tree is neither the one that the tree had, nor its inserter's."""
    found = wrong_token(run.step)
    if found is None:
        return None
    node, pool, at = found[0], found[1], found[0].start + found[2]
    had, has = (_slots(moment.view, node.path, run.page_size) for moment in (run.before, run.after))
    if pool == "SWA" or had[at] == has[at]:
        return ownership(run)  # somebody has written over it
    path, texts = f"tokens = {ids_text(node.path)}", _inserters(run)
    tokens = "tree_slots(server.cache, tokens)"
    if not texts:
        return Asserts([f"self.assertEqual({tokens}, before)"], [path, f"before = {tokens}"])
    name = next(name for name, text in texts.items() if tuple(text[: len(node.path)]) == node.path)
    notes = [f"row = {run.row(variable(name) + run.holder, end=str(len(node.path)))}.tolist()"]
    after = "" if isinstance(run.last, Finish) else r"checkpoint\(|hand_in\("
    if had[at] is None:
        new = f"[{start}:]" if (start := sum(slot is not None for slot in had)) else ""
        return Asserts([path, f"self.assertEqual({tokens}{new}, row{new})"], notes, after)
    lines = [f"for slot, *written in zip({tokens}, before, row):", "    self.assertIn(slot, written)"]
    return Asserts(lines, [*notes, path, f"before = {tokens}"], after)


def _inserters(run: RecordedRun) -> dict[str, Sequence[int]]:
    """Whose text the last command may have put into the tree, and the text."""
    last, texts = run.last, {name: r.text for name, r in run.before.view.requests.items()}
    if isinstance(last, Insert):
        return {last.holder: key_of(last.prompt)}
    if isinstance(last, Finish):
        return {last.request: texts[last.request]}
    return {lane.request: texts[lane.request] for lane in getattr(last, "lanes", ())}


def _prefixes(run: RecordedRun) -> Asserts | None:
    """Who has other slots at the start of its row than the tree has for the same tokens."""
    place = run.at[0]
    if not isinstance(place, AtPosition):
        return None
    name = place.owner
    if name in run.after.facts.holders:
        lines, held = run.bound(name, run.after)
        if held == "slot":
            tokens = f"history(server.sessions.get({quoted(name)}))"
        else:
            request = held.removesuffix(run.holder)
            tokens = f"[*{request}.origin_input_ids, *{request}.output_ids]"
        row = run.row(held, end=run.cursor(held, "cache_protected_len"))
        return Asserts([
            *lines, f"row = {row}.tolist()",
            f"tokens = {tokens}[: len(row)]", "self.assertEqual(row, tree_slots(server.cache, tokens))",
        ])  # fmt: skip
    locked = f"{variable(name)}.prefix_indices"
    if not run.kind.keeps_slots:
        locked = f"server.cache.path_device_indices({variable(name)}.last_node)"
    slots = f"tree_slots(server.cache, {ids_text(lock_holders(run.after.state)[name])})"
    return Asserts([f"self.assertEqual({locked}.tolist(), {slots})"])


def _slots(view: View, tokens: Sequence[int], page: int) -> list[int | None]:
    """The slots that the tree has for these tokens."""
    slots: dict[int, int] = {}
    for node in _tree(view).nodes:
        for at, slot in enumerate(node.slots, len(node.path) - len(node.slots)):
            end = at - at % page + page  # keys match by pages
            if list(node.path[:end]) == list(tokens[:end]):
                slots[at] = slot
    return [slots.get(at) for at in range(len(tokens))]


def _tree(view: View) -> TreeView:
    assert view.tree is not None
    return view.tree


def _held(node: NodeView, pool: str) -> tuple[int, int]:
    """Tokens that a node has in a pool, and the locks on them."""
    if pool == "full":
        return len(node.slots), node.full_locks
    return len(node.swa_slots), node.swa_locks


def _counters(run: RecordedRun) -> Asserts | None:
    """A node whose counters are not those of the locks that there are."""
    place = run.at[0]
    if not isinstance(place, AtNode):
        return None
    found, lines = _node_at(run, place.path)
    counter = run.of_node(found, place.pool, "lock_ref")
    if place.pool == "full":
        return Asserts([*lines, f"self.assertEqual({counter}, {place.must})"])
    [node] = (node for node in _tree(run.after.view).nodes if tuple(node.path) == place.path)
    few = node.swa_locks < (place.must or 0)
    bound = f"GreaterEqual({counter}, {place.must})" if few else f"LessEqual({counter}, {node.full_locks})"
    return Asserts([*lines, f"self.assert{bound}"])


def _one_window(run: RecordedRun) -> Asserts | None:
    """A live leaf that was not there before, and is longer than a window."""
    place = run.at[0]
    if not isinstance(place, AtNode) or run.window is None:
        return None
    found, lines = _node_at(run, place.path)
    most = ceil_page(run.window, run.page_size)
    return Asserts([*lines, f"self.assertLessEqual(len({run.of_node(found, 'full', 'value')}), {most})"])


def _node_at(run: RecordedRun, path: Sequence[int]) -> tuple[str, list[str]]:
    """A node as an expression, and the lines that it needs."""
    found = f"node_at(server.cache, {ids_text(path)})"
    return ("node", [f"node = {found}"]) if run.unified else (found, [])


def _found(run: RecordedRun) -> Asserts | None:
    """How much a match hands out."""
    found = match_of(run.step)
    if found is None:
        return None
    name, key, _ = found
    held = variable(name)
    length = f"len({held}.prefix_indices)" if run.kind.keeps_slots else f"{held}.prefix_len"
    return Asserts([f"self.assertEqual({length}, {usable_length(run.step, key)})"])


def _kept(run: RecordedRun) -> Asserts | None:
    """A lock of whose prefix a page is gone, or SWA KV that the lock needs."""
    lock, page = run.at
    if not isinstance(lock, AtLock) or not isinstance(page, AtTreePage):
        return None
    key, since, *_ = run.step.locks[lock.owner]
    locked, tree = f"locked = {ids_text(key)}", run.after.facts.tree
    if tree is not None and page.path not in tree.pages:
        return Asserts([locked, "self.assertNotIn(None, tree_slots(server.cache, locked))"])
    needed = f"len(path) > {since} and " if since else ""
    return Asserts([
        locked, _EACH, f"    if {needed}path == locked[: len(path)]:",
        f"        {run.is_live('node', 'path')}",
    ])  # fmt: skip


def _sums(run: RecordedRun) -> Asserts | None:
    """A counter of tokens that is not the sum over the nodes."""
    place = run.at[0]
    if not isinstance(place, AtCounter):
        return None
    pool, term = place.pool, place.name
    size = f"{term}_size" if run.window is None else f"{pool}_{term}_size"
    value, locks = (run.of_node("node", pool, what) for what in ("value", "lock_ref"))
    these = f"{locks} {'>' if term == 'protected' else '=='} 0"
    which = [f"if {run.live('node')}", f"and {these}"] if pool == "swa" else [f"if {these}"]
    counted = [f"len({value})", "for node, _ in nodes(server.cache)", *which]
    assertion = f"self.assertEqual(server.cache.{size}(), counted)"
    return Asserts(["counted = sum(", *(f"    {line}" for line in counted), ")", assertion])


def _eviction(run: RecordedRun) -> Asserts | None:
    """What an eviction frees, against what it was to free and what it reports."""
    before, after = run.before.view, run.after.view
    reported, two = getattr(run.step.outcome, "freed", None), run.window is not None
    pools = [("full", before.free_full, after.free_full, "num_tokens_evicted")]
    pools += [("swa", before.free_swa, after.free_swa, "swa_num_tokens_evicted")] * two
    for pool, had, has, field in pools:
        freed = (len(has) - len(had)) * run.page_size
        could = sum(tokens for tokens, locks in (_held(n, pool) for n in _tree(before).nodes) if not locks)
        want = min(getattr(run.last, pool), could)
        size = f"server.allocator.{f'{pool}_' if two else ''}available_size()"
        if freed < want:
            return Asserts([f"self.assertGreaterEqual({size} - before, {want})"], [f"before = {size}"])
        if reported is not None and getattr(reported, pool) != freed:
            return Asserts([f"self.assertEqual(evicted.{field}, {size} - before)"], [f"before = {size}"])
    return None


_TREE: dict[str, Callable[[RecordedRun], Asserts | None]] = {
    "TREE-1": _shape, "TREE-2": _half_dead, "TREE-3": _contents, "TREE-4": _prefixes, "TREE-5": _found,
    "TREE-6": _counters, "TREE-7": _one_window, "TREE-8": _kept, "TREE-9": _sums, "TREE-10": _eviction,
}  # fmt: skip
