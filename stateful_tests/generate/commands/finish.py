"""Finish: the turn ends."""

from __future__ import annotations

from reference.commands import Finish, Mode
from reference.rules.rule_definition import cursors_of
from reference.state import Phase, Request, State
from impl.choices import once_in
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, harness
from stateful_tests.generate.commands.shared_cases import ALL_BACK, cut, page_ends, request_of
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.exploration_scope import Scope


@harness(
    Finish,
    applies=lambda c: c.running,
    weight=lambda _: 6,
    is_in=lambda scope: scope.served,
    tells_late=True,
)
class FinishHarness(Harness[Finish]):
    def draw(self, c: Enabled) -> Finish:
        name = c.request(c.running)
        request = c.state.request(name)
        output = request.output if request is not None else 1
        if c.invalid:
            return Finish(name, c.source.upto(output + 1))
        low = 1
        if request is not None and c.state.config.mode is Mode.FAITHFUL:
            low = max(request.processed_outputs[0] + 1, request.evicted - request.origin)
        if low >= output or once_in(c.source, 6 if c.profile.allocate_ahead else 3):
            return Finish(name, output)
        if once_in(c.source, 2):  # far back: most of what was accepted was past the limit
            return Finish(name, low)
        return Finish(name, low + c.source.upto(output - low))

    def of_request(self, scope: Scope, request: Request) -> Commands:
        if request.phase is Phase.RUNNING:
            for finished in range(1, request.output + 1 + scope.invalid):
                yield Finish(request.name, finished)
        elif scope.invalid:
            yield Finish(request.name, 1)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Finish(fresh.request, 1)

    def case(self, was: State, command: Finish, now: State) -> Labels:
        request = request_of(was, command.request)
        session = was.session(request.session)
        *cut_cases, tail = cut(was, cursors_of(request), request.origin + command.finished_len)
        if session is not None and not session.closing:
            return "turn", *cut_cases, tail, ""
        if session is None and was.tree is not None and now.tree is not None:
            grew = page_ends(now.tree).keys() - page_ends(was.tree).keys()
            return (
                "ordinary",
                *cut_cases,
                "",
                "leaves pages in the tree" if grew else "leaves the tree as it is",
            )
        return "ordinary" if session is None else "turn of a closing session", *ALL_BACK, ""
