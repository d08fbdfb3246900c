"""vLLM's scheduler without a server: settings, cache groups and requests of its own classes.

Stand-ins have the values that a server computes from its flags and its model. Differences between releases
are found by the parameters of their own functions. Exported tests contain this file unchanged, after
impl/stand_ins.py, so it imports nothing else of kvspec.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from impl.stand_ins import Values, accepted_arguments


class No:
    """The answer to a question, whether it is a method or a property."""

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False

    def __bool__(self) -> bool:
        return False


class Questions(Values):
    """A stand-in that answers no to all questions (`is_...`, `use_...`) about host, model and drafter."""

    def __getattr__(self, name: str) -> Any:
        return No() if name.startswith(("is_", "use_", "uses_")) else super().__getattr__(name)


# What is None in a stand-in because nothing that is driven has it: stand-in -> attribute -> why.
UNSET = {
    "vllm_config": {
        "lora_config": "no adapters",
        "kv_transfer_config": "no connector, unless the sizes have one",
        "kv_events_config": "nobody listens to events",
        "ec_transfer_config": "no encoder",
    },
    "model_config": {
        "enable_return_routed_experts": "no experts",
        "return_sampling_mask": "nobody asks for it",
    },
    "scheduler_config": {
        "long_prefill_token_threshold_adaptive": "the limit of a chunk is fixed",
        "max_num_active_seqs": "max_num_seqs bounds the requests",
        "max_num_scheduled_tokens": "max_num_batched_tokens bounds a batch",
    },
    "cache_config": {
        "kv_cache_layout": "nothing stands in memory in any layout",
        "enable_mamba_fine_grained_prefix_cache": "prefix_match_unit says it",
        "hash_block_size": "prefix_match_unit says it, where states are driven",
        "simple_cpu_offload_num_blocks": "the bytes of host memory say it",
    },
    "speculative_config": {
        "num_speculative_tokens_per_batch_size": "as many drafts whatever the batch",
    },
    "observability_config": {"kv_cache_metrics": "nobody reads metrics"},
    "sampling_params": {
        "extra_args": "no connector's parameters",
        "ignore_eos": "requests stop at the stop token",
        "logprobs": "nobody asks for them",
        "num_logprobs": "nobody asks for them",
        "prompt_logprobs": "nobody asks for them",
        "repetition_detection": "requests end by length or stop token alone",
        "sampling_type": "greedy",
        "skip_reading_prefix_cache": "the prefix cache is read",
        "structured_outputs": "no grammar",
    },
}


def unset(stand_in: str) -> dict[str, Any]:
    """Return the attributes of a stand-in that are None."""
    return dict.fromkeys(UNSET[stand_in])


class StructuredOutput(Values):
    """Accepts every token: no request asks for a grammar."""

    def validate_tokens(self, _: Any, tokens: list[int]) -> list[int]:
        return tokens

    def accept_tokens(self, *_: Any, **__: Any) -> bool:
        return True

    def should_advance(self, *_: Any, **__: Any) -> bool:
        return False


def new_scheduler(
    config: Any,
    overlap: bool,
    hashed: Callable[[Any], bytes],
    v2: bool = False,
    around: Callable[[Any], Any] | None = None,
    adapt: Callable[[Any], None] | None = None,
) -> tuple[Any, Callable[..., Any]]:
    """Return a scheduler, and the function that makes requests for it.

    hashed: hashes blocks.
    v2: for model runner V2.
    around: wraps the function that hashes a request's blocks.
    adapt: changes the settings.
    """
    kind = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    parameters = kind.__init__
    if overlap:
        kind = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    pool = pool_of(config)
    settings = settings_of(config, overlap=overlap, v2=v2)
    if adapt is not None:
        adapt(settings)
    block_size, hash_size = block_sizes(utils, pool, settings, config)
    settings.cache_config.block_size = block_size
    offered = {
        "vllm_config": settings,
        "kv_cache_config": pool,
        "block_size": block_size,
        "hash_block_size": hash_size,
        "structured_output_manager": StructuredOutput(),
        "log_stats": False,
    }
    scheduler = kind(**accepted_arguments(parameters, offered))
    utils.init_none_hash(hashed)
    hasher = {
        "caching_hash_fn": hashed,
        "num_hash_lookahead_tokens": settings.num_hash_lookahead_tokens,
    }
    sizes = {"hash_block_size": hash_size, "block_size": hash_size}
    by = utils.get_request_block_hasher(**accepted_arguments(utils.get_request_block_hasher, hasher | sizes))
    if around is not None:
        by = around(by)
    return scheduler, requests_by(by if config.caching else None)


def pool_of(config: Any) -> Any:
    """Return the KVCacheConfig for these sizes."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    torch = importlib.import_module("torch")
    groups = []
    for index, group in enumerate(config.groups):
        if group.state:
            groups.append(
                interface.KVCacheGroupSpec([f"layer{index}"], state_spec(interface, config, group))
            )
            continue
        kind = interface.FullAttentionSpec if group.window is None else interface.SlidingWindowSpec
        shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32, "use_mla": False}
        if group.window is not None:
            shape["sliding_window"] = group.window
        spec = kind(**accepted_arguments(kind, shape | {"block_size": group.block_size}))
        groups.append(interface.KVCacheGroupSpec([f"layer{index}"], spec))
        if group.drafter:
            groups[-1].is_eagle_group = True
    kv_cache_config = interface.KVCacheConfig(
        num_blocks=config.blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups
    )
    if config.retention:
        kv_cache_config.prefix_cache_retention_interval = max(0, config.retention)
    if config.host_chunks:  # the size of host memory follows from that of a block
        layers = [name for group in groups for name in group.layer_names]
        kv_cache_config.kv_cache_tensors = [
            Values(
                size=64 * kv_cache_config.num_blocks, shared_by=layers, block_stride=None, layers=layers,
                layer_stride=0, offset=0,
            )
        ]
    return kv_cache_config


