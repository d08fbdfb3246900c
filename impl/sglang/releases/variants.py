"""Radix trees that a release has besides the one that is driven by default: VARIANTS.

unified: 0.5.11 to 0.5.14 with SGLANG_ENABLE_UNIFIED_RADIX_TREE=1, one tree for all with the sessions in it.
The flag is read only where there is a tree: without one a server has its chunk cache in StreamingSession
either way (init_cache_with_memory_pool of the scheduler, mem_cache/registry.py from 0.5.13 on).

rust: 0.5.23 with the tree's core in Rust, which a server takes where it can load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from impl.adapter import UnusableImplementation
from impl.sglang.releases.v0_5_10_to_14 import Release0510, Release0511, Release0512, Release0513, Release0514
from impl.sglang.releases.v0_5_16_to_20 import Unified
from impl.sglang.releases.v0_5_23 import RustCore0523
from reference.geometry import Geometry

_TREE = "sglang.srt.mem_cache.unified_radix_cache"


class _Flagged(Unified):
    """What the flag changes in a release."""

    @classmethod
    def require(cls, root: Path) -> None:
        if not root.joinpath(*_TREE.split(".")).with_suffix(".py").is_file():
            raise UnusableImplementation(f"sglang {cls.version}+unified: {root} has no {_TREE}")

    @classmethod
    def is_unified(cls, geometry: Geometry) -> bool:
        return geometry.tree

    def slot(self, cache: Any, session_id: str) -> Any:
        sessions = cache.session if isinstance(cache, self.unified.UnifiedRadixCache) else cache
        return super().slot(sessions, session_id)


def _flagged(release: type[Release0510]) -> type[Release0510]:
    # From 0.5.13 on it splits a fresh leaf where a window ends (#26919), which the other trees do not yet.
    more: dict[str, Any] = {"known": {}} if issubclass(release, Release0513) else {}
    return type(f"Flagged{release.__name__}", (_Flagged, release), {"__doc__": release.__doc__, **more})


# Name -> version -> the release with that tree.
VARIANTS: dict[str, dict[str, type[Release0510]]] = {
    "unified": {r.version: _flagged(r) for r in (Release0511, Release0512, Release0513, Release0514)},
    "rust": {RustCore0523.version: RustCore0523},
}


def variant(release: type[Release0510], tree: str) -> type[Release0510]:
    """The release with the tree of that name; raises UnusableImplementation where it has none."""
    of = VARIANTS[tree]
    if release.version not in of:
        raise UnusableImplementation(
            f"sglang {release.version}: +{tree} is no choice there; it is in {', '.join(of)}"
        )
    return of[release.version]
