"""The radix tree of torch_kv beside that of the reference: same answers, same nodes, pages owned once.

`Pair` drives both through one operation at a time, as ended requests, running ones and memory pressure
would, and compares after each. Hypothesis and seeds only decide what to do. Trees with one rule broken
show what each of the comparisons is good for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from impl.torch_kv.nodes import (
    FULL,
    SWA,
    Key,
    Lock,
    LostPrefixError,
    Match,
    Node,
    NotLockedError,
    Owed,
    StaleNodeError,
)  # fmt: skip
from impl.torch_kv.pool import PagePool
from impl.torch_kv.store import KVStore
from impl.torch_kv.tree import RadixTree
from reference import tree as ref
from reference.geometry import Geometry
from stateful_tests.tests.torch_kv.test_cursors_on_device import Waits
from stateful_tests.tests.torch_kv.test_pools import extend

CPU = torch.device("cpu")
ALL = 10**6
LONGEST = 6  # pages of a key
WIDTH = 40

CHECKS = ("results", "nodes", "sizes", "walk", "owners", "mapping", "contents", "readers", "end", "errors")


class Differs(AssertionError):
    """A check failed; `check` is one of CHECKS."""

    def __init__(self, check: str, told: str) -> None:
        super().__init__(f"{check}: {told}")
        self.check = check


class Held(NamedTuple):
    """A running request: what it matched and locked."""

    holder: str
    key: Key
    match: Match
    lock: Lock


class Pair:
    """Both trees, the store of the one under test, and who holds locks.

    checks: those that count; `errors` are exceptions of the tree and of its pools. Row 0 is where
    inserters allocate. Tokens are stamped by their whole prefix, so that no page passes for another.
    """

    def __init__(
        self,
        page_size: int,
        window: int | None,
        kind: type[RadixTree] = RadixTree,
        pages: int = 18,
        checked: bool = False,
        checks: tuple[str, ...] = CHECKS,
    ) -> None:
        swa_pages = 0 if window is None else pages * 2 // 3
        size = Geometry(page_size, window, pages, swa_pages, rows=1, width=WIDTH)
        self.size = size
        self.store = KVStore(size, CPU, checked)
        self.tree = kind(self.store, window)
        self.ref = ref.Tree(page_size, window)
        self.checks = checks
        self.held: list[Held] = []
        self.number = 0
        self.stamps: dict[Key, int] = {}
        self.seen: Counter[str] = Counter()

    # Operations.

    def match(self, key: Key, hold: bool) -> None:
        self.ref, expected = ref.match(self.ref, key)
        found = self.tree.match(key)
        self.same("results", found.length, expected)
        if hold and found.length:
            self.number += 1
            holder = f"r{self.number:05}"
            self.ref = ref.lock(self.ref, holder, key[: found.length])
            self.held.append(Held(holder, key[: found.length], found, self.tree.lock(found.node)))
        self.seen["match"] += bool(found.length)
        self.compare()

    def unlock(self, index: int) -> None:
        held = self.held.pop(index)
        self.ref = ref.unlock(self.ref, held.holder)
        self.tree.unlock(held.lock)
        self.compare()

    def insert(self, key: Key, evicted: int) -> None:
        """A request ends that started from nothing."""
        self._insert(key, evicted, 0, torch.zeros(0, dtype=torch.int64))

    def end(self, index: int, suffix: Key, evicted: int) -> None:
        """A request ends that resumed from what it holds."""
        held = self.held[index]
        if self._insert(held.key + suffix, evicted, len(held.key), held.match.slots):
            self.unlock(index)

    def _insert(self, key: Key, evicted: int, prefix: int, slots: torch.Tensor) -> bool:
        store, size, length = self.store, self.size.page_size, len(key)
        pages = store.pages([prefix], [length])
        if not all(store.fits(pages)):
            lacking = [pages - pool.available for pool in (store.full, store.swa) if pool is not None]
            self.evict(*([n * size for n in lacking] + [0])[:2])
            if not all(store.fits(pages)):
                return False
        new = extend(store, [0], [prefix], [length])
        store.write(new, torch.tensor([self.stamp(key[:i]) for i in range(prefix + 1, length + 1)]).long())
        evicted = min(evicted, length) if self.size.window is not None else 0
        dead, whole = -(-evicted // size), length // size
        self.free([], range(prefix // size, dead))
        self.ref, expected = ref.insert(self.ref, key, evicted)
        found = self.tree.insert(key, torch.cat((slots, new)), evicted, prefix)
        self.free(range(whole, -(-length // size)), range(max(whole, dead), -(-length // size)))
        self.same("results", tuple(found), tuple(expected))
        self.seen["recovered"] += bool(found.recovered)
        self.seen["duplicates"] += found.matched > prefix
        self.compare()
        return True

    def evict(self, full: int, swa: int) -> None:
        before = self.tree.sizes()
        self.ref, expected = ref.evict(self.ref, full, swa)
        found = self.tree.evict(full, swa)
        self.same("results", tuple(found), tuple(expected))
        after = self.tree.sizes()
        self.same("sizes", tuple(found), (sum(before[:2]) - sum(after[:2]), sum(before[2:]) - sum(after[2:])))
        self.seen["evicted"] += found.full + found.swa > 0
        self.compare()

    def finish(self) -> None:
        """Everybody ends and everything goes: both pools are full again."""
        while self.held:
            self.unlock(0)
        self.evict(ALL, ALL)
        for pool in self.pools():
            self.same("end", sorted(pool.free_pages().tolist()), list(range(1, pool.pages + 1)))
        self.same("end", tuple(self.tree.sizes()), (0, 0, 0, 0))

    # What they need.

    def pools(self) -> list[PagePool]:
        return [pool for pool in (self.store.full, self.store.swa) if pool is not None]

    def stamp(self, prefix: Key) -> int:
        return self.stamps.setdefault(prefix, len(self.stamps) + 1)

    def free(self, full: range | list[int], swa: range) -> None:
        """The row's own pages, by index: the caller's side of an insert."""
        slots = self.store.req_to_token[0].long()
        index = [torch.tensor(list(pages), dtype=torch.int64) * self.size.page_size for pages in (full, swa)]
        self.store.free_starts(slots[index[0]], slots[index[1]] if self.store.swa is not None else slots[:0])

    def same(self, check: str, found: object, expected: object) -> None:
        if check in self.checks and found != expected:
            raise Differs(check, f"{found}, expected {expected}")

    # Comparisons.

    def compare(self) -> None:
        tree, window = self.tree, self.size.window
        facts = tree.view()
        expected = {}
        for placed in ref.nodes(self.ref):
            through = [lock for lock in self.ref.locks if lock.key[: placed.end] == placed.path]
            swa = sum(lock.swa_from < placed.end for lock in through)
            expected[placed.path] = (placed.node.live, len(through), swa)
        found = {fact.path: (fact.live, fact.full_lock, fact.swa_lock) for fact in facts}
        self.same("nodes", found, expected)
        self.seen["tombstones"] += not all(fact.live for fact in facts)
        self.same("sizes", tuple(tree.sizes()), tuple(ref.sizes(self.ref)))
        counts = [0, 0, 0, 0]
        for fact in facts:
            counts[fact.full_lock > 0] += len(fact.slots)
            counts[2 + (fact.swa_lock > 0)] += len(fact.slots) * (fact.live and window is not None)
        self.same("walk", tuple(tree.sizes()), tuple(counts))
        self._pages(facts)
        for held in self.held:
            slots = [slot for node in reversed(list(upward(held.lock.node))) for slot in node.slots.tolist()]
            self.same("readers", slots, held.match.slots.tolist())
            reach = len(slots) if window is None else window
            self._reads("readers", held.key, slots, range(max(0, len(slots) - reach), len(slots)))

    def _pages(self, facts: list[Any]) -> None:
        size, mapping = self.size.page_size, self.store.full_to_swa.tolist()
        owned: list[list[int]] = [[], []]
        unmapped = set(range(len(mapping)))
        for fact in facts:
            offsets = list(range(size)) * (len(fact.slots) // size)
            self.same("owners", [slot % size for slot in fact.slots], offsets)
            owned[FULL] += {slot // size: 0 for slot in fact.slots}
            if self.size.window is not None and fact.live:
                owned[SWA] += {mapping[slot] // size: 0 for slot in fact.slots}
                unmapped -= set(fact.slots)
                self.same("mapping", [mapping[slot] % size for slot in fact.slots], offsets)
                self.same("mapping", all(mapping[slot] for slot in fact.slots), True)
            start = len(fact.path) - len(fact.slots)
            slots = [0] * start + list(fact.slots)
            self._reads("contents", fact.path, slots, range(start, len(slots)), fact.live)
        self.same("mapping", [slot for slot in unmapped if mapping[slot]], [])
        for pages, pool in zip(owned, self.pools()):
            self.same("owners", sorted(pages + pool.free_pages().tolist()), list(range(1, pool.pages + 1)))

    def _reads(self, check: str, path: Key, slots: list[int], span: range, live: bool = True) -> None:
        """What is in the slots of these positions, in both pools."""
        expected = [self.stamp(path[: at + 1]) for at in span]
        full = self.store.full.stamps
        here = [slots[at] for at in span]
        self.same(check, full[here].tolist(), expected)
        if self.store.swa is not None and live:
            self.same(check, self.store.swa.stamps[self.store.full_to_swa[here]].tolist(), expected)


def upward(node: Node) -> Iterator[Node]:
    while node.parent is not None:
        yield node
        node = node.parent


def windows(page_size: int) -> list[int | None]:
    """None, below, at and above a page."""
    return [None, *sorted({max(1, page_size - 1), page_size, page_size + 1, 2 * page_size + 1})]


SIZES = [(page_size, window) for page_size in (1, 2, 3, 4) for window in windows(page_size)]


def random_ops(pair: Pair, rng: random.Random, count: int) -> None:
    size = pair.size.page_size

    def draw(pages: int) -> Key:
        length = rng.randrange(pages * size + 1)
        return tuple(2 if rng.random() < 0.3 / size else 1 for _ in range(length))

    for _ in range(count):
        move = rng.random()
        evicted = rng.choice([0, 0, 1, 2, 3]) * rng.randrange(LONGEST * size) // 2
        if move < 0.3:
            pair.insert(draw(LONGEST), evicted)
        elif move < 0.6:
            pair.match(draw(LONGEST + 1), hold=rng.random() < 0.8 and len(pair.held) < 4)
        elif move < 0.7 and pair.held:
            index = rng.randrange(len(pair.held))
            pair.end(index, draw(2)[: LONGEST * size - len(pair.held[index].key)], evicted)
        elif move < 0.8 and pair.held:
            pair.unlock(rng.randrange(len(pair.held)))
        else:
            most = rng.choice([2, 4, 12]) * size
            pair.evict(rng.randrange(most) * (rng.random() < 0.5), rng.randrange(most))
    pair.finish()


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_both_trees_do_the_same(page_size: int) -> None:
    seen: Counter[str] = Counter()
    for window in windows(page_size):
        for seed in range(6):
            pair = Pair(page_size, window, checked=seed % 2 == 0)
            random_ops(pair, random.Random(f"{page_size} {window} {seed}"), 50)
            seen += pair.seen
    for what in ("match", "recovered", "duplicates", "evicted", "tombstones"):
        assert seen[what] > 20, (what, seen)


class TreeMachine(RuleBasedStateMachine):
    """The same operations, as Hypothesis chooses and shrinks them."""

    keys = st.lists(st.sampled_from([1, 1, 1, 2]), max_size=LONGEST * 2).map(tuple)
    suffixes = st.lists(st.sampled_from([1, 2]), max_size=6).map(tuple)
    few = st.integers(0, LONGEST * 2)

    @initialize(sizes=st.sampled_from(SIZES))
    def build(self, sizes: tuple[int, int | None]) -> None:
        self.pair = Pair(*sizes, checked=True)

    @rule(key=keys, evicted=few)
    def insert(self, key: Key, evicted: int) -> None:
        self.pair.insert(key, evicted)

    @rule(key=keys, hold=st.booleans())
    def match(self, key: Key, hold: bool) -> None:
        self.pair.match(key, hold)

    @precondition(lambda self: self.pair.held)
    @rule(index=few)
    def unlock(self, index: int) -> None:
        self.pair.unlock(index % len(self.pair.held))

    @precondition(lambda self: self.pair.held)
    @rule(index=few, suffix=suffixes, evicted=few)
    def end(self, index: int, suffix: Key, evicted: int) -> None:
        index %= len(self.pair.held)
        room = self.pair.size.width - len(self.pair.held[index].key)
        self.pair.end(index, suffix[:room], evicted)

    @rule(full=few, swa=few)
    def evict(self, full: int, swa: int) -> None:
        self.pair.evict(full, swa)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.finish()


TreeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_tree_machine = TreeMachine.TestCase


# Trees with one rule broken.


class NoCap(RadixTree):
    def leaf_cap(self) -> int:
        return ALL


class WholePathRefresh(RadixTree):
    def refresh_from(self, length: int) -> int:
        return 0


class NoThirdCase(RadixTree):
    """Knows leaves that are live, and live past a tombstone, alone."""

    def live_from(self, evicted: int, end: int) -> int:
        live_from = super().live_from(evicted, end)
        return live_from if live_from < end else 0


class LocksSwaOfWholePath(RadixTree):
    def swa_from(self, node: Node) -> int:
        return 0 if self.window is not None else super().swa_from(node)


class UnlockStopsEarly(RadixTree):
    def unlocked(self, lock: Lock) -> Iterator[Node]:
        return iter(list(super().unlocked(lock))[:-1])


class UnlockFindsTheWindowAgain(RadixTree):
    """Remembers nothing: walks up until a window is covered, as lock did before the split."""

    def unlock_from(self, lock: Lock) -> int:
        return self.swa_from(lock.node)


class SplitForgetsLocks(RadixTree):
    def inherit(self, head: Node, tail: Node) -> None:
        head.used = list(tail.used)


class SplitForgetsUse(RadixTree):
    def inherit(self, head: Node, tail: Node) -> None:
        head.locks = list(tail.locks)


class RecoversLocked(RadixTree):
    def recoverable(self, node: Node, live_from: int) -> bool:
        return not node.live and node.start >= live_from


class RecoversWithoutSwa(RadixTree):
    def recoverable(self, node: Node, live_from: int) -> bool:
        return not node.live and not node.locks[FULL]


class RecoveryKeepsOldSlots(RadixTree):
    def recover(self, node: Node, slots: torch.Tensor, owed: Owed) -> None:
        super().recover(node, slots, Owed())


class DuplicatesTwice(RadixTree):
    def duplicate(self, full: torch.Tensor, swa: torch.Tensor, owed: Owed) -> None:
        super().duplicate(full, swa, owed)
        super().duplicate(full, swa[:0], owed)


class DuplicateSwaLeaks(RadixTree):
    def duplicate(self, full: torch.Tensor, swa: torch.Tensor, owed: Owed) -> None:
        super().duplicate(full, swa[:0], owed)


class FullEvictionIgnoresLocks(RadixTree):
    def full_candidate(self, node: Node) -> bool:
        return not node.children


class SwaEvictionIgnoresLocks(RadixTree):
    def swa_candidate(self, node: Node) -> bool:
        return self.window is not None and node.live


class MostRecentlyUsed(RadixTree):
    def rank(self, moment: int) -> int:
        return -moment


class TombstoneKeepsSwa(RadixTree):
    def entomb(self, node: Node, owed: Owed) -> None:
        super().entomb(node, Owed())
        owed.tokens[SWA] += len(node.key)


class TombstoneStillCounts(RadixTree):
    def entomb(self, node: Node, owed: Owed) -> None:
        super().entomb(node, owed)
        self._evictable[SWA] += len(node.key)


class DeadLeavesStay(RadixTree):
    def stays(self, node: Node) -> bool:
        return True


class ResumesWithoutWindow(RadixTree):
    def usable(self, path: list[Node]) -> int:
        return len(path)


# What each of them shows to, with every other comparison off.
BROKEN = [
    (NoCap, "nodes"),
    (WholePathRefresh, "results"),
    (NoThirdCase, "mapping"),
    (LocksSwaOfWholePath, "sizes"),
    (UnlockStopsEarly, "end"),
    (UnlockFindsTheWindowAgain, "walk"),
    (SplitForgetsLocks, "readers"),
    (SplitForgetsUse, "nodes"),
    (RecoversLocked, "readers"),
    (RecoversWithoutSwa, "mapping"),
    (RecoveryKeepsOldSlots, "owners"),
    (DuplicatesTwice, "contents"),
    (DuplicateSwaLeaks, "end"),
    (FullEvictionIgnoresLocks, "readers"),
    (SwaEvictionIgnoresLocks, "readers"),
    (MostRecentlyUsed, "results"),
    (TombstoneKeepsSwa, "mapping"),
    (TombstoneStillCounts, "walk"),
    (DeadLeavesStay, "sizes"),
    (ResumesWithoutWindow, "errors"),
]


def caught(kind: type[RadixTree], checks: tuple[str, ...], seeds: int = 60) -> str | None:
    """The check that catches this tree first; None when these checks do not."""
    for seed in range(seeds):
        page_size, window = SIZES[seed * 7 % len(SIZES)]
        pair = Pair(page_size, window, kind, checks=checks)
        try:
            random_ops(pair, random.Random(f"broken {seed}"), 40)
        except Differs as found:
            return found.check
        except (RuntimeError, AssertionError, LookupError, ValueError):
            if "errors" in checks:
                return "errors"
    return None


@pytest.mark.parametrize("kind, check", BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_rule_is_caught(kind: type[RadixTree], check: str) -> None:
    assert caught(kind, (check,)) == check


def test_counters_and_pages_show_no_policy() -> None:
    """Which KV goes first is nobody's damage: the reference alone tells."""
    for kind in (WholePathRefresh, MostRecentlyUsed):
        assert caught(kind, ("walk", "owners", "mapping", "contents", "readers", "end", "errors"), 10) is None


