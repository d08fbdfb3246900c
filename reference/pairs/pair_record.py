"""The record of a pair's run: texts of its requests, leases, failures, and its progress.

It decides nothing. It follows what the environment did, and what the servers scheduled and sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from reference.blocks.clauses import BlockStep
from reference.blocks.commands import (
    Add, EngineCommand, More, ResetConnector, Schedule, Update, client_tokens,
)  # fmt: skip
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts, HostFacts, Transfer
from reference.blocks.request_texts import LaneNote, OutputNote, RequestTexts
from reference.commands import Abort
from reference.pairs.commands import (
    Advance, Cancel, CompleteHost, CopyHost, Deliver, Drop, Forget, Forward, Lose, PairCommand, Prefill,
    ResetHost, Serve, Shake, Write,
)  # fmt: skip
from reference.pairs.config import DECODE, LEASE, PREFILL, RENEWAL, SERVERS, PairConfig
from reference.pairs.facts import PairFacts, Promise, PairReader, ReaderState
from reference.pairs.progress import PairProgress
from reference.tiers.commands import Complete, Copy, ResetCache, Tick

NETWORK = Copy(load=True)  # in the place of a server's command where it has none
# On a server with host memory: the first number of transfers between the servers.
NETWORK_JOBS = 1000
NOTHING = BlockFacts((), (), (), (), {}, {})
START = PairFacts(NOTHING, NOTHING)


class ServerTexts(RequestTexts):
    """Texts of the requests of one server.

    prompts: prompts of the whole pair, by request: a forwarded request has the prompt of another.
    shortened: requests whose last prompt token this server leaves to its peer, because a recurrent
        state cannot go back to the token before.
    """

    def __init__(
        self,
        config: EngineConfig,
        prompts: dict[str, list[int]],
        shortened: Container[str] = (),
    ) -> None:
        super().__init__(config)
        self._prompts = prompts
        self._shortened = shortened

    def _tokens(self, command: Add | More) -> list[int]:
        tokens = list(self._prompts[command.request])
        if len(tokens) > 1 and command.request in self._shortened:
            del tokens[-1]
        return tokens


@dataclass(slots=True)
class Lease:
    """The time for which P must keep a promise.

    ends: the latest end (seconds).
    rounds: batches that P has scheduled since then.
    """

    ends: float
    rounds: int = 0


@dataclass(slots=True)
class PairRecord:
    """The record of one run."""

    config: PairConfig
    #: tokens of each request's prompt
    prompts: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, ServerTexts] = field(init=False)
    #: requests of P whose KV is for D
    asked: set[str] = field(default_factory=set)
    #: requests of P whose answer the proxy does not forward
    dropped: set[str] = field(default_factory=set)
    #: the token that P has sampled for each of its requests
    first_tokens: dict[str, int] = field(default_factory=dict)
    #: requests of P whose KV did not reach its reader because of a network failure
    faulted: set[str] = field(default_factory=set)
    #: leases by request of P
    leases: dict[str, Lease] = field(default_factory=dict)
    #: batches and writing turns of each server since the pair came to rest
    quiet: Counter[tuple[str, type]] = field(default_factory=Counter)
    #: batches of each server since the clock moved
    loops: Counter[str] = field(default_factory=Counter)
    #: commands by kind and server
    done: Counter[tuple[type, str]] = field(default_factory=Counter)
    progress: PairProgress = field(default_factory=PairProgress)
    _sent: int = 0
    _renewed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        shortened = self.asked if self.config.recurrent else ()
        self.texts = {
            PREFILL: ServerTexts(self.config.prefill, self.prompts, shortened),
            DECODE: ServerTexts(self.config.decode, self.prompts),
        }

    # -- what a command is to a server ------------------------------------------------------------

    def served(self, command: PairCommand, before: PairFacts) -> tuple[str, EngineCommand] | None:
        """Return the server that a command is for, and the engine command that it runs there; None for
        a command of the network."""
        match command:
            case Prefill(request, tokens, prompt, priority):
                return PREFILL, Add(request, 1, tokens, prompt, priority)
            case Forward(request, _, max_tokens, priority):
                return DECODE, Add(request, max_tokens, priority=priority)
            case Serve(server, request, max_tokens, tokens, prompt, priority):
                return server, Add(request, max_tokens, tokens, prompt, priority)
            case Cancel(server, request):
                return server, Abort(request)
            case Forget(server, running):
                return server, ResetCache(running)
            case CopyHost(server, load):
                return server, Copy(load)
            case CompleteHost(server, load):
                return server, Complete(load)
            case ResetHost(server):
                return server, ResetConnector()
            case Advance(server, accept, stop, drafts):
                facts = before.of(server)
                has_results_due = facts.in_step or facts.results_due
                return server, Update(drafts) if has_results_due else Schedule(accept, stop)
        return None

    # -- following --------------------------------------------------------------------------------

    def follow(
        self, command: PairCommand, before: PairFacts, after: PairFacts
    ) -> dict[str, BlockStep]:
        """Record a command that was carried out, and return the step of each server."""
        self.done[type(command), getattr(command, "server", "")] += 1
        self._note_texts(command)
        is_told = self._note_network(command, before)
        served = self.served(command, before)
        steps = {}
        for server in SERVERS:
            is_served = served is not None and served[0] == server
            ran = served[1] if served is not None and is_served else NETWORK
            self._note_failed_loads(server, after)
            notes = self.texts[server].follow(ran, after.of(server))
            steps[server] = self._step(server, ran, before, after, notes)
        for output in after.prefill.outputs:
            if output.tokens:
                self.first_tokens.setdefault(output.request, output.tokens[0])
        self._note_leases(served, after)
        self._note_quiet(command, served, before, after)
        self.progress.follow(command, served, after, self._pending_work(after), is_told)
        return steps

    def broken_off(
        self, command: PairCommand, before: PairFacts, after: PairFacts
    ) -> dict[str, BlockStep]:
        """Return the steps of a command at which the pair failed."""
        served = self.served(command, before) if before is not START else None
        return {
            server: self._step(
                server,
                served[1] if served is not None and served[0] == server else NETWORK,
                before, after, ([], []),
            )
            for server in SERVERS
        }  # fmt: skip

    def _step(
        self,
        server: str,
        command: EngineCommand,
        before: PairFacts,
        after: PairFacts,
        notes: tuple[list[LaneNote], list[OutputNote]],
    ) -> BlockStep:
        texts = self.texts[server]
        was, now = (self._with_network(server, facts) for facts in (before, after))
        return BlockStep(
            texts.config, command, False, was, now, *notes, texts.bearers, texts.in_use
        )

    def _note_texts(self, command: PairCommand) -> None:
        if isinstance(command, Prefill | Serve):
            self._sent += 1
            tokens = client_tokens(command.prompt, command.tokens, self._sent)
            self.prompts[command.request] = tokens
            if isinstance(command, Prefill):
                self.asked.add(command.request)
        elif isinstance(command, Forward):
            self.prompts[command.request] = self.prompts[command.of]
            if self.config.first_token:
                self.prompts[command.request] = [*self.prompts[command.of], self.first_tokens[command.of]]
        elif isinstance(command, Drop):
            self.dropped.add(command.request)

    def _note_failed_loads(self, server: str, after: PairFacts) -> None:
        """End the request of a load that fails, where that is the policy."""
        if server == DECODE and self.config.decode.fail_requests:
            host = after.decode.host
            bearers = self.texts[server].bearers
            if host is not None:
                for name in host.failed:
                    if name in bearers:
                        bearers[name].failed = True

    def _note_network(self, command: PairCommand, before: PairFacts) -> bool:
        """Record failures and heartbeats that have arrived. Returns whether another message has
        arrived."""
        if isinstance(command, Shake) and command.fails:
            # Of a recurrent model D may have had all itself, and no way yet to tell P.
            over = () if self.config.recurrent else (ReaderState.READ,)
            self.faulted |= {reader.of for reader in before.readers if reader.state not in over}
        elif isinstance(command, Lose):
            name = before.under_way[command.at].reader
            self.faulted |= {reader.of for reader in before.readers if reader.request == name}
        elif isinstance(command, Deliver):
            message = next(each for each in before.messages if each.to == command.server)
            self._renewed |= {*message.requests} if message.renews else set()
            return not message.renews
        return False

    def _note_leases(self, served: tuple[str, EngineCommand] | None, after: PairFacts) -> None:
        for promise in after.promises:
            lease = self.leases.setdefault(promise.request, Lease(promise.at + LEASE))
            if not self.config.late and self._is_awaited(after, promise):
                lease.ends = max(lease.ends, after.clock + RENEWAL)
                lease.rounds = 0
        if served is None or served[0] != PREFILL or not isinstance(served[1], Schedule):
            return
        for name in self._renewed & self.leases.keys():
            lease = self.leases[name]
            if not lease.rounds:  # else it has ended
                lease.ends = max(lease.ends, after.clock + RENEWAL)
        self._renewed.clear()
        for lease in self.leases.values():
            if after.clock >= lease.ends:
                lease.rounds += 1

    def _is_awaited(self, facts: PairFacts, promise: Promise) -> bool:
        """Return whether a request of D waits for promised KV."""
        waits = ReaderState.GIVEN, ReaderState.WAITS
        return any(reader.state in waits for reader in facts.readers_of(promise.request))

    def _note_quiet(
        self,
        command: PairCommand,
        served: tuple[str, EngineCommand] | None,
        before: PairFacts,
        after: PairFacts,
    ) -> None:
        if not (self._is_at_rest(before) and self._is_at_rest(after)):
            self.quiet.clear()
        elif isinstance(command, Write):
            self.quiet[command.server, Write] += 1
        elif served is not None and isinstance(served[1], Schedule):
            self.quiet[served[0], Schedule] += 1
        elif not isinstance(command, Advance):
            self.quiet.clear()
        if isinstance(command, Tick):
            self.loops.clear()
        elif served is not None and isinstance(served[1], Schedule):
            self.loops[served[0]] += 1

    # -- what follows from it ---------------------------------------------------------------------

    def _is_at_rest(self, facts: PairFacts) -> bool:
        """Return whether no server has a request, nothing is under way, and no promise has a reader."""
        busy = any(facts.of(name).requests or facts.of(name).steps_in_flight for name in SERVERS)
        busy = busy or any(facts.of(name).kv_moves for name in SERVERS)
        needed = any(self.is_needed(facts, promise) for promise in facts.promises)
        return facts.network_rests and not busy and not needed

    def is_quiet(self, facts: PairFacts) -> bool:
        """Return whether the pair is at rest, each running server loop has scheduled twice since, and
        with push each writing thread has had two turns."""
        loops = all(name in facts.idle or self.quiet[name, Schedule] >= 2 for name in SERVERS)
        written = all(self.quiet[name, Write] >= 2 for name in SERVERS if self.config.push)
        return loops and written and self._is_at_rest(facts)

    def _pending_work(self, facts: PairFacts) -> list[tuple[str, str]]:
        """Return the pending work of the proxy and of the writing threads."""
        writers = SERVERS if self.config.push else ()
        turns = [(f"writes {name}", str(self.done[Write, name])) for name in writers]
        return [*turns, *(("proxy", name) for name in self.unforwarded(facts))]

    def unforwarded(self, facts: PairFacts) -> list[str]:
        """Return the requests of P whose answer the proxy may still forward or drop."""
        names = [promise.request for promise in facts.promises if promise.held]
        return [name for name in names if name not in self.dropped and not facts.readers_of(name)]

    def is_needed(self, facts: PairFacts, promise: Promise) -> bool:
        """Return whether a request reads what was promised, or may yet be told to."""
        if promise.request in self.dropped or self._lease_ended(facts, promise):
            return False
        readers = facts.readers_of(promise.request)
        return not readers or any(_will_read(facts, reader) for reader in readers)

    def _lease_ended(self, facts: PairFacts, promise: Promise) -> bool:
        """Return whether the promise's lease has ended. Where nobody is late, a lease does not end
        while it is needed."""
        lease = self.leases.get(promise.request)
        return self.config.late and lease is not None and facts.clock >= lease.ends

    def _with_network(self, server: str, facts: PairFacts) -> BlockFacts:
        """Return the facts of a server with the network as its second tier, besides its host memory: D loads
        from the blocks of P. Beside chunks of the host these are numbered from the end, block 0 being -1."""
        server_facts = facts.of(server)
        host = server_facts.host or HostFacts(0, (), (), (), ())
        memory: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...] = ()
        if server == PREFILL:
            jobs = self._promised_stores(facts)
        else:
            jobs = _decode_loads(facts)
            memory = tuple((block,) for block in facts.prefill.memory)
        if self.config.of(server).host_chunks:
            jobs = [_beside_host(job) for job in jobs]
            memory = (*host.memory, *memory[::-1])
        return server_facts._replace(
            host=host._replace(memory=memory, transfers=(*host.transfers, *jobs))
        )

    def _promised_stores(self, facts: PairFacts) -> list[Transfer]:
        """Return the promises of P as stores, which complete once no request needs them."""
        jobs = []
        for number, promise in enumerate(facts.promises):
            if promise.held:
                over = not self.is_needed(facts, promise)
                parts = [
                    (group, block, 0, 0)
                    for group, row in enumerate(promise.blocks)
                    for block in row
                    if block
                ]
                jobs.append(
                    Transfer(
                        number,
                        load=False,
                        parts=tuple(parts),
                        submitted=True,
                        copied=over,
                        completed=over,
                    )
                )
        return jobs


def _beside_host(job: Transfer) -> Transfer:
    """Return a transfer between the servers, with numbers that no transfer and no chunk of a host has."""
    parts = tuple((group, block, -1 - chunk, at) for group, block, chunk, at in job.parts)
    return job._replace(job=NETWORK_JOBS + job.job, parts=parts)


def _will_read(facts: PairFacts, reader: PairReader) -> bool:
    if reader.state is ReaderState.GIVEN:
        return True
    jobs = facts.transfers_of(reader.request)
    to_come = not jobs or any(not (job.copied or job.over) for job in jobs)
    return reader.state is ReaderState.WAITS and to_come


def _decode_loads(facts: PairFacts) -> list[Transfer]:
    """Return the loads of D, one for each reader. KV for a reader that has gone may hold anything: only
    its destination matters."""
    jobs = []
    known = [reader.request for reader in facts.readers]
    for number, reader in enumerate(facts.readers):
        own_transfers = facts.transfers_of(reader.request)
        waits = reader.state in (ReaderState.WAITS, ReaderState.LINGERS)
        if not own_transfers and waits:
            jobs.append(Transfer(number, load=True, parts=()))
        elif own_transfers and (waits or any(not job.over for job in own_transfers)):
            jobs.append(_as_transfer(number, own_transfers, wanted=reader.state is ReaderState.WAITS))
    for job in facts.under_way:
        if job.reader not in known:
            jobs.append(_as_transfer(len(known) + job.number, (job,), wanted=False))
    return jobs


def _as_transfer(number: int, jobs: tuple, wanted: bool) -> Transfer:  # type: ignore[type-arg]
    parts = tuple((*move, 0) for job in jobs for move in job.moves)
    read = not wanted or all(job.copied or job.over for job in jobs)
    return Transfer(
        number,
        load=True,
        parts=parts,
        submitted=True,
        copied=read,
        completed=all(job.over for job in jobs),
    )
