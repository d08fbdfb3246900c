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


class _Enum(type):
    """The type of inert classes: each of its attributes, such as a member of an enumeration, is inert."""

    def __getattr__(cls, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()


class _Module(InertModule):
    """Names written as classes are classes: they are inherited from, and used in isinstance."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper() or name.isupper():
            return super().__getattr__(name)
        value = _Enum(name, (Inert,), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers, after everybody else, imports of inert packages by files of the release.

    Others who look for such a package (transformers does) must go on finding that it is missing.
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
        vars(module)["__version__"] = "99.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _imported_by_sglang() -> bool:
    frame = sys._getframe(2)
    while frame is not None and (
        "importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and f"{os.sep}sglang{os.sep}" in frame.f_code.co_filename


def _ask_first() -> None:
    """Let others look for what is inert before the release imports it: they look once, or find it then."""
    with contextlib.suppress(ImportError):
        importlib.import_module("tvm_ffi")
    with contextlib.suppress(ImportError):
        asks = importlib.import_module("transformers.utils.import_utils")
        inert = tuple(f"is_{package}" for package in INERT)
        for name in [n for n in vars(asks) if n.startswith(inert) and n.endswith("_available")]:
            getattr(asks, name)()
        # What stands for a class that is not there takes registrations, and refuses all else as ever.
        refuses = asks.DummyObject.__getattribute__
        asks.DummyObject.__getattribute__ = lambda cls, name: (
            (lambda *_, **__: None) if name == "register" else refuses(cls, name)
        )


def _operators() -> None:
    """Operators of a sgl_kernel that is compiled for CPUs: models with recurrent layers look them up when
    they are imported."""
    namespace = type(importlib.import_module("torch").ops.sgl_kernel)
    has = namespace.__getattr__

    def inert(self: Any, name: str) -> Any:
        of_cpus = self.name == "sgl_kernel" and name.endswith("_cpu")
        return Inert() if of_cpus else has(self, name)

    namespace.__getattr__ = inert


def install() -> None:
    """Make this process ready to import `sglang`, once."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    _ask_first()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
        _operators()
