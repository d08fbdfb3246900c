"""Since when what of a host tier is driven, and whether a checkout has what that takes (TIERED of
impl.sglang.releases.api)."""

from __future__ import annotations

from pathlib import Path

from impl.adapter import UnusableImplementation
from impl.loading import probe, used_names
from impl.loading.nearest import Nearest
from impl.sglang.parts.modules import WITH_TIERS
from impl.sglang.releases.api import TIERED
from impl.sglang.releases.catalogue import TABLE

FIRST = "0.5.18"  # the first release that is driven so: before it there is no L2TransferEngine
# With the core in Rust, which tells the locks of full KV on the device alone: in 0.5.19 the others break.
FIRST_IN_RUST = "0.5.20"
FIRST_WITH_STATES = "0.5.22"  # the first whose recurrent state is driven
# Where it differs how a release's locks count: see reference.tiers.locks.
_LOOSE = {"tombstones": "0.5.20", "host end": "0.5.22"}  # up to, not including


def require(root: Path, name: str, release: str, remark: str = "") -> None:
    """Raise UnusableImplementation that names what the files under `root` lack of the release's host tier.

    remark: of a checkout, for which release it was taken, "" for a release.
    """
    table = tuple(probe.entries(TIERED))
    missing = probe.Checkout(root, "sglang/srt", WITH_TIERS, table).missing(release, list(TABLE))
    if remark:
        renamed = TABLE[release].renamed
        missing += used_names.not_given("sglang", root, Nearest(release, 0), ("hicache",), renamed)
    if not missing:
        return
    named = probe.named(missing)
    why = remark.removeprefix(f"{root}: ").partition(";")[0]
    taken = f"; {why}{used_names.also_lost('sglang', root, release, named)}" if why else ""
    follow = "CONTRIBUTING.md, 'A new release of SGLang', says how to follow it"
    raise UnusableImplementation(f"{name} {root}: {named}{taken}. Nothing was driven: {follow}")


def loose(release: str) -> tuple[str, ...]:
    """Return how the locks of a release differ (TierFacts.loose)."""
    order = list(TABLE)
    return tuple(name for name, end in _LOOSE.items() if order.index(release) < order.index(end))
