"""Every branch of every clause of pairs sees a fault first, and what only resembles one conforms."""

from dataclasses import replace

import pytest

from reference.pairs.clauses import OF_PAIRS
from reference.pairs.commands import Advance, Cancel, Deliver, Drop, Lose, Shake, Tick
from reference.pairs.config import LEASE
from reference.pairs.facts import PairMessage, ReaderState
from stateful_tests.tests.pairs.scenes import (
    AFTER_LEASE, EMPTY, GAVE_BACK, HAS, KEEPS, KV, LIFE, NONE, PAIR, PROMISE, READ, STAYS, TRANSFER, WAITING,
    failures, given, server, spoilt, steps, tick, waits_for_ever,
)  # fmt: skip

S = ReaderState
LATE = replace(PAIR, late=True)


def on(name, facts):
    """Put these facts of a server in the place of its own."""
    return lambda whole: whole._replace(**{name: facts})


WRITTEN = KEEPS._replace(memory=(NONE, (0, (7, 7)), *KEEPS.memory[2:]))
OTHER = HAS._replace(memory=(NONE, (0, (KV[1][0], 9)), *HAS.memory[2:]))
GONE_AT_D = given(S.GONE, EMPTY, idle=("D",))
TOLD = [*LIFE[:4], (Cancel("D", "r2"), GONE_AT_D)]
RECORDS = ("D recving_metadata: r2",)
FORGOTTEN = LIFE[-1][1]._replace(records=RECORDS)
LOST = given(S.WAITS, WAITING, transfers=(TRANSFER._replace(over=True, failed=True),))
REREADS = given(S.READ, HAS)
OLD = STAYS._replace(clock=float(AFTER_LEASE))
STUCK = [given(S.WAITS, WAITING, clock=60.0 * at, promises=()) for at in range(3)]
PAST_TIMEOUTS = [(c, facts) for facts in STUCK for c in (Tick(60), Advance("P"), Advance("D"))][:-1]
RENEWS = PairMessage("P", True, ("r1",))

