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

from impl.loading.function_cuts import cut
from impl.loading.isolation import Provided, source_of
from impl.sglang.parts import modules, stand_ins
from impl.sglang.parts.modules import ASSEMBLER, SGLANG, WITH_TIERS, install
from impl.sglang.releases.catalogue import supported_release
from impl.sglang.releases.names import name_in_release
from impl.sglang.releases.v0_5_10_to_14 import Release0510


class _Missing(importlib.abc.MetaPathFinder):
    """Finder that raises ModuleNotFoundError for a bookkeeping module that the release lacks, so that a test
    can fall back."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> None:
        del path, target
        folder = self.root.joinpath(*fullname.split("."))
        exists = source_of(self.root, fullname) or folder.is_dir()
        if SGLANG.is_real(fullname) and not exists:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def import_tiered(root: Path, version: str) -> None:
    """Have this process import the release, with the modules of its host tier."""
    hook(root, version, tiers=True)


# Modules that tests in upstream's shape call and that no adapter drives.
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
        # The parent is inert, and has a submodule as an attribute only once that is loaded.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def hook(root: Path, version: str, tiers: bool = False) -> None:
    """Have this process import the release under `root`.

    tiers: with what its host tier needs.
    """
    provided = _provided_modules()
    install(root, provided, modules=WITH_TIERS if tiers else None)
    sys.meta_path.insert(0, _Missing(root))
    release = supported_release(version)
    spec_module = _provide_draft_sizing(root, release, provided)
    names_in_scope = _scheduler_names()
    _provide_aborts(root, release, provided, names_in_scope)
    needed = [spec_module, "sglang.srt.speculative.spec_utils"]
    if tiers:
        _provide_tier_methods(root, provided, names_in_scope)
        needed += ["sglang.srt.managers.cache_controller", ASSEMBLER]
    for name in needed:  # a loaded module is an attribute of its package
        importlib.import_module(name)


def _provided_modules() -> Provided:
    """Return stand-ins for the modules that the bookkeeping imports, by module and then by name."""
    provided = stand_ins.stand_ins_by_module()
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
    provided["sglang.srt.runtime_context"]["get_context"] = lambda: stand_ins.Bag(
        override_server_args=_settings,
        parallel=stand_ins.Bag(override=_settings),
        server_args=stand_ins.SERVER_ARGS,
    )
    return provided


def _provide_draft_sizing(root: Path, release: type[Release0510], provided: Provided) -> str:
    """Provide the function that prepares a speculative round, cut from the file of the release, and return
    the name of its module."""
    module = release.spec_file.removesuffix(".py").replace("/", ".")
    files = ("common", "allocation", "allocation_sizing")  # one module until 0.5.14
    present = [name for name in files if (root / f"sglang/srt/mem_cache/{name}.py").is_file()]
    allocation = [importlib.import_module(f"sglang.srt.mem_cache.{name}") for name in present]
    env = {name: value for each in allocation for name, value in vars(each).items()}
    env["torch"] = sys.modules["torch"]
    env["get_spec"] = provided["sglang.srt.runtime_context"]["get_spec"]
    for name in ("get_alloc_len_per_decode", "get_alloc_reserve_per_decode"):
        env[name] = lambda *_, name=name: getattr(sys.modules[module], name)()
    owner, _, method = release.spec_prepare.rpartition(".")
    prepare = cut(root / release.spec_file, frozenset({release.spec_prepare}), env)[method]
    provided[module] = {method: prepare}
    if owner:
        provided[module] = {owner: type(owner, (), {method: prepare})}
    return module


def _scheduler_names() -> dict[str, Any]:
    """Return the names that methods cut from the scheduler read."""
    return {
        **vars(importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")),
        "AbortReq": stand_ins.Bag,
        "DisaggregationMode": stand_ins.DisaggregationMode,
        "_make_abort_req": lambda *_, **__: None,
        "logger": logging.getLogger("sglang"),
    }


def _provide_aborts(
    root: Path, release: type[Release0510], provided: Provided, env: dict[str, Any]
) -> None:
    """Provide a scheduler class with the methods of the release that abort a request, compiled in `env`."""
    methods = ("Scheduler.abort_request", "Scheduler._release_aborted_request")
    names = frozenset(name_in_release(name, release) for name in methods)
    aborts = cut(root / "sglang/srt/managers/scheduler.py", names, env)
    provided["sglang.srt.managers.scheduler"] = {"Scheduler": type("Scheduler", (), aborts)}


def _provide_tier_methods(root: Path, provided: Provided, env: dict[str, Any]) -> None:
    """Provide the release's eviction for a load from the host, compiled in `env`, and its policy's lock."""
    assembler = root.joinpath(*ASSEMBLER.split(".")).with_suffix(".py")
    eviction = cut(assembler, frozenset({"_evict_swa_for_device_alloc"}), env)
    provided[ASSEMBLER] = {"attach_hybrid_pool_to_unified_cache": None, **eviction}
    policy = root / "sglang/srt/managers/schedule_policy.py"
    lock = cut(policy, frozenset({"PrefillAdder._lock_node"}), {})
    adder = {name: contextlib.contextmanager(method) for name, method in lock.items()}
    provided["sglang.srt.managers.schedule_policy"] = {
        "PrefillAdder": type("PrefillAdder", (), adder)
    }


@contextlib.contextmanager
def _settings(**given: Any) -> Iterator[None]:
    with mock.patch.dict(vars(stand_ins.SERVER_ARGS), given):
        yield
