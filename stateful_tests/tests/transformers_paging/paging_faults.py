"""Faults of transformers 5.23.0, and what sees each: clauses by name, found by random runs on small sizes.

`python -m stateful_tests.tests.transformers_paging.paging_faults` prints them as JSON; "" is the release
as it is.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

from impl.transformers_paging.driver import PagingDriver
from impl.transformers_paging.loading import PACKAGE, TransformersSystem
from reference.commands import Mode
from stateful_tests.check import driving, tiers
from stateful_tests.tests.support.patched_code import patched

VERSION = "5.23.0"
# What is found first: file, what becomes what.
PAGING_FAULTS: dict[str, tuple[str, str, str, str]] = {
    "sharing-counts-nobody": (
        "BLK-1", "cache_allocators/cache_allocator",
        "self.shared_ref_counts[block_id] = self.shared_ref_counts.get(block_id, 1) + 1", "pass",
    ),
    "release-frees-what-is-shared": (
        "BLK-1", "cache_allocators/cache_allocator",
        "        if new_ref_count > 0:\n            return False\n", "",
    ),
    "cached-block-is-lost": (
        "BLK-1", "cache_allocators/cache_allocator", "self.cached_blocks[block_id] = None", "pass",
    ),
    "hit-covers-the-whole-prompt": (
        "HIT-1", "cache_allocators/cache_allocator", "(len(prompt_ids) - 1) // self.tokens_per_page",
        "len(prompt_ids) // self.tokens_per_page",
    ),
    "hash-is-kept-on-eviction": (
        "PUB-1", "cache_allocators/cache_allocator",
        "            block_hash = self.block_to_hash.pop(block_id)\n"
        "            self.hash_to_block.pop(block_hash)\n        return evicted",
        "            pass\n        return evicted",
    ),
    "published-a-block-too-early": (
        "PUB-1", "cache", "(tokens_in_last_block + request_len) // allocator.tokens_per_page",
        "(tokens_in_last_block + request_len) // allocator.tokens_per_page + 1",
    ),
    "duplicate-is-not-released": (
        "BLK-1", "cache_allocators/cache_allocator", "if self.ledger.release(block_id):", "if False:",
    ),
    "a-block-too-few": (
        "BROKEN", "cache_allocators/full_attention",
        "total_blocks = (total_length + self.tokens_per_page - 1) // self.tokens_per_page",
        "total_blocks = total_length // self.tokens_per_page",
    ),
    "written-a-slot-too-far": (
        "READ-3", "cache_allocators/full_attention", "start_offset = past_length % self.tokens_per_page",
        "start_offset = (past_length + 1) % self.tokens_per_page",
    ),
    "reset-loses-what-was-said": (
        "TXT-3", "requests", "initial_tokens=self.initial_tokens + self.generated_tokens,",
        "initial_tokens=self.initial_tokens,",
    ),
    "finish-keeps-blocks": (
        "BLK-1", "scheduler", "        self.cache.free_blocks(request_id)\n        self.active",
        "        self.active",
    ),
    "one-output-too-many": (
        "TXT-2", "requests", "current_len >= self._new_tokens_limit:",
        "current_len > self._new_tokens_limit:",
    ),
}  # fmt: skip


def seen(runs: int = 12) -> dict[str, str]:
    """The clause that sees each fault first, "" where none does."""
    system = PagingDriver(TransformersSystem(VERSION).root)
    plan = tiers.plan("smoke", presets=("full", "tight"), examples=runs)
    found = {}
    for name, (_, file, old, new) in {"": ("", "", "", ""), **PAGING_FAULTS}.items():
        module = f"{PACKAGE}.{file}".replace("/", ".")
        path = Path(system.root, *module.split(".")).with_suffix(".py")
        found[name] = ""
        with patched(path, module, old, new) if name else nullcontext():
            for example, preset in ((example, preset) for example in range(runs) for preset in plan.presets):
                cell = driving.Cell(tiers.CLIENTS, preset, Mode.FAITHFUL)
                stint = driving.Stint(cell, range(example, example + 1))
                [(_, met)] = driving.drive(system, plan, stint).runs
                if met:
                    found[name] = met[0][0].clause
                    break
    return found


if __name__ == "__main__":
    print(json.dumps(seen()))
