"""Which releases can be driven, and all that differs between them: one class each.

A class says where the release keeps its session code, how its scheduler calls it, and where its
cursors live. A new release is a new class in TABLE; nothing else asks for a version.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from impl.adapter import Cursors, UnusableImplementation
from impl.sglang import isolate
from reference.geometry import Geometry


class Release0510:
    """0.5.10. The session registers a request when it is created, and is closed at once."""

    version = "0.5.10"
    session_cache = ("sglang.srt.mem_cache.session_aware_cache", "SessionAwareCache")
    session_controller = "sglang.srt.managers.session_controller"
    checker = ("sglang.srt.managers.scheduler_runtime_checker_mixin", "SchedulerRuntimeCheckerMixin")
    scheduler = "Scheduler0510"  # of impl.sglang.checker
    spec_file = "sglang/srt/speculative/eagle_info_v2.py"
    spec_prepare = "EagleDraftInputV2Mixin.prepare_for_decode"
    # Tokens that preparing a speculative round commits already (the result adds accepted - claimed).
    claimed = 0
    # Pools that its busy check does not count: see Capabilities.
    uncounted: frozenset[str] = frozenset({"swa", "rows"})
    # The paged two-pool allocator declines an extend that leaves no page to spare per lane.
    spare_page_per_lane = True

    @classmethod
    def is_in(cls, root: Path) -> bool:
        """Whether the files under `root` are of this release's kind."""
        srt = root / "sglang/srt"
        return (srt / "mem_cache/session_aware_cache.py").is_file() and (
            srt / "managers/session_controller.py"
        ).is_file()

    def __init__(self, root: Path) -> None:
        """Import the release; the process is its own from now on.

        Raises UnusableImplementation when the files do not load.
        """
        # Here, because it imports torch: who only asks what is supported need not wait for that.
        from impl.sglang import doubles

        isolate.install(root, doubles.provided())
        try:
            self._import(root)
            doubles.without_kernels(self.allocator)
        except (ImportError, AttributeError, KeyError, OSError, SyntaxError) as error:
            raise UnusableImplementation(
                f"sglang {self.version}: its bookkeeping does not load: {type(error).__name__}: {error}"
            ) from error

    def _import(self, root: Path) -> None:
        import torch

        load = importlib.import_module
        self.common = load("sglang.srt.mem_cache.common")
        self.allocator = load("sglang.srt.mem_cache.allocator")
        self.swa_pool = load("sglang.srt.mem_cache.swa_memory_pool")
        self.memory_pool = load("sglang.srt.mem_cache.memory_pool")
        self.chunk_cache = load("sglang.srt.mem_cache.chunk_cache")
        self.params = load("sglang.srt.mem_cache.cache_init_params")
        self.batch = load("sglang.srt.managers.schedule_batch")
        self.controller = load(self.session_controller)
        module, name = self.session_cache
        self.session_cache_class = getattr(load(module), name)
        module, name = self.checker
        checks = getattr(load(module), name)
        if not isinstance(checks, type):  # inert: the file is not there
            raise ImportError(f"no {module}")
        stand_in = getattr(load("impl.sglang.checker"), self.scheduler)
        self.scheduler_class = type(name, (stand_in, checks), {"checks": checks})
        self.draft_len = 1  # what get_alloc_len_per_decode answers; set before each round
        env = {**vars(self.common), "torch": torch, "get_alloc_len_per_decode": lambda *_: self.draft_len}
        prepare = isolate.cut(root / self.spec_file, frozenset({self.spec_prepare}), env)
        self._prepare_spec = prepare[self.spec_prepare.rpartition(".")[2]]

    # -- pools ------------------------------------------------------------------------------------

    def make_allocator(self, full: int, swa: int | None, page_size: int) -> Any:
        """The allocator of one pool, or of two; `full` and `swa` are tokens."""
        import torch

        from impl.sglang import doubles

        kind: dict[str, Any] = {"dtype": torch.float16, "device": "cpu", "need_sort": False}
        if swa is not None:
            pool = doubles.kv_pool(self.swa_pool.SWAKVPool)
            return self.swa_pool.SWATokenToKVPoolAllocator(
                size=full, size_swa=swa, page_size=page_size, kvcache=pool, **kind
            )
        if page_size == 1:
            return self.allocator.TokenToKVPoolAllocator(full, kvcache=None, **kind)
        return self.allocator.PagedTokenToKVPoolAllocator(full, page_size, kvcache=None, **kind)

    def make_rows(self, rows: int, width: int) -> Any:
        return self.memory_pool.ReqToTokenPool(
            size=rows, max_context_len=width, device="cpu", enable_memory_saver=False
        )

    def make_cache(self, rows: Any, allocator: Any, page_size: int, window: int | None) -> Any:
        """The release's session cache around its chunk cache (sessions without a radix tree)."""
        params = self.params.CacheInitParams(
            disable=True,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            sliding_window_size=window,
        )
        inner = self.chunk_cache.ChunkCache if window is None else self.chunk_cache.SWAChunkCache
        return self.session_cache_class(inner(params))

    def make_scheduler(self, rows: Any, allocator: Any, cache: Any, geometry: Geometry) -> Any:
        """The release's memory checks on a stand-in of its scheduler."""
        return self.scheduler_class(self.batch.ScheduleBatch, rows, allocator, cache, geometry)

    # -- requests ---------------------------------------------------------------------------------

    def checkpoint(self, req: Any, cache: Any, chunked: bool) -> None:
        """What the scheduler calls after a chunk, and after the last one."""
        cache.cache_unfinished_req(req, **({"chunked": True} if chunked else {}))

    def prepare_spec(self, batch: Any, draft_len: int) -> None:
        """The release's own over-allocation for a verify round, 2 * draft_len past the commit."""
        self.draft_len = draft_len
        self._prepare_spec(None, batch)

    def row(self, req: Any) -> int | None:
        row: int | None = req.req_pool_idx
        return row

    def cursors(self, holder: Any) -> Cursors:
        """Of a request, or of a session's slot: both carry the same four attributes."""
        return Cursors(
            holder.kv_committed_len,
            holder.kv_allocated_len,
            holder.swa_evicted_seqlen,
            holder.cache_protected_len,
        )

    def commit(self, req: Any, tokens: int) -> None:
        """What processing a verify round's result does to the committed length."""
        req.kv_committed_len += tokens - self.claimed

    # -- sessions ---------------------------------------------------------------------------------

    def slot(self, cache: Any, session_id: str) -> Any:
        """The session's slot while it holds a row, else None."""
        slot = cache.slots.get(session_id)
        return slot if slot is not None and slot.is_holding_kv else None

    def closing(self, session: Any) -> bool:
        """0.5.10 knows no deferred close."""
        del session
        return False

    def history(self, session: Any) -> list[int]:
        """The tokens that Session.create_req would put in front of the next turn's input."""
        for node in session.req_nodes.values():
            last = node.req
            return [*last.origin_input_ids, *last.output_ids[: last.sampling_params.max_new_tokens]]
        return []


