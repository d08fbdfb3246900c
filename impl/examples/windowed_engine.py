"""The example engine with a sliding window: two block tables, and a window eviction that says how far it
went.

    kvspec check --impl impl.examples.windowed_engine:make

A request has a block of each pool for each page of its text; SWA blocks behind the window go back early.
How far a window eviction goes is the engine's own policy, so it is reported as a `Choice`.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from impl.adapter import Cursors, RequestView, View
from impl.examples.example_engine import ExampleEngine
from reference.commands import (
    Choice, Command, Decode, Done, EvictSwa, Extend, Finish, Mode, Outcome, Reason, Refused,
)  # fmt: skip
from reference.geometry import Geometry


class WindowedEngine(ExampleEngine):
    """`ExampleEngine` computes and keeps the full pool; here is what the SWA pool adds."""

    name = "windowed-example"
    capabilities = replace(
        ExampleEngine.capabilities,
        commands=ExampleEngine.capabilities.commands | {"EvictSwa"},
        swa=True,
        full_only=False,
        # its scheduler evicts with lengths that are committed, never further
        modes=(Mode.FAITHFUL,),
    )
    window: int
    free_swa: list[int]
    swa_stamps: list[int]
    mapping: list[int]
    swa_blocks: dict[str, list[int]]

    def reset(self, geometry: Geometry) -> None:
        super().reset(geometry)
        assert geometry.window is not None
        self.window = geometry.window
        self.free_swa = list(range(1, geometry.swa_pages + 1))
        self.swa_stamps = [0] * (geometry.swa_pages + 1) * geometry.page_size
        self.mapping = [0] * len(self.stamps)  # full slot -> SWA slot
        # request -> a SWA page for each page, 0 where evicted
        self.swa_blocks = {}

    def apply(self, command: Command) -> Outcome:
        if isinstance(command, EvictSwa):
            return self._evict_window(command)
        if isinstance(command, (Extend, Decode)) and self._new_pages(command) > len(self.free_swa):
            return Refused(Reason.OUT_OF_SWA)
        ended = self.requests.get(command.request) if isinstance(command, Finish) else None
        outcome = super().apply(command)
        if isinstance(outcome, Done) and isinstance(command, (Extend, Decode)):
            for name, _ in self._lanes(command):
                self._write(name)
        if isinstance(outcome, Done) and isinstance(command, Finish) and ended is not None:
            self._release(self.swa_blocks.pop(command.request), ended.slots)
        return outcome

    def _lanes(self, c: Extend | Decode) -> list[tuple[str, int]]:
        """Return the known requests of a batch, and the number of tokens by which each grows."""
        if isinstance(c, Decode):
            return [(name, 1) for name in c.requests if name in self.requests]
        return [(lane.request, lane.tokens) for lane in c.lanes if lane.request in self.requests]

    def _new_pages(self, c: Extend | Decode) -> int:
        """Return the number of SWA pages that a batch needs, before anything changes."""
        grown = [(len(self.requests[name].slots), tokens) for name, tokens in self._lanes(c)]
        return sum(
            -(-(n + tokens) // self.page_size) - -(-n // self.page_size) for n, tokens in grown
        )

    def _write(self, name: str) -> None:
        """Give each new page an SWA block, and write KV for each new token."""
        request = self.requests[name]
        blocks = self.swa_blocks.setdefault(name, [])
        for index, slot in enumerate(request.slots):
            page, inside = divmod(index, self.page_size)
            if page == len(blocks):
                blocks.append(self.free_swa.pop())
            if blocks[page] and not self.mapping[slot]:
                self.mapping[slot] = blocks[page] * self.page_size + inside
                self.swa_stamps[self.mapping[slot]] = request.text[index]

    def _evict_window(self, c: EvictSwa) -> Outcome:
        """Give back the blocks that no token from `length` on reads."""
        request = self.requests.get(c.request)
        if request is None or request.row is None:
            return Refused(Reason.WRONG_PHASE)
        if not 0 <= c.length <= len(request.slots):
            return Refused(Reason.BAD_LENGTH)
        blocks = self.swa_blocks[c.request]
        end = max(0, c.length - self.window) // self.page_size
        self._release(blocks[:end], request.slots[: end * self.page_size])
        blocks[:end] = [0] * end
        return Done((Choice(c.request, swa_evicted_seqlen=self._evicted_len(c.request)),))

    def _evicted_len(self, name: str) -> int:
        blocks = self.swa_blocks.get(name, [])
        return (
            next((page for page, block in enumerate(blocks) if block), len(blocks)) * self.page_size
        )

    def _release(self, blocks: list[int], slots: list[int]) -> None:
        self.free_swa += [block for block in blocks if block]
        for slot in slots:
            self.mapping[slot] = 0

    def view(self) -> View:
        return structs.replace(
            super().view(),
            free_swa=list(self.free_swa),
            full_to_swa=list(self.mapping),
            swa_stamps=list(self.swa_stamps),
            requests={
                name: self._cursors(name, shown) for name, shown in super().view().requests.items()
            },
        )

    def _cursors(self, name: str, view: RequestView) -> RequestView:
        if view.cursors is None:
            return view
        computed = view.cursors.kv_committed_len
        return structs.replace(view, cursors=Cursors(computed, computed, self._evicted_len(name), 0))


make = WindowedEngine  # what `--impl` calls
