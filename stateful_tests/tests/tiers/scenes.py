"""A small tree with a host tier, its facts by hand, and what is changed in them for a clause to see.

root - 1 "aa" on device and host, locked by h1 - 2 "a" whose store is in flight
                                               - 3 "b" on the host alone
     - 4 "c" whose load is in flight
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

from reference.clauses import Clause
from reference.failures import Failure
from reference.tiers.clauses import TierStep, failed_clauses
from reference.tiers.commands import Poll, TierCommand
from reference.tiers.config import TierConfig
from reference.recurrent_states import chained
from reference.tiers.facts import (
    METADATA, TierFacts, TierNode, TierOperation, TierPage, TierPart, TierRead, TierRecord, TierRequest,
    TierRequestState, TierSend, TierTransfer, TierUser,
)  # fmt: skip
from reference.tiers.locks import TierUsers
from reference.token_ids import token_id
from stateful_tests.tests.support.record_words import Notation, RecordKind
from stateful_tests.tests.support.row_files import ClauseRow

SIZES = TierConfig(page_size=1, window=2, full_pages=6, swa_pages=6, host_pages=6, host_swa_pages=6, width=8)
A, B, C = (tuple(token_id(serial, at) for at in range(4)) for serial in (1, 2, 3))
OTHER = token_id(9, 0)


def kv(full: tuple[int, ...] = (), swa: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    return {"full": full, "swa": swa}


def count(full: int = 0, swa: int = 0) -> dict[str, int]:
    return {"full": full, "swa": swa}


def part(slot: int, host: int) -> tuple[TierPart, ...]:
    """Return a token of both pools, with the same slots in both."""
    return TierPart("full", slot, host), TierPart("swa", slot, host)


NODES = {
    1: TierNode(
        1,
        parent=0,
        start=0,
        stamps=A[:2],
        device=kv((1, 2), (1, 2)),
        host=kv((0, 1), (0, 1)),
        locks=count(2, 2),
        pins=count(),
        hashed=A[:2],
    ),
    2: TierNode(
        2,
        parent=1,
        start=2,
        stamps=A[2:3],
        device=kv((3,), (3,)),
        host=kv((2,), (2,)),
        locks=count(1, 1),
        pins=count(),
        storing=2,
        hashed=A[:3],
    ),
    3: TierNode(
        3,
        parent=1,
        start=2,
        stamps=B[2:3],
        device=kv(),
        host=kv((3,), (3,)),
        locks=count(),
        pins=count(),
        hashed=A[:2] + B[2:3],
    ),
    4: TierNode(
        4,
        parent=0,
        start=0,
        stamps=C[:1],
        device=kv((4,), (4,)),
        host=kv((4,), (4,)),
        locks=count(1, 1),
        pins=count(1, 1),
        loading=4,
    ),
}
USERS = (
    TierUser("h1", host=False, node=1, lock=1),
    TierUser("store of 2", host=False, node=2, lock=2),
    TierUser("load of 4", host=False, node=4, lock=3),
    TierUser("load of 4", host=True, node=4, lock=4),
)
TRANSFERS = (
    TierTransfer(1, load=False, parts=part(3, 2), acks=(2,), sent=True),
    TierTransfer(2, load=True, parts=part(4, 4), acks=(4,), sent=True),
)
RECORDS = TierRecord(load=False, ack=2, nodes=(2,)), TierRecord(load=True, ack=4, nodes=(4,))
DEVICE = (0, *A[:3], 0, 0, 0)  # by slot; 0 is the padding page
HOST = (*A[:2], 0, B[2], C[0], 0)
FACTS = TierFacts(
    nodes=tuple(NODES.values()),
    free=kv((5, 6), (5, 6)),
    host_free=kv((5,), (5,)),
    evictable=count(1, 1),
    memory=kv(DEVICE, DEVICE),
    host_memory=kv(HOST, HOST),
    transfers=TRANSFERS,
    records=RECORDS,
    users=USERS,
    reads=(TierRead("h1", "full", 0, 1, A[0], A[0]),),
)
# At rest: the store and the load are over.
SETTLED = {
    2: NODES[2]._replace(storing=-1, locks=count()),
    1: NODES[1]._replace(locks=count(1, 1)),
    4: NODES[4]._replace(locks=count(), pins=count(), loading=-1),
}
REST = FACTS._replace(
    nodes=tuple(SETTLED.get(at, node) for at, node in NODES.items()),
    transfers=(),
    records=(),
    users=USERS[:1],
    memory=kv((0, *A[:3], C[0], 0, 0), (0, *A[:3], C[0], 0, 0)),
    host_memory=kv((*A[:3], B[2], C[0], 0), (*A[:3], B[2], C[0], 0)),
)


# A storage behind the host: node 1 is to be written to it, a prefetch reads into host slot 5.
BACKUP = TierOperation(
    3, back=True, name="", state="to write", slots=kv((0, 1), (0, 1)), moving=kv((0, 1), (0, 1))
)
PREFETCH = TierOperation(4, back=False, name="h2", state="reads", slots=kv((5,), (5,)), moving=kv((5,)))
PAGE = TierPage(1, "full", (0,), A[:1], A[:1])
STORING = FACTS._replace(
    operations=(BACKUP, PREFETCH),
    host_free=kv((), ()),
    stored=(PAGE,),
    asked=("h2",),
    reserved=1,
    returned=kv(),
)
WAITING = ("h2",)
# A server that only decodes: node 1 "aa" of its tree, h1 receives, h2 was given up and is still written to.
DECODING = TierConfig(
    page_size=1,
    window=2,
    full_pages=8,
    swa_pages=8,
    host_pages=0,
    host_swa_pages=0,
    width=8,
    decode="radix",
    rows=3,
)
RECEIVES = TierRequest(
    "h1", state="receives", row=1, first=0, slots=kv((3,), (3,)), kept={}, writing=kv((3,), (3,))
)
HELD = TierRequest(
    "h2", state="held", row=2, first=1, slots=kv((4, 5), (4, 5)), kept={}, writing=kv((4, 5), (5,))
)
RECEIVED = TierFacts(
    (
        TierNode(
            1,
            parent=0,
            start=0,
            stamps=A[:2],
            device=kv((1, 2), (1, 2)),
            host=kv(),
            locks=count(),
            pins=count(),
        ),
    ),
    kv((6, 7, 8), (6, 7, 8)),
    kv(),
    count(2, 2),
    kv((0, *A[:2], 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0, 0, 0)),
    kv(),
    requests=(RECEIVES, HELD),
    free_rows=(3,),
    free_first=(),
)


# A server that only prefills: node 1 "aa" and the third token of h1 are sent to its decode server, with its
# row of metadata; h2 is between two chunks, and two of its pages are due.
PREFILLING = TierConfig(
    page_size=1,
    window=2,
    full_pages=8,
    swa_pages=8,
    host_pages=0,
    host_swa_pages=0,
    width=8,
    prefill="radix",
    rows=3,
)
SENDS = TierRequest(
    "h1", state=TierRequestState.SENDS, row=1, first=0, slots=kv((3,), (3,)), kept={}, writing={}
)
COMPUTES = TierRequest(
    "h2",
    state=TierRequestState.COMPUTES,
    row=2,
    first=1,
    slots=kv((4, 5), (4, 5)),
    kept={},
    writing={},
    due=2,
)
SENDING = RECEIVED._replace(
    requests=(SENDS, COMPUTES),
    memory=kv((0, *A[:3], 0, 0, 0, 0, 0), (0, *A[:3], 0, 0, 0, 0, 0)),
    sends=(
        TierSend(1, name="h1", pool="full", position=0, slots=(1, 2, 3), wanted=A[:3], found=A[:3]),
        TierSend(2, name="h1", pool="swa", position=1, slots=(2, 3), wanted=A[1:3], found=A[1:3]),
        TierSend(3, name="h1", pool=METADATA, position=0, slots=(0,), wanted=(7,), found=(7,)),
    ),
    begun=("h2",),
    free_first=(2, 3),
)


# A model with recurrent layers: node 1 "aa" has its state on both tiers; one is loaded for h2 as well.
WITH_STATES = TierConfig(
    page_size=1,
    window=None,
    full_pages=4,
    swa_pages=0,
    host_pages=4,
    host_swa_pages=0,
    width=4,
    states=3,
    host_states=2,
)
STATE = chained(A[:2])[-1]
LOADS = TierRequest(
    "h2", state=TierRequestState.HOLDS, row=-1, first=-1, slots={"state": (2,)}, kept={}, writing={}
)
RECURRENT = TierFacts(
    (
        TierNode(
            1,
            parent=0,
            start=0,
            stamps=A[:2],
            device={"full": (1, 2), "state": (1,)},
            host={"full": (0, 1), "state": (0,)},
            locks={"full": 1, "state": 1},
            pins={"full": 0, "state": 0},
        ),
    ),
    {"full": (3, 4), "state": (3,)},
    {"full": (2, 3), "state": (1,)},
    {"full": 0, "state": 0},
    {"full": (0, *A[:2], 0, 0), "state": (0, STATE, STATE, 0)},
    {"full": (*A[:2], 0, 0), "state": (STATE, 0)},
    users=(TierUser("h2", host=False, node=1, lock=1),),
    requests=(LOADS,),
)


class TierScene(NamedTuple):
    """Facts before and after a poll, which conform.

    waiting: the requests that wait.
    """

    facts: TierFacts
    sizes: TierConfig
    waiting: tuple[str, ...] = WAITING


SCENES = {
    "running": TierScene(FACTS, SIZES),
    "rest": TierScene(REST, SIZES),
    "storing": TierScene(STORING, SIZES),
    "decoding": TierScene(RECEIVED, DECODING),
    "prefilling": TierScene(SENDING, PREFILLING, ()),
    "states": TierScene(RECURRENT, WITH_STATES, ()),
}
_TOKENS = {
    f"{letter}{at}": token
    for letter, text in zip("abc", (A, B, C))
    for at, token in enumerate(text)
}
NOTATION = Notation(
    {
        "node": RecordKind(TierNode, "nodes", "node"),
        "transfer": RecordKind(TierTransfer, "transfers", "job"),
        "operation": RecordKind(TierOperation, "operations", "job"),
        "request": RecordKind(TierRequest, "requests", "name"),
        "record": RecordKind(TierRecord, "records"),
        "user": RecordKind(TierUser, "users"),
        "read": RecordKind(TierRead, "reads"),
        "page": RecordKind(TierPage, "stored"),
        "send": RecordKind(TierSend, "sends", "job"),
    },
    {**_TOKENS, "other": OTHER, "state": STATE},
)


def node(at: int, **changes: Any) -> Callable[[TierFacts], TierFacts]:
    """Another node in the place of one."""

    def change(facts: TierFacts) -> TierFacts:
        nodes = tuple(n._replace(**changes) if n.node == at else n for n in facts.nodes)
        return facts._replace(nodes=nodes)

    return change


def facts(**changes: Any) -> Callable[[TierFacts], TierFacts]:
    """Other facts."""
    return lambda was: was._replace(**changes)


def together(*changes: Callable[[TierFacts], TierFacts]) -> Callable[[TierFacts], TierFacts]:
    def change(was: TierFacts) -> TierFacts:
        for each in changes:
            was = each(was)
        return was

    return change


def failures(
    change: Callable[[TierFacts], TierFacts],
    *,
    was: TierFacts = FACTS,
    command: TierCommand | None = None,
    sizes: TierConfig = SIZES,
    refused: bool = False,
    waiting: Collection[str] = WAITING,
) -> list[tuple[Clause, Failure]]:
    """Return the failures at a command after which the facts are changed."""
    ranges = TierUsers(sizes)
    ranges.follow(was)
    now = change(was)
    return failed_clauses(
        TierStep(
            sizes,
            command or Poll(),
            refused=refused,
            before=was,
            after=now,
            ranges=ranges.follow(now),
            waiting=waiting,
        )
    )


def violated_at(change: Callable[[TierFacts], TierFacts], **scene: Any) -> tuple[list[str], str]:
    """Return the clauses that fail after a change, and the text of the first failure."""
    failed = failures(change, **scene)
    first = failed[0][1] if failed else None
    return [
        clause.id for clause, _ in failed
    ], f"{first.expected}; {first.observed}" if first else ""


def failures_of(row: ClauseRow, first: int | None = None) -> list[tuple[Clause, Failure]]:
    """Return the failures at a row of clause_rows.txt.

    first: the place of the record that is put first in each list, with those behind it.
    """
    name, *sizes = (row.on or "running").split(", ")
    scene = SCENES[name]
    changes = (change.split() for change in sizes)
    was = now = scene.facts
    for line in row.lines:
        if line.startswith("before "):
            was = NOTATION.change_facts(was, line.removeprefix("before "))
        else:
            now = NOTATION.change_facts(now, line)
    if first is not None:
        was = rotated(was, first)
        now = rotated(now, first)
    return failures(
        lambda _: now,
        was=was,
        sizes=replace(scene.sizes, **{field: int(value) for field, value in changes}),
        waiting=scene.waiting,
    )


def rotated(was: TierFacts, first: int) -> TierFacts:
    """Return the same facts with their lists in another order, nodes behind their parents, and the parts of
    each transfer too."""
    lists = {
        kind.field: records[first:] + records[:first]
        for kind in NOTATION.kinds.values()
        if (records := getattr(was, kind.field))
    }
    lists["transfers"] = tuple(
        each._replace(parts=each.parts[first:] + each.parts[:first]) for each in lists.get("transfers", ())
    )
    left = [*lists.pop("nodes", ())]
    nodes: list[TierNode] = []
    while left:
        above = {at.node for at in left}
        nodes.append(next((at for at in left if at.parent not in above), left[0]))
        left.remove(nodes[-1])
    return was._replace(**lists, nodes=tuple(nodes))
