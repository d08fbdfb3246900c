"""The reference as a system under test: its state made physical with page ids of no meaning.

It checks the operational model against the declarative clauses, with nothing else in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from impl.adapter import (
    Capabilities, LockHolderView, NodeView, RequestView, SessionView, StatesView, TreeSizes, TreeView, View,
)  # fmt: skip
from reference import model
from reference import radix_tree as radix
from reference.commands import (
    Command, Decode, Done, Extend, Launch, Mode, Outcome, SpecDecode, UnlockSwa,
)  # fmt: skip
from reference.cursors import page_ends
from reference.geometry import Geometry
from reference.state import (
    IN_BATCH, Cursors, State, Text, full_pages, holders, state_lens, swa_pages, text_tokens,
)  # fmt: skip
from reference.recurrent_states import chained, stamp_after
from reference.prefix_cache import NO_PAGES, Effects, lock_holders, page_name, pages_of
from reference.system_kinds import ROWS
from reference.memoization import memoized
from reference.radix_tree import Key, Tree, state_paths
from reference.token_ids import token_of, tree_key


class ReferenceSystem:
    """`model.step` behind the adapter. Every page that the state owns gets a page number."""

    name = "reference"
    capabilities = Capabilities(
        kind=ROWS.name, mixed_batches=True, swa_tail=True, answers=True, bigram=True, recurrent=True
    )
    state: State
    geometry: Geometry
    pages: dict[str, dict[tuple[str, int], int]]
    free: dict[str, list[int]]
    rows: dict[str, int]
    free_rows: list[int]
    stamps: dict[str, list[int]]
    slots: dict[Hashable, int]
    free_slots: list[int]
    state_stamps: list[int]
    states_read: dict[str, int]

    def reset(self, geometry: Geometry) -> None:
        self.state = model.initial(geometry)
        self.geometry = geometry
        self.pages = {p: {} for p in geometry.pools}
        self.free = {p: list(range(1, geometry.pages(p) + 1)) for p in geometry.pools}
        self.rows = {}
        self.free_rows = list(range(geometry.rows))
        self.stamps = {
            p: [0] * ((geometry.pages(p) + 1) * geometry.page_size) for p in geometry.pools
        }
        self.slots = {}  # of recurrent state, by holder or by path
        self.free_slots = list(range(geometry.states, 0, -1))
        self.state_stamps = [0] * (geometry.states + 1)
        self.states_read = {}

    def apply(self, command: Command) -> Outcome:
        state = self.state
        config = self.state.config
        # nobody tells it the mode, and free mode allows less of this
        if isinstance(command, UnlockSwa):
            state = state._replace(config=config._replace(mode=Mode.FAITHFUL))
        now, outcome, effects = model.step_with_effects(state, command)
        if isinstance(outcome, Done):
            if state is not self.state:
                now = now._replace(config=config)
            self.carry_out(type(command), now, effects)
        return outcome

    def carry_out(self, kind: type, now: State, effects: Effects) -> None:
        """Apply the effects of a command of this kind, which leads to `now`."""
        was = self.state
        self.state = now
        if now is was:
            return
        # given back, even where another takes the name at once
        for pool, pages in self.pages.items():
            for key in effects.gone[pool] & pages.keys():
                # not the next to go: it was free only now
                self.free[pool].insert(0, pages.pop(key))
            if effects.adopted[pool]:
                self._adopt(pool, effects.adopted[pool], was)
        self._assign_pages()
        if now.tree is not was.tree:
            self._write_tree()
        if self.geometry.states:
            self._assign_states(was)
        if kind in (Extend, Decode, SpecDecode, Launch):
            then = dict(turns_of(was))
            turns = dict(turns_of(now))
            for row in rows_of(now):
                if row.holder in turns and then.get(row.holder, row.computed) < row.computed:
                    self._write_row(row, then[row.holder])

    def _adopt(self, pool: str, adopted: set[tuple[str, int]], was: State) -> None:
        """Move pages of rows to the tree, under the name of the path to their end."""
        size = self.geometry.page_size
        pages = self.pages[pool]
        texts = {row.holder: row.text for row in rows_of(was)}
        for holder, index in sorted(adopted & pages.keys()):
            path = self._tree_key(texts[holder])[: (index + 1) * size]
            pages[page_name(path), index] = pages.pop((holder, index))

    def _assign_pages(self) -> None:
        """Give every owned (holder, page index) a page and every holder a row; free the rest."""
        now = {row.holder: row.cursors for row in rows_of(self.state)}
        for name in [n for n in self.rows if n not in now]:
            self.free_rows.append(self.rows.pop(name))
        for name in now:
            if name not in self.rows:
                self.rows[name] = self.free_rows.pop()
        cached = pages_of(self.state.tree) if self.state.tree is not None else NO_PAGES
        for pool, pages in self.pages.items():
            owned = full_pages if pool == "full" else swa_pages
            due = {
                (n, i) for n, c in now.items() for i in owned(c, self.geometry.page_size)
            } | cached[pool]
            for key in sorted(pages.keys() - due):
                self.free[pool].insert(0, pages.pop(key))
            for key in sorted(due - pages.keys()):
                pages[key] = self.free[pool].pop()

    def _assign_states(self, was: State) -> None:
        """Give every state a slot with its content, and note the state that each request has continued
        from."""
        texts = {session.name: session.history for session in self.state.sessions}
        for r in self.state.requests:
            if r.cursors is not None or r.started:
                texts[r.holder] = r.computed_text if r.cursors is not None else r.text
        paths = state_paths(self.state.tree) if self.state.tree is not None else ()
        due: dict[Hashable, int] = {path: chained(path)[-1] for path in paths}
        for name, length in state_lens(self.state).items():
            stamps = chained(text_tokens(texts[name]))
            due[name] = (
                stamp_after(stamps, length) if length <= len(stamps) else self._stamp_of(name)
            )
        for gone in self.slots.keys() - due.keys():
            self.free_slots.insert(0, self.slots.pop(gone))
        for owner, stamp in due.items():
            if owner not in self.slots:
                self.slots[owner] = self.free_slots.pop()
            self.state_stamps[self.slots[owner]] = stamp
        then = {r.name: r for r in was.requests if r.cursors is not None}
        self.states_read = {
            r.name: stamp_after(chained(text_tokens(r.computed_text)), then[r.name].computed_len)
            for r in self.state.requests
            if r.name in then and r.phase in IN_BATCH and r.computed_len > then[r.name].computed_len
        }

    def _stamp_of(self, holder: str) -> int:
        """Return the stamp of a holder's state. A state past the text that its session keeps stays as
        it was."""
        return self.state_stamps[self.slots.get(holder, 0)]

    def _write_tree(self) -> None:
        """Write the tree's pages: a holder that hands pages over has computed the tokens of their path."""
        size = self.geometry.page_size
        tree = self.state.tree
        if tree is None:
            return
        for placed_node in radix.nodes(tree):
            for end in page_ends(placed_node.end, size, placed_node.start):
                key = page_name(placed_node.path[:end]), end // size - 1
                for pool, pages in self.pages.items():
                    if key in pages:
                        first_slot = pages[key] * size
                        self.stamps[pool][first_slot : first_slot + size] = map(
                            token_of, placed_node.path[end - size : end]
                        )

    def _write_row(self, row: RowInUse, start: int) -> None:
        """Write the KV that a row has computed from `start` on; allocated-ahead slots hold nothing."""
        size = self.geometry.page_size
        tokens = text_tokens(row.text, row.computed)
        for position in range(start, row.cursors.kv_allocated_len):
            for pool, pages in self.pages.items():
                page = pages.get((row.holder, position // size))
                if page is not None:
                    stamp = tokens[position] if position < row.computed else 0
                    self.stamps[pool][page * size + position % size] = stamp

    def view(self) -> View:
        """Return the view of a system that has the reference's state, with pages, rows and slots chosen
        here."""
        page_size = self.geometry.page_size
        cells: dict[int, Sequence[int]] = {}
        mapping = [0] * len(self.stamps["full"]) if "swa" in self.pages else []
        for key, page in self.pages["full"].items():
            other = self.pages.get("swa", {}).get(key)
            if other is not None:
                mapping[page * page_size : (page + 1) * page_size] = self._slots("swa", key)
        for row in rows_of(self.state):
            slots = self._cached_slots(self._tree_key(row.text)[: row.cursors.cache_protected_len])
            for i in full_pages(row.cursors, page_size):
                slots += self._slots("full", (row.holder, i))
            cells[self.rows[row.holder]] = slots
        state = self.state
        return View(
            sessions={
                s.name: SessionView(
                    text_tokens(s.history), s.closing, self._row(s.name, s.slot), s.slot
                )
                for s in state.sessions
            },
            requests={
                r.name: RequestView(
                    r.session,
                    r.origin,
                    text_tokens(r.text),
                    self._row(r.holder, r.cursors),
                    r.cursors,
                )
                for r in state.requests
            },
            free_full=self.free["full"],
            free_rows=self.free_rows,
            rows=cells,
            full_stamps=self.stamps["full"],
            free_swa=self.free.get("swa", ()),
            full_to_swa=mapping,
            swa_stamps=self.stamps.get("swa", ()),
            tree=self._tree_view(),
            states=self._states_view(),
        )

    def _states_view(self) -> StatesView | None:
        state = self.state
        if not self.geometry.states:
            return None
        sessions = {s.name: self.slots[s.name] for s in state.sessions if s.slot is not None}
        having = ((r.name, r.holder) for r in state.requests if r.cursors is not None)
        requests = {name: self.slots[holder] for name, holder in having if holder in self.slots}
        return StatesView(self.free_slots, self.state_stamps, requests, sessions, self.states_read)

    def _tree_key(self, text: Text) -> Key:
        return tree_key(text_tokens(text), self.geometry.bigram)

    def _row(self, holder: str, cursors: Cursors | None) -> int | None:
        return self.rows.get(holder) if cursors is not None else None

    def _slots(self, pool: str, key: tuple[str, int]) -> range:
        """Return the slots of an owned page."""
        first_slot = self.pages[pool][key] * self.geometry.page_size
        return range(first_slot, first_slot + self.geometry.page_size)

    def _cached_slots(self, path: Sequence[int], start: int = 0, pool: str = "full") -> list[int]:
        """Return the slots that the tree has for `path` from `start` on."""
        size = self.geometry.page_size
        slots: list[int] = []
        for end in page_ends(len(path), size, start):
            slots += self._slots(pool, (page_name(tuple(path[:end])), end // size - 1))
        return slots

    def _tree_view(self) -> TreeView | None:
        """Return the view of the tree; None without one."""
        if self.state.tree is None:
            return None
        shape, sizes = _tree_layout(self.state.tree)
        nodes = [
            NodeView(
                path,
                slots=self._cached_slots(path, start),
                swa_slots=self._cached_slots(path, start, "swa") if live else [],
                full_locks=full_locks,
                swa_locks=swa_locks,
                state=self.slots.get(path),
                state_locks=state_locks,
            )
            for path, start, live, full_locks, swa_locks, state_locks in shape
        ]
        holders = {
            k: LockHolderView(self._cached_slots(key))
            for k, key in lock_holders(self.state).items()
        }
        return TreeView(nodes, holders, sizes)

    def close(self) -> None:
        """Release nothing: it holds nothing."""


class RowInUse(NamedTuple):
    """A row in use.

    text: the content of its positions, of which the first `computed` are computed.
    """

    holder: str
    cursors: Cursors
    text: Text
    computed: int


@memoized
def rows_of(state: State) -> tuple[RowInUse, ...]:
    """Return the rows in use."""
    return tuple(
        RowInUse(h.name, h.cursors, h.text, h.cursors.kv_committed_len)
        if h.request is None
        else RowInUse(h.name, h.cursors, h.request.computed_text, h.request.computed_len)
        for h in holders(state)
    )


def turns_of(state: State) -> list[tuple[str, int]]:
    """Return each admitted turn with the number of its computed tokens."""
    return [(r.holder, r.computed_len) for r in state.requests if r.cursors is not None]


def layout(state: State) -> Hashable:
    """Return everything in a state that rows, pages, stamps and the tree depend on, whatever its
    history."""
    tree = state.tree and (
        _tree_layout(state.tree),
        state_paths(state.tree),
        *lock_holders(state).items(),
    )
    return rows_of(state), *turns_of(state), tree, *state_lens(state).items()


@memoized
def _tree_layout(tree: Tree) -> tuple[tuple[tuple[Key, int, bool, int, int, int], ...], TreeSizes]:
    """Return (path, start, whether it shows SWA slots, locks) of the nodes, and the sizes."""
    has_swa = tree.window is not None
    shape = []
    for placed in radix.nodes(tree):
        on_path = [k for k in tree.locks if k.key[: placed.end] == placed.path]
        swa_locks = sum(k.swa_from < placed.end for k in on_path) if has_swa else 0
        state_locks = sum(k.state and k.key == placed.path for k in on_path)
        live = placed.node.live and has_swa
        shape.append((placed.path, placed.start, live, len(on_path), swa_locks, state_locks))
    return tuple(shape), TreeSizes(*radix.sizes(tree))
