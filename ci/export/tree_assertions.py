"""What an exported test asks of a release's radix tree, for each clause about it."""

from collections.abc import Callable, Sequence

from ci.export.pool_assertions import ownership
from ci.export.recorded_run import MAPPING, Asserts, RecordedRun, row
from impl.adapter import NodeView, TreeView, View
from impl.sglang.scheduler.call_log import ids_text, quoted, variable
from reference.clauses.tree_locks import match_of, usable_length
from reference.commands import Evict, Finish, Insert
from reference.cursors import ceil_page
from reference.prefix_cache import key_of, lock_holders
from reference.tree import Lock

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
    facts = run.after.facts.tree
    assert facts is not None
    node, pool, at = next(
        (node, pool, node.start + i)
        for node in facts.nodes
        for pool, got in (("full", node.full_read), ("SWA", node.swa_read))
        for i, stamp in enumerate(got)
        if stamp != node.path[node.start + i]
    )
    had, has = (_slots(moment.view, node.path, run.page_size) for moment in (run.before, run.after))
    if pool == "SWA" or had[at] == has[at]:
        return ownership(run)  # somebody has written over it
    path, texts = f"tokens = {ids_text(node.path)}", _inserters(run)
    tokens = "tree_slots(server.cache, tokens)"
    if not texts:
        return Asserts([f"self.assertEqual({tokens}, before)"], [path, f"before = {tokens}"])
    name = next(name for name, text in texts.items() if tuple(text[: len(node.path)]) == node.path)
    notes = [f"row = {row(variable(name) + run.holder, end=str(len(node.path)))}.tolist()"]
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
    view, page = run.after.view, run.page_size
    after = "self.assertEqual(row, tree_slots(server.cache, tokens))"
    for name, request in view.requests.items():
        if request.row is not None and request.cursors is not None:
            length = request.cursors.cache_protected_len
            if list(view.rows[request.row][:length]) != _slots(view, request.text[:length], page):
                var = variable(name)
                held = var + run.holder
                return Asserts([
                    f"row = {row(held, end=f'{held}.cache_protected_len')}.tolist()",
                    f"tokens = [*{var}.origin_input_ids, *{var}.output_ids][: len(row)]", after,
                ])  # fmt: skip
    for name, session in view.sessions.items():
        if session.row is not None and session.cursors is not None:
            length = session.cursors.cache_protected_len
            if list(view.rows[session.row][:length]) != _slots(view, session.history[:length], page):
                return Asserts([
                    f"slot = {run.slot(name)}",
                    f"row = {row('slot', end='slot.cache_protected_len')}.tolist()",
                    f"tokens = history(server.sessions.get({quoted(name)}))[: len(row)]", after,
                ])  # fmt: skip
    for name, key in lock_holders(run.after.state).items():
        if list(_tree(view).lock_holders[name].slots) != _slots(view, key, page):
            locked = f"{variable(name)}.prefix_indices"
            if not run.kind.keeps_slots:
                locked = f"server.cache.path_device_indices({variable(name)}.last_node)"
            slots = f"tree_slots(server.cache, {ids_text(key)})"
            return Asserts([f"self.assertEqual({locked}.tolist(), {slots})"])
    return None


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


def _locks(run: RecordedRun) -> list[Lock]:
    assert run.after.state.tree is not None
    return [lock for lock in run.after.state.tree.locks if lock.key]


def _counters(run: RecordedRun) -> Asserts | None:
    """The first node whose counters are not those of the locks that there are."""
    for node in _tree(run.after.view).nodes:
        end = len(node.path)
        mine = [lock for lock in _locks(run) if tuple(lock.key[:end]) == tuple(node.path)]
        found, lines = _node_at(run, node)
        full, swa = (run.of_node(found, pool, "lock_ref") for pool in ("full", "swa"))
        deep = sum(lock.swa_from < end for lock in mine)
        if node.full_locks != len(mine):
            return Asserts([*lines, f"self.assertEqual({full}, {len(mine)})"])
        if run.window is not None and node.swa_locks < deep:
            return Asserts([*lines, f"self.assertGreaterEqual({swa}, {deep})"])
        if run.window is not None and node.swa_locks > len(mine):
            return Asserts([*lines, f"self.assertLessEqual({swa}, {len(mine)})"])
    return None


