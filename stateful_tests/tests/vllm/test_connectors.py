"""The device that moves KV, the peer, and what is shown of them: without vLLM, on facts made by hand."""

import sys
from types import SimpleNamespace as Bag

import pytest

from impl.vllm.bare_connectors import DeviceJob, Loads, Offloads, Transfers, chunks_of
from impl.vllm.engine import Stamps
from impl.vllm.offload import host_facts, loads_wait_for_steps, stuck_chunks
from reference.blocks.config import LayerGroup
from reference.blocks.facts import HostFacts, HostKey, Transfer, chain

CONFIG = Bag(groups=(LayerGroup(2), LayerGroup(4)), chunk_blocks=2, storage=False)
NOTHING = (-1, ())
EMPTY = 0
OUTPUTS = "vllm.v1.outputs"


def lists(ids, sizes=(), firsts=()):
    """Return a list of blocks, with so many of each group from these places on; or one of chunks."""
    return Bag(block_ids=ids, **({"group_sizes": sizes, "block_indices": firsts} if sizes else {}))


@pytest.fixture
def device():
    return Transfers({5: (0, (11, 12)), 6: (0, (13, 14)), 7: (1, (1, 2, 3, 4))}, CONFIG, EMPTY)


@pytest.mark.parametrize("sizes, firsts, parts", [
    ((3, 0), (0, 0), [(0, 5, 1, 0), (0, 6, 1, 1), (0, 7, 2, 0)]),
    ((3, 0), (3, 0), [(0, 5, 1, 1), (0, 6, 2, 0), (0, 7, 2, 1)]),  # from the middle of a chunk on
    ((2, 1), (1, 4), [(0, 5, 1, 1), (0, 6, 2, 0), (1, 7, 3, 0)]),
    ((0, 3), (3, 0), [(1, 5, 1, 0), (1, 6, 1, 1), (1, 7, 2, 0)]),
])  # fmt: skip
def test_a_job_has_a_part_for_each_block(device, sizes, firsts, parts):
    assert device.parts(lists((5, 6, 7), sizes, firsts), lists((1, 2, 3))) == tuple(parts)


def test_a_load_brings_back_what_a_store_has_copied(device):
    blocks = lists((5, 7), (1, 1), (0, 1))
    assert device.submit_store(1, blocks, lists((2, 3)))
    assert device.transfer_async(
        2, (lists((2, 3)), blocks)
    )
    assert device.transfer_async(3, (lists((0,), (1, 0), (0, 0)), lists((4,))))
    device.host[2] = [(9, (9,)), (9, (9,))]
    device.blocks[0] = (0, (9, 9))  # the null block
    assert [job.job for job in device.queues[False]] == [1, 3] and [*device.jobs] == [1, 2, 3]
    assert device.copy(load=False)
    assert device.copy(load=False)
    assert not device.copy(load=False)
    assert device.host == {
        2: [(0, (11, 12)), NOTHING],
        3: [NOTHING, (1, (1, 2, 3, 4))],
        4: [NOTHING] * 2,
    }
    assert not device.completed
    device.blocks.clear()
    assert device.complete(load=True) and not device.complete(load=True)
    assert device.blocks == {5: (0, [11, 12]), 7: (1, [1, 2, 3, 4])}
    device.host[2] = [(0, (8, 8)), NOTHING]
    assert device.complete(load=False) and device.completed == [2, 1]
    assert device.host[2][0] == (0, (8, 8)), "copied once"


def test_a_load_of_unstored_blocks_leaves_them_empty(device):
    device.submit_load(1, lists((4, 5)), lists((6, 7), (1, 1), (0, 0)), expedited=True)
    device.wait({1})
    assert [device.blocks[at] for at in (6, 7)] == [(-1, [EMPTY] * 2), (-1, [EMPTY] * 4)]


def test_a_store_of_an_unwritten_block_copies_nothing(device):
    device.submit_store(1, lists((8,), (1, 0), (0, 0)), lists((1,)))
    assert device.complete(load=False) and device.host == {1: [NOTHING, NOTHING]}


