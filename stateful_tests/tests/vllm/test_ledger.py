"""Clauses of block-pool engines, asked of facts by hand: no wheel, no process."""

import pytest

from reference.blocks.clauses import BlockStep, broken
from reference.blocks.commands import Add, Schedule, Update, client_tokens
from reference.blocks.config import ENGINE_PRESETS, EngineConfig, LayerGroup
from reference.blocks.facts import BlockFacts, Lane, Output, Published, RequestFact, chain
from reference.blocks.ledger import Ledger
from reference.commands import Piece
from reference.failures import AtTable, failure
from reference.geometry import GeometryError
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.engine_commands import draw_engine_config

CONFIG = EngineConfig((LayerGroup(2, 3),), 8, 12, 8)
TEXT = client_tokens((Piece("a", 5),), 0, 1)
SAMPLED = 77


def stamps(tokens):
    made, stamp = [], 0
    for token in tokens:
        stamp = chain(stamp, token)
        made.append(stamp)
    return made


def facts(**changes) -> BlockFacts:
    """An engine that has just computed five tokens in blocks 1, 2 and 3, and published two of them."""
    s = stamps(TEXT)
    table = ((1, 2, 3),)
    plain = BlockFacts(
        refs=(0, 1, 1, 1, *[0] * 5), free=(4, 5, 6, 7, 8),
        memory=((-1, ()), (0, (s[0], s[1])), (0, (s[2], s[3])), (0, (s[4], 0)), *[(-1, ())] * 5),
        published=(Published(1, 0, (s[0], s[1])), Published(2, 0, (s[2], s[3]))), mapped={1: 1, 2: 1},
        requests={"r1": RequestFact("RUNNING", tuple(TEXT), 5, table)},
        lanes=(Lane("r1", 0, tuple(TEXT), 0, (SAMPLED,), table),), steps_in_flight=1,
    )  # fmt: skip
    return plain._replace(**changes)


EMPTY = BlockFacts((0,) * 9, tuple(range(1, 9)), ((-1, ()),) * 9, (), {}, {})


def first_failure(after, config=CONFIG):
    ledger = Ledger(config)
    ledger.follow(Add("r1", 4, 0, (Piece("a", 5),)), EMPTY)
    lanes, outputs = ledger.follow(Schedule(), after)
    step = BlockStep(config, Schedule(), False, EMPTY, after, lanes, outputs, ledger.bearers)
    failed = broken(step)
    return failed[0][0].id if failed else None


def lane(**changes):
    return (facts().lanes[0]._replace(**changes),)


def request(**changes):
    return {"r1": facts().requests["r1"]._replace(**changes)}


def test_a_first_batch_conforms():
    assert first_failure(facts()) is None


@pytest.mark.parametrize(
    "clause, wrong",
    [
        ("BLK-1", {"refs": (0, 1, 2, 1, *[0] * 5)}),
        ("BLK-2", {"free": (4, 5, 6, 7)}),
        ("BLK-2", {"free": (4, 5, 6, 7, 8, 8)}),
        ("BLK-2", {"free": (0, 4, 5, 6, 7, 8)}),
        ("BLK-4", {"leftovers": ("r9",)}),
        ("BLK-5", {"lanes": lane(tokens=(*TEXT, 11, 12), drafts=2)}),
        ("READ-3", {"lanes": lane(tables=((1, 2, 5),))}),
        ("PUB-1", {"published": (Published(3, 0, tuple(stamps(TEXT + [SAMPLED])[4:])),), "mapped": {3: 1}}),
        ("PUB-2", {"mapped": {1: 1, 2: 1, 4: 1}}),
        ("RUN-1", {"lanes": lane(tokens=(*TEXT, *range(8)))}),
        ("RUN-3", {"lanes": lane(tokens=(*TEXT[:4], 9))}),
        ("RUN-3", {"lanes": lane(sampled=())}),
        ("TXT-3", {"requests": request(tokens=tuple(TEXT[:4]))}),
        ("WIN-2", {"requests": request(computed=4)}),
    ],
)  # fmt: skip
def test_a_wrong_fact_is_seen_by_its_clause(clause, wrong):
    assert first_failure(facts(**wrong)) == clause


