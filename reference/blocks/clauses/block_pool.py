"""The block pool: the holders of blocks, the free queue, and the hashes of the prefix cache (BLK, PUB)."""

from __future__ import annotations

from collections import Counter

from reference.blocks.clauses.step import BlockStep, clause
from reference.blocks.commands import NewWeights
from reference.tiers.commands import ResetCache
from reference.failures import AtBlock, AtChunk, AtCount, AtTable, Failure, count_text, failure


@clause(
    "BLK-1",
    "a ref count is the number of owners",
    "A block's ref count is the number of entries in tables of requests that name it.",
    why="One too few: a block that is in use is allocated again. One too many: the block is lost.",
    rule="blocks.facts",
    source="vllm KVCacheBlock.ref_cnt",
    scope="The null block is not counted.",
    trigger=lambda s: any(len(entries) > 1 for entries in s.entries.values()),
)
def _ref_count_is_owner_count(step: BlockStep) -> Failure | None:
    for block, refs in enumerate(step.after.refs):
        entries = step.entries.get(block, ())
        if block and refs != len(entries):
            holders = " and ".join(map(_holder_text, entries)) or "nobody"
            hold = "hold" if len(entries) > 1 else "holds"
            expected = f"block {block} must have ref count {len(entries)}: {holders} {hold} it"
            return failure(expected, f"block {block} has ref count {refs}", AtBlock(block))
    return None


def _holder_text(entry: tuple[str, int, int]) -> str:
    """Name the holder of a block, and its group if a table has the block."""
    name, group, _ = entry
    return f"{name} group {group}" if group >= 0 else name


@clause(
    "BLK-2",
    "the free queue has what nobody holds",
    "A block is in the free queue once if its ref count is 0, and not at all otherwise; the null block"
    " never is. A block of host memory for swapped requests is free, or of one request.",
    why=(
        "A block that is free twice, or free and owned, gets two owners. A block that is neither "
        "is lost."
    ),
    rule="blocks.facts",
    source="vllm FreeKVCacheBlockQueue",
    trigger=lambda s: len(s.after.free) < len(s.after.refs) - 1,
)
def _free_queue_has_unheld_blocks(step: BlockStep) -> Failure | None:
    times = Counter(step.after.free)
    for block, refs in enumerate(step.after.refs):
        due_times = int(block > 0 and refs == 0)
        if times[block] != due_times:
            expectation = "must be in the free queue once" if due_times else "must not be in the free queue"
            often = f" {times[block]} times" if times[block] > 1 else ""
            observed = f"the free queue {'has' if times[block] else 'lacks'} block {block}{often}"
            return failure(f"block {block} (ref count {refs}) {expectation}", observed, AtBlock(block))
    return _swap_has_unheld_blocks(step)


def _swap_has_unheld_blocks(step: BlockStep) -> Failure | None:
    """Return the failure where a block of host memory is neither free nor of one request, or both."""
    swap = step.after.swap
    if swap is None:
        return None
    owners = Counter(
        block for table in swap.tables.values() for blocks in table for block in blocks
    )
    times = Counter(swap.free)
    for block in range(1, len(swap.memory)):
        if times[block] + owners[block] != 1:
            expected = f"block {block} of host memory must be free, or of one request"
            observed = f"tables name it {count_text(owners[block], 'time')}"
            observed += f", and it is free {count_text(times[block], 'time')}"
            return failure(expected, observed, AtCount("swap", "free"))
    return None


@clause(
    "BLK-3",
    "a block serves one place",
    "All tables that name a block name it for the same group and the same part of a sequence.",
    why="Otherwise a layer reads KV of other layers or positions.",
    rule="blocks.facts",
    source="vllm KVCacheCoordinator",
    trigger=lambda s: (
        len(s.config.groups) > 1 and any(len(named) > 1 for named in s.entries.values())
    ),
)
def _block_serves_one_place(step: BlockStep) -> Failure | None:
    for block, entries in step.entries.items():
        entries = [each for each in entries if each[1] >= 0]
        if len({(group, at) for _, group, at in entries}) > 1:
            places = " and ".join(
                f"entry {at} of {name} in group {group}" for name, group, at in entries
            )
            at = (AtTable(name, group, at) for name, group, at in entries)
            return failure(
                f"block {block} must serve one place", f"it is {places}", AtBlock(block), *at
            )
    return None


@clause(
    "BLK-4",
    "nothing is kept for requests that have ended",
    "Tables and counters of the cache manager are those of requests that have not ended, copies in host"
    " memory those of requests that are swapped.",
    why="The next request, or one of the same name, would start with it.",
    rule="blocks.facts",
    source="vllm single_type_managers",
    trigger=lambda s: len(s.after.requests) < len(s.before.requests),
)
def _ended_requests_keep_nothing(step: BlockStep) -> Failure | None:
    if step.after.leftovers:
        also = ", ".join(step.after.leftovers)
        expected = "the manager must keep nothing of requests that have ended"
        return failure(expected, f"the manager keeps an entry of {also}", AtCount("manager", "leftovers"))
    swapped = step.after.swap.tables if step.after.swap is not None else ()
    for name in swapped:
        fact = step.after.requests.get(name)
        if fact is None or fact.status != "SWAPPED":
            expected = "host memory must keep copies of swapped requests alone"
            observed = f"host memory keeps a copy of {name}"
            return failure(expected, observed, AtCount("swap", "leftovers"))
    return None


