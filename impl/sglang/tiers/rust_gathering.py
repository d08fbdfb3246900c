"""The facts of a tree whose core is in Rust, with its host tier: what that core tells of its nodes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from impl.sglang.parts.stand_ins import Bag
from impl.sglang.parts.trees import captured_stdout
from impl.sglang.tiers.copy_engine import slots_of
from impl.sglang.tiers.gathering import Gatherer
from reference.tiers.facts import TierNode

_CACHE = "sglang.srt.mem_cache"
# A node as the core prints it, two columns in a generation: its handle, its tokens, its locks.
_NODE = re.compile(r"^( *)\[(\d+)\] (\d+) full_lock=(\d+)", re.MULTILINE)


class RustGatherer(Gatherer):
    """The core hands out no nodes. It tells keys, KV on both tiers, and how many locks pin full KV on the
    device. It does not tell other locks, so none are given; nor marks, which are those that records name."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        if self.storage is not None:
            core = self.core
            utils = importlib.import_module(f"{_CACHE}.utils")
            core.begin_insert = self._hashing(core.begin_insert, utils.get_storage_hash_str)

    def _note_locks(self) -> None:
        """Do nothing: a split changes no lock that the core tells of."""

    def _hashing(self, insert: Callable[[Any], Any], hashes: Callable[..., Any]) -> Any:
        """Hash the inserted tokens by our function as well, which records each hash's text."""

        def hashing(params: Any) -> Any:
            hashes(params.key, None, page_size=self.config.page_size)
            return insert(params)

        return hashing

    @property
    def root(self) -> int:
        number: int = self.core.root_node_handle()
        return number

    def _nodes(self) -> Iterator[TierNode]:
        """Yield the facts of the nodes of the tree in Rust, parents before children, as the core prints
        them."""
        core = self.core
        records = [*self._records()]
        ends: dict[int, tuple[int, int]] = {}  # by depth: the last node that was there, its end
        marks = {(record.load, node): record.ack for record in records for node in record.nodes}
        if self.storage is None:  # else nodes are hashed as they are made
            core.backfill_missing_hash_values()  # a snapshot is given of hashed nodes only
        for indent, node_name, length, locks in _NODE.findall(captured_stdout(core.pretty_print)):
            depth = len(indent) // 2
            handle = int(node_name)
            if not int(length):
                ends[depth] = 0, 0  # a root
                continue
            number = self.nodes.of(handle)
            parent, start = ends[depth - 1]
            ends[depth] = number, start + int(length)
            yield TierNode(
                number,
                parent=parent,
                start=start,
                stamps=self.stamps(self._describe_node(handle), start),
                device={
                    pool: slots_of(core.get_component_device_value(handle, kind))
                    for pool, kind in self.kinds.items()
                },
                host=self._on_host(handle),
                locks={"full": int(locks)},
                pins={},
                storing=marks.get((False, number), -1),
                loading=marks.get((True, number), -1),
                hashed=self._text_of_hashes(core.get_hash_values(handle)),
            )

    def _describe_node(self, handle: int) -> Any:
        """Return a node with its key, as the core describes it for a store from either tier."""
        core = self.core
        if (snapshot := core.snapshot_buffer_backup(handle, False)) is not None:
            return snapshot
        name, salt = core.prefetch_anchor_info(handle)
        key: Any = importlib.import_module(f"{_CACHE}.radix_cache").RadixKey
        tokens = core.build_storage_backup_spec(handle, False).token_ids
        return Bag(key=key(tokens, extra_key=name, is_bigram=core.is_eagle, cache_salt=salt))

    def _on_host(self, handle: int) -> dict[str, tuple[int, ...]]:
        """Return the host slots of a node, as the core names them for a store."""
        core = self.core
        spec = core.build_storage_backup_spec(handle, False)
        slots_by_pool = {"full": slots_of(spec.host_value) if spec is not None else ()}
        components = importlib.import_module(f"{_CACHE}.unified_cache.components")
        stored = components.CacheTransferPhase.BACKUP_STORAGE
        for pool in [*self.kinds][1:]:
            transfers = core.build_hicache_transfers(self.kinds[pool], handle, stored)
            slots_by_pool[pool] = slots_of(transfers[0].host_indices) if transfers else ()
        return slots_by_pool
