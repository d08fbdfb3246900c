"""Locks of a tree with a host tier: the range of each, their holders, and both after nodes are split."""

from dataclasses import replace

import pytest

from reference.commands import Abort, Close, Insert, Match, Piece, Unlock
from reference.tiers.commands import Await, Load, Poll, Prefetch
from reference.tiers.facts import TierLock, TierTransfer, TierUser
from reference.tiers.locks import NOWHERE as NEVER
from reference.tiers.locks import LockRange, TierUsers
from stateful_tests.tests.tiers.scenes import (
    A, C, FACTS, HOST, NODES, RECURRENT, SIZES, TRANSFERS, WITH_STATES, count, facts,
    kv, node, part, together, violated_at,
)  # fmt: skip

# Nodes of a path: "aa", "a", "a".
PATH = (NODES[1], NODES[2], NODES[2]._replace(node=3, parent=2, start=3, stamps=A[3:4]))
LOCKS = [  # user, window, what is changed, from where each pool is locked, where SWA KV is not
    (False, 1, facts(), {"full": 0, "swa": 3}, ()),
    (False, 2, facts(), {"full": 0, "swa": 2}, ()),
    (False, 5, facts(), {"full": 0, "swa": 0}, ()),
    (False, None, facts(), {"full": 0}, ()),
    (True, 1, facts(), {"full": 3, "swa": 3}, ()),
    (True, 1, node(3, host=kv((), (2,))), {"full": NEVER, "swa": 3}, ()),
    (False, 2, node(2, device=kv((3,), ())), {"full": 0, "swa": 2}, ()),
    (False, 2, together(node(2, device=kv((3,), ())), facts(loose=("tombstones",))),
     {"full": 0, "swa": 0}, ((2, 3),)),
    (True, 2, together(node(2, device=kv((3,), ())), facts(loose=("tombstones",))),
     {"full": 3, "swa": 2}, ()),
    (True, 2, together(node(2, host=kv((2,), ())), facts(loose=("tombstones",))),
     {"full": 3, "swa": 0}, ((2, 3),)),
]  # fmt: skip


@pytest.mark.parametrize(("host", "window", "change", "low", "left_out"), LOCKS)
def test_a_lock_has_a_range_of_each_pool(host, window, change, low, left_out):
    user = TierUser("h1", host, 3, 1)
    sizes = SIZES if window else replace(SIZES, window=None, swa_pages=0, host_swa_pages=0)
    ranges = TierUsers(replace(sizes, window=window))
    assert ranges.follow(change(FACTS._replace(nodes=PATH, users=(user,)))) == [
        LockRange(user, low, left_out)
    ]


# A poll inserts pages from the storage, so it splits nodes too.
@pytest.mark.parametrize(("command", "host", "at", "low"), [
    (Insert("h3", ()), True, 1, {"full": 0, "swa": 0}), (Poll(), True, 1, {"full": 0, "swa": 0}),
    (Unlock("h3"), True, 1, {"full": 1, "swa": 1}), (None, True, 1, {"full": 1, "swa": 1}),
    (Poll(), False, 1, {"full": 0, "swa": 1}), (Poll(), True, 7, {"full": 0, "swa": 0}),
])  # fmt: skip
def test_a_backup_locks_a_node_before_an_insert_splits_it(command, host, at, low):
    """Node 1 is backed up and split; both parts count the backup."""
    ranges = TierUsers(replace(SIZES, window=1))
    ranges.follow(FACTS)
    if command:
        ranges.note(command)
    last = NODES[1]._replace(start=1, stamps=A[1:2], parent=7)
    user = TierUser("backup of 1", host, at, 9)
    now = FACTS._replace(
        nodes=(NODES[1]._replace(node=7, stamps=A[:1]), last, *FACTS.nodes[1:]), users=(user,)
    )
    assert ranges.follow(now) == [LockRange(user, low)]
    ranges.take_lock(user, {1: NODES[1]})
    if at == 1:
        assert ranges.follow(now) == [LockRange(user, {"full": 0, "swa": 0})]


def test_a_lock_covers_its_path_as_of_before_the_split():
    user = TierUser("h1", host=False, node=2, lock=5)
    first = NODES[1]._replace(node=7, stamps=A[:1])
    rest = NODES[1]._replace(start=1, stamps=A[1:2], parent=7)
    split = FACTS._replace(nodes=(first, rest, *FACTS.nodes[1:]), users=(user,))
    assert TierUsers(SIZES).follow(split) == [LockRange(user, {"full": 0, "swa": 1})]
    taken = (TierLock(5, (NODES[1], NODES[2])),)
    found = TierUsers(SIZES).follow(split._replace(taken=taken))
    assert found == [LockRange(user, {"full": 0, "swa": 0})]
    user = user._replace(node=1)
    alone = split._replace(users=(user,), taken=(TierLock(5, (NODES[1],)),))
    assert TierUsers(SIZES).follow(alone) == [LockRange(user, {"full": 0, "swa": 0})]


