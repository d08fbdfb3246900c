"""Decode, SpecDecode, Launch, Settle: rounds of requests that run, with results at once and later."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TypeVar

from reference.commands import Command, Decode, Draft, Launch, Reason, Settle, SpecDecode
from reference.rules.rule_definition import cursors_of
from reference.radix_tree import sizes
from reference.state import Phase, Request, State, free
from impl.choices import once_in, weight_if
from stateful_tests.generate.commands.shared_arguments import draw_drafts, drafts_of, drafts_of_two
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, RefusalCase, harness
from stateful_tests.generate.commands.shared_cases import LATE, grows, request_of
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.exploration_scope import Scope

V = TypeVar("V", SpecDecode, Launch)


def _tree_could_give(was: State, _command: Decode | SpecDecode) -> bool:
    left = free(was)
    lacks_page = not left.full or (was.config.geometry.window is not None and not left.swa)
    return lacks_page and was.tree is not None and sizes(was.tree).full_evictable > 0


def _accepted_fits(was: State, command: SpecDecode) -> bool:
    commits = [
        (cursors_of(request_of(was, n.request)).kv_committed_len, n.accept) for n in command.lanes
    ]
    return all(committed + accept <= was.config.geometry.width for committed, accept in commits)


_PAGE_OF_TREE = RefusalCase("and a page only from the tree", _tree_could_give)


@harness(
    Decode,
    applies=lambda c: c.running,
    weight=lambda c: weight_if(c.settled_requests, 5),
    is_in=lambda scope: scope.served and scope.decode,
    refusals={Reason.WRONG_PHASE: LATE, Reason.WINDOW_LOST: _PAGE_OF_TREE},
)
class DecodeHarness(Harness[Decode]):
    def draw(self, c: Enabled) -> Decode:
        return Decode(tuple(c.lanes(c.running if c.invalid else c.decoding)))

    def of_request(self, scope: Scope, request: Request) -> Commands:
        if request.phase is Phase.RUNNING or scope.invalid:
            yield Decode((request.name,))

    def of_two(self, scope: Scope, one: Request, two: Request) -> Commands:
        if one.phase is two.phase is Phase.RUNNING:
            yield Decode((one.name, two.name))

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield from (Decode((fresh.request,)), Decode(()), Decode((fresh.request, fresh.request)))

    def case(self, was: State, command: Decode, now: State) -> Labels:
        size = "batch" if len(command.requests) > 1 else ""
        return size, *grows(was, now, command.requests)


class _VerifyRound(Harness[V]):
    """The common part of SpecDecode and Launch: a batch of drafts."""

    @staticmethod
    @abstractmethod
    def batch(lanes: tuple[Draft, ...]) -> Command:
        """Return the command with these batch entries."""

    def of_request(self, scope: Scope, request: Request) -> Commands:
        return [self.batch((draft,)) for draft in drafts_of(scope, request)]

    def of_two(self, scope: Scope, one: Request, two: Request) -> Commands:
        return map(self.batch, drafts_of_two(scope, one, two))

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        return [self.batch((Draft(fresh.request, 1, 1),) * entries) for entries in (0, 1, 2)]


@harness(
    SpecDecode,
    applies=lambda c: c.running,
    weight=lambda c: weight_if(c.settled_requests, 6),
    is_in=lambda scope: scope.served and scope.ahead > 0,
    refusals={
        Reason.WRONG_PHASE: LATE,
        Reason.ROW_TOO_SHORT: RefusalCase("what is accepted would fit", _accepted_fits),
        Reason.WINDOW_LOST: _PAGE_OF_TREE,
    },
)
class SpecDecodeHarness(_VerifyRound[SpecDecode]):
    batch = SpecDecode

    def draw(self, c: Enabled) -> SpecDecode:
        return SpecDecode(draw_drafts(c, c.running if c.invalid else c.settled_requests))

    def case(self, was: State, command: SpecDecode, now: State) -> Labels:
        size = "batch" if len(command.lanes) > 1 else ""
        names = [lane.request for lane in command.lanes]
        accepted = all(lane.accept == lane.allocate for lane in command.lanes)
        window = was.config.geometry.window
        ahead = ""
        if window is not None:
            after = [cursors_of(request_of(now, name)) for name in names]
            most = max(c.kv_allocated_len - c.kv_committed_len for c in after)
            ahead = "ahead by a window" if most >= window else ""
        taken = "all accepted" if accepted else "some rejected"
        return size, taken, ahead, *grows(was, now, names)


@harness(
    Launch,
    applies=lambda c: c.launchable,
    weight=lambda _: 10,
    is_in=lambda scope: scope.late,
    refusals={Reason.WRONG_PHASE: LATE},
)
class LaunchHarness(_VerifyRound[Launch]):
    batch = Launch

    def draw(self, c: Enabled) -> Launch:
        """Draw a launch, often of one token: what a later end takes back then lies in slots that were
        ahead."""
        drafts = draw_drafts(c, c.running if c.invalid else c.launchable)
        if not c.invalid and once_in(c.source, 2):
            drafts = tuple(replace(draft, allocate=1, accept=1) for draft in drafts)
        return Launch(drafts)

    def case(self, was: State, command: Launch, now: State) -> Labels:
        names = [lane.request for lane in command.lanes]
        behind = any(request_of(was, name).in_flight for name in names)
        size = "batch" if len(names) > 1 else ""
        return size, "behind another" if behind else "", *grows(was, now, names)


@harness(
    Settle,
    applies=lambda c: c.late,
    weight=lambda _: 10,
    is_in=lambda scope: scope.late,
)
class SettleHarness(Harness[Settle]):
    def draw(self, c: Enabled) -> Settle:
        return Settle(c.request(c.late))

    def of_request(self, scope: Scope, request: Request) -> Commands:
        if request.phase is Phase.RUNNING or scope.invalid:
            yield Settle(request.name)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield Settle(fresh.request)

    def case(self, was: State, command: Settle, now: State) -> Labels:
        oldest, *others = request_of(was, command.request).in_flight
        taken = "all accepted" if oldest.accept == oldest.allocate else "some rejected"
        return taken, "another in flight" if others else ""
