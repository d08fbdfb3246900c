"""Every branch of every clause of a tree with a host tier sees a fault that it is the first to see, and what
only resembles one conforms."""

from dataclasses import replace

import pytest

from ci.documents.reported import TierReport, reported
from reference.commands import Abort, Close, Evict, Insert, Match, Piece, Unlock
from reference.tiers.clauses import OF_CONNECTORS, TIER_CLAUSES, TierStep, broken
from reference.failures import AtCount, AtSlot, AtTransfer, AtTreeNode
from reference.tiers.commands import (
    Arrive,
    Await,
    Complete,
    Greet,
    Load,
    Poll,
    Prefetch,
    ResetCache,
)
from reference.tiers.facts import (
    BUSY,
    GONE,
    IDLE,
    NOWHERE,
    OVER,
    TierPart,
    TierRead,
    TierRecord,
    TierRequest,
    TierTransfer,
    TierUser,
)
from reference.tiers.locks import NOWHERE as NEVER
from reference.tiers.locks import LockRange, LockRanges
from reference.tiers.progress import DecodeProgress
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.tests.support.planted_faults import planted_faults
from stateful_tests.tests.tiers.scenes import (
    A, B, BACKUP, C, DECODING, DEVICE, FACTS, HELD, HOST, LOADS, NODES, OTHER, PAGE, PREFETCH, RECEIVED,
    RECEIVES, RECORDS, RECURRENT, REST, SIZES, STATE, STORING, TRANSFERS, USERS, WITH_STATES, count, facts,
    failures, kv, node, part, together, violated,
)  # fmt: skip

