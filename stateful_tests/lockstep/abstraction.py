"""View -> Facts: owners, reads and leftovers, computed from the rows, free lists and stamps that are shown.

Nothing is judged here. A view in which pages are lost or owned twice gives facts that violate a clause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, count, repeat
from operator import attrgetter
from typing import Any

from impl.adapter import NodeView, View
from reference.clauses.facts import (
    Facts, HolderFacts, NodeFacts, Owned, Pool, RequestFacts, SessionFacts, StateFacts, Torn, TreeFacts,
    TreePage,
)  # fmt: skip
from reference.geometry import Geometry
from reference.state import Cursors
from reference.prefix_cache import page_name
from reference.radix_tree import Key

NOTHING = View({}, {}, (), (), {}, ())  # stands for the view of a system that could not be started
# `Owned(*values)` without its Python constructor: a step makes one for each page in use.
_OWNED: Callable[[tuple[str, int, int]], Owned] = partial(tuple.__new__, Owned)


def facts_of(view: View, geometry: Geometry) -> Facts:
    """Return owners, reads and leftovers of a view. Never raises on a wrong view: slots outside of a
    pool become 0."""
    return _Reader(view, geometry).facts()


def misfit(view: View, geometry: Geometry) -> str:
    """Describe how a view does not fit the sizes that the system was built with; "" if it fits."""
    if view.tree is not None and not geometry.tree:
        return "view().tree: a tree, and there is none in this run (geometry.tree)"
    if view.tree is None and geometry.tree:
        return "view().tree: None, and there is a tree in this run (geometry.tree)"
    if (view.states is None) == bool(geometry.states):
        if view.states is None:
            return "view().states: None, and there are in this run (geometry.states)"
        return "view().states: states, and there are none in this run (geometry.states)"
    # Page 0 is padding, on top of the pages that geometry counts.
    full_slots = (geometry.full_pages + 1) * geometry.page_size
    swa_slots = (geometry.swa_pages + 1) * geometry.page_size
    sizes = {"full_stamps": full_slots}
    if geometry.window is not None:
        sizes |= {"full_to_swa": full_slots, "swa_stamps": swa_slots}
    for name, least in sizes.items():
        if len(getattr(view, name)) < least:
            return f"view().{name}: {len(getattr(view, name))} entries, for {least} slots"
    return ""


# Requests change with nearly every command, so two views that differ mostly differ there.
_FIELDS = ["requests", *(name for name in View.__struct_fields__ if name != "requests")]


def same(a: View, b: View) -> bool:
    """Return whether two views are equal apart from the order of free lists and tree nodes."""
    for name in _FIELDS:
        one = getattr(a, name)
        other = getattr(b, name)
        if one != other and (
            one is None or other is None or _sorted_value(name, one) != _sorted_value(name, other)
        ):
            return False
    return True


def _sorted_value(name: str, value: Any) -> object:
    """Return the value of a field of View with its lists sorted where order has no meaning."""
    if name == "tree":
        return sorted(value.nodes, key=_PATH), value.lock_holders, value.sizes
    if name == "states":
        # The slots that the last batch has read are left out: they belong to that command alone.
        return sorted(value.free), value.stamps, value.requests, value.sessions
    return sorted(value) if name.startswith("free_") else value


_PATH = attrgetter("path")


def _rows_in_use(view: View) -> list[tuple[str, int, Cursors]]:
    """Return (holder, row, cursors) of each row in use. A session and the turn that borrows its row are one
    holder."""
    rows = []
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
        rows.append((owner, request.row, request.cursors))
    for name, session in view.sessions.items():
        if session.row is not None and session.cursors is not None and name not in lent:
            rows.append((name, session.row, session.cursors))
    return rows


class _Reader:
    """Walks the rows of a view and the nodes of its tree, and notes the owner of each page.

    full, swa: the pages in use of each pool, by owner.
    live: (full slot, SWA slot) of live positions.
    torn and those below: the fields of Facts with these names.
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
        """Return the facts of the view."""
        view = self.view
        geometry = self.geometry
        if self.has_swa:
            free_pages = {*view.free_full}
            size = self.page_size
            mapped = compress(count(), view.full_to_swa)
            self.unused_mapped = [
                (s, view.full_to_swa[s]) for s in mapped if s // size in free_pages
            ]
        holders = {name: self._read_row(name, row, cursors) for name, row, cursors in _rows_in_use(view)}
        tree = self._read_tree() if view.tree is not None else None
        pools = {"full": Pool(geometry.full_pages, view.free_full, self.full)}
        if self.has_swa:
            pools["swa"] = Pool(geometry.swa_pages, view.free_swa, self.swa)
        sessions = {
            name: SessionFacts(session_view.history, session_view.closing, session_view.cursors)
            for name, session_view in view.sessions.items()
        }
        requests = {
            name: RequestFacts(shown.session, shown.origin, shown.text, shown.cursors)
            for name, shown in view.requests.items()
        }
        return Facts(
            sessions=sessions,
            requests=requests,
            holders=holders,
            pools=pools,
            rows=geometry.rows,
            free_rows=view.free_rows,
            torn=self.torn,
            torn_swa=self.torn_swa,
            unmapped=self.unmapped,
            evicted_mapped=self.evicted_mapped,
            unused_mapped=self.unused_mapped,
            shared=self._shared_entries(),
            tree=tree,
            states=self._read_states(),
        )

    def _shared_entries(self) -> list[tuple[int, int]]:
        """Return entries at live positions of different full slots that name the same SWA slot. A
        full slot that several holders share counts once."""
        swa_slots = [swa for _, swa in self.live]
        if len(set(swa_slots)) == len(swa_slots):
            return []
        live = set(self.live)
        times = Counter(swa for _, swa in live)
        return sorted((slot, swa) for slot, swa in live if times[swa] > 1)

    def _read_row(self, name: str, row: int, cursors: Cursors) -> HolderFacts:
        """Return what a row in use holds up to kv_allocated_len, and note its pages and SWA entries."""
        view = self.view
        page_size = self.page_size
        cells = view.rows.get(row, ())
        length = max(0, min(cursors.kv_allocated_len, len(cells)))
        slots = _clip_slots(cells[:length], len(view.full_stamps))
        own_begin = max(0, cursors.cache_protected_len)
        self.full += self._note_pages(name, "full", slots, own_begin, self.torn)
        full_read = [*map(view.full_stamps.__getitem__, slots)]
        swa_read: list[int | None] = []
        if self.has_swa:
            mapped = _clip_slots([*map(view.full_to_swa.__getitem__, slots)], len(view.swa_stamps))
            swa_read = [view.swa_stamps[m] if m else None for m in mapped]
            dead = max(own_begin, cursors.swa_evicted_seqlen)
            start = -(-dead // page_size) * page_size
            self.swa += self._note_pages(name, "swa", mapped, start, self.torn_swa)
            self.live += [(s, m) for s, m in zip(slots[start:], mapped[start:]) if m]
            self.unmapped += [(name, p) for p in range(start, length) if not mapped[p]]
            self.evicted_mapped += [
                (s, m) for s, m in zip(slots[own_begin:start], mapped[own_begin:start]) if m
            ]
            if length % page_size:
                self._check_rest_of_page(slots[-1], mapped[-1])
        return HolderFacts(row, cursors, full_read, swa_read, slots[:own_begin])

    def _check_rest_of_page(self, last: int, last_swa: int) -> None:
        """Note the slots behind the last allocated one in its page whose entries are wrong: they must be
        unmapped, or mapped to the SWA slots behind `last_swa`."""
        mapping = self.view.full_to_swa
        page_end = (last // self.page_size + 1) * self.page_size
        for slot in range(last + 1, min(page_end, len(mapping))):
            swa = mapping[slot]
            if swa and (not last_swa or swa - last_swa != slot - last):
                self.unused_mapped.append((slot, swa))

    def _read_states(self) -> StateFacts | None:
        """Return the slots of recurrent state; a session and the turn that borrows its slot are one
        holder."""
        states_view = self.view.states
        if states_view is None:
            return None
        holders = dict(states_view.sessions)
        holder_of = dict[str, str]()  # request -> its name, or that of its session
        for name, slot in states_view.requests.items():
            request = self.view.requests.get(name)
            owner = request.session or name if request is not None else name
            holder_of[name] = owner if holders.get(owner, slot) == slot else f"{owner}/{name}"
            holders[holder_of[name]] = slot
        buffers = {holder_of.get(name, name): slots for name, slots in states_view.buffers.items()}
        tracked = {holder_of.get(name, name): slots for name, slots in states_view.tracked.items()}
        nodes = self.view.tree.nodes if self.view.tree is not None else ()
        of_nodes = {tuple(node.path): node.state for node in nodes if node.state is not None}
        return StateFacts(
            size=self.geometry.states,
            free=states_view.free,
            stamps=states_view.stamps,
            holders=holders,
            nodes=of_nodes,
            read=states_view.read,
            buffers=buffers,
            tracked=tracked,
            reached=states_view.reached,
            verifies=states_view.verifies,
        )

    def _read_tree(self) -> TreeFacts:
        tree = self.view.tree
        assert tree is not None
        nodes = [self._read_node(node) for node in sorted(tree.nodes, key=_PATH)]
        size = self.page_size
        lock_holders = {name: tuple(holder.slots) for name, holder in tree.lock_holders.items()}
        pages: dict[Key, TreePage] = {}
        for node in nodes:
            for index in range(0, len(node.slots), size):
                end = node.start + index + size
                pages[node.path[:end]] = TreePage(tuple(node.slots[index : index + size]), node.live)
        return TreeFacts(nodes, lock_holders, tree.sizes, pages)

    def _read_node(self, node: NodeView) -> NodeFacts:
        """Return the facts of a tree node, and note its pages. The owner of a page is the path to its end."""
        view = self.view
        size = self.page_size
        path = tuple(node.path)
        slots = _clip_slots(node.slots, len(view.full_stamps))
        swa = _clip_slots(node.swa_slots, len(view.swa_stamps))
        mapped = [view.full_to_swa[s] for s in slots] if self.has_swa else []
        start = len(path) - len(slots)
        for pool, own, owned, torn in (
            ("full", slots, self.full, self.torn),
            ("swa", swa, self.swa, self.torn_swa),
        ):
            wrong: list[Torn] = []
            for _, page_in_node, page in self._note_pages("the tree", pool, own, 0, wrong):
                number = start // size + page_in_node
                owned.append(Owned(page_name(path[: (number + 1) * size]), number, page))
            for each in wrong:
                position = start + each.start
                torn.append(each._replace(start=position, path=path[: position + len(each.slots)]))
        if swa:
            self.live += [(s, m) for s, m in zip(slots, swa) if m]
        else:  # a tombstone must not be mapped
            self.evicted_mapped += [(s, m) for s, m in zip(slots, mapped) if m]
        return NodeFacts(
            path,
            slots=slots,
            swa_slots=swa,
            mapped=mapped,
            full_read=[view.full_stamps[s] for s in slots],
            swa_read=[view.swa_stamps[s] for s in swa],
            full_locks=node.full_locks,
            swa_locks=node.swa_locks,
            state=node.state,
            state_locks=node.state_locks,
        )

    def _note_pages(
        self, name: str, pool: str, slots: Sequence[int], start: int, torn: list[Torn]
    ) -> list[Owned]:
        """Return the pages of the positions from the first page boundary at or after `start` on. Slots that
        are not one page in order go to `torn`; a page whose first slot is 0 has no owner."""
        page_size = self.page_size
        first_page = -(-start // page_size)
        own_slots = slots[first_page * page_size :]
        heads = own_slots[::page_size]
        # Nearly every sequence is made of whole pages in order: the loop below is for the others.
        if all(heads) and _in_order(own_slots, heads, page_size):
            pages = heads if page_size == 1 else [head // page_size for head in heads]
            return [*map(_OWNED, zip(repeat(name), count(first_page), pages))]
        owned = []
        for index in range(first_page * page_size, len(slots), page_size):
            head = slots[index]
            cells = slots[index : index + page_size]
            if all(cells) and not _in_order(cells, [head], page_size):
                torn.append(Torn(name, pool, index, cells))
            if head:
                owned.append(Owned(name, index // page_size, head // page_size))
        return owned


def _in_order(slots: Sequence[int], heads: Sequence[int], page_size: int) -> bool:
    """Return whether slots are those of the pages that begin at `heads`, in order; the last page may be
    cut."""
    if page_size == 1:
        return True
    if any(head % page_size for head in heads):
        return False
    expected = [slot for head in heads for slot in range(head, head + page_size)]
    return list(slots) == expected[: len(slots)]


def _clip_slots(slots: Sequence[int], size: int) -> Sequence[int]:
    """Return the slots, with 0 in the place of each that is outside of a pool of `size` slots."""
    if not slots or (min(slots) >= 0 and max(slots) < size):
        return slots
    return [s if 0 <= s < size else 0 for s in slots]
