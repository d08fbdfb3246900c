"""A life of one request over two servers by hand, a moment each: a row then spoils the facts of one
moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from reference.blocks.commands import client_tokens
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import BlockFacts, Output, RequestFact, chained
from reference.failures import Failure
from reference.system_kinds import PAIRS
from reference.pairs.pair_record import PairRecord
from reference.pairs.clauses import OF_PAIRS, PairStep
from reference.pairs.commands import (
    Advance, Deliver, Forward, Land, Move, PairCommand, Prefill, Shake,
)  # fmt: skip
from reference.pairs.config import PairConfig
from reference.pairs.facts import PairMessage, PairFacts, PairTransfer, Promise, PairReader, ReaderState
from stateful_tests.tests.support.record_words import Notation, RecordKind
from stateful_tests.traces.notation import parse

ENGINE = EngineConfig((LayerGroup(2),), blocks=4, max_model_len=8, max_batched_tokens=8)
PAIR = PairConfig(ENGINE, replace(ENGINE, peer=True))
TOKENS = tuple(client_tokens((), 2, 1))
KV = (0, tuple(chained(TOKENS, 0)))
NONE = (-1, ())


def server(
    table: tuple[int, ...] | None = None, status: str = "WAITING", computed: int = 0, name: str = "r1",
    kept: tuple[int, ...] = (), memory: Any = NONE, **more: Any,
) -> BlockFacts:  # fmt: skip
    """Return a server with one request or none.

    memory: of block 1.
    """
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
KEEPS = server(kept=(1,), memory=KV)
GAVE_BACK = server(memory=KV)
PROMISE = Promise("r1", ((1,),), 0.0, held=True)
TRANSFER = PairTransfer(0, "r2", ((0, 1, 1),), copied=False, over=False, failed=False)
READ = PairMessage("P", renews=False, requests=("r1",))


def facts_of(state: ReaderState, decode: BlockFacts, **more: Any) -> PairFacts:
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
    (Forward("r2", "r1"), facts_of(S.GIVEN, server((), name="r2"))),
    (Advance("D"), facts_of(S.WAITS, WAITING, handshakes=("D",))),
    (Shake("D"), facts_of(S.WAITS, WAITING)),
    (Advance("D"), facts_of(S.WAITS, WAITING, transfers=(TRANSFER,))),
    (
        Move(),
        facts_of(
            S.WAITS,
            WAITING._replace(memory=HAS.memory),
            transfers=(TRANSFER._replace(copied=True),),
        ),
    ),
    (
        Land(),
        facts_of(
            S.WAITS,
            WAITING._replace(memory=HAS.memory),
            messages=(READ,),
            transfers=(TRANSFER._replace(copied=True, over=True),),
        ),
    ),
    (Advance("D"), facts_of(S.READ, HAS, messages=(READ,))),
    (Advance("D"), facts_of(S.GONE, server(memory=KV), messages=(READ,), idle=("D",))),
    (Deliver("P"), facts_of(S.GONE, server(memory=KV), idle=("D",))),
    (
        Advance("P"),
        facts_of(
            S.GONE,
            server(memory=KV),
            prefill=GAVE_BACK,
            promises=(PROMISE._replace(held=False),),
            idle=("P", "D"),
        ),
    ),
    (
        Advance("P"),
        facts_of(
            S.GONE,
            server(memory=KV),
            prefill=GAVE_BACK,
            promises=(PROMISE._replace(held=False),),
            idle=("P", "D"),
        ),
    ),
]
WRITTEN = KEEPS._replace(memory=(NONE, (0, (7, 7)), *KEEPS.memory[2:]))
OTHER = HAS._replace(memory=(NONE, (0, (KV[1][0], 9)), *HAS.memory[2:]))
# A server's facts, by the names that rows have for them.
SERVER_FACTS = {
    "empty": EMPTY, "keeps": KEEPS, "gave_back": GAVE_BACK, "written": WRITTEN, "waits": WAITING, "has": HAS,
    "other": OTHER, "ended": server(memory=KV), "ended_with_other": server(memory=OTHER.memory[1]),
    "has_nothing": HAS._replace(memory=EMPTY.memory),
    "counts_less": OTHER._replace(requests={"r2": HAS.requests["r2"]._replace(computed=1)}),
}  # fmt: skip
NOTATION = Notation(
    {
        "promise": RecordKind(Promise, "promises", "request"),
        "reader": RecordKind(PairReader, "readers", "request"),
        "transfer": RecordKind(PairTransfer, "transfers", "number"),
        "message": RecordKind(PairMessage, "messages"),
    },
    values=SERVER_FACTS,
)


def life_of(lines: Sequence[str]) -> list[tuple[PairCommand, PairFacts]]:
    """Return the commands of a row, each with the facts after it."""
    life = list[tuple[PairCommand, PairFacts]]()
    facts = PairFacts(EMPTY, EMPTY)
    for line in lines:
        if line.startswith("life "):
            life = LIFE[: int(line.removeprefix("life "))]
            facts = life[-1][1]
            continue
        command, *changes = line.split("; ")
        for change in changes:
            if change.startswith("as at "):
                facts = LIFE[int(change.removeprefix("as at ")) - 1][1]
            else:
                facts = NOTATION.change_facts(facts, change)
        life = [*life, (parse(command, PAIRS), facts)]
    return life


def steps(
    life: list[tuple[PairCommand, PairFacts]], config: PairConfig = PAIR
) -> Iterator[PairStep]:
    """Yield the steps of a life."""
    beside = PairRecord(config)
    before = PairFacts(EMPTY, EMPTY)
    for command, after in life:
        sides = beside.follow(command, before, after)
        yield PairStep(config, command, refused=False, before=before, after=after, sides=sides, record=beside)
        before = after


def failures(
    life: list[tuple[PairCommand, PairFacts]], config: PairConfig = PAIR
) -> list[tuple[str, Failure]]:
    """Return the clauses of pairs that fail at the first step at which one does."""
    for step in steps(life, config):
        found = [(name, each.check(step)) for name, each in OF_PAIRS.items()]
        if failed := [(name, failure) for name, failure in found if failure is not None]:
            return failed
    return []
