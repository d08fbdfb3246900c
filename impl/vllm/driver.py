"""The driver of an engine: executes commands on a release's scheduler, as its engine core does.

`python -m impl.vllm.driver ROOT [--async] [--v2] [--offload] [--storage] [--images]` is the worker of a
release. The module state of a release is global, so a worker has exactly one.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from impl.adapter import Capabilities
from impl.loading.optional import optional
from impl.process.failures import Guarded, SystemFailed
from impl.process.worker import serve
from impl.vllm import storage
from impl.vllm.api import WAYS
from impl.vllm.bare_connectors import Loads
from impl.vllm.bare_scheduler import results
from impl.vllm.client_calls import ClientCalls
from impl.vllm.gathering import FactGatherer
from impl.vllm.offload import offloading_scheduler
from impl.vllm.simple_offload import resets_host, transfers_of
from impl.vocabulary import CommandRefused, require
from reference.blocks.commands import (
    Add, End, EngineCommand, Fail, LoadAdapter, More, NewWeights, ResetConnector, Schedule, Update,
)  # fmt: skip
from reference.blocks.facts import Output
from reference.commands import Abort, Done, Outcome, Reason, Refused
from reference.tiers.commands import Backup, Complete, Copy, Fetch, ResetCache


# Commands that a client, a device or the engine core may give within a step of the engine core.
_ALLOWED_IN_STEP = (Abort, Update, Copy, Complete, Fail, Backup, Fetch)


class EngineDriver(ClientCalls, FactGatherer):
    """The engine of a release, driven in the order of its engine core (see EngineParts)."""

    # Every system has a name and capabilities. VLLMSystem declares those of a release, in the process that
    # drives this worker.
    name = ""
    capabilities = Capabilities()

    @cached_property
    def _commands(self) -> dict[type, Callable[[Any], None]]:
        return {
            Add: self._add, More: self._more, End: self._end, Abort: self._abort, ResetCache: self._reset,
            Schedule: self._schedule, Update: self._update, Copy: self._copy, Complete: self._complete,
            Fail: self._fail, ResetConnector: self._reset_connector, LoadAdapter: self._load_adapter,
            NewWeights: self._new_weights, Backup: self._backup, Fetch: self._fetch,
        }  # fmt: skip

    def apply(self, command: EngineCommand) -> Outcome:
        """Execute a command, or refuse it."""
        self._lanes = ()
        self._client_outputs = ()
        self._reset_done = False
        self._copies = ()
        storage.FILES.lookups = 0
        if self.runner.encoder is not None:
            self.runner.encoder.encoded = ()
        if self._in_step and not isinstance(command, _ALLOWED_IN_STEP):
            return Refused(Reason.WRONG_PHASE)
        try:
            self._commands[type(command)](command)
        except CommandRefused as refused:
            return Refused(refused.reason)
        return Done()

    def close(self) -> None:
        """Do nothing: the engine has no resources outside of this process."""

    # -- steps ------------------------------------------------------------------------------------

    def _schedule(self, command: Schedule) -> None:
        """Schedule and run a batch, as `EngineCore.step` or, with asynchronous scheduling,
        `step_with_batch_queue`. A step that runs no request takes its results at once; others wait for
        Update."""
        require(self.scheduler.has_requests(), Reason.EMPTY)
        scheduled = self.scheduler.schedule()
        if self.config.storage:
            storage.answer_lookups(self.scheduler.connector.connector_scheduler.manager)
        copies = optional(scheduled, "SchedulerOutput.kv_cache_block_copies", None) or ()
        self._copies = tuple((copy.src_block_id, copy.dst_block_id) for copy in copies)
        stop = [self._ids.get(name, "") for name in command.stop]
        if self._worker_side is not None:
            self._worker_side.before(scheduled)
        ran = self.runner.run(scheduled, command.accept, stop)
        outcome = results(ran.sampled)
        if self._worker_side is not None:
            outcome.kv_connector_output = self._worker_side.after(scheduled)
        if isinstance(self._worker_side, Loads):
            self._worker_side.spoil(ran.lanes)
        if ran.lanes:
            self._in_flight.append((scheduled, ran, outcome))
        else:
            self._take_outputs(self.scheduler.update_from_output(scheduled, outcome))
        # The engine core fills its queue of batches before it takes results (step_with_batch_queue).
        queue_size = 2 if self.overlap else 1
        queue_is_full = len(self._in_flight) >= queue_size
        self._in_step = queue_is_full or bool(self._in_flight and not ran.lanes)
        self._lanes = tuple(lane._replace(request=self._names[lane.request]) for lane in ran.lanes)

    def _update(self, command: Update) -> None:
        require(self._in_flight, Reason.EMPTY)
        require(self._results_due(), Reason.WRONG_PHASE)
        self._in_step = False
        scheduled, ran, outcome = self._in_flight.popleft()
        self._take_outputs(self.scheduler.update_from_output(scheduled, outcome))
        if isinstance(self._worker_side, Loads):
            self._worker_side.results_taken()
        if self.config.drafts and not self.overlap:
            max_drafts = self.config.drafts
            if not self.config.eagle:
                max_drafts = min(max_drafts, max(0, command.drafts))
            drafts = self.runner.propose_drafts(ran, max_drafts)
            kind = self._outputs.DraftTokenIds
            self.scheduler.update_draft_token_ids(kind(list(drafts), list(drafts.values())))

    def _take_outputs(self, outputs: Any) -> None:
        """Keep the outputs for clients.

        outputs: EngineCoreOutputs by client index.
        """
        self._client_outputs = tuple(
            Output(
                self._names[out.request_id],
                tuple(out.new_token_ids),
                "" if out.finish_reason is None else str(out.finish_reason),
            )
            for of_client in outputs.values()
            for out in of_client.outputs
        )

    # -- transfers --------------------------------------------------------------------------------

    def _copy(self, command: Copy) -> None:
        copied = self._worker_side is not None and self._worker_side.transfers.copy(load=command.load)
        require(copied, Reason.EMPTY)

    def _complete(self, command: Complete) -> None:
        completed = self._worker_side is not None and self._worker_side.transfers.complete(load=command.load)
        require(completed, Reason.EMPTY)

    def _fail(self, command: Fail) -> None:
        failed = isinstance(self._worker_side, Loads) and self._worker_side.fail(command.blocks)
        require(failed, Reason.EMPTY)

    def _backup(self, command: Backup) -> None:
        written = self.config.storage and storage.FILES.write(command.pages)
        require(written, Reason.EMPTY)

    def _fetch(self, command: Fetch) -> None:
        read = self.config.storage and storage.FILES.read(command.pages)
        require(read, Reason.EMPTY)

    def _reset_connector(self, _: ResetConnector) -> None:
        require(self.config.host_chunks, Reason.EMPTY)
        if self.config.simple:
            self._reset_pool()
            return
        manager = offloading_scheduler(self.scheduler).manager
        reset_cache = optional(manager, "CPUOffloadingManager.reset_cache", None)
        # 0.21 has no reset_cache: reset_connector_cache() then logs a warning and resets nothing.
        require(reset_cache is not None, Reason.UNFAITHFUL)
        if self.scheduler.reset_connector_cache() is False:
            raise SystemFailed("reset_connector_cache() returns False: host memory is not reset")

    def _reset_pool(self) -> None:
        """Reset host memory that is a pool of blocks. The release refuses the reset while KV moves."""
        require(resets_host(self.scheduler.connector), Reason.UNFAITHFUL)
        self._reset_done = bool(self.scheduler.reset_connector_cache())
        if not self._reset_done and not any(transfers_of(self.scheduler.connector.scheduler_manager)):
            raise SystemFailed("reset_connector_cache() returns False, and no KV moves")


def _engine_of_arguments(arguments: list[str]) -> tuple[Path, dict[str, bool]]:
    """Return the root of the release and the keyword arguments of its EngineDriver. Raises SystemExit for
    an unknown option."""
    parser = argparse.ArgumentParser(prog="python -m impl.vllm.driver", allow_abbrev=False)
    parser.add_argument("root", type=Path)
    for parameter, word in WAYS.items():
        if parameter != "pair":  # impl.vllm.pair.driver drives both servers of a pair
            parser.add_argument(f"--{word}", dest=parameter, action="store_true")
    parser.add_argument(storage.OPTION, dest="stores", action="store_true")
    parameters = vars(parser.parse_args(arguments))
    return parameters.pop("root"), parameters


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    importlib.import_module("torch").set_num_threads(1)
    root, parameters = _engine_of_arguments(sys.argv[1:])

    def guarded_engine() -> Guarded:
        engine = EngineDriver(root, **parameters)
        return Guarded(
            engine, root, engine="vLLM", modules="modules.py", values="bare_scheduler.py"
        )

    sys.exit(serve(guarded_engine, root))
