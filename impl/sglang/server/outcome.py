"""The outcome of a run of a whole scheduler, as its process answers."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from impl.sglang.server.grants import BrokenGrant
from impl.sglang.server.progress import Stall


UNSENT = "a page of the window that D has not named, so that P has not sent it"
OUTDATED = "a page that P has sent from one that it had already given back"


class Misread(NamedTuple):
    """A read of the wrong KV: what attention would have read at `position` of a request in `pool`, first in
    forward pass `forward`.

    want, got: (token, position) whose KV belongs there, and is there; None for none.
    writer: the request that wrote what is there. In the pool "state" the request goes on at `position` from
        another state than the one before it.
    found: what that is, in words; in a window UNSENT, OUTDATED or nothing.
    """

    forward: int
    request: str
    pool: str
    position: int
    want: tuple[int, int]
    got: tuple[int, int] | None
    writer: str = ""
    found: str = ""


class Complaint(NamedTuple):
    """SGLang's KV canary complains in this forward pass, of what a request of the batch reads at `position`
    ("" and -1: of what nobody in it reads)."""

    forward: int
    request: str
    position: int
    says: str


class PairNote(NamedTuple):
    """A note of a judge of two servers.

    key: the same of another run means the same fault.
    """

    key: str
    request: str
    says: str


class PairEvent(NamedTuple):
    """Something that happens in a pair, for a reader.

    where: "P", "D" or "wire".
    """

    step: int
    where: str
    says: str


class RunOutcome(msgspec.Struct, frozen=True):
    """The outcome of a run.

    forwards, rounds: how many there were.
    misread: the first wrong read at each position.
    error: the server broke, in one line.
    stuck: it was ended after too many rounds.
    stalls: where it went on with nothing, and could.
    cpu_s: of the event loop, and of the watcher if there is one.
    blocks_s: of each block of rounds.
    canary: what the release's own KV canary saw, None without it.
    preemptions: how often a request that waits preempted others for its priority.
    grant: the one that could not be allocated, where that broke the server.
    noted, events: of a pair.
    unusable: code of kvspec failed, so that the run says nothing of the server.
    """

    forwards: int
    rounds: int
    misread: list[Misread]
    answers: dict[str, str]
    error: str = ""
    traceback: str = ""
    stuck: bool = False
    stalls: list[Stall] = []
    cpu_s: float = 0.0
    blocks_s: list[float] = []
    canary: list[Complaint] | None = None
    preemptions: int = 0
    grant: BrokenGrant | None = None
    noted: list[PairNote] = []
    events: list[PairEvent] = []
    unusable: str = ""
