"""Faults planted into the reference: clauses that share none of its code name them.

The reference as a system shows its fault, and a clause must see it. A correct system beside a reference with
the fault must part from it, unless no state of the reference is wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from reference import cursors, model, radix_tree
from reference.commands import (
    Admit, Command, Draft, Evict, EvictSwa, Finish, Insert, Match, Mode, Retract,
    SpecDecode, Submit, Unlock, UnlockSwa,
)  # fmt: skip
from reference.geometry import Geometry
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.commands import script
from stateful_tests.traces.trace_files import prompt_of

PLAIN = Geometry(page_size=1, window=3, full_pages=40, swa_pages=28, rows=4, width=24)
TREE = Geometry(page_size=2, window=2, full_pages=12, swa_pages=12, rows=3, width=16, tree=True)
RUNNING = script("open s1; submit r1 in s1 +1; admit r1; extend r1 +1")
AHEAD = (*RUNNING, SpecDecode((Draft("r1", 12, 2),)), EvictSwa("r1", 13))
CHUNKS = script("admit r1; extend r1 +1; extend r1 +4")
IN_CHUNKS = (Submit("r1", None, 0, 0, prompt_of("a5")), *CHUNKS)
KEPT = Insert("h1", prompt_of("a8"), 0, chunked=True)
TOMBSTONE = (Insert("h1", prompt_of("a4")), Evict(0, 2))
RECOVERED = (*TOMBSTONE, Submit("r1", None, 0, 0, prompt_of("a2 b3")), *CHUNKS)

Fault = Callable[[pytest.MonkeyPatch], None]


def code(function: Any, wrong: Any) -> Fault:
    """Whoever has imported the function runs the wrong code. The names in it are those of its module."""
    return lambda patch: patch.setattr(function, "__code__", wrong.__code__)


def effects(kind: str, pool: str) -> Fault:
    """Pages that change hands with the tree are not noted."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = model.step_with_effects

        def wrong(*args: Any) -> Any:
            found = right(*args)
            getattr(found[2], kind)[pool].clear()
            return found

        patch.setattr(model, "step_with_effects", wrong)

    return plant


# The wrong code. Names in it are those of the module that it is planted into.
def no_cap_of_e(c: Any, target: int) -> Any:
    return c._replace(kv_committed_len=min(c[0], target), kv_allocated_len=min(c[1], target))


def no_cap_of_a(c: Any, target: int) -> Any:
    return c._replace(kv_committed_len=min(c[0], target))


def one_less(c: Any, target: int) -> Any:
    return c._replace(kv_committed_len=target - 1, kv_allocated_len=target - 1)


def pins_to_the_root(tree: Any, holder: str, key: Any) -> Any:
    return tree._replace(locks=(*tree.locks, Lock(holder, key, 0)))  # noqa: F821


def pins_nothing(tree: Any, holder: str, key: Any) -> Any:
    return tree._replace(locks=(*tree.locks, Lock(holder, key, len(key))))  # noqa: F821


def keeps_the_lock(tree: Any, holder: str) -> Any:
    return tree


def takes_all_locks(tree: Any, holder: str) -> Any:
    return tree._replace(locks=())


# fault, sizes, commands; the clause on the reference and the one on torch
CASES: dict[str, tuple[Fault, Geometry, Sequence[Command], str, str]] = {
    "a finish leaves E": (
        code(cursors.cut, no_cap_of_e), PLAIN, (*AHEAD, Finish("r1", 1)), "LEN-2", "REF-1"),
    "a retract leaves A": (
        code(cursors.cut, no_cap_of_a), PLAIN, (*AHEAD, Retract("r1")), "LEN-2", "REF-1"),
    "a restore goes below the prefix": (
        code(cursors.cut, one_less), PLAIN, (*RUNNING, Retract("r1"), Admit("r1")), "LEN-3", "REF-1"),
    "a page that is taken over is freed": (effects("adopted", "full"), TREE, IN_CHUNKS, "FREE-1", ""),
    "the same of the SWA pool": (effects("adopted", "swa"), TREE, IN_CHUNKS, "FREE-2", ""),
    "a page that is replaced is kept": (effects("gone", "full"), TREE, RECOVERED, "FREE-1", ""),
    "a lock pins up to the root": (
        code(radix_tree.lock, pins_to_the_root), TREE, (KEPT, Evict(0, 2)), "TREE-6", "TREE-11"),
    "a lock pins no SWA KV": (
        code(radix_tree.lock, pins_nothing), TREE, (KEPT, Evict(0, 8)), "TREE-6", "TREE-11"),
    "an unlock keeps the lock": (
        code(radix_tree.unlock, keeps_the_lock), TREE, (KEPT, Unlock("h1")), "TREE-6", "REF-1"),
    "an unlock takes the locks of others": (
        code(radix_tree.unlock, takes_all_locks), TREE, (KEPT, Match("h2", prompt_of("a4")), Unlock("h2")),
        "TREE-6", "REF-1"),
    "an SWA part stays": (
        code(radix_tree.unlock_swa, keeps_the_lock), TREE, (KEPT, UnlockSwa("h1"), Evict(0, 8)),
        "TREE-6", "TREE-11"),
    "an SWA part takes the rest along": (
        code(radix_tree.unlock_swa, takes_all_locks), TREE, (KEPT, UnlockSwa("h1")), "TREE-6", "REF-1"),
}  # fmt: skip


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_the_reference_is_named(name, impl, monkeypatch):
    plant, geometry, commands, on_reference, on_torch = CASES[name]
    assert violated_clause(impl, geometry, commands) == "", "there is no fault yet"
    plant(monkeypatch)
    assert violated_clause(impl, geometry, commands) == (on_reference if impl == "reference" else on_torch)


def violated_clause(impl: str, geometry: Geometry, commands: Sequence[Command]) -> str:
    lockstep = Lockstep(resolve(impl), geometry, Mode.FREE)
    for command in commands:
        if lockstep.violation is None:
            lockstep.do(command)
    return lockstep.violation.clause if lockstep.violation is not None else ""
