"""Clauses on recurrent states: the one that an entry continues from, those that hashes publish, the writer of
a block, the states that a request keeps (STA)."""

from __future__ import annotations

from collections.abc import Sequence

from reference.blocks.clauses.step import IN_FLIGHT, BlockStep, clause
from reference.blocks.facts import Lane, Published, StateUse
from reference.failures import AtBlock, AtCount, AtNamed, Failure, Place, failure
from reference.recurrent_states import (
    EMPTY, GOES_ON, HIT, KEPT, NAMED, NOWHERE, misread, describe_stamp, stamp_after,
)  # fmt: skip


@clause(
    "STA-1",
    HIT.title,
    HIT.sentence,
    why=HIT.why,
    needs=("states",),
    rule="states",
    source="vllm find_longest_cache_hit; vllm#43559",
    trigger=lambda s: any(n.fresh and n.lane.start and n.lane.states for n in s.lanes),
)
def _hit_starts_from_its_state(step: BlockStep) -> Failure | None:
    return _first_wrong_start(step, fresh=True)


@clause(
    "STA-2",
    GOES_ON.title,
    GOES_ON.sentence,
    why=GOES_ON.why,
    needs=("states",),
    rule="states",
    source="vllm preprocess_mamba, num_accepted_tokens; vllm#56524",
    trigger=lambda s: any(not n.fresh and n.lane.start and n.lane.states for n in s.lanes),
)
def _entry_continues_its_state(step: BlockStep) -> Failure | None:
    return _first_wrong_start(step, fresh=False)


def _first_wrong_start(step: BlockStep, fresh: bool) -> Failure | None:
    """Return the failure of the first entry that continues from a wrong state.

    fresh: judge the requests that held no block before the step; otherwise, those that did.
    """
    for note in step.lanes:
        if note.fresh != fresh:
            continue
        for use in note.lane.states:
            start = note.lane.start
            name = note.lane.request
            observed = _wrong_start(use, start, note.stamps)
            if observed is not None:
                state = f"the state after its first {start} tokens"
                expected = f"{name} continues from {state} in group {use.group}"
                places: list[Place] = [AtCount(name, "state", start, use.group)]
                if use.block > 0:
                    places.append(AtBlock(use.block))
                return failure(expected, observed, *places)
    return None


def _wrong_start(use: StateUse, start: int, stamps: Sequence[int]) -> str | None:
    """Say what is wrong with the state that an entry continues from at `start`; None where it is right."""
    if start and use.block == NOWHERE:
        return "it begins with an empty state"
    if not start and use.block != NOWHERE:
        return f"it continues from block {use.block}"
    wrong = misread(use.found, stamp_after(stamps, start), stamps)
    return None if wrong is None else f"block {use.block}: {wrong}"


@clause(
    "STA-3",
    NAMED.title,
    NAMED.sentence,
    why=NAMED.why,
    needs=("states",),
    rule="states",
    source="vllm cache_blocks, move_block_hashes; vllm#57580",
    trigger=lambda s: any(s.config.groups[p.group].state for p in s.after.published),
)
def _published_state_matches_hash(step: BlockStep) -> Failure | None:
    for block, group, stamps in _published_states(step):
        owner, parts = step.after.memory[block]
        state = parts if owner == group else (EMPTY, EMPTY)
        observed = misread(state, stamps[-1], stamps)
        if observed is not None:
            if "after token" in observed:  # the token is counted within the block, not within the text
                observed += " of its block"
            expected = f"block {block} holds the state that its hash in group {group} is of"
            return failure(expected, observed, AtBlock(block))
    return None


def _published_states(step: BlockStep) -> list[Published]:
    """Return the published blocks of recurrent groups but the null block, which is block 0."""
    return [
        entry for entry in step.after.published if entry.block and step.config.groups[entry.group].state
    ]


@clause(
    "STA-4",
    "one writer",
    "A batch entry leaves states only in blocks of its request's own table that no other request has, and"
    " that no other entry of the batch reads or writes; never in the null block.",
    why="Whoever shares the block continues from a state of another text.",
    needs=("states",),
    rule="states",
    source="vllm MambaManager.allocate_new_blocks",
    scope="A block that is kept for what is in flight may be written: a copy from it begins its step, and of"
    " transfers XFER-1 and XFER-2 say it.",
    trigger=lambda s: sum(1 for n in s.lanes if n.lane.states) > 1,
)
def _state_has_one_writer(step: BlockStep) -> Failure | None:
    """Return the failure of the first state that is written into a block which another request has, or
    continues from in the same batch."""
    writer_of_block: dict[int, str] = {}
    for lane in step.after.lanes:
        for group, block in _written_blocks(lane):
            expected = f"{lane.request} leaves its state of group {group} in a block of its own"
            at_block = AtBlock(block)
            at_request = AtNamed("request", lane.request)
            if not block:
                return failure(expected, "it has none there", at_request, at_block)
            fact = step.after.requests.get(lane.request)
            if fact is None or block not in fact.tables[group]:
                return failure(expected, f"block {block} is not in its table", at_block, at_request)
            holders = {name for name, _, _ in step.entries.get(block, ())}
            if others := holders - {lane.request, IN_FLIGHT}:
                observed = f"{' and '.join(sorted(others))} has block {block} too"
                return failure(expected, observed, at_block, at_request)
            writer_of_block[block] = lane.request
    for lane in step.after.lanes:
        for use in lane.states:
            writer = writer_of_block.get(use.block, lane.request)
            if writer != lane.request:
                expected = f"nobody writes block {use.block} while {lane.request} continues from it"
                return failure(expected, f"{writer} does, in the same batch", AtBlock(use.block))
    return None


def _written_blocks(lane: Lane) -> list[tuple[int, int]]:
    """Return the (group, block) of each state that a batch entry leaves."""
    return [(use.group, block) for use in lane.states for block, _ in use.writes]


@clause(
    "STA-5",
    KEPT.title,
    KEPT.sentence,
    why=KEPT.why,
    needs=("states",),
    rule="states",
    source="vllm MambaManager.remove_skipped_blocks; vllm#55178",
    scope="A session between turns may have taken back tokens: its next turn may start earlier.",
    trigger=lambda s: bool(s.config.recurrent) and any(b.computed for _, b, _ in s.held_tables()),
)
def _request_keeps_its_state(step: BlockStep) -> Failure | None:
    """Return the failure of the first request in whose blocks the state after its computed tokens, or the
    convolution window of it, is missing."""
    if not step.config.recurrent:
        return None
    for name, bearer, tables in step.held_tables():
        count = bearer.computed
        stamps = bearer.ahead()[1]
        if not count or count > len(stamps) or bearer.idle or bearer.turned:
            continue
        due_stamp = stamp_after(stamps, count)
        for group in step.config.recurrent:
            blocks = [step.after.memory[block] for block in tables[group] if block]
            states = [parts for owner, parts in blocks if owner == group]
            stamps_by_part = {
                "state": {parts[0] for parts in states},
                "convolution window": {part for parts in states for part in parts[1:]},
            }
            for part, stamps_kept in stamps_by_part.items():
                if due_stamp not in stamps_kept:
                    others = [
                        f"one {describe_stamp(stamp, stamps)}"
                        for stamp in sorted(stamps_kept - {EMPTY})
                    ]
                    observed = f"of its blocks {', '.join(others) or 'none'}"
                    expected = (
                        f"{name} keeps the {part} after its first {count} tokens in group {group}"
                    )
                    return failure(expected, observed, AtCount(name, "kept", count, group))
    return None