COPIED = TRANSFERS[0]._replace(copied=True)
FAULTS = [  # what is changed, the clause that sees it first, how expected and observed end
    ("two nodes have a host slot", node(3, host=kv((1,), (3,))), "HOST-1", "2 nodes have it, 0 times"),
    ("a host slot is owned and free", facts(host_free=kv((5, 0), (5,))), "HOST-1",
     "1 node has it, 1 time"),
    ("a host slot is free twice", facts(host_free=kv((5, 5), (5,))), "HOST-1", "0 nodes have it, 2 times"),
    ("a host slot is lost", facts(host_free=kv((), (5,))), "HOST-1", "0 nodes have it, 0 times"),
    ("a copy of another token", facts(host_memory=kv((A[0], OTHER, *HOST[2:]), HOST)), "HOST-2",
     "host full slot 1 of position 1 holds KV of another token"),
    ("a copy that was never written", facts(host_memory=kv((A[0], 0, *HOST[2:]), HOST)), "HOST-2",
     "host full slot 1 of position 1 holds nothing"),
    ("a copy whose store has moved another token", facts(transfers=(COPIED, TRANSFERS[1])), "HOST-2",
     "host full slot 2 of position 2 holds nothing"),
    ("a copy of another length", together(node(1, host=kv((0,), (0, 1))), facts(host_free=kv((5, 1), (5,)))),
     "HOST-2", "1 slot for 2 tokens"),
    ("another token on the device", facts(memory=kv((0, OTHER, *DEVICE[2:]), DEVICE)), "HOST-2",
     "device full slot 1 of position 0 holds KV of another token"),
    ("another token in the SWA pool", facts(memory=kv(DEVICE, (0, OTHER, *DEVICE[2:]))), "HOST-2",
     "device swa slot 1 of position 0 holds KV of another token"),
    ("a copy of another length that is being written", together(node(4, device=kv((4, 5), (4,))), facts(
        free=kv((6,), (5, 6)), transfers=(
            TRANSFERS[0], TRANSFERS[1]._replace(parts=(*part(4, 4), TierPart("full", 5, 5)))))),
     "HOST-2", "2 slots for 1 token"),
    ("a lock too few", node(1, locks=count(1, 2)), "HOST-3",
     "the full KV of node 1 on the device is locked 2 times; it is locked 1 time"),
    ("no lock where the host has no KV", together(
        node(2, host=kv((), (2,)), locks=count(0, 1)), facts(host_free=kv((5, 2), (5,)))), "HOST-3",
     "the full KV of node 2 on the device is locked 1 time; it is locked 0 times"),
    ("a lock too many", node(3, locks=count(1, 0)), "HOST-3", "locked 0 times; it is locked 1 time"),
    ("an SWA lock too few", node(2, locks=count(1, 0)), "HOST-3", "locked 1 time; it is locked 0 times"),
    ("a pin too few", node(4, pins=count(0, 1)), "HOST-3", "locked 1 time; it is locked 0 times"),
    ("a pin too many", node(3, pins=count(1, 0)), "HOST-3", "locked 0 times; it is locked 1 time"),
    ("a pin of the SWA KV too few", node(4, pins=count(1, 0)), "HOST-3", "1 time; it is locked 0 times"),
    ("no pin of SWA KV that is not there", together(node(4, host=kv((4,), ()), pins=count(1, 0)), facts(
        host_free=kv((5,), (5, 4)))), "HOST-3", "the swa KV of node 4 on the host is locked 1 time"),
    ("a node that is nowhere", together(node(3, host=kv((), (3,))), facts(host_free=kv((5, 3), (5,)))),
     "HOST-5", "its copy on the host is complete; it has none"),
    ("half of a copy is complete", together(
        node(3, stamps=B[2:4], host=kv((3, 5), (3, 5)), hashed=A[:2] + B[2:4]), facts(
            host_free=kv(), transfers=(*TRANSFERS, TierTransfer(3, False, part(6, 5), (), True)))),
     "HOST-5", "its store is in flight"),
    ("a node leaves before its store is done", together(node(2, device=kv()), facts(
        free=kv((5, 6, 3), (5, 6, 3)))), "HOST-5", "its store is in flight"),
    ("a source is freed", together(node(2, device=kv((), (3,)), locks=count(1, 1)), facts(
        free=kv((5, 6, 3), (5, 6)), transfers=(TRANSFERS[0], TRANSFERS[1]),
        host_memory=kv(HOST, HOST))), "HOST-5", "its store is in flight"),
    ("a source is written", facts(memory=kv(DEVICE, (*DEVICE[:3], OTHER, *DEVICE[4:]))), "HOST-2",
     "device swa slot 3 of position 2 holds KV of another token"),
    ("the source of a load is written", facts(host_memory=kv((*HOST[:4], OTHER, 0), HOST)), "HOST-2",
     "host full slot 4 of position 0 holds KV of another token"),
    ("the source of an SWA store is freed", together(node(2, device=kv((3,), ())), facts(
        free=kv((5, 6), (5, 6, 3)))), "XFER-1", "device swa slot 3 stays as it is until store 1 has read it; "
     "it is free"),
    ("the source of an SWA store is nobody's", node(2, device=kv((3,), ())), "XFER-1", "0 nodes have it"),
    ("a destination is free as well", facts(free=kv((5, 6, 4), (5, 6))), "XFER-2",
     "device full slot 4 is kept for load 2; node 4 and the free list have it"),
    ("a destination is nobody's", node(4, device=kv((4,), ())), "XFER-2",
     "device swa slot 4 is kept for load 2; nobody has it"),
    ("a mark is lost", node(2, storing=-1), "XFER-4", "marked for the store of 2, as the records name it; it "
     "is not marked"),
    ("a mark of another store", node(2, storing=7), "XFER-4", "it is marked for the store of 7"),
    ("a mark without a record", node(3, storing=7), "XFER-4", "is not marked, as the records name it; it is "
     "marked for the store of 7"),
    ("nobody names a node that is written", together(node(2, storing=-1), facts(records=RECORDS[1:])),
     "XFER-4", "a record names node 2, which store 1 writes; none does"),
    ("a record names a node that is gone", facts(records=(TierRecord(False, 2, (2, 8)), RECORDS[1])),
     "XFER-4", "node 8 is gone"),
    ("a record without a transfer", facts(records=(*RECORDS, TierRecord(True, 3, (3,)))), "XFER-4",
     "the load of node 3 is in flight, for it has a record; it is not"),
    ("a read of another token", facts(reads=(TierRead("h1", "full", 0, 1, OTHER, A[0]),)), "LOAD-1",
     "h1 finds its own full KV at position 0; slot 1 holds KV of another token"),
    ("a read of nothing", facts(reads=(TierRead("h1", "full", 0, 1, 0, A[0]),)), "LOAD-1",
     "slot 1 holds nothing"),
    ("a read of the padding page", facts(reads=(TierRead("h1", "full", 0, 0, 0, A[0]),)), "LOAD-1",
     "h1 finds its own full KV at position 0; slot 0 holds nothing"),
    ("a read of SWA KV of another text", facts(reads=(TierRead("h1", "swa", 0, 1, OTHER, A[0]),)), "LOAD-1",
     "h1 finds its own swa KV at position 0; slot 1 holds KV of another token"),
    ("a read where there is no slot", facts(reads=(TierRead("h1", "swa", 0, 0, 0, A[0]),)), "LOAD-1",
     "it has no slot there"),
    ("a device slot is owned and free", facts(free=kv((5, 6, 1), (5, 6))), "TREE-16",
     "device full slot 1 has one owner; node 1 and the free list have it"),
]  # fmt: skip


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[0])
def test_a_clause_sees_the_fault_first(row):
    _, change, clause, words = row
    found, text = violated(change)
    assert found[0] == clause and words in text, (found, text)


