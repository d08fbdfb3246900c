"""What an exported test asks about pages: who has them, what was freed, where the mapping leads."""

from collections.abc import Callable

from ci.export.recorded_run import Asserts, RecordedRun
from reference.clauses.freed import wrongly_freed
from reference.clauses.window import evicted_too_far
from reference.commands import Extend
from reference.cursors import Cursors, ceil_page, window_start
from reference.failures import AtPage, AtPosition, AtRow
from reference.state import text_tokens

_TREE = "the tree"


def asserted(run: RecordedRun) -> Asserts | None:
    """What shows the clause that is violated; None where cursors and sizes show it, or nothing does."""
    asserts = _POOLS.get(run.clause)
    return asserts(run) if asserts is not None else None


def ownership(run: RecordedRun) -> Asserts | None:
    """The first page that is owned and free, owned twice, or neither."""
    return _owned_too_often(run) or _lost(run)


def _owned_too_often(run: RecordedRun) -> Asserts | None:
    for pool, facts in run.after.facts.pools.items():
        free, owner = set(facts.free), dict[int, str]()
        for holder, _, page in facts.owned:
            who = _whose(holder)
            mine, other = _slots(run, who, pool), owner.get(page)
            if page in free:
                return Asserts([
                    f"owned, free = pages_of(server, {mine}), free_pages({_allocator(run, pool)})",
                    "self.assertEqual(owned.intersection(free), set())",
                ])  # fmt: skip
            if other not in (None, who):
                return Asserts([
                    f"owned = pages_of(server, {_slots(run, other or '', pool)})",
                    f"self.assertEqual(owned & pages_of(server, {mine}), set())",
                ])  # fmt: skip
            if other == who and (who != _TREE or _twice_in_tree(run, pool)):
                return Asserts([f"slots = {mine}.tolist()", "self.assertEqual(len(slots), len(set(slots)))"])
            owner[page] = who
    return None


def _twice_in_tree(run: RecordedRun, pool: str) -> bool:
    """A slot is in two nodes; a page may also be as a node ends inside of it (TREE-1)."""
    tree = run.after.facts.tree
    found = [n.slots if pool == "full" else n.swa_slots for n in (tree.nodes if tree is not None else ())]
    return sum(map(len, found)) > len(set().union(*found))


def _lost(run: RecordedRun) -> Asserts | None:
    for pool, facts in run.after.facts.pools.items():
        if {*range(1, facts.size + 1)} - {*facts.free} - {owned.page for owned in facts.owned}:
            holders = dict.fromkeys(_whose(owned.holder) for owned in run.after.facts.pools["full"].owned)
            return Asserts([
                f"lost = {{*range(1, {facts.size + 1})}} - {{*free_pages({_allocator(run, pool)})}}",
                *(f"lost -= pages_of(server, {_slots(run, holder, pool)})" for holder in holders),
                "self.assertEqual(lost, set())",
            ])  # fmt: skip
    return None


def renamed(run: RecordedRun) -> Asserts | None:
    """A row that names other slots, before its end, than those in which its tokens were computed."""
    handed = r"checkpoint\(" if isinstance(run.last, Extend) else ""
    for holder in run.after.step.held if run.after.step is not None else ():
        length = holder.cursors.kv_committed_len
        seen = run.after.facts.holders.get(holder.name)
        if seen is None or tuple(seen.full_read[:length]) == text_tokens(holder.text, length):
            continue
        if not handed:  # what it has allocated since is not in the row before
            was = run.before.facts.holders.get(holder.name)
            if was is None:
                continue
            length = min(length, was.cursors.kv_allocated_len)
        had, has = (run.row(run.whose(holder.name, m), end=str(length)) for m in (run.before, run.after))
        notes = [f"row = {has if handed else had}.tolist()"]
        return Asserts([f"self.assertEqual({has}.tolist(), row)"], notes, handed)
    return None


def _whose(holder: str) -> str:
    return _TREE if holder.startswith("tree ") else holder


