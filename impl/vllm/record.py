"""The record of vLLM as an engine: its releases, its ways and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from impl.adapter import UnusableImplementation
from impl.engines import DriveOptions, Engine
from impl.process.remote_system import WorkerSystem
from impl.system_spec import SystemSpec
from impl.vllm.api import RELEASES, SINCE, WAYS
from impl.vllm.copied import COPIED
from impl.vllm.fetch import complete
from impl.vllm.images import FILES as IMAGES
from impl.vllm.images_v2 import FILES as IMAGES_V2
from impl.vllm.modules import RUNNER_V2, STATES_V2


def _drive(spec: SystemSpec, options: DriveOptions) -> WorkerSystem:
    """Return the system of a spec. The ways are `+async` for overlap scheduling, `+v2` for model runner V2,
    `+offload` for its OffloadingConnector, `+pair` for two servers joined by its NixlConnector, and
    `+images` for prompts with images."""
    from impl.vllm.system import VLLMSystem

    is_on = {way: word in spec.ways for way, word in WAYS.items()}
    if list(spec.ways) != [WAYS[way] for way in WAYS if is_on[way]]:
        order = ", then +".join(WAYS.values())
        raise UnusableImplementation(f"--impl {str(spec)!r}: after a release goes +{order}")
    return VLLMSystem(
        version=spec.version or None, path=options.checkout, **is_on, limits=options.limits
    )


def _releases_with(ways: Sequence[str]) -> Sequence[str]:
    """Return the releases that have all these ways."""
    first_index = max((RELEASES.index(SINCE[way]) for way in ways if way in SINCE), default=0)
    return RELEASES[first_index:]


def _loads(module: str) -> bool:
    from impl.vllm import offload
    from impl.vllm.modules import VLLM
    from impl.vllm.pair import REAL

    return replace(VLLM, real=VLLM.real + offload.REAL + REAL).is_real(module)


def _test_hook(text: str) -> str:
    """Return the hook that loads the release for a test in upstream's shape: with the worker's class if the
    test calls it."""
    if "gpu_model_runner" in text:
        return "impl.vllm.testing:with_worker"
    return "impl.vllm.modules:with_connector"


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    repository="vllm-project/vllm",
    about="Every minor release from 0.11 on; sessions came with 0.15.",
    releases=RELEASES,
    ways=(
        "", "async", "offload", "v2", "async+v2", "async+offload", "pair",
        "images", "async+images", "offload+images", "async+offload+images",
        "v2+images", "async+v2+images",
    ),
    having=_releases_with,
    drive=_drive,
    test_hook=_test_hook,
    loads=_loads,
    sketched=(
        "vllm/v1/core/**/*.py",
        "vllm/v1/request.py",
        "vllm/v1/kv_cache_*.py",
        "vllm/v1/outputs.py",
        "vllm/v1/engine/__init__.py",
        # +offload, without the modules that move bytes
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/*.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
        "vllm/v1/kv_offload/*.py",
        "vllm/v1/kv_offload/cpu/common.py",
        "vllm/v1/kv_offload/cpu/manager.py",
        "vllm/v1/kv_offload/cpu/spec.py",
        "vllm/v1/kv_offload/cpu/policies/*.py",
        "vllm/v1/kv_offload/tiering/*.py",
        "vllm/v1/kv_offload/tiering/fs/manager.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py",
        "vllm/v1/simple_kv_offload/manager.py",
        "vllm/v1/simple_kv_offload/metadata.py",
        "vllm/v1/simple_kv_offload/worker.py",
        *IMAGES,
        *IMAGES_V2,
        # +pair
        "vllm/distributed/kv_transfer/kv_connector/v1/base.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/nixl/*.py",
        "vllm/distributed/kv_transfer/kv_connector/v1/ssm_conv_transfer_utils.py",
        *RUNNER_V2,
        *STATES_V2,
    ),
    copied=COPIED,
    complete=complete,
)
