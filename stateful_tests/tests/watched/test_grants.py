"""A grant that a pool cannot keep: which pool, and who holds the rest."""

from types import SimpleNamespace as Bag

import pytest

from impl.sglang.server.grants import broken_grant

OWN = [4, 4, 0, 0]  # committed, allocated, evicted, protected


class Batch:
    """Fails while it is prepared. matches: one request is looked at, before it is in a batch."""

    def __init__(self, error):
        self.reqs, self.rid, self.error = [Bag(rid="a.1")], "a.1", error

    def prepare_for_extend(self):
        raise self.error

    def prepare_for_decode(self):
        raise self.error

    def init_next_round_input(self):
        raise self.error

    def process_batch_result(self):
        raise self.error


def server(full=(0, 8, 6), swa=(5, 3), rows=0, states=0):
    """A reader. full: free, of the tree, locked; swa: free, evictable. s1 holds a row, b.1 another."""
    owner = Bag(
        kv=Bag(holds_mamba=True, mamba_ping_pong_track_buffer=None), cursors=OWN, session=None
    )
    runs = Bag(**{**vars(owner), "rid": "b.1"})
    return Bag(
        counts=lambda: (full[0], swa[0], rows, full[1], 0, full[2]),
        shares=True,
        swa=True,
        tree=Bag(swa_evictable_size=lambda: swa[1], mamba_evictable_size=lambda: 1),
        rows=Bag(mamba_allocator=Bag(available_size=lambda: states)),
        release=Bag(slots=lambda _: {"s1": owner}, cursors=lambda each: each.cursors),
        holds=lambda _: True,
        unfinished=lambda: [(runs, False), (runs, False), (Bag(rid="c.1"), True)],
    )


def failed(step, error, **sizes):
    try:
        getattr(Batch(error), step)()
    except RuntimeError as raised:
        return broken_grant(server(**sizes), raised)


TOKENS = "Prefill out of memory. Try to allocate 8 tokens."


@pytest.mark.parametrize("step, error, sizes, pool, left", [
    ("prepare_for_extend", "alloc_req_slots runs out of memory", {}, "rows", (0, 0)),
    ("prepare_for_extend", "Not enough space for mamba cache", {}, "states", (0, 1)),
    ("init_next_round_input", "Can not alloc mamba cache", {}, "states", (0, 1)),
    ("prepare_for_extend", TOKENS, {}, "full", (0, 2)),
    ("prepare_for_extend", f"{TOKENS} Available mamba: 15", {}, "full", (0, 2)),
    ("prepare_for_decode", TOKENS, {"full": (7, 8, 7), "swa": (5, 2)}, "SWA", (5, 2)),
    ("prepare_for_decode", TOKENS, {"full": (6, 8, 7), "swa": (5, 2)}, "full", (6, 1)),
    # its own count says that there is room: what is evictable is pinned
    ("prepare_for_decode", TOKENS, {"full": (7, 8, 7), "swa": (5, 3)}, "full", (7, 1)),
])  # fmt: skip
def test_the_pool_that_ran_out(step, error, sizes, pool, left):
    grant = failed(step, RuntimeError(error), **sizes)
    assert (grant.pool, (grant.free, grant.evictable), grant.requests) == (pool, left, ["a.1"])


@pytest.mark.parametrize("step, error", [
    ("process_batch_result", TOKENS), ("prepare_for_extend", "a shape does not fit"),
])  # fmt: skip
def test_another_error_is_of_no_grant(step, error):
    assert failed(step, RuntimeError(error)) is None


def test_who_holds_the_rest_is_said():
    says = failed("prepare_for_extend", RuntimeError(TOKENS)).says
    assert says == (
        "a prefill of a.1 was granted, and the pool of full has 0 free and 2 evictable;"
        " held by locks of the tree 6, session s1 4, b.1 4"
    )
    assert (
        failed("prepare_for_extend", RuntimeError("alloc_req_slots")).pinned
        == "held by session s1 1, b.1 1"
    )