def test_waiting_completes_earlier_jobs_too(device):
    for job in range(4):
        device.submit(DeviceJob(job, job == 3, ()))
    assert device.copy(load=False)
    assert device.complete(load=False)
    assert not device.jobs[1].copied
    device.wait({1, 7})
    assert device.completed == [0, 1]
    assert device.jobs[1].copied
    assert not device.jobs[2].copied


def test_finished_jobs_are_reported_once(device, monkeypatch):
    for module, values in {"base": {}, "worker.worker": {"TransferResult": Bag}}.items():
        monkeypatch.setitem(sys.modules, f"vllm.v1.kv_offload.{module}", Bag(**values))
    device.completed = [3]
    assert device.get_finished() == [Bag(job_id=3, success=True)] and device.get_finished() == []


@pytest.fixture
def offloads(device):
    worker = Bag(connector_worker=Bag(_unsubmitted_store_jobs=[]))
    of = Offloads.__new__(Offloads)
    of.transfers = device
    of.worker = worker
    return of


def server(**fields):
    """Return a scheduler and what its connector keeps."""
    manager = Bag(_policy=Bag(kept={}), _num_allocated_chunks=1, _free_list=[0])
    kept = {
        "manager": manager,
        "_jobs": {},
        "_req_status": {},
        "_block_id_to_pending_jobs": {},
        **fields,
    }
    return Bag(
        connector=Bag(connector_scheduler=Bag(**kept)),
        requests={"r1-0": 1},
        finished_req_ids={"r2-0"},
        finished_recving_kv_req_ids={"r1-0"},
        failed_recving_kv_req_ids={"r5-0"},
    )


def test_jobs_are_shown_until_their_end_is_taken(offloads):
    device = offloads.transfers
    blocks = lists((5,), (1, 0), (0, 0))
    for job in (1, 2, 3, 4):
        device.submit_store(job, blocks, lists((job,)))
    for _ in (1, 2, 3):
        device.complete(load=False)
    device.completed.remove(1)
    device.completed.remove(3)
    unsubmitted = [(7, blocks, lists((6,))), (8, (blocks, lists((0,))))]
    offloads.worker.connector_worker._unsubmitted_store_jobs = unsubmitted
    scheduler = server(_jobs={3: Bag(req_id="r1-0"), 7: Bag(req_id="r1-0")})
    facts = host_facts(offloads, scheduler, CONFIG, Stamps())

    def job(number, chunk, *flags):
        return Transfer(number, False, ((0, 5, chunk, 0),), *flags)

    assert facts.transfers == (
        job(7, 6),
        job(8, 0, False, False, False, True),
        job(2, 2, True, True, True, True),
        job(3, 3, True, True, True),
        job(4, 4, True, False, False, True),
    )
    assert facts.chunks == 7
    assert facts.free == (0, 1, 2, 3, 4, 5, 6)
    assert [*device.jobs] == [2, 3, 4]
    assert facts.memory[3] == ((0, (11, 12)), NOTHING) and facts.memory[5] == (NOTHING, NOTHING)


def test_hashes_and_leftover_records_are_shown(offloads):
    stamps = Stamps()
    group = (1).to_bytes(4, "big")
    hashed = stamps((bytes(16), tuple(range(9)), None))
    chunk = Bag(chunk_id=2, ref_cnt=1)
    other = Bag(block_id=0, ref_cnt=-1)
    key = hashed + b"more" + group
    ghosts = {b"gone": None}
    policy = Bag(
        t1={key: Bag(chunk=chunk)}, ghosts=ghosts, sizes=[3], t2={hashed + bytes(4): other}
    )
    status = {"r1-0": 1, "r2-0": 1, "r3-0": 1, "r4-0": 1}
    pending = {5: {9}, 6: {1}, 7: {1, 9}}
    scheduler = server(
        _jobs={1: Bag(req_id="r3-0")}, _req_status=status, _block_id_to_pending_jobs=pending
    )
    manager = scheduler.connector.connector_scheduler.manager
    manager._policy = policy
    del manager._num_allocated_chunks
    manager._num_allocated_blocks = 3
    facts = host_facts(offloads, scheduler, CONFIG, stamps)
    last = chain(chain_of(8), 8)
    assert facts.keys == (
        HostKey(chunk=0, group=0, stamps=(last,), pins=-1),
        HostKey(chunk=2, group=1, stamps=(last,), pins=1),
    )
    assert facts.records == ("failed_recving of request r5", "request r4", "block 5")
    assert facts.chunks == 3 and facts.free == (0,)
    assert chunks_of(manager) == [(key, 2, 1), (hashed + bytes(4), 0, -1)]


