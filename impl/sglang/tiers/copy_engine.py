"""A stand-in for `L2TransferEngine`, its streams and its events: the device that moves KV between tiers.

A command decides when a transfer moves its KV and when it completes. Transfers of one direction complete in
order. Waiting for an event completes all transfers up to the one that sets it.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from reference.tiers.facts import TierPart

POOLS = {"swa": "swa", "mamba": "state"}  # by PoolName of the release, besides that of full KV


class Event:
    """An event of the device. It is done unless a transfer that sets it is in flight.

    moving: the engine and the transfer that will set the event; None if it is done.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.moving: tuple[CopyEngine, CopyJob] | None = None

    def record(self, *_: Any) -> None:
        """Do nothing: the transfer sets the event when it completes."""

    def wait(self, *_: Any) -> None:
        """Do nothing: commands order the streams."""

    def query(self) -> bool:
        return self.moving is None

    def synchronize(self) -> None:
        if self.moving is not None:
            engine, job = self.moving
            engine.finish(job)

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    """A stream of the device. Commands order the transfers, so its waits do nothing."""

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


class CopyJob:
    """A submitted transfer.

    load: the direction, from host to device; otherwise it stores from device to host.
    parts: the transfer token by token.
    finish: the event that its submitter waits for.
    events: all events that it sets when it completes.
    copied: its KV was moved.
    completed: its events were set.
    """

    def __init__(self, load: bool, parts: list[TierPart], finish: Event) -> None:
        self.load = load
        self.parts = parts
        self.finish = finish
        self.events = [finish]
        self.copied = False
        self.completed = False


class CopyEngine:
    """A stand-in for `L2TransferEngine`.

    queues: transfers in flight, oldest first, loads under True and stores under False.
    completed: completed transfers that the cache has not acknowledged, the oldest first.
    memory: device stamps by pool and slot.
    host: host stamps by pool and slot.
    """

    def __init__(self, io_backend: str = "direct") -> None:
        del io_backend
        self.queues: dict[bool, deque[CopyJob]] = {False: deque(), True: deque()}
        self.completed: list[CopyJob] = []
        self.device_to_host_stream = Stream()
        self.host_to_device_stream = self.device_to_host_stream
        self.memory: dict[str, Any] = {}  # of lists, or of objects that are indexed like one
        self.host: dict[str, list[int]] = {}

    def submit_device_to_host(self, transfers: Sequence[Any], **_: Any) -> Any:
        return self._submit(transfers, load=False)

    def submit_host_to_device(
        self, transfers: Sequence[Any], *, on_layer_done: Any = None, **_: Any
    ) -> Any:
        return self._submit(transfers, on_layer_done, load=True)

    def _submit(self, transfers: Sequence[Any], on_layer_done: Any = None, *, load: bool) -> Any:
        parts = [
            part
            for transfer in transfers
            for part in parts_of(transfer.device_pool.pool, transfer.device_indices, transfer.host_indices)
        ]
        job = CopyJob(load, parts, Event())
        if on_layer_done is not None:  # a forward pass waits for these events, layer by layer
            job.events += on_layer_done.__self__.load_events
        for event in job.events:
            event.moving = self, job
        self.queues[load].append(job)
        self.clear_targets(load, parts)
        module = importlib.import_module("sglang.srt.mem_cache.l2_transfer")
        return module.TransferCompletion(Event(), job.finish, False)

    def clear_targets(self, load: bool, parts: Sequence[TierPart]) -> None:
        """Clear the slots that a transfer will write, as a reused slot may hold the right KV already."""
        for part in parts:
            if load:
                self.memory[part.pool][part.device] = 0
            else:
                self.host[part.pool][part.host] = 0

    def copy(self, job: CopyJob) -> None:
        """Move the KV of a transfer, unless that was done."""
        if job.copied:
            return
        job.copied = True
        for part in job.parts:
            device = self.memory[part.pool]
            host = self.host[part.pool]
            if job.load:
                device[part.device] = host[part.host]
            else:
                host[part.host] = device[part.device]

    def complete(self, load: bool) -> None:
        """Complete the oldest transfer of a direction."""
        job = self.queues[load].popleft()
        self.copy(job)
        job.completed = True
        self.completed.append(job)
        for event in job.events:
            event.moving = None

    def finish(self, job: CopyJob) -> None:
        """Complete a transfer and all transfers of its direction before it."""
        while not job.completed:
            self.complete(job.load)

    def finish_loads(self) -> None:
        """Complete all loads: a forward pass waits for its own, and loads complete in order."""
        while self.queues[True]:
            self.complete(load=True)

    def next_to_copy(self, load: bool) -> CopyJob | None:
        """Return the oldest transfer of a direction that has not moved its KV."""
        return next((job for job in self.queues[load] if not job.copied), None)


class StateStamps:
    """Stamps of recurrent states by slot, read from and written to the tensor of the release's pool."""

    def __init__(self, states: Any) -> None:
        self.states = states

    def __getitem__(self, slot: int) -> int:
        return int(self.states.cells[slot])

    def __setitem__(self, slot: int, stamp: int) -> None:
        self.states.cells[slot] = stamp

    def __iter__(self) -> Iterator[int]:
        stamps: list[int] = self.states.cells.tolist()
        return iter(stamps)


def parts_of(pool: str, device: Any, host: Any) -> list[TierPart]:
    """Return the parts of a transfer of one pool, token by token.

    device, host: tensors of slots.
    """
    return [TierPart(pool, *pair) for pair in zip(device.tolist(), host.tolist(), strict=True)]


def slots_of(value: Any) -> tuple[int, ...]:
    """Return the slots of a tensor of indices; none where there is none."""
    return () if value is None else tuple(value.tolist())


def slots_by_pool(full: Any, transfers: Iterable[Any] | None) -> dict[str, tuple[int, ...]]:
    """Return host slots of an operation of the storage, by pool."""
    slots = {"full": slots_of(full)}
    for transfer in transfers or ():
        if transfer.indices_from_pool is None and transfer.host_indices is not None:
            slots[POOLS[transfer.name.value]] = slots_of(transfer.host_indices)
    return slots
