"""The engines whose releases and checkouts are driven: a record of each, in the folder of its adapter.

Nothing outside of such a folder imports it for what every engine has: ask `engine`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from impl.loading.copied_rules import CopiedRules
from impl.process.remote_system import LIMITS, Limits, WorkerSystem
from impl.system_spec import ALL, ENGINES, EngineName, SystemSpec

# The packages of the adapters. Each has a module `record`, which is imported when its engine is asked for.
PACKS: dict[EngineName, str] = {
    "sglang": "impl.sglang",
    "vllm": "impl.vllm",
    "transformers": "impl.transformers_paging",
    "lmdeploy": "impl.lmdeploy",
}


@dataclass(frozen=True)
class DriveOptions:
    """The options beside `--impl`.

    checkout: a folder.
    calls: the system notes what it calls (see SGLangSystem).
    limits: of a worker process.
    """

    checkout: str | None = None
    device: str = "cpu"
    calls: bool = False
    limits: Limits = LIMITS


DEFAULTS = DriveOptions()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A package whose releases and checkouts are driven."""

    #: name in `--impl` and on the package index
    name: EngineName
    #: title, repository and sentence on the engine in documents
    title: str
    repository: str
    about: str
    #: releases that are driven, the oldest first
    releases: tuple[str, ...]
    #: makes the system; it raises UnusableImplementation, also for ways that it has not
    drive: Callable[[SystemSpec, DriveOptions], WorkerSystem]
    #: the text of a unit test -> MODULE:NAME of what has a process import a release for it
    test_hook: Callable[[str], str]
    #: files whose lines tell the nearest release, as patterns: those that are loaded, less what
    #: changes for other reasons
    sketched: tuple[str, ...]
    #: ways to run a release, "" for the plain one
    ways: tuple[str, ...] = ("",)
    #: ways -> the releases that have them; None where every release has every way
    having: Callable[[Sequence[str]], Sequence[str]] | None = None
    #: devices on which it is driven
    devices: tuple[str, ...] = ("cpu",)
    #: module -> whether the adapter loads that file whole; else it cuts functions out of it
    loads: Callable[[str], bool] = lambda _: True
    #: the rules that the adapter copies
    copied: CopiedRules | None = None
    #: adds their files to the folder of a release, which may be from before
    complete: Callable[[str, Path], None] = lambda *_: None

    def driven_releases(self, ways: Sequence[str]) -> Sequence[str]:
        """Return the releases that are driven in these ways, the oldest first."""
        return self.releases if self.having is None else self.having(ways)

    def newest(self, way: str) -> SystemSpec:
        """Return the newest release that is driven in a way."""
        plain = SystemSpec(self.name).in_way(way)
        return plain.of_version(self.driven_releases(plain.ways)[-1])


@cache
def _record(name: EngineName) -> Engine:
    return cast(Engine, importlib.import_module(f"{PACKS[name]}.record").ENGINE)


def engine(name: str) -> Engine:
    """Return the engine of that name. Raises KeyError."""
    if name not in ENGINES:
        raise KeyError(name)
    return _record(name)


def driven_releases(name: str, ways: Sequence[str]) -> Sequence[str]:
    """Return the releases of an engine that are driven in these ways, the oldest first."""
    return engine(name).driven_releases(ways)


def every_release(spec: SystemSpec) -> list[SystemSpec]:
    """Return the systems that a name stands for, if it names all releases of an engine, such as
    `sglang==all+overlap`. None where it names one system."""
    if spec.version != ALL or spec.engine not in ENGINES:
        return []
    return [spec.of_version(version) for version in driven_releases(spec.engine, spec.ways)]
