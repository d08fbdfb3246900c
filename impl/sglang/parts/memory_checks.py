"""A release's own memory checks, bound to a stand-in for its scheduler.

The stand-in keeps the running batches as the scheduler does and has the attributes that the checks read. The
release's code counts and decides; a term that a release does not count has no account here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from impl.sglang.parts.stand_ins import SERVER_ARGS, DisaggregationMode, ForwardMode
from reference.commands import Account, Report
from reference.geometry import Geometry

_MAX_ALARM = 200  # characters of an alarm that are reported


class Scheduler:
    """The attributes of a scheduler that every release's checks read, without further pools and
    disaggregation.

    checks: the release's class with the checks. The class that is used inherits from it as well.
    last_batch: the batch that ran last; None before the first launch and when the server has become idle.
    After a decode it is running_batch, because a decode step takes all running requests.
    running_batch: running requests that are not in last_batch. Finished ones stay until the next launch.
    """

    checks: Any
    enable_hisparse = is_hybrid_ssm = current_scheduler_metrics_enabled = False
    disaggregation_mode = DisaggregationMode.NULL
    new_token_ratio = init_new_token_ratio = 1.0

    def __init__(
        self, batch: Any, rows: Any, allocator: Any, cache: Any, geometry: Geometry
    ) -> None:
        page = geometry.page_size
        self.make_batch = batch
        self.tree_cache = cache
        self.req_to_token_pool = rows
        self.token_to_kv_pool_allocator = allocator
        self.page_size = page
        self.is_hybrid_swa = geometry.window is not None
        self.max_total_num_tokens = geometry.full_pages * page
        self.full_tokens_per_layer = self.max_total_num_tokens
        self.swa_tokens_per_layer = geometry.swa_pages * page
        self.server_args = SERVER_ARGS
        self.waiting_queue: list[Any] = []
        self.waiting_locked = False
        self.last_batch: Any = None
        self.running_batch = self._batch([], ForwardMode.IDLE)

    # -- what on_idle of a release calls besides its checks ---------------------------------------

    def is_fully_idle(self) -> bool:
        return not self.waiting_queue

    def _publish_kv_events(self) -> None:
        pass

    maybe_sleep_on_idle = reset_device_timer_window = _publish_kv_events

    # -- the batches ------------------------------------------------------------------------------

    def _batch(self, reqs: Sequence[Any], mode: ForwardMode) -> Any:
        batch = self.make_batch(reqs=list(reqs))
        batch.forward_mode = mode
        return batch

    def launch(self, reqs: Sequence[Any], mode: ForwardMode) -> None:
        """Launch a batch of these requests. Requests launched before are merged, without finished ones."""
        batches = [b for b in (self.running_batch, self.last_batch) if b is not None]
        launched = {id(r) for r in reqs}
        others_by_id = {
            id(r): r
            for batch in batches
            for r in batch.reqs
            if not r.finished() and id(r) not in launched
        }
        others = list(others_by_id.values())
        if mode is ForwardMode.DECODE:
            self.running_batch = self._batch([*others, *reqs], mode)
            self.last_batch = self.running_batch
        else:
            self.last_batch = self._batch(reqs, mode)
            self.running_batch = self._batch(others, ForwardMode.DECODE)

    def remove(self, req: Any) -> None:
        """Remove a retracted request from the batches at once."""
        for batch in (self.last_batch, self.running_batch):
            if batch is not None:
                batch.reqs = [r for r in batch.reqs if r is not req]

    # -- the commands -----------------------------------------------------------------------------

    def busy(self, level: int) -> Report:
        """Run the check between two steps. Without a last batch the release checks nothing."""
        if self.last_batch is None:
            return Report(self.idle_accounts())
        os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = str(level)
        return _run_check(self.self_check_during_busy, self.busy_accounts)

    def idle(self, waiting: Sequence[Any], locked: bool) -> Report:
        """Run the check of an idle scheduler, which has no batch left.

        waiting: the queue.
        locked: lock holders or waiting requests have locks in the radix tree. A real scheduler never gets
        there, and the releases' inspection of the tree (nothing may be locked when idle) is left out
        then.
        """
        self.last_batch = None
        self.running_batch = self._batch([], ForwardMode.IDLE)
        self.waiting_queue = list(waiting)
        self.waiting_locked = locked
        return _run_check(self.on_idle, self.idle_accounts)

    def idle_rows(self) -> Account:
        rows = self.req_to_token_pool
        return Account(
            "rows",
            available=len(rows.free_slots),
            evictable=0,
            protected=0,
            session_held=self._session_held_req_count(),
            uncached=0,
            total=rows.size,
        )

    def busy_accounts(self) -> tuple[Account, ...]:
        """Return the terms of the release's busy check, by its own functions."""
        raise NotImplementedError

    def idle_accounts(self) -> tuple[Account, ...]:
        """Return the terms of the release's idle check, by its own functions."""
        raise NotImplementedError

    # -- methods of the release -------------------------------------------------------------------

    self_check_during_busy: Callable[[], None]
    on_idle: Callable[[], None]
    _session_held_req_count: Callable[[], int]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the release's checks read {name} of the scheduler, which has none here"
        )


