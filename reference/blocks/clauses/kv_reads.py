"""Clauses on the KV that a batch reads, must keep, gives back and writes (HIT, WIN, READ, BLK-5)."""

from __future__ import annotations

from reference.blocks.clauses.step import NOT_WRITTEN, BlockStep, clause, window_start
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.request_texts import LaneNote
from reference.failures import AtBlock, AtCount, AtTable, Failure, count_text, failure


@clause(
    "HIT-1",
    "a hit can be resumed from in every group",
    "A request that starts behind a cached prefix finds KV of its own text in every group, as "
    "far back as the next query reads; at least one token is left to compute.",
    why=(
        "Groups are matched one by one and cut to a common length; a longer hit is read where "
        "nothing is."
    ),
    rule="blocks.request_texts",
    source="vllm find_longest_cache_hit",
    trigger=lambda s: any(n.fresh and n.lane.start for n in s.lanes),
)
def _hit_is_resumable(step: BlockStep) -> Failure | None:
    for note in step.lanes:
        start = note.lane.start
        name = note.lane.request
        if not note.fresh or not start or note.void:
            continue
        if not step.config.caching and not step.config.peer:
            expected = f"{name} starts at 0: nothing is cached"
            return failure(expected, f"it starts at {start}", AtCount(name, "start", 1))
        if start >= len(note.text):
            expected = f"{name} computes at least the last of its {len(note.text)} tokens"
            return failure(expected, f"it starts at {start}", AtCount(name, "start", len(note.text)))
        if (misread := step.misread(name, note.lane.tables, note.stamps, start, start)) is not None:
            return misread
    return None


@clause(
    "READ-3",
    "every group reads the text's KV",
    "Each query of a batch finds KV of exactly its request's text in every group, at every position that"
    " it sees.",
    why="This is the purpose of the bookkeeping.",
    rule="blocks.request_texts",
    source="as READ-1, READ-2",
    scope=(
        "An entry may read what a load within its step, or within one whose results are not taken, has not"
        " brought: TXT-1 says that its results are dropped."
    ),
    trigger=lambda s: any(n.lane.start > 0 for n in s.lanes),
)
def _groups_read_text_kv(step: BlockStep) -> Failure | None:
    for note in step.lanes:
        lane = note.lane
        stamps = note.stamps
        if note.void:
            continue
        end = min(lane.start + len(lane.tokens), len(note.stamps))
        if (misread := step.misread(lane.request, lane.tables, stamps, lane.start, end)) is not None:
            return misread
        if (misread := _wrong_attention(step, note, end)) is not None:
            return misread
    return None


def _wrong_attention(step: BlockStep, note: LaneNote, end: int) -> Failure | None:
    """Return the failure where attention got other KV than that of the entry's text, up to position `end`."""
    lane = note.lane
    for group, first_position, stamps in lane.found:
        layers = step.config.groups[group]
        start = window_start(layers, lane.start)
        if (first_position, list(stamps)) != (start, note.stamps[start:end]):
            pairs = enumerate(zip(stamps, note.stamps[first_position:end]), first_position)
            position = next((at for at, (observed, expected) in pairs if observed != expected), start)
            entry, _ = layers.slot_of(position)
            expected = f"attention gets the KV of {lane.request} at [{start}, {end}) in group {group}"
            observed = f"{count_text(len(stamps), 'position')} from {first_position} on, wrong at {position}"
            return failure(expected, observed, AtTable(lane.request, group, entry, position, lane.start))
    return None


@clause(
    "WIN-1",
    "the confirmed window stays",
    "Each request keeps, in every group, all that its next query can read: from one window "
    "before its confirmed length up to that length. Only blocks below are replaced by the null "
    "block.",
    why=(
        "Drafts in flight may be taken back; the request then continues below the optimistic count."
    ),
    rule="blocks.request_texts",
    source="vllm#47728",
    trigger=lambda s: any(
        layers.window is not None and bearer.sure_count >= layers.window
        for _, bearer, _ in s.held_tables()
        for layers in s.config.groups
    ),
)
def _confirmed_window_stays(step: BlockStep) -> Failure | None:
    for name, bearer, tables in step.held_tables():
        sure = bearer.sure_count
        for group, layers in enumerate(step.config.groups):
            row = tables[group]
            if layers.state:  # STA-5
                continue
            for table_entry in layers.entries_of(window_start(layers, sure), sure):
                if table_entry >= len(row) or not row[table_entry]:
                    problem = "is the null block" if table_entry < len(row) else "is past its end"
                    entry = f"entry {table_entry} of its table in group {group}"
                    expected = (
                        f"{name}, whose confirmed length is {sure}, must keep the block of {entry}"
                    )
                    return failure(
                        expected,
                        f"{entry} {problem}",
                        AtTable(name, group, table_entry, query=sure),
                    )
    return None


