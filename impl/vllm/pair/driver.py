"""The driver of a pair: executes commands on two servers of a release.

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
from impl.process.failures import Guarded
from impl.process.worker import serve
from impl.vllm.pair.both_connectors import nixl_of
from impl.vllm.pair.gathering import PairView
from impl.vllm.pair.loading import Factory, Layout, install
from impl.vllm.pair.memory import WORDS
from impl.vllm.pair.network import NETWORK, START, Clock, NixlState, PostedTransfer
from impl.vllm.pair.server import PairServer
from impl.vllm.pair.states import page_tokens, words_of_state
from impl.vocabulary import CommandRefused, require, well_formed
from reference.blocks.commands import ResetConnector, Schedule, Update, client_tokens
from reference.commands import Abort, Done, Outcome, Prompt, Reason, Refused
from reference.pairs.commands import (
    Advance, Cancel, CompleteHost, CopyHost, Deliver, Drop, Forget, Forward, Land, Lose, Move, PairCommand,
    Prefill, ResetHost, Serve, Shake, Write,
)  # fmt: skip
from reference.pairs.config import DECODE, HEARTBEAT, PREFILL, SERVERS, PairConfig
from reference.tiers.commands import Complete, Copy, ResetCache, Tick

# The transfer parameters of a request to P.
ASKED_OF_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


class PairDriver(PairView):
    """Two servers of the release under `root`, in this process."""

    # The system in the parent process has the real values (impl.vllm.system).
    name = ""
    capabilities = Capabilities()
    #: request -> its tokens
    _prompts: dict[str, list[int]]
    #: requests of P whose KV D may read, and those that the proxy has dropped
    _prefills: set[str]
    _dropped_prefills: set[str]
    #: names of requests of both servers
    _used_names: set[str]
    _prompts_sent: int
    #: servers that have scheduled since the clock moved
    _scheduled_servers: set[str]

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
        self._prefills = set()
        self._promises = {}
        self._dropped_prefills = set()
        self._readers = {}
        self._ids_at_decode = {}
        self._used_names = set()
        self._prompts_sent = 0
        self._scheduled_servers = set()

    def apply(self, command: PairCommand) -> Outcome:
        """Execute a command, or refuse it."""
        for server in self.servers.values():
            server.clear_step_facts()
        try:
            outcome = self._commands[type(command)](command) or Done()
        except CommandRefused as refused:
            return Refused(refused.reason)
        self._note_promises()
        self._note_ids_at_decode()
        for server in self.servers.values():
            server.note_host_loads()
        return outcome

    def close(self) -> None:
        """Do nothing: the pair has no resources outside of this process."""

    # -- clients and the proxy --------------------------------------------------------------------

    def _server(self, name: str) -> PairServer:
        require(name in self.servers, Reason.UNKNOWN_REQUEST)
        return self.servers[name]

    def _prompt_tokens(self, name: str, prompt: Prompt, tokens: int) -> list[int]:
        require(name not in self._used_names, Reason.REQUEST_EXISTS)
        require(well_formed(prompt) and tokens >= 0, Reason.BAD_LENGTH)
        return client_tokens(prompt, tokens, self._prompts_sent + 1)

    def _note_if_accepted(self, name: str, tokens: list[int], outcome: Outcome) -> Outcome:
        if isinstance(outcome, Done):
            self._used_names.add(name)
            self._prompts[name] = tokens
        return outcome

    def _new_request_id(self, base: str) -> str:
        """Return a new id for a request: its name at the proxy and a suffix, as the front end makes it."""
        return f"{base}-{len(self._used_names):08x}"

    def _prefill(self, command: Prefill) -> Outcome:
        name = command.request
        server = self.servers[PREFILL]
        tokens = self._prompt_tokens(name, command.prompt, command.tokens)
        parameters = dict(ASKED_OF_PREFILL)
        outcome = server.serve(
            name, self._new_request_id(name), tokens, 1, command.priority, parameters
        )
        if isinstance(outcome, Done):
            self._prompts_sent += 1
            self._prefills.add(name)
        return self._note_if_accepted(name, tokens, outcome)

    def _serve(self, command: Serve) -> Outcome:
        name = command.request
        server = self._server(command.server)
        tokens = self._prompt_tokens(name, command.prompt, command.tokens)
        outcome = server.serve(
            name, self._new_request_id(name), tokens, command.max_tokens, command.priority, None
        )
        if isinstance(outcome, Done):
            self._prompts_sent += 1
        return self._note_if_accepted(name, tokens, outcome)

    def _forward(self, command: Forward) -> Outcome:
        name = command.request
        prefilled = command.of
        require(name not in self._used_names, Reason.REQUEST_EXISTS)
        require(
            prefilled in self._prefills and prefilled not in self._dropped_prefills, Reason.UNKNOWN_REQUEST
        )
        require(self.config.shared or prefilled not in self._readers.values(), Reason.WRONG_PHASE)
        parameters = self._transfer_parameters(prefilled)
        request_id = self._new_request_id(prefilled if self.config.push else name)
        tokens = list(self._prompts[prefilled])
        outcome = self.servers[DECODE].serve(
            name, request_id, tokens, command.max_tokens, command.priority, parameters
        )
        if isinstance(outcome, Done):
            self._readers[name] = prefilled
        return self._note_if_accepted(name, tokens, outcome)

    def _transfer_parameters(self, prefilled: str) -> dict[str, Any]:
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
            "remote_request_id": prefill.request_id(prefilled), "remote_host": connector.side_channel_host,
            "remote_port": connector.side_channel_port, "tp_size": 1,
        }  # fmt: skip

    def _drop(self, command: Drop) -> None:
        name = command.request
        require(name in self._promises and name not in self._dropped_prefills, Reason.UNKNOWN_REQUEST)
        require(name not in self._readers.values(), Reason.WRONG_PHASE)
        self._dropped_prefills.add(name)

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
            self._scheduled_servers.add(command.server)
        return outcome

    def _write(self, command: Write) -> None:
        server = self._server(command.server)
        require(self.config.push, Reason.UNFAITHFUL)
        server.worker_side.write()

    # -- host memory ------------------------------------------------------------------------------

    def _copy_host(self, command: CopyHost) -> Outcome:
        return self._server(command.server).apply(Copy(command.load))

    def _complete_host(self, command: CompleteHost) -> Outcome:
        return self._server(command.server).apply(Complete(command.load))

    def _reset_host(self, command: ResetHost) -> Outcome:
        return self._server(command.server).apply(ResetConnector())

    # -- the network ------------------------------------------------------------------------------

    def _shake(self, command: Shake) -> None:
        handshakes = self._server(command.server).worker_side.handshakes
        ran = handshakes.run(command.fails)
        require(ran, Reason.EMPTY)
        error = handshakes.error
        handshakes.error = None
        if error is not None:
            raise error

    def _move(self, command: Move) -> None:
        self._transfer_at([job for job in NETWORK.transfers_in_flight() if not job.copied], command.at).copy()

    def _land(self, command: Land) -> None:
        self._transfer_at(NETWORK.transfers_in_flight(), command.at).land()

    def _lose(self, command: Lose) -> None:
        self._transfer_at(NETWORK.transfers_in_flight(), command.at).state = NixlState.FAILED

    def _transfer_at(self, jobs: list[PostedTransfer], index: int) -> PostedTransfer:
        require(0 <= index < len(jobs), Reason.EMPTY)
        return jobs[index]

    def _deliver(self, command: Deliver) -> None:
        agent = self._server(command.server).worker_side.agent
        delivered = NETWORK.deliver(agent.name)
        require(delivered, Reason.EMPTY)

    def _tick(self, command: Tick) -> None:
        require(command.seconds >= 1, Reason.BAD_LENGTH)
        if not self.config.late:
            require(command.seconds <= HEARTBEAT, Reason.BAD_LENGTH)
            forwarded = {*self._readers.values(), *self._dropped_prefills}
            held = filter(self._holds_promise, self._promises)
            unanswered = [name for name in held if name not in forwarded]
            looped = all(s.idle or name in self._scheduled_servers for name, s in self.servers.items())
            pending = unanswered or NETWORK.messages or self._handshakes()
            require(looped and not pending, Reason.WRONG_PHASE)
        Clock.now += command.seconds
        self._scheduled_servers.clear()

    # -- records of the pair ----------------------------------------------------------------------

    def _note_promises(self) -> None:
        """Note the blocks that P's new answers promise to D, with the time of the answer."""
        prefill = self.servers[PREFILL]
        for name in self._prefills - self._promises.keys():
            answer = prefill.answers.get(name)
            if answer and answer.get("remote_block_ids"):
                blocks = tuple(tuple(row) for row in answer["remote_block_ids"])
                self._promises[name] = blocks, Clock.now - START

    def _note_ids_at_decode(self) -> None:
        """Note for each posted transfer the request of D that it is for."""
        if self.config.push:
            worker = self.servers[PREFILL].worker_side.worker
            waiting = worker._sending_transfers
            agent = self.servers[PREFILL].worker_side.agent
        else:
            worker = self.servers[DECODE].worker_side.worker
            waiting = worker._recving_transfers
            agent = self.servers[DECODE].worker_side.agent
        for request_id, handles in waiting.items():
            for handle in handles:
                job = agent.handles.get(handle)
                if job is not None:
                    self._ids_at_decode.setdefault(job, self._id_at_decode(request_id))

    def _id_at_decode(self, request_id: str) -> str:
        """Return D's id of the request that a transfer is for, "" for none.

        request_id: the id under which the transfer was posted: that of D with pull, that of P with push.
        """
        if not self.config.push:
            return request_id
        prefilled = self.servers[PREFILL].name_of(request_id)
        names = [name for name, read in self._readers.items() if read == prefilled]
        return self.servers[DECODE].request_id(names[0]) if names else ""


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
