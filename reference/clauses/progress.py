"""Clauses on progress: every accepted request is answered (PRO). They are the same for every kind of server.

A step shows its `standstill` (see reference.standstill_detector), the waiting requests, and what is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, Protocol

from reference.clauses.registry import Clause, register
from reference.failures import AtCount, AtNamed, Failure, count_text, failure
from reference.standstill_detector import FOR_EVER, Standstill

PROGRESS: dict[str, Clause] = {}
clause = partial(register, PROGRESS, concerns="outcomes, choices and order", rule="headway")


class Admission(NamedTuple):
    """A server's decision on a request that a client has sent.

    never: reason why even an empty server could not answer it, "" where one could.
    fits: an empty server has room for it, with a spare page of each pool.
    refused: the server refused it for its size.
    """

    request: str
    never: str
    fits: bool
    refused: bool


class ProgressStep(Protocol):
    """A step after which a request may wait for ever.

    standstill: None where the scheduler was not called, or no request waits.
    unanswered: state of each request without an answer, by name.
    room: free memory, in words.
    admission: None where no client has sent a request, or its refusal has another reason than its size.
    """

    @property
    def standstill(self) -> Standstill | None: ...

    @property
    def unanswered(self) -> Mapping[str, str]: ...

    @property
    def room(self) -> str: ...

    @property
    def admission(self) -> Admission | None: ...


@clause(
    "PRO-1",
    "no request waits for ever",
    "While a request has no answer, the scheduler does not come into the same state again and again without a"
    " forward pass: a request that would fit alone is answered once nobody else holds what it needs.",
    why=(
        "A deadlock or a starvation loses no page, so every memory check passes while the client waits until"
        " its timeout."
    ),
    source="vllm#39734, vllm#53130; sglang#39271, sglang#36458",
    scope=(
        "All that others had to do has been done. A session between turns may hold what others wait for."
    ),
    decision=(
        f"A state must be seen {FOR_EVER} times: a scheduler may count attempts that its facts do not show."
    ),
    assumption="A scheduler that is in the same state, and is called the same way, does the same again.",
    trigger=lambda step: step.standstill is not None and not step.standstill.runs,
)
def _no_endless_wait(step: ProgressStep) -> Failure | None:
    still = step.standstill
    if still is None or still.ran or still.times < FOR_EVER:
        return None
    return failure(
        "somebody who waits must get further: all that devices and clients had to do is done",
        f"{count_text(still.turns, 'call')} of the scheduler later nothing has run and nothing has changed;"
        f" {step.room}; {_waiting_text(step)}",
        AtCount("batch", "stall"),
        *(AtNamed("request", name) for name in step.unanswered),
    )


@clause(
    "PRO-2",
    "no cycle without a token",
    "While a request has no answer, the scheduler does not come into the same state again and again by"
    " forward passes after which nobody has a token more.",
    why="A livelock computes at full load, so it looks like a busy server; its clients get nothing.",
    source="vllm#39734; sglang#36855",
    scope="As PRO-1.",
    decision="As PRO-1.",
    assumption="As PRO-1.",
    trigger=lambda step: step.standstill is not None and step.standstill.passes > 1,
)
def _no_cycle_without_token(step: ProgressStep) -> Failure | None:
    still = step.standstill
    if still is None or not still.ran or still.times < FOR_EVER:
        return None
    return failure(
        "a forward pass must bring somebody further",
        f"after {count_text(still.ran, 'forward pass', 'es')} in {count_text(still.turns, 'call')}"
        " of the scheduler"
        f" everybody is where they were; {step.room}; {_waiting_text(step)}",
        AtCount("batch", "livelock"),
        *(AtNamed("request", name) for name in step.unanswered),
    )


@clause(
    "PRO-3",
    "what never fits is refused, and nothing else",
    "A request that no empty server could answer is refused when it comes. One that an empty server has room"
    " for is not refused for its size.",
    why="What never fits waits for ever, and all behind it. A server that refuses all answers nobody.",
    source="sglang#31205, sglang#39271",
    scope="The first turn of a session. A refusal may come a page early.",
    trigger=lambda step: step.admission is not None and bool(step.admission.never),
)
def _oversized_is_refused(step: ProgressStep) -> Failure | None:
    admission = step.admission
    if admission is None:
        return None
    place = AtNamed("request", admission.request)
    if admission.never and not admission.refused:
        return failure(f"{admission.request} is refused: {admission.never}", "it is accepted", place)
    if admission.fits and admission.refused:
        expected = f"{admission.request} is accepted: an empty server has room for it"
        return failure(expected, "it is refused for its length", place)
    return None


def _waiting_text(step: ProgressStep) -> str:
    return ", ".join(f"{name} {state}" for name, state in step.unanswered.items())
