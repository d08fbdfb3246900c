"""Each comparison of a clause is seen to fail by its name, and to hold beside it.

A step of the reference is what every clause accepts. Each case spoils one fact of it, by hand.
"""

from dataclasses import replace

import pytest

from reference.clauses import CLAUSES
from reference.clauses.facts import NodeFacts, Owned
from reference.clauses.step import Step
from reference.clauses.tree_locks import usable_length
from reference.commands import (
    Choice, Done, Draft, Evict, Freed, Insert, Launch,
    SpecDecode, Unlock,
)  # fmt: skip
from reference.ledger import ZERO
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.reference.spoilt_facts import (
    ONE, PLAIN, TREE, also_owned, as_refused, changed, cursors, end_of, fails, freed_less, holds, in_tree,
    is_told, moved, node, one_lost, one_twice, pages, path, reads, step_of, text,
)  # fmt: skip

SERVE = script("submit r1 (no session) +5; admit r1; extend r1 +5")
OTHER = script("submit r2 (no session) +2; admit r2")
TURN = script("open s1; submit r1 in s1 +5; admit r1; extend r1 +5")
BY_TREE = script("submit r1 (no session) a4 +1; admit r1; extend r1 +5")

INSERTED = step_of(TREE, "insert h1 a8")  # [0, 6) and [6, 8)
CROWDED = step_of(
    replace(TREE, full_pages=4, swa_pages=4), *(Insert("h1", text(letters)) for letters in ("b4", "a4", "a6"))
)
KEPT = step_of(TREE, "insert h1 a8 (goes on)")
MATCHED = step_of(ONE, "insert h1 a5; match h2 a5")
EVICTED = step_of(TREE, "insert h1 a8; insert h2 b2; evict full 2")
SWA_EVICTED = step_of(TREE, "insert h1 a8; evict full 0 swa 2")
UNLOCKED_ALL = step_of(TREE, "insert h1 a8 (goes on); unlock h1")
UNLOCKED = step_of(TREE, "insert h1 a4 (goes on); evict full 2 swa 2")
LEFT = step_of(TREE, *BY_TREE, "decode r1; finish r1 keep 2")
TOO_LATE = step_of(TREE, *BY_TREE, *(SpecDecode((Draft("r1", n, n),)) for n in (4, 1)), "finish r1 keep 5")
ENTERED = step_of(TREE, *BY_TREE)
TWO = step_of(TREE, "insert h1 a2 (goes on); insert h2 b2 (goes on); unlock h2")
ADMITTED = step_of(TREE, "insert h1 a4; submit r1 (no session) a4 +1; admit r1")
SWEPT = step_of(PLAIN, *SERVE, "spec_decode r1 +8 accept 5; evict_swa r1 at length 10")
DECODED = step_of(PLAIN, *TURN, "decode r1")
IN_FLIGHT = *SERVE, Launch((Draft("r1", 3, 1),))
BEHIND = step_of(PLAIN, *IN_FLIGHT, "launch r1 +2 accept 1")
SETTLED = step_of(PLAIN, *IN_FLIGHT, "settle r1")
BATCH = step_of(PLAIN, *SERVE, *OTHER, "extend r2 +2")
PREFILLED = step_of(PLAIN, *SERVE)
LONG_PROMPT = step_of(TREE, "submit r1 (no session) a8 +1; admit r1; extend r1 +9")
ENDED = step_of(PLAIN, *TURN, "finish r1 keep 1")
AGAIN = step_of(PLAIN, *TURN, "finish r1 keep 1; submit r2 in s1 +2; admit r2")
EMPTY = step_of(PLAIN, *SERVE, "abort r1")
LEAF = step_of(TREE, "insert h1 a2")
LONG_LEAF = node(LEAF, 0, path=path("a6"), slots=range(2, 8))


def followed(step: Step, **cursors: int) -> Step:
    """The reference has followed a choice: the first request has other cursors."""
    request = step.now.requests[0]
    return replace(step, now=step.now.with_request(
        request._replace(cursors=request.cursors._replace(**cursors))))  # fmt: skip


ALLOCATED = followed(DECODED, kv_allocated_len=8)
WIDE = followed(step_of(replace(TREE, window=6), "submit r1 (no session) a8 +1; admit r1; extend r1 +9"),
                swa_evicted_seqlen=6)  # fmt: skip
