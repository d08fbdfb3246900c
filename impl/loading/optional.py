"""Reads of what not every release has.

The tables of the API say which release has it, and a checkout is looked up in them before it is driven. So a
name that is not there is one that the release never had, and not one that was renamed. Nothing else may read
an attribute of a release's object with a default (stateful_tests/tests/check/test_adapter_reads.py).
"""

from __future__ import annotations

from typing import Any


def optional(owner: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, named as in the tables ("Class.member"), or `default` in a release that has
    none."""
    return getattr(owner, name.rpartition(".")[2], default)


def first_attribute(owner: Any, *names: str) -> Any:
    """Return the attribute that a release has, of several names ("Class.member") for one thing."""
    found = [optional(owner, name, None) for name in names]
    return next(each for each in found if each is not None)
