"""What the watcher reads of a whole scheduler: sizes, free counts, a snapshot, and the pages themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from impl.adapter import Cursors
from impl.sglang.parts import trees
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.server.events import Cells, Paged, RequestState, SessionState, Snapshot

# What reads the nodes of a release's tree, in impl.sglang.parts.trees.
_TREES = {
    "UnifiedRadixCache": "ComponentTree", "SWARadixCache": "SWARadixTree", "RadixCache": "ReleaseTree",
}  # fmt: skip
# Where releases have the row and the cursors of a request or a slot, the newest first.
_NAMES = ("req_pool_idx", *Cursors._fields)
_PLACES = dict.fromkeys(tuple(map(r.places.__getitem__, _NAMES)) for r in reversed(TABLE.values()))
_RowAndCursors = tuple[int | None, int, int, int, int]
_READ: dict[type, Callable[[Any], _RowAndCursors]] = {}


class Reader:
    """Reads one scheduler; changes nothing."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.rows = scheduler.req_to_token_pool
        self.tree = scheduler.tree_cache
        self.swa = bool(scheduler.is_hybrid_swa)
        self.shares = not self.tree.disable
        self.speculates = not scheduler.spec_algorithm.is_none()
        self._nodes: Any = None
        pool, sizes = ("full_available_size", "full_{}_size") if self.swa else ("available_size", "{}_size")
        self._full_free = getattr(self.allocator, pool)
        self._swa_free = getattr(self.allocator, "swa_available_size", int)
        if self.shares:
            core = getattr(self.tree, "tree_core", self.tree)  # which counts
            self._evictable = getattr(core, sizes.format("evictable"))
            self._locked = getattr(core, sizes.format("protected"))

    def header(self) -> dict[str, Any]:
        """What a log says of the server before anything else. Sizes in tokens, rows in rows."""
        scheduler, allocator = self.scheduler, self.allocator
        return {
            "engine": "sglang", "release": version("sglang"),
            "page_size": scheduler.page_size,
            "window": scheduler.sliding_window_size if self.swa else None,
            "full_tokens": allocator.size_full if self.swa else allocator.size,
            "swa_tokens": allocator.size_swa if self.swa else 0,
            "rows": self.rows.size, "width": self.rows.req_to_token.shape[1],
            "tree": self.shares, "overlap": bool(scheduler.enable_overlap),
            "speculative": self.speculates,
            "claims": getattr(TABLE.get(version("sglang")), "claimed", 0),
        }  # fmt: skip

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Free tokens of each pool, free rows, tokens that the tree holds of each pool, tokens that it
        locks."""
        full, rows, swa = self._full_free(), len(self.rows.free_slots), self._swa_free() if self.swa else 0
        if not self.shares:
            return full, swa, rows, 0, 0, 0
        locked = int(self._locked())
        held = int(self.tree.swa_evictable_size() + self.tree.swa_protected_size()) if self.swa else 0
        return full, swa, rows, int(self._evictable()) + locked, held, locked

    # -- a state to begin with ----------------------------------------------------------------------

    def snapshot(self, plan: Any, pages: bool, dropped: int) -> Snapshot:
        """Sessions and unfinished requests, as a log that begins here needs them."""
        sessions = []
        for name, session in self.scheduler.session_controller.sessions.items():
            if not session.streaming:
                continue
            length, turn = 0, None
            history: list[int] | None = [] if pages else None
            for last in [node.req for node in session.req_nodes.values()][-1:]:
                ahead = min(session.committed_origin_len, len(last.origin_input_ids))
                outputs = min(len(last.output_ids), last.sampling_params.max_new_tokens)
                length, turn = ahead + outputs, None if last.finished() else last.rid
                if pages:
                    history = [*last.origin_input_ids[:ahead], *last.output_ids[:outputs]]
            slot = slot_of(self.tree, name)
            sessions.append(SessionState(
                session=name, tokens=length, closing=bool(session.close_on_finish),
                cursors=None if slot is None else cursors_of(slot),
                times_out=session.timeout is not None, ids=history, turn=turn,
            ))  # fmt: skip
        requests: dict[str, RequestState] = {}
        rounds = self._in_flight(plan)
        for request, queued in self._unfinished(plan):
            if request.rid in requests or (not queued and not holds(request)):
                continue
            requests[request.rid] = RequestState(
                request=request.rid, session=session_of(request), queued=queued,
                tokens=len(request.origin_input_ids), outputs=len(request.output_ids),
                rejected=request.to_finish is not None, retracted=bool(request.is_retracted),
                cursors=None if queued else cursors_of(request),
                ids=[*request.origin_input_ids, *request.output_ids] if pages else None,
                rounds=rounds.get(request.rid, []),
                extends=request is getattr(self.scheduler, "chunked_req", None),
            )  # fmt: skip
        return Snapshot(dropped, sessions, list(requests.values()))

    def _in_flight(self, plan: Any) -> dict[str, list[Any]]:
        """Rounds whose results are to come, the oldest first."""
        found: dict[str, list[Any]] = {}
        waiting = [batch for batch, _ in getattr(self.scheduler, "result_queue", ())]
        for batch in (*waiting, getattr(plan, "batch_to_run", plan)):
            if batch is None:
                continue
            kind = "decode" if batch.forward_mode.is_decode() else "prefill"
            decoding = getattr(batch, "decoding_reqs", None) or ()
            for request in batch.reqs:
                found.setdefault(request.rid, []).append("mixed" if request in decoding else kind)
        return found

    def entries(self) -> int:
        """About how many sessions and requests a snapshot would have."""
        scheduler = self.scheduler
        running = getattr(scheduler.running_batch, "reqs", None) or ()
        return len(scheduler.session_controller.sessions) + len(scheduler.waiting_queue) + len(running)

    def _unfinished(self, plan: Any) -> list[tuple[Any, bool]]:
        scheduler, found = self.scheduler, []
        batches = (getattr(plan, "batch_to_run", plan), scheduler.running_batch, scheduler.last_batch)
        waiting = [batch for batch, _ in getattr(scheduler, "result_queue", ())]  # launched, not processed
        for batch in (*batches, *waiting):
            found += [(request, False) for request in (batch.reqs if batch is not None else ())]
        if getattr(scheduler, "chunked_req", None) is not None:
            found.append((scheduler.chunked_req, False))
        found += [(request, True) for request in scheduler.waiting_queue]
        return [(request, queued) for request, queued in found if not request.finished()]

    # -- level `pages` --------------------------------------------------------------------------------

    def pages(self, plan: Any) -> Paged:
        """Rows by owner, free lists, the mapping of what rows and tree name, and the tree's nodes."""
        owners: dict[str, Any] = {}
        for name, slot in _slots(self.tree).items():
            if holds(slot):
                owners[name] = slot
        running = [request for request, queued in self._unfinished(plan) if not queued and holds(request)]
        for request in sorted(running, key=lambda each: each.to_finish is not None):
            session, name = request.session, request.rid
            if session is not None:
                had = owners.get(session.session_id, request)
                rejected = request.to_finish is not None and row_of(had) != row_of(request)
                name = request.rid if rejected else session.session_id
            owners[name] = request
        rows = {name: self._row(owner) for name, owner in owners.items()}
        full = self.allocator.full_attn_allocator if self.swa else self.allocator
        found = Paged(rows, _free(full), list(self.rows.free_slots))
        if self.swa:
            mapping = self.allocator.full_to_swa_index_mapping
            found.free_swa = _free(self.allocator.swa_attn_allocator)
            found.mapping = mapping[: self.allocator.size_full + self.scheduler.page_size].tolist()
        if self.shares:
            found.nodes = [
                (list(n.path), list(n.slots), list(n.swa_slots), n.full_locks, n.swa_locks)
                for n in self._tree_nodes().nodes()
            ]  # fmt: skip
        return found

    def _row(self, owner: Any) -> tuple[int, Cells, list[int]]:
        row, cursors = row_of(owner), cursors_of(owner)
        assert row is not None
        return (int(row), cursors, self.rows.req_to_token[row, : cursors[1]].tolist())

    def _tree_nodes(self) -> Any:
        if self._nodes is None:
            tree = getattr(self.tree, "inner", self.tree)
            kind = _TREES[type(tree).__name__]
            if getattr(tree, "_tree_core_backend", "") == "rust":
                kind = "RustUnifiedTree"
            self._nodes = getattr(trees, kind)(
                tree, self.allocator.full_to_swa_index_mapping if self.swa else None)  # fmt: skip
        return self._nodes


