"""Plays what requests, the scheduler and the copy engine do to a release's tree with its host tier.

`python -m impl.sglang.tiers.driver ROOT VERSION` is the worker of a release. A release's module state is
global, so each worker has one.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from impl.adapter import Capabilities
from impl.lazy import Tensor
from impl.process.failures import own_errors
from impl.process.worker import serve
from impl.sglang.parts.stand_ins import SERVER_ARGS, UNSET
from impl.sglang.scheduler.server import LockHolder, Server
from impl.sglang.scheduler.tree_commands import TreeCommands
from impl.sglang.tiers.gathering import Gatherer
from impl.sglang.tiers.loading import tiered
from impl.vocabulary import CommandRefused, Played, done, require
from reference.blocks.commands import Complete, Copy, ResetCache
from reference.commands import Evict, Insert, Match, Outcome, Reason, Refused, Unlock
from reference.tiers.commands import Load, Poll, Send, TierCommand
from reference.tiers.config import TierConfig
from reference.tiers.facts import TierFacts, TierRead

_ALL_OR_NONE = "must commit all promised FULL tokens or none"


class TierDriver(TreeCommands):
    """One release in this process; `reset` starts a tree with a host tier, `apply` plays one command."""

    name, capabilities = "", Capabilities()  # TierSystem says both

    release: Any

    def __init__(self, release: Any, root: Path) -> None:
        self.release, self.root = release, root
        self._checks_loads = _ALL_OR_NONE in release.policy.read_text(encoding="utf-8")
        self._commands: dict[type, Callable[[Any], Played]] = {
            Match: self.match, Load: self._load, Insert: self.insert, Unlock: self.unlock, Evict: self.evict,
            Send: self._send, Copy: self._copy, Complete: self._complete, Poll: self._poll,
            ResetCache: self._reset,
        }  # fmt: skip

    def reset(self, geometry: TierConfig) -> None:
        """Start an empty tree of these sizes."""
        with self._own_errors():
            self.config = geometry
            self.server = server = Server(self.release, geometry.device)
            self.cache: Any = server.cache
            self._start_tier()
            self.copies = self.cache.cache_controller.l2_transfer_engine
            self.copies.memory = {"full": server.full_stamps, "swa": server.swa_stamps}
            self.copies.host = {pool: [0] * geometry.host_slots(pool) for pool in geometry.pools}
            self.held = self.release.admission(self.cache)
            self.facts = Gatherer(self.release, server, geometry)
            self._loads = False
            self._reads: tuple[TierRead, ...] = ()

    def _start_tier(self) -> None:
        """What the scheduler does after it has made its tree."""
        config, server = self.config, self.server
        SERVER_ARGS.tiers, SERVER_ARGS.files = config, self.root
        SERVER_ARGS.enable_hierarchical_cache, SERVER_ARGS.hicache_write_policy = True, config.policy
        SERVER_ARGS.hicache_host_memory_mode = "cache"
        SERVER_ARGS.hicache_storage_prefetch_policy = "best_effort"
        params = self.release._cache_params(
            server.rows, server.allocator, server.geometry, tree_components=self.cache.tree_components
        )
        self.cache.init_hicache(SERVER_ARGS, params)
        self.cache.load_back_threshold = 1  # of ten tokens, tuned for real texts

    def apply(self, command: TierCommand) -> Outcome:
        """Carry a command out, or refuse it."""
        self._reads = ()
        with self._own_errors():
            try:
                return done(self._commands[type(command)](command))
            except CommandRefused as refused:
                return Refused(refused.reason)

    def view(self) -> TierFacts:
        with self._own_errors():
            return self.facts.gather(self._reads)

    def close(self) -> None:
        """Holds nothing outside of this process."""

    def _own_errors(self) -> contextlib.AbstractContextManager[None]:
        problem = f"is not of the {self.release.version} kind", "SGLang"
        unset = "|".join(rf"\b{name}\b" for name in UNSET) or r"(?!)"
        return own_errors(self.root, *problem, "parts/modules.py", lambda: unset, "parts/stand_ins.py")

    # -- requests ---------------------------------------------------------------------------------

    def _load(self, command: Load) -> None:
        self._loads = True
        try:
            self.match(Match(command.holder, command.prompt))
        finally:
            self._loads = False

    def _found(self, holder: LockHolder, ids: Any) -> Tensor:
        """PrefillAdder.add_one_req: a load is prepared while the match is held."""
        slots, req = super()._found(holder, ids), holder.req
        if self.release.keeps_slots:  # Req.init_next_round_input; later match_kv_cache does it
            for name in ("best_match_node", "host_hit_length", "swa_host_hit_length", "last_host_node"):
                setattr(req, name, getattr(self._tree().found, name, 0))
        if not (self._loads and req.needs_host_load_back()):
            return slots
        with self.held(req.last_node):
            return self._loaded(req, slots)

    def _loaded(self, req: Any, slots: Tensor) -> Tensor:
        params = self.release.base.InitLoadBackParams(
            best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
        )
        promised, pinned = req.host_hit_length, contextlib.nullcontext()
        if "lock_host" in inspect.signature(self.held).parameters:
            pinned = self.held(req.best_match_node, lock_host=True)
        with pinned:
            loaded, req.last_node = self.cache.init_load_back(params)
        count = len(loaded) if torch.is_tensor(loaded) else loaded
        if self._checks_loads and 0 < count < promised:
            raise RuntimeError(f"HiCache load-back {_ALL_OR_NONE}: promised={promised} loaded={count}")
        if torch.is_tensor(loaded):
            found: Tensor = torch.cat([slots, loaded])
            req.prefix_indices = found
            return found
        req.prefix_len += loaded
        return self._slots(req)

    def _slots(self, req: Any) -> Tensor:
        slots: Tensor = self.cache.prefix_device_indices(req)
        return slots

    def _compute(self, holder: LockHolder, tokens: Sequence[int], evicted: int) -> None:
        """The batch sends its load, and its forward pass waits for it before it reads the prefix."""
        self.cache.ready_to_load_host_cache()
        self.copies.finish_loads()
        self._reads = tuple(self.facts.reads(holder))
        super()._compute(holder, tokens, evicted)

    def _reset(self, command: ResetCache) -> None:
        """Scheduler.flush_cache: nobody runs, so no forward pass waits for a load."""
        require(not command.running, Reason.UNFAITHFUL)
        require(not self.server.lock_holders and not self.copies.queues[True], Reason.NOT_IDLE)
        self.cache.reset()
        self.server.rows.clear()
        self.server.allocator.clear()

    # -- the scheduler and the copy engine ---------------------------------------------------------

    def _send(self, command: Send) -> None:
        controller = self.cache.cache_controller
        require(controller.load_queue if command.load else controller.write_queue, Reason.EMPTY)
        if command.load:
            self.cache.ready_to_load_host_cache()
        else:
            self.cache.flush_pending_backups()

    def _poll(self, command: Poll) -> None:
        del command
        self.cache.check_hicache_events()

    def _copy(self, command: Copy) -> None:
        job = self.copies.next_to_copy(command.load)
        require(job is not None, Reason.EMPTY)
        self.copies.copy(job)

    def _complete(self, command: Complete) -> None:
        require(self.copies.queues[command.load], Reason.EMPTY)
        self.copies.complete(command.load)


def main(arguments: list[str]) -> int:
    """Serve until stdin ends. Returns an exit status."""
    root, version = Path(arguments[0]), arguments[1]
    logging.disable(logging.CRITICAL)

    def make() -> Any:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        return TierDriver(tiered(version)(root), root)

    return serve(make, root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
