"""Stand-ins for sockets, HTTP, clock, threads and the transfer engine of both servers.

All else of the Mooncake manager, its sender and its receiver is the release's own.
"""

from __future__ import annotations

import importlib
import re
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from impl.sglang.server.pair.turns import Stage
from reference.pairs.config import DECODE, PREFILL

# The address of P, as the router gives it.
HOST = "127.0.0.1"
PORT = 8998
_ADDRESS = {PREFILL: "10.0.0.1", DECODE: "10.0.0.2"}
_PORT = {PREFILL: 7000, DECODE: 8000}
# Threads that wait in real time: the conductor does what they do.
_ROUTINES = ("HeartbeatChecker", "MooncakeFailedSessionProbe")
_ROOM_CALLS = {  # of sender, receiver and manager: another thread may run before and after each
    "CommonKVSender": ("init", "send", "clear", "abort", "failure_exception"),
    "CommonKVReceiver": ("init", "send_metadata", "clear", "abort", "failure_exception"),
}


class NamedPages(NamedTuple):
    """The memory that D keeps for the transfer of a room, until it has ended: its request, pages for the
    positions from `prefix` on, a metadata row, of a window the pages of the SWA pool, of recurrent layers the
    slot of its state."""

    room: int
    request: Any
    pages: list[int]
    prefix: int
    row: int
    swa: list[int]
    state: list[int]


class Wire(Protocol):
    """The environment's decisions that the stand-ins ask for."""

    stage: Stage
    seconds: float

    def send_message(self, receiver: str, parts: list[bytes]) -> None: ...
    def has_arrived(self, server: str) -> bool: ...
    def next_message(self, server: str) -> list[bytes]: ...
    def transfer(self, chunk: Any, blocks: Sequence[tuple[int, int, int]]) -> int: ...
    def lookup_fails(self) -> bool: ...
    def is_gone(self, server: str) -> bool: ...
    def calls(self, room: int) -> None: ...
    def note_clear(self, room: int) -> None: ...
    def note_promise(self, promise: NamedPages) -> None: ...
    def tell(self, where: str, says: str) -> None: ...


class _Clock:
    """The module `time`, where the release decides by it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def time(self) -> float:
        return self._wire.seconds

    monotonic = perf_counter = time

    def monotonic_ns(self) -> int:
        return int(self._wire.seconds * 1e9)

    def sleep(self, _: float) -> None:
        self._wire.stage.hand_over()


class _Inbox:
    """The socket at which a server takes messages."""

    def __init__(self, wire: Wire, server: str) -> None:
        self._wire = wire
        self._server = server

    def recv_multipart(self, *_: Any) -> list[bytes]:
        self._wire.stage.hand_over(lambda: self._wire.has_arrived(self._server))
        return self._wire.next_message(self._server)


class _Outbox:
    """The socket through which a server sends to another."""

    def __init__(self, wire: Wire, endpoint: str) -> None:
        self._wire = wire
        self._receiver = next(name for name, at in _ADDRESS.items() if f"{at}:" in f"{endpoint}:")

    def send_multipart(self, parts: Sequence[Any], *_: Any, **__: Any) -> None:
        self._wire.send_message(self._receiver, [bytes(part) for part in parts])

    def close(self, *_: Any, **__: Any) -> None:
        pass


class _Engine:
    """The transfer engine of one server."""

    def __init__(self, wire: Wire, server: str, chunk: Callable[[], Any]) -> None:
        self._wire = wire
        self._server = server
        self._chunk = chunk

    def get_session_id(self) -> str:
        return f"{_ADDRESS[self._server]}:{_PORT[self._server]}"

    def batch_register(self, *_: Any) -> None:
        pass

    def send_probe(self, _: str) -> int:
        return -1 if any(map(self._wire.is_gone, (PREFILL, DECODE))) else 0

    def batch_transfer_sync(
        self, _: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        return self._wire.transfer(self._chunk(), list(zip(sources, targets, lengths, strict=True)))


class _Lookup:
    """`requests`, by which D finds the addresses that P has registered."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._registered = dict[str, Any]()
        self.adapters = SimpleNamespace(HTTPAdapter=lambda **_: None)

    def Session(self) -> _Lookup:  # noqa: N802  (the library's name)
        return self

    def mount(self, *_: Any) -> None:
        pass

    def put(self, _: str, json: Any = None, **__: Any) -> Any:
        self._registered = json
        return SimpleNamespace(status_code=200, json=dict, text="")

    def get(self, url: str, **_: Any) -> Any:
        if self._wire.is_gone(PREFILL) or self._wire.lookup_fails():
            raise ConnectionError("the address server does not answer")
        body = {**self._registered, "dp_size": 1, "follow_bootstrap_room": True}
        wanted: tuple[str, ...] = ("rank_ip", "rank_port")
        if re.search(r"prefill_dp_rank=-1\b", url):
            wanted = (
                "attn_tp_size", "attn_cp_size", "pp_size", "page_size", "kv_cache_dtype", "dp_size",
                "follow_bootstrap_room", "kv_layout", "dsv41_spec_layout", "decode_allocation_policy",
                "prefill_http_port",
            )  # fmt: skip
        found = {name: body[name] for name in wanted if name in body}
        return SimpleNamespace(status_code=200, json=lambda: dict(found), text="")


