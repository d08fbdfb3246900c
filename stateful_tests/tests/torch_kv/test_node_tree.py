"""The radix tree of torch_kv: what its methods cost. What it does is in test_conformance."""


import torch

from impl.choices import RandomChoices
from impl.torch_kv.counting_device import counting, device
from impl.torch_kv.nodes import Key
from impl.torch_kv.pool import PagePool
from impl.torch_kv.store import KVStore
from impl.torch_kv.radix_tree import RadixTree
from reference.commands import Freed
from reference.geometry import Geometry
from stateful_tests.tests.support.allocation import extend

CPU = torch.device("cpu")
ALL = 10**6
TEN = (1,) * 10


def empty(page_size: int, window: int | None) -> RadixTree:
    geometry = Geometry(page_size, window, 18, 12 if window else 0, rows=1, width=40)
    return RadixTree(KVStore(geometry, CPU), window)


def insert(tree: RadixTree, *keys: Key) -> RadixTree:
    """Requests end that started from nothing."""
    for key in keys:
        tree.insert(key, extend(tree.store, [0], [0], [len(key)]))
    return tree


def test_the_queues_do_not_grow_with_use():
    tree = insert(empty(1, 2), TEN)
    for _ in range(500):
        tree.unlock(tree.lock(tree.match(TEN).node))
    assert all(len(queue) < 80 for queue in tree._queues)


def test_the_order_outlives_stale_entries():
    tree = RadixTree(
        KVStore(
            Geometry(page_size=1, window=None, full_pages=20, swa_pages=0, rows=1, width=20), CPU
        ),
        None,
    )
    choices = RandomChoices(1)
    used = dict.fromkeys(range(20), -1)

    def evict_nodes():
        before = {node.path for node in tree.view(())}
        tree.evict(1, 0)
        ((letter,),) = before - {node.path for node in tree.view(())}
        return letter

    insert(tree, *((letter,) for letter in used))
    for moment in range(1000):  # entries are taken out of the queue on the way
        letter = choices.upto(19)
        if moment % 50 == 0:
            letter = min(used, key=lambda other: used[other])
            assert evict_nodes() == letter
            insert(tree, (letter,))
        tree.match((letter,))
        used[letter] = moment
    assert [evict_nodes() for _ in used] == sorted(used, key=lambda letter: used[letter])


class CountsGives(PagePool):
    """How often pages came back, to any pool."""

    gives = 0

    def give(self, pages):
        CountsGives.gives += 1
        super().give(pages)


class Counting(KVStore):
    pool_class = CountsGives


def test_an_operation_frees_once_per_pool_and_waits_for_nothing():
    def work(tokens):
        store = Counting(
            Geometry(page_size=1, window=8, full_pages=256, swa_pages=256, rows=1, width=64),
            device(),
        )
        tree = RadixTree(store, 8)
        operators = 0
        for letter in (2, 3, 4):
            for evicted in (tokens, 0):  # the second recovers what the first left a tombstone of
                slots = extend(store, [0], [0], [tokens])
                store.free_starts(slots[:0], slots[:evicted])
                CountsGives.gives = 0
                with counting(may_wait=0) as counted:
                    tree.insert((1,) * (tokens // 2) + (letter,) * (tokens // 2), slots, evicted)
                    tree.unlock(tree.lock(tree.match((1,) * (tokens // 2)).node))
                operators += sum(counted.operators.values())
                assert CountsGives.gives <= 2
        CountsGives.gives = 0
        with counting(may_wait=0) as counted:
            assert tree.evict(ALL, ALL) == Freed(2 * tokens, 2 * tokens)
        assert CountsGives.gives == 2
        return operators + sum(counted.operators.values())

    assert work(24) == work(48)
