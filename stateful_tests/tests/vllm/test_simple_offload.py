"""Host memory as a pool of blocks: its device, its records by hand, and what a release resets."""

import sys
from types import SimpleNamespace as Bag

import pytest

from impl.vllm.engine import Stamps
from impl.vllm.simple_offload import CopyingThread, PoolOffloads, pool_facts
from reference.blocks.commands import NewWeights, ResetConnector
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.presets import engine_preset
from reference.commands import Done, Mode, Reason, Refused
from reference.geometry import GeometryError
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace

CONFIG = EngineConfig(
    (LayerGroup(2),), blocks=4, max_model_len=6, max_batched_tokens=6, host_chunks=3, simple=True
)
STAMPS = Stamps()
HASH = STAMPS((None, (7, 8), None))
KEY = HASH + bytes(4)
WRITTEN = tuple(STAMPS.of_block(HASH, 2))


class Queue(list):
    get_all_free_blocks = list.copy


def block(number, refs=0, key=None):
    return Bag(block_id=number, ref_cnt=refs, block_hash=key, is_null=not number)


def pool(*blocks, free=()):
    """Return a pool of these blocks behind its null block.

    free: numbers in its queue.
    """
    every = [block(0), *blocks]
    found = {block.block_hash: block for block in blocks if block.block_hash}
    queue = Queue(every[number] for number in free)
    return Bag(blocks=every, cached_block_hash_to_block=Bag(_cache=found), free_block_queue=queue)


@pytest.fixture
def utils(monkeypatch):
    functions = Bag(get_group_id=lambda key: int.from_bytes(key[-4:]), get_block_hash=lambda key: key[:-4])
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_utils", functions)


@pytest.fixture
def manager():
    return Bag(
        cpu_block_pool=pool(block(1), block(2), block(3), free=(1, 2, 3)),
        _gpu_block_pool=pool(block(1, 1, KEY), block(2)),
        _reqs_to_load={}, _load_event_to_reqs={}, _reqs_to_store={}, _store_event_to_reqs={},
        _store_event_to_blocks={}, _pending_cpu_hits={}, _in_flight_store_gpu_blocks=set(),
    )  # fmt: skip


@pytest.fixture
def offloads(manager, utils):
    of = PoolOffloads.__new__(PoolOffloads)
    scheduler = Bag(connector=Bag(scheduler_manager=manager), requests={"r1-0": 1}, finished_req_ids={"r2-0"})
    of.transfers = CopyingThread(scheduler, {1: (0, WRITTEN)}, CONFIG)
    worker = Bag(
        _pending_load_event_indices=set(), _pending_store_event_indices={0}, _completed_store_events={}
    )
    of.worker = Bag(worker_handler=worker)
    of.numbers = {}
    of._unused = iter(range(9))
    of.scheduler = scheduler
    return of


def facts_of(offloads, at_rest=True):
    return pool_facts(offloads, offloads.scheduler, CONFIG, STAMPS, at_rest)


def stores(manager, *moves):
    """Have a store in flight with these (block, block of the host)."""
    blocks, chunks = map(list, zip(*moves))
    manager._store_event_to_blocks[0] = Bag(gpu_block_ids=blocks, cpu_block_ids=chunks)
    for chunk in chunks:
        manager.cpu_block_pool.blocks[chunk].ref_cnt = 1
    manager.cpu_block_pool.free_block_queue[:] = manager.cpu_block_pool.blocks[1 + len(chunks) :]


def test_a_worker_hears_of_a_copy_once_it_is_made(offloads, manager):
    stores(manager, (1, 1))
    thread = offloads.transfers
    events = []
    thread.launch_copy([1], [1], is_store=True, event_idx=0, events_list=events)
    assert not events and not thread.copy(load=True)
    assert thread.copy(load=False) and not thread.copy(load=False)
    [(number, event)] = events
    assert number == 0
    assert not event.query()
    assert thread.host[0] == [(0, WRITTEN)]
    assert facts_of(offloads).transfers[0][2:6] == (((0, 1, 0, 0),), True, True, False)
    event.synchronize()
    assert event.query()
    assert not thread.complete(load=False)
    assert thread.completed == []
    assert facts_of(offloads).transfers[0].completed


