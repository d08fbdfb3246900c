"""One server of a pair of LMDeploy: the release's own scheduler, loop and, at D, migration loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from impl.bare import bare
from impl.lmdeploy.driver import LMDeployDriver
from impl.lmdeploy.engine_methods import session_ends_of
from impl.lmdeploy.pair.pulled import MigrationLoop
from impl.loading.optional import optional
from impl.stand_ins import Values
from reference.blocks.commands import EngineCommand
from reference.blocks.config import EngineConfig
from reference.blocks.facts import RequestFact
from reference.commands import Done, Outcome, Reason, Refused
from reference.pairs.config import DECODE, PREFILL

_WAITS = {"MIGRATION_WAITING": "WAITING", "MIGRATION_DONE": "WAITING"}
_LOADS = {"MIGRATION_READY", "MIGRATION_RUNNING"}


class Answer(NamedTuple):
    """P's answer to a request: its session, the token that it has sampled, and the blocks of the prompt."""

    session: int
    token: int
    blocks: tuple[int, ...]


class LMDeployServer(LMDeployDriver):
    """The prefill server P or the decode server D.

    answers: request -> P's answer.
    arrived: sessions of P whose KV D has read, of which messages have arrived.
    first_tokens: session of D -> the first token of its answer.
    """

    migrations: MigrationLoop

    def __init__(self, root: Any, server: str) -> None:
        super().__init__(root)
        self.server = server
        self.role = {PREFILL: "Prefill", DECODE: "Decode"}[server]
        self._ends = session_ends_of(root, self._modules)

    def reset(self, geometry: EngineConfig) -> None:
        self.answers: dict[str, Answer] = {}
        self.arrived: list[int] = []
        self.first_tokens: dict[int, int] = {}
        self._sessions_for_decode: set[int] = set()  # sessions whose KV P keeps for D
        super().reset(replace(geometry, peer=False))
        self.migrations = MigrationLoop()
        if self.server == DECODE:
            self._begin_migrations()

    def _begin_migrations(self) -> None:
        migrations = self.migrations

        async def migrate(inputs: Any) -> None:
            [(session, blocks)] = inputs.requests
            await migrations.migrate(int(session), blocks)

        module = self._modules["engine_loop"]
        module.asyncio = Values(sleep=migrations.sleep)
        module.MigrationExecutionBatch = Values
        loop = bare(
            module.EngineLoop,
            scheduler=self.scheduler,
            stop_event=Values(is_set=lambda: False),
            migration_event=migrations.event,
            executor=Values(migrate=migrate),
            engine_conn=Values(zmq_send=migrations.send),
            resp_queue=Values(put_nowait=self._deliver),
            has_runable_event=Values(set=lambda: None),
            _sleep_requested=False,
        )
        migrations.begin(loop.migration_loop())

    @property
    def due(self) -> bool:
        """Whether the loop takes an output next, before it makes a batch."""
        return self._dispatched_next

    @property
    def idle(self) -> bool:
        """Whether the server does nothing before something arrives."""
        return not (self._flights or self._has_work() or self.scheduler.has_migration_waiting())

    def _has_work(self) -> bool:
        pending = self.maker.has_pending_long_context_chunk()
        return bool(self.scheduler.has_unfinished() or pending)

    def advance(self, command: EngineCommand) -> Outcome:
        """Let the main loop take half a step; where it has no work, time passes for requests that wait for
        room (`migration_loop` sleeps)."""
        self.migrations.wake()
        if self._flights or self._has_work() or not self.scheduler.has_migration_waiting():
            outcome = self.apply(command)
        else:
            self.clear_step_facts()
            outcome = Done()
        self.run_migrations()
        return outcome

    def _dispatch(self) -> None:
        # Up to 0.17 the main loop collects them; later the maker of batches does.
        optional(self.scheduler, "Scheduler.collect_migration_done", lambda: None)()
        super()._dispatch()

    def run_migrations(self) -> None:
        """Run the migration loop, where the main loop gives it a turn."""
        if self.server == DECODE and self._hears_clients:
            self.migrations.run()

    def clear_step_facts(self) -> None:
        """Clear the batch and the outputs of the last command."""
        self.lanes = []
        self.outputs = []
        self._released = []

    def serve(
        self,
        name: str,
        tokens: list[int],
        max_tokens: int,
        *,
        asked: bool = False,
        answer: Answer | None = None,
    ) -> Outcome:
        """Add a request, as the front end does.

        max_tokens: tokens that it may sample.
        asked: P keeps its KV for D.
        answer: P's answer, whose KV D takes over; the request begins with its token.
        """
        if not self._hears_clients:
            return Refused(Reason.WRONG_PHASE)
        if self.server == PREFILL and max_tokens > 1:
            return Refused(Reason.UNFAITHFUL)
        length = len(tokens) + max_tokens + (1 if answer is not None else 0)
        if max_tokens < 1 or not tokens or length > self._longest:
            return Refused(Reason.BAD_LENGTH)
        self.sent += 1
        number = self.sent
        migration = None
        most_tokens = max_tokens
        if answer is not None:
            most_tokens += 1
            migration = Values(
                protocol=None,
                remote_engine_id=str(number),  # names the transfer
                remote_session_id=answer.session,
                remote_token_id=answer.token,
                remote_block_ids=list(answer.blocks),
                is_dummy_prefill=False,
            )
            self.first_tokens[number] = answer.token
        if asked:
            self._sessions_for_decode.add(number)
        self.sources.add(number, "", "")
        wants = self._modules["messages"].SamplingParam(max_new_tokens=most_tokens)
        sequence = self.scheduler.add_session(number).add_sequence(
            np.array(tokens),
            sampling_param=wants,
            adapter_name=None,
            migration_request=migration,
            resp_cache=asked,
            preserve_cache=asked,
        )
        sequence.resp = Values(data=None, type=None, _input_logprobs=None)
        self._names[number] = name
        self._delivered[name] = 0
        if migration is not None:
            self.migrations.event.set()
        return Done()

    def cancel(self, name: str) -> Outcome:
        """Abort a request, as the front end does: it stops the session and ends it."""
        if not self._hears_clients:
            return Refused(Reason.WRONG_PHASE)
        if name not in self._names.values():
            return Refused(Reason.UNKNOWN_REQUEST)
        session = next(each for each, known in self._names.items() if known == name)
        self._ends.stop(self.scheduler, session)
        self.end_session(session)
        del self._names[session]
        return Done()

    def end_session(self, session: int) -> None:
        """End a session, as the front end does after each request."""
        self._ends.end(self.scheduler, session)

    def free_what_was_read(self) -> None:
        """Free the KV of sessions whose messages have arrived, where the main loop gives that a turn."""
        while self._hears_clients and self.arrived:
            self._ends.free(self.scheduler, self.arrived.pop(0))

    def keeps_kv_of(self, name: str) -> bool:
        """Return whether P still keeps the KV of a request for D."""
        return self.answers[name].session in self.scheduler.sessions

    def is_served(self, session: int) -> bool:
        """Return whether the client of a session has not ended it."""
        return session in self._names

    def status_of(self, session: int) -> str | None:
        """Return the release's status of a session's request; None where it has gone."""
        for sequence in self.scheduler.seq_manager.get_all_sequences():
            if sequence.session_id == session:
                return str(sequence.status.name)
        return None

    def _deliver(self, outputs: dict[int, Any]) -> None:
        """Give outputs to the clients. The first token of a request that D takes over is in its prompt."""
        for session, output in outputs.items():
            name = self._names.get(session)
            if name is None:
                continue  # its client has gone
            tokens = output.token_ids.tolist()
            if session in self.first_tokens and len(tokens) == 1:
                output.resp.data = {"token_ids": tokens}
                self._delivered[name] = 1
                continue
            if output.finish and session in self._sessions_for_decode:
                blocks = tuple(output.cache_block_ids)
                self.answers[name] = Answer(session, tokens[-1], blocks)
            super()._deliver({session: output})

    def _loading_sessions(self) -> list[int]:
        """Return the sessions that P keeps for D, and those that D still has a transfer for."""
        kept = (answer.session for answer in self.answers.values())
        return [*super()._loading_sessions(), *kept, *(job.session for job in self.migrations.transfers)]

    def _request_fact(self, sequence: Any, row: list[int], state: tuple[int, ...]) -> RequestFact:
        """Return the fact of a request. One that D takes over has P's token from the start."""
        fact = super()._request_fact(sequence, row, state)
        status = sequence.status.name
        if status == "MIGRATION_WAITING" or status in _LOADS:
            first = self.first_tokens[sequence.session_id]
            fact = fact._replace(tokens=(*fact.tokens, first))
        if status in _LOADS:
            return fact._replace(status="WAITING_FOR_REMOTE_KVS")
        return fact._replace(status=_WAITS.get(status, fact.status))
