"""The two connectors of a server of a pair with host memory: a release's own MultiConnector over its
NixlConnector and its OffloadingConnector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from impl.loading.optional import optional
from impl.stand_ins import Values
from impl.vllm.bare_connectors import Transfers
from impl.vllm.offload import OFFLOADING, children

MULTI_NAME = "MultiConnector"
NIXL_NAME = "NixlConnector"


class TransferConfig(Values):
    """A stand-in for `KVTransferConfig`, with the defaults that the connectors read."""

    def __init__(self, **given: Any) -> None:
        extra = given.setdefault("kv_connector_extra_config", {})
        role = given["kv_role"]
        super().__init__(
            **{
                "kv_buffer_device": "cuda", "enable_permute_local_kv": False,
                "kv_load_failure_policy": "fail", "is_kv_consumer": role != "kv_producer",
                "is_kv_producer": role != "kv_consumer", "get_from_extra_config": extra.get,
            } | given
        )  # fmt: skip


def multi_connector_config(
    nixl: dict[str, Any], host: dict[str, Any], role: str, host_first: bool
) -> dict[str, Any]:
    """Return what MultiConnector reads of its configuration.

    nixl, host: what each connector reads of its own. role: the server's, to its peer. host_first: the order.
    """
    connectors = [
        {"kv_connector": NIXL_NAME, "kv_role": role, "kv_connector_extra_config": nixl},
        {"kv_connector": OFFLOADING, "kv_role": "kv_both", "kv_connector_extra_config": host},
    ]
    return {"connectors": connectors[::-1] if host_first else connectors}


def nixl_of(connector: Any) -> Any:
    """Return the NixlConnector among a server's connectors."""
    return next(child for child in children(connector) if type(child).__name__ != OFFLOADING)


def attach_host(connector: Any, transfers: Transfers) -> Any:
    """Put the device below the worker's side of an OffloadingConnector, in the place of its copies of
    registered KV, and return that connector; None if the server has no host memory."""
    for child in children(connector):
        if type(child).__name__ == OFFLOADING:
            child.connector_worker.worker = transfers
            child.register_kv_caches = _register_nothing
            return child
    return None


def _register_nothing(_: Any) -> None:
    """Do nothing: the device has the memory."""


def multi_connector_tables(connectors: Iterable[Any]) -> dict[str, Any]:
    """Return the tables of MultiConnector on both sides, by their names; empty without it."""
    tables = {}
    for side, connector in zip(("scheduler", "worker"), connectors):
        for name in ("_requests_to_connector", "_extra_async_saves"):
            table = optional(connector, f"MultiConnector.{name}", {})
            tables[f"{side}'s {name.lstrip('_')}"] = table
    return tables
