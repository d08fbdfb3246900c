"""Load a release's memory-cache and session modules alone, without what a server needs besides.

An import hook answers every `sglang.*` import: modules of the bookkeeping are the release's own
files, every other module is inert. So no model, no GPU and none of the release's dependencies is
needed; a few utilities are cut out of the release's own file. One release per process: its module
state is global, and the hook stays.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# The release's own files, by prefix.
REAL = (
    "sglang.srt.constants",
    "sglang.srt.environ",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.managers.scheduler_components.invariant_checker",
    "sglang.srt.managers.scheduler_components.pool_stats_observer",
    "sglang.srt.managers.scheduler_runtime_checker_mixin",
    "sglang.srt.managers.session_controller",
    "sglang.srt.mem_cache",
    "sglang.srt.rust_extensions",
    "sglang.srt.session",
    "sglang.srt.utils.token_sequence_matcher",
    "sglang.kernels.ops.memory",
)
# Inside those: what serves other storage than the GPU pools, and drags dependencies in.
INERT = (
    "sglang.srt.mem_cache.buffer_mode",
    "sglang.srt.mem_cache.cpp_radix_tree",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.hybrid_cache",
    "sglang.srt.mem_cache.kv_vmm_backing",
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.sparsity",
    "sglang.srt.mem_cache.storage",
    "sglang.srt.mem_cache.storage_prefetch",
    "sglang.srt.mem_cache.unified_cache.storage_attachment",
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker",
)
# Pure functions of sglang/srt/utils/common.py that the bookkeeping computes with.
UTILITIES = frozenset(
    {"ceil_align", "ceil_div", "floor_align", "flatten_arrays_to_pinned_cpu", "flatten_nested_list",
     "get_bool_env_var", "get_num_new_pages", "next_power_of_2", "raise_error_or_warn"}
)  # fmt: skip
# Questions about the host in the same file: a CPU and nothing special.
HOST_QUESTIONS = (
    "cpu_has_amx_support", "is_cpu", "is_cuda", "is_cuda_alike", "is_float4_e2m1fn_x2", "is_hip",
    "is_hpu", "is_mps", "is_musa", "is_npu", "is_pin_memory_available", "is_xpu", "support_triton",
)  # fmt: skip
# Packages that the bookkeeping imports and hardly uses: inert where they are not installed.
IMPORTED_ONLY = ("numpy", "psutil")

Provided = dict[str, dict[str, Any]]


class Inert:
    """Stands for anything that is imported and never matters: callable, falsy, empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator it leaves what it decorates alone.
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return Inert()

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Inert()
        object.__setattr__(self, name, value)
        return value

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __getitem__(self, _: Any) -> Inert:
        return self

    def __or__(self, _: Any) -> Inert:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (type("InertBase", (), {}),)

    def __enter__(self) -> Inert:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class InertModule(types.ModuleType):
    """A module in which every name is inert, but for those provided."""

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Inert()
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of `sglang.*`, and of packages that are needed for imports only."""

    def __init__(self, root: Path, provided: Provided, absent: Iterable[str]) -> None:
        self.root = root
        self.provided = provided
        self.packages = frozenset({"sglang", *absent})

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in self.packages:
            return None
        if real(fullname):
            stem = self.root.joinpath(*fullname.split("."))
            if (stem / "__init__.py").is_file():
                return importlib.util.spec_from_file_location(
                    fullname, stem / "__init__.py", submodule_search_locations=[str(stem)]
                )
            for suffix in (".py", *importlib.machinery.EXTENSION_SUFFIXES):
                if (file := stem.with_suffix(suffix)).is_file():
                    return importlib.util.spec_from_file_location(fullname, file)
            if stem.is_dir():
                spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
                spec.submodule_search_locations = [str(stem)]
                return spec
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = InertModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.provided.get(module.__name__, {}))


def real(name: str) -> bool:
    """Whether a module of this name is the release's own file, if it has one."""
    return _within(name, REAL) and not _within(name, INERT)


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def install(root: Path, provided: Provided) -> None:
    """Hook the imports of this process up to the release under `root`.

    provided: module name -> names that are not inert in it. Triton is imported by the releases but
    runs nothing on their plain torch paths, so it is inert whether or not it is installed.
    """
    importlib.import_module("torch")  # before the hook: torch must find the real packages
    absent = ["triton", *(name for name in IMPORTED_ONLY if importlib.util.find_spec(name) is None)]
    for name in set(IMPORTED_ONLY).difference(absent):
        importlib.import_module(name)
    for name in [m for m in sys.modules if m == "triton" or m.startswith("triton.")]:
        del sys.modules[name]
    env: dict[str, Any] = {
        "torch": sys.modules["torch"],
        "np": sys.modules.get("numpy"),
        "os": os,
        "logger": logging.getLogger("sglang"),
        "_warned_bool_env_var_keys": set(),
    }
    utilities: dict[str, Any] = {**cut(root / "sglang/srt/utils/common.py", UTILITIES, env)}
    for question in HOST_QUESTIONS:
        utilities[question] = _no
    for name in ("sglang.srt.utils", "sglang.srt.utils.common"):
        provided[name] = {**utilities, **provided.get(name, {})}
    sys.meta_path.insert(0, Finder(root, provided, absent))


def _no(*_: Any, **__: Any) -> bool:
    return False


def cut(path: Path, names: frozenset[str], env: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Functions (`name`, or `Class.name`) cut out of a file and compiled by themselves in `env`.

    What else stands in the file is neither imported nor run. Names that are not there are left out.
    """
    source = path.read_text(encoding="utf-8")
    chosen: list[ast.stmt] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            chosen.append(node)
        elif isinstance(node, ast.ClassDef):
            chosen += [
                member
                for member in node.body
                if isinstance(member, ast.FunctionDef) and f"{node.name}.{member.name}" in names
            ]
    for function in chosen:
        assert isinstance(function, ast.FunctionDef)
        function.decorator_list = []
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *chosen], []))
    scope: dict[str, Any] = dict(env)
    exec(compile(module, str(path), "exec"), scope)  # the release's own code is what is tested
    return {f.name: scope[f.name] for f in chosen if isinstance(f, ast.FunctionDef)}
