"""The radix tree of a release: calls of its methods, and its nodes for the view.

The release's own methods match, lock, insert and evict; the classes here call them as the release does, and
read nodes. Each kind of tree that releases have is a class.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from impl.adapter import NodeView, TreeSizes
from impl.lazy import Tensor, torch
from impl.loading.optional import optional
from impl.sglang.parts.namespaces import elements_of
from reference.commands import Freed


class ReleaseTree:
    """RadixCache: one pool, no window.

    cache: the release's cache as the scheduler has it, with sessions around the tree or in it.
    mapping: the allocator's tensor, full slot -> SWA slot; None without a window.
    """

    has_states = False  # whether the model has recurrent layers

    def __init__(self, cache: Any, mapping: Any) -> None:
        base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        self._base = base
        self._key = importlib.import_module("sglang.srt.mem_cache.radix_cache").RadixKey
        self.cache = cache
        self.mapping = mapping
        #: the release's MatchResult of the last match, None before one
        self.match_result: Any = None

    @property
    def root(self) -> Any:
        return self.cache.root_node

    # -- locks ------------------------------------------------------------------------------------

    def reset_match(self, req: Any) -> None:
        """Reset the match of `req`, as an admission without one leaves it: a node at the root, whose lock
        pins nothing."""
        req.last_node = self.root
        req.prefix_indices = torch.empty((0,), dtype=torch.int64)

    def match(self, req: Any, ids: Any) -> Tensor:
        """Match `ids` and set the node and the slots of `req` as Req.init_next_round_input does. Its cursor
        stays. Return the slots of the matched prefix."""
        salt = {"cache_salt": req.cache_salt} if optional(req, "Req.cache_salt") else {}
        key = self._key(token_ids=ids, extra_key=req.extra_key, **salt)
        result = self.cache.match_prefix(self._base.MatchPrefixParams(key=key, req=req))
        self.match_result = result
        req.prefix_indices = result.device_indices
        req.last_node = result.last_device_node
        slots: Tensor = result.device_indices
        return slots

    def lock(self, req: Any) -> None:
        """Lock the prefix of a request (PrefillAdder._req_inc_lock_ref)."""
        self.cache.inc_lock_ref(req.last_node)

    def unlock(self, req: Any) -> None:
        """Unlock the prefix of a request as cache_finished_req does."""
        self.cache.dec_lock_ref(req.last_node)

    # -- memory pressure --------------------------------------------------------------------------

    def evict(self, full: int, swa: int, states: int = 0) -> Freed:
        """Evict this many tokens and states. Returns how many the release says that it freed."""
        params = {"mamba_num": states} if states else {}
        eviction = self.cache.evict(
            self._base.EvictParams(num_tokens=full, swa_num_tokens=swa, **params)
        )
        return Freed(
            int(eviction.num_tokens_evicted),
            int(eviction.swa_num_tokens_evicted),
            int(eviction.mamba_num_evicted) if self.has_states else 0,
        )

    def sizes(self) -> TreeSizes:
        """Return the evictable and the locked tokens of each pool, by the release's counters."""
        return TreeSizes(
            full_evictable=self.cache.evictable_size(),
            full_protected=self.cache.protected_size(),
            swa_evictable=0,
            swa_protected=0,
        )

    # -- looking ----------------------------------------------------------------------------------

    def nodes(self) -> Iterator[NodeView]:
        """Yield every node but the root, parents before children."""
        children_of_root = self.cache.root_node.children.values()
        waiting: list[tuple[Any, list[int]]] = [(child, []) for child in children_of_root]
        while waiting:
            node, path = waiting.pop()
            path = [*path, *elements_of(node.key)]
            yield self._node(node, path)
            waiting += [(child, path) for child in node.children.values()]

    def _node(self, node: Any, path: list[int]) -> NodeView:
        return NodeView(path, node.value.tolist(), (), node.lock_ref, 0)


class SWARadixTree(ReleaseTree):
    """SWARadixCache: full and SWA KV. A lock pins SWA KV up to a node, whose number the unlock needs."""

    def lock(self, req: Any) -> None:
        req.swa_uuid_for_lock = self.cache.inc_lock_ref(req.last_node).swa_uuid_for_lock

    def unlock(self, req: Any) -> None:
        self.cache.dec_lock_ref(
            req.last_node, self._base.DecLockRefParams(swa_uuid_for_lock=req.swa_uuid_for_lock)
        )

    def sizes(self) -> TreeSizes:
        cache = self.cache
        return TreeSizes(
            full_evictable=cache.full_evictable_size(),
            full_protected=cache.full_protected_size(),
            swa_evictable=cache.swa_evictable_size(),
            swa_protected=cache.swa_protected_size(),
        )

    def _node(self, node: Any, path: list[int]) -> NodeView:
        live = not node.swa_tombstone
        swa = self.mapping[node.value].tolist() if live else ()
        return NodeView(path, node.value.tolist(), swa, node.full_lock_ref, node.swa_lock_ref)


