"""The choices of a generator in a state: the enabled commands, and the free room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from reference.commands import Mode, Piece, Prompt
from reference.cursors import ceil_page, lost_below, window_live
from reference.state import IN_BATCH, Cursors, Phase, Request, Session, State, free
from reference.prefix_cache import lock_holders, shares_lock
from reference.rules.rule_definition import cursors_of
from reference.rules.decode import MOST_LATE
from reference.radix_tree import Sizes, nodes, sizes, swa_locked
from impl.choices import Choices, once_in, pick
from stateful_tests.generate.prompts import draw_length, draw_prompt
from stateful_tests.generate.run_profile import LOCK_HOLDERS, TEXTS, RunProfile


def may_overshoot(state: State, request: Request) -> bool:
    """Return whether window eviction could pass the end of a turn if the turn allocated more ahead, and
    there is room to allocate."""
    c = cursors_of(request)
    geometry = state.config.geometry
    need = (geometry.window or 0) + 2 * geometry.page_size
    if request.session is None or c.swa_evicted_seqlen > request.origin:
        return False
    return c.kv_allocated_len - c.kv_committed_len <= need < room_of(state, c)


def ahead_of(request: Request) -> int:
    """Return the number of tokens that are allocated past the commit and are not evicted."""
    c = cursors_of(request)
    return c.kv_allocated_len - max(c.kv_committed_len, c.swa_evicted_seqlen)


def slot_source(cursors: Cursors, page_size: int) -> str:
    """Return the source of the slot of the next token: allocated ahead, the rest of a page, or a fresh
    page."""
    if cursors.kv_allocated_len > cursors.kv_committed_len:
        return "ahead"
    return "in the page" if cursors.kv_committed_len % page_size else "a fresh page"


def full_alone(state: State) -> set[str]:
    """Return the lock owners that pin only full KV, although there is a window."""
    tree = state.tree
    if tree is None or tree.window is None:
        return set()
    return {lock.holder for lock in tree.locks if lock.key and lock.swa_from == len(lock.key)}


@dataclass(slots=True)
class Enabled:
    """The commands that are enabled in a state, and the choices that a generator makes among them.

    invalid: the command ignores its precondition.
    last: kind of the previous command.
    """

    state: State
    source: Choices
    profile: RunProfile
    invalid: bool
    last: type | None = None

    def _in_phases(self, *phases: Phase) -> list[Request]:
        return [r for r in self.state.requests if r.phase in phases]

    @property
    def tree_alone(self) -> bool:
        """Whether only commands of the radix tree are driven."""
        return self.profile.machine == "tree"

    @property
    def cached(self) -> bool:
        """Whether the radix tree has a node."""
        return self.state.tree is not None and bool(self.state.tree.children)

    @property
    def queued_requests(self) -> list[Request]:
        return self._in_phases(Phase.QUEUED)

    @property
    def admitted_requests(self) -> list[Request]:
        return self._in_phases(Phase.ADMITTED)

    @property
    def waiting(self) -> list[Request]:
        return self._in_phases(Phase.QUEUED, Phase.ADMITTED)

    @property
    def extending(self) -> list[Request]:
        return self._in_phases(Phase.ADMITTED, Phase.EXTENDING)

    @property
    def running(self) -> list[Request]:
        return self._in_phases(Phase.RUNNING)

    @property
    def settled_requests(self) -> list[Request]:
        """The running requests without results in flight."""
        return [r for r in self.running if not r.in_flight]

    @property
    def sources(self) -> dict[str, list[Request]]:
        """The settled requests, by the source of the slot of their next token."""
        size = self.state.config.geometry.page_size
        requests_of = dict[str, list[Request]]()
        for request in self.settled_requests:
            requests_of.setdefault(slot_source(cursors_of(request), size), []).append(request)
        return requests_of

    @property
    def decoding(self) -> list[Request]:
        """The settled requests for the next round. In a synchronised run a request that needs a fresh page
        mostly waits until all requests need one."""
        sources = self.sources if self.profile.synchronise else {}
        waits = sources.pop("a fresh page", [])
        if waits and sources and not once_in(self.source, 4):
            return [request for found in sources.values() for request in found]
        return self.settled_requests

    @property
    def launchable(self) -> list[Request]:
        return [r for r in self.running if len(r.in_flight) < MOST_LATE]

    @property
    def late(self) -> list[Request]:
        return [r for r in self.running if r.in_flight]

    @property
    def requests_in_batch(self) -> list[Request]:
        return self._in_phases(*IN_BATCH)

    @property
    def idle(self) -> list[Session]:
        return [s for s in self.state.sessions if s.turn is None and not s.closing]

    @property
    def resumable(self) -> list[Session]:
        """The sessions that resume their next turn from a slot."""
        return [s for s in self.idle if s.slot is not None]

    @property
    def busy(self) -> list[Session]:
        """The sessions that reject a second turn. Patient clients send a second turn only after a
        retraction of the first."""
        retracted = {r.session for r in self.waiting if r.started}
        impatient = self.profile.impatient
        return [
            s
            for s in self.state.sessions
            if s.turn is not None and not s.closing and (impatient or s.name in retracted)
        ]

    @property
    def abortable(self) -> list[Request]:
        """The requests with an abort that must evict, or that must free something unusual: only a lock, the
        lock of a slot, or everything of a closing session."""
        return [r for r in self.state.requests if self._abortable(r)]

    def _abortable(self, r: Request) -> bool:
        session = self.state.session(r.session)
        if not r.started and r.phase is Phase.QUEUED:
            return (session is not None and session.closing) or not free(self.state).full
        later = not r.started or (session is not None and bool(session.history))
        return bool(r.cursors and r.cursors.cache_protected_len) and later

    @property
    def wiped_sessions(self) -> list[Session]:
        """The sessions without a slot after an abort: the next turn computes their history again."""
        return [s for s in self.state.sessions if s.history and s.slot is None and not s.closing]

    @property
    def closable(self) -> list[Session]:
        """The sessions with a queued turn that has not started."""
        waiting = {r.session for r in self.queued_requests if not r.started}
        return [s for s in self.state.sessions if s.name in waiting and not s.closing]

    @property
    def crowded_sessions(self) -> list[Session]:
        """The idle sessions with a prefix that another holder has locked too."""
        return [s for s in self.idle if shares_lock(self.state, s.name)]

    @property
    def windowless(self) -> list[Request]:
        """The running requests that have lost their window by an eviction past the commit."""
        window = self.state.config.geometry.window
        if window is None or self.state.config.mode is not Mode.FREE:
            return []
        held = ((r, cursors_of(r)) for r in self.running)
        return [r for r, c in held if not window_live(lost_below(c), r.settled_len, window)]

    @property
    def swa_passed(self) -> list[Request]:
        """The requests that may release the SWA part of their lock, because their window has passed it."""
        state = self.state
        window = self.state.config.geometry.window
        if state.tree is None or window is None:
            return []
        return [
            r
            for r in self.requests_in_batch
            if (r.session is None or state.config.mode is Mode.FAITHFUL)
            and cursors_of(r).kv_committed_len - window >= cursors_of(r).cache_protected_len > 0
        ]

    @property
    def swa_unlockable(self) -> list[str]:
        """The holders that may release the SWA part of their lock: those that have one, otherwise requests
        that have released theirs before."""
        tree = self.state.tree
        passed = self.swa_passed
        if tree is None or tree.window is None:
            return []
        with_swa = {k.holder for k in tree.locks if k.swa_from < len(k.key)}
        names = [r.name for r in passed if r.holder in with_swa]
        names += (name for name in lock_holders(self.state) if name in with_swa)
        return names or [r.name for r in passed]

    @property
    def swa_unlocked(self) -> list[Request]:
        """The requests that pin only the full KV of their prefix, before their first window eviction."""
        alone = full_alone(self.state)
        held = ((r, cursors_of(r)) for r in self.requests_in_batch if r.holder in alone)
        return [r for r, c in held if c.swa_evicted_seqlen < c.cache_protected_len]

    @property
    def orders_differ(self) -> bool:
        """Whether SWA pressure evicts nodes in another order than pressure on full KV."""
        tree = self.state.tree
        if tree is None or tree.window is None:
            return False
        live = [p.node for p in nodes(tree) if p.node.live and not swa_locked(tree, p)]
        live.sort(key=attrgetter("swa_used"))
        return any(
            one.full_used > other.full_used and one.swa_used < other.swa_used
            for one, other in pairwise(live)
        )

    def request(self, fitting: Sequence[Request]) -> str:
        """Draw one of the fitting requests; any name when invalid or when none fits."""
        if fitting and not (self.invalid and once_in(self.source, 2)):
            return pick(self.source, fitting).name
        return pick(self.source, self.profile.requests)

    def lanes(self, fitting: Sequence[Request]) -> list[str]:
        """Draw distinct fitting requests, often all of them; when invalid, perhaps one twice or none."""
        if self.invalid and once_in(self.source, 8):
            return []
        rest = [r.name for r in fitting]
        count = len(rest)
        if not once_in(self.source, 2):
            count = 1 + self.source.upto(max(0, len(rest) - 1))
        names = [rest.pop(self.source.upto(len(rest) - 1)) for _ in range(min(count, len(rest)))]
        if not names or (self.invalid and once_in(self.source, 3)):
            names.append(pick(self.source, self.profile.requests))
        return names

    def prompt(self, longest: int, *, fresh: bool = False) -> Prompt:
        """Draw a prompt; when invalid, perhaps an empty one or one with an empty piece.

        fresh: drawn independently of the prompts in the state.
        """
        if self.invalid and once_in(self.source, 3):
            return pick(self.source, ((), (Piece("a", 0),), (Piece("a", 4), Piece("b", -1))))
        if fresh:
            length = draw_length(self.state, self.source, longest)
            text = pick(self.source, self.profile.texts)
            others = [other for other in TEXTS if other != text]
            if length > 1 and once_in(self.source, 6):
                return (Piece(text, length - 1), Piece(pick(self.source, others), 1))
            return (Piece(text, length),)
        if self.invalid and once_in(self.source, 3):
            longest += self.state.config.geometry.width
        return draw_prompt(self.state, self.source, self.profile.texts, longest)

    def lock_holder(self, fitting: Sequence[str]) -> str:
        """Draw one of the fitting lock owners; any name when invalid or when none fits."""
        if fitting and not (self.invalid and once_in(self.source, 2)):
            return pick(self.source, fitting)
        others = (*(r.name for r in self.state.requests), *(s.name for s in self.state.sessions))
        return pick(self.source, (*self.profile.lock_holders, *others) or LOCK_HOLDERS)

    def length(self, high: int) -> int:
        """Draw a length in [1, high], often within one of a page or window boundary."""
        high = max(1, high)
        geometry = self.state.config.geometry
        if once_in(self.source, 2):
            return 1 + self.source.upto(min(high, 2 * geometry.page_size + 1) - 1)
        edge = pick(self.source, (geometry.page_size, geometry.window or 1, 2 * geometry.page_size))
        return max(1, min(high, edge - 1 + self.source.upto(2)))


def room_of(state: State, cursors: Cursors | None) -> int:
    """Return the number of tokens past the commit that still fit into the row and the pools."""
    geometry = state.config.geometry
    if cursors is None:
        return geometry.width
    pages = pages_left(state)
    reach = ceil_page(cursors.kv_allocated_len, geometry.page_size) + pages * geometry.page_size
    return min(geometry.width, reach) - cursors.kv_committed_len


def pages_left(state: State) -> int:
    """Return the number of pages that are free or evictable in every pool."""
    geometry = state.config.geometry
    left = free(state)
    more = sizes(state.tree) if state.tree is not None else Sizes(0, 0, 0, 0)
    full = left.full + more.full_evictable // geometry.page_size
    if geometry.window is None:
        return full
    return min(full, left.swa + more.swa_evictable // geometry.page_size)