class Release0511(Release0510):
    """0.5.11. Turns in flight are known to the session; a close waits for them."""

    version = "0.5.11"
    scheduler = "Scheduler0511"
    session_cache = ("sglang.srt.session.streaming_session", "StreamingSession")
    session_controller = "sglang.srt.session.session_controller"
    uncounted: frozenset[str] = frozenset({"rows"})
    claimed = 1
    spare_page_per_lane = False

    @classmethod
    def is_in(cls, root: Path) -> bool:
        srt = root / "sglang/srt"
        return (
            (srt / "session/streaming_session.py").is_file()
            and (srt / "mem_cache/allocator.py").is_file()  # a package from 0.5.13 on
            and (srt / "speculative/eagle_info_v2.py").is_file()
        )

    def checkpoint(self, req: Any, cache: Any, chunked: bool) -> None:
        self.common.maybe_cache_unfinished_req(req, cache, **({"chunked": True} if chunked else {}))

    def closing(self, session: Any) -> bool:
        return bool(session.close_on_finish)


class Release0512(Release0511):
    """0.5.12. The same modules and rules; a checkout of it is told as 0.5.11."""

    version = "0.5.12"


TABLE: dict[str, type[Release0510]] = {r.version: r for r in (Release0510, Release0511, Release0512)}
SUPPORTED = ", ".join(TABLE)


def supported(version: str) -> type[Release0510]:
    """The class of a release; raises UnusableImplementation that names those there are."""
    try:
        return TABLE[version]
    except KeyError:
        raise UnusableImplementation(
            f"sglang=={version[:40]} is not supported; these are: {SUPPORTED}"
        ) from None


def detect(root: Path) -> type[Release0510]:
    """The release whose kind the files under `root` (which holds `sglang/`) are of.

    Told by the modules that exist, since a checkout between two releases has no version of its own.
    Raises UnusableImplementation that names what is supported.
    """
    for release in TABLE.values():
        if release.is_in(root):
            return release
    stated = stated_version(root)
    raise UnusableImplementation(
        f"sglang checkout {root}: {f'version {stated}' if stated else 'its version'} is not supported;"
        f" these are: {SUPPORTED}"
    )


def stated_version(root: Path) -> str | None:
    """The version that the files state, if they do; nothing of them is run."""
    for name in ("_version.py", "version.py"):
        file = root / "sglang" / name
        if not file.is_file():
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = {t.id for t in node.targets if isinstance(t, ast.Name)}
                if names & {"version", "__version__"} and isinstance(node.value.value, str):
                    return node.value.value
    return None


__all__ = ["SUPPORTED", "TABLE", "Release0510", "Release0511", "detect", "stated_version", "supported"]
