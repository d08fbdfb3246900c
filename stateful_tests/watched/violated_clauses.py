"""The clause that a difference between rules and server violates, decided by the clauses themselves.

A log of lengths shows cursors, not pages. So the facts after a command are the reference's, with the values
that the log shows; the clauses that read nothing else are checked on these.

A log of level `pages` also shows token ids, and at each step rows, free lists, mapping and tree, on which
clauses about states are checked. It has no contents. But committed tokens of a row stay in their slots,
unless the tree has adopted its pages. So a row that suddenly names other slots would be read wrong (READ-1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from impl.adapter import NodeView, RequestView, StatesView, TreeView, View
from impl.sglang.server.events import Paged, Snapshot, ShownStates
from reference.clauses import CLAUSES
from reference.clauses.facts import Facts, RequestFacts, SessionFacts
from reference.clauses.step import Step, cursors_text
from reference.commands import CheckBusy, Command, Done, Outcome
from reference.geometry import Geometry
from reference.state import Cursors, State, holders, text_tokens
from stateful_tests.lockstep.abstraction import facts_of

# In the order of evaluation; the others read pages, contents or the tree.
_OF_LENGTHS = tuple(
    each
    for name, each in CLAUSES.items()
    if name in ("OUT-1", "OUT-3", "LEN-2", "LEN-3", "LEN-1", "LEN-4", "SES-2", "SES-1", "SWA-1")
)
_OF_PAGES = tuple(
    CLAUSES[name]
    for name in ("OWN-5", "OWN-4", "MAP-1", "MAP-2", "MAP-3", "OWN-2", "OWN-1", "OWN-3", "STA-6")
)


class Verdict(NamedTuple):
    """A clause that does not hold: the expected and the observed value."""

    clause: str
    expected: str
    observed: str


class Shown(NamedTuple):
    """The facts of a log after a command: cursors of requests, and of slots (None: it keeps none)."""

    requests: dict[str, Cursors]
    slots: dict[str, Cursors | None]


def verdict(
    command: Command, was: State, now: State, expected: Outcome, shown: Shown, overreach: str = ""
) -> Verdict:
    """Return the first clause that the server violates with the cursors it shows; REF-1 if none of
    these applies."""
    before = _facts(was, Shown({}, {}))
    after = _facts(now, shown)
    step = Step(
        config=was.config,
        command=command,
        expected=expected,
        outcome=Done(),
        was=was,
        now=now,
        before=before,
        after=after,
        unchanged=False,
        overreach=overreach,
        tree_policy_is_free=True,
        locks_before={},
    )
    for clause in _OF_LENGTHS:
        failure = clause.check(step)
        if failure is not None:
            return Verdict(clause.id, failure.expected, failure.observed)
    cursors = {r.name: r.cursors for r in now.requests} | {
        f"slot of {s.name}": s.slot for s in now.sessions
    }
    shown_cursors = shown.requests | {f"slot of {name}": slot for name, slot in shown.slots.items()}
    name = next(name for name, got in shown_cursors.items() if cursors.get(name) != got)
    return Verdict("REF-1", f"{name}: {cursors_text(cursors.get(name))}", cursors_text(shown_cursors[name]))


def _facts(state: State, shown: Shown) -> Facts:
    requests = {}
    for r in state.requests:
        cursors = shown.requests.get(r.name, r.cursors)
        requests[r.name] = RequestFacts(r.session, r.origin, text_tokens(r.text), cursors)
    sessions = {}
    for s in state.sessions:
        slot = shown.slots.get(s.name, s.slot)
        sessions[s.name] = SessionFacts(text_tokens(s.history), s.closing, slot)
    return Facts(sessions, requests, {}, {}, state.config.geometry.rows, ())


class TextJudge:
    """Records token ids: of inputs, of outputs as they come, of sessions' histories."""

    def __init__(self) -> None:
        self.history: dict[str, list[int]] = {}
        self.inputs: dict[str, list[int]] = {}
        self._outputs: dict[str, list[int]] = {}

    def begin(self, e: Snapshot) -> None:
        """Take the texts of a snapshot."""
        self.history = {s.session: s.ids for s in e.sessions if s.ids is not None}
        self.inputs = {r.request: r.ids[: r.tokens] for r in e.requests if r.ids is not None}
        self._outputs = {r.request: r.ids[r.tokens :] for r in e.requests if r.ids is not None}

    def check_snapshot(self, e: Snapshot) -> Iterator[Verdict]:
        """Compare the texts of a snapshot with the recorded ones."""
        for r in e.requests:
            text = [*self.inputs.get(r.request, []), *self._outputs.get(r.request, [])]
            if r.ids is not None and r.ids[: len(text)] != text:
                yield Verdict("SES-1", f"{len(text)} tokens of {r.request}, as they came", "others")
        for s in e.sessions:
            had = self.history.get(s.session)
            if s.turn is None and s.ids and had is not None and s.ids != had:
                yield Verdict(
                    "SES-1", f"{len(had)} tokens of {s.session}, as its turns left them", "others"
                )

    def note_input(self, request: str, session: str | None, ids: list[int] | None) -> Iterator[Verdict]:
        """Record the input of a request, and compare its beginning with its session's history."""
        if ids is None:
            return
        self.inputs[request] = ids
        had = self.history.get(session or "", [])
        if ids[: len(had)] != had:
            pairs = enumerate(zip(ids, had))
            position = next((n for n, (token, before) in pairs if token != before), len(ids))
            yield Verdict(
                "SES-1", f"the history of {session}", f"another token at position {position} of it"
            )

    def note_outputs(self, request: str, ids: list[int]) -> None:
        """Record the outputs of a result."""
        self._outputs.setdefault(request, []).extend(ids)

    def check_end(self, request: str, ids: list[int] | None, goes_on: bool) -> Iterator[Verdict]:
        """Compare all outputs of a request that gives its row back."""
        if ids is None:
            return
        outputs = self._outputs.get(request, [])
        if ids[: len(outputs)] != outputs:
            expected = f"the first {len(outputs)} outputs of {request}, the last of them {outputs[-8:]}"
            yield Verdict("SES-1", expected, f"has {ids[-8:]}")
        if not goes_on:
            self._outputs.pop(request, None)

    def note_history(self, request: str, session: str, outputs: list[int] | None, length: int) -> None:
        """Record the history of a session whose turn has ended: so many tokens of the text."""
        text = [*self.inputs.pop(request, []), *(outputs or [])]
        self.history[session] = text[:length]


