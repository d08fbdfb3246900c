"""The modules of a release that a pair loads, stand-ins for all others, and the settings of a server."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from impl.loading.function_cuts import cut
from impl.loading.isolation import install as install_hook
from impl.stand_ins import Values, accepted_arguments
from impl.vllm import modules, offload
from impl.vllm.bare_connectors import CONNECTORS, connector_class
from impl.vllm.pair import MULTI, MULTI_CONNECTOR, NIXL, REAL
from impl.vllm.pair.both_connectors import MULTI_NAME, NIXL_NAME, TransferConfig, multi_connector_config
from impl.vllm.pair.network import Agent, Clock, Handshakes, SideChannel, Telemetry
from reference.blocks.config import EngineConfig
from reference.pairs.config import DECODE, LEASE, PREFILL

_WORKER = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py"
_TABLES = "vllm/v1/worker/block_table.py"
_UTILS = "vllm/distributed/kv_transfer/kv_connector/utils.py"


class Layout:
    """The memory layout of the loaded release.

    tokens_first: a KV cache has the token dimension before the head dimension.
    equal_blocks: both servers need the same block size (0.26).
    kernel_blocks: kernel blocks in an attention block; more than 1 for the large blocks of a hybrid model.
    """

    tokens_first = equal_blocks = False
    kernel_blocks = 1


class AttentionBackend:
    """An attention backend: the connector reads its name and the shape of its KV cache."""

    @staticmethod
    def get_name() -> str:
        return "PLAYED"

    full_cls_name = get_name

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, **_: Any
    ) -> tuple[int, ...]:
        inner = (block_size, num_kv_heads) if Layout.tokens_first else (num_kv_heads, block_size)
        return (num_blocks, *inner, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(*_: Any, **__: Any) -> tuple[int, ...]:
        return (0, 1, 2, 3)

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[int]:
        return [1]


class Factory:
    """A stand-in for `KVConnectorFactory`.

    push: servers have the push connector instead of the pull one.
    """

    push = False

    @classmethod
    def get_connector_class(cls, config: Any) -> Any:
        """Return the class of a connector."""
        if config.kv_connector == MULTI_NAME:
            return importlib.import_module(MULTI).MultiConnector
        if config.kv_connector != NIXL_NAME:
            return connector_class(config.kv_connector)
        names = ("NixlPushConnector",) if cls.push else ("NixlPullConnector", "NixlConnector")
        known = vars(importlib.import_module(NIXL))
        return next(known[name] for name in names if name in known)

    @classmethod
    def create_connector(cls, config: Any, role: Any, kv_cache_config: Any = None) -> Any:
        arguments = {"vllm_config": config, "role": role, "kv_cache_config": kv_cache_config}
        kind = cls.get_connector_class(config.kv_transfer_config)
        return kind(**accepted_arguments(kind.__init__, arguments))

    @classmethod
    def supports_hma_config(cls, config: Any) -> bool:
        """Return whether a connector takes several groups, as the release's factory does."""
        kind = cls.get_connector_class(config)
        if config.kv_connector == MULTI_NAME:
            return bool(kind.all_children_support_hma(config))
        return bool(importlib.import_module(f"{CONNECTORS}.v1.base").supports_hma(kind))


def install(root: Path) -> None:
    """Import vLLM from `root` in this process, with its NixlConnector and stand-ins for its network."""
    sys.modules.setdefault("regex", re)
    Layout.tokens_first = "permute(0, 2, 1, 3)" in (root / _UTILS).read_text(encoding="utf-8")
    worker = (root / _WORKER).read_text(encoding="utf-8")
    Layout.equal_blocks = "HMA does not support different remote block size" in worker
    engine = (root / "vllm/v1/engine").glob("*.py")
    never = tuple(f"vllm.v1.engine.{file.stem}" for file in engine if file.stem != "__init__")
    real = modules.VLLM.real + offload.REAL + REAL
    names = replace(modules.VLLM, real=real, inert=never + offload.INERT)
    install_hook(root, names, _stand_ins_by_module(root))
    # `from vllm import envs` asks the package before it imports.
    package: Any = importlib.import_module("vllm")
    package.envs = importlib.import_module("vllm.envs")
    offload.expose()
    importlib.import_module(NIXL)
    if (root / MULTI_CONNECTOR).is_file():
        importlib.import_module(MULTI)
    played = {
        "time": Clock, "ThreadPoolExecutor": Handshakes, "zmq_ctx": SideChannel,
        "get_current_attn_backends": lambda *_: [AttentionBackend],
        "get_current_attn_backend": lambda *_: AttentionBackend,
        "get_current_attn_backends_and_specs": lambda *_: ([AttentionBackend], [None]),
        "select_common_block_size": lambda size, *_: size // Layout.kernel_blocks,
    }  # fmt: skip
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(NIXL):
            known = vars(module)
            known.update({name: value for name, value in played.items() if name in known})


