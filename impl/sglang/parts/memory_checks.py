"""A release's own memory checks, bound to a stand-in of its scheduler.

The stand-in keeps the running batches as the scheduler does and carries what the checks read. What is
counted, and the verdict on it, is the release's code: terms that a release does not count have no
account here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from impl.sglang.parts.stand_ins import SERVER_ARGS, DisaggregationMode, ForwardMode
from reference.commands import Account, Report
from reference.geometry import Geometry

_ALARM = 200  # characters of an alarm that are passed on


class Scheduler:
    """The attributes of a scheduler that every release's checks read: no overlay of other pools, no
    disaggregation.

    last_batch: what ran last; None before the first launch and once the server went idle. After a decode
    it is running_batch, as a decode step takes everybody under way. running_batch: the others under way.
    Finished requests stay listed until the next launch.
    """

    checks: Any  # the release's class; the class that is used inherits from both
    enable_hisparse = is_hybrid_ssm = current_scheduler_metrics_enabled = False
    disaggregation_mode = DisaggregationMode.NULL
    new_token_ratio = init_new_token_ratio = 1.0

    def __init__(
        self, batch: Any, rows: Any, allocator: Any, cache: Any, geometry: Geometry
    ) -> None:
        page = geometry.page_size
        self.make_batch = batch
        self.tree_cache, self.req_to_token_pool, self.token_to_kv_pool_allocator = (
            cache,
            rows,
            allocator,
        )
        self.page_size = page
        self.is_hybrid_swa = geometry.window is not None
        self.max_total_num_tokens = self.full_tokens_per_layer = geometry.full_pages * page
        self.swa_tokens_per_layer = geometry.swa_pages * page
        self.server_args = SERVER_ARGS
        self.waiting_queue: list[Any] = []
        self.waiting_locked = False
        self.last_batch: Any = None
        self.running_batch = self._batch([], ForwardMode.IDLE)

    # What the idle checks do besides, and none of it is bookkeeping.

    def is_fully_idle(self) -> bool:
        return not self.waiting_queue

    def _publish_kv_events(self) -> None:
        pass

    maybe_sleep_on_idle = reset_device_timer_window = _publish_kv_events

    # The batches.

    def _batch(self, reqs: Sequence[Any], mode: ForwardMode) -> Any:
        batch = self.make_batch(reqs=list(reqs))
        batch.forward_mode = mode
        return batch

    def launch(self, reqs: Sequence[Any], mode: ForwardMode) -> None:
        """A batch of these requests runs; those under way before are merged, less the finished ones."""
        listed = [r for b in (self.running_batch, self.last_batch) if b is not None for r in b.reqs]
        now = {id(r) for r in reqs}
        others = list({id(r): r for r in listed if not r.finished() and id(r) not in now}.values())
        if mode is ForwardMode.DECODE:
            self.last_batch = self.running_batch = self._batch([*others, *reqs], mode)
        else:
            self.last_batch = self._batch(reqs, mode)
            self.running_batch = self._batch(others, ForwardMode.DECODE)

    def leave(self, req: Any) -> None:
        """A retracted request is taken out of the batches at once."""
        for batch in (self.last_batch, self.running_batch):
            if batch is not None:
                batch.reqs = [r for r in batch.reqs if r is not req]

    # The commands.

    def busy(self, level: int) -> Report:
        """The check between two steps. Without a last batch the release's own one looks at nothing."""
        if self.last_batch is None:
            return Report(self.idle_accounts())
        os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = str(level)
        return _checked(self.self_check_during_busy, self.busy_accounts)

    def idle(self, waiting: Sequence[Any], locked: bool) -> Report:
        """The scheduler found nothing to run, so no batch is left; `waiting`: the queue.

        locked: lock holders, or requests that wait, have locks in the radix tree. No scheduler comes to
        that, and the releases' inspection of the tree (nothing may be locked when idle) is left out then.
        """
        self.last_batch, self.running_batch = None, self._batch([], ForwardMode.IDLE)
        self.waiting_queue, self.waiting_locked = list(waiting), locked
        return _checked(self.on_idle, self.idle_accounts)

    def idle_rows(self) -> Account:
        rows = self.req_to_token_pool
        return Account(
            "rows", len(rows.free_slots), 0, 0, self._session_held_req_count(), 0, rows.size
        )

    def busy_accounts(self) -> tuple[Account, ...]:
        """The terms that the release's busy check adds up, as its functions have them now."""
        raise NotImplementedError

    def idle_accounts(self) -> tuple[Account, ...]:
        """The same of its idle check."""
        raise NotImplementedError

    # Of the release.

    self_check_during_busy: Callable[[], None]
    on_idle: Callable[[], None]
    _session_held_req_count: Callable[[], int]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the release's checks read {name} of the scheduler, which has none here"
        )


