"""Abort: a request is given up."""

from __future__ import annotations

from reference.commands import Abort
from reference.state import IN_BATCH, Phase, Request, State
from impl.choices import once_in, weight_if
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, harness
from stateful_tests.generate.commands.shared_cases import request_of
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.exploration_scope import Scope


@harness(
    Abort,
    applies=lambda c: c.state.requests,
    weight=lambda c: 1 + weight_if(c.abortable, 5),
    is_in=lambda scope: scope.served and scope.aborts,
    tells_late=True,
)
class AbortHarness(Harness[Abort]):
    def draw(self, c: Enabled) -> Abort:
        special = c.abortable
        fitting = special if special and not c.invalid else c.state.requests
        return Abort(c.request(fitting), once_in(c.source, 2))

    def of_request(self, scope: Scope, request: Request) -> Commands:
        yield Abort(request.name)
        waits = request.phase is Phase.QUEUED and not request.started
        if scope.marked and (scope.invalid or waits):
            yield Abort(request.name, marked=True)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Abort(fresh.request)

    def case(self, was: State, command: Abort, now: State) -> Labels:
        request = request_of(was, command.request)
        session = was.session(request.session)
        if request.phase in IN_BATCH:
            where = "in a batch"
        elif request.started:
            where = "waits after a retract"
        else:
            where = "admitted" if request.phase is Phase.ADMITTED else "queued"
        if command.marked:
            where = "marked"
        who = "ordinary"
        if session is not None:
            who = "slot" if session.slot is not None else "no slot"
        closing = "session closing" if session is not None and session.closing else ""
        held = request.cursors or (session.slot if session is not None else None)
        prefix = (
            "with a prefix of the tree" if held is not None and held.cache_protected_len else ""
        )
        return where, who, closing, prefix
