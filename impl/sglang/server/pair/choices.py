"""Delays and failures in the environment of a pair, as data, without an import of a server.

A run names each choice by whom it is about, so that it keeps its meaning when other choices, clients or turns
are taken out. A choice for a thing that never comes does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from reference.pairs.config import DECODE, PREFILL

# Messages between the servers. They carry KV addresses of D, destinations of a request, that D gives a
# request up, how the transfer of a request ended, and that P writes no more for a request that was given up.
# With prefill_complete they also carry where D waits for a request, and that P has computed its prompt.
MESSAGES = "register", "metadata", "notice", "status", "ack", "endpoint", "ready"
RECEIVER = {
    "register": PREFILL,
    "metadata": PREFILL,
    "notice": PREFILL,
    "status": DECODE,
    "ack": DECODE,
    "endpoint": PREFILL,
    "ready": DECODE,
}
# Fields of Config that only a pair has, and that a pair has not.
OF_A_PAIR = (
    "decode_tokens",
    "decode_overlap",
    "decode_tree",
    "deferred",
    "optimistic",
    "prefill_complete",
    "prefill_draft",
    "decode_hicache",
    "host_backup",
)
NOT_OF_A_PAIR = {
    "lazy": "SGLang has no extra_buffer_lazy with it (mamba_hook.py:125 in 0.5.23)",
    "queue": "a server of a pair has no limit (_add_request_to_queue, scheduler.py:3488 in 0.5.23)",
}
What = Literal[
    "request", "abort", "register", "metadata", "notice", "status", "ack", "endpoint", "ready", "transfer",
    "row", "lookup", "call", "round", "clock", "death",
]  # fmt: skip


class NetworkChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One choice of the environment.

    what: the event. "request" and "abort" reach `side`, and a message (MESSAGES) its receiver. "transfer" is
        one of the request, "row" the one that carries its metadata row. In "lookup" D looks for the address
        of P. In "call" the scheduler of `side` calls its manager for the request, in "round" it begins a
        round. "clock" is the time, "death" the end of a server.
    request: the request that it concerns, "" for none.
    number: which of these, from 1; of the clock and of a death the step.
    steps: for which it rests; of the clock seconds that pass at once.
    at: tenths of a transfer's blocks that are copied before it rests or fails.
    fails: an abort does not reach this side, a lookup gets no answer, a transfer ends with an error.
    late: the blocks that are left are copied all the same, at the end of `steps`.
    """

    what: What
    request: str = ""
    side: str = ""
    number: int = 1
    steps: int = 0
    at: int = 0
    fails: bool = False
    late: bool = False


class NetworkChoices:
    """The choices of a run, by the request that they concern."""

    def __init__(self, choices: Iterable[NetworkChoice]) -> None:
        self._by_subject: dict[tuple[str, str, str, int], list[NetworkChoice]] = {}
        for choice in choices:
            key = choice.what, choice.request, choice.side, choice.number
            self._by_subject.setdefault(key, []).append(choice)

    def of(
        self, what: str, request: str = "", side: str = "", number: int = 1
    ) -> list[NetworkChoice]:
        """Return the choices for one thing, in the order of the run."""
        return self._by_subject.get((what, request, side, number), [])

    def steps(self, what: str, request: str = "", side: str = "", number: int = 1) -> int:
        """Return the number of steps that a thing rests."""
        return sum(choice.steps for choice in self.of(what, request, side, number))


def can_fail(choices: Iterable[NetworkChoice]) -> bool:
    """Return whether something fails by these choices, or a timeout may end in the middle."""
    return any(
        choice.what in ("clock", "death") or (choice.fails and choice.what != "abort") for choice in choices
    )