@clause(
    "READ-4",
    "what is held stays what it was",
    "Between batches too, the blocks of a request hold KV of its own text, in the window of its "
    "confirmed length. So does the copy of a request that is swapped to host memory.",
    why="A wrong write is caught at the write, not at a later read.",
    rule="blocks.request_texts",
    source="kvspec",
    trigger=lambda s: any(b.sure_count > 0 for _, b, _ in s.held_tables()),
)
def _held_content_stays(step: BlockStep) -> Failure | None:
    for name, bearer, tables in step.held_tables():
        sure = bearer.sure_count
        if bearer.void:
            continue
        stamps = bearer.stamps if sure <= len(bearer.stamps) else bearer.ahead()[1]
        if (misread := step.misread(name, tables, stamps, sure, min(sure, len(stamps)))) is not None:
            return misread
    return _wrong_copy(step)


def _wrong_copy(step: BlockStep) -> Failure | None:
    """Return the failure where the copy of a swapped request holds other KV than that of its text."""
    swap = step.after.swap
    if swap is None:
        return None
    for name, bearer in step.bearers.items():
        fact = step.after.requests.get(name)
        if fact is None or fact.status != "SWAPPED":
            continue
        sure = bearer.sure_count
        tables = swap.tables.get(name, ((),) * len(step.config.groups))
        for group, layers in enumerate(step.config.groups):
            start = window_start(layers, sure)
            copied = step.reads(tables, group, start, sure, swap.memory)
            if copied != bearer.stamps[start:sure]:
                expected = f"host memory has the KV of {name} at [{start}, {sure}) in group {group}"
                observed = f"blocks {list(tables[group])} of host memory have other KV, or none"
                return failure(expected, observed, AtCount(name, "swapped", sure, group))
    return None


@clause(
    "WIN-2",
    "counts in order",
    "The confirmed length is at most the scheduler's count, which is at most what each table has "
    "slots for.",
    why="A lower count computes tokens twice; one past the table writes where no block is.",
    rule="blocks.request_texts",
    source="as LEN-1",
    scope="Requests that run.",
    trigger=lambda s: any(s.after.requests[name].status == "RUNNING" for name, _, _ in s.held_tables()),
)
def _counts_in_order(step: BlockStep) -> Failure | None:
    for name, bearer, tables in step.held_tables():
        fact = step.after.requests[name]
        if fact.status != "RUNNING":
            continue
        if bearer.sure_count > fact.computed:
            expected = f"{name}: the scheduler counts at least {bearer.sure_count}"
            return failure(expected, f"{fact.computed}", AtCount(name, "computed", bearer.sure_count))
        for group, layers in enumerate(step.config.groups):
            slots = len(tables[group]) * layers.block_size
            expected_count = fact.computed - layers.first_kept(0, fact.computed)
            if slots < expected_count and not layers.state:
                expected = f"{name}: slots for {expected_count} in group {group}"
                return failure(expected, f"{slots}", AtCount(name, "slots", expected_count, group))
    return None


