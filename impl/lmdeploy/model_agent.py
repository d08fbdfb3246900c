"""The worker of LMDeploy (model_agent), and the clients that get its outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterator
from itertools import repeat
from typing import Any

import torch

from impl.adapter import Misfit
from impl.lmdeploy.states import CheckpointedStates
from impl.lmdeploy.store import MooncakeStore
from impl.process.failures import SystemFailed
from impl.self_scheduling.driver import SelfSchedulingDriver
from impl.self_scheduling.request_sources import RequestSources
from impl.self_scheduling.toy_model import greedy, other
from impl.stand_ins import Values
from reference.blocks.commands import STOP_TOKEN
from reference.blocks.config import EngineConfig
from reference.blocks.facts import Lane, chain, chained

# What a model gives out beside tokens, and nobody asks for.
_NOT_ASKED = dict.fromkeys(
    ("all_routed_experts", "ce_loss", "kv_connector_output", "logits", "logprobs", "model_metas")
)


class ModelAgent(SelfSchedulingDriver):
    """The part of a driver that runs the batches that are made, and delivers their outputs."""

    config: EngineConfig
    #: the release's scheduler
    scheduler: Any
    #: the sources of KV of requests
    sources: RequestSources
    _states: CheckpointedStates
    _store: MooncakeStore | None
    _connector_output: type[Any]  # KVConnectorOutput
    _rows: list[Any]  # of the worker's batch (step_inputs.py), as `_prefill_rows` makes them
    _flights: deque[tuple[Any, Any, Any]]  # requests, what was made for them, output
    _names: dict[int, str]  # of sessions that clients have not ended
    _computed_counts: dict[int, int]  # of sessions that ran: positions that the worker has computed
    _finished_sessions: list[int]  # sessions that have finished, which clients end next
    _accept: tuple[int, ...]  # as of the last Schedule

    def _run_batch(self, next_inputs: Coroutine[Any, Any, Any]) -> None:
        """Have the worker run the batch that is made, if one is."""
        made, running = result_of(next_inputs)
        if made is None:
            return
        store = self._submit_transfers(made)
        output: Any
        if made["inputs"] is None and made["delta"] is None:  # a step of the connector alone
            output = Values(next_token_ids=None, kv_connector_output=None)
        else:
            copies = made["cache_inputs"]
            self._copy_checkpoints(copies, "restore")
            output = self._forward(made["inputs"], made["delta"], running)
            self._copy_checkpoints(copies, "save")
        if store is not None:
            output.kv_connector_output = store.take_finished(self._connector_output)
        self._flights.append((running, made, output))

    def _submit_transfers(self, made: Any) -> MooncakeStore | None:
        """Submit the transfers of a step (start_kv_connector_step). Return the store; None where the step is
        none of the connector's."""
        if self._store is None or made["kv_connector_metadata"] is None:
            return None
        sequences = self.scheduler.seq_manager.get_all_sequences()
        by_number = {sequence.seq_id: sequence for sequence in sequences}
        self._store.submit(made["kv_connector_metadata"], self.sources, by_number)
        return self._store

    def _copy_checkpoints(self, copies: Any, which: str) -> None:
        """Copy checkpoints: those to restore before the forward pass, those to save after it."""
        if copies is None:
            return
        blocks = getattr(copies, f"kv_{which}_plan")
        if blocks is not None:
            for source, target in blocks.T.tolist():
                _, slots = self.memory.get(source, (0, [0] * self.block_size))
                self.memory[target] = 0, list(slots)
        self._states.copy_slots(getattr(copies, f"state_{which}_plan"))

    def _forward(self, inputs: Any, delta: Any, running: list[Any]) -> Any:
        """Run a batch: a stamp in each slot, a token for each request whose prompt is done."""
        if delta is not None and delta.indice_cpu is not None:
            self._rows = [self._rows[index] for index in delta.indice_cpu]
        samples = inputs is None or not inputs.is_chunk or bool(inputs.is_last_chunk)
        batch = [(row, [row.token, *row.drafts]) for row in self._rows]
        source = delta
        if inputs is not None:
            batch = list(_prefill_rows(inputs, running, self.sources))
            source = inputs
            self._rows += [row for row, _ in batch] if samples else []
        if [row.seq for row, _ in batch] != running:
            raise SystemFailed("the worker has another batch than the engine")
        tokens = []
        stops = []
        ignored = source.num_ignored_history.tolist()
        tables = source.block_offsets.tolist()
        width = 1 + self.config.drafts if inputs is None else 1
        for index, ((row, given), skipped, table) in enumerate(zip(batch, ignored, tables)):
            table = [0] * (skipped // self.block_size) + table
            agreed = self._accept[min(index, len(self._accept) - 1)] if self._accept else 0
            sampled = self._run_request(row, given, table, samples, agreed)
            tokens.append([*sampled, *[-1] * (width - len(sampled))])
            stops.append(_stop_position(sampled, row.left) if samples else -1)
            row.left -= len(sampled) * samples
        if inputs is None:
            delta.seq_length = torch.full((len(batch),), width, dtype=torch.long)
            delta.is_decoding = True
        drafts = torch.tensor([row.drafts for row, _ in batch], dtype=torch.long)
        return Values(
            next_token_ids=torch.tensor(tokens).squeeze(1),
            stopped=torch.tensor([index >= 0 for index in stops]),
            new_token_timestamp=0,
            stop_pos=torch.tensor(stops),
            extra_outputs=Values(draft_token_ids=drafts) if self.config.drafts else None,
            **_NOT_ASKED,
        )

    def _run_request(
        self, row: Any, tokens: list[int], table: list[int], samples: bool, agreed: int
    ) -> list[int]:
        """Compute the tokens of one request, note its lane, and return the sampled tokens.

        agreed: the drafts that the model accepts, at most.
        """
        start = row.past
        drafts = row.drafts
        stamps = chained(tokens, row.stamp)
        for position, stamp in enumerate(stamps, start):
            entry, offset = divmod(position, self.block_size)
            if entry < len(table):
                self.write(table[entry], offset, stamp)
        origin = self.sources.origin_of(row.seq.session_id)
        states = self._states.fold(row.slot, start, tokens, origin)
        name = self._names.get(row.seq.session_id, "")
        accepted = min(agreed, len(drafts))
        end = len(tokens) - len(drafts) + accepted  # inputs behind the last accepted one do not count
        row.past = start + end
        row.stamp = stamps[end - 1]
        row.token = self.sample(name, row.stamp)
        if accepted < len(drafts) and row.token != STOP_TOKEN:
            row.token = other(row.stamp)
        row.drafts = self._draft_tokens(chain(row.stamp, row.token)) if samples else []
        self._computed_counts[row.seq.session_id] = row.past
        sampled = [*drafts[:accepted], row.token]
        if name:
            held = tuple(table[: -(-(start + len(tokens)) // self.block_size)])
            tables = (held, self._states.block_table(row.slot))[: len(self.config.groups)]
            sampled_tokens = tuple(sampled) if samples else ()
            self.lanes.append(
                Lane(
                    name,
                    start=start,
                    tokens=tuple(tokens),
                    drafts=len(drafts),
                    sampled=sampled_tokens,
                    tables=tables,
                    states=states,
                )
            )
        return sampled

    def _draft_tokens(self, stamp: int) -> list[int]:
        """Return the tokens that the drafter proposes behind a text, by the stamp of its end."""
        drafts: list[int] = []
        for _ in range(self.config.drafts):
            drafts.append(greedy(stamp))
            stamp = chain(stamp, drafts[-1])
        return drafts

    def _deliver(self, outputs: dict[int, Any]) -> None:
        """Give outputs to the clients, by session."""
        for session, output in outputs.items():
            tokens = output.token_ids.tolist()
            output.resp.data = {"token_ids": tokens}
            self.deliver(self._names[session], tokens, output.finish)
            if output.finish:
                self._finished_sessions.append(session)
                del self._names[session]


def _prefill_rows(
    inputs: Any, running: list[Any], sources: RequestSources
) -> Iterator[tuple[Any, list[int]]]:
    """Yield a row for each request of a prefill, and its inputs.

    seq: its sequence.
    past: number of positions that have KV.
    stamp: the stamp of the last of them.
    token: the token that is sampled behind it.
    drafts: the tokens that are proposed behind that.
    left: number of tokens that it may still sample.
    slot: the slot of its state, -1 for none.
    """
    given = inputs.input_ids[0].split(inputs.seq_length.tolist())
    slots = inputs.state_offsets.tolist() if inputs.state_offsets is not None else repeat(-1)
    for sequence, past, tokens, slot in zip(running, inputs.history_lengths.tolist(), given, slots):
        origin = sources.origin_of(sequence.session_id)
        stamp = [origin, *chained(sequence.all_ids[:past].tolist(), origin)][-1]
        left = sequence.sampling_param.max_new_tokens - sequence.num_new_tokens
        yield (
            Values(seq=sequence, past=past, stamp=stamp, token=0, drafts=[], left=left, slot=slot),
            tokens.tolist(),
        )


def _stop_position(sampled: list[int], left: int) -> int:
    """Return the index of the sampled token that ends the request (ARSpecStoppingCriteria), -1 for none.

    left: number of tokens that it may still sample.
    """
    ends = [index for index, token in enumerate(sampled) if token == STOP_TOKEN]
    if left <= len(sampled):
        ends.append(left - 1)
    return min(ends, default=-1)


async def take_batch(_: Any) -> None:
    """Take a batch for the worker, which runs it once it is made."""


def result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise Misfit("the maker of batches waits for something that is not played")
