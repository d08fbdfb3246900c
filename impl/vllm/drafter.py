"""The KV that the layers of a drafter (EAGLE, MTP) write and read beside those of the target model.

A drafter's KV at a position is computed from the target's hidden state there and the next token, so its
stamp is that of the text up to and including this token. The release's own code prepares the inputs of the
first pass, which has the positions of the batch. Further passes continue from the drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch

from impl.loading.function_cuts import cut
from impl.stand_ins import Values, accepted_arguments
from impl.vllm.copied import DRAFT_KERNELS, PROPOSER, SPECULATOR
from impl.vllm.triton import Kernel, Language, Triton
from reference.blocks.config import EngineConfig
from reference.blocks.facts import DraftUse, Lane, chain

_METHODS = ("prepare_next_token_ids_padded", "prepare_inputs_padded", "set_inputs_first_pass")
_GUESSED = -1  # stamp of KV of a further pass, which has a hidden state of the drafter itself
_MAX_TOKEN = (1 << 31) - 1


class DraftInputs(NamedTuple):
    """Inputs of the drafter's first pass for a batch entry.

    tokens: the token at each position.
    last: index of the position from which it drafts.
    """

    tokens: Sequence[int]
    last: int


class Drafter:
    """The layers of a drafter in one worker.

    group: the KV cache group of the layers.
    """

    def __init__(self, config: EngineConfig, runner: Any) -> None:
        self.config = config
        self._runner = runner
        assert config.draft_group is not None
        self.group: int = config.draft_group

    def run(self, lanes: Sequence[Lane], inputs: Sequence[DraftInputs], passes: int) -> list[Lane]:
        """Run the drafter for a batch, and return the entries with the use of its KV. A layer writes the KV
        of all entries before it reads.

        passes: number of passes after the first, which write slots ahead.
        """
        layers = self.config.groups[self.group]
        for lane, entry in zip(lanes, inputs):
            _, *hidden = self._runner.stamps(lane.request, lane.start, lane.tokens)
            for position, (stamp, token) in enumerate(zip(hidden, entry.tokens), lane.start):
                self._write(lane, position, chain(stamp, token))
        uses = []
        for lane, entry in zip(lanes, inputs):
            first_read = 0
            if layers.window is not None:
                first_read = max(0, lane.start - layers.window + 1)
            read_stamps = tuple(self._stamp_at(lane, position) for position in range(first_read, lane.start))
            ahead = min(lane.start + entry.last + 1 + passes, self.config.max_model_len)
            end = max(lane.start + len(lane.tokens), ahead)
            uses.append(DraftUse(self.group, first_read, read_stamps, end))
        for lane, entry, use in zip(lanes, inputs, uses):
            for position in range(lane.start + entry.last + 1, use.end):
                self._write(lane, position, _GUESSED)
        return [lane._replace(draft=use) for lane, use in zip(lanes, uses)]

    def _place(self, lane: Lane, position: int) -> tuple[int, int, int, int]:
        """Return the block, the group, the block size and the offset of a position. A position without a
        block is in block 0, the padding of a table row."""
        size = self.config.groups[self.group].block_size
        entry, offset = divmod(position, size)
        row = lane.tables[self.group]
        block = row[entry] if entry < len(row) else 0
        return block, self.group, size, offset

    def _stamp_at(self, lane: Lane, position: int) -> int:
        return int(self._runner.memory.drafted(*self._place(lane, position)))

    def _write(self, lane: Lane, position: int, stamp: int) -> None:
        self._runner.memory.stamp_drafted(*self._place(lane, position), stamp)


class _Known(NamedTuple):
    """A request with tokens that are numbered by the drafter.

    numbers: token -> its number.
    """

    request: Any
    numbers: dict[int, int]

    def get_token_id(self, position: int) -> int:
        token = self.request.get_token_id(position)
        return self.numbers.setdefault(token, len(self.numbers))


class _Metadata(Values):
    """Attention metadata. Fields that are not given are None: the release only passes them on."""

    def __getattr__(self, name: str) -> Any:
        return None


class DrafterV1(Drafter):
    """The drafter of a worker with model runner V1, with inputs from `SpecDecodeBaseProposer`.

    root: the folder of the release.
    """

    def __init__(self, config: EngineConfig, runner: Any, root: Path) -> None:
        """Make a proposer with the release's methods (SpecDecodeBaseProposer) and kernels, on the CPU.

        root: the release.
        """
        super().__init__(config, runner)
        rows = torch.zeros(config.max_seqs, dtype=torch.int32)
        tokens = config.max_batched_tokens
        names = "eagle_prepare_next_token_padded", "eagle_prepare_inputs_padded"
        kernels = cut(
            root / DRAFT_KERNELS, frozenset(f"{name}_kernel" for name in names), {"tl": Language}
        )
        env: dict[str, Any] = {
            "torch": torch,
            "np": np,
            "CommonAttentionMetadata": _Metadata,
            "next_power_of_2": Triton.next_power_of_2,
        }
        for name in names:  # since 0.30 the release launches the kernel by a function
            kernel = Kernel(kernels[f"{name}_kernel"])
            env |= {f"{name}_kernel": kernel, f"_{name}": _launcher_of(kernel)}
        self._proposer = Values(
            device=torch.device("cpu"),
            backup_next_token_ids=Values(np=rows.numpy(), gpu=rows, copy_to_gpu=lambda _: rows),
            needs_extra_input_slots=False, use_heterogeneous_vocab=False,
            uses_xdrope_dim=0, draft_uses_xdrope_dim=0,
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            hidden_states=torch.zeros(tokens, dtype=torch.int64),
            _set_positions=lambda *_: None,
        )  # fmt: skip
        wanted = frozenset(f"SpecDecodeBaseProposer.{name}" for name in _METHODS)
        for name, method in cut(root / PROPOSER, wanted, env).items():
            setattr(self._proposer, name.rpartition(".")[2], MethodType(method, self._proposer))
        self._numbers: dict[int, int] = {}  # token -> its number; a token does not fit into 32 bits

    def fits(self, length: int) -> bool:
        """Return whether the drafter runs for a batch with a longest text of this length (tokens)."""
        return length + self.config.drafts <= self.config.max_model_len

    def inputs(
        self, lanes: Sequence[Lane], requests: dict[str, Any], lengths: Sequence[int]
    ) -> list[DraftInputs]:
        """Prepare the first pass, as `propose_draft_token_ids` does.

        lengths: the worker's length of each request's text (num_tokens_no_spec).
        """
        proposer = self._proposer
        counts = [len(lane.tokens) for lane in lanes]
        starts = torch.tensor([0, *counts]).cumsum(0)
        sampled = torch.full((len(lanes), 1 + self.config.drafts), -1)
        for row, lane in zip(sampled, lanes):
            row[: len(lane.sampled)] = torch.tensor(self._number_tokens(lane.sampled))
        names = [lane.request for lane in lanes]
        batch = Values(
            num_reqs=len(lanes), req_ids=names, num_tokens_no_spec=np.array(lengths), vocab_size=_MAX_TOKEN
        )
        known = {name: _Known(requests[name], self._numbers) for name in names}
        discarded = torch.tensor([not lane.sampled for lane in lanes])
        following, valid = proposer.prepare_next_token_ids_padded(sampled, known, batch, discarded)
        total = sum(counts)
        metadata: Any = _Metadata(
            num_reqs=len(lanes), query_start_loc=starts.int(), query_start_loc_cpu=starts.int(),
            slot_mapping=torch.zeros(total), max_seq_len=0,
        )  # fmt: skip
        last = rejected = None
        drafts = torch.tensor([lane.drafts for lane in lanes])
        if drafts.any():
            of_drafts = Values(cu_num_draft_tokens=drafts.cumsum(0))
            metadata, last, rejected = proposer.prepare_inputs_padded(metadata, of_drafts, valid)
        tokens = [token for lane in lanes for token in lane.tokens]
        _, last, _ = proposer.set_inputs_first_pass(
            target_token_ids=torch.tensor(self._number_tokens(tokens)),
            next_token_ids=following.long(),
            target_positions=torch.zeros(total),
            target_hidden_states=torch.zeros(total, dtype=torch.int64),
            token_indices_to_sample=last,
            cad=metadata,
            num_rejected_tokens_gpu=rejected,
        )
        known_tokens = list(self._numbers)
        inputs = [known_tokens[number] for number in proposer.input_ids[:total].tolist()]
        return [
            DraftInputs(inputs[start : start + count], end - start)
            for start, count, end in zip(starts.tolist(), counts, last.tolist())
        ]

    def _number_tokens(self, tokens: Sequence[int]) -> list[int]:
        return [self._numbers.setdefault(token, len(self._numbers)) for token in tokens]


def _launcher_of(kernel: Kernel) -> Any:
    """Return a function that launches a kernel with one program for each request; its first argument has a
    row for each."""
    return lambda first, *rest, **constants: kernel[(len(first),)](first, *rest, **constants)


class DrafterV2(Drafter):
    """The drafter of a worker with model runner V2, with inputs from its speculator.

    buffers: for them.
    """

    def __init__(self, config: EngineConfig, runner: Any, root: Path, buffers: Any) -> None:
        super().__init__(config, runner)
        file = root / SPECULATOR
        kernel = "_prepare_prefill_inputs_kernel"
        launched = Kernel(cut(file, frozenset({kernel}), {"tl": Language})[kernel])
        function = "prepare_prefill_inputs"
        self._prepare = cut(file, frozenset({function}), {kernel: launched})[function]
        self._buffers = buffers
        buffers.input_ids = buffers.input_ids.long()  # tokens do not fit into 32 bits
        self._last = torch.zeros(config.max_seqs, dtype=torch.int64)
        self._step = torch.tensor(0)

    def inputs(self, batch: Any, states: Any, sampled: Any, rejected: Any) -> list[DraftInputs]:
        """Prepare the first pass, as `propose` does.

        batch: an InputBatch that has run.
        states: the RequestState of the worker.
        """
        offered = {
            "last_token_indices": self._last,
            "current_draft_step": self._step,
            "input_buffers": self._buffers,
            "input_batch": batch,
            "num_sampled": sampled,
            "num_rejected": rejected,
            "last_sampled": states.last_sampled_tokens,
            "next_prefill_tokens": states.next_prefill_tokens,
            "max_num_reqs": self.config.max_seqs,
        }
        self._prepare(**accepted_arguments(self._prepare, offered))
        starts = batch.query_start_loc.tolist()
        tokens = self._buffers.input_ids.tolist()
        return [
            DraftInputs(tokens[start:end], int(last) - start)
            for start, end, last in zip(starts, starts[1:], self._last.tolist())
        ]
