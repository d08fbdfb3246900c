"""The releases whose host tiers are driven, and a check that a checkout has the names that this needs (TIERED
in impl.sglang.releases.api)."""

from __future__ import annotations

from pathlib import Path

from impl.adapter import UnusableImplementation
from impl.loading import probe, used_names
from impl.loading.nearest import Nearest
from impl.sglang.parts.modules import WITH_TIERS
from impl.sglang.releases.api import TIERED
from impl.sglang.releases.catalogue import TABLE

# The first release whose host tier is driven: earlier ones have no L2TransferEngine.
FIRST_RELEASE = "0.5.18"
# The first with the core in Rust. The core shows only the device's locks on full KV, and in 0.5.19 the other
# locks go wrong.
FIRST_IN_RUST = "0.5.20"
# The first whose recurrent state is driven.
FIRST_WITH_STATES = "0.5.22"
# Deviation of a release's locks (TierFacts.loose, reference.tiers.locks) -> the first release without it.
_LOCK_DEVIATIONS = {"tombstones": "0.5.20", "host end": "0.5.22"}


def require_tier_api(root: Path, name: str, release: str, taken_for: str = "") -> None:
    """Raise UnusableImplementation that names what the files under `root` lack of the release's host tier.

    taken_for: the release that a checkout is taken for, in words (Detected.release_text); "" for a release.
    """
    table = tuple(probe.entries(TIERED))
    missing = probe.Checkout(root, "sglang/srt", WITH_TIERS, table).missing(release, list(TABLE))
    if taken_for:
        renamed = TABLE[release].renamed
        missing += used_names.not_given("sglang", root, Nearest(release, 0), ("hicache",), renamed)
    if not missing:
        return
    missing_names = probe.missing_text(missing)
    taken = ""
    if taken_for:
        taken = f"; {taken_for}{used_names.also_lost('sglang', root, release, missing_names)}"
    follow = "CONTRIBUTING.md, 'A new release of SGLang', says how to follow it"
    raise UnusableImplementation(f"{name} {root}: {missing_names}{taken}. Nothing was driven: {follow}")


def lock_deviations(release: str) -> tuple[str, ...]:
    """Return the names of the ways in which a release's locks differ (TierFacts.loose)."""
    order = list(TABLE)
    return tuple(
        name
        for name, first_without in _LOCK_DEVIATIONS.items()
        if order.index(release) < order.index(first_without)
    )
