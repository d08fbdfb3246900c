"""Faults of requests and sessions on the radix tree: who locks, inserts, lets go, and gets room."""

from __future__ import annotations

from collections.abc import Sequence

from impl.adapter import TreeSizes
from impl.bugs.register import FREE_ONLY, bug
from impl.torch_kv.cursors import N, RowCursors
from impl.lazy import Tensor
from impl.torch_kv.nodes import FULL, Key
from impl.torch_kv.requests import KVRequest, KVSession
from impl.torch_kv.system import TorchKV
from impl.vocabulary import Played, require
from reference.commands import Choice, Reason, Report


@bug(
    "insert-protects-half-a-page",
    "LEN-1",
    "the protected length is not whole pages",
    TorchKV.insert_unfinished,
    source="#20070",
)
def _(self: TorchKV, requests: Sequence[KVRequest]) -> None:
    """A crash with page_size > 1. After an insert the protected length was taken from what the request had
    committed, not from the whole pages that the tree took. Visible when a prompt ends inside a page. Fix: the
    tree's own length is R."""
    TorchKV.insert_unfinished(self, requests)
    inserted = [r for r in requests if self.tree is not None and r.cursors.cache_protected_len]
    lengths = [r.cursors.kv_committed_len for r in inserted]
    self.move([r for r in inserted if self.slot_of(r) is None], self.with_protected_len, lengths)


@bug(
    "no-cap-above-a-prefix",
    "LEN-2",
    "finish forgets the window's cursor of a turn with a prefix",
    TorchKV.cap_kept,
    modes=FREE_ONLY,
)
def _(self: TorchKV, cursors: RowCursors[N], target: N) -> RowCursors[N]:
    """As pr22900, of sessions whose first prompt the tree has: swa_evicted_seqlen is taken for the tree's,
    which no cut may touch, and left above the target. Visible once a window eviction ran past the target of a
    turn whose protected length is not 0. Fix: cap all three, whatever the protected length is."""
    capped = TorchKV.cap_kept(self, cursors, target)
    above = cursors.swa_evicted_seqlen - capped.swa_evicted_seqlen
    extra = above * (cursors.cache_protected_len > 0)  # a branch would wait for the device
    return capped._replace(swa_evicted_seqlen=capped.swa_evicted_seqlen + extra)


@bug(
    "bigrams-counted-as-tokens",
    "TREE-8",
    "R counts a token that the tree has no key for",
    TorchKV.insert_unfinished,
)
def _(self: TorchKV, requests: Sequence[KVRequest]) -> None:
    """A page is lost. n tokens have n - 1 bigrams, but what a request protects after an insert is counted in
    tokens. Visible with bigram keys (EAGLE) when what is computed ends with a page: that page is neither the
    row's nor the tree's. Fix: count keys."""
    TorchKV.insert_unfinished(self, requests)
    lanes = [r for r in requests if self.bigram and self.slot_of(r) is None]
    self.move(lanes, self.with_protected_len, [self.floor(r.cursors.kv_committed_len) for r in lanes])


@bug(
    "row-keeps-its-duplicates",
    "TREE-4",
    "a row goes on naming what an insert has freed",
    TorchKV.rename,
)
def _(
    self: TorchKV, requests: Sequence[KVRequest], lengths: list[int], slots: list[Tensor]
) -> None:
    """Two requests with one prompt read each other's KV. The second one's pages are duplicates and freed, but
    its row is not rewritten to the tree's. Visible when a running request inserts what is there already. Fix:
    rewrite the row up to the protected length."""


@bug(
    "insert-without-a-second-match",
    "TREE-8",
    "a running request inserts what it cannot match again",
    TorchKV.may_keep,
)
def _(self: TorchKV, key: Key, evicted: int) -> bool:
    """A running request loses its window. It inserts its prompt although the tree keeps a locked tombstone
    there: its own SWA KV is freed as a duplicate, and it reads on. Visible when a prompt is computed again
    over a locked tombstone. Fix: insert only if all of it can be matched again."""
    return True


@bug(
    "prompt-is-not-inserted", "TREE-12", "a prefilled prompt stays out of the tree", TorchKV.inserts
)
def _(self: TorchKV, request: KVRequest) -> bool:
    """Nothing that runs is ever shared. The prompt is not inserted when its last chunk has run. Visible at
    the first prefill. Fix: insert and lock it."""
    return False


@bug("later-turns-insert", "LEN-4", "a later turn inserts its prompt as well", TorchKV.inserts)
def _(self: TorchKV, request: KVRequest) -> bool:
    """A session's history is in the tree and in its row. A turn with a slot inserts what it prefills, and the
    protected length of the slot is overtaken. Visible in the second turn. Fix: later turns stay outside of
    the tree."""
    return self.unfinished_length(request.cursors) > request.cursors.cache_protected_len


