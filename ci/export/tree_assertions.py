"""Assertions of an exported test about a release's radix tree, for each kind of place in it."""

from collections.abc import Sequence

from ci.export.recorded_run import Asserts, RecordedRun, in_tree, tokens_of_release, namespace_argument
from impl.adapter import View
from impl.sglang.scheduler.call_log import ids_text, variable
from reference.clauses.facts import NodeFacts
from reference.clauses.tree_shape import wrong_token
from reference.clauses.tree_locks import match_of, usable_length
from reference.commands import Finish, Insert
from reference.cursors import ceil_page
from reference.failures import AtCounter, AtNode, AtTreePage
from reference.prefix_cache import key_of
from reference.radix_tree import Key
from reference.token_ids import tokens_of


def assert_counter(run: RecordedRun, place: AtCounter) -> Asserts:
    """Return the assertion of a counter of tokens."""
    size = f"{place.name}_size" if run.window is None else f"{place.pool}_{place.name}_size"
    return Asserts([f"self.assertEqual(server.cache.{size}(), {place.must})"])


def assert_node(run: RecordedRun, place: AtNode) -> Asserts | None:
    """Return the assertion of a node that has other lock counts, ends inside a page, lacks slots, or is
    longer than a window. None where the tree has no such node, or nothing of this is wrong with it."""
    tree = run.after.facts.tree
    nodes = tree.nodes if tree is not None else ()
    node = next((node for node in nodes if node.path == place.path), None)
    if node is None:
        return None
    lookup = f"node_at(server.cache, {in_tree(run.geometry, place.path)})"
    if place.must is not None:
        return _lock_count(run, node, place.pool, place.must, lookup)
    if len(place.path) % run.page_size:
        return _torn_end(run, place.path)
    if len(node.slots) != len(node.path) - node.start:
        full = run.of_node("node", "full", "value")
        return Asserts([f"node = {lookup}", f"self.assertEqual(len({full}), len(node.key))"])
    if place.pool == "swa" and run.window is not None:
        return _swa_slots(run, node, run.window, lookup)
    return None


def _lock_count(run: RecordedRun, node: NodeFacts, pool: str, must: int, lookup: str) -> Asserts:
    """Return the assertion of a node's lock count.

    lookup: the expression for the node.
    """
    if run.unified:
        lines = [f"node = {lookup}"]
        count = run.of_node("node", pool, "lock_ref")
    else:
        lines = []
        count = run.of_node(lookup, pool, "lock_ref")
    if pool == "full":
        return Asserts([*lines, f"self.assertEqual({count}, {must})"])
    if node.swa_locks < must:
        return Asserts([*lines, f"self.assertGreaterEqual({count}, {must})"])
    return Asserts([*lines, f"self.assertLessEqual({count}, {node.full_locks})"])


def _torn_end(run: RecordedRun, path: Key) -> Asserts:
    """Return the assertion that no node ends inside a page, as one with this path does."""
    key = ids_text(tokens_of_release(run.geometry, tokens_of(path)))
    if run.geometry.bigram:
        key = f"keys(server.cache, {key})"
    return Asserts(
        ["paths = [path for _, path in nodes(server.cache)]", f"self.assertNotIn({key}, paths)"]
    )


def _swa_slots(run: RecordedRun, node: NodeFacts, window: int, lookup: str) -> Asserts:
    """Return the assertion of a node's SWA slots: none is the padding's, they are those of the mapping, or
    they are no more than a window.

    lookup: the expression for the node.
    """
    full = run.of_node("node", "full", "value")
    swa = run.of_node("node", "swa", "value")
    lines = [f"node = {lookup}"]
    if 0 in node.swa_slots:
        slots = swa if run.unified else f"swa_slots(server, {full})"
        return Asserts([*lines, f"self.assertTrue({slots}.all())"])
    if list(node.swa_slots) != [run.after.view.full_to_swa[slot] for slot in node.slots]:
        lines.append(f"mapped = swa_slots(server, {full}).tolist()")
        return Asserts([*lines, f"self.assertEqual({swa}.tolist(), mapped)"])
    most_slots = ceil_page(window, run.page_size)
    return Asserts([*lines, f"self.assertLessEqual(len({full}), {most_slots})"])


