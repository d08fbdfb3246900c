"""Statements of rows: a pattern of text, and what it does to an engine by hand.

clause_rows.txt says what each of them means.
"""

from __future__ import annotations

from collections.abc import Callable

from reference.blocks.facts import (
    BlockFacts, DraftUse, ForeignKey, Found, Lane, Output, Published, RequestFact, SwapFacts,
)  # fmt: skip
from reference.blocks.host_view import window_start
from stateful_tests.tests.vllm.engine_by_hand import EngineByHand
from stateful_tests.tests.vllm.host_statements import HOST_STATEMENTS
from stateful_tests.tests.vllm.image_scenes import IMAGE_STATEMENTS
from stateful_tests.tests.vllm.storage_statements import STORAGE_STATEMENTS

OTHER = 5  # a token that no text has
STOP = 1  # the stop token


def _runs(
    scene: EngineByHand, name: str, start: str, end: str, own: str | None, drafts: str | None,
    samples: str | None, tables: str,
) -> None:  # fmt: skip
    text = scene.texts.setdefault(name, [OTHER] * 9)
    table = scene.tables(tables)
    first = int(start)
    last = int(end)
    count = int(drafts or 0)
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
    scene.lanes.append(
        Lane(
            name,
            start=first,
            tokens=tuple(inputs),
            drafts=count,
            sampled=sampled,
            tables=table,
            states=states,
        )
    )
    text += sampled
    if name in scene.requests:
        scene.requests[name] = RequestFact("RUNNING", (), last, table)


def _gets(
    scene: EngineByHand,
    name: str,
    count: str | None,
    other: str | None,
    twice: str | None,
    ends: str | None,
) -> None:
    tokens = scene.batch.get(name, ())[: int(count or 0)]
    if other:
        tokens = (OTHER,)
    elif twice:
        tokens = tokens * 2
    scene.outputs.append(Output(name, tokens, "length" if ends else ""))
    if name in scene.batch:
        scene.given[name] += tokens


def _turns(scene: EngineByHand, name: str, kept: str | None) -> None:
    scene.left = scene.stamps(name, scene.given[name])[-1]
    was = scene.given[name] if kept else scene.given[name][:-1]
    scene.given[name] = [*was, *scene.waiting.pop(name)]
    scene.texts[name] = list(scene.given[name])


def _is(scene: EngineByHand, name: str, status: str, computed: str, tables: str | None) -> None:
    table = scene.requests[name].tables if tables is None else scene.tables(tables)
    scene.requests[name] = RequestFact(status, (), int(computed), table)
    if status == "PREEMPTED":
        scene.texts[name] = list(scene.given[name])


def _knows(scene: EngineByHand, name: str, at: str) -> None:
    def other(facts: BlockFacts) -> object:
        fact = facts.requests[name]
        tokens = (*fact.tokens[: int(at)], OTHER, *fact.tokens[int(at) + 1 :])
        return {**facts.requests, name: fact._replace(tokens=tokens)}

    scene.spoil(requests=other)


def _knows_less(scene: EngineByHand, name: str, count: str) -> None:
    def less(facts: BlockFacts) -> object:
        fact = facts.requests[name]
        return {**facts.requests, name: fact._replace(tokens=fact.tokens[: int(count)])}

    scene.spoil(requests=less)


def _drafts(scene: EngineByHand, name: str, end: str, what: str | None, at: str | None) -> None:
    """Have the drafter find its KV of the text, but for one position, and write up to `end`."""
    lane = next(lane for lane in scene.lanes if lane.request == name)
    group = scene.config.draft_group
    assert group is not None
    first = window_start(scene.config.groups[group], lane.start)
    found = scene.stamps(name)[first + 1 : lane.start + 1]
    if at is not None:
        found[int(at) - first] = {"nothing": 0, "another": 7}.get(what or "", scene.left)
    use = DraftUse(group, first, tuple(found), int(end))
    scene.lanes = [
        each._replace(draft=use) if each.request == name else each for each in scene.lanes
    ]


def _lane(change: Callable[[Lane, str], Lane]) -> Callable[..., None]:
    def state(scene: EngineByHand, name: str, value: str) -> None:
        scene.lanes = [
            change(lane, value) if lane.request == name else lane for lane in scene.lanes
        ]

    return state


