"""View -> Facts: what a system's physical facts come down to, whoever the system is.

Nothing is judged here. A view that is no partition gives facts that some clause refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, count, repeat
from operator import attrgetter, is_, ne
from typing import Any, NamedTuple, TypeVar

import msgspec

from impl.adapter import NodeView, View
from reference.clauses.facts import (
    LEFTOVERS, Facts, HolderFacts, NodeFacts, Owned, Pool, RequestFacts, SessionFacts, Torn,
    TreeFacts,
)  # fmt: skip
from reference.geometry import Geometry
from reference.ledger import Cursors
from reference.prefix_cache import page_name
from reference.tree import Key

Part = TypeVar("Part")
_OWNED: Callable[[tuple[str, int, int]], Owned] = partial(tuple.__new__, Owned)


class Wrong(msgspec.Struct, frozen=True):
    """What should not be, as in Facts."""

    torn: list[Torn]
    torn_swa: list[Torn]
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


NOTHING = View({}, {}, (), (), {}, ())  # of a system that could not be started
_NO_FACTS = Facts({}, {}, {}, {}, 0, ())


class Seen(NamedTuple):
    """A view and its facts, with the parts that they were put together from."""

    view: View
    facts: Facts
    rows: Mapping[str, RowPart]
    nodes: Sequence[NodePart]
    slots: Sequence[Slots]


def facts_of(view: View, geometry: Geometry) -> Facts:
    """Gather owners, reads and leftovers. Never raises on a wrong view; indices are clamped."""
    return look(view, geometry).facts


def look(view: View, geometry: Geometry, last: Seen | None = None) -> Seen:
    """The facts of a view, whose nodes are put in the order of their paths. What is as it was in the `last`
    view is the same objects: all of it, where they are equal but for the order of free lists."""
    if view.tree is not None:
        view.tree.nodes = sorted(view.tree.nodes, key=attrgetter("path"))
    if last is not None and _same(last.view, view):
        return Seen(view, *last[1:])
    reader = _Reader(view, geometry, last)
    rows = {name: reader.row(name, row, cursors) for name, row, cursors in _holders(view)}
    nodes: list[NodePart] = []
    tree = None
    if view.tree is not None:
        nodes = [reader.node(node) for node in view.tree.nodes]
        tree = _tree_of(view, nodes, last)
    was, then = (NOTHING, _NO_FACTS) if last is None else (last.view, last.facts)
    sessions, requests = then.sessions, then.requests
    if view.sessions != was.sessions:
        sessions = {
            name: sessions[name] if was.sessions.get(name) == shown
            else SessionFacts(shown.history, shown.closing, shown.cursors)
            for name, shown in view.sessions.items()
        }  # fmt: skip
    if view.requests != was.requests:
        requests = {
            name: requests[name] if was.requests.get(name) == shown
            else RequestFacts(shown.session, shown.origin, shown.text, shown.cursors)
            for name, shown in view.requests.items()
        }  # fmt: skip
    holders = _kept({name: part.holder for name, part in rows.items()}, then.holders)
    slots = [part.slots for part in rows.values()] + [part.slots for part in nodes]
    leftovers: Any
    if last is not None and reader.same_free and _identical(slots, last.slots):
        pools, leftovers = then.pools, then[LEFTOVERS]
    else:
        pools, leftovers = _owners(view, geometry, slots)
        pools = _kept(pools, then.pools)
    torn, torn_swa, unmapped, swept, unused, shared = leftovers
    facts = Facts(
        sessions, requests, holders, pools, geometry.rows, view.free_rows,
        torn, torn_swa, unmapped, swept, unused, shared, tree,
    )  # fmt: skip
    return Seen(view, facts, rows, nodes, slots)


def _identical(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


# Requests differ first.
_FIELDS = ["requests", *(name for name in View.__struct_fields__ if name != "requests")]


def _same(a: View, b: View) -> bool:
    """Equal but for the order of free lists."""
    for name in _FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        if x != y and not (name.startswith("free_") and sorted(x) == sorted(y)):
            return False
    return True


def _owners(
    view: View, geometry: Geometry, parts: Iterable[Slots]
) -> tuple[dict[str, Pool], tuple[Sequence[Any], ...]]:
    """The pools, and what Facts has as LEFTOVERS."""
    full: list[Owned] = []
    swa: list[Owned] = []
    torn: list[Torn] = []
    torn_swa: list[Torn] = []
    unmapped: list[tuple[str, int]] = []
    swept: list[tuple[int, int]] = []
    unused: list[tuple[int, int]] = []
    live: set[tuple[int, int]] = set()
    for slots in parts:
        full += slots.full
        swa += slots.swa
        live.update(slots.live)
        if slots.wrong is not None:
            torn += slots.wrong.torn
            torn_swa += slots.wrong.torn_swa
            unmapped += slots.wrong.unmapped
            swept += slots.wrong.swept_mapped
            unused += slots.wrong.gap_mapped
    pools = {"full": Pool(geometry.full_pages, view.free_full, full)}
    if geometry.window is not None:
        pools["swa"] = Pool(geometry.swa_pages, view.free_swa, swa)
        free, size = {*view.free_full}, geometry.page_size
        mapped = compress(count(), view.full_to_swa)
        unused = [(slot, view.full_to_swa[slot]) for slot in mapped if slot // size in free] + unused
    led_to = [entry for _, entry in live]
    shared: list[tuple[int, int]] = []
    if len(set(led_to)) < len(led_to):
        times = Counter(led_to)
        shared = sorted((slot, entry) for slot, entry in live if times[entry] > 1)
    return pools, (torn, torn_swa, unmapped, swept, unused, shared)


def _kept(now: dict[str, Part], then: dict[str, Part]) -> dict[str, Part]:
    """What there was then, or the parts of it that are equal."""
    if now == then:
        return then
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
        if _identical(then.nodes, shown):
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
            mapped = _differ(then.full_to_swa, view.full_to_swa)
            self.full = mapped | _differ(then.full_stamps, view.full_stamps)
            self.swa = _differ(then.swa_stamps, view.swa_stamps)
            free = then.free_full == view.free_full and then.free_swa == view.free_swa
            self.same_free = free and not mapped

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
        slots = _within(cells[:length], len(view.full_stamps))
        first, wrong = max(0, cursors.cache_protected_len), Wrong([], [], [], [], [])
        full = self._pages(name, "full", slots, first, wrong.torn)
        swa: list[Owned] = []
        full_read = [*map(view.full_stamps.__getitem__, slots)]
        mapped: Sequence[int] = []
        swa_read: list[int | None] = []
        live: list[tuple[int, int]] = []
        looked = slots
        if self.has_swa:
            mapped = _within([*map(view.full_to_swa.__getitem__, slots)], len(view.swa_stamps))
            swa_read = [view.swa_stamps[m] if m else None for m in mapped]
            dead = max(first, cursors.swa_evicted_seqlen)
            start = -(-dead // page_size) * page_size
            swa = self._pages(name, "swa", mapped, start, wrong.torn_swa)
            live = [*zip(slots[start:], mapped[start:])]
            if not all(mapped[start:]):
                wrong.unmapped.extend((name, p) for p in range(start, length) if not mapped[p])
                live = [(s, m) for s, m in live if m]
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
        slots = _within(node.slots, len(view.full_stamps))
        swa = _within(node.swa_slots, len(view.swa_stamps))
        mapped = [view.full_to_swa[s] for s in slots] if self.has_swa else []
        start, wrong = len(path) - len(slots), Wrong([], [], [], [], [])
        full, swa_pages = (
            [
                Owned(page_name(path[: (start // size + at + 1) * size]), start // size + at, page)
                for _, at, page in self._pages("the tree", pool, own, 0, into)
            ]
            for pool, own, into in (("full", slots, wrong.torn), ("swa", swa, wrong.torn_swa))
        )
        for into in (wrong.torn, wrong.torn_swa):
            into[:] = [
                torn._replace(start=(at := start + torn.start), path=path[: at + len(torn.slots)])
                for torn in into
            ]
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
        self, name: str, pool: str, slots: Sequence[int], start: int, torn: list[Torn]
    ) -> list[Owned]:
        """Pages of the positions from `start` on; zero slots belong to no page."""
        page_size = self.page_size
        first, own = -(-start // page_size), slots[-(-start // page_size) * page_size :]
        heads = own[::page_size]
        whole = heads if page_size == 1 else [s for h in heads for s in range(h, h + page_size)][: len(own)]
        if all(heads) and own == whole and not (page_size > 1 and any(h % page_size for h in heads)):
            pages = heads if page_size == 1 else [h // page_size for h in heads]
            return [*map(_OWNED, zip(repeat(name), count(first), pages))]
        owned = []
        for at in range(-(-start // page_size) * page_size, len(slots), page_size):
            head = slots[at]
            if page_size > 1:
                cells = slots[at : at + page_size]
                if head % page_size or list(cells) != list(range(head, head + len(cells))):
                    if all(cells):
                        torn.append(Torn(name, pool, at, cells))
            if head:
                owned.append(Owned(name, at // page_size, head // page_size))
        return owned


def _within(slots: Sequence[int], size: int) -> Sequence[int]:
    """The slots, 0 for those that there are not."""
    if not slots or (min(slots) >= 0 and max(slots) < size):
        return slots
    return [s if 0 <= s < size else 0 for s in slots]


def _differ(then: Sequence[int], now: Sequence[int]) -> set[int]:
    """Where two lists differ."""
    if len(then) != len(now):
        return {*range(max(len(then), len(now)))}
    return set() if then == now else {*compress(count(), map(ne, then, now))}
