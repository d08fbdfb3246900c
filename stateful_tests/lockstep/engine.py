"""One run of an engine that schedules by itself, beside the texts and lengths of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from impl.adapter import EngineSystem
from reference.blocks.clauses import BLOCK_CLAUSES, BlockStep, broken, broken_off
from reference.blocks.commands import EngineCommand, ResetCache
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts
from reference.blocks.request_texts import RequestTexts
from reference.commands import Broken, Done, Mode, Outcome, Reason, Refused
from reference.failures import Failure, counted
from stateful_tests.lockstep.base import AnyLockstep
from stateful_tests.lockstep.results import EngineMoment, Row, Tally


class EngineLockstep(AnyLockstep):
    """One run of an engine. texts: what clients sent and the model sampled."""

    facts: BlockFacts
    step: BlockStep | None
    judge = "the engine says"

    def __init__(
        self,
        system: EngineSystem,
        config: EngineConfig,
        *,
        tallies: dict[str, Tally] | None = None,
        refusals: Counter[str] | None = None,
        clause: str | None = None,
    ) -> None:
        super().__init__(system, tallies, refusals, clause)
        self.texts = RequestTexts(config)
        system.reset(config)
        self._look()

    @property
    def config(self) -> tuple[EngineConfig, Mode]:
        return self.texts.config, Mode.FAITHFUL

    def do(self, command: EngineCommand) -> Outcome:
        """Run one command; sets `violation` if it leaves the specification."""
        self._begin()
        if not self._can.offers(command):
            return self._count(Refused(Reason.UNFAITHFUL))  # the engine has no such command: it gets none
        texts, before = self.texts, self.facts
        outcome = self._carried_out(command)
        if isinstance(outcome, Broken):
            self.violation = self._break(
                Failure("the engine carries it out", outcome.error),
                lambda: BlockStep(texts.config, command, False, before, self.facts, [], [], texts.bearers),
                broken_off,
            )
            return outcome
        done = isinstance(outcome, Done)
        lanes, outputs = texts.follow(command, self.facts) if done else ([], [])
        step = self.step = BlockStep(
            texts.config, command, not done, before, self.facts, lanes, outputs, texts.bearers, texts.writing
        )
        self._judge(step, broken(step, self.waived), BLOCK_CLAUSES.values())
        return self._count(outcome)

    def _look(self) -> None:
        self.facts = self.system.view()

    def moment(self) -> EngineMoment:
        """The engine as it is now."""
        return EngineMoment(self.facts, self.step)

    def row(self, command: EngineCommand, outcome: Outcome, before: EngineMoment) -> Row:
        """What a command did."""
        lines = _changes(before.facts, self.facts)
        if isinstance(command, ResetCache) and isinstance(outcome, Done):
            lines.insert(0, "the reset succeeds" if self.facts.reset else "the reset fails")
        return Row(command, outcome, tree=tuple(lines))  # type: ignore[arg-type]


def _changes(before: BlockFacts, now: BlockFacts) -> list[str]:
    """What a command did, a sentence each."""
    lines = []
    for lane in now.lanes:
        end = lane.start + len(lane.tokens)
        drafts = f", {lane.drafts} of them drafts" if lane.drafts else ""
        sampled = f"; samples {len(lane.sampled)}" if lane.sampled else ""
        lines.append(f"{lane.request} computes [{lane.start}, {end}){drafts}{sampled}")
    for output in now.outputs:
        ends = f" and ends: {output.finished}" if output.finished else ""
        tokens = counted(len(output.tokens), "token")
        lines.append(f"{output.request} gets {tokens}{ends}")
    for name in {**before.requests, **now.requests}:
        was, fact = before.requests.get(name), now.requests.get(name)
        if fact is None:
            lines.append(f"{name} is gone")
        elif was is None or was._replace(tokens=()) != fact._replace(tokens=()):
            tables = "; ".join(" ".join(map(str, table)) or "none" for table in fact.tables)
            lines.append(f"{name} {fact.status}, computed {fact.computed}, blocks {tables}")
    was_named, named = ({p.block for p in facts.published} for facts in (before, now))
    for word, blocks in (("published", named - was_named), ("forgotten", was_named - named)):
        if blocks:
            lines.append(f"{word}: {' '.join(map(str, sorted(blocks)))}")
    return lines + list(_moved(before, now))


def _moved(before: BlockFacts, now: BlockFacts) -> Iterator[str]:
    """What transfers did, and what host memory keeps."""
    were, are = ({job.job: job for job in facts.transfers} for facts in (before, now))
    for number in sorted(were | are):
        was, job = were.get(number), are.get(number) or were[number]
        what = f"{'load' if job.load else 'store'} {number}"
        if was is None:
            blocks, chunks = (" ".join(str(part[at]) for part in job.parts) for at in (1, 2))
            ends = (f"blocks {blocks}", f"chunks {chunks}")
            yield f"{what}: {' to '.join(reversed(ends) if job.load else ends)}"
        if job.copied and not job.completed and not (was and was.copied):
            yield f"{what} has copied"
        if job.completed and not (was and was.completed):
            yield f"{what} completes"
        if number not in are:
            yield f"{what} has ended"
    kept, keeps = ({(key.chunk, key.stamps) for key in facts.host.keys} if facts.host else set()
                   for facts in (before, now))  # fmt: skip
    for word, keys in (("under a hash", keeps - kept), ("forgotten", kept - keeps)):
        if keys:
            yield f"chunks {word}: {' '.join(str(chunk) for chunk, _ in sorted(keys))}"