def _allocator(run: RecordedRun, pool: str) -> str:
    return "server.allocator" if run.window is None else f"server.allocator.{pool}_attn_allocator"


def _slots(run: RecordedRun, holder: str, pool: str) -> str:
    """The slots that somebody owns in a pool."""
    if holder == _TREE:
        return "slots_in_tree(server.cache)" if pool == "full" else "swa_slots_in_tree(server)"
    return f"own_{'' if pool == 'full' else 'swa_'}slots(server, {run.whose(holder, run.after)})"


def _free_list(run: RecordedRun) -> Asserts | None:
    """A free list with a page twice, with padding, or with what does not exist."""
    place = run.at[0]
    if not isinstance(place, AtPage):
        return None
    facts, free = run.after.facts.pools[place.pool], f"free_pages({_allocator(run, place.pool)})"
    if list(facts.free).count(place.page) > 1:
        return Asserts([f"free = {free}", "self.assertEqual(len(free), len(set(free)))"])
    return Asserts([f"self.assertEqual({{*{free}}} - {{*range(1, {facts.size + 1})}}, set())"])


def _freed(run: RecordedRun) -> Asserts | None:
    """Which positions of a row were freed."""
    pool, size = {"FREE-1": "full", "FREE-2": "swa"}[run.clause], run.page_size
    found = wrongly_freed(run.step, pool)
    if found is None or found[0].startswith("tree "):
        return None
    holder, owed, _ = found
    notes, held = run.bound(holder, run.before)
    slots = run.row(held, end=run.cursor(held, "kv_allocated_len"))
    want = [at for page in owed for at in range(page * size, (page + 1) * size)]
    last = run.step.before.holders[holder].cursors.kv_allocated_len
    positions = f"[*range({want[0]}, {min(want[-1] + 1, last)})]" if want else "[]"
    notes += _named(slots, swa=pool == "swa")
    return Asserts(
        [f"free = free_pages({_allocator(run, pool)})",
         f"freed = [at for at, slot in enumerate(slots) if slot // {size} in free]".replace(" // 1 ", " "),
         f"self.assertEqual(freed, {positions})"],
        notes,
    )  # fmt: skip


def _rows(run: RecordedRun) -> Asserts | None:
    """A row that is held and free, or free twice."""
    facts, place = run.after.facts, run.at[0]
    if not isinstance(place, AtRow) or place.row not in facts.free_rows:
        return None
    for holder, seen in facts.holders.items():
        if seen.row == place.row:
            row = run.cursor(run.whose(holder, run.after), "req_pool_idx")
            return Asserts([f"self.assertNotIn({row}, server.rows.free_slots)"])
    rows = "server.rows.free_slots"
    return Asserts([f"self.assertEqual(len({rows}), len(set({rows})))"])


def _named(slots: str, *, swa: bool) -> list[str]:
    """Lines that call these slots, or the SWA slots that go with them, `slots`."""
    if not swa:
        return [f"slots = {slots}.tolist()"]
    return [f"row = {slots}", "slots = swa_slots(server, row).tolist()"]


def _whole_pages(run: RecordedRun) -> Asserts | None:
    """A row, or a node, whose slots or the SWA slots they are mapped to do not fill pages in order."""
    size, place = run.page_size, run.at[0]
    swa = run.clause == "MAP-1"
    starts = f"starts = [slots[at - at % {size}] // {size} * {size} for at in range(len(slots))]"
    whole = f"slots, [start + at % {size} for at, start in enumerate(starts)]"
    if isinstance(place, AtPosition):
        lines, held = run.bound(place.owner, run.after)
        first = _first_live(run, held, run.after.facts.holders[place.owner].cursors)[1] if swa else ""
        lines += _named(run.row(held, first, run.cursor(held, "kv_allocated_len")), swa=swa)
        return Asserts([*lines, starts, f"self.assertEqual({whole})"])
    value = run.of_node("node", "swa" if swa else "full", "value")
    value = f"swa_slots(server, {value})" if swa and not run.unified else value
    lines = [f"slots = {value}.tolist()", starts, f"self.assertEqual({whole}, path)"]
    each = ["for node, path in nodes(server.cache):"]
    if swa:
        each, lines = [*each, f"    if {run.live('node')}:"], [f"    {line}" for line in lines]
    return Asserts([*each, *(f"    {line}" for line in lines)])


