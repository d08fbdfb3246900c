"""What a torch system costs, counted by operator; allocation by host lists, and random commands."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from impl.adapter import Capabilities
from impl.torch_kv.store import KVStore
from reference import model
from reference.commands import Command, Mode
from reference.geometry import PRESETS
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import draw_profile


class Operators(TorchDispatchMode):
    """Counts operators while it is active.

    seen: by name. waits: those that need a value, or a size, from the device. elements: how many they produce
    or write; views cost nothing.
    """

    values = frozenset(
        {"_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.waits: list[str] = []
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        self.seen[name] += 1
        sized = (kwargs or {}).get("output_size") is not None
        by_mask = name in {"index", "index_put_"} and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in self.values or by_mask or (name == "repeat_interleave" and not sized):
            self.waits.append(name)
        out = func(*args, **(kwargs or {}))
        if name in {"index_put_", "copy_", "index_fill_", "put_"}:
            written = {"index_put_": args[1], "index_fill_": args[2:3]}.get(name, args[1:2])
            self.elements += next(i for i in written if i is not None).numel()
        elif isinstance(out, torch.Tensor) and not func.is_view:
            self.elements += out.numel()
        return out


def lanes(*columns: list[int]) -> tuple[Any, ...]:
    return tuple(torch.tensor(column, dtype=torch.int64) for column in columns)


def extend(store: KVStore, rows: list[int], starts: list[int], ends: list[int]) -> torch.Tensor:
    """alloc_extend of host lists."""
    row, start, end = lanes(rows, starts, ends)
    span = store.span(row, start, end - start, [e - s for s, e in zip(starts, ends, strict=True)])
    return store.alloc_extend(row, start, end, span, store.pages(starts, ends))


def random_commands(preset: str, seed: int) -> list[Command]:
    """Commands as a client and a scheduler would give them, then everything ended."""
    source = RandomChoices(f"{preset} {seed}")
    profile, commands = draw_profile(source, Capabilities()), list[Command]()
    state = model.initial(PRESETS[preset], Mode.FREE)
    for _ in range(40):
        commands.append(propose(state, source, profile))
        state, _ = model.step(state, commands[-1])
    return commands + finale(state)
