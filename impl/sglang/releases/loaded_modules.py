"""The modules of a release, and what is cut out of its files, as 0.5.10 has them."""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from impl.adapter import UnusableImplementation
from impl.lazy import torch
from impl.loading.function_cuts import cut
from impl.loading.isolation import note_loaded
from impl.sglang.parts import memory_checks, stand_ins
from impl.sglang.parts.aborts import Aborts
from impl.sglang.parts.modules import install
from impl.sglang.parts.tracking import without_pinning
from impl.sglang.releases.objects import Objects


class LoadedModules(Objects):
    """The part of a release's class that says where modules are, and imports them.

    checker: module and class of the memory checks.
    observer: those of the class that counts the sizes of pools, if apart.
    scheduler: the stand-in that the checks run on.
    spec_file, spec_prepare: the file and the function that prepare a verify round.
    core: what its tree is written in.
    """

    version: str
    session_controller = "sglang.srt.managers.session_controller"
    checker = (
        "sglang.srt.managers.scheduler_runtime_checker_mixin",
        "SchedulerRuntimeCheckerMixin",
    )
    observer: ClassVar[tuple[str, str] | None] = None
    scheduler: ClassVar[type[memory_checks.Scheduler]] = memory_checks.Scheduler0510
    paged_allocator = "sglang.srt.mem_cache.allocator"
    swa_allocators = "sglang.srt.mem_cache.swa_memory_pool"
    spec_file = "sglang/srt/speculative/eagle_info_v2.py"
    spec_prepare = "EagleDraftInputV2Mixin.prepare_for_decode"
    core = "python"
    # the release's modules
    common: ModuleType
    allocator: ModuleType
    swa_allocator: ModuleType
    token_allocator: ModuleType
    swa_pool: ModuleType
    memory_pool: ModuleType
    params: ModuleType
    batch: ModuleType
    controller: ModuleType
    allocation: Any
    session_cache_class: Any
    aborts: Aborts
    draft_len: int
    chunk_cache: Any
    radix_cache: Any
    swa_radix_cache: Any
    scheduler_class: type

    @classmethod
    def require(cls, root: Path) -> None:
        """Raise UnusableImplementation where the files under `root` are not all that it takes."""

    def __init__(self, root: Path | None = None) -> None:
        """Import the release; the process is its own from now on.

        root: None to load nothing, and to read objects of the release that this process has already.
        Raises UnusableImplementation when the files do not load.
        """
        if root is None:
            return
        self._install(root)
        stand_ins.take_defaults(root)
        try:
            self._import(root)
            if not stand_ins.on_gpu():
                self._without_kernels()
            note_loaded("impl/sglang/parts/modules.py")
        except (ImportError, AttributeError, KeyError, OSError, SyntaxError) as error:
            raise UnusableImplementation(
                f"sglang {self.version}: its bookkeeping does not load: {type(error).__name__}: {error}"
            ) from error

    def _install(self, root: Path) -> None:
        install(root, stand_ins.stand_ins_by_module(), stand_ins.on_gpu())

    def _import(self, root: Path) -> None:
        """Import the release's modules, and keep those of which the driver uses names."""
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = self.core  # read from 0.5.19 on
        load = importlib.import_module
        self.common = load("sglang.srt.mem_cache.common")
        self.allocation = self._load_allocation(load)
        self.allocator = load(self.paged_allocator)
        self.swa_allocator = load(self.swa_allocators)
        self.token_allocator = load("sglang.srt.mem_cache.allocator")
        self.swa_pool = load("sglang.srt.mem_cache.swa_memory_pool")
        self.memory_pool = load("sglang.srt.mem_cache.memory_pool")
        self._modules(load)
        self.params = load("sglang.srt.mem_cache.cache_init_params")
        self.batch = load("sglang.srt.managers.schedule_batch")
        self.controller = load(self.session_controller)
        module, name = self.session_cache
        self.session_cache_class = getattr(load(module), name)
        self._import_checks(load)
        self._load_rounds(root, load)
        self._load_received(root)
        self._load_states(root)
        self.aborts = Aborts(root, self)

    def _load_allocation(self, load: Any) -> Any:
        """Load the module that allocates slots of a request."""
        return load("sglang.srt.mem_cache.common")

    def _load_rounds(self, root: Path, load: Any) -> None:
        """Cut out what prepares a verify round."""
        self.draft_len = 1  # what get_alloc_len_per_decode answers; set before each round
        lengths = {
            "get_alloc_len_per_decode": lambda *_: self.draft_len,
            "get_alloc_reserve_per_decode": lambda *_: 2 * self.draft_len,
        }
        for owner in (self.batch, load("sglang.srt.managers.utils")):
            vars(owner).update(lengths)
        env = {**self._spec_environment(), "torch": torch, **lengths}
        prepare = cut(root / self.spec_file, frozenset({self.spec_prepare}), env)
        self._prepare_spec = prepare[self.spec_prepare.rpartition(".")[2]]

    def _load_received(self, root: Path) -> None:
        """Cut out the rule for SWA KV of a received prompt: nothing here, received_tail is a copy."""

    def _load_states(self, root: Path) -> None:
        """Load what moves recurrent states."""

    def _modules(self, load: Any) -> None:
        """Load the caches that this release has."""
        self.chunk_cache = load("sglang.srt.mem_cache.chunk_cache")
        self.radix_cache = load("sglang.srt.mem_cache.radix_cache")
        self.swa_radix_cache = load("sglang.srt.mem_cache.swa_radix_cache")

    def _spec_environment(self) -> dict[str, Any]:
        """Return the names that the over-allocation of a verify round may use, wherever they are defined."""
        alike: defaultdict[str, Any] = defaultdict(
            lambda: self.allocation.alloc_paged_token_slots_extend
        )
        environment: dict[str, Any] = {"ALLOC_EXTEND_FUNCS": alike}
        for name in ("common", "allocation_sizing", "allocation"):
            environment |= vars(importlib.import_module(f"sglang.srt.mem_cache.{name}"))
        return environment

    def _without_kernels(self) -> None:
        stand_ins.without_kernels(self.allocator)
        if "assign_req_to_token_pool_func" in vars(self.allocation):  # imported from 0.5.16 on
            self.allocation.assign_req_to_token_pool_func = stand_ins.assign_rows
        without_pinning()

    def _import_checks(self, load: Any) -> None:
        """Load the memory checks: the release's class on top of a stand-in of the scheduler."""
        module, name = self.checker
        checks = getattr(load(module), name)
        if not isinstance(checks, type):  # inert: the file is not there
            raise ImportError(f"no {module}")
        self.scheduler_class = type(name, (self.scheduler, checks), {"checks": checks})
