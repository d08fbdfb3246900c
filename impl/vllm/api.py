"""What the adapter uses of a vLLM; see `impl.probe`. Add a line where it starts to use something else.
Parameters and attributes tell other differences between releases (bare_scheduler.py, driver.py)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from impl import probe
from impl.adapter import UnusableImplementation
from impl.renamed import in_uses, name_of
from impl.vllm.modules import VLLM

# how an engine runs -> its name in `--impl`
WAYS = {"overlap": "async", "v2": "v2", "offloads": "offload"}
RELEASES = tuple(f"0.{minor}.0" for minor in range(11, 34))
# ruff: noqa: E501
API = """
0.11.0 ... v1/core/sched/scheduler.py | Scheduler.add_request(_); Scheduler.schedule(); Scheduler.update_from_output(_, _); Scheduler.finish_requests(_, _)
0.11.0 ... v1/core/sched/scheduler.py | Scheduler.has_requests(); Scheduler.reset_prefix_cache(); Scheduler.requests; Scheduler.kv_cache_manager
0.11.0 ... v1/core/sched/async_scheduler.py | AsyncScheduler
0.11.0 ... v1/core/kv_cache_utils.py | init_none_hash(_); get_request_block_hasher; get_block_hash(_); get_group_id(_)
0.11.0 ... v1/core/kv_cache_utils.py | KVCacheBlock.block_id; KVCacheBlock.ref_cnt; KVCacheBlock.block_hash; FreeKVCacheBlockQueue.get_all_free_blocks()
0.11.0 ... v1/core/block_pool.py | BlockPool.blocks; BlockPool.free_block_queue; BlockPool.cached_block_hash_to_block
0.11.0 ... v1/core/kv_cache_manager.py | KVCacheManager.coordinator; KVCacheManager.block_pool
0.11.0 ... v1/core/kv_cache_coordinator.py | KVCacheCoordinator.single_type_managers
0.11.0 ... v1/core/single_type_kv_cache_manager.py | SingleTypeKVCacheManager.req_to_blocks; SingleTypeKVCacheManager.num_cached_block
0.11.0 ... v1/request.py | Request.status; Request._all_token_ids; Request.num_computed_tokens; RequestStatus.FINISHED_ABORTED
0.11.0 ... v1/outputs.py | ModelRunnerOutput; DraftTokenIds
0.11.0 ... v1/kv_cache_interface.py | FullAttentionSpec; SlidingWindowSpec; KVCacheGroupSpec; KVCacheConfig(num_blocks=_, kv_cache_tensors=_, kv_cache_groups=_)
0.11.0 ... v1/worker/gpu_model_runner.py | GPUModelRunner._update_states(_)
0.12.0 ... v1/core/sched/output.py | CachedRequestData.resumed_req_ids
0.24.0 ... v1/core/block_pool.py | BlockPool.cached_block_hashes_by_block
0.24.0 ... v1/core/sched/scheduler.py | Scheduler.deferred_frees
0.29.0 ... v1/core/sched/output.py | SchedulerOutput.has_sync_kv_loads
"""
API_STATE = """
0.27.0 ... v1/kv_cache_interface.py | MambaSpec
0.27.0 ... v1/worker/mamba_utils.py | MambaBuffers.create; preprocess_mamba; postprocess_mamba_align_gpu; stage_postprocess_inputs_to_gpu
0.27.0 ... model_executor/layers/mamba/mamba_utils.py | get_conv_copy_spec; get_temporal_copy_spec; is_conv_state_dim_first
"""
API_V2 = """
0.31.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.finish_requests(_); GPUModelRunner.free_states(_); GPUModelRunner.add_requests(_)
0.31.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.update_requests(_); GPUModelRunner.gather_batch_req_state(_, _)
0.31.0 ... v1/worker/gpu/model_runner.py | GPUModelRunner.prepare_inputs(_, _, _, _); GPUModelRunner.prepare_attn(_); GPUModelRunner.postprocess_sampled(_, _, _, _, _)
0.31.0 ... v1/worker/gpu/states.py | RequestState
0.31.0 ... v1/worker/gpu/block_table.py | BlockTables
0.31.0 ... v1/worker/gpu/input_batch.py | InputBuffers; get_num_sampled_and_rejected(_, _, _, _, _)
"""
API_OFFLOAD = """
0.21.0 ... distributed/kv_transfer/kv_connector/v1/offloading_connector.py | OffloadingConnector
0.21.0 ... v1/kv_offload/cpu/manager.py | CPUOffloadingManager.lookup(_, _); CPUOffloadingManager.prepare_load(_, _)
0.22.0 ... v1/kv_offload/cpu/manager.py | CPUOffloadingManager.reset_cache()
0.21.0 ... v1/core/sched/scheduler.py | Scheduler.reset_connector_cache()
0.21.0 0.30.0 v1/kv_offload/cpu/policies/base.py | BlockStatus.ref_cnt
0.30.0 ... v1/kv_offload/cpu/policies/base.py | ChunkStatus.ref_cnt
"""
EVERY = API + API_STATE.lstrip() + API_V2.lstrip() + API_OFFLOAD.lstrip()
# What a later release calls a thing, where that is all that is new: `Class.member`, or a function or class. A
# release has the one name or the other (impl.renamed).
RENAMED: dict[str, str] = {}
# The first release that is driven so.
SINCE = {
    "session": "0.15.0",
    "offload": "0.21.0",
    "reset": "0.22.0",
    "state": "0.27.0",
    "v2": "0.31.0",
    "state+v2": "0.32.0",
}


def drives(release: str, what: str) -> bool:
    """Whether a release is driven so; one that is newer than all is."""
    known = release in RELEASES
    return RELEASES.index(release) >= RELEASES.index(SINCE[what]) if known else _later(release)


def _later(release: str) -> bool:
    numbers, newest = (
        [int(n) for n in re.findall(r"\d+", text)] for text in (release, RELEASES[-1])
    )
    return numbers > newest


def taken_for(root: Path) -> str:
    """The release that a checkout under `root` is driven as: the one that it states; where it states none
    that is driven, the one that has all the names that it has and no more, else the newest."""
    file = root / "vllm" / "_version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    stated = re.search(r"version = '(\d+\.\d+\.\d+)", text)
    if stated and stated[1] in RELEASES:
        return stated[1]
    order, table = list(RELEASES), tuple(probe.entries(in_uses(API, renamed_in(root))))
    checkout = probe.Checkout(root, "vllm", VLLM, table)
    for release in reversed(RELEASES):
        newer = [entry for entry in table if order.index(entry.since) > order.index(release)]
        later = [use for entry in newer for use in entry.uses]
        if not checkout.missing(release, order) and len(checkout.missing(order[-1], order)) == len(
            later
        ):
            return release
    return order[-1]


def renamed_in(root: Path) -> dict[str, str]:
    """Of RENAMED what the files under `root` have by the new name."""
    order = list(RELEASES)

    def lacks(name: str, table: str) -> bool:
        entries = [e for e in probe.entries(table) if any(name_of(use) == name for use in e.uses)]
        only = [
            e._replace(uses=tuple(use for use in e.uses if name_of(use) == name)) for e in entries
        ]
        return bool(probe.Checkout(root, "vllm", VLLM, only).missing(order[-1], order))

    names = {}
    for name, new in RENAMED.items():
        if lacks(name, EVERY) and not lacks(
            in_uses(name, {name: new}), in_uses(EVERY, {name: new})
        ):
            names[name] = new
    return names


def uses() -> Iterator[tuple[str, ast.expr]]:
    """Module and use, of all tables."""
    for entry in probe.entries(EVERY):
        for use in entry.uses:
            yield "vllm." + entry.file.removesuffix(".py").replace("/", "."), use


def require(root: Path, name: str, release: str, v2: bool = False, offloads: bool = False) -> None:
    """Raise UnusableImplementation that names everything that the files under `root` lack of what that
    release has. v2: for model runner V2; offloads: for its OffloadingConnector."""
    more = API_STATE.lstrip() * drives(release, "state")
    more += API_V2.lstrip() * v2 + API_OFFLOAD.lstrip() * offloads
    since = [SINCE[way] for way, wanted in (("v2", v2), ("offload", offloads)) if wanted]
    at_least = max([release if release in RELEASES else RELEASES[-1], *since], key=RELEASES.index)
    entries = tuple(probe.entries(in_uses(API + more, renamed_in(root))))
    missing = probe.Checkout(root, "vllm", VLLM, entries).missing(at_least, list(RELEASES))
    if missing:
        raise UnusableImplementation(
            f"{name} {root}: {probe.named(missing)}. Nothing was driven: CONTRIBUTING.md,"
            " 'A new release of vLLM', says how to follow it"
        )
