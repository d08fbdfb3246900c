"""Releases with their host tier, one worker for the tests of a file."""

import pytest

from impl.sglang.tiers.system import TierSystem
from stateful_tests.tests.tiers.lines import NEWEST


@pytest.fixture(scope="module")
def newest():
    system = TierSystem(NEWEST)
    yield system
    system.close()
