"""Drives the release's own scheduler, maker of batches and output step, and gathers the facts.

The order of the engine's loop (engine_loop.py) is kept: a batch is dispatched before the output of the one
before it is taken. `Schedule` dispatches the next batch, if there is one; `Update` takes the oldest output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from impl.adapter import Misfit, UnusableImplementation
from impl.bare import bare
from impl.loading.isolation import loaded
from impl.lmdeploy.loading import CAPABILITIES, load
from impl.lmdeploy.engine_methods import longest_session_of, sleep_of
from impl.lmdeploy.states import CheckpointedStates
from impl.loading.optional import either, optional
from impl.process.failures import SystemFailed
from impl.self_scheduling.release_system import serve_driver
from impl.self_scheduling.request_sources import RequestSources
from impl.self_scheduling.driver import SelfSchedulingDriver
from impl.stand_ins import Values, taken
from impl.vocabulary import CommandRefused, require
from reference.blocks.commands import STOP_TOKEN, Add, EngineCommand, NewWeights, Schedule, Update
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts, Lane, Published, RequestFact, chained
from reference.commands import Abort, Reason

_AHEAD = 16  # tokens that a server allocates slots for ahead of a decode (prefill_interval)


class BatchInputs(Values):
    """`ModelInputs` and `ModelInputsDelta`. What a batch is not given is None, as there."""

    is_chunk = is_last_chunk = logits_indices = state_offsets = None


# What a model gives out beside tokens, and nobody asks for.
_NOT_ASKED = dict.fromkeys(
    ("all_routed_experts", "ce_loss", "kv_connector_output", "logits", "logprobs", "model_metas")
)


class LMDeployDriver(SelfSchedulingDriver):
    """One release under `root`, in this process."""

    capabilities = CAPABILITIES

    def __init__(self, root: Path, name: str = "lmdeploy") -> None:
        self.name = name
        self._of = load(root)
        maker = self._of["inputs_maker"]
        loop = self._of["engine_loop"]
        maker.ModelInputs = maker.ModelInputsDelta = BatchInputs
        maker.fill_logits_indices = lambda inputs, *_: inputs
        loop.InferOutput = Values
        self._sleep = sleep_of(root)
        self._longest_session = longest_session_of(root)

    def reset(self, geometry: EngineConfig) -> None:
        [group, *more] = geometry.groups
        extra = geometry.drafts or geometry.connects or geometry.checkpoints or not geometry.chunked
        if extra or group.state or more not in ([], [replace(group, window=None, state=True)]):
            alone = "no drafts, no connector, chunked prompts, states where chunks end alone"
            raise UnusableImplementation(f"lmdeploy: one group, and one with state; {alone}")
        self.clear(size := group.block_size)
        self.config = geometry
        self._states = CheckpointedStates(geometry)
        slots = self._states.blocks * size
        caching = geometry.caching and group.window is None
        cache = self._of["config"].CacheConfig(
            max_batches=geometry.max_seqs, block_size=size, num_cpu_blocks=0,
            num_gpu_blocks=self._states.blocks + 1, kernel_block_size=size, window_size=group.window or -1,
            max_prefill_token_num=geometry.max_batched_tokens, enable_prefix_caching=caching,
            num_reserved_gpu_blocks=1, device_type="cpu", **self._states.settings,
        )  # fmt: skip
        self._longest = self._longest_session(geometry.max_model_len, cache)
        plan = self._of["config"].SchedulerConfig(
            max_batches=geometry.max_seqs,
            max_session_len=self._longest,
            prefill_interval=max(1, min(_AHEAD, slots - self._longest)),
        )
        meta = self._of["messages"].SequenceMeta(
            size, strategy=self._of["sequence"].ARSequenceStrategy()
        )
        self.scheduler = self._of["paging"].Scheduler(plan, cache, meta)
        self._notes_released(self.scheduler)
        self.maker = self._maker(plan, cache)
        self._preempt = either(
            self.maker,
            "InputsMakerAsync.preempt_invalid_decode_seqs",
            "InputsMakerAsync.deactivate_evict_seqs",
        )
        self.loop = bare(
            self._of["engine_loop"].EngineLoop,
            scheduler=self.scheduler,
            seq_strategy=meta.strategy,
            inputs_maker=self.maker,
            config=Values(num_speculative_tokens=None, enable_metrics=False),
            resp_queue=Values(put_nowait=self._deliver),
        )
        self._checkpoints = self.scheduler.block_trie.state_checkpoints
        self._publish = optional(
            self.loop, "EngineLoop._publish_forward_checkpoints", self._publish_later
        )
        # of the worker's batch (step_inputs.py), as `_prefilled` makes them
        self._rows: list[Any] = []
        # requests, what was made for them, output
        self._flights: deque[tuple[Any, Any, Any]] = deque()
        self._dispatched_next = False  # whether the loop waits for the oldest output
        self._listens = True  # whether the loop gives clients a turn before it goes on
        self._names: dict[int, str] = {}  # of sessions that clients have not ended
        # of sessions that ran: positions that the worker has computed
        self._past: dict[int, int] = {}
        self._ending: list[int] = []
        self._released: list[str] = []
        self.sources = RequestSources()
        self.new_weights = False
        loaded("impl/lmdeploy/loading.py")

    def _maker(self, plan: Any, cache: Any) -> Any:
        """The release's maker of batches. Each release is given what it takes."""
        module = self._of["inputs_maker"]
        sizes = {
            **vars(cache),
            **vars(plan),
            "role": module.EngineRole.Hybrid,
            "is_ssm": self._states.slots > 0,
        }
        parts = {
            "executor": Values(device_type="cpu", forward_async=_sent),
            "scheduler": self.scheduler,
            "state_checkpoints": optional(self.scheduler, "Scheduler.state_checkpoints", None),
            "adapter_manager": Values(num_adapters=lambda: 0),
            "engine_strategy": self._of["engine"].AREngineStrategy(plan, cache),
            "sampling_strategy": Values(make_sampling_inputs=lambda _: None),
            "model_agent_strategy": Values(
                make_extra_inputs=lambda *_: None, make_stopping_criteria=lambda _: None
            ),
            "config": module.InputsMakerConfig(**taken(module.InputsMakerConfig, sizes)),
        }
        return module.InputsMakerAsync(**taken(module.InputsMakerAsync, parts))

    def carry_out(self, command: EngineCommand) -> None:
        self._released = []
        self.new_weights = False
        match command:
            case Schedule():
                require(not self._dispatched_next, Reason.WRONG_PHASE)
                waits = (
                    self.scheduler.has_unfinished() or self.maker.has_pending_long_context_chunk()
                )
                require(waits or bool(self._flights), Reason.EMPTY)
                self._dispatch()
            case Update():
                require(self._dispatched_next, Reason.EMPTY)
                self._dispatched_next = self._listens = False
                running, made, output = self._flights.popleft()
                self._checkpoints.unpin_saves(running)
                self.loop._finish_forward_output(output, running, made["inputs"], made["delta"])
                self._preempt()
            case Add():
                require(self._heard, Reason.WRONG_PHASE)
                self._add(command)
            case Abort(name):
                require(self._heard, Reason.WRONG_PHASE)
                require(name in self._names.values(), Reason.UNKNOWN_REQUEST)
                session = next(each for each, known in self._names.items() if known == name)
                self.scheduler.stop_session(session)
                self.scheduler.end_session(session)
                del self._names[session]
            case NewWeights():
                require(not (self._flights or self._names), Reason.WRONG_PHASE)
                _ran(self._sleep(self.scheduler, self.maker))
                self._rows = []  # as the worker's `reset_runtime_state`
                self.sources.replace_weights()
                self.new_weights = True
            case _:  # each client ends the session that it began
                raise CommandRefused(Reason.UNFAITHFUL)
        if self._heard:  # clients end what has finished
            for session in self._ending:
                self.scheduler.end_session(session)
            self._ending = []

    @property
    def _heard(self) -> bool:
        """Whether clients can act: while the loop waits for an output, or for work."""
        return self._listens or not self._flights

    def _add(self, command: Add) -> None:
        tokens = self.accept(command, self._longest, command.request in self._names.values())
        wants = self._of["messages"].SamplingParam(max_new_tokens=command.max_tokens)
        session = self.scheduler.add_session(self.sent)
        self.sources.add(self.sent, command.adapter, "")
        adapter = command.adapter or None
        sequence = session.add_sequence(
            np.array(tokens), sampling_param=wants, adapter_name=adapter
        )
        sequence.resp = Values(data=None, _input_logprobs=None)
        self._names[self.sent] = command.request

    def _dispatch(self) -> None:
        """The loop up to its next wait."""
        if not self._flights:
            self._send(self.maker.send_next_inputs())
        else:
            running, made, _ = self._flights[0]
            self.scheduler.activate_seqs(running)
            self.maker.update_running_seqs(running, made["inputs"])
            copies = made["cache_inputs"]
            self._publish(running, copies is not None and copies.state_save_plan is not None)
            self._send(self.maker.prefetch_next_inputs())
            self._dispatched_next = True
        self._listens = True

    def _publish_later(self, running: list[Any], saves: bool) -> None:
        """As 0.18 has it."""
        self._checkpoints.finish_forward_dispatch(running, has_save_plan=saves)

    def _notes_released(self, scheduler: Any) -> None:
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

    # -- the worker (model_agent) and the clients -----------------------------------------------------

    def _send(self, next_inputs: Coroutine[Any, Any, Any]) -> None:
        """Have the worker run the batch that is made, if one is."""
        made, running = _ran(next_inputs)
        if made is not None:
            copies = made["cache_inputs"]
            self._copy(copies, "restore")
            output = self._forward(made["inputs"], made["delta"], running)
            self._copy(copies, "save")
            self._flights.append((running, made, output))

    def _copy(self, copies: Any, which: str) -> None:
        """Checkpoints are restored before the forward pass, and saved after it."""
        if copies is None:
            return
        blocks = getattr(copies, f"kv_{which}_plan")
        if blocks is not None:
            for source, target in blocks.T.tolist():
                _, slots = self.memory.get(source, (0, [0] * self.block_size))
                self.memory[target] = 0, list(slots)
        self._states.copy(getattr(copies, f"state_{which}_plan"))

    def _forward(self, inputs: Any, delta: Any, running: list[Any]) -> Any:
        """Run a batch: a stamp in each slot, a token for each request whose prompt is done."""
        if delta is not None and delta.indice_cpu is not None:
            self._rows = [self._rows[at] for at in delta.indice_cpu]
        samples = inputs is None or not inputs.is_chunk or bool(inputs.is_last_chunk)
        batch = [(row, [row.token]) for row in self._rows]
        source = delta
        if inputs is not None:
            batch = list(_prefilled(inputs, running, self.sources))
            source = inputs
            self._rows += [row for row, _ in batch] if samples else []
        if [row.seq for row, _ in batch] != running:
            raise SystemFailed("the worker has another batch than the engine")
        tokens, stopped = [], []
        ignored = source.num_ignored_history.tolist()
        tables = source.block_offsets.tolist()
        for (row, given), skipped, table in zip(batch, ignored, tables):
            table = [0] * (skipped // self.block_size) + table
            tokens.append(self._run(row, given, table, samples))
            row.left -= samples
            stopped.append(samples and (row.left <= 0 or row.token == STOP_TOKEN))
        if inputs is None:
            delta.seq_length = torch.ones(len(batch), dtype=torch.long)
            delta.is_decoding = True
        return Values(
            next_token_ids=torch.tensor(tokens),
            stopped=torch.tensor(stopped),
            new_token_timestamp=0,
            stop_pos=torch.zeros(len(batch), dtype=torch.long),
            **_NOT_ASKED,
        )

    def _run(self, row: Any, tokens: list[int], table: list[int], samples: bool) -> int:
        start = row.past
        stamps = chained(tokens, row.stamp)
        for position, stamp in enumerate(stamps, start):
            at, offset = divmod(position, self.block_size)
            if at < len(table):
                self.write(table[at], offset, stamp)
        origin = self.sources.origin_of(row.seq.session_id)
        states = self._states.fold(row.slot, start, tokens, origin)
        name = self._names.get(row.seq.session_id, "")
        row.past = start + len(tokens)
        row.stamp = stamps[-1]
        row.token = self.sample(name, row.stamp)
        self._past[row.seq.session_id] = row.past
        if name:
            sampled = (row.token,) if samples else ()
            held = tuple(table[: -(-row.past // self.block_size)])
            tables = (held, self._states.table(row.slot))[: len(self.config.groups)]
            self.lanes.append(Lane(name, start, tuple(tokens), 0, sampled, tables, states))
        return int(row.token)

    def _deliver(self, outputs: dict[int, Any]) -> None:
        for session, output in outputs.items():
            output.resp.data = {"token_ids": (tokens := output.token_ids.tolist())}
            self.deliver(self._names[session], tokens, output.finish)
            if output.finish:
                self._ending.append(session)
                del self._names[session]

    # -- facts ----------------------------------------------------------------------------------------

    def view(self) -> BlockFacts:
        allocator = self.scheduler.block_manager.allocator
        of = allocator._log_mem.phy_map.tolist()
        pool = allocator._gpu_allocator
        states, slots = self._states, self.scheduler.state_manager
        published, copied = self._cached(of)
        cached = [each.block for each in published]
        requests = {}
        kept = list(copied)
        for sequence in self.scheduler.seq_manager.get_all_sequences():
            row = [of[block] for block in sequence.logical_blocks.get_real_blocks().tolist()]
            state = states.table(sequence.logical_state)
            if (name := self._names.get(sequence.session_id)) is None:
                kept += (*row, *state)
            else:
                requests[name] = self._request(sequence, row, state)
        refs = [0] * (self.config.blocks + 1)
        used = allocator._free_blocks[: allocator._num_blocks - allocator._free_count].tolist()
        for block in {*range(allocator._num_blocks)} - {
            *allocator._free_blocks.tolist()[len(used) :]
        }:
            refs[of[block]] += int(allocator._log_mem.ref_count[block])
        for slot in (*slots._runtime_states, *slots._checkpoint_states):
            refs[states.blocks + slot] += 1
        for block in cached:
            refs[block] -= block not in copied
        free = _free(pool._free_blocks, pool._free_count)
        free += [
            states.blocks + each
            for each in _free(slots.allocator._free_states, slots.get_num_free())
        ]
        free += [block for block in cached if not refs[block]]  # evicted when blocks run out
        ours = {*self._names, *self._ending}
        return self.facts(
            refs=refs,
            states=states.memory,
            published=published,
            free=tuple(free),
            mapped={block: cached.count(block) for block in cached},
            requests=requests,
            leftovers=tuple(
                f"session {each}" for each in self.scheduler.sessions if each not in ours
            ),
            steps_in_flight=len(self._flights),
            results_due=self._dispatched_next,
            kept=tuple(kept),
            merges=True,
            unheard=not self._heard,
            released=tuple(self._released),
            reset=self.new_weights,
        )

    def _cached(self, of: list[int]) -> tuple[list[Published], list[int]]:
        """Return what the trie names, and the blocks of checkpoints that batches in flight copy."""
        published, copied = [], []
        roots = [(root, self._origin(root)) for root in self.scheduler.block_trie._roots.values()]
        waiting = [(root, [origin], origin) for root, origin in roots]
        while waiting:
            node, stamps, origin = waiting.pop()
            if node.parent is not None:
                published.append(Published(of[int(node.block_id)], 0, tuple(stamps)))
            if node.state_checkpoint is not None:
                published += self._states.published(node.state_checkpoint, of, origin)
                copied += self._states.in_flight(node.state_checkpoint, of)
            for child in node.children.values():
                made = chained(child.token_ids.tolist(), stamps[-1])
                waiting.append((child, made, origin))
        return published, copied

    def _origin(self, root: Any) -> int:
        """The origin of the texts below a root of the trie, of which each adapter has one."""
        return self.sources.loaded.source(root.adapter_name or "", "").origin

    def _request(self, sequence: Any, row: list[int], state: tuple[int, ...]) -> RequestFact:
        """Its count is made at outputs: what batches in flight have computed is added."""
        status = sequence.status.name
        computed = sequence.num_history_ids
        if status in ("READY", "RUNNING"):
            status = "RUNNING"
            if any(sequence in batch for batch, *_ in self._flights):
                computed = max(computed, self._past[sequence.session_id])
        elif sequence.session_id in self._past:
            status = "PAUSED" if row else "PREEMPTED"
        table = (0,) * (sequence.num_ignored_history // self.block_size) + tuple(row)
        tables = (table, state)[: len(self.config.groups)]
        return RequestFact(status, tuple(sequence.all_ids.tolist()), computed, tables)


def _prefilled(
    inputs: Any, running: list[Any], sources: RequestSources
) -> Iterator[tuple[Any, list[int]]]:
    """A row for each request of a prefill, and its inputs. past: positions that have KV; stamp: of the last;
    token: that was sampled behind it; left: how many more it may have; slot: of its state."""
    given = inputs.input_ids[0].split(inputs.seq_length.tolist())
    slots = inputs.state_offsets.tolist() if inputs.state_offsets is not None else repeat(-1)
    for sequence, past, tokens, slot in zip(running, inputs.history_lengths.tolist(), given, slots):
        origin = sources.origin_of(sequence.session_id)
        stamp = [origin, *chained(sequence.all_ids[:past].tolist(), origin)][-1]
        left = sequence.sampling_param.max_new_tokens - sequence.num_new_tokens
        yield (
            Values(seq=sequence, past=past, stamp=stamp, token=0, left=left, slot=slot),
            tokens.tolist(),
        )


def _free(items: Any, count: int) -> list[int]:
    """The last of them."""
    return list(items[len(items) - count :].tolist())


async def _sent(_: Any) -> None:
    """A batch goes to the worker, which runs it once it is made."""


def _ran(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise Misfit("the maker of batches waits for something that is not played")


if __name__ == "__main__":
    raise SystemExit(serve_driver(LMDeployDriver))
