"""Engines by hand: a line of text is a command and the facts after it. clause_rows.txt says how to write one.

What is not stated is derived, so that it fits: contents from what ran, ref counts and the free queue from
tables, the cache's map from hashes. A row then spoils one fact alone.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from reference.blocks.clauses import BlockStep, broken
from reference.blocks.commands import Add, More, Update, client_tokens
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import (
    BlockFacts, DraftUse, ForeignKey, HostFacts, HostKey, Lane, Output, Published, RequestFact, StateUse,
    Table, Transfer, chained,
)  # fmt: skip
from reference.blocks.host_view import window_start
from reference.blocks.request_texts import RequestTexts
from reference.commands import Reason
from reference.kinds import BLOCKS
from stateful_tests.lockstep.results import Violation, violation_of
from stateful_tests.tests.vllm.image_scenes import IMAGE_STATEMENTS, encoder_of
from stateful_tests.traces.notation import parse

ROWS = Path(__file__).with_name("clause_rows.txt")
OTHER, STOP = 5, 1  # a token that no text has, and the stop token
_FULL, _NEAR = LayerGroup(2), LayerGroup(2, 3)
SIZES = {
    "full": EngineConfig((_FULL,), 12, 12, 8),
    "near": EngineConfig((_NEAR,), 12, 12, 8),
    "small": EngineConfig((_FULL,), 12, 24, 3),
    "small near": EngineConfig((_NEAR,), 12, 24, 3),
    "small wide": EngineConfig((LayerGroup(4, 3),), 12, 24, 3),
    "small both": EngineConfig((_FULL, _NEAR), 24, 24, 3),
    "both": EngineConfig((_FULL, _NEAR), 12, 12, 8),
    "drafts": EngineConfig((_FULL,), 12, 12, 8, drafts=2),
    "near drafts": EngineConfig((_NEAR,), 12, 12, 8, drafts=2),
    "eagle": EngineConfig((LayerGroup(2, drafter=True),), 12, 12, 8, drafts=2, eagle=True),
    "eagle near": EngineConfig(
        (_FULL, LayerGroup(2, 3, drafter=True)), 24, 12, 8, drafts=2, eagle=True
    ),
    "uncached": EngineConfig((_FULL,), 12, 12, 12, caching=False, chunked=False),
    "host": EngineConfig((_FULL,), 12, 12, 8, host_chunks=4),
    "state": EngineConfig((_FULL, LayerGroup(2, state=True)), 12, 12, 8),
    "state first": EngineConfig((LayerGroup(2, state=True), _FULL), 12, 12, 8),
    "state first near": EngineConfig((LayerGroup(2, state=True), _NEAR), 12, 12, 8),
    "peer": EngineConfig((_FULL,), 12, 12, 8, peer=True, fail_requests=True),
    "in step": EngineConfig((_FULL,), 12, 12, 8, peer=True, sync_loads=True),
    "in step fails": EngineConfig(
        (_FULL,), 12, 12, 8, peer=True, sync_loads=True, fail_requests=True
    ),
    "host state": EngineConfig((LayerGroup(2, state=True),), 12, 12, 8, host_chunks=4),
    "host near": EngineConfig((_NEAR,), 12, 12, 8, host_chunks=4, chunk_blocks=2),
    "image": EngineConfig((_FULL,), 12, 12, 8, image=3, encoder_cache=6, encoder_budget=4),
    "whole image": EngineConfig(
        (_FULL,), 12, 12, 8, image=3, encoder_cache=6, encoder_budget=4, whole_images=True
    ),
}


@dataclass
class Scene:
    """What there is after the lines so far.

    texts: of each request with what was sampled for it; given: with what its client got. waiting: tokens of
    a next turn, until the one before ends. keys, chunks, transfers: of host memory; kept, pinned: blocks.
    images: that are kept, each with who needs it. lost: blocks that a load within a step has not brought.
    """

    config: EngineConfig
    texts: dict[str, list[int]] = field(default_factory=dict)
    given: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, RequestFact] = field(default_factory=dict)
    hashes: list[Published] = field(default_factory=list)
    batches: deque[dict[str, tuple[int, ...]]] = field(default_factory=deque)
    waiting: dict[str, list[int]] = field(default_factory=dict)
    serial: int = 0
    keys: dict[int, tuple[int, ...]] = field(default_factory=dict)
    chunks: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    kept: tuple[int, ...] = ()
    pinned: tuple[tuple[str, int], ...] = ()
    images: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lost: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.memory: list[tuple[int, tuple[int, ...]]] = [(-1, ())] * (self.config.blocks + 1)
        self.expected, self.before = RequestTexts(self.config), self._facts()

    def violation(self, line: str, waived: Container[str] = ()) -> Violation | None:
        """What a command with the facts after it violates of the clauses that are not waived."""
        text, *stated = (part.strip() for part in line.split(";"))
        refused, for_length = text.startswith("refused "), text.startswith("refused (length) ")
        command = parse(text.removeprefix("refused ").removeprefix("(length) "), BLOCKS)
        if not refused:
            self._sent(command)
        self._outputs: list[Output] = []
        self._lanes: list[Lane] = []
        self._spoilt: list[Callable[[BlockFacts], BlockFacts]] = []
        self._batch = self.batches.popleft() if isinstance(command, Update) and self.batches else {}
        for part in stated:
            self._stated(part)
        if self._lanes:
            self.batches.append({lane.request: lane.sampled for lane in self._lanes})
        after = self._facts()
        for spoil in self._spoilt:
            after = spoil(after)
        lanes, outputs = ([], []) if refused else self.expected.follow(command, after)
        if refused:
            self.expected.follow_refused(command, after)
        step = BlockStep(
            self.config, command, refused, self.before, after, lanes, outputs, self.expected.bearers,
            self.expected.in_use, self.expected.standstill, tuple(self.expected.sources),
            Reason.BAD_LENGTH if for_length else None,
        )  # fmt: skip
        self.before, self.step = after, step
        failures = broken(step, waived)
        return violation_of(failures, 0) if failures else None

    def _sent(self, command: object) -> None:
        if not isinstance(command, Add | More):
            return
        self.serial += 1
        tokens = client_tokens(command.prompt, command.tokens, self.serial)
        name = command.request
        if isinstance(command, Add):
            self.texts[name], self.given[name] = list(tokens), list(tokens)
            empty = ((),) * len(self.config.groups)
            self.requests[name] = RequestFact("WAITING", tuple(tokens), 0, empty)
        else:
            self.waiting[name] = tokens

    def _facts(self) -> BlockFacts:
        facts = {name: self._known(name) for name in self.requests}
        held = Counter(
            chain.from_iterable(table for fact in facts.values() for table in fact.tables)
        )
        held.update([*self.kept, *(block for _, block in self.pinned)])
        held[0] = 0
        refs = tuple(held[block] for block in range(self.config.blocks + 1))
        free = tuple(block for block, count in enumerate(refs) if block and not count)
        return BlockFacts(
            refs, free, tuple(self.memory), tuple(self.hashes),
            mapped=Counter(published.block for published in self.hashes), requests=facts,
            lanes=tuple(getattr(self, "_lanes", ())), outputs=tuple(getattr(self, "_outputs", ())),
            steps_in_flight=len(self.batches), kept=self.kept, pinned=self.pinned,
            host=self._host() if self.config.connects else None,
            encoder=encoder_of(self.config.encoder_cache, self.images) if self.config.encodes else None,
        )  # fmt: skip

    def _host(self) -> HostFacts:
        """Host memory: pins and the free list follow from transfers and hashes."""
        jobs = [job for job in self.transfers.values() if not job.stale]
        moving = [(job.load, chunk) for job in jobs for chunk in {part[2] for part in job.parts}]
        pins = {
            chunk: -1 if (False, chunk) in moving else moving.count((True, chunk))
            for chunk in self.keys
        }
        used, count = {*self.keys, *(chunk for _, chunk in moving)}, self.config.host_chunks
        nothing = [(-1, ())] * self.config.chunk_blocks
        return HostFacts(
            count,
            tuple(chunk for chunk in range(count) if chunk not in used),
            tuple(tuple(self.chunks.get(chunk, nothing)) for chunk in range(count)),
            tuple(HostKey(chunk, 0, stamps, pins[chunk]) for chunk, stamps in self.keys.items()),
            tuple(self.transfers.values()),
            lost=self.lost,
        )

    def _known(self, name: str) -> RequestFact:
        return self.requests[name]._replace(tokens=tuple(self.given[name]))

    def _stated(self, part: str) -> None:
        for pattern, state in _STATEMENTS.items():
            if found := re.fullmatch(pattern, part):
                state(self, **found.groupdict())
                return
        raise AssertionError(f"no fact: {part!r}")

    def _spoil(self, **changes: Callable[[BlockFacts], object]) -> None:
        def spoil(facts: BlockFacts) -> BlockFacts:
            return facts._replace(**{name: change(facts) for name, change in changes.items()})

        self._spoilt.append(spoil)

    def stamps(self, name: str, tokens: list[int] | None = None) -> list[int]:
        """The stamps of these tokens, or of its text, as a request computes them."""
        bearer = self.expected.bearers.get(name)
        origin = bearer.source.origin if bearer is not None else 0
        return chained(self.texts[name] if tokens is None else tokens, origin)

    def tables(self, text: str) -> Table:
        return tuple(tuple(map(int, table.split())) for table in text.split("|"))

    def write(self, block: int, group: int, offset: int, stamp: int) -> None:
        owner, slots = self.memory[block]
        if owner != group:
            slots = (0,) * self.config.groups[group].block_size
        self.memory[block] = group, (*slots[:offset], stamp, *slots[offset + 1 :])

    def use(
        self, group: int, table: tuple[int, ...], stamps: list[int], start: int, end: int
    ) -> StateUse:
        """An entry goes on from the state that is due, in the block of its last token."""
        block = table[(end - 1) // self.config.groups[group].block_size]
        found = (stamps[start - 1],) * 2 if start else (0, 0)
        self.memory[block] = group, (stamps[end - 1],) * 2
        return StateUse(group, block if start else -1, found, ((block, stamps[end - 1]),))

    def fill(self, tables: Table, stamps: list[int], start: int, end: int) -> None:
        """KV of these positions, wherever a table has a block for them."""
        for group, table in enumerate(tables):
            size = self.config.groups[group].block_size
            if self.config.groups[group].state:
                continue
            for position in range(start, end):
                at, offset = divmod(position, size)
                if at < len(table) and table[at]:
                    self.write(table[at], group, offset, stamps[position])


def _runs(
    scene: Scene, name: str, start: str, end: str, own: str | None, drafts: str | None, samples: str | None,
    tables: str,
) -> None:  # fmt: skip
    text, table = scene.texts.setdefault(name, [OTHER] * 9), scene.tables(tables)
    first, last, count = int(start), int(end), int(drafts or 0)
    known = last - count
    drafted = text[known:last] if own else [20 + at for at in range(count)]
    inputs = [*text[first:known], *drafted]
    sampled: tuple[int, ...] = ()
    if samples == "stop":
        sampled = (STOP,)
    elif samples:
        sampled = (*drafted[: int(samples) - 1], 100 + len(text) + 10 * scene.serial)
    stamps = scene.stamps(name, [*text[:known], *drafted])
    scene.fill(table, stamps, first, last)
    states = tuple(
        scene.use(group, table[group], stamps, first, last) for group in scene.config.recurrent
    )
    scene._lanes.append(Lane(name, first, tuple(inputs), count, sampled, table, states))
    text += sampled
    if name in scene.requests:
        scene.requests[name] = RequestFact("RUNNING", (), last, table)


def _gets(
    scene: Scene,
    name: str,
    count: str | None,
    other: str | None,
    twice: str | None,
    ends: str | None,
) -> None:
    tokens = scene._batch.get(name, ())[: int(count or 0)]
    tokens = (OTHER,) if other else tokens * 2 if twice else tokens
    scene._outputs.append(Output(name, tokens, "length" if ends else ""))
    if name in scene._batch:
        scene.given[name] += tokens


def _turns(scene: Scene, name: str, kept: str | None) -> None:
    was = scene.given[name] if kept else scene.given[name][:-1]
    scene.given[name] = [*was, *scene.waiting.pop(name)]
    scene.texts[name] = list(scene.given[name])


def _is(scene: Scene, name: str, status: str, computed: str, tables: str | None) -> None:
    table = scene.requests[name].tables if tables is None else scene.tables(tables)
    scene.requests[name] = RequestFact(status, (), int(computed), table)
    if status == "PREEMPTED":
        scene.texts[name] = list(scene.given[name])


def _knows(scene: Scene, name: str, at: str) -> None:
    def other(facts: BlockFacts) -> object:
        fact = facts.requests[name]
        tokens = (*fact.tokens[: int(at)], OTHER, *fact.tokens[int(at) + 1 :])
        return {**facts.requests, name: fact._replace(tokens=tokens)}

    scene._spoil(requests=other)


def _knows_less(scene: Scene, name: str, count: str) -> None:
    def less(facts: BlockFacts) -> object:
        fact = facts.requests[name]
        return {**facts.requests, name: fact._replace(tokens=fact.tokens[: int(count)])}

    scene._spoil(requests=less)


def _drafts(scene: Scene, name: str, end: str, what: str | None, at: str | None) -> None:
    """The drafter finds its KV of the text, but for one position, and writes up to `end`."""
    lane = next(lane for lane in scene._lanes if lane.request == name)
    group = scene.config.draft_group
    assert group is not None
    first = window_start(scene.config.groups[group], lane.start)
    found = scene.stamps(name)[first + 1 : lane.start + 1]
    if at is not None:
        others = {"nothing": [0], "another": [7]}.get(what or "", scene.expected.discarded)
        found[int(at) - first] = next(iter(others))
    use = DraftUse(group, first, tuple(found), int(end))
    scene._lanes = [
        each._replace(draft=use) if each.request == name else each for each in scene._lanes
    ]


def _lane(change: Callable[[Lane, str], Lane]) -> Callable[..., None]:
    def state(scene: Scene, name: str, value: str) -> None:
        scene._lanes = [
            change(lane, value) if lane.request == name else lane for lane in scene._lanes
        ]

    return state


def _state(**changes: Callable[[Scene, Lane, str], object]) -> Callable[..., None]:
    """A field of what an entry does with its state is another."""

    def state(scene: Scene, name: str, value: str) -> None:
        def spoilt(lane: Lane) -> Lane:
            made = {field: change(scene, lane, value) for field, change in changes.items()}
            return lane._replace(states=tuple(use._replace(**made) for use in lane.states))

        scene._lanes = [spoilt(lane) if lane.request == name else lane for lane in scene._lanes]

    return state


def _after(scene: Scene, lane: Lane, count: str) -> int:
    if count in ("nothing", "others"):
        return 7 * (count == "others")
    return scene.stamps(lane.request)[int(count) - 1]


def _keeps_state(scene: Scene, block: str, name: str, count: str, window: str | None) -> None:
    stamps = [0, *scene.stamps(name)]
    scene.memory[int(block)] = (
        scene.config.recurrent[0],
        (stamps[int(count)], stamps[int(window or count)]),
    )


def _input(lane: Lane, at: str) -> Lane:
    return lane._replace(tokens=(*lane.tokens[: int(at)], OTHER, *lane.tokens[int(at) + 1 :]))


def _more_inputs(lane: Lane, count: str) -> Lane:
    return lane._replace(tokens=(*lane.tokens, *(OTHER,) * int(count)))


def _hash(scene: Scene, block: str, group: str | None, more: str | None, other: str | None) -> None:
    owner, slots = scene.memory[int(block)]
    stamps = tuple(stamp for stamp in slots if stamp)
    if owner in scene.config.recurrent:
        stamps = (7, *stamps[:1])  # the last of them is that of the state
    if more:
        stamps += (7,)
    if other:
        stamps = (*stamps[:-1], 7)
    scene.hashes.append(Published(int(block), int(group) if group else max(0, owner), stamps))


def _holds(scene: Scene, block: str, group: str, name: str, start: str, end: str) -> None:
    size, stamps = scene.config.groups[int(group)].block_size, scene.stamps(name)
    for position in range(int(start), int(end)):
        scene.write(int(block), int(group), position % size, stamps[position])


def _slot(scene: Scene, what: str, block: str, offset: str) -> None:
    group, _ = scene.memory[int(block)]
    scene.write(int(block), group, int(offset), 0 if what == "erases" else 7)


def _refs(scene: Scene, block: str, count: str) -> None:
    at = int(block)
    scene._spoil(refs=lambda f: (*f.refs[:at], int(count), *f.refs[at + 1 :]))


def _free(scene: Scene, sign: str, block: str) -> None:
    at = int(block)
    more: Callable[[BlockFacts], object] = lambda f: (*f.free, at)  # noqa: E731
    less: Callable[[BlockFacts], object] = lambda f: tuple(b for b in f.free if b != at)  # noqa: E731
    scene._spoil(free=more if sign == "+" else less)


def _map(scene: Scene, block: str, count: str) -> None:
    scene._spoil(mapped=lambda f: {**f.mapped, int(block): int(count)})


def _unmap(scene: Scene, block: str) -> None:
    scene._spoil(mapped=lambda f: {at: count for at, count in f.mapped.items() if at != int(block)})


def _drop(scene: Scene, name: str) -> None:
    del scene.requests[name]


def _foreign(scene: Scene, name: str, what: str, number: str, found: str) -> None:
    mine = str(scene.expected.loaded.source("", ""))
    key = ForeignKey(name, mine, found)._replace(**{what: int(number)})
    scene._spoil(foreign_keys=lambda _: (key,))


def _forget(scene: Scene) -> None:
    scene.hashes.clear()


def _key(scene: Scene, chunk: str, name: str, start: str, end: str, how: str | None) -> None:
    """A chunk is kept under a hash, and holds that, unless how says what is wrong with its last slot."""
    stamps, size = (
        scene.stamps(name)[int(start) : int(end)],
        scene.config.groups[0].block_size,
    )
    scene.keys[int(chunk)] = tuple(stamps)
    held = [*stamps[:-1], {"unwritten": 0, "overwritten": 7}[how]] if how else stamps
    blocks = [(0, tuple(held[at : at + size])) for at in range(0, len(held), size)]
    if scene.config.recurrent:
        blocks = [(0, (slots[-1],) * 2) for _, slots in blocks]
    scene.chunks[int(chunk)] = blocks


def _hole(scene: Scene, chunk: str, index: str) -> None:
    scene.chunks[int(chunk)][int(index)] = (-1, ())


def _moves(scene: Scene, way: str, job: str, first: str, second: str, how: str | None) -> None:
    load, states = way == "load", ("queued", "copied", "completed")
    sources, targets = ([int(number) for number in text.split()] for text in (first, second))
    blocks, chunks, size = (
        *((targets, sources) if load else (sources, targets)),
        scene.config.chunk_blocks,
    )
    parts = tuple((0, block, chunks[at // size], at % size) for at, block in enumerate(blocks))
    state = states.index(how) if how in states else 0
    scene.transfers[int(job)] = Transfer(
        int(job), load, parts, True, state > 0, state > 1, how == "stale"
    )


def _ends(scene: Scene, job: str) -> None:
    del scene.transfers[int(job)]


def _keeps(scene: Scene, blocks: str) -> None:
    scene.kept = tuple(map(int, blocks.split()))


def _pins_block(scene: Scene, name: str, block: str) -> None:
    scene.pinned = (*scene.pinned, (name, int(block)))


def _of_group(scene: Scene, chunk: str, index: str, group: str) -> None:
    _, slots = scene.chunks[int(chunk)][int(index)]
    scene.chunks[int(chunk)][int(index)] = int(group), slots


def _host(change: Callable[[HostFacts, int, str], HostFacts]) -> Callable[..., None]:
    def state(scene: Scene, number: str = "0", value: str = "") -> None:
        scene._spoil(host=lambda facts: change(facts.host, int(number), value))

    return state


def _pins(host: HostFacts, chunk: int, pins: str) -> HostFacts:
    keys = (key._replace(pins=int(pins)) if key.chunk == chunk else key for key in host.keys)
    return host._replace(keys=tuple(keys))


def _free_chunk(host: HostFacts, chunk: int, sign: str) -> HostFacts:
    less = tuple(free for free in host.free if free != chunk)
    return host._replace(free=(*host.free, chunk) if sign == "+" else less)


_WHO, _BLOCKS = r"(?P<name>r\d)", r"(?P<tables>[\d |]*)"
def _loads(scene: Scene, name: str, end: str, tables: str) -> None:
    scene.fill(scene.tables(tables), scene.stamps(name), 0, int(end))


def _loses(scene: Scene, blocks: str) -> None:
    scene.lost += tuple(map(int, blocks.split()))
    for block in scene.lost:
        size = scene.config.groups[0].block_size
        scene.memory[block] = 0, (0,) * size


def _is_notified(scene: Scene) -> None:
    """The engine is notified of what was lost. Texts are again those that clients have."""
    scene.lost = ()
    scene.texts.update((name, list(given)) for name, given in scene.given.items())


_STATEMENTS: dict[str, Callable[..., None]] = {
    rf"{_WHO} runs (?P<start>\d+)-(?P<end>\d+)( with(?P<own> its)? (?P<drafts>\d) drafts)?"
    rf"( samples (?P<samples>\d|stop))? in ?{_BLOCKS}": _runs,
    rf"{_WHO} gets ((?P<count>\d)|(?P<other>other))(?P<twice> twice)?(?P<ends> ends)?": _gets,
    rf"{_WHO} loads 0-(?P<end>\d+) in ?{_BLOCKS}": _loads,
    r"loses (?P<blocks>[\d ]+)": _loses,
    r"the engine is notified": _is_notified,
    rf"{_WHO} takes its next turn(?P<kept> behind all)?": _turns,
    rf"{_WHO} is (?P<status>[A-Z]+) (?P<computed>\d+)( in ?{_BLOCKS})?": _is,
    rf"{_WHO} is gone": _drop,
    rf"{_WHO} has another token at (?P<at>\d+)": _knows,
    rf"{_WHO} has (?P<count>\d+) tokens": _knows_less,
    rf"{_WHO} drafts to (?P<end>\d+)(, finds (?P<what>nothing|another|what a turn has left)"
    r" at (?P<at>\d+))?": _drafts,
    rf"{_WHO} computes another token at (?P<value>\d+)": _lane(_input),
    rf"{_WHO} computes (?P<value>\d) token more": _lane(_more_inputs),
    rf"{_WHO} runs in (?P<value>[\d |]*)": _lane(
        lambda lane, text: lane._replace(
            tables=tuple(tuple(map(int, t.split())) for t in text.split("|"))
        )
    ),
    r"hash (?P<block>\d+)( in group (?P<group>\d))?(?P<more> and more)?(?P<other> of others)?": _hash,
    rf"{_WHO} reads the state after (?P<value>\w+)": _state(
        found=lambda s, lane, n: (_after(s, lane, n),) * 2
    ),
    rf"{_WHO} reads the window after (?P<value>\w+)": _state(
        found=lambda s, lane, n: (lane.states[0].found[0], _after(s, lane, n))
    ),
    rf"{_WHO} reads block (?P<value>-?\d+)": _state(block=lambda _, __, block: int(block)),
    rf"{_WHO} leaves its state in (?P<value>\d+)": _state(
        writes=lambda _, lane, block: ((int(block), lane.states[0].writes[0][1]),)
    ),
    rf"block (?P<block>\d+) has the state after (?P<count>\d+) of {_WHO}"
    r"(, the window (?P<window>\d+))?": _keeps_state,
    r"no hashes": _forget,
    rf"a key of {_WHO} finds (?P<what>block|chunk) (?P<number>\d+) of (?P<found>.*)": _foreign,
    rf"block (?P<block>\d+) holds group (?P<group>\d) of {_WHO} (?P<start>\d+)-(?P<end>\d+)": _holds,
    r"somebody (?P<what>erases|overwrites) block (?P<block>\d+) slot (?P<offset>\d+)": _slot,
    r"refs (?P<block>\d+) = (?P<count>\d+)": _refs,
    r"block (?P<block>\d+) is copied to (?P<target>\d+)": lambda scene, block, target: scene._spoil(
        copies=lambda _: ((int(block), int(target)),)
    ),
    r"free (?P<sign>[+-]) (?P<block>\d+)": _free,
    r"map (?P<block>\d+) = (?P<count>\d+)": _map,
    r"no map (?P<block>\d+)": _unmap,
    r"the manager keeps (?P<name>\w+)": lambda scene, name: scene._spoil(
        leftovers=lambda _: (name,)
    ),
    rf"chunk (?P<chunk>\d) keeps (?P<start>\d+)-(?P<end>\d+) of {_WHO}"
    r"( (?P<how>unwritten|overwritten))?": _key,
    r"chunk (?P<chunk>\d) lacks its block (?P<index>\d)": _hole,
    r"(?P<way>store|load) (?P<job>\d) of (?P<first>[\d ]+) to (?P<second>[\d ]+)( (?P<how>\w+))?": _moves,
    r"transfer (?P<job>\d) ends": _ends,
    r"blocks are kept:? ?(?P<blocks>[\d ]*)": _keeps,
    rf"{_WHO} pins block (?P<block>\d+)": _pins_block,
    rf"{_WHO} is released": lambda scene, name: scene._spoil(released=lambda _: (name,)),
    r"chunk (?P<chunk>\d) has its block (?P<index>\d) of group (?P<group>\d)": _of_group,
    r"chunk (?P<number>\d) has pins (?P<value>-?\d)": _host(_pins),
    r"chunks free (?P<value>[+-]) (?P<number>\d)": _host(_free_chunk),
    r"the connector keeps (?P<value>\w+)": _host(
        lambda host, _, who: host._replace(records=(who,))
    ),
    rf"the load of {_WHO} has failed": lambda scene, name: scene._spoil(
        host=lambda facts: facts.host._replace(failed=(name,))
    ),
    r"no hashes in host memory": lambda scene: scene.keys.clear(),
    r"the reset succeeds": lambda scene: scene._spoil(reset=lambda _: True),
    r"equal blocks are one": lambda scene: scene._spoil(merges=lambda _: True),
    **IMAGE_STATEMENTS,
}
