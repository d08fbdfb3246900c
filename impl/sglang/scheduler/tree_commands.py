"""Lock holders of the radix tree: Match, Unlock, Insert and Evict as a release's own requests do them.

A lock holder is the release's Req without a session. What it inserts goes through cache_unfinished_req and
cache_finished_req, so the release itself frees duplicates, recovers tombstones and moves the lock. Only a
request in a batch has a row; a lock holder works in one row that the server keeps for this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from impl.sglang.parts.trees import RadixTree
from impl.sglang.scheduler.refusals import need, spelled
from impl.sglang.scheduler.server import ExternalLock
from reference.commands import Choice, Evict, Insert, Match, Reason, Unlock

if TYPE_CHECKING:
    from impl.sglang.scheduler.driver import Driver


def match(driver: Driver, command: Match) -> list[Choice]:
    server = driver.server
    tokens = spelled(command.prompt)
    need(tokens, Reason.EMPTY)
    need(not _in_use(driver, command.holder), Reason.REQUEST_EXISTS)
    need(command.holder not in server.lock_holders, Reason.REQUEST_EXISTS)
    tree = _tree(driver)
    need(len(tokens) <= server.geometry.width, Reason.ROW_TOO_SHORT)
    lock_holder = _newcomer(driver, command.holder)
    tree.unlock(lock_holder.req)
    lock_holder.slots = tree.match(lock_holder.req, driver.release.ids(tokens))
    tree.lock(lock_holder.req)
    lock_holder.tokens = tokens[: len(lock_holder.slots)]
    server.lock_holders[command.holder] = lock_holder
    return []


def unlock(driver: Driver, command: Unlock) -> list[Choice]:
    lock_holder = driver.server.lock_holders.get(command.holder)
    need(lock_holder is not None, Reason.UNKNOWN_REQUEST)
    assert lock_holder is not None
    _tree(driver).unlock(lock_holder.req)
    del driver.server.lock_holders[command.holder]
    return []


def insert(driver: Driver, command: Insert) -> list[Choice]:
    server, geometry = driver.server, driver.server.geometry
    tokens = spelled(command.prompt)
    need(tokens, Reason.EMPTY)
    need(not _in_use(driver, command.holder), Reason.REQUEST_EXISTS)
    lock_holder = server.lock_holders.get(command.holder)
    locked = [] if lock_holder is None else lock_holder.tokens
    prefix = len(locked)
    need(tokens[:prefix] == locked, Reason.SHRINKING_PREFIX)
    need(geometry.window is not None or command.evicted == 0, Reason.NO_SWA)
    _tree(driver)
    need(0 <= command.evicted <= len(tokens), Reason.BAD_LENGTH)
    if command.evicted > prefix and geometry.window is not None:
        # Between the chunks of a prefill a tree's server does not sweep; afterwards no further than this.
        limit = driver.release.sweep_limit(len(tokens), geometry.window, geometry.page_size)
        need(not command.chunked and command.evicted <= limit, Reason.UNFAITHFUL)
    need(len(tokens) <= geometry.width, Reason.ROW_TOO_SHORT)
    end = len(tokens) // geometry.page_size * geometry.page_size
    driver.room([(prefix, end)])

    if lock_holder is None:
        lock_holder = _newcomer(driver, command.holder)
    _compute(driver, lock_holder, tokens[:end], command.evicted)
    if command.chunked:
        driver.release.checkpoint(lock_holder.req, server.cache, chunked=True)
        locked_len = driver.release.cursors(lock_holder.req).cache_protected_len
        lock_holder.tokens = tokens[:locked_len]
        slots = server.rows.req_to_token[server.spare_row, :end].to(torch.int64)
        # A request would go on with what the tree did not take; a lock holder has nothing of its own.
        lock_holder.slots = slots[:locked_len]
        if locked_len < end:
            driver.release.drop(lock_holder.req, server.cache, locked_len, end)
        server.lock_holders[command.holder] = lock_holder
    else:
        driver.release.hand_in(lock_holder.req, server.cache, server.rows)
        server.lock_holders.pop(command.holder, None)
    return []


def evict(driver: Driver, command: Evict) -> list[Choice]:
    need(command.full or command.swa, Reason.EMPTY)
    need(driver.server.geometry.window is not None or command.swa == 0, Reason.NO_SWA)
    tree = _tree(driver)
    need(command.full >= 0 and command.swa >= 0, Reason.BAD_LENGTH)
    driver.freed = tree.evict(command.full, command.swa)
    return []


def _in_use(driver: Driver, name: str) -> bool:
    """A session or a request is called that."""
    return name in driver.server.turns or name in driver.server.controller


def _tree(driver: Driver) -> RadixTree:
    tree = driver.server.tree
    need(tree is not None, Reason.NO_TREE)
    assert tree is not None
    return tree


def _newcomer(driver: Driver, name: str) -> ExternalLock:
    """A lock holder that has locked nothing."""
    req = driver.server.new_request(f"lock holder {name}", [], None, None)
    _tree(driver).newcomer(req)
    return ExternalLock(req, [], torch.empty((0,), dtype=torch.int64))


def _compute(driver: Driver, lock_holder: ExternalLock, tokens: Sequence[int], evicted: int) -> None:
    """Give the lock holder the row of a request that has computed `tokens`, whole pages of them.

    evicted: a sweep has freed its SWA pages below this, as far as they are its own.
    """
    server, req = driver.server, lock_holder.req
    prefix, end, page = len(lock_holder.tokens), len(tokens), server.geometry.page_size
    row = server.spare_row
    cells = server.rows.req_to_token[row]
    cells[:prefix] = lock_holder.slots.to(cells.dtype)
    if prefix < end:
        slots = driver.release.take(server.cache, prefix, end, lock_holder.slots)
        cells[prefix:end] = slots.to(cells.dtype)
        server.stamp(slots, tokens[prefix:])
    swept = -(-evicted // page) * page if evicted > prefix else 0
    if swept:
        server.allocator.free_swa(cells[prefix : min(swept, end)].to(torch.int64))
    driver.release.computed(req, list(tokens), row, swept)
