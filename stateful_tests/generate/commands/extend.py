"""Extend: a batch that prefills."""

from __future__ import annotations

from itertools import product

from reference.commands import Chunk, Extend, Reason
from reference.cursors import floor_page
from reference.rules.rule_definition import cursors_of
from reference.state import Phase, Request, State, free
from impl.choices import once_in, pick
from stateful_tests.generate.commands.shared_arguments import PREFILLS, chunk_sizes
from stateful_tests.generate.commands.harness import Commands, Harness, Labels, Names, harness
from stateful_tests.generate.commands.shared_cases import LATE, grows, request_of
from stateful_tests.generate.enabled_commands import Enabled, room_of
from stateful_tests.generate.exploration_scope import Scope


@harness(
    Extend,
    applies=lambda c: c.extending,
    weight=lambda _: 10,
    is_in=lambda scope: scope.served,
    refusals={Reason.WRONG_PHASE: LATE},
)
class ExtendHarness(Harness[Extend]):
    def draw(self, c: Enabled) -> Extend:
        names = c.lanes(c.extending)
        running = {r.name for r in c.running}
        if c.profile.mixed and running and not once_in(c.source, 3):
            names += [name for name in self._decoding_beside(c) if name not in names]
        elif not c.profile.mixed and not running.issuperset(names):
            names = [name for name in names if name not in running]
        return Extend(tuple(self._chunk(c, name) for name in names))

    def _decoding_beside(self, c: Enabled) -> list[str]:
        """Draw the requests that decode in a mixed batch: often all, where slots come from different
        places."""
        if len(c.sources) > 1 and not c.windowless and once_in(c.source, 2):
            return [request.name for request in c.settled_requests]
        return c.lanes(c.windowless or c.decoding)

    def _chunk(self, c: Enabled, name: str) -> Chunk:
        request = c.state.request(name)
        done = request.cursors.kv_committed_len if request is not None and request.cursors else 0
        tokens_left = request.origin + request.output - done if request is not None else 1
        retracted = request is not None and request.started
        whole = not once_in(c.source, 2 if retracted else 3)
        shared = c.profile.machine != "sessions"
        tokens = tokens_left if whole else self._chunk_length(c, done, tokens_left)
        tail = c.profile.tails and self._may_be_tail(c, request) and not once_in(c.source, 3)
        if tail and not whole:
            tokens = max(1, tokens_left - 1 - c.source.upto(1))
        elif request is not None and shared and not tail and not once_in(c.source, 3):
            tokens = max(1, min(tokens, room_of(c.state, request.cursors)))
            # a chunk for which the tree makes room
            if tokens == tokens_left > 1 and free(c.state).full < 2:
                tokens = c.length(tokens_left - 1)
        if c.invalid and once_in(c.source, 3):
            tokens = pick(c.source, (tokens_left + 1, 0, -1))
        return Chunk(name, tokens, tail)

    def _chunk_length(self, c: Enabled, computed_len: int, tokens_left: int) -> int:
        """Draw the length of a chunk out of `tokens_left` tokens, often up to the end of a page."""
        size = c.state.config.geometry.page_size
        to_page = size - computed_len % size
        if size > 1 and to_page < tokens_left and once_in(c.source, 2):
            return to_page + size * c.source.upto((tokens_left - 1 - to_page) // size)
        return c.length(tokens_left)

    def _may_be_tail(self, c: Enabled, request: Request | None) -> bool:
        """Return whether a chunk may be a tail. Either there is a window and the request has computed nothing
        of its own, or the command may be invalid."""
        windowless = c.state.config.geometry.window is None
        if c.invalid or windowless or request is None or request.cursors is None:
            return c.invalid
        started = request.cursors.kv_allocated_len > request.cursors.cache_protected_len
        return request not in c.running and not started

    def of_request(self, scope: Scope, request: Request) -> Commands:
        if request.phase in PREFILLS:
            for tail in {False, scope.tails}:
                for tokens in chunk_sizes(scope, request, over=1):
                    yield Extend((Chunk(request.name, tokens, tail),))
        elif scope.invalid:
            yield Extend((Chunk(request.name, 1, scope.tails),))

    def of_two(self, scope: Scope, one: Request, two: Request) -> Commands:
        names = one.name, two.name
        prefill = [r for r in (one, two) if r.phase in PREFILLS]
        if len(prefill) == 2:
            for sizes in product(*(chunk_sizes(scope, r) for r in prefill)):
                lanes = tuple(map(Chunk, names, sizes))
                yield Extend(lanes)
                if scope.geometry.tree:
                    yield Extend(lanes[::-1])
        running = [r for r in (one, two) if r.phase is Phase.RUNNING]
        if scope.decode and prefill and running:  # a mixed batch
            for tokens in chunk_sizes(scope, prefill[0]):
                yield Extend((Chunk(prefill[0].name, tokens), Chunk(running[0].name, 1)))

    def ill_formed(self, scope: Scope, fresh: Names) -> Commands:
        chunk = Chunk(fresh.request, 1)
        yield from (
            Extend((chunk,)),
            Extend(()),
            Extend((Chunk(fresh.request, 0),)),
            Extend((chunk, chunk)),
        )

    def case(self, was: State, command: Extend, now: State) -> Labels:
        """Label the batch or the start of its request, whether chunks are the last, what the tree has, SWA
        tails and the room that was made."""
        names = [lane.request for lane in command.lanes]
        room = grows(was, now, names)
        last = [request_of(now, name).phase is Phase.RUNNING for name in names]
        tails = [
            (cursors_of(request_of(was, n.request)), cursors_of(request_of(now, n.request)))
            for n in command.lanes
            if n.tail
        ]
        less = any(c.swa_evicted_seqlen > had.cache_protected_len for had, c in tails)
        tail = "SWA KV of the last window alone" if less else ""
        if len(names) > 1:
            mixed = any(request_of(was, name).phase is Phase.RUNNING for name in names)
            chunks = "last chunks" if all(last) else "chunks"
            return "mixed batch" if mixed else "batch", chunks, "", tail, *room
        before = request_of(was, names[0])
        after = request_of(now, names[0])
        session = was.session(before.session)
        slotless = session is None or session.slot is None
        if before.phase is not Phase.ADMITTED:
            start = "goes on"
        else:
            start = "takes a row" if slotless else "resumes a slot"
        insertion = ""
        if was.tree is not None and slotless:
            r = cursors_of(after).cache_protected_len
            if r > cursors_of(before).cache_protected_len:
                insertion = "into the tree"
            elif floor_page(cursors_of(after).kv_committed_len, was.config.geometry.page_size) > r:
                insertion = "kept out of the tree"
        return start, "last chunks" if last[0] else "chunks", insertion, tail, *room
