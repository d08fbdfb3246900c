"""The network between the two servers of a pair: nixl agents, transfers, messages, handshakes and the clock.

A transfer moves its bytes, a message arrives and a handshake runs only when a command says so. The connector
looks up its agent, clock and sockets in modules, so a process has one network.
"""

from __future__ import annotations

import ctypes
import importlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from enum import StrEnum
from typing import Any

import numpy as np

START = 1000.0  # the clock at reset (seconds), as of a server that has run for a while


class Clock:
    """A stand-in for the module `time`: its time moves only by commands."""

    now = START

    @classmethod
    def _read(cls) -> float:
        return cls.now

    @staticmethod
    def sleep(_: float) -> None:
        """Return at once."""


Clock.perf_counter = Clock.monotonic = Clock.time = Clock._read  # type: ignore[attr-defined]


class NixlState(StrEnum):
    """The state of a transfer, by nixl's names."""

    PREPARED = "INIT"
    IN_FLIGHT = "PROC"
    COMPLETED = "DONE"
    FAILED = "ERR"


class PostedTransfer:
    """A transfer of nixl.

    peer: name of the other agent.
    address_pairs: (own address, address of the peer, bytes) of each region.
    writes: the agent writes to its peer; otherwise it reads.
    notification: what the peer is told when the transfer completes, or None.
    number: position in the order of posting; -1 before it is posted.
    copied: its bytes were moved.
    released: the agent has released its handle.
    """

    def __init__(
        self,
        agent: Agent,
        peer: str,
        address_pairs: list[tuple[int, int, int]],
        writes: bool,
        notification: bytes | None,
    ) -> None:
        self.agent = agent
        self.peer = peer
        self.address_pairs = address_pairs
        self.writes = writes
        self.notification = notification
        self.number = -1
        self.state = NixlState.PREPARED
        self.copied = False
        self.released = False

    @property
    def moves(self) -> Iterator[tuple[int, int, int]]:
        """The (target address, source address, bytes) of each region. P has the source and D the target: P
        writes, or D reads."""
        for own_address, peer_address, size in self.address_pairs:
            yield (peer_address, own_address, size) if self.writes else (own_address, peer_address, size)

    def copy(self) -> None:
        """Move the bytes."""
        for target, source, size in self.moves:
            ctypes.memmove(target, source, size)
        self.copied = True

    def land(self) -> None:
        """Complete the transfer and send its notification."""
        if not self.copied:
            self.copy()
        self.state = NixlState.COMPLETED
        if self.notification is not None:
            NETWORK.send(self.agent.name, self.peer, self.notification)


class Network:
    """The state of the network.

    agents: the agents by name.
    messages: messages in flight, in the order of sending: (sender, receiver, text).
    transfers: posted transfers that the facts still show.
    listeners: functions that return a server's handshake metadata, by the path of its socket.
    posted_count: number of transfers posted so far.
    """

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.messages: deque[tuple[str, str, bytes]] = deque()
        self.transfers: list[PostedTransfer] = []
        self.listeners: dict[str, Callable[[], dict[Any, bytes]]] = {}
        self.posted_count = 0

    def restart(self) -> None:
        """Remove all agents, messages and transfers, and reset the clock."""
        self.__init__()  # type: ignore[misc]
        Clock.now = START

    def send(self, source: str, target: str, text: bytes) -> None:
        """Put a message in flight."""
        self.messages.append((source, target, text))

    def deliver(self, target: str) -> bool:
        """Deliver the oldest message for an agent. Return False if there is none."""
        message = next((each for each in self.messages if each[1] == target), None)
        if message is None:
            return False
        self.messages.remove(message)
        source, _, text = message
        self.agents[target].inbox.setdefault(source, []).append(text)
        return True

    def transfers_in_flight(self) -> list[PostedTransfer]:
        """Return the transfers that have neither completed nor failed."""
        return [job for job in self.transfers if job.state is NixlState.IN_FLIGHT]


NETWORK = Network()


class Telemetry:
    """A stand-in for nixl's measurements of a transfer. The values have no meaning."""

    xferDuration = postDuration = totalBytes = descCount = 1  # noqa: N815 (nixl's names)


