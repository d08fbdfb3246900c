"""The bounds of a small world whose every state is explored: sizes, names, texts, values of arguments.

Rows, pools and width bound the rest. Lengths are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.commands import Mode
from reference.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Scope:
    """A world to explore, in full or to a bound.

    about: what is special, in a few words. sessions: so many, each with one turn at most; ordinary:
    so many requests without a session; lock_holders: so many of the radix tree.
    submits: fresh tokens of a Submit. prompts: such as "a2b1", of Submit (None: none of it), Match and
    Insert. texts: the letters in them. chunks: at most so many tokens in an entry of Extend (None: any
    number). ahead: SpecDecode allocates 1 to so many, 0: never; late: Launch as well, and Settle; decode:
    whether there is Decode.
    window_evictions: EvictSwa, with every length. retracts, aborts: whether there are any. marked: marked
    aborts.
    batches: Extend, Decode and SpecDecode with two entries as well. evicts: Evict, with every number of
    pages. parts: UnlockSwa, and Match of full KV alone. tails: chunks that take SWA slots for the last
    window alone. checks: CheckBusy at every level and CheckIdle. invalid: commands that are ill-formed,
    or name somebody who is not there or is somebody else, as well.
    takes: seconds (twenty or so at most, on one core with every clause), minutes (five at most) or nightly.
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
        """There are requests."""
        return bool(self.sessions or self.ordinary)
