"""What an engine's own project imports: the adapter's types, `machine`, `check` and `replay`.

    import kvspec
    TestMyEngine = kvspec.machine(make).TestCase

Nothing is loaded before it is used. Nothing else of this project is meant to be imported from outside.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from impl.adapter import (
        Capabilities, Cursors, LockHolderView, NodeView, RequestView, SessionView, System, TreeSizes,
        TreeView, UnusableImplementation, View,
    )  # fmt: skip
    from kvspec.testing import ClauseViolated, check, machine, replay
    from reference.commands import (
        Abort, Account, Admit, Broken, CheckBusy, CheckIdle, Choice, Chunk, Close, Command, Decode, Done,
        Draft, Entry, Evict, EvictSwa, Extend, Finish, Freed, Insert, Launch, Match, Mode, Open, Outcome,
        Piece, Prompt, Reason, Refused, Report, Retract, Settle, SpecDecode, Submit, Unlock, UnlockSwa,
        prompt_len, shared_serial, token_id,
    )  # fmt: skip
    from reference.geometry import PRESETS, Geometry, preset

__all__ = [
    "PRESETS", "Abort", "Account", "Admit", "Broken", "Capabilities", "CheckBusy", "CheckIdle",
    "Choice", "Chunk", "ClauseViolated", "Close", "Command", "Cursors", "Decode", "Done", "Draft",
    "Entry", "Evict", "EvictSwa", "Extend", "Finish", "Freed", "Geometry", "Insert", "Launch",
    "LockHolderView", "Match", "Mode", "NodeView", "Open", "Outcome", "Piece", "Prompt", "Reason",
    "Refused", "Report", "RequestView", "Retract", "SessionView", "Settle", "SpecDecode", "Submit", "System",
    "TreeSizes", "TreeView", "Unlock", "UnlockSwa", "UnusableImplementation", "View", "check", "machine",
    "preset", "prompt_len", "replay", "shared_serial", "token_id",
]  # fmt: skip

_HOMES = ("impl.adapter", "reference.commands", "reference.geometry")
_TESTING = ("ClauseViolated", "check", "machine", "replay")  # these load Hypothesis and the clauses


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in ("kvspec.testing",) if name in _TESTING else _HOMES:
            module = import_module(home)
            if hasattr(module, name):
                globals()[name] = found = getattr(module, name)
                return found
    raise AttributeError(f"module 'kvspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
