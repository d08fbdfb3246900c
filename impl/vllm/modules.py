"""The modules of a vLLM release that are loaded (scheduler, cache manager, request), and stand-ins for names
that they import from others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from impl.loading.function_cuts import cut
from impl.loading.isolation import Bookkeeping, Inert, Provided
from impl.loading.isolation import install as install_hook
from impl.stand_ins import Values
from impl.vllm import images, images_v2
from impl.vllm.bare_scheduler import Questions

REAL = (
    "vllm.v1.core", "vllm.v1.request", "vllm.v1.kv_cache_interface", "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry", "vllm.v1.hisparse.block_pool", "vllm.v1.engine", "vllm.v1.outputs",
    "vllm.v1.metrics.stats", "vllm.v1.metrics.utils", "vllm.v1.metrics.cache_hit_source", "vllm.v1.kv_hints",
    "vllm.v1.spec_decode.metrics", "vllm.utils.math_utils",
)  # fmt: skip
_NEVER_RUN = (
    "zmq", "uvloop", "prometheus_client", "cbor2", "xxhash", "transformers", "PIL", "pydantic", "cachetools",
    "cloudpickle", "psutil", "regex", "setproctitle", "yaml", "vllm_flash_attn", "blake3",
)  # fmt: skip
# The worker's own code that updates requests and block tables from the scheduler's output.
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
RUNNER_V2 = tuple(
    f"vllm/v1/worker/gpu/{name}.py"
    for name in ("model_runner", "states", "block_table", "buffer_utils", "input_batch")
)
# The worker's code that copies recurrent states.
STATES = tuple(
    f"vllm/{name}.py"
    for name in (
        "v1/worker/mamba_utils",
        "model_executor/layers/mamba/mamba_utils",
        "model_executor/layers/mamba/checkpoint",
    )
)
STATES_V2 = ("vllm/v1/worker/gpu/model_states/mamba_hybrid.py",)
RUNNER_METHODS = ("_update_states", "_update_streaming_request")
WORKER = tuple(
    file.removesuffix(".py").replace("/", ".") for file in (*RUNNER_V2, *STATES, *STATES_V2)
)
VLLM = Bookkeeping("vllm", REAL + WORKER, imported_only=("numpy", "msgspec", *_NEVER_RUN))


class _Logger(logging.Logger):
    def info_once(self, *_: Any, **__: Any) -> None:
        pass

    warning_once = debug_once = info_once


class _ReadOnly(Sequence[Any]):
    """A read-only view of a list (vllm/v1/utils.py: ConstantList)."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __getitem__(self, at: Any) -> Any:
        return self._values[at]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Any:
        return iter(self._values)

    def copy(self) -> list[Any]:
        return self._values.copy()