class ComponentTree(SWARadixTree):
    """UnifiedRadixCache, with or without SWA: nodes have components."""

    def __init__(self, cache: Any, mapping: Any) -> None:
        super().__init__(cache, mapping)
        kinds = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache").ComponentType
        self._kinds = kinds
        self._full = kinds.FULL
        self._swa = kinds.SWA
        self.has_states = optional(kinds, "ComponentType.MAMBA") in optional(
            cache, "UnifiedRadixCache.tree_components", ()
        )

    def sizes(self) -> TreeSizes:
        if self.mapping is None:
            return ReleaseTree.sizes(self)
        return super().sizes()

    def _node(self, node: Any, path: list[int]) -> NodeView:
        kv = self._kv(node, path)
        if self.has_states:
            state = node.component_data[self._kinds.MAMBA]
            kv.state = None if state.value is None else int(state.value)
            kv.state_locks = state.lock_ref
        return kv

    def _kv(self, node: Any, path: list[int]) -> NodeView:
        full = node.component_data[self._full]
        if self.mapping is None:
            return NodeView(path, full.value.tolist(), (), full.lock_ref, 0)
        swa = node.component_data[self._swa]
        slots = () if swa.value is None else swa.value.tolist()
        return NodeView(path, full.value.tolist(), slots, full.lock_ref, swa.lock_ref)


class NumberedTree(ComponentTree):
    """UnifiedRadixCache that gives out numbers of nodes. An unlock needs the nodes that the lock left out."""

    @property
    def root(self) -> Any:
        return self.cache.root_node_handle()

    def reset_match(self, req: Any) -> None:
        super().reset_match(req)
        self.lock(req)

    def lock(self, req: Any) -> None:
        super().lock(req)
        req.skip_lock_node_ids = {}

    def unlock(self, req: Any) -> None:
        params = self._base.DecLockRefParams(
            swa_uuid_for_lock=req.swa_uuid_for_lock, skip_lock_node_ids=req.skip_lock_node_ids
        )
        self.cache.dec_lock_ref(req.last_node, params)


class ReceiptTree(NumberedTree):
    """UnifiedRadixCache whose lock returns the parameters of its unlock."""

    def lock(self, req: Any) -> None:
        req.lock_receipt = self.cache.inc_lock_ref(req.last_node).to_dec_params()

    def unlock(self, req: Any) -> None:
        self.cache.dec_lock_ref(req.last_node, req.lock_receipt)


class UnifiedTree(ReceiptTree):
    """UnifiedRadixCache of 0.5.23. A lock is an object, and a request keeps no slots of its matched
    prefix."""

    def __init__(self, cache: Any, mapping: Any) -> None:
        super().__init__(cache, mapping)
        self._common = importlib.import_module("sglang.srt.mem_cache.common")

    def reset_match(self, req: Any) -> None:
        req.last_node = self.cache.root_node_handle()
        self.lock(req)

    def match(self, req: Any, ids: Any) -> Tensor:
        self._common.match_kv_cache(req, self.cache, ids)
        slots: Tensor = self.cache.prefix_device_indices(req)
        return slots

    def lock(self, req: Any) -> None:
        req.lock = self.cache.lock(req.last_node)

    def unlock(self, req: Any) -> None:
        self.cache.unlock(req.lock)
        req.lock = None


# A line of TreeCore.pretty_print, such as "  [7] 4 full_lock=1": a node's number, its tokens, its locks on
# full KV. The root has no tokens.
_PRINTED_NODE = re.compile(r"\[(\d+)\] [1-9]\d* full_lock=(\d+)")


class _Rust(NumberedTree):
    """A tree with its core in Rust, which hands out no nodes. They are read from what the core prints, and
    from what it returns for a node's number.

    The core says whether a node's SWA KV is locked, not how often: the view then shows the locks on its full
    KV. The core does not say how many locks a state has: the view shows none.
    """

    def nodes(self) -> Iterator[NodeView]:
        """Yield the nodes of the tree in Rust, parents before children, as the core prints them."""
        core = self.cache.tree_core
        core.backfill_missing_hash_values()  # the core takes snapshots of hashed nodes only
        without_swa_lock = set(
            core.walk_for_kv_canary(
                unlocked_only=True, swa_resident_only=True
            ).slot_indices.tolist()
        )
        paths: dict[int, list[int]] = {}
        for number, locks in _PRINTED_NODE.findall(captured_stdout(core.pretty_print)):
            node = int(number)
            full_locks = int(locks)
            snapshot = core.snapshot_buffer_backup(node, False)
            path = paths[node] = [
                *paths.get(snapshot.parent_node_id, []),
                *elements_of(snapshot.key),
            ]
            full = core.get_component_device_value(node, self._full).tolist()
            swa = None if self.mapping is None else core.get_component_device_value(node, self._swa)
            swa_locks = 0 if swa is None or full[0] in without_swa_lock else max(1, full_locks)
            node_view = NodeView(path, full, () if swa is None else swa.tolist(), full_locks, swa_locks)
            if self.has_states:
                state = core.get_component_device_value(node, self._kinds.MAMBA)
                node_view.state = None if state is None else int(state)
            yield node_view


class RustNumberedTree(_Rust, NumberedTree): ...


class RustReceiptTree(_Rust, ReceiptTree): ...


class RustUnifiedTree(_Rust, UnifiedTree): ...


def captured_stdout(action: Callable[[], None]) -> str:
    """Return what `action` writes to file descriptor 1, past Python's own stdout."""
    original = os.dup(1)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 1)
            action()
            file.seek(0)
            return file.read().decode()
    finally:
        os.dup2(original, 1)
        os.close(original)
