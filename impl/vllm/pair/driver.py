"""The driver of a pair: executes commands on two servers of a release, and gathers the facts.

`python -m impl.vllm.pair.driver ROOT` is the worker of a release as a pair.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from impl.adapter import Capabilities, UnusableImplementation
from impl.process.failures import Guarded, SystemFailed
from impl.process.worker import serve
from impl.vllm.pair.loading import Factory, Layout, install
from impl.vllm.pair.memory import WORDS
from impl.vllm.pair.network import NETWORK, START, Clock, NixlState, PostedTransfer
from impl.vllm.pair.both_connectors import nixl_of
from impl.vllm.pair.server import WAITS, PairServer
from impl.vllm.pair.states import page_tokens, words_of_state
from impl.vllm.pair.tables import kept_records
from impl.vocabulary import CommandRefused, require, well_formed
from reference.blocks.commands import ResetConnector, Schedule, Update, client_tokens
from reference.commands import Abort, Done, Outcome, Prompt, Reason, Refused
from reference.pairs.commands import (
    Advance, Cancel, CompleteHost, CopyHost, Deliver, Drop, Forget, Forward, Land, Lose, Move, PairCommand,
    Prefill, ResetHost, Serve, Shake, Write,
)  # fmt: skip
from reference.pairs.config import DECODE, HEARTBEAT, PREFILL, SERVERS, PairConfig
from reference.pairs.facts import (
    PairMessage,
    PairFacts,
    PairTransfer,
    Promise,
    PairReader,
    ReaderState,
)
from reference.tiers.commands import Complete, Copy, ResetCache, Tick

ASKS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip

class PairDriver:
    """Two servers of the release under `root`, in this process."""

    # The system in the parent process has the real values (impl.vllm.system).
    name = ""
    capabilities = Capabilities()
    config: PairConfig
    _prompts: dict[str, list[int]]
    _asked: set[str]
    _promises: dict[str, tuple[tuple[tuple[int, ...], ...], float]]
    _dropped: set[str]
    _readers: dict[str, str]
    _owners: dict[PostedTransfer, str]
    _used: set[str]
    _sent: int
    _looped: set[str]

    def __init__(self, root: Path) -> None:
        install(root)
        self.servers = {name: PairServer(root, name) for name in SERVERS}
        self._commands: dict[type, Callable[[Any], Outcome | None]] = {
            Prefill: self._prefill, Forward: self._forward, Drop: self._drop, Serve: self._serve,
            Cancel: self._cancel, Forget: self._forget, Advance: self._advance, Write: self._write,
            Shake: self._shake, Move: self._move, Land: self._land, Lose: self._lose,
            Deliver: self._deliver, Tick: self._tick, CopyHost: self._copy_host,
            CompleteHost: self._complete_host, ResetHost: self._reset_host,
        }  # fmt: skip

    def reset(self, geometry: PairConfig) -> None:
        """Start both servers with an empty network."""
        self.config = geometry
        _check_blocks(geometry)
        NETWORK.restart()
        Factory.push = geometry.push
        Layout.kernel_blocks = _kernel_blocks(geometry)
        for name, server in self.servers.items():
            server.overlap = geometry.overlaps(name)
            server.host_first = geometry.host_first
            server.reset(geometry.of(name))
        self._prompts = {}
        self._asked = set()  # requests of P for D
        self._promises = {}
        self._dropped = set()
        self._readers = {}  # request of D -> request of P whose KV it reads
        self._owners = {}  # transfer -> the engine's name of its request at D
        self._used = set()  # names of requests
        self._sent = 0
        self._looped = set()  # servers that have scheduled since the clock moved

    def apply(self, command: PairCommand) -> Outcome:
        """Execute a command, or refuse it."""
        for server in self.servers.values():
            server.clear_step_facts()
        try:
            outcome = self._commands[type(command)](command) or Done()
        except CommandRefused as refused:
            return Refused(refused.reason)
        self._note_promises()
        self._note_owners()
        for server in self.servers.values():
            server.note_host_loads()
        return outcome

    def close(self) -> None:
        """Do nothing: the pair has no resources outside of this process."""

    # -- clients and the proxy --------------------------------------------------------------------

    def _server(self, name: str) -> PairServer:
        require(name in self.servers, Reason.UNKNOWN_REQUEST)
        return self.servers[name]

    def _prompt(self, name: str, prompt: Prompt, tokens: int) -> list[int]:
        require(name not in self._used, Reason.REQUEST_EXISTS)
        require(well_formed(prompt) and tokens >= 0, Reason.BAD_LENGTH)
        return client_tokens(prompt, tokens, self._sent + 1)

    def _accepted(self, name: str, tokens: list[int], outcome: Outcome) -> Outcome:
        if isinstance(outcome, Done):
            self._used.add(name)
            self._prompts[name] = tokens
        return outcome

    def _ident(self, base: str) -> str:
        """Return a new engine name for a request: its name at the proxy and a suffix, as the front end
        makes it."""
        return f"{base}-{len(self._used):08x}"

    def _prefill(self, command: Prefill) -> Outcome:
        name = command.request
        server = self.servers[PREFILL]
        tokens = self._prompt(name, command.prompt, command.tokens)
        outcome = server.serve(name, self._ident(name), tokens, 1, command.priority, dict(ASKS))
        if isinstance(outcome, Done):
            self._sent += 1
            self._asked.add(name)
        return self._accepted(name, tokens, outcome)

    def _serve(self, command: Serve) -> Outcome:
        name = command.request
        server = self._server(command.server)
        tokens = self._prompt(name, command.prompt, command.tokens)
        outcome = server.serve(
            name, self._ident(name), tokens, command.max_tokens, command.priority, None
        )
        if isinstance(outcome, Done):
            self._sent += 1
        return self._accepted(name, tokens, outcome)

    def _forward(self, command: Forward) -> Outcome:
        name = command.request
        prefilled = command.of
        require(name not in self._used, Reason.REQUEST_EXISTS)
        require(
            prefilled in self._asked and prefilled not in self._dropped, Reason.UNKNOWN_REQUEST
        )
        require(self.config.shared or prefilled not in self._readers.values(), Reason.WRONG_PHASE)
        parameters = self._parameters(prefilled)
        ident = self._ident(prefilled if self.config.push else name)
        tokens = list(self._prompts[prefilled])
        outcome = self.servers[DECODE].serve(
            name, ident, tokens, command.max_tokens, command.priority, parameters
        )
        if isinstance(outcome, Done):
            self._readers[name] = prefilled
        return self._accepted(name, tokens, outcome)

    def _parameters(self, prefilled: str) -> dict[str, Any]:
        """Return the transfer parameters that the proxy sends to D.

        In pull mode they are P's answer; in push mode they name the server at which D registers its blocks.
        prefilled: the request of P.
        """
        prefill = self.servers[PREFILL]
        if not self.config.push:
            require(prefilled in self._promises, Reason.WRONG_PHASE)
            return dict(prefill.answers[prefilled])
        connector = nixl_of(prefill.scheduler.connector).connector_scheduler
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": connector.engine_id,
            "remote_request_id": prefill.ident(prefilled), "remote_host": connector.side_channel_host,
            "remote_port": connector.side_channel_port, "tp_size": 1,
        }  # fmt: skip

    def _drop(self, command: Drop) -> None:
        name = command.request
        require(name in self._promises and name not in self._dropped, Reason.UNKNOWN_REQUEST)
        require(name not in self._readers.values(), Reason.WRONG_PHASE)
        self._dropped.add(name)

    def _cancel(self, command: Cancel) -> Outcome:
        return self._server(command.server).apply(Abort(command.request))

    # -- loops ------------------------------------------------------------------------------------

    def _forget(self, command: Forget) -> Outcome:
        return self._server(command.server).apply(ResetCache(command.running))

    def _advance(self, command: Advance) -> Outcome:
        server = self._server(command.server)
        if server.due:
            return server.apply(Update(command.drafts))
        outcome = server.apply(Schedule(command.accept, command.stop))
        if isinstance(outcome, Done):
            self._looped.add(command.server)
        return outcome

    def _write(self, command: Write) -> None:
        server = self._server(command.server)
        require(self.config.push, Reason.UNFAITHFUL)
        server.mover.write()

    # -- host memory ------------------------------------------------------------------------------

    def _copy_host(self, command: CopyHost) -> Outcome:
        return self._server(command.server).apply(Copy(command.load))

    def _complete_host(self, command: CompleteHost) -> Outcome:
        return self._server(command.server).apply(Complete(command.load))

    def _reset_host(self, command: ResetHost) -> Outcome:
        return self._server(command.server).apply(ResetConnector())

    # -- the network ------------------------------------------------------------------------------

    def _shake(self, command: Shake) -> None:
        handshakes = self._server(command.server).mover.handshakes
        ran = handshakes.run(command.fails)
        require(ran, Reason.EMPTY)
        error = handshakes.error
        handshakes.error = None
        if error is not None:
            raise error

    def _move(self, command: Move) -> None:
        self._nth([job for job in NETWORK.transfers_in_flight() if not job.copied], command.at).copy()

    def _land(self, command: Land) -> None:
        self._nth(NETWORK.transfers_in_flight(), command.at).land()

    def _lose(self, command: Lose) -> None:
        self._nth(NETWORK.transfers_in_flight(), command.at).state = NixlState.FAILED

    def _nth(self, jobs: list[PostedTransfer], index: int) -> PostedTransfer:
        require(0 <= index < len(jobs), Reason.EMPTY)
        return jobs[index]

    def _deliver(self, command: Deliver) -> None:
        agent = self._server(command.server).mover.agent
        delivered = NETWORK.deliver(agent.name)
        require(delivered, Reason.EMPTY)

    def _tick(self, command: Tick) -> None:
        require(command.seconds >= 1, Reason.BAD_LENGTH)
        if not self.config.late:
            require(command.seconds <= HEARTBEAT, Reason.BAD_LENGTH)
            forwarded = {*self._readers.values(), *self._dropped}
            due = [name for name in self._promises if name not in forwarded and self._held(name)]
            looped = all(s.idle or name in self._looped for name, s in self.servers.items())
            pending = due or NETWORK.messages or self._handshakes()
            require(looped and not pending, Reason.WRONG_PHASE)
        Clock.now += command.seconds
        self._looped.clear()

    # -- records of the pair ----------------------------------------------------------------------

    def _note_promises(self) -> None:
        """Note the blocks that P's new answers promise to D, with the time of the answer."""
        prefill = self.servers[PREFILL]
        for name in self._asked - self._promises.keys():
            answer = prefill.answers.get(name)
            if answer and answer.get("remote_block_ids"):
                blocks = tuple(tuple(row) for row in answer["remote_block_ids"])
                self._promises[name] = blocks, Clock.now - START

    def _note_owners(self) -> None:
        """Note for each posted transfer the request of D that it is for."""
        if self.config.push:
            worker = self.servers[PREFILL].mover.worker
            waiting = worker._sending_transfers
            agent = self.servers[PREFILL].mover.agent
        else:
            worker = self.servers[DECODE].mover.worker
            waiting = worker._recving_transfers
            agent = self.servers[DECODE].mover.agent
        for ident, handles in waiting.items():
            for handle in handles:
                job = agent.handles.get(handle)
                if job is not None:
                    self._owners.setdefault(job, self._owner(ident))

    def _owner(self, ident: str) -> str:
        """Return the engine's name at D of the request that a transfer is for, "" for none. ident: the
        engine's name under which the transfer was posted: that of D with pull, that of P with push."""
        if not self.config.push:
            return ident
        prefilled = self.servers[PREFILL].named(ident)
        names = [name for name, read in self._readers.items() if read == prefilled]
        return self.servers[DECODE].ident(names[0]) if names else ""

    # -- facts ------------------------------------------------------------------------------------

    def view(self) -> PairFacts:
        """Return the facts of the pair after the last command."""
        prefill = self.servers[PREFILL]
        decode = self.servers[DECODE]
        readers = tuple(
            PairReader(name, prefilled, self._state(name))
            for name, prefilled in self._readers.items()
        )
        return PairFacts(
            prefill=prefill.view() if self.config.prefill.host_chunks else prefill.view()._replace(host=None),
            decode=decode.view(),
            promises=tuple(
                Promise(name, blocks, at, self._held(name))
                for name, (blocks, at) in self._promises.items()
            ),
            readers=readers,
            transfers=tuple(self._transfers(readers)),
            messages=tuple(self._message(*each) for each in NETWORK.messages),
            handshakes=self._handshakes(),
            clock=Clock.now - START,
            idle=tuple(name for name, server in self.servers.items() if server.idle),
            records=tuple(kept_records(self.servers)),
        )

    def _held(self, name: str) -> bool:
        """Return whether P still holds the blocks that it has promised for a request."""
        prefill = self.servers[PREFILL]
        return prefill.ident(name) in prefill.scheduler.requests

    def _handshakes(self) -> tuple[str, ...]:
        return tuple(
            name for name, server in self.servers.items() for _ in server.mover.handshakes.tasks
        )

    def _state(self, name: str) -> ReaderState:
        decode = self.servers[DECODE]
        ident = decode.ident(name)
        request = decode.scheduler.requests.get(ident)
        if request is None:
            return ReaderState.GONE
        if request.is_finished():
            return ReaderState.LINGERS
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return ReaderState.GIVEN
        received = ident in decode.scheduler.finished_recving_kv_req_ids
        if request.status.name != WAITS or received or decode.loads_from_host(ident):
            return ReaderState.READ
        return ReaderState.WAITS

    def _transfers(self, readers: tuple[PairReader, ...]) -> list[PairTransfer]:
        """Return the transfers in flight, and the ended ones that the posting worker has not released or
        that D still waits for. Forget all others."""
        decode = self.servers[DECODE]
        waiting = {
            reader.request
            for reader in readers
            if reader.state in (ReaderState.WAITS, ReaderState.LINGERS)
        }
        under_way = []
        transfers = []
        managers = decode.scheduler.kv_cache_manager.coordinator.single_type_managers
        for job in NETWORK.transfers:
            ident = self._owners.get(job, "")
            name = decode.named(ident)
            if job.state is NixlState.IN_FLIGHT or not job.released or name in waiting:
                under_way.append(job)
                groups = {
                    block.block_id: group
                    for group, manager in enumerate(managers)
                    for block in manager.req_to_blocks.get(ident, ())
                }
                moves = tuple(dict.fromkeys(self._moves(job, groups)))
                over = job.state is not NixlState.IN_FLIGHT
                failed = job.state is NixlState.FAILED
                transfers.append(PairTransfer(job.number, name, moves, job.copied, over, failed))
        NETWORK.transfers[:] = under_way
        return transfers

    def _moves(self, job: PostedTransfer, groups: dict[int, int]) -> list[tuple[int, int, int]]:
        """Return the (group, target block, source block) of each region of a transfer."""
        prefill = self.servers[PREFILL]
        decode = self.servers[DECODE]
        moves = []
        for own, theirs, _ in job.pairs:
            if job.writes:
                decode_address = theirs
                prefill_address = own
            else:
                decode_address = own
                prefill_address = theirs
            target = decode.memory.block_at(decode_address)
            source = prefill.memory.block_at(prefill_address)
            if target is None or source is None:
                raise SystemFailed("a transfer has an address outside of the KV of both servers")
            moves.append((groups.get(target, 0), target, source))
        return moves

    def _message(self, source: str, target: str, text: bytes) -> PairMessage:
        del source
        receiver = next(n for n, server in self.servers.items() if server.mover.agent.name == target)
        words = text.decode(errors="replace")
        renews = words.startswith("HB:")  # a heartbeat renews leases
        idents = words[3:].split(",") if renews else [words.rsplit(":", 1)[0]]
        prefill = self.servers[PREFILL]
        return PairMessage(receiver, renews, tuple(prefill.named(ident) for ident in idents))


