"""Which releases of an engine are driven in which ways: what `ENGINE==all` stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from stateful_tests.lockstep.known_faults import Engine, releases
from stateful_tests.lockstep.systems import ENGINES

ALL = "all"  # in the place of a version
# The ways to run of each engine, each behind a plus sign.
WAYS: dict[str, tuple[str, ...]] = {
    "sglang": ("", "overlap", "hicache", "rust", "unified", "rust+overlap", "rust+hicache"),
    "vllm": ("", "async", "offload", "v2", "async+v2", "async+offload"),
    "transformers": ("",),
    "lmdeploy": ("",),
}


def names(impl: str) -> list[str]:
    """The systems that `impl` stands for, if it names all releases of an engine: `sglang==all+overlap`, or
    with other ways behind it; none where it names one system."""
    package, *ways = impl.split("+")
    engine, _, version = package.partition("==")
    if version != ALL or engine not in ENGINES:
        return []
    return ["+".join([f"{engine}=={each}", *ways]) for each in driven_in(engine, ways)]


def driven_in(engine: str, ways: Sequence[str]) -> Sequence[str]:
    """The releases of an engine that are driven in these ways, the oldest first."""
    with_ways = _WITH_WAYS.get(engine)
    return releases(cast(Engine, engine)) if with_ways is None else with_ways(ways)


def _sglang(ways: Sequence[str]) -> Sequence[str]:
    from impl.sglang.releases.catalogue import TABLE
    from impl.sglang.releases.variants import VARIANTS
    from impl.sglang.tiers.api import FIRST, FIRST_IN_RUST

    order = list(TABLE)
    having = VARIANTS.get(ways[0] if ways else "", TABLE)
    if "hicache" in ways:
        order = order[order.index(FIRST_IN_RUST if "rust" in ways else FIRST) :]
    return [version for version in order if version in having]


def _vllm(ways: Sequence[str]) -> Sequence[str]:
    from impl.vllm.api import RELEASES, SINCE

    return RELEASES[max((RELEASES.index(SINCE[way]) for way in ways if way in SINCE), default=0) :]


# Engines of which not every release has each way.
_WITH_WAYS: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {"sglang": _sglang, "vllm": _vllm}