GONE_FETCH = PREFETCH._replace(state=GONE, moving=kv())
OF_A_STORAGE = [
    ("an operation has a slot of a node", facts(
        operations=(BACKUP, PREFETCH._replace(slots=kv((4, 5), (5,))))), "HOST-1",
     "1 node has it, prefetch 4 of h2 has it, 0 times in the free list"),
    ("a slot of an operation is free", facts(host_free=kv((5,), ())), "HOST-1",
     "0 nodes have it, prefetch 4 of h2 has it, 1 time in the free list"),
    ("a slot waits to be freed and is an operation's", facts(returned=kv((5,))), "HOST-1",
     "prefetch 4 of h2 has it, the queue of slots to free has it, 0 times in the free list"),
    ("a slot of no operation is lost", facts(operations=(BACKUP,)), "HOST-1", "0 nodes have it, 0 times"),
    ("what a backup reads is written", facts(host_memory=kv((OTHER, *HOST[1:]), HOST)), "HOST-2",
     "host full slot 0 of position 0 holds KV of another token"),
    ("what a backup reads has left the tree", together(node(1, host=kv((0, 1), ())), facts(
        returned=kv((), (0, 1)))), "XFER-1",
     "host swa slot 0 stays as it is until backup 3 has read it; 0 nodes have it"),
    ("what a backup reads is free", together(node(1, host=kv((0, 1), ())), facts(host_free=kv((), (0, 1)))),
     "XFER-1", "host swa slot 0 stays as it is until backup 3 has read it; it is free"),
    ("what is being read from the storage is somebody's", facts(
        operations=(BACKUP, PREFETCH._replace(moving=kv((4,))))), "XFER-2",
     "host full slot 4 is kept for prefetch 4 of h2; node 4 has it"),
    ("what is being read waits to be freed", facts(
        operations=(BACKUP, PREFETCH._replace(slots=kv((), (5,)))), returned=kv((5,))), "XFER-2",
     "host full slot 5 is kept for prefetch 4 of h2; the queue of slots to free has it"),
    ("what is being read is free", facts(
        operations=(BACKUP, PREFETCH._replace(slots=kv((), (5,)))), host_free=kv((5,), ())), "XFER-2",
     "host full slot 5 is kept for prefetch 4 of h2; it is free"),
    ("a record of who waits no more", facts(asked=("h2", "h3")), "XFER-3",
     "no record of h3, which waits no more; there is one"),
    ("a record without an operation", facts(operations=(BACKUP, GONE_FETCH)), "XFER-3",
     "prefetch 4 of h2 is in flight, for it has a record; it is not"),
    ("the first record is without an operation", facts(operations=(GONE_FETCH, BACKUP)), "XFER-3",
     "prefetch 4 of h2 is in flight, for it has a record; it is not"),
    ("a page of another text is stored", facts(stored=(PAGE._replace(found=C[:1]),)), "STORE-1",
     "the full KV that is stored under it; it stands for #1:1 at 0; host slot 0 holds KV of #3:1 at 0"),
    ("a page that was not written is stored", facts(stored=(PAGE._replace(found=(0,)),)), "STORE-1",
     "host slot 0 holds nothing"),
    ("half a page is stored", facts(stored=(PAGE._replace(wanted=A[:2]),)), "STORE-1",
     "it is of 2 tokens, and 1 are stored"),
    ("the second page that is stored is of another text", facts(
        stored=(PAGE, PAGE._replace(key=2, found=C[:1]))), "STORE-1", "host slot 0 holds KV of #3:1 at 0"),
    ("a hash of a node is of another page", node(3, hashed=A[:3]), "STORE-2",
     "the hashes of node 3 stand for #1:2 #2:1; they stand for #1:3"),
    ("a node has the hashes of its parent as well", node(2, hashed=A[:2] + A[:3]), "STORE-2",
     "the hashes of node 2 stand for #1:3; they stand for #1:5"),
    ("a node lacks a hash", node(1, hashed=A[:1]), "STORE-2",
     "the hashes of node 1 stand for #1:2; they stand for #1:1"),
    ("a node has no hash left", node(1, hashed=()), "STORE-2", "they stand for nothing"),
]  # fmt: skip


@pytest.mark.parametrize("row", OF_A_STORAGE, ids=lambda row: row[0])
def test_a_clause_sees_what_is_wrong_with_a_storage(row):
    _, change, clause, words = row
    found, text = violated(change, was=STORING)
    assert found[0] == clause and words in text, (found, text)


def but(at, **changes):
    """Another request in the place of one."""
    requests = [RECEIVES, HELD]
    requests[at] = requests[at]._replace(**changes)
    return facts(requests=tuple(requests))


