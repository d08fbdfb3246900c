"""Arguments that several commands share: chunks, drafts and prompts of a scope, and drafts that are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from reference.commands import Draft, Prompt, prompt_of
from reference.rules.rule_definition import cursors_of
from reference.state import Phase, Request
from impl.choices import once_in, pick
from stateful_tests.generate.enabled_commands import Enabled, ahead_of, room_of
from stateful_tests.generate.exploration_scope import Scope

PREFILLS = (Phase.ADMITTED, Phase.EXTENDING)


def chunk_sizes(scope: Scope, request: Request, over: int = 0) -> range:
    """Return the sizes of the next chunk (tokens).

    over: how many sizes past the end of the text are added where the scope has invalid commands.
    """
    left = request.origin + request.output - cursors_of(request).kv_committed_len
    longest = left if scope.chunks is None else min(left, scope.chunks)
    if scope.invalid and longest == left:
        longest += over
    return range(1, longest + 1)


def draft_sizes(scope: Scope) -> list[tuple[int, int]]:
    """Return (tokens allocated ahead, tokens accepted) of each draft in a scope."""
    return [
        (ahead, accept) for ahead in range(1, scope.ahead + 1) for accept in range(1, ahead + 1)
    ]


def drafts_of(scope: Scope, request: Request) -> list[Draft]:
    """Return every draft of a running request. A scope with invalid commands adds one that accepts more than
    it allocates, and has one for a request that does not run."""
    runs = request.phase is Phase.RUNNING
    if not (runs or scope.invalid):
        return []
    if not runs:
        return [Draft(request.name, 1, 1)]
    drafts = [Draft(request.name, *sizes) for sizes in draft_sizes(scope)]
    if scope.invalid:
        drafts.append(Draft(request.name, 1, 2))
    return drafts


def drafts_of_two(scope: Scope, one: Request, two: Request) -> Iterator[tuple[Draft, Draft]]:
    """Yield a draft of each of two requests, in every combination; none unless both run."""
    if one.phase is two.phase is Phase.RUNNING:
        for first, second in product(draft_sizes(scope), repeat=2):
            yield Draft(one.name, *first), Draft(two.name, *second)


@lru_cache(maxsize=64)
def prompts_of(scope: Scope) -> tuple[Prompt, ...]:
    """Read the prompts of a scope, which are in the notation of traces."""
    return tuple(map(prompt_of, scope.prompts))


def draw_drafts(c: Enabled, fitting: list[Request]) -> tuple[Draft, ...]:
    """Draw the batch entries of a verify round.

    fitting: requests to choose from.
    """
    drafts = []
    geometry = c.state.config.geometry
    for name in c.lanes(fitting):
        request = c.state.request(name)
        room = room_of(c.state, request.cursors if request is not None else None)
        allocate = c.length(room + c.invalid)
        accept = allocate if once_in(c.source, 4) else 1 + c.source.upto(allocate - 1)
        if c.profile.allocate_ahead and not once_in(c.source, 3):
            allocate = max(1, room - c.source.upto(room // 3))
            window = geometry.window or 0
            within_window = (
                request in c.running and cursors_of(request).kv_committed_len < window
            )
            accept = 1 if within_window or once_in(c.source, 2) else 1 + c.source.upto(allocate - 1)
        elif c.profile.allocate_ahead and request in c.running and ahead_of(request) > 1:
            allocate = accept = 1  # what is left of the round before stays ahead
        if c.invalid and once_in(c.source, 4):
            allocate, accept = pick(c.source, ((allocate, allocate + 1), (0, 0), (1, 0), (-1, 1)))
        elif request in c.running and once_in(c.source, 16):
            # Past the end of the row, which has room for the accepted tokens.
            left = geometry.width - cursors_of(request).kv_committed_len
            allocate = left + 1 + c.source.upto(1)
            accept = 1 + c.source.upto(max(0, left - 1))
        drafts.append(Draft(name, allocate, accept))
    return tuple(drafts)
