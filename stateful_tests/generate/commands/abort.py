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
        candidates = c.state.requests if c.invalid else c.abortable or c.state.requests
        return Abort(c.request(candidates), once_in(c.source, 2))

    def of_request(self, scope: Scope, request: Request) -> Commands:
        yield Abort(request.name)
        # a server marks only requests that it has not admitted yet
        never_admitted = request.phase is Phase.QUEUED and not request.started
        if scope.marked and (scope.invalid or never_admitted):
            yield Abort(request.name, marked=True)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Abort(fresh.request)

    def case(self, was: State, command: Abort, now: State) -> Labels:
        """Label where the request is, its kind, whether its session closes, and its prefix of the tree."""
        request = request_of(was, command.request)
        session = was.session(request.session)
        kind = "ordinary"
        if session is not None:
            kind = "slot" if session.slot is not None else "no slot"
        closing = "session closing" if session is not None and session.closing else ""
        held = request.cursors or (session.slot if session is not None else None)
        prefix = (
            "with a prefix of the tree" if held is not None and held.cache_protected_len else ""
        )
        return _place_of(request, command.marked), kind, closing, prefix


def _place_of(request: Request, marked: bool) -> str:
    """Return the label of where the request is aborted."""
    if marked:
        return "marked"
    if request.phase in IN_BATCH:
        return "in a batch"
    if request.started:
        return "waits after a retract"
    return "admitted" if request.phase is Phase.ADMITTED else "queued"
