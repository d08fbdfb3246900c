"""The command line on a system that does nothing, in an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from impl.adapter import Capabilities
from stateful_tests.check import campaign, tiers
from stateful_tests.lockstep import systems as registry
from stateful_tests.lockstep.results import CheckResult


class FakeSystem:
    """Enough of a system for commands whose engine is replaced."""

    name = "torch+pr22900"
    capabilities = Capabilities()
    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSystem:
    """Run in an empty folder, on a system that does nothing."""
    system = FakeSystem()
    monkeypatch.setattr(registry, "resolve", lambda spec, **options: system)
    monkeypatch.chdir(tmp_path)
    return system


@pytest.fixture
def finds(
    fake: FakeSystem, monkeypatch: pytest.MonkeyPatch
) -> Callable[[CheckResult], list[tiers.Plan]]:
    """Make `check` find this; gives the plans that it was asked to carry out."""

    def find(result: CheckResult) -> list[tiers.Plan]:
        plans: list[tiers.Plan] = []

        def run(
            _system: FakeSystem, plan: tiers.Plan, say: Callable[[str, int, int], None], *_: object,
            **_options: object,
        ) -> CheckResult:
            plans.append(plan)
            say("sessions on page2, free", 100, 0)
            return result

        monkeypatch.setattr(campaign, "run", run)
        return plans

    return find