OF_A_DECODER = [
    ("a slot is written to and free", facts(free=kv((6, 7, 8, 3), (6, 7, 8))), "XFER-2",
     "device full slot 3 is kept for what the prefill server of h1 writes; h1 and the free list have it"),
    ("a slot that is written to was freed", together(but(1, slots=kv((5,), (4, 5))), facts(
        free=kv((6, 7, 8, 4), (6, 7, 8)))), "XFER-2", "prefill server of h2 writes; the free list has it"),
    ("a slot that is written to is a node's", together(but(1, slots=kv((5,), (4, 5))), node(
        1, stamps=A[:3], device=kv((1, 2, 4), (1, 2)))), "HOST-2",
     "device full slot 4 of position 2 holds nothing"),
    ("a slot that is written to is another's", together(but(0, slots=kv((3, 5), (3,)))), "XFER-2",
     "prefill server of h2 writes; h1 and h2 have it"),
    ("an SWA slot that is written to is a node's", together(
        node(1, device=kv((1, 2), (1, 3))), facts(free=kv((6, 7, 8), (6, 7, 8, 2)))), "XFER-2",
     "device swa slot 3 is kept for what the prefill server of h1 writes; node 1 and h1 have it"),
    ("a row is free while it is written to", facts(free_rows=(3, 2)), "XFER-2",
     "h2 keeps its row while its prefill server writes; it is free"),
    ("the row of who is written to is gone", but(1, row=-1), "XFER-2", "h2 keeps its row while"),
    ("a slot of a first token is free", facts(free_first=(1,)), "XFER-2",
     "h2 keeps its slot of a first token while its prefill server writes; it is free"),
    ("a row is lost", facts(free_rows=()), "XFER-3", "each row of 3 is free or of one request; 1 are lost"),
    ("a row is free twice", facts(free_rows=(3, 3)), "XFER-3", "row 3 is free or of one request; 2 have it"),
    ("a slot of a first token is lost", together(but(0, first=-1, writing={})), "XFER-3",
     "each slot of a first token of 2 is free or of one request; 1 are lost"),
    ("a device slot is lost", facts(free=kv((6, 7), (6, 7, 8))), "XFER-3",
     "device full slot 8 is free, a node's or a request's; nobody has it"),
    ("an SWA slot is lost", facts(free=kv((6, 7, 8), (6, 7))), "XFER-3", "device swa slot 8 is free"),
    ("a session waits for nobody", but(1, name="session h2", state=BUSY), "XFER-3",
        "session h2 is free for a turn; it waits for one that is gone"),
    ("a session is over", but(1, name="session h2", state=OVER), "XFER-3",
        "session h2 was closed, and keeps nothing; it keeps KV"),
    ("a request is in no queue", but(1, state=NOWHERE), "XFER-3", "h2 is in a queue, or runs; it is in none"),
    ("a request and a node have a slot", but(0, slots=kv((3, 1), (3,))), "TREE-16",
     "device full slot 1 has one owner; node 1 and h1 have it"),
]  # fmt: skip


@pytest.mark.parametrize("row", OF_A_DECODER, ids=lambda row: row[0])
def test_a_clause_sees_what_is_wrong_on_a_server_that_only_decodes(row):
    _, change, clause, words = row
    found, text = violated(change, was=RECEIVED, sizes=DECODING)
    assert found[0] == clause and words in text, (found, text)


def test_a_retracted_request_keeps_its_kv_on_the_host():
    sizes = replace(DECODING, decode="plain", host_pages=2, host_swa_pages=1)
    kept = TierRequest("h3", "retracted", -1, -1, {}, kv((0,)), {})
    was = RECEIVED._replace(
        requests=(RECEIVES, HELD, kept), host_free=kv((1,), (0,)), host_memory=kv((A[0], 0), (0,))
    )
    assert violated(facts(), was=was, sizes=sizes) == ([], "")
    found, text = violated(facts(host_free=kv((1, 0), (0,))), was=was, sizes=sizes)
    assert found == ["HOST-1"] and "h3, which is retracted, has it, 1 time in the free list" in text


def test_a_lock_of_full_kv_alone_counts_in_one_pool():
    was = RECEIVED._replace(users=(TierUser("h1", False, 1, 1, full_only=True),))
    assert violated(node(1, locks=count(1, 0)), was=was, sizes=DECODING) == ([], "")
    assert violated(node(1, locks=count(1, 1)), was=was, sizes=DECODING)[0] == ["HOST-3"]


def test_what_counts_as_being_fetched_is_nothing_at_rest():
    [(clause, failure)] = failures(facts(reserved=3), was=REST)
    assert clause.id == "XFER-3" and failure.observed == "3 do"
    assert failure.at == (AtCount("storage", "tokens being fetched", 0),)


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


@pytest.mark.parametrize("row", LOCKS)
def test_a_lock_has_a_range_of_each_pool(row):
    host, window, change, low, left_out = row
    user = TierUser("h1", host, 3, 1)
    sizes = SIZES if window else replace(SIZES, window=None, swa_pages=0, host_swa_pages=0)
    ranges = LockRanges(replace(sizes, window=window))
    assert ranges.follow(change(FACTS._replace(nodes=PATH, users=(user,)))) == [
        LockRange(user, low, left_out)
    ]


# a poll takes pages of a storage in
@pytest.mark.parametrize(("command", "host", "at", "low"), [
    (Insert("h3", ()), True, 1, {"full": 0, "swa": 0}), (Poll(), True, 1, {"full": 0, "swa": 0}),
    (Unlock("h3"), True, 1, {"full": 1, "swa": 1}), (None, True, 1, {"full": 1, "swa": 1}),
    (Poll(), False, 1, {"full": 0, "swa": 1}), (Poll(), True, 7, {"full": 0, "swa": 0}),
])  # fmt: skip
def test_a_backup_locks_a_node_before_what_is_inserted_splits_it(command, host, at, low):
    """Node 1 is backed up and split; both parts count the backup."""
    ranges = LockRanges(replace(SIZES, window=1))
    ranges.follow(FACTS)
    if command:
        ranges.note(command)
    last = NODES[1]._replace(start=1, stamps=A[1:2], parent=7)
    user = TierUser("backup of 1", host, at, 9)
    now = FACTS._replace(
        nodes=(NODES[1]._replace(node=7, stamps=A[:1]), last, *FACTS.nodes[1:]), users=(user,)
    )
    assert ranges.follow(now) == [LockRange(user, low)]
    ranges.begins(user, {1: NODES[1]})
    if at == 1:
        assert ranges.follow(now) == [LockRange(user, {"full": 0, "swa": 0})]


