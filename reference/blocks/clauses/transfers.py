"""Transfers between blocks and host memory while they are in flight (XFER)."""

from __future__ import annotations

from collections.abc import Iterator

from reference.blocks.clauses.step import BlockStep, clause, window_start
from reference.blocks.facts import BlockFacts, Part, Transfer
from reference.failures import AtBlock, AtChunk, AtCount, AtTable, Failure, failure


def _waiting(facts: BlockFacts) -> Iterator[tuple[Transfer, Part]]:
    """What transfers that have moved nothing yet will move."""
    for job in facts.transfers:
        if not job.copied:
            for part in job.parts:
                yield job, part


def _source(facts: BlockFacts, job: Transfer, part: Part) -> tuple[int, tuple[int, ...]]:
    _, block, chunk, index = part
    if job.load:
        assert facts.host is not None
        return facts.host.memory[chunk][index]
    return facts.memory[block]


@clause(
    "XFER-1",
    "a source stays until it is read",
    "Nobody writes what a transfer in flight has not read yet: blocks of a store, chunks of a load.",
    why="The copy would be of another text than its hash names.",
    rule="blocks.facts",
    source="vllm#42761, vllm#29870",
    scope="A block of a store may be freed; who takes it waits for the store first.",
    trigger=lambda s: any(True for _ in _waiting(s.after)),
)
def _source_stays(step: BlockStep) -> Failure | None:
    before = {job.job for job in step.before.transfers}
    for job, part in _waiting(step.after):
        if job.job not in before:
            continue
        if _source(step.before, job, part) != _source(step.after, job, part):
            where = f"chunk {part[2]}" if job.load else f"block {part[1]}"
            at = AtChunk(part[2]) if job.load else AtBlock(part[1])
            want = f"{where} stays as it is until transfer {job.job} has read it"
            return failure(want, "it was written", at)
    return None


@clause(
    "XFER-2",
    "a load's blocks are its request's",
    "A block that a load in flight writes is not free and belongs to one request's tables, or to "
    "the load alone. Nobody computes with it before the load completes, and no step in flight writes it.",
    why="An owner loses its KV when the load arrives; an early reader reads what is not there. A step that"
    " was scheduled earlier may write after the load.",
    rule="blocks.facts",
    source="vllm Scheduler._update_waiting_for_remote_kv",
    trigger=lambda s: any(job.load and not job.completed for job in s.after.transfers),
)
def _destination(step: BlockStep) -> Failure | None:
    for job in step.after.transfers:
        for group, block, _, _ in job.parts if job.load and not job.completed else ():
            where, named = AtBlock(block), step.entries.get(block, ())
            if len(names := {name for name, _, _ in named}) != 1:
                who = " and ".join(sorted(names)) or "nobody"
                want = f"block {block} is held for transfer {job.job} alone"
                return failure(want, f"{who} holds it", where)
            for lane in step.after.lanes:
                start = window_start(step.config.groups[group], lane.start)
                size, row = step.config.groups[group].block_size, lane.tables[group]
                end = -(-(lane.start + len(lane.tokens)) // size)
                if block in row[start // size : end]:
                    want = f"{lane.request} waits for transfer {job.job}"
                    place = AtTable(lane.request, group, row.index(block))
                    return failure(want, f"it computes with block {block}", place)
            if block in step.writing:
                want = f"no step in flight writes block {block}, for transfer {job.job} does"
                return failure(want, "one does", where)
    return None


@clause(
    "XFER-3",
    "nothing is kept for requests that are gone",
    "The connector has records only of requests that exist or have a transfer in flight; it "
    "keeps blocks only for steps and transfers in flight.",
    why="A stale record leaks memory, and meets the next request of that name.",
    rule="blocks.facts",
    source="vllm OffloadingConnectorScheduler._req_status",
    trigger=lambda s: bool(s.before.kept) or (bool(s.before.transfers) and not s.after.transfers),
)
def _records(step: BlockStep) -> Failure | None:
    facts = step.after
    if facts.host is not None and facts.host.records:
        got = ", ".join(facts.host.records)
        return failure("no record of what is gone", got, AtCount("host", "records", 0))
    if facts.kept and not facts.transfers and not facts.steps_in_flight:
        blocks = " ".join(map(str, facts.kept))
        at = (AtBlock(block) for block in facts.kept)
        return failure("blocks are kept for what is in flight", f"nothing is; blocks {blocks} are kept", *at)
    return None
