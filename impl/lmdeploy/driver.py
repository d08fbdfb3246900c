"""Drives the release's own scheduler, maker of batches and output step.

The order of the engine's loop (engine_loop.py) is kept: a batch is dispatched before the output of the one
before it is taken. `Schedule` dispatches the next batch, if there is one; `Update` takes the oldest output.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from impl.adapter import Capabilities, UnusableImplementation
from impl.bare import bare
from impl.lmdeploy.engine_methods import longest_session_of, sleep_of
from impl.lmdeploy.gathering import EngineFacts
from impl.lmdeploy.loading import CAPABILITIES, WITH_STORE, load
from impl.lmdeploy.model_agent import result_of, take_batch
from impl.lmdeploy.states import CheckpointedStates
from impl.lmdeploy.store import CONNECTOR, WAY, MooncakeStore
from impl.loading.isolation import note_loaded
from impl.loading.optional import first_attribute, optional
from impl.self_scheduling.release_system import serve_driver
from impl.self_scheduling.request_sources import RequestSources
from impl.stand_ins import Values, accepted_arguments
from impl.vocabulary import CommandRefused, require
from impl.system_spec import SystemSpec
from reference.blocks.commands import Add, EngineCommand, Fail, NewWeights, Schedule, Update
from reference.blocks.config import EngineConfig
from reference.commands import Abort, Reason
from reference.tiers.commands import Complete, Copy

_AHEAD = 16  # tokens that a server allocates slots for ahead of a decode (prefill_interval)


class BatchInputs(Values):
    """`ModelInputs` and `ModelInputsDelta`. What a batch is not given is None, as there."""

    is_chunk = is_last_chunk = logits_indices = state_offsets = None
    is_dummy = False


class LMDeployDriver(EngineFacts):
    """One release under `root`, in this process."""

    capabilities = CAPABILITIES
    role = "Hybrid"  # as EngineRole
    _longest: int
    maker: Any
    _preempt: Any
    loop: Any
    _checkpoints: Any
    _publish: Any

    def __init__(self, root: Path, name: str = "lmdeploy") -> None:
        self.name = name
        if with_store := WAY in SystemSpec.parse(name).ways:
            self.capabilities = WITH_STORE
        self._modules = load(root, with_store)
        maker = self._modules["inputs_maker"]
        loop = self._modules["engine_loop"]
        maker.ModelInputs = maker.ModelInputsDelta = BatchInputs
        maker.fill_logits_indices = lambda inputs, *_: inputs
        loop.InferOutput = Values
        self._sleep = sleep_of(root)
        self._longest_session = longest_session_of(root)

    def reset(self, geometry: EngineConfig) -> None:
        """Build the release's Scheduler, InputsMakerAsync and EngineLoop for these sizes. Raises
        UnusableImplementation for sizes that LMDeploy is not driven with."""
        [group, *more] = geometry.groups
        if geometry.connects:
            _check_for_store(geometry, self.capabilities)
        extra = geometry.checkpoints or not geometry.chunked
        if extra or group.state or more not in ([], [replace(group, window=None, state=True)]):
            alone = "chunked prompts, states where chunks end alone"
            raise UnusableImplementation(f"lmdeploy: one group, and one with state; {alone}")
        if geometry.drafts and (more or group.window is not None):
            raise UnusableImplementation("lmdeploy: drafts go with full attention alone")
        size = group.block_size
        self.clear(size)
        self.config = geometry
        self._states = CheckpointedStates(geometry)
        slots = self._states.blocks * size
        caching = geometry.caching and group.window is None
        cache = self._modules["config"].CacheConfig(
            max_batches=geometry.max_seqs, block_size=size, num_cpu_blocks=0,
            num_gpu_blocks=self._states.blocks + 1, kernel_block_size=size, window_size=group.window or -1,
            max_prefill_token_num=geometry.max_batched_tokens, enable_prefix_caching=caching,
            num_reserved_gpu_blocks=1, device_type="cpu", **self._states.settings,
            **self._connection(geometry),
        )  # fmt: skip
        self._longest = self._longest_session(geometry.max_model_len, cache)
        plan = self._modules["config"].SchedulerConfig(
            max_batches=geometry.max_seqs,
            max_session_len=self._longest,
            prefill_interval=max(1, min(_AHEAD, (slots - self._longest) // (1 + geometry.drafts))),
        )
        strategy = self._modules["ar.sequence"].ARSequenceStrategy
        if geometry.drafts:
            strategy = self._modules["ar_spec.sequence"].ARSpecSequenceStrategy
        meta = self._modules["messages"].SequenceMeta(size, strategy=strategy())
        self._store: MooncakeStore | None = None
        self._answered_lookups = 0
        if geometry.connects:
            self._store = MooncakeStore(geometry, self.memory)
            module = self._modules["kv_connector.mooncake.store.connector"]
            connector = module.MooncakeStoreConnector(module.KVConnectorRole.SCHEDULER, cache)
            self._lookups = connector.connector_scheduler.client
            self._connector_output = self._modules["kv_connector.base"].KVConnectorOutput
            self.scheduler = self._modules["paging"].Scheduler(plan, cache, meta, connector)
        else:
            self.scheduler = self._modules["paging"].Scheduler(plan, cache, meta)
        self._watch_releases(self.scheduler)
        self.maker = self._new_maker(plan, cache)
        self._preempt = first_attribute(
            self.maker,
            "InputsMakerAsync.preempt_invalid_decode_seqs",
            "InputsMakerAsync.deactivate_evict_seqs",
        )
        self.loop = bare(
            self._modules["engine_loop"].EngineLoop,
            scheduler=self.scheduler,
            seq_strategy=meta.strategy,
            inputs_maker=self.maker,
            config=Values(num_speculative_tokens=geometry.drafts or None, enable_metrics=False),
            resp_queue=Values(put_nowait=self._deliver),
        )
        self._checkpoints = self.scheduler.block_trie.state_checkpoints
        self._publish = optional(
            self.loop, "EngineLoop._publish_forward_checkpoints", self._publish_later
        )
        self._rows = []
        self._accept = ()
        self._flights = deque()
        self._dispatched_next = False
        self._listens = True
        self._names = {}
        self._computed_counts = {}
        self._finished_sessions = []
        self._released = []
        self.sources = RequestSources()
        self.new_weights = False
        note_loaded("impl/lmdeploy/loading.py")

    def _connection(self, geometry: EngineConfig) -> dict[str, Any]:
        """Return the fields of CacheConfig about a connector."""
        if not geometry.connects:
            return {}
        config = self._modules["config"].KVTransferConfig
        return {"kv_transfer_config": config(kv_connector=CONNECTOR, kv_role="kv_both")}

    def _new_maker(self, plan: Any, cache: Any) -> Any:
        """Make the release's maker of batches. Each release is given what it takes."""
        module = self._modules["inputs_maker"]
        sizes = {
            **vars(cache),
            **vars(plan),
            "role": module.EngineRole[self.role],
            "is_ssm": self._states.slots > 0,
            "spec_decoding": self.config.drafts > 0,
        }
        rounds = self._modules["ar.engine"].AREngineStrategy(plan, cache)
        if self.config.drafts:
            rounds = self._modules["ar_spec.engine"].ARSpecEngineStrategy(plan, cache, self.config.drafts)
        parts = {
            "executor": Values(device_type="cpu", forward_async=take_batch),
            "scheduler": self.scheduler,
            "state_checkpoints": optional(self.scheduler, "Scheduler.state_checkpoints", None),
            "adapter_manager": Values(num_adapters=lambda: 0),
            "engine_strategy": rounds,
            "sampling_strategy": Values(make_sampling_inputs=lambda _: None),
            "model_agent_strategy": Values(
                make_extra_inputs=lambda *_: None, make_stopping_criteria=lambda _: None
            ),
            "config": module.InputsMakerConfig(**accepted_arguments(module.InputsMakerConfig, sizes)),
        }
        return module.InputsMakerAsync(**accepted_arguments(module.InputsMakerAsync, parts))

    def carry_out(self, command: EngineCommand) -> None:
        """Execute a command as the release's engine loop does, and end sessions as their clients do once they
        have heard of the end. Raises CommandRefused."""
        self._released = []
        self.new_weights = False
        self._answered_lookups = 0
        match command:
            case Schedule():
                require(not self._dispatched_next, Reason.WRONG_PHASE)
                waits = (
                    self.scheduler.has_unfinished() or self.maker.has_pending_long_context_chunk()
                )
                require(waits or bool(self._flights), Reason.EMPTY)
                self._accept = command.accept
                self._dispatch()
            case Update():
                require(self._dispatched_next, Reason.EMPTY)
                self._dispatched_next = False
                self._listens = False
                running, made, output = self._flights.popleft()
                if _has_model_work(made):
                    self._checkpoints.unpin_saves(running)
                self.loop._finish_forward_output(output, running, made["inputs"], made["delta"])
                if self._store is not None:
                    self._store.forget_reported(output.kv_connector_output)
                self._preempt()
            case Add():
                require(self._hears_clients, Reason.WRONG_PHASE)
                self._add_request(command)
            case Abort(name):
                require(self._hears_clients, Reason.WRONG_PHASE)
                require(name in self._names.values(), Reason.UNKNOWN_REQUEST)
                session = next(each for each, known in self._names.items() if known == name)
                self.scheduler.stop_session(session)
                self.scheduler.end_session(session)
                del self._names[session]
            case NewWeights():
                require(not (self._flights or self._names), Reason.WRONG_PHASE)
                result_of(self._sleep(self.scheduler, self.maker))
                self._rows = []  # as the worker's `reset_runtime_state`
                self.sources.replace_weights()
                self.new_weights = True
            case Copy(load):
                moved = self._store is not None and self._store.copy(load)
                require(moved, Reason.EMPTY)
            case Complete(load):
                completed = self._store is not None and self._store.complete(load)
                require(completed, Reason.EMPTY)
            case Fail(blocks):
                failed = self._store is not None and self._store.fail(blocks)
                require(failed, Reason.EMPTY)
            case _:  # each client ends the session that it began
                raise CommandRefused(Reason.UNFAITHFUL)
        if self._hears_clients:  # clients end what has finished
            for session in self._finished_sessions:
                self.end_session(session)
            self._finished_sessions = []
        if self._store is not None:
            self._answered_lookups = self._lookups.answer(self._store.entries)

    def end_session(self, session: int) -> None:
        """End a session, as its client does."""
        self.scheduler.end_session(session)

    def _add_request(self, command: Add) -> None:
        tokens = self.accept(command, self._longest, command.request in self._names.values())
        wants = self._modules["messages"].SamplingParam(max_new_tokens=command.max_tokens)
        session = self.scheduler.add_session(self.sent)
        self.sources.add(self.sent, command.adapter, "")
        adapter = command.adapter or None
        sequence = session.add_sequence(
            np.array(tokens), sampling_param=wants, adapter_name=adapter
        )
        sequence.resp = Values(data=None, _input_logprobs=None)
        self._names[self.sent] = command.request

    def _dispatch(self) -> None:
        """Go through the loop up to its next wait."""
        if not self._flights:
            self._run_batch(self.maker.send_next_inputs())
        else:
            running, made, _ = self._flights[0]
            self.scheduler.activate_seqs(running)
            if _has_model_work(made):
                self.maker.update_running_seqs(running, made["inputs"])
                copies = made["cache_inputs"]
                self._publish(running, copies is not None and copies.state_save_plan is not None)
            self._run_batch(self.maker.prefetch_next_inputs())
            self._dispatched_next = True
        self._listens = True

    def _publish_later(self, running: list[Any], saves: bool) -> None:
        """Publish the checkpoints of a batch as 0.18 does."""
        self._checkpoints.finish_forward_dispatch(running, has_save_plan=saves)

    def _watch_releases(self, scheduler: Any) -> None:
        """Note requests that give all their blocks back, whatever they get in the same command."""
        lifecycle = optional(scheduler, "Scheduler.sequence_lifecycle", None)
        owner = lifecycle or scheduler.block_manager
        method = "release_paging_resources" if owner is not scheduler.block_manager else "free"
        whole = getattr(owner, method)

        def release(sequence: Any) -> Any:
            name = self._names.get(sequence.session_id)
            if name is not None and sequence.num_blocks:
                self._released.append(name)
            return whole(sequence)

        setattr(owner, method, release)


def _has_model_work(made: Any) -> bool:
    return made["inputs"] is not None or made["delta"] is not None


def _check_for_store(sizes: EngineConfig, can: Capabilities) -> None:
    """Raise UnusableImplementation for sizes that a server with the Mooncake Store is not driven with."""
    [group, *more] = sizes.groups
    if not can.connects:
        raise UnusableImplementation("lmdeploy: a store of KV goes with +store")
    if more or group.window is not None or group.state or sizes.drafts:
        raise UnusableImplementation("lmdeploy+store: the store goes with full attention alone")
    other = sizes.storage or sizes.simple or sizes.peer or sizes.sync_loads or sizes.prompt_only
    if other or sizes.chunk_blocks != 1:
        raise UnusableImplementation(
            "lmdeploy+store: the store keeps single blocks, without host memory in front of it"
        )


if __name__ == "__main__":
    raise SystemExit(serve_driver(LMDeployDriver))
