"""A grant that a pool cannot keep: which pool ran out, and who holds its other pages."""

from types import SimpleNamespace

import pytest

from impl.sglang.server.grants import broken_grant

OWN = [4, 4, 0, 0]  # committed, allocated, evicted, protected


class Batch:
    """A batch of request a.1, or that request itself, whose every step raises `error`."""

    def __init__(self, error):
        self.reqs = [SimpleNamespace(rid="a.1")]
        self.rid = "a.1"
        self.error = error

    def prepare_for_extend(self):
        raise self.error

    def prepare_for_decode(self):
        raise self.error

    def init_next_round_input(self):
        raise self.error

    def process_batch_result(self):
        raise self.error


def server(full=(0, 8, 6), swa=(5, 3), rows=0, states=0):
    """Return what a reader shows of a server in which session s1 and request b.1 hold a row each.

    full: slots that are free, evictable and locked by the tree.
    swa: slots that are free and evictable.
    """
    kv = SimpleNamespace(holds_mamba=True, mamba_ping_pong_track_buffer=None)
    owner = SimpleNamespace(kv=kv, cursors=OWN, session=None)
    running = SimpleNamespace(**vars(owner), rid="b.1")
    waiting = SimpleNamespace(rid="c.1")
    return SimpleNamespace(
        counts=lambda: (full[0], swa[0], rows, full[1], 0, full[2]),
        shares=True,
        swa=True,
        tree=SimpleNamespace(
            swa_evictable_size=lambda: swa[1], mamba_evictable_size=lambda: 1
        ),
        rows=SimpleNamespace(mamba_allocator=SimpleNamespace(available_size=lambda: states)),
        release=SimpleNamespace(slots=lambda _: {"s1": owner}, cursors=lambda each: each.cursors),
        holds=lambda _: True,
        unfinished_requests=lambda: [(running, False), (running, False), (waiting, True)],
    )


def grant_broken_by(step, error, **sizes):
    """Return the grant that a server with these sizes has broken when `step` raised, or None."""
    with pytest.raises(RuntimeError) as raised:
        getattr(Batch(error), step)()
    return broken_grant(server(**sizes), raised.value)


TOKENS = "Prefill out of memory. Try to allocate 8 tokens."


@pytest.mark.parametrize("step, error, sizes, pool, left", [
    ("prepare_for_extend", "alloc_req_slots runs out of memory", {}, "rows", (0, 0)),
    ("prepare_for_extend", "Not enough space for mamba cache", {}, "states", (0, 1)),
    ("init_next_round_input", "Can not alloc mamba cache", {}, "states", (0, 1)),
    ("prepare_for_extend", TOKENS, {}, "full", (0, 2)),
    ("prepare_for_extend", f"{TOKENS} Available mamba: 15", {}, "full", (0, 2)),
    ("prepare_for_decode", TOKENS, {"full": (7, 8, 7), "swa": (5, 2)}, "SWA", (5, 2)),
    ("prepare_for_decode", TOKENS, {"full": (6, 8, 7), "swa": (5, 2)}, "full", (6, 1)),
    # SGLang counts enough room, but the evictable slots are pinned.
    ("prepare_for_decode", TOKENS, {"full": (7, 8, 7), "swa": (5, 3)}, "full", (7, 1)),
])  # fmt: skip
def test_a_broken_grant_names_the_pool_that_ran_out_and_what_is_left(step, error, sizes, pool, left):
    grant = grant_broken_by(step, RuntimeError(error), **sizes)
    assert grant.pool == pool
    assert (grant.free, grant.evictable) == left
    assert grant.requests == ["a.1"]


@pytest.mark.parametrize("step, error", [
    ("process_batch_result", TOKENS), ("prepare_for_extend", "a shape does not fit"),
])  # fmt: skip
def test_an_error_of_another_kind_or_step_breaks_no_grant(step, error):
    assert grant_broken_by(step, RuntimeError(error)) is None


def test_a_broken_grant_says_who_holds_the_other_slots():
    grant = grant_broken_by("prepare_for_extend", RuntimeError(TOKENS))
    assert grant.says == (
        "a prefill of a.1 was granted, and the pool of full has 0 free and 2 evictable;"
        " held by locks of the tree 6, session s1 4, b.1 4"
    )


def test_a_broken_grant_of_rows_says_who_holds_them():
    grant = grant_broken_by("prepare_for_extend", RuntimeError("alloc_req_slots"))
    assert grant.pinned == "held by session s1 1, b.1 1"