TEXT, MORE = (Piece("a", 1),), (Piece("b", 2),)


def test_who_holds_which_text_is_remembered():
    """By name; of prompts the last six."""
    ranges = LockRanges(SIZES)

    def after(*commands):
        for command in commands:
            ranges.note(command)
        return ranges.prompts, ranges.waiting, ranges.sessions

    assert after(Match("h1", TEXT), Load("h2", MORE), Insert("h3", MORE, chunked=True)) == (
        {"h1": TEXT, "h2": MORE, "h3": MORE}, {}, set(),
    )  # fmt: skip
    assert after(Insert("h1", TEXT), Unlock("h2"), Unlock("h3")) == ({}, {}, set())
    asks = [Prefetch(name, TEXT) for name in ("h1", "h2", "h3", "h4")]
    assert after(*asks, Abort("h1"), Match("h2", TEXT), Load("h3", TEXT))[1] == {"h4": TEXT}
    assert after(Await("h5", TEXT), Await("h6", TEXT, resumable=True))[2] == {"h6"}
    assert after(Close("h6"))[2] == set()
    assert ranges.seen == [TEXT, TEXT, TEXT, MORE]
    after(*(Insert("h1", MORE) for _ in range(4)))
    assert ranges.seen == [MORE, MORE, MORE, MORE, TEXT, TEXT]


def test_the_scenes_conform():
    assert violated(facts()) == ([], "")
    assert violated(facts(), was=STORING) == ([], "")
    assert violated(facts(), was=RECEIVED, sizes=DECODING) == ([], "")
    assert violated(facts(), was=REST) == ([], "")


CONFORMS = [
    ("a lock of a node that is gone", facts(users=(*USERS, TierUser("h9", False, 99, 9))), FACTS, SIZES),
    ("a window that ends in a node", node(1, locks=count(2, 1)), FACTS, replace(SIZES, window=1)),
    ("a parent on the host alone", facts(
        nodes=(*REST.nodes, NODES[3]._replace(
            node=5, parent=3, start=3, stamps=B[3:4], host=kv((5,), (5,)), hashed=A[:2] + B[2:4])),
        host_free=kv(), host_memory=kv(*((*REST.host_memory["full"][:5], B[3]),) * 2)), REST, SIZES),
    ("one row", facts(free_rows=(), free_first=()), RECEIVED._replace(
        requests=(HELD._replace(row=1, first=0, slots=kv((4, 5, 3), (4, 5, 3))),)),
     replace(DECODING, rows=1)),
    ("what is loaded for a request alone", facts(transfers=(
        TierTransfer(1, True, (TierPart("state", 2, 0),), (), True),)), RECURRENT, WITH_STATES),
]  # fmt: skip


@pytest.mark.parametrize("row", CONFORMS, ids=lambda row: row[0])
def test_what_only_resembles_a_fault_conforms(row):
    _, change, was, sizes = row
    assert violated(change, was=was, sizes=sizes) == ([], "")


def unwritten(device=A[2], host=C[0], backed_up=A[0]):
    """Before the command the sources of the transfers held other tokens."""
    return facts(
        memory=kv((*DEVICE[:3], device, *DEVICE[4:]), DEVICE),
        host_memory=kv((backed_up, *HOST[1:4], host, 0), HOST),
    )


STALE = TRANSFERS[0]._replace(stale=True)
BEFORE = [
    ("the source of a store", unwritten(device=OTHER), "device full slot 3 stays as it is until store 1 has"),
    ("the source of a load", unwritten(host=OTHER), "host full slot 4 stays as it is until load 2 has"),
    ("the source of a backup", unwritten(backed_up=OTHER), "host full slot 0 stays as it is until backup 3"),
    ("a source, before its store begins", together(
        unwritten(device=OTHER), facts(transfers=TRANSFERS[1:])), ""),
    ("a source, before a store that a reset left goes on", together(
        unwritten(device=OTHER), facts(transfers=(STALE, TRANSFERS[1]))), ""),
    ("a source, before its backup begins", together(
        unwritten(backed_up=OTHER), facts(operations=(PREFETCH,))), ""),
]  # fmt: skip


@pytest.mark.parametrize("row", BEFORE, ids=lambda row: row[0])
def test_a_source_may_be_written_until_its_transfer_begins(row):
    _, other, words = row
    found, text = violated(lambda _: STORING, was=other(STORING))
    assert found == ["XFER-1"] * bool(words) and text.startswith(words), (found, text)
    assert not words or text.endswith("it was written")


def test_a_fault_of_two_clauses_is_seen_by_both():
    slots = PREFETCH._replace(slots=kv((4, 5), (5,)), moving=kv((4,)))
    for change in (facts(host_free=kv((5,), ())), facts(operations=(BACKUP, slots))):
        assert violated(change, was=STORING)[0] == ["HOST-1", "XFER-2"]
    assert violated(facts(host_free=kv((5, 0), (5,))))[0] == ["HOST-1"]


