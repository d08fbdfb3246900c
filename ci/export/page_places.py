"""Assertions of an exported test about pages, rows and the slots in them, for each kind of place there."""

from ci.export.recorded_run import Asserts, RecordedRun, in_tree, within
from impl.sglang.scheduler.call_log import quoted, variable
from reference.commands import Extend
from reference.failures import AtEntry, AtLock, AtPage, AtPosition, AtRow
from reference.prefix_cache import lock_holders
from reference.state import text_tokens
from stateful_tests.lockstep.moments import Moment

_TREE = "the tree"


def page_place(run: RecordedRun, place: AtPage) -> Asserts | None:
    """A page that is free and should not be, or is owned twice, or by nobody."""
    pool, page = place
    facts = run.after.facts.pools[pool]
    size = run.page_size
    free_list = f"free_pages({_allocator(run, pool)})"
    times = list(facts.free).count(page)
    if times > 1:
        return Asserts([f"free = {free_list}", "self.assertEqual(len(free), len(set(free)))"])
    if not 1 <= page <= facts.size:
        return Asserts(
            [f"self.assertEqual({{*{free_list}}} - {{*range(1, {facts.size + 1})}}, set())"]
        )
    owners = [_who(owned.holder) for owned in facts.owned if owned.page == page]
    if owners and times:
        lines = [f"owned = pages_of(server, {_slots(run, owners[0], pool)})"]
        return Asserts([*lines, f"self.assertEqual(owned.intersection({free_list}), set())"])
    if len(set(owners)) > 1:
        one, other = (_slots(run, who, pool) for who in [*dict.fromkeys(owners)][:2])
        lines = [f"owned = pages_of(server, {one})"]
        return Asserts([*lines, f"self.assertEqual(owned & pages_of(server, {other}), set())"])
    if len(owners) > 1:
        if owners[0] == _TREE and not _twice_in_tree(run, pool):
            return None
        lines = [f"slots = {_slots(run, owners[0], pool)}.tolist()"]
        return Asserts([*lines, "self.assertEqual(len(slots), len(set(slots)))"])
    if not owners and not times:
        holders = dict.fromkeys(_who(owned.holder) for owned in run.after.facts.pools["full"].owned)
        lines = [f"lost = {{*range(1, {facts.size + 1})}} - {{*{free_list}}}"]
        lines += [f"lost -= pages_of(server, {_slots(run, holder, pool)})" for holder in holders]
        return Asserts([*lines, "self.assertEqual(lost, set())"])
    had = [
        o for o in run.before.facts.pools[pool].owned if o.page == page and _who(o.holder) != _TREE
    ]
    if not had:
        return None
    notes, held = run.bound(had[0].holder, run.before)
    slot = run.slot_at(held, had[0].at * size)
    slot = f"swa_slots(server, {slot})" if pool == "swa" else slot
    notes = [*notes, f"page = {slot}.item()" + (f" // {size}" if size > 1 else "")]
    return Asserts([f"self.assert{'Not' if times else ''}In(page, {free_list})"], notes)


def odd_page(run: RecordedRun) -> Asserts | None:
    """The first page that does not have one owner or is not free once."""
    for pool, facts in run.after.facts.pools.items():
        seen = [*facts.free, *(owned.page for owned in facts.owned)]
        odd = dict.fromkeys(page for page in seen if seen.count(page) > 1)
        odd |= dict.fromkeys(sorted({*range(1, facts.size + 1)} - {*seen}))
        for found in (page_place(run, AtPage(pool, page)) for page in odd):
            if found is not None:
                return found
    return None


def _who(holder: str) -> str:
    return _TREE if holder.startswith("tree ") else holder


def _allocator(run: RecordedRun, pool: str) -> str:
    return "server.allocator" if run.window is None else f"server.allocator.{pool}_attn_allocator"


def _slots(run: RecordedRun, holder: str, pool: str) -> str:
    """The slots that somebody owns in a pool."""
    if holder == _TREE:
        return "slots_in_tree(server.cache)" if pool == "full" else "swa_slots_in_tree(server)"
    return f"own_{'' if pool == 'full' else 'swa_'}slots(server, {run.whose(holder, run.after)})"


def _twice_in_tree(run: RecordedRun, pool: str) -> bool:
    """A slot is in two nodes; a page may also be as a node ends inside of it (TREE-1)."""
    tree = run.after.facts.tree
    found = [
        n.slots if pool == "full" else n.swa_slots for n in (tree.nodes if tree is not None else ())
    ]
    return sum(map(len, found)) > len(set().union(*found))


def row_place(run: RecordedRun, place: AtRow) -> Asserts | None:
    """A row that is held and free, or free twice."""
    facts = run.after.facts
    rows = "server.rows.free_slots"
    if list(facts.free_rows).count(place.row) > 1:
        return Asserts([f"self.assertEqual(len({rows}), len(set({rows})))"])
    held = [name for name, seen in facts.holders.items() if seen.row == place.row]
    if not held or place.row not in facts.free_rows:
        return None
    row = run.cursor(run.whose(held[0], run.after), "req_pool_idx")
    return Asserts([f"self.assertNotIn({row}, {rows})"])


