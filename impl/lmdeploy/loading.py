"""Modules that are loaded of a release of LMDeploy, and the source of its files."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import replace
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

from impl.lmdeploy.api import RELEASES, TABLES
from impl.loading.isolation import Bookkeeping, Inert, install
from impl.self_scheduling.release_system import REQUESTS_ALONE, ReleaseSystem
from impl.stand_ins import Values

_PACKAGE = "lmdeploy.pytorch"
# The modules that the driver calls; envs first, which others take from its package.
_CALLED = ("envs", "config", "messages", "paging", "engine.inputs_maker", "engine.engine_loop",
           "strategies.ar.sequence", "strategies.ar.engine",
           "strategies.ar_spec.sequence", "strategies.ar_spec.engine")  # fmt: skip
# What they import is inert but for these.
_REAL = (*_CALLED, "block", "long_context", "prefix_cache_state", "engine.cache_inputs",
         "strategies.base", "disagg.config", "disagg.conn.protocol")  # fmt: skip
_LOADED = (*(f"{_PACKAGE}.{name}" for name in _REAL), "lmdeploy.messages")
CAPABILITIES = replace(
    REQUESTS_ALONE,
    recurrent=True,
    commands=REQUESTS_ALONE.commands | {"NewWeights"},
    sources=frozenset({"adapter"}),
)


class LMDeploySystem(ReleaseSystem):
    """LMDeploy's PyTorch engine."""

    package = "lmdeploy"
    releases = RELEASES
    tables = TABLES
    modules = Bookkeeping("lmdeploy", _LOADED, imported_only=("pydantic",))
    driver = "impl.lmdeploy.driver"
    capabilities = CAPABILITIES
    kept_prefixes = ("lmdeploy/pytorch/", "lmdeploy/messages.py", "lmdeploy/version.py")
    required_path = "lmdeploy/pytorch/paging/block_trie/trie.py"  # since 0.16.0


def load(root: Path) -> dict[str, Any]:
    """Return the release's modules, loaded in this process, such as "inputs_maker" and "ar.sequence"."""
    install(root, LMDeploySystem.modules, {})
    modules: dict[str, Any] = {
        name.removeprefix("engine.").removeprefix("strategies."): importlib.import_module(
            f"{_PACKAGE}.{name}"
        )
        for name in _CALLED
    }
    quiet: Any = Inert()
    quiet.level = logging.ERROR  # or each batch is described
    for name in ("inputs_maker", "engine_loop"):
        modules[name].logger = quiet
    clock = Values(perf_counter=partial(next, count(step=1e-6)))
    for name, module in sys.modules.items():  # what is evicted first must be so in a replay
        if name.startswith(f"{_PACKAGE}.paging") and hasattr(module, "time"):
            vars(module)["time"] = clock
        if name == f"{_PACKAGE}.paging.block_trie.kv_lifecycle":
            vars(module)["id"] = attrgetter("block_id")
    return modules


def for_tests(root: Path, _: str) -> None:
    """Have this process import the release, for unit tests of its classes."""
    load(root)
