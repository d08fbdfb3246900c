"""LMDeploy as an engine."""

from __future__ import annotations

from impl.engines import Engine
from impl.lmdeploy.loading import LMDeploySystem
from impl.self_scheduling.release_system import drive_release

ENGINE = Engine(
    name="lmdeploy",
    title="LMDeploy",
    repository="InternLM/lmdeploy",
    about="Its PyTorch engine, with steps that overlap.",
    releases=LMDeploySystem.releases,
    drive=drive_release(LMDeploySystem),
    test_hook=lambda _: "impl.lmdeploy.loading:for_tests",
    sketched=(
        "lmdeploy/pytorch/paging/**/*.py",
        "lmdeploy/pytorch/engine/*.py",
        "lmdeploy/pytorch/strategies/ar/*.py",
        "lmdeploy/pytorch/strategies/ar_spec/*.py",
        "lmdeploy/pytorch/messages.py",
    ),
)
