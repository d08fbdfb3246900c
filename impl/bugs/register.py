"""The register that the modules beside this one fill, and how a faulty part becomes a faulty system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from impl.torch_kv.pool import PagePool
from impl.torch_kv.state_slots import StateSlots
from impl.torch_kv.store import KVStore
from impl.torch_kv.system import TorchKV
from impl.torch_kv.radix_tree import RadixTree
from reference.commands import Mode

BOTH = (Mode.FAITHFUL, Mode.FREE)
FREE_ONLY = (Mode.FREE,)
F = TypeVar("F", bound=Callable[..., Any])
# Part -> what it is a part of, and where that names the class to use.
_PARTS: dict[type, tuple[type, str]] = {
    PagePool: (KVStore, "pool_class"),
    KVStore: (TorchKV, "store_class"),
    RadixTree: (TorchKV, "tree_class"),
    StateSlots: (TorchKV, "states_class"),
}


@dataclass(frozen=True, slots=True)
class Bug:
    """One fault.

    source: the change upstream that has, names or fixed it, or "kvspec".
    clause: id of the clause that a shortest trace violates first.
    modes: in which it can show.
    story: symptom, cause, fix.
    system: the faulty TorchKV.
    """

    id: str
    title: str
    source: str
    clause: str
    modes: tuple[Mode, ...]
    story: str
    system: type[TorchKV]


BUGS: dict[str, Bug] = {}


def torch_with_bug(id: str, device: str = "cpu") -> TorchKV:  # noqa: A002
    """Return the system with bug `id`, called "torch+ID". Raises KeyError for an unknown id."""
    return BUGS[id].system(device)


def bug(
    name: str,
    clause: str,
    title: str,
    method: Callable[..., Any] | None = None,
    *,
    source: str = "kvspec",
    modes: tuple[Mode, ...] = BOTH,
) -> Callable[[F], F]:
    """Register a fault, whose docstring is the story: a function in the place of a `method` of TorchKV or of
    a part of it, or a subclass of one of these."""

    def register(fault: F) -> F:
        """Register a function, or a class of a part, as a named bug of the built-in implementation. Return it
        unchanged."""
        system: Any = fault
        if method is not None:
            method_name = method.__name__
            [owner] = [part for part in (TorchKV, *_PARTS) if getattr(part, method_name, None) is method]
            system = type(owner.__name__, (owner,), {method_name: fault})
        for part, (whole, attribute) in _PARTS.items():
            if issubclass(system, part):
                system = type(whole.__name__, (whole,), {attribute: system})
        system.name = f"torch+{name}"
        BUGS[name] = Bug(
            name,
            title=title,
            source=source,
            clause=clause,
            modes=modes,
            story=" ".join((fault.__doc__ or "").split()),
            system=system,
        )
        return fault

    return register
