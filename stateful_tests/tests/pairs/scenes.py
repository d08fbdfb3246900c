"""A life of one request over two servers by hand, a moment each: a row then spoils the facts of one
moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from reference.blocks.commands import client_tokens
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import BlockFacts, Output, RequestFact, chained
from reference.failures import Failure
from reference.pairs.beside import PairBeside
from reference.pairs.clauses import OF_PAIRS, PairStep
from reference.pairs.commands import (
    Advance, Deliver, Forward, Land, Move, PairCommand, Prefill, Shake, Tick,
)  # fmt: skip
from reference.pairs.config import LEASE, PairConfig
from reference.pairs.facts import (
    PairMessage,
    PairFacts,
    PairTransfer,
    Promise,
    PairReader,
    ReaderState,
)

ENGINE = EngineConfig((LayerGroup(2),), 4, 8, 8)
PAIR = PairConfig(ENGINE, replace(ENGINE, peer=True))
TOKENS = tuple(client_tokens((), 2, 1))
KV = (0, tuple(chained(TOKENS, 0)))
NONE = (-1, ())
Spoil = Callable[[PairFacts], PairFacts]


def server(
    table: tuple[int, ...] | None = None, status: str = "WAITING", computed: int = 0, name: str = "r1",
    kept: tuple[int, ...] = (), memory: Any = NONE, **more: Any,
) -> BlockFacts:  # fmt: skip
    """A server with one request or none; memory: of block 1."""
    there = table is not None
    held = {*(table or ()), *kept}
    requests = {name: RequestFact(status, TOKENS, computed, (table or (),))} if there else {}
    return BlockFacts(
        refs=tuple(int(block in held) for block in range(5)),
        free=tuple(block for block in range(1, 5) if block not in held),
        memory=(NONE, memory, NONE, NONE, NONE), published=(), mapped={}, requests=requests, kept=kept,
        **more,
    )  # fmt: skip


EMPTY = server()
KEEPS, GAVE_BACK = server(kept=(1,), memory=KV), server(memory=KV)
PROMISE = Promise("r1", ((1,),), 0.0, True)
TRANSFER = PairTransfer(0, "r2", ((0, 1, 1),), False, False, False)
READ = PairMessage("P", False, ("r1",))


def given(state: ReaderState, decode: BlockFacts, **more: Any) -> PairFacts:
    """P has answered, and D has its request."""
    made = PairFacts(KEEPS, decode, (PROMISE,), (PairReader("r2", "r1", state),), idle=())
    return made._replace(**more)


WAITING = server((1,), "WAITING_FOR_REMOTE_KVS", 2, "r2")
HAS = server((1,), "WAITING", 2, "r2", memory=KV)
S = ReaderState
LIFE: list[tuple[PairCommand, PairFacts]] = [
    (Prefill("r1", 2), PairFacts(server(()), EMPTY, idle=("D",))),
    (
        Advance("P"),
        PairFacts(
            server((1,), "RUNNING", 2, memory=KV, steps_in_flight=1, in_step=True),
            EMPTY,
            idle=("D",),
        ),
    ),
    (
        Advance("P"),
        PairFacts(
            KEEPS._replace(outputs=(Output("r1", (), "length"),)), EMPTY, (PROMISE,), idle=("D",)
        ),
    ),
    (Forward("r2", "r1"), given(S.GIVEN, server((), name="r2"))),
    (Advance("D"), given(S.WAITS, WAITING, handshakes=("D",))),
    (Shake("D"), given(S.WAITS, WAITING)),
    (Advance("D"), given(S.WAITS, WAITING, transfers=(TRANSFER,))),
    (
        Move(),
        given(
            S.WAITS,
            WAITING._replace(memory=HAS.memory),
            transfers=(TRANSFER._replace(copied=True),),
        ),
    ),
    (
        Land(),
        given(
            S.WAITS,
            WAITING._replace(memory=HAS.memory),
            messages=(READ,),
            transfers=(TRANSFER._replace(copied=True, over=True),),
        ),
    ),
    (Advance("D"), given(S.READ, HAS, messages=(READ,))),
    (Advance("D"), given(S.GONE, server(memory=KV), messages=(READ,), idle=("D",))),
    (Deliver("P"), given(S.GONE, server(memory=KV), idle=("D",))),
    (
        Advance("P"),
        given(
            S.GONE,
            server(memory=KV),
            prefill=GAVE_BACK,
            promises=(PROMISE._replace(held=False),),
            idle=("P", "D"),
        ),
    ),
    (
        Advance("P"),
        given(
            S.GONE,
            server(memory=KV),
            prefill=GAVE_BACK,
            promises=(PROMISE._replace(held=False),),
            idle=("P", "D"),
        ),
    ),
]
STAYS = given(S.GONE, server(memory=KV), idle=("D",))  # P was not told


def waits_for_ever(times: int) -> list[tuple[PairCommand, PairFacts]]:
    """D waits, and nothing is under way."""
    stuck = given(S.WAITS, WAITING)
    return [(Advance(name), stuck) for _ in range(times) for name in "PD"]


def steps(
    life: list[tuple[PairCommand, PairFacts]], config: PairConfig = PAIR
) -> Iterator[PairStep]:
    """The steps of a life."""
    beside, before = PairBeside(config), PairFacts(EMPTY, EMPTY)
    for command, after in life:
        sides = beside.follow(command, before, after)
        yield PairStep(config, command, False, before, after, sides, beside)
        before = after


def failures(
    life: list[tuple[PairCommand, PairFacts]], config: PairConfig = PAIR
) -> list[tuple[str, Failure]]:
    """The clauses of pairs that fail at the first step at which one does."""
    for step in steps(life, config):
        found = [(name, each.check(step)) for name, each in OF_PAIRS.items()]
        if failed := [(name, failure) for name, failure in found if failure is not None]:
            return failed
    return []


def spoilt(at: int, spoil: Spoil) -> list[tuple[PairCommand, PairFacts]]:
    """The life up to a moment, whose facts are spoilt."""
    command, facts = LIFE[at]
    return [*LIFE[:at], (command, spoil(facts))]


def tick(seconds: int, facts: PairFacts) -> tuple[PairCommand, PairFacts]:
    """The clock moves."""
    return Tick(seconds), facts._replace(clock=facts.clock + seconds)


AFTER_LEASE = LEASE + 1
