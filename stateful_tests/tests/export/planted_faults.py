"""Faults that no release has: what puts each into a checkout of one, and the commands that show it.

A fault shows in caches of one page size alone, so all of them fit into one checkout. No run that is drawn
has these page sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reference.commands import (
    Admit, CheckBusy, Chunk, Command, Decode, Evict, Extend, Finish, Mode, Open, Piece, Submit,
)  # fmt: skip
from reference.geometry import Geometry
from stateful_tests.lockstep.results import Trace

# Appended to a module; a fault is given what it takes the place of.
_GATE = """

def _at_page_size(size, kind, name, fault):
    right = getattr(kind, name)

    def run(this, *args, **kwargs):
        cache = getattr(this, "tree_core", None) or getattr(this, "tree_cache", None) or this
        if cache.page_size == size:
            return fault(right, this, *args, **kwargs)
        return right(this, *args, **kwargs)

    setattr(kind, name, run)
"""
OLD, NEW = "0.5.10", "0.5.23"
TREE, CORE, UNIFIED, SWA = (
    f"mem_cache/{name}.py:{kind}"
    for name, kind in (
        ("swa_radix_cache", "SWARadixCache"), ("unified_cache/unified_tree_core", "UnifiedTreeCore"),
        ("unified_radix_cache", "UnifiedRadixCache"), ("unified_cache/components/swa", "SWAComponent"),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A fault at one page size, and what shows it.

    places: release -> `file:class.method`; faults: the function that is put there, by release or for all.
    window: in pages.
    """

    clause: str
    page_size: int
    places: dict[str, str]
    faults: str | dict[str, str]
    commands: tuple[Command, ...]
    window: int | None = 1
    tree: bool = True

    def trace(self) -> Trace:
        size = self.page_size
        window = None if self.window is None else self.window * size
        always = (("SGLANG_SWA_EVICTION_INTERVAL", "1"),)  # rounds sweep
        geometry = Geometry(size, window, 8, 0 if window is None else 8, 3, 4 * size, self.tree, always)
        return Trace(geometry, Mode.FAITHFUL, self.commands, clause=self.clause)


def plant(release: str, checkout: Path) -> None:
    """Put all faults of this release into a checkout of it."""
    for fault in PLANTED:
        if release in fault.places:
            file, _, name = fault.places[release].partition(":")
            body = fault.faults if isinstance(fault.faults, str) else fault.faults[release]
            kind, _, method = name.partition(".")
            module = checkout / "sglang" / "srt" / file
            text = module.read_text(encoding="utf-8")
            gate = "" if _GATE in text else _GATE
            put = f"_at_page_size({fault.page_size}, {kind}, {method!r}, fault)"
            module.write_text(f"{text}{gate}\n\n{body}\n\n\n{put}\n", encoding="utf-8")


def _prefill(request: str, tokens: int) -> tuple[Command, ...]:
    """An ordinary request is prefilled."""
    prompt = (Piece("a", tokens),)
    return Submit(request, None, 0, 0, prompt), Admit(request), Extend((Chunk(request, tokens),))


def _parting(tokens: int, length: int) -> tuple[Command, ...]:
    """Another prompt has so many tokens of the first in common, and is matched."""
    return Submit("r2", None, 1, 0, (Piece("a", tokens), Piece("b", length - tokens))), Admit("r2")


def _turn(tokens: int) -> tuple[Command, ...]:
    return Open("s1"), Submit("r1", "s1", tokens), Admit("r1"), Extend((Chunk("r1", tokens),))


_POOLS = {
    OLD: "mem_cache/swa_memory_pool.py:SWATokenToKVPoolAllocator.alloc_extend",
    NEW: "mem_cache/allocator/swa.py:SWATokenToKVPoolAllocator.alloc_extend",
}
_PAGES = {
    OLD: "mem_cache/allocator.py:PagedTokenToKVPoolAllocator.alloc_extend",
    NEW: "mem_cache/allocator/paged.py:PagedTokenToKVPoolAllocator.alloc_extend",
}
_BATCH = dict.fromkeys((OLD, NEW), "managers/schedule_batch.py:ScheduleBatch")
_COMMITS = """def fault(right, this, *args):
    right(this, *args)
    this.{}.kv_committed_len += 1"""