def _one_to_one(run: RecordedRun) -> Asserts | None:
    """An SWA slot that several positions are mapped to."""
    facts = run.after.facts
    return _whole_pages(run) if facts.torn_swa else _owned_too_often(run)


def _mapped(run: RecordedRun) -> Asserts | None:
    """Positions that must have an SWA slot and have none."""
    assert run.window is not None
    place = run.at[0]
    seen = run.after.facts.holders.get(place.owner) if isinstance(place, AtPosition) else None
    if seen is None or not isinstance(place, AtPosition) or seen.swa_read[place.position] is not None:
        return None
    (lines, held), last = run.bound(place.owner, run.after), "kv_allocated_len"
    _, first = _first_live(run, held, seen.cursors)
    if run.clause != "MAP-2":
        last = "kv_committed_len"
        first = str(window_start(seen.cursors.kv_committed_len, run.window) or "")
    lines.append(f"row = {run.row(held, first, run.cursor(held, last))}")
    return Asserts([*lines, "self.assertTrue(swa_slots(server, row).all())"])


def _unmapped(run: RecordedRun) -> Asserts:
    """Positions that were evicted, and tombstones, that lead to an SWA slot."""
    for holder, seen in run.after.facts.holders.items():
        (lines, held), start = run.bound(holder, run.after), seen.cursors.cache_protected_len
        end, _ = _first_live(run, held, seen.cursors)
        if any(slot is not None for slot in seen.swa_read[start:end]):
            evicted = run.row(held, str(start or ""), run.cursor(held, "swa_evicted_seqlen"))
            return Asserts([*lines, f"row = {evicted}", "self.assertFalse(swa_slots(server, row).any())"])
    value = run.of_node("node", "full", "value")
    return Asserts([
        "for node, path in nodes(server.cache):", f"    if {run.live('node', dead=True)}:",
        f"        self.assertFalse(swa_slots(server, {value}).any(), path)",
    ])  # fmt: skip


def _first_live(run: RecordedRun, held: str, cursors: Cursors) -> tuple[int, str]:
    """Where a row's own SWA KV begins, as a position and as an expression."""
    evicted, protected = cursors.swa_evicted_seqlen, cursors.cache_protected_len
    cursor = "swa_evicted_seqlen" if evicted > protected else "cache_protected_len"
    start = ceil_page(max(evicted, protected), run.page_size)
    return start, run.cursor(held, cursor) if start else ""


def _evicted(run: RecordedRun) -> Asserts | None:
    """How far a window eviction went."""
    found = evicted_too_far(run.step)
    if found is None:
        return None
    was, _, low, high, got = found
    evicted = run.cursor(run.whose(was.name, run.after), "swa_evicted_seqlen")
    if low <= got <= high:
        return Asserts([f"self.assertEqual({evicted} % {run.page_size}, 0)"])
    bound = f"LessEqual({evicted}, {high})" if got > high else f"GreaterEqual({evicted}, {low})"
    return Asserts([f"self.assert{bound}"])


_POOLS: dict[str, Callable[[RecordedRun], Asserts | None]] = {
    "FREE-1": _freed, "FREE-2": _freed, "OWN-1": _owned_too_often, "OWN-2": _free_list, "OWN-4": _rows,
    "OWN-5": _whole_pages, "MAP-1": _one_to_one, "MAP-2": _mapped, "MAP-3": _unmapped, "SWA-1": _evicted,
    "SWA-2": _mapped, "READ-2": _mapped, "OUT-3": _evicted,
}  # fmt: skip