ROWS = [  # title, life, the clause that fails first, how its words end, sizes
    ("freed with the answer", spoilt(2, on("prefill", GAVE_BACK)), "PD-1", "it is free"),
    ("freed before anybody was told", spoilt(3, on("prefill", GAVE_BACK)), "PD-1", "it is free"),
    ("freed while D waits", spoilt(5, on("prefill", GAVE_BACK)), "PD-1", "it is free"),
    ("freed while it is read", spoilt(6, on("prefill", GAVE_BACK)), "PD-1", "it is free"),
    ("written while it is read", spoilt(6, on("prefill", WRITTEN)), "PD-1", "it was written"),
    ("freed once its bytes have moved", spoilt(7, on("prefill", GAVE_BACK)), "", ""),
    (
        "freed after the failure of its transfer",
        [*LIFE[:7], (Lose(), LOST._replace(prefill=GAVE_BACK))],
        "",
        "",
    ),
    (
        "freed after its reader was given up",
        [*TOLD[:4], (TOLD[4][0], GONE_AT_D._replace(prefill=GAVE_BACK))],
        "",
        "",
    ),
    (
        "freed after its answer was dropped",
        [*LIFE[:3], (Drop("r1"), LIFE[2][1]._replace(prefill=GAVE_BACK))],
        "",
        "",
    ),
    (
        "freed at the end of its lease",
        [
            *LIFE[:4],
            (tick(LEASE, LIFE[3][1])),
            (Advance("P"), LIFE[3][1]._replace(clock=30.0, prefill=GAVE_BACK)),
        ],
        "PD-1",
        "it is free",
    ),
    (
        "freed at the end of its lease, clients are late",
        [
            *LIFE[:4],
            (tick(LEASE, LIFE[3][1])),
            (Advance("P"), LIFE[3][1]._replace(clock=30.0, prefill=GAVE_BACK)),
        ],
        "",
        "",
        LATE,
    ),
    (
        "freed before the end of its lease, clients are late",
        [
            *LIFE[:4],
            (tick(29, LIFE[3][1])),
            (Advance("P"), LIFE[3][1]._replace(clock=29.0, prefill=GAVE_BACK)),
        ],
        "PD-1",
        "it is free",
        LATE,
    ),
    (
        "freed at the end of a lease that was renewed, clients are late",
        [
            *LIFE[:3],
            (LIFE[3][0], LIFE[3][1]._replace(messages=(RENEWS,))),
            (Deliver("P"), LIFE[3][1]),
            tick(20, LIFE[3][1]),
            (Advance("P"), LIFE[3][1]._replace(clock=20.0)),
            tick(15, LIFE[3][1]._replace(clock=20.0)),
            (Advance("P"), LIFE[3][1]._replace(clock=35.0, prefill=GAVE_BACK)),
        ],
        "PD-1",
        "it is free",
        LATE,
    ),
    (
        "kept past its lease",
        [
            *LIFE[:3],
            (Drop("r1"), LIFE[2][1]),
            tick(AFTER_LEASE, LIFE[2][1]),
            *[(Advance("P"), LIFE[2][1]._replace(clock=float(AFTER_LEASE)))] * 3,
        ],
        "PD-3",
        "it is kept at 31 s",
    ),
    (
        "kept for two batches past its lease",
        [
            *LIFE[:3],
            (Drop("r1"), LIFE[2][1]),
            tick(AFTER_LEASE, LIFE[2][1]),
            *[(Advance("P"), LIFE[2][1]._replace(clock=float(AFTER_LEASE)))] * 2,
        ],
        "",
        "",
    ),
    (
        "kept though it was read",
        [*LIFE[:12], *[(Advance("P"), STAYS)] * 2],
        "PD-2",
        "until the lease ends",
    ),
    (
        "kept though its reader was given up",
        [*TOLD, *[(Advance("P"), GONE_AT_D)] * 2],
        "PD-2",
        "until the lease ends",
    ),
    ("kept until P has scheduled twice", [*LIFE[:12], (Advance("P"), STAYS)], "", ""),
    (
        "kept while D has yet to schedule",
        [*TOLD, *[(Advance("P"), GONE_AT_D._replace(idle=()))] * 3],
        "",
        "",
    ),
    (
        "kept while a message is under way",
        [*LIFE[:11], *[(Advance("P"), STAYS._replace(messages=(READ,)))] * 3],
        "",
        "",
    ),
    (
        "kept after a drop",
        [*LIFE[:3], (Drop("r1"), LIFE[2][1]), *[(Advance("P"), LIFE[2][1])] * 3],
        "",
        "",
    ),
    (
        "kept after a failure",
        [*LIFE[:7], (Lose(), LOST), (Advance("D"), GONE_AT_D), *[(Advance("P"), GONE_AT_D)] * 3],
        "",
        "",
    ),
    (
        "kept after a handshake that failed",
        [
            *LIFE[:5],
            (Shake("D", True), LIFE[5][1]),
            (Advance("D"), GONE_AT_D),
            *[(Advance("P"), GONE_AT_D)] * 3,
        ],
        "",
        "",
    ),
    (
        "waits for a message that never comes",
        [*LIFE[:6], *waits_for_ever(3)[:5]],
        "PD-4",
        "r2 at D WAITING_FOR_REMOTE_KVS",
    ),
    ("waits after a failure", [*LIFE[:7], (Lose(), LOST), *waits_for_ever(4)], "", ""),
    (
        "a handshake is owed",
        [*LIFE[:5], *[(Advance(name), LIFE[4][1]) for _ in range(5) for name in "PD"]],
        "",
        "",
    ),
    (
        "a transfer is owed",
        [*LIFE[:7], *[(Advance(name), LIFE[6][1]) for _ in range(5) for name in "PD"]],
        "",
        "",
    ),
    ("one server alone has its turns", [*LIFE[:6], *[(Advance("D"), LIFE[5][1])] * 6], "", ""),
    (
        "waits past every timeout",
        [*LIFE[:7], (Lose(), LOST), *PAST_TIMEOUTS],
        "PRO-1",
        "r2 at D WAITING_FOR_REMOTE_KVS",
    ),
    ("a record is left", [*LIFE[:12], (LIFE[12][0], FORGOTTEN)], "PD-5", "D recving_metadata: r2"),
    (
        "a record while P keeps what nobody will give back",
        [
            *LIFE[:3],
            (Drop("r1"), LIFE[2][1]),
            *[(Advance("P"), LIFE[2][1]._replace(records=RECORDS))] * 3,
        ],
        "",
        "",
    ),
    (
        "a record of a request that is there",
        spoilt(6, lambda f: f._replace(records=RECORDS)),
        "",
        "",
    ),
    (
        "another token was sent",
        spoilt(9, on("decode", OTHER)),
        "PD-6",
        "block 1 holds KV of another token there",
    ),
    (
        "nothing was sent",
        spoilt(9, on("decode", HAS._replace(memory=EMPTY.memory))),
        "PD-6",
        "block 1 holds nothing of this group there",
    ),
    (
        "less is counted than was sent wrong",
        spoilt(
            9,
            on("decode", OTHER._replace(requests={"r2": HAS.requests["r2"]._replace(computed=1)})),
        ),
        "",
        "",
    ),
    (
        "a request that ends as its KV comes",
        [*LIFE[:9], (Advance("D"), given(S.READ, server(memory=OTHER.memory[1])))],
        "",
        "",
    ),
    (
        "what was counted before",
        [*LIFE[:10], (Advance("D"), REREADS._replace(decode=OTHER))],
        "",
        "",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_last_step_violates_its_clause_and_no_step_before_does(row):
    _, life, clause, words, *config = row
    assert failures(life[:-1], *config) == []
    found = failures(life, *config)
    assert [name for name, _ in found][:1] == [clause] * bool(clause)
    for _, failure in found[:1]:
        assert f"{failure.expected}; {failure.observed}".endswith(words)
        assert failure.at


def test_a_whole_life_conforms_and_reaches_what_it_can():
    reached = {
        name for step in steps(LIFE) for name, each in OF_PAIRS.items() if each.trigger(step)
    }
    assert failures(LIFE) == []
    assert reached == {"PD-1", "PD-2", "PD-4", "PD-5", "PD-6", "PRO-1"}


def test_every_clause_has_a_row():
    assert {row[2] for row in ROWS if row[2]} == OF_PAIRS.keys() - {"PRO-2"}


def test_nothing_is_asked_of_a_refused_command():
    step = [*steps(LIFE)][-1]
    refused = replace(step, refused=True, after=FORGOTTEN, before=FORGOTTEN)
    assert [each for each in OF_PAIRS.values() if each.check(refused) is not None] == []
    assert PROMISE.held and OLD.clock > LEASE