def assert_tree_page(run: RecordedRun, place: AtTreePage) -> Asserts:
    """Return the assertion of a page of a text that the tree must have, must not have, or has in other
    slots."""
    path, start = place
    if (match := match_of(run.step)) is not None:
        name, key, _ = match
        if run.kind.keeps_slots:
            length = f"len({variable(name)}.prefix_indices)"
        else:
            length = f"{variable(name)}.prefix_len"
        return Asserts([f"self.assertEqual({length}, {usable_length(run.step, key)})"])
    facts = run.after.facts
    page = facts.tree.pages.get(path) if facts.tree is not None else None
    slots = f"tree_slots(server.cache, {in_tree(run.geometry, path)})"
    if start:
        slots += f"[{start}:]"
    if page is None:
        return Asserts([f"self.assertNotIn(None, {slots})"])
    if (path, start) in [(torn.path, torn.start) for torn in facts.torn]:
        return Asserts(run.in_order(slots))
    if (path, start) in [(torn.path, torn.start) for torn in facts.torn_swa]:
        return Asserts(run.in_order(f"swa_slots(server, {slots}).tolist()"))
    if not page.has_swa and run.window is not None:
        return Asserts([f"slots = {slots}", "self.assertTrue(swa_slots(server, slots).all())"])
    return _content_assertions(run) or Asserts([f"self.assertIn(None, {slots})"])


def _content_assertions(run: RecordedRun) -> Asserts | None:
    """Return the assertion of a token whose slot in the tree is neither the one that the tree had, nor its
    inserter's; None where each slot has its token, or only the SWA slot has another one."""
    wrong = wrong_token(run.step)
    if wrong is None:
        return None
    node, pool, index = wrong
    position = node.start + index
    slots_before = slots_of(run.before.view, node.path, run.page_size)
    slots_after = slots_of(run.after.view, node.path, run.page_size)
    if pool == "swa" or slots_before[position] == slots_after[position]:
        return None
    tokens = tokens_of(node.path)
    slots = f"tree_slots(server.cache, tokens{namespace_argument(run.geometry, tokens)})"
    notes = [f"tokens = {ids_text(tokens_of_release(run.geometry, tokens))}", f"before = {slots}"]
    allowed = "before"
    before_call = ""
    for name, text in _inserted_texts(run).items():
        if tuple(text[: len(tokens)]) == tokens:
            row = run.row(variable(name) + run.holder, end=str(len(node.path)))
            notes.insert(0, f"row = {row}.tolist()")
            allowed = "before, row"
            # the calls that insert without an end, in exported tests; an end reads the row first
            before_call = "" if isinstance(run.last, Finish) else r"checkpoint\(|hand_in\("
            break
    lines = [f"for slot, *written in zip({slots}, {allowed}):", "    self.assertIn(slot, written)"]
    return Asserts(lines, notes, before_call)


def _inserted_texts(run: RecordedRun) -> dict[str, Sequence[int]]:
    """Return the texts that the last command may have put into the tree, by owner."""
    last = run.last
    texts = {name: request.text for name, request in run.before.view.requests.items()}
    if isinstance(last, Insert):
        return {last.holder: key_of(last.prompt)}
    if isinstance(last, Finish):
        return {last.request: texts[last.request]}
    return {lane.request: texts[lane.request] for lane in getattr(last, "lanes", ())}


def slots_of(view: View, path: Key, page_size: int) -> list[int | None]:
    """Return the slots that the tree has for the tokens of a path; None for a token without."""
    slots: dict[int, int] = {}
    if view.tree is not None:
        for node in view.tree.nodes:
            for position, slot in enumerate(node.slots, len(node.path) - len(node.slots)):
                end = position - position % page_size + page_size  # keys match by pages
                if tuple(node.path[:end]) == path[:end]:
                    slots[position] = slot
    return [slots.get(position) for position in range(len(path))]
