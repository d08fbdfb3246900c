"""One command on a tree with a host tier, with what its clauses ask about it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from reference.failures import count_text
from reference.standstill_detector import Standstill
from reference.tiers.commands import TierCommand
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts
from reference.tiers.host_records import HostRecords
from reference.tiers.leaks import Leaks
from reference.tiers.locks import LockRange
from reference.tiers.progress import WAITING
from reference.tiers.sent_parts import SentParts
from reference.tiers.storage_waits import AdmissionAttempt


@dataclass(eq=False)
class TierStep(HostRecords, Leaks, SentParts):
    """A command on a tree, and the facts before and after it.

    refused: the command changed nothing.
    ranges: ranges of positions that users have locked, after the command.
    waiting: requests that have asked a storage and wait for it, after the command.
    standstill: of a Poll on a server with one role, while a request waits.
    admission_attempt: of a request that waits for a storage, where such waits end in time.
    """

    config: TierConfig
    command: TierCommand
    refused: bool
    before: TierFacts
    after: TierFacts
    ranges: list[LockRange]
    waiting: Collection[str] = ()
    standstill: Standstill | None = None
    admission_attempt: AdmissionAttempt | None = None

    @property
    def unanswered(self) -> dict[str, str]:
        """The state of each request that has no answer."""
        return {request.name: request.state for request in self.after.requests if request.state in WAITING}

    @property
    def room(self) -> str:
        """The free or evictable tokens, in words."""
        free = {pool: len(slots) for pool, slots in self.after.free.items()}
        for pool, tokens in self.after.evictable.items():
            free[pool] = free.get(pool, 0) + tokens
        rows = count_text(len(self.after.free_rows), "row")
        return f"{', '.join(f'{pool} {tokens}' for pool, tokens in free.items())} tokens and {rows} free"
