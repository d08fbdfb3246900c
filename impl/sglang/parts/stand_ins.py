"""Stand-ins for what the release's bookkeeping reads of the rest of a server, small and plain.

Only flags and sizes; nothing in here decides anything about memory. On a CPU the kernels that need a GPU
are replaced by the release's own torch formulation of them.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from enum import Enum, IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from impl.lazy import Tensor, torch

# What is None in a stand-in because nothing that is driven has it, with the reason.
UNSET = {
    "abort_all": "a client aborts one request",
    "abort_message": "the client aborts without one",
    "bootstrap_host": "no other server sends a prompt",
    "bootstrap_port": "no other server sends a prompt",
    "bootstrap_room": "no other server sends a prompt",
    "cache_salt": "no namespace, unless the run has one",
    "chunked_req": "no prefill beside a server that only decodes",
    "conv_shard_groups": "one device",
    "conv_slice_axis": "one device",
    "cpu_copy_carries_mamba": "a retracted request's states are not copied to the host",
    "cpu_group": "one device",
    "custom_logit_processor": "tokens are made up",
    "custom_params": "tokens are made up",
    "dcp_enabled": "one device",
    "disagg_prefill_dp_rank": "no other server sends a prompt",
    "disaggregation_decode_enable_offload_kvcache": "no server that only decodes",
    "disaggregation_enable_kv_checksum": "stamps tell what arrived",
    "dllm_config": "no diffusion model",
    "enable_decode_hicache": "a decode server with a host tier is not driven",
    "enable_encoder_swa_bounded_replay": "no encoder",
    "enable_hisparse": "no sparse attention",
    "enable_int8_mamba_checkpoint": "states are copied as they are",
    "enable_lora": "no adapters",
    "enable_metrics": "nobody reads metrics",
    "enable_overlap": "the driver plays when results are processed",
    "enable_priority_scheduling": "requests are served as commands say",
    "extra_key": "no namespace, unless the run has one",
    "extra_metric_labels": "nobody reads metrics",
    "finished_reason": "the client aborts without one",
    "grammar_retained_tokens": "no grammar",
    "hicache_host_memory_mode": "exported tests have no storage",
    "hicache_storage_backend": "a storage is attached later",
    "hicache_storage_prefetch_policy": "exported tests have no storage",
    "http_worker_ipc": "one front end",
    "last_batch": "commands say what runs",
    "lora_id": "no adapters",
    "mm_receiver": "texts alone",
    "model_config": "texts alone",
    "offset": "nothing is taken back, unless the command says so",
    "priority": "requests are served as commands say",
    "RECEIVER": "the receiver of prompts is played (decode_side.py)",
    "retraction_policy": "commands say who is retracted",
    "return_sampling_mask": "nobody asks for it",
    "routed_dp_rank": "one server",
    "routed_experts_start_len": "no experts",
    "routing_key": "one server",
    "sampling_logprobs_mode": "nobody asks for it",
    "speculative_eagle_topk": "one chain of drafts",
    "speculative_num_steps": "commands say how many drafts",
    "time_stats": "nobody reads metrics",
    "token_ids_logprob": "nobody asks for it",
    "token_to_kv_pool_allocator": "of a server that only decodes the queues have it",
    "tp_rank": "one device",
    "verify_done": "batches run in stream order",
}


@cache
def unset() -> str:
    """Return a pattern of a line that asks for one of UNSET."""
    return rf"\b({'|'.join(UNSET)})\b"


class Bag:
    """Attributes as given, and those that UNSET declares as None. What else a release reads is not known:
    AttributeError, which ends a check with the name and the place."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name in UNSET:
            return None
        known = ", ".join(sorted(self.__dict__)[:3])
        raise AttributeError(f"the stand-in with {known} has no {name}", name=name, obj=self)


class Settings(Bag):
    """The settings of a server. One that is not given has the default that the tree's own server_args.py
    states; see `take_defaults`."""

    def __getattr__(self, name: str) -> Any:
        defaults: dict[str, Any] = self.__dict__.get("tree_defaults", {})
        return defaults[name] if name in defaults else super().__getattr__(name)


