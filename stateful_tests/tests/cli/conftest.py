"""The command line on a system that does nothing, in an empty folder."""

import pytest

from impl.adapter import Capabilities
from stateful_tests.check import campaign, check_plans
from stateful_tests.lockstep import system_names as registry


class FakeSystem:
    """Enough of a system for commands whose engine is replaced."""

    name = "torch+pr22900"
    capabilities = Capabilities()
    closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def fake_system(monkeypatch, tmp_path):
    """Run in an empty folder, on a system that does nothing."""
    system = FakeSystem()
    monkeypatch.setattr(registry, "driven_system", lambda *_: system)
    monkeypatch.chdir(tmp_path)
    return system


@pytest.fixture
def make_check_find(fake_system, monkeypatch):
    """Make `check` find this; gives the plans that it had to carry out."""

    def find(result):
        plans: list[check_plans.Plan] = []

        def run(_system, plan, say, *_, **_options):
            plans.append(plan)
            say("sessions on page2, free", 100, 0)
            return result

        monkeypatch.setattr(campaign, "run", run)
        return plans

    return find