def state_spec(interface: Any, config: Any, group: Any) -> Any:
    """Return the KV cache spec of layers with a convolution and a recurrent state.

    A row of either is (group + 1, stamp). The window of the convolution has a row for each token of a
    verify round.
    """
    torch = importlib.import_module("torch")
    exports = vars(importlib.import_module("vllm.model_executor.layers.mamba.checkpoint"))
    has_checkpoints = config.checkpoints and "compute_mamba_prefill_checkpoints" in exports
    shape = {
        "block_size": group.block_size,
        "shapes": ((1 + config.drafts, 2), (2,)),
        "dtypes": (torch.int64, torch.int64),
        "mamba_cache_mode": "align" if config.caching else "none",
        "num_speculative_blocks": config.drafts,
        "num_prefill_checkpoint_blocks": int(bool(has_checkpoints)),
        "prefill_checkpoint_alignment": config.checkpoints if has_checkpoints else None,
    }
    return interface.MambaSpec(**accepted_arguments(interface.MambaSpec, shape))


def block_sizes(utils: Any, pool: Any, settings: Any, config: Any) -> tuple[int, int]:
    """Return the size of the scheduler's block and that of a hashed block (tokens)."""
    sizes = {group.block_size for group in config.groups}
    settings.cache_config.block_size = min(sizes)
    if resolved := getattr(utils, "resolve_kv_cache_block_sizes", None):
        scheduler_size, hash_size = resolved(pool, settings)
        return int(scheduler_size), int(hash_size)
    return min(sizes), min(sizes)  # the release asserts what it needs of them


