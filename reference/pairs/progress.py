"""Progress of a pair: its states, and the work that network, loops and clients have to do.

The same states answer two questions. Without a failure no request should have to wait until a timeout, so
for the first the clock has no work to do. For the second a state counts again only once the clock has passed
every timeout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from reference.blocks.commands import EngineCommand, Schedule, Update
from reference.blocks.progress import state_of
from reference.standstill_detector import StandstillDetector, Standstill
from reference.pairs.commands import (
    Advance, CompleteHost, CopyHost, Deliver, Land, Move, PairCommand, Shake, Write,
)  # fmt: skip
from reference.pairs.config import LEASE, SERVERS
from reference.pairs.facts import PairFacts
from reference.tiers.commands import Tick

_BY_ITSELF = Advance, Write, Move, Land, Deliver, Tick, Shake, CopyHost, CompleteHost
EPOCH = 2 * LEASE  # seconds in which every timeout ends


class PairProgress:
    """States of a pair in one run since a request last got further.

    standstill: of the last command, if it was a Schedule while a request waits.
    in_time: as standstill, with a clock that stands still.
    """

    def __init__(self) -> None:
        self.standstill: Standstill | None = None
        self.in_time: Standstill | None = None
        self._with_clock = StandstillDetector()
        self._without = StandstillDetector()
        self._done: Counter[Hashable] = Counter()

    def follow(
        self,
        command: PairCommand,
        served: tuple[str, EngineCommand] | None,
        facts: PairFacts,
        owed: list[tuple[str, str]],
        told: bool,
    ) -> None:
        """Record a command that was carried out.

        owed: work of the proxy and of the writing threads.
        told: a message other than a heartbeat has arrived, which no server's state shows yet.
        """
        self.standstill = self.in_time = None
        ran = served[1] if served is not None else None
        server = served[0] if served is not None else ""
        self._done[type(ran or command), server] += 1
        outputs = [output for name in SERVERS for output in facts.of(name).outputs]
        waits = any(facts.of(name).requests for name in SERVERS)
        moved = isinstance(command, Land | Shake) or told
        if (
            not waits
            or moved
            or not isinstance(command, _BY_ITSELF)
            or any(output.tokens or output.finished for output in outputs)
        ):
            self._with_clock.restart()
            self._without.restart()
        if not waits or not isinstance(ran, Schedule):
            return
        owed_work = [*self._pending_work(facts), *owed]
        timeouts = ("clock", facts.clock // EPOCH)
        runs = any(facts.of(name).lanes for name in SERVERS)
        state = _state_of_pair(facts)
        self.standstill = self._with_clock.enter_state(state, [*owed_work, timeouts], runs=runs)
        self.in_time = self._without.enter_state(state, owed_work, runs=runs)

    def _pending_work(self, facts: PairFacts) -> Iterator[Hashable]:
        """Yield the work that others have to do. The name of a piece of work changes once it is done."""
        for server in SERVERS:
            if server not in facts.idle:
                yield "schedules", server, self._done[Schedule, server]
            if facts.of(server).steps_in_flight:
                yield "takes results", server, self._done[Update, server]
            for job in facts.of(server).transfers:
                if job.submitted and not job.completed:
                    yield "host transfer", server, job.job
        yield from (("transfer", job.number, job.copied) for job in facts.under_way)
        if facts.messages:
            yield "message", self._done[Deliver, ""]
        if facts.handshakes:
            yield "handshake", self._done[Shake, ""]


def _state_of_pair(facts: PairFacts) -> Hashable:
    readers = tuple((reader.request, reader.state) for reader in facts.readers)
    held = tuple(promise.held for promise in facts.promises)
    under_way = tuple((job.number, job.copied) for job in facts.under_way)
    network = len(facts.messages), len(facts.handshakes), under_way
    return state_of(facts.prefill), state_of(facts.decode), readers, held, network