def _one_window(run: RecordedRun) -> Asserts:
    """The longest live leaf that was not there before."""
    assert run.window is not None
    known = {tuple(node.path) for node in _tree(run.before.view).nodes}
    leaf = max(
        (n for n in _tree(run.after.view).nodes if n.swa_slots and tuple(n.path) not in known),
        key=lambda node: len(node.slots),
    )
    found, lines = _node_at(run, leaf)
    value, most = run.of_node(found, "full", "value"), ceil_page(run.window, run.page_size)
    return Asserts([*lines, f"self.assertLessEqual(len({value}), {most})"])


def _node_at(run: RecordedRun, node: NodeView) -> tuple[str, list[str]]:
    """A node as an expression, and the lines that it needs."""
    found = f"node_at(server.cache, {ids_text(node.path)})"
    return ("node", [f"node = {found}"]) if run.unified else (found, [])


def _found(run: RecordedRun) -> Asserts:
    """How much a match hands out."""
    step = run.after.step
    assert step is not None
    found = match_of(step)
    assert found is not None
    name, key, _ = found
    held = variable(name)
    length = f"len({held}.prefix_indices)" if run.kind.keeps_slots else f"{held}.prefix_len"
    return Asserts([f"self.assertEqual({length}, {usable_length(step, key)})"])


def _kept(run: RecordedRun) -> Asserts | None:
    """The first lock of whose prefix a page is gone, or SWA KV that the lock needs."""
    tree, size = run.after.facts.tree, run.page_size
    assert tree is not None
    for lock in _locks(run):
        pages = {end: tree.pages.get(lock.key[:end]) for end in range(size, len(lock.key) + 1, size)}
        if None in pages.values():
            locked = f"locked = {ids_text(lock.key)}"
            return Asserts([locked, "self.assertNotIn(None, tree_slots(server.cache, locked))"])
        dead = [end for end, page in pages.items() if page is not None and not page[1]]
        if run.window is not None and dead and dead[-1] > lock.swa_from:
            needed = f"len(path) > {lock.swa_from} and " if lock.swa_from else ""
            return Asserts([
                f"locked = {ids_text(lock.key)}", _EACH, f"    if {needed}path == locked[: len(path)]:",
                f"        {run.is_live('node', 'path')}",
            ])  # fmt: skip
    return None


def _sums(run: RecordedRun) -> Asserts | None:
    """The first counter of tokens that is not the sum over the nodes."""
    tree = _tree(run.after.view)
    assert tree.sizes is not None
    for field, got in tree.sizes._asdict().items():
        pool, term = field.split("_")
        held = [_held(node, pool) for node in tree.nodes]
        if got != sum(tokens for tokens, locks in held if (locks > 0) is (term == "protected")):
            size = f"{term}_size" if run.window is None else f"{pool}_{term}_size"
            value, locks = (run.of_node("node", pool, what) for what in ("value", "lock_ref"))
            these = f"{locks} {'>' if term == 'protected' else '=='} 0"
            which = [f"if {run.live('node')}", f"and {these}"] if pool == "swa" else [f"if {these}"]
            counted = [f"len({value})", "for node, _ in nodes(server.cache)", *which]
            asked = f"self.assertEqual(server.cache.{size}(), counted)"
            return Asserts(["counted = sum(", *(f"    {line}" for line in counted), ")", asked])
    return None


def _eviction(run: RecordedRun) -> Asserts | None:
    """What an eviction frees, against what it was to free and what it reports."""
    before, after, step = run.before.view, run.after.view, run.after.step
    assert isinstance(run.last, Evict) and step is not None
    said, two = getattr(step.outcome, "freed", None), run.window is not None
    pools = [("full", before.free_full, after.free_full, "num_tokens_evicted")]
    pools += [("swa", before.free_swa, after.free_swa, "swa_num_tokens_evicted")] * two
    for pool, had, has, field in pools:
        freed = (len(has) - len(had)) * run.page_size
        could = sum(tokens for tokens, locks in (_held(n, pool) for n in _tree(before).nodes) if not locks)
        want = min(getattr(run.last, pool), could)
        size = f"server.allocator.{f'{pool}_' if two else ''}available_size()"
        if freed < want:
            return Asserts([f"self.assertGreaterEqual({size} - before, {want})"], [f"before = {size}"])
        if said is not None and getattr(said, pool) != freed:
            return Asserts([f"self.assertEqual(evicted.{field}, {size} - before)"], [f"before = {size}"])
    return None


_TREE: dict[str, Callable[[RecordedRun], Asserts | None]] = {
    "TREE-1": _shape, "TREE-2": _half_dead, "TREE-3": _contents, "TREE-4": _prefixes, "TREE-5": _found,
    "TREE-6": _counters, "TREE-7": _one_window, "TREE-8": _kept, "TREE-9": _sums, "TREE-10": _eviction,
}  # fmt: skip