# What is said of single methods.


def grown(page_size: int = 1) -> Pair:
    pair = Pair(page_size, 2, checked=True)
    pair.insert((1,) * 10 * page_size, 0)
    return pair


def test_unlock_after_the_topmost_pinned_node_was_split() -> None:
    """The lock needed 3 tokens of SWA KV and pinned a node of 5 for it."""
    pair = Pair(1, 3)
    pair.insert((1, 2, 3, 4, 5), 0)  # 2 + 3
    pair.insert((1, 2, 3, 4, 5, 6, 7), 0)  # 2 + 3 + 2
    pair.match((1, 2, 3, 4, 5, 6, 7), hold=True)
    pair.match((1, 2, 3), hold=False)
    assert pair.tree.sizes() == (0, 7, 2, 5)
    pair.unlock(0)
    assert pair.tree.sizes() == (7, 0, 7, 0)


def test_a_lock_needs_what_its_match_saw() -> None:
    pair = grown()
    pair.tree.evict(0, 1)
    stale = pair.tree.match((1,) * 10).node.parent
    assert stale is not None and not stale.live
    before = pair.tree.view()
    with pytest.raises(StaleNodeError):
        pair.tree.lock(stale)
    assert pair.tree.view() == before
    other = grown()
    gone = other.tree.match((1,) * 10).node
    other.tree.evict(ALL, ALL)
    with pytest.raises(StaleNodeError):
        other.tree.lock(gone)


