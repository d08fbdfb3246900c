"""Tests that run at night alone (KVSPEC_NIGHT=1): each takes seconds, and a quicker one of every day says the
same of another release, scope or way."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

NIGHT = "KVSPEC_NIGHT" in os.environ
at_night = pytest.mark.skipif(not NIGHT, reason="at night (KVSPEC_NIGHT=1)")


def some_at_night(cases: Iterable[Any], which: Callable[[Any], bool]) -> list[Any]:
    """Parameters, of which those that `which` holds of are for the night."""
    return [pytest.param(case, marks=at_night) if which(case) else case for case in cases]
