"""What the commands of the driver share: the requests that they name, and what the scheduler does to them."""

from __future__ import annotations

from collections.abc import Sequence

from impl.sglang.parts.stand_ins import ForwardMode
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.scheduler.results import Results
from impl.sglang.scheduler.server import LiveRequest, Server
from impl.vocabulary import CommandRefused, RequestPhase, require
from reference.commands import Reason


class OnServer:
    """release: what is driven; server: the one that runs; results: of its batches."""

    release: Release0510
    server: Server
    results: Results

    def _turn(self, name: str) -> LiveRequest:
        turn = self.server.turns.get(name)
        if turn is None:
            raise CommandRefused(Reason.UNKNOWN_REQUEST)
        return turn

    def _lanes(self, names: Sequence[str], *phases: RequestPhase, late: int = 0) -> list[LiveRequest]:
        require(len(set(names)) == len(names), Reason.DUPLICATE_LANE)
        turns = [self._turn(name) for name in names]
        require(all(t.phase in phases and len(t.unsettled) <= late for t in turns), Reason.WRONG_PHASE)
        return turns

    def _let_go(self, turn: LiveRequest) -> None:
        """Give back the lock that a request waits with."""
        if turn.locked:
            assert self.server.tree is not None
            self.server.tree.unlock(turn.req)
            turn.locked = False

    def _matched(self, turn: LiveRequest) -> None:
        """Match and lock in the very cycle in which the request extends, as the scheduler does."""
        server = self.server
        turn.req.init_next_round_input(server.cache)
        if server.tree is not None:
            server.tree.lock(turn.req)
        else:
            self.release.hold(server.cache, turn.req)

    def _launch(self, turns: Sequence[LiveRequest], mode: ForwardMode) -> None:
        self.server.scheduler.launch([t.req for t in turns], mode)

    def _reap(self) -> None:
        """The scheduler reaps sessions about once a second; here after every turn."""
        controller = self.server.controller
        controller.maybe_reap(controller._last_reap_time + 2.0)
