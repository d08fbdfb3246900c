"""What is for the night alone, where KVSPEC_NIGHT is set: what takes seconds, and says the same as a
quicker test of the day, of one more release, scope or way."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

NIGHT = "KVSPEC_NIGHT" in os.environ
at_night = pytest.mark.skipif(not NIGHT, reason="at night (KVSPEC_NIGHT=1)")


def some_at_night(cases: Iterable[Any], which: Callable[[Any], bool]) -> list[Any]:
    """Parameters, of which those that `which` holds of are for the night."""
    return [pytest.param(case, marks=at_night) if which(case) else case for case in cases]
