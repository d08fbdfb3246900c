"""The text of each request and its positions with KV, from the tokens of clients and of the model.

`RequestTexts` makes no scheduling decision. The engine's facts say which requests a batch had and which
tokens the model sampled. `RequestTexts` derives the text of each request, its computed positions, and its
confirmed positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from reference.blocks.commands import (
    STOP_TOKEN, Add, End, EngineCommand, Fail, LoadAdapter, More, NewWeights, Schedule, Update, child_name,
    client_tokens,
)  # fmt: skip
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts, Lane, Output, chained
from reference.blocks.progress import EngineProgress
from reference.commands import Abort
from reference.standstill_detector import Standstill
from reference.kv_sources import PLAIN, LoadedWeights, KvSource


@dataclass(slots=True)
class Flight:
    """A batch entry with results in flight.

    context: stamp of the text before the sampled tokens.
    sampled: the sampled tokens.
    uses: blocks that the entry writes, and blocks that its step copies.
    stale: its request was preempted, or its turn ended, since the launch.
    void: it read blocks of a failed load.
    """

    context: int
    sampled: tuple[int, ...]
    uses: frozenset[int] = frozenset()
    stale: bool = False
    void: bool = False


Turn = tuple[list[int], int]  # the client's tokens, and max_tokens


@dataclass(slots=True)
class Bearer:
    """A request or a session."""

    name: str
    #: tokens on which client and engine agree
    text: list[int]
    #: the stamps of `text`, from the origin of `source` on
    stamps: list[int]
    max_tokens: int
    resumable: bool
    #: output tokens of this turn
    outputs: int = 0
    #: turns that wait for this one to end; None is the end of the session
    turns: deque[Turn | None] = field(default_factory=deque)
    #: the session is between turns
    idle: bool = False
    #: it has ended
    gone: bool = False
    #: positions with KV, accepted drafts included; None while it has no blocks
    computed: int | None = None
    #: a new turn has begun and has not run yet
    turned: bool = False
    #: its load has failed, which ends the request
    failed: bool = False
    #: its batch entries with results in flight
    flights: list[Flight] = field(default_factory=list)
    #: the source of its KV
    source: KvSource = PLAIN
    #: further answers to its prompt that the engine has not forked off
    children: tuple[str, ...] = ()

    @property
    def void(self) -> bool:
        """Whether it has KV from a failed load that was not reported to the engine yet."""
        return any(flight.void and not flight.stale for flight in self.flights)

    @property
    def sure_count(self) -> int:
        """The number of positions that have KV for any results in flight: drafts in flight do not count. At
        least 0."""
        ahead = sum(len(f.sampled) - 1 for f in self.flights if f.sampled and not f.stale)
        return max(0, (self.computed or 0) - ahead)

    def ahead(self) -> tuple[list[int], list[int]]:
        """Return the text and the stamps, extended by the tokens in flight."""
        text = self.text
        stamps = self.stamps
        if any(f.sampled and not f.stale for f in self.flights):
            text = list(text)
            stamps = list(stamps)
            for flight in self.flights:
                if not flight.stale:
                    extend(text, stamps, flight.sampled)
        return text, stamps

    def compute_again(self, source: KvSource) -> None:
        """Set the source of its KV, and compute the stamps of its text again."""
        self.source = source
        self.stamps[:] = chained(self.text, source.origin)


def extend(text: list[int], stamps: list[int], tokens: Sequence[int], origin: int = 0) -> None:
    """Append tokens and their stamps.

    origin: the stamp of the empty text.
    """
    stamps += chained(tokens, stamps[-1] if stamps else origin)
    text += tokens


@dataclass(slots=True)
class LaneNote:
    """A batch entry with its expectation."""

    lane: Lane
    #: its request had no blocks before
    fresh: bool
    #: a new turn began since its last entry
    turned: bool
    #: the request's text up to the last sampled token
    text: list[int]
    #: the stamps of `text`
    stamps: list[int]
    #: positions that had KV
    computed: int
    #: see Flight
    void: bool = False
    #: stamps of the last tokens of turns; a drafter may have computed KV after them
    discarded: Container[int] = ()


@dataclass(slots=True)
class OutputNote:
    """An output of the engine with its expectation.

    given: the engine's output, None without one.
    tokens: expected tokens, up to a stop.
    ends: the turn ends with these tokens.
    current: the model sampled them after exactly the client's text.
    optional: the engine may drop the tokens.
    """

    name: str
    given: Output | None
    tokens: tuple[int, ...]
    ends: bool
    current: bool
    optional: bool


class RequestTexts:
    """The texts of all requests of one run.

    bearers: requests and sessions, by name.
    batches: batches in flight, the oldest first.
    standstill: the standstill after the last command, if it was a Schedule while a request waits.
    loaded: the present weights.
    sources: sources of all requests, in order of first use.
    discarded: stamps of the last tokens of turns, which the next turn drops.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.bearers: dict[str, Bearer] = {}
        self.batches: deque[list[tuple[Bearer, Flight]]] = deque()
        self.standstill: Standstill | None = None
        self.loaded = LoadedWeights()
        self.sources: dict[KvSource, None] = {}
        self.discarded: set[int] = set()
        self._sent = 0
        self._progress = EngineProgress()

    def follow(
        self, command: EngineCommand, facts: BlockFacts
    ) -> tuple[list[LaneNote], list[OutputNote]]:
        """Record a command that the engine has executed, and return its batch entries and outputs."""
        notes = self._apply(command, facts)
        self._note_forks(facts)
        self._note_progress(command, facts)
        return notes

    def follow_refused(self, command: EngineCommand, facts: BlockFacts) -> None:
        """Record a command that the engine has refused. A refused Schedule counts as a call of the
        scheduler without progress."""
        self.standstill = None
        if isinstance(command, Schedule):
            self._note_progress(command, facts)

    def _note_progress(self, command: EngineCommand, facts: BlockFacts) -> None:
        idle = any(bearer.idle for bearer in self.bearers.values())
        waits = len(self.bearers) > 0
        self.standstill = self._progress.follow(command, facts, waits=waits, idle=idle)

    def _apply(
        self, command: EngineCommand, facts: BlockFacts
    ) -> tuple[list[LaneNote], list[OutputNote]]:
        """Follow a command, and return the entries of its batch and its outputs, each with its expectation.

        facts: the engine's, after the command.
        """
        bearer = self.bearers.get(getattr(command, "request", ""))
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, More) and bearer is not None:
            bearer.turns.append((self._tokens(command), command.max_tokens))
            self._start_next_turn(bearer)
        elif isinstance(command, End) and bearer is not None:
            bearer.turns.append(None)
            self._start_next_turn(bearer)
        elif isinstance(command, Abort) and bearer is not None:
            self._remove(bearer)
        elif isinstance(command, Fail) and self.config.fail_requests and facts.host is not None:
            for name in facts.host.failed:
                self.bearers[name].failed = True
        elif isinstance(command, LoadAdapter):
            self.loaded.load_adapter(command.adapter)
        elif isinstance(command, Update):
            self._drop_failed_loads(facts)
            return [], self._take_results(facts)
        self._mark_preempted(facts)
        if isinstance(command, NewWeights) and facts.reset:
            self._replace_weights()
        self._note_forks(facts)  # before the batch: a parent goes on in it
        return self._launch_entries(facts), self._outputs_without_results(
            {output.request: output for output in facts.outputs}
        )

    def _add(self, command: Add) -> None:
        source = self.loaded.source(command.adapter, command.salt)
        self.sources[source] = None
        text: list[int] = []
        stamps: list[int] = []
        extend(text, stamps, self._tokens(command), source.origin)
        self.bearers[command.request] = Bearer(
            command.request, text, stamps, command.max_tokens, command.resumable, source=source,
            children=tuple(child_name(command.request, number) for number in range(command.children)),
        )  # fmt: skip

    def _note_forks(self, facts: BlockFacts) -> None:
        """Add the children that the engine has forked off, and those that are due: their parent samples.

        A child has its parent's text. If it has blocks, it also has the parent's KV, and continues there. A
        parent that is aborted before has no children.
        """
        for bearer in list(self.bearers.values()):
            due = any(flight.sampled for flight in bearer.flights)
            new = facts.requests.keys() - self.bearers.keys()
            forked = [name for name in bearer.children if due or name in new]
            bearer.children = tuple(name for name in bearer.children if name not in forked)
            for name in forked:
                fact = facts.requests.get(name)
                holds = fact is not None and any(map(any, fact.tables))
                child = Bearer(
                    name, [*bearer.text], [*bearer.stamps], bearer.max_tokens, resumable=False,
                    computed=bearer.computed if holds else None, source=bearer.source,
                )  # fmt: skip
                # a name that a client has used again: the request that has it goes on
                self.bearers.setdefault(name, child)

    def _replace_weights(self) -> None:
        """Drop all KV. Running requests compute their text again with the new weights."""
        self.loaded.replace_weights()
        for bearer in self.bearers.values():
            source = self.loaded.source(bearer.source.adapter, bearer.source.salt)
            self.sources[source] = None
            bearer.compute_again(source)

    def _mark_preempted(self, facts: BlockFacts) -> None:
        """Mark the results in flight of preempted requests as stale. A paused request keeps its KV, and one
        that is swapped a copy; both compute their last token again."""
        for name, fact in facts.requests.items():
            bearer = self.bearers.get(name)
            if bearer is None or bearer.computed is None:
                continue
            lost = fact.status == "PREEMPTED" or name in facts.released
            if lost or fact.status in ("PAUSED", "SWAPPED"):
                bearer.computed = None if lost else min(bearer.computed, len(bearer.text) - 1)
                for flight in bearer.flights:
                    flight.stale = True

    def _drop_failed_loads(self, facts: BlockFacts) -> None:
        """Drop the KV of requests that computed from blocks of a failed load, once the load is reported to
        the engine."""
        lost = frozenset(facts.host.lost if facts.host is not None else ())
        for bearer in self.bearers.values():
            reported = [f for f in bearer.flights if f.void and not f.stale and not f.uses & lost]
            if reported:
                bearer.computed = None
                bearer.failed = self.config.fail_requests
            for flight in reported:
                flight.stale = True

    def _tokens(self, command: Add | More) -> list[int]:
        self._sent += 1
        return client_tokens(command.prompt, command.tokens, self._sent)

    def _remove(self, bearer: Bearer) -> None:
        bearer.gone = True
        bearer.computed = None
        self.bearers.pop(bearer.name, None)

    def _start_next_turn(self, bearer: Bearer) -> None:
        """Start the next turn of an idle session. The last output token has no KV, so the turn drops it."""
        if not bearer.idle or not bearer.turns:
            return
        turn = bearer.turns.popleft()
        if turn is None:
            self._remove(bearer)
            return
        tokens, max_tokens = turn
        self.discarded.add(bearer.stamps[-1])
        del bearer.text[-1]
        del bearer.stamps[-1]
        extend(bearer.text, bearer.stamps, tokens)
        bearer.idle = False
        bearer.outputs = 0
        bearer.max_tokens = max_tokens
        bearer.turned = True

    def _launch_entries(self, facts: BlockFacts) -> list[LaneNote]:
        """Note the batch that the engine runs as in flight, and return its entries, each with its request's
        text up to there. Entries of unknown requests are left out."""
        notes = []
        batch = []
        for lane in facts.lanes:
            bearer = self.bearers.get(lane.request)
            if bearer is None:  # BLK-5 reports it
                continue
            text, stamps = bearer.ahead()
            fresh = bearer.computed is None
            written = self._blocks_written(lane)
            void = facts.host is not None and not written.isdisjoint(facts.host.lost)
            computed = bearer.computed or 0
            notes.append(
                LaneNote(
                    lane,
                    fresh=fresh,
                    turned=bearer.turned,
                    text=text,
                    stamps=stamps,
                    computed=computed,
                    void=void,
                    discarded=self.discarded,
                )
            )
            end = lane.start + len(lane.tokens) - lane.drafts
            bearer.computed = end + max(0, len(lane.sampled) - 1)
            bearer.turned = False
            context = stamps[end - 1] if 0 < end <= len(stamps) else -1
            uses = written.union(*facts.copies)
            flight = Flight(context, lane.sampled, uses, void=void)
            bearer.flights.append(flight)
            batch.append((bearer, flight))
        # a step of a connector alone has no entries
        if facts.lanes or facts.steps_in_flight > len(self.batches):
            self.batches.append(batch)
        return notes

    def _blocks_written(self, lane: Lane) -> frozenset[int]:
        """Return the blocks that an entry writes, without the null block."""
        blocks: set[int] = set()
        for group, row in zip(self.config.groups, lane.tables):
            if group.state:
                continue
            end = lane.start + len(lane.tokens)
            written = group.entries_of(group.first_kept(lane.start, end), end)
            blocks.update(row[at] for at in written if at < len(row))
        blocks.update(block for use in lane.states for block, _ in use.writes)
        return frozenset(blocks - {0})

    @property
    def in_use(self) -> frozenset[int]:
        """The blocks that steps in flight write or copy."""
        return frozenset().union(*(flight.uses for batch in self.batches for _, flight in batch))

    def _take_results(self, facts: BlockFacts) -> list[OutputNote]:
        """Take the results of the oldest batch in flight: return the expected outputs beside the engine's,
        extend the texts and end turns."""
        outputs_by_request = {output.request: output for output in facts.outputs}
        notes = []
        if self.batches:
            for bearer, flight in self.batches.popleft():
                if bearer.gone:
                    continue  # another request may have its name now
                bearer.flights.remove(flight)
                tokens, ends = self._tokens_for_client(bearer, () if flight.void else flight.sampled)
                ends = ends or (flight.void and bearer.failed)
                current = flight.context == (
                    bearer.stamps[-1] if bearer.stamps else bearer.source.origin
                )
                output = outputs_by_request.pop(bearer.name, None)
                notes.append(OutputNote(bearer.name, output, tokens, ends, current, flight.stale))
                if output is not None and output.tokens:
                    extend(bearer.text, bearer.stamps, output.tokens)
                    bearer.outputs += len(output.tokens)
                    if ends:
                        self._end_turn(bearer)
                elif output is not None and output.finished and bearer.failed:
                    self._remove(bearer)
        return notes + self._outputs_without_results(outputs_by_request)

    def _outputs_without_results(self, outputs: dict[str, Output]) -> list[OutputNote]:
        """Return outputs without a sampled token: the end of a request with a failed load."""
        notes = []
        for name, output in outputs.items():
            bearer = self.bearers.get(name)
            ends = bearer is not None and bearer.failed
            notes.append(OutputNote(name, output, (), ends, current=False, optional=False))
            if ends and output.finished:
                self._remove(self.bearers[name])
        return notes

    def _tokens_for_client(self, bearer: Bearer, sampled: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        """Return the sampled tokens that a client gets, and whether the turn ends with them."""
        for count, token in enumerate(sampled, 1):
            outputs = bearer.outputs + count
            length = len(bearer.text) + count
            if (
                token == STOP_TOKEN
                or outputs >= bearer.max_tokens
                or length >= self.config.max_model_len
            ):
                return tuple(sampled[:count]), True
        return tuple(sampled), False

    def _end_turn(self, bearer: Bearer) -> None:
        for flight in bearer.flights:
            flight.stale = True
        if not bearer.resumable:
            self._remove(bearer)
            return
        if bearer.computed is not None:
            bearer.computed = min(bearer.computed, len(bearer.text) - 1)
        bearer.idle = True
        self._start_next_turn(bearer)