_FREES = """def fault(right, this, *args):
    for req in this.reqs:
        row = this.req_to_token_pool.req_to_token[{}.req_pool_idx, :26]
        this.token_to_kv_pool_allocator.free(row.to(torch.int64))
    right(this, *args)"""
PLANTED = (
    Planted(
        "TREE-1", 6, {OLD: f"{TREE}._split_node", NEW: f"{CORE}._split_node"},
        "def fault(right, this, key, child, length):\n    return right(this, key, child, length - 1)",
        (*_prefill("r1", 12), *_parting(6, 12)), window=2,
    ),
    Planted(
        "TREE-2", 7, {NEW: f"{SWA}.redistribute_on_node_split"},
        "def fault(right, this, new_parent, child):\n"
        "    right(this, new_parent, child)\n"
        "    data = [node.component_data[this.component_type] for node in (new_parent, child)]\n"
        "    data[1].value = data[0].value",
        (*_prefill("r1", 14), *_parting(7, 14)), window=2,
    ),
    Planted(
        "TREE-3", 9, {OLD: f"{TREE}._add_new_node", NEW: f"{CORE}._add_new_node"},
        "def fault(right, this, parent, key, value, *args, **kwargs):\n"
        "    return right(this, parent, key, value.roll(9), *args, **kwargs)",
        _prefill("r1", 18), window=2,
    ),
    Planted(
        "TREE-4", 14, {NEW: f"{UNIFIED}.checkpoint_into_tree"},
        "def fault(right, this, req, **kwargs):\n"
        "    row = this.req_to_token_pool.req_to_token[req.kv.req_pool_idx]\n"
        "    kept = row.clone()\n"
        "    right(this, req, **kwargs)\n"
        "    row[:] = kept",
        (*_prefill("r1", 14)[:2], *_prefill("r2", 14), Extend((Chunk("r1", 14),))),
    ),
    Planted(
        "TREE-5", 10, {OLD: f"{TREE}._match_prefix_helper", NEW: f"{CORE}._match_prefix_helper"},
        {
            OLD: "def fault(right, this, key):\n"
            "    return right(this, key) if len(key) == 10 else ([], this.root_node, 0)",
            NEW: "def fault(right, this, key, params):\n"
            "    return right(this, key, params) if len(key) == 10 else this.empty_match_result",
        },
        (*_prefill("r1", 10), *_parting(10, 20)),
    ),
    Planted(
        "TREE-7", 15, {NEW: f"{SWA}._maybe_split_leaf_for_swa_lock"},
        "def fault(right, this, *_):\n    return None",
        _prefill("r1", 30),
    ),
    Planted(
        "TREE-8", 11, {OLD: f"{TREE}.evict", NEW: f"{UNIFIED}.evict"},
        {
            OLD: "def fault(right, this, params):\n"
            "    for node in this.root_node.children.values():\n"
            "        this.token_to_kv_pool_allocator.free_swa(node.value)\n"
            "        node.swa_tombstone = True\n"
            "    return EvictResult(0, 11)",
            NEW: "def fault(right, this, params):\n"
            "    for node in this.root_node.children.values():\n"
            "        data = node.component_data\n"
            "        this.token_to_kv_pool_allocator.free_swa(data[ComponentType.FULL].value)\n"
            "        data[ComponentType.SWA].value = None\n"
            "    return EvictResult(0, 11)",
        },
        (*_prefill("r1", 11), Evict(0, 11)),
    ),
    Planted(
        "TREE-9", 12, {OLD: f"{TREE}._add_new_node", NEW: f"{CORE}._add_new_node"},
        {
            OLD: "def fault(right, this, *args, **kwargs):\n"
            "    this.swa_evictable_size_ += 1\n"
            "    return right(this, *args, **kwargs)",
            NEW: "def fault(right, this, *args, **kwargs):\n"
            "    this.component_evictable_size_[ComponentType.SWA] += 1\n"
            "    return right(this, *args, **kwargs)",
        },
        _prefill("r1", 12),
    ),
    Planted(
        "TREE-10", 13, {NEW: f"{UNIFIED}.evict"},
        "def fault(right, this, params):\n    right(this, params)\n    return EvictResult()",
        (*_prefill("r1", 13), Finish("r1", 1), Evict(13)),
    ),
    Planted(
        "OWN-1", 17, _PAGES,
        "def fault(right, this, *args, **kwargs):\n"
        "    slots = right(this, *args, **kwargs)\n"
        "    this.free_pages = torch.cat([this.free_pages, slots[:1] // 17])\n"
        "    return slots",
        _prefill("r1", 17), window=None, tree=False,
    ),
    Planted(
        "OWN-2", 18, _PAGES,
        "def fault(right, this, *args, **kwargs):\n"
        "    this.free_pages = torch.cat([this.free_pages, this.free_pages[-1:]])\n"
        "    return right(this, *args, **kwargs)",
        _prefill("r1", 18), window=None, tree=False,
    ),
    Planted(
        "OWN-5", 19, _PAGES,
        "def fault(right, this, *args, **kwargs):\n    return right(this, *args, **kwargs).flip(0)",
        _prefill("r1", 19), window=None, tree=False,
    ),
    Planted(
        "MAP-1", 20, _POOLS,
        "def fault(right, this, *args, **kwargs):\n"
        "    slots, mapping = right(this, *args, **kwargs), this.full_to_swa_index_mapping\n"
        "    mapping[slots] = mapping[slots].flip(0)\n"
        "    return slots",
        _prefill("r1", 20), tree=False,
    ),
    Planted(
        "MAP-2", 21, _POOLS,
        "def fault(right, this, *args, **kwargs):\n"
        "    slots = right(this, *args, **kwargs)\n"
        "    this.full_to_swa_index_mapping[slots] = 0\n"
        "    return slots",
        _prefill("r1", 21), tree=False,
    ),
    Planted(
        "SWA-1", 22, {version: f"{place}._evict_swa" for version, place in _BATCH.items()},
        "def fault(right, this, req, pre_len, **kwargs):\n    right(this, req, pre_len + 44, **kwargs)",
        (*_prefill("r1", 60), Decode(("r1",)), Decode(("r1",))), tree=False,
    ),
    Planted(
        "LEN-1", 23, {version: f"{place}.prepare_for_decode" for version, place in _BATCH.items()},
        {version: _COMMITS.format(held) for version, held in ((OLD, "reqs[0]"), (NEW, "reqs[0].kv"))},
        (*_prefill("r1", 23), Decode(("r1",))), tree=False,
    ),
    Planted(
        "FREE-1", 26, {version: f"{place}.prepare_for_decode" for version, place in _BATCH.items()},
        {version: _FREES.format(held) for version, held in ((OLD, "req"), (NEW, "req.kv"))},
        (*_prefill("r1", 30), Decode(("r1",))), tree=False,
    ),
    Planted(
        "CHK-2", 24, {OLD: "mem_cache/session_aware_cache.py:SessionAwareCache.session_held_tokens"},
        "def fault(right, this, *args):\n    return right(this, *args) + 1",
        (*_turn(24), Finish("r1", 1), CheckBusy(1)), window=None, tree=False,
    ),
    Planted(
        "CHK-3", 25,
        {
            OLD: "managers/scheduler_runtime_checker_mixin.py"
            ":SchedulerRuntimeCheckerMixin.self_check_during_busy",
            NEW: "managers/scheduler_components/invariant_checker.py"
            ":SchedulerInvariantChecker.self_check_during_busy",
        },
        "def fault(right, this):\n    this.req_to_token_pool.free_slots.pop()\n    right(this)",
        (*_turn(25), CheckBusy(1)), window=None, tree=False,
    ),
)  # fmt: skip
