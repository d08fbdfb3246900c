"""Batches that admission granted although a pool is too small: explains a failed allocation of a server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, NamedTuple

from impl.sglang.parts.tracking import buffers_of
from impl.sglang.server.reading import Reader, session_of

Pool = Literal["rows", "full", "SWA", "states"]

# Functions of the release that prepare a granted batch or match a request, and the name of that step.
_STEP_OF_FUNCTION = {
    "prepare_for_extend": "prefill",
    "prepare_for_decode": "decode",
    "init_next_round_input": "match",
}
_TOKENS_ASKED = re.compile(r"Try to allocate (?P<tokens>\d+) tokens")
_MAX_NAMED = 4  # holders named in a message


class BrokenGrant(NamedTuple):
    """A granted batch for which an allocation failed.

    pool: the pool in which the allocation failed.
    step: a value of _STEP_OF_FUNCTION.
    requests: names of the requests of the batch.
    free: what is free in the pool, in its unit (rows, tokens or slots).
    evictable: what the tree counts as evictable, in the same unit.
    pinned: who holds the rest, in words.
    """

    pool: Pool
    step: str
    requests: list[str]
    free: int
    evictable: int
    pinned: str

    @property
    def says(self) -> str:
        """The finding in words."""
        granted = f"a {self.step} of {', '.join(self.requests)} was granted"
        left = f"{self.free} free and {self.evictable} evictable"
        return f"{granted}, and the pool of {self.pool} has {left}; {self.pinned}"


def broken_grant(reader: Reader, error: Exception) -> BrokenGrant | None:
    """Return the grant for which the server failed with an error; None if the error is no failed
    allocation."""
    prepared, step = _failed_step(error.__traceback__)
    pool = None if prepared is None else _exhausted_pool(reader, str(error))
    if pool is None:
        return None
    free, evictable = _free_and_evictable(reader, pool)
    requests = [prepared] if step == "match" else prepared.reqs
    names = [request.rid for request in requests]
    return BrokenGrant(pool, step, names, free, evictable, _describe_holders(reader, pool, names))


def _failed_step(trace: TracebackType | None) -> tuple[Any, str]:
    """Return the batch or request that a step was working on when it failed, and the step; (None, "") for
    none."""
    while trace is not None:
        if step := _STEP_OF_FUNCTION.get(trace.tb_frame.f_code.co_name):
            return trace.tb_frame.f_locals.get("self"), step
        trace = trace.tb_next
    return None, ""


def _exhausted_pool(reader: Reader, error: str) -> Pool | None:
    """Return the pool in which an allocation failed, by the message of the error; None if none failed."""
    if "alloc_req_slots" in error:
        return "rows"
    found = _TOKENS_ASKED.search(error)
    if found is None:  # a message about tokens mentions states ("mamba") as well
        return "states" if "mamba" in error else None
    requested = int(found["tokens"])
    if not reader.swa:
        return "full"
    fits_full = requested <= sum(_free_and_evictable(reader, "full"))
    fits_swa = requested <= sum(_free_and_evictable(reader, "SWA"))
    return "SWA" if fits_full and not fits_swa else "full"


def _free_and_evictable(reader: Reader, pool: Pool) -> tuple[int, int]:
    """Return the free amount of a pool and the amount that the tree counts as evictable, in the unit of the
    pool."""
    full, swa, rows, cached, _, locked = reader.counts()
    tree = reader.tree
    if pool == "rows":
        return rows, 0
    if pool == "full":
        return full, cached - locked
    if pool == "SWA":
        return swa, int(tree.swa_evictable_size()) if reader.shares else 0
    evictable = int(tree.mamba_evictable_size()) if reader.shares else 0
    return int(reader.rows.mamba_allocator.available_size()), evictable


def _describe_holders(reader: Reader, pool: Pool, granted: list[str]) -> str:
    """Name the holders of a pool other than the granted requests, the greatest first."""
    amounts = dict(_amounts_held(reader, pool))  # a request may be in two batches
    greatest_first = sorted(amounts.items(), key=lambda item: -item[1])
    words = [
        f"{name} {amount}" for name, amount in greatest_first if amount and name not in granted
    ]
    if not words:
        return "nobody else holds any"
    more = f" and {len(words) - _MAX_NAMED} others" if len(words) > _MAX_NAMED else ""
    return f"held by {', '.join(words[:_MAX_NAMED])}{more}"


def _amounts_held(reader: Reader, pool: Pool) -> Iterator[tuple[str, int]]:
    """Yield (holder, amount): sessions between and during their turns, other requests, locks of the tree."""
    slots = reader.release.slots(reader.tree)
    for name, slot in slots.items():
        if reader.holds(slot):
            yield f"session {name}", _amount_of(reader, pool, slot)
    for request, queued in reader.unfinished_requests():
        if not queued and reader.holds(request) and session_of(request) not in slots:
            yield request.rid, _amount_of(reader, pool, request)
    if pool == "full" and reader.shares:
        yield "locks of the tree", reader.counts()[5]


def _amount_of(reader: Reader, pool: Pool, owner: Any) -> int:
    """Return the amount of a pool that a request or session slot holds, without the tree's."""
    _, allocated, evicted, protected = reader.release.cursors(owner)
    if pool == "rows":
        return 1
    if pool == "states":
        return 1 + len(buffers_of(owner.kv)) if owner.kv.holds_mamba else 0
    return allocated - (max(evicted, protected) if pool == "SWA" else protected)
