"""One command on system and reference, with the derived values that clauses share.

`Step` derives its values from the command, the reference before and after it (roles and texts), and the
system's facts. Each value is computed once.
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


@dataclass(eq=False)
class Step:
    """A command on system and reference."""

    config: RunConfig
    command: Command
    #: outcomes of reference and system
    expected: Outcome
    outcome: Outcome
    #: the reference before and after
    was: State
    now: State
    #: the system's facts
    before: Facts
    after: Facts
    #: the system's view is the same as before
    unchanged: bool
    #: text about a choice of the system that the reference could not follow, "" for none; `now`
    #: then follows the default
    overreach: str = ""
    #: the system's tree has its own policy for splits and evictions, and `now` has its shape
    tree_policy_is_free: bool = False
    #: locks in the tree after the previous step, None for the first step
    locks_before: Locks | None = None

    def __post_init__(self) -> None:
        """Set `done`: both sides executed the command."""
        self.done = isinstance(self.outcome, Done) and isinstance(self.expected, Done)

    @memoized
    def holders_before(self) -> tuple[Holder, ...]:
        return holders(self.was)

    @memoized
    def holders_now(self) -> tuple[Holder, ...]:
        return holders(self.now)

    @memoized
    def grew(self) -> bool:
        """Whether the tree has new nodes."""
        before = self.before.tree
        after = self.after.tree
        if after is None:
            return False
        known = {node.path for node in before.nodes} if before is not None else set()
        return any(node.path not in known for node in after.nodes)

    @memoized
    def evicted_any(self) -> bool:
        """Whether a window eviction has happened for a holder."""
        return any(h.cursors.swa_evicted_seqlen > 0 for h in self.holders_now)

    @memoized
    def freed_something(self) -> bool:
        """Whether a free list of the system has grown."""
        before = self.before.pools
        after = self.after.pools
        return any(len(p.free) > len(before[n].free) for n, p in after.items())

    @memoized
    def named_request(self) -> Request | None:
        """The request that the command names, as it was before; None if it names none."""
        return self.was.request(getattr(self.command, "request", None))

    def name_of_cursors(self, holder: str) -> str:
        """Return the owner of a holder's cursors, for AtCursor: its running request, or "slot of s1"."""
        for held in self.holders_now:
            if held.name == holder:
                return held.request.name if held.request is not None else f"slot of {holder}"
        return holder

    @memoized
    def ended_holder(self) -> tuple[str, Cursors] | None:
        """The holder that loses all its KV by the command, with its cursors before; None if there is none."""
        command = self.command
        if not isinstance(command, (Close, Finish, Retract, Abort)) or not self.done:
            return None
        if isinstance(command, Close):
            session = self.was.session(command.session)
            assert session is not None
            if session.turn is None and session.slot is not None:
                return session.name, session.slot
            return None
        request = self.named_request
        assert request is not None
        if request.session is None:
            return None if request.cursors is None else (request.name, request.cursors)
        session = self.was.session(request.session)
        assert session is not None
        cursors = request.cursors if request.cursors is not None else session.slot
        if cursors is None:
            return None
        finishes = isinstance(command, Finish) and session.closing
        aborts = isinstance(command, Abort) and (request.started or session.closing)
        return (session.name, cursors) if finishes or aborts else None

    @memoized
    def cut_at(self) -> tuple[str, Cursors, int] | None:
        """The holder, the cursors before and the new length of a session's row that the command trims and
        keeps; None if it trims none."""
        request = self.named_request if self.done else None
        if request is None or request.session is None or self.ended_holder is not None:
            return None
        if isinstance(self.command, (Finish, Retract)):
            assert request.cursors is not None
            if isinstance(self.command, Finish):
                kept_outputs = self.command.finished_len
            else:
                kept_outputs = request.output - self.command.in_flight
            stop = self._stop_position(request.session, request.cursors, request.origin + kept_outputs)
            return request.session, request.cursors, stop
        session = self.was.session(request.session)
        assert session is not None
        if isinstance(self.command, Admit) and session.slot is not None:
            after = self.after.requests.get(request.name)
            if after is not None and after.cursors is not None:
                return request.session, session.slot, after.cursors.kv_committed_len
        return None

    def _stop_position(self, session: str, c: Cursors, target: int) -> int:
        """Return `target`, or where the system's slot ends if that has all KV of the turn, or is a page
        boundary and no position past the tree's prefix can be resumed."""
        geometry = self.config.geometry
        after = self.after.sessions.get(session)
        if after is None or after.slot is None:
            return target
        stop = after.slot.kv_allocated_len
        kept_lengths = [min(length, target) for length in (c.kv_committed_len, c.swa_evicted_seqlen)]
        if max(kept_lengths) <= stop < min(c.kv_allocated_len, target):
            return stop
        if geometry.window is None:
            return target
        resumed = min(c.kv_committed_len, target)
        if swa_start(c) <= max(0, resumed - geometry.window) or stop % geometry.page_size:
            return target
        return stop if c.cache_protected_len <= stop < min(c.kv_allocated_len, target) else target

    @memoized
    def progress(self) -> dict[str, tuple[int, int]]:
        """Return the tokens committed and the kv_allocated_len requested by a prefill or a round,
        by request."""
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
            # the number of claimed tokens is a choice of the system
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
    def window_evictions(self) -> frozenset[str]:
        """Return the requests with a window eviction after the forward pass of this extend, by the system's
        choices, and the requests that received only the SWA KV of their last window."""
        assert isinstance(self.command, Extend) and isinstance(self.outcome, Done)
        choices = self.outcome.choices
        lanes = self.command.lanes
        return frozenset(
            [*(c.request for c in choices if c.after), *(n.request for n in lanes if n.tail)]
        )

    def frontier(self, name: str) -> int:
        """Return the system's swa_evicted_seqlen of a request after the step, 0 if the system does not show
        it."""
        facts = self.after.requests.get(name)
        return facts.cursors.swa_evicted_seqlen if facts is not None and facts.cursors else 0

    @memoized
    def tree_locks_before(self) -> Locks:
        """Return the locks in the system's tree before the step, those of the reference for the first
        step."""
        return locks_of(self.was.tree) if self.locks_before is None else self.locks_before

    @memoized
    def locks(self) -> Locks:
        """Return the locks in the system's tree after the step."""
        if not self.done or self.after.tree is None:
            return self.tree_locks_before
        command = self.command
        request = self.named_request
        again = None
        if isinstance(command, Admit):
            assert request is not None
            session = self.was.session(request.session)
            if session is None or session.slot is None:
                again = request.holder
        return locks_after(
            self.tree_locks_before,
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
    """Return the four cursors with their names, as text."""
    if c is None:
        return "no cursors"
    return " ".join(f"{name} {value}" for name, value in zip(c._fields, c))


def swa_start(c: Cursors) -> int:
    """Return the position below which the row has no SWA KV of its own. A window eviction starts at
    cache_protected_len, so a swa_evicted_seqlen within the tree's prefix has evicted nothing."""
    return c.swa_evicted_seqlen if c.swa_evicted_seqlen > c.cache_protected_len else 0
