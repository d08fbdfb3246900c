"""Progress of an engine that schedules by itself: its states, and the work that devices have to do."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from reference.blocks.commands import EngineCommand, Schedule, Update
from reference.blocks.facts import BlockFacts, HostFacts
from reference.standstill_detector import StandstillDetector, Standstill
from reference.tiers.commands import Backup, Complete, Copy, Fetch

# What the engine and its devices do. With any other command a client or a fault comes in between.
_BY_ITSELF = Schedule, Update, Copy, Complete, Backup, Fetch


class EngineProgress:
    """States of an engine in one run since a client last got a token, or did something."""

    def __init__(self) -> None:
        self._headway = StandstillDetector()
        self._updates = 0

    def follow(
        self, command: EngineCommand, facts: BlockFacts, *, waits: bool, idle: bool
    ) -> Standstill | None:
        """Record a command that was carried out, and return the standstill; None unless the command is
        a Schedule and a request waits.

        waits: some request has no answer.
        idle: some session is between turns.
        """
        if isinstance(command, Update):
            self._updates += 1
        answers = any(output.tokens or output.finished for output in facts.outputs)
        if answers or not waits or not isinstance(command, _BY_ITSELF):
            self._headway.restart()
        if not waits or not isinstance(command, Schedule):
            return None
        return self._headway.enter_state(
            state_of(facts), self._pending_work(facts), runs=bool(facts.lanes), counts=not idle
        )

    def _pending_work(self, facts: BlockFacts) -> Iterator[Hashable]:
        """Yield the work that devices have to do: steps in flight and submitted transfers."""
        yield from range(self._updates, self._updates + facts.steps_in_flight)
        yield from (
            ("transfer", job.job) for job in facts.transfers if job.submitted and not job.completed
        )
        if facts.host is not None:
            yield from (("storage", job.job) for job in facts.host.jobs if not job.done)


def state_of(facts: BlockFacts) -> Hashable:
    """Return the engine's state without block ids, which change from round to round of a cycle."""
    requests = tuple(
        (name, fact.status, len(fact.tokens), fact.computed, *map(_blocks_in, fact.tables))
        for name, fact in facts.requests.items()
    )
    transfers = sorted((*job[1:2], len(job.parts), *job[3:]) for job in facts.transfers)
    host_state = _host_state(facts.host) if facts.host else ()
    pools = len(facts.free), len(facts.published), len(facts.pinned), facts.steps_in_flight, *host_state
    return requests, tuple(transfers), pools


def _host_state(host: HostFacts) -> tuple[int, ...]:
    done = sum(job.done for job in host.jobs)
    return len(host.free), len(host.keys), len(host.jobs), done, len(host.stored), host.lookups


def _blocks_in(table: tuple[int, ...]) -> int:
    """Return the blocks of a table without null blocks."""
    return sum(map(bool, table))