def _forks(scene: EngineByHand, name: str, child: str, computed: str, tables: str) -> None:
    """Fork a child off a request, with the text that its client has."""
    scene.texts[child] = list(scene.given[name])
    scene.given[child] = list(scene.given[name])
    scene.requests[child] = RequestFact("RUNNING", (), int(computed), scene.tables(tables))


def _swap_blocks(
    scene: EngineByHand, name: str, blocks: str, count: str, free: str | None, other: str | None
) -> None:
    """Have host memory keep a copy of the first positions of a text, or one of another text."""
    table = tuple(map(int, blocks.split()))
    size = scene.config.groups[0].block_size
    stamps = [7] * int(count) if other else scene.stamps(name)[: int(count)]
    memory: list[tuple[int, tuple[int, ...]]] = [(-1, ())] * (1 + scene.config.swap)
    for at, block in enumerate(table):
        slots = [*stamps[at * size : (at + 1) * size], *[0] * size]
        memory[block] = 0, tuple(slots[:size])
    unused = tuple(map(int, (free or "").split()))
    facts = SwapFacts(unused, tuple(memory), {name: (table,)})
    scene.spoil(swap=lambda _: facts)


def _attends(scene: EngineByHand, name: str, start: str, end: str, other: str | None) -> None:
    """Have attention get the KV of positions of the text, but for some of them."""
    stamps = scene.stamps(name)
    others = {int(at) for at in (other or "").split()}
    found = [7 if at in others else stamps[at] for at in range(int(start), int(end))]
    scene.lanes = [
        lane._replace(found=(Found(0, int(start), tuple(found)),)) if lane.request == name else lane
        for lane in scene.lanes
    ]


def _state(**changes: Callable[[EngineByHand, Lane, str], object]) -> Callable[..., None]:
    """Return the function of a statement that changes fields of what an entry does with its state."""

    def state(scene: EngineByHand, name: str, value: str) -> None:
        def spoilt(lane: Lane) -> Lane:
            made = {field: change(scene, lane, value) for field, change in changes.items()}
            return lane._replace(states=tuple(use._replace(**made) for use in lane.states))

        scene.lanes = [spoilt(lane) if lane.request == name else lane for lane in scene.lanes]

    return state


def _after(scene: EngineByHand, lane: Lane, count: str) -> int:
    if count == "nothing":
        return 0
    if count == "others":
        return 7
    return scene.stamps(lane.request)[int(count) - 1]


def _keeps_state(scene: EngineByHand, block: str, name: str, count: str, window: str | None) -> None:
    stamps = [0, *scene.stamps(name)]
    scene.memory[int(block)] = (
        scene.config.recurrent[0],
        (stamps[int(count)], stamps[int(window or count)]),
    )


def _input(lane: Lane, at: str) -> Lane:
    return lane._replace(tokens=(*lane.tokens[: int(at)], OTHER, *lane.tokens[int(at) + 1 :]))


def _more_inputs(lane: Lane, count: str) -> Lane:
    return lane._replace(tokens=(*lane.tokens, *(OTHER,) * int(count)))


def _hash(scene: EngineByHand, block: str, group: str | None, more: str | None, other: str | None) -> None:
    owner, slots = scene.memory[int(block)]
    stamps = tuple(stamp for stamp in slots if stamp)
    if owner in scene.config.recurrent:
        stamps = (7, *stamps[:1])  # the last of them is that of the state
    if more:
        stamps += (7,)
    if other:
        stamps = (*stamps[:-1], 7)
    scene.hashes.append(Published(int(block), int(group) if group else max(0, owner), stamps))


def _holds(scene: EngineByHand, block: str, group: str, name: str, start: str, end: str) -> None:
    size = scene.config.groups[int(group)].block_size
    stamps = scene.stamps(name)
    for position in range(int(start), int(end)):
        scene.write(int(block), int(group), position % size, stamps[position])


def _slot(scene: EngineByHand, what: str, block: str, offset: str) -> None:
    group, _ = scene.memory[int(block)]
    scene.write(int(block), group, int(offset), 0 if what == "erases" else 7)


def _refs(scene: EngineByHand, block: str, count: str) -> None:
    at = int(block)
    scene.spoil(refs=lambda f: (*f.refs[:at], int(count), *f.refs[at + 1 :]))


