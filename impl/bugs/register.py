"""The register that the modules beside this one fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from impl.torch_kv.store import KVStore
from impl.torch_kv.system import TorchKV
from impl.torch_kv.tree import RadixTree
from reference.commands import Mode

BOTH = (Mode.FAITHFUL, Mode.FREE)
FREE_ONLY = (Mode.FREE,)


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


def broken(id: str, device: str = "cpu", checked: bool = False) -> TorchKV:  # noqa: A002
    """The system with bug `id`, called "torch+ID". Raises KeyError for an unknown id."""
    return BUGS[id].system(device=device, checked=checked)


def bug(
    name: str,
    title: str,
    *,
    clause: str,
    story: str,
    source: str = "kvspec",
    modes: tuple[Mode, ...] = BOTH,
) -> Callable[[type[TorchKV]], type[TorchKV]]:
    def register(system: type[TorchKV]) -> type[TorchKV]:
        system.name = f"torch+{name}"
        BUGS[name] = Bug(name, title, source, clause, modes, " ".join(story.split()), system)
        return system

    return register


def store_bug(
    name: str,
    title: str,
    *,
    clause: str,
    story: str,
    modes: tuple[Mode, ...] = BOTH,
) -> Callable[[type[KVStore]], type[KVStore]]:
    """A bug of the physical side: a TorchKV over a faulty store."""

    def register(store: type[KVStore]) -> type[KVStore]:
        system = type(store.__name__, (TorchKV,), {"store_class": store})
        bug(name, title, clause=clause, story=story, modes=modes)(system)
        return store

    return register


def tree_bug(
    name: str,
    title: str,
    *,
    clause: str,
    story: str,
    source: str = "kvspec",
) -> Callable[[type[RadixTree]], type[RadixTree]]:
    """A bug of the radix tree: a TorchKV with a faulty one."""

    def register(tree: type[RadixTree]) -> type[RadixTree]:
        system = type(tree.__name__, (TorchKV,), {"tree_class": tree})
        bug(name, title, clause=clause, story=story, source=source)(system)
        return tree

    return register
