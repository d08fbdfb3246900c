"""Assertions of an exported test about pages, rows and slots: a function for each kind of place in them."""

from ci.export.recorded_run import Asserts, RecordedRun, in_tree, namespace_argument
from impl.sglang.scheduler.call_log import quote, variable
from reference.commands import Extend
from reference.failures import AtEntry, AtLock, AtPage, AtPosition, AtRow
from reference.prefix_cache import lock_holders
from reference.state import text_tokens
from stateful_tests.lockstep.run_moments import Moment

_TREE = "the tree"


def page_place(run: RecordedRun, place: AtPage) -> Asserts | None:
    """Return assertions about a page that is free and should not be, or has two owners, or none.

    None if the test cannot name the page.
    """
    pool, page = place
    facts = run.after.facts.pools[pool]
    free_list = f"free_pages({_allocator(run, pool)})"
    times_free = list(facts.free).count(page)
    if times_free > 1:
        return Asserts([f"free = {free_list}", "self.assertEqual(len(free), len(set(free)))"])
    every_page = f"{{*range(1, {facts.size + 1})}}"
    if not 1 <= page <= facts.size:
        return Asserts([f"self.assertEqual({{*{free_list}}} - {every_page}, set())"])
    owners = [_owner_text(owned.holder) for owned in facts.owned if owned.page == page]
    if owners and times_free:
        lines = [f"owned = pages_of(server, {_slots_expression(run, owners[0], pool)})"]
        return Asserts([*lines, f"self.assertEqual(owned.intersection({free_list}), set())"])
    if len(set(owners)) > 1:
        first, second, *_ = dict.fromkeys(owners)
        other = _slots_expression(run, second, pool)
        lines = [f"owned = pages_of(server, {_slots_expression(run, first, pool)})"]
        return Asserts([*lines, f"self.assertEqual(owned & pages_of(server, {other}), set())"])
    if len(owners) > 1:
        return _owned_twice_by_one(run, owners[0], pool)
    if not owners and not times_free:
        holders = dict.fromkeys(_owner_text(page.holder) for page in run.after.facts.pools["full"].owned)
        lines = [f"lost = {every_page} - {{*{free_list}}}"]
        for holder in holders:
            lines.append(f"lost -= pages_of(server, {_slots_expression(run, holder, pool)})")
        return Asserts([*lines, "self.assertEqual(lost, set())"])
    assertion = "assertNotIn" if times_free else "assertIn"
    return _page_of_earlier_owner(run, place, f"self.{assertion}(page, {free_list})")


def _owned_twice_by_one(run: RecordedRun, owner: str, pool: str) -> Asserts | None:
    """Return assertions about an owner that has a page twice. None where the tree has no slot twice: a page
    is in two nodes where one ends inside of it."""
    if owner == _TREE and not _twice_in_tree(run, pool):
        return None
    lines = [f"slots = {_slots_expression(run, owner, pool)}.tolist()"]
    return Asserts([*lines, "self.assertEqual(len(slots), len(set(slots)))"])


def _page_of_earlier_owner(run: RecordedRun, place: AtPage, assertion: str) -> Asserts | None:
    """Return an assertion about `page`, with notes that bind that name to it before the last command, by the
    row that had it. None if no row had it."""
    pool, page = place
    size = run.page_size
    for owned in run.before.facts.pools[pool].owned:
        if owned.page == page and _owner_text(owned.holder) != _TREE:
            notes, held = run.holder_expression(owned.holder, run.before)
            slot = run.slot_at(held, owned.at * size)
            if pool == "swa":
                slot = f"swa_slots(server, {slot})"
            page_of_slot = f"{slot}.item() // {size}" if size > 1 else f"{slot}.item()"
            return Asserts([assertion], [*notes, f"page = {page_of_slot}"])
    return None


def odd_page(run: RecordedRun) -> Asserts | None:
    """Return assertions about the first page that has not exactly one owner, or is not free exactly once."""
    for pool, facts in run.after.facts.pools.items():
        listed_pages = [*facts.free, *(owned.page for owned in facts.owned)]
        several = [page for page in listed_pages if listed_pages.count(page) > 1]
        lost = sorted({*range(1, facts.size + 1)} - {*listed_pages})
        for page in dict.fromkeys([*several, *lost]):
            assertion = page_place(run, AtPage(pool, page))
            if assertion is not None:
                return assertion
    return None


def _owner_text(holder: str) -> str:
    """Return the owner of a page: a request, a slot, or the tree for all of its nodes."""
    return _TREE if holder.startswith("tree ") else holder


def _allocator(run: RecordedRun, pool: str) -> str:
    return "server.allocator" if run.window is None else f"server.allocator.{pool}_attn_allocator"


def _slots_expression(run: RecordedRun, owner: str, pool: str) -> str:
    """Return the expression for the slots that an owner has in a pool."""
    if owner == _TREE:
        return "slots_in_tree(server.cache)" if pool == "full" else "swa_slots_in_tree(server)"
    function = "own_slots" if pool == "full" else "own_swa_slots"
    return f"{function}(server, {run.holder_cursors(owner, run.after)})"


def _twice_in_tree(run: RecordedRun, pool: str) -> bool:
    """Return whether a slot is in two nodes. A page may be in two: a node can end inside of it
    (TREE-1)."""
    tree = run.after.facts.tree
    if tree is None:
        return False
    slots_by_node = [node.slots if pool == "full" else node.swa_slots for node in tree.nodes]
    return sum(map(len, slots_by_node)) > len(set().union(*slots_by_node))


