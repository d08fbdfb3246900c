"""A whole adapter of an engine that schedules by itself.

    kvspec check --impl impl.examples.block_engine:make

One pool of blocks serves every group of layers: full attention and windows. Blocks with a hash are shared
and have a ref count; a block that nobody holds keeps its hash until it is handed out again. Requests that run
go first; where no block is free the last of them is preempted. Lengths are tokens.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from impl.adapter import UnusableImplementation
from impl.self_scheduling.driver import SelfSchedulingDriver
from impl.vocabulary import CommandRefused, require
from reference.blocks.commands import STOP_TOKEN, Add, EngineCommand, Schedule, Update
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts, Lane, Published, RequestFact, chained
from reference.commands import Abort, Reason

NULL = 0  # the block that stands in a table for what a window has left behind


@dataclass
class _Request:
    name: str
    text: list[int]  # tokens of input and outputs
    most: int  # tokens, outputs that are still to come included
    tables: list[list[int]]  # of each group, blocks by their index in the text
    status: str = "WAITING"  # then RUNNING; PREEMPTED
    computed: int = 0  # positions with KV
    outputs: list[int] = field(default_factory=list)


class BlockEngine(SelfSchedulingDriver):
    """Has one step in flight: the model runs a batch in `Schedule`, and `Update` hands out its tokens."""

    name = "block-engine"
    config: EngineConfig
    refs: list[int]
    free: deque[int]
    hashes: dict[int, tuple[int, int]]
    cached: dict[tuple[int, int], int]
    waiting: list[_Request]
    running: list[_Request]
    batch: list[tuple[_Request, int | None]]
    in_step: bool

    def reset(self, geometry: EngineConfig) -> None:
        if geometry.drafts:
            raise UnusableImplementation(f"{self.name}: it has no drafts")
        self.config = geometry
        self.groups = geometry.groups
        self.clear(*(group.block_size for group in self.groups))
        self.refs = [0] * (1 + geometry.blocks)
        self.free = deque(range(1, 1 + geometry.blocks))
        # of a block: its group, the stamp of its last token
        self.hashes = {}
        self.cached = {}  # the block of a hash
        self.waiting = []
        self.running = []
        # who was scheduled, and what was sampled
        self.batch = []
        self.in_step = False

    def carry_out(self, command: EngineCommand) -> None:
        """Execute a command. Raises CommandRefused, also for a command that the engine does not have."""
        if not isinstance(command, Abort):  # which a client may send at any time
            require(self.in_step == isinstance(command, Update), Reason.WRONG_PHASE)
        match command:
            case Add():
                known = command.request in self._requests()
                text = self.accept(command, self.config.max_model_len, known)
                most = len(text) + command.max_tokens
                self.waiting.append(
                    _Request(command.request, text, most, [[] for _ in self.groups])
                )
            case Abort(name):
                require(name in self._requests(), Reason.UNKNOWN_REQUEST)
                self._end(self._requests()[name])
            case Schedule():
                require(self.waiting or self.running, Reason.EMPTY)
                self._schedule()
            case Update():
                self._update()
            case _:
                raise CommandRefused(Reason.UNFAITHFUL)

    def _requests(self) -> dict[str, _Request]:
        return {request.name: request for request in (*self.running, *self.waiting)}

    def _end(self, request: _Request) -> None:
        self._release(request)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    # -- the pool ---------------------------------------------------------------------------------

    def _release(self, request: _Request) -> None:
        """Free the blocks of a text from its end on: the longer a cached prefix, the fewer requests have
        it."""
        for table in request.tables:
            for block in reversed(table):
                self._give_back(block)
            table.clear()
        request.computed = 0

    def _give_back(self, block: int) -> None:
        if block != NULL:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.append(block)

    def _take(self) -> int:
        block = self.free.popleft()
        if block in self.hashes:
            del self.cached[self.hashes.pop(block)]
        self.refs[block] = 1
        return block

    def _share(self, block: int) -> int:
        if block != NULL:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1
        return block

    def _lacking_blocks(self, request: _Request, end: int) -> list[int]:
        """Return the number of blocks that each group lacks for the first `end` tokens of a request."""
        return [
            -(-end // g.block_size) - len(table) for g, table in zip(self.groups, request.tables)
        ]

    def _oldest_read(self, group: int, query: int) -> int:
        """Return the index of the first block that a query at this position reads."""
        layers = self.groups[group]
        return (
            0 if layers.window is None else max(0, query - layers.window + 1) // layers.block_size
        )

    # -- the prefix cache -------------------------------------------------------------------------

    def _find(self, request: _Request) -> tuple[int, list[list[int]]]:
        """Return the longest prefix of which every group has the blocks that the next query reads, and
        these blocks."""
        stamps = chained(request.text)
        step = math.lcm(*(g.block_size for g in self.groups))
        longest = (len(stamps) - 1) // step * step if self.config.caching else 0
        for length in range(longest, 0, -step):
            tables = [self._find_hit(group, stamps, length) for group in range(len(self.groups))]
            if None not in tables:
                return length, [table for table in tables if table is not None]
        return 0, [[] for _ in self.groups]

    def _find_hit(self, group: int, stamps: list[int], length: int) -> list[int] | None:
        size = self.groups[group].block_size
        first_read = self._oldest_read(group, length)
        ends = range(size * (first_read + 1), length + 1, size)
        blocks = [self.cached.get((group, stamps[end - 1]), NULL) for end in ends]
        return None if NULL in blocks else [NULL] * first_read + blocks

    def _publish(self, request: _Request) -> None:
        stamps = chained(request.text[: request.computed])
        for group, table in enumerate(request.tables if self.config.caching else ()):
            size = self.groups[group].block_size
            for index, block in enumerate(table[: request.computed // size]):
                key = group, stamps[(index + 1) * size - 1]
                if block != NULL and block not in self.hashes and key not in self.cached:
                    self.hashes[block] = key
                    self.cached[key] = block

    # -- a step -----------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Fill a batch: first with requests that run, the last of which is preempted where blocks are
        missing, then with waiting ones, which begin behind the prefix that the cache has."""
        budget = self.config.max_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count = self._chunk(request, request.computed, budget)
            if sum(self._lacking_blocks(request, request.computed + count)) > len(self.free):
                preempted = True
                self._preempt(self.running.pop())
            else:
                self._run(request, count)
                budget -= count
                index += 1
        while (
            self.waiting and budget and not preempted and len(self.running) < self.config.max_seqs
        ):
            request = self.waiting[0]
            start, tables = self._find(request)
            count = self._chunk(request, start, budget)
            unreferenced = {
                block
                for table in tables
                for block in table
                if block != NULL and not self.refs[block]
            }
            request.tables = tables
            if not count or sum(self._lacking_blocks(request, start + count)) > len(
                self.free
            ) - len(unreferenced):
                request.tables = [[] for _ in self.groups]
                break
            for table in tables:
                table[:] = map(self._share, table)
            self.running.append(self.waiting.pop(0))
            request.status = "RUNNING"
            request.computed = start
            self._run(request, count)
            budget -= count
        self.in_step = bool(self.batch)

    def _chunk(self, request: _Request, start: int, budget: int) -> int:
        left = len(request.text) - start
        if left > budget and not self.config.chunked:
            return 0  # a prompt is not cut
        return min(left, budget)

    def _preempt(self, request: _Request) -> None:
        self._release(request)
        request.status = "PREEMPTED"
        self.waiting.insert(0, request)

    def _run(self, request: _Request, count: int) -> None:
        """Allocate, compute `count` tokens, and sample where they end the text."""
        start = request.computed
        end = request.computed + count
        for table, lacks in zip(request.tables, self._lacking_blocks(request, end)):
            table += [self._take() for _ in range(lacks)]
        stamps = chained(request.text[:end])
        for group, table in enumerate(request.tables):
            for position in range(start, end):
                block, offset = divmod(position, self.groups[group].block_size)
                self.write(table[block], offset, stamps[position], group)
        request.computed = end
        ends = end == len(request.text)
        sampled_token = self.sample(request.name, stamps[-1]) if ends else None
        rows = tuple(map(tuple, request.tables))
        tokens = tuple(request.text[start:end])
        self.lanes.append(
            Lane(request.name, start, tokens, 0, () if sampled_token is None else (sampled_token,), rows)
        )
        self.batch.append((request, sampled_token))
        self._publish(request)

    def _update(self) -> None:
        requests = self._requests()
        for request, token in self.batch:
            if requests.get(request.name) is not request:
                continue  # it was aborted
            if token is not None:
                request.text.append(token)
                request.outputs.append(token)
                most = min(request.most, self.config.max_model_len)
                finished = token == STOP_TOKEN or len(request.text) >= most
                self.deliver(request.name, request.outputs, finished)
                if finished:
                    self._end(request)
                    continue
            self._leave_behind(request)
        self.batch = []
        self.in_step = False

    def _leave_behind(self, request: _Request) -> None:
        """Give back what the windows have passed."""
        for group, table in enumerate(request.tables):
            for index in range(min(self._oldest_read(group, request.computed), len(table))):
                self._give_back(table[index])
                table[index] = NULL

    # -- facts ------------------------------------------------------------------------------------

    def view(self) -> BlockFacts:
        published = []
        for block, (group, _) in self.hashes.items():
            _, slots = self.memory[block]
            published.append(Published(block, group, tuple(slots)))
        requests = {
            name: RequestFact(r.status, tuple(r.text), r.computed, tuple(map(tuple, r.tables)))
            for name, r in self._requests().items()
        }
        return self.facts(
            self.refs,
            published,
            free=tuple(self.free),
            mapped=dict(Counter(self.cached.values())),
            requests=requests,
            steps_in_flight=int(self.in_step),
            results_due=self.in_step,
            in_step=self.in_step,
        )


make = BlockEngine
