"""What an exported test asks about pages: who has them, what was freed, where the mapping leads."""

from collections.abc import Callable, Sequence

from ci.export.recorded_run import Asserts, RecordedRun, row
from reference.clauses.freed import wrongly_freed
from reference.clauses.window import oversweep
from reference.commands import Extend
from reference.cursors import Cursors, ceil_page, window_start
from reference.ledger import text_tokens

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
        had, has = (row(run.whose(holder.name, m), end=str(length)) for m in (run.before, run.after))
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
    for pool, facts in run.after.facts.pools.items():
        free = f"free_pages({_allocator(run, pool)})"
        if len(set(facts.free)) < len(facts.free):
            return Asserts([f"free = {free}", "self.assertEqual(len(free), len(set(free)))"])
        if not {*facts.free} <= {*range(1, facts.size + 1)}:
            return Asserts([f"self.assertEqual({{*{free}}} - {{*range(1, {facts.size + 1})}}, set())"])
    return None


def _freed(run: RecordedRun) -> Asserts | None:
    """Which positions of a row were freed."""
    pool, size = {"FREE-1": "full", "FREE-2": "swa"}[run.clause], run.page_size
    found = wrongly_freed(run.step, pool)
    if found is None or found[0].startswith("tree "):
        return None
    holder, owed, _ = found
    notes, held = run.bound(holder, run.before)
    slots = row(held, end=f"{held}.{run.cursor('kv_allocated_len')}")
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
    facts = run.after.facts
    for holder, seen in facts.holders.items():
        if seen.row in facts.free_rows:
            held = run.whose(holder, run.after)
            return Asserts([f"self.assertNotIn({held}.req_pool_idx, server.rows.free_slots)"])
    rows = "server.rows.free_slots"
    if len(set(facts.free_rows)) < len(facts.free_rows):
        return Asserts([f"self.assertEqual(len({rows}), len(set({rows})))"])
    return None


def _named(slots: str, *, swa: bool) -> list[str]:
    """Lines that call these slots, or the SWA slots that go with them, `slots`."""
    if not swa:
        return [f"slots = {slots}.tolist()"]
    return [f"row = {slots}", "slots = swa_slots(server, row).tolist()"]


def _whole_pages(run: RecordedRun) -> Asserts | None:
    """A row, or a node, whose slots or the SWA slots they are mapped to do not fill pages in order."""
    facts, size, view = run.after.facts, run.page_size, run.after.view
    swa = run.clause == "MAP-1"
    starts = f"starts = [slots[at - at % {size}] // {size} * {size} for at in range(len(slots))]"
    whole = f"slots, [start + at % {size} for at, start in enumerate(starts)]"
    for holder, seen in facts.holders.items():
        lines, held = run.bound(holder, run.after)
        start, first = _first_live(run, held, seen.cursors) if swa else (0, "")
        cells = view.rows[seen.row][start : seen.cursors.kv_allocated_len]
        if _torn([view.full_to_swa[slot] for slot in cells] if swa else cells, size):
            end = f"{held}.{run.cursor('kv_allocated_len')}"
            lines += _named(row(held, first, end), swa=swa)
            return Asserts([*lines, starts, f"self.assertEqual({whole})"])
    for node in facts.tree.nodes if facts.tree is not None else ():
        if _torn(node.swa_slots if swa else node.slots, size):
            value = run.of_node("node", "swa" if swa else "full", "value")
            value = f"swa_slots(server, {value})" if swa and not run.unified else value
            lines = [f"slots = {value}.tolist()", starts, f"self.assertEqual({whole}, path)"]
            each = ["for node, path in nodes(server.cache):"]
            if swa:
                each, lines = [*each, f"    if {run.live('node')}:"], [f"    {line}" for line in lines]
            return Asserts([*each, *(f"    {line}" for line in lines)])
    return None


def _torn(slots: Sequence[int], size: int) -> bool:
    return list(slots) != [slots[at - at % size] // size * size + at % size for at in range(len(slots))]


def _one_to_one(run: RecordedRun) -> Asserts | None:
    """An SWA slot that several positions are mapped to."""
    facts = run.after.facts
    return _whole_pages(run) if facts.torn_swa else _owned_too_often(run)


def _mapped(run: RecordedRun) -> Asserts | None:
    """Positions that must have an SWA slot and have none."""
    assert run.window is not None
    for holder, seen in run.after.facts.holders.items():
        (lines, held), cursors = run.bound(holder, run.after), seen.cursors
        start, first = _first_live(run, held, cursors)
        end, last = cursors.kv_allocated_len, "kv_allocated_len"
        if run.clause != "MAP-2":
            end, last = cursors.kv_committed_len, "kv_committed_len"
            start = window_start(end, run.window)
            first = str(start or "")
        if any(slot is None for slot in seen.swa_read[start:end]):
            lines.append(f"row = {row(held, first, f'{held}.{run.cursor(last)}')}")
            return Asserts([*lines, "self.assertTrue(swa_slots(server, row).all())"])
    return None


def _unmapped(run: RecordedRun) -> Asserts:
    """Positions that were swept, and tombstones, that lead to an SWA slot."""
    for holder, seen in run.after.facts.holders.items():
        (lines, held), start = run.bound(holder, run.after), seen.cursors.cache_protected_len
        end, _ = _first_live(run, held, seen.cursors)
        if any(slot is not None for slot in seen.swa_read[start:end]):
            swept = row(held, str(start or ""), f"{held}.{run.cursor('swa_evicted_seqlen')}")
            return Asserts([*lines, f"row = {swept}", "self.assertFalse(swa_slots(server, row).any())"])
    value = run.of_node("node", "full", "value")
    return Asserts([
        "for node, path in nodes(server.cache):", f"    if {run.live('node', dead=True)}:",
        f"        self.assertFalse(swa_slots(server, {value}).any(), path)",
    ])  # fmt: skip


def _first_live(run: RecordedRun, held: str, cursors: Cursors) -> tuple[int, str]:
    """Where a row's own SWA KV begins, as a position and as an expression."""
    swept, protected = cursors.swa_evicted_seqlen, cursors.cache_protected_len
    cursor = run.cursor("swa_evicted_seqlen") if swept > protected else "cache_protected_len"
    start = ceil_page(max(swept, protected), run.page_size)
    return start, f"{held}.{cursor}" if start else ""


def _swept(run: RecordedRun) -> Asserts | None:
    """How far a sweep went."""
    found = oversweep(run.step)
    if found is None:
        return None
    was, _, low, high, got = found
    swept = f"{run.whose(was.name, run.after)}.{run.cursor('swa_evicted_seqlen')}"
    if low <= got <= high:
        return Asserts([f"self.assertEqual({swept} % {run.page_size}, 0)"])
    bound = f"LessEqual({swept}, {high})" if got > high else f"GreaterEqual({swept}, {low})"
    return Asserts([f"self.assert{bound}"])


_POOLS: dict[str, Callable[[RecordedRun], Asserts | None]] = {
    "FREE-1": _freed, "FREE-2": _freed, "OWN-1": _owned_too_often, "OWN-2": _free_list, "OWN-4": _rows,
    "OWN-5": _whole_pages, "MAP-1": _one_to_one, "MAP-2": _mapped, "MAP-3": _unmapped, "SWA-1": _swept,
    "SWA-2": _mapped, "READ-2": _mapped, "OUT-3": _swept,
}  # fmt: skip
