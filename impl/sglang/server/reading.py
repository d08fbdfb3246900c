"""Readings of a whole scheduler for the watcher: sizes, free counts, a snapshot, and the pages."""

from __future__ import annotations

from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from impl.sglang.releases.catalogue import TABLE, detect
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.parts.tracking import buffers_of, tracked_states
from impl.sglang.server.events import (
    Cells, Paged, RequestState, SessionState, Snapshot, ShownStates,
)  # fmt: skip


def installed_release() -> Release0510:
    """Return the class for the SGLang of this process. A checkout or an unknown version counts as the release
    that has the same names. Raises UnusableImplementation, which says what it lacks."""
    spec = find_spec("sglang")
    wheel = distribution("sglang")
    root = Path(str(spec and spec.origin)).parents[1]
    kind = TABLE.get(wheel.version) if root == Path(str(wheel.locate_file(""))) else None
    return (kind or detect(root).release)()


class Reader:
    """Reads one scheduler; changes nothing.

    release: the names of its objects and fields.
    """

    def __init__(self, scheduler: Any, release: Release0510) -> None:
        self.scheduler = scheduler
        self.release = release
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.rows = scheduler.req_to_token_pool
        self.tree = scheduler.tree_cache
        self.swa = bool(scheduler.is_hybrid_swa)
        self.shares = not self.tree.disable
        self.speculates = not scheduler.spec_algorithm.is_none()
        tree = self.tree
        pools = self.allocator
        self._full_free = pools.full_available_size if self.swa else pools.available_size
        if self.shares:
            self._evictable = tree.full_evictable_size if self.swa else tree.evictable_size
            self._locked = tree.full_protected_size if self.swa else tree.protected_size
        self.recurrent = release.has_states(self.rows)

    def header(self) -> dict[str, Any]:
        """Return the header of a log. Sizes in tokens, rows in rows."""
        scheduler = self.scheduler
        allocator = self.allocator
        return {
            "engine": "sglang", "release": version("sglang"),
            "page_size": scheduler.page_size,
            "window": scheduler.sliding_window_size if self.swa else None,
            "full_tokens": allocator.size_full if self.swa else allocator.size,
            "swa_tokens": allocator.size_swa if self.swa else 0,
            "rows": self.rows.size, "width": self.rows.req_to_token.shape[1],
            "tree": self.shares, "overlap": bool(scheduler.enable_overlap),
            "speculative": self.speculates,
            "claims": self.release.claimed,
            **({"states": self.rows.mamba_pool.size, "tracks": self.rows.mamba_initial_tracking_slots,
                "lazy": self.rows.enable_mamba_extra_buffer_lazy} if self.recurrent else {}),
        }  # fmt: skip

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Return the free tokens of each pool, the free rows, the tokens of each pool that the tree holds,
        and the full tokens that it locks."""
        full = self._full_free()
        rows = len(self.rows.free_slots)
        swa = self.allocator.swa_available_size() if self.swa else 0
        if not self.shares:
            return full, swa, rows, 0, 0, 0
        locked = int(self._locked())
        held = 0
        if self.swa:
            held = int(self.tree.swa_evictable_size() + self.tree.swa_protected_size())
        return full, swa, rows, int(self._evictable()) + locked, held, locked

    def states(self) -> int:
        """Return the number of slots of recurrent state that are free or the tree's."""
        if not self.recurrent:
            return 0
        left = int(self.rows.mamba_allocator.available_size())
        if self.shares:
            left += int(self.tree.mamba_evictable_size() + self.tree.mamba_protected_size())
        return left

    # -- a state to begin with ----------------------------------------------------------------------

    def snapshot(self, plan: Any, pages: bool, dropped: int) -> Snapshot:
        """Return the sessions and unfinished requests that a log which begins here needs."""
        sessions = []
        for name, session in self.scheduler.session_controller.sessions.items():
            if not session.streaming:
                continue
            length = 0
            turn = None
            history: list[int] | None = [] if pages else None
            for last in [node.req for node in session.req_nodes.values()][-1:]:
                ahead = min(session.committed_origin_len, len(last.origin_input_ids))
                outputs = min(len(last.output_ids), last.sampling_params.max_new_tokens)
                length = ahead + outputs
                turn = None if last.finished() else last.rid
                if pages:
                    history = [*last.origin_input_ids[:ahead], *last.output_ids[:outputs]]
            slot = self.slot(name)
            sessions.append(SessionState(
                session=name, tokens=length, closing=bool(session.close_on_finish),
                cursors=None if slot is None else self.release.cursors(slot),
                times_out=session.timeout is not None, ids=history, turn=turn,
            ))  # fmt: skip
        requests: dict[str, RequestState] = {}
        rounds = self._in_flight(plan)
        for request, queued in self.unfinished_requests(self.release.planned_batch(plan)):
            if request.rid in requests or (not queued and not self.holds(request)):
                continue
            requests[request.rid] = RequestState(
                request=request.rid,
                session=session_of(request),
                queued=queued,
                tokens=len(request.origin_input_ids),
                outputs=len(request.output_ids),
                rejected=request.to_finish is not None,
                retracted=bool(request.is_retracted),
                cursors=None if queued else self.release.cursors(request),
                ids=[*request.origin_input_ids, *request.output_ids] if pages else None,
                rounds=rounds.get(request.rid, []),
                extends=request is self.scheduler.chunked_req,
            )
        return Snapshot(dropped, sessions, list(requests.values()))

    def _in_flight(self, plan: Any) -> dict[str, list[Any]]:
        """Return the rounds without results, the oldest first."""
        found: dict[str, list[Any]] = {}
        for batch in (*self._launched_batches(), self.release.planned_batch(plan)):
            if batch is None:
                continue
            kind = "decode" if batch.forward_mode.is_decode() else "prefill"
            decoding = batch.decoding_reqs or ()
            for request in batch.reqs:
                found.setdefault(request.rid, []).append("mixed" if request in decoding else kind)
        return found

    def entries(self) -> int:
        """Return the approximate number of sessions and requests of a snapshot."""
        scheduler = self.scheduler
        running = len(scheduler.running_batch.reqs)
        return len(scheduler.session_controller.sessions) + len(scheduler.waiting_queue) + running

    def _launched_batches(self) -> list[Any]:
        """Return the batches without processed results; only an overlapped loop has them."""
        return [batch for batch, _ in vars(self.scheduler).get("result_queue", ())]

    def unfinished_requests(self, planned: Any = None) -> list[tuple[Any, bool]]:
        """Return the unfinished requests of the planned batch, of the batches before it and of the queue,
        each with whether it is queued."""
        scheduler = self.scheduler
        found = []
        batches = (planned, scheduler.running_batch, scheduler.last_batch)
        for batch in (*batches, *self._launched_batches()):
            if batch is not None:
                found += [(request, False) for request in batch.reqs]
        if scheduler.chunked_req is not None:
            found.append((scheduler.chunked_req, False))
        found += [(request, True) for request in scheduler.waiting_queue]
        return [(request, queued) for request, queued in found if not request.finished()]

    # -- level `pages` --------------------------------------------------------------------------------

    def pages(self, plan: Any) -> Paged:
        """Return rows by owner, free lists, the mapping for the slots of rows and tree, and the tree's
        nodes."""
        owners: dict[str, Any] = {}
        row = self.release.row
        for name, slot in self.release.slots(self.tree).items():
            if self.holds(slot):
                owners[name] = slot
        unfinished = [
            request
            for request, queued in self.unfinished_requests(self.release.planned_batch(plan))
            if not queued
        ]
        running = filter(self.holds, unfinished)
        for request in sorted(running, key=lambda each: each.to_finish is not None):
            session = request.session
            name = request.rid
            if session is not None:
                had = owners.get(session.session_id, request)
                rejected = request.to_finish is not None and row(had) != row(request)
                name = request.rid if rejected else session.session_id
            owners[name] = request
        rows = {name: self._row(owner) for name, owner in owners.items()}
        full = self.allocator.full_attn_allocator if self.swa else self.allocator
        found = Paged(rows, self._free(full), list(self.rows.free_slots))
        if self.swa:
            mapping = self.allocator.full_to_swa_index_mapping
            found.free_swa = self._free(self.allocator.swa_attn_allocator)
            found.mapping = mapping[: self.allocator.size_full + self.scheduler.page_size].tolist()
        nodes = []
        if self.shares:
            mapping = self.allocator.full_to_swa_index_mapping if self.swa else None
            nodes = list(self.release.nodes(self.tree, mapping))
            found.nodes = [
                (list(n.path), list(n.slots), list(n.swa_slots), n.full_locks, n.swa_locks)
                for n in nodes
            ]
        if self.recurrent:
            found.states = self._shown_states(plan, [n.state for n in nodes])
        return found

    def _shown_states(self, plan: Any, slots_of_nodes: list[int | None]) -> ShownStates:
        """Return the slots of recurrent state. A turn that runs on its session's state is left out."""
        free = [int(slot) for slot in self.rows.mamba_allocator.free_slots]
        shown = ShownStates(free, {}, {}, slots_of_nodes)
        slots = self.release.slots(self.tree).items()
        owners: list[tuple[str, str | None, Any]] = [(name, None, slot) for name, slot in slots]
        owners += [
            (r.rid, session_of(r), r) for r, _ in self.unfinished_requests(self.release.planned_batch(plan))
        ]
        for name, lender, owner in owners:
            if owner.kv.holds_mamba:
                slots_held = [int(owner.kv.mamba_pool_idx), *buffers_of(owner.kv)]
                if lender is not None and shown.held.get(lender) == slots_held:
                    name = lender
                shown.held[name] = slots_held
                for last in tracked_states(owner.kv):
                    shown.tracked[name] = last
        return shown

    def _row(self, owner: Any) -> tuple[int, Cells, list[int]]:
        row = self.release.row(owner)
        cursors = self.release.cursors(owner)
        assert row is not None
        return (int(row), cursors, self.rows.req_to_token[row, : cursors[1]].tolist())

    def _free(self, pool: Any) -> list[int]:
        """Return the free list of a pool, in pages."""
        return [int(page) for page in self.release.free_pages(pool)]

    def holds(self, owner: Any) -> bool:
        """Return whether a request or a slot has a row."""
        return self.release.row(owner) is not None

    def slot(self, session: str | None) -> Any:
        """Return the slot of a session that keeps a row."""
        return slot_of(self.release, self.tree, session)


def session_of(request: Any) -> str | None:
    """Return the streaming session that a request belongs to."""
    session = request.session
    return session.session_id if session is not None and session.streaming else None


def slot_of(release: Release0510, tree: Any, session: str | None) -> Any:
    """Return the slot of a session that keeps a row."""
    slot = release.slots(tree).get(session) if session is not None else None
    return slot if slot is not None and release.row(slot) is not None else None
