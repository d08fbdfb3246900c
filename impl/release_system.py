"""A release of a Python package that a worker drives: from its wheel, or from a checkout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from impl import fetch, parts
from impl.adapter import Capabilities, UnusableImplementation
from impl.engines import DriveOptions
from impl.isolation import Bookkeeping
from impl.parts import Tables
from impl.process.failures import Guarded
from impl.process.remote_system import LIMITS, Limits, WorkerSystem
from impl.process.worker import serve
from impl.system_spec import SystemSpec
from impl.wheel_parts import unpack_parts
from reference.commands import Mode
from reference.kinds import BLOCKS

# Of engines without sessions, resets of their cache and connectors.
REQUESTS_ALONE = Capabilities(
    kind=BLOCKS.name,
    commands=frozenset({"Add", "Abort", "Schedule", "Update"}),
    modes=(Mode.FAITHFUL,),
)


class ReleaseSystem(WorkerSystem):
    """A release (`version`) or a checkout (`path`), in a worker. Raises UnusableImplementation.

    package: its name. releases: that are driven, the oldest first. tables: of its API, each part of which is
    needed. modules: that are loaded. driver: the module of the worker.
    kept: beginnings of the names of files that are kept of a wheel; needed: a file or folder without which a
    wheel is not driven. source: the folder of a checkout that has the package.
    """

    package = driver = needed = ""
    releases: tuple[str, ...] = ()
    remark = ""  # what the user of a checkout should know about how it is driven
    tables: Tables
    modules: Bookkeeping
    kept: tuple[str, ...] = ()
    source = "."
    capabilities = REQUESTS_ALONE

    def __init__(
        self, version: str | None, path: str | None = None, limits: Limits = LIMITS
    ) -> None:
        super().__init__(limits)
        self.spec = SystemSpec(self.package, version, checkout=path is not None)
        self.name = str(self.spec)
        self.root: Path
        if path is None:
            self.root = fetch.release_root(self.package, str(version), self._unpacked)
        else:
            self.root = Path(path, self.source).expanduser().resolve()
        if not (self.root / (self.needed if path is None else self.package)).exists():
            since = "" if path else f"; the first release that is driven is {self.releases[0]}"
            where = path or "its wheel"
            raise UnusableImplementation(
                f"{self.name}: there is no {self.needed} in {where}{since}"
            )
        found = parts.facts(
            self.root, self.tables, self.modules, self.tables.parts, release=version
        )
        parts.require(found, self.tables, self.name, self.root)
        self.release = found.near.release
        if version not in self.releases:
            self.remark = parts.told(found, self.root)

    def command_line(self) -> list[str]:
        return [sys.executable, "-m", self.driver, str(self.root), self.name]

    def _unpacked(self, _: Path, target: Path) -> None:
        unpack_parts(self.name, target, self._is_kept)

    def _is_kept(self, path: PurePosixPath) -> bool:
        return path.suffix == ".py" and path.as_posix().startswith(self.kept)


def driven_plainly(
    system: type[ReleaseSystem],
) -> Callable[[SystemSpec, DriveOptions], ReleaseSystem]:
    """Return the maker of an engine that has one way to run (see `impl.engines.Engine`)."""

    def drive(spec: SystemSpec, options: DriveOptions) -> ReleaseSystem:
        if spec.ways:
            nothing = f"nothing goes after a release of {system.package}"
            raise UnusableImplementation(f"--impl {str(spec)!r}: {nothing}")
        return system(spec.version or None, options.checkout, options.limits)

    return drive


def work(driver: Callable[[Path, str], Any]) -> int:
    """Serve the driver of the release that the worker's command line names."""
    import torch

    torch.set_num_threads(1)  # the tensors are tiny; threads only wait for each other
    root, name = Path(sys.argv[1]), sys.argv[2]
    of = root, "LMDeploy or transformers", "loading.py", "driver.py"
    return serve(lambda: Guarded(driver(root, name), *of), root)