def settings_of(config: Any, *, overlap: bool, v2: bool) -> Values:
    """Return a stand-in for VllmConfig, with the fields that the scheduler reads."""
    drafts = config.drafts
    eagle = config.eagle

    def yes_if_eagle() -> bool:
        return bool(eagle)

    speculative = Questions(
        num_speculative_tokens=drafts, max_num_new_slots_for_drafting=0, disable_eagle_block_drop=False,
        use_eagle=yes_if_eagle, use_eagle_block_drop=yes_if_eagle, needs_eagle_block_drop=yes_if_eagle,
        **unset("speculative_config"),
    )  # fmt: skip
    settings = Questions(
        scheduler_config=Values(
            max_num_seqs=config.max_seqs, max_num_batched_tokens=config.max_batched_tokens,
            max_model_len=config.max_model_len, policy="priority" if config.priority else "fcfs",
            long_prefill_token_threshold=config.long_prefill, enable_chunked_prefill=config.chunked,
            chunked_prefill_enabled=config.chunked, async_scheduling=overlap, watermark=0.0,
            max_num_partial_prefills=1, max_long_partial_prefills=1, prefill_schedule_interval=1,
            max_num_encoder_input_tokens=config.encoder_budget, encoder_cache_size=config.encoder_cache,
            disable_chunked_mm_input=config.whole_images, disable_hybrid_kv_cache_manager=False,
            scheduler_reserve_full_isl=True, **unset("scheduler_config"),
        ),
        cache_config=Values(
            num_gpu_blocks=config.blocks + 1, enable_prefix_caching=config.caching,
            mamba_cache_mode="align" if config.caching and any(g.state for g in config.groups) else "none",
            mamba_block_size=max((g.block_size for g in config.groups if g.state), default=None),
            prefix_match_unit=config.match or None,
            prefix_cache_retention_interval=max(0, config.retention) if config.retention else None,
            enable_mamba_shared_prefix_checkpoint=False, **unset("cache_config"),
        ),
        model_config=Questions(
            max_model_len=config.max_model_len, runner_type="generate",
            supports_multimodal_inputs=config.image > 0, **unset("model_config"),
        ),
        parallel_config=Values(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
            data_parallel_size=1, data_parallel_rank=0, data_parallel_index=0,
        ),
        observability_config=Values(
            per_request_spec_decode_metrics="none", **unset("observability_config")
        ),
        speculative_config=speculative if drafts else None, num_speculative_tokens=drafts,
        num_lookahead_tokens=drafts if eagle else 0, num_prefill_lookahead_tokens=int(eagle),
        num_hash_lookahead_tokens=int(eagle and config.caching), use_v2_model_runner=v2,
        max_concurrent_batches=1 + overlap,
        max_in_flight_tokens=(1 + overlap) * config.max_batched_tokens,
        ec_manager_config=Values(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Values(enabled=False), **unset("vllm_config"),
    )  # fmt: skip
    if config.host_chunks or config.peer:
        offloading(vars(settings), config)
    return settings


def connector_of(config: Any) -> str:
    """Return the name of a server's connector."""
    if config.peer:
        return "Peer"
    return "SimpleCPUOffloadConnector" if config.simple else "OffloadingConnector"


def offloading(settings: dict[str, Any], config: Any) -> None:
    """Add the settings of a server with a connector. A chunk of host memory has 4,096 bytes, whatever it
    holds."""
    extra = {
        "cpu_bytes_to_use": 4096 * config.host_chunks,
        "num_cpu_blocks": config.host_chunks,
        "offload_prompt_only": bool(config.prompt_only),
        # more than all loads of a step: one that may be done within its step is done there
        "sync_load_budget_bytes": 1 << 30 if config.sync_loads else 0,
        "eviction_policy": "arc" if config.arc else "lru",
        "store_threshold": 0,
    }
    if config.storage:
        extra |= {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": "/kvspec-storage"}],
        }
    if config.simple:
        extra = {
            "cpu_bytes_to_use": 64 * (config.host_chunks + 1),  # 64 bytes a block, and the null block
            "lazy_offload": config.lazy,
        }
    if config.chunk_blocks > 1:
        # all groups have this size
        extra["block_size"] = config.chunk_blocks * config.groups[0].block_size
    settings["kv_transfer_config"] = Values(
        kv_connector_extra_config=extra,
        get_from_extra_config=extra.get,
        kv_connector=connector_of(config),
        kv_role="kv_both",
        engine_id="engine",
        kv_load_failure_policy="fail" if config.fail_requests else "recompute",
        is_kv_consumer=True,
        is_kv_producer=True,
    )
    vars(settings["parallel_config"]).update(
        world_size=1, tensor_parallel_size=1, nnodes_within_dp=1, rank=0, data_parallel_rank_local=0
    )
    vars(settings["model_config"]).update(
        use_mla=False, get_total_num_kv_heads=lambda: 1, model="model", dtype="float32"
    )
    settings["cache_config"].cache_dtype = "auto"
    settings["attention_config"] = Values()
    settings["num_hash_lookahead_tokens"] = 0  # as config/vllm.py has it beside a connector


def requests_by(hasher: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a function that makes requests in the form that the front end sends to the scheduler. Its
    arrival time is its position in the order of arrival. source: lora_request, cache_salt."""
    kind = importlib.import_module("vllm.v1.request").Request
    arrivals = iter(range(1 << 40))

    def make(
        name: str, tokens: list[int], max_tokens: int, priority: int, resumable: bool, **source: Any
    ) -> Any:
        """Return a Request of the release. source: further arguments that only some releases take."""
        sampling = Values(
            max_tokens=max_tokens,
            min_tokens=0,
            stop_token_ids=[1],
            eos_token_id=0,
            all_stop_token_ids={1},
            **unset("sampling_params"),
        )
        offered = {
            "request_id": name,
            "prompt_token_ids": tokens,
            "sampling_params": sampling,
            "pooling_params": None,
            "eos_token_id": 0,
            "priority": priority,
            "arrival_time": float(next(arrivals)),
            "block_hasher": hasher,
            "resumable": resumable,
            **source,
        }
        return kind(**accepted_arguments(kind.__init__, offered))

    return make


def adapter_of(name: str, load: int) -> Any:
    """Return a LoRARequest.

    load: number of times that the adapter was loaded again from its path; each load has another id.
    """
    number = int.from_bytes(name.encode(), "big") * 1000 + load
    path = f"/adapters/{name}"
    return Values(
        lora_name=name, lora_int_id=number, lora_path=path, adapter_id=number, name=name, path=path,
        load_inplace=False,
    )  # fmt: skip


def results(sampled: dict[str, list[int]]) -> Any:
    """Return the output of the model runner."""
    kind = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput
    lists: list[Any] = [list(tokens) for tokens in sampled.values()]
    if "ndarray" in str(kind.__annotations__["sampled_token_ids"]):  # between 0.11 and 0.12
        numpy = importlib.import_module("numpy")
        lists = [numpy.array(tokens, dtype=int) for tokens in lists]
    offered = {
        "req_ids": list(sampled),
        "req_id_to_index": {name: index for index, name in enumerate(sampled)},
        "sampled_token_ids": lists,
        "logprobs": None,
        "prompt_logprobs_dict": {},
        "pooler_output": [],
    }
    return kind(**accepted_arguments(kind, offered))
