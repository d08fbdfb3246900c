"""The bounds of a small world whose every state is explored: sizes, names, texts, values of arguments.

Rows, pools and width bound the rest. Lengths are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.commands import Mode
from reference.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Scope:
    """A small world to explore, in full or to a bound."""

    name: str
    #: its speciality, in a few words
    about: str
    geometry: Geometry
    mode: Mode = Mode.FREE
    #: number of sessions, each with one turn at most
    sessions: int = 0
    #: number of requests without a session
    ordinary: int = 0
    #: number of lock owners of the radix tree
    lock_holders: int = 0
    #: fresh tokens of a Submit
    submits: tuple[int, ...] = (1, 2)
    #: prompts of Submit (None: no prompt), Match and Insert, such as "a2b1"
    prompts: tuple[str, ...] = ()
    #: the letters in them
    texts: str = ""
    #: the most tokens in an entry of Extend (None: any number)
    chunks: int | None = None
    #: most tokens that SpecDecode allocates; 0 leaves the command out
    ahead: int = 0
    #: Launch and Settle are commands of the scope
    late: bool = False
    #: Decode is a command of the scope
    decode: bool = True
    #: EvictSwa is a command of the scope, with every length
    window_evictions: bool = True
    #: these commands are in the scope
    retracts: bool = True
    aborts: bool = True
    #: aborts may be marked
    marked: bool = True
    #: Extend, Decode and SpecDecode may have two entries
    batches: bool = True
    #: Evict is a command of the scope, with every number of pages
    evicts: bool = True
    #: UnlockSwa, and Match of only full KV, are commands of the scope
    parts: bool = False
    #: chunks may take SWA slots only for the last window
    tails: bool = False
    #: CheckBusy, at every level, and CheckIdle are commands of the scope
    checks: bool = False
    #: the scope has ill-formed commands, and commands with names not in use or of another kind
    invalid: bool = True
    #: duration: seconds (at most twenty or so, on one core with every clause), minutes (at most five)
    #: or nightly
    takes: str = "seconds"

    @property
    def served(self) -> bool:
        """Whether there are requests."""
        return bool(self.sessions or self.ordinary)
