"""One command on system and reference, with what clauses ask about it again and again.

`Step` derives everything from the command, the reference before and after (roles and texts) and the
system's facts; each derived value is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.clauses.facts import Facts
from reference.clauses.locks import Locks, locks_after, locks_of
from reference.commands import (
    Abort, Admit, Close, Command, Decode, Done, Evict, Extend, Finish, Insert, Launch, Outcome, Retract,
    SpecDecode, UnlockSwa, tree_key,
)  # fmt: skip
from reference.remembered import remembered
from reference.state import Cursors, Holder, Request, RunConfig, State, holders, text_tokens
from reference.prefix_cache import page_name

PagesByHolder = dict[str, list[int]]  # holder -> page indices of its sequence
_ENDINGS = Close, Finish, Retract, Abort, Admit, Extend  # see `ended`, `cut_at` and `_handed`


@dataclass(eq=False)
class Step:
    """was, now: reference before and after. expected, outcome: the reference's, the system's.

    before, after: the system's facts. unchanged: its view is the same as before. overreach: a choice of
    the system that the reference could not follow, in words; `now` then follows the default.
    tree_policy_is_free: the system's tree picks itself what it splits and evicts, and `now` has its shape.
    locks_before: who had locked what in the tree, as the step before left it.
    """

    config: RunConfig
    command: Command
    expected: Outcome
    outcome: Outcome
    was: State
    now: State
    before: Facts
    after: Facts
    unchanged: bool
    overreach: str = ""
    tree_policy_is_free: bool = False
    locks_before: Locks | None = None

    def __post_init__(self) -> None:
        """done: both carried the command out."""
        self.done = isinstance(self.outcome, Done) and isinstance(self.expected, Done)

    @remembered
    def held_before(self) -> tuple[Holder, ...]:
        return holders(self.was)

    @remembered
    def held(self) -> tuple[Holder, ...]:
        return holders(self.now)

    @remembered
    def grew(self) -> bool:
        """The tree has nodes that it did not have."""
        before, after = self.before.tree, self.after.tree
        if after is None:
            return False
        known = {node.path for node in before.nodes} if before is not None else set()
        return any(node.path not in known for node in after.nodes)

    @remembered
    def evicted_any(self) -> bool:
        """Some holder's window has moved on."""
        return any(h.cursors.swa_evicted_seqlen > 0 for h in self.held)

    @remembered
    def freed_something(self) -> bool:
        """A free list of the system grew."""
        before, after = self.before.pools, self.after.pools
        return any(len(p.free) > len(before[n].free) for n, p in after.items())

    @remembered
    def acted(self) -> Request | None:
        """The request that a command for one request is about, as it was before."""
        return self.was.request(getattr(self.command, "request", None))

    def name_of_cursors(self, holder: str) -> str:
        """Whose the cursors of a holder are, for AtCursor: its running request, or "slot of s1"."""
        for held in self.held:
            if held.name == holder:
                return held.request.name if held.request is not None else f"slot of {holder}"
        return holder

    @remembered
    def ended(self) -> tuple[str, Cursors] | None:
        """(holder, its cursors before) when the command gives back everything a holder has."""
        command = self.command
        if not isinstance(command, (Close, Finish, Retract, Abort)) or not self.done:
            return None
        if isinstance(command, Close):
            session = self.was.session(command.session)
            if session is not None and session.turn is None and session.slot is not None:
                return session.name, session.slot
            return None
        request = self.acted
        assert request is not None
        if request.session is None:
            return None if request.cursors is None else (request.name, request.cursors)
        session = self.was.session(request.session)
        assert session is not None
        has = request.cursors if request.cursors is not None else session.slot
        goes = (isinstance(command, Finish) and session.closing) or (
            isinstance(command, Abort) and (request.started or session.closing)
        )
        return (session.name, has) if goes and has is not None else None

    @remembered
    def cut_at(self) -> tuple[str, Cursors, int] | None:
        """(holder, cursors before, to where) when the command trims a session's row and keeps it."""
        request = self.acted if self.done else None
        if request is None or request.session is None or self.ended is not None:
            return None
        if isinstance(self.command, (Finish, Retract)):
            assert request.cursors is not None
            kept = (
                self.command.finished_len if isinstance(self.command, Finish)
                else request.output - self.command.in_flight
            )  # fmt: skip
            stop = self._stop(request.session, request.cursors, request.origin + kept)
            return request.session, request.cursors, stop
        session = self.was.session(request.session)
        assert session is not None
        if isinstance(self.command, Admit) and session.slot is not None:
            after = self.after.requests.get(request.name)
            if after is not None and after.cursors is not None:
                return request.session, session.slot, after.cursors.kv_committed_len
        return None

    def _stop(self, session: str, c: Cursors, target: int) -> int:
        """target, or the page boundary at which the system's slot ends, if nothing past R can be resumed."""
        geometry, after = self.config.geometry, self.after.sessions.get(session)
        if geometry.window is None or after is None or after.slot is None:
            return target
        resumed, stop = min(c.kv_committed_len, target), after.slot.kv_allocated_len
        if evicted_below(c) <= max(0, resumed - geometry.window) or stop % geometry.page_size:
            return target
        return stop if c.cache_protected_len <= stop < min(c.kv_allocated_len, target) else target

    @remembered
    def progress(self) -> dict[str, tuple[int, int]]:
        """request -> (tokens committed, kv_allocated_len requested) by a prefill or a round."""
        command = self.command
        progress: dict[str, tuple[int, int]] = {}
        if not self.done:
            return progress
        if isinstance(command, Extend):
            lanes = [(lane.request, lane.tokens, lane.tokens) for lane in command.lanes]
        elif isinstance(command, Decode):
            lanes = [(name, 1, 1) for name in command.requests]
        elif isinstance(command, SpecDecode):
            lanes = [(lane.request, lane.accept, lane.allocate) for lane in command.lanes]
        elif isinstance(command, Launch):
            claimed = {r.name: r.in_flight[-1].claimed for r in self.now.requests if r.in_flight}  # a choice
            lanes = [(lane.request, claimed[lane.request], lane.allocate) for lane in command.lanes]
        else:
            return progress
        for name, committed, ahead in lanes:
            request = self.was.request(name)
            assert request is not None and request.cursors is not None
            most = request.settled_len + sum(r.allocate for r in request.in_flight) + ahead
            progress[name] = (committed, max(request.cursors.kv_allocated_len, most))
        return progress

    @remembered
    def evicted_after(self) -> frozenset[str]:
        """Requests that the system has evicted after the forward pass of this extend, which is done, by what
        it says, or that have received SWA KV of the last window alone."""
        assert isinstance(self.command, Extend) and isinstance(self.outcome, Done)
        choices, lanes = self.outcome.choices, self.command.lanes
        return frozenset([*(c.request for c in choices if c.after), *(n.request for n in lanes if n.tail)])

    def frontier(self, name: str) -> int:
        """The system's swa_evicted_seqlen of a request after the step (0 if it shows none)."""
        facts = self.after.requests.get(name)
        return facts.cursors.swa_evicted_seqlen if facts is not None and facts.cursors else 0

    @remembered
    def locked_before(self) -> Locks:
        """Who had locked what in the system's tree; of a step that stands by itself, by the reference."""
        return locks_of(self.was.tree) if self.locks_before is None else self.locks_before

    @remembered
    def locks(self) -> Locks:
        """Who has locked what in the system's tree now."""
        if not self.done or self.after.tree is None:
            return self.locked_before
        command, request = self.command, self.acted
        again = None
        if isinstance(command, Admit):
            assert request is not None
            session = self.was.session(request.session)
            again = request.holder if session is None or session.slot is None else None
        return locks_after(
            self.locked_before, self.before, self.after, command, again, self.config.geometry,
            self.tree_policy_is_free,
        )  # fmt: skip

    # What goes back.

    @remembered
    def freed(self) -> dict[str, PagesByHolder]:
        """By pool: pages that somebody had before and the system gave back."""
        return {pool: self._freed_of(pool) for pool in self.after.pools}

    @remembered
    def owed(self) -> dict[str, PagesByHolder]:
        """By pool: pages that must go back."""
        goes = None
        if isinstance(self.command, _ENDINGS):
            goes = self.cut_at if self.ended is None else (*self.ended, 0)
        some = self.done and (goes is not None or self.after.tree is not None or self._evicted)
        return {pool: self._owed_of(pool, goes) if some else {} for pool in self.after.pools}

    def _freed_of(self, pool: str) -> PagesByHolder:
        before, after = self.before.pools[pool], self.after.pools[pool]
        freed: PagesByHolder = {}
        free, others = after.free_pages, after.owner_of
        once = len(before.owner_of) == len(before.owned)
        if once and before.owner_of.items() <= others.items() and free.isdisjoint(others):
            return freed
        kept = after.owned_once
        for owned in before.owned:
            holder, at, page = owned
            gone = owned not in kept and page in others
            if page in free or (gone and others[page].holder != self._name_in_tree(holder, at)):
                freed.setdefault(holder, []).append(at)
        return freed

    def _name_in_tree(self, holder: str, at: int) -> str | None:
        """What a page of a row is called once the tree has taken it over."""
        if holder not in self._paths:
            return None
        return page_name(self._paths[holder][: (at + 1) * self.config.geometry.page_size])

    @remembered
    def _paths(self) -> dict[str, tuple[int, ...]]:
        """What the tree knows the text of each holder by."""
        bigram = self.config.geometry.bigram
        return {h.name: tree_key(text_tokens(h.text), bigram) for h in (*self.held, *self.held_before)}

    @remembered
    def _evicted(self) -> list[tuple[str, Cursors, int]]:
        """(holder, cursors before, swa_evicted_seqlen now) of requests whose window has moved on."""
        evicted = []
        for request in self.was.requests:
            c, now = request.cursors, self.after.requests.get(request.name)
            if c is not None and now is not None and now.cursors is not None:
                if now.cursors.swa_evicted_seqlen > c.swa_evicted_seqlen:
                    evicted.append((request.holder, c, now.cursors.swa_evicted_seqlen))
        return evicted

    def _owed_of(self, pool: str, goes: tuple[str, Cursors, int] | None) -> PagesByHolder:
        size, swa = self.config.geometry.page_size, pool == "swa"
        owed: dict[str, set[int]] = {}
        if goes is not None:  # from target on, as far as it has pages of its own
            holder, c, target = goes
            start = max(target, c.cache_protected_len, c.swa_evicted_seqlen if swa else 0)
            owed[holder] = {*range(-(-start // size), -(-c.kv_allocated_len // size))}
        for holder, c, frontier in self._evicted if swa else ():
            start, end = max(c.cache_protected_len, c.swa_evicted_seqlen), min(frontier, c.kv_allocated_len)
            owed[holder] = {p // size for p in range(start, end, size)}
        if self.after.tree is not None:
            self._hand_over(pool, owed)
        return {holder: sorted(pages) for holder, pages in owed.items() if pages} if owed else {}

    def _hand_over(self, pool: str, owed: dict[str, set[int]]) -> None:
        """What a row hands to the tree is owed, but for pages that the tree did not have: those it takes
        over, each from the first of a batch who has it. What the tree gives up is owed."""
        before, after = self.before.pools[pool], self.after.pools[pool]
        size, own = self.config.geometry.page_size, before.places
        had, has = before.owned_once, after.owned_once
        taken = {o.holder for o in has - had} if self._handed else set()
        for holder, start, end, frontier in self._handed:
            for at in range(start // size, -(-end // size)):
                name = self._name_in_tree(holder, at)
                if pool == "swa" and at * size < frontier:
                    continue
                if name in taken:
                    taken.remove(name)
                    owed.get(holder, set()).discard(at)
                elif (holder, at) in own:
                    owed.setdefault(holder, set()).add(at)
        if isinstance(
            self.command, (Extend, Decode, SpecDecode, Launch, Finish, Abort, UnlockSwa, Insert, Evict)
        ):
            for gone in had - has:
                if gone.holder.startswith("tree "):
                    owed.setdefault(gone.holder, set()).add(gone.at)

    @remembered
    def _handed(self) -> list[tuple[str, int, int, int]]:
        """(holder, start, end, its swa_evicted_seqlen) of what rows hand to the tree, in order."""
        if isinstance(self.command, Finish) and self.ended is not None:
            holder, c = self.ended
            return [(holder, c.cache_protected_len, c.kv_allocated_len, c.swa_evicted_seqlen)]
        handed = []
        for name in self.progress if isinstance(self.command, Extend) else ():
            was, now = self.was.request(name), self.after.requests.get(name)
            assert was is not None and was.cursors is not None
            if now is not None and now.cursors is not None:
                end, frontier = now.cursors.cache_protected_len, now.cursors.swa_evicted_seqlen
                handed.append((was.holder, was.cursors.cache_protected_len, end, frontier))
        return handed


def span(pages: list[int], page_size: int) -> str:
    """Page indices as token ranges, such as "[36, 44)"."""
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page:
            runs[-1][1] += 1
        else:
            runs.append([page, page + 1])
    return ", ".join(f"[{a * page_size}, {b * page_size})" for a, b in runs) or "nothing"


def cursors_text(c: Cursors | None) -> str:
    """The four cursors by name."""
    if c is None:
        return "no cursors"
    return " ".join(f"{name} {value}" for name, value in zip(c._fields, c))


def evicted_below(c: Cursors) -> int:
    """Positions of the row's own below this have no SWA KV any more: a window eviction starts at R, so a
    frontier within the tree's prefix has evicted nothing."""
    return c.swa_evicted_seqlen if c.swa_evicted_seqlen > c.cache_protected_len else 0