BARE = replace(PLAIN, window=None, swa_pages=0)
FIRST = script("open s1; submit r1 in s1 a4; admit r1; extend r1 +4")
LATER = (*FIRST, *script("finish r1 keep 1; submit r2 in s1 +2; admit r2"))
FAR = step_of(PLAIN, *SERVE, "spec_decode r1 +8 accept 5; evict_swa r1 at length 12")
LIFTED = step_of(TREE, *BY_TREE, "evict_swa r1 at length 5")
NO_SWA = step_of(replace(TREE, window=None, swa_pages=0), "insert h1 a8")

LONG = NodeFacts(path("a10"), range(1, 11), range(1, 11), range(1, 11), path("a10"), path("a10"), 0, 0)


CASES = [
    # Shape.
    fails("TREE-1", "an empty node", node(INSERTED, 0, slots=()), "whole pages"),
    fails("TREE-1", "begins before the root", node(INSERTED, 1, slots=range(2, 12)), "whole pages"),
    fails("TREE-1", "begins inside a page", node(INSERTED, 0, slots=range(2, 7)), "whole pages"),
    fails("TREE-1", "ends inside a page", node(INSERTED, 1, path=path("a7"), slots=(2,)), "whole pages"),
    fails("TREE-1", "hangs nowhere", in_tree(INSERTED, nodes=lambda ns: ns[1:]), "a node that ends at 6"),
    fails("TREE-1", "begins as its sibling", in_tree(INSERTED, nodes=lambda ns: [*ns, LONG]), "one node"),
    holds("TREE-1", "siblings and children", TWO),
    holds("TREE-1", "no tree", SWEPT),
    # Live or tombstone.
    fails("TREE-2", "a slot short", node(INSERTED, 0, swa_slots=range(2, 7)), "6 SWA slots"),
    fails("TREE-2", "padding's slot", node(INSERTED, 1, swa_slots=(0, 5), mapped=(0, 5)), "or none, not 1"),
    fails("TREE-2", "not as mapped", node(INSERTED, 1, mapped=(1, 1)), "as mapped"),
    holds("TREE-2", "a tombstone", node(INSERTED, 1, swa_slots=())),
    holds("TREE-2", "no such pool", node(NO_SWA, 0, swa_slots=(7,))),
    holds("TREE-2", "no tree", SWEPT),
    fails("TREE-2", "a slot more", node(INSERTED, 0, swa_slots=range(2, 9)), "6 SWA slots at [0, 6)"),
    fails("TREE-3", "no SWA KV", node(INSERTED, 0, swa_read=(0,) * 6),
          "SWA KV of a6 at position 0, not its slot holds that of no committed token"),
    # What was inserted is there.
    fails("TREE-12", "a page is not", pages(INSERTED, "LLL-"), "[6, 8) of a8 in the tree"),
    fails("TREE-12", "kept though its first part was swept", pages(step_of(
        TREE, "insert h1 a8 SWA from 6 (goes on)"), "TTT-"), "[6, 8)"),
    fails("TREE-12", "a tombstone", pages(INSERTED, "TLLL"), "[0, 2) of a8 live"),
    fails("TREE-12", "a new tombstone, others evicted", pages(CROWDED, "LLT"), "[4, 6) of a6 live"),
    fails("TREE-12", "an old tombstone, nothing evicted", pages(step_of(
        TREE, "insert h1 a8 SWA from 4; insert h2 a8"), "TTLL"), "[0, 2) of a8 live"),
    holds("TREE-12", "an old tombstone, others evicted", pages(CROWDED, "TLL")),
    fails("TREE-12", "of what was kept", pages(KEPT, "LLL-"), "[6, 8)"),
    fails("TREE-12", "swept, but another had it", pages(step_of(
        TREE, "insert h1 a8 (goes on); insert h2 a8 SWA from 8 (goes on)"), "LL-L"), "[4, 6)"),
    fails("TREE-12", "of a prefill", pages(ENTERED, "L-"), "[2, 4)"),
    fails("TREE-12", "a tombstone of what is left", pages(step_of(
        TREE, *BY_TREE, "spec_decode r1 +8 accept 1; evict_swa r1 at length 13; finish r1 keep 2"),
        "LL-"), "[4, 6)"),
    fails("TREE-12", "of a first turn", pages(step_of(TREE, *FIRST), "L-"), "[2, 4)"),
    fails("TREE-12", "of what is left", pages(LEFT, "LL-"), "[4, 6)"),
    holds("TREE-12", "the last round was in flight", pages(TOO_LATE, "LLLL-")),
    holds("TREE-12", "of what is there", LEFT),
    holds("TREE-12", "of who is not shown", changed(ENTERED, requests={})),
    fails("TREE-14", "the end is not there", pages(LEFT, "LL-"), "6 tokens, not it is not there"),
    fails("TREE-14", "the end a tombstone", pages(LEFT, "LLT"), "6 tokens, not a tombstone"),
    holds("TREE-14", "refused", as_refused(pages(LEFT, "LL-"))),
    holds("TREE-14", "what it had from the tree", pages(LEFT, "LTL")),
    holds("TREE-14", "of what is there", LEFT),
    holds("TREE-14", "a window behind the last round", pages(TOO_LATE, "LLLTL")),
    holds("TREE-14", "the last round was in flight", pages(TOO_LATE, "LLLL-")),
    fails("TREE-14", "the last round was not needed", pages(step_of(
        TREE, *BY_TREE, "spec_decode r1 +3 accept 3; spec_decode r1 +2 accept 2; finish r1 keep 4"), "LLLT"),
        "[6, 8)"),
    fails("TREE-14", "a window behind neither", pages(TOO_LATE, "LLLT-"), "[6, 8)"),
    holds("TREE-14", "under pressure", pages(LEFT, "TL-")),
    holds("TREE-14", "a retract", pages(step_of(TREE, *BY_TREE, "retract r1"), "--")),
    holds("TREE-14", "no tree", changed(LEFT, tree=None)),
    holds("TREE-14", "driven with all that it hands in", pages(step_of(
        TREE, *BY_TREE, "decode r1; evict_swa r1 at length 6; finish r1 keep 2"), "LLT")),
    holds("TREE-14", "driven with more than it hands in", pages(step_of(TREE, *BY_TREE,
        "spec_decode r1 +8 accept 5; evict_swa r1 at length 8; finish r1 keep 1"), "LLT")),
    holds("TREE-14", "tombstones that are read", step_of(TREE, "submit r1 (no session) a6 +1; admit r1",
        "insert h1 a6 (goes on); unlock_swa h1; evict full 0 swa 6; extend r1 +7; finish r1 keep 1")),
    holds("TREE-14", "no window", step_of(
        replace(TREE, window=None, swa_pages=0), *BY_TREE, "decode r1; finish r1 keep 2")),
    holds("SWA-1", "of who shows no cursors", replace(changed(
        SWEPT, requests=lambda rs: {"r1": rs["r1"]._replace(cursors=None)}), tree_policy_is_free=True)),
    fails("TREE-12", "its end a tombstone", pages(INSERTED, "LLLT"), "[6, 8) of a8 live"),
    holds("TREE-12", "kept out", step_of(TREE, "insert h1 b4 SWA from 4 (goes on)")),
    holds("TREE-12", "C before target", step_of(TREE, *BY_TREE, "finish r1 keep 1")),
    holds("TREE-12", "target before C", step_of(
        TREE, *BY_TREE, "spec_decode r1 +4 accept 4; finish r1 keep 1")),
    holds("TREE-12", "a round", pages(step_of(TREE, *BY_TREE, "decode r1"), "--")),
    holds("TREE-12", "a retract", step_of(TREE, *BY_TREE, "retract r1")),
    holds("TREE-12", "swept", step_of(TREE, "insert h1 a8 SWA from 4")),
    holds("TREE-12", "a shape of its own", replace(pages(INSERTED, "LLL-"), tree_policy_is_free=True)),
    holds("TREE-12", "no tree", changed(INSERTED, tree=None)),
    holds("TREE-12", "refused", as_refused(pages(INSERTED, "LLL-"))),
    holds("TREE-12", "one pool", pages(NO_SWA, "TTTT")),
    holds("TREE-12", "a turn's end", pages(step_of(TREE, *FIRST, "finish r1 keep 1"), "--")),
    holds("TREE-12", "another command", pages(UNLOCKED, "--")),
    # A fresh leaf pins one window.
    fails("TREE-7", "a page too long", LONG_LEAF, "as one window needs"),
    holds("TREE-7", "a window", LEAF),
    holds("TREE-7", "a tombstone", node(LONG_LEAF, 0, swa_slots=())),
    holds("TREE-7", "an inner node", INSERTED),
    holds("TREE-7", "was there", in_tree(LONG_LEAF, before=True, pages={path("a2"): ((), True)})),
    holds("TREE-7", "no insert", replace(LONG_LEAF, command=Evict(2, 0))),
    holds("TREE-7", "refused", as_refused(LONG_LEAF)),
    holds("TREE-7", "no window", node(NO_SWA, 0, swa_slots=(7,))),
    holds("TREE-7", "no tree", changed(LONG_LEAF, tree=None)),
    holds("TREE-7", "a window in whole pages", step_of(replace(TREE, window=3), "insert h1 a4")),
    # A match can be resumed from.
    fails("TREE-5", "less", in_tree(MATCHED, lock_holders={"h2": range(4)}), "h2: 5 tokens"),
    fails("TREE-5", "more", pages(MATCHED, "LLLLT", before=True), "h2: 4 tokens"),
    fails("TREE-5", "of a request", changed(
        ADMITTED, requests=moved("r1", cache_protected_len=2)), "r1: 4 tokens"),
    fails("TREE-5", "of a first turn", cursors(step_of(TREE, "insert h1 a4", *TURN[:1],
        "submit r1 in s1 a4 +1; admit r1"), cache_protected_len=2), "r1: 4 tokens"),
    holds("TREE-5", "of a turn with a slot", changed(
        step_of(TREE, *LATER), requests=moved("r2", cache_protected_len=2))),
    holds("TREE-5", "all of it", MATCHED),
    holds("TREE-5", "less the last token", step_of(
        TREE, "insert h1 a4; submit r1 (no session) a4; admit r1")),
    holds("TREE-5", "outputs too", step_of(
        TREE, "submit r1 (no session) a4", *FIRST[2:], "retract r1; admit r1")),
    holds("TREE-5", "another command", cursors(LIFTED, cache_protected_len=2)),
    holds("TREE-5", "nobody", changed(ADMITTED, requests={})),
    holds("TREE-5", "no cursors", changed(
        ADMITTED, requests=lambda rs: {"r1": rs["r1"]._replace(cursors=None)})),
    holds("TREE-5", "no tree", changed(MATCHED, tree=None)),
    holds("TREE-5", "refused", as_refused(in_tree(MATCHED, lock_holders={"h2": range(4)}))),
    # Whoever reads it names its slots.
    fails("TREE-4", "a lock holder", in_tree(MATCHED, lock_holders={"h2": (9,) * 5}), "h2 at [0, 1)"),
    fails("TREE-4", "a request", reads(ENTERED, "r1", prefix=(*ENTERED.after.holders["r1"].prefix[:2], 9, 9)),
          "r1 at [2, 4)"),
    holds("TREE-4", "no row yet", changed(ENTERED, holders={})),
    holds("TREE-4", "no tree", changed(ENTERED, tree=None)),
    # What is locked stays.
    fails("TREE-8", "a page went", pages(KEPT, "LLL-"), "[6, 8) of a8, locked by h1, is there"),
    fails("TREE-8", "a tombstone", pages(KEPT, "LLLT"), "has SWA KV"),
    holds("TREE-8", "above the window", pages(KEPT, "TTTL")),
    holds("TREE-8", "no tree", changed(KEPT, tree=None)),
    holds("TREE-8", "nobody's", pages(INSERTED, "----")),
    holds("TREE-8", "one pool", pages(step_of(
        replace(TREE, window=None, swa_pages=0), "insert h1 a8 (goes on)"), "TTTT")),
    # Eviction frees what was asked.
    fails("TREE-10", "a full page less", freed_less(EVICTED, "full"), "2 full tokens freed, of 10"),
    fails("TREE-10", "an SWA page less", freed_less(
        step_of(TREE, "insert h1 a8; evict full 0 swa 6"), "swa"), "6 swa tokens freed, of 8"),
    fails("TREE-10", "told too much", replace(EVICTED, outcome=Done(freed=Freed(4, 2))), "2 full tokens"),
    fails("TREE-10", "told too little", replace(EVICTED, outcome=Done(freed=Freed(2, 0))), "2 swa tokens"),
    holds("TREE-10", "nothing told", replace(EVICTED, outcome=Done())),
    holds("TREE-10", "all is locked", UNLOCKED),
    holds("TREE-10", "refused", as_refused(freed_less(EVICTED, "full"))),
    holds("TREE-10", "SWA alone is not locked", step_of(TREE, "insert h1 a8 (goes on); evict full 8 swa 2")),
    holds("TREE-10", "no tree", changed(EVICTED, tree=None)),
    fails("TREE-10", "SWA alone is not locked", freed_less(step_of(
        TREE, "insert h1 a8 (goes on); evict full 0 swa 6"), "swa"), "6 swa tokens freed, of 6"),
    holds("TREE-10", "full is locked", step_of(TREE, "insert h1 a8 (goes on); evict full 6")),
    fails("TREE-10", "tombstones have full KV", freed_less(step_of(
        TREE, "insert h1 a8; evict full 0 swa 6; evict full 8"), "full"), "8 full tokens freed, of 8"),
    holds("TREE-10", "tombstones have no SWA KV", step_of(
        TREE, "insert h1 a8; evict full 0 swa 6; evict full 0 swa 8")),
    holds("TREE-10", "another command", replace(freed_less(EVICTED, "full"), command=Unlock("h1"))),
    fails("TREE-11", "a tombstone", node(EVICTED, 0, swa_slots=()), "a6 is live, not it is a tombstone"),
    fails("TREE-11", "it is gone", in_tree(EVICTED, nodes=[]), "a6 is live, not it is not there"),
    fails("TREE-11", "one stays", in_tree(EVICTED, nodes=lambda ns: [*ns, LONG]), "no node ends a10"),
    fails("TREE-11", "nothing goes", changed(EVICTED, tree=EVICTED.before.tree), "a8, not one does, live"),
    fails("TREE-11", "no SWA KV goes", changed(SWA_EVICTED, tree=SWA_EVICTED.before.tree),
          "a6 is a tombstone, not it is live"),
    holds("TREE-11", "nothing should go", in_tree(UNLOCKED_ALL, nodes=lambda ns: [*ns, LONG])),
    holds("TREE-11", "a shape of its own", replace(in_tree(EVICTED, nodes=[]), tree_policy_is_free=True)),
    holds("TREE-11", "no tree", changed(EVICTED, tree=None)),
    holds("TREE-9", "no counters", in_tree(INSERTED, sizes=None)),
    holds("TREE-9", "no tree", changed(INSERTED, tree=None)),
    holds("TREE-13", "a shape of its own", replace(in_tree(INSERTED, nodes=[]), tree_policy_is_free=True)),
    holds("TREE-13", "no tree", changed(INSERTED, tree=None)),
    fails("TREE-13", "one is gone", in_tree(INSERTED, nodes=lambda ns: ns[1:]), "ends a6, not none does"),
    fails("TREE-13", "one too many", in_tree(
        INSERTED, nodes=lambda ns: [*ns, LONG]), "none does, not a node ends a10"),
    # Cursors.
    fails("LEN-1", "C above A", cursors(DECODED, kv_committed_len=7), "r1"),
    fails("LEN-1", "A past the row", cursors(DECODED, kv_allocated_len=17), "r1"),
    fails("LEN-1", "E above A", cursors(DECODED, swa_evicted_seqlen=7), "r1"),
    fails("LEN-1", "R inside a page", cursors(DECODED, cache_protected_len=1), "r1"),
    fails("LEN-1", "of a slot", changed(ENDED, sessions=moved("s1", kv_committed_len=7)), "slot of s1"),
    holds("LEN-1", "a full row", cursors(DECODED, kv_allocated_len=16)),
    fails("LEN-4", "C too far", cursors(DECODED, kv_committed_len=5), "kv_committed_len 6"),
    fails("LEN-4", "A too far", cursors(DECODED, kv_allocated_len=8), "kv_allocated_len 6"),
    fails("LEN-4", "R", cursors(DECODED, cache_protected_len=2), "cache_protected_len 0"),
    fails("LEN-5", "slots for one round", cursors(BEHIND, kv_allocated_len=9), "kv_allocated_len 10 or more"),
    holds("LEN-5", "slots further ahead", cursors(BEHIND, kv_allocated_len=12)),
    holds("LEN-5", "nobody", changed(BEHIND, requests={})),
    holds("LEN-5", "no cursors", changed(
        BEHIND, requests=lambda rs: {"r1": rs["r1"]._replace(cursors=None)})),
    fails("LEN-4", "a result takes nothing back", cursors(SETTLED, kv_committed_len=8), "kv_committed_len 6"),
    fails("LEN-4", "a sweep moves C", cursors(SWEPT, kv_committed_len=9), "kv_committed_len 10"),
    fails("LEN-4", "a bystander", cursors(BATCH, kv_committed_len=4), "r1: "),
    fails("LEN-4", "a bystander of a sweep", changed(step_of(PLAIN, *SERVE, *OTHER,
        "extend r2 +2; evict_swa r1 at length 5"), requests=moved("r2", swa_evicted_seqlen=2)), "r2: "),
    holds("LEN-4", "a sweep as far as it likes", cursors(SWEPT, swa_evicted_seqlen=4)),
    holds("LEN-4", "refused", as_refused(cursors(DECODED, kv_committed_len=5))),
    holds("LEN-4", "the tree takes over", ENTERED),
    holds("LEN-4", "the tree takes over from a first turn", step_of(TREE, *FIRST)),
    fails("LEN-4", "R of a later turn", changed(
        step_of(TREE, *LATER, "extend r2 +2"), requests=moved("r2", cache_protected_len=2)), "r2"),
    fails("LEN-4", "no cursors", changed(
        ENTERED, requests=lambda rs: {"r1": rs["r1"]._replace(cursors=None)}), "no cursors"),
    holds("LEN-4", "allocates further", cursors(ALLOCATED, kv_allocated_len=8)),
    fails("LEN-4", "gives up slots, as the reference does", cursors(followed(step_of(
        PLAIN, *TURN, "spec_decode r1 +8 accept 1; decode r1"), kv_allocated_len=7), kv_allocated_len=7),
        "kv_allocated_len 13"),
    fails("LEN-4", "launches with less, as the reference does", cursors(
        followed(BEHIND, kv_allocated_len=9), kv_allocated_len=9), "kv_allocated_len 10"),
    fails("LEN-4", "allocates less, as the reference does", cursors(
        followed(DECODED, kv_allocated_len=5), kv_allocated_len=5), "kv_allocated_len 6"),
    holds("LEN-4", "a retract", step_of(PLAIN, *SERVE, "retract r1")),
    holds("LEN-4", "nobody", changed(DECODED, requests={})),
    holds("LEN-4", "somebody waits", step_of(PLAIN, *SERVE, *OTHER[:1], "decode r1")),
    holds("LEN-4", "whom an admission names", AGAIN),
    holds("LEN-4", "admitted without a slot", changed(step_of(PLAIN, *SERVE, *OTHER, "decode r1"),
        requests=lambda rs: rs | {"r2": rs["r2"]._replace(cursors=None)})),
    # Sweeps.
    fails("SWA-1", "past the window", cursors(SWEPT, swa_evicted_seqlen=10), "in [0, 8]"),
    fails("SWA-1", "inside a page", cursors(SWEPT, swa_evicted_seqlen=7), "in [0, 8]"),
    fails("SWA-1", "back", changed(
        step_of(PLAIN, *SERVE, "spec_decode r1 +8 accept 5; evict_swa r1 at length 10; decode r1"),
        requests=moved("r1", swa_evicted_seqlen=4)), "in [6, 8]"),
    fails("SWA-1", "in a round", cursors(DECODED, swa_evicted_seqlen=4), "in [0, 2]"),
    fails("SWA-1", "in a prefill", changed(step_of(PLAIN, *SERVE[:2], "extend r1 +4; extend r1 +1"),
        requests=moved("r1", swa_evicted_seqlen=4)), "in [0, 2]"),
    holds("SWA-1", "to the window", cursors(SWEPT, swa_evicted_seqlen=8)),
    holds("SWA-1", "not at all", cursors(SWEPT, swa_evicted_seqlen=0)),
    holds("SWA-1", "in a round", cursors(DECODED, swa_evicted_seqlen=2)),
    holds("SWA-1", "after the forward pass", replace(
        cursors(PREFILLED, swa_evicted_seqlen=2),
        outcome=Done((Choice("r1", swa_evicted_seqlen=2, after=True),)))),
    fails("SWA-1", "before it", cursors(PREFILLED, swa_evicted_seqlen=2), "in [0, 0]"),
    fails("SWA-1", "after the forward pass of a chunk, too far", replace(
        cursors(step_of(PLAIN, *SERVE[:2], "extend r1 +4; extend r1 +1"), swa_evicted_seqlen=4),
        outcome=Done((Choice("r1", swa_evicted_seqlen=4, after=True),))), "in [0, 2]"),
    holds("SWA-1", "into the tree's, by a shape of its own", replace(
        cursors(SWEPT, swa_evicted_seqlen=10, cache_protected_len=10), tree_policy_is_free=True)),
    fails("SWA-1", "into what is the tree's", cursors(
        SWEPT, swa_evicted_seqlen=10, cache_protected_len=10), "in [0, 8]"),
    fails("SWA-1", "by a shape of its own", replace(
        cursors(SWEPT, swa_evicted_seqlen=10), tree_policy_is_free=True), "in [0, 8]"),
    holds("SWA-1", "to the protected length", LIFTED),
    holds("SWA-1", "below the protected length, not at all", cursors(LIFTED, swa_evicted_seqlen=0)),
    holds("SWA-1", "as far as it is driven", cursors(FAR, swa_evicted_seqlen=10)),
    fails("SWA-1", "after a round", replace(
        cursors(DECODED, swa_evicted_seqlen=4),
        outcome=Done((Choice("r1", swa_evicted_seqlen=4, after=True),))), "in [0, 2]"),
    holds("SWA-1", "no window", cursors(step_of(BARE, *SERVE), swa_evicted_seqlen=4)),
    holds("SWA-1", "nobody", changed(SWEPT, requests={})),
    holds("SWA-1", "refused", as_refused(cursors(SWEPT, swa_evicted_seqlen=10))),
    # Windows.
    fails("SWA-2", "its first position", reads(step_of(
        PLAIN, "submit r1 (no session) +1; admit r1; extend r1 +1"), "r1", swa_read=(None,)),
        "positions [0]"),
    fails("SWA-2", "its last position", reads(DECODED, "s1", swa_read=(1,) * 5 + (None,)), "[5]"),
    fails("SWA-2", "with rounds in flight", reads(BEHIND, "r1", swa_read=(1,) * 4 + (None,) * 2), "[4]"),
    fails("SWA-2", "a row too short", reads(DECODED, "s1", swa_read=(1,) * 4 + (None,)), "[4]"),
    fails("SWA-2", "after a sweep", reads(SWEPT, "r1", swa_read=(None,) * 10), "[8, 9]"),
    holds("SWA-2", "less is committed than a round claims", reads(cursors(
        BEHIND, kv_committed_len=0), "r1", swa_read=(None,) * 10)),
    holds("SWA-2", "no window", step_of(BARE, *SERVE)),
    holds("SWA-2", "behind it", reads(DECODED, "s1", swa_read=(None,) * 3 + (1,) * 3)),
    holds("SWA-2", "nobody", reads(changed(DECODED, requests={}), "s1", swa_read=(None,) * 6)),
    holds("SWA-2", "no cursors", reads(changed(
        DECODED, requests=lambda rs: {"r1": rs["r1"]._replace(cursors=None)}), "s1", swa_read=(None,) * 6)),
    holds("SWA-2", "no cursors by the rules", changed(step_of(
        PLAIN, *SERVE[:1]), requests=PREFILLED.after.requests, holders=PREFILLED.after.holders)),
    holds("SWA-2", "no row", changed(DECODED, holders={})),
    holds("SWA-2", "somebody waits", step_of(PLAIN, *SERVE[:1])),
    # Reads.
    fails("READ-2", "another's", reads(DECODED, "s1", swa_read=[1] * 6), "SWA KV at position 0"),
    fails("READ-2", "no slot", reads(SWEPT, "r1", swa_read=[None] * 10), "SWA KV at position 6"),
    fails("READ-2", "a row too short", reads(DECODED, "s1", swa_read=()), "reads 6 positions"),
    fails("READ-1", "another's, swept", reads(SWEPT, "r1", full_read=(1,) * 10), "position 0"),
    fails("READ-1", "another's at the end", reads(
        DECODED, "s1", full_read=(*DECODED.after.holders["s1"].full_read[:5], 1)), "position 5"),
    fails("READ-1", "no window", reads(step_of(BARE, *SERVE), "r1", full_read=(1,) * 5), "position 0"),
    fails("READ-1", "a text too short", replace(PREFILLED, now=PREFILLED.now.with_request(
        PREFILLED.now.requests[0]._replace(origin=-3))), "reads 0 positions, not its row has 3"),
    fails("READ-1", "a retracted turn's, which is more than the history", reads(
        step_of(PLAIN, *TURN, "retract r1"), "s1", full_read=[1] * 5), "position 0"),
    fails("READ-2", "nobody", changed(DECODED, holders={}), "reads 6 positions"),
    holds("READ-2", "no window", step_of(BARE, *SERVE)),
    holds("READ-2", "below the frontier", reads(
        SWEPT, "r1", swa_read=[None] * 6 + list(SWEPT.after.holders["r1"].swa_read[6:]))),
    holds("READ-2", "the tree's, out of the window", reads(
        LONG_PROMPT, "r1", swa_read=[None] * 7 + list(LONG_PROMPT.after.holders["r1"].swa_read[7:]))),
    fails("READ-2", "the tree's, in the window, and the sweep ends with it", reads(
        LIFTED, "r1", swa_read=(None,) * 4 + tuple(LIFTED.after.holders["r1"].swa_read[4:])), "position 3"),
    fails("READ-2", "the tree's, in the window", reads(
        LONG_PROMPT, "r1", swa_read=[None] * 8 + list(LONG_PROMPT.after.holders["r1"].swa_read[8:])),
        "SWA KV at position 7"),
    fails("READ-2", "the tree's, in the window, and a sweep ends there", reads(
        WIDE, "r1", swa_read=(*WIDE.after.holders["r1"].swa_read[:5], None, 1, 1, 1)), "position 5"),
    # The backstop.
    fails("REF-1", "cursors", cursors(DECODED, swa_evicted_seqlen=2), "r1: "),
    fails("REF-1", "a slot", changed(ENDED, sessions=moved("s1", swa_evicted_seqlen=2)), "slot of s1"),
    fails("REF-1", "a lent slot", changed(AGAIN, sessions=moved("s1", swa_evicted_seqlen=2)), "slot of s1"),
    holds("REF-1", "a slot whose turn runs", changed(
        step_of(PLAIN, *TURN, "finish r1 keep 1; submit r2 in s1 +2; admit r2; extend r2 +3"),
        sessions=moved("s1", swa_evicted_seqlen=2))),
    holds("REF-1", "admitted without a slot", changed(
        step_of(PLAIN, *SERVE[:2]), requests=lambda rs: {"r1": rs["r1"]._replace(cursors=None)})),
    fails("REF-1", "a lock holder", in_tree(MATCHED, lock_holders={"h2": range(4)}), "lock holders"),
    fails("REF-1", "a full page more", also_owned(DECODED, "full", Owned("s1", 5, 9)), "full pages"),
    fails("REF-1", "an SWA page more", also_owned(DECODED, "swa", Owned("s1", 5, 9)), "SWA pages"),
    fails("REF-1", "a page of the tree", also_owned(MATCHED, "full", Owned("tree b1", 0, 9)), "full pages"),
    holds("REF-1", "an idle slot", ENDED),
    holds("REF-1", "no cursors, or none yet", changed(
        step_of(PLAIN, *SERVE[:1]), requests=lambda rs: {"r1": rs["r1"]._replace(cursors=ZERO)})),
    holds("REF-1", "one pool", NO_SWA),
    # Nothing lost at the end.
    fails("END-1", "a full page", one_lost(EMPTY, "full"), "12 of 12 pages of the full pool"),
    fails("END-1", "an SWA page", one_lost(EMPTY, "swa"), "12 of 12 pages of the swa pool"),
    fails("END-1", "a page, another twice", one_twice(EMPTY, "full"), "12 of 12 pages"),
    fails("END-1", "a page of who is gone", also_owned(one_lost(EMPTY, "full"), "full", Owned(
        "r1", 0, EMPTY.after.pools["full"].free[0])), "12 of 12 pages of the full pool"),
    fails("END-1", "a row", changed(EMPTY, free_rows=(0, 1, 1)), "all 3 rows"),
    fails("END-1", "beside the tree's", one_lost(INSERTED, "full"), "8 of 12 pages of the full pool"),
    fails("END-1", "somebody waits", one_lost(
        step_of(PLAIN, *SERVE, "abort r1", *OTHER[:1]), "full"), "12 of 12 pages"),
    holds("END-1", "somebody holds some", one_lost(DECODED, "full")),
    holds("END-1", "somebody is admitted", changed(step_of(PLAIN, *SERVE[:2]), free_rows=(0, 1))),
    holds("END-1", "the tree's", INSERTED),
]  # fmt: skip


