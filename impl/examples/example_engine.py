"""A whole adapter in a hundred lines, to start yours from.

    kvspec check --impl impl.examples.example_engine:make

The engine has one paged pool and serves ordinary requests: no sessions, no window, no radix tree. What it
cannot do it leaves out of its capabilities, and is never driven through. Lengths are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from impl.adapter import Capabilities, Cursors, RequestView, View
from reference.commands import (
    Admit, Command, Decode, Done, Extend, Finish, Outcome, Reason, Refused, Submit,
)  # fmt: skip
from reference.geometry import Geometry
from reference.token_ids import token_id


@dataclass
class _Request:
    serial: int
    text: list[int]  # tokens of input and outputs
    origin: int  # how many of them are input
    phase: str = "queued"  # then admitted, extending, running
    row: int | None = None
    slots: list[int] = field(default_factory=list)  # of the positions that are computed


class ExampleEngine:
    """Requests are prefilled in batches of chunks, decode together, and give everything back at their end."""

    name = "example"
    capabilities = Capabilities(
        kind="rows",
        commands=frozenset({"Submit", "Admit", "Extend", "Decode", "Finish"}),
        swa=False,
        tree=False,
        exact_reasons=False,
        may_refuse=frozenset({Reason.NO_TREE}),  # prompts that others share
    )
    page_size: int
    width: int
    serial: int
    free_pages: list[int]
    free_rows: list[int]
    stamps: list[int]
    requests: dict[str, _Request]

    def reset(self, geometry: Geometry) -> None:
        self.page_size = geometry.page_size
        self.width = geometry.width
        self.serial = 0
        self.free_pages = list(range(1, geometry.full_pages + 1))  # page 0 is padding
        self.free_rows = list(range(geometry.rows))
        self.stamps = [0] * (geometry.full_pages + 1) * geometry.page_size
        self.requests = {}

    def apply(self, command: Command) -> Outcome:
        reason = getattr(self, f"_{type(command).__name__.lower()}")(command)
        return Done() if reason is None else Refused(reason)

    def _submit(self, c: Submit) -> Reason | None:
        if (
            c.session is not None
            or c.request in self.requests
            or c.rewind
            or not 1 <= c.tokens <= self.width
        ):
            return Reason.BAD_LENGTH
        if c.prompt:
            return Reason.NO_TREE
        self.serial += 1
        text = [token_id(self.serial, index) for index in range(c.tokens)]
        self.requests[c.request] = _Request(self.serial, text, c.tokens)
        return None

    def _admit(self, c: Admit) -> Reason | None:
        if c.request not in self.requests or self.requests[c.request].phase not in (
            "queued",
            "admitted",
        ):
            return Reason.WRONG_PHASE
        self.requests[c.request].phase = "admitted"
        return None

    def _extend(self, c: Extend) -> Reason | None:
        return self._compute([(n.request, n.tokens) for n in c.lanes], "admitted", "extending")

    def _decode(self, c: Decode) -> Reason | None:
        return self._compute([(name, 1) for name in c.requests], "running")

    def _compute(self, lanes: list[tuple[str, int]], *phases: str) -> Reason | None:
        """Compute the next tokens of each request, all or none: their needs are added up first."""
        batch = {name: self.requests[name] for name, n in lanes if name in self.requests and n >= 1}
        if (
            not lanes
            or len(batch) < len(lanes)
            or any(r.phase not in phases for r in batch.values())
        ):
            return Reason.WRONG_PHASE
        ends = [(r, len(r.slots) + n) for r, (_, n) in zip(batch.values(), lanes)]
        if any(end > min(len(r.text), self.width) for r, end in ends):
            return Reason.BAD_LENGTH
        pages = sum(
            -(-end // self.page_size) - -(-len(r.slots) // self.page_size) for r, end in ends
        )
        rows = sum(r.row is None for r, _ in ends)
        if pages > len(self.free_pages) or rows > len(self.free_rows):
            return Reason.OUT_OF_FULL
        for request, end in ends:
            if request.row is None:
                request.row = self.free_rows.pop()
            for index in range(len(request.slots), end):
                inside = index % self.page_size
                slot = request.slots[-1] + 1 if inside else self.free_pages.pop() * self.page_size
                request.slots.append(slot)
                self.stamps[slot] = request.text[index]  # here attention would write KV
            request.phase = "running" if end == len(request.text) else "extending"
            if request.phase == "running":  # sampled; its KV comes with the next round
                request.text.append(token_id(request.serial, end))
        return None

    def _finish(self, c: Finish) -> Reason | None:
        request = self.requests.get(c.request)
        if request is None or request.row is None or request.phase != "running":
            return Reason.WRONG_PHASE
        if not 1 <= c.finished_len <= len(request.text) - request.origin:
            return Reason.BAD_LENGTH
        self.free_pages += [slot // self.page_size for slot in request.slots[:: self.page_size]]
        self.free_rows.append(request.row)
        del self.requests[c.request]
        return None

    def view(self) -> View:
        held = {r.row: list(r.slots) for r in self.requests.values() if r.row is not None}
        shown = {name: self._request_view(request) for name, request in self.requests.items()}
        return View({}, shown, list(self.free_pages), list(self.free_rows), held, list(self.stamps))

    def _request_view(self, request: _Request) -> RequestView:
        cursors = (
            Cursors(len(request.slots), len(request.slots), 0, 0)
            if request.row is not None
            else None
        )
        return RequestView(None, request.origin, list(request.text), request.row, cursors)

    def close(self) -> None:
        """Do nothing: nothing outside this process is held."""


make = ExampleEngine  # what `--impl` calls