def test_a_misread_names_the_query_that_fails_and_not_the_next_one():
    ledger, after = Ledger(CONFIG), facts(lanes=lane(tables=((1, 2, 5),)))
    ledger.follow(Add("r1", 4, 0, (Piece("a", 5),)), EMPTY)
    lanes, outputs = ledger.follow(Schedule(), after)
    step = BlockStep(CONFIG, Schedule(), False, EMPTY, after, lanes, outputs, ledger.bearers)
    found = {clause.id: failed for clause, failed in broken(step)}["READ-3"]
    assert found.at == (AtTable("r1", 0, 2, position=4, query=4),)


def test_a_window_that_was_freed_too_early_is_seen():
    refs, free = (0, 0, 0, 1, *[0] * 5), (1, 2, 4, 5, 6, 7, 8)
    freed = facts(requests=request(tables=((0, 0, 3),)), refs=refs, free=free, lanes=())
    ledger = Ledger(CONFIG)
    ledger.follow(Add("r1", 4, 0, (Piece("a", 5),)), EMPTY)
    ledger.follow(Schedule(), facts())
    failed = broken(BlockStep(CONFIG, Update(), False, facts(), freed, [], [], ledger.bearers))
    assert [clause.id for clause, _ in failed] == ["WIN-1", "READ-4"]
    assert failed[0][1] == failure("r1 (sure of 5) keeps block 1 of group 0", "it is the null block")


def test_an_output_that_was_sampled_behind_another_text_is_none():
    ledger = Ledger(CONFIG)
    ledger.follow(Add("r1", 4, 0, (Piece("a", 5),)), EMPTY)
    ledger.follow(Schedule(), facts())
    ledger.bearers["r1"].text.append(5)
    ledger.bearers["r1"].stamps.append(5)
    _, [note] = ledger.follow(Update(), facts(lanes=(), outputs=(Output("r1", (SAMPLED,), ""),)))
    assert not note.current


def test_what_is_sure_counts_no_draft_in_flight():
    config = EngineConfig((LayerGroup(2, 3),), 12, 12, 8, drafts=2)
    ledger = Ledger(config)
    ledger.follow(Add("r1", 4, 0, (Piece("a", 5),)), EMPTY)
    drafted = Lane("r1", 0, (*TEXT, 11, 12), 2, (11, 12, 13), ((1, 2, 3, 4),))
    ledger.follow(Schedule(), facts(lanes=(drafted,)))
    bearer = ledger.bearers["r1"]
    assert (bearer.computed, bearer.sure) == (7, 5)
    ledger.follow(Update(), facts(lanes=(), outputs=(Output("r1", (11, 12, 13), ""),)))
    assert (bearer.computed, bearer.sure, bearer.text) == (7, 7, [*TEXT, 11, 12, 13])


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"groups": ()}, "groups"),
        ({"groups": (LayerGroup(0),)}, r"groups\[0\].block_size"),
        ({"blocks": 2}, "blocks"),
        ({"eagle": True}, "eagle"),
        ({"drafts": 9}, "max_batched_tokens"),
        ({"chunked": False, "max_batched_tokens": 10}, "max_batched_tokens"),
    ],
)
def test_sizes_that_do_not_fit_name_their_field(changes, field):
    plain = {"groups": (LayerGroup(2),), "blocks": 8, "max_model_len": 16, "max_batched_tokens": 16}
    with pytest.raises(GeometryError, match=f"^{field}: "):
        EngineConfig(**(plain | changes))


def test_drawn_sizes_fit_together():
    for seed in range(300):
        for preset in ENGINE_PRESETS.values():
            drawn = draw_engine_config(RandomChoices(seed), preset)
            assert [g.window is None for g in drawn.groups] == [g.window is None for g in preset.groups]
