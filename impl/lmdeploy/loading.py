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

from impl.lmdeploy import store
from impl.lmdeploy.api import RELEASES, TABLES
from impl.lmdeploy.copied import COPIED
from impl.adapter import Capabilities
from impl.loading.isolation import Bookkeeping, Inert, install
from impl.process.remote_system import LIMITS, Limits
from impl.self_scheduling.release_system import REQUESTS_ALONE, ReleaseSystem
from impl.stand_ins import Values
from reference.blocks.commands import Fail
from reference.commands import Mode
from reference.system_kinds import PAIRS
from reference.tiers.commands import Complete, Copy

_PACKAGE = "lmdeploy.pytorch"
# The modules that the driver calls; envs first, which others take from its package.
_CALLED = ("envs", "config", "messages", "paging", "engine.inputs_maker", "engine.engine_loop",
           "strategies.ar.sequence", "strategies.ar.engine",
           "strategies.ar_spec.sequence", "strategies.ar_spec.engine")  # fmt: skip
# What they import is inert but for these.
_REAL = (*_CALLED, "block", "long_context", "prefix_cache_state", "engine.cache_inputs",
         "strategies.base", "disagg.config", "disagg.conn.protocol", *store.REAL)  # fmt: skip
_LOADED = (*(f"{_PACKAGE}.{name}" for name in _REAL), "lmdeploy.messages")
_INERT = tuple(f"{_PACKAGE}.{name}" for name in store.INERT)
CAPABILITIES = replace(
    REQUESTS_ALONE,
    recurrent=True,
    commands=REQUESTS_ALONE.commands | {"NewWeights"},
    sources=frozenset({"adapter"}),
)

_MOVES = {kind.__name__ for kind in (Copy, Complete, Fail)}
PAIR = "pair"  # the way to run it as a prefill and a decode server
AS_PAIR = Capabilities(
    PAIRS.name,
    frozenset({
        "Prefill", "Forward", "Drop", "Serve", "Cancel", "Advance", "Move", "Land", "Lose", "Deliver", "Tick",
    }),
    modes=(Mode.FAITHFUL,),
    first_token=True,
)
WITH_STORE = replace(CAPABILITIES, commands=CAPABILITIES.commands | _MOVES)


class LMDeploySystem(ReleaseSystem):
    """LMDeploy's PyTorch engine."""

    package = "lmdeploy"
    releases = RELEASES
    tables = TABLES
    modules = Bookkeeping("lmdeploy", _LOADED, _INERT, imported_only=("pydantic",))
    driver = "impl.lmdeploy.driver"
    capabilities = CAPABILITIES
    kept_prefixes = ("lmdeploy/pytorch/", "lmdeploy/messages.py", "lmdeploy/version.py")
    required_path = "lmdeploy/pytorch/paging/block_trie/trie.py"  # since 0.16.0
    ways = (store.WAY, PAIR)

    def __init__(
        self,
        version: str | None,
        path: str | None = None,
        limits: Limits = LIMITS,
        ways: tuple[str, ...] = (),
    ) -> None:
        super().__init__(version, path, limits, ways)
        if store.WAY in ways:
            self.capabilities = WITH_STORE
            self.doubts = COPIED.doubts(self.root)
        if PAIR in ways:
            self.capabilities = AS_PAIR
            self.driver = "impl.lmdeploy.pair.driver"


def load(root: Path, with_store: bool = False) -> dict[str, Any]:
    """Return the release's modules, loaded in this process, such as "inputs_maker" and "ar.sequence".

    with_store: those of the connector as well.
    """
    install(root, LMDeploySystem.modules, {})
    called = _CALLED + (store.CALLED if with_store else ())
    modules: dict[str, Any] = {
        name.removeprefix("engine.").removeprefix("strategies."): importlib.import_module(
            f"{_PACKAGE}.{name}"
        )
        for name in called
    }
    if with_store:
        modules["kv_connector.mooncake.store.scheduler"].LookupKeyClient = store.Lookups
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
