"""The load of a prefix whose KV only the host has, as a release's scheduler does it between a match and its
lock."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import torch

from impl.lazy import Tensor
from impl.loading.optional import optional
from impl.sglang.scheduler.live_requests import LockHolder
from impl.sglang.scheduler.tree_commands import TreeCommands
from reference.commands import Match
from reference.tiers.commands import Load

_ALL_OR_NONE = "must commit all promised FULL tokens or none"


def refuses_partial_loads(policy: Path) -> bool:
    """Return whether the scheduler refuses a load of only a part of what a match has promised.

    policy: its schedule_policy.py.
    """
    return _ALL_OR_NONE in policy.read_text(encoding="utf-8")


class HostLoads(TreeCommands):
    """The commands of a tree whose matches may load back a prefix from the host.

    cache: the release's tree.
    refuses_partial_loads: the scheduler does so.
    """

    release: Any
    cache: Any
    refuses_partial_loads: bool
    _loads_prefix: bool  # the match under way is a Load
    _lock_node: Any  # the release's context in which a node is locked

    def load(self, command: Load) -> None:
        """Match a prompt, and load back the part that only the host has."""
        if (states := self.server.states) is not None:
            # For the node, for the request, and what its match locks: a server has three for each.
            states.require(3)
        self._loads_prefix = True
        try:
            self.match(Match(command.holder, command.prompt))
        finally:
            self._loads_prefix = False

    def _match_prefix(self, holder: LockHolder, ids: Any) -> Tensor:
        """Match a prefix as PrefillAdder.add_one_req does: the match is locked while a load is prepared."""
        slots = super()._match_prefix(holder, ids)
        req = holder.req
        if self.release.keeps_slots:
            self._note_promised_match(req)
        if not (self._loads_prefix and req.needs_host_load_back()):
            return slots
        with self._lock_node(req.last_node):
            return self._load_prefix(req, slots)

    def _note_promised_match(self, req: Any) -> None:
        """Match the prefix of a request as Req.init_next_round_input does, or match_kv_cache in later
        releases."""
        for name in ("best_match_node", "host_hit_length", "swa_host_hit_length", "last_host_node"):
            setattr(req, name, optional(self._tree().match_result, f"MatchResult.{name}", 0))

    def _load_prefix(self, req: Any, slots: Tensor) -> Tensor:
        """Load the part of a match that is on the host (init_load_back), and return the slots of the whole
        prefix. Raises RuntimeError as the release's scheduler does where only a part is loaded."""
        params = self.release.base.InitLoadBackParams(
            best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
        )
        promised = req.host_hit_length
        pinned = contextlib.nullcontext()
        if "lock_host" in inspect.signature(self._lock_node).parameters:
            pinned = self._lock_node(req.best_match_node, lock_host=True)
        with pinned:
            loaded, req.last_node = self.cache.init_load_back(params)
        count = len(loaded) if torch.is_tensor(loaded) else loaded
        if self.refuses_partial_loads and 0 < count < promised:
            raise RuntimeError(
                f"HiCache load-back {_ALL_OR_NONE}: promised={promised} loaded={count}"
            )
        if torch.is_tensor(loaded):
            all_slots: Tensor = torch.cat([slots, loaded])
            req.prefix_indices = all_slots
            return all_slots
        req.prefix_len += loaded
        return self._prefix_slots(req)

    def _prefix_slots(self, req: Any) -> Tensor:
        slots: Tensor = self.cache.prefix_device_indices(req)
        return slots