@bug("slot-drops-the-lock", "TREE-6", "a saved slot lets its prefix go", TorchKV.save)
def _(self: TorchKV, session: KVSession, request: KVRequest) -> None:
    """A session's first prompt is evicted between turns, and its row still names it. The lock of the first
    turn is given back when that finishes. Visible when a first turn finishes. Fix: the slot carries the lock
    until the session is closed."""
    TorchKV.save(self, session, request)
    self.let_go(session.name)


@bug("close-keeps-the-lock", "TREE-6", "a closed session's prefix stays locked", TorchKV.close_now)
def _(self: TorchKV, session: KVSession) -> None:
    """The tree fills with prefixes that nothing evicts. Close gives back row and pages and forgets the lock.
    Visible at the close of a session that has had a turn. Fix: drop it, once."""
    lock = self.locks.pop(session.name, None)
    TorchKV.close_now(self, session)
    if lock is not None:
        self.locks[session.name] = lock


@bug(
    "abort-keeps-the-lock",
    "TREE-6",
    "an abort before the first extend keeps its match locked",
    TorchKV.abort_unstarted,
)
def _(self: TorchKV, request: KVRequest) -> None:
    """As with close: an aborted request that was admitted and never ran leaves its lock behind. Visible when
    a turn that matched something is aborted before it runs. Fix: drop the lock of the admission."""


@bug("wipe-keeps-the-lock", "TREE-6", "a midway abort keeps the prefix locked", TorchKV.wipe)
def _(self: TorchKV, session: KVSession, request: KVRequest) -> None:
    """A session that was wiped holds on to its first prompt, and locks another at its next turn. Visible at a
    midway abort of a session. Fix: row, pages and lock, once."""
    lock = self.locks.pop(session.name, None)
    TorchKV.wipe(self, session, request)
    if lock is not None:
        self.locks[session.name] = lock


@bug(
    "finish-keeps-the-lock",
    "TREE-6",
    "an ordinary request ends and its prefix stays locked",
    TorchKV.drop,
)
def _(self: TorchKV, request: KVRequest) -> None:
    """Nothing that was ever used is evicted. The end of an ordinary request frees its pages and not its lock.
    Visible when it finishes or is retracted. Fix: drop it, once."""
    lock = self.locks.pop(request.name, None)
    TorchKV.drop(self, request)
    if lock is not None:
        self.locks[request.name] = lock


@bug(
    "readmission-locks-again",
    "TREE-6",
    "an admission that is repeated locks twice",
    TorchKV.match_prefix,
)
def _(self: TorchKV, request: KVRequest) -> None:
    """Prefixes stay pinned after their requests are gone. A rejected admission is repeated and matches again,
    and the lock of the first one is overwritten. Visible when a request that matched something is admitted
    twice. Fix: give the first back."""
    self.locks.pop(self.holder_of(request), None)
    TorchKV.match_prefix(self, request)


@bug("match-takes-the-last-token", "TREE-5", "a match covers the whole input", TorchKV.match_key)
def _(self: TorchKV, request: KVRequest) -> Key:
    """A request whose input is cached has nothing to compute and no logits. The key of the match is the whole
    input instead of all but its last token. Visible when all of an input is in the tree. Fix: leave the last
    token out."""
    return tuple(request.text)


@bug(
    "finish-frees-what-it-inserted",
    "FREE-1",
    "a finished request frees the pages that the tree has taken",
    TorchKV.insert_finished,
)
def _(self: TorchKV, request: KVRequest, target: int) -> None:
    """The tree's pages are handed out again. A finished request inserts its text and then gives its whole row
    back. Visible when an ordinary request finishes with a whole page of output. Fix: what was inserted is the
    tree's."""
    before = request.cursors.cache_protected_len
    TorchKV.insert_finished(self, request, target)
    self.move([request], self.with_protected_len, [before])


@bug(
    "finish-inserts-the-overshoot",
    "TREE-15",
    "a finished request inserts what was accepted past its end",
    TorchKV.finished_length,
    source="#35694",
)
def _(self: TorchKV, cursors: RowCursors[int], target: int) -> int:
    """The tree keeps text that no client has seen. The key of a finished request ends at kv_committed_len,
    past the outputs that count. Visible when a verify round accepts past a stop. Fix: end it at target."""
    return self.floor(max(0, cursors.kv_committed_len - self.bigram))


@bug(
    "finish-inserts-a-token-too-many",
    "TREE-15",
    "a finished request inserts the token behind its last one",
    TorchKV.finished_length,
    source="#24590",
)
def _(self: TorchKV, cursors: RowCursors[int], target: int) -> int:
    """The tree keeps a token that no client has seen. Under overlap the round after the last one has written
    it. Visible when that token fills a page. Fix: end the key at the target."""
    return self.floor(max(0, min(cursors.kv_committed_len, target + 1) - self.bigram))


