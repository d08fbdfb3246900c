"""Write the sketches of releases, by which `impl.nearest` finds the one that a checkout is nearest to; the
names that adapters use of them (`impl.used_names`); and the statements of the rules that adapters copy
(`impl.copied_rules`).

`python -m ci.sketches [ENGINE...]` reads every driven release of an engine; those that are not in the cache
are fetched. Run it when a release is added.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ci import adapter_names
from impl import nearest, used_names
from impl.copied_rules import CopiedRules
from impl.sglang.releases.copied import COPIED as OF_SGLANG
from impl.vllm.copied import COPIED as OF_VLLM
from impl.vllm.fetch import complete
from stateful_tests.check.way_map import way_map
from stateful_tests.lockstep import known_faults, systems
from stateful_tests.lockstep.known_faults import Engine

# The files whose lines count: those that are loaded, less what changes for other reasons.
_FILES: dict[Engine, tuple[str, ...]] = {
    "sglang": (
        "sglang/srt/mem_cache/allocat*.py",
        "sglang/srt/mem_cache/base_prefix_cache.py",
        "sglang/srt/mem_cache/base_swa_memory_pool.py",
        "sglang/srt/mem_cache/cache_init_params.py",
        "sglang/srt/mem_cache/chunk_cache.py",
        "sglang/srt/mem_cache/common.py",
        "sglang/srt/mem_cache/evict_policy.py",
        "sglang/srt/mem_cache/memory_pool.py",
        "sglang/srt/mem_cache/radix_cache.py",
        "sglang/srt/mem_cache/registry.py",
        "sglang/srt/mem_cache/session_*.py",
        "sglang/srt/mem_cache/swa_*.py",
        "sglang/srt/mem_cache/unified_radix_cache.py",
        "sglang/srt/mem_cache/allocator/*.py",
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
    "vllm": (
        "vllm/v1/core/**/*.py",
        "vllm/v1/request.py",
        "vllm/v1/kv_cache_*.py",
        "vllm/v1/outputs.py",
        "vllm/v1/engine/__init__.py",
    ),
    "lmdeploy": (
        "lmdeploy/pytorch/paging/**/*.py",
        "lmdeploy/pytorch/engine/*.py",
        "lmdeploy/pytorch/strategies/ar/*.py",
        "lmdeploy/pytorch/messages.py",
    ),
    "transformers": ("transformers/generation/continuous_batching/**/*.py",),
}

_COPIED: dict[Engine, CopiedRules] = {"sglang": OF_SGLANG, "vllm": OF_VLLM}


def sketch_of(engine: Engine) -> nearest.Sketch:
    """The sketch of all driven releases of an engine."""
    releases = tuple(known_faults.releases(engine))
    roots = [_root(f"{engine}=={release}") for release in releases]
    files = sorted({file for root in roots for file in driven_files(engine, root)})
    lines = dict[bytes, int]()
    for number, root in enumerate(roots):
        for line in nearest.checksums(root / file for file in files):
            lines[line] = lines.get(line, 0) | 1 << number
    return nearest.Sketch(releases, tuple(files), lines)


def names_of(engine: Engine) -> used_names.NameSketch:
    """The names that an engine's adapter uses, with the driven releases that have them."""
    releases = tuple(known_faults.releases(engine))
    roots = [_root(f"{engine}=={release}") for release in releases]
    files = {file for root in roots for file in driven_files(engine, root)} | way_map(engine).files
    there = [used_names.words(root / file for file in files) for root in roots]
    names = []
    for name, ways in adapter_names.used(engine).items():
        if mask := sum(1 << number for number, words in enumerate(there) if name in words):
            names.append(used_names.UsedName(name, mask, ways))
    return used_names.NameSketch(releases, tuple(sorted(files)), tuple(names))


def driven_files(engine: Engine, root: Path) -> Iterator[str]:
    """The files of a release whose lines count."""
    for pattern in _FILES[engine]:
        yield from (file.relative_to(root).as_posix() for file in root.glob(pattern))


def copied_by(engine: Engine) -> str:
    """The statements of the rules that an engine's adapter copies, of all driven releases."""
    roots = []
    for release in known_faults.releases(engine):
        roots.append(_root(f"{engine}=={release}"))
        if engine == "vllm":
            complete(release, roots[-1])
    return _COPIED[engine].written(roots)


def _root(release: str) -> Path:
    with closing(systems.resolve(release)) as system:
        root: Path = system.root
    return root


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for name in [engine for engine in _FILES if not wanted or engine in wanted]:
        (nearest.FOLDER / f"{name}.txt").write_text(nearest.written(sketch_of(name)), "ascii")
        used_names.write(name, names_of(name))
        if name in _COPIED:
            _COPIED[name].file.write_text(copied_by(name), "utf-8")
