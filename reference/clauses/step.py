"""One command on system and reference, with what clauses ask about it again and again.

`Step` derives everything from the command, the reference before and after (roles and texts) and the
system's facts; each derived value is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.clauses.facts import Facts
from reference.clauses.lock_facts import Locks, locks_after, locks_of
from reference.commands import (
    Abort, Admit, Close, Command, Decode, Done, Extend, Finish, Launch, Outcome, Retract,
    SpecDecode,
)  # fmt: skip
from reference.memoization import memoized
from reference.state import Cursors, Holder, Request, RunConfig, State, holders

PagesByHolder = dict[str, list[int]]  # holder -> page indices of its sequence
_ENDINGS = Close, Finish, Retract, Abort, Admit, Extend  # see `ended`, `cut_at` and `_handed`


@dataclass(eq=False)
class Step:
    """A command on system and reference.

    was, now: the reference before and after.
    expected, outcome: outcomes of reference and system.
    before, after: the system's facts.
    unchanged: the system's view is the same as before.
    overreach: a choice of the system that the reference could not follow, in words; `now` then follows
        the default.
    tree_policy_is_free: the system's tree decides itself what it splits and evicts, and `now` has its
        shape.
    locks_before: locks in the tree after the step before.
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
        """Set `done`: both carried the command out."""
        self.done = isinstance(self.outcome, Done) and isinstance(self.expected, Done)

    @memoized
    def held_before(self) -> tuple[Holder, ...]:
        return holders(self.was)

    @memoized
    def held(self) -> tuple[Holder, ...]:
        return holders(self.now)

    @memoized
    def grew(self) -> bool:
        """Whether the tree has new nodes."""
        before, after = self.before.tree, self.after.tree
        if after is None:
            return False
        known = {node.path for node in before.nodes} if before is not None else set()
        return any(node.path not in known for node in after.nodes)

    @memoized
    def evicted_any(self) -> bool:
        """Whether the window of some holder has moved."""
        return any(h.cursors.swa_evicted_seqlen > 0 for h in self.held)

    @memoized
    def freed_something(self) -> bool:
        """Whether a free list of the system has grown."""
        before, after = self.before.pools, self.after.pools
        return any(len(p.free) > len(before[n].free) for n, p in after.items())

    @memoized
    def acted(self) -> Request | None:
        """The request that a command for one request is about, as it was before."""
        return self.was.request(getattr(self.command, "request", None))

    def name_of_cursors(self, holder: str) -> str:
        """Return the owner of a holder's cursors, for AtCursor: its running request, or "slot of s1"."""
        for held in self.held:
            if held.name == holder:
                return held.request.name if held.request is not None else f"slot of {holder}"
        return holder

    @memoized
    def ended(self) -> tuple[str, Cursors] | None:
        """(holder, its cursors before) of a command that frees everything a holder has."""
        command = self.command
        if not isinstance(command, (Close, Finish, Retract, Abort)) or not self.done:
            return None
        if isinstance(command, Close):
            session = self.was.session(command.session)
            assert session is not None
            if session.turn is None and session.slot is not None:
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

    @memoized
    def cut_at(self) -> tuple[str, Cursors, int] | None:
        """(holder, cursors before, new length) of a command that trims a session's row and keeps it."""
        request = self.acted if self.done else None
        if request is None or request.session is None or self.ended is not None:
            return None
        if isinstance(self.command, (Finish, Retract)):
            assert request.cursors is not None
            kept = (
                self.command.finished_len
                if isinstance(self.command, Finish)
                else request.output - self.command.in_flight
            )
            stop = self._stop_position(request.session, request.cursors, request.origin + kept)
            return request.session, request.cursors, stop
        session = self.was.session(request.session)
        assert session is not None
        if isinstance(self.command, Admit) and session.slot is not None:
            after = self.after.requests.get(request.name)
            if after is not None and after.cursors is not None:
                return request.session, session.slot, after.cursors.kv_committed_len
        return None

    def _stop_position(self, session: str, c: Cursors, target: int) -> int:
        """Return target, or the page boundary at which the system's slot ends if nothing past R can be
        resumed."""
        geometry = self.config.geometry
        after = self.after.sessions.get(session)
        if geometry.window is None or after is None or after.slot is None:
            return target
        resumed = min(c.kv_committed_len, target)
        stop = after.slot.kv_allocated_len
        if evicted_below(c) <= max(0, resumed - geometry.window) or stop % geometry.page_size:
            return target
        return stop if c.cache_protected_len <= stop < min(c.kv_allocated_len, target) else target

    @memoized
    def progress(self) -> dict[str, tuple[int, int]]:
        """Request -> (tokens committed, kv_allocated_len requested) by a prefill or a round."""
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
            # a choice
            claimed = {r.name: r.in_flight[-1].claimed for r in self.now.requests if r.in_flight}
            lanes = [(lane.request, claimed[lane.request], lane.allocate) for lane in command.lanes]
        else:
            return progress
        for name, committed, ahead in lanes:
            request = self.was.request(name)
            assert request is not None and request.cursors is not None
            most = request.settled_len + sum(r.allocate for r in request.in_flight) + ahead
            progress[name] = (committed, max(request.cursors.kv_allocated_len, most))
        return progress

    @memoized
    def evicted_after(self) -> frozenset[str]:
        """Requests whose window the system says it evicted after the forward pass of this extend, or
        that received only the SWA KV of the last window."""
        assert isinstance(self.command, Extend) and isinstance(self.outcome, Done)
        choices = self.outcome.choices
        lanes = self.command.lanes
        return frozenset(
            [*(c.request for c in choices if c.after), *(n.request for n in lanes if n.tail)]
        )

    def frontier(self, name: str) -> int:
        """Return the system's swa_evicted_seqlen of a request after the step (0 if it shows none)."""
        facts = self.after.requests.get(name)
        return facts.cursors.swa_evicted_seqlen if facts is not None and facts.cursors else 0

    @memoized
    def locked_before(self) -> Locks:
        """The locks in the system's tree before the step; those of the reference for the first step."""
        return locks_of(self.was.tree) if self.locks_before is None else self.locks_before

    @memoized
    def locks(self) -> Locks:
        """The locks in the system's tree now."""
        if not self.done or self.after.tree is None:
            return self.locked_before
        command = self.command
        request = self.acted
        again = None
        if isinstance(command, Admit):
            assert request is not None
            session = self.was.session(request.session)
            again = request.holder if session is None or session.slot is None else None
        return locks_after(
            self.locked_before,
            self.before,
            self.after,
            command,
            again,
            self.config.geometry,
            self.tree_policy_is_free,
        )


def span(pages: list[int], page_size: int) -> str:
    """Return page indices as token ranges, such as "[36, 44)"."""
    runs: list[list[int]] = []
    for page in sorted(pages):
        if runs and runs[-1][1] == page:
            runs[-1][1] += 1
        else:
            runs.append([page, page + 1])
    return ", ".join(f"[{a * page_size}, {b * page_size})" for a, b in runs) or "nothing"


def cursors_text(c: Cursors | None) -> str:
    """Return the four cursors with their names."""
    if c is None:
        return "no cursors"
    return " ".join(f"{name} {value}" for name, value in zip(c._fields, c))


def evicted_below(c: Cursors) -> int:
    """Return the position below which the row's own positions have no SWA KV. A window eviction starts
    at R, so a frontier within the tree's prefix has evicted nothing."""
    return c.swa_evicted_seqlen if c.swa_evicted_seqlen > c.cache_protected_len else 0
