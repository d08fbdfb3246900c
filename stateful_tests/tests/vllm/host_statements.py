"""Statements about host memory and transfers, for the rows of scenes.py."""

from __future__ import annotations

from collections.abc import Callable

from reference.blocks.facts import HostFacts, Transfer
from stateful_tests.tests.vllm.engine_by_hand import EngineByHand


def _key(scene: EngineByHand, chunk: str, name: str, start: str, end: str, how: str | None) -> None:
    """Keep a chunk under a hash, and have it hold that, unless how says what is wrong with its last slot."""
    stamps = scene.stamps(name)[int(start) : int(end)]
    size = scene.config.groups[0].block_size
    scene.keys[int(chunk)] = tuple(stamps)
    held = [*stamps[:-1], {"unwritten": 0, "overwritten": 7}[how]] if how else stamps
    blocks = [(0, tuple(held[at : at + size])) for at in range(0, len(held), size)]
    if scene.config.recurrent:
        blocks = [(0, (slots[-1],) * 2) for _, slots in blocks]
    scene.chunks[int(chunk)] = blocks


def _hole(scene: EngineByHand, chunk: str, index: str) -> None:
    scene.chunks[int(chunk)][int(index)] = (-1, ())


def _moves(scene: EngineByHand, way: str, job: str, first: str, second: str, how: str | None) -> None:
    load = way == "load"
    states = ("queued", "copied", "completed")
    sources = [int(number) for number in first.split()]
    targets = [int(number) for number in second.split()]
    blocks, chunks = (targets, sources) if load else (sources, targets)
    size = scene.config.chunk_blocks
    parts = tuple((0, block, chunks[at // size], at % size) for at, block in enumerate(blocks))
    state = states.index(how) if how in states else 0
    scene.transfers[int(job)] = Transfer(
        int(job), load, parts, submitted=True, copied=state > 0, completed=state > 1, stale=how == "stale"
    )


def _ends(scene: EngineByHand, job: str) -> None:
    del scene.transfers[int(job)]


def _of_group(scene: EngineByHand, chunk: str, index: str, group: str) -> None:
    _, slots = scene.chunks[int(chunk)][int(index)]
    scene.chunks[int(chunk)][int(index)] = int(group), slots


def _host(change: Callable[[HostFacts, int, str], HostFacts]) -> Callable[..., None]:
    def state(scene: EngineByHand, number: str = "0", value: str = "") -> None:
        scene.spoil(host=lambda facts: change(facts.host, int(number), value))

    return state


def _second_hash(host: HostFacts, chunk: int, _: str) -> HostFacts:
    """Have the first token in a chunk found by a hash of its own."""
    (key,) = (key for key in host.keys if key.chunk == chunk)
    return host._replace(keys=(*host.keys, key._replace(stamps=key.stamps[:1])))


def _pins(host: HostFacts, chunk: int, pins: str) -> HostFacts:
    keys = (key._replace(pins=int(pins)) if key.chunk == chunk else key for key in host.keys)
    return host._replace(keys=tuple(keys))


def _free_chunk(host: HostFacts, chunk: int, sign: str) -> HostFacts:
    less = tuple(free for free in host.free if free != chunk)
    return host._replace(free=(*host.free, chunk) if sign == "+" else less)


_WHO = r"(?P<name>r\d)"
HOST_STATEMENTS: dict[str, Callable[..., None]] = {
    rf"chunk (?P<chunk>\d) keeps (?P<start>\d+)-(?P<end>\d+) of {_WHO}"
    r"( (?P<how>unwritten|overwritten))?": _key,
    r"chunk (?P<chunk>\d) lacks its block (?P<index>\d)": _hole,
    r"(?P<way>store|load) (?P<job>\d) of (?P<first>[\d ]+) to (?P<second>[\d ]+)( (?P<how>\w+))?": _moves,
    r"transfer (?P<job>\d) ends": _ends,
    r"chunk (?P<chunk>\d) has its block (?P<index>\d) of group (?P<group>\d)": _of_group,
    r"chunk (?P<number>\d) has pins (?P<value>-?\d)": _host(_pins),
    r"chunks free (?P<value>[+-]) (?P<number>\d)": _host(_free_chunk),
    r"a second hash of chunk (?P<number>\d)": _host(_second_hash),
    r"the connector keeps (?P<value>\w+)": _host(
        lambda host, _, who: host._replace(records=(who,))
    ),
    rf"the load of {_WHO} has failed": lambda scene, name: scene.spoil(
        host=lambda facts: facts.host._replace(failed=(name,))
    ),
    r"no hashes in host memory": lambda scene: scene.keys.clear(),
}