class _Done:
    """torch.cuda.Event: what it waits for is over."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    synchronize = record

    def query(self) -> bool:
        return True


def install(wire: Wire) -> None:
    """Put the stand-ins in their places, once in a process and before the servers are built."""
    of: Callable[[str], Any] = importlib.import_module
    torch = of("torch")
    common = of("sglang.srt.disaggregation.common.conn")
    mooncake = of("sglang.srt.disaggregation.mooncake.conn")
    decode, prefill = (of(f"sglang.srt.disaggregation.{name}") for name in ("decode", "prefill"))
    empty = torch.empty
    torch.empty = lambda *sizes, **more: empty(*sizes, **{**more, "pin_memory": False})
    torch.cuda.Event = _Done
    torch.cuda.current_stream = lambda *_: None
    _one_process(of("sglang.srt.distributed.bootstrap"))
    _network(wire, common, mooncake)
    _threads(wire, common, mooncake)
    bootstrap = of("sglang.srt.disaggregation.common.bootstrap")
    for module in (common, mooncake, decode, prefill, bootstrap):
        module.time = _Clock(wire)
    _calls(wire, common, decode)
    _draft_model(of("sglang.srt.speculative.spec_info").SpeculativeAlgorithm)


def _one_process(bootstrap: Any) -> None:
    """Build the groups of one rank once: the second server has them as well."""
    context = importlib.import_module("sglang.srt.runtime_context")
    build = bootstrap.init_parallel_runtime
    built = list[Any]()

    def once(**named: Any) -> None:
        if not built:
            build(**named)
        else:
            mine = context.get_parallel()
            mine._stamp = {**built[0]._stamp, **mine._stamp}
        built.append(context.get_parallel())

    bootstrap.init_parallel_runtime = once
    bootstrap.maybe_init_shared_mooncake_transfer_engine = lambda **_: None


def _draft_model(algorithm: Any) -> None:
    """Have P send the KV of a draft model with the rest."""
    create = algorithm.create_worker

    def with_pool(*args: Any) -> Any:
        worker = create(*args)
        worker.primary_draft_kv_pool = None

        def allocate(self: Any, *, token_to_kv_pool_allocator: Any, **_: Any) -> None:
            kv = token_to_kv_pool_allocator.get_kvcache()
            kv = getattr(kv, "full_kv_pool", kv)
            self.primary_draft_kv_pool = type(kv)(
                kv.size, kv.page_size, kv.dtype, kv.head_num, kv.head_dim, 1, "cpu",
                enable_memory_saver=False,
            )  # fmt: skip

        worker.alloc_memory_pool = allocate
        return worker

    algorithm.create_worker = with_pool


def _network(wire: Wire, common: Any, mooncake: Any) -> None:
    in_hand: list[Any] = [None]  # the chunk that the transfer worker has taken
    stage = wire.stage

    class Queue:
        """The chunks that wait for P's transfer worker."""

        def __init__(self) -> None:
            self._waiting: deque[Any] = deque()

        def put(self, chunk: Any) -> None:
            self._waiting.append(chunk)

        def get(self) -> Any:
            stage.hand_over(lambda: bool(self._waiting))
            in_hand[0] = self._waiting.popleft()
            return in_hand[0]

    def of_manager(manager: Any, endpoint: str, **_: Any) -> Any:
        manager._socket_send_locks.setdefault(endpoint, lock)
        return _Outbox(wire, endpoint)

    lock = common.threading.Lock()
    mooncake.FastQueue = Queue
    mooncake.get_mooncake_transfer_engine = lambda: _Engine(wire, stage.server, lambda: in_hand[0])
    common.get_zmq_socket_on_host = lambda *_, **__: (
        _PORT[stage.server],
        _Inbox(wire, stage.server),
    )
    common.get_local_ip_auto = lambda *_: _ADDRESS[stage.server]
    common.requests = _Lookup(wire)
    common._get_bootstrap_session = lambda _: common.requests
    common.CommonKVManager._connect = of_manager
    common.CommonKVReceiver._connect = classmethod(
        lambda _, endpoint, **__: (_Outbox(wire, endpoint), lock)
    )


