"""A release of a Python package that a worker drives: from its wheel, or from a checkout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from impl.adapter import Capabilities, UnusableImplementation
from impl.engines import DriveOptions
from impl.loading import fetch, parts
from impl.loading.isolation import Bookkeeping
from impl.loading.parts import Tables
from impl.loading.wheel_parts import unpack_parts
from impl.process.failures import Guarded
from impl.process.remote_system import LIMITS, Limits, WorkerSystem
from impl.process.worker import serve
from impl.system_spec import SystemSpec
from reference.commands import Mode
from reference.system_kinds import BLOCKS

# What an engine can do that has no sessions, no reset of its cache and no connectors.
REQUESTS_ALONE = Capabilities(
    kind=BLOCKS.name,
    commands=frozenset({"Add", "Abort", "Schedule", "Update"}),
    modes=(Mode.FAITHFUL,),
)


class ReleaseSystem(WorkerSystem):
    """A release (`version`) or a checkout (`path`), in a worker, in `ways`. Raises UnusableImplementation.

    package: name of the Python package.
    driver: module that the worker runs.
    releases: releases that can be driven, the oldest first.
    remark: what the user of a checkout should know about how it is driven.
    tables: names of the API that the adapter uses; a release must have all of them.
    ways: to run it; the part of the API that a way needs has its name.
    modules: modules of the release that the worker loads.
    kept_prefixes: path prefixes of the files of a wheel that are unpacked.
    required_path: file or folder that a wheel must have to be driven.
    source: folder of a clone that contains the package; a copy may have the package itself.
    """

    package = ""
    driver = ""
    required_path = ""
    releases: tuple[str, ...] = ()
    remark = ""
    tables: Tables
    ways: tuple[str, ...] = ()
    modules: Bookkeeping
    kept_prefixes: tuple[str, ...] = ()
    source = "."
    capabilities = REQUESTS_ALONE

    def __init__(
        self,
        version: str | None,
        path: str | None = None,
        limits: Limits = LIMITS,
        ways: tuple[str, ...] = (),
    ) -> None:
        """Find the files of a release, or of the checkout at `path`, and check them for the names that the
        adapter needs. Raises UnusableImplementation that lists what is missing."""
        super().__init__(limits)
        self.spec = SystemSpec(self.package, version, ways, checkout=path is not None)
        self.name = str(self.spec)
        self.root: Path
        if path is None:
            self.root = fetch.release_root(self.package, str(version), self._unpack_wheel)
        else:
            self.root = self._folder_of_package(path)
        if path is None and not (self.root / self.required_path).exists():
            first = f"the first release that is driven is {self.releases[0]}"
            raise UnusableImplementation(
                f"{self.name}: there is no {self.required_path} in its wheel; {first}"
            )
        unused = {*self.ways} - {*ways}
        used = [part for part in self.tables.parts if part not in unused]
        facts = parts.facts(
            self.root, self.tables, self.modules, used, unused, release=version
        )
        parts.require(facts, self.tables, str(self.spec.in_way("")), self.root)
        self.release = facts.near.release
        if version not in self.releases:
            self.remark = parts.driving_text(facts, self.root)

    def _folder_of_package(self, path: str) -> Path:
        """Return the folder that contains the package: `source` of a clone, or `path` itself. Raises
        UnusableImplementation."""
        folder = Path(path).expanduser()
        for root in (folder / self.source, folder):
            if (root / self.package).is_dir():
                return root.resolve()
        wanted = dict.fromkeys((f"{Path(self.source, self.package)}", self.package))
        raise UnusableImplementation(f"{self.name}: there is no {' or '.join(wanted)} in {path}")

    def command_line(self) -> list[str]:
        return [sys.executable, "-m", self.driver, str(self.root), self.name]

    def _unpack_wheel(self, _: Path, target: Path) -> None:
        unpack_parts(self.name, target, self._is_kept)

    def _is_kept(self, path: PurePosixPath) -> bool:
        return path.suffix == ".py" and path.as_posix().startswith(self.kept_prefixes)


def drive_release(
    system: type[ReleaseSystem],
) -> Callable[[SystemSpec, DriveOptions], ReleaseSystem]:
    """Return the `drive` function of an engine (see `impl.engines.Engine`)."""

    def drive(spec: SystemSpec, options: DriveOptions) -> ReleaseSystem:
        if spec.ways and spec.way not in system.ways:
            known = " or ".join(f"+{way}" for way in system.ways) or "nothing"
            raise UnusableImplementation(
                f"--impl {str(spec)!r}: {known} goes after a release of {system.package}"
            )
        return system(spec.version or None, options.checkout, options.limits, spec.ways)

    return drive


def serve_driver(driver: Callable[[Path, str], Any]) -> int:
    """Run a worker: serve the driver of the release that its command line names (folder, name)."""
    import torch

    torch.set_num_threads(1)  # the tensors are tiny; threads only wait for each other
    root = Path(sys.argv[1])
    name = sys.argv[2]

    def guarded() -> Guarded:
        return Guarded(
            driver(root, name),
            root,
            engine="LMDeploy or transformers",
            modules="loading.py",
            values="driver.py",
        )

    return serve(guarded, root)
