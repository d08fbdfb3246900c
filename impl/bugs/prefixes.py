"""Faults of requests and sessions on the radix tree: who locks, inserts, lets go, and gets room."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from impl.bugs.register import FREE_ONLY, bug
from impl.bugs.tree_locks import Trusting
from impl.torch_kv.cursors import Cursors, N
from impl.torch_kv.nodes import Key
from impl.torch_kv.radix import Room
from impl.torch_kv.sessions import Request, Session
from impl.torch_kv.system import TorchKV
from reference.commands import Reason, Report


@bug(
    "insert-protects-half-a-page",
    "the protected length is not whole pages",
    clause="LEN-1",
    source="#20070",
    story="""A crash with page_size > 1. After an insert the protected length was taken from what the
    request had committed, not from the whole pages that the tree took. Visible when a prompt ends inside a
    page. Fix: the tree's own length is R.""",
)
class _UnalignedPrefix(TorchKV):
    def insert_unfinished(self, requests: Sequence[Request]) -> None:
        super().insert_unfinished(requests)
        inserted = [r for r in requests if self.tree is not None and r.cursors.cache_protected_len]
        lengths = [r.cursors.kv_committed_len for r in inserted]
        self.move([r for r in inserted if self.slot_of(r) is None], self.protected_to, lengths)


@bug(
    "no-cap-above-a-prefix",
    "finish forgets the window's cursor of a turn with a prefix",
    clause="LEN-2",
    modes=FREE_ONLY,
    story="""As pr22900, of sessions whose first prompt the tree has: swa_evicted_seqlen is taken for the
    tree's, which no cut may touch, and left above the target. Visible once a sweep ran past the target of a
    turn whose protected length is not 0. Fix: cap all three, whatever the protected length is.""",
)
class _NoCapAboveAPrefix(TorchKV):
    def capped_kept(self, cursors: Cursors[N], target: N) -> Cursors[N]:
        capped = super().capped_kept(cursors, target)
        above = cursors.swa_evicted_seqlen - capped.swa_evicted_seqlen
        kept = above * (cursors.cache_protected_len > 0)
        return capped._replace(swa_evicted_seqlen=capped.swa_evicted_seqlen + kept)


@bug(
    "row-keeps-its-duplicates",
    "a row goes on naming what an insert has freed",
    clause="TREE-4",
    story="""Two requests with one prompt read each other's KV. The second one's pages are duplicates and
    freed, but its row is not rewritten to the tree's. Visible when a running request inserts what is there
    already. Fix: rewrite the row up to the protected length.""",
)
class _RowKeepsDuplicates(TorchKV):
    def rename(self, requests: Sequence[Request], lengths: list[int], slots: list[Tensor]) -> None:
        """The row stays as it is."""


@bug(
    "insert-without-a-second-match",
    "a running request inserts what it cannot match again",
    clause="TREE-8",
    story="""A running request loses its window. It inserts its prompt although the tree keeps a locked
    tombstone there: its own SWA KV is freed as a duplicate, and it reads on. Visible when a prompt is
    computed again over a locked tombstone. Fix: insert only if all of it can be matched again.""",
)
class _InsertsBlindly(TorchKV):
    tree_class = Trusting

    def may_keep(self, key: Key, evicted: int) -> bool:  # noqa: ARG002
        return True


@bug(
    "prompt-is-not-inserted",
    "a prefilled prompt stays out of the tree",
    clause="TREE-12",
    story="""Nothing that runs is ever shared. The prompt is not inserted when its last chunk has run.
    Visible at the first prefill. Fix: insert and lock it.""",
)
class _NotInserted(TorchKV):
    def inserts(self, request: Request) -> bool:  # noqa: ARG002
        return False


@bug(
    "later-turns-insert",
    "a later turn inserts its prompt as well",
    clause="LEN-4",
    story="""A session's history is in the tree and in its row. A turn with a slot inserts what it prefills,
    and the protected length of the slot is overtaken. Visible in the second turn. Fix: later turns stay
    outside of the tree.""",
)
class _LaterTurnsInsert(TorchKV):
    def inserts(self, request: Request) -> bool:
        return self.unfinished_length(request.cursors) > request.cursors.cache_protected_len


@bug(
    "slot-drops-the-lock",
    "a saved slot lets its prefix go",
    clause="TREE-6",
    story="""A session's first prompt is evicted between turns, and its row still names it. The lock of the
    first turn is given back when that finishes. Visible when a first turn finishes. Fix: the slot carries
    the lock until the session is closed.""",
)
class _SlotDropsLock(TorchKV):
    def save(self, session: Session, request: Request) -> None:
        super().save(session, request)
        self.let_go(session.name)


@bug(
    "close-keeps-the-lock",
    "a closed session's prefix stays locked",
    clause="TREE-6",
    story="""The tree fills with prefixes that nothing evicts. Close gives back row and pages and forgets
    the lock. Visible at the close of a session that has had a turn. Fix: drop it, once.""",
)
class _CloseKeepsLock(TorchKV):
    def close_now(self, session: Session) -> None:
        lock = self.locks.pop(session.name, None)
        super().close_now(session)
        if lock is not None:
            self.locks[session.name] = lock


@bug(
    "abort-keeps-the-lock",
    "an abort before the first extend keeps its match locked",
    clause="TREE-6",
    story="""As with close: an aborted request that was admitted and never ran leaves its lock behind.
    Visible when a turn that matched something is aborted before it runs. Fix: drop the lock of the
    admission.""",
)
class _AbortKeepsLock(TorchKV):
    def abort_unstarted(self, request: Request) -> None:
        """The lock is forgotten."""


