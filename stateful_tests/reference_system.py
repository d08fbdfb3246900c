"""The reference as a system under test: its ledger made physical with page ids of no meaning.

It checks the operational model against the declarative clauses, with nothing else in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from impl.adapter import Capabilities, RequestView, SessionView, View
from reference import model
from reference.commands import (
    Command, Decode, Done, Extend, Outcome, SpecDecode,
)  # fmt: skip
from reference.geometry import Geometry
from reference.ledger import State, full_pages, holders, swa_pages, text_tokens


class ReferenceSystem:
    """`model.step` behind the adapter. Pages are assigned where the ledger says that one is owned."""

    name = "reference"
    capabilities = Capabilities()

    def reset(self, geometry: Geometry) -> None:
        self.state: State = model.initial(geometry)
        self.geometry = geometry
        self.pages: dict[str, dict[tuple[str, int], int]] = {p: {} for p in geometry.pools}
        self.free = {p: list(range(1, geometry.pages(p) + 1)) for p in geometry.pools}
        self.rows: dict[str, int] = {}
        self.free_rows = list(range(geometry.rows))
        self.stamps = {p: [0] * ((geometry.pages(p) + 1) * geometry.page_size) for p in geometry.pools}

    def apply(self, command: Command) -> Outcome:
        was = self.state
        self.state, outcome = model.step(was, command)
        if isinstance(outcome, Done):
            self._assign()
            if isinstance(command, (Extend, Decode, SpecDecode)):
                self._forward(was)
        return outcome

    def _assign(self) -> None:
        """Give every owned (holder, page index) a page and every holder a row; take back the rest."""
        now = {h.name: h.cursors for h in holders(self.state)}
        for name in [n for n in self.rows if n not in now]:
            self.free_rows.append(self.rows.pop(name))
        for name in now:
            if name not in self.rows:
                self.rows[name] = self.free_rows.pop()
        for pool, pages in self.pages.items():
            owned = full_pages if pool == "full" else swa_pages
            want = {(n, i) for n, c in now.items() for i in owned(c, self.geometry.page_size)}
            for key in [k for k in pages if k not in want]:
                self.free[pool].append(pages.pop(key))
            for key in sorted(want - pages.keys()):
                pages[key] = self.free[pool].pop()

    def _forward(self, was: State) -> None:
        """Write the KV of what each named request committed; allocated-ahead slots hold nothing."""
        then = {r.name: r.cursors.kv_committed_len for r in was.requests if r.cursors is not None}
        page_size = self.geometry.page_size
        for holder in holders(self.state):
            if holder.request is None or holder.request.name not in then:
                continue
            low, high = then[holder.request.name], holder.cursors.kv_committed_len
            tokens = text_tokens(holder.text, high)
            for position in range(low, holder.cursors.kv_allocated_len if low < high else low):
                for pool, pages in self.pages.items():
                    page = pages.get((holder.name, position // page_size))
                    if page is not None:
                        stamp = tokens[position] if position < high else 0
                        self.stamps[pool][page * page_size + position % page_size] = stamp

    def view(self) -> View:
        page_size = self.geometry.page_size
        cells: dict[int, Sequence[int]] = {}
        mapping = [0] * len(self.stamps["full"]) if "swa" in self.pages else []
        for holder in holders(self.state):
            row = []
            for i in full_pages(holder.cursors, page_size):
                first = self.pages["full"][holder.name, i] * page_size
                row += range(first, first + page_size)
                other = self.pages.get("swa", {}).get((holder.name, i))
                if other is not None:
                    mapping[first : first + page_size] = range(
                        other * page_size, (other + 1) * page_size
                    )
            cells[self.rows[holder.name]] = row
        state = self.state
        return View(
            sessions={
                s.name: SessionView(
                    text_tokens(s.history),
                    s.closing,
                    self.rows[s.name] if s.slot is not None else None,
                    s.slot,
                )
                for s in state.sessions
            },
            requests={
                r.name: RequestView(
                    r.session,
                    r.origin,
                    text_tokens(r.text),
                    self.rows.get(r.session or r.name) if r.cursors is not None else None,
                    r.cursors,
                )
                for r in state.requests
            },
            free_full=list(self.free["full"]),
            free_rows=list(self.free_rows),
            rows=cells,
            full_stamps=list(self.stamps["full"]),
            free_swa=list(self.free.get("swa", ())),
            full_to_swa=mapping,
            swa_stamps=list(self.stamps.get("swa", ())),
        )

    def close(self) -> None:
        """Holds nothing."""
