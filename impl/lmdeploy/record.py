"""LMDeploy as an engine."""

from __future__ import annotations

from collections.abc import Sequence

from impl.engines import Engine
from impl.lmdeploy.api import RELEASES, SINCE
from impl.lmdeploy.copied import COPIED
from impl.lmdeploy.loading import LMDeploySystem
from impl.self_scheduling.release_system import drive_release

def _releases_with(ways: Sequence[str]) -> Sequence[str]:
    """Return the releases that have all these ways."""
    first = max((RELEASES.index(SINCE[way]) for way in ways if way), default=0)
    return RELEASES[first:]


ENGINE = Engine(
    name="lmdeploy",
    title="LMDeploy",
    repository="InternLM/lmdeploy",
    about="Its PyTorch engine, with steps that overlap.",
    releases=LMDeploySystem.releases,
    ways=("", *LMDeploySystem.ways),
    having=_releases_with,
    drive=drive_release(LMDeploySystem),
    test_hook=lambda _: "impl.lmdeploy.loading:for_tests",
    sketched=(
        "lmdeploy/pytorch/paging/**/*.py",
        "lmdeploy/pytorch/engine/*.py",
        "lmdeploy/pytorch/strategies/ar/*.py",
        "lmdeploy/pytorch/strategies/ar_spec/*.py",
        "lmdeploy/pytorch/messages.py",
        # +store
        "lmdeploy/pytorch/kv_connector/base.py",
        "lmdeploy/pytorch/kv_connector/mooncake/store/connector.py",
        "lmdeploy/pytorch/kv_connector/mooncake/store/data.py",
        "lmdeploy/pytorch/kv_connector/mooncake/store/scheduler.py",
    ),
    copied=COPIED,
)