def take_defaults(root: Path) -> None:
    """Have SERVER_ARGS know the plain defaults of the ServerArgs under `root`, where that file is there."""
    file = root / "sglang/srt/server_args.py"
    defaults = {}
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    tree = ast.parse(text, str(file))
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(field.value, ast.Constant)
            ):
                defaults[field.target.id] = field.value.value
    SERVER_ARGS.tree_defaults = defaults


# The server's command line, with a CPU (see use_gpu) and no disaggregation. The rest is set for each server.
SERVER_ARGS: Any = Settings(
    attention_backend="torch_native",  # selects the plain torch paths
    kernel=Bag(attention_backend="torch_native"),
    chunked_prefill_size=-1,
    dcp_size=1,
    device="cpu",
    disable_overlap_schedule=True,
    disable_radix_cache=True,
    disaggregation_mode="null",
    page_size=1,
    speculative_algorithm=None,
    enable_mamba_extra_buffer=lambda: False,
    enable_mis=False,
    features=Bag(),
    mamba=Bag(
        mamba_max_states_per_path=-1,
        enable_mamba_extra_buffer=False,
        enable_mamba_extra_buffer_lazy=False,
    ),
    strip_thinking_cache=False,
)


class SamplingParams(Bag):
    """No stop tokens; the length limit is lowered when a turn is to finish."""

    def __init__(self) -> None:
        super().__init__(max_new_tokens=1 << 30, ignore_eos=True, stop_strs=[], stop_regex_strs=[])


class SpecAlgorithm:
    """Speculative decoding is on or off; which algorithm does not matter to the bookkeeping."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def is_none(self) -> bool:
        return not self.on

    def supports_spec_v2(self) -> bool:
        return self.on

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if not name.startswith(("is_", "supports_", "has_", "needs_", "requires_", "uses_")):
            raise AttributeError(f"the stand-in has no {name}", name=name, obj=self)
        return lambda *_, **__: False


class ForwardMode(IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    PREBUILT = 5
    DLLM_EXTEND = 8

    def is_extend(self, *_: Any, **__: Any) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_prebuilt(self) -> bool:
        return self is ForwardMode.PREBUILT

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


class CaptureHiddenMode(IntEnum):
    NULL = 0

    def need_capture(self) -> bool:
        return False


class DisaggregationMode(Enum):
    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


class ReqDllmMixin:
    """No diffusion model."""

    def init_diffusion_llm(self, *_: Any, **__: Any) -> None:
        self.dllm_config = None

    def is_dllm(self) -> bool:
        return False


class Range(NamedTuple):
    """Positions [start, end) that a chunk computes (sglang/srt/utils/common.py, from 0.5.15 on)."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


def assign_rows(rows: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, count: int) -> None:
    """Write new slots into the rows: what assign_req_to_token_pool does on a GPU."""
    done = 0
    for row, a, b in zip(rows.tolist()[:count], start.tolist(), end.tolist(), strict=True):
        table[row, a:b] = slots[done : done + b - a].to(table.dtype)
        done += b - a


def checkpoint_grid(*_: int) -> int:
    """Return the tokens between two tracked states: a page, and more than one token, as in every kernel."""
    return max(2, int(SERVER_ARGS.page_size))


def state_chunk() -> int:
    """Return the tokens between two states that a prefill's kernel computes."""
    return 2 if checkpoint_grid() % 2 == 0 else checkpoint_grid()


PLATFORM: Any = Bag(get_paged_allocator_cls=lambda: None, capabilities=Bag(supports_triton=False))


def use_gpu() -> None:
    """Let the server have a GPU, on which its own Triton kernels run."""
    SERVER_ARGS.device = "cuda"
    SERVER_ARGS.attention_backend = "triton"
    SERVER_ARGS.kernel = Bag(attention_backend="triton")
    PLATFORM.capabilities = Bag(supports_triton=True)


def on_gpu() -> bool:
    return bool(SERVER_ARGS.device == "cuda")


def decorating(function: Any = None, **_: Any) -> Any:
    """Return a decorator with or without arguments that decorates nothing."""
    return function if callable(function) else lambda f: f


