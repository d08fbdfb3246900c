"""EvictSwa: window eviction for one request."""

from __future__ import annotations

from reference.commands import EvictSwa, Mode
from reference.rules.rule_definition import cursors_of
from reference.state import IN_BATCH, Request, State
from impl.choices import once_in, pick, weight_if
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, harness
from stateful_tests.generate.commands.shared_cases import pages, request_of
from stateful_tests.generate.enabled_commands import Enabled, ahead_of
from stateful_tests.generate.exploration_scope import Scope


@harness(
    EvictSwa,
    applies=lambda c: bool(c.requests_in_batch) and c.state.config.geometry.window is not None,
    weight=lambda c: 5 + weight_if(c.swa_unlocked, 10),
    is_in=lambda scope: scope.served and scope.window_evictions,
    tells_late=True,
)
class EvictSwaHarness(Harness[EvictSwa]):
    def draw(self, c: Enabled) -> EvictSwa:
        """Draw a target near the end of the computed text, or where the first page leaves the window."""
        over = [r for r in c.running if ahead_of(r) > 0] if c.profile.allocate_ahead else []
        unlocked = c.swa_unlocked
        fitting = unlocked if unlocked and once_in(c.source, 2) else over or c.requests_in_batch
        name = c.request(fitting)
        request = c.state.request(name)
        cursors = request.cursors if request is not None else None
        if cursors is None:
            return EvictSwa(name, c.source.upto(4))
        top = cursors.kv_committed_len
        if request is not None and not c.invalid:
            top = request.settled_len
        is_free = c.state.config.mode is Mode.FREE or c.invalid
        if is_free and (c.profile.allocate_ahead or once_in(c.source, 3)):
            too_long = c.invalid and once_in(c.source, 3)
            top = cursors.kv_allocated_len + (1 if too_long else 0)
        if c.invalid and once_in(c.source, 8):
            return EvictSwa(name, -1)
        geometry = c.state.config.geometry
        if geometry.window is not None:  # where the first page goes, or does not yet
            first_eviction = geometry.window + 2 * geometry.page_size
            # and with it the window
            if cursors.kv_committed_len <= geometry.window and top >= first_eviction:
                return EvictSwa(name, pick(c.source, (first_eviction, first_eviction, top)))
            if once_in(c.source, 4):
                return EvictSwa(name, min(top, first_eviction - c.source.upto(1)))
        return EvictSwa(name, top if not once_in(c.source, 4) else c.source.upto(top))

    def of_request(self, scope: Scope, request: Request) -> Commands:
        if request.phase in IN_BATCH:
            lengths = range(cursors_of(request).kv_allocated_len + 1 + scope.invalid)
            yield from (EvictSwa(request.name, length) for length in lengths)
        elif scope.invalid:
            yield EvictSwa(request.name, 0)

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        yield EvictSwa(fresh.request, 0)

    def case(self, was: State, command: EvictSwa, now: State) -> Labels:
        request = request_of(was, command.request)
        before = cursors_of(request)
        after = cursors_of(request_of(now, command.request))
        reach = "past the commit" if command.length > request.settled_len else ""
        if after.swa_evicted_seqlen == before.swa_evicted_seqlen:
            return reach, "does not move"
        low = max(before.swa_evicted_seqlen, before.cache_protected_len)
        size = was.config.geometry.page_size
        freed = pages(after.swa_evicted_seqlen, size) > pages(low, size)
        return reach, "frees pages" if freed else "to the tree's prefix, frees nothing"
