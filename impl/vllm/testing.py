"""The import of a release into its own process, for tests in upstream's shape that call the worker."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from impl.loading.isolation import install
from impl.stand_ins import Values
from impl.vllm import modules, offload


def _no(*_: Any, **__: Any) -> bool:
    return False


def with_worker(root: Path, _: str = "") -> None:
    """Import vLLM from `root` with its OffloadingConnector, and with the worker's class and its persistent
    batch (model runner V1), for tests in upstream's shape. Driven engines do not import these."""
    package = "vllm.v1.worker"
    of_worker = [f"{package}.{name}" for name in ("mamba_utils", "gpu_model_runner", "gpu_input_batch")]
    real = (*modules.VLLM.real, *offload.REAL, *of_worker)
    never = (*modules.VLLM.imported_only, "tqdm")
    stand_ins = modules.provided_names() | offload.stand_ins_by_module()
    stand_ins["vllm.utils.torch_utils"]["PIN_MEMORY"] = False
    stand_ins["vllm.sampling_params"]["SamplingType"] = Values(GREEDY=0, RANDOM=1, RANDOM_SEED=2)
    stand_ins["vllm.v1.sample.logits_processor"] = {"BatchUpdateBuilder": _FreeRows}
    stand_ins["vllm.distributed.kv_transfer"] = {"has_kv_transfer_group": _no}
    stand_ins["vllm.distributed.ec_transfer"] = {"has_ec_transfer": _no}
    install(root, replace(modules.VLLM, real=real, inert=offload.INERT, imported_only=never), stand_ins)
    for name in of_worker:  # their package is inert, and only returns submodules that are loaded
        importlib.import_module(name)


class _FreeRows:
    """The free rows of the persistent batch; the lowest is used first (v1/sample/logits_processor)."""

    def __init__(self) -> None:
        self.removed: list[int] = []
        self.added: list[Any] = []
        self.moved: list[Any] = []

    def removed_append(self, row: int) -> None:
        self.removed = sorted([*self.removed, row], reverse=True)

    def peek_removed(self) -> int | None:
        return self.removed[-1] if self.removed else None

    def pop_removed(self) -> int | None:
        return self.removed.pop() if self.removed else None

    def get_and_reset(self, _: int) -> None:
        self.__init__()  # type: ignore[misc]
