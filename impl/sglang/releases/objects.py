"""Contents of a release's objects, and their places: rows, cursors, tree nodes, sessions.

Loads nothing: the watcher reads the objects of a server that runs already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

from impl.adapter import Cursors, NodeView
from impl.sglang.parts import trees


class Objects:
    """As 0.5.10 has them."""

    session_cache = ("sglang.srt.mem_cache.session_aware_cache", "SessionAwareCache")
    # Where a request, or a session's slot, has its row and its cursors.
    places: ClassVar[dict[str, str]] = {name: name for name in ("req_pool_idx", *Cursors._fields)}

    # -- requests ---------------------------------------------------------------------------------

    @classmethod
    def record(cls) -> str:
        """Return the attribute of a request, or of a session's slot, that has its row; "" for the object
        itself."""
        return cls.places["req_pool_idx"].rpartition(".")[0]

    @classmethod
    def in_record(cls) -> dict[str, str]:
        """Return `places` relative to that attribute."""
        return {name: place.removeprefix(f"{cls.record()}.") for name, place in cls.places.items()}

    @cached_property
    def _row(self) -> Callable[[Any], Any]:
        return attrgetter(self.places["req_pool_idx"])

    @cached_property
    def _cells(self) -> Callable[[Any], tuple[int, int, int, int]]:
        return self.cells()

    def cells(self) -> Callable[[Any], tuple[int, int, int, int]]:
        """Return the reader of the cursors of a request, or of a session's slot, in every forward pass: a
        fast one."""
        return attrgetter(*map(self.places.__getitem__, Cursors._fields))

    def row(self, holder: Any) -> int | None:
        """Return the row of a request or of a session's slot, None without one."""
        row: int | None = self._row(holder)
        return row

    def cursors(self, holder: Any) -> Cursors:
        """Return the cursors of a request or of a session's slot, which have the same four attributes."""
        return Cursors._make(self._cells(holder))

    def put(self, req: Any, name: str, value: int) -> None:
        """Set the row or a cursor of a request, by its name in `places`."""
        record, _, attribute = self.places[name].rpartition(".")
        setattr(attrgetter(record)(req) if record else req, attribute, value)

    # -- sessions ---------------------------------------------------------------------------------

    def slot(self, cache: Any, session_id: str) -> Any:
        """Return the session's slot while it holds a row, else None."""
        slot = cache.slots.get(session_id)
        return slot if slot is not None and slot.is_holding_kv else None

    def closing(self, session: Any) -> bool:
        """Return False: 0.5.10 has no deferred close."""
        del session
        return False

    def history(self, session: Any) -> list[int]:
        """Return the tokens that Session.create_req would put in front of the next turn's input."""
        for node in session.req_nodes.values():
            last = node.req
            outputs = last.output_ids[: last.sampling_params.max_new_tokens]
            return [*last.origin_input_ids[: self.committed_len(session)], *outputs]
        return []

    def committed_len(self, session: Any) -> int | None:
        """Return how many tokens of the last turn's input count, None for all."""
        del session
        return None

    # -- a whole scheduler ------------------------------------------------------------------------

    def planned_batch(self, plan: Any) -> Any:
        """Return the batch that get_next_batch_to_run has decided on, None for none."""
        return plan

    def free_pages(self, pool: Any) -> list[int]:
        """Return the free list of one pool, as it stands."""
        return [*pool.free_pages.tolist(), *pool.release_pages.tolist()]

    def nodes(self, tree: Any, mapping: Any) -> Iterator[NodeView]:
        """Yield the nodes of the radix tree in a scheduler's cache.

        mapping: the allocator's mapping of full slots to SWA slots, None without a window.
        """
        wrapped = type(tree).__name__ == self.session_cache[1]
        return self.shown_tree(tree.inner if wrapped else tree, mapping).nodes()

    def shown_tree(self, cache: Any, mapping: Any) -> trees.ReleaseTree:
        """Return the reader of the nodes of a tree of this kind."""
        kinds: dict[str, type[trees.ReleaseTree]] = {
            "UnifiedRadixCache": trees.ComponentTree,
            "SWARadixCache": trees.SWARadixTree,
            "RadixCache": trees.ReleaseTree,
        }
        return kinds[type(cache).__name__](cache, mapping)

    def slots(self, tree: Any) -> dict[str, Any]:
        """Return the slots of sessions by name: of the tree's sessions, or of the wrapper that has them."""
        kind = type(tree).__name__
        sessions = None
        if kind == self.session_cache[1]:
            sessions = tree
        elif kind == "UnifiedRadixCache":
            sessions = tree.session
        slots: dict[str, Any] = {} if sessions is None else sessions.slots
        return slots