@pytest.mark.parametrize("clause, step, says", CASES)
def test_a_spoilt_fact_is_told(clause, step, says):
    is_told(clause, step, says)


@pytest.mark.parametrize("step", [INSERTED, DECODED, AGAIN, LONG_PROMPT, MATCHED, FAR])
def test_clauses_about_states_read_the_end_of_a_step_alone(step):
    states = [clause for clause in CLAUSES.values() if clause.of_state]
    assert not any(clause.check(end_of(step)) for clause in states)


@pytest.mark.parametrize(
    "window, pattern, length",
    [
        (2, "LLLLL", 5), (2, "L", 1), (2, "LLTL", 2), (2, "LLTLL", 5), (3, "LLTLL", 2), (2, "TLL", 3),
        (2, "TL", 0), (1, "TL", 2), (2, "T", 0), (None, "TTT", 3), (2, "LL-LL", 2), (2, "-LL", 0),
        (3, "LTLLL", 5),
    ],
)  # fmt: skip
def test_what_can_be_resumed_from(window, pattern, length):
    step = pages(MATCHED, pattern, before=True)
    config = step.config._replace(geometry=replace(ONE, window=window, swa_pages=12 if window else 0))
    assert usable_length(replace(step, config=config), path("a5")[: len(pattern)]) == length
