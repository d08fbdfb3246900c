"""Stand-ins for objects of an engine that come with a server or a model.

Exported tests have this file in them as it stands, so it imports nothing of kvspec.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Values:
    """A stand-in with the attributes that are given. A release that reads another one is told so: what would
    stand there is not known."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(list(self.__dict__)[:3])
        raise AttributeError(f"the stand-in with {known} has no {name}", name=name, obj=self)


def accepted_arguments(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the release's function has a parameter for."""
    return {
        name: value
        for name, value in offered.items()
        if name in inspect.signature(function).parameters
    }
