"""The device that moves KV between blocks and host memory or a peer, and the worker's side of a connector.

The caller decides when a job reads, writes and completes. Jobs of one direction run in order, as on a stream.
Exported tests contain this file unchanged, after bare_scheduler.py, so it imports nothing else.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from impl.loading.optional import first_attribute, optional
from impl.stand_ins import accepted_arguments

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"


class DeviceJob:
    """A submitted transfer.

    parts: (group, block, chunk, index in the chunk) of each block.
    """

    def __init__(self, job: int, load: bool, parts: tuple[Any, ...]) -> None:
        self.job = job
        self.load = load
        self.parts = parts
        self.copied = False


class Transfers:
    """The device that moves KV (`OffloadingWorker`).

    blocks: the memory of the runner, by block: the group that wrote it last, and its slots.
    host: chunk -> the same for each of its blocks.
    empty: the value of a slot without KV.
    queues: jobs that have not completed, by direction (True: loads).
    completed: completed jobs that the connector has not read.
    jobs: all submitted jobs.
    """

    def __init__(self, blocks: dict[int, Any], config: Any, empty: Any) -> None:
        self.blocks = blocks
        self._config = config
        self.empty = empty
        self.host: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
        self.queues: dict[bool, deque[DeviceJob]] = {False: deque(), True: deque()}
        self.completed: list[int] = []
        self.jobs: dict[int, DeviceJob] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self.submit(DeviceJob(job_id, load=False, parts=self.parts(src_spec, dst_spec)))

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        del expedited  # it is waited for
        return self.submit(DeviceJob(job_id, load=True, parts=self.parts(dst_spec, src_spec)))

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Submit a job, as releases up to 0.27 do."""
        source, target = spec
        of_blocks = optional(source, "GPULoadStoreSpec.group_sizes", None) is not None
        submit = self.submit_store if of_blocks else self.submit_load
        return submit(job_id, source, target)

    def wait(self, job_ids: set[int]) -> None:
        for load, queue in self.queues.items():
            while any(job.job in job_ids for job in queue):
                self.complete(load=load)

    def get_finished(self) -> list[Any]:
        names = ("vllm.v1.kv_offload.base", "vllm.v1.kv_offload.worker.worker")
        modules = map(importlib.import_module, names)
        kinds = [optional(module, "TransferResult", None) for module in modules]
        kind = next(filter(None, kinds))
        done = self.completed
        self.completed = []
        return [kind(job_id=job, success=True) for job in done]

    def shutdown(self) -> None:
        """Do nothing: there are no streams."""

    def submit(self, job: DeviceJob) -> bool:
        self.jobs[job.job] = job
        self.queues[job.load].append(job)
        return True

    def parts(self, blocks: Any, host: Any) -> tuple[Any, ...]:
        """Return the parts of a job. The two lists of blocks are read as in cpu/gpu_worker.py."""
        size = self._config.chunk_blocks
        parts = []
        ids = iter(map(int, blocks.block_ids))
        chunks = [int(chunk) for chunk in host.block_ids]
        first_chunk = 0  # of the group, in the list of chunks
        for group, (count, first_block) in enumerate(zip(blocks.group_sizes, blocks.block_indices)):
            skipped = first_block % size if count else 0
            for index in range(skipped, skipped + count):
                parts.append((group, next(ids), chunks[first_chunk + index // size], index % size))
            first_chunk += -(-(skipped + count) // size)
        return tuple(parts)

    def copy(self, *, load: bool) -> bool:
        """Move the KV of the oldest job that has not moved it. Return False if there is none."""
        job = next((job for job in self.queues[load] if not job.copied), None)
        if job is None:
            return False
        job.copied = True
        nothing = [(-1, ())] * self._config.chunk_blocks
        if not load:  # a store replaces the whole chunk
            self.host.update((chunk, [*nothing]) for _, _, chunk, _ in job.parts)
        for group, block, chunk, index in job.parts:
            held = self.host.setdefault(chunk, [*nothing])
            if load:
                owner, slots = held[index]
                self.blocks[block] = (
                    owner,
                    [*slots] or [self.empty] * self._config.groups[group].block_size,
                )
            else:
                owner, values = self.blocks.get(block, (-1, ()))
                held[index] = (owner, tuple(values)) if block else (-1, ())
        return True

    def complete(self, *, load: bool) -> bool:
        """Complete the oldest job of a direction. Return False if there is none."""
        queue = self.queues[load]
        if not queue:
            return False
        if not queue[0].copied:
            self.copy(load=load)
        self.completed.append(queue.popleft().job)
        return True


class Offloads:
    """The worker's side of the release's own OffloadingConnector, with the stand-in device below it."""

    def __init__(self, scheduler: Any, transfers: Transfers) -> None:
        self.transfers = transfers
        kind = type(scheduler.connector)
        role = importlib.import_module(f"{CONNECTORS}.v1.base").KVConnectorRole.WORKER
        arguments = {
            "vllm_config": scheduler.vllm_config,
            "role": role,
            "kv_cache_config": scheduler.kv_cache_config,
        }
        self.worker = kind(**accepted_arguments(kind.__init__, arguments))
        self.attach()

    def attach(self) -> None:
        """Replace the device of the worker's side."""
        self.worker.connector_worker.worker = self.transfers

    def before(self, scheduled: Any) -> None:
        """Call the connector as the worker does before the forward pass of a batch."""
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        self.worker.bind_connector_metadata(scheduled.kv_connector_metadata)
        if optional(scheduled, "SchedulerOutput.has_sync_kv_loads", False):
            self.worker.start_load_kv(None)

    def after(self, scheduled: Any) -> Any:
        """Call the connector as the worker does after the forward pass, and return its KVConnectorOutput."""
        if not optional(scheduled, "SchedulerOutput.has_sync_kv_loads", False):
            self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        sending, recving = self.worker.get_finished(scheduled.finished_req_ids)
        output = importlib.import_module("vllm.v1.outputs").KVConnectorOutput()
        output.finished_sending = sending or None
        output.finished_recving = recving or None
        output.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        return output


def peer(**given: Any) -> Any:
    """Return a connector of ours that loads computed prompts from a peer. The request says how many tokens
    the peer has."""
    base: Any = importlib.import_module(f"{CONNECTORS}.v1.base")

    class Peer(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
        """A connector that loads from a peer.

        remote: request -> tokens that the peer will send.
        started_loads: the loads of this step.
        in_step: a load completes within the step that needs it.
        """

        def __init__(self) -> None:
            super().__init__(**accepted_arguments(super().__init__, given))
            self.remote: dict[str, int] = {}
            self.started_loads: list[tuple[Any, tuple[list[int], ...], int, int]] = []
            specs = [group.kv_cache_spec for group in given["kv_cache_config"].kv_cache_groups]
            windows = any(
                optional(spec, "SlidingWindowSpec.sliding_window", None) for spec in specs
            )
            extra = given["vllm_config"].kv_transfer_config.kv_connector_extra_config
            self.in_step = bool(extra["sync_load_budget_bytes"])
            self.computed_here = int(windows or self.in_step)

        def get_num_new_matched_tokens(
            self, request: Any, computed: int, *_: Any
        ) -> tuple[int, bool]:
            # The last token is computed again; behind a window its query still needs all that it sees.
            most = min(
                self.remote.get(request.request_id, 0),
                request.num_prompt_tokens - self.computed_here,
            )
            return max(0, most - computed), most > computed and not self.in_step

        def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
            if tokens:
                most = min(
                    self.remote.pop(request.request_id),
                    request.num_prompt_tokens - self.computed_here,
                )
                self.started_loads.append((request, blocks.get_block_ids(), most - tokens, most))

        def build_connector_meta(self, _: Any) -> Any:
            return base.KVConnectorMetadata()

        def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
            return False, None

        def request_finished(self, *_: Any) -> tuple[bool, None]:
            return False, None

        def start_load_kv(self, *_: Any, **__: Any) -> None:
            """Do nothing: `Loads` moves the KV."""

        wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv

    return Peer()


class Loads:
    """Loads of KV from the peer, and the worker's reports of them.

    written: returns the slots of a request with a computed text.
    failed: requests with a failed load that the worker has not yet reported.
    """

    def __init__(
        self, scheduler: Any, transfers: Transfers, config: Any, written: Callable[[Any], Any]
    ) -> None:
        self.transfers = transfers
        self._peer = scheduler.connector
        self._config = config
        self._written = written
        self._requests: dict[int, str] = {}  # job -> the request that it loads
        self._output = importlib.import_module("vllm.v1.outputs").KVConnectorOutput
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self.failed: set[str] = set()
        self._in_step = scheduler.connector.in_step
        self._next_brings: int | None = None  # blocks that the next load within a step loads, if it fails
        # block without its KV -> the step with the results that report it to the engine
        self._lost_blocks: dict[int, int] = {}
        self._steps = self._steps_taken = 0

    def expects(self, name: str, tokens: int) -> None:
        """Note how many tokens of a request's prompt the peer has."""
        self._peer.remote[name] = tokens

    def before(self, _: Any) -> None:
        """Start the loads of a batch."""
        for load in self._peer.started_loads:
            self._begin(*load)
            if self._in_step:
                self._load_now()
        self._peer.started_loads.clear()

    def after(self, _: Any) -> Any:
        """Return the report of the loads that have ended."""
        output = self._output()
        done = self.transfers.completed
        self.transfers.completed = []
        output.finished_recving = {self._requests[job] for job in done} or None
        output.invalid_block_ids = self._invalid
        self._invalid = set()
        self.failed = set()
        if self._failed:
            output.failed_recving = self._failed
            self._failed = set()
        return output

    def _begin(self, request: Any, tables: tuple[list[int], ...], local: int, tokens: int) -> None:
        """Start the load of the positions from `local` up to `tokens`."""
        values = self._written(request)
        job = len(self._requests)
        parts = []
        host = self.transfers.host
        for group, (layers, table) in enumerate(zip(self._config.groups, tables)):
            size = layers.block_size
            for index in range(local // size, -(-tokens // size)):
                if index < len(table) and table[index]:
                    slots = values[index * size : min(tokens, (index + 1) * size)]
                    parts.append((group, table[index], len(host), 0))
                    host[len(host)] = [
                        (group, (*slots, *[self.transfers.empty] * (size - len(slots))))
                    ]
        self._requests[job] = request.request_id
        self.transfers.submit(DeviceJob(job, load=True, parts=tuple(parts)))

    @property
    def blocks_lost(self) -> tuple[int, ...]:
        """The blocks without their KV, until the engine takes the results that report them."""
        return tuple(sorted(self._lost_blocks))

    def _load_now(self) -> None:
        """Complete the load that has just started."""
        (job,) = self.transfers.queues[True]
        brought = len(job.parts) if self._next_brings is None else self._next_brings
        self._next_brings = None
        lost = [block for _, block, _, _ in job.parts[brought:]]
        job.parts = job.parts[:brought]
        self.transfers.complete(load=True)
        self.transfers.completed.clear()  # a load within a step is not reported
        self._invalid.update(lost)
        for block in lost:
            self._lose(block, 0, self._steps)

    def _lose(self, block: int, first_slot: int, step: int) -> None:
        """Clear the slots of a block from slot `first_slot` on.

        step: the step that reports it.
        """
        size = self._config.groups[0].block_size
        owner, slots = self.transfers.blocks.get(block, (-1, ()))
        kept = slots[:first_slot] if owner == 0 else [self.transfers.empty] * first_slot
        self.transfers.blocks[block] = (0, [*kept, *[self.transfers.empty] * (size - first_slot)])
        self._lost_blocks[block] = step

    def spoil(self, lanes: Sequence[Any]) -> None:
        """Mark as lost the KV that entries compute from lost blocks. A block that an entry computes from its
        first slot on is whole again, unless the entry reads lost blocks.

        lanes: have start, tokens and tables.
        """
        size = self._config.groups[0].block_size
        sound = list(lanes) if self._lost_blocks else []
        for lane in sound:
            for block in lane.tables[0][-(-lane.start // size) : self._end(lane)]:
                self._lost_blocks.pop(block, None)
        while spoiled := [lane for lane in sound if self._reads_lost(lane) is not None]:
            lane = spoiled[0]
            step = self._reads_lost(lane) or 0
            sound.remove(lane)
            first_block = lane.start // size
            for index, block in enumerate(lane.tables[0][first_block : self._end(lane)], first_block):
                self._lose(block, max(0, lane.start - index * size), step)
        if lanes:
            self._steps += 1

    def _end(self, lane: Any) -> int:
        """Return the number of blocks up to an entry's last token."""
        size: int = self._config.groups[0].block_size
        return -(-(int(lane.start) + len(lane.tokens)) // size)

    def _reads_lost(self, lane: Any) -> int | None:
        """Return the first step that lost one of the blocks before an entry, None if none is lost."""
        row = lane.tables[0][: -(-lane.start // self._config.groups[0].block_size)]
        return min((self._lost_blocks[block] for block in row if block in self._lost_blocks), default=None)

    def results_taken(self) -> None:
        """Forget the lost blocks that the oldest batch reports: the engine has taken its results."""
        self._lost_blocks = {
            block: step for block, step in self._lost_blocks.items() if step > self._steps_taken
        }
        self._steps_taken += 1

    def fail(self, blocks: int) -> bool:
        """Fail the oldest load after its first `blocks` blocks, or the next load if loads are done within a
        step. Return False if there is no load, or if the release cannot report it: with several groups
        the report names the request, which is possible since 0.30."""
        if self._in_step:
            self._next_brings = blocks
            return True
        is_hybrid = len(self._config.groups) > 1
        queue = self.transfers.queues[True]
        if not queue or (
            is_hybrid and optional(self._output(), "KVConnectorOutput.failed_recving", False) is False
        ):
            return False
        job = queue[0]
        lost = {part[1] for part in job.parts[blocks:]}
        job.parts = job.parts[:blocks]
        if lost:
            self.failed.add(self._requests[job.job])
        if is_hybrid and lost:
            self._failed.add(self._requests[job.job])
        elif lost:
            self._invalid |= lost
        return self.transfers.complete(load=True)


def connector_class(name: str) -> Any:
    """Return the release's connector of that name."""
    module = "simple_cpu_offload_connector" if name.startswith("Simple") else "offloading_connector"
    return getattr(importlib.import_module(f"{CONNECTORS}.v1.{module}"), name)


def create_connector(config: Any, role: Any, kv_cache_config: Any = None) -> Any:
    """Return a connector, in the place of `KVConnectorFactory.create_connector`."""
    arguments = {"vllm_config": config, "role": role, "kv_cache_config": kv_cache_config}
    name = config.kv_transfer_config.kv_connector
    if name == "Peer":
        return peer(**arguments)
    kind = connector_class(name)
    return kind(**accepted_arguments(kind.__init__, arguments))


def worker_of(
    scheduler: Any,
    blocks: dict[int, Any],
    config: Any,
    empty: Any,
    written: Callable[[Any], Any],
) -> Any:
    """Return the worker's side of the connector, None without a connector. The arguments are those of
    Transfers and Loads."""
    transfers = Transfers(blocks, config, empty)
    if config.host_chunks:
        return Offloads(scheduler, transfers)
    if config.peer:
        return Loads(scheduler, transfers, config, written)
    return None


def chunks_of(manager: Any) -> list[tuple[bytes, int, int]]:
    """Return the (hash and group, chunk, pins) of each chunk in the lists of a CPU manager's policy."""
    chunks = []
    for policy_table in [value for value in vars(manager._policy).values() if isinstance(value, dict)]:
        for key, of_key in policy_table.items():
            chunk: Any = getattr(of_key, "chunk", of_key)
            if optional(chunk, "ChunkStatus.ref_cnt", None) is not None:
                chunks.append(
                    (
                        key,
                        first_attribute(chunk, "ChunkStatus.chunk_id", "BlockStatus.block_id"),
                        chunk.ref_cnt,
                    )
                )
    return chunks
