"""A storage behind the host tier: its threads, which run when a command lets them, and the backend that they
talk to.

The bodies of the threads are the release's own. A thread stops where it waits for its next operation, and
before each call of the backend.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import queue
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from impl.loading.optional import optional
from impl.sglang.parts.namespaces import exchange_texts
from impl.sglang.parts.stand_ins import Bag
from impl.sglang.tiers.copy_engine import POOLS
from reference.recurrent_states import chained
from reference.tiers.config import WAIT_BASE_S, WAIT_PER_PAGE_S
from reference.tiers.facts import TierPage
from reference.token_ids import TOKEN_BITS, second_of, token_of, tree_key

FIRST_WITH_STORAGE = "0.5.20"  # before it the thread that reads frees what it has not read
BATCH = 2  # pages of a call of the backend; 128 in a server, more than a run has
QUERY = "prefetch_thread_func"
FETCH = "prefetch_io_aux_func"
BACKUP = "backup_thread_func"
SYNC = "prefetch_sync_thread_func"
_RUNNING = threading.local()


class _Over(BaseException):
    """Ends a thread whose server is gone."""


class IOThread:
    """`threading.Thread` of the cache controller: one runs at a time, while a command waits for it.

    operation: the one that it works on.
    call: slots of the host, by pool, that its call of the backend will read or write; None between calls.
    done: slots that its calls have read or written, of this operation.
    pages: those that the backend handles in the next call at most.
    """

    known: ClassVar[dict[str, IOThread]] = {}  # by the name of the body; of the present server
    started: ClassVar[list[IOThread]] = []

    def __init__(self, target: Any, daemon: bool = True) -> None:
        del daemon
        self._body = target
        self.ended = False
        self._give_up = False
        self._turn = threading.Lock()
        self._back = threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._error: BaseException | None = None
        self._profiler: Any = None
        self.operation: Any = None
        self.call: dict[str, list[int]] | None = None
        self.done: set[tuple[str, int]] = set()
        self.pages = 0
        IOThread.known[target.__name__] = self
        IOThread.started.append(self)

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()
        self.go_on()

    def _run(self) -> None:
        self._turn.acquire()
        sys.setprofile(self._profiler)
        _RUNNING.thread = self
        try:
            self._body()
        except _Over:
            pass
        except BaseException as error:  # the command that let it run reports it
            self._error = error
        self.ended = True
        self._back.release()

    def go_on(self, pages: int = -1) -> None:
        """Let it run up to its next stop."""
        if self.ended:
            return
        self.pages = pages
        self._profiler = sys.getprofile()  # it notes what the thread calls for this command as well
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Stop until the next turn. Called in the thread itself."""
        self._back.release()
        self._turn.acquire()
        sys.setprofile(self._profiler)
        if self._give_up:
            raise _Over

    def join(self, timeout: float | None = None) -> None:
        """End what is under way first."""
        del timeout
        while not self.ended:
            self.go_on()

    def is_alive(self) -> bool:
        return not self.ended

    @classmethod
    def end_all(cls) -> None:
        """End the server and its threads."""
        for thread in cls.started:
            if not thread.ended:
                thread._give_up = True
                thread.go_on()
        cls.started = []
        cls.known = {}


def stub_threads(controller: Any) -> None:
    """Have the threads of a cache controller (its module) stop where this says, and its calls be short."""
    controller.threading = Bag(**vars(threading) | {"Thread": IOThread})
    controller.Queue = Operations
    controller.STORAGE_BATCH_SIZE = BATCH


