"""Retract: memory pressure sends a request back to the queue."""

from __future__ import annotations

from reference.commands import Retract
from reference.rules.rule_definition import cursors_of
from reference.state import Phase, Request, State
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, harness
from stateful_tests.generate.commands.shared_cases import ALL_BACK, cut, request_of
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.exploration_scope import Scope


@harness(
    Retract,
    applies=lambda c: c.running,
    weight=lambda _: 3,
    is_in=lambda scope: scope.served and scope.retracts,
    tells_late=True,
)
class RetractHarness(Harness[Retract]):
    def draw(self, c: Enabled) -> Retract:
        name = c.request(c.running)
        if c.invalid:
            return Retract(name, c.source.upto(3) - 1)
        in_flight = c.source.upto(1)
        is_late = any(request.name == name for request in c.late)
        return Retract(name, 0 if is_late else in_flight)

    def of_request(self, scope: Scope, request: Request) -> Commands:
        if request.phase is Phase.RUNNING:
            yield from (Retract(request.name, in_flight) for in_flight in (0, 1))
        elif scope.invalid:
            yield Retract(request.name, 0)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Retract(fresh.request)

    def case(self, was: State, command: Retract, now: State) -> Labels:
        request = request_of(was, command.request)
        in_flight = "one output in flight" if command.in_flight else ""
        if request.session is None:
            return "ordinary", in_flight, *ALL_BACK
        target = request.origin + request.output - command.in_flight
        return "turn", in_flight, *cut(was, cursors_of(request), target)
