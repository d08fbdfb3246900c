"""Waits for a storage that end in time (TierConfig.storage is "timeout"): of requests, in one run."""

from __future__ import annotations

from dataclasses import dataclass

from reference.commands import Abort, Done, Match, Outcome, Prompt, Reason, Refused, prompt_len
from reference.tiers.commands import Load, Prefetch, TierCommand, Tick
from reference.tiers.config import WAIT_BASE_S, WAIT_PER_PAGE_S, TierConfig
from reference.tiers.facts import TierFacts

_IN_PROGRESS = "to ask", "asks", "answered", "to read", "reads"  # states of a prefetch


@dataclass(frozen=True, slots=True)
class AdmissionAttempt:
    """An attempt to admit a request that has asked the storage.

    name: of the request.
    waited: since it asked (s).
    blocked: since an attempt first failed (s), -1 if none has.
    most: the time that it may be blocked (s).
    pages_due: before the attempt its prefetch had still to ask for pages, or to read some.
    """

    name: str
    waited: int
    blocked: int
    most: int
    pages_due: bool


@dataclass(slots=True)
class _Wait:
    prompt: Prompt
    asked: int
    prefetch: int  # number of its operation, -1 if it has none
    blocked: int = -1  # when an attempt to admit it first failed


class StorageWaits:
    """The clock of a run (s), and the requests that have asked the storage."""

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self.now = 0
        self.waits: dict[str, _Wait] = {}

    @property
    def ends_in_time(self) -> bool:
        """Whether waits end in time."""
        return self.config.storage == "timeout"

    @property
    def waiting_requests(self) -> dict[str, bool]:
        """Requests that an attempt to admit has found waiting, and whether the time of each is over."""
        return {
            name: self.now - wait.blocked > self._most_pages(wait)
            for name, wait in self.waits.items()
            if wait.blocked >= 0
        }

    def _most_pages(self, wait: _Wait) -> int:
        return WAIT_BASE_S + WAIT_PER_PAGE_S * -(-prompt_len(wait.prompt) // self.config.page_size)

    def follow(
        self, command: TierCommand, outcome: Outcome, before: TierFacts, after: TierFacts
    ) -> AdmissionAttempt | None:
        """Record a command. Returns the attempt to admit a request that it was; None for any other."""
        if not self.ends_in_time:
            return None
        is_done = isinstance(outcome, Done)
        match command:
            case Tick(seconds) if is_done:
                self.now += seconds
            case Prefetch(name, prompt) if is_done:
                known = {operation.job for operation in before.operations}
                own_jobs = (op.job for op in after.operations if not op.back and op.job not in known)
                self.waits[name] = _Wait(prompt, self.now, next(own_jobs, -1))
            case Abort(name) if is_done:
                self.waits.pop(name, None)
            case Match(name, prompt, full_only=False) | Load(name, prompt):
                wait = self.waits.get(name)
                held_back = outcome == Refused(Reason.WRONG_PHASE)  # else it was not tried
                if wait is not None and wait.prompt == prompt and (is_done or held_back):
                    return self._attempt(name, wait, is_done, before)
        return None

    def _attempt(self, name: str, wait: _Wait, is_done: bool, before: TierFacts) -> AdmissionAttempt:
        operation = next((op for op in before.operations if op.job == wait.prefetch), None)
        admission = AdmissionAttempt(
            name,
            self.now - wait.asked,
            self.now - wait.blocked if wait.blocked >= 0 else -1,
            self._most_pages(wait),
            operation is not None and operation.state in _IN_PROGRESS,
        )
        if is_done:
            del self.waits[name]
        elif wait.blocked < 0:
            wait.blocked = self.now
        return admission
