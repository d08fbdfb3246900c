"""What an engine's own project imports: the adapter's types, every command, `machine`, `check` and `replay`.

    import kvspec
    TestMyEngine = kvspec.machine(make).TestCase

Nothing is loaded before it is used. Nothing else of this project is meant to be imported from outside.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# ruff: noqa: F403 (`from MODULE import *` re-exports to a type checker; at run time _NAMES are all)
if TYPE_CHECKING:
    from impl.adapter import *
    from kvspec.testing import *
    from reference.commands import *
    from reference.geometry import *

_NAMES = {
    "impl.adapter": (
        "Capabilities", "Cursors", "LockHolderView", "NodeView", "RequestView", "SessionView", "System",
        "TreeSizes", "TreeView", "UnusableImplementation", "View",
    ),
    "kvspec.testing": ("ClauseViolated", "check", "machine", "replay"),  # loads Hypothesis
    "reference.commands": (  # and every command
        "Account", "Broken", "Choice", "Chunk", "Command", "Done", "Draft", "Entry", "Freed", "Mode",
        "Outcome", "Piece", "Prompt", "Reason", "Refused", "Report", "prompt_len", "shared_serial",
        "token_id",
    ),
    "reference.geometry": ("PRESETS", "Geometry", "preset"),
}  # fmt: skip


def _names_of(home: str) -> tuple[str, ...]:
    if home != "reference.commands":
        return _NAMES[home]
    return (*_NAMES[home], *(kind.__name__ for kind in import_module(home).COMMANDS))


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(each for home in _NAMES for each in _names_of(home))
    for home in _NAMES if not name.startswith("_") else ():
        if name in _names_of(home):
            globals()[name] = found = getattr(import_module(home), name)
            return found
    raise AttributeError(f"module 'kvspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(each for home in _NAMES for each in _names_of(home))
