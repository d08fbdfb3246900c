"""The bounds of a small world whose every state is explored: sizes, names, texts, values of arguments.

Rows, pools and width bound the rest. Lengths are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.commands import Mode
from reference.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Scope:
    """A small world to explore, in full or to a bound.

    about: its speciality, in a few words.
    sessions: number of sessions, each with one turn at most; ordinary: number of requests without a
        session; lock_holders: number of lock owners of the radix tree.
    submits: fresh tokens of a Submit. prompts: prompts of Submit (None: no prompt), Match and Insert,
        such as "a2b1". texts: the letters in them.
    chunks: the most tokens in an entry of Extend (None: any number).
    ahead: SpecDecode allocates 1 to so many tokens, 0: it is left out; late: Launch and Settle as well;
        decode: Decode as well.
    window_evictions: EvictSwa, with every length. retracts, aborts: these commands. marked: marked
        aborts.
    batches: Extend, Decode and SpecDecode with two entries as well. evicts: Evict, with every number of
        pages.
    parts: UnlockSwa, and Match of only full KV. tails: chunks that take SWA slots only for the last
        window.
    checks: CheckBusy at every level and CheckIdle.
    invalid: ill-formed commands, and commands with names that are not in use or of another kind, as
        well.
    takes: seconds (twenty or so at most, on one core with every clause), minutes (five at most) or
        nightly.
    """

    name: str
    about: str
    geometry: Geometry
    mode: Mode = Mode.FREE
    sessions: int = 0
    ordinary: int = 0
    lock_holders: int = 0
    submits: tuple[int, ...] = (1, 2)
    prompts: tuple[str, ...] = ()
    texts: str = ""
    chunks: int | None = None
    ahead: int = 0
    late: bool = False
    decode: bool = True
    window_evictions: bool = True
    retracts: bool = True
    aborts: bool = True
    marked: bool = True
    batches: bool = True
    evicts: bool = True
    parts: bool = False
    tails: bool = False
    checks: bool = False
    invalid: bool = True
    takes: str = "seconds"

    @property
    def served(self) -> bool:
        """Whether there are requests."""
        return bool(self.sessions or self.ordinary)
