"""The network between the servers: nixl agents, transfers, messages, handshakes, and the clock.

Nothing happens by itself: a transfer moves its bytes, a message arrives, a handshake runs when it is told to.
The connector finds its agent, its clock and its sockets by names of modules, so there is one network a
process.
"""

from __future__ import annotations

import ctypes
import importlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

START = 1000.0  # seconds: a clock of a server that has run a while


class Clock:
    """In the place of the module `time`."""

    now = START

    @classmethod
    def _read(cls) -> float:
        return cls.now

    @staticmethod
    def sleep(_: float) -> None:
        """Nobody waits here."""


Clock.perf_counter = Clock.monotonic = Clock.time = Clock._read  # type: ignore[attr-defined]


class PostedTransfer:
    """A transfer that was posted. number: in the order of posting; pairs: (own address, the peer's,
    bytes)."""

    def __init__(
        self, agent: Agent, peer: str, pairs: list[tuple[int, int, int]], writes: bool, says: Any
    ) -> None:
        self.agent, self.peer, self.pairs, self.writes, self.says = agent, peer, pairs, writes, says
        self.number = -1
        self.state = "INIT"
        self.copied = self.released = False

    def copy(self) -> None:
        """Move the bytes."""
        for own, theirs, size in self.pairs:
            target, source = (theirs, own) if self.writes else (own, theirs)
            ctypes.memmove(target, source, size)
        self.copied = True

    def land(self) -> None:
        """End well, and tell the peer."""
        if not self.copied:
            self.copy()
        self.state = "DONE"
        if self.says is not None:
            NETWORK.send(self.agent.name, self.peer, self.says)


