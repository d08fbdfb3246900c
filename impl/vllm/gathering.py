"""The facts of an engine: its block pool, block tables, hashes, host memory and encoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from impl.loading.optional import optional
from impl.vllm.engine_parts import EngineParts
from impl.vllm.images import encoder_facts, text_of
from impl.vllm.offload import host_facts
from impl.vllm.simple_offload import PoolOffloads, hashes_of, pool_facts, transfers_of
from impl.vllm.sources import foreign_keys, places_of
from reference.blocks.facts import BlockFacts, EncoderFacts, HostFacts, Published, RequestFact


class FactGatherer(EngineParts):
    """The part of a driver that reads the engine's objects after a command."""

    def view(self) -> BlockFacts:
        """Return the facts of the engine after the last command."""
        manager = self.scheduler.kv_cache_manager
        pool = manager.block_pool
        managers = manager.coordinator.single_type_managers
        requests = {}
        deferred = [
            blocks for _, blocks in optional(self.scheduler, "Scheduler.deferred_frees", ())
        ]
        kept_blocks = [block.block_id for blocks in deferred for block in blocks]
        for name, request in self.scheduler.requests.items():
            tables = tuple(
                tuple(b.block_id for b in m.req_to_blocks.get(name, ())) for m in managers
            )
            if request.is_finished():  # a load still writes its blocks
                kept_blocks += [block for table in tables for block in table]
                continue
            requests[self._names[name]] = RequestFact(
                request.status.name,
                tuple(text_of(request)),
                request.num_computed_tokens,
                tables,
            )
        holders = {name for m in managers for name, blocks in m.req_to_blocks.items() if blocks}
        holders.update(*(m.num_cached_block for m in managers))
        # 0.27 and 0.28: the block with the state at the end of a prompt, which the connector may store
        pins = optional(manager, "KVCacheManager._partial_tail_pins", {}).items()
        pinned = [(self._names[name], b.block_id) for name, bs in pins for b in bs]
        if isinstance(self._worker_side, PoolOffloads):
            for transfer in transfers_of(self.scheduler.connector.scheduler_manager):
                name = self._names.get(transfer.request, "")
                held = [block for block in transfer.blocks if block]  # the null block is not held
                if name in requests:
                    pinned += [(name, block) for block in held]
                else:
                    kept_blocks += held
        memory = self._held_blocks()
        known = self.scheduler.requests
        return BlockFacts(
            refs=tuple(block.ref_cnt for block in pool.blocks),
            free=tuple(block.block_id for block in pool.free_block_queue.get_all_free_blocks()),
            memory=tuple((group, tuple(slots)) for group, slots in memory),
            published=tuple(self._published_hashes(pool)),
            mapped=_hashes_by_block(pool),
            requests=requests,
            leftovers=tuple(self._names.get(name, name) for name in holders if name not in known),
            lanes=self._lanes,
            outputs=self._client_outputs,
            reset=self._reset_done,
            steps_in_flight=len(self._in_flight),
            results_due=self._results_due(),
            in_step=self._in_step,
            kept=tuple(kept_blocks),
            copies=self._copies,
            pinned=tuple(pinned),
            host=None if self._worker_side is None else self._host_facts(),
            foreign_keys=foreign_keys(
                self.sources,
                self.scheduler,
                self._stamps,
                places_of(self.scheduler, self.runner.memory, self._worker_side),
                self._names,
            ),
            encoder=self._encoder_facts(),
        )

    def _encoder_facts(self) -> EncoderFacts | None:
        encoder = self.runner.encoder
        if encoder is None:
            return None
        return encoder_facts(self.scheduler, encoder, self._names)

    def _held_blocks(self) -> list[Any]:
        """Return the group and the stamps of each block."""
        blocks = range(self.config.blocks + 1)
        return [self._without_drafter(self.runner.memory.get(block, (-1, ()))) for block in blocks]

    def _without_drafter(self, held: tuple[int, Any]) -> tuple[int, Any]:
        """Return the group and the stamps of a block, without those of the drafter's KV."""
        group, slots = held
        if group < 0 or group != self.config.draft_group:
            return held
        return group, slots[: self.config.groups[group].block_size]

    def _host_facts(self) -> HostFacts:
        parts = self._worker_side, self.scheduler, self.config, self._stamps
        if isinstance(self._worker_side, PoolOffloads):
            facts = pool_facts(*parts, at_rest=not self._in_flight)
        else:
            facts = host_facts(*parts, loads_wait=self.loads_wait)
        memory = (tuple(map(self._without_drafter, chunk)) for chunk in facts.memory)
        return facts._replace(memory=tuple(memory))

    def _published_hashes(self, pool: Any) -> Iterator[Published]:
        """Yield the hashes under which the pool knows its blocks."""
        further = optional(pool, "BlockPool.cached_block_hashes_by_block", {})
        for block in pool.blocks:
            if block.block_hash is None:
                continue
            for key in (block.block_hash, *further.get(block.block_id, ())):
                group = self._utils.get_group_id(key)
                size = self.config.groups[group].block_size
                slots = self.runner.memory.get(block.block_id, (-1, ()))[1]
                stamps = self._stamps.of_block(self._utils.get_block_hash(key), size, slots)
                yield Published(block.block_id, group, stamps)


def _hashes_by_block(pool: Any) -> dict[int, int]:
    """Return for each block the number of hashes under which the pool finds it."""
    mapped: dict[int, int] = {}
    for _, block in hashes_of(pool):
        mapped[block.block_id] = mapped.get(block.block_id, 0) + 1
    return mapped