@bug(
    "sweep-frees-the-trees-pages",
    "TREE-2",
    "a window eviction starts below the protected prefix",
    TorchKV.eviction_start,
)
def _(self: TorchKV, cursors: RowCursors[N]) -> N:
    """A shared prefix loses its SWA KV under everybody who reads it. Window eviction starts at
    swa_evicted_seqlen, which is 0 at the first, instead of at the protected length. Visible at the first
    window eviction of a request with a prefix. Fix: max(E, R)."""
    return cursors.swa_evicted_seqlen


@bug("sweep-to-the-window", "TREE-14", "a leaf keeps less SWA KV than one window", source="#22470")
class _SweepsToTheWindow(TorchKV):
    """The next turn computes the whole conversation again. Decode evicts to a window behind the token that
    comes next; the tree takes whole pages, and of the last of them less than a window is live. Visible when a
    request that has evicted ends inside a page. Fix: stop a page short."""

    def eviction_reach(self, cursors: RowCursors[int], length: int) -> int:
        assert self.window is not None
        return self.floor(max(0, length - self.window))

    def eviction_choice(self, request: KVRequest) -> Played:
        return (Choice(request.name, swa_evicted_seqlen=request.cursors.swa_evicted_seqlen),)


@bug(
    "frontier-in-the-prefix-counts-as-swept",
    "OUT-1",
    "a request behind its prefix counts as having lost its window",
    TorchKV.evicted_end,
)
def _(self: TorchKV, cursors: RowCursors[int]) -> int:
    """A request cannot go on after its first window eviction. Window eviction lifts swa_evicted_seqlen to the
    protected length without freeing anything; taken for evicted, the window seems gone, though the tree has
    it. Visible when a prefix reaches into the window. Fix: below R the tree's lock keeps the window."""
    return cursors.swa_evicted_seqlen


@bug("evicts-before-it-knows", "OUT-2", "a refused batch has evicted the cache", TorchKV.room_for)
def _(self: TorchKV, pages: int, swa_pages: int, states: int = 0) -> None:
    """Under pressure every attempt to admit empties the tree and fails all the same. Eviction comes before
    the question whether it will do. Visible when a batch is refused for want of pages while something may be
    evicted. Fix: ask the counters first."""
    missing = self.missing(pages, swa_pages)
    if self.tree is not None and any(missing):
        self.tree.evict(*missing)
    TorchKV.room_for(self, pages, swa_pages, states)


@bug(
    "no-room-in-the-swa-pool",
    "OUT-1",
    "eviction for a batch looks at the full pool alone",
    TorchKV.room_for,
)
def _(self: TorchKV, pages: int, swa_pages: int, states: int = 0) -> None:
    """Requests are refused although the SWA pool has evictable pages. Only the full pool is checked for what
    the tree could give back. Visible when the SWA pool is full of cached windows. Fix: check each pool."""
    require(not self.missing(pages, swa_pages)[1], Reason.OUT_OF_SWA)
    TorchKV.room_for(self, pages, swa_pages, states)


@bug(
    "cached-pages-are-not-counted", "CHK-1", "a memory check does not know the tree", TorchKV.report
)
def _(self: TorchKV, *, log: bool = False) -> Report:
    """The check cries leak as soon as something is cached. Pages that may be evicted are neither available
    nor anybody's. Visible at the first check after an insert. Fix: the evictable term."""
    tree = self.tree
    self.tree = None
    try:
        return TorchKV.report(self, log=log)
    finally:
        self.tree = tree


@bug(
    "protected-counts-each-lock",
    "CHK-1",
    "a memory check counts a shared prefix once for each lock",
    TorchKV.sizes,
)
def _(self: TorchKV) -> TreeSizes:
    """The check cries leak as soon as two requests share a prefix. Protected tokens are added up over the
    locks instead of over the nodes. Visible at a check while two holders lock one node. Fix: each node
    once."""
    nodes = [] if self.tree is None else [self.tree.root]
    for node in nodes:
        nodes += node.children.values()
    return TorchKV.sizes(self)._replace(
        full_protected=sum(len(n.key) * n.locks[FULL] for n in nodes)
    )


@bug(
    "finish-caches-the-last-token",
    "TREE-3",
    "a finished request caches a token that has no KV",
    TorchKV.finished_length,
    source="#24590, #35694",
)
def _(self: TorchKV, cursors: RowCursors[int], target: int) -> int:
    """The next turn reads a slot that nobody has written. Under overlap the last sampled token is taken for
    computed, and the key at finish is one token too long. Visible when the request has slots ahead and the
    token ends a page. Fix: cap the key at what is committed."""
    return self.floor(max(0, min(cursors.kv_allocated_len, target) - self.bigram))