class Network:
    """agents: by name. mail: messages under way, in the order of sending: (from, to, text). transfers: that
    were posted and are not forgotten. listeners: what a server tells at a handshake, by its address."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.mail: deque[tuple[str, str, bytes]] = deque()
        self.transfers: list[PostedTransfer] = []
        self.listeners: dict[str, Callable[[], dict[Any, bytes]]] = {}
        self.posted = 0

    def restart(self) -> None:
        """Nobody is there, and nothing is under way."""
        self.__init__()  # type: ignore[misc]
        Clock.now = START

    def send(self, source: str, target: str, text: bytes) -> None:
        """A message is under way from now on."""
        self.mail.append((source, target, text))

    def deliver(self, target: str) -> bool:
        """The oldest message to an agent arrives; False where there is none."""
        found = next((each for each in self.mail if each[1] == target), None)
        if found is None:
            return False
        self.mail.remove(found)
        self.agents[target].inbox.setdefault(found[0], []).append(found[2])
        return True

    def under_way(self) -> list[PostedTransfer]:
        """Transfers that have not ended."""
        return [job for job in self.transfers if job.state == "PROC"]


NETWORK = Network()


class Telemetry:
    """Measurements of nixl about a transfer; nobody reads them."""

    xferDuration = postDuration = totalBytes = descCount = 1  # noqa: N815 (nixl's names)


class Agent:
    """In the place of `nixl_agent`. inbox: messages that have arrived, by sender. handles: of transfers."""

    def __init__(self, name: str, config: Any = None) -> None:
        del name, config
        self.name = f"agent{len(NETWORK.agents) + 1}"
        self.inbox: dict[str, list[bytes]] = {}
        self.handles: dict[int, PostedTransfer] = {}
        self._lists: dict[int, tuple[str, list[tuple[int, int]]]] = {}
        self._known: set[str] = set()
        self._next = 0
        NETWORK.agents[self.name] = self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the played nixl agent has no {name}", name=name, obj=self)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def create_backend(self, *_: Any) -> None:
        """There is one."""

    def get_reg_descs(self, descs: Any, mem_type: Any = None) -> Any:
        del mem_type
        return descs

    get_xfer_descs = get_reg_descs

    def register_memory(self, descs: Any, backends: Any = None) -> Any:
        del backends
        return descs

    def deregister_memory(self, descs: Any) -> None:
        """All memory can be reached."""

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self._known.add(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self._known.discard(name)

    def check_remote_metadata(self, name: str, *_: Any) -> bool:
        return name in self._known

    def prep_xfer_dlist(self, agent: str, descs: Any, mem_type: Any = None) -> int:
        """Rows are (address, bytes, device), since 0.33 (address, bytes, device, stride, count)."""
        del mem_type
        rows: list[tuple[int, int]] = []
        places: list[list[int]] = np.asarray(descs, dtype=np.uint64).tolist()
        for base, size, _, *strided in places:
            stride, count = strided or (0, 1)
            rows += [(base + stride * at, size) for at in range(count)]
        handle = self._number()
        self._lists[handle] = agent, rows
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        del self._lists[handle]

    def make_prepped_xfer(
        self, operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any,
        notif_msg: bytes | None = None, **more: Any,
    ) -> int:  # fmt: skip
        del more
        _, own = self._lists[local]
        peer, theirs = self._lists[remote]
        here, there = np.asarray(local_ids).tolist(), np.asarray(remote_ids).tolist()
        if len(here) != len(there) or max(here) >= len(own) or max(there) >= len(theirs):
            raise RuntimeError("NIXL_ERR_INVALID_PARAM: descriptors that do not match")
        pairs = []
        for mine, other in zip(here, there):
            (address, size), (remote_address, remote_size) = own[mine], theirs[other]
            if size != remote_size:
                raise RuntimeError(f"NIXL_ERR_INVALID_PARAM: {size} and {remote_size} bytes")
            pairs.append((address, remote_address, size))
        handle = self._number()
        self.handles[handle] = PostedTransfer(self, peer, pairs, operation == "WRITE", notif_msg)
        return handle

    def transfer(self, handle: int, *_: Any) -> str:
        job = self.handles[handle]
        job.number, job.state = NETWORK.posted, "PROC"
        NETWORK.posted += 1
        NETWORK.transfers.append(job)
        return job.state

    def check_xfer_state(self, handle: int) -> str:
        return self.handles[handle].state

    def get_xfer_telemetry(self, _: int) -> Telemetry:
        return Telemetry()

    def release_xfer_handle(self, handle: int) -> None:
        self.handles.pop(handle).released = True

    def send_notif(self, agent: str, notif_msg: bytes, *_: Any, **__: Any) -> None:
        if agent not in self._known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND: no such agent")
        NETWORK.send(self.name, agent, notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        given, self.inbox = self.inbox, {}
        return given


class HandshakeFailed(RuntimeError):
    """The peer does not answer."""


class Handshakes:
    """In the place of the executor that runs handshakes. tasks: that wait. error: that one has raised."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.error: BaseException | None = None

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks.append((future, lambda: function(*args, **kwargs)))
        return future

    def run(self, fails: bool) -> bool:
        """Run the oldest; False where there is none."""
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
        """There is no thread."""


class SideChannel:
    """In the place of a ZMQ socket on which a server asks its peer for what it needs for a handshake."""

    def __init__(self, _: Any, path: str) -> None:
        self._path = path
        self._asked: Any = ()

    def __enter__(self) -> SideChannel:
        return self

    def __exit__(self, *_: Any) -> None:
        """There is nothing to close."""

    def setsockopt(self, *_: Any) -> None:
        """There is no timeout."""

    def send(self, text: bytes) -> None:
        self._asked = importlib.import_module("msgspec").msgpack.decode(text)[1:]

    def recv(self) -> bytes:
        known = NETWORK.listeners[self._path]()
        key = tuple(self._asked)  # ranks of pipeline and tensor parallelism, or the latter alone
        return known[key] if key in known else known[key[-1]]

    def recv_multipart(self) -> list[bytes]:
        clock: bytes = importlib.import_module("msgspec").msgpack.encode(Clock.now)
        return [self.recv(), clock]
