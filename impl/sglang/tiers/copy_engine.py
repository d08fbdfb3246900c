"""The device that moves KV between tiers, in the place of `L2TransferEngine`, its streams and events.

When a transfer moves its KV and when it completes is a command; transfers of one direction keep their order.
Whoever waits for an event has the engine complete all up to its transfer.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from reference.tiers.facts import TierPart


class Event:
    """An event of the device; done unless a transfer has still to complete for it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.moving: tuple[CopyEngine, CopyJob] | None = None

    def record(self, *_: Any) -> None:
        """It is recorded when its transfer completes."""

    def wait(self, *_: Any) -> None:
        """Streams are ordered by commands."""

    def query(self) -> bool:
        return self.moving is None

    def synchronize(self) -> None:
        if self.moving is not None:
            engine, job = self.moving
            engine.finish(job)

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    """A stream of the device: nothing is queued on it but transfers, which are commands."""

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


class CopyJob:
    """A transfer that was submitted. events: those that it sets when it completes."""

    def __init__(self, load: bool, parts: list[TierPart], finish: Event) -> None:
        self.load, self.parts, self.finish = load, parts, finish
        self.events = [finish]
        self.copied = self.completed = False


class CopyEngine:
    """`L2TransferEngine`. queues: transfers in flight, of loads and of stores; unacknowledged: completed ones
    that the cache may still wait for. memory: device stamps by pool; host: host stamps."""

    def __init__(self, io_backend: str = "direct") -> None:
        del io_backend
        self.queues: dict[bool, deque[CopyJob]] = {False: deque(), True: deque()}
        self.completed: list[CopyJob] = []
        self.device_to_host_stream = self.host_to_device_stream = Stream()
        self.memory: dict[str, Any] = {}  # lists, or what is read and written as one
        self.host: dict[str, list[int]] = {}

    def submit_device_to_host(self, transfers: Sequence[Any], **_: Any) -> Any:
        return self._submit(False, transfers)

    def submit_host_to_device(
        self, transfers: Sequence[Any], *, on_layer_done: Any = None, **_: Any
    ) -> Any:
        return self._submit(True, transfers, on_layer_done)

    def _submit(self, load: bool, transfers: Sequence[Any], on_layer_done: Any = None) -> Any:
        parts = [
            part
            for each in transfers
            for part in parts_of(each.device_pool.pool, each.device_indices, each.host_indices)
        ]
        job = CopyJob(load, parts, Event())
        if on_layer_done is not None:  # a forward pass waits for these, layer by layer
            job.events += on_layer_done.__self__.load_events
        for event in job.events:
            event.moving = self, job
        self.queues[load].append(job)
        self.nothing_there(load, parts)
        module = importlib.import_module("sglang.srt.mem_cache.l2_transfer")
        return module.TransferCompletion(Event(), job.finish, False)

    def nothing_there(self, load: bool, parts: Sequence[TierPart]) -> None:
        """Clear what a transfer has still to write: a slot that is used again may hold the right KV."""
        for part in parts:
            if load:
                self.memory[part.pool][part.device] = 0
            else:
                self.host[part.pool][part.host] = 0

    def copy(self, job: CopyJob) -> None:
        """Move the KV of a transfer."""
        if job.copied:
            return
        job.copied = True
        for part in job.parts:
            device, host = self.memory[part.pool], self.host[part.pool]
            if job.load:
                device[part.device] = host[part.host]
            else:
                host[part.host] = device[part.device]

    def complete(self, load: bool) -> None:
        """The oldest transfer of a direction completes."""
        job = self.queues[load].popleft()
        self.copy(job)
        job.completed = True
        self.completed.append(job)
        for event in job.events:
            event.moving = None

    def finish(self, job: CopyJob) -> None:
        """A transfer completes, and with it all before it."""
        while not job.completed:
            self.complete(job.load)

    def finish_loads(self) -> None:
        """All loads complete: a forward pass waits for its own, and was queued behind those before."""
        while self.queues[True]:
            self.complete(True)

    def next_to_copy(self, load: bool) -> CopyJob | None:
        """The oldest transfer of a direction that has not moved its KV."""
        return next((job for job in self.queues[load] if not job.copied), None)


class StateStamps:
    """Stamps of recurrent state by slot, in the pool's own tensor."""

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
    """A transfer of one pool, token by token."""
    return [TierPart(pool, *pair) for pair in zip(device.tolist(), host.tolist(), strict=True)]