def test_a_lock_is_given_back_once() -> None:
    pair = grown()
    lock = pair.tree.lock(pair.tree.match((1,) * 10).node)
    pair.tree.unlock(lock)
    with pytest.raises(NotLockedError):
        pair.tree.unlock(lock)


def test_the_empty_prefix_is_locked_at_no_cost() -> None:
    pair = grown()
    lock = pair.tree.lock(pair.tree.match((2,)).node)
    assert pair.tree.sizes() == (10, 0, 10, 0)
    pair.tree.unlock(lock)


def test_bad_inserts_change_nothing() -> None:
    pair = grown(page_size=2)
    before = pair.tree.view()
    slots = torch.zeros(4, dtype=torch.int64)
    for key, evicted, prefix in (((2,) * 6, 0, 0), ((2,) * 4, -1, 0), ((2,) * 4, 0, 1), ((2,) * 4, 0, 6)):
        with pytest.raises(ValueError, match="prefix"):
            pair.tree.insert(key, slots, evicted, prefix)
    with pytest.raises(LostPrefixError):
        pair.tree.insert((2,) * 4, slots, 0, 2)
    assert pair.tree.view() == before


def test_a_window_needs_a_pool() -> None:
    store = KVStore(Geometry(1, None, 4, 0, rows=1, width=4), CPU)
    with pytest.raises(ValueError, match="SWA pool"):
        RadixTree(store, 2)


