"""The register that the modules beside this one fill, and how a faulty part becomes a faulty system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from impl.torch_kv.pool import PagePool
from impl.torch_kv.store import KVStore
from impl.torch_kv.system import TorchKV
from impl.torch_kv.tree import RadixTree
from reference.commands import Mode

BOTH, FREE_ONLY = (Mode.FAITHFUL, Mode.FREE), (Mode.FREE,)
F = TypeVar("F", bound=TorchKV | KVStore | PagePool | RadixTree)
# Part -> what it is a part of, and where that names the class to use.
_PARTS: dict[type, tuple[type, str]] = {
    PagePool: (KVStore, "pool_class"),
    KVStore: (TorchKV, "store_class"),
    RadixTree: (TorchKV, "tree_class"),
}


@dataclass(frozen=True, slots=True)
class Bug:
    """One fault.

    source: the change upstream that has, names or fixed it, or "kvspec". clause: id of the clause that
    a shortest trace violates first. modes: in which it can show. story: symptom, cause, fix.
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


def broken(id: str, device: str = "cpu") -> TorchKV:  # noqa: A002
    """The system with bug `id`, called "torch+ID". Raises KeyError for an unknown id."""
    return BUGS[id].system(device)


def bug(
    name: str, clause: str, title: str, *, source: str = "kvspec", modes: tuple[Mode, ...] = BOTH
) -> Callable[[type[F]], type[F]]:
    """Register a fault of TorchKV or of a part of it: a subclass whose docstring is the story."""

    def register(fault: type[F]) -> type[F]:
        system: type = fault
        for part, (whole, attribute) in _PARTS.items():
            if issubclass(system, part):
                system = type(fault.__name__, (whole,), {attribute: system})
        system.name = f"torch+{name}"  # type: ignore[attr-defined]
        BUGS[name] = Bug(name, title, source, clause, modes, " ".join((fault.__doc__ or "").split()), system)
        return fault

    return register
