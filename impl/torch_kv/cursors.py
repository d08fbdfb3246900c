"""Cursors of rows: int64 [rows, 4] on the device, with a mirror of each line on the host.

Batched work reads the device's lines: ranges to allocate, write, evict and free. Refusals read the mirror,
so that none waits for the device (servers keep seq_lens and a CPU copy for the same reason). The same rule
moves both sides, each from its own values. Neither is copied from the other, so a drift between them stays
visible. All writes of cursors are in `CursorTable`, which writes both sides.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from impl.lazy import Tensor, torch

N = TypeVar("N", int, Tensor)


class RowCursors(NamedTuple, Generic[N]):
    """The four cursors, in tokens: of one holder (ints), or of a batch (int64 [B] each).

    Their order is that of the columns on the device.
    """

    kv_committed_len: N
    kv_allocated_len: N
    swa_evicted_seqlen: N
    cache_protected_len: N


ZERO: RowCursors[int] = RowCursors(0, 0, 0, 0)

# A move of cursors: from the cursors and one value per argument to the new cursors. It is arithmetic,
# `maximum` and `minimum`, without branches, so that it takes ints and tensors alike.
Rule = Callable[..., RowCursors[Any]]


def maximum(a: N, b: N) -> N:
    """Return the elementwise maximum of two ints or two tensors."""
    return max(a, b) if isinstance(a, int) else torch.maximum(a, b)


def minimum(a: N, b: N) -> N:
    """Return the elementwise minimum of two ints or two tensors."""
    return min(a, b) if isinstance(a, int) else torch.minimum(a, b)


def floor_divide(length: N, size: int) -> N:
    """Return length // size, rounded down. On tensors `floor_divide` is faster than the operator."""
    if isinstance(length, int):
        return length // size
    return length.floor_divide(size) if size > 1 else length


class CursorHolder(Protocol):
    """The holder of cursors in a table: a request or a slot. `cursors` is the mirror of the row's line."""

    cursors: RowCursors[int]

    @property
    def row(self) -> int | None: ...


class Lanes:
    """A batch of holders with their rows and arguments on both sides, sent to the device in one transfer.

    row: int64 [B] on the device.
    arguments, columns: the same numbers as host lists and as int64 [B] on the device.
    tail: int64 [n] on the device, other numbers of the batch.
    """

    __slots__ = ("arguments", "columns", "holders", "row", "tail")

    def __init__(
        self,
        device: torch.device,
        holders: Sequence[CursorHolder],
        *arguments: list[int],
        tail: Sequence[int] = (),
    ) -> None:
        self.holders = holders
        self.arguments = arguments
        numbers = [holder.row for holder in holders]
        for argument in arguments:
            numbers += argument
        numbers += tail
        # torch.tensor would inspect each number for its type
        flat = torch.frombuffer(array("q", numbers), dtype=torch.int64).to(
            device, non_blocking=True
        )
        sizes = [len(holders)] * (1 + len(arguments))
        self.row, *self.columns, self.tail = flat.split_with_sizes([*sizes, len(tail)])


class CursorTable:
    """Cursors of one kind of holder by row; those of a free row are 0.

    lines: int64 [rows, 4] on `device`, columns as in `RowCursors`.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = device
        self.lines = torch.zeros((rows, 4), dtype=torch.int64, device=device)

    def read(self, row: Tensor) -> RowCursors[Tensor]:
        """Return the device's cursors of the rows `row`, int64 [B]: four tensors of that shape."""
        return RowCursors(*self.lines.index_select(0, row).unbind(1))

    def move(self, lanes: Lanes, rule: Rule) -> tuple[RowCursors[Tensor], RowCursors[Tensor]]:
        """Apply `rule` with the entries' arguments to both sides. Returns the device's cursors before and
        after."""
        for holder, *values in zip(lanes.holders, *lanes.arguments, strict=True):
            holder.cursors = rule(holder.cursors, *values)
        before = self.read(lanes.row)
        after = rule(before, *lanes.columns)
        self.lines.index_copy_(0, lanes.row, torch.stack(after, 1))
        return before, after

    def copy(self, source: CursorTable, holder: CursorHolder, origin: CursorHolder) -> None:
        """Copy both sides from the holder's origin in `source`, which has the same row."""
        holder.cursors = origin.cursors
        row = Lanes(self.device, [holder]).row
        self.lines.index_copy_(0, row, source.lines.index_select(0, row))

    def put(self, holder: CursorHolder, cursors: RowCursors[int]) -> None:
        """Set both sides of one holder."""
        holder.cursors = cursors
        if any(cursors):
            line = torch.tensor(cursors, dtype=torch.int64)
            self.lines[holder.row] = line.to(self.device, non_blocking=True)
        else:
            self.lines[holder.row] = 0
