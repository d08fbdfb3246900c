"""Recurrent state: what an entry continues from, what is published, who writes, what is kept (STA)."""

from __future__ import annotations

from reference.blocks.clauses.step import IN_FLIGHT, BlockStep, clause
from reference.blocks.facts import Lane, Published
from reference.failures import AtBlock, AtCount, AtNamed, Failure, failure
from reference.states import (
    EMPTY, GOES_ON, HIT, KEPT, NAMED, NOWHERE, misread, seen, stamp_after,
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
def _hit(step: BlockStep) -> Failure | None:
    return _continued(step, fresh=True)


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
def _goes_on(step: BlockStep) -> Failure | None:
    return _continued(step, fresh=False)


def _continued(step: BlockStep, fresh: bool) -> Failure | None:
    """The first entry, of a request that held nothing before or of another, that has a wrong state."""
    for note in step.lanes:
        if note.fresh != fresh:
            continue
        for use in note.lane.states:
            start, name = note.lane.start, note.lane.request
            got: str | None
            if (use.block == NOWHERE) != (start == 0):
                got = (
                    "it begins with an empty state"
                    if start
                    else f"it continues from block {use.block}"
                )
            else:
                wrong = misread(use.found, stamp_after(note.stamps, start), note.stamps)
                got = wrong and f"block {use.block}: {wrong}"
            if got is not None:
                want = f"{name} continues from the state after its first {start} tokens in group {use.group}"
                at = AtCount(name, "state", start, use.group)
                return failure(want, got, at, *([AtBlock(use.block)] if use.block > 0 else []))
    return None


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
def _named(step: BlockStep) -> Failure | None:
    for block, group, stamps in _published(step):
        owner, parts = step.after.memory[block]
        found = parts if owner == group else (EMPTY, EMPTY)
        if (got := misread(found, stamps[-1], stamps)) is not None:
            want = f"block {block} holds the state that its hash in group {group} is of"
            return failure(
                want, f"{got} of its block" if "after token" in got else got, AtBlock(block)
            )
    return None


def _published(step: BlockStep) -> list[Published]:
    return [
        each for each in step.after.published if each.block and step.config.groups[each.group].state
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
def _alone(step: BlockStep) -> Failure | None:
    users: dict[int, str] = {}
    for lane in step.after.lanes:
        for group, block in _written(lane):
            where = f"{lane.request} leaves its state of group {group} in a block of its own"
            at = (AtBlock(block), AtNamed("request", lane.request))
            if not block:
                return failure(where, "it has none there", *reversed(at))
            fact = step.after.requests.get(lane.request)
            if fact is None or block not in fact.tables[group]:
                return failure(where, f"block {block} is not in its table", *at)
            users_of = {name for name, _, _ in step.entries.get(block, ())}
            if others := users_of - {lane.request, IN_FLIGHT}:
                return failure(where, f"{' and '.join(sorted(others))} has block {block} too", *at)
            users[block] = lane.request
    for lane in step.after.lanes:
        for use in lane.states:
            if users.get(use.block, lane.request) != lane.request:
                want = f"nobody writes block {use.block} while {lane.request} continues from it"
                return failure(
                    want, f"{users[use.block]} does, in the same batch", AtBlock(use.block)
                )
    return None


def _written(lane: Lane) -> list[tuple[int, int]]:
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
    trigger=lambda s: bool(s.config.recurrent) and any(b.computed for _, b, _ in s.held()),
)
def _kept(step: BlockStep) -> Failure | None:
    if not step.config.recurrent:
        return None
    for name, bearer, tables in step.held():
        count, stamps = bearer.computed, bearer.ahead()[1]
        if not count or count > len(stamps) or bearer.idle or bearer.turned:
            continue
        want = stamp_after(stamps, count)
        for group in step.config.recurrent:
            there = [step.after.memory[block] for block in tables[group] if block]
            held = [parts for owner, parts in there if owner == group]
            for what, kept in (
                ("state", {parts[0] for parts in held}),
                ("convolution window", {part for parts in held for part in parts[1:]}),
            ):
                if want not in kept:
                    has = (
                        ", ".join(f"one {seen(stamp, stamps)}" for stamp in sorted(kept - {0}))
                        or "none"
                    )
                    expected = (
                        f"{name} keeps the {what} after its first {count} tokens in group {group}"
                    )
                    return failure(
                        expected, f"of its blocks {has}", AtCount(name, "kept", count, group)
                    )
    return None