def test_a_store_writes_under_the_hash_that_it_will_have(offloads, manager):
    stores(manager, (1, 1))
    offloads.transfers.launch_copy([1], [1], is_store=True, event_idx=0, events_list=[])
    facts = facts_of(offloads)
    assert facts.keys == ((0, 0, WRITTEN, -1),)
    assert facts.free == (1, 2)
    assert facts.records == ()


def test_a_store_of_which_nobody_knows_goes_on_without_a_hash(offloads, manager):
    stores(manager, (1, 1))
    offloads.transfers.launch_copy([1], [1], is_store=True, event_idx=0, events_list=[])
    manager._store_event_to_blocks.clear()
    facts = facts_of(offloads)
    assert facts.transfers[0].stale and facts.keys == ()
    manager._abandoned_store_event_to_blocks = {0: Bag(gpu_block_ids=[1], cpu_block_ids=[1])}
    assert facts_of(offloads).transfers[0].stale


def test_a_waiting_hit_pins_and_is_no_load(offloads, manager):
    manager.cpu_block_pool = pool(block(1, 1, KEY), block(2), block(3), free=(2, 3))
    assert facts_of(offloads).keys[0].pins == 1
    manager._pending_cpu_hits["r1-0"] = ((manager.cpu_block_pool.blocks[:2],), 2)
    facts = facts_of(offloads)
    assert facts.keys[0].pins == 0 and facts.records == ()


def test_a_block_with_a_pin_is_not_free_twice(offloads, manager):
    manager.cpu_block_pool = pool(block(1, 0, KEY), block(2), block(3), free=(1, 2, 3))
    assert facts_of(offloads).free == (1, 2)
    manager.cpu_block_pool.blocks[1].ref_cnt = 1
    assert facts_of(offloads).free == (0, 1, 2)


@pytest.mark.parametrize("kept, record", [
    ({"_pending_cpu_hits": {"r3-0": ((), 2)}}, "a hit of request r3"),
    ({"_reqs_to_store": {"r3-0": Bag(store_events=set())}}, "request r3"),
    ({"_reqs_to_store": {"r2-0": Bag(store_events=set()), "r3-0": Bag(store_events={0})}}, None),
    ({"_store_event_to_reqs": {4: ["r1-0"]}}, "store 4"),
    ({"_load_event_to_reqs": {4: ["r1-0"]}}, "load 4 of r1"),
    ({"_in_flight_store_gpu_blocks": {2}}, "block 2, which no store reads"),
    ({"cpu_block_pool": pool(block(1), block(2), block(3), free=(1, 2))}, "chunk 2, which no eviction takes"),
    ({"_store_event_to_blocks": {3: Bag(gpu_block_ids=[1], cpu_block_ids=[1])}}, "store 3, which has ended"),
])  # fmt: skip
def test_records_of_ended_requests_are_shown(offloads, manager, kept, record):
    vars(manager).update(kept)
    assert facts_of(offloads).records == ((record,) if record else ())
    if record == "store 3, which has ended":
        assert facts_of(offloads, at_rest=False).records == ()
        offloads.worker.worker_handler._completed_store_events = {3: 1}
        assert facts_of(offloads).records == ()


@pytest.mark.parametrize("changes, field", [
    ({"host_chunks": 0}, "simple"),
    ({"chunk_blocks": 2}, "chunk_blocks"),
    ({"arc": True}, "arc"),
    ({"storage": True}, "storage"),
    ({"groups": (LayerGroup(2, 3),)}, "simple"),
    ({"simple": False, "lazy": True}, "lazy"),
])  # fmt: skip
def test_impossible_sizes_of_host_memory_are_refused(changes, field):
    sizes = {"groups": (LayerGroup(2),), "blocks": 8, "max_model_len": 8, "max_batched_tokens": 8}
    with pytest.raises(GeometryError, match=f"^{field}: "):
        EngineConfig(**(sizes | {"host_chunks": 2, "simple": True} | changes))


@pytest.mark.parametrize("release, outcomes", [
    ("0.22.0", [Refused(Reason.UNFAITHFUL), Done()]),
    ("0.23.0", [Refused(Reason.UNFAITHFUL)] * 2),
    ("0.24.0", [Done()] * 2),
])  # fmt: skip
def test_a_reset_that_raises_is_refused(vllm, release, outcomes):
    trace = Trace(engine_preset("simple"), Mode.FAITHFUL, (ResetConnector(), NewWeights()))
    assert [row.outcome for row in replay(vllm(f"{release}+offload"), trace).rows] == outcomes
