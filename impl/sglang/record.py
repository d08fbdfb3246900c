"""SGLang as an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from impl.adapter import UnusableImplementation
from impl.engines import DriveOptions, Engine
from impl.process.remote_system import WorkerSystem
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.releases.copied import COPIED
from impl.system_spec import SystemSpec


def _drive(spec: SystemSpec, options: DriveOptions) -> WorkerSystem:
    """Return the system of a release or a checkout in its ways. `+unified` and `+rust` select that radix
    tree, where a release has the choice (see VARIANTS). Behind them `+overlap` selects overlap scheduling,
    and `+hicache`, also behind `+rust`, the tree with its host tier."""
    from impl.sglang.process.system import SGLangSystem
    from impl.sglang.releases.variants import VARIANTS

    version = spec.version or None
    ways = spec.ways
    if ways[-1:] == ("hicache",) and ways[:-1] in ((), ("rust",)):
        return _with_host_tier(spec, options)
    tree = ways[0] if ways and ways[0] in VARIANTS else None
    overlap = ways[tree is not None :]
    if overlap not in ((), ("overlap",)):
        trees = " or ".join(f"+{name}" for name in VARIANTS)
        after = f"after a release goes {trees}, then +overlap; or +hicache, behind +rust too"
        raise UnusableImplementation(f"--impl {str(spec)!r}: {after}")
    return SGLangSystem(
        version=version,
        path=options.checkout,
        tree=tree,
        gpu=options.device == "cuda",
        overlap=bool(overlap),
        calls=options.calls,
        limits=options.limits,
    )


def _with_host_tier(spec: SystemSpec, options: DriveOptions) -> WorkerSystem:
    from impl.sglang.tiers.system import TierSystem

    if options.device != "cpu":
        raise UnusableImplementation(f"--device: {spec} is not driven on {options.device}")
    core = "".join(spec.ways[:-1])
    return TierSystem(
        spec.version or None,
        options.checkout,
        core=core,
        calls=options.calls,
        limits=options.limits,
    )


def _releases_with(ways: Sequence[str]) -> Sequence[str]:
    from impl.sglang.releases.variants import VARIANTS
    from impl.sglang.tiers.api import FIRST_IN_RUST, FIRST_RELEASE

    order = list(TABLE)
    having = VARIANTS.get(ways[0] if ways else "", TABLE)
    if "hicache" in ways:
        order = order[order.index(FIRST_IN_RUST if "rust" in ways else FIRST_RELEASE) :]
    return tuple(version for version in order if version in having)


def _loads(module: str) -> bool:
    from impl.sglang.parts.modules import SGLANG, WITH_TIERS

    return SGLANG.is_real(module) or WITH_TIERS.is_real(module)


def _test_hook(text: str) -> str:
    """Exported tests say who made them; others may call the scheduler and the queues of a decode server, or
    the threads of a storage."""
    from impl.sglang.parts.modules import ASSEMBLER

    if "Made by kvspec" not in text and "sglang.srt.managers.cache_controller" not in text:
        return "impl.sglang.process.testing:wide"
    tiers = ASSEMBLER, "cache_controller"
    return f"impl.sglang.process.testing:{'import_tiered' if any(n in text for n in tiers) else 'hook'}"


def _complete(release: str, root: Path) -> None:
    """Add what a folder from before servers that only prefill lacks."""
    from impl.sglang.parts.fetch import PREFILLS, release_root

    if not (root / PREFILLS).exists():
        release_root(release, PREFILLS)


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    repository="sgl-project/sglang",
    about="Each release's own session cache around its own chunk cache or radix tree, on a CPU.",
    releases=tuple(TABLE),
    ways=("", "overlap", "hicache", "rust", "unified", "rust+overlap", "rust+hicache"),
    having=_releases_with,
    drive=_drive,
    test_hook=_test_hook,
    devices=("cpu", "cuda"),
    loads=_loads,
    sketched=(
        "sglang/srt/disaggregation/decode*.py",
        "sglang/srt/disaggregation/prefill.py",
        "sglang/srt/managers/cache_controller.py",
        "sglang/srt/mem_cache/allocat*.py",
        "sglang/srt/mem_cache/base_prefix_cache.py",
        "sglang/srt/mem_cache/base_swa_memory_pool.py",
        "sglang/srt/mem_cache/cache_init_params.py",
        "sglang/srt/mem_cache/chunk_cache.py",
        "sglang/srt/mem_cache/common.py",
        "sglang/srt/mem_cache/events.py",
        "sglang/srt/mem_cache/evict_policy.py",
        "sglang/srt/mem_cache/hicache_storage.py",
        "sglang/srt/mem_cache/l2_transfer.py",
        "sglang/srt/mem_cache/mamba_checkpoint_pool.py",
        "sglang/srt/mem_cache/memory_pool.py",
        "sglang/srt/mem_cache/memory_pool_host.py",
        "sglang/srt/mem_cache/radix_cache.py",
        "sglang/srt/mem_cache/registry.py",
        "sglang/srt/mem_cache/session_*.py",
        "sglang/srt/mem_cache/storage_prefetch.py",
        "sglang/srt/mem_cache/swa_*.py",
        "sglang/srt/mem_cache/unified_*.py",
        "sglang/srt/mem_cache/utils.py",
        "sglang/srt/mem_cache/allocator/*.py",
        "sglang/srt/mem_cache/buffer_mode/*.py",
        "sglang/srt/mem_cache/hybrid_cache/hybrid_*.py",
        "sglang/srt/mem_cache/pool_host/base.py",
        "sglang/srt/mem_cache/pool_host/group.py",
        "sglang/srt/mem_cache/rust_tree_core/*.py",
        "sglang/srt/mem_cache/unified_cache/**/*.py",
        "sglang/srt/mem_cache/unified_cache_components/*.py",
        "sglang/srt/managers/schedule_batch.py",
        "sglang/srt/managers/schedule_policy.py",
        "sglang/srt/managers/scheduler.py",
        "sglang/srt/managers/scheduler_components/*.py",
        "sglang/srt/managers/scheduler_output_processor_mixin.py",
        "sglang/srt/managers/scheduler_runtime_checker_mixin.py",
        "sglang/srt/managers/session_controller.py",
        "sglang/srt/session/*.py",
        "sglang/srt/speculative/eagle_info_v2.py",
        "sglang/srt/speculative/eagle_utils.py",
    ),
    copied=COPIED,
    complete=_complete,
)
