"""Objects of a release that are made without their constructors, which need a whole server.

Such an object has the attributes that it was given. One that it lacks is the adapter's omission, not the
release's (impl.process.failures).
"""

from __future__ import annotations

from typing import Any

_KINDS: set[type] = set()


def bare(kind: type, **attributes: Any) -> Any:
    """Return an object of a class of the release, with only these attributes."""
    _KINDS.add(kind)
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def is_bare(thing: object) -> bool:
    """Return whether an object is of a class of which `bare` makes objects."""
    return type(thing) in _KINDS
