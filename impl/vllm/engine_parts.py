"""The parts of one release's engine in this process: scheduler, model runner, drafter, connector."""

from __future__ import annotations

import importlib
import inspect
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from impl.adapter import UnusableImplementation
from impl.loading.isolation import note_loaded
from impl.loading.renamed import alias, name_of
from impl.self_scheduling.request_sources import RequestSources
from impl.vllm import storage
from impl.vllm.offload import loads_wait_for_steps
from impl.vllm.api import renamed_entries, uses
from impl.vllm.bare_connectors import worker_of
from impl.vllm.bare_scheduler import pool_of
from impl.vllm.copied import PROPOSER, SPECULATOR
from impl.vllm.drafter import Drafter, DrafterV1, DrafterV2
from impl.vllm.engine import Stamps, start
from impl.vllm.images import text_of
from impl.vllm.modules import RUNNER, install, runner_methods
from impl.vllm.runner import ModelRunner, ModelRunnerV1, Ran
from impl.vllm.simple_offload import CONNECTOR as SIMPLE
from impl.vllm.simple_offload import CopyingThread, PoolOffloads
from impl.vllm.sources import reset_caches
from reference.blocks.config import EngineConfig
from reference.blocks.facts import Lane, Output


class EngineParts:
    """The release under `root`, and the engine of the present run.

    overlap: with the asynchronous scheduler, which has two steps in flight.
    v2: with model runner V2.
    offloads: with its OffloadingConnector.
    encodes: prompts have images.
    stores: the connector may have a storage behind host memory.
    has_both: it may have two connectors, to its peer and to its host.
    """

    has_both = False

    config: EngineConfig
    _stamps: Stamps
    sources: RequestSources
    runner: ModelRunner
    _worker_side: Any
    _in_flight: deque[tuple[Any, Ran, Any]]
    _ids: dict[str, str]
    _names: dict[str, str]
    _ended: set[str]
    _in_step: bool
    _sent: int
    _lanes: tuple[Lane, ...]
    _copies: tuple[tuple[int, int], ...]
    _client_outputs: tuple[Output, ...]
    _reset_done: bool
    scheduler: Any
    _request: Callable[..., Any]

    def __init__(
        self,
        root: Path,
        overlap: bool = False,
        v2: bool = False,
        offloads: bool = False,
        encodes: bool = False,
        stores: bool = False,
    ) -> None:
        """Load the release's modules and note which parts it has. The arguments are those of the class."""
        self._load_release(root, offloads, encodes)
        names = renamed_entries(root)
        for name in names:
            for module in dict.fromkeys(module for module, use in uses() if name_of(use) == name):
                alias(importlib.import_module(module), name, names)
        self.root = root
        self.drafter_root = root
        self.overlap = overlap
        self.v2 = v2
        self._methods = {} if v2 else runner_methods(root, names, encodes)
        runner = (root / RUNNER).read_text(encoding="utf-8")
        engine = (root / "vllm/v1/engine/__init__.py").read_text(encoding="utf-8")
        # since 0.14 the engine gives each request a unique name
        self._renames = "external_req_id" in engine
        self._spec_overlap = "def _get_valid_sampled_token_count" in runner
        self.loads_wait = offloads and loads_wait_for_steps(root)
        request = importlib.import_module("vllm.v1.request")
        self._statuses = request.RequestStatus
        self._resumable = "resumable" in inspect.signature(request.Request.__init__).parameters
        self._outputs = importlib.import_module("vllm.v1.outputs")
        self._utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self._offloads = offloads
        self._encodes = encodes
        self._stores = stores
        self._reset_caches = reset_caches(root)

    def _load_release(self, root: Path, offloads: bool, encodes: bool) -> None:
        install(root, offloads=offloads, encodes=encodes)

    def reset(self, geometry: EngineConfig) -> None:
        """Start an engine with these sizes. Raises UnusableImplementation for sizes that it cannot be
        driven with."""
        if geometry.connects and not self._offloads:
            raise UnusableImplementation(
                "host_chunks, peer: driven without a connector; +offload has one"
            )
        if geometry.host_chunks and geometry.peer and not self.has_both:
            raise UnusableImplementation("peer: goes without host_chunks but in a pair")
        if geometry.storage and not self._stores:
            raise UnusableImplementation("storage: this vLLM is driven without one")
        if geometry.simple and not (self.root / SIMPLE).is_file():
            raise UnusableImplementation("simple: this vLLM has no SimpleCPUOffloadConnector")
        if geometry.encodes and not self._encodes:
            raise UnusableImplementation("image: driven without an encoder; +images has one")
        if self.v2 and geometry.peer and geometry.sync_loads and not geometry.fail_requests:
            raise UnusableImplementation(
                "fail_requests: model runner V2 does not go back behind a load that has failed (#49250)"
            )
        if self.overlap and geometry.drafts and not self._spec_overlap:
            raise UnusableImplementation("this vLLM's asynchronous scheduler takes no drafts")
        self.config = config = geometry
        self._stamps = Stamps()
        self.sources = RequestSources()
        self.scheduler, self._request = self._start_engine(config)
        self.runner = self._new_runner(config)
        self.runner.origin_of = self.sources.origin_of
        self.runner.drafter = self._new_drafter(config)
        self._worker_side = self._new_worker_side()
        if config.storage:
            storage.FILES.reset(self._worker_side.transfers.host)
        self._in_flight = deque()
        self._ids = {}  # name in commands -> the engine's request id
        self._names = {}  # request id -> name in commands
        self._ended = set()
        # the current step of the engine core ends with the results of its batch
        self._in_step = False
        self._sent = 0
        self._lanes = ()
        self._copies = ()
        self._client_outputs = ()
        self._reset_done = False
        note_loaded("impl/vllm/modules.py")

    def _start_engine(self, config: EngineConfig) -> tuple[Any, Callable[..., Any]]:
        return start(self.root, config, self.overlap, self._stamps, self.v2, self.sources.of)

    def _new_worker_side(self) -> Any:
        """Make the worker's side of the connector, None without a connector."""
        if self.config.simple:
            thread = CopyingThread(self.scheduler, self.runner.memory, self.config)
            return PoolOffloads(self.scheduler, thread)

        def request_stamps(request: Any) -> list[int]:
            return self.sources.stamps_of(text_of(request), request.request_id)

        return worker_of(self.scheduler, self.runner.memory, self.config, 0, request_stamps)

    def _new_runner(self, config: EngineConfig) -> ModelRunner:
        if not self.v2 and not config.recurrent:
            return ModelRunnerV1(config, self.overlap, self._methods)
        if not self.v2:
            from impl.vllm.states import StateRunnerV1

            return StateRunnerV1(config, self.overlap, self._methods, pool_of(config))
        if config.recurrent:
            from impl.vllm.states_v2 import StateRunnerV2

            return StateRunnerV2(config, self.overlap, pool_of(config))

        from impl.vllm.runner_v2 import ModelRunnerV2

        return ModelRunnerV2(config, self.overlap, pool_of(config))

    def _new_drafter(self, config: EngineConfig) -> Drafter | None:
        """Make the layers of a drafter. Return None if no group has them, if the release lacks their files,
        and for a peer."""
        if config.draft_group is None or config.peer:
            return None
        if not self.v2:
            if not (self.drafter_root / PROPOSER).is_file():
                return None
            return DrafterV1(config, self.runner, self.drafter_root)
        if not (self.drafter_root / SPECULATOR).is_file():
            return None
        from impl.vllm.runner_v2 import input_buffers

        return DrafterV2(config, self.runner, self.drafter_root, input_buffers(config))

    def _results_due(self) -> bool:
        """Return whether the engine core takes results next."""
        return self._in_step or bool(self._in_flight and not self.scheduler.has_requests())
