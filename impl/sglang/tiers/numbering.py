"""Numbers of the things that one run of a tree shows."""

from __future__ import annotations

from typing import Any


class Numbers:
    """Things of a run, numbered from 1 on in the order in which they came up; each is kept, so that no other
    gets its identity."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[int, Any]] = {}

    def of(self, key: Any, thing: Any = None) -> int:
        return self.known.setdefault(key, (len(self.known) + 1, thing))[0]

    def __contains__(self, key: Any) -> bool:
        return key in self.known
