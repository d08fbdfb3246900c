"""A connector of ours (`KVConnectorBase_V1`): a peer has computed prompts, and loads of them may fail.

How much of a prompt the peer has stands in the command that adds it (`Add.remote`). A load is asynchronous:
when it copies, completes (`Copy`, `Complete`) or fails (`Fail`) is a command of the trace.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from impl.vllm.bare_scheduler import taken
from impl.vllm.offload import CONNECTORS, DeviceJob, Transfers
from impl.vllm.runner import ModelRunner, Ran
from reference.blocks.config import EngineConfig
from reference.blocks.facts import HostFacts, Transfer, chained

_BASE = f"{CONNECTORS}.v1.base"


@cache
def connector() -> Any:
    """The class, on top of the release's own base."""
    base: Any = importlib.import_module(_BASE)

    class Peer(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
        """remote: of each request the tokens that the peer has yet to send. begun: loads of this step."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**taken(super().__init__, given))
            self.remote: dict[str, int] = {}
            self.begun: list[tuple[Any, tuple[list[int], ...], int, int]] = []
            specs = [group.kv_cache_spec for group in given["kv_cache_config"].kv_cache_groups]
            self.windows = any(getattr(spec, "sliding_window", None) for spec in specs)

        def get_num_new_matched_tokens(self, request: Any, computed: int, *_: Any) -> tuple[int, bool]:
            # The last token is computed again; behind a window its query still needs all that it sees.
            most = min(self.remote.get(request.request_id, 0), request.num_prompt_tokens - self.windows)
            return max(0, most - computed), most > computed

        def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
            if tokens:
                most = min(self.remote.pop(request.request_id), request.num_prompt_tokens - self.windows)
                self.begun.append((request, blocks.get_block_ids(), most - tokens, most))

        def build_connector_meta(self, _: Any) -> Any:
            return base.KVConnectorMetadata()

        def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
            return False, None

        def request_finished(self, *_: Any) -> tuple[bool, None]:
            return False, None

        def start_load_kv(self, *_: Any, **__: Any) -> None:
            """`Loads` has what it asks for."""

        wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv

    return Peer


class Loads:
    """The device that moves KV from the peer, and what the worker reports of it."""

    def __init__(self, scheduler: Any, runner: ModelRunner, config: EngineConfig) -> None:
        self._scheduler, self._config = scheduler, config
        self.transfers = Transfers(runner, config)
        self._requests: dict[int, str] = {}  # whose load a job is
        self._output = importlib.import_module("vllm.v1.outputs").KVConnectorOutput
        self._invalid: set[int] = set()
        self._failed: set[str] = set()

    def expects(self, name: str, tokens: int) -> None:
        """The peer has so many tokens of a request's prompt."""
        self._scheduler.connector.remote[name] = tokens

    def around(self, _: Any, forward: Callable[[], Ran]) -> tuple[Ran, Any]:
        """Run a batch, begin loads, and report those that have ended."""
        peer = self._scheduler.connector
        for begun in peer.begun:
            self._begin(*begun)
        peer.begun.clear()
        ran = forward()
        output = self._output()
        done, self.transfers.completed = self.transfers.completed, []
        output.finished_recving = {self._requests[job] for job in done} or None
        output.invalid_block_ids, self._invalid = self._invalid, set()
        if self._failed:
            output.failed_recving, self._failed = self._failed, set()
        return ran, output

    def _begin(self, request: Any, tables: tuple[list[int], ...], local: int, tokens: int) -> None:
        """A load of positions from `local` to `tokens`."""
        stamps, job, parts = chained(request._all_token_ids), len(self._requests), []
        for group, (layers, table) in enumerate(zip(self._config.groups, tables)):
            size = layers.block_size
            for at in range(local // size, -(-tokens // size)):
                if at < len(table) and table[at]:
                    chunk = len(self.transfers.host)
                    there = stamps[at * size : min(tokens, (at + 1) * size)]
                    held = (*there, *[0] * (size - len(there)))
                    self.transfers.host[chunk] = [(group, held)]
                    parts.append((group, table[at], chunk, 0))
        self._requests[job] = request.request_id
        self.transfers.submit(DeviceJob(job, True, tuple(parts)))

    def fail(self, blocks: int) -> bool:
        """The oldest load ends behind its first `blocks` blocks; False where there is none, or where a
        release has no word for it: with several groups the request is named, which is possible since 0.30."""
        whole, queue = len(self._config.groups) > 1, self.transfers.queues[True]
        if not queue or (whole and not hasattr(self._output(), "failed_recving")):
            return False
        job = queue[0]
        lost = {part[1] for part in job.parts[blocks:]}
        job.parts = job.parts[:blocks]
        if whole and lost:
            self._failed.add(self._requests[job.job])
        elif lost:
            self._invalid |= lost
        return self.transfers.complete(True)

    def facts(self) -> HostFacts:
        """What moves; the peer's memory is not ours to judge."""
        moving = {job.job for job in self.transfers.queues[True]}
        jobs = tuple(
            Transfer(number, True, job.parts, True, job.copied, number not in moving)
            for number, job in self.transfers.jobs.items()
            if number in moving or number in self.transfers.completed
        )
        held = tuple(tuple(chunk) for _, chunk in sorted(self.transfers.host.items()))
        return HostFacts(0, (), held, (), jobs)
