"""Judges of a pair of whole servers: what each notes, without a server."""

from types import SimpleNamespace

import pytest
import torch

from impl.sglang.server.clients import Client, Clients, Config, Turn
from impl.sglang.server.fake_model import _stamped_tokens
from impl.sglang.server.outcome import OUTDATED
from impl.sglang.server import server_leftovers
from impl.sglang.server.pair import judges
from impl.sglang.server.pair.choices import NetworkChoice
from impl.sglang.server.pair.model import ServerModel, TensorSlots
from impl.sglang.server.tier import stamp
from reference.recurrent_states import chained, stamp_after
from stateful_tests.watched import deviations
from stateful_tests.watched.validation_results import Validated

RELEASE = "0.5.23"
CLIENTS = Clients(
    [Client(name, 0, (Turn(wait=0, tokens=3, limit=2),), session=False) for name in ("c1", "c2")], 5
)
PROMPT = CLIENTS.prompt("c1.1")
TEXT = chained(_stamped_tokens(PROMPT))


def server(**more):
    """Return a server that is at rest: nothing is allocated."""
    allocator = SimpleNamespace(page_size=1, size=100, available_size=lambda: 100)
    tree = SimpleNamespace(evictable_size=lambda: 0, host_pool_group=None)
    scheduler = SimpleNamespace(
        is_hybrid_swa=False, disagg_prefill_inflight_queue=[], waiting_queue=[], tree_cache=tree,
        token_to_kv_pool_allocator=allocator,
    )  # fmt: skip
    found = {"allocator": allocator, "scheduler": scheduler, "window": None, "states": None}
    return SimpleNamespace(**{**found, **more})


def judge_page(p=None, d=None, **network):
    """Return the judges of two servers at rest, of which these differ."""
    said = {"harmed": False, "harmed_by_time": False, "delivered": {}, "told_success": {1}}
    wire = SimpleNamespace(**{**said, **network}, tell=lambda *_: None)
    return judges.Judges(wire, {"P": p or server(), "D": d or server()}, {}, CLIENTS, deferred=True)


@pytest.mark.parametrize(
    ("delivered", "key"),
    [
        ({("notice", "c1.1"): 4, ("request", "c1.1"): 9},
         "PD-4 P waits for a request that D gave up before it came"),
        ({("notice", "c1.1"): 9, ("request", "c1.1"): 4}, "PD-4 P waits for a timeout"),
        ({}, "PD-4 P waits for a timeout"),
    ],
)  # fmt: skip
def test_a_request_may_arrive_after_its_notice(delivered, key):
    judgements = judge_page(delivered=delivered)
    judgements.waiting({"P": ["c1.1"], "D": []})
    assert [*judgements.noted] == [key]


SLOTS = {1: TEXT[-1], 2: stamp_after(TEXT, 2), 3: 77}


@pytest.mark.parametrize(
    ("source", "target", "keeps", "key"),
    [
        (1, 6, 6, None),
        (2, 6, 6, "PD-6 another state is sent"),
        (3, 6, 6, "PD-1 state of P is rewritten"),
        (4, 6, 6, "PD-1 state of P is free"),
        (1, 7, 7, "XFER-2 state of another"),
        (1, 6, None, "XFER-1 state of D is given back"),
    ],
)
def test_a_wrong_state_is_noted_when_it_is_sent(source, target, keeps, key):
    rows = SimpleNamespace(mamba_allocator=SimpleNamespace(free_slots=torch.tensor([4])))
    states = SimpleNamespace(cells={**SLOTS, 4: TEXT[-1]}, rows=rows)
    judgements = judge_page(server(states=states), server(states=states))
    request = SimpleNamespace(req=SimpleNamespace(kv=SimpleNamespace(mamba_pool_idx=keeps)))
    judgements._state(SimpleNamespace(room=1, request=request, state=[6]), "c1.1", source, target)
    assert [*judgements.noted] == ([key] if key else [])


def has_computed(*names, refused=()):
    """Return the judges of a P that has computed these prompts and has not sent them; D refused
    some."""
    p = server()
    p.scheduler.disagg_prefill_inflight_queue = [
        SimpleNamespace(rid=name, pending_bootstrap=False) for name in names
    ]
    judgements = judge_page(p)
    judgements.refused["D"] |= {*refused}
    return judgements


@pytest.mark.parametrize(
    ("computed", "key"),
    [(["c2.1"], "PD-4 P waits for a prompt that D has refused"), ([], "PD-4 P waits for a timeout")],
)
def test_a_computed_prompt_that_is_refused_makes_others_wait(computed, key):
    judgements = has_computed(*computed, refused=["c2.1"])
    judgements.waiting({"P": ["c1.1", "c2.1"], "D": []})
    assert [*judgements.noted] == [key]


PAGE = [[float(token), float(at)] for at, token in enumerate(PROMPT)]
OTHER = [[9.0, 0.0], [9.0, 1.0], [9.0, 2.0]]


