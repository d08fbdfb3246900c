"""View -> Facts: what a system's physical facts come down to, whoever the system is.

Nothing is judged here. A view that is no partition gives facts that some clause refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, count, repeat
from operator import attrgetter

from impl.adapter import NodeView, View
from reference.clauses.facts import (
    Facts, HolderFacts, NodeFacts, Owned, Pool, RequestFacts, SessionFacts, StateFacts, Torn, TreeFacts,
)  # fmt: skip
from reference.geometry import Geometry
from reference.state import Cursors
from reference.prefix_cache import page_name
from reference.radix_tree import Key

NOTHING = View({}, {}, (), (), {}, ())  # of a system that could not be started
_OWNED: Callable[[tuple[str, int, int]], Owned] = partial(tuple.__new__, Owned)


def facts_of(view: View, geometry: Geometry) -> Facts:
    """Gather owners, reads and leftovers. Never raises on a wrong view; indices are clamped."""
    return _Reader(view, geometry).facts()


def misfit(view: View, geometry: Geometry) -> str:
    """Say what a view shows for other sizes than the system was built with; "" if nothing."""
    if view.tree is not None and not geometry.tree:
        return "view().tree: a tree, and there is none in this run (geometry.tree)"
    if view.tree is None and geometry.tree:
        return "view().tree: None, and there is a tree in this run (geometry.tree)"
    if (view.states is None) == bool(geometry.states):
        has, there = ("None", "are") if view.states is None else ("states", "are none")
        return f"view().states: {has}, and there {there} in this run (geometry.states)"
    full, swa = (
        (pages + 1) * geometry.page_size for pages in (geometry.full_pages, geometry.swa_pages)
    )
    sizes = {"full_stamps": full}
    if geometry.window is not None:
        sizes |= {"full_to_swa": full, "swa_stamps": swa}
    for name, least in sizes.items():
        if len(getattr(view, name)) < least:
            return f"view().{name}: {len(getattr(view, name))} entries, for {least} slots"
    return ""


# Requests differ first.
_FIELDS = ["requests", *(name for name in View.__struct_fields__ if name != "requests")]


def same(a: View, b: View) -> bool:
    """Equal but for the order of free lists and tree nodes."""
    for name in _FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        if x == y:
            continue
        if name == "tree" and x is not None and y is not None:
            x, y = ((sorted(t.nodes, key=_PATH), t.lock_holders, t.sizes) for t in (x, y))
        elif name == "states" and x is not None and y is not None:
            # Not what the last batch has read.
            x, y = ((sorted(s.free), s.stamps, s.requests, s.sessions) for s in (x, y))
        elif name.startswith("free_"):
            x, y = sorted(x), sorted(y)
        if x != y:
            return False
    return True


_PATH = attrgetter("path")


def _rows_in_use(view: View) -> list[tuple[str, int, Cursors]]:
    """(holder, row, cursors): a session and the turn that borrows its row are one holder."""
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
    """Walks the rows of a view and the nodes of its tree, and notes who owns which page.

    live: (full slot, SWA slot) of live positions. The others are what Facts has under these names.
    """

    def __init__(self, view: View, geometry: Geometry) -> None:
        self.view = view
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.has_swa = geometry.window is not None
        self.full: list[Owned] = []
        self.swa: list[Owned] = []
        self.live: list[tuple[int, int]] = []
        self.torn: list[Torn] = []
        self.torn_swa: list[Torn] = []
        self.unmapped: list[tuple[str, int]] = []
        self.evicted_mapped: list[tuple[int, int]] = []
        self.unused_mapped: list[tuple[int, int]] = []

    def facts(self) -> Facts:
        view = self.view
        geometry = self.geometry
        if self.has_swa:
            free = {*view.free_full}
            size = self.page_size
            mapped = compress(count(), view.full_to_swa)
            self.unused_mapped = [(s, view.full_to_swa[s]) for s in mapped if s // size in free]
        holders = {name: self._row(name, row, cursors) for name, row, cursors in _rows_in_use(view)}
        tree = self._tree() if view.tree is not None else None
        pools = {"full": Pool(geometry.full_pages, view.free_full, self.full)}
        if self.has_swa:
            pools["swa"] = Pool(geometry.swa_pages, view.free_swa, self.swa)
        sessions = {
            name: SessionFacts(shown.history, shown.closing, shown.cursors)
            for name, shown in view.sessions.items()
        }
        requests = {
            name: RequestFacts(shown.session, shown.origin, shown.text, shown.cursors)
            for name, shown in view.requests.items()
        }
        return Facts(
            sessions, requests, holders, pools, geometry.rows, view.free_rows,
            self.torn, self.torn_swa, self.unmapped, self.evicted_mapped, self.unused_mapped,
            self._shared(), tree, self._states(),
        )  # fmt: skip

    def _shared(self) -> list[tuple[int, int]]:
        """Entries of live positions that lead where another one leads; a slot that several read is one."""
        led_to = [entry for _, entry in self.live]
        if len(set(led_to)) == len(led_to):
            return []
        live = set(self.live)
        times = Counter(entry for _, entry in live)
        return sorted((slot, entry) for slot, entry in live if times[entry] > 1)

    def _row(self, name: str, row: int, cursors: Cursors) -> HolderFacts:
        """Return what a row in use holds, as far as its cursors go."""
        view = self.view
        page_size = self.page_size
        cells = view.rows.get(row, ())
        length = max(0, min(cursors.kv_allocated_len, len(cells)))
        slots = _within(cells[:length], len(view.full_stamps))
        first = max(0, cursors.cache_protected_len)
        self.full += self._pages(name, "full", slots, first, self.torn)
        full_read = [*map(view.full_stamps.__getitem__, slots)]
        swa_read: list[int | None] = []
        if self.has_swa:
            mapped = _within([*map(view.full_to_swa.__getitem__, slots)], len(view.swa_stamps))
            swa_read = [view.swa_stamps[m] if m else None for m in mapped]
            dead = max(first, cursors.swa_evicted_seqlen)
            start = -(-dead // page_size) * page_size
            self.swa += self._pages(name, "swa", mapped, start, self.torn_swa)
            self.live += [(s, m) for s, m in zip(slots[start:], mapped[start:]) if m]
            self.unmapped += [(name, p) for p in range(start, length) if not mapped[p]]
            self.evicted_mapped += [
                (s, m) for s, m in zip(slots[first:start], mapped[first:start]) if m
            ]
            if length % page_size:
                self._gap(slots[-1], mapped[-1])
        return HolderFacts(row, cursors, full_read, swa_read, slots[:first])

    def _gap(self, slot: int, swa: int) -> None:
        """The slots that follow the last one in its page: unmapped, or mapped to what follows."""
        mapping = self.view.full_to_swa
        for at in range(slot + 1, min((slot // self.page_size + 1) * self.page_size, len(mapping))):
            entry = mapping[at]
            if entry and (not swa or entry - swa != at - slot):
                self.unused_mapped.append((at, entry))

    def _states(self) -> StateFacts | None:
        """Slots of recurrent state; a session and the turn that borrows its slot are one holder."""
        shown = self.view.states
        if shown is None:
            return None
        holders = dict(shown.sessions)
        called = dict[str, str]()
        for name, slot in shown.requests.items():
            request = self.view.requests.get(name)
            owner = request.session or name if request is not None else name
            called[name] = owner if holders.get(owner, slot) == slot else f"{owner}/{name}"
            holders[called[name]] = slot
        buffers = {called.get(name, name): slots for name, slots in shown.buffers.items()}
        tracked = {called.get(name, name): slots for name, slots in shown.tracked.items()}
        nodes = self.view.tree.nodes if self.view.tree is not None else ()
        of_nodes = {tuple(node.path): node.state for node in nodes if node.state is not None}
        slots = self.geometry.states, shown.free, shown.stamps
        return StateFacts(*slots, holders, of_nodes, shown.read, buffers, tracked)

    def _tree(self) -> TreeFacts:
        tree = self.view.tree
        assert tree is not None
        nodes = [self._node(node) for node in sorted(tree.nodes, key=_PATH)]
        size = self.page_size
        lock_holders = {name: tuple(holder.slots) for name, holder in tree.lock_holders.items()}
        pages: dict[Key, tuple[tuple[int, ...], bool]] = {}
        for node in nodes:
            for at in range(0, len(node.slots), size):
                end = node.start + at + size
                pages[node.path[:end]] = tuple(node.slots[at : at + size]), node.live
        return TreeFacts(nodes, lock_holders, tree.sizes, pages)

    def _node(self, node: NodeView) -> NodeFacts:
        """A node of the radix tree; its pages are owned under the name of the path to their end."""
        view = self.view
        size = self.page_size
        path = tuple(node.path)
        slots = _within(node.slots, len(view.full_stamps))
        swa = _within(node.swa_slots, len(view.swa_stamps))
        mapped = [view.full_to_swa[s] for s in slots] if self.has_swa else []
        start = len(path) - len(slots)
        for pool, own, owned, torn in (
            ("full", slots, self.full, self.torn),
            ("swa", swa, self.swa, self.torn_swa),
        ):
            wrong: list[Torn] = []
            for _, at, page in self._pages("the tree", pool, own, 0, wrong):
                at += start // size
                owned.append(Owned(page_name(path[: (at + 1) * size]), at, page))
            for each in wrong:
                at = start + each.start
                torn.append(each._replace(start=at, path=path[: at + len(each.slots)]))
        pairs = [(s, m) for s, m in zip(slots, swa or mapped) if m]
        (self.live if swa else self.evicted_mapped).extend(pairs)
        return NodeFacts(
            path, slots, swa, mapped, [view.full_stamps[s] for s in slots],
            [view.swa_stamps[s] for s in swa], node.full_locks, node.swa_locks, node.state,
            node.state_locks,
        )  # fmt: skip

    def _pages(
        self, name: str, pool: str, slots: Sequence[int], start: int, torn: list[Torn]
    ) -> list[Owned]:
        """Pages of the positions from `start` on; zero slots belong to no page."""
        page_size = self.page_size
        first = -(-start // page_size)
        own = slots[-(-start // page_size) * page_size :]
        heads = own[::page_size]
        whole = (
            heads
            if page_size == 1
            else [s for h in heads for s in range(h, h + page_size)][: len(own)]
        )
        if (
            all(heads)
            and own == whole
            and not (page_size > 1 and any(h % page_size for h in heads))
        ):
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
