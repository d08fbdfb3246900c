"""Admit: a queued request gets its prefix."""

from __future__ import annotations

from impl.choices import weight_if
from reference.commands import Admit
from reference.cursors import floor_page
from reference.rules.rule_definition import cursors_of
from reference.state import Phase, Request, State
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, harness
from stateful_tests.generate.commands.shared_cases import request_of, tail
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.exploration_scope import Scope


@harness(
    Admit,
    applies=lambda c: c.waiting,
    weight=lambda c: (
        weight_if(c.queued_requests, 8)
        + weight_if(c.admitted_requests, 8 if c.wiped_sessions else 2)
    ),
    is_in=lambda scope: scope.served,
)
class AdmitHarness(Harness[Admit]):
    def draw(self, c: Enabled) -> Admit:
        return Admit(c.request(c.waiting))

    def of_request(self, scope: Scope, request: Request) -> Commands:
        if scope.invalid or request.phase in (Phase.QUEUED, Phase.ADMITTED):
            yield Admit(request.name)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Admit(fresh.request)

    def case(self, was: State, command: Admit, now: State) -> Labels:
        """Label whether a slot is restored or the tree has a prefix, how its commit and the key compare, and
        the tail that is freed."""
        before = request_of(was, command.request)
        after = request_of(now, command.request)
        again = "again" if before.phase is Phase.ADMITTED else ""
        session = was.session(before.session)
        c = cursors_of(after)
        key = before.origin + before.output - 1
        if session is None or session.slot is None:
            source = "slot wiped" if session is not None and session.history else "no slot"
            if not c.cache_protected_len:
                return again, source, ""
            whole = c.cache_protected_len == floor_page(key, was.config.geometry.page_size)
            return again, source, f"{'all' if whole else 'part'} of its key from the tree"
        slot = session.slot
        page_size = was.config.geometry.page_size
        if c.kv_committed_len < min(slot.kv_committed_len, key):
            source = "from R, its window lost"
        elif slot.kv_committed_len > key:
            source = "commit past its key"
        else:
            source = "commit at its key" if slot.kv_committed_len == key else "commit below its key"
        return again, source, tail(slot.kv_allocated_len, c.kv_allocated_len, page_size)
