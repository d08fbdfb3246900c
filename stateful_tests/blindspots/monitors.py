"""Run-time checks that look at a system's own state alone; contents take stamps, which no server has.

Each is a predicate over the facts of two moments, before and after a command; it returns what it found
in words, "" when it is content. They are weaker than clauses on purpose: nothing here knows what the
command should have done. The sums are not among them: those are commands of the system itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from reference.clauses.facts import Facts, HolderFacts, SessionFacts
from reference.commands import Mode
from reference.cursors import in_order, lost_below, window_live, window_start
from reference.geometry import Geometry
from reference.ledger import Cursors


@dataclass(frozen=True, slots=True)
class Observation:
    """What a monitor sees: the system's facts now and at its last look."""

    geometry: Geometry
    mode: Mode
    before: Facts
    after: Facts


@dataclass(frozen=True, slots=True)
class Monitor:
    """A check. looks_for: what it finds, in a line; reads: what it has to read for that."""

    id: str
    looks_for: str
    reads: str
    sign: Callable[[Observation], str]


MONITORS: dict[str, Monitor] = {}


def _monitor(
    name: str, looks_for: str, reads: str
) -> Callable[[Callable[[Observation], str]], Callable[[Observation], str]]:
    def add(sign: Callable[[Observation], str]) -> Callable[[Observation], str]:
        MONITORS[name] = Monitor(name, looks_for, reads, sign)
        return sign

    return add


def _held_rows(facts: Facts) -> list[int]:
    return [holder.row for holder in facts.holders.values()]


@_monitor("free-list", "a page or row twice in its free list, padding, a page out of range", "free lists")
def _free_list(m: Observation) -> str:
    for name, pool in m.after.pools.items():
        if len(set(pool.free)) < len(pool.free):
            return f"{name} free list holds a page twice"
        if any(not 1 <= page <= pool.size for page in pool.free):
            return f"{name} free list holds a page that does not exist"
    if len(set(m.after.free_rows)) < len(m.after.free_rows):
        return "a row is free twice"
    return ""


@_monitor("free-owned", "a page or row that is free and owned", "free lists, rows")
def _free_and_owned(m: Observation) -> str:
    for name, pool in m.after.pools.items():
        free = set(pool.free)
        for owned in pool.owned:
            if owned.page in free:
                return f"{name} page {owned.page} of {owned.holder} is free"
    return "a held row is free" if set(_held_rows(m.after)) & set(m.after.free_rows) else ""


@_monitor("owned-twice", "a page or row with two owners, a row of broken pages", "rows")
def _owned_twice(m: Observation) -> str:
    for name, pool in m.after.pools.items():
        if len({o.page for o in pool.owned}) < len(pool.owned):
            return f"a {name} page is owned twice"
    if m.after.torn:
        return m.after.torn[0]
    rows = _held_rows(m.after)
    return "a row is held twice" if len(set(rows)) < len(rows) else ""


@_monitor("lost", "a page or row neither free nor owned", "free lists, rows")
def _lost(m: Observation) -> str:
    for name, pool in m.after.pools.items():
        lost = set(range(1, pool.size + 1)).difference(pool.free, (o.page for o in pool.owned))
        if lost:
            return f"{name} pages {sorted(lost)} are neither free nor owned"
    known = len({*m.after.free_rows, *_held_rows(m.after)})
    return f"{m.after.rows - known} rows are neither free nor held" if known < m.after.rows else ""


@_monitor("mapping", "a live slot unmapped, a dead one mapped, an SWA slot mapped twice", "rows, mapping")
def _mapping(m: Observation) -> str:
    facts = m.after
    if facts.unmapped:
        holder, position = facts.unmapped[0]
        return f"position {position} of {holder} has no SWA slot"
    if facts.swept_mapped:
        return f"swept full slot {facts.swept_mapped[0][0]} is mapped"
    if facts.unused_mapped:
        return f"unused full slot {facts.unused_mapped[0][0]} is mapped"
    if facts.shared:
        return f"SWA slot {facts.shared[0]} is mapped twice"
    return facts.torn_swa[0] if facts.torn_swa else ""


def _texts(facts: Facts, name: str, session: SessionFacts) -> list[Sequence[int]]:
    """Texts that an idle slot may hold KV of: its session's history, or that of a turn that waits."""
    return [session.history, *(r.text for r in facts.requests.values() if r.session == name)]


def _idle_slots(facts: Facts) -> Iterator[tuple[str, SessionFacts, Cursors]]:
    """Slots that no turn has borrowed."""
    lent = {r.session for r in facts.requests.values() if r.cursors is not None}
    for name, session in facts.sessions.items():
        if session.slot is not None and name not in lent:
            yield name, session, session.slot


def _holder(facts: Facts, request: str) -> HolderFacts | None:
    """The row that a request runs on."""
    record = facts.requests[request]
    found = facts.holders.get(f"{record.session}/{request}") or facts.holders.get(record.session or request)
    return found if found is not None and found.cursors == record.cursors else None