@pytest.mark.parametrize(
    ("sent", "row", "free", "key"),
    [
        (PAGE, 1, [], None),
        (PAGE, 1, [1], "PD-1 full page of P is free"),
        (OTHER, 1, [], "PD-1 full page of P is rewritten"),
        (PAGE, 2, [1], "PD-1 full page of P is replaced before it is sent"),
        (OTHER, 2, [], "PD-1 full page of P is replaced before it is sent"),
        (OTHER, 3, [], "PD-1 full page of P is rewritten"),  # the row leads to other KV as well
    ],
)
def test_a_wrong_page_is_noted_when_it_is_sent(sent, row, free, key):
    size = len(PROMPT)
    cells = torch.zeros(5 * size, 1, 4)
    for page, content in ((1, sent), (2, PAGE), (3, OTHER)):
        cells[page * size : (page + 1) * size, 0, :2] = torch.tensor(content)
    rows = SimpleNamespace(req_to_token=torch.tensor([[row * size + index for index in range(size)]]))
    p = server(free_pages=lambda _: free, writers={"full": {}})
    asks = SimpleNamespace(rid="c1.1", kv=SimpleNamespace(req_pool_idx=0))
    more = {"chunked_req": None, "last_batch": None, "req_to_token_pool": rows}
    p.scheduler.__dict__.update(more, disagg_prefill_inflight_queue=[asks])
    p.allocator.page_size = size
    d = server(outdated=set())
    d.scheduler.req_to_token_pool = SimpleNamespace(req_to_token=torch.tensor([[4 * size]]))
    judgements = judge_page(p, d)
    request = SimpleNamespace(req=asks)
    promise = SimpleNamespace(room=1, request=request, pages=[4], prefix=0)
    region = SimpleNamespace(pool="full", tensor=cells)
    judgements._page(promise, "c1.1", region, 1, 4)
    assert [*judgements.noted] == ([key] if key else [])
    assert d.outdated == ({4} if (sent, row) == (OTHER, 2) else set())


def test_a_lost_prefix_of_a_host_tier_is_noted():
    judgements = judge_page()
    judgements.aborted["D"].add("c2.1")
    judgements.prefix_is_gone("c2.1")
    assert not judgements.noted
    judgements.prefix_is_gone("c1.1")
    assert [*judgements.noted] == ["PD-1 D loses a prefix of its host tier"]


@pytest.mark.parametrize(
    ("tree", "free", "left"),
    [(False, 8, []), (False, 6, [("KV on the host", "2 of 8")]), (True, 6, [])],
)
def test_kv_of_retracted_requests_is_not_left_on_the_host(tree, free, left):
    pool = SimpleNamespace(host_pool=SimpleNamespace(size=8, available_size=lambda: free))
    row = SimpleNamespace(size=2, free_slots=[1, 2])
    queues = ("disagg_prefill_inflight_queue", "disagg_prefill_pending_chunk_rids")
    scheduler = SimpleNamespace(
        req_to_token_pool=row,
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(size=2, free_slots=[0, 1]),
        tree_cache=SimpleNamespace(host_pool_group=SimpleNamespace(entries=[pool]), disable=not tree),
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[]), **{name: [] for name in queues},
    )  # fmt: skip
    assert [*server_leftovers.leftovers(scheduler, "P")] == left


def test_records_of_a_storage_and_loads_that_were_not_sent_are_found():
    waits = {"r1": object()}
    queues = ("disagg_prefill_inflight_queue", "disagg_prefill_pending_chunk_rids")
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=2, free_slots=[1, 2]),
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(size=2, free_slots=[0, 1]),
        tree_cache=SimpleNamespace(_storage_prefetch_wait=waits, disable=False),
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[]), **{name: [] for name in queues},
    )  # fmt: skip
    assert [*server_leftovers.leftovers(scheduler, "P")] == [("waits for a storage", "1 entries")]
    waits.clear()
    assert [*server_leftovers.leftovers(scheduler, "P")] == []
    assert not server_leftovers.has_unsent_load(scheduler)
    for queue in ([], [object()]):
        scheduler.tree_cache.cache_controller = SimpleNamespace(load_queue=queue)
        assert server_leftovers.has_unsent_load(scheduler) == bool(queue)


def model(draft=(3, 0)):
    """D, whose only tensors have one token at slot 0: the model's, and its draft's."""
    server_model = object.__new__(ServerModel)
    tensors = [torch.tensor([[[*at, 0.0]]]) for at in ((3, 0), draft)]
    server_model.__dict__.update(
        tensors={"full": tensors}, target_tensors=1, without_draft=set(), tree=False, server="D",
        outdated=set(), window=None,
        writers={"full": {}}, unsent=set(), misread={}, forwards=1, noted=[],
        network=SimpleNamespace(tell=lambda *_: None),
        allocator=SimpleNamespace(page_size=1),
    )  # fmt: skip
    return server_model