def _free(scene: EngineByHand, sign: str, block: str) -> None:
    at = int(block)
    more: Callable[[BlockFacts], object] = lambda f: (*f.free, at)  # noqa: E731
    less: Callable[[BlockFacts], object] = lambda f: tuple(b for b in f.free if b != at)  # noqa: E731
    scene.spoil(free=more if sign == "+" else less)


def _map(scene: EngineByHand, block: str, count: str) -> None:
    scene.spoil(mapped=lambda f: {**f.mapped, int(block): int(count)})


def _unmap(scene: EngineByHand, block: str) -> None:
    scene.spoil(mapped=lambda f: {at: count for at, count in f.mapped.items() if at != int(block)})


def _drop(scene: EngineByHand, name: str) -> None:
    del scene.requests[name]


def _foreign(scene: EngineByHand, name: str, what: str, number: str, found: str) -> None:
    mine = str(scene.expected.loaded.source("", ""))
    key = ForeignKey(name, mine, found)._replace(**{what: int(number)})
    scene.spoil(foreign_keys=lambda _: (key,))


def _forget(scene: EngineByHand) -> None:
    scene.hashes.clear()


def _keeps(scene: EngineByHand, blocks: str) -> None:
    scene.kept = tuple(map(int, blocks.split()))


def _pins_block(scene: EngineByHand, name: str, block: str) -> None:
    scene.pinned = (*scene.pinned, (name, int(block)))


def _loads(scene: EngineByHand, name: str, end: str, tables: str) -> None:
    scene.fill(scene.tables(tables), scene.stamps(name), 0, int(end))


def _loses(scene: EngineByHand, blocks: str) -> None:
    scene.lost += tuple(map(int, blocks.split()))
    for block in scene.lost:
        size = scene.config.groups[0].block_size
        scene.memory[block] = 0, (0,) * size


def _is_notified(scene: EngineByHand) -> None:
    """Notify the engine of what was lost. Texts are again those that clients have."""
    scene.lost = ()
    scene.texts.update((name, list(given)) for name, given in scene.given.items())


_WHO = r"(?P<name>r\d(?:\.\d)?)"
_BLOCKS = r"(?P<tables>[\d |]*)"
STATEMENTS: dict[str, Callable[..., None]] = {
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
    r"block (?P<block>\d+) is copied to (?P<target>\d+)": lambda scene, block, target: scene.spoil(
        copies=lambda _: ((int(block), int(target)),)
    ),
    r"free (?P<sign>[+-]) (?P<block>\d+)": _free,
    r"map (?P<block>\d+) = (?P<count>\d+)": _map,
    r"no map (?P<block>\d+)": _unmap,
    r"the manager keeps (?P<name>\w+)": lambda scene, name: scene.spoil(
        leftovers=lambda _: (name,)
    ),
    r"blocks are kept:? ?(?P<blocks>[\d ]*)": _keeps,
    rf"{_WHO} pins block (?P<block>\d+)": _pins_block,
    rf"{_WHO} is released": lambda scene, name: scene.spoil(released=lambda _: (name,)),
    rf"{_WHO} forks (?P<child>r\d\.\d) at (?P<computed>\d+) in ?{_BLOCKS}": _forks,
    rf"{_WHO} attends (?P<start>\d+)-(?P<end>\d+)(, another at (?P<other>[\d ]+))?": _attends,
    rf"host memory has (?P<other>not )?{_WHO} 0-(?P<count>\d+) in (?P<blocks>[\d ]+?)"
    r"(, free (?P<free>[\d ]+))?": _swap_blocks,
    r"host memory is free": lambda scene: scene.spoil(
        swap=lambda _: SwapFacts(
            tuple(range(1, 1 + scene.config.swap)), ((-1, ()),) * (1 + scene.config.swap), {}
        )
    ),
    r"batches are padded": lambda scene: scene.spoil(padded=lambda _: True),
    r"the reset succeeds": lambda scene: scene.spoil(reset=lambda _: True),
    r"equal blocks are one": lambda scene: scene.spoil(merges=lambda _: True),
    **HOST_STATEMENTS,
    **IMAGE_STATEMENTS,
    **STORAGE_STATEMENTS,
}
