"""Facts about the blocks, table places and requests of an engine that schedules by itself."""

from __future__ import annotations

from collections.abc import Iterable

from ci.explain.fact_history import Past
from ci.explain.places import Fact
from reference.blocks.clauses.step import window_start
from reference.blocks.facts import Lane, StateUse, chained
from reference.failures import AtBlock, AtChunk, AtCount, AtNamed, AtTable, AtText, Place, count_text
from reference.kv_sources import KvSource
from stateful_tests.lockstep.run_moments import EngineMoment


def block_at(place: AtTable, moment: EngineMoment) -> int | None:
    """Return the block in a place of a table, 0 for the null block; None past the table's end."""
    fact = moment.facts.requests.get(place.request)
    row = fact.tables[place.group] if fact is not None else ()
    return row[place.at] if place.at < len(row) else None


def blocks_of(places: tuple[Place, ...], moment: EngineMoment) -> set[int]:
    """Return the blocks that a failure is about."""
    first_place = places[0] if places else None
    if isinstance(first_place, AtTable):
        return {block_at(first_place, moment) or 0} - {0}
    if isinstance(first_place, AtCount) and first_place.name == "state":
        return {place.block for place in places if isinstance(place, AtBlock)}
    return {first_place.block} if isinstance(first_place, AtBlock) else set()


def chunks_of(places: tuple[Place, ...]) -> set[int]:
    """Return the chunks of host memory that a failure is about."""
    return {place.chunk for place in places if isinstance(place, AtChunk)}


def place_name(place: Place, m: EngineMoment) -> str:
    match place:
        case AtTable(request):
            return f"{request} at {_position_range(place, m)}"
        case AtBlock(block):
            return f"block {block}"
        case AtChunk(chunk):
            return f"chunk {chunk} of host memory"
        case AtCount(who) | AtText(who) | AtNamed(_, who):
            return who
    return ""


def facts_at(place: Place, m: EngineMoment) -> list[Fact]:
    """Return the facts about a place, as in ci.explain.places: a block is free, named by the prefix
    cache, and in tables."""
    facts = m.facts
    match place:
        case AtTable():
            block = block_at(place, m)
            had = {0: "the null block", None: "no block"}.get(block, f"block {block}")
            return [Fact("", f"has {had}", f"had {had}" if block else "")]
        case AtBlock(block):
            free = [Fact("", "is free", "was free")] if block in facts.free else []
            is_named = any(published.block == block for published in facts.published)
            entries = m.step.entries.get(block, ()) if m.step is not None else ()
            owners = [Fact(entry[0], _holder_facts(AtTable(*entry), m)) for entry in entries]
            named = [Fact("", "is named by the prefix cache")] if is_named else []
            return free + named + owners
        case AtChunk(chunk) if facts.host is not None:
            is_named = any(key.chunk == chunk for key in facts.host.keys)
            free = [Fact("", "is free", "was free")] if chunk in facts.host.free else []
            named = [Fact("", "is named by a hash", "was named by a hash")] if is_named else []
            return free + named
        case AtCount(who) | AtText(who) | AtNamed(_, who) if who in facts.requests:
            fact = facts.requests[who]
            blocks = count_text(sum(1 for table in fact.tables for block in table if block), "block")
            counts = f"counts {fact.computed} computed and holds {blocks}"
            return [
                Fact("", f"is {fact.status} with {count_text(len(fact.tokens), 'token')}, {counts}")
            ]
    return []


def _holder_facts(place: AtTable, m: EngineMoment) -> str:
    """Return how a holder has a block. Group -1: a step or transfer in flight keeps it."""
    return f"has it at {_position_range(place, m)}" if place.group >= 0 else "keeps it"


def _position_range(place: AtTable, m: EngineMoment) -> str:
    assert m.step is not None
    size = m.step.config.groups[place.group].block_size
    return f"[{place.at * size}, {(place.at + 1) * size}) of group {place.group}"


def events(past: Past[EngineMoment]) -> list[str]:
    """Return events that the facts of one moment do not show: the last writer of a block, and what a
    query sees."""
    places = past.violation.failure.at
    step = past.now.step
    assert step is not None
    events = [_last_write(past, block) for block in sorted(blocks_of(places, past.now))]
    first_place = places[0] if places else None
    if isinstance(first_place, AtChunk):
        events.append(_last_move(past, first_place.chunk))
    if isinstance(first_place, AtTable) and first_place.query is not None:
        layers = step.config.groups[first_place.group]
        among = "" if first_place.position is None else f", {first_place.position} among them"
        read_range = f"from {window_start(layers, first_place.query)} on{among}"
        events.append(f"the query at {first_place.query} sees positions {read_range}")
    return events


def _last_move(past: Past[EngineMoment], chunk: int) -> str:
    """Describe the last KV that was moved into a chunk of host memory, and when that was seen first."""
    moves_by_block: dict[int, str] = {}
    for index, moment in enumerate(past.moments, past.run.history_start):
        for job in moment.facts.transfers:
            blocks = [str(part[1]) for part in job.parts if part[2] == chunk]
            if blocks and job.copied and not job.load:
                event = f"store {job.job} has moved block {' and '.join(blocks)} into it"
                moves_by_block.setdefault(job.job, f"{event} by {past.command(index)}")
    return moves_by_block[max(moves_by_block)] if moves_by_block else "no store in sight has written it"


def _last_write(past: Past[EngineMoment], block: int) -> str:
    """Describe the last write into a block before an entry read it: its request, positions and command."""
    moments = list(enumerate(past.moments, past.run.history_start))
    step = past.now.step
    assert step is not None
    if isinstance(past.violation.failure.at[0], AtCount):
        moments.pop()
    for index, moment in reversed(moments):
        for lane in reversed(moment.facts.lanes):
            if (left := _last_state(lane, block, step.kv_sources)) is not None:
                return f"{lane.request} left {left} in block {block} last, in {past.command(index)}"
            for group, row in enumerate(lane.tables):
                if step.config.groups[group].state:
                    continue
                size = step.config.groups[group].block_size
                span = range(lane.start, lane.start + len(lane.tokens))
                positions = [p for p in span if p // size < len(row) and row[p // size] == block]
                if positions:
                    where = f"[{positions[0]}, {positions[-1] + 1}) of group {group}"
                    return (
                        f"{lane.request} wrote {where} of block {block} last, in {past.command(index)}"
                    )
        was = past.moments[max(0, index - past.run.history_start - 1)].facts
        if (held := moment.facts.memory[block]) != was.memory[block]:
            copied = f"a state was copied into block {block} last"
            if not step.config.groups[held[0]].state:
                copied = f"a load wrote block {block} last"
                if not any(held[1]):
                    copied = f"a load that failed has left block {block} empty"
            return f"{copied}, in {past.command(index)}"
    return f"nobody has written block {block}"


def _last_state(lane: Lane, block: int, sources: Iterable[KvSource]) -> str | None:
    """Return the last state that an entry leaves in a block, in words.

    sources: sources that its text may begin at.
    """
    for use in lane.states:
        for written, stamp in reversed(use.writes):
            if written == block:
                return f"the state after its token {lane.start + _token_count(lane, use, stamp, sources)}"
    return None


def _token_count(lane: Lane, use: StateUse, stamp: int, sources: Iterable[KvSource]) -> int:
    """Return the number of the entry's tokens before a state with this stamp."""
    begins = [use.found[0]] if lane.start else [use.found[0], *(source.origin for source in sources)]
    texts = (chained(lane.tokens, begin) for begin in begins)
    return next(stamps.index(stamp) + 1 for stamps in texts if stamp in stamps)
