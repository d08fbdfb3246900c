"""Faults of vLLM 0.33.0: which lines become which, what sees it first, and the commands that show it.

A fault is put into the code of one function of the release that this process has loaded, and taken out again.
`python -m stateful_tests.tests.vllm.vllm_faults [NAME...]` looks for each with random runs, and prints
clauses, runs, commands, seconds, and exits with 1 if one survives; `--replay` runs the commands of all, and
the unit tests that they export as.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ci.export import engine_test
from ci.export.recorded_run import NotExportable
from impl.vllm.driver import EngineDriver
from impl.vllm.fetch import release_root
from impl.vllm.modules import RUNNER, RUNNER_V2, runner_methods
from impl.vllm.system import VLLMSystem
from reference.blocks.config import EngineConfig, LayerGroup
from reference.commands import Mode
from stateful_tests.check import driving, tiers
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.results import Trace
from stateful_tests.shrink.minimise import minimise, violated
from stateful_tests.tests.support.patched_code import patched, replaced
from stateful_tests.traces.notation import ENGINE_KINDS, format_command, parse

VERSION = "0.33.0"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
_POOL = "vllm/v1/core/block_pool.py"
_SLOTS = "vllm/v1/core/kv_cache_manager.py"
_COORDINATOR = "vllm/v1/core/kv_cache_coordinator.py"
_RUNNER_V2, _, _TABLES, _, _INPUTS = RUNNER_V2


@dataclass(frozen=True)
class ReleaseFault:
    """In `file`, `old` becomes `new`. presets: where to look; overlap: under asynchronous scheduling; v2:
    with model runner V2.

    clause: sees it first, in these commands on these sizes.
    """

    file: str
    old: str
    new: str
    presets: tuple[str, ...] = ("hybrid", "drafts")
    overlap: bool = False
    v2: bool = False
    clause: str = ""
    sizes: EngineConfig | None = None
    commands: str = ""

    def trace(self) -> Trace:
        commands = tuple(parse(line, ENGINE_KINDS) for line in self.commands.split(";"))
        return Trace(self.sizes, Mode.FAITHFUL, commands)


RELEASE_FAULTS: dict[str, ReleaseFault] = {
    "preempt-keeps-blocks": ReleaseFault(
        _SCHEDULER, "        self._free_request_blocks(request)\n       "
        " self.encoder_cache_manager.free(request)\n"
        "        self._pending_encoder_input_ids.pop(request.request_id, None)\n        self._inflight",
        "        self._inflight", ("tight", "full"),
        clause="BROKEN", sizes=EngineConfig((LayerGroup(1),), 8, 5, 1, max_seqs=1),
        commands="add r1 a2 for 1; schedule; update drafts 0; reset_cache (running); schedule",
    ),
    "window-by-optimistic-count": ReleaseFault(
        _SLOTS, "max(0, total_computed_tokens - request.num_in_flight_tokens)", "total_computed_tokens",
        ("drafts", "block1"), overlap=True,
        clause="WIN-1", sizes=EngineConfig((LayerGroup(1, 2),), 7, 6, 3, max_seqs=1, drafts=2),
        commands="add r1 +1 for 3; schedule; schedule; update drafts 0; schedule",
    ),
    "hit-covers-the-whole-prompt": ReleaseFault(
        _SLOTS, "max_cache_hit_length = request.num_tokens - 1\n        computed_blocks",
        "max_cache_hit_length = request.num_tokens\n        computed_blocks", ("full", "hybrid"),
        clause="BROKEN", sizes=EngineConfig((LayerGroup(1),), 5, 2, 2),
        commands="add r1 a1 for 1; add r2 a1 for 1; schedule",
    ),
    "hit-not-cut-to-a-common-length": ReleaseFault(
        _COORDINATOR, "            if is_simple_hybrid", "            hit_length = max(hit_length_by_group)\n"
        "            if is_simple_hybrid", ("hybrid", "unequal"),
        clause="PUB-1", sizes=EngineConfig((LayerGroup(2), LayerGroup(2, 2),), 14, 7, 6),
        commands="add r1 a1 for 2; add r2 b3 +2 for 2; schedule; update drafts 0; "
        "add r3 a2 for 1 (session); schedule; update drafts 0; more r3 a4 +1 for 1; schedule; "
        "update drafts 0; add r1 b3 for 1; schedule",
    ),
    "windows-are-taken-for-one": ReleaseFault(
        _COORDINATOR, "                    group.spec == spec\n",
        "                    type(group.spec) is type(spec)\n", ("two-windows",),
        clause="HIT-1", sizes=EngineConfig((LayerGroup(1, 2), LayerGroup(1, 3)), 18, 4, 3, max_seqs=2),
        commands="add r1 a2 for 1; add r2 a3 for 1; schedule",
    ),
    "hit-needs-a-block-less": ReleaseFault(
        _MANAGER, "blocks = cdiv(window_size - 1, block_size)",
        "blocks = cdiv(window_size - 1, block_size) - 1",
        ("window", "hybrid", "unequal"),
        clause="HIT-1", sizes=EngineConfig((LayerGroup(1, 4),), 11, 6, 5),
        commands="add r1 a3 for 1; add r2 a4 for 1; schedule",
    ),
    "block-freed-twice": ReleaseFault(
        _MANAGER, "            freed.append(blocks[i])\n            blocks[i] = self._null_block\n "
        "       if freed:\n"
        "            self.block_pool.free_blocks(freed)\n\n    def remove_skipped",
        "            freed += [blocks[i]] * 2\n            blocks[i] = self._null_block\n        if freed:\n"
        "            self.block_pool.free_blocks(freed)\n\n    def remove_skipped", ("window", "hybrid"),
        clause="BLK-1", sizes=EngineConfig((LayerGroup(2, 1),), 5, 5, 3, max_seqs=1),
        commands="add r1 a3 for 2; schedule; update drafts 0; schedule",
    ),
    "touch-leaves-it-free": ReleaseFault(
        _POOL, "            if block.ref_cnt == 0:\n                self.free_block_queue.remove(block)\n",
        "",
        clause="BLK-2", sizes=EngineConfig((LayerGroup(1),), 7, 3, 2, max_seqs=1),
        commands="add r1 a1 for 1; schedule; update drafts 0; add r2 a2 for 1; schedule",
    ),
    "touch-counts-nobody": ReleaseFault(
        _POOL, "            block.ref_cnt += 1\n            if self.metrics_collector:\n"
        "                self.metrics_collector.on_block_accessed", "            if self.metrics_collector:\n"
        "                self.metrics_collector.on_block_accessed",
        clause="BLK-1", sizes=EngineConfig((LayerGroup(1),), 7, 3, 2),
        commands="add r1 a1 for 1; add r2 a2 for 1; schedule",
    ),
    "reuse-keeps-the-hash": ReleaseFault(
        _POOL, "                self._maybe_evict_cached_block(block)\n                assert",
        "                assert",
        clause="PUB-1", sizes=EngineConfig((LayerGroup(2), LayerGroup(2),), 10, 8, 4),
        commands="add r1 a1 +1 for 3; schedule; update drafts 0; add r2 a3 for 1 (session); schedule; "
        "update drafts 0; more r2 a4 for 1; schedule; update drafts 0; schedule",
    ),
    "eviction-leaves-the-map": ReleaseFault(
        _POOL, "                self.cached_block_hash_to_block.pop(block_hash, block.block_id)\n",
        "                self.cached_block_hash_to_block.get_one_block(block_hash)\n",
        clause="PUB-2", sizes=EngineConfig((LayerGroup(1), LayerGroup(1),), 14, 7, 6),
        commands="add r1 +1 for 1; add r2 a2 for 1 (session); schedule; update drafts 0; "
        "more r2 a4 +1 for 1; schedule",
    ),
    "window-a-token-short": ReleaseFault(
        _MANAGER, "            num_computed_tokens - self.sliding_window + 1 - self.extra_retained_tokens,",
        "            num_computed_tokens - self.sliding_window + 2 - self.extra_retained_tokens,",
        ("window", "block1"),
        clause="READ-3", sizes=EngineConfig((LayerGroup(1, 3),), 8, 4, 3, max_seqs=1),
        commands="add r1 a2 for 1 (session); schedule; update drafts 0; more r1 a1 for 1; schedule",
    ),
    "rejected-drafts-count": ReleaseFault(
        _SCHEDULER, "                        request.num_computed_tokens -= num_rejected\n",
        "                        pass\n", ("drafts", "eagle"),
        clause="RUN-2", sizes=EngineConfig((LayerGroup(2),), 8, 5, 2, max_seqs=1, drafts=1),
        commands="add r1 a1 for 3; schedule; update drafts 1; schedule; update drafts 1; schedule",
    ),
    "in-flight-never-settles": ReleaseFault(
        _SCHEDULER, "                request.num_in_flight_tokens -= num_tokens_scheduled\n", "",
        clause="BROKEN", sizes=EngineConfig((LayerGroup(1),), 8, 3, 2, max_seqs=1),
        commands="add r1 a1 for 1 (session); schedule; update drafts 0; more r1 a2 for 1; schedule; "
        "update drafts 0",
    ),
    "reset-keeps-hashes": ReleaseFault(
        _POOL, "        for block in self.blocks:\n            block.reset_hash()\n", "", ("full", "hybrid"),
        clause="PUB-2", sizes=EngineConfig((LayerGroup(1),), 2, 2, 1, max_seqs=1),
        commands="add r1 +1 for 1; schedule; update drafts 0; reset_cache",
    ),
    "free-keeps-a-counter": ReleaseFault(
        _MANAGER, "        self.num_cached_block.pop(request_id, None)\n        self._partial_hit_reqs",
        "        self._partial_hit_reqs",
        clause="BLK-4", sizes=EngineConfig((LayerGroup(1),), 5, 2, 1, max_seqs=1),
        commands="add r1 +1 for 1; schedule; update drafts 0",
    ),
    "one-output-too-many": ReleaseFault(
        "vllm/v1/core/sched/utils.py", "or request.num_output_tokens >= request.max_tokens",
        "or request.num_output_tokens > request.max_tokens",
        clause="TXT-2", sizes=EngineConfig((LayerGroup(1),), 5, 3, 1, max_seqs=1),
        commands="add r1 a1 for 1; schedule; update drafts 0",
    ),
    "turn-resumes-at-the-optimistic-count": ReleaseFault(
        _SCHEDULER, "safe_frontier = request.num_computed_tokens - request.num_output_placeholders",
        "safe_frontier = request.num_computed_tokens", ("full", "drafts"), overlap=True,
        clause="BROKEN", sizes=EngineConfig((LayerGroup(1),), 14, 6, 3, max_seqs=1, drafts=1),
        commands="add r1 +1 for 3 (session); schedule; schedule accept 1; update drafts 0; schedule; "
        "update drafts 0; more r1 +1 for 1",
    ),
    "trimmed-tokens-count": ReleaseFault(
        _SCHEDULER, "                    request.num_computed_tokens -= len(new_token_ids) - num_new\n",
        "                    pass\n", ("drafts", "eagle"),
        clause="BROKEN", sizes=EngineConfig((LayerGroup(1),), 5, 4, 2, max_seqs=1, drafts=1),
        commands="add r1 a1 for 2 (session); schedule; update drafts 1; schedule accept 1; "
        "update drafts 0; more r1 +1 for 1",
    ),
    "session-keeps-its-tail": ReleaseFault(
        _SCHEDULER, "        del session._all_token_ids[keep_end:]\n", "", ("full", "hybrid"),
        clause="TXT-3", sizes=EngineConfig((LayerGroup(1),), 6, 2, 1, max_seqs=1),
        commands="add r1 a1 for 1 (session); schedule; update drafts 0; more r1 +1 for 1",
    ),
    "session-keeps-its-hashes": ReleaseFault(
        _SCHEDULER, "        del session.block_hashes[keep_end // self.hash_block_size :]\n", "", ("full",
        "block1"),
        clause="PUB-1", sizes=EngineConfig((LayerGroup(1),), 8, 2, 1, max_seqs=1),
        commands="add r1 a1 for 1 (session); schedule; update drafts 0; more r1 a1 for 1; schedule",
    ),
    "past-max-model-len": ReleaseFault(
        _SCHEDULER, "                self.max_model_len\n                - request.num_computed_tokens\n"
        "                - self.num_sampled_tokens_per_step,\n",
        "                self.max_model_len\n                - request.num_computed_tokens\n"
        "                + self.num_spec_tokens,\n", ("drafts", "block1"),
        clause="RUN-1", sizes=EngineConfig((LayerGroup(2),), 8, 6, 6, drafts=2),
        commands="add r1 a4 for 5; schedule; update; schedule",
    ),
    "a-block-too-few": ReleaseFault(
        _MANAGER, "        num_required_blocks = cdiv(num_tokens, self.block_size)\n       "
        " num_new_blocks = num_req",
        "        num_required_blocks = num_tokens // self.block_size\n        num_new_blocks = num_req",
        clause="READ-3", sizes=EngineConfig((LayerGroup(2),), 3, 2, 1, max_seqs=1),
        commands="add r1 +1 for 1; schedule",
    ),
    "worker-appends-to-a-resumed-table": ReleaseFault(
        RUNNER, "                req_state.block_ids = new_block_ids\n",
        "                req_state.block_ids = tuple(a + b for a, b in zip(req_state.block_ids,"
        " new_block_ids))\n",
        ("tight", "full"),
        clause="PUB-1", sizes=EngineConfig((LayerGroup(1),), 8, 5, 1, max_seqs=1),
        commands="add r1 a2 for 1; schedule; update drafts 0; reset_cache (running); schedule",
    ),
    "session-text-lost-in-the-worker": ReleaseFault(
        RUNNER, "        req_state.output_token_ids.clear()\n", "        pass\n", ("full", "hybrid"),
        clause="RUN-3", sizes=EngineConfig((LayerGroup(1),), 6, 2, 1, max_seqs=1),
        commands="add r1 a1 for 1 (session); schedule; update drafts 0; more r1 +1 for 1; schedule",
    ),
    "worker-forgets-blocks-of-drafts": ReleaseFault(
        RUNNER,
        "            if new_block_ids is not None:\n                self.input_batch.block_table.append_row",
        "            if new_block_ids is not None and not scheduled_spec_tokens.get(req_id):\n"
        "                self.input_batch.block_table.append_row", ("drafts", "block1"),
        clause="BLK-5", sizes=EngineConfig((LayerGroup(2),), 8, 10, 6, drafts=1),
        commands="add r1 +3 for 3; schedule; update drafts 1; schedule",
    ),
    "a-token-is-not-delivered": ReleaseFault(
        _SCHEDULER, "                        new_token_ids=new_token_ids,\n",
        "                        new_token_ids=new_token_ids[1:],\n", ("drafts", "full"),
        clause="TXT-1", sizes=EngineConfig((LayerGroup(1),), 3, 2, 1, max_seqs=1),
        commands="add r1 +1 for 1; schedule; update drafts 0",
    ),
    "one-request-too-few": ReleaseFault(
        _SCHEDULER, "                if num_running >= self.max_num_active_reqs:\n",
        "                if num_running + 1 >= self.max_num_active_reqs:\n", ("full", "hybrid"),
        clause="RUN-4", sizes=EngineConfig((LayerGroup(2),), 8, 6, 6, max_seqs=1),
        commands="add r1 a4 for 1; schedule",
    ),
    "hit-of-another-group": ReleaseFault(
        _POOL, "                block_hash, group_id\n            )\n            block = self",
        "                block_hash, 0\n            )\n            block = self", ("hybrid", "uncached"),
        clause="BLK-3", sizes=EngineConfig((LayerGroup(1), LayerGroup(1),), 14, 4, 3),
        commands="add r1 a1 for 1; add r2 a2 for 1; schedule",
    ),
    "reset-that-forgets-nothing": ReleaseFault(
        _POOL, "        # Remove all hashes so that no new blocks will hit.\n",
        "        return True\n", ("full", "hybrid"),
        clause="PUB-3", sizes=EngineConfig((LayerGroup(1),), 2, 2, 1, max_seqs=1),
        commands="add r1 +1 for 1; schedule; update drafts 0; reset_cache",
    ),
    "rejected-drafts-count-twice": ReleaseFault(
        _SCHEDULER, "                        request.num_computed_tokens -= num_rejected\n",
        "                        request.num_computed_tokens -= 2 * num_rejected\n", ("drafts", "eagle"),
        clause="WIN-2", sizes=EngineConfig((LayerGroup(1),), 8, 4, 2, max_seqs=1, drafts=1),
        commands="add r1 +1 for 3; schedule; update drafts 1; schedule; update drafts 0",
    ),
    "worker-resumes-on-its-old-table": ReleaseFault(
        RUNNER, "                req_state.block_ids = new_block_ids\n", "                pass\n",
        ("uncached",),
        clause="READ-4", sizes=EngineConfig((LayerGroup(2),), 8, 10, 10, caching=False, chunked=False),
        commands="add r1 a3 for 4; schedule; update; reset_cache (running); add r2 b3 for 4; schedule",
    ),
    "v2-table-keeps-old-blocks": ReleaseFault(
        _TABLES, "self.num_blocks.np[i, req_index] if not overwrite else 0",
        "self.num_blocks.np[i, req_index]", ("full", "hybrid"), v2=True,
        clause="PUB-1", sizes=EngineConfig((LayerGroup(2),), 6, 5, 3, max_seqs=1),
        commands="add r1 a1 for 1; schedule; update drafts 0; add r2 a3 for 1; schedule",
    ),
    "v2-rejected-drafts-count": ReleaseFault(
        _INPUTS, "computed_delta = query_len - num_rejected", "computed_delta = query_len",
        ("drafts", "eagle"), v2=True,
        clause="RUN-2", sizes=EngineConfig((LayerGroup(1),), 7, 4, 2, max_seqs=1, drafts=1),
        commands="add r1 a1 for 3; schedule; update drafts 0; schedule; update drafts 0; schedule",
    ),
    "v2-window-nulled-too-far": ReleaseFault(
        _TABLES, "tl.maximum(first_pos - reach, 0)", "tl.maximum(first_pos - reach + 1, 0)",
        ("window", "block1"), v2=True,
        clause="READ-3", sizes=EngineConfig((LayerGroup(2, 3),), 5, 5, 3, max_seqs=1),
        commands="add r1 a4 for 1; schedule; update drafts 0; schedule",
    ),
    "v2-next-turn-takes-another-row": ReleaseFault(
        _RUNNER_V2, "            # with the updated prompt_token_ids and mm_features.\n"
        "            self._remove_request(req_id)\n", "", ("full", "hybrid"), v2=True,
        clause="BROKEN", sizes=EngineConfig((LayerGroup(1),), 6, 4, 1, max_seqs=1),
        commands="add r1 a1 for 1 (session); schedule; update drafts 0; more r1 +1 for 1; schedule",
    ),
    "v2-sampled-token-is-not-kept": ReleaseFault(
        _INPUTS, "tl.store(last_sampled_tokens_ptr + req_state_idx, token_id)", "pass", v2=True,
        clause="RUN-3", sizes=EngineConfig((LayerGroup(1),), 6, 3, 1, max_seqs=1),
        commands="add r1 +1 for 2; schedule; update drafts 0; schedule",
    ),
}  # fmt: skip


class Loaded(EngineDriver):
    """The release in this process, into which a fault can be put."""

    name, capabilities = f"vllm=={VERSION}", VLLMSystem.capabilities

    @contextmanager
    def faulty(self, fault: ReleaseFault) -> Iterator[None]:
        """With the fault."""
        path = self._root / fault.file
        if fault.file == RUNNER:
            was = self._methods
            with tempfile.TemporaryDirectory() as folder:
                (file := Path(folder, fault.file)).parent.mkdir(parents=True)
                file.write_text(replaced(path, fault.old, fault.new), encoding="utf-8")
                self._methods = runner_methods(Path(folder))
            yield
            self._methods = was
            return
        with patched(path, fault.file.removesuffix(".py").replace("/", "."), fault.old, fault.new):
            yield


def look_for(system: Loaded, fault: ReleaseFault, runs: int = 60) -> tuple[Trace | None, int, int]:
    """The first run of the fault's presets that violates what the release does not; runs and commands."""
    plan, ran, commands = tiers.plan("smoke", presets=fault.presets, examples=runs), 0, 0
    for example in range(runs):
        for preset in fault.presets:
            cell = driving.Cell(tiers.CLIENTS, preset, Mode.FAITHFUL)
            with system.faulty(fault):
                driven = driving.drive(system, plan, driving.Stint(cell, range(example, example + 1)))
            [(count, met)] = driven.runs
            ran, commands = ran + 1, commands + count
            for violation, trace in met:
                if violated(system, trace, violation.clause) == ():
                    return trace, ran, commands
    return None, ran, commands