@bug(
    "wipe-keeps-the-lock",
    "a midway abort keeps the prefix locked",
    clause="TREE-6",
    story="""A session that was wiped holds on to its first prompt, and locks another at its next turn.
    Visible at a midway abort of a session. Fix: row, pages and lock, once.""",
)
class _WipeKeepsLock(TorchKV):
    def wipe(self, session: Session, request: Request) -> None:
        lock = self.locks.pop(session.name, None)
        super().wipe(session, request)
        if lock is not None:
            self.locks[session.name] = lock


@bug(
    "finish-keeps-the-lock",
    "an ordinary request ends and its prefix stays locked",
    clause="TREE-6",
    story="""Nothing that was ever used is evicted. The end of an ordinary request frees its pages and not
    its lock. Visible when it finishes or is retracted. Fix: drop it, once.""",
)
class _FinishKeepsLock(TorchKV):
    def drop(self, request: Request) -> None:
        lock = self.locks.pop(request.name, None)
        super().drop(request)
        if lock is not None:
            self.locks[request.name] = lock


@bug(
    "readmission-locks-again",
    "an admission that is repeated locks twice",
    clause="TREE-6",
    story="""Prefixes stay pinned after their requests are gone. A rejected admission is repeated and
    matches again, and the lock of the first one is overwritten. Visible when a request that matched
    something is admitted twice. Fix: give the first back.""",
)
class _LocksAgain(TorchKV):
    def match_prefix(self, request: Request) -> None:
        self.locks.pop(self.holder_of(request), None)
        super().match_prefix(request)


@bug(
    "match-takes-the-last-token",
    "a match covers the whole input",
    clause="TREE-5",
    story="""A request whose input is cached has nothing to compute and no logits. The key of the match is
    the whole input instead of all but its last token. Visible when all of an input is in the tree. Fix:
    leave the last token out.""",
)
class _TakesLastToken(TorchKV):
    def match_key(self, request: Request) -> Key:
        return tuple(request.text)


@bug(
    "finish-frees-what-it-inserted",
    "a finished request frees the pages that the tree has taken",
    clause="FREE-1",
    story="""The tree's pages are handed out again. A finished request inserts its text and then gives its
    whole row back. Visible when an ordinary request finishes with a whole page of output. Fix: what was
    inserted is the tree's.""",
)
class _FreesInserted(TorchKV):
    def insert_finished(self, request: Request, target: int) -> None:
        before = request.cursors.cache_protected_len
        super().insert_finished(request, target)
        self.move([request], self.protected_to, [before])


@bug(
    "sweep-frees-the-trees-pages",
    "a sweep starts below the protected prefix",
    clause="TREE-2",
    story="""A shared prefix loses its SWA KV under everybody who reads it. The sweep starts at
    swa_evicted_seqlen, which is 0 at the first, instead of at the protected length. Visible at the first
    sweep of a request with a prefix. Fix: max(E, R).""",
)
class _SweepsPrefix(TorchKV):
    def sweep_start(self, cursors: Cursors[N]) -> N:
        return self.ceil(cursors.swa_evicted_seqlen)


@bug(
    "frontier-in-the-prefix-counts-as-swept",
    "a request behind its prefix is said to have lost its window",
    clause="OUT-1",
    story="""A request cannot go on after its first sweep. The sweep lifts swa_evicted_seqlen to the
    protected length without freeing anything; taken for swept, the window seems gone, though the tree has
    it. Visible when a prefix reaches into the window. Fix: below R the tree's lock keeps the window.""",
)
class _RawFrontier(TorchKV):
    def lost_below(self, cursors: Cursors[int]) -> int:
        return cursors.swa_evicted_seqlen


@bug(
    "evicts-before-it-knows",
    "a refused batch has evicted the cache",
    clause="OUT-2",
    story="""Under pressure every attempt to admit empties the tree and fails all the same. Eviction comes
    before the question whether it will do. Visible when a batch is refused for want of pages while
    something may be evicted. Fix: ask the counters first.""",
)
class _EvictsFirst(TorchKV):
    def room_for(self, pages: int) -> Reason | None:
        missing = self.missing(pages)
        if self.tree is not None and any(missing):
            self.tree.evict(*missing)
        return super().room_for(pages)


@bug(
    "no-room-in-the-swa-pool",
    "eviction for a batch looks at the full pool alone",
    clause="OUT-1",
    story="""Requests are refused although the SWA pool could be had. What the tree could give back is asked
    of the full pool only. Visible when the SWA pool is full of cached windows. Fix: each pool by
    itself.""",
)
class _FullAlone(TorchKV):
    def room_for(self, pages: int) -> Reason | None:
        missing = self.missing(pages)
        return Reason.OUT_OF_SWA if missing.swa else super().room_for(pages)


@bug(
    "cached-pages-are-not-counted",
    "a memory check does not know the tree",
    clause="CHK-1",
    story="""The check cries leak as soon as something is cached. Pages that may be evicted are neither
    available nor anybody's. Visible at the first check after an insert. Fix: the evictable term.""",
)
class _NotCounted(TorchKV):
    def report(self, *, log: bool = False) -> Report:
        tree, self.tree = self.tree, None
        try:
            return super().report(log=log)
        finally:
            self.tree = tree


@bug(
    "protected-counts-each-lock",
    "a memory check counts a shared prefix once for each lock",
    clause="CHK-1",
    story="""The check cries leak as soon as two requests share a prefix. Protected tokens are added up over
    the locks instead of over the nodes. Visible at a check while two holders lock one node. Fix: each node
    once.""",
)
class _CountsEachLock(TorchKV):
    def protected(self) -> Room:
        found = super().protected()
        facts = self.tree.view() if self.tree is not None else []
        return Room(sum(len(f.slots) * f.full_lock for f in facts), found.swa)