def position_place(run: RecordedRun, place: AtPosition) -> Asserts | None:
    """A position whose slot is not the right one: out of order in its page, not the tree's, or unmapped."""
    owner, pool, position, _ = place
    facts = run.after.facts
    seen = run.after.facts.holders.get(owner)
    if seen is None:
        if owner not in lock_holders(run.after.state):
            return None
        name = variable(owner)
        key = in_tree(run.geometry, lock_holders(run.after.state)[owner])
        locked = f"{name}.prefix_indices"
        if not run.kind.keeps_slots:
            locked = f"server.cache.path_device_indices({name}.last_node)"
        return Asserts([f"self.assertEqual({locked}.tolist(), tree_slots(server.cache, {key}))"])
    lines, held = run.bound(owner, run.after)
    torn = [
        t
        for t in (facts.torn if pool == "full" else facts.torn_swa)
        if t.holder == owner and not t.path
    ]
    if any(t.start == position for t in torn):
        lines.append(f"row = {run.row(held, str(position), str(position + len(torn[0].slots)))}")
        slots = "swa_slots(server, row)" if pool == "swa" else "row"
        return Asserts([*lines, *run.in_order(f"{slots}.tolist()")])
    if any(isinstance(each, AtLock) for each in run.at):  # of what the tree holds for it
        tokens = f"history(server.sessions.get({quoted(owner)}))"
        if held != "slot":
            request = held.removesuffix(run.holder)
            tokens = f"[*{request}.origin_input_ids, *{request}.output_ids]"
        lines.append(f"row = {run.row(held, end=run.cursor(held, 'cache_protected_len'))}.tolist()")
        more = " + 1" if run.geometry.bigram else ""
        lines.append(f"tokens = {tokens}[: len(row){more}]")
        text = next((text_tokens(held.text) for held in run.step.held if held.name == owner), ())
        slots = f"tree_slots(server.cache, tokens{within(run.geometry, text)})"
        return Asserts([*lines, f"self.assertEqual(row, {slots})"])
    if pool == "swa" and position < len(seen.swa_read) and seen.swa_read[position] is None:
        lines.append(f"slot = {run.slot_at(held, position)}")
        return Asserts([*lines, "self.assertNotEqual(swa_slots(server, slot), 0)"])
    return odd_page(run) or renamed_row(run)


def renamed_row(run: RecordedRun) -> Asserts | None:
    """A row that names other slots, before its end, than those in which its tokens were computed."""
    handed = r"checkpoint\(" if isinstance(run.last, Extend) else ""
    if run.after.step is None:
        return None
    for holder in run.after.step.held:
        length = holder.cursors.kv_committed_len
        seen = run.after.facts.holders.get(holder.name)
        if seen is None or tuple(seen.full_read[:length]) == text_tokens(holder.text, length):
            continue
        if not handed:  # what it has allocated since is not in the row before
            was = run.before.facts.holders.get(holder.name)
            if was is None:
                continue
            length = min(length, was.cursors.kv_allocated_len)
        had, has = (
            run.row(run.whose(holder.name, m), end=str(length)) for m in (run.before, run.after)
        )
        notes = [f"row = {has if handed else had}.tolist()"]
        return Asserts([f"self.assertEqual({has}.tolist(), row)"], notes, handed)
    return None


def entry_place(run: RecordedRun, place: AtEntry) -> Asserts | None:
    """A mapping entry of a slot that must lead nowhere, or that leads where another does."""
    if any(slot == place.slot for slot, _ in run.after.facts.shared):
        return odd_page(run)
    for moment in (run.after, run.before):  # who has the slot, or had it
        named = _slot(run, moment, place.slot)
        if named:
            asserts = ["self.assertEqual(swa_slots(server, slot), 0)"]
            return Asserts(asserts, named) if moment is run.before else Asserts([*named, *asserts])
    return None


def _slot(run: RecordedRun, moment: Moment, slot: int) -> list[str]:
    """Lines that call it `slot`, by the position of a row or of the tree that it is at."""
    for name, seen in moment.facts.holders.items():
        if slot in (cells := list(moment.view.rows.get(seen.row, ()))):
            lines, held = run.bound(name, moment)
            return [*lines, f"slot = {run.slot_at(held, cells.index(slot))}.item()"]
    if moment.view.tree is not None:
        for found in moment.view.tree.nodes:
            if slot in found.slots:
                at = len(found.path) - len(found.slots) + list(found.slots).index(slot)
                return [f"slot = tree_slots(server.cache, {in_tree(run.geometry, found.path)})[{at}]"]
    return []