def replayed() -> dict[str, Any]:
    """What sees each fault in its commands, what is seen of them without it, and what its unit test comes to:
    how it ends with the fault and without, or why there is none."""
    found = {}
    for name, fault in RELEASE_FAULTS.items():
        system, trace = _loaded(fault.overlap, fault.v2), fault.trace()
        with system.faulty(fault):
            seen = replay(system, trace).violation
            text, ends = _exported(system, trace), []
            ends += [_tested(text)]
        healthy = replay(system, trace).violation
        found[name] = *(v and [*v.clauses, v.observed] for v in (seen, healthy)), [*ends, _tested(text)]
    return found


def _exported(system: Any, trace: Trace) -> str:
    try:
        return engine_test.unit_test(trace, "trace.json", system)
    except NotExportable as why:
        return f"# {why}"


def _tested(text: str) -> str:
    """How an exported test ends in this process."""
    if text.startswith("#"):
        return text
    space: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), space)
    case = next(kind for kind in space.values() if isinstance(kind, type) and kind.__module__ == "exported"
                and issubclass(kind, unittest.TestCase))  # fmt: skip
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if result.errors:
        return result.errors[0][1]
    return "fails" if result.failures else "passes"


@cache
def _loaded(overlap: bool, v2: bool) -> Loaded:
    logging.disable(logging.CRITICAL)
    return Loaded(release_root(VERSION, v2=True), overlap, v2)


def main(names: list[str]) -> int:
    if names == ["--replay"]:
        print(json.dumps(replayed()))
        return 0
    survivors = 0
    for name in names or RELEASE_FAULTS:
        fault, began = RELEASE_FAULTS[name], time.monotonic()
        system = _loaded(fault.overlap, fault.v2)
        trace, ran, commands = look_for(system, fault)
        said, smallest = "survives", trace
        if trace is None:
            survivors += 1
        else:
            with system.faulty(fault):
                first = replay(system, trace).violation
                assert first is not None
                said = ", ".join(first.clauses)
                smallest = minimise(system, trace, first.clause, budget=300)
        took = time.monotonic() - began
        print(f"| {name} | {said} | {ran} | {commands} | {took:.1f} |", flush=True)
        if smallest is not None and smallest is not trace:
            shown = "; ".join(map(format_command, smallest.commands))
            print(name, first.clause, smallest.geometry, shown, sep=" | ", file=sys.stderr)
    return min(1, survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
