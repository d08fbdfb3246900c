"""A release, loaded into a process of its own for exported tests."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import logging
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from impl.loading.isolation import cut, source_of
from impl.sglang.parts import modules, stand_ins
from impl.sglang.parts.modules import ASSEMBLER, SGLANG, WITH_TIERS, install
from impl.sglang.releases.catalogue import supported
from impl.sglang.releases.names import called


class _Missing(importlib.abc.MetaPathFinder):
    """A module of the bookkeeping that the release does not have: a test may ask and do without."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> None:
        del path, target
        there = source_of(self.root, fullname) or self.root.joinpath(*fullname.split(".")).is_dir()
        if SGLANG.is_real(fullname) and not there:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def tiered(root: Path, version: str) -> None:
    """Have this process import the release, with the modules of its host tier."""
    hook(root, version, tiers=True)


# What tests in upstream's shape call besides the bookkeeping that is driven.
_WIDE = (
    "sglang.srt.disaggregation.decode",
    "sglang.srt.managers.scheduler_components.batch_result_processor",
    "sglang.srt.managers.schedule_policy",
    "sglang.srt.managers.scheduler",
)


def wide(root: Path, version: str) -> None:
    """Have this process import the release, with the scheduler, its policy and a decode server's queues."""
    # The scheduler imports setproctitle.
    absent = *modules.SGLANG.absent, "setproctitle"
    modules.SGLANG = replace(modules.SGLANG, real=(*modules.SGLANG.real, *_WIDE), absent=absent)
    hook(root, version)
    for name in _WIDE:
        # The parent is inert: it gives a submodule that is loaded.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def hook(root: Path, version: str, tiers: bool = False) -> None:
    """Have this process import the release under `root`. tiers: with what its host tier needs."""
    provided = stand_ins.provided()
    provided["sglang.srt.server_args"] = {
        "_global_server_args": None,
        "get_global_server_args": lambda: sys.modules["sglang.srt.server_args"]._global_server_args,
    }

    class SamplingParams(stand_ins.SamplingParams):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.normalize = lambda _: None

    provided["sglang.srt.sampling.sampling_params"] = {"SamplingParams": SamplingParams}
    provided["sglang.srt.managers.io_struct"] = {"AbortReq": stand_ins.Bag}
    install(root, provided, modules=WITH_TIERS if tiers else None)
    sys.meta_path.insert(0, _Missing(root))
    load = importlib.import_module
    context = provided["sglang.srt.runtime_context"]
    context["get_context"] = lambda: stand_ins.Bag(
        override_server_args=_settings,
        parallel=stand_ins.Bag(override=_settings),
        server_args=stand_ins.SERVER_ARGS,
    )
    release = supported(version)
    module = release.spec_file.removesuffix(".py").replace("/", ".")
    names = ("common", "allocation", "allocation_sizing")  # one module until 0.5.14
    there = [name for name in names if (root / f"sglang/srt/mem_cache/{name}.py").is_file()]
    homes = [load(f"sglang.srt.mem_cache.{name}") for name in there]
    env = {name: value for home in homes for name, value in vars(home).items()}
    env |= {"torch": sys.modules["torch"], "get_spec": context["get_spec"]}
    for name in ("get_alloc_len_per_decode", "get_alloc_reserve_per_decode"):
        env[name] = lambda *_, name=name: getattr(sys.modules[module], name)()
    owner, _, name = release.spec_prepare.rpartition(".")
    prepare = cut(root / release.spec_file, frozenset({release.spec_prepare}), env)[name]
    provided[module] = {owner: type(owner, (), {name: prepare})} if owner else {name: prepare}
    env = {
        **vars(load("sglang.srt.mem_cache.base_prefix_cache")),
        "AbortReq": stand_ins.Bag,
        "DisaggregationMode": stand_ins.DisaggregationMode,
        "_make_abort_req": lambda *_, **__: None,
        "logger": logging.getLogger("sglang"),
    }
    managers = root / "sglang/srt/managers"
    assembler = root.joinpath(*ASSEMBLER.split(".")).with_suffix(".py")
    methods = ("Scheduler.abort_request", "Scheduler._release_aborted_request")
    named = frozenset(called(name, release) for name in methods)
    aborts = cut(managers / "scheduler.py", named, env)
    provided["sglang.srt.managers.scheduler"] = {"Scheduler": type("Scheduler", (), aborts)}
    needed = [module, "sglang.srt.speculative.spec_utils"]
    if tiers:
        room = cut(assembler, frozenset({"_evict_swa_for_device_alloc"}), env)
        provided[ASSEMBLER] = {"attach_hybrid_pool_to_unified_cache": None, **room}
        lock = cut(managers / "schedule_policy.py", frozenset({"PrefillAdder._lock_node"}), {})
        adder = {name: contextlib.contextmanager(method) for name, method in lock.items()}
        provided["sglang.srt.managers.schedule_policy"] = {
            "PrefillAdder": type("PrefillAdder", (), adder)
        }
        needed += ["sglang.srt.managers.cache_controller", ASSEMBLER]
    for name in needed:  # so that its package has it
        load(name)


@contextlib.contextmanager
def _settings(**given: Any) -> Iterator[None]:
    with mock.patch.dict(vars(stand_ins.SERVER_ARGS), given):
        yield
