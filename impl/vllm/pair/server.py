"""One server of a pair: a release's scheduler and cache manager, and both sides of its NixlConnector."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from impl.loading.optional import optional
from impl.stand_ins import accepted_arguments
from impl.vllm.bare_connectors import Offloads, Transfers
from impl.vllm.drafter import Drafter
from impl.vllm.driver import EngineDriver
from impl.vllm.engine import start
from impl.vllm.offload import host_facts, offloading_scheduler
from impl.vllm.pair import V1
from impl.vllm.pair.both_connectors import attach_host, nixl_of
from impl.vllm.pair.loading import Factory, Layout, socket_path, add_pair_settings
from impl.vllm.pair.memory import TensorMemory
from impl.vllm.pair.network import NETWORK, Agent, Handshakes
from impl.vllm.pair.states import PairStateMemory, PairStateRunner, lay_out_states, page_tokens
from impl.vllm.runner import ModelRunner
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts, HostFacts
from reference.commands import Done, Outcome, Reason, Refused
from reference.pairs.config import PREFILL

WAITS = "WAITING_FOR_REMOTE_KVS"


class NixlWorker:
    """The worker's side of the release's own connector, called in the order of its model runner.

    worker: the worker's side of the NixlConnector. host: the OffloadingConnector, None without host memory.
    transfers: the device between blocks and host memory; it has no transfers without.
    failed: ids of the requests with a failed load in the last batch: reported by name, or waiting
        for an invalid block.
    """

    def __init__(self, scheduler: Any, memory: TensorMemory, config: EngineConfig) -> None:
        role = importlib.import_module(f"{V1}.base").KVConnectorRole.WORKER
        kind = type(scheduler.connector)
        given = {
            "vllm_config": scheduler.vllm_config, "role": role, "kv_cache_config": scheduler.kv_cache_config,
        }  # fmt: skip
        self.connector = kind(**accepted_arguments(kind.__init__, given))
        blocks: Any = memory
        self.transfers = Transfers(blocks, config, 0)
        self.host = attach_host(self.connector, self.transfers)
        self.worker = nixl_of(self.connector).connector_worker
        if Factory.push:
            self.worker._push_writer_thread = NoThread()
            self.worker._push_writer_stop = self.worker._push_writer_wake = LoopPasses()
        caches = memory.caches(len(config.groups), Layout.tokens_first, Layout.kernel_blocks)
        self.connector.register_kv_caches(caches)
        self.agent: Agent = self.worker.nixl_wrapper
        self.handshakes: Handshakes = self.worker._handshake_initiation_executor
        self.failed: frozenset[str] = frozenset()
        self._scheduler = scheduler
        self._output = importlib.import_module("vllm.v1.outputs").KVConnectorOutput
        self._answer_handshakes(scheduler.connector)

    def _answer_handshakes(self, connector: Any) -> None:
        """Give the handshake metadata to the scheduler's side, and answer handshakes, as a server does."""
        scheduler_side = nixl_of(connector).connector_scheduler
        metadata = self.connector.get_handshake_metadata()
        scheduler_side._nixl_handshake_listener_t = NoThread()
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        path = socket_path("tcp", scheduler_side.side_channel_host, scheduler_side.side_channel_port)
        # Up to 0.32 the listener thread, which does not run here, encodes the metadata.
        encoded = importlib.import_module("msgspec").msgpack.encode(metadata)
        by_rank = {(0, 0): encoded, 0: encoded}
        published = "NixlBaseConnectorScheduler._handshake_data"
        NETWORK.listeners[path] = lambda: optional(scheduler_side, published, None) or by_rank

    def before(self, scheduled: Any) -> None:
        """Call the connector as the worker does before the forward pass of a batch."""
        self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        self.connector.bind_connector_metadata(scheduled.kv_connector_metadata)
        if optional(scheduled, "SchedulerOutput.has_sync_kv_loads", False):
            self.connector.start_load_kv(None)

    def after(self, scheduled: Any) -> Any:
        """Call the connector as the worker does after the forward pass, and return its KVConnectorOutput."""
        if not optional(scheduled, "SchedulerOutput.has_sync_kv_loads", False):
            self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        output = self._output()
        failed = set[str]()
        if optional(self.connector, "NixlBaseConnector.get_transfer_results", None):
            results = self.connector.get_transfer_results(scheduled.finished_req_ids)
            output.finished_sending = results.finished_sending or None
            output.finished_recving = results.finished_recving or None
            output.failed_recving = results.failed_recving
            failed |= {*results.failed_recving}
        else:
            sent, received = self.connector.get_finished(scheduled.finished_req_ids)
            output.finished_sending = sent or None
            output.finished_recving = received or None
        output.invalid_block_ids = self.connector.get_block_ids_with_load_errors()
        self.failed = frozenset(failed.union(self._requests_loading_into({*output.invalid_block_ids})))
        stats = self.connector.get_kv_connector_stats()
        if self.host is not None:  # they are merged with those of the scheduler's side
            output.kv_connector_stats = stats
        output.kv_connector_worker_meta = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return output

    def _requests_loading_into(self, invalid: set[int]) -> Iterator[str]:
        """Yield the requests that wait for a load into invalid blocks. Call this before the scheduler reads
        the report, because it finishes these requests then."""
        if not invalid:
            return
        for request_id, request in self._scheduler.requests.items():
            if request.status.name == WAITS:
                tables = self._scheduler.kv_cache_manager.get_block_ids(request_id)
                if any(block in invalid for table in tables for block in table):
                    yield request_id

    def write(self) -> None:
        """Run one pass of the thread that writes KV to the peer."""
        self.worker._push_writer_stop.left = 1
        self.worker._push_writer_loop()


