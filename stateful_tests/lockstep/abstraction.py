"""View -> Facts: what a system's physical facts come down to, whoever the system is.

Nothing is judged here. A view that is no partition gives facts that some clause refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from impl.adapter import NodeView, View
from reference.clauses.facts import (
    Facts, HolderFacts, NodeFacts, Owned, Pool, RequestFacts, SessionFacts, TreeFacts,
)  # fmt: skip
from reference.geometry import Geometry
from reference.ledger import Cursors
from reference.prefix_cache import page_name


def facts_of(view: View, geometry: Geometry) -> Facts:
    """Gather owners, reads and leftovers. Never raises on a wrong view; indices are clamped."""
    reader = _Reader(view, geometry)
    for name, row, cursors in _holders(view):
        reader.read(name, row, cursors)
    tree = None
    if view.tree is not None:
        nodes = [reader.node(node) for node in sorted(view.tree.nodes, key=lambda n: tuple(n.path))]
        lock_holders = {name: tuple(holder.slots) for name, holder in view.tree.lock_holders.items()}
        size = geometry.page_size
        pages = {
            node.path[: node.start + at + size]: (tuple(node.slots[at : at + size]), node.live)
            for node in nodes
            for at in range(0, len(node.slots), size)
        }
        tree = TreeFacts(nodes, lock_holders, view.tree.sizes, pages)
    pools = {"full": Pool(geometry.full_pages, view.free_full, reader.full)}
    if geometry.window is not None:
        pools["swa"] = Pool(geometry.swa_pages, view.free_swa, reader.swa)
    unused: list[tuple[int, int]] = []
    if geometry.window is not None:
        free = {*view.free_full}
        unused = [e for e in enumerate(view.full_to_swa) if e[1] and e[0] // geometry.page_size in free]
    led_to = [swa for _, swa in reader.live]
    shared = {} if len(set(led_to)) == len(led_to) else Counter(led_to)
    return Facts(
        {n: SessionFacts(s.history, s.closing, s.cursors) for n, s in view.sessions.items()},
        {n: RequestFacts(r.session, r.origin, r.text, r.cursors) for n, r in view.requests.items()},
        reader.holders,
        pools,
        geometry.rows,
        view.free_rows,
        reader.torn["full"],
        reader.torn["swa"],
        reader.unmapped,
        reader.swept_mapped,
        unused + reader.gap_mapped,
        sorted(s for s, n in shared.items() if n > 1),
        tree,
    )


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
    """Walks the rows of a view."""

    def __init__(self, view: View, geometry: Geometry) -> None:
        self.view = view
        self.page_size = geometry.page_size
        self.has_swa = geometry.window is not None
        self.holders: dict[str, HolderFacts] = {}
        self.full: list[Owned] = []
        self.swa: list[Owned] = []
        self.torn: dict[str, list[str]] = {"full": [], "swa": []}
        self.unmapped: list[tuple[str, int]] = []
        self.swept_mapped: list[tuple[int, int]] = []
        self.gap_mapped: list[tuple[int, int]] = []
        self.live: set[tuple[int, int]] = set()  # (full slot, SWA slot) of live positions

    def read(self, name: str, row: int, cursors: Cursors) -> None:
        view, page_size = self.view, self.page_size
        cells = view.rows.get(row, ())
        length = max(0, min(cursors.kv_allocated_len, len(cells)))
        slots = [s if 0 <= s < len(view.full_stamps) else 0 for s in cells[:length]]
        first = max(0, cursors.cache_protected_len)
        self.full += self._pages(name, "full", slots, first)
        full_read = [view.full_stamps[s] for s in slots]
        swa_read: list[int | None] = []
        if self.has_swa:
            size = len(view.swa_stamps)
            mapped = [m if 0 <= (m := view.full_to_swa[s]) < size else 0 for s in slots]
            swa_read = [view.swa_stamps[m] if m else None for m in mapped]
            dead = max(first, cursors.swa_evicted_seqlen)
            live = -(-dead // page_size) * page_size
            self.unmapped += [(name, p) for p in range(live, length) if not mapped[p]]
            self.swa += self._pages(name, "swa", mapped, live)
            self.live.update((s, m) for s, m in zip(slots[live:], mapped[live:]) if m)
            self.swept_mapped += [(s, m) for s, m in zip(slots[first:live], mapped[first:live]) if m]
            if length % page_size:
                self._gap(slots[-1], mapped[-1])
        self.holders[name] = HolderFacts(row, cursors, full_read, swa_read, slots[:first])

    def node(self, node: NodeView) -> NodeFacts:
        """A node of the radix tree; its pages are owned under the name of the path to their end."""
        view, size, path = self.view, self.page_size, tuple(node.path)
        slots = [s if 0 <= s < len(view.full_stamps) else 0 for s in node.slots]
        swa = [s if 0 <= s < len(view.swa_stamps) else 0 for s in node.swa_slots]
        mapped = [view.full_to_swa[s] for s in slots] if self.has_swa else []
        start = len(path) - len(slots)
        for pool, own, into in (("full", slots, self.full), ("swa", swa, self.swa)):
            for owned in self._pages("the tree", pool, own, 0):
                at = start // size + owned.at
                into.append(Owned(page_name(path[: (at + 1) * size]), at, owned.page))
        if swa:
            self.live.update((s, m) for s, m in zip(slots, swa) if m)
        else:
            self.swept_mapped += [(s, m) for s, m in zip(slots, mapped) if m]
        return NodeFacts(
            path, slots, swa, mapped, [view.full_stamps[s] for s in slots],
            [view.swa_stamps[s] for s in swa], node.full_locks, node.swa_locks,
        )  # fmt: skip

    def _gap(self, slot: int, swa: int) -> None:
        """The slots that follow the last one in its page: unmapped, or mapped to what follows."""
        for step in range(1, self.page_size - slot % self.page_size):
            if slot + step < len(self.view.full_to_swa):
                entry = self.view.full_to_swa[slot + step]
                if entry and (not swa or entry != swa + step):
                    self.gap_mapped.append((slot + step, entry))

    def _pages(self, name: str, pool: str, slots: Sequence[int], start: int) -> list[Owned]:
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
                        self.torn[pool].append(f"{pool} slots of {name} at [{at}, {end}): {list(cells)}")
            if head:
                owned.append(Owned(name, at // page_size, head // page_size))
        return owned