# Where releases from 0.5.16 on ask for the settings: one bag has them all.
_SETTINGS = (
    "get_attn", "get_cache", "get_disagg", "get_exec", "get_hicache", "get_kv_cache", "get_lora",
    "get_memory", "get_model", "get_observability", "get_parallel", "get_runtime", "get_schedule",
    "get_server_args", "get_serving", "get_session", "get_spec",
)  # fmt: skip


def stand_ins_by_module() -> dict[str, dict[str, Any]]:
    """Return, for each module, the names in it that must not be inert."""
    return {
        "sglang.srt.server_args": {"get_global_server_args": lambda: SERVER_ARGS},
        "sglang.srt.model_executor.forward_batch_info": {
            "ForwardMode": ForwardMode,
            "CaptureHiddenMode": CaptureHiddenMode,
        },
        "sglang.srt.disaggregation.utils": {
            "DisaggregationMode": DisaggregationMode,
            "FAKE_BOOTSTRAP_HOST": "2.2.2.2",
        },
        "sglang.srt.dllm.mixin.req": {"ReqDllmMixin": ReqDllmMixin},
        "sglang.srt.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "sglang.srt.utils.common": {"Range": Range, "async_h2d": torch.tensor},
        "sglang.srt.speculative.spec_utils": {"assign_req_to_token_pool_func": assign_rows},
        "sglang.srt.runtime_context": {
            **{name: lambda: SERVER_ARGS for name in _SETTINGS},
            "attention_backends": lambda *_, **__: (SERVER_ARGS.attention_backend,) * 2,
            "get_flags": lambda: Bag(attn=Bag(backend=SERVER_ARGS.attention_backend)),
            "get_platform": lambda: Bag(device=SERVER_ARGS.device),
            "mamba_cache_chunk_size": checkpoint_grid,
            "max_speculative_num_draft_tokens": lambda: SERVER_ARGS.max_speculative_num_draft_tokens,
            "mamba_checkpoint_grid": checkpoint_grid,
            "mamba_track_grid": checkpoint_grid,
        },
        "sglang.srt.platforms": {"current_platform": PLATFORM},
        "sglang.srt.utils.rank_consensus_checker": {"rank_consensus": decorating},
        "sglang.srt.beam_search.batch_tail": {
            "beam_retraction_order": lambda order, _: order,
            "num_beam_member_rows": lambda *_, **__: 0,
        },
    }


class _Kernel:
    """`kernel[grid](...)` on a function that does the same in torch."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run


def without_kernels(allocator: types.ModuleType) -> None:
    """Have a release's paged allocator use torch where it would launch Triton kernels.

    With too few free pages a kernel reads past the list, and the allocator then returns None by
    itself; torch would raise instead, so nothing is computed in that case.
    """
    naive = allocator.alloc_extend_naive

    def extend(
        prefix: Tensor,
        total: Tensor,
        last: Tensor,
        free: Tensor,
        out: Tensor,
        _: int,
        page_size: int,
    ) -> None:
        pages = (total + page_size - 1) // page_size - (prefix + page_size - 1) // page_size
        if int(pages.sum()) <= len(free):
            naive(prefix, total, last, free, out, page_size, "cpu")

    def decode(total: Tensor, last: Tensor, free: Tensor, out: Tensor, _: int, page_size: int) -> None:
        opens = [(length - 1) % page_size == 0 for length in total.tolist()]
        if sum(opens) > len(free):
            return
        pages = iter(free.tolist())
        slots = [
            next(pages) * page_size if new else previous + 1
            for new, previous in zip(opens, last.tolist(), strict=True)
        ]
        out[:] = torch.tensor(slots, dtype=out.dtype)

    allocator.alloc_extend_kernel = _Kernel(extend)  # type: ignore[attr-defined]
    allocator.alloc_decode_kernel = _Kernel(decode)  # type: ignore[attr-defined]


def kv_pool(base: type) -> Any:
    """Return a two-pool KV cache without KV memory: it only keeps the mapping for the allocator."""

    def no_memory(self: Any) -> None:
        self.full_kv_pool = self.swa_kv_pool = None
        self.full_to_swa_index_mapping = None

    memoryless = type("NoMemory", (base,), {"__init__": no_memory})
    memoryless.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return memoryless()