class Scheduler0510(Scheduler):
    """0.5.10. Busy: one pool, no rows, SWA or not (#21499). Idle: both pools, and the rows."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.uncached = 0

    def on_idle(self) -> None:
        self.self_check_during_idle()

    def check_tree_cache(self) -> None:
        if not self.waiting_locked:
            self.checks.check_tree_cache(self)

    def _get_batch_uncached_size(self, batch: Any) -> int:
        size: int = self.checks._get_batch_uncached_size(self, batch)
        self.uncached += size
        return size

    def busy_accounts(self) -> tuple[Account, ...]:
        # Which batches are summed is for the check to say: it ran just before.
        available, evictable = self._get_token_info()[2:]
        held, total = self._session_held_tokens(), self.max_total_num_tokens
        uncached, self.uncached = self.uncached, 0
        protected = self.tree_cache.protected_size()
        return (Account("full", available, evictable, protected, held, uncached, total),)

    def idle_accounts(self) -> tuple[Account, ...]:
        cache = self.tree_cache
        if not self.is_hybrid_swa:
            available, evictable = self._get_token_info()[2:]
            held, total = self._session_held_tokens(), self.max_total_num_tokens
            full = Account("full", available, evictable, cache.protected_size(), held, 0, total)
            return full, self.idle_rows()
        full_left, full_evictable, swa_left, swa_evictable = self._get_swa_token_info()[4:]
        return (
            Account("full", full_left, full_evictable, cache.full_protected_size(),
                    self._session_held_full_tokens(), 0, self.full_tokens_per_layer),
            Account("swa", swa_left, swa_evictable, cache.swa_protected_size(),
                    self._session_held_swa_tokens(), 0, self.swa_tokens_per_layer),
            self.idle_rows(),
        )  # fmt: skip


class Scheduler0511(Scheduler):
    """0.5.11. All checks add up through one function; rows are looked at when idle only."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.sums: dict[str, Account] = {}

    def _check_pool_invariant(
        self, pool_name: str, available: int, evictable: int, protected: int, session_held: int,
        total: int, uncached: int = 0,
    ) -> tuple[bool, str]:  # fmt: skip
        terms = available, evictable, protected, session_held
        self.sums[pool_name] = Account(pool_name, *terms, uncached, total)
        verdict: tuple[bool, str] = self.checks._check_pool_invariant(
            pool_name, *terms, total, uncached
        )
        return verdict

    def _check_tree_cache(self) -> None:
        if not self.waiting_locked:
            self.checks._check_tree_cache(self)

    def _added_up(self) -> tuple[Account, ...]:
        sums, self.sums = self.sums, {}
        return tuple(sums.values())

    def busy_accounts(self) -> tuple[Account, ...]:
        return self._added_up()

    def idle_accounts(self) -> tuple[Account, ...]:
        # on_idle gives up before it while requests wait
        self._check_all_pools(self.get_pool_stats())
        return (*self._added_up(), self.idle_rows())


class Scheduler0513(Scheduler0511):
    """0.5.13. The checks are an object, which asks another one what the pools have.

    Both are made anew for every server; `parts` are the release's classes of them.
    """

    parts: dict[str, Any]

    def __init__(
        self, batch: Any, rows: Any, allocator: Any, cache: Any, geometry: Geometry
    ) -> None:
        super().__init__(batch, rows, allocator, cache, geometry)
        common = {
            "tree_cache": cache,
            "token_to_kv_pool_allocator": allocator,
            "req_to_token_pool": rows,
            "is_hybrid_swa": self.is_hybrid_swa,
            "is_hybrid_ssm": False,
            "full_tokens_per_layer": self.full_tokens_per_layer,
            "swa_tokens_per_layer": self.swa_tokens_per_layer,
            "max_total_num_tokens": self.max_total_num_tokens,
            "get_last_batch": lambda: self.last_batch,
            "get_running_batch": lambda: self.running_batch,
            "session_controller": None,
            "hisparse_coordinator": None,
            "enable_hisparse": False,
            "disaggregation_mode": DisaggregationMode.NULL,
            "page_size": self.page_size,
            "server_args": SERVER_ARGS,
            "scheduler_stage_metrics": None,
        }
        self.observer = self._make(self.parts["observer"], common)
        self.checks = self.parts["checker"]
        noting = type(
            "Noting", (self.checks,), {"_check_pool_invariant": self._check_pool_invariant}
        )
        self.checker = self._make(noting, {**common, "pool_stats_observer": self.observer})

    @staticmethod
    def _make(kind: type, given: dict[str, Any]) -> Any:
        """A release's dataclass, out of those of its fields that are given."""
        known = {f.name for f in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in given.items() if name in known})

    def self_check_during_busy(self) -> None:
        self.checker.self_check_during_busy()

    def on_idle(self) -> None:
        """Scheduler.on_idle, as far as it checks memory."""
        if not self.is_fully_idle():
            return
        leak, messages = self.checker._check_all_pools(self.observer.get_pool_stats())
        if leak:
            self.checker._report_leak("pool", "\n".join(messages))
        self.checker._check_req_pool()
        if not self.waiting_locked:
            self.checker._check_tree_cache()

    def _session_held_req_count(self) -> int:
        count: int = self.observer.session_held_req_count()
        return count

    def idle_accounts(self) -> tuple[Account, ...]:
        self.checker._check_all_pools(self.observer.get_pool_stats())
        return (*self._added_up(), self.idle_rows())


def _checked(check: Callable[[], None], accounts: Callable[[], tuple[Account, ...]]) -> Report:
    """Return the result of the release's check, and its terms.

    The releases raise AssertionError (busy), ValueError (idle) or a bare Exception (the inspection of the
    tree); anything else is no verdict.
    """
    alarm = ""
    try:
        check()
    except Exception as error:
        if type(error) not in (AssertionError, ValueError, Exception):
            raise
        alarm = " ".join(str(error).split())[:_ALARM] or type(error).__name__
    return Report(accounts(), (), alarm)
