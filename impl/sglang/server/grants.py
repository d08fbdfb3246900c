"""Grants of admission that the pools do not have: looked at when the server ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, NamedTuple

from impl.sglang.parts.tracking import buffers_of
from impl.sglang.server.reading import Reader, session_of

Pool = Literal["rows", "full", "SWA", "states"]

# Where the release prepares a batch that admission or a decode round has granted, and where it matches a
# request that it looks at.
_PREPARES = {
    "prepare_for_extend": "prefill",
    "prepare_for_decode": "decode",
    "init_next_round_input": "match",
}
_WANTED = re.compile(r"Try to allocate (?P<tokens>\d+) tokens")
_MOST = 4  # holders that are named


class BrokenGrant(NamedTuple):
    """A batch was granted what a pool does not have.

    pool: in which nothing was left. step: a value of _PREPARES. requests: of the batch. free: what the pool
    has free, in its unit (rows, tokens, slots). evictable: what the tree counts as evictable of it. pinned:
    who holds the rest, in words.
    """

    pool: Pool
    step: str
    requests: list[str]
    free: int
    evictable: int
    pinned: str

    @property
    def says(self) -> str:
        """Return the words of the finding."""
        granted = f"a {self.step} of {', '.join(self.requests)} was granted"
        left = f"{self.free} free and {self.evictable} evictable"
        return f"{granted}, and the pool of {self.pool} has {left}; {self.pinned}"


def broken_grant(reader: Reader, error: Exception) -> BrokenGrant | None:
    """The grant that an error of the server ends; None where the error is of something else."""
    prepared, step = _prepared(error.__traceback__)
    if prepared is None or (pool := _pool(reader, str(error))) is None:
        return None
    free, evictable = _left(reader, pool)
    names = [request.rid for request in ([prepared] if step == "match" else prepared.reqs)]
    return BrokenGrant(pool, step, names, free, evictable, _pinned(reader, pool, names))


def _prepared(trace: TracebackType | None) -> tuple[Any, str]:
    """The batch that was being prepared, or the request, and for what."""
    while trace is not None:
        if step := _PREPARES.get(trace.tb_frame.f_code.co_name):
            return trace.tb_frame.f_locals.get("self"), step
        trace = trace.tb_next
    return None, ""


def _pool(reader: Reader, error: str) -> Pool | None:
    """The pool in which an allocation failed."""
    if "alloc_req_slots" in error:
        return "rows"
    if (found := _WANTED.search(error)) is None:  # else it tells of states as of all pools
        return "states" if "mamba" in error else None
    wanted = int(found["tokens"])
    if reader.swa and sum(_left(reader, "full")) >= wanted > sum(_left(reader, "SWA")):
        return "SWA"
    return "full"


def _left(reader: Reader, pool: Pool) -> tuple[int, int]:
    """Return what is free in a pool, and what the tree counts as evictable."""
    full, swa, rows, held, _, locked = reader.counts()
    tree = reader.tree
    if pool == "rows":
        return rows, 0
    if pool == "full":
        return full, held - locked
    if pool == "SWA":
        return swa, int(tree.swa_evictable_size()) if reader.shares else 0
    evictable = int(tree.mamba_evictable_size()) if reader.shares else 0
    return int(reader.rows.mamba_allocator.available_size()), evictable


def _pinned(reader: Reader, pool: Pool, granted: list[str]) -> str:
    """Name the holders of a pool, the greatest first."""
    # a request may be in two batches
    held = sorted(dict(_held(reader, pool)).items(), key=lambda each: -each[1])
    words = [f"{name} {amount}" for name, amount in held if amount and name not in granted]
    more = f" and {len(words) - _MOST} others" if len(words) > _MOST else ""
    return f"held by {', '.join(words[:_MOST])}{more}" if words else "nobody else holds any"


def _held(reader: Reader, pool: Pool) -> Iterator[tuple[str, int]]:
    """Yield what sessions hold between and during their turns, what requests hold, and what the tree
    locks."""
    slots = reader.release.slots(reader.tree)
    for name, slot in slots.items():
        if reader.holds(slot):
            yield f"session {name}", _of(reader, pool, slot)
    for request, queued in reader.unfinished():
        if not queued and reader.holds(request) and session_of(request) not in slots:
            yield request.rid, _of(reader, pool, request)
    if pool == "full" and reader.shares:
        yield "locks of the tree", reader.counts()[5]


def _of(reader: Reader, pool: Pool, owner: Any) -> int:
    """Return what one owner holds of a pool, less what is the tree's."""
    _, allocated, evicted, protected = reader.release.cursors(owner)
    if pool == "rows":
        return 1
    if pool == "states":
        return 1 + len(buffers_of(owner.kv)) if owner.kv.holds_mamba else 0
    return allocated - (max(evicted, protected) if pool == "SWA" else protected)
