"""The facts of a pair: the part of its driver that reads both servers and the network after a command."""

from __future__ import annotations


from impl.process.failures import SystemFailed
from impl.vllm.pair.network import NETWORK, START, Clock, NixlState, PostedTransfer
from impl.vllm.pair.server import WAITS, PairServer
from impl.vllm.pair.tables import kept_records
from reference.pairs.config import DECODE, PREFILL, PairConfig
from reference.pairs.facts import (
    PairFacts, PairMessage, PairReader, PairTransfer, Promise, ReaderState,
)  # fmt: skip


class PairView:
    """Both servers, and the records of a run that the facts name.

    _promises: request of P -> its promised blocks, by group, and the time of the answer (seconds).
    _readers: request of D -> the request of P whose KV it reads.
    _ids_at_decode: transfer -> D's id of the request that it is for, "" for none.
    """

    config: PairConfig
    servers: dict[str, PairServer]
    _promises: dict[str, tuple[tuple[tuple[int, ...], ...], float]]
    _readers: dict[str, str]
    _ids_at_decode: dict[PostedTransfer, str]

    def view(self) -> PairFacts:
        """Return the facts of the pair after the last command."""
        prefill = self.servers[PREFILL]
        decode = self.servers[DECODE]
        readers = tuple(
            PairReader(name, prefilled, self._reader_state(name))
            for name, prefilled in self._readers.items()
        )
        prefill_facts = prefill.view()
        if not self.config.prefill.host_chunks:
            prefill_facts = prefill_facts._replace(host=None)
        return PairFacts(
            prefill=prefill_facts,
            decode=decode.view(),
            promises=tuple(
                Promise(name, blocks, at, self._holds_promise(name))
                for name, (blocks, at) in self._promises.items()
            ),
            readers=readers,
            transfers=tuple(self._transfers(readers)),
            messages=tuple(self._pair_message(*each) for each in NETWORK.messages),
            handshakes=self._handshakes(),
            clock=Clock.now - START,
            idle=tuple(name for name, server in self.servers.items() if server.idle),
            records=tuple(kept_records(self.servers)),
        )

    def _holds_promise(self, name: str) -> bool:
        """Return whether P still holds the blocks that it has promised for a request."""
        prefill = self.servers[PREFILL]
        return prefill.request_id(name) in prefill.scheduler.requests

    def _handshakes(self) -> tuple[str, ...]:
        """Return the server of each handshake that has not run."""
        return tuple(
            name for name, server in self.servers.items() for _ in server.worker_side.handshakes.tasks
        )

    def _reader_state(self, name: str) -> ReaderState:
        """Return the state of a request of D with respect to the KV that it reads."""
        decode = self.servers[DECODE]
        request_id = decode.request_id(name)
        request = decode.scheduler.requests.get(request_id)
        if request is None:
            return ReaderState.GONE
        if request.is_finished():
            return ReaderState.LINGERS
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return ReaderState.GIVEN
        received = request_id in decode.scheduler.finished_recving_kv_req_ids
        if request.status.name != WAITS or received or decode.loads_from_host(request_id):
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
            request_id = self._ids_at_decode.get(job, "")
            name = decode.name_of(request_id)
            if job.state is NixlState.IN_FLIGHT or not job.released or name in waiting:
                under_way.append(job)
                groups = {
                    block.block_id: group
                    for group, manager in enumerate(managers)
                    for block in manager.req_to_blocks.get(request_id, ())
                }
                moves = tuple(dict.fromkeys(self._block_moves(job, groups)))
                over = job.state is not NixlState.IN_FLIGHT
                failed = job.state is NixlState.FAILED
                transfers.append(PairTransfer(job.number, name, moves, job.copied, over, failed))
        NETWORK.transfers[:] = under_way
        return transfers

    def _block_moves(self, job: PostedTransfer, groups: dict[int, int]) -> list[tuple[int, int, int]]:
        """Return the (group, target block, source block) of each region of a transfer."""
        prefill = self.servers[PREFILL]
        decode = self.servers[DECODE]
        moves = []
        for target_address, source_address, _ in job.moves:
            target = decode.memory.block_at(target_address)
            source = prefill.memory.block_at(source_address)
            if target is None or source is None:
                raise SystemFailed("a transfer has an address outside of the KV of both servers")
            moves.append((groups.get(target, 0), target, source))
        return moves

    def _pair_message(self, source: str, target: str, text: bytes) -> PairMessage:
        del source
        receiver = next(n for n, server in self.servers.items() if server.worker_side.agent.name == target)
        words = text.decode(errors="replace")
        renews = words.startswith("HB:")  # a heartbeat renews leases
        request_ids = words[3:].split(",") if renews else [words.rsplit(":", 1)[0]]
        prefill = self.servers[PREFILL]
        return PairMessage(receiver, renews, tuple(prefill.name_of(request_id) for request_id in request_ids))
