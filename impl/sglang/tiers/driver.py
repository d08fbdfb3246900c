"""Plays what requests, the scheduler and the copy engine do to a release's tree with its host tier.

`python -m impl.sglang.tiers.driver ROOT VERSION` is the worker of a release. A release's module state is
global, so each worker has one.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from impl.adapter import Capabilities, UnusableImplementation
from impl.process.failures import raising_misfit
from impl.process import wire
from impl.process.worker import serve
from impl.sglang.parts.stand_ins import SERVER_ARGS, checkpoint_grid, unset
from impl.sglang.scheduler.call_log import Calls
from impl.sglang.scheduler.driver import CallLog
from impl.sglang.scheduler.live_requests import LockHolder
from impl.sglang.scheduler.server import Server
from impl.sglang.tiers.copy_engine import CopyEngine, StateStamps
from impl.sglang.tiers.decode_side import FIRST_THAT_RECEIVES, DecodeSide, HostCopies, take_role
from impl.sglang.tiers.gathering import Gatherer
from impl.sglang.tiers.host_loads import HostLoads, refuses_partial_loads
from impl.sglang.tiers.loading import tiered_release
from impl.sglang.tiers.prefill_side import FIRST_THAT_SENDS, PrefillSide
from impl.sglang.tiers.rust_gathering import RustGatherer
from impl.sglang.tiers.storage import BACKUP, FETCH, FIRST_WITH_STORAGE, QUERY, IOThread, Storage
from impl.vocabulary import CommandRefused, Played, done, require, spelled
from reference.commands import (
    Abort, Close, Decode, Evict, Extend, Insert, Match, Outcome, Reason, Refused, Retract, Unlock,
)  # fmt: skip
from reference.tiers.commands import (
    Arrive, Await, Backup, Complete, Copy, Expire, FailPeer, Fetch, Greet, LastToken, Load, Poll, Prefetch,
    Query, Reattach, ResetCache, Send, Tick, TierCommand,
)  # fmt: skip
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts, TierRead


class TierDriver(DecodeSide, HostLoads):
    """One release in this process; `reset` starts a tree with a host tier, `apply` plays one command."""

    # TierSystem has the real values of both.
    name = ""
    capabilities = Capabilities()

    config: TierConfig
    copies: CopyEngine
    #: requests that wait for pages of the storage, by name, and their texts
    _waiting: dict[str, Any]
    _waiting_texts: dict[str, list[int]]
    storage: Storage | None
    prefill_side: PrefillSide | None
    gatherer: Gatherer
    #: what the forward passes of the last command read
    _reads: tuple[TierRead, ...]
    _request_prefetch: Any

    def __init__(self, release: Any, root: Path) -> None:
        """Note for each command the method that executes it: of every tree, and of a server that only
        decodes."""
        self.release = release
        self.root = root
        self.calls: CallLog | None = None
        self.noted = wire.Noted()
        self.refuses_partial_loads = refuses_partial_loads(release.policy)
        self._commands: dict[type, Callable[[Any], Played]] = {
            Match: self.match, Load: self.load, Insert: self.insert, Unlock: self.unlock,
            Evict: self.evict, Send: self._send, Copy: self._copy, Complete: self._complete,
            Poll: self._poll, ResetCache: self._reset, Prefetch: self._prefetch, Abort: self._abort,
            Query: partial(self._run_storage_thread, QUERY, "prefetch_queue"),
            Fetch: partial(self._run_storage_thread, FETCH, "prefetch_buffer"),
            Backup: partial(self._run_storage_thread, BACKUP, "backup_queue"), Tick: self._tick,
            Reattach: self._reattach,
        }  # fmt: skip
        self._decode_commands: dict[type, Callable[[Any], Played]] = {
            Await: self.await_prompt, Greet: self.greet, Arrive: self.arrive, FailPeer: self.fail_peer,
            Expire: self.expire, Decode: self._decode, Retract: self.retract_received, LastToken: self.end,
            Poll: self._poll_decode_side, Abort: lambda c: self.abort_received(c.request), Evict: self.evict,
            Close: self.close_session,
        }  # fmt: skip
        self._prefill_commands: dict[type, Callable[[Any], Played]] = {}

    def reset(self, geometry: TierConfig) -> None:
        """Start an empty tree of these sizes."""
        with self._own_errors():
            self.config = geometry
            IOThread.end_all()
            take_role(geometry)
            self.server = server = Server(self.release, geometry.device)
            self.cache = server.cache
            if geometry.decode != "radix" and not geometry.prefill:
                self._start_tier()
            controller = self.cache.cache_controller
            self.copies = controller.l2_transfer_engine if controller is not None else CopyEngine()
            self.copies.memory = {"full": server.full_stamps, "swa": server.swa_stamps}
            if server.states is not None:
                self.copies.memory["state"] = StateStamps(server.states)
            self.copies.host = {pool: [0] * geometry.host_slots(pool) for pool in geometry.pools}
            self._loads_prefix = False
            self._waiting = {}
            self._waiting_texts = {}
            self.storage = None
            self.release.clock.now = 0.0
            if geometry.storage:
                self._attach_storage(geometry)
            self.prefill_side = None
            if geometry.decode:
                self._start_decode_side(geometry)
            elif geometry.prefill:
                self._start_prefill_side(geometry)
            else:
                self._lock_node = self.release.admission(self.cache)
            side = self if geometry.decode else None
            kind = RustGatherer if self.release.core == "rust" else Gatherer
            self.gatherer = kind(
                self.release, server, geometry, self.copies, self.storage, side, self.prefill_side
            )
            self._reads = ()
        if self.calls is not None:
            self.calls.begin_server()

    def _start_tier(self) -> None:
        """Start the tier as the scheduler does after it has made its tree."""
        config = self.config
        server = self.server
        SERVER_ARGS.tiers = config
        SERVER_ARGS.files = self.root
        SERVER_ARGS.enable_hierarchical_cache = True
        SERVER_ARGS.hicache_write_policy = config.policy
        SERVER_ARGS.hicache_host_memory_mode = "cache"
        SERVER_ARGS.hicache_storage_prefetch_policy = "best_effort"
        params = self.release._cache_params(
            server.rows,
            server.allocator,
            server.geometry,
            tree_components=self.cache.tree_components,
        )
        self.cache.init_hicache(SERVER_ARGS, params)
        self.cache.load_back_threshold = 1  # of ten tokens, tuned for real texts

    def _attach_storage(self, config: TierConfig) -> None:
        if not self.release.stores:
            reason = f"a storage behind the host is driven from {FIRST_WITH_STORAGE} on"
            raise UnusableImplementation(f"sglang {self.release.version}+hicache: {reason}")
        self.storage = Storage(self.cache, self.copies.host, config.page_size, self.release.hashes)
        self.storage.attach(config.storage, config.policy)
        self._request_prefetch = self.release.prefetching(self.cache)

    def _start_decode_side(self, config: TierConfig) -> None:
        if not self.release.receives:
            reason = f"a server that only decodes is driven from {FIRST_THAT_RECEIVES} on"
            raise UnusableImplementation(f"sglang {self.release.version}+hicache: {reason}")
        kv = self.server.allocator.get_kvcache()
        memory = self.copies.memory
        if config.decode == "radix":
            if config.window is None:
                self.server.allocator._kvcache = HostCopies(memory=memory["full"])
            else:
                kv.full_kv_pool = HostCopies(memory=memory["full"])
                kv.swa_kv_pool = HostCopies(memory=memory["swa"])
        self.start_decode_side(config, memory)

    def _start_prefill_side(self, config: TierConfig) -> None:
        if not self.release.sends:
            reason = f"a server that only prefills is driven from {FIRST_THAT_SENDS} on"
            raise UnusableImplementation(f"sglang {self.release.version}+hicache: {reason}")
        self.prefill_side = prefill_side = PrefillSide(self.release, self.server, config)
        self._prefill_commands = {
            Await: prefill_side.await_prompt, Greet: prefill_side.greet, Arrive: prefill_side.arrive,
            FailPeer: prefill_side.fail_peer, Abort: lambda c: prefill_side.abort(c.request),
            Evict: self.evict, Extend: self._run_round, Poll: self._run_round,
        }  # fmt: skip

    def apply(self, command: TierCommand) -> Outcome:
        """Carry a command out, or refuse it."""
        self._reads = ()
        if self.storage is not None:
            self.storage.written.clear()
        try:
            with self._own_errors():
                try:
                    by_role = {"decode": self._decode_commands, "prefill": self._prefill_commands}
                    known = by_role.get(self.config.role, self._commands)
                    require(type(command) in known, Reason.UNFAITHFUL)
                    return done(known[type(command)](command))
                except CommandRefused as refused:
                    return Refused(refused.reason)
        finally:
            if self.calls is not None:
                self.noted = wire.Noted(self.calls.take())

    def view(self) -> TierFacts:
        with self._own_errors():
            return self.gatherer.gather(self._reads)

    def close(self) -> None:
        """Do nothing: nothing outside this process is held."""

    def _own_errors(self) -> contextlib.AbstractContextManager[None]:
        problem = f"is not of the {self.release.version} kind", "SGLang"
        return raising_misfit(self.root, *problem, "parts/modules.py", unset(), "parts/stand_ins.py")

    # -- requests ---------------------------------------------------------------------------------

    def match(self, command: Match) -> None:
        """Admit a request as Scheduler.get_new_batch_prefill does: one that waits for pages of the storage
        is admitted when it may be."""
        req = self._waiting.get(command.holder)
        if req is not None:
            require(not command.full_only, Reason.UNFAITHFUL)
            require(spelled(command.prompt) == self._waiting_texts[command.holder], Reason.WRONG_PHASE)
            request = req.cache_request_handle
            prefetched = self.cache.check_prefetch_progress(request)
            require(prefetched, Reason.WRONG_PHASE)
            self.cache.pop_prefetch_loaded_span(request)
            del self._waiting[command.holder]
        super().match(command)
        if req is not None:  # as PrefillAdder._account_prefill_cache_admission does
            self.cache.finish_storage_prefetch_admission(
                req.cache_request_handle, fulfilled_tokens=0, reason=None
            )

    def unlock(self, command: Unlock) -> None:
        """Unlock a holder. One with a loaded state is admitted first, because its forward pass waits for
        the load."""
        holder = self.server.lock_holders.get(command.holder)
        states = self.server.states
        has_slot = states is not None and holder is not None and holder.req.kv.holds_mamba
        if has_slot:
            self.cache.ready_to_load_host_cache()
            self.copies.finish_loads()
        super().unlock(command)
        if has_slot:
            states.revert_match(holder.req)  # type: ignore[union-attr]

    def insert(self, command: Insert) -> None:
        require(command.holder not in self._waiting, Reason.WRONG_PHASE)
        super().insert(command)

    def _prefetch(self, command: Prefetch) -> None:
        """Prefetch for a request, as Scheduler._add_request_to_queue does."""
        server = self.server
        tokens = spelled(command.prompt)
        require(tokens, Reason.EMPTY)
        require(
            not server.is_name_taken(command.holder) and command.holder not in self._waiting,
            Reason.REQUEST_EXISTS,
        )
        require(self.storage is not None, Reason.UNFAITHFUL)
        require(len(tokens) <= server.geometry.width, Reason.ROW_TOO_SHORT)
        named_tokens = self.named_tokens(tokens)
        namespace = server.namespace_of(tokens)
        req = server.new_request(command.holder, named_tokens, None, None, **namespace)
        self._waiting[command.holder] = req
        self._waiting_texts[command.holder] = tokens
        self._request_prefetch(req)

    def _abort(self, command: Abort) -> None:
        require(command.request in self._waiting, Reason.UNKNOWN_REQUEST)
        require(not command.marked, Reason.UNFAITHFUL)
        self.cache.release_aborted_request(self._waiting.pop(command.request).cache_request_handle)

    def _tracked(self, prefix: int, end: int) -> int:
        """Return after how many tokens a prefill keeps a state for the tree, as
        ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend does."""
        grid = checkpoint_grid()
        computed = (end - prefix) // grid * grid
        return prefix + computed if computed else 0

    def _compute(self, holder: LockHolder, tokens: Sequence[int], evicted: int) -> None:
        """Run a batch: it sends its load, and its forward pass waits for that before it reads the prefix."""
        self.cache.ready_to_load_host_cache()
        self.copies.finish_loads()
        self._reads = tuple(self.gatherer.reads(holder))
        super()._compute(holder, tokens, evicted)

    def _reset(self, command: ResetCache) -> None:
        """Flush the cache (Scheduler.flush_cache): no request runs, so no forward pass waits for a load."""
        require(not command.running, Reason.UNFAITHFUL)
        self._require_idle()
        self.cache.reset()
        self.server.rows.clear()
        self.server.allocator.clear()

    def _require_idle(self) -> None:
        """Refuse the command unless no request is there and no storage operation is recorded, as
        Scheduler.is_fully_idle does."""
        cache = self.cache
        busy = self.server.lock_holders or self.copies.queues[True] or self._waiting
        require(not (busy or cache.ongoing_prefetch or cache.ongoing_backup), Reason.NOT_IDLE)

    # -- the scheduler and the copy engine ---------------------------------------------------------

    def _send(self, command: Send) -> None:
        controller = self.cache.cache_controller
        require(controller.load_queue if command.load else controller.write_queue, Reason.EMPTY)
        if command.load:
            require(self._may_load_ahead(), Reason.UNFAITHFUL)
            self.cache.ready_to_load_host_cache()
        else:
            self.cache.flush_pending_backups()

    def _may_load_ahead(self) -> bool:
        """Return whether another load may be sent: a forward pass waits for the loads of its batch, and one
        of three counters is for the next batch."""
        counter = self.cache.cache_controller.layer_done_counter
        following = (counter.producer_index + ahead for ahead in (1, 2))
        return all(
            counter.events[at % counter.num_counters].finish_event.query() for at in following
        )

    def _poll(self, command: Poll) -> None:
        del command
        self.cache.check_hicache_events()

    def _copy(self, command: Copy) -> None:
        job = self.copies.next_to_copy(command.load)
        require(job is not None, Reason.EMPTY)
        self.copies.copy(job)  # type: ignore[arg-type]

    def _complete(self, command: Complete) -> None:
        require(self.copies.queues[command.load], Reason.EMPTY)
        self.copies.complete(command.load)

    # -- a server that only decodes ----------------------------------------------------------------

    def _poll_decode_side(self, command: Poll) -> None:
        del command
        self._reads = tuple(
            read
            for turn in self.process_queues()
            for read in self.gatherer.decoding(turn, turn.fill - 1)
        )

    def _decode(self, command: Decode) -> None:
        turns = self.decode_round(command)
        self._reads = tuple(
            read for turn in turns for read in self.gatherer.decoding(turn, turn.fill - 1)
        )
        self.sample_tokens(turns)

    # -- a server that only prefills ---------------------------------------------------------------

    def _run_round(self, command: Extend | Poll) -> None:
        """Run a round of the event loop. The reads of its forward pass are noted before the pass writes."""
        assert self.prefill_side is not None
        reads: list[TierRead] = []
        self.prefill_side.before_forward = lambda turn, start: reads.extend(
            self.gatherer.decoding(turn, start)
        )
        if isinstance(command, Poll):
            self.prefill_side.poll()
        else:
            self.prefill_side.extend(command)
        self._reads = tuple(reads)

    # -- the threads of the storage ----------------------------------------------------------------

    def _run_storage_thread(self, body: str, waiting: str, command: Query | Fetch | Backup) -> None:
        require(self.storage is not None, Reason.UNFAITHFUL)
        assert self.storage is not None
        at_work = self.storage.thread(body).operation is not None
        require(at_work or getattr(self.cache.cache_controller, waiting).qsize(), Reason.EMPTY)
        self.storage.go_on(body, command.pages)

    def _reattach(self, command: Reattach) -> None:
        """Detach the storage as Scheduler.detach_hicache_storage_wrapped does, and attach it again."""
        del command
        require(self.storage is not None, Reason.UNFAITHFUL)
        assert self.storage is not None
        self._require_idle()
        cache = self.cache
        require(not (cache.ongoing_write_through or cache.ongoing_load_back), Reason.NOT_IDLE)
        self.storage.reattach(self.config.storage, self.config.policy)

    def _tick(self, command: Tick) -> None:
        require(self.config.storage == "timeout", Reason.UNFAITHFUL)
        require(command.seconds >= 1, Reason.BAD_LENGTH)
        self.release.clock.now += command.seconds


def main(arguments: list[str]) -> int:
    """Serve until stdin ends. Returns an exit status."""
    root = Path(arguments[0])
    version, core, *options = arguments[1:]
    logging.disable(logging.CRITICAL)

    def make() -> Any:
        torch.set_num_threads(1)
        torch.inference_mode().__enter__()  # see impl/sglang/process/worker.py
        driver = TierDriver(tiered_release(version, core)(root), root)
        driver.calls = Calls(driver) if "--calls" in options else None
        return driver

    return serve(make, root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