@_monitor("cursors", "cursors out of order or off a page, past the text, slot and turn at odds", "lengths")
def _cursors(m: Observation) -> str:
    facts = m.after
    shown = [(name, r.cursors) for name, r in facts.requests.items()]
    shown += [(f"slot of {name}", s.slot) for name, s in facts.sessions.items()]
    for name, c in shown:
        if c is not None and not _well_formed(m, c):
            return f"{name}: {tuple(c)} out of order, out of bounds or off a page"
    for name, session, slot in _idle_slots(facts):
        longest = max(len(text) for text in _texts(facts, name, session))
        if max(slot[:3]) > longest:
            return f"slot of {name}: {tuple(slot)} is past its text of {longest}"
    for name, request in facts.requests.items():
        mine = request.cursors
        if mine is None:
            continue
        if mine.kv_committed_len >= len(request.text):
            return f"{name}: committed {mine.kv_committed_len} of a text of {len(request.text)}"
        lender = facts.sessions.get(request.session) if request.session is not None else None
        lent = lender.slot if lender is not None else None
        if lent is None or mine == lent:
            continue
        grown = all(now >= then for now, then in zip(mine, lent)) and mine[3] == lent[3]
        if not grown or mine.kv_committed_len == lent.kv_committed_len:
            return f"{name}: {tuple(mine)} does not follow from its slot's {tuple(lent)}"
    return ""


def _well_formed(m: Observation, c: Cursors) -> bool:
    """LEN-1; E is at a page boundary too, but for free mode, where a cut may cap it at any target."""
    size = m.geometry.page_size
    swept = m.mode is Mode.FREE or c.swa_evicted_seqlen % size == 0
    bounded = c.kv_allocated_len <= m.geometry.width
    return in_order(c) and bounded and swept and c.cache_protected_len % size == 0


@_monitor("window", "the next token's window swept or unmapped", "lengths, rows, mapping")
def _window(m: Observation) -> str:
    window = m.geometry.window
    if window is None:
        return ""
    facts = m.after
    seen = [(name, r.cursors, _holder(facts, name)) for name, r in facts.requests.items()]
    seen += [(f"slot of {name}", slot, facts.holders.get(name)) for name, _, slot in _idle_slots(facts)]
    for name, c, holder in seen:
        if c is None or min(c) < 0:
            continue
        if not window_live(lost_below(c), c.kv_committed_len, window):
            # In free mode a sweep may run ahead of the commit: the turn may end, not go on.
            if m.mode is Mode.FAITHFUL:
                return f"{name} at {c.kv_committed_len}: swept up to {c.swa_evicted_seqlen}"
            continue
        start = window_start(c.kv_committed_len, window)
        if holder is not None and None in list(holder.swa_read[start : c.kv_committed_len]):
            return f"{name} at {c.kv_committed_len}: its window has positions without SWA slot"
    return _went_on(m, window)


def _went_on(m: Observation, window: int) -> str:
    """A request that was admitted onto a window that is gone, or committed more behind one."""
    for name, now in m.after.requests.items():
        was = m.before.requests.get(name)
        if was is None or now.cursors is None:
            continue
        c = was.cursors if was.cursors is not None else now.cursors
        moved = was.cursors is None or now.cursors.kv_committed_len > c.kv_committed_len
        if moved and min(c) >= 0 and not window_live(lost_below(c), c.kv_committed_len, window):
            return f"{name} goes on at {c.kv_committed_len}, swept up to {c.swa_evicted_seqlen}"
    return ""


@_monitor("tree", "a node of half a page or half dead, a counter that is no sum, a lost prefix", "tree, rows")
def _tree(m: Observation) -> str:
    tree, size = m.after.tree, m.geometry.page_size
    if tree is None:
        return ""
    sums = [0, 0, 0, 0]
    for node in tree.nodes:
        if not node.slots or len(node.slots) % size or node.start % size:
            return f"the node that ends at {len(node.path)} is not whole pages"
        if node.live and (len(node.swa_slots) != len(node.slots) or not all(node.swa_slots)):
            return f"the node that ends at {len(node.path)} has SWA KV for some of its tokens"
        if not node.full_locks >= node.swa_locks >= 0:
            return f"the node that ends at {len(node.path)} counts {node.full_locks}, {node.swa_locks} locks"
        sums[node.full_locks > 0] += len(node.slots)
        sums[2 + (node.swa_locks > 0)] += len(node.swa_slots)
    if tree.sizes is not None and tuple(sums) != tuple(tree.sizes):
        return f"a walk gives {sums}, the counters say {list(tree.sizes)}"
    known = {slot for node in tree.nodes for slot in node.slots}
    for name, holder in m.after.holders.items():
        if not known.issuperset(holder.prefix):
            return f"the row of {name} names slots below its protected length that the tree has not"
    return ""


@_monitor("contents", "KV below kv_committed_len that is not that of the text", "rows, mapping, all KV")
def _contents(m: Observation) -> str:
    facts = m.after
    for name, request in facts.requests.items():
        holder = _holder(facts, name)
        if holder is not None and not _reads(m, holder, request.text):
            return f"{name} reads KV that is not its text's"
    for name, session, slot in _idle_slots(facts):
        holder = facts.holders.get(name)
        if holder is None or holder.cursors != slot:
            continue
        if not any(_reads(m, holder, text) for text in _texts(facts, name, session)):
            return f"slot of {name} holds KV that is not its text's"
    return ""


def _reads(m: Observation, holder: HolderFacts, text: Sequence[int]) -> bool:
    """A row holds the full KV of the text's first C tokens, and the SWA KV of those from E on."""
    committed, _, evicted, protected = holder.cursors
    want = list(text[: max(0, committed)])
    if len(want) < committed or list(holder.full_read[: len(want)]) != want:
        return False
    live = max(0, evicted, protected)
    return m.geometry.window is None or list(holder.swa_read[live : len(want)]) == want[live:]