def row_place(run: RecordedRun, place: AtRow) -> Asserts | None:
    """Return assertions about a row that is held and free, or free twice."""
    facts = run.after.facts
    rows = "server.rows.free_slots"
    if list(facts.free_rows).count(place.row) > 1:
        return Asserts([f"self.assertEqual(len({rows}), len(set({rows})))"])
    held = [name for name, holder_facts in facts.holders.items() if holder_facts.row == place.row]
    if not held or place.row not in facts.free_rows:
        return None
    row = run.cursor(run.holder_cursors(held[0], run.after), "req_pool_idx")
    return Asserts([f"self.assertNotIn({row}, {rows})"])


def position_place(run: RecordedRun, place: AtPosition) -> Asserts | None:
    """Return assertions about a position with a wrong slot: out of order in its page, not the tree's, or
    unmapped."""
    owner, pool, position, _ = place
    facts = run.after.facts
    holder_facts = run.after.facts.holders.get(owner)
    if holder_facts is None:
        if owner not in lock_holders(run.after.state):
            return None
        name = variable(owner)
        key = in_tree(run.geometry, lock_holders(run.after.state)[owner])
        locked = f"{name}.prefix_indices"
        if not run.kind.keeps_slots:
            locked = f"server.cache.path_device_indices({name}.last_node)"
        return Asserts([f"self.assertEqual({locked}.tolist(), tree_slots(server.cache, {key}))"])
    lines, holder_name = run.holder_expression(owner, run.after)
    torn_of_pool = facts.torn if pool == "full" else facts.torn_swa
    torn = [page for page in torn_of_pool if page.holder == owner and not page.path]
    if any(page.start == position for page in torn):
        lines.append(f"row = {run.row(holder_name, str(position), str(position + len(torn[0].slots)))}")
        slots = "swa_slots(server, row)" if pool == "swa" else "row"
        return Asserts([*lines, *run.in_order(f"{slots}.tolist()")])
    if any(isinstance(place, AtLock) for place in run.at):  # the position is in the locked prefix
        tokens = f"history(server.sessions.get({quote(owner)}))"
        if holder_name != "slot":
            request = holder_name.removesuffix(run.holder)
            tokens = f"[*{request}.origin_input_ids, *{request}.output_ids]"
        lines.append(
            f"row = {run.row(holder_name, end=run.cursor(holder_name, 'cache_protected_len'))}.tolist()"
        )
        # A key of n bigrams has n + 1 tokens.
        length = "len(row) + 1" if run.geometry.bigram else "len(row)"
        lines.append(f"tokens = {tokens}[: {length}]")
        text = next(
            (
                text_tokens(holder_name.text)
                for holder_name in run.step.holders_now
                if holder_name.name == owner
            ),
            (),
        )
        slots = f"tree_slots(server.cache, tokens{namespace_argument(run.geometry, text)})"
        return Asserts([*lines, f"self.assertEqual(row, {slots})"])
    if pool == "swa" and position < len(holder_facts.swa_read) and holder_facts.swa_read[position] is None:
        lines.append(f"slot = {run.slot_at(holder_name, position)}")
        return Asserts([*lines, "self.assertNotEqual(swa_slots(server, slot), 0)"])
    return odd_page(run) or renamed_row(run)


def renamed_row(run: RecordedRun) -> Asserts | None:
    """Return assertions about a row that names other slots than those in which its tokens were computed.

    The row is noted before the last command; before the call of `checkpoint` in it, if it is an extend.
    """
    noted_before = r"checkpoint\(" if isinstance(run.last, Extend) else ""
    if run.after.step is None:
        return None
    for holder in run.after.step.holders_now:
        length = holder.cursors.kv_committed_len
        holder_facts = run.after.facts.holders.get(holder.name)
        if holder_facts is None or tuple(holder_facts.full_read[:length]) == text_tokens(holder.text, length):
            continue
        if not noted_before:  # the row before lacks what was allocated since
            was = run.before.facts.holders.get(holder.name)
            if was is None:
                continue
            length = min(length, was.cursors.kv_allocated_len)
        row_before = run.row(run.holder_cursors(holder.name, run.before), end=str(length))
        row_after = run.row(run.holder_cursors(holder.name, run.after), end=str(length))
        noted = row_after if noted_before else row_before
        asserts = [f"self.assertEqual({row_after}.tolist(), row)"]
        return Asserts(asserts, [f"row = {noted}.tolist()"], noted_before)
    return None


def entry_place(run: RecordedRun, place: AtEntry) -> Asserts | None:
    """Return assertions about the mapping entry of a slot that must be 0, or that equals another entry."""
    if any(slot == place.slot for slot, _ in run.after.facts.shared):
        return odd_page(run)
    assertion = "self.assertEqual(swa_slots(server, slot), 0)"
    if binding := _slot_binding(run, run.after, place.slot):
        return Asserts([*binding, assertion])
    if binding := _slot_binding(run, run.before, place.slot):
        return Asserts([assertion], binding)
    return None


def _slot_binding(run: RecordedRun, moment: Moment, slot: int) -> list[str]:
    """Return lines that bind `slot` by its position in a row or in the tree; none if it is in neither."""
    for name, holder_facts in moment.facts.holders.items():
        cells = list(moment.view.rows.get(holder_facts.row, ()))
        if slot in cells:
            lines, held = run.holder_expression(name, moment)
            return [*lines, f"slot = {run.slot_at(held, cells.index(slot))}.item()"]
    if moment.view.tree is not None:
        for node in moment.view.tree.nodes:
            if slot in node.slots:
                start = len(node.path) - len(node.slots)
                position = start + list(node.slots).index(slot)
                key = in_tree(run.geometry, node.path)
                return [f"slot = tree_slots(server.cache, {key})[{position}]"]
    return []
