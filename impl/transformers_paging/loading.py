"""What of a release of transformers is loaded, and where its files come from."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from impl import fetch
from impl.adapter import Capabilities, UnusableImplementation
from impl.isolation import Bookkeeping, install
from impl.process.remote_system import LIMITS, Limits, WorkerSystem
from reference.commands import Mode

NEWEST = "5.23.0"
PACKAGE = "transformers.generation.continuous_batching"
_FOLDER = PACKAGE.replace(".", "/")
CAN = Capabilities(commands=frozenset({"Add", "Abort", "Schedule", "Update"}), modes=(Mode.FAITHFUL,))


class TransformersSystem(WorkerSystem):
    """A release (`version`) or a checkout's `src` (`path`), in a worker. Raises UnusableImplementation."""

    capabilities = CAN

    def __init__(self, version: str | None, path: str | None = None, limits: Limits = LIMITS) -> None:
        super().__init__(limits)
        self.name = f"transformers=={version}" if path is None else "transformers@checkout"
        self.release = version or NEWEST
        self.root = _release(str(version)) if path is None else Path(path).expanduser().resolve() / "src"
        if path is not None and not self.root.is_dir():
            raise UnusableImplementation(f"transformers checkout: {path} has no folder src")
        if not (self.root / _FOLDER / "cache_allocators").is_dir():
            problem = f"{self.name}: there is no {_FOLDER}/cache_allocators, which later releases have"
            raise UnusableImplementation(problem)

    def command_line(self) -> list[str]:
        return [sys.executable, "-m", "impl.transformers_paging.driver", str(self.root), self.name]


def _release(version: str) -> Path:
    def unpacked(work: Path, target: Path, release: str) -> None:
        done = fetch.ask_pip(["download", "--quiet", "--dest", str(work)], release)
        if done.returncode:
            raise UnusableImplementation(f"{release}: {fetch.pip_trouble(done.stderr + done.stdout)}")
        fetch.unpack(release, next(work.glob("*.whl")), target, _needed)

    return fetch.release_root("transformers", version, partial(unpacked, release=f"transformers=={version}"))


def _needed(path: PurePosixPath) -> bool:
    return path.suffix == ".py" and path.as_posix().startswith(f"{_FOLDER}/")


def load(root: Path) -> dict[str, Any]:
    """The release's modules by their last name, loaded in this process without all else that it imports."""
    import torch

    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    compiler: Any = torch.compiler
    compiler.disable = lambda function: function  # or dynamo is imported, which takes seconds
    vars(torch)["_dynamo"] = type("_Dynamo", (), {"mark_static_address": staticmethod(lambda _: None)})
    install(root, Bookkeeping("transformers", (PACKAGE,), imported_only=("tqdm", "psutil")), {})
    names = (
        "cache", "cache_allocators.cache_allocator", "requests", "scheduler", "offloading_manager",
        "continuous_api",
    )  # fmt: skip
    return {name.rpartition(".")[2]: importlib.import_module(f"{PACKAGE}.{name}") for name in names}