def _threads(wire: Wire, common: Any, mooncake: Any) -> None:
    stage = wire.stage

    class Thread:
        def __init__(self, target: Any = None, args: Any = (), name: str = "", **_: Any) -> None:
            self._work = lambda: target(*args)
            self.name = name or target.__name__

        def start(self) -> None:
            if self.name not in _ROUTINES:
                stage.add(stage.server, self.name.replace("_", " "), self._work)

        def join(self, *_: Any) -> None:
            pass

        def is_alive(self) -> bool:
            return True

    real = vars(common.threading)
    module = SimpleNamespace(
        **{**{n: v for n, v in real.items() if n[:2] != "__"}, "Thread": Thread}
    )
    common.threading = mooncake.threading = module


def _calls(wire: Wire, common: Any, decode: Any) -> None:
    """Add points at which another thread may run, and note what D promises to keep for a transfer."""
    for owner, methods in _ROOM_CALLS.items():
        for name in methods:
            _pauses(getattr(common, owner), name, wire)
    queue = decode.DecodePreallocQueue
    receiver = common.CommonKVReceiver
    send = queue._send_kv_metadata
    publish = receiver.send_metadata
    in_hand: list[Any] = [None]

    def sends(self: Any, request: Any, *args: Any, **more: Any) -> Any:
        in_hand[0] = request
        return send(self, request, *args, **more)

    def publish_pages(
        self: Any, pages: Any, row: Any = None, states: Any = None, prefix: Any = None, **more: Any
    ) -> Any:
        prefix = more.pop("decode_prefix_len", prefix) or 0
        promised = [int(at) for at in pages]
        sent = {str(kind.value): at for kind, at in zip(self.kv_mgr.kv_args.state_types, states or ())}
        swa, state = ([int(at) for at in sent.get(kind, ())] for kind in ("swa", "mamba"))
        wire.note_promise(NamedPages(self.bootstrap_room, in_hand[0], promised, prefix, row, swa, state))
        return publish(self, pages, row, states, decode_prefix_len=prefix, **more)

    queue._send_kv_metadata = sends
    receiver.send_metadata = publish_pages
    restored = decode.DecodeTransferQueue._commit_hicache_local_restore_to_req

    def commits(self: Any, request: Any) -> None:
        match = request.prefix_match
        if match is not None and match.needs_local_restore:
            tokens = match.restore_token_count
            wire.tell(DECODE, f"has {tokens} tokens of its host for {request.req.rid}")
        restored(self, request)

    decode.DecodeTransferQueue._commit_hicache_local_restore_to_req = commits


def _pauses(owner: Any, name: str, wire: Wire) -> None:
    call = getattr(owner, name)

    def around(self: Any, *args: Any, **named: Any) -> Any:
        wire.calls(self.bootstrap_room)
        result = call(self, *args, **named)
        if name == "clear":
            wire.note_clear(self.bootstrap_room)
        wire.calls(self.bootstrap_room)
        return result

    setattr(owner, name, around)
