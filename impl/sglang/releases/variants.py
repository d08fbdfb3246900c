"""Radix trees that a release has besides the one that is driven by default: VARIANTS.

unified: 0.5.11 to 0.5.18 with SGLANG_ENABLE_UNIFIED_RADIX_TREE=1, one tree for all with the sessions in it.
The flag is read only where there is a tree: without one a server has its chunk cache in StreamingSession
either way (init_cache_with_memory_pool of the scheduler, mem_cache/registry.py from 0.5.13 on).

rust: 0.5.19 and later with the tree's core in Rust, an extension that the wheel brings for one Python. A
server of 0.5.21 and later has that where it can load it, unless SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND says
otherwise.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from impl.adapter import UnusableImplementation
from impl.sglang.parts import trees
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.releases.facts import compose_release
from impl.sglang.releases.v0_5_10_to_14 import Release0510, Release0511
from impl.sglang.releases.v0_5_15_to_21 import Release0519, Unified
from reference.geometry import Geometry

_TREE = "sglang.srt.mem_cache.unified_radix_cache"


class _Flagged(Unified):
    """The changes of the flag in a release."""

    @classmethod
    def require(cls, root: Path) -> None:
        if not root.joinpath(*_TREE.split(".")).with_suffix(".py").is_file():
            raise UnusableImplementation(f"sglang {cls.version}+unified: {root} has no {_TREE}")

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        return geometry.tree


def _flagged_release(release: type[Release0510]) -> type[Release0510]:
    return type(f"Flagged{release.__name__}", (_Flagged, release), {"__doc__": release.__doc__})


class _InRust(Unified):
    """The changes of the core in Rust."""

    core = "rust"

    @classmethod
    def require(cls, root: Path) -> None:
        folder = root / "sglang/srt/mem_cache/rust_tree_core"
        if not any((folder / f"mem_cache{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
            raise UnusableImplementation(
                f"sglang {cls.version}+{cls.core}: {root} has no compiled core for this Python"
                " (one that an older kvspec has fetched has none: remove it)"
            )

    def make_cache(self, rows: Any, allocator: Any, geometry: Geometry) -> Any:
        cache = super().make_cache(rows, allocator, geometry)
        # Where the release's support of it ends it takes Python's.
        if self.is_unified(geometry) and cache._tree_core_backend != self.core:
            raise UnusableImplementation(
                f"sglang {self.version}+{self.core}: not with this torch or system"
            )
        return cache


def _in_rust(release: type[Release0519]) -> type[Release0510]:
    more = {"__doc__": release.__doc__, "tree": getattr(trees, f"Rust{release.tree.__name__}")}
    return type(f"InRust{release.__name__}", (_InRust, release), more)


# Name -> version -> the release with that tree.
VARIANTS: dict[str, dict[str, type[Release0510]]] = {
    "unified": {
        version: _flagged_release(release)
        for version, release in TABLE.items()
        if issubclass(release, Release0511) and not issubclass(release, Release0519)
    },
    "rust": {version: _in_rust(r) for version, r in TABLE.items() if issubclass(r, Release0519)},
}


def variant(release: type[Release0510], tree: str) -> type[Release0510]:
    """Return the release with the tree of that name; raises UnusableImplementation where it has none."""
    mixin = VARIANTS[tree]
    if release.version not in mixin:
        raise UnusableImplementation(
            f"sglang {release.version}: +{tree} is no choice there; it is in {', '.join(mixin)}"
        )
    return compose_release(mixin, release.version, release.facts)
