"""Host memory that blocks are offloaded to: chunks, the hashes that they are kept under, pins (HOST)."""

from __future__ import annotations

from collections import Counter

from reference.blocks.clauses.step import BlockStep, clause
from reference.blocks.commands import ResetConnector
from reference.blocks.facts import HostKey
from reference.failures import AtChunk, AtCount, Failure, failure


@clause(
    "HOST-1",
    "a chunk has one owner",
    "A chunk of host memory is kept under one hash, or is free once, or a transfer in flight uses it.",
    why="Two owners overwrite each other's KV; a chunk without one is lost.",
    rule="blocks.facts",
    source="vllm CPUOffloadingManager._free_list",
    trigger=lambda s: s.after.host is not None and bool(s.after.host.free),
)
def _owned(step: BlockStep) -> Failure | None:
    if (host := step.after.host) is None:
        return None
    kept, free = Counter(key.chunk for key in host.keys), Counter(host.free)
    moving = {part[2] for job in host.transfers for part in job.parts}
    for chunk in range(host.chunks):
        owners = kept[chunk] + free[chunk]
        if owners > 1 or not (owners or chunk in moving):
            observed = f"{kept[chunk]} hashes name it, {free[chunk]} times in the free list"
            return failure(f"chunk {chunk} has one owner", observed, AtChunk(chunk))
    return None


@clause(
    "HOST-2",
    "a copy holds what its hash names",
    "A chunk whose store has completed holds KV of exactly the tokens that its hash is of, the last one"
    " included.",
    why="A later load gives that KV to every request that matches the hash.",
    rule="blocks.facts",
    source="vllm#54193, vllm#54288",
    scope="In a group with a window, blocks of a chunk that no hit needs may be left out.",
    trigger=lambda s: s.after.host is not None and any(key.pins >= 0 for key in s.after.host.keys),
)
def _holds(step: BlockStep) -> Failure | None:
    if (host := step.after.host) is None:
        return None
    for key in host.keys:
        if key.pins < 0:
            continue
        layers = step.config.groups[key.group]
        for index in range(step.config.chunk_blocks):
            start = index * layers.block_size
            want = key.stamps[start : start + layers.block_size]
            group, slots = host.memory[key.chunk][index]
            if (group, slots) != (key.group, want) and not (group < 0 and layers.window is not None):
                at = next((i for i, pair in enumerate(zip(slots, want)) if pair[0] != pair[1]), 0)
                got = "KV of another token" if group == key.group and slots[at] else "nothing of this group"
                expected = f"chunk {key.chunk} holds the {len(key.stamps)} tokens of its hash"
                observed = f"its slot {start + at} holds {got}"
                return failure(f"{expected} in group {key.group}", observed, AtChunk(key.chunk, start + at))
    return None


@clause(
    "HOST-3",
    "pins are the loads",
    "A chunk is pinned once for each load in flight that reads it. It is unreadable while a store writes it,"
    " and only then.",
    why="A pin too few: the chunk is evicted under a load. One too many: it is never evicted.",
    rule="blocks.facts",
    source="vllm ChunkStatus.ref_cnt",
    trigger=lambda s: any(job.load for job in s.after.transfers),
)
def _pinned(step: BlockStep) -> Failure | None:
    host = step.after.host
    for key in host.keys if host is not None else ():
        loads, stores = _users(step, key)
        want = -1 if stores else loads
        if key.pins != want:
            words = {-1: "being written"}
            expected = f"chunk {key.chunk} is {words.get(want, f'pinned {want} times')}"
            got = words.get(key.pins, f"pinned {key.pins} times")
            return failure(expected, f"it is {got}", AtChunk(key.chunk))
    return None


def _users(step: BlockStep, key: HostKey) -> tuple[int, int]:
    """Loads and stores in flight of the chunk that is kept under `key`."""
    jobs = [job for job in step.after.transfers if not job.stale]
    using = [job.load for job in jobs if any(part[2] == key.chunk for part in job.parts)]
    return sum(using), len(using) - sum(using)


@clause(
    "HOST-4",
    "a reset forgets the copies",
    "After a ResetConnector no chunk is kept under a hash.",
    why="Resets come with new weights: KV of the old ones must not be loaded.",
    rule="blocks.facts",
    source="vllm reset_connector_cache",
    trigger=lambda s: isinstance(s.command, ResetConnector) and bool(s.before.host and s.before.host.keys),
)
def _forgotten(step: BlockStep) -> Failure | None:
    host = step.after.host
    if not isinstance(step.command, ResetConnector) or step.refused or host is None or not host.keys:
        return None
    return failure("no hash in host memory", f"{len(host.keys)}", AtCount("host", "hashes", 0))
