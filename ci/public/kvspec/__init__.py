"""The imports of an engine's own project: the adapter's types, every command, `machine`, `check` and
`replay`.

    import kvspec
    TestMyEngine = kvspec.machine(make).TestCase

Nothing is loaded before it is used. Nothing else of this project is meant to be imported from outside.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# ruff: noqa: F403 (`from MODULE import *` re-exports to a type checker; at run time _NAMES are all)
if TYPE_CHECKING:
    from impl.adapter import *
    from impl.self_scheduling.driver import *
    from impl.vocabulary import *
    from kvspec.testing import *
    from reference.blocks.commands import *
    from reference.blocks.config import *
    from reference.blocks.facts import *
    from reference.commands import *
    from reference.geometry import *
    from reference.token_ids import *

_NAMES = {
    "impl.adapter": (
        "Capabilities", "Cursors", "EngineSystem", "LockHolderView", "NodeView", "RequestView", "SessionView",
        "System", "TreeSizes", "TreeView", "UnusableImplementation", "View",
    ),
    "impl.self_scheduling.driver": ("SelfSchedulingDriver",),  # and all that such an engine needs
    "impl.vocabulary": ("CommandRefused", "require"),
    "kvspec.testing": ("ClauseViolated", "Incomplete", "check", "machine", "replay"),  # loads Hypothesis
    # and every command
    "reference.blocks.commands": ("EngineCommand", "STOP_TOKEN", "client_tokens"),
    "reference.blocks.config": ("EngineConfig", "LayerGroup"),
    "reference.blocks.presets": ("ENGINE_PRESETS", "engine_preset"),
    "reference.blocks.facts": (
        "BlockFacts", "HostFacts", "HostKey", "Lane", "Output", "Published", "RequestFact", "StateUse",
        "StorageJob", "StoredChunk",
        "Transfer", "chain", "chained",
    ),
    "reference.commands": (  # and every command
        "Account", "Broken", "Choice", "Chunk", "Command", "Done", "Draft", "Entry", "Freed", "Mode",
        "Outcome", "Piece", "Prompt", "Reason", "Refused", "Report", "prompt_len",
    ),
    "reference.geometry": ("PRESETS", "Geometry", "preset"),
    "reference.token_ids": ("shared_serial", "token_id"),
}  # fmt: skip


_COMMANDS = {"reference.commands": "COMMANDS", "reference.blocks.commands": "ENGINE_COMMANDS"}


def _names_of(home: str) -> tuple[str, ...]:
    kinds = getattr(import_module(home), _COMMANDS[home]) if home in _COMMANDS else ()
    return tuple(dict.fromkeys((*_NAMES[home], *(kind.__name__ for kind in kinds))))


def __getattr__(name: str) -> object:
    if name == "__all__":
        return sorted(each for home in _NAMES for each in _names_of(home))
    if not name.startswith("_"):
        for home in _NAMES:
            if name in _names_of(home):
                globals()[name] = value = getattr(import_module(home), name)
                return value
    raise AttributeError(f"module 'kvspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(each for home in _NAMES for each in _names_of(home))