def _cdiv(a: int, b: int) -> int:
    return -(a // -b)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _variable(name: str) -> None:
    """Look up an environment variable, none of which is set. Raises AttributeError for another
    name."""
    if not name.startswith("VLLM_"):
        raise AttributeError(name)


def _no(*_: Any, **__: Any) -> bool:
    return False


def _to_device(values: Any, device: Any = None, dtype: Any = None, out: Any = None) -> Any:
    del device  # there is only one
    tensor = sys.modules["torch"].as_tensor(values, dtype=dtype)
    return tensor.clone() if out is None else out.copy_(tensor)


def provided_names(root: Path | None = None) -> Provided:
    """Return the stand-ins for names that the loaded modules import from others, by module.

    root: the folder of a release; its own rules about images are used if it has their file.
    """
    from impl.vllm import triton
    from impl.vllm.states import MirroredBuffer
    from impl.vllm.states_v2 import DefaultModelState, metadata

    def size(dtype: Any) -> int:
        return int(sys.modules["torch"].tensor([], dtype=dtype).element_size())

    image_rules = {}
    if root is not None and (root / images.UTILS).is_file():
        image_rules = images.rules(root)
    text_only = Values(supports_multimodal_inputs=_no, get_encdec_max_encoder_len=lambda *_: 0)
    return {
        "vllm.logger": {"init_logger": lambda name: _Logger(name, logging.CRITICAL)},
        "vllm.sampling_params": {"SamplingParams": Values, "SamplingType": Values(RANDOM_SEED=object())},
        "vllm.v1.structured_output.request": {
            "StructuredOutputRequest": Values(from_sampling_params=_nothing),
        },
        "vllm.v1.structured_output.utils": {
            "strip_speculative_padding": lambda tokens: [t for t in tokens if t != -1],
        },
        "vllm.v1.utils": {
            "ConstantList": _ReadOnly, "record_function_or_nullcontext": Inert,
            "CpuGpuBuffer": MirroredBuffer,
        },
        "vllm.v1.worker.utils": {"copy_kv_cache_blocks_inplace": _copy_blocks},
        "vllm.v1.worker.gpu.model_states.default": {"DefaultModelState": DefaultModelState},
        "vllm.v1.worker.gpu.attn_utils": {"build_attn_metadata": metadata},
        "vllm.utils": {
            "cdiv": _cdiv, "round_up": lambda x, y: _cdiv(x, y) * y, "round_down": lambda x, y: x // y * y,
            "length_from_prompt_token_ids_or_embeds": lambda tokens, _: len(tokens), "get_dtype_size": size,
        },
        "vllm.utils.torch_utils": {
            "get_dtype_size": size, "async_tensor_h2d": _to_device, "PIN_MEMORY": False,
        },
        "vllm.utils.platform_utils": {"is_uva_available": _no},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
        "vllm.triton_utils": {"tl": triton.Language, "triton": triton.Triton, "HAS_TRITON": True},
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": text_only},
        "vllm.multimodal.utils": {
            "get_mm_features_in_window": lambda *_, **__: (0, 0),
            "strip_covered_mm_data": lambda features, *_, **__: features,
            "set_mm_embedding_modality": _nothing,
            **image_rules,
        },
        "vllm.platforms": {
            "current_platform": Questions(device_type="cpu", register_custom_kv_cache_specs=_nothing),
        },
        "vllm.distributed.kv_events": {"MEDIUM_GPU": "GPU", "MEDIUM_CPU": "CPU"},
        "vllm.envs": {"__getattr__": _variable},
        "vllm.config": {"get_current_vllm_config_or_none": _nothing},
        "vllm.exceptions": {"VLLMValidationError": ValueError, "VLLMNotFoundError": KeyError},
    }  # fmt: skip


def install(root: Path, _: str = "", offloads: bool = False, encodes: bool = False) -> None:
    """Import vLLM, of any release, from `root` in this process.

    offloads: with its OffloadingConnector.
    encodes: for a model with an encoder.
    """
    engine = (root / "vllm/v1/engine").glob("*.py")
    never = tuple(f"vllm.v1.engine.{file.stem}" for file in engine if file.stem != "__init__")
    stand_ins = provided_names(root) | (images.stand_ins_by_module() if encodes else {})
    modules = replace(VLLM, inert=never)
    if encodes:
        modules = replace(modules, real=VLLM.real + images_v2.MODULES)
    if not offloads:
        install_hook(root, modules, stand_ins)
        return
    from impl.vllm import offload

    modules = replace(modules, real=modules.real + offload.REAL, inert=never + offload.INERT)
    install_hook(root, modules, stand_ins | offload.stand_ins_by_module())
    offload.expose(root)


def with_connector(root: Path, _: str = "") -> None:
    """Import vLLM from `root` with its OffloadingConnector (see `install`)."""
    install(root, offloads=True)


def runner_methods(
    root: Path, renamed: Mapping[str, str], encodes: bool = False
) -> dict[str, Any]:
    """Return the worker's methods of this release, compiled without its module, by their names in other
    releases.

    renamed: old name -> name in this release.
    encodes: with the methods of an encoder.
    """
    env: dict[str, Any] = {
        "CachedRequestState": WorkerRequest,
        "SamplingType": Values(RANDOM_SEED=object()),
        "torch": sys.modules["torch"],
        "get_pp_group": lambda: Values(is_last_rank=True),
        "cast": lambda _, value: value,
        "length_from_prompt_token_ids_or_embeds": lambda tokens, _: len(tokens),
        "copy_kv_cache_blocks_inplace": _copy_blocks,
    }
    wanted = list(RUNNER_METHODS)
    if encodes:
        wanted += [*images.METHODS, *images.OPTIONAL_METHODS]
        env |= images.rules(root)
        env |= {
            "PIN_MEMORY": False,
            "set_mm_embedding_modality": _nothing,
            "MultiModalKwargsItem": dict,
            "PlaceholderRange": images.ImageSpan,
        }
    names = {renamed.get(f"GPUModelRunner.{name}", name): name for name in wanted}
    methods = cut(root / RUNNER, frozenset(f"GPUModelRunner.{name}" for name in names), env)
    return {names[name]: method for name, method in methods.items()}


def _copy_blocks(memory: dict[int, Any], _: int, copies: Any) -> None:
    """Copy blocks of the runner's memory.

    copies: pairs of (source, target).
    """
    for source, target in copies:
        group, slots = memory.get(source, (-1, []))
        memory[target] = (group, list(slots))


class WorkerRequest(Values):
    """A worker's record of a request (gpu_input_batch.py: CachedRequestState)."""

    prev_num_draft_len = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @num_prompt_tokens.setter
    def num_prompt_tokens(self, _: int) -> None:
        """Ignore the value: it follows from prompt_token_ids."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    def get_token_id(self, position: int) -> int:
        """Return the token at a position, -1 after the last one."""
        tokens = self.prompt_token_ids + self.output_token_ids
        return int(tokens[position]) if position < len(tokens) else -1
