"""Host memory: its owners, the contents of copies, and their pins (HOST)."""

from __future__ import annotations

from reference.failures import AtCount, AtTreeNode, Failure, count_text, failure
from reference.tiers.clauses.registry import clause
from reference.tiers.tier_records import HasTier
from reference.tiers.step import TierStep


@clause(
    "HOST-1",
    "host memory has one owner",
    "A slot of host memory (of vLLM a chunk, a list of slots) has one owner: a copy, the free list, once, or"
    " a transfer in flight.",
    why="Two owners overwrite each other's KV; a slot without one is lost.",
    needs=("tier",),
    rule="tiers.facts",
    source="vllm CPUOffloadingManager._free_list; sglang HostKVCache.free_slots",
    trigger=lambda s: "HOST-1" in s.clauses_reached,
)
def _slot_has_one_owner(step: HasTier) -> Failure | None:
    for room in step.rooms():
        owners = room.owners + room.free
        if owners > 1 or not (owners or room.moving):
            observed = f"{room.owned}, {count_text(room.free, 'time')} in the free list"
            return failure(f"{room.called} has one owner", observed, room.at)
    return None


@clause(
    "HOST-2",
    "a copy holds what it is named by",
    "A copy whose store has completed holds KV of exactly the tokens that its hash or its node is of, the"
    " last one included; of a recurrent group the state after the last one. So do the device slots of a node,"
    " once no load has still to write them.",
    why="Whoever matches the hash or the node reads that KV as its own.",
    needs=("tier",),
    rule="tiers.facts",
    source="vllm#54193, vllm#54288, sglang#38480",
    scope="In a group with a window or a state, blocks of a chunk that no hit needs may be left out. On a"
    " server that only decodes: full KV.",
    trigger=lambda s: "HOST-2" in s.clauses_reached,
)
def _copy_holds_its_kv(step: HasTier) -> Failure | None:
    for copy in step.copies():
        if copy.found == copy.wanted:
            continue
        first_wrong = next((i for i, (a, b) in enumerate(zip(copy.found, copy.wanted)) if a != b), None)
        if first_wrong is None:
            found = count_text(len(copy.found), "slot")
            wanted = count_text(len(copy.wanted), "token")
            return failure(copy.holds, f"{found} for {wanted}", copy.at(0))
        got = copy.another if copy.found[first_wrong] else copy.missing
        return failure(copy.holds, f"{copy.slot(first_wrong)} holds {got}", copy.at(first_wrong))
    return None


@clause(
    "HOST-3",
    "pins are the users",
    "A copy is pinned once for each load in flight that reads it, and unreadable exactly while a store"
    " writes it. A user of a tree locks a range of positions of one path, fixed when it locks; every node in"
    " the range counts it once, on each tier. A split changes no range.",
    why="A pin too few: KV is evicted under its user. One too many: it is never evicted.",
    needs=("tier",),
    rule="tiers.locks",
    source="vllm ChunkStatus.ref_cnt; sglang inc_lock_ref, inc_host_lock_ref, sglang#38138",
    scope="A tree with its core in Rust tells only the locks of full KV on the device.",
    trigger=lambda s: "HOST-3" in s.clauses_reached,
)
def _pins_are_users(step: HasTier) -> Failure | None:
    for count in step.pins():
        if count.got != count.wanted:
            return failure(f"{count.called} is {count.wanted}", f"it is {count.got}", count.at)
    return None


@clause(
    "HOST-4",
    "a reset forgets the copies",
    "After a reset no copy is kept under a hash or in a node.",
    why="Resets come with new weights: KV of the old ones must not be loaded.",
    needs=("tier",),
    rule="tiers.facts",
    source="vllm reset_connector_cache; sglang flush_cache",
    trigger=lambda s: s.resets_tier and s.kept_copy_counts[0] > 0,
)
def _reset_forgets_copies(step: HasTier) -> Failure | None:
    if not step.resets_tier or not (left := step.kept_copy_counts[1]):
        return None
    return failure("no hash in host memory", f"{left}", AtCount("host", "hashes", 0))


@clause(
    "HOST-5",
    "what has left the device is on the host",
    "A node without KV on the device has a copy on the host whose store has completed.",
    why="A match of the node promises KV that is nowhere yet, or nowhere at all.",
    rule="tiers.facts",
    source="sglang UnifiedRadixCache._demote",
    scope="Trees with a host tier.",
    trigger=lambda s: any(not node.device["full"] for node in s.after.nodes),
)
def _evicted_kv_is_on_host(step: TierStep) -> Failure | None:
    for node in step.after.nodes:
        if node.device["full"]:
            continue
        at = AtTreeNode(node.node, "full", host=True)
        expected = f"node {node.node} has left the device: its copy on the host is complete"
        if not node.host["full"]:
            return failure(expected, "it has none", at)
        if any((True, "full", slot) in step.slots_being_written for slot in node.host["full"]):
            return failure(expected, "its store is in flight", at)
    return None
