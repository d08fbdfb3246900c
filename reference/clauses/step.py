"""One command on system and reference, with what clauses ask about it again and again.

`Step` derives everything from the command, the reference before and after (roles and texts) and the
system's facts; each derived value is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from reference.clauses.facts import Facts, Owned
from reference.commands import (
    Abort,
    Admit,
    Close,
    Command,
    Decode,
    Done,
    Extend,
    Finish,
    Outcome,
    Retract,
    SpecDecode,
)  # fmt: skip
from reference.cursors import owed_full, owed_swa
from reference.ledger import (
    Cursors,
    Holder,
    Request,
    RunConfig,
    State,
    full_pages,
    holders,
    swa_pages,
    text_tokens,
)  # fmt: skip
from reference.prefix_cache import Effects, page_name


@dataclass(eq=False)
class Step:
    """was, now: reference before and after. expected, outcome: the reference's, the system's.

    before, after: the system's facts. unchanged: its view is the same as before. overreach: a choice of
    the system that the reference could not follow, in words; `now` then follows the default.
    effects: what changed hands with the reference's tree. tree_policy_is_free: the system's tree picks
    itself what it splits and evicts, and `now` has its shape.
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
    effects: Effects = field(default_factory=Effects)
    tree_policy_is_free: bool = False

    @cached_property
    def done(self) -> bool:
        """Both carried the command out."""
        return isinstance(self.outcome, Done) and isinstance(self.expected, Done)

    @cached_property
    def held_before(self) -> tuple[Holder, ...]:
        return tuple(holders(self.was))

    @cached_property
    def held(self) -> tuple[Holder, ...]:
        return tuple(holders(self.now))

    @cached_property
    def swept_any(self) -> bool:
        """Some holder's window has moved on."""
        return any(h.cursors.swa_evicted_seqlen > 0 for h in self.held)

    @cached_property
    def freed_something(self) -> bool:
        """A free list of the system grew."""
        return any(len(p.free) > len(self.before.pools[n].free) for n, p in self.after.pools.items())

    @cached_property
    def acted(self) -> Request | None:
        """The request that a command for one request is about, as it was before."""
        name = getattr(self.command, "request", None)
        return self.was.request(name) if isinstance(name, str) else None

    @cached_property
    def ended(self) -> tuple[str, Cursors] | None:
        """(holder, its cursors before) when the command gives back everything a holder has."""
        command = self.command
        if not self.done:
            return None
        if isinstance(command, Close):
            session = self.was.session(command.session)
            if session is not None and session.turn is None and session.slot is not None:
                return session.name, session.slot
            return None
        request = self.acted
        if request is None:
            return None
        if request.session is None:
            if isinstance(command, (Finish, Retract, Abort)) and request.cursors is not None:
                return request.name, request.cursors
            return None
        session = self.was.session(request.session)
        assert session is not None
        has = request.cursors if request.cursors is not None else session.slot
        goes = (isinstance(command, Finish) and session.closing) or (
            isinstance(command, Abort) and (request.started or session.closing)
        )
        return (session.name, has) if goes and has is not None else None

    @cached_property
    def cut_at(self) -> tuple[str, Cursors, int] | None:
        """(holder, cursors before, target) when the command trims a session's row and keeps it."""
        request = self.acted
        if not self.done or request is None or request.session is None or self.ended is not None:
            return None
        if isinstance(self.command, Finish) and request.cursors is not None:
            return request.session, request.cursors, request.origin + self.command.finished_len
        if isinstance(self.command, Retract) and request.cursors is not None:
            output = request.output - self.command.in_flight
            return request.session, request.cursors, request.origin + output
        session = self.was.session(request.session)
        if isinstance(self.command, Admit) and session is not None and session.slot is not None:
            after = self.after.requests.get(request.name)
            if after is not None and after.cursors is not None:
                return request.session, session.slot, after.cursors.kv_committed_len
        return None

    @cached_property
    def progress(self) -> dict[str, tuple[int, int]]:
        """request -> (tokens committed, kv_allocated_len asked for) by a prefill or a round."""
        command = self.command
        asked: dict[str, tuple[int, int]] = {}
        if not self.done:
            return asked
        if isinstance(command, Extend):
            lanes = [(lane.request, lane.tokens, lane.tokens) for lane in command.lanes]
        elif isinstance(command, Decode):
            lanes = [(name, 1, 1) for name in command.requests]
        elif isinstance(command, SpecDecode):
            lanes = [(lane.request, lane.accept, lane.allocate) for lane in command.lanes]
        else:
            return asked
        for name, committed, ahead in lanes:
            request = self.was.request(name)
            if request is not None and request.cursors is not None:
                c = request.cursors
                asked[name] = (committed, max(c.kv_allocated_len, c.kv_committed_len + ahead))
        return asked

    @cached_property
    def swept_after(self) -> frozenset[str]:
        """Requests that the system has swept after the forward pass, by what it says."""
        choices = self.outcome.choices if isinstance(self.outcome, Done) else ()
        return frozenset(choice.request for choice in choices if choice.after)

    def frontier(self, name: str) -> int:
        """The system's swa_evicted_seqlen of a request after the step (0 if it shows none)."""
        facts = self.after.requests.get(name)
        return facts.cursors.swa_evicted_seqlen if facts is not None and facts.cursors else 0

    def freed(self, pool: str) -> dict[str, list[int]]:
        """holder -> page indices of its sequence that it had before and the system gave back."""
        before, after = self.before.pools[pool], self.after.pools[pool]
        free = set(after.free)
        kept = set(after.owned)
        others = {o.page: o.holder for o in after.owned}
        freed: dict[str, list[int]] = {}
        for owned in before.owned:
            gone = owned not in kept and owned.page in others
            if owned.page in free or (gone and others[owned.page] != self._name_in_tree(owned)):
                freed.setdefault(owned.holder, []).append(owned.at)
        return freed

    def _name_in_tree(self, owned: Owned) -> str | None:
        """What a page of a row is called once the tree has taken it over."""
        if self.after.tree is None:
            return None
        path = self._paths.get(owned.holder, ())[: (owned.at + 1) * self.config.geometry.page_size]
        return page_name(path)

    @cached_property
    def _paths(self) -> dict[str, tuple[int, ...]]:
        """The text of each holder before, as tokens."""
        return {h.name: tuple(text_tokens(h.text)) for h in self.held_before}

    @cached_property
    def _owed(self) -> dict[str, dict[str, list[int]]]:
        owed = {pool: self._owed_of(pool) for pool in self.after.pools}
        for pool, pages in owed.items() if self.after.tree is not None and self.done else ():
            self._take_over(pool, pages)
        return owed

    def owed(self, pool: str) -> dict[str, list[int]]:
        """The same, as the rules owe it."""
        return self._owed[pool]

    def _owed_of(self, pool: str) -> dict[str, list[int]]:
        page_size = self.config.geometry.page_size
        owed: dict[str, list[int]] = {}
        if not self.done:
            return owed
        if self.ended is not None:
            pages = full_pages if pool == "full" else swa_pages
            owed[self.ended[0]] = list(pages(self.ended[1], page_size))
        elif self.cut_at is not None:
            holder, before, target = self.cut_at
            low, high = (owed_full if pool == "full" else owed_swa)(before, target, page_size)
            owed[holder] = list(range(low // page_size, high // page_size))
        elif pool == "swa":
            for was in self.was.requests:
                facts = self.after.requests.get(was.name)
                if was.cursors is None or facts is None or facts.cursors is None:
                    continue
                stop = facts.cursors.swa_evicted_seqlen // page_size
                gone = [p for p in swa_pages(was.cursors, page_size) if p < stop]
                owed[was.session or was.name] = gone
        return {holder: pages for holder, pages in owed.items() if pages}


    def _take_over(self, pool: str, owed: dict[str, list[int]]) -> None:
        """Owed besides are duplicates and evicted nodes; not owed is what the tree has taken over."""
        size = self.config.geometry.page_size
        for was in self.was.requests if isinstance(self.command, Extend) else ():
            now = self.now.request(was.name)
            if was.cursors is not None and now is not None and now.cursors is not None:
                pages = (full_pages if pool == "full" else swa_pages)(was.cursors, size)
                given_up = [p for p in pages if p < now.cursors.cache_protected_len // size]
                owed[was.holder] = sorted({*owed.get(was.holder, ()), *given_up})
        for holder in list(owed):
            owed[holder] = [p for p in owed[holder] if (holder, p) not in self.effects.adopted[pool]]
            if not owed[holder]:
                del owed[holder]
        gone = self.effects.gone[pool]
        # Taken over again in the same command, a page that was given back may be the very same one.
        same = {(o.holder, o.at) for o in {*self.before.pools[pool].owned} & {*self.after.pools[pool].owned}}
        for holder, page in gone - same if gone else ():
            owed.setdefault(holder, []).append(page)


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
