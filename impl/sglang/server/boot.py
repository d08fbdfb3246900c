"""Import a whole release on a CPU: packages that need CUDA, or that a scheduler never uses, are inert.

Runs inside the server's process, before its first import of `sglang`. Unlike `impl.loading` everything of
the release itself is real; only what its files import from these packages is not, and only where it is
missing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from impl.loading.isolation import Inert, InertModule

# Top-level names that SGLang's files import. First what needs CUDA, then what no text-only scheduler uses.
_CUDA = """
    cuda cutlass deep_ep deep_gemm flash_attn flash_mla flashinfer humming kernels mathdx nvidia
    nvshmem pynvml quack sgl_kernel tilelang torch_memory_saver
"""
_UNUSED = """
    IPython av blobfile compressed_tensors datasets decord decord2 deepseek_recipe easydict gguf
    llguidance mistral_common modelscope numba outlines outlines_core py_spy scipy sentencepiece
    smg_grpc_servicer soundfile timm tml_renderers torchao torchaudio torchvision
"""
INERT = frozenset(_CUDA.split() + _UNUSED.split())
# Settings that a server on a CPU needs; a setting that the environment has stays.
SETTINGS = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class _InertMeta(type):
    """The metaclass of inert classes: each attribute of a class, such as a member of an enumeration, is
    inert."""

    def __getattr__(cls, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()


class _Module(InertModule):
    """Names written as classes are classes: they are inherited from, and used in isinstance."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper() or name.isupper():
            return super().__getattr__(name)
        value = _InertMeta(name, (Inert,), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports inert packages for files of the release, where no other finder has them.

    Other packages that look for one (transformers does) still find that it is missing.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in INERT or not _imported_by_sglang():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        # above every minimum that the release's files check
        vars(module)["__version__"] = "99.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _imported_by_sglang() -> bool:
    """Return whether the import that a finder is asked about stands in a file of sglang: the first caller
    outside of the import system and of this file."""
    frame = sys._getframe(2)
    # the import system's own frames are called <frozen importlib._bootstrap> and importlib/__init__.py
    while frame is not None and (
        "importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and f"{os.sep}sglang{os.sep}" in frame.f_code.co_filename


def _settle_availability_checks() -> None:
    """Have other packages look for the inert ones before the release imports any. Each looks once, and would
    find an inert package later."""
    with contextlib.suppress(ImportError):
        importlib.import_module("tvm_ffi")
    with contextlib.suppress(ImportError):
        import_utils = importlib.import_module("transformers.utils.import_utils")
        prefixes = tuple(f"is_{package}" for package in INERT)
        checks = [
            name
            for name in vars(import_utils)
            if name.startswith(prefixes) and name.endswith("_available")
        ]
        for check in checks:
            getattr(import_utils, check)()
        # A class of transformers whose package is missing (DummyObject) raises for every attribute. SGLang
        # registers models with some of these classes: their `register` does nothing.
        original = import_utils.DummyObject.__getattribute__
        import_utils.DummyObject.__getattribute__ = lambda cls, name: (
            (lambda *_, **__: None) if name == "register" else original(cls, name)
        )


def _stub_cpu_operators() -> None:
    """Make the operators of a sgl_kernel for CPUs inert: models with recurrent layers look them up when they
    are imported."""
    namespace = type(importlib.import_module("torch").ops.sgl_kernel)
    original = namespace.__getattr__

    def operator_or_stub(self: Any, name: str) -> Any:
        if self.name == "sgl_kernel" and name.endswith("_cpu"):
            return Inert()
        return original(self, name)

    namespace.__getattr__ = operator_or_stub


def install() -> None:
    """Make this process ready to import `sglang`. A second call does nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    _settle_availability_checks()
    sys.meta_path.append(_Finder())
    _stub_cpu_operators()
