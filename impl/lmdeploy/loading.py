"""What of a release of LMDeploy is loaded, and where its files come from."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from impl import fetch
from impl.adapter import Capabilities, UnusableImplementation
from impl.isolation import Bookkeeping, Inert, install
from impl.process.remote_system import LIMITS, Limits, WorkerSystem
from impl.wheel_parts import unpack_parts
from reference.commands import Mode

RELEASES = ("0.16.0", "0.17.0", "0.18.0")
CAN = Capabilities(commands=frozenset({"Add", "Abort", "Schedule", "Update"}), modes=(Mode.FAITHFUL,))
# The modules that the driver calls; whatever else they import than _REAL is inert.
MODULES = {
    "envs": "envs",
    "config": "config",
    "roles": "disagg.config",
    "messages": "messages",
    "paging": "paging",
    "inputs_maker": "engine.inputs_maker",
    "engine_loop": "engine.engine_loop",
    "sequences": "strategies.ar.sequence",
    "strategy": "strategies.ar.engine",
}
_REAL = (*MODULES.values(), "block", "long_context", "prefix_cache_state", "engine.cache_inputs",
         "strategies.base", "disagg.conn.protocol")  # fmt: skip
_PACKAGE = "lmdeploy.pytorch"


class LMDeploySystem(WorkerSystem):
    """A release (`version`) or a checkout (`path`), in a worker. Raises UnusableImplementation."""

    capabilities = CAN

    def __init__(self, version: str | None, path: str | None = None, limits: Limits = LIMITS) -> None:
        super().__init__(limits)
        self.name = f"lmdeploy=={version}" if path is None else "lmdeploy@checkout"
        self.root = _release(str(version)) if path is None else Path(path).expanduser().resolve()
        needed = "lmdeploy/pytorch/engine/inputs_maker.py"
        if not (self.root / needed).is_file():
            raise UnusableImplementation(f"{self.name}: there is no {needed} in {path or 'its wheel'}")
        self.release = version or _stated(self.root)

    def command_line(self) -> list[str]:
        return [sys.executable, "-m", "impl.lmdeploy.driver", str(self.root), self.name]


def _release(version: str) -> Path:
    def unpacked(_: Path, target: Path) -> None:
        unpack_parts(f"lmdeploy=={version}", target, _needed)

    return fetch.release_root("lmdeploy", version, unpacked)


def _needed(path: PurePosixPath) -> bool:
    inside = path.as_posix().startswith("lmdeploy/pytorch/") or path.parts[:-1] == ("lmdeploy",)
    return path.suffix == ".py" and inside


def _stated(root: Path) -> str:
    """The version that a checkout states, if it is one that is driven; else the newest."""
    file = root / "lmdeploy" / "version.py"
    found = re.search(r"__version__ = '([\d.]+)'", file.read_text()) if file.is_file() else None
    return found[1] if found and found[1] in RELEASES else RELEASES[-1]


def load(root: Path) -> dict[str, Any]:
    """The release's modules by name, in this process."""
    real = (*(f"{_PACKAGE}.{name}" for name in _REAL), "lmdeploy.messages")
    install(root, Bookkeeping("lmdeploy", real, imported_only=("pydantic",)), {})
    modules: dict[str, Any]
    modules = {name: importlib.import_module(f"{_PACKAGE}.{module}") for name, module in MODULES.items()}
    quiet: Any = Inert()
    quiet.level = logging.ERROR  # or each batch is described
    for name in ("inputs_maker", "engine_loop"):
        modules[name].logger = quiet
    return modules