@clause(
    "PUB-1",
    "a hash names what its block holds",
    "A block that the prefix cache names holds KV of exactly the tokens that its hash is of, written.",
    why="A request that matches the hash reads that KV as its own.",
    rule="blocks.facts",
    source="vllm cache_full_blocks",
    scope=(
        "A load within a step that has failed: until the engine is notified, and then while a request has yet"
        " to compute the block."
    ),
    trigger=lambda s: bool(s.after.published),
)
def _hash_names_content(step: BlockStep) -> Failure | None:
    """Return the failure of the first published hash whose block holds other KV than that of its tokens.
    Hashes of states are STA-3's."""
    for block, group, stamps in step.after.published:
        if not block:
            return failure(
                "block 0, the null block, has no hash", f"it has one in group {group}", AtBlock(0)
            )
        if step.config.groups[group].state or isinstance(step.command, NewWeights):
            continue  # STA-3, PUB-3
        if block in step.awaited_blocks:
            continue
        owner, slots = step.after.memory[block]
        slots = slots[: len(stamps)]
        if owner != group or slots != stamps:
            wrong = next((i for i, (a, b) in enumerate(zip(slots, stamps)) if a != b), 0)
            problem = (
                "is not written"
                if owner != group or not slots[wrong]
                else "holds KV of another token"
            )
            expected = f"it must hold KV of the tokens that its hash in group {group} names"
            return failure(expected, f"slot {wrong} of block {block} {problem}", AtBlock(block))
    return None


@clause(
    "PUB-2",
    "map and blocks agree",
    "The prefix cache's map names a block once for each hash that the block bears, and no others.",
    why="A block that the map still names after its reuse is a hit on other text.",
    rule="blocks.facts",
    source="vllm BlockHashToBlockMap",
    trigger=lambda s: bool(s.after.published) and len(s.after.published) < len(s.before.published),
)
def _map_agrees_with_blocks(step: BlockStep) -> Failure | None:
    bears = Counter(published.block for published in step.after.published)
    for block in {*bears, *step.after.mapped}:
        if (mapped := step.after.mapped.get(block, 0)) != bears[block]:
            bear = f"block {block} bears {count_text(bears[block], 'hash', 'es')}"
            expected = f"the map must name it once for each: {bear}"
            return failure(
                expected, f"the map names block {block} {count_text(mapped, 'time')}", AtBlock(block)
            )
    return None


@clause(
    "PUB-3",
    "a reset forgets everything",
    "After a successful reset, and before new weights, no block bears a hash, and all are free. A reset"
    " succeeds whenever no request holds a block. One with running requests leaves them none.",
    of=(ResetCache, NewWeights),
    why="Resets come with new weights: KV of the old ones must not be matched.",
    rule="blocks.facts",
    source="vllm reset_prefix_cache, EngineCore._reset_caches",
    scope="Without prefix caching there is nothing to forget.",
    trigger=lambda s: isinstance(s.command, (ResetCache, NewWeights)) and bool(s.before.published),
)
def _reset_empties_cache(step: BlockStep) -> Failure | None:
    """Return the failure of a reset that leaves hashes, fails though no request holds a block, or lets a
    request that ran keep its blocks."""
    command = step.command
    if not isinstance(command, (ResetCache, NewWeights)) or step.refused or not step.config.caching:
        return None
    left = len(step.after.published)
    if step.after.reset and (left or len(step.after.free) < len(step.after.refs) - 1):
        free = len(step.after.free)
        blocks = len(step.after.refs) - 1
        observed = f"it leaves {count_text(left, 'hash', 'es')}, and {free} of {blocks} blocks are free"
        return failure(
            "a reset must leave no hash and all blocks free", observed, AtCount("cache", "hashes")
        )
    if not step.after.reset and not step.entries:
        expected = "the reset must succeed, for nobody holds a block"
        return failure(expected, "the reset fails", AtCount("cache", "reset"))
    ran = {name for name, fact in step.before.requests.items() if fact.status == "RUNNING"}
    holders = {name for named in step.entries.values() for name, _, _ in named}
    running = isinstance(command, NewWeights) or command.running
    if running and (holding := sorted(ran & holders)):
        expected = "a reset must leave requests that run no block"
        return failure(expected, f"{', '.join(holding)} still holds blocks", AtCount("cache", "reset"))
    return None


@clause(
    "KEY-1",
    "a key has one source",
    "No key of a request finds KV of another source, in a block or in host memory: another adapter, other"
    " weights under the adapter's name, another salt, or the model's weights before an update.",
    why=(
        "Whoever matches the key reads KV that other weights computed, or that belongs to another tenant, and"
        " the tokens look right."
    ),
    needs=("keys",),
    rule="sources",
    source="vllm generate_block_hash_extra_keys (issues 30931, 42125)",
    scope="A key that two sources share does no harm while the cache has nothing under it.",
    trigger=lambda s: len(s.kv_sources) > 1 and bool(s.after.published),
)
def _key_has_one_source(step: BlockStep) -> Failure | None:
    if isinstance(step.command, NewWeights):  # PUB-3, HOST-4
        return None
    for request, source, source_of_kv, block, chunk in step.after.foreign_keys:
        where = f"block {block}" if chunk < 0 else f"chunk {chunk} of host memory"
        observed = f"a key of {request} finds {where}, which holds KV of {source_of_kv}"
        return failure(
            f"{request} has {source}", observed, AtBlock(block) if chunk < 0 else AtChunk(chunk)
        )
    return None