@clause(
    "BLK-5",
    "only one's own blocks are written",
    "A batch entry writes only into blocks of its request's tables, into slots of one position that no other"
    " entry writes; never into the null block, never past its table, never into a block that another request"
    " has and the prefix cache named before. Where the engine makes blocks of equal text one, entries may"
    " write the same KV there.",
    why="Whoever holds the block reads what was written there.",
    rule="blocks.facts",
    source="vllm slot mapping",
    trigger=lambda s: sum(1 for n in s.lanes if len(n.lane.tokens)) > 1,
)
def _writes_own_blocks(step: BlockStep) -> Failure | None:
    """Return the failure of the first position that a batch writes outside of its request's blocks, into a
    block that others read by an older hash, or twice with different KV."""
    writers: dict[tuple[int, int], tuple[str, int]] = {}
    texts = {note.lane.request: note.stamps for note in step.lanes}
    written_blocks: set[int] = set()
    if not step.after.merges and step.lanes:
        written_blocks = {entry.block for entry in {*step.before.published} & {*step.after.published}}
    for lane in step.after.lanes:
        fact = step.after.requests.get(lane.request)
        for group, layers in enumerate(step.config.groups):
            row = lane.tables[group]
            size = layers.block_size
            if layers.state:  # STA-4
                continue
            end = lane.start + len(lane.tokens)
            for position in range(layers.first_kept(lane.start, end), end):
                entry, offset = layers.slot_of(position)
                block = row[entry] if entry < len(row) else 0
                where = f"{lane.request} writes position {position} of group {group}"
                place = AtTable(lane.request, group, entry, position)
                if not block:
                    return failure(f"{where} into a block of its own", "it has none there", place)
                own_table = fact.tables[group] if fact is not None else ()
                if entry >= len(own_table) or own_table[entry] != block:
                    observed = f"block {block} is not in its table"
                    return failure(f"{where} into a block of its own", observed, place)
                if block in written_blocks and step.held_its_text(block):
                    if others := _previous_holders(step, block) - {lane.request}:
                        names = " and ".join(sorted(others))
                        observed = f"{names} has block {block} too, and its hash is older"
                        behind = AtCount(lane.request, "start", (entry + 1) * size)
                        return failure(
                            f"{where} into a block of its own", observed, behind, AtBlock(block)
                        )
                stamps = texts.get(lane.request, [])
                stamp = stamps[position] if position < len(stamps) else NOT_WRITTEN
                other, its = writers.setdefault((block, offset), (lane.request, stamp))
                if other != lane.request and not (
                    step.after.merges and stamp == its != NOT_WRITTEN
                ):
                    observed = f"{other} writes there in the same batch"
                    return failure(f"{where} alone", observed, AtBlock(block), place)
    return None


@clause(
    "WIN-3",
    "what a window has left goes",
    "Behind the window of its confirmed length a request keeps at most as many blocks as two steps of the"
    " whole budget and one more fill.",
    why=(
        "A pool is sized, and requests are admitted, by that many. A request that keeps more is preempted"
        " where it would run, though nobody else has a block."
    ),
    rule="blocks.config",
    source="vllm max_admission_blocks_per_request",
    scope="A ring has at most the blocks of its window, whatever the text's length.",
    concerns="outcomes, choices and order",
    trigger=lambda s: any(
        window_start(layers, bearer.sure_count)
        >= layers.block_size * (max_blocks_behind_window(s.config, layers) + 1)
        for _, bearer, _ in s.held_tables()
        for layers in s.config.groups
        if layers.window is not None
    ),
)
def _frees_blocks_behind_window(step: BlockStep) -> Failure | None:
    for name, bearer, tables in step.held_tables():
        for group, layers in enumerate(step.config.groups):
            if layers.ring:
                if len(tables[group]) > (most := step.config.most_blocks(layers)):
                    limit = f"at most {count_text(most, 'block')}"
                    expected = f"{name} must have {limit} in the ring of group {group}"
                    place = AtTable(name, group, most, query=bearer.sure_count)
                    return failure(expected, f"its table has {len(tables[group])}", place)
                continue
            behind = tables[group][: window_start(layers, bearer.sure_count) // layers.block_size]
            unfreed = [index for index, block in enumerate(behind) if block]
            if len(unfreed) > (most := max_blocks_behind_window(step.config, layers)):
                expected = f"{name} must keep at most {count_text(most, 'block')} behind its window"
                blocks = count_text(len(unfreed), "block")
                observed = f"{name} keeps {blocks} of group {group}, from entry {unfreed[0]} of its table on"
                return failure(expected, observed, AtTable(name, group, unfreed[0], query=bearer.sure_count))
    return None


def max_blocks_behind_window(config: EngineConfig, layers: LayerGroup) -> int:
    """Return the number of blocks that a request may keep behind its window: those that two steps fill,
    and one."""
    return -(-2 * config.max_batched_tokens // layers.block_size) + 1


def _previous_holders(step: BlockStep, block: int) -> set[str]:
    """Return the requests that have held a block since before the command. A request that found the
    block computed anew is not among them."""
    had = (
        name
        for name, fact in step.before.requests.items()
        if any(block in row for row in fact.tables)
    )
    return {*had} & {name for name, _, _ in step.entries[block]}