def test_the_queues_do_not_grow_with_use() -> None:
    pair = grown()
    for _ in range(500):
        lock = pair.tree.lock(pair.tree.match((1,) * 10).node)
        pair.tree.unlock(lock)
    assert all(len(queue) < 80 for queue in pair.tree._queues)


def test_the_order_outlives_stale_entries() -> None:
    store = KVStore(Geometry(1, None, 20, 0, rows=1, width=20), CPU)
    tree, source, used = RadixTree(store, None), random.Random(1), dict.fromkeys(range(20), -1)

    def evicted() -> int:
        before = {fact.path for fact in tree.view()}
        tree.evict(1, 0)
        ((letter,),) = before - {fact.path for fact in tree.view()}
        return letter

    for letter in used:
        tree.insert((letter,), extend(store, [0], [0], [1]))
    for moment in range(1000):  # entries are taken out of the queue on the way
        letter = source.randrange(20)
        if moment % 50 == 0:
            letter = min(used, key=lambda other: used[other])
            assert evicted() == letter
            tree.insert((letter,), extend(store, [0], [0], [1]))
        tree.match((letter,))
        used[letter] = moment
    assert [evicted() for _ in used] == sorted(used, key=lambda letter: used[letter])


class CountsGives(PagePool):
    """How often pages came back."""

    gives = 0

    def give(self, pages: torch.Tensor) -> None:
        self.gives += 1
        super().give(pages)


