"""Faults to put into a copy of vLLM 0.33.0: which lines become which, and what must see it.

`python -m stateful_tests.tests.support.vllm_faults [NAME...]` measures them: clause, runs, commands, seconds.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from impl.vllm.fetch import release_root
from impl.vllm.modules import RUNNER
from impl.vllm.system import VLLMSystem
from stateful_tests.check import driving, tiers
from stateful_tests.lockstep.results import Violation
from stateful_tests.shrink.minimise import violated

VERSION = "0.33.0"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
_POOL = "vllm/v1/core/block_pool.py"
_SLOTS = "vllm/v1/core/kv_cache_manager.py"
_COORDINATOR = "vllm/v1/core/kv_cache_coordinator.py"


@dataclass(frozen=True)
class ReleaseFault:
    """In `file`, `old` becomes `new`. overlap: it takes asynchronous scheduling. presets: where to look."""

    file: str
    old: str
    new: str
    presets: tuple[str, ...] = ("hybrid", "drafts")
    overlap: bool = False


RELEASE_FAULTS: dict[str, ReleaseFault] = {
    "preempt-keeps-blocks": ReleaseFault(
        _SCHEDULER, "        self._free_request_blocks(request)\n       "
        " self.encoder_cache_manager.free(request)\n"
        "        self._pending_encoder_input_ids.pop(request.request_id, None)\n        self._inflight",
        "        self._inflight", ("tight", "full"),
    ),
    "window-by-optimistic-count": ReleaseFault(
        _SLOTS, "max(0, total_computed_tokens - request.num_in_flight_tokens)", "total_computed_tokens",
        ("drafts", "block1"), overlap=True,
    ),
    "null-block-published": ReleaseFault(
        _POOL, "if blk.is_null or (block_mask is not None", "if (block_mask is not None", ("window", "hybrid")
    ),
    "hit-covers-the-whole-prompt": ReleaseFault(
        _SLOTS, "max_cache_hit_length = request.num_tokens - 1\n        computed_blocks",
        "max_cache_hit_length = request.num_tokens\n        computed_blocks", ("full", "hybrid"),
    ),
    "hit-not-cut-to-a-common-length": ReleaseFault(
        _COORDINATOR, "            if is_simple_hybrid", "            hit_length = max(hit_length_by_group)\n"
        "            if is_simple_hybrid", ("hybrid", "unequal"),
    ),
    "hit-needs-a-block-less": ReleaseFault(
        _MANAGER, "blocks = cdiv(window_size - 1, block_size)",
        "blocks = cdiv(window_size - 1, block_size) - 1",
        ("window", "hybrid", "unequal"),
    ),
    "eviction-order": ReleaseFault(
        _POOL, "self.free_block_queue.prepend_n(blocks_to_evict_first)",
        "self.free_block_queue.append_n(blocks_to_evict_first)",
    ),
    "block-freed-twice": ReleaseFault(
        _MANAGER, "            freed.append(blocks[i])\n            blocks[i] = self._null_block\n "
        "       if freed:\n"
        "            self.block_pool.free_blocks(freed)\n\n    def remove_skipped",
        "            freed += [blocks[i]] * 2\n            blocks[i] = self._null_block\n        if freed:\n"
        "            self.block_pool.free_blocks(freed)\n\n    def remove_skipped", ("window", "hybrid"),
    ),
    "touch-leaves-it-free": ReleaseFault(
        _POOL, "            if block.ref_cnt == 0:\n                self.free_block_queue.remove(block)\n", ""
    ),
    "touch-counts-nobody": ReleaseFault(
        _POOL, "            block.ref_cnt += 1\n            if self.metrics_collector:\n"
        "                self.metrics_collector.on_block_accessed", "            if self.metrics_collector:\n"
        "                self.metrics_collector.on_block_accessed",
    ),
    "reuse-keeps-the-hash": ReleaseFault(
        _POOL, "                self._maybe_evict_cached_block(block)\n                assert",
        "                assert",
    ),
    "eviction-leaves-the-map": ReleaseFault(
        _POOL, "                self.cached_block_hash_to_block.pop(block_hash, block.block_id)\n",
        "                self.cached_block_hash_to_block.get_one_block(block_hash)\n",
    ),
    "window-a-token-short": ReleaseFault(
        _MANAGER, "            num_computed_tokens - self.sliding_window + 1 - self.extra_retained_tokens,",
        "            num_computed_tokens - self.sliding_window + 2 - self.extra_retained_tokens,",
        ("window", "block1"),
    ),
    "rejected-drafts-count": ReleaseFault(
        _SCHEDULER, "                        request.num_computed_tokens -= num_rejected\n",
        "                        pass\n", ("drafts", "eagle"),
    ),
    "in-flight-never-settles": ReleaseFault(
        _SCHEDULER, "                request.num_in_flight_tokens -= num_tokens_scheduled\n", "",
    ),
    "reset-keeps-hashes": ReleaseFault(
        _POOL, "        for block in self.blocks:\n            block.reset_hash()\n", "", ("full", "hybrid")
    ),
    "free-keeps-a-counter": ReleaseFault(
        _MANAGER, "        self.num_cached_block.pop(request_id, None)\n        self._partial_hit_reqs",
        "        self._partial_hit_reqs",
    ),
    "one-output-too-many": ReleaseFault(
        "vllm/v1/core/sched/utils.py", "or request.num_output_tokens >= request.max_tokens",
        "or request.num_output_tokens > request.max_tokens",
    ),
    "reset-delivers-stale-output": ReleaseFault(
        _SCHEDULER, "self._preempt_request(request, timestamp, drop_stale_output=True)",
        "self._preempt_request(request, timestamp)", ("full", "hybrid"), overlap=True,
    ),
    "turn-resumes-at-the-optimistic-count": ReleaseFault(
        _SCHEDULER, "safe_frontier = request.num_computed_tokens - request.num_output_placeholders",
        "safe_frontier = request.num_computed_tokens", ("full", "drafts"), overlap=True,
    ),
    "trimmed-tokens-count": ReleaseFault(
        _SCHEDULER, "                    request.num_computed_tokens -= len(new_token_ids) - num_new\n",
        "                    pass\n", ("drafts", "eagle"),
    ),
    "session-keeps-its-tail": ReleaseFault(
        _SCHEDULER, "        del session._all_token_ids[keep_end:]\n", "", ("full", "hybrid")
    ),
    "session-keeps-its-hashes": ReleaseFault(
        _SCHEDULER, "        del session.block_hashes[keep_end // self.hash_block_size :]\n", "", ("full",
        "block1")
    ),
    "past-max-model-len": ReleaseFault(
        _SCHEDULER, "                self.max_model_len\n                - request.num_computed_tokens\n"
        "                - self.num_sampled_tokens_per_step,\n",
        "                self.max_model_len\n                - request.num_computed_tokens\n"
        "                + self.num_spec_tokens,\n", ("drafts", "block1"),
    ),
    "a-block-too-few": ReleaseFault(
        _MANAGER, "        num_required_blocks = cdiv(num_tokens, self.block_size)\n       "
        " num_new_blocks = num_req",
        "        num_required_blocks = num_tokens // self.block_size\n        num_new_blocks = num_req",
    ),
    "worker-appends-to-a-resumed-table": ReleaseFault(
        RUNNER, "                req_state.block_ids = new_block_ids\n",
        "                req_state.block_ids = tuple(a + b for a, b in zip(req_state.block_ids,"
        " new_block_ids))\n",
        ("tight", "full"),
    ),
}  # fmt: skip


def faulty(name: str, folder: Path) -> VLLMSystem:
    """A copy of the release in `folder`, with the fault in it."""
    fault = RELEASE_FAULTS[name]
    shutil.copytree(release_root(VERSION), folder, dirs_exist_ok=True)
    source = (folder / fault.file).read_text(encoding="utf-8")
    assert source.count(fault.old) == 1, f"{name}: {source.count(fault.old)} places"
    (folder / fault.file).write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    return VLLMSystem(path=folder, overlap=fault.overlap)


def first_violation(name: str, folder: Path, runs: int = 60) -> tuple[Violation | None, int, int]:
    """What random runs of the fault's presets meet first that the release does not, runs and commands."""
    fault, system = RELEASE_FAULTS[name], faulty(name, folder)
    healthy = VLLMSystem(VERSION, overlap=fault.overlap)
    plan = tiers.plan("smoke", presets=fault.presets, examples=runs)
    ran = commands = 0
    try:
        for example in range(runs):
            for preset in fault.presets:
                cell = driving.Cell(tiers.CLIENTS, preset, system.capabilities.modes[0])
                driven = driving.drive(system, plan, driving.Stint(cell, range(example, example + 1)))
                [(count, violation, trace)] = driven.runs
                ran, commands = ran + 1, commands + count
                if violation is not None and trace is not None:
                    if violated(healthy, trace, violation.clause) == ():
                        return violation, ran, commands
    finally:
        system.close()
        healthy.close()
    return None, ran, commands


def main(names: list[str]) -> None:
    for name in names or RELEASE_FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            violation, ran, commands = first_violation(name, Path(folder))
            seen = "survives" if violation is None else ", ".join(violation.clauses)
            broke = violation is not None and violation.clause == "BROKEN"
            what = f" ({violation.observed[:80]})" if broke and violation is not None else ""
            took = time.monotonic() - began
            print(f"| {name} | {seen}{what} | {ran} | {commands} | {took:.0f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
