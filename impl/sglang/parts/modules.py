"""Modules that are loaded of an SGLang release: memory cache, sessions, and a few utilities."""

from __future__ import annotations

import logging
import os
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from impl.loading.function_cuts import cut, runnable_functions
from impl.loading.isolation import Bookkeeping, Provided
from impl.loading.isolation import install as install_hook

SGLANG = Bookkeeping(
    package="sglang",
    real=(
        "sglang.srt.constants",
        "sglang.srt.environ",
        "sglang.srt.managers.schedule_batch",
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        "sglang.srt.managers.scheduler_components.invariant_checker",
        "sglang.srt.managers.scheduler_components.pool_stats_observer",
        "sglang.srt.managers.scheduler_runtime_checker_mixin",
        "sglang.srt.managers.session_controller",
        "sglang.srt.mem_cache",
        "sglang.srt.rust_extensions",
        "sglang.srt.session",
        "sglang.srt.utils.token_sequence_matcher",
        "sglang.kernels.ops.mamba",
        "sglang.kernels.ops.memory",
    ),
    # What serves other storage than the GPU pools, and drags dependencies in.
    inert=(
        "sglang.srt.mem_cache.buffer_mode",
        "sglang.srt.mem_cache.cpp_radix_tree",
        "sglang.srt.mem_cache.hicache_storage",
        "sglang.srt.mem_cache.hybrid_cache",
        "sglang.srt.mem_cache.kv_vmm_backing",
        "sglang.srt.mem_cache.memory_pool_host",
        "sglang.srt.mem_cache.pool_host",
        "sglang.srt.mem_cache.sparsity",
        "sglang.srt.mem_cache.storage",
        "sglang.srt.mem_cache.storage_prefetch",
        "sglang.srt.mem_cache.unified_cache.storage_attachment",
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker",
    ),
    # imported by the releases; without a GPU they run nothing on either
    absent=("sgl_kernel", "triton"),
    imported_only=("numpy", "psutil"),
)
# The same with a host tier, its controller and its pools; what assembles those of real models is ours.
_TIERS = (
    "buffer_mode", "hicache_storage", "hybrid_cache", "memory_pool_host", "pool_host", "storage_prefetch",
    "unified_cache.storage_attachment", "unified_cache.unified_cache_linker",
)  # fmt: skip
ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"
WITH_TIERS = replace(
    SGLANG,
    real=(
        *SGLANG.real,
        "sglang.srt.managers.cache_controller",
        "sglang.srt.disaggregation.base",
        "sglang.srt.disaggregation.decode",
        "sglang.srt.disaggregation.decode_hicache_mixin",
        "sglang.srt.disaggregation.decode_schedule_batch_mixin",
        "sglang.srt.disaggregation.prefill",
        "sglang.srt.utils.poll_timer",
    ),
    inert=(
        *(n for n in SGLANG.inert if n.removeprefix("sglang.srt.mem_cache.") not in _TIERS),
        ASSEMBLER,
    ),
)
# Questions about the host in sglang/srt/utils/common.py: a CPU and nothing special. The second lot is so
# with a GPU.
HOST_QUESTIONS = (
    "cpu_has_amx_support", "is_cpu", "is_float4_e2m1fn_x2", "is_hip", "is_hpu", "is_mps", "is_musa", "is_npu",
    "is_xpu",
)  # fmt: skip
OF_A_GPU = ("is_cuda", "is_cuda_alike", "is_pin_memory_available", "support_triton")


def install(
    root: Path, provided: Provided, gpu: bool = False, modules: Bookkeeping | None = None
) -> None:
    """Hook the imports of this process up to the SGLang under `root`.

    Besides what is provided, the utilities are those functions of the release's own file that can run as they
    are.

    modules: what is real, SGLANG unless it is given.
    """
    modules = modules or SGLANG
    install_hook(root, replace(modules, absent=modules.absent[:1]) if gpu else modules, provided)
    env: dict[str, Any] = {
        "array": array,
        "torch": sys.modules["torch"],
        "np": sys.modules.get("numpy"),
        "os": os,
        "logger": logging.getLogger("sglang"),
        "_warned_bool_env_var_keys": set(),
    }
    common = root / "sglang/srt/utils/common.py"
    utilities = cut(common, runnable_functions(common, env), env) | dict.fromkeys(HOST_QUESTIONS, _no)
    utilities |= dict.fromkeys(OF_A_GPU, lambda *_, **__: gpu)
    for name in ("sglang.srt.utils", "sglang.srt.utils.common"):
        provided[name] = {**utilities, **provided.get(name, {})}


def _no(*_: Any, **__: Any) -> bool:
    return False
