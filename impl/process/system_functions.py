"""Functions of a system by file and name, such as those that a command called.

Reports and `--json` group them: "FILE: FUNCTION, FUNCTION".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class SystemFunction(NamedTuple):
    """A function in a file of a system.

    file: its path below the system's root.
    name: its qualified name, such as "Scheduler.schedule".
    """

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"

    @classmethod
    def parse(cls, text: str) -> SystemFunction:
        """Return the function that its text names."""
        file, _, name = text.partition(": ")
        return cls(file, name)


def names_by_file(functions: Iterable[SystemFunction]) -> dict[str, list[str]]:
    """Return the names of functions by file, in the order of the functions."""
    by_file: dict[str, list[str]] = {}
    for file, name in functions:
        by_file.setdefault(file, []).append(name)
    return by_file


def grouped_texts(functions: Iterable[SystemFunction]) -> list[str]:
    """Return a text "FILE: FUNCTION, ..." for each file."""
    return [f"{file}: {', '.join(names)}" for file, names in names_by_file(functions).items()]


def parse_grouped(texts: Iterable[str]) -> Iterator[SystemFunction]:
    """Yield the functions that texts "FILE: FUNCTION, ..." name."""
    for text in texts:
        file, _, names = text.partition(": ")
        for name in names.split(", "):
            yield SystemFunction(file, name)
