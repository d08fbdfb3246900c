"""Shared parts of the driver's commands: the requests that they name, and the scheduler's steps for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from impl.adapter import UnusableImplementation
from impl.sglang.parts.stand_ins import SERVER_ARGS, ForwardMode
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.scheduler.live_requests import LiveRequest
from impl.sglang.scheduler.results import Results
from impl.sglang.scheduler.server import Server
from impl.vocabulary import CommandRefused, RequestPhase, require
from reference.commands import Choice, Reason


class OnServer:
    """A part of the driver of a running server.

    release: the driven release. server: the running server.
    results: of its batches.
    overlap: they are late.
    """

    overlap: bool
    release: Release0510
    server: Server
    results: Results

    def _turn(self, name: str) -> LiveRequest:
        turn = self.server.turns.get(name)
        if turn is None:
            raise CommandRefused(Reason.UNKNOWN_REQUEST)
        return turn

    def _lanes(
        self, names: Sequence[str], *phases: RequestPhase, late: int = 0
    ) -> list[LiveRequest]:
        require(len(set(names)) == len(names), Reason.DUPLICATE_LANE)
        turns = [self._turn(name) for name in names]
        require(
            all(t.phase in phases and len(t.unsettled_results) <= late for t in turns), Reason.WRONG_PHASE
        )
        return turns

    def _let_go(self, turn: LiveRequest) -> None:
        """Give back the lock that a request waits with."""
        if turn.locked:
            assert self.server.tree is not None
            self.server.tree.unlock(turn.req)
            turn.locked = False
        if self.server.states is not None and turn.phase is RequestPhase.ADMITTED:
            self.server.states.revert_match(turn.req)

    def _match_and_lock(self, turn: LiveRequest) -> None:
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
        """Reap sessions after every turn; a server does so about once a second."""
        controller = self.server.controller
        controller.maybe_reap(controller._last_reap_time + 2.0)

    def _kind_of_run(self, spec: bool) -> None:
        """Fix the server to plain or speculative decoding: the first round decides. A request between two
        prefill chunks was tried before this round and did not fit; under overlap its results may be
        pending."""
        if self.server.swa_pool is not None and not self.overlap:
            for turn in self.server.turns.values():
                if turn.phase is RequestPhase.EXTENDING:
                    self.release.park(turn.req, self.server.cache)
        server = self.server
        if server.spec is None:
            server.spec = spec
            SERVER_ARGS.speculative_algorithm = "EAGLE" if spec else None
        elif server.spec is not spec:
            raise UnusableImplementation("sglang: a run cannot mix Decode and SpecDecode")

    # -- window eviction ------------------------------------------------------------------------------

    def _window(self, turns: Iterable[LiveRequest]) -> None:
        """Refuse to decode where a window eviction ran ahead of the commit: no scheduler gets there."""
        window = self.server.geometry.window
        if window is None:
            return
        for turn in turns:
            cursors = self.server.cursors(turn)
            evicted = cursors.swa_evicted_seqlen
            position = turn.origin + turn.visible_output - 1
            # a window eviction leaves the tree's prefix alone
            evicts_own_kv = evicted > cursors.cache_protected_len
            require(not evicts_own_kv or evicted <= max(0, position - window), Reason.WINDOW_LOST)

    def _eviction_lengths(self, turns: Iterable[LiveRequest]) -> list[int]:
        return [self.release.cursors(t.req).swa_evicted_seqlen for t in turns]

    def _window_evictions(
        self, turns: Sequence[LiveRequest], before: Sequence[int]
    ) -> list[Choice]:
        """Return the window evictions that the release made by itself since `before` was noted."""
        after = zip(turns, before, self._eviction_lengths(turns), strict=True)
        return [Choice(turn.name, now) for turn, then, now in after if now != then]

    def _own_evictions(
        self, turns: Sequence[LiveRequest], before: Sequence[int], launched: Sequence[int]
    ) -> list[Choice]:
        """Return window evictions that the release made in this batch.

        A position that the tree has taken over since the launch does not count: its swa_evicted_seqlen
        moved without an eviction.
        """
        moved_since_launch = {
            choice.request for choice in self._window_evictions(turns, launched)
        }
        now = {turn.name: self.release.cursors(turn.req) for turn in turns}
        owned_by_tree = {
            name for name, c in now.items() if c.swa_evicted_seqlen <= c.cache_protected_len
        }
        without_eviction = moved_since_launch & owned_by_tree
        evictions = self._window_evictions(turns, before)
        return [choice for choice in evictions if choice.request not in without_eviction]