# Places of failures, by the name of their row.
PLACES = {
    "a host slot is lost": [AtSlot("full", 5, host=True)],
    "a copy of another length": [AtSlot("full", 0, host=True)],
    "a node that is nowhere": [AtTreeNode(3, host=True)],
    "the source of an SWA store is freed": [AtSlot("swa", 3, host=False)],
    "a destination is free as well": [AtSlot("full", 4, host=False), AtTransfer(2)],
    "nobody names a node that is written": [AtTreeNode(2, host=True), AtTransfer(1)],
    "a read of nothing": [AtSlot("full", 1, host=False)],
    "a device slot is owned and free": [AtSlot("full", 1, host=False)],
    "a page of another text is stored": [AtSlot("full", 0, host=True)],
    "a row is free twice": [AtCount("server", "row", 1)],
    "a row is lost": [AtCount("server", "row", 3)],
    "a mark of a store stays": [AtTreeNode(2, host=True)],
    "a mark of a load stays": [AtTreeNode(4)],
    "a pin stays with its user": [AtTreeNode(4, host=True)],
    "an SWA lock too few": [AtTreeNode(2, "swa")],
    "a pin too few": [AtTreeNode(4, host=True)],
}


@pytest.mark.parametrize("name", PLACES)
def test_a_failure_has_its_places(name):
    scenes = (
        (FAULTS, FACTS, SIZES),
        (OF_A_STORAGE, STORING, SIZES),
        (OF_A_DECODER, RECEIVED, DECODING),
        (AT_REST, REST, SIZES),
    )
    [found] = [
        failures(row[1], was=was, sizes=sizes)
        for rows, was, sizes in scenes
        for row in rows
        if row[0] == name
    ]
    assert [*found[0][1].at] == PLACES[name]


AT_REST = [
    ("a record stays", facts(records=RECORDS[1:]), "XFER-3", "there is a record of the load of node 4"),
    ("a mark of a load stays", node(4, loading=4), "XFER-3", "node 4 waits for a load"),
    ("a mark of a store stays", node(2, storing=2), "XFER-3", "node 2 waits for a store"),
    ("a pin stays with its user", together(
        node(4, pins=count(1, 0)), facts(users=(USERS[0], USERS[3]._replace(full_only=True)))),
     "XFER-3", "node 4 is pinned on the host"),
    ("the tree's own check complains", facts(complaint="D-leaf extra: [1]"), "CHK-4", "D-leaf extra: [1]"),
    ("a parent has left the device", together(
        node(1, device=kv(), locks=count()), facts(users=(), free=kv((5, 6, 1, 2), (5, 6, 1, 2)), reads=())),
     "TREE-16", "the parent of node 2, node 1, has KV on the device; it has none"),
    ("two nodes have one device slot", together(
        node(3, stamps=A[2:3], device=kv((3,), ()), host=kv((3,), ())), facts(
            host_memory=kv((*A[:3], A[2], C[0], 0), (*A[:3], 0, C[0], 0)), host_free=kv((5,), (5, 3)))),
     "TREE-16", "device full slot 3 has one owner; node 2 and node 3 have it"),
]  # fmt: skip


@pytest.mark.parametrize("row", AT_REST, ids=lambda row: row[0])
def test_a_clause_sees_what_is_wrong_at_rest(row):
    _, change, clause, words = row
    found, text = violated(change, was=REST)
    assert found[0] == clause and text.endswith(words), (found, text)


def test_a_parent_and_its_child_leave_the_device_in_one_step():
    """The child counts as it is after the step, not as it was before."""
    both = together(
        node(1, device=kv(), locks=count()), node(2, device=kv()), facts(
            users=(), free=kv((5, 6, 1, 2, 3), (5, 6, 1, 2, 3)), reads=()))  # fmt: skip
    assert violated(both, was=REST) == ([], "")


def test_a_device_slot_of_nobody_in_the_tree_may_be_that_of_a_running_request():
    assert violated(facts(free=kv((5,), (5, 6))), was=REST) == ([], "")


def split(host=1, swa=1):
    """Node 4 of two tokens, its load in flight, and the same split in two; the new part counts this."""
    whole = NODES[4]._replace(stamps=C[:2], device=kv((4, 5), (4, 5)), host=kv((4, 5), (4, 5)))
    load = TierTransfer(2, True, (*part(4, 4), *part(5, 5)), (4,), True)
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
    assert violated(cut, was=was) == ([], "")
    for less in (split(host=0), split(swa=0)):
        found, text = violated(less[1], was=less[0])
        assert (
            found == ["HOST-3"]
            and "node 5 on the host is locked 1 time; it is locked 0 times" in text
        )


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
    assert violated(facts(nodes=(upper, rest)), was=RECURRENT, sizes=WITH_STATES) == ([], "")


def test_an_older_release_leaves_the_lock_on_the_host_with_the_last_part():
    was, cut = split(host=0)
    assert violated(cut, was=was._replace(loose=("host end",))) == ([], "")


