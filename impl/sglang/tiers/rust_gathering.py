"""The facts of a tree whose core is in Rust, with its host tier: what that core tells of its nodes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from impl.sglang.parts.stand_ins import Bag
from impl.sglang.parts.trees import printed
from impl.sglang.tiers.gathering import Gatherer, slots_of
from reference.tiers.facts import TierNode

# How deep a node is, its handle, how many tokens its key has, its locks.
_NODE = re.compile(r"^( *)\[(\d+)\] (\d+) full_lock=(\d+)", re.MULTILINE)


class _Place(NamedTuple):
    """A node, the position after its last token, and the hash of its last page."""

    node: int
    end: int
    hashed: str | None = None


_ROOT = _Place(0, 0)


class RustGatherer(Gatherer):
    """The core hands out no nodes. It tells keys, KV on both tiers, and how many locks pin full KV on the
    device. It does not tell other locks, so none are given; nor marks, which are those that records name."""

    @property
    def root(self) -> int:
        number: int = self.cache.tree_core.root_node_handle()
        return number

    @cached_property
    def _key(self) -> Any:
        return importlib.import_module("sglang.srt.mem_cache.radix_cache").RadixKey

    @cached_property
    def _stores(self) -> Any:
        components: Any = importlib.import_module("sglang.srt.mem_cache.unified_cache.components")
        return components.CacheTransferPhase.BACKUP_STORAGE

    def _nodes(self) -> Iterator[TierNode]:
        core = self.cache.tree_core
        marks = {
            (record.load, node): record.ack for record in self._records() for node in record.nodes
        }
        if self.storage is None:  # else nodes are hashed as they are made
            core.backfill_missing_hash_values()  # a snapshot is given of hashed nodes only
        above: dict[int, _Place] = {}
        for line in _NODE.finditer(printed(core.pretty_print)):
            indent, handle, length, locks = map(
                int, (line.end(1) - line.start(1), *line.groups()[1:])
            )
            parent = above.get(indent - 2, _ROOT)
            if not length:
                above[indent] = _ROOT
                continue
            number, key = self.nodes.of(handle), self._shown(handle)
            above[indent] = _Place(
                number, parent.end + length, self._last_hash(key.key, parent.hashed)
            )
            yield TierNode(
                number, parent.node, parent.end, self.stamps(key, parent.end),
                {
                    pool: slots_of(core.get_component_device_value(handle, kind))
                    for pool, kind in self.kinds.items()
                },
                self._on_host(handle), {"full": locks}, {}, marks.get((False, number), -1),
                marks.get((True, number), -1), self._hashed(core.get_hash_values(handle)),
            )  # fmt: skip

    def _last_hash(self, key: Any, before: str | None) -> str | None:
        """That of a node's last page, behind its parent's; what each stands for is known from then on."""
        if self.storage is None:
            return None
        utils: Any = importlib.import_module("sglang.srt.mem_cache.utils")
        hashes = utils.get_storage_hash_str(key, before, page_size=self.config.page_size)
        return hashes[-1] if hashes else before

    def _shown(self, handle: int) -> Any:
        """A node's key, which the core tells to whom would store it, from either tier."""
        core = self.cache.tree_core
        if (snapshot := core.snapshot_buffer_backup(handle, False)) is not None:
            return snapshot
        name, salt = core.prefetch_anchor_info(handle)
        tokens = core.build_storage_backup_spec(handle, False).token_ids
        return Bag(key=self._key(tokens, extra_key=name, is_bigram=core.is_eagle, cache_salt=salt))

    def _on_host(self, handle: int) -> dict[str, tuple[int, ...]]:
        """Slots of a node's copies, which the core tells to whom would store them."""
        core = self.cache.tree_core
        spec = core.build_storage_backup_spec(handle, False)
        found = {"full": slots_of(spec.host_value) if spec is not None else ()}
        if "swa" in self.kinds:
            (swa,) = core.build_hicache_transfers(self.kinds["swa"], handle, self._stores) or (
                None,
            )
            found["swa"] = slots_of(swa.host_indices) if swa is not None else ()
        return found