def test_draft_kv_counts_until_a_request_is_retracted():
    right = model()
    wrong = model(draft=(9, 0))
    right._compare("full", "c1.1", 0, [0], [3])
    wrong._compare("full", "c1.1", 0, [0], [3])
    assert not right.misread and [*wrong.misread] == [("c1.1", "full of D", 0)]
    for tree, request in ((False, "c1.1"), (True, "c2.1")):  # with a tree others share its prompt
        wrong = model(draft=(9, 0))
        wrong.without_draft = {"c1.1"}
        wrong.tree = tree
        wrong._compare("full", request, 0, [0], [3])
        assert not wrong.misread


def test_a_page_given_back_before_it_was_sent_is_noted_at_the_read():
    server_model = model(draft=(9, 0))
    server_model.outdated = {0}
    server_model._compare("full", "c1.1", 0, [0], [3])
    (misread,) = server_model.misread.values()
    assert misread.found == OUTDATED
    for draft, known in ((2, "sent-page-is-replaced"), (0, "")):
        config = Config(pair=True, draft=draft, prefill_draft=True)
        assert deviations.fault_of_pair_read(RELEASE, OUTDATED, "full of D", config) == known
    server_model._write(torch.tensor([0]), [3], 0, "c1.1")
    assert not server_model.outdated


@pytest.mark.parametrize(("hidden", "stained", "notes"), [((7, 2), False, 0), ((7, 1), False, 1),
                                                          ((7, 1), True, 0)])  # fmt: skip
def test_a_wrong_hidden_state_is_noted_unless_stained(monkeypatch, hidden, stained, notes):
    server_model = model()
    noted = []
    server_model.__dict__.update(
        sends_draft=True, notes=lambda *what: noted.append(what), _texts={"c1.1": [3]}
    )
    monkeypatch.setattr(ServerModel.__bases__[0], "verify", lambda *_: ([], []))
    info = SimpleNamespace(
        bonus_tokens=torch.tensor([7]), hidden_states=torch.tensor([[*hidden, 0]]).float()
    )
    request = SimpleNamespace(rid="c1.1", retracted_stain=stained)
    server_model.verify(SimpleNamespace(reqs=[request], seq_lens=torch.tensor([2]), spec_info=info), 2)
    assert len(noted) == notes and server_model.without_draft == ({"c1.1"} if stained else set())


def test_slots_of_tensors_are_numbers():
    tensors = [torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)]
    slots = TensorSlots(tensors, {})
    slots[1] = stamp(9, 4)
    assert slots[1] == stamp(9, 4) and slots[0] == 0
    assert all(tensor[1, 0, :2].tolist() == [9, 4] for tensor in tensors)
    slots[1] = 0
    assert slots[1] == 0 and slots.writers[1] == "a load from the host"


@pytest.mark.parametrize(
    ("key", "settings", "known"),
    [
        ("PD-2 D keeps KV", {"decode_tree": True, "host_backup": True},
         "retraction-pool-locks-the-tree"),
        ("PD-2 D keeps KV", {"decode_tree": True, "host_backup": True, "decode_hicache": True}, ""),
        ("PD-2 D keeps KV", {"host_backup": True}, ""),
        ("PD-1 D loses a prefix of its host tier", {"storage": 1}, "prefix-of-a-storage-is-lost"),
        ("PD-1 D loses a prefix of its host tier", {}, ""),
        ("PD-2 D keeps KV of a load that it does not send", {}, "failed-restore-keeps-its-load"),
        ("XFER-2 another pool", {"draft": 2, "window": 8}, "draft-as-deep-as-the-model"),
        ("XFER-2 another pool", {"draft": 2, "window": 8, "prefill_draft": True}, ""),
        ("PD-1 full page of P is replaced before it is sent", {"draft": 2, "prefill_draft": True},
         "sent-page-is-replaced"),
        ("PD-1 full page of P is replaced before it is sent", {"draft": 2}, ""),
        ("PD-1 full page of P is free", {"draft": 2, "prefill_draft": True}, ""),
        ("PD-4 P waits for a request that D gave up before it came", {}, "early-notice-is-dropped"),
    ],
)  # fmt: skip
def test_settings_decide_which_known_fault_a_note_shows(key, settings, known):
    config = Config(pair=True, **settings)
    assert deviations.fault_of_pair(RELEASE, key, config, (NetworkChoice("request"),)) == known
    reads = deviations.fault_of_pair_read(RELEASE, "", "full of D", config)
    assert reads == (known if known.startswith("draft") else "")


@pytest.mark.parametrize(
    ("policy", "evictable", "known"),
    [(2, 33, "evictable-above-a-backup"), (0, 33, ""), (2, 2, "")],
)
def test_a_prompt_that_finds_no_room_though_enough_is_evictable(policy, evictable, known):
    error = "D's scheduler: AssertionError: KV cache is full! Bug in memory estimation. available=14,"
    error += f" evictable={evictable}, protected=33, required_alloc=17, delta=17 at decode.py:2357"
    config = Config(pair=True, decode_hicache=True, storage=1, policy=policy)
    assert deviations.fault_of_end(RELEASE, error, config, Validated()) == known