def _kernel_blocks(config: PairConfig) -> int:
    """Return the number of kernel blocks in an attention block: 2 for a recurrent model, where state pages
    make attention blocks large, if the block sizes of both servers are even; otherwise 1."""
    sizes = page_tokens(config.prefill), page_tokens(config.decode)
    return 2 if config.recurrent and not any(size % 2 for size in sizes) else 1


def _check_blocks(config: PairConfig) -> None:
    """Raise UnusableImplementation for block sizes with which the release refuses every handshake
    (block_size_ratio)."""
    servers = config.prefill, config.decode
    sizes = [
        {group.block_size for group in server.groups if not group.state} for server in servers
    ]
    for server in servers:
        if server.recurrent and words_of_state(server) > WORDS * page_tokens(server):
            raise UnusableImplementation("groups: a page of attention must hold a state")
    for server in servers:
        block_sizes = {group.block_size for group in server.groups}
        if server.caching and server.recurrent and len(block_sizes) > 1:
            raise UnusableImplementation(
                "groups: with caching a block of state has as many tokens as one of attention"
            )
    if any(len(of_server) > 1 for of_server in sizes):
        raise UnusableImplementation("groups: a NixlConnector has blocks of one size")
    prefill, decode = map(max, sizes)
    equal = config.push or Layout.equal_blocks
    if decode % prefill or (equal and decode != prefill):
        raise UnusableImplementation(
            "groups: blocks of D must have a multiple of the tokens of P's; with push, and in 0.26, as many"
        )


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    importlib.import_module("torch").set_num_threads(1)
    root = Path(sys.argv[1])

    def guarded_pair() -> Guarded:
        pair = PairDriver(root)
        return Guarded(pair, root, engine="vLLM", modules="modules.py", values="bare_scheduler.py")

    sys.exit(serve(guarded_pair, root))