class Scheduler0510(Scheduler):
    """The checks of 0.5.10. Busy: one pool, no rows, with SWA or not (#21499). Idle: both pools and rows."""

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
        available, evictable = _left_in(self._get_token_info(), "full")
        session_held = self._session_held_tokens()
        # The check, which ran just before, has added up the batches that it counts.
        uncached = self.uncached
        self.uncached = 0
        protected = self.tree_cache.protected_size()
        total = self.max_total_num_tokens
        return (
            Account(
                "full",
                available=available,
                evictable=evictable,
                protected=protected,
                session_held=session_held,
                uncached=uncached,
                total=total,
            ),
        )

    def idle_accounts(self) -> tuple[Account, ...]:
        """Return the accounts of the check of an idle server: of the full pool, of the SWA pool where there
        is one, and of the rows."""
        cache = self.tree_cache
        if not self.is_hybrid_swa:
            available, evictable = _left_in(self._get_token_info(), "full")
            session_held = self._session_held_tokens()
            total = self.max_total_num_tokens
            full = Account(
                "full",
                available=available,
                evictable=evictable,
                protected=cache.protected_size(),
                session_held=session_held,
                uncached=0,
                total=total,
            )
            return full, self.idle_rows()
        stats = self._get_swa_token_info()
        full_left, full_evictable = _left_in(stats, "full")
        swa_left, swa_evictable = _left_in(stats, "swa")
        return (
            Account(
                "full",
                available=full_left,
                evictable=full_evictable,
                protected=cache.full_protected_size(),
                session_held=self._session_held_full_tokens(),
                uncached=0,
                total=self.full_tokens_per_layer,
            ),
            Account(
                "swa",
                available=swa_left,
                evictable=swa_evictable,
                protected=cache.swa_protected_size(),
                session_held=self._session_held_swa_tokens(),
                uncached=0,
                total=self.swa_tokens_per_layer,
            ),
            self.idle_rows(),
        )


def _left_in(stats: Any, pool: str) -> tuple[int, int]:
    """Return how many tokens of a pool are available, and how many the tree can evict.

    stats: of a function of 0.5.10, which ends its tuple with both for each pool; a tree between 0.5.10 and
    0.5.11 has `PoolStats`.
    """
    if isinstance(stats, tuple):
        available, evictable = stats[-2:] if pool == "swa" or len(stats) == 4 else stats[-4:-2]
        return available, evictable
    sizes = vars(stats)
    return sizes[f"{pool}_available_size"], sizes[f"{pool}_evictable_size"]


class Scheduler0511(Scheduler):
    """The checks of 0.5.11. One function adds up all pools; rows are checked when idle only.

    sums: the terms that the function was called with, by pool.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.sums: dict[str, Account] = {}

    def _check_pool_invariant(
        self, pool_name: str, available: int, evictable: int, protected: int, session_held: int,
        total: int, uncached: int = 0,
    ) -> tuple[bool, str]:  # fmt: skip
        terms = (available, evictable, protected, session_held)
        self.sums[pool_name] = Account(pool_name, *terms, uncached, total)
        verdict: tuple[bool, str] = self.checks._check_pool_invariant(
            pool_name, *terms, total, uncached
        )
        return verdict

    def _check_tree_cache(self) -> None:
        if not self.waiting_locked:
            self.checks._check_tree_cache(self)

    def _take_sums(self) -> tuple[Account, ...]:
        sums = tuple(self.sums.values())
        self.sums = {}
        return sums

    def busy_accounts(self) -> tuple[Account, ...]:
        return self._take_sums()

    def idle_accounts(self) -> tuple[Account, ...]:
        # While requests wait, on_idle returns before this check.
        self._check_all_pools(self.get_pool_stats())
        return (*self._take_sums(), self.idle_rows())


class Scheduler0513(Scheduler0511):
    """The checks of 0.5.13: a checker object, which asks an observer for the sizes of the pools.

    parts: the release's classes of the two.
    """

    parts: dict[str, Any]

    def __init__(
        self, batch: Any, rows: Any, allocator: Any, cache: Any, geometry: Geometry
    ) -> None:
        """Make the release's observer of the pools and its checker, which records the accounts that it
        compares."""
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
        recording_checker = type(
            "Noting", (self.checks,), {"_check_pool_invariant": self._check_pool_invariant}
        )
        self.checker = self._make(recording_checker, {**common, "pool_stats_observer": self.observer})

    @staticmethod
    def _make(kind: type, given: dict[str, Any]) -> Any:
        """Make an object of a release's dataclass from those of its fields that are given."""
        known = {f.name for f in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in given.items() if name in known})

    def self_check_during_busy(self) -> None:
        self.checker.self_check_during_busy()

    def on_idle(self) -> None:
        """Run the memory checks of Scheduler.on_idle."""
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
        return (*self._take_sums(), self.idle_rows())


def _run_check(check: Callable[[], None], accounts: Callable[[], tuple[Account, ...]]) -> Report:
    """Run a release's check. Returns its alarm, "" for none, and its terms.

    The releases raise AssertionError (busy), ValueError (idle) or a plain Exception (inspection of the tree)
    as an alarm. Other exceptions are raised again.
    """
    alarm = ""
    try:
        check()
    except Exception as error:
        if type(error) not in (AssertionError, ValueError, Exception):
            raise
        alarm = " ".join(str(error).split())[:_MAX_ALARM] or type(error).__name__
    return Report(accounts(), (), alarm)