def _stand_ins_by_module(root: Path) -> Any:
    """Return the stand-ins for names that the connector imports from modules that are not loaded, by
    module."""
    provided: dict[str, dict[str, Any]] = {**modules.provided_names(), **offload.stand_ins_by_module()}
    maps = cut(root / _TABLES, frozenset({"BlockTable.map_to_kernel_blocks"}), {"np": np})  # to 0.31
    of_tables = {name.rpartition(".")[2]: function for name, function in maps.items()}
    provided["vllm.v1.worker.block_table"] = {"BlockTable": Values(**of_tables)}
    vars(provided["vllm.platforms"]["current_platform"]).update(
        device_type="cuda", get_nixl_supported_devices=dict, get_nixl_memory_type=_return_none,
        set_device=_return_none, is_cpu=lambda: False,
    )  # fmt: skip
    provided["vllm.envs"].update(
        VLLM_NIXL_SIDE_CHANNEL_HOST="host", VLLM_NIXL_SIDE_CHANNEL_PORT=5600,
        VLLM_NIXL_ABORT_REQUEST_TIMEOUT=LEASE, VLLM_SSM_CONV_STATE_LAYOUT="DS",
        VLLM_KV_CACHE_LAYOUT=None,
    )  # fmt: skip
    return provided | {
        "vllm": {"__version__": "0"},
        f"{CONNECTORS}.factory": {"KVConnectorFactory": Factory},
        "vllm.config.kv_transfer": {"KVTransferConfig": TransferConfig},
        "vllm.distributed.nixl_utils": {
            "NixlWrapper": Agent, "check_nixl_version": _return_none, "nixl_agent_config": None,
            "nixlXferTelemetry": Telemetry, "is_nixl_available": lambda: True,
        },
        "vllm.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
            "get_tp_group": lambda: Values(rank=0),
            "get_pcp_group": lambda: Values(rank_in_group=0),
        },
        "vllm.utils.network_utils": {"make_zmq_path": socket_path, "make_zmq_socket": None},
        "vllm.config.utils": {"hash_factors": lambda factors: str(sorted(factors.items()))},
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "HND", "PAD_SLOT_ID": -1},
    }  # fmt: skip


def _return_none(*_: Any, **__: Any) -> None:
    return None


def socket_path(scheme: str, host: str, port: int | None = None) -> str:
    """Return the path of a socket, in the place of `make_zmq_path`."""
    return f"{scheme}://{host}:{port}"


def add_pair_settings(settings: Any, config: EngineConfig, server: str, host_first: bool) -> None:
    """Add the settings of a server of a pair to those of a server with a connector."""
    extra: dict[str, Any] = {"kv_lease_duration": LEASE, "kv_recompute_threshold": 0}
    role = "kv_producer" if server == PREFILL else "kv_consumer"
    if config.host_chunks:
        of_host = settings.kv_transfer_config.kv_connector_extra_config
        extra = multi_connector_config(extra, of_host, role, host_first)
    layers = len(config.groups)
    vars(settings)["kv_transfer_config"] = TransferConfig(
        kv_connector_extra_config=extra, kv_connector=MULTI_NAME if config.host_chunks else NIXL_NAME,
        kv_role=role, engine_id=f"engine-{server}",
        kv_load_failure_policy="fail" if config.fail_requests else "recompute",
    )  # fmt: skip
    vars(settings.parallel_config).update(
        nnodes_within_dp=1, data_parallel_index=int(server == DECODE), tensor_parallel_size=1, world_size=1,
        rank=0, prefill_context_parallel_size=1, decode_context_parallel_size=1, data_parallel_rank_local=0,
    )  # fmt: skip
    vars(settings.model_config).update(
        use_mla=False, enable_sleep_mode=False, get_head_size=lambda: 8, model="model", dtype="float32",
        get_total_num_kv_heads=lambda: 1, get_total_num_hidden_layers=lambda: layers,
        get_num_layers=lambda *_: layers, is_hybrid=False, is_deepseek_mla=False,
        get_num_kv_heads=lambda *_: 1,
    )  # fmt: skip
    if settings.speculative_config is not None:
        draft = Values(
            model="draft", hf_config=Values(), revision=None, code_revision=None, dtype="float32"
        )
        vars(settings.speculative_config).update(
            draft_model_config=draft, method="eagle", kv_cache_dtype=None, parallel_drafting=False
        )
    vars(settings.cache_config).update(
        cache_dtype="auto", get_resolved_kv_cache_layout=lambda: Values(name="LBHNC", value="LBHNC"),
        enable_prefix_caching=config.caching,
    )  # fmt: skip