def chain_of(count):
    """Return the stamp of the last of `count` tokens."""
    stamp = 0
    for token in range(count):
        stamp = chain(stamp, token)
    return stamp


@pytest.mark.parametrize("sync", [None, False, True])
def test_a_worker_loads_before_and_stores_after_a_batch(offloads, monkeypatch, sync):
    monkeypatch.setitem(sys.modules, OUTPUTS, Bag(KVConnectorOutput=Bag))
    did = []
    batch = Bag(kv_connector_metadata="meta", finished_req_ids={"r1"})
    if sync is not None:  # releases up to 0.29 have no such loads
        batch.has_sync_kv_loads = sync
    names = ("handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_save")
    for name in (*names, "clear_connector_metadata"):
        setattr(offloads.worker, name, lambda *given, name=name: did.append((name, *given)))
    offloads.worker.get_finished = lambda ids: (ids, set()) if sync else (set(), ids)
    offloads.worker.build_connector_worker_meta = lambda: "told"
    offloads.before(batch)
    begins = ("start_load_kv", None)
    first = [
        ("handle_preemptions", "meta"),
        ("bind_connector_metadata", "meta"),
        *[begins] * bool(sync),
    ]
    assert did == first
    output = offloads.after(batch)
    assert did[len(first) :] == [
        *[begins] * (not sync),
        ("wait_for_save",),
        ("clear_connector_metadata",),
    ]
    assert (output.finished_sending, output.finished_recving) == (
        ({"r1"}, None) if sync else (None, {"r1"})
    )
    assert output.kv_connector_worker_meta == "told"


@pytest.fixture
def loads(device, monkeypatch):
    monkeypatch.setitem(
        sys.modules, OUTPUTS, Bag(KVConnectorOutput=lambda: Bag(failed_recving=None))
    )
    peer = Bag(remote={}, started_loads=[], in_step=False)

    def written(request):
        return [100 + token for token in request._all_token_ids]

    return Loads(Bag(connector=peer), device, CONFIG, written)


def facts_shown(loads):
    gone = Bag(requests={}, finished_recving_kv_req_ids={"r3-0"}, failed_recving_kv_req_ids=set())
    return host_facts(loads, gone, CONFIG, None)


REQUEST = Bag(request_id="r1", _all_token_ids=list(range(8)))


def test_a_load_from_the_peer(loads):
    device = loads.transfers
    peer = loads._peer
    loads.expects("r1", 7)
    assert peer.remote == {"r1": 7}
    peer.started_loads = [(REQUEST, ([1, 2, 3, 4], [5, 0]), 2, 7)]
    loads.before(None)
    assert not peer.started_loads and device.jobs[0].load
    assert device.jobs[0].parts == ((0, 2, 0, 0), (0, 3, 1, 0), (0, 4, 2, 0), (1, 5, 3, 0))
    assert device.host[2] == [(0, (106, EMPTY))] and device.host[3] == [(1, (100, 101, 102, 103))]
    device.copy(load=True)
    shown = facts_shown(loads)
    job = Transfer(0, load=True, parts=device.jobs[0].parts, submitted=True, copied=True)
    held = tuple(tuple(c) for c in device.host.values())
    gone = ("finished_recving of request r3",)
    assert shown == HostFacts(0, (), held, (), (job,), gone)
    device.complete(load=True)
    assert facts_shown(loads).transfers == (job._replace(completed=True),)
    output = loads.after(None)
    assert (output.finished_recving, output.invalid_block_ids, output.failed_recving) == (
        {"r1"},
        set(),
        None,
    )
    assert loads.after(None).finished_recving is None and not facts_shown(loads).transfers