def test_an_older_release_locks_no_tombstones():
    """Node 1 has no SWA KV on the device: a window before the end of node 2 covers that alone."""
    bare = together(
        node(1, device=kv((1, 2), ()), locks=count(2, 0)),
        facts(free=kv((5, 6), (5, 6, 1, 2)), loose=("tombstones",)),
    )
    was = bare(FACTS)
    assert violated(facts(), was=was) == ([], "")
    found, _ = violated(node(1, device=kv((1, 2), ()), locks=count(2, 1)), was=was)
    assert found[0] == "HOST-3"


def test_a_pin_of_full_kv_counts_what_is_there_unless_it_is_copied_when_evicted():
    transfers = TRANSFERS[0], TierTransfer(2, True, part(4, 4)[1:], (4,), True)
    bare = together(
        node(4, host=kv((), (4,)), pins=count(0, 1)),
        facts(host_free=kv((5, 4), (5,)), transfers=transfers),
        facts(memory=kv((*DEVICE[:4], C[0], 0, 0), DEVICE)),
    )
    back = replace(SIZES, policy="write_back")
    for was in (FACTS, bare(FACTS)):  # locked with KV on the host, or without
        assert violated(bare, was=was) == ([], "")
        assert violated(bare, was=was, sizes=back)[0] == ["HOST-3"]
    assert violated(together(bare, node(4, pins=count(2, 1))), was=FACTS)[0] == ["HOST-3"]


def test_a_store_that_has_copied_needs_its_source_no_more():
    memory = (*HOST[:2], A[2], *HOST[3:])
    freed = together(
        node(2, device=kv((3,), ())),
        facts(
            transfers=(COPIED, TRANSFERS[1]),
            host_memory=kv(memory, memory),
            free=kv((5, 6), (5, 6, 3)),
        ),
    )
    assert violated(freed) == ([], "")


def test_a_transfer_from_before_a_reset_harms_nobody():
    stale = TRANSFERS[0]._replace(stale=True, acks=())
    empty = FACTS._replace(
        nodes=(),
        users=(),
        records=(),
        reads=(),
        transfers=(stale,),
        free=kv(range(1, 7), range(1, 7)),
        host_free=kv(range(6), range(6)),
    )
    assert violated(lambda _: empty, command=ResetCache()) == ([], "")


def test_a_reset_forgets_the_copies():
    # a copy without SWA KV is one
    bare = together(node(1, host=kv((0, 1), ())), facts(host_free=kv((5,), (5, 0, 1))))
    [(clause, failure)] = failures(bare, was=REST, command=ResetCache())
    assert clause.id == "HOST-4" and failure.observed == "4"
    assert failure.at == (AtCount("host", "hashes", 0),)
    assert violated(facts(), was=REST, command=ResetCache(), refused=True) == ([], "")


def test_an_evict_frees_what_counts_as_evictable():
    was = REST._replace(evictable=count(2, 1))
    found, text = violated(facts(), was=was, command=Evict(1))
    assert found == ["TREE-17"] and text == "1 of 2 evictable full tokens are freed; 0 are"
    assert violated(facts(), was=was, command=Evict(0, 3))[0] == ["TREE-17"]
    assert violated(facts(), was=was, command=Evict(1), refused=True) == ([], "")
    freed = together(node(2, device=kv((), (3,))), facts(free=kv((5, 6, 3), (5, 6))))
    assert violated(freed, was=was, command=Evict(1)) == ([], "")
    assert violated(facts(), was=REST._replace(evictable=count()), command=Evict(3)) == ([], "")
    one_pool = replace(SIZES, window=None, swa_pages=0, host_swa_pages=0)
    assert one_pool.pools == ("full",)


def recurrent(**changes):
    """Another node, or other facts, of a model with recurrent layers."""

    def changed(was):
        [only] = was.nodes
        of_node = {name: changes.pop(name) for name in ("host", "locks") if name in changes}
        return was._replace(nodes=(only._replace(**of_node),), **changes)

    return changed


KV = {"full": (0, *A[:2], 0, 0)}
OF_STATES = (
    ("a state of other tokens", recurrent(memory={**KV, "state": (0, A[0], STATE, 0)}), "HOST-2",
        "the state of node 1 on the device is that after token 2; device state slot 1 of the state after"
        " token 2 holds another state"),
    ("a copy is empty", recurrent(host_memory={"full": (*A[:2], 0, 0), "state": (0, 0)}), "HOST-2",
        "the state of node 1 on the host is that after token 2; host state slot 0 of the state after token"
        " 2 holds nothing"),
    ("a slot that nobody has", recurrent(requests=()), "XFER-3",
        "device state slot 2 is free, a node's or a request's; nobody has it"),
    ("a request has the state of a node", recurrent(requests=(LOADS._replace(slots={"state": (1,)}),)),
        "XFER-3", "device state slot 2"),
    ("a request has a free slot", recurrent(free={"full": (3, 4), "state": (2, 3)}), "TREE-16",
        "device state slot 2 has one owner; h2 and the free list have it"),
    ("a host slot is lost", recurrent(host={"full": (0, 1), "state": ()}), "HOST-1", "host state slot 0"),
    ("a lock too many", recurrent(locks={"full": 1, "state": 2}), "HOST-3",
        "the state of node 1 on the device is locked 1 time"),
    ("a state that was not loaded", recurrent(reads=(TierRead("h2", "state", 1, 2, 0, STATE),)), "LOAD-1",
        "h2 finds its own state after token 2; slot 2 holds nothing"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "clause", "says"), [row[1:] for row in OF_STATES], ids=[r[0] for r in OF_STATES]
)
def test_a_fault_in_states_is_seen_first_by_its_clause(change, clause, says):
    clauses, sentence = violated(change, was=RECURRENT, sizes=WITH_STATES, waiting=())
    assert clauses[0] == clause and says in sentence, (clauses, sentence)


