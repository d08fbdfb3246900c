"""Assertions of an exported test about a release's radix tree, for each kind of place in it."""

from collections.abc import Sequence

from ci.export.recorded_run import Asserts, RecordedRun, in_tree, spelled, within
from impl.adapter import View
from impl.sglang.scheduler.call_log import ids_text, variable
from reference.clauses.tree_shape import wrong_token
from reference.clauses.tree_locks import match_of, usable_length
from reference.commands import Finish, Insert
from reference.cursors import ceil_page
from reference.failures import AtCounter, AtNode, AtTreePage
from reference.prefix_cache import key_of
from reference.token_ids import tokens_of


def counter(run: RecordedRun, place: AtCounter) -> Asserts | None:
    """Assert a counter of tokens."""
    size = f"{place.name}_size" if run.window is None else f"{place.pool}_{place.name}_size"
    return Asserts([f"self.assertEqual(server.cache.{size}(), {place.must})"])


def node(run: RecordedRun, place: AtNode) -> Asserts | None:
    """Assert a node that ends inside a page, lacks slots, is longer than a window, or has other lock
    counts."""
    path, pool, must = place
    tree = run.after.facts.tree
    found = next((n for n in tree.nodes if n.path == path), None) if tree is not None else None
    if found is None:
        return None
    at = f"node_at(server.cache, {in_tree(run.geometry, path)})"
    lines, name = ([f"node = {at}"], "node") if run.unified or must is None else ([], at)
    if must is not None:
        code = run.of_node(name, pool, "lock_ref")
        if pool == "full":
            return Asserts([*lines, f"self.assertEqual({code}, {must})"])
        few = found.swa_locks < must
        bound = f"GreaterEqual({code}, {must})" if few else f"LessEqual({code}, {found.full_locks})"
        return Asserts([*lines, f"self.assert{bound}"])
    if len(path) % run.page_size:
        lines = ["paths = [path for _, path in nodes(server.cache)]"]
        key = ids_text(spelled(run.geometry, tokens_of(path)))
        key = f"keys(server.cache, {key})" if run.geometry.bigram else key
        return Asserts([*lines, f"self.assertNotIn({key}, paths)"])
    full, swa = (run.of_node("node", of, "value") for of in ("full", "swa"))
    if len(found.slots) != len(path) - found.start:
        return Asserts([*lines, f"self.assertEqual(len({full}), len(node.key))"])
    if pool != "swa" or run.window is None:
        return None
    if 0 in found.swa_slots and not run.unified:
        return Asserts([*lines, f"self.assertTrue(swa_slots(server, {full}).all())"])
    if 0 in found.swa_slots:
        return Asserts([*lines, f"self.assertTrue({swa}.all())"])
    if list(found.swa_slots) != [run.after.view.full_to_swa[slot] for slot in found.slots]:
        lines.append(f"mapped = swa_slots(server, {full}).tolist()")
        return Asserts([*lines, f"self.assertEqual({swa}.tolist(), mapped)"])
    most = ceil_page(run.window, run.page_size)
    return Asserts([*lines, f"self.assertLessEqual(len({full}), {most})"])


def tree_page(run: RecordedRun, place: AtTreePage) -> Asserts | None:
    """Assert a page of a text that the tree must have, must not have, or has in other slots."""
    path, start = place
    if (match := match_of(run.step)) is not None:
        name, key, _ = match
        length = f"len({variable(name)}.prefix_indices)"
        length = length if run.kind.keeps_slots else f"{variable(name)}.prefix_len"
        return Asserts([f"self.assertEqual({length}, {usable_length(run.step, key)})"])
    tree = run.after.facts.tree
    page = tree.pages.get(path) if tree is not None else None
    slots = f"tree_slots(server.cache, {in_tree(run.geometry, path)})" + (
        f"[{start}:]" if start else ""
    )
    if page is None:
        return Asserts([f"self.assertNotIn(None, {slots})"])
    facts = run.after.facts
    if any((torn.path, torn.start) == (path, start) for torn in facts.torn):
        return Asserts(run.in_order(slots))
    if any((torn.path, torn.start) == (path, start) for torn in facts.torn_swa):
        return Asserts(run.in_order(f"swa_slots(server, {slots}).tolist()"))
    if not page[1] and run.window is not None:
        return Asserts([f"slots = {slots}", "self.assertTrue(swa_slots(server, slots).all())"])
    return _content_assertions(run) or Asserts([f"self.assertIn(None, {slots})"])


def _content_assertions(run: RecordedRun) -> Asserts | None:
    """Assert a token whose slot in the tree is neither the one that the tree had, nor its inserter's."""
    found = wrong_token(run.step)
    if found is None:
        return None
    node = found[0]
    pool = found[1]
    at = found[0].start + found[2]
    had, has = (
        slots_of(moment.view, node.path, run.page_size) for moment in (run.before, run.after)
    )
    if pool == "SWA" or had[at] == has[at]:
        return None
    tokens = tokens_of(node.path)
    slots = f"tree_slots(server.cache, tokens{within(run.geometry, tokens)})"
    notes = [f"tokens = {ids_text(spelled(run.geometry, tokens))}", f"before = {slots}"]
    right = "before"
    after = ""
    for name, text in _inserted_texts(run).items():
        if tuple(text[: len(tokens)]) == tokens:
            row = run.row(variable(name) + run.holder, end=str(len(node.path)))
            notes.insert(0, f"row = {row}.tolist()")
            right = "before, row"
            after = "" if isinstance(run.last, Finish) else r"checkpoint\(|hand_in\("
            break
    lines = [f"for slot, *written in zip({slots}, {right}):", "    self.assertIn(slot, written)"]
    return Asserts(lines, notes, after)


def _inserted_texts(run: RecordedRun) -> dict[str, Sequence[int]]:
    """Return the texts that the last command may have put into the tree, by owner."""
    last = run.last
    texts = {name: r.text for name, r in run.before.view.requests.items()}
    if isinstance(last, Insert):
        return {last.holder: key_of(last.prompt)}
    if isinstance(last, Finish):
        return {last.request: texts[last.request]}
    return {lane.request: texts[lane.request] for lane in getattr(last, "lanes", ())}


def slots_of(view: View, tokens: Sequence[int], page: int) -> list[int | None]:
    """Return the slots that the tree has for these tokens."""
    slots: dict[int, int] = {}
    if view.tree is not None:
        for found in view.tree.nodes:
            for at, slot in enumerate(found.slots, len(found.path) - len(found.slots)):
                end = at - at % page + page  # keys match by pages
                if list(found.path[:end]) == list(tokens[:end]):
                    slots[at] = slot
    return [slots.get(at) for at in range(len(tokens))]
