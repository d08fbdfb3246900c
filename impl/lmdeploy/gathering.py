"""Facts of LMDeploy's engine: its blocks, the slots of its states, its trie and its requests."""

from __future__ import annotations

from typing import Any

from impl.lmdeploy.model_agent import ModelAgent
from reference.blocks.facts import BlockFacts, Published, RequestFact, chained


_LOADING = "WAITING_FOR_REMOTE_KVS"


class EngineFacts(ModelAgent):
    """The part of a driver that reads the engine's objects after a command."""

    new_weights: bool
    _dispatched_next: bool  # whether the loop waits for the oldest output
    _listens: bool  # whether the loop gives clients a turn before it goes on
    _released: list[str]  # requests that gave all their blocks back
    _answered_lookups: int  # lookups of the last command that the store has answered since

    @property
    def _hears_clients(self) -> bool:
        """Whether clients can act: while the loop waits for an output, or for work."""
        return self._listens or not self._flights

    def view(self) -> BlockFacts:
        """Return the facts of the engine after the last command."""
        allocator = self.scheduler.block_manager.allocator
        physical_blocks = allocator._log_mem.phy_map.tolist()
        pool = allocator._gpu_allocator
        states = self._states
        slots = self.scheduler.state_manager
        published, copied = self._cached_blocks(physical_blocks)
        cached = [entry.block for entry in published]
        requests = {}
        kept_blocks = [*copied, *self._blocks_being_saved(physical_blocks)]
        for sequence in self.scheduler.seq_manager.get_all_sequences():
            row = [physical_blocks[block] for block in sequence.logical_blocks.get_real_blocks().tolist()]
            state = states.block_table(sequence.logical_state)
            if (name := self._names.get(sequence.session_id)) is None:
                kept_blocks += (*row, *state)
            else:
                requests[name] = self._request_fact(sequence, row, state)
        refs = [0] * (self.config.blocks + 1)
        blocks = allocator._num_blocks
        unused = allocator._free_blocks.tolist()[blocks - allocator._free_count :]
        for block in {*range(blocks)} - {*unused}:
            refs[physical_blocks[block]] += int(allocator._log_mem.ref_count[block])
        for slot in (*slots._runtime_states, *slots._checkpoint_states):
            refs[states.blocks + slot] += 1
        for block in cached:
            if block not in copied:
                refs[block] -= 1
        free = _free_items(pool._free_blocks, pool._free_count)
        free += [
            states.blocks + free_slot
            for free_slot in _free_items(slots.allocator._free_states, slots.get_num_free())
        ]
        free += [block for block in cached if not refs[block]]  # evicted when blocks run out
        ours = {*self._names, *self._finished_sessions, *self._loading_sessions()}
        return self.facts(
            refs=refs,
            states=states.memory,
            published=published,
            free=tuple(free),
            mapped={block: cached.count(block) for block in cached},
            requests=requests,
            leftovers=tuple(
                f"session {session}" for session in self.scheduler.sessions if session not in ours
            ),
            steps_in_flight=len(self._flights),
            results_due=self._dispatched_next,
            kept=tuple(kept_blocks),
            merges=True,
            unheard=not self._hears_clients,
            released=tuple(self._released),
            reset=self.new_weights,
            overrun=2 * self.config.drafts,  # a round, and the one behind it
            host=None if self._store is None else self._store.facts(self._answered_lookups),
        )

    def _blocks_being_saved(self, physical_blocks: list[int]) -> list[int]:
        """Return the blocks that saves of the store read."""
        if self._store is None:
            return []
        leases = self.scheduler.kv_save_coordinator._leases.values()
        return [physical_blocks[block] for lease in leases for block in lease.tolist()]

    def _loading_sessions(self) -> list[int]:
        """Return the sessions whose requests wait for a load, which the engine keeps until its end."""
        if self._store is None:
            return []
        loads = self.scheduler.kv_load_coordinator._loads.values()
        return [load.seq.session_id for load in loads]

    def _cached_blocks(self, physical_blocks: list[int]) -> tuple[list[Published], list[int]]:
        """Return what the trie names, and the blocks of checkpoints that batches in flight copy."""
        published: list[Published] = []
        copied: list[int] = []
        roots = [(root, self._origin_below(root)) for root in self.scheduler.block_trie._roots.values()]
        waiting = [(root, [origin], origin) for root, origin in roots]
        while waiting:
            node, stamps, origin = waiting.pop()
            if node.parent is not None:
                published.append(Published(physical_blocks[int(node.block_id)], 0, tuple(stamps)))
            if node.state_checkpoint is not None:
                published += self._states.published_states(node.state_checkpoint, physical_blocks, origin)
                copied += self._states.blocks_in_flight(node.state_checkpoint, physical_blocks)
            for child in node.children.values():
                made = chained(child.token_ids.tolist(), stamps[-1])
                waiting.append((child, made, origin))
        return published, copied

    def _origin_below(self, root: Any) -> int:
        """Return the origin of the texts below a root of the trie, of which each adapter has one."""
        return self.sources.loaded.source(root.adapter_name or "", "").origin

    def _request_fact(self, sequence: Any, row: list[int], state: tuple[int, ...]) -> RequestFact:
        """Return the fact of a request. Its own count is made at outputs: what batches in flight have
        computed is added."""
        status = sequence.status.name
        computed = sequence.num_history_ids
        if status in ("READY", "RUNNING"):
            status = "RUNNING"
            if any(sequence in batch for batch, *_ in self._flights):
                computed = max(computed, self._computed_counts[sequence.session_id])
        elif sequence.session_id in self._computed_counts and status != _LOADING:
            status = "PAUSED" if row else "PREEMPTED"
        table = (0,) * (sequence.num_ignored_history // self.block_size) + tuple(row)
        tables = (table, state)[: len(self.config.groups)]
        text = tuple(sequence.all_ids[: sequence.num_valid_ids].tolist())  # without drafts
        return RequestFact(status, text, computed, tables)


def _free_items(items: Any, count: int) -> list[int]:
    """Return the free ones of an allocator, which are the last `count` of its items."""
    return list(items[len(items) - count :].tolist())
