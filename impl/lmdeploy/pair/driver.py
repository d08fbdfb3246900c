"""The driver of a pair of LMDeploy: executes commands on two servers of a release, and gathers the facts.

`python -m impl.lmdeploy.pair.driver ROOT NAME` is the worker of a release as a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from impl.adapter import Capabilities, UnusableImplementation
from impl.lmdeploy.pair.pulled import MigrationTransfer
from impl.lmdeploy.pair.server import LMDeployServer
from impl.self_scheduling.release_system import serve_driver
from impl.vocabulary import CommandRefused, require, well_formed
from reference.blocks.commands import Schedule, Update, client_tokens
from reference.commands import Done, Outcome, Prompt, Reason, Refused
from reference.pairs.commands import (
    Advance, Cancel, Deliver, Drop, Forward, Land, Lose, Move, PairCommand, Prefill, Serve,
)  # fmt: skip
from reference.pairs.config import DECODE, HEARTBEAT, PREFILL, SERVERS, PairConfig
from reference.pairs.facts import (
    PairFacts, PairMessage, PairReader, PairTransfer, Promise, ReaderState,
)  # fmt: skip
from reference.tiers.commands import Tick


class LMDeployPair:
    """Two servers of the release under `root`, in this process."""

    # The system in the parent process has the real values (impl.lmdeploy.loading).
    capabilities = Capabilities()
    config: PairConfig
    _prompts: dict[str, list[int]]
    _prefills: set[str]
    _answered_at: dict[str, float]
    _dropped_prefills: set[str]
    _readers: dict[str, str]
    _reader_sessions: dict[str, int]
    _clock: float
    _prompts_sent: int
    _scheduled_servers: set[str]

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.servers = {name: LMDeployServer(root, name) for name in SERVERS}
        self._commands: dict[type, Callable[[Any], Outcome | None]] = {
            Prefill: self._prefill, Forward: self._forward, Drop: self._drop, Serve: self._serve,
            Cancel: self._cancel, Advance: self._advance, Move: self._move, Land: self._land,
            Lose: self._lose, Deliver: self._deliver, Tick: self._tick,
        }  # fmt: skip

    def reset(self, geometry: PairConfig) -> None:
        """Start both servers with an empty network. Raises UnusableImplementation for sizes that LMDeploy is
        not driven with."""
        _check_sizes(geometry)
        self.config = geometry
        for name, server in self.servers.items():
            server.reset(geometry.of(name))
        self._prompts = {}
        self._prefills = set()  # requests of P for D
        self._answered_at = {}
        self._dropped_prefills = set()
        self._readers = {}  # request of D -> request of P whose KV it takes over
        self._reader_sessions = {}  # of the readers
        self._clock = 0.0
        self._prompts_sent = 0
        self._scheduled_servers = set()  # servers that have made a batch since the clock moved

    def apply(self, command: PairCommand) -> Outcome:
        """Execute a command, or refuse it."""
        for server in self.servers.values():
            server.clear_step_facts()
        carry_out = self._commands.get(type(command))
        if carry_out is None:  # no handshake, no push, no reset of a cache
            return Refused(Reason.UNFAITHFUL)
        try:
            outcome = carry_out(command) or Done()
        except CommandRefused as refused:
            return Refused(refused.reason)
        for name in self.servers[PREFILL].answers.keys() - self._answered_at.keys():
            self._answered_at[name] = self._clock
        self.servers[PREFILL].free_what_was_read()
        self.servers[DECODE].run_migrations()
        return outcome

    def close(self) -> None:
        """Do nothing: the pair has no resources outside of this process."""

    # Clients and the proxy

    def _server(self, name: str) -> LMDeployServer:
        require(name in self.servers, Reason.UNKNOWN_REQUEST)
        return self.servers[name]

    def _prompt_tokens(self, name: str, prompt: Prompt, tokens: int) -> list[int]:
        require(name not in self._prompts, Reason.REQUEST_EXISTS)
        require(well_formed(prompt) and tokens >= 0, Reason.BAD_LENGTH)
        return client_tokens(prompt, tokens, self._prompts_sent + 1)

    def _prefill(self, command: Prefill) -> Outcome:
        name = command.request
        tokens = self._prompt_tokens(name, command.prompt, command.tokens)
        outcome = self.servers[PREFILL].serve(name, tokens, 1, asked=True)
        if isinstance(outcome, Done):
            self._prefills.add(name)
        return self._note_prompt(name, tokens, outcome)

    def _serve(self, command: Serve) -> Outcome:
        name = command.request
        tokens = self._prompt_tokens(name, command.prompt, command.tokens)
        outcome = self._server(command.server).serve(name, tokens, command.max_tokens)
        return self._note_prompt(name, tokens, outcome)

    def _note_prompt(self, name: str, tokens: list[int], outcome: Outcome) -> Outcome:
        if isinstance(outcome, Done):
            self._prompts_sent += 1
            self._prompts[name] = tokens
        return outcome

    def _forward(self, command: Forward) -> Outcome:
        name = command.request
        prefilled = command.of
        require(name not in self._prompts, Reason.REQUEST_EXISTS)
        require(
            prefilled in self._prefills and prefilled not in self._dropped_prefills, Reason.UNKNOWN_REQUEST
        )
        answer = self.servers[PREFILL].answers.get(prefilled)
        if answer is None:
            return Refused(Reason.WRONG_PHASE)
        require(prefilled not in self._readers.values(), Reason.WRONG_PHASE)
        decode = self.servers[DECODE]
        tokens = self._prompts[prefilled]
        outcome = decode.serve(name, tokens, command.max_tokens, answer=answer)
        if isinstance(outcome, Done):
            self._readers[name] = prefilled
            self._reader_sessions[name] = decode.sent
            self._prompts[name] = tokens
        return outcome

    def _drop(self, command: Drop) -> None:
        name = command.request
        require(name in self._answered_at and name not in self._dropped_prefills, Reason.UNKNOWN_REQUEST)
        require(name not in self._readers.values(), Reason.WRONG_PHASE)
        self._dropped_prefills.add(name)

    def _cancel(self, command: Cancel) -> Outcome:
        return self._server(command.server).cancel(command.request)

    # Loops

    def _advance(self, command: Advance) -> Outcome:
        server = self._server(command.server)
        if server.due:
            return server.advance(Update(command.drafts))
        outcome = server.advance(Schedule(command.accept, command.stop))
        if isinstance(outcome, Done):
            self._scheduled_servers.add(command.server)
        return outcome

    # The network

    def _transfer_at(self, jobs: list[MigrationTransfer], index: int) -> MigrationTransfer:
        require(0 <= index < len(jobs), Reason.EMPTY)
        return jobs[index]

    def _transfers(self) -> list[MigrationTransfer]:
        """Return the transfers under way."""
        return [job for job in self.servers[DECODE].migrations.transfers if not job.over]

    def _move(self, command: Move) -> None:
        self._copy_blocks(self._transfer_at([job for job in self._transfers() if not job.copied], command.at))

    def _copy_blocks(self, job: MigrationTransfer) -> None:
        """Move the bytes of a transfer."""
        memory, target = (self.servers[name].memory for name in SERVERS)
        for source, block in job.moves:
            group, slots = memory.get(source, (0, [0] * self.servers[PREFILL].block_size))
            target[block] = group, list(slots)
        job.copied = True

    def _land(self, command: Land) -> None:
        job = self._transfer_at(self._transfers(), command.at)
        if not job.copied:
            self._copy_blocks(job)
        job.over = True

    def _lose(self, command: Lose) -> None:
        job = self._transfer_at(self._transfers(), command.at)
        job.failed = job.over = True

    def _deliver(self, command: Deliver) -> None:
        messages = self.servers[DECODE].migrations.messages
        require(command.server == PREFILL and messages, Reason.EMPTY)
        self.servers[PREFILL].arrived.append(messages.popleft())

    def _tick(self, command: Tick) -> None:
        require(1 <= command.seconds <= HEARTBEAT, Reason.BAD_LENGTH)
        forwarded = {*self._readers.values(), *self._dropped_prefills}
        prefill = self.servers[PREFILL]
        due = [name for name in prefill.answers if name not in forwarded and prefill.keeps_kv_of(name)]
        looped = all(s.idle or name in self._scheduled_servers for name, s in self.servers.items())
        require(looped and not due and not self.servers[DECODE].migrations.messages, Reason.WRONG_PHASE)
        self._clock += command.seconds
        self._scheduled_servers.clear()
        self.servers[DECODE].migrations.wake()

    # Facts

    def view(self) -> PairFacts:
        """Return the facts of the pair after the last command."""
        prefill = self.servers[PREFILL]
        decode = self.servers[DECODE]
        readers = tuple(
            PairReader(name, prefilled, self._reader_state(name))
            for name, prefilled in self._readers.items()
        )
        self._forget_transfers(readers)
        requests = {answer.session: name for name, answer in prefill.answers.items()}
        names = {session: name for name, session in self._reader_sessions.items()}
        return PairFacts(
            prefill=prefill.view(),
            decode=decode.view(),
            promises=tuple(
                Promise(name, (answer.blocks,), self._answered_at[name], prefill.keeps_kv_of(name))
                for name, answer in prefill.answers.items()
            ),
            readers=readers,
            transfers=tuple(
                PairTransfer(
                    job.number,
                    names[job.session],
                    tuple((0, target, source) for source, target in job.moves),
                    copied=job.copied,
                    over=job.over,
                    failed=job.failed,
                )
                for job in decode.migrations.transfers
            ),
            messages=tuple(
                PairMessage(PREFILL, renews=False, requests=(requests[session],))
                for session in decode.migrations.messages
            ),
            clock=self._clock,
            idle=tuple(name for name, server in self.servers.items() if server.idle),
        )

    def _forget_transfers(self, readers: tuple[PairReader, ...]) -> None:
        """Forget ended transfers that no request waits for."""
        states = ReaderState.WAITS, ReaderState.LINGERS
        waiting = {self._reader_sessions[reader.request] for reader in readers if reader.state in states}
        transfers = self.servers[DECODE].migrations.transfers
        transfers[:] = [job for job in transfers if not job.over or job.session in waiting]

    def _reader_state(self, name: str) -> ReaderState:
        """Return the state of a request of D with respect to the KV that it takes over."""
        decode = self.servers[DECODE]
        session = self._reader_sessions[name]
        status = decode.status_of(session)
        if status is None:
            return ReaderState.GONE
        if status == "MIGRATION_WAITING":
            return ReaderState.GIVEN
        if status not in ("MIGRATION_READY", "MIGRATION_RUNNING"):
            return ReaderState.READ
        return ReaderState.WAITS if decode.is_served(session) else ReaderState.LINGERS


def _check_sizes(config: PairConfig) -> None:
    """Raise UnusableImplementation for sizes and an environment that LMDeploy has not as a pair."""
    for name in SERVERS:
        [group, *more] = config.of(name).groups
        if more or group.state or config.of(name).drafts:
            raise UnusableImplementation("lmdeploy+pair: KV goes over without states and drafts")
    if config.prefill.groups != config.decode.groups:
        raise UnusableImplementation("lmdeploy+pair: both servers have blocks of one size")
    if not config.first_token or config.push or config.late or config.shared:
        raise UnusableImplementation(
            "lmdeploy+pair: D takes P's first token over (first_token) and reads KV itself: no push, late or"
            " shared"
        )


if __name__ == "__main__":
    raise SystemExit(serve_driver(LMDeployPair))