class Operations(queue.Queue[Any]):
    """`queue.Queue` of the cache controller: a thread stops before it takes its next operation."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        thread: IOThread | None = getattr(_RUNNING, "thread", None)
        if thread is None:
            return super().get(block, timeout)
        thread.operation = None
        thread.call = None
        thread.done = set()
        thread.pause()
        try:
            thread.operation = super().get(block=False)
        except queue.Empty:
            thread.operation = None
            raise
        return thread.operation


class Hashes:
    """Hashes of pages, in the place of the release's compiled function, which gives the same, and what each
    stands for: whether in the namespace, and the text up to the end of the page."""

    def __init__(self) -> None:
        self.texts: dict[str, tuple[bool, tuple[int, ...]]] = {}

    def text(self, name: str) -> tuple[int, ...]:
        return self.texts.get(name, (False, ()))[1]

    def of(self, key: Any, prior: bytes | None, page_size: int | None = None) -> Any:
        """Return the hashes of the tokens as get_native_hash does: one chained hash for each whole page, or
        one of all tokens without a page size."""
        tokens = list(optional(key, "RadixKey.token_ids", key))
        bigram = bool(optional(key, "RadixKey.is_bigram", False))
        elements = tree_key(tokens, bigram)
        known = self.texts.get(prior.hex()) if prior is not None else None
        # else it is the namespace's seed
        if known is not None:
            inside, text = known
        else:
            inside = prior is not None
            text = ()
        size = page_size or len(elements)
        last = prior or b""
        hashes = list[str]()
        if size:
            for index in range(0, len(elements) - size + 1, size):
                page = elements[index : index + size]
                last = hashlib.sha256(last + _pack_page(page, bigram)).digest()
                text += self.stamps_of([*map(token_of, page)], inside, len(text))
                self.texts[last.hex()] = inside, text
                hashes.append(last.hex())
        return hashes if page_size else hashes[0]

    def stamps_of(self, tokens: list[int], inside: bool, start: int) -> tuple[int, ...]:
        """Return the stamps of the KV of these tokens, from a position on."""
        del start
        return tuple(exchange_texts(tokens) if inside else tokens)


def _pack_page(page: Sequence[int], bigram: bool) -> bytes:
    """Return the elements of a page as they are hashed: tokens of 32 bits, of a bigram both."""
    tokens = (
        [half for token in page for half in (token >> TOKEN_BITS, second_of(token))]
        if bigram
        else page
    )
    return struct.pack(f"<{len(tokens)}I", *tokens)


class Storage:
    """The storage of one server: what the backend has, and how its threads go on.

    host: stamps of the host, by pool.
    written: pages since the last command.
    """

    def __init__(
        self, cache: Any, host: dict[str, list[int]], page_size: int, hashes: Hashes
    ) -> None:
        self.cache = cache
        self.host = host
        self.page_size = page_size
        self.hashes = hashes
        self.pages: dict[tuple[str, str], tuple[int, ...]] = {}
        self.numbers: dict[str, int] = {}
        self.written: list[TierPage] = []

    def attach(
        self, how_long: str, policy: str, by: Callable[..., tuple[bool, str]] | None = None
    ) -> None:
        """Attach the backend as the release's command of an operator does.

        by: the method that it calls; of a tree without a scheduler the tree's own.
        """
        backend = importlib.import_module("sglang.srt.mem_cache.hicache_storage").HiCacheFile
        backend_instance = type("Backend", (Backend, backend), {})(self)
        module: Any = importlib.import_module("sglang.srt.mem_cache.storage")
        module.StorageBackendFactory = Bag(create_backend=lambda *_, **__: backend_instance)
        settings = {
            "interface_v1": 1,
            "prefetch_threshold": 1,
            "prefetch_timeout_base": WAIT_BASE_S,
            "prefetch_timeout_per_ki_token": WAIT_PER_PAGE_S * 1024 / self.page_size,
        }
        attach = by or self.cache.attach_storage_backend
        ok, message = attach("dynamic", json.dumps(settings), None, how_long, policy)
        if not ok:
            raise RuntimeError(message)

    def reattach(self, how_long: str, policy: str) -> None:
        """Detach the backend as the release's command of an operator does, and attach it again. The threads
        end; their calls of the backend return."""
        ok, message = self.cache.detach_storage_backend()
        if not ok:
            raise RuntimeError(message)
        self.attach(how_long, policy)

    def thread(self, body: str) -> IOThread:
        return IOThread.known[body]

    def begin_call(self, slots: dict[str, list[int]]) -> int:
        """Pause at the beginning of a call of the backend. Returns the number of pages that it handles."""
        thread: IOThread | None = getattr(_RUNNING, "thread", None)
        if thread is None:
            return 1 << 30
        thread.call = slots
        thread.pause()
        thread.call = None
        thread.done |= {(pool, slot) for pool, pool_slots in slots.items() for slot in pool_slots}
        return thread.pages if thread.pages >= 0 else 1 << 30

    @property
    def rests(self) -> bool:
        """Whether no thread has an operation and none waits for one."""
        controller = self.cache.cache_controller
        names = "prefetch_queue", "prefetch_buffer", "backup_queue"
        waiting = sum(getattr(controller, name).qsize() for name in names)
        return not waiting and all(thread.operation is None for thread in IOThread.known.values())

    def go_on(self, body: str, pages: int) -> None:
        self.thread(body).go_on(pages)
        if body == FETCH:  # ranks agree on what was read
            while self.cache.cache_controller.prefetch_sync_queue.qsize():
                self.thread(SYNC).go_on()

    def read(self, pool: str, key: str, slots: Sequence[int]) -> bool:
        page = self.pages.get((pool, key))
        if page is None:
            return False
        for slot, stamp in zip(slots, page):
            self.host[pool][slot] = stamp
        return True

    def write(self, pool: str, key: str, slots: Sequence[int]) -> bool:
        """Write a page, unless the storage has it. Returns whether it is there."""
        if (pool, key) not in self.pages:
            content = tuple(self.host[pool][slot] for slot in slots)
            self.pages[pool, key] = content
            number = self.numbers.setdefault(key, len(self.numbers) + 1)
            text = self.hashes.text(key)
            wanted = tuple(chained(text)[-1:]) if pool == "state" else text[-self.page_size :]
            self.written.append(TierPage(number, pool, tuple(slots), content, wanted))
        return True

    def slots_of_page(self, pool: str) -> int:
        """Return the slots of a page of a pool: tokens, or one state."""
        return 1 if pool == "state" else self.page_size

    def pages_of(self, pool: str, slots: Any) -> Iterator[list[int]]:
        size = self.slots_of_page(pool)
        every = slots.tolist()
        return (every[index : index + size] for index in range(0, len(every), size))


class Backend:
    """A backend that reads and writes host memory itself. Which pages make a hit is the release's own rule,
    of its backend in files."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def _get_component_key(self, key: str, component_name: Any = None) -> str:
        return f"{key}.{_pool(component_name)}"

    def _collect_existing_component_keys(
        self, keys: list[str], pool_transfers: Any = None
    ) -> set[str]:
        pages = self._storage.pages
        names = [None, *(transfer.name for transfer in pool_transfers or ())]
        return {
            f"{self._get_component_key(key, name)}.bin"
            for name in names
            for key in keys
            if (_pool(name), key) in pages
        }

    def batch_exists(self, keys: list[str], _: Any = None) -> int:
        most = self._storage.begin_call({})
        are_stored = (("full", key) in self._storage.pages for key in keys[: max(0, most)])
        return next((i for i, found in enumerate(are_stored) if not found), min(most, len(keys)))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        most = self._storage.begin_call({})
        known: Any = super()
        return known.batch_exists_v2(keys[:most], pool_transfers, extra_info)

    def batch_get_v1(self, keys: list[str], host_indices: Any, _: Any = None) -> list[bool]:
        return self._each("full", keys, host_indices, self._storage.read)

    def batch_set_v1(self, keys: list[str], host_indices: Any, _: Any = None) -> list[bool]:
        return self._each("full", keys, host_indices, self._storage.write)

    def batch_get_v2(self, transfers: Any, **_: Any) -> dict[str, list[bool]]:
        return {t.name: self._of(t, self._storage.read) for t in transfers}

    def batch_set_v2(self, transfers: Any, **_: Any) -> dict[str, list[bool]]:
        return {t.name: self._of(t, self._storage.write) for t in transfers}

    def _of(self, transfer: Any, act: Any) -> list[bool]:
        keys = transfer.keys or []
        slots = transfer.host_indices
        pool = _pool(transfer.name)
        if slots is None or slots.numel() != len(keys) * self._storage.slots_of_page(pool):
            return [False] * len(keys)
        return self._each(pool, keys, slots, act)

    def _each(self, pool: str, keys: list[str], slots: Any, act: Any) -> list[bool]:
        most = self._storage.begin_call({pool: slots.tolist()})
        pages = enumerate(zip(keys, self._storage.pages_of(pool, slots)))
        return [i < most and act(pool, key, page) for i, (key, page) in pages]


def _pool(name: Any) -> str:
    """Return a pool of host memory by the release's name of it; None names that of full KV."""
    if name is None or name.value == "kv":
        return "full"
    return POOLS[name.value]