class HostSide(Offloads):
    """The worker's side of an OffloadingConnector that another connector has made."""

    def __init__(self, worker: Any, transfers: Transfers) -> None:
        self.worker = worker
        self.transfers = transfers


class NoThread:
    """A stand-in for a thread of the connector."""

    def start(self) -> None:
        """Run nothing: commands or the network do its work."""

    join = start

    def is_alive(self) -> bool:
        return True


class LoopPasses:
    """A stand-in for the events that stop and wake a thread.

    left: remaining passes of its loop.
    """

    left = 0

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    set = clear = wait


class PairServer(EngineDriver):
    """The prefill server P or the decode server D.

    answers: finished request -> its transfer parameters for the peer.
    host_first: of two connectors, that to the host comes first.
    """

    has_both = True
    host_first = False

    _worker_side: NixlWorker
    answers: dict[str, Any]
    memory: TensorMemory

    def __init__(self, root: Path, server: str) -> None:
        self.server = server
        super().__init__(root, offloads=True)

    def _load_release(self, root: Path, offloads: bool, encodes: bool) -> None:
        """Do nothing: the pair has loaded the release."""

    def reset(self, geometry: EngineConfig) -> None:
        if geometry.recurrent:
            self.memory = PairStateMemory(geometry)
        else:
            self.memory = TensorMemory(geometry.blocks + 1, page_tokens(geometry))
        self.answers = {}
        self._loading_from_host: set[str] = set()
        super().reset(geometry)

    def _start_engine(self, config: EngineConfig) -> tuple[Any, Callable[..., Any]]:
        def connect_server(settings: Any) -> None:
            add_pair_settings(settings, config, self.server, self.host_first)

        with_peer = replace(config, peer=True)
        scheduler, new_request = start(
            self.root, with_peer, self.overlap, self._stamps, adapt=connect_server
        )
        lay_out_states(scheduler.kv_cache_config, config)
        # Up to 0.29 the worker takes its block size from here: that of a server, not the scheduler's unit.
        scheduler.vllm_config.cache_config.block_size = page_tokens(config)
        return scheduler, new_request

    def _new_runner(self, config: EngineConfig) -> ModelRunner:
        if config.recurrent:
            pool = self.scheduler.kv_cache_config
            return PairStateRunner(config, self.overlap, self._methods, pool, self.memory)
        runner = super()._new_runner(config)
        runner.use(self.memory)
        return runner

    def _new_drafter(self, config: EngineConfig) -> Drafter | None:
        """Make the layers of a drafter. Their KV is sent together with the target's."""
        return super()._new_drafter(replace(config, peer=False, fail_requests=False))

    def _new_worker_side(self) -> NixlWorker:
        return NixlWorker(self.scheduler, self.memory, self.config)

    def _held_blocks(self) -> list[Any]:
        sizes = [group.block_size for group in self.config.groups]
        return [
            (group, slots if group in self.config.recurrent else slots[: sizes[group]])
            for group, slots in self.memory.held()
        ]

    def _host_facts(self) -> HostFacts:
        failed = sorted(self._names[request_id] for request_id in self._worker_side.failed)
        facts = HostFacts(chunks=0, free=(), memory=(), keys=(), transfers=(), records=())
        if self._worker_side.host is not None:
            worker_side = HostSide(self._worker_side.host, self._worker_side.transfers)
            facts = host_facts(
                worker_side, self.scheduler, self.config, self._stamps, loads_wait=self.loads_wait
            )
            memory = (tuple(map(self._without_drafter, chunk)) for chunk in facts.memory)
            facts = facts._replace(memory=tuple(memory))
        return facts._replace(failed=tuple(failed))

    def note_host_loads(self) -> None:
        """Note the requests that wait for a load from host memory."""
        known = self.scheduler.requests
        self._loading_from_host = {
            request_id
            for request_id in self._loading_from_host
            if request_id in known and known[request_id].status.name == WAITS
        }
        if self._worker_side.host is not None:
            jobs = offloading_scheduler(self.scheduler)._jobs.values()
            self._loading_from_host |= {job.req_id for job in jobs if not job.is_store}

    def loads_from_host(self, request_id: str) -> bool:
        """Return whether a request waits for a load from host memory."""
        return request_id in self._loading_from_host

    def _take_outputs(self, outputs: Any) -> None:
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.finish_reason is not None:
                    self.answers[self._names[output.request_id]] = output.kv_transfer_params
        super()._take_outputs(outputs)

    def view(self) -> BlockFacts:
        """Return the facts of the server.

        A prompt that P computes for D is shown without its last token, which D computes. Up to 0.28 the
        release removes this token from the prompt of a recurrent model only when it first schedules the
        request.
        """
        facts = super().view()
        if self.server != PREFILL or not self.config.recurrent:
            return facts
        requests = dict(facts.requests)
        for name, fact in facts.requests.items():
            params = self.scheduler.requests[self.request_id(name)].kv_transfer_params or {}
            is_promised = params.get("do_remote_decode") and not params.get("_p_side_truncated")
            if is_promised and fact.status == "WAITING" and len(fact.tokens) > 1:
                requests[name] = fact._replace(tokens=fact.tokens[:-1])
        return facts._replace(requests=requests)

    def request_id(self, name: str) -> str:
        """Return the engine's id of a request, "" for one that it never had."""
        return self._ids.get(name, "")

    def name_of(self, request_id: str) -> str:
        """Return the name in commands of a request of the engine."""
        return self._names.get(request_id, request_id)

    def clear_step_facts(self) -> None:
        """Clear the batch, the outputs and the copies of the last command."""
        self._lanes = ()
        self._client_outputs = ()
        self._reset_done = False
        self._copies = ()

    def serve(
        self, name: str, request_id: str, tokens: list[int], max_tokens: int, priority: int, parameters: Any
    ) -> Outcome:  # fmt: skip
        """Add a request to the scheduler.

        parameters: the connector's transfer parameters, None without a transfer.
        """
        self.clear_step_facts()
        if self._in_step:
            return Refused(Reason.WRONG_PHASE)
        if max_tokens < 1 or not 1 <= len(tokens) < self.config.max_model_len:
            return Refused(Reason.BAD_LENGTH)
        # a copy: the release takes the last token from a prompt of a recurrent model
        request = self._request(request_id, list(tokens), max_tokens, priority, False)
        request.kv_transfer_params = parameters
        self._ids[name] = request_id
        self._names[request_id] = name
        self.scheduler.add_request(request)
        return Done()

    @property
    def due(self) -> bool:
        """Whether the loop takes results next, before it schedules."""
        return self._results_due()

    @property
    def in_step(self) -> bool:
        return self._in_step

    @property
    def idle(self) -> bool:
        """Whether the engine loop has nothing to do."""
        return not (self._in_flight or self.scheduler.has_requests())

    @property
    def worker_side(self) -> NixlWorker:
        return self._worker_side