class Agent:
    """A stand-in for `nixl_agent`.

    inbox: notifications that have arrived and were not read, by sender.
    handles: transfers by handle, until they are released.
    """

    def __init__(self, name: str, config: Any = None) -> None:
        del name, config
        self.name = f"agent{len(NETWORK.agents) + 1}"
        self.inbox: dict[str, list[bytes]] = {}
        self.handles: dict[int, PostedTransfer] = {}
        self._descriptor_lists: dict[int, tuple[str, list[tuple[int, int]]]] = {}
        self._known_peers: set[str] = set()
        self._last_handle = 0
        NETWORK.agents[self.name] = self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the played nixl agent has no {name}", name=name, obj=self)

    def _new_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle

    def create_backend(self, *_: Any) -> None:
        """Do nothing: all agents share one backend."""

    def get_reg_descs(self, descs: Any, mem_type: Any = None) -> Any:
        del mem_type
        return descs

    get_xfer_descs = get_reg_descs

    def register_memory(self, descs: Any, backends: Any = None) -> Any:
        del backends
        return descs

    def deregister_memory(self, descs: Any) -> None:
        """Do nothing: all memory can be reached."""

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self._known_peers.add(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self._known_peers.discard(name)

    def check_remote_metadata(self, name: str, *_: Any) -> bool:
        return name in self._known_peers

    def prep_xfer_dlist(self, agent: str, descs: Any, mem_type: Any = None) -> int:
        """Prepare a list of regions, and return its handle.

        descs: rows of (address, bytes, device); since 0.33 of (address, bytes, device, stride, count).
        """
        del mem_type
        rows: list[tuple[int, int]] = []
        places: list[list[int]] = np.asarray(descs, dtype=np.uint64).tolist()
        for base, size, _, *strided in places:
            stride, count = strided or (0, 1)
            rows += [(base + stride * index, size) for index in range(count)]
        handle = self._new_handle()
        self._descriptor_lists[handle] = agent, rows
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        del self._descriptor_lists[handle]

    def make_prepped_xfer(
        self, operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any,
        notif_msg: bytes | None = None, **more: Any,
    ) -> int:  # fmt: skip
        """Return the handle of a transfer between descriptors of two agents, as NIXL does. Raises
        RuntimeError where the descriptors do not match."""
        del more
        _, own_descriptors = self._descriptor_lists[local]
        peer, peer_descriptors = self._descriptor_lists[remote]
        own_ids = np.asarray(local_ids).tolist()
        their_ids = np.asarray(remote_ids).tolist()
        unequal = len(own_ids) != len(their_ids)
        if unequal or max(own_ids) >= len(own_descriptors) or max(their_ids) >= len(peer_descriptors):
            raise RuntimeError("NIXL_ERR_INVALID_PARAM: descriptors that do not match")
        address_pairs = []
        for own_id, their_id in zip(own_ids, their_ids):
            address, size = own_descriptors[own_id]
            remote_address, remote_size = peer_descriptors[their_id]
            if size != remote_size:
                raise RuntimeError(f"NIXL_ERR_INVALID_PARAM: {size} and {remote_size} bytes")
            address_pairs.append((address, remote_address, size))
        handle = self._new_handle()
        self.handles[handle] = PostedTransfer(self, peer, address_pairs, operation == "WRITE", notif_msg)
        return handle

    def transfer(self, handle: int, *_: Any) -> str:
        job = self.handles[handle]
        job.number = NETWORK.posted_count
        job.state = NixlState.IN_FLIGHT
        NETWORK.posted_count += 1
        NETWORK.transfers.append(job)
        return job.state.value

    def check_xfer_state(self, handle: int) -> str:
        return self.handles[handle].state.value

    def get_xfer_telemetry(self, _: int) -> Telemetry:
        return Telemetry()

    def release_xfer_handle(self, handle: int) -> None:
        self.handles.pop(handle).released = True

    def send_notif(self, agent: str, notif_msg: bytes, *_: Any, **__: Any) -> None:
        if agent not in self._known_peers:
            raise RuntimeError("NIXL_ERR_NOT_FOUND: no such agent")
        NETWORK.send(self.name, agent, notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notifications = self.inbox
        self.inbox = {}
        return notifications


class HandshakeFailed(RuntimeError):
    """The peer of a handshake does not answer."""


class Handshakes:
    """A stand-in for the executor that runs handshakes.

    tasks: handshakes that have not run.
    error: the exception that the last failing handshake has raised, unless its peer did not answer.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.error: BaseException | None = None

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks.append((future, lambda: function(*args, **kwargs)))
        return future

    def run(self, fails: bool) -> bool:
        """Run the oldest handshake. Return False if there is none.

        fails: the peer does not answer.
        """
        if not self.tasks:
            return False
        future, task = self.tasks.popleft()
        future.set_running_or_notify_cancel()
        try:
            if fails:
                raise HandshakeFailed("the peer does not answer")
            value = task()
        except Exception as error:
            self.error = None if isinstance(error, HandshakeFailed) else error
            future.set_exception(error)
        else:
            future.set_result(value)
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no thread."""


class SideChannel:
    """A stand-in for the ZMQ socket on which a server asks its peer for handshake metadata."""

    def __init__(self, _: Any, path: str) -> None:
        self._path = path
        self._asked: Any = ()

    def __enter__(self) -> SideChannel:
        return self

    def __exit__(self, *_: Any) -> None:
        """Do nothing: there is nothing to close."""

    def setsockopt(self, *_: Any) -> None:
        """Do nothing: an answer takes no time."""

    def send(self, text: bytes) -> None:
        self._asked = importlib.import_module("msgspec").msgpack.decode(text)[1:]

    def recv(self) -> bytes:
        known = NETWORK.listeners[self._path]()
        key = tuple(self._asked)  # ranks of pipeline and tensor parallelism, or the latter alone
        return known[key] if key in known else known[key[-1]]

    def recv_multipart(self) -> list[bytes]:
        clock: bytes = importlib.import_module("msgspec").msgpack.encode(Clock.now)
        return [self.recv(), clock]
