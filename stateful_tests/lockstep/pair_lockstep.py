"""One run of a pair, beside the texts of its requests, its promises and leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from impl.adapter import Capabilities, PairedSystem
from impl.engines import engine
from reference.commands import Broken, Done, Mode, Outcome
from reference.failures import Failure
from reference.pairs.pair_record import START, PairRecord
from reference.pairs.clauses import OF_PAIRS, PAIR_CLAUSES, PairStep, failed_clauses, broken_off, clauses_of
from reference.pairs.commands import CopyHost, PairCommand
from reference.pairs.config import PAIR_PRESETS, SERVERS, PairConfig
from reference.pairs.facts import PairMessage, PairFacts, PairTransfer
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.engine_lockstep import changes
from stateful_tests.lockstep.run_moments import PairMoment
from stateful_tests.lockstep.check_results import Tally, tally_up
from stateful_tests.lockstep.run_results import Row


class PairLockstep(AnyLockstep):
    """One run of a pair. record: see PairRecord."""

    system: PairedSystem
    facts: PairFacts
    step: PairStep | None
    judge = "the pair says"
    clauses = PAIR_CLAUSES

    def __init__(
        self,
        system: PairedSystem,
        config: PairConfig,
        mode: Mode = Mode.FAITHFUL,
        *,
        tallies: dict[str, Tally] | None = None,
        refusals: Counter[str] | None = None,
        clause: str | None = None,
    ) -> None:
        del mode  # both servers schedule by themselves
        super().__init__(system, tallies, refusals, clause)
        self.record = PairRecord(config)
        self.facts = START
        self._start(config)

    @staticmethod
    def unsupported(can: Capabilities, config: PairConfig, _: Sequence[PairCommand]) -> str:
        """Say that a pair lacks recurrent layers or host memory, or takes over the first token where the
        trace does not, or the other way round."""
        if config.recurrent and not can.recurrent:
            return "is driven without recurrent state: the trace has it"
        if config.with_host and not _has_host(can):
            return "is driven without host memory: the trace has it"
        if config.first_token and not can.first_token:
            return "has a decode server that computes the last token of a prompt again: the trace has another"
        if can.first_token and not config.first_token:
            return "has a decode server that takes over the first token: the trace has another (first_token)"
        return ""

    @staticmethod
    def presets_for(can: Capabilities) -> tuple[str, ...]:
        """Return the presets of what the release has."""
        unsupported = PairLockstep.unsupported
        return tuple(name for name, config in PAIR_PRESETS.items() if not unsupported(can, config, ()))

    @staticmethod
    def suitable_option(config: PairConfig) -> str:
        del config
        return f"--impl {engine('vllm').newest('pair')}"

    @property
    def config(self) -> tuple[PairConfig, Mode]:
        return self.record.config, Mode.FAITHFUL

    def do(self, command: PairCommand) -> Outcome:
        """Run one command; sets `violation` if it leaves the specification."""
        self._begin()
        before = self.facts
        outcome = self._carry_out(command)
        if isinstance(outcome, Broken):
            self.violation = self._break(
                Failure("the pair carries it out", outcome.error),
                lambda: self._step(command, refused=False, before=before, broke=True),
                broken_off,
            )
            return outcome
        step = self.step = self._step(command, not isinstance(outcome, Done), before)
        if step.refused:
            return self._count(outcome)
        if self._tallies is not None:
            for server, side in step.sides.items():
                of_server = clauses_of(step.config, server).values()
                tally_up(self._tallies, of_server, side, self._reached)
        self._judge(step, failed_clauses(step, self.waived), OF_PAIRS.values())
        return self._count(outcome)

    def _step(
        self, command: PairCommand, refused: bool, before: PairFacts, broke: bool = False
    ) -> PairStep:
        record = self.record
        after = self.facts
        if broke:
            sides = record.broken_off(command, before, after)
        else:
            sides = {} if refused else record.follow(command, before, after)
        return PairStep(
            record.config,
            command,
            refused=refused,
            before=before,
            after=after,
            sides=sides,
            record=record,
        )

    def _read_facts(self) -> None:
        self.facts = self.system.view()

    def moment(self) -> PairMoment:
        """Return the pair as it is now."""
        return PairMoment(self.facts, self.step)

    def row(self, command: PairCommand, outcome: Outcome, before: PairMoment) -> Row:
        """Return the changes of a command on each server and between them."""
        was = before.facts
        now = self.facts
        lines = [
            f"{server}: {line}"
            for server in SERVERS
            for line in changes(was.of(server), now.of(server))
        ]
        return Row(command, outcome, tree=(*lines, *_network_changes(was, now)))


def _has_host(can: Capabilities) -> bool:
    return CopyHost.__name__ in can.commands


def _network_changes(was: PairFacts, now: PairFacts) -> Iterator[str]:
    """Yield the promises, messages and transfers that began or ended between the servers."""
    for promise in now.promises[len(was.promises) :]:
        yield f"P promises blocks {_block_list(promise.blocks)} of {promise.request}"
    for before, promise in zip(was.promises, now.promises):
        if before.held and not promise.held:
            yield f"P gives back what {promise.request} left"
    states = {reader.request: reader.state for reader in was.readers}
    for reader in now.readers:
        if states.get(reader.request) != reader.state:
            yield f"{reader.request} {reader.state.value}"
    waited = len(now.handshakes) - len(was.handshakes)
    if waited:
        yield "a handshake begins" if waited > 0 else "a handshake has ended"
    yield from _transfer_changes(was, now)
    for message in now.messages[len(was.messages) :]:
        yield in_words(message)
    if now.clock != was.clock:
        yield f"it is {now.clock:g} s"


def _transfer_changes(was: PairFacts, now: PairFacts) -> Iterator[str]:
    before = {job.number: job for job in was.transfers}
    for job in now.transfers:
        had = before.get(job.number)
        if had is None:
            yield transfer_in_words(job)
        elif job.copied and not had.copied:
            yield f"transfer {job.number} has moved its bytes"
        if job.over and not (had is not None and had.over):
            yield f"transfer {job.number} has {'failed' if job.failed else 'ended'}"


def transfer_in_words(job: PairTransfer) -> str:
    """Return a transfer in words, such as "transfer 0 for r2: blocks 1 2 of P to 4 5 of D"."""
    sources = " ".join(str(source) for _, _, source in job.moves)
    targets = " ".join(str(target) for _, target, _ in job.moves)
    return f"transfer {job.number} for {job.reader or 'nobody'}: blocks {sources} of P to {targets} of D"


def in_words(message: PairMessage) -> str:
    """Return a message under way in words."""
    verb = "renews the leases of" if message.renews else "says that there is no more need of"
    return f"a message to {message.to} {verb} {' '.join(message.requests)}"


def _block_list(blocks: tuple[tuple[int, ...], ...]) -> str:
    return " | ".join(" ".join(map(str, row)) or "none" for row in blocks)