class PageJudge:
    """Records rows from step to step, and compares them."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._rows: dict[str, tuple[Cursors, list[int], int]] = {}
        self._numbers: set[int] = set()  # of all rows, once all were shown

    def forget(self, holder: str) -> None:
        """Forget a row that was freed: a new one of that name has nothing to do with it."""
        self._rows.pop(holder, None)

    def cut(self, holder: str, length: int) -> None:
        """Record that no more than this is committed in a row; later positions may be written anew."""
        if holder in self._rows:
            cursors, slots, row = self._rows[holder]
            least = min(cursors.kv_committed_len, length)
            self._rows[holder] = cursors._replace(kv_committed_len=least), slots, row

    def judge(self, state: State, e: Paged) -> Iterator[Verdict]:
        """Yield the faults in the pages of a step."""
        facts = facts_of(self._view(e), self.geometry)
        step = Step(
            config=state.config,
            command=CheckBusy(),
            expected=Done(),
            outcome=Done(),
            was=state,
            now=state,
            before=facts,
            after=facts,
            unchanged=True,
        )
        for clause in _OF_PAGES:
            failure = clause.check(step)
            if failure is not None:
                yield Verdict(clause.id, failure.expected, failure.observed)
        numbers = {*e.free_rows, *(row for row, _, _ in e.owners.values())}
        if self._numbers and not numbers <= self._numbers:
            yield Verdict("OWN-4", f"rows {sorted(self._numbers)}", f"rows {sorted(numbers)}")
        elif len(numbers) == self.geometry.rows:
            self._numbers = numbers
        size = self.geometry.page_size
        pool = range(size, size * (self.geometry.full_pages + 1))  # page 0 is padding
        for path, slots, *_ in e.nodes or ():
            if strange := [slot for slot in slots if slot not in pool]:
                expected = f"the node of {len(path)} tokens has slots of the pool"
                yield Verdict("TREE-3", expected, f"has {strange}")
        owners = {owner.name: owner.cursors for owner in holders(state)}
        rows = self._rows
        self._rows = {}
        for name, (row, cells, slots) in e.owners.items():
            cursors = Cursors(*cells)
            if owners.get(name, cursors) != cursors:
                yield Verdict(
                    "LEN-4", f"{name}: {cursors_text(owners[name])}", cursors_text(cursors)
                )
            computed = enumerate(slots[: cursors.kv_committed_len])
            nowhere = next((at for at, slot in computed if slot not in pool), None)
            if nowhere is not None:
                expected = f"{name} has a slot of the pool at position {nowhere}, which is committed"
                yield Verdict("READ-1", expected, f"its row names {slots[nowhere]} there")
            before, slots_before, row_before = rows.get(name, (cursors, slots, row))
            if row != row_before:
                yield Verdict("OWN-4", f"{name} keeps row {row_before}", f"has row {row}")
            # between the two the tree has taken over pages
            ahead, start = sorted((before.cache_protected_len, cursors.cache_protected_len))
            # a turn's end has cut `before`
            end = min(before.kv_committed_len, len(slots_before), len(slots))
            stays = (*range(min(ahead, end)), *range(start, end))
            moved = next((at for at in stays if slots_before[at] != slots[at]), None)
            if moved is not None:
                expected = f"{name} keeps slot {slots_before[moved]} at position {moved}, which is committed"
                yield Verdict("READ-1", expected, f"its row names {slots[moved]} there")
            self._rows[name] = cursors, slots, row

    def _view(self, e: Paged) -> View:
        """Return the logged pages, tree and states as a view, without sessions and contents."""
        geometry = self.geometry
        owners = e.owners
        size = (geometry.full_pages + 1) * geometry.page_size
        swa = (geometry.swa_pages + 1) * geometry.page_size
        tree = states = None
        if e.nodes is not None:
            tree = TreeView(tuple(NodeView(*node) for node in e.nodes), {})
        if e.states is not None:
            states = self._states(e.states)
            for node, slot in zip(tree.nodes if tree is not None else (), e.states.nodes):
                node.state = slot
        return View(
            sessions={},
            requests={n: RequestView(None, 0, (), row, Cursors(*c)) for n, (row, c, _) in owners.items()},
            free_full=e.free_full, free_rows=e.free_rows,
            rows={row: slots for row, _, slots in owners.values()}, full_stamps=[0] * size,
            free_swa=e.free_swa or (), full_to_swa=e.mapping or (), swa_stamps=[0] * swa, tree=tree,
            states=states,
        )  # fmt: skip

    def _states(self, shown: ShownStates) -> StatesView:
        own_slots = {name: slots[0] for name, slots in shown.held.items()}
        more = {name: slots[1:] for name, slots in shown.held.items()}
        return StatesView(shown.free, (), {}, own_slots, {}, more)