@pytest.mark.parametrize("groups, blocks, names, reported", [
    (2, 1, True, (set(), {"r1"})), (2, 3, True, (set(), None)), (2, 1, False, None),
    (1, 1, False, ({2}, None)), (1, 2, False, (set(), None)),
])  # fmt: skip
def test_a_load_that_fails(loads, groups, blocks, names, reported):
    loads._config = Bag(groups=CONFIG.groups[:groups])
    loads._output = lambda: Bag(failed_recving=None) if names else Bag()
    assert not loads.fail(0), "there is none"
    loads._peer.started_loads = [(REQUEST, ([1, 2], [3]), 0, 5)]  # more than the tables have
    loads.before(None)
    assert loads.fail(blocks) == (reported is not None)
    if reported is not None:
        output = loads.after(None)
        assert (output.invalid_block_ids, getattr(output, "failed_recving", None)) == reported
        assert output.finished_recving == {"r1"} and loads.after(None).invalid_block_ids == set()
        assert len(loads.transfers.jobs[0].parts) == blocks


class Policy:
    """Evicts the oldest idle chunk; an idle chunk that is not in its order it never finds."""

    def __init__(self, pins, order):
        self.chunks = {bytes([at]): Bag(chunk_id=at, ref_cnt=count) for at, count in pins.items()}
        self.order = order

    def evict(self, _, protected):
        assert not protected
        at = next((at for at in self.order if not self.chunks[bytes([at])].ref_cnt), None)
        if at is None:
            return None
        self.order.remove(at)
        return [(bytes([at]), self.chunks.pop(bytes([at])))]


@pytest.mark.parametrize(
    ("pins", "order", "stuck"),
    [({}, [], []), ({0: 0, 1: 2, 2: -1}, [0, 1, 2], []), ({0: 0, 1: 0, 2: 0}, [1], [0, 2])],
)
def test_idle_chunks_outside_of_the_policys_order_are_stuck(pins, order, stuck):
    manager = Bag(_policy=Policy(pins, order))
    assert stuck_chunks(manager) == stuck
    assert len(manager._policy.chunks) == len(pins), "a copy is asked"


def entry(start, end, *blocks):
    return Bag(start=start, tokens=(0,) * (end - start), tables=(blocks, ()))


def test_a_load_within_a_step_that_fails(device, monkeypatch):
    monkeypatch.setitem(sys.modules, OUTPUTS, Bag(KVConnectorOutput=Bag))
    peer = Bag(remote={}, started_loads=[], in_step=True)
    loads = Loads(Bag(connector=peer), device, CONFIG, lambda _: [101, 102, 103, 104])
    assert loads.fail(1)
    peer.started_loads.append((REQUEST, ([3, 4], []), 0, 4))
    loads.before(None)
    assert device.blocks[3] == (0, [101, 102]) and device.blocks[4] == (0, [EMPTY, EMPTY])
    assert loads.after(None).invalid_block_ids == {4} and loads.blocks_lost == (4,)
    device.blocks[5] = (0, [105, 106])
    loads.spoil([entry(4, 6, 3, 4, 5), entry(2, 4, 3, 6)])
    assert loads.blocks_lost == (4, 5) and device.blocks[5] == (0, [EMPTY, EMPTY])

    # The next step reads lost blocks as well, and computes one of them anew in its own table.
    loads.spoil([entry(6, 7, 3, 4, 5, 7), entry(0, 2, 5)])
    assert loads.blocks_lost == (4, 7), "whoever computes a block from its first slot on has it whole"
    loads.results_taken()
    assert loads.blocks_lost == (), "what was computed from lost blocks is known with them"
    peer.started_loads.append((REQUEST, ([8, 9], []), 0, 4))
    loads.before(None)
    assert loads.blocks_lost == () and device.blocks[9] == (0, [103, 104]), "one load fails, not all"


@pytest.mark.parametrize(
    ("source", "waits"),
    [
        ("stream.wait_stream(compute)", True),
        ("if self.gpu_to_cpu:\n            # of the step\n            stream.wait_stream(compute)", False),
        ("stream.wait_event(last)", False),
        (None, False),
    ],
)
def test_loads_wait_for_steps_where_the_worker_has_them_wait_as_stores_do(source, waits, tmp_path):
    worker = tmp_path / "vllm/v1/kv_offload/cpu/gpu_worker.py"
    if source is not None:
        worker.parent.mkdir(parents=True)
        worker.write_text(source)
    assert loads_wait_for_steps(tmp_path) == waits