def _free(pool: Any) -> list[int]:
    """The free list of a pool, in pages."""
    if hasattr(pool, "get_all_free_pages"):  # since 0.5.20
        return [int(page) for page in pool.get_all_free_pages().tolist()]
    return [int(page) for pages in (pool.free_pages, pool.release_pages) for page in pages.tolist()]


def row_and_cursors(owner: Any) -> _RowAndCursors:
    """Row, C, A, E and R of a request or a slot, by the names of the newest release that it has all of."""
    try:
        return _READ[type(owner)](owner)
    except (KeyError, AttributeError):  # the first of its type, or without what others of it have
        pass
    for places in _PLACES:
        with suppress(AttributeError):
            read: Callable[[Any], _RowAndCursors] = attrgetter(*places)
            found = read(owner)
            _READ[type(owner)] = read
            return found
    # 0.5.16 to 0.5.18: no record before there is a row
    return None, owner.kv_committed_len, 0, 0, owner.cache_protected_len


def cursors_of(owner: Any) -> Cells:
    return row_and_cursors(owner)[1:]


def row_of(owner: Any) -> int | None:
    return row_and_cursors(owner)[0]


def holds(owner: Any) -> bool:
    """Whether it has a row."""
    return row_of(owner) is not None


def session_of(request: Any) -> str | None:
    """The streaming session that a request belongs to."""
    session = request.session
    return session.session_id if session is not None and session.streaming else None


def _slots(tree: Any) -> dict[str, Any]:
    """What sessions keep, by their names: of the tree's sessions, or of the wrapper that has them."""
    sessions = getattr(tree, "session", None) or tree
    return sessions.slots if sessions is not tree or "Session" in type(tree).__name__ else {}


def slot_of(tree: Any, session: str | None) -> Any:
    """What a session keeps, if it keeps a row."""
    slot = _slots(tree).get(session) if session is not None else None
    return slot if slot is not None and holds(slot) else None
