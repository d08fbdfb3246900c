"""Load the bookkeeping of an engine's release alone, without what a server needs besides.

An import hook answers every import of the engine's package: the modules of its bookkeeping are the
release's own files, every other module is inert. So no model, no GPU and none of the release's
dependencies is needed. One release per process: its module state is global, and the hook stays.
Each engine names these modules (impl.sglang.parts.modules).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impl.adapter import Misfit

Provided = dict[str, dict[str, Any]]  # module -> the names in it that are not inert


@dataclass(frozen=True)
class Bookkeeping:
    """The modules of a package that are the release's own files, and those that are stand-ins.

    real: names of modules that are the release's own files, with their submodules.
    inert: names below those of `real` that are inert all the same.
    absent: other packages that the release imports and does not need: inert even where they are installed.
    imported_only: other packages that the release hardly uses: inert where they are not installed.
    """

    package: str
    real: tuple[str, ...]
    inert: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    imported_only: tuple[str, ...] = ()

    def is_real(self, name: str) -> bool:
        """Return whether a module of this name is the release's own file, if it has one."""
        return _within(name, self.real) and not _within(name, self.inert)


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


# What an inert thing may be asked while a server runs: the last part of its name -> why nothing is lost.
_MAY_BE_EMPTY = {
    "pop_aborted_reqs()": "no diffusion model",
    "collect_inflight_reqs()": "no request is received from another server",
    "mbs": "no pipeline",
    "running_mbs": "no pipeline",
    "enable_hicache_storage": "a client aborts in the queue, before a storage is asked",
    "DEEPGEMM_PAGED_SPARSE_MQA_LOGITS": "no kernel runs",
    "profiler_enabled()": "nobody profiles",
}
# What it may be given a tensor: a record of what is not kept, an assertion of the release's own.
_MAY_TAKE_TENSORS = {"RelayPayload", "expect"}
_QUESTIONS = ("is_", "use_", "uses_", "has_", "can_", "should_", "supports_", "enable_", "need_")


class _Loaded:
    """Whether the release is loaded; from then on an inert object that would decide something is an error.

    by: the adapter's file that lists the loaded modules.
    """

    done = False
    by = ""


def note_loaded(by: str) -> None:
    """Note that the release is loaded, and runs from now on.

    by: the adapter's file that lists the loaded modules.
    """
    _Loaded.done = True
    _Loaded.by = by


class Inert:
    """Stands for anything that is imported and never matters: callable, falsy, empty.

    It matters where a running server launches it as a kernel, gives it a tensor to write, goes through it or
    branches on it: then it raises Misfit. A question about the host or the model, such as `is_foo()`, is
    answered no.
    """

    def __init__(self, *_: Any, path: str = "it", **__: Any) -> None:
        object.__setattr__(self, "_path", path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _Loaded.done and any(map(_is_tensor, (*args, *kwargs.values()))):
            if self._path.rpartition(".")[2] not in _MAY_TAKE_TENSORS:
                self._raise_misfit("is given a tensor")
        # As a decorator it leaves what it decorates alone.
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return Inert(path=f"{self._path}()")

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Inert(path=f"{self._path}.{name}")
        object.__setattr__(self, name, value)
        return value

    def __bool__(self) -> bool:
        self._require_undecisive("decides a branch")
        return False

    def __iter__(self) -> Any:
        self._require_undecisive("is gone through")
        return iter(())

    def __len__(self) -> int:
        self._require_undecisive("is counted")
        return 0

    def __getitem__(self, _: Any) -> Inert:
        if _Loaded.done:
            self._raise_misfit("is launched or read")
        return self

    def _require_undecisive(self, how: str) -> None:
        """Raise Misfit if the running release uses this as a value that decides something."""
        name = self._path.rpartition(".")[2]
        is_question = name.startswith(_QUESTIONS) or name.endswith("_enabled()")
        if _Loaded.done and not is_question and name not in _MAY_BE_EMPTY:
            self._raise_misfit(how)

    def _raise_misfit(self, how: str) -> None:
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise Misfit(f"{place}: {self._path} {how}, and is not loaded ({_Loaded.by})")

    def __or__(self, _: Any) -> Inert:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (type("InertBase", (), {}),)

    def __enter__(self) -> Inert:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _is_tensor(value: Any) -> bool:
    return isinstance(value, sys.modules["torch"].Tensor)


class InertModule(types.ModuleType):
    """A module in which every name is inert, but for those provided."""

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Inert(path=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of the release's package, and of those that are needed for imports only."""

    def __init__(
        self,
        root: Path,
        modules: Bookkeeping,
        provided: Mapping[str, dict[str, Any]],
        inert: Sequence[str],
    ) -> None:
        self.root = root
        self.modules = modules
        self.provided = provided
        self.packages = frozenset({modules.package, *inert})

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in self.packages:
            return None
        if self.modules.is_real(fullname):
            if (file := source_of(self.root, fullname)) is not None:
                folder = [str(file.parent)] if file.name == "__init__.py" else None
                return importlib.util.spec_from_file_location(
                    fullname, file, submodule_search_locations=folder
                )
            if (stem := self.root.joinpath(*fullname.split("."))).is_dir():
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


def source_of(root: Path, name: str) -> Path | None:
    """Return the file under `root` that a module is loaded from; None for one that is missing, or a bare
    folder."""
    stem = root.joinpath(*name.split("."))
    suffixes = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
    files = (stem / "__init__.py", *(stem.with_suffix(suffix) for suffix in suffixes))
    return next((file for file in files if file.is_file()), None)


def install(root: Path, modules: Bookkeeping, provided: Provided) -> None:
    """Hook the imports of this process up to the release under `root`; `provided` may still be added to."""
    importlib.import_module("torch")  # before the hook: torch must find the real packages
    inert = list(modules.absent)
    for name in modules.imported_only:
        if importlib.util.find_spec(name) is None:
            inert.append(name)
        else:
            importlib.import_module(name)
    for name in [m for m in sys.modules if m.partition(".")[0] in modules.absent]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(root, modules, provided, inert))
