"""What the watcher reads of a whole scheduler: sizes, free counts, a snapshot, and the pages themselves."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any


class Reader:
    """Reads one scheduler; changes nothing."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.rows = scheduler.req_to_token_pool
        self.tree = scheduler.tree_cache
        self.swa = bool(scheduler.is_hybrid_swa)
        self.shares = not getattr(self.tree, "disable", True)
        self._nodes: Any = None

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
            "speculative": not scheduler.spec_algorithm.is_none(),
        }  # fmt: skip

    def free(self) -> dict[str, int]:
        """Free tokens of each pool, free rows, and tokens that the tree holds."""
        allocator, tree, swa = self.allocator, self.tree, self.swa
        counts = {
            "full": allocator.full_available_size() if swa else allocator.available_size(),
            "swa": allocator.swa_available_size() if swa else 0,
            "rows": len(self.rows.free_slots),
        }
        if self.shares:
            sized = getattr(tree, "full_evictable_size", None) is not None and swa
            full = (tree.full_evictable_size, tree.full_protected_size) if sized else (
                tree.evictable_size, tree.protected_size)  # fmt: skip
            counts["tree_locked"] = int(full[1]())
            counts["tree_full"] = int(full[0]()) + counts["tree_locked"]
            counts["tree_swa"] = int(tree.swa_evictable_size() + tree.swa_protected_size()) if swa else 0
        return counts

    # -- a state to begin with ----------------------------------------------------------------------

    def snapshot(self, plan: Any, pages: bool) -> dict[str, Any]:
        """Sessions and unfinished requests, as a log that begins here needs them."""
        from impl.sglang.server.watch import cursors_of, holds, session_of, slot_of

        sessions = []
        for name, session in self.scheduler.session_controller.sessions.items():
            if not session.streaming:
                continue
            history: list[int] = []
            for node in session.req_nodes.values():
                last = node.req
                history = list(last.origin_input_ids[: session.committed_origin_len])
                history += list(last.output_ids[: last.sampling_params.max_new_tokens])
            slot = slot_of(self.tree, name)
            sessions.append({
                "session": name, "tokens": len(history), "closing": bool(session.close_on_finish),
                "cursors": None if slot is None else cursors_of(slot), **({"ids": history} if pages else {}),
            })  # fmt: skip
        requests: dict[str, dict[str, Any]] = {}
        for request, queued in self._unfinished(plan):
            if request.rid in requests or (not queued and not holds(request)):
                continue
            text = {"ids": [*request.origin_input_ids, *request.output_ids]} if pages else {}
            requests[request.rid] = {
                "request": request.rid, "session": session_of(request), "queued": queued,
                "tokens": len(request.origin_input_ids), "outputs": len(request.output_ids),
                "rejected": request.to_finish is not None, "retracted": bool(request.is_retracted),
                "cursors": None if queued else cursors_of(request), **text,
            }  # fmt: skip
        return {"sessions": sessions, "requests": list(requests.values())}

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

    def view(self, plan: Any) -> dict[str, Any]:
        """Rows by owner, free lists, the mapping of what rows and tree name, and the tree's nodes."""
        from impl.sglang.server.watch import holds

        owners: dict[str, Any] = {}
        slots = getattr(getattr(self.tree, "session", None) or self.tree, "slots", {})
        for name, slot in slots.items():
            if holds(slot):
                owners[name] = slot
        for request, queued in self._unfinished(plan):
            if not queued and holds(request):
                session = request.session
                owners[session.session_id if session is not None else request.rid] = request
        rows = {name: self._row(owner) for name, owner in owners.items()}
        full = self.allocator.full_attn_allocator if self.swa else self.allocator
        found: dict[str, Any] = {
            "owners": rows,
            "free_full": _free(full),
            "free_rows": list(self.rows.free_slots),
        }
        if self.swa:
            mapping = self.allocator.full_to_swa_index_mapping
            found["free_swa"] = _free(self.allocator.swa_attn_allocator)
            found["mapping"] = mapping[: self.allocator.size_full + self.scheduler.page_size].tolist()
        if self.shares:
            found["nodes"] = [
                [list(n.path), list(n.slots), list(n.swa_slots), n.full_locks, n.swa_locks]
                for n in self._tree_nodes().nodes()
            ]  # fmt: skip
        return found

    def _row(self, owner: Any) -> list[Any]:
        from impl.sglang.server.watch import cursors_of

        kv = getattr(owner, "kv", None) or owner
        cursors = cursors_of(owner)
        row = int(kv.req_pool_idx)
        return [row, cursors, self.rows.req_to_token[row, : cursors[1]].tolist()]

    def _tree_nodes(self) -> Any:
        if self._nodes is None:
            trees = importlib.import_module("impl.sglang.parts.trees")
            in_rust = getattr(self.tree, "_tree_core_backend", "") == "rust"
            kind = "RustUnifiedTree" if in_rust else "UnifiedTree"
            self._nodes = getattr(trees, kind)(
                self.tree, self.allocator.full_to_swa_index_mapping if self.swa else None)  # fmt: skip
        return self._nodes


def _free(pool: Any) -> list[int]:
    return [int(page) for page in pool.get_all_free_pages().tolist()]
