"""Explanations for engines that schedule by themselves: blocks, places in tables, requests."""

import re
from typing import NamedTuple

from ci.explain.history import Past, some
from reference.blocks.clauses import BlockStep
from reference.blocks.clauses.step import window_start
from reference.blocks.config import EngineConfig
from stateful_tests.lockstep.results import EngineMoment

# What a clause says of a place: who, where, in which group; `index` counts blocks, not positions.
_PLACES = (
    r"(?P<who>\S+) finds its own KV at position (?P<at>\d+) in group (?P<group>\d+)",
    r"(?P<who>\S+) writes position (?P<at>\d+) of group (?P<group>\d+)",
    r"(?P<who>\S+) \(sure of \d+\) keeps block (?P<index>\d+) of group (?P<group>\d+)",
)


class TablePlace(NamedTuple):
    """A block's place in a request's table of a group."""

    who: str
    group: int
    at: int  # by which of its blocks

    def block(self, moment: EngineMoment) -> int | None:
        """The block there, 0 for the null block; None past the table's end."""
        fact = moment.facts.requests.get(self.who)
        row = fact.tables[self.group] if fact is not None else ()
        return row[self.at] if self.at < len(row) else None

    def told(self, step: BlockStep) -> str:
        size = step.config.groups[self.group].block_size
        return f"[{self.at * size}, {(self.at + 1) * size}) of group {self.group}"


def place_at_stake(expected: str, config: EngineConfig) -> TablePlace | None:
    """The place that a clause is about, by what it expects, if it is about one."""
    for pattern in _PLACES:
        if found := re.match(pattern, expected):
            group, index = int(found["group"]), found.groupdict().get("index")
            if index is None:
                index = int(found["at"]) // config.groups[group].block_size
            return TablePlace(found["who"], group, int(index))
    return None


def blocks_at_stake(expected: str, config: EngineConfig, moment: EngineMoment) -> set[int]:
    """The blocks that a clause is about."""
    if (place := place_at_stake(expected, config)) is not None:
        return {place.block(moment) or 0} - {0}
    found = re.search(r"\bblock (\d+)\b", expected)
    return {int(found[1])} if found else set()


def rule(past: Past) -> str | None:
    """Why what a clause is about cannot be."""
    violation, facts, config = past.violation, past.now.facts, past.run.trace.geometry
    if (place := place_at_stake(violation.expected, config)) is not None:
        return _of_place(past, place)
    if violation.clause == "RUN-4":
        waiting = " and ".join(_of_request(past, name) for name in facts.requests)
        return f"{past.here} gives no batch with {some(len(facts.free), 'block')} free: {waiting}"
    if stake := blocks_at_stake(violation.expected, config, past.now):
        return _of_block(past, *stake)
    who = violation.expected.partition(" ")[0].rstrip(":")
    if who not in facts.requests:
        return None
    return f"{past.here}: {violation.observed}, where {violation.expected}; {_of_request(past, who)}"


def _of_place(past: Past, place: TablePlace) -> str:
    """What a request has at a place of its table, and what is written there."""
    block, step = place.block(past.now), past.now.step
    told = place.told(step)
    since = past.first_since(f"{place.who} has {block} at {told}", lambda m: place.block(m) == block)
    had = {0: "the null block", None: "no block"}.get(block, f"block {block}")
    said = f"{place.who} has {had} at {told} {since}"
    if block:
        return f"{said}, and {_written(past, block)}"
    was = past.last_before(lambda m: bool(place.block(m)))
    if was is not None:
        said += f"; until then it had block {place.block(was)}"
    sure, group = step.bearers[place.who].sure, step.config.groups[place.group]
    return f"{said}; {sure} of its tokens are sure, and the query behind them sees positions from " \
        f"{window_start(group, sure)} on"


def _of_block(past: Past, block: int) -> str:
    """Who has a block, whether it is free, what the prefix cache says of it, and what is written there."""
    facts, said = past.now.facts, []
    for who, group, index in past.now.step.entries.get(block, ()):
        place = TablePlace(who, group, index)
        had = past.first_since(f"{place} has {block}", lambda m, p: p.block(m) == block, place)
        said.append(f"{who} has it at {place.told(past.now.step)} {had}")
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