class Counting(KVStore):
    pool_class = CountsGives


def gives(store: KVStore) -> list[int]:
    pools = (store.full, store.swa)
    assert all(isinstance(pool, CountsGives) for pool in pools)
    return [pool.gives for pool in pools if isinstance(pool, CountsGives)]


def test_an_operation_frees_once_per_pool_and_waits_for_nothing() -> None:
    def work(tokens: int) -> int:
        store = Counting(Geometry(1, 8, 256, 256, rows=1, width=64), CPU)
        tree = RadixTree(store, 8)
        waits = Waits()
        for letter in (2, 3, 4):
            for evicted in (tokens, 0):  # the second recovers what the first left a tombstone of
                slots = extend(store, [0], [0], [tokens])
                store.free_starts(slots[:0], slots[:evicted])
                before = gives(store)
                with waits:
                    tree.insert((1,) * (tokens // 2) + (letter,) * (tokens // 2), slots, evicted)
                    tree.unlock(tree.lock(tree.match((1,) * (tokens // 2)).node))
                assert all(now <= then + 1 for now, then in zip(gives(store), before))
        before = gives(store)
        with waits:
            assert tree.evict(ALL, ALL) == (2 * tokens, 2 * tokens)
        assert gives(store) == [then + 1 for then in before]
        assert waits.found == []
        return sum(waits.seen.values())

    assert work(24) == work(48)