TEXT = (Piece("a", 1),)
MORE = (Piece("b", 2),)


def noted(*commands):
    """Return the lock ranges after these commands."""
    ranges = TierUsers(SIZES)
    for command in commands:
        ranges.note(command)
    return ranges


def test_a_holder_has_its_prompt_until_it_gives_it_up():
    takes = Match("h1", TEXT), Load("h2", MORE), Insert("h3", MORE, chunked=True)
    ends = Insert("h1", TEXT), Unlock("h2"), Unlock("h3")
    assert noted(*takes).prompts == {"h1": TEXT, "h2": MORE, "h3": MORE}
    assert noted(*takes, *ends).prompts == {}


def test_a_request_waits_for_the_storage_until_it_is_admitted_or_aborted():
    asks = [Prefetch(name, TEXT) for name in ("h1", "h2", "h3", "h4")]
    assert noted(*asks).waiting.keys() == {"h1", "h2", "h3", "h4"}
    ends = Abort("h1"), Match("h2", TEXT), Load("h3", TEXT)
    assert noted(*asks, *ends).waiting == {"h4": TEXT}


def test_a_resumable_request_begins_a_session_until_its_close():
    asks = Await("h5", TEXT), Await("h6", TEXT, resumable=True)
    assert noted(*asks).sessions == {"h6"}
    assert noted(*asks, Close("h6")).sessions == set()


def test_the_last_six_prompts_that_were_inserted_or_sent_are_remembered():
    """Not those that are only asked for."""
    asks = Match("h2", MORE), Load("h4", MORE), Prefetch("h7", MORE)
    prompts = Insert("h3", MORE, chunked=True), Insert("h1", TEXT), Await("h5", TEXT), Await("h6", TEXT)
    assert noted(*asks, *prompts).seen == [TEXT, TEXT, TEXT, MORE]
    more = [Insert("h1", MORE) for _ in range(4)]
    assert noted(*asks, *prompts, *more).seen == [MORE, MORE, MORE, MORE, TEXT, TEXT]


def split(host=1, swa=1):
    """Node 4 of two tokens, its load in flight, and the same split in two; the new part counts this."""
    whole = NODES[4]._replace(stamps=C[:2], device=kv((4, 5), (4, 5)), host=kv((4, 5), (4, 5)))
    load = TierTransfer(2, load=True, parts=(*part(4, 4), *part(5, 5)), acks=(4,), sent=True)
    memory = (*HOST[:5], C[1])
    was = FACTS._replace(
        nodes=(*FACTS.nodes[:3], whole),
        transfers=(TRANSFERS[0], load),
        free=kv((6,), (6,)),
        host_free=kv(),
        host_memory=kv(memory, memory),
    )
    new = whole._replace(
        node=5, stamps=C[:1], device=kv((4,), (4,)), host=kv((4,), (4,)), pins=count(host, swa)
    )
    rest = whole._replace(
        parent=5, start=1, stamps=C[1:2], device=kv((5,), (5,)), host=kv((5,), (5,))
    )
    return was, facts(nodes=(*FACTS.nodes[:3], new, rest))


def test_a_split_changes_no_range():
    was, cut = split()
    assert violated_at(cut, was=was) == ([], "")
    for less in (split(host=0), split(swa=0)):
        failed, text = violated_at(less[1], was=less[0])
        assert failed == ["HOST-3"]
        assert "node 5 on the host is locked 1 time; it is locked 0 times" in text


def test_a_split_leaves_the_state_with_the_last_part():
    [whole] = RECURRENT.nodes
    upper = whole._replace(
        node=7, stamps=A[:1], device={"full": (1,), "state": ()}, host={"full": (0,), "state": ()},
        locks={"full": 1, "state": 0},
    )  # fmt: skip
    rest = whole._replace(
        parent=7, start=1, stamps=A[1:2], device={"full": (2,), "state": (1,)},
        host={"full": (1,), "state": (0,)},
    )  # fmt: skip
    assert violated_at(facts(nodes=(upper, rest)), was=RECURRENT, sizes=WITH_STATES) == ([], "")


def test_an_older_release_leaves_the_lock_on_the_host_with_the_last_part():
    was, cut = split(host=0)
    assert violated_at(cut, was=was._replace(loose=("host end",))) == ([], "")


def test_an_older_release_locks_no_tombstones():
    """Node 1 has no SWA KV on the device: a window before the end of node 2 covers that alone."""
    bare = together(
        node(1, device=kv((1, 2), ()), locks=count(2, 0)),
        facts(free=kv((5, 6), (5, 6, 1, 2)), loose=("tombstones",)),
    )
    was = bare(FACTS)
    assert violated_at(facts(), was=was) == ([], "")
    failed, _ = violated_at(node(1, device=kv((1, 2), ()), locks=count(2, 1)), was=was)
    assert failed[0] == "HOST-3"
