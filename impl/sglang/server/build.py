"""Builds a release's own Scheduler for a configuration: the model's folder, and the server's arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from impl.sglang.server.clients import EOS, PRIORITIES, Config

_VOCABULARY = 1024
NEVER = _VOCABULARY  # the end token of a model that ends no turn
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
    "bos_token_id": 1, "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip

_RECURRENT = {  # every second layer has a state instead of KV
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0, 1],
}  # fmt: skip


def model_folder(
    folder: Path, window: int = 0, *, eos: int = EOS, config: Config | None = None
) -> Path:
    """Return a folder that says what the model is; there are no weights. window 0: full attention alone.

    eos: the token that ends a turn; one past the vocabulary never does.
    config: says whether it has recurrent layers, and the chunk in which these compute a prompt.
    """
    more: dict[str, Any] = {"eos_token_id": eos}
    if config is not None and config.states:
        more |= _RECURRENT | ({"mamba_chunk_size": config.track} if config.track else {})
    if window:
        more |= {
            "is_hybrid_swa": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "swa_attention_layer_ids": [0],
            "full_attention_layer_ids": [1],
            "sliding_window": window,
            "sliding_window_size": window,
            "hybrid_layer_pattern": [1, 0],
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_MODEL, **more}))
    return folder


def _strategy(config: Config) -> str:
    """Return the strategy of keeping states for the tree, as the server's arguments call it."""
    if not config.track:
        return "no_buffer"
    return "extra_buffer_lazy" if config.lazy else "extra_buffer"


def build_scheduler(config: Config, model: Path, settings: dict[str, Any]) -> Any:
    """Return the release's Scheduler, built as its own process does.

    settings: further server arguments.
    """
    import sglang.srt.managers.scheduler as module
    from sglang.srt.server_args import PortArgs, ServerArgs

    from impl.sglang.server import fake_tier

    more = dict(settings)
    if config.draft:
        more |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": config.draft - 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": config.draft,
            "speculative_draft_model_path": str(model),
        }
    if config.states:
        more |= {
            "max_mamba_cache_size": config.states,
            "mamba_track_interval": config.track or 256,
            "mamba_radix_cache_strategy": _strategy(config),
        }
    if config.hicache:
        more |= fake_tier.settings(config)
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "rust" if config.rust else "python"
    if config.window:
        more["swa_full_tokens_ratio"] = config.swa / 10
    if config.pressure:
        more["schedule_conservativeness"] = 0.05
    if config.priority:
        more |= {
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": PRIORITIES[config.priority] == "smallest",
            "priority_scheduling_preemption_threshold": config.threshold,
        }
    if config.queue:
        more["max_queued_requests"] = config.queue
    if config.lowest:
        more["retraction_policy"] = "priority"
    server_arguments = dict[str, Any](
        model_path=str(model), load_format="dummy", device="cpu", skip_tokenizer_init=True,
        attention_backend="torch_native", sampling_backend="pytorch", dtype="float32", random_seed=1,
        disable_overlap_schedule=not config.overlap, disable_radix_cache=not config.tree,
        max_total_tokens=config.tokens, max_running_requests=config.running,
        chunked_prefill_size=config.chunk, enable_mixed_chunk=config.mixed,
        page_size=config.page_size, context_length=2048, mem_fraction_static=0.5,
        enable_streaming_session=True,
        disable_cuda_graph=True, watchdog_timeout=100000, log_level="error", host="127.0.0.1",
        port=20000 + os.getpid() % 20000,
    )  # fmt: skip
    args = ServerArgs(**{**server_arguments, **more})
    ports = PortArgs.init_new(args)
    if hasattr(module, "SpawnRanks"):
        module.publish(
            args, role="scheduler", ranks=module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        )
        return module.Scheduler(args, ports)
    if hasattr(module, "publish"):
        module.publish(args, role="scheduler")
    else:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
    ranks = {f"{name}_rank": 0 for name in ("tp", "moe_ep", "pp", "attn_cp", "moe_dp")}
    return module.Scheduler(args, ports, gpu_id=0, dp_rank=None, **ranks)
