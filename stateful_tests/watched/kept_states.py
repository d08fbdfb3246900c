"""States that requests keep for the tree, step by step, as a log of level `pages` shows them.

What a slot holds is not in a log. But a request says which of its slots has the state that it keeps, and
after how many tokens that is. A node that has the slot at the next step ends after so many tokens, or after
more if a round in between has kept a later state there. One that ends before them has the state of a longer
text (STA-3), and a request that matches it goes on from that.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from impl.sglang.server.events import Paged, WatchHeader
from stateful_tests.watched import deviations
from stateful_tests.watched.violated_clauses import Verdict

Path = tuple[int, ...]


class _Wrong(NamedTuple):
    """The known fault of a node that has the state of a longer text; "" for none."""

    slot: int
    known: str


class _Kept(NamedTuple):
    """A state for the tree: its request, and the number of tokens before it."""

    name: str
    length: int


class KeptStates:
    """Records, from one step to the next, the states that requests keep for the tree, and the nodes
    that are wrong."""

    def __init__(self, header: WatchHeader) -> None:
        self.header = header
        self._step: int | None = None
        self._kept_by_slot: dict[int, _Kept] = {}  # by slot
        self._wrong: dict[Path, _Wrong] = {}
        self._hits: list[tuple[str, Path]] = []  # since the last step
        self._ended: dict[Path, str] = {}  # since the last step, with a state that is ahead

    def note_prefix(self, request: str, prefix: Sequence[int]) -> None:
        """Record that a request goes on where this text ends, which may be that of a node."""
        self._hits.append((request, tuple(prefix)))

    def note_end(self, text: Sequence[int], known: str) -> None:
        """Record that by a known fault a request ends with this text and with a state after more
        tokens: the tree gets both, where states are not tracked."""
        if not self.header.tracks:
            self._ended[tuple(text)] = known

    def judge(
        self, step: int | None, e: Paged, sessions: Container[str]
    ) -> Iterator[tuple[Verdict, str | None]]:
        """Yield the faults of a step, each with the known fault that explains it. States that sessions track
        may have drafts that a turn did not take, and hardly ever go into the tree.

        sessions: those that keep KV.
        """
        before = self._kept_by_slot if step is not None and self._step == step - 1 else {}
        self._step = step
        self._kept_by_slot = {}
        ended = self._ended
        self._ended = {}
        if e.states is None:
            return
        for name, (slot, length) in e.states.tracked.items():
            tracked_slots = e.states.held[name][1:]
            if slot not in tracked_slots:
                expected = f"{name} keeps its last state for the tree in one of its slots {tracked_slots}"
                yield Verdict("STA-8", expected, f"in slot {slot}"), None
            if self.header.speculative and name in sessions:
                continue
            if name in e.owners and length > (most := e.owners[name][1][0]):
                expected = f"a state that {name} keeps for the tree is after {most} tokens at most"
                yield Verdict("STA-8", expected, f"slot {slot} after {length}"), None
            self._kept_by_slot[slot] = _Kept(name, length)
        nodes = e.nodes or ()
        for (path, *_), has in zip(nodes, e.states.nodes):
            if has is None:
                continue
            if (reason := ended.get(tuple(path))) is not None:
                self._wrong[tuple(path)] = _Wrong(has, reason)
            state = before.get(has)
            if state is not None and state.length > len(path):
                known = deviations.fault_of_state_within_page(self.header, state.length)
                self._wrong[tuple(path)] = _Wrong(has, known or "")
                expected = f"the node of {len(path)} tokens has the state after them"
                observed = f"slot {has}, in which {state.name} kept the state after {state.length}"
                yield Verdict("STA-3", expected, observed), known

    def wrong_hits(self, e: Paged) -> Iterator[tuple[str, int, str]]:
        """Yield (request, position, known fault) for requests that went on from a wrong node since the
        last step."""
        for request, prefix in self._hits:
            if prefix in self._wrong:
                yield request, len(prefix), self._wrong[prefix].known
        self._hits.clear()
        slots = e.states.nodes if e.states is not None else ()
        slot_by_path = {tuple(path): slot for (path, *_), slot in zip(e.nodes or (), slots)}
        self._wrong = {p: was for p, was in self._wrong.items() if slot_by_path.get(p) == was.slot}
