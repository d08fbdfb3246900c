"""Drives the release's own batch processor, and gathers the facts.

With asynchronous batching the processor prepares and launches a batch before it updates the requests of the
batch before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from impl.adapter import UnusableImplementation
from impl.bare import bare
from impl.loading.isolation import note_loaded
from impl.self_scheduling.release_system import serve_driver
from impl.self_scheduling.driver import SelfSchedulingDriver
from impl.system_spec import SystemSpec
from impl.transformers_paging.api import OVERLAP
from impl.transformers_paging.batches import BatchEntry, HostBatch, LaunchedBatches
from impl.transformers_paging.loading import TransformersSystem, load
from impl.transformers_paging.stamped_cache import Slot, StampedCache, UnpinnedTorch
from impl.stand_ins import Values
from impl.vocabulary import CommandRefused, require
from reference.blocks.commands import STOP_TOKEN, Add, EngineCommand, Schedule, Update
from reference.blocks.config import EngineConfig
from reference.blocks.facts import (
    BlockFacts, Found, Lane, Published, RequestFact, SwapFacts, Table, chained,
)  # fmt: skip
from reference.commands import Abort, Reason

_LAYER_TYPES = {False: "full_attention", True: "sliding_attention"}  # of a group, by its ring
_CHILD = "__child#"  # between a parent's name and the number of its child


class PagingDriver(SelfSchedulingDriver):
    """One release under `root`, in this process."""

    capabilities = TransformersSystem.capabilities
    config: EngineConfig
    cache: Any
    _pages: list[Any]
    _kv: StampedCache
    scheduler: Any
    _offloading: Any
    _batches: LaunchedBatches
    processor: Any
    _texts: dict[int, tuple[int, ...]]

    def __init__(self, root: Path, name: str = "transformers") -> None:
        self.name = name
        self.root = root
        self.overlap = OVERLAP in SystemSpec.parse(name).ways
        self._modules = load(root)
        self._modules["offloading_manager"].torch = UnpinnedTorch()
        memory = (torch.device("cpu"), 1 << 40, 0, 0)
        self._modules["cache"].get_device_and_memory_breakdown = lambda: memory
        processor_class = self._modules["continuous_api"].ContinuousBatchProcessor
        # The release's own __del__ collects garbage.
        self._processor: Any = type("Processor", (processor_class,), {"__del__": _nothing})

    def reset(self, geometry: EngineConfig) -> None:
        """Build the release's PagedAttentionCache, FIFOScheduler and processor of batches for these sizes.
        Raises UnusableImplementation for sizes that transformers is not driven with."""
        if any(group.window is not None and not group.ring for group in geometry.groups):
            raise UnusableImplementation("transformers: no window that is not a ring")
        kinds = {group.ring for group in geometry.groups}
        sizes_of_blocks = {group.block_size for group in geometry.groups}
        if len(kinds) < len(geometry.groups) or len(sizes_of_blocks) > 1 or geometry.recurrent:
            raise UnusableImplementation(
                "transformers: a group of full attention, one of a ring, or both, with blocks of one size"
            )
        if geometry.drafts or not geometry.chunked:
            raise UnusableImplementation(
                "transformers: it takes no drafts, and cuts prompts (chunked)"
            )
        self.clear(*(group.block_size for group in geometry.groups))
        self.config = geometry
        layers = len(geometry.groups)  # one of each group, so that their blocks are alike
        windows = [group.window for group in geometry.groups if group.ring]
        model = Values(
            num_hidden_layers=layers,
            num_attention_heads=1,
            head_dim=32,
            hidden_size=32,
            vocab_size=1,
            layer_types=[_LAYER_TYPES[group.ring] for group in geometry.groups],
            num_key_value_heads=None,
            sliding_window=windows[0] if windows else None,
        )
        sizes = Values(
            page_size=self.block_size,
            num_blocks=geometry.blocks / layers,  # the release counts blocks of all layers
            max_batch_tokens=geometry.max_batched_tokens,
            allow_block_sharing=geometry.caching,
            max_memory_percent=1.0,
            fallback_max_blocks_per_request=0,
            max_blocks_per_request=None,
            return_logprobs=False,
            use_async_batching=self.overlap,
        )
        single_device = Values(tp_size=1, tp_all_reduce_min=lambda value, **_: value)
        self.cache = self._modules["cache"].PagedAttentionCache(model, sizes, "cpu", single_device)
        self._pages = [*self.cache.cache_allocators.values()]
        self._kv = StampedCache(self._pages)
        kind = self._modules["scheduler"].FIFOScheduler
        self.scheduler = kind(self.cache, 0.0, geometry.max_seqs)
        self._offloading = self._offloading_manager(single_device)
        self._batches = LaunchedBatches(
            self._modules["input_outputs"].ContinuousBatchingAsyncIOs if self.overlap else None,
            self.cache,
        )
        self.processor = bare(
            self._processor,
            cache=self.cache,
            scheduler=self.scheduler,
            max_batch_tokens=self.cache.max_batch_tokens,
            offloading_manager=self._offloading,
            inputs_and_outputs=self._batches.release_object,
            output_router=self,
            use_async_batching=self.overlap,
            logit_processor=None,
            model_runner=Values(
                maybe_pad_inputs=lambda tokens, read, _: (tokens, read), pad_inputs=False
            ),
            _update_tp_group_state=lambda: False,
        )
        # of a hash: the stamps of its block, after those before
        self._texts = {}
        self._modules["cache_allocator"].compute_block_hash = self._block_hash
        note_loaded("impl/transformers_paging/loading.py")

    def _offloading_manager(self, single_device: Values) -> Any:
        """Return the release's manager of host memory, which has as many blocks as the configuration says."""
        manager_class = self._modules["offloading_manager"].OffloadingManager
        blocks = self.config.swap
        sized = type("Manager", (manager_class,), {"_compute_num_cpu_sectors": lambda *_: blocks})
        return sized(self.cache, self.scheduler, 0.0, 0.0, None, single_device)

    def carry_out(self, command: EngineCommand) -> None:
        """Execute a command as ContinuousBatchProcessor and the manager's loop do. Raises CommandRefused."""
        # clients: between steps
        if isinstance(command, Update):
            require(self._results_due(), Reason.WRONG_PHASE)
        else:
            require(not self._batches.in_step, Reason.WRONG_PHASE)
        match command:
            case Add():
                self._add(command)
            case Abort(name):
                require(name in self._requests_by_name(), Reason.UNKNOWN_REQUEST)
                self.scheduler.set_request_cancellation(_release_name(name))
                # as in prepare_next_batch
                for state in self.scheduler.clear_cancelled_requests():
                    self._offloading.free_request_cpu_cache(state)
                self._forget_child(name)
            case Schedule():
                require(self.scheduler.has_pending_requests(), Reason.EMPTY)
                if self.processor.prepare_next_batch():
                    self._run(self._batches.launch())
            case Update():
                with self._batches.updating_the_oldest():
                    self.processor.update_batch()
            case _:  # it has no sessions, and forgets its cache when it must
                raise CommandRefused(Reason.UNFAITHFUL)

    def _results_due(self) -> bool:
        """Return whether the loop takes the oldest results next. Where no request is left it takes those of
        the last batch when it stops."""
        idle = not self.scheduler.has_pending_requests()
        return self._batches.in_step or (self._batches.in_flight > 0 and idle)

    def _requests_by_name(self) -> dict[str, Any]:
        """Return the requests of the scheduler, by our names."""
        known = {**self.scheduler.waiting_requests, **self.scheduler.active_requests}
        return {_our_name(name): state for name, state in known.items()}

    def _add(self, command: Add) -> None:
        require(command.children <= self.config.children, Reason.UNFAITHFUL)
        known = command.request in self._requests_by_name()
        # it has no such bound of its own
        tokens = self.accept(command, self.config.max_model_len, known)
        self.scheduler.add_waiting_request(
            self._modules["requests"].RequestState(
                request_id=command.request,
                initial_tokens=tokens,
                streaming=True,
                max_new_tokens=command.max_tokens,
                eos_token_id=STOP_TOKEN,
                num_children=command.children,
            )
        )

    def _forget_child(self, name: str) -> None:
        """Forget what a child has delivered: another one may get its name, and no Add says so."""
        if "." in name:
            self._delivered.pop(name, None)

    # -- the model ----------------------------------------------------------------------------------

    def _run(self, batch: HostBatch) -> None:
        """Run the batch: write a stamp to each slot, sample a token for each request whose prompt is done."""
        written: list[list[int]] = []
        for entry in batch.entries:
            before = chained(entry.text)[-1] if entry.text else 0
            written.append(chained(entry.inputs, before))
        attention = [self._attention(batch, group, written) for group in range(len(self._pages))]
        for entry, stamps, read_stamps in zip(batch.entries, written, zip(*attention)):
            name = _our_name(entry.request)
            sampled: tuple[int, ...] = ()
            if entry.samples:
                last = chained(entry.text)[-1] if not stamps else stamps[-1]
                sampled = (self.sample(name, last),)
                batch.tokens += sampled
            tables = tuple(self._table(entry, group) for group in range(len(self._pages)))
            lane = Lane(name, entry.start, entry.inputs, 0, sampled, tables, found=read_stamps)
            self.lanes.append(lane)
        batch.keep_outputs()

    def _attention(
        self, batch: HostBatch, group: int, written: Sequence[Sequence[int]]
    ) -> list[Found]:
        """Run the attention of a group, and return the KV that it gets for each entry.

        written: stamps that each entry writes. A batch in which every entry begins a text reads no cache.
        """
        read = [row for entry in batch.entries for row in entry.read[group] if batch.reads_cache]
        write = [row for entry in batch.entries for row in entry.write[group]]
        stamps = self._kv.update(group, [*chain(*written)], read, write)
        stamps_by_entry = []
        for entry in batch.entries:
            count = len(entry.inputs)
            length = entry.lengths[group] if batch.reads_cache else count
            window_begin = entry.start + count - length
            stamps_by_entry.append(Found(group, window_begin, tuple(stamps[:length])))
            del stamps[:length]
        return stamps_by_entry

    def _table(self, entry: BatchEntry, group: int) -> tuple[int, ...]:
        """Return the blocks that an entry reads and writes."""
        pages = self._pages[group]
        if self.config.groups[group].ring:
            return tuple(map(self._block, pages.block_table.get(entry.request, ())))
        stride = pages.block_physical_stride
        return tuple(
            self._block(index // stride) for index in entry.read[group][:: self.block_size]
        )

    # -- what the processor hands to its clients ------------------------------------------------------

    def deliver_batch(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            name = _our_name(output.request_id)
            self._delivered.setdefault(name, 0)  # of a child nothing was noted before
            self.deliver(name, output.generated_tokens, output.is_finished())
            if output.is_finished():
                self._forget_child(name)

    def _block_hash(self, parent: int | None, tokens: Sequence[int]) -> int:
        """Return the hash of a block: the stamp of its last token."""
        stamps = chained(tokens, parent or 0)
        self._texts[stamps[-1]] = tuple(stamps)
        return stamps[-1]

    # -- facts ------------------------------------------------------------------------------------

    def _block(self, raw: int) -> int:
        """Return our number of a block, from the release's: its pool begins with a trash sector, ours with
        the null block."""
        return int(raw - 2 * self._pages[0].blocks_per_sector + 1)

    def view(self) -> BlockFacts:
        """Return the facts of the pool, of block tables, of hashes and of batches in flight. Sectors are
        counted as blocks."""
        pool = self.cache.pool
        per = self._pages[0].blocks_per_sector
        free = [sector * per + index for sector in pool.free_sectors for index in range(per)]
        shared: dict[int, int] = {}
        published = []
        mapped: dict[int, int] = {}
        tables = set()
        for group, pages in enumerate(self._pages):
            ledger = pages.ledger
            free += [leaf for tree in pool._free_blocks[group].trees.values() for leaf in tree]
            free += ledger.cached_blocks  # nobody holds them, and they are taken when blocks run out
            shared |= ledger.shared_ref_counts
            for raw, value in ledger.block_to_hash.items():
                published.append(Published(self._block(raw), group, self._texts[value]))
            for raw in ledger.hash_to_block.values():
                mapped[self._block(raw)] = mapped.get(self._block(raw), 0) + 1
            tables |= pages.block_table.keys()
        blocks = range(2 * per, (2 + pool.num_sectors) * per)
        unheld = set(free)
        refs = [0 if raw in unheld else shared.get(raw, 1) for raw in blocks]
        requests = {name: self._request_fact(state) for name, state in self._requests_by_name().items()}
        tables_of = {name: fact.tables for name, fact in requests.items()}
        self.memory = _group_and_stamps(self._kv.blocks()[2 * per :], tables_of)
        results_due = self._results_due()
        return self.facts(
            refs=(0, *refs),
            published=published,
            free=tuple(map(self._block, free)),
            mapped=mapped,
            requests=requests,
            leftovers=tuple(sorted({*map(_our_name, tables)} - requests.keys())),
            # a batch that is alone in flight is not waited for: the loop takes its results behind another
            # launch
            steps_in_flight=self._batches.in_flight if results_due else 0,
            results_due=results_due,
            in_step=self._batches.in_step,
            padded=self.overlap,  # as by default, with CUDA graphs
            swap=self._swap_facts() if self.config.swap else None,
        )

    def _swap_facts(self) -> SwapFacts:
        """Return the facts of host memory. The release numbers its blocks from 0, we from 1."""
        manager = self._offloading
        pool = manager._cpu_pool
        free = [*pool.free_sectors]
        for blocks in pool._free_blocks:
            free += [leaf for tree in blocks.trees.values() for leaf in tree]
        kinds = [*self.cache.cache_allocators]
        tables = {
            _our_name(name): tuple(
                tuple(block + 1 for block in blocks.get(kind, ())) for kind in kinds
            )
            for name, blocks in manager._request_id_to_cpu_blocks.items()
        }
        stamps = self._kv.blocks(manager._cpu_tensor)
        written = _group_and_stamps(stamps, tables)
        memory: list[tuple[int, tuple[int, ...]]] = [(-1, ())] * (1 + self.config.swap)
        for block, (group, slots) in written.items():
            memory[block] = group, tuple(slots)
        return SwapFacts(tuple(block + 1 for block in free), tuple(memory), tables)

    def _request_fact(self, state: Any) -> RequestFact:
        status = "RUNNING"
        if state.request_id in self.scheduler.waiting_requests:
            status = "PREEMPTED" if state._true_initial_tokens else "WAITING"
            if state.is_cpu_offloaded:
                status = "SWAPPED"
        tables = tuple(
            tuple(map(self._block, pages.block_table.get(state.request_id, ())))
            for pages in self._pages
        )
        text = tuple(state.initial_tokens + state.generated_tokens)
        return RequestFact(status, text, state.position_offset, tables)


def _group_and_stamps(
    blocks: Sequence[Sequence[Slot]], tables: Mapping[str, Table]
) -> dict[int, tuple[int, list[int]]]:
    """Return the group and the stamps of each block that was written: the group of the table that has it, or
    of its first slot. Blocks count from 1."""
    groups = {
        block: group
        for rows in tables.values()
        for group, table in enumerate(rows)
        for block in table
    }
    written = {}
    for block, slots in enumerate(blocks, 1):
        owners = [group for stamp, group in slots if stamp]
        if owners:
            owner = groups.get(block, owners[0])
            written[block] = owner, [stamp if group == owner else 0 for stamp, group in slots]
    return written


def _our_name(name: str) -> str:
    """Return our name of a request of the release: a child has a number behind its parent's name."""
    return name.replace(_CHILD, ".")


def _release_name(name: str) -> str:
    return name.replace(".", _CHILD)


def _nothing(*_: Any) -> None:
    return None


if __name__ == "__main__":
    raise SystemExit(serve_driver(PagingDriver))
