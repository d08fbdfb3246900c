"""Level `pages`: rows, free lists, mapping and tree at a step, judged by clauses about states; token ids.

Contents are not in a log. But what was committed in a row stays where it is: its slots may change only where
the tree has taken over its pages. So a row that suddenly names others would be read wrong (READ-1).
"""

from __future__ import annotations

from collections.abc import Iterator

from impl.adapter import NodeView, RequestView, TreeView, View
from impl.sglang.server.events import Paged
from reference.clauses import CLAUSES
from reference.clauses.step import Step
from reference.commands import CheckBusy, Done
from reference.geometry import Geometry
from reference.ledger import Cursors, State
from stateful_tests.lockstep.abstraction import facts_of
from stateful_tests.watched.judging import Verdict

ASKED = tuple(CLAUSES[name] for name in ("OWN-5", "OWN-4", "MAP-2", "MAP-3", "OWN-2", "OWN-1", "OWN-3"))


class TextJudge:
    """Remembers token ids: of inputs, of outputs as they come, of sessions' histories."""

    def __init__(self) -> None:
        self.history: dict[str, list[int]] = {}
        self.inputs: dict[str, list[int]] = {}
        self._said: dict[str, list[int]] = {}

    def asks(self, request: str, session: str | None, ids: list[int] | None) -> Iterator[Verdict]:
        """A request comes: its input begins with what its session remembers."""
        if ids is None:
            return
        self.inputs[request] = ids
        had = self.history.get(session or "", [])
        if ids[: len(had)] != had:
            at = next((n for n, (one, two) in enumerate(zip(ids, had)) if one != two), len(ids))
            yield Verdict("SES-1", f"the history of {session}", f"another token at position {at} of it")

    def says(self, request: str, ids: list[int]) -> None:
        """Outputs of a result."""
        if ids:
            self._said.setdefault(request, []).extend(ids)

    def ends(self, request: str, ids: list[int] | None, goes_on: bool) -> Iterator[Verdict]:
        """All outputs of a request that gives its row back."""
        if ids is None:
            return
        said = self._said.get(request, [])
        if ids[: len(said)] != said:
            yield Verdict("SES-1", f"{request} has said {said[-8:]} up to {len(said)}", f"has {ids[-8:]}")
        if not goes_on:
            self._said.pop(request, None)

    def keeps(self, request: str, session: str | None, outputs: list[int] | None, length: int) -> None:
        """A turn has ended, and its session remembers so much of the text."""
        text = [*self.inputs.pop(request, []), *(outputs or [])]
        if session is not None and outputs is not None:
            self.history[session] = text[:length]


class PageJudge:
    """Remembers rows from step to step."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._rows: dict[str, tuple[Cursors, list[int]]] = {}

    def forget(self, holder: str) -> None:
        """Its row was given back: a new one has nothing to do with it."""
        self._rows.pop(holder, None)

    def cut(self, holder: str, length: int) -> None:
        """No more than this is committed in its row; what comes after may be written anew."""
        if holder in self._rows:
            cursors, slots = self._rows[holder]
            least = min(cursors.kv_committed_len, length)
            self._rows[holder] = cursors._replace(kv_committed_len=least), slots

    def judge(self, state: State, e: Paged) -> Iterator[Verdict]:
        """What is wrong with the pages of a step."""
        facts = facts_of(self._view(e), self.geometry)
        step = Step(state.config, CheckBusy(), Done(), Done(), state, state, facts, facts, True)
        for clause in ASKED:
            failure = clause.check(step)
            if failure is not None:
                yield Verdict(clause.id, *failure)
        for name, (_, cells, slots) in e.owners.items():
            cursors = Cursors(*cells)
            before, had = self._rows.get(name, (cursors, slots))
            start = max(before.cache_protected_len, cursors.cache_protected_len)
            end = min(before.kv_committed_len, cursors.kv_committed_len)
            end = min(end, len(had), len(slots))
            moved = next((at for at in range(start, end) if had[at] != slots[at]), None)
            if moved is not None:
                want = f"{name} keeps slot {had[moved]} at position {moved}, which is committed"
                yield Verdict("READ-1", want, f"its row names {slots[moved]} there")
            self._rows[name] = cursors, slots
        for name in self._rows.keys() - e.owners.keys():
            del self._rows[name]

    def _view(self, e: Paged) -> View:
        geometry, owners = self.geometry, e.owners
        size = (geometry.full_pages + 1) * geometry.page_size
        swa = (geometry.swa_pages + 1) * geometry.page_size if geometry.window is not None else 0
        tree = None
        if e.nodes is not None:
            tree = TreeView(tuple(NodeView(*node) for node in e.nodes), {})
        return View(
            sessions={},
            requests={n: RequestView(None, 0, (), row, Cursors(*c)) for n, (row, c, _) in owners.items()},
            free_full=e.free_full, free_rows=e.free_rows,
            rows={row: slots for row, _, slots in owners.values()}, full_stamps=[0] * size,
            free_swa=e.free_swa or (), full_to_swa=e.mapping or (), swa_stamps=[0] * swa, tree=tree,
        )  # fmt: skip
