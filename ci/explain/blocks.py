"""Explanations for engines that schedule by themselves: blocks, places in tables, requests."""

from ci.explain.history import Past, some
from reference.blocks.clauses import BlockStep
from reference.blocks.clauses.step import window_start
from reference.failures import AtBlock, AtChunk, AtCount, AtNamed, AtTable, AtText, Place
from stateful_tests.lockstep.results import EngineMoment


def block_at(place: AtTable, moment: EngineMoment) -> int | None:
    """The block in a place of a table, 0 for the null block; None past the table's end."""
    fact = moment.facts.requests.get(place.request)
    row = fact.tables[place.group] if fact is not None else ()
    return row[place.at] if place.at < len(row) else None


def blocks_of(places: tuple[Place, ...], moment: EngineMoment) -> set[int]:
    """The blocks that a failure is about."""
    first = places[0] if places else None
    if isinstance(first, AtTable):
        return {block_at(first, moment) or 0} - {0}
    return {first.block} if isinstance(first, AtBlock) else set()


def rule(past: Past) -> str | None:
    """Why what a clause is about cannot be."""
    violation, facts = past.violation, past.now.facts
    match violation.failure.at:
        case (AtTable() as place, *_):
            return _of_place(past, place)
        case (AtCount("batch", "stall"), *_):
            waiting = " and ".join(_of_request(past, name) for name in facts.requests)
            return f"{past.here} gives no batch with {some(len(facts.free), 'block')} free: {waiting}"
        case (AtBlock(block), *_):
            return _of_block(past, block)
        case (AtChunk(chunk), *_):
            return _of_chunk(past, chunk)
        case (AtCount(who) | AtText(who) | AtNamed(_, who), *_) if who in facts.requests:
            said = f"{past.here}: {violation.observed}, where {violation.expected}"
            return f"{said}; {_of_request(past, who)}"
    return None


def _range(place: AtTable, step: BlockStep) -> str:
    size = step.config.groups[place.group].block_size
    return f"[{place.at * size}, {(place.at + 1) * size}) of group {place.group}"


def _of_place(past: Past, place: AtTable) -> str:
    """What a request has at a place of its table, what is written there, and which query sees it."""
    block, step, who = block_at(place, past.now), past.now.step, place.request
    where = _range(place, step)
    since = past.first_since(f"{who} has {block} at {where}", lambda m: block_at(place, m) == block)
    had = {0: "the null block", None: "no block"}.get(block, f"block {block}")
    said = f"{who} has {had} at {where} {since}"
    if block:
        said += f", and {_written(past, block)}"
    elif (was := past.last_before(lambda m: bool(block_at(place, m)))) is not None:
        said += f"; until then it had block {block_at(place, was)}"
    if place.query is None:
        return said
    start = window_start(step.config.groups[place.group], place.query)
    among = "" if place.position is None else f", {place.position} among them"
    return f"{said}; the query at {place.query} sees positions from {start} on{among}"


def _of_block(past: Past, block: int) -> str:
    """Who has a block, whether it is free, what the prefix cache says of it, and what is written there."""
    facts, said = past.now.facts, []
    for who, group, index in past.now.step.entries.get(block, ()):
        place = AtTable(who, group, index)
        had = past.first_since(f"{place} has {block}", lambda m, p: block_at(p, m) == block, place)
        said.append(f"{who} has it at {_range(place, past.now.step)} {had}")
    if block in facts.free:
        said.append(f"it is free {past.first_since(f'{block} is free', lambda m: block in m.facts.free)}")
    if any(p.block == block for p in facts.published):
        named = past.first_since(
            f"{block} is published", lambda m: any(p.block == block for p in m.facts.published)
        )
        said.append(f"the prefix cache names it {named}")
    violation = past.violation
    said.append(_written(past, block))
    return f"by the rules {violation.expected}, and {violation.observed}; of block {block}: {', '.join(said)}"


def _of_chunk(past: Past, chunk: int) -> str:
    """Since when a hash names a chunk, and what was moved into it last."""
    said = [f"by the rules {past.violation.expected}, and {past.violation.observed}"]
    if any(key.chunk == chunk for key in past.now.facts.host.keys):
        named = past.first_since(
            f"{chunk} has its hash", lambda m: any(key.chunk == chunk for key in m.facts.host.keys)
        )
        said.append(f"a hash names it {named}")
    for at, moment in reversed(list(enumerate(past.run.history, past.run.first))):
        for job in moment.facts.transfers:
            blocks = [part[1] for part in job.parts if part[2] == chunk]
            if blocks and job.copied and not job.load:
                moved = f"store {job.job} has moved block {' and '.join(map(str, blocks))} into it"
                return f"{', '.join(said)}; {moved} by {past.command(at)}"
    return f"{', '.join(said)}; no store in sight has written it"


def _written(past: Past, block: int) -> str:
    """Who wrote into a block last, which positions, and when."""
    for at, moment in reversed(list(enumerate(past.run.history, past.run.first))):
        for lane in reversed(moment.facts.lanes):
            for group, row in enumerate(lane.tables):
                size = past.now.step.config.groups[group].block_size
                there = [p for p in range(lane.start, lane.start + len(lane.tokens))
                         if p // size < len(row) and row[p // size] == block]  # fmt: skip
                if there:
                    where = f"[{there[0]}, {there[-1] + 1}) of group {group}"
                    return f"{lane.request} wrote {where} there last, in {past.command(at)}"
    return "nobody has written it"


def _of_request(past: Past, who: str) -> str:
    """How long a request's text is, what the scheduler counts, and what it holds."""
    fact = past.now.facts.requests[who]

    def same(moment: EngineMoment) -> bool:
        was = moment.facts.requests.get(who)
        return was is not None and was._replace(tokens=fact.tokens) == fact

    blocks = sum(1 for table in fact.tables for block in table if block)
    since = past.first_since(f"{who} is so", same)
    return (
        f"{who} ({fact.status}) has {some(len(fact.tokens), 'token')}, counts {fact.computed} computed and"
        f" holds {some(blocks, 'block')} {since}"
    )
