"""View -> Facts: what a system's physical facts come down to, whoever the system is.

Nothing is judged here. A view that is no partition gives facts that some clause refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, count
from operator import attrgetter, ne
from typing import TypeVar

import msgspec

from impl.adapter import NodeView, View
from reference.clauses.facts import (
    Facts, HolderFacts, NodeFacts, Owned, Pool, RequestFacts, SessionFacts, TreeFacts,
)  # fmt: skip
from reference.geometry import Geometry
from reference.ledger import Cursors
from reference.prefix_cache import page_name
from reference.tree import Key

Part = TypeVar("Part")


class Wrong(msgspec.Struct, frozen=True):
    """What should not be, as in Facts."""

    torn: list[str]
    torn_swa: list[str]
    unmapped: list[tuple[str, int]]
    swept_mapped: list[tuple[int, int]]
    gap_mapped: list[tuple[int, int]]

    def some(self) -> bool:
        return bool(self.torn or self.torn_swa or self.unmapped or self.swept_mapped or self.gap_mapped)


class Slots(msgspec.Struct, frozen=True):
    """What the slots of a row, or of a node of the tree, come down to.

    full_slots, swa_slots: all that were looked at. full, swa: pages that they own; live: pairs of slots
    of live positions.
    """

    full_slots: Sequence[int]
    swa_slots: Sequence[int]
    full: list[Owned]
    swa: list[Owned]
    live: list[tuple[int, int]]
    wrong: Wrong | None


class RowPart(msgspec.Struct, frozen=True):
    """A row: the view that it was read from, and the facts."""

    cells: Sequence[int]
    holder: HolderFacts
    slots: Slots


class NodePart(msgspec.Struct, frozen=True):
    """A node of the tree: its view, and the facts. pages: its part of TreeFacts.pages."""

    view: NodeView
    node: NodeFacts
    slots: Slots
    pages: dict[Key, tuple[tuple[int, ...], bool]]


class Seen(msgspec.Struct, frozen=True):
    """A view and its facts, with the parts that they were put together from."""

    view: View
    facts: Facts
    rows: Mapping[str, RowPart]
    nodes: Sequence[NodePart]


def facts_of(view: View, geometry: Geometry) -> Facts:
    """Gather owners, reads and leftovers. Never raises on a wrong view; indices are clamped."""
    return look(view, geometry).facts


def look(view: View, geometry: Geometry, last: Seen | None = None) -> Seen:
    """The facts of a view. Parts of them that are as they were in the `last` view are the same objects."""
    reader = _Reader(view, geometry, last)
    rows = {name: reader.row(name, row, cursors) for name, row, cursors in _holders(view)}
    nodes: list[NodePart] = []
    tree = None
    if view.tree is not None:
        nodes = [reader.node(node) for node in sorted(view.tree.nodes, key=attrgetter("path"))]
        tree = _tree_of(view, nodes, last)
    full: list[Owned] = []
    swa: list[Owned] = []
    torn: list[str] = []
    torn_swa: list[str] = []
    unmapped: list[tuple[str, int]] = []
    swept: list[tuple[int, int]] = []
    unused: list[tuple[int, int]] = []
    live: set[tuple[int, int]] = set()
    for slots in (*(part.slots for part in rows.values()), *(part.slots for part in nodes)):
        full += slots.full
        swa += slots.swa
        live.update(slots.live)
        if slots.wrong is not None:
            torn += slots.wrong.torn
            torn_swa += slots.wrong.torn_swa
            unmapped += slots.wrong.unmapped
            swept += slots.wrong.swept_mapped
            unused += slots.wrong.gap_mapped
    then = last.facts if last is not None else None
    pools = {"full": Pool(geometry.full_pages, view.free_full, full)}
    if geometry.window is not None:
        pools["swa"] = Pool(geometry.swa_pages, view.free_swa, swa)
        free, size = {*view.free_full}, geometry.page_size
        mapped = compress(count(), view.full_to_swa)
        unused = [(slot, view.full_to_swa[slot]) for slot in mapped if slot // size in free] + unused
    led_to = [entry for _, entry in live]
    shared = {} if len(set(led_to)) == len(led_to) else Counter(led_to)
    sessions = {n: SessionFacts(s.history, s.closing, s.cursors) for n, s in view.sessions.items()}
    requests = {n: RequestFacts(r.session, r.origin, r.text, r.cursors) for n, r in view.requests.items()}
    facts = Facts(
        sessions if then is None else _kept(sessions, then.sessions),
        requests if then is None else _kept(requests, then.requests),
        {name: part.holder for name, part in rows.items()},
        pools if then is None else _kept(pools, then.pools),
        geometry.rows,
        view.free_rows,
        torn,
        torn_swa,
        unmapped,
        swept,
        unused,
        sorted(s for s, n in shared.items() if n > 1),
        tree,
    )
    return Seen(view, facts, rows, nodes)


def _kept(now: dict[str, Part], then: Mapping[str, Part]) -> dict[str, Part]:
    """The values of then where they are equal."""
    return {name: then[name] if then.get(name) == part else part for name, part in now.items()}


def _tree_of(view: View, nodes: Sequence[NodePart], last: Seen | None) -> TreeFacts:
    assert view.tree is not None
    lock_holders = {name: tuple(holder.slots) for name, holder in view.tree.lock_holders.items()}
    then = last.facts.tree if last is not None else None
    shown: Sequence[NodeFacts] = [part.node for part in nodes]
    pages: dict[Key, tuple[tuple[int, ...], bool]] = {}
    for part in nodes:
        pages |= part.pages
    if then is not None:
        if len(then.nodes) == len(shown) and all(a is b for a, b in zip(then.nodes, shown)):
            shown = then.nodes
        if then.pages == pages:
            pages = then.pages
    tree = TreeFacts(shown, lock_holders, view.tree.sizes, pages)
    return then if then == tree else tree


def _holders(view: View) -> list[tuple[str, int, Cursors]]:
    """Rows in use: a session and the turn that borrows its row are one holder."""
    found = []
    lent: set[str] = set()
    for name, request in view.requests.items():
        if request.row is None or request.cursors is None:
            continue
        owner = request.session or name
        session = view.sessions.get(owner) if request.session else None
        if session is not None and session.row is not None and session.row != request.row:
            owner = f"{owner}/{name}"  # two rows for one session: both are in use
        else:
            lent.add(owner)
        found.append((owner, request.row, request.cursors))
    for name, session in view.sessions.items():
        if session.row is not None and session.cursors is not None and name not in lent:
            found.append((name, session.row, session.cursors))
    return found


class _Reader:
    """Walks the rows of a view, and the nodes of its tree, but for those that are as they were."""

    def __init__(self, view: View, geometry: Geometry, last: Seen | None) -> None:
        self.view, self.page_size = view, geometry.page_size
        self.has_swa = geometry.window is not None
        self.rows: Mapping[str, RowPart] = {}
        self.nodes: dict[Key, NodePart] = {}
        if last is not None:
            self.rows, self.nodes = last.rows, {part.node.path: part for part in last.nodes}
            then = last.view
            self.full = _differ(then.full_stamps, view.full_stamps)
            self.full |= _differ(then.full_to_swa, view.full_to_swa)
            self.swa = _differ(then.swa_stamps, view.swa_stamps)

    def _as_they_were(self, slots: Slots) -> bool:
        full, swa = not self.full or self.full.isdisjoint(slots.full_slots), not self.swa
        return full and (swa or self.swa.isdisjoint(slots.swa_slots))

    def row(self, name: str, row: int, cursors: Cursors) -> RowPart:
        """What a row in use holds, as far as its cursors go."""
        cells, known = self.view.rows.get(row, ()), self.rows.get(name)
        if known is not None and known.cells == cells and self._as_they_were(known.slots):
            if (known.holder.row, known.holder.cursors) == (row, cursors):
                return known
        return self._read(name, row, cursors, cells)

    def _read(self, name: str, row: int, cursors: Cursors, cells: Sequence[int]) -> RowPart:
        view, page_size = self.view, self.page_size
        length = max(0, min(cursors.kv_allocated_len, len(cells)))
        slots = [s if 0 <= s < len(view.full_stamps) else 0 for s in cells[:length]]
        first, wrong = max(0, cursors.cache_protected_len), Wrong([], [], [], [], [])
        full = self._pages(name, "full", slots, first, wrong.torn)
        swa: list[Owned] = []
        full_read = [view.full_stamps[s] for s in slots]
        mapped: list[int] = []
        swa_read: list[int | None] = []
        live: list[tuple[int, int]] = []
        looked = slots
        if self.has_swa:
            size = len(view.swa_stamps)
            mapped = [m if 0 <= (m := view.full_to_swa[s]) < size else 0 for s in slots]
            swa_read = [view.swa_stamps[m] if m else None for m in mapped]
            dead = max(first, cursors.swa_evicted_seqlen)
            start = -(-dead // page_size) * page_size
            wrong.unmapped.extend((name, p) for p in range(start, length) if not mapped[p])
            swa = self._pages(name, "swa", mapped, start, wrong.torn_swa)
            live = [(s, m) for s, m in zip(slots[start:], mapped[start:]) if m]
            wrong.swept_mapped.extend((s, m) for s, m in zip(slots[first:start], mapped[first:start]) if m)
            if length % page_size:
                rest = range(slots[-1] + 1, (slots[-1] // page_size + 1) * page_size)
                wrong.gap_mapped.extend(self._gap(slots[-1], mapped[-1], rest))
                looked = [*slots, *rest]
        facts = HolderFacts(row, cursors, full_read, swa_read, slots[:first])
        return RowPart(cells, facts, Slots(looked, mapped, full, swa, live, wrong if wrong.some() else None))

    def node(self, node: NodeView) -> NodePart:
        """A node of the radix tree; its pages are owned under the name of the path to their end."""
        path = tuple(node.path)
        known = self.nodes.get(path)
        if known is not None and self._as_they_were(known.slots):
            then, locks = known.view, (node.full_locks, node.swa_locks)
            if then.slots == node.slots and then.swa_slots == node.swa_slots:
                if (then.full_locks, then.swa_locks) == locks:
                    return known
                full_locks, swa_locks = locks
                pinned = known.node._replace(full_locks=full_locks, swa_locks=swa_locks)
                return NodePart(node, pinned, known.slots, known.pages)
        view, size = self.view, self.page_size
        slots = [s if 0 <= s < len(view.full_stamps) else 0 for s in node.slots]
        swa = [s if 0 <= s < len(view.swa_stamps) else 0 for s in node.swa_slots]
        mapped = [view.full_to_swa[s] for s in slots] if self.has_swa else []
        start, wrong = len(path) - len(slots), Wrong([], [], [], [], [])
        full, swa_pages = (
            [
                Owned(page_name(path[: (start // size + at + 1) * size]), start // size + at, page)
                for _, at, page in self._pages("the tree", pool, own, 0, into)
            ]
            for pool, own, into in (("full", slots, wrong.torn), ("swa", swa, wrong.torn_swa))
        )
        pairs = [(s, m) for s, m in zip(slots, swa or mapped) if m]
        facts = NodeFacts(
            path, slots, swa, mapped, [view.full_stamps[s] for s in slots],
            [view.swa_stamps[s] for s in swa], node.full_locks, node.swa_locks,
        )  # fmt: skip
        pages = {
            path[: start + at + size]: (tuple(slots[at : at + size]), bool(swa))
            for at in range(0, len(slots), size)
        }
        if not swa:
            wrong.swept_mapped.extend(pairs)
        read = Slots(slots, swa, full, swa_pages, pairs if swa else [], wrong if wrong.some() else None)
        return NodePart(node, facts, read, pages)

    def _gap(self, slot: int, swa: int, rest: Iterable[int]) -> list[tuple[int, int]]:
        """The slots that follow the last one in its page: unmapped, or mapped to what follows."""
        mapping = self.view.full_to_swa
        entries = ((at, mapping[at]) for at in rest if at < len(mapping))
        return [(at, entry) for at, entry in entries if entry and (not swa or entry - swa != at - slot)]

    def _pages(
        self, name: str, pool: str, slots: Sequence[int], start: int, torn: list[str]
    ) -> list[Owned]:
        """Pages of the positions from `start` on; zero slots belong to no page."""
        page_size = self.page_size
        owned = []
        for at in range(-(-start // page_size) * page_size, len(slots), page_size):
            head = slots[at]
            if page_size > 1:
                cells = slots[at : at + page_size]
                if head % page_size or list(cells) != list(range(head, head + len(cells))):
                    if all(cells):
                        end = at + len(cells)
                        torn.append(f"{pool} slots of {name} at [{at}, {end}): {list(cells)}")
            if head:
                owned.append(Owned(name, at // page_size, head // page_size))
        return owned


def _differ(then: Sequence[int], now: Sequence[int]) -> set[int]:
    """Where two lists differ."""
    if len(then) != len(now):
        return {*range(max(len(then), len(now)))}
    return set() if then == now else {*compress(count(), map(ne, then, now))}