def test_states_that_are_right_conform_and_an_evict_frees_as_many_as_counted():
    assert violated(recurrent(), was=RECURRENT, sizes=WITH_STATES, waiting=()) == ([], "")
    was = RECURRENT._replace(evictable={"full": 0, "state": 1})
    clauses, says = violated(
        recurrent(), command=Evict(0, 0, 1), was=was, sizes=WITH_STATES, waiting=()
    )
    assert clauses == ["TREE-17"] and says == "1 of 1 evictable states are freed; 0 are"


SENT, ARRIVE = RECEIVES._replace(writing={}), Arrive("h1")


@pytest.mark.parametrize(
    "commands, requests, found",
    [
        ([ARRIVE, *[Poll()] * 3], [SENT], "PRO-1"),
        ([ARRIVE, *[Poll()] * 2], [SENT], None),
        ([Poll()] * 3, [SENT], None),  # its first token has still to come
        ([ARRIVE, *[Poll()] * 3], [RECEIVES], None),  # the prefill server has still to write
        ([Poll()] * 3, [HELD._replace(writing={})], None),  # nobody waits for it
        ([ARRIVE, Poll(), Poll(), Evict(1), Poll()], [SENT], None),
        ([ARRIVE, *[Poll()] * 3], [SENT, HELD._replace(state="runs", writing={})], None),
        ([ARRIVE, *[Poll()] * 3], [SENT, HELD._replace(state=IDLE, writing={})], None),
        ([Poll()] * 3, [SENT._replace(state="waits")], None),
        ([Greet("h1"), *[Poll()] * 3], [SENT._replace(state="waits")], "PRO-1"),
        ([ARRIVE, Await("h1", ()), *[Poll()] * 3], [SENT], None),
        ([Greet("h1"), Await("h1", ()), *[Poll()] * 3], [SENT._replace(state="waits")], None),
        ([ARRIVE, Poll(), Complete(), Poll(), Poll()], [SENT], "PRO-1"),
    ],
)
def test_a_server_that_only_decodes_and_comes_into_the_same_state_again(commands, requests, found):
    progress, beside = DecodeProgress(), LockRanges(DECODING)
    now = RECEIVED._replace(requests=tuple(requests))
    for command in commands:
        beside.note(command)
        still = progress.follow(command, now, beside.greeted, beside.arrived)
    step = TierStep(DECODING, Poll(), False, now, now, [], standstill=still)
    failure = TIER_CLAUSES["PRO-1"].check(step)
    assert bool(failure) == bool(found)
    if failure:
        assert failure.observed.startswith("2 calls of the scheduler later nothing has run")
        assert f"h1 {requests[0].state}" in failure.observed


def test_every_clause_has_a_row():
    seen = {row[2] for row in (*FAULTS, *AT_REST, *OF_A_STORAGE)} | {"HOST-4", "TREE-17", "PRO-1"}
    assert seen == {*TIER_CLAUSES}
    assert {*OF_CONNECTORS} <= {*TIER_CLAUSES}


def test_a_waived_clause_is_not_evaluated():
    ranges = LockRanges(SIZES)
    now = node(1, locks=count(1, 2))(FACTS)
    step = TierStep(SIZES, Poll(), False, FACTS, now, ranges.follow(now))
    assert broken(step, {"HOST-3"}) == []


def test_what_was_reported_is_shown_by_a_fault_or_stands_for_a_planted_one():
    planted = planted_faults("tiers/faults.toml")
    for each in reported():
        assert not each.planted or each.planted in planted, each.numbers
        known = [known_faults()[fault] for fault in each.faults]
        said = {number for fault in known for number in (*fault.reports, *fault.cause)}
        assert not said or {*each.numbers} <= said, each.numbers


def test_a_report_that_contradicts_itself_is_named():
    with pytest.raises(ValueError, match=r"\(1,\): `faults` go with the verdict shown"):
        TierReport(numbers=(1,), says="", verdict="gone", faults=("split-below-a-backup",))
    with pytest.raises(ValueError, match=r"\(1,\): `called` goes with the verdict not met"):
        TierReport(numbers=(1,), says="", verdict="not met", called={"load_back": 0})
    with pytest.raises(ValueError, match=r"known\.toml has no 'nothing'"):
        TierReport(numbers=(1,), says="", verdict="shown", faults=("nothing",))
