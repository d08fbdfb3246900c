"""One run of an engine that schedules by itself, beside the texts and lengths of its requests."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from collections.abc import Iterator

from impl.adapter import EngineSystem, UnusableImplementation
from impl.process.failures import described
from reference.blocks.clauses import BLOCK_CLAUSES, BlockStep, broken, broken_off
from reference.blocks.commands import EngineCommand, ResetCache
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts
from reference.blocks.request_texts import RequestTexts
from reference.commands import Broken, Done, Outcome, Refused
from reference.failures import Failure
from stateful_tests.lockstep.results import (
    KEPT, EngineMoment, Row, Run, Tally, Trace, Violation, tally_up, violation_of,
)  # fmt: skip


class EngineLockstep:
    """texts: what clients sent and the model sampled. facts: the engine's, now. violation: the first
    command that left the specification; nothing may be done after it. tallies (shared between runs) count
    evaluations and situations."""

    def __init__(
        self,
        system: EngineSystem,
        config: EngineConfig,
        *,
        tallies: dict[str, Tally] | None = None,
        refusals: Counter[str] | None = None,
        clause: str | None = None,
    ) -> None:
        self.system, self.texts = system, RequestTexts(config)
        self.violation: Violation | None = None
        self.steps = 0
        self._tallies, self._refusals = tallies, refusals
        self._reached: set[str] = set()  # clauses whose trigger has come up
        can = system.capabilities
        self.waived = frozenset(can.waived) | (frozenset(can.known) - {clause})
        system.reset(config)
        self.facts: BlockFacts = system.view()
        self.step: BlockStep | None = None  # the last one, unless the engine broke in it

    def do(self, command: EngineCommand) -> Outcome:
        """Run one command; sets `violation` if it leaves the specification."""
        assert self.violation is None, "the run has ended with a violation"
        index, before = self.steps, self.facts
        self.steps, self.step = index + 1, None
        try:
            outcome = self.system.apply(command)
            if not isinstance(outcome, Broken):
                self.facts = self.system.view()
        except UnusableImplementation:
            raise
        except Exception as error:
            outcome = Broken(described(error))
        if isinstance(outcome, Broken):
            self.violation = self._broken(command, outcome, index)
            return outcome
        done = isinstance(outcome, Done)
        if isinstance(outcome, Refused) and self._refusals is not None:
            self._refusals[outcome.reason.value] += 1
        lanes, outputs = self.texts.follow(command, self.facts) if done else ([], [])
        step = self.step = BlockStep(
            self.texts.config, command, not done, before, self.facts, lanes, outputs, self.texts.bearers,
            self.texts.writing,
        )  # fmt: skip
        failures = broken(step, self.waived)
        if self._tallies is not None:
            tally_up(self._tallies, BLOCK_CLAUSES.values(), step, self._reached)
        if failures:
            self.violation = violation_of(failures, index)
        return outcome

    def _broken(self, command: EngineCommand, outcome: Broken, index: int) -> Violation:
        """The engine has failed. What it has left in its blocks, if it still shows them, says more."""
        failure, before = Failure("the engine carries it out", outcome.error), self.facts
        with suppress(Exception, SystemExit):
            self.facts = self.system.view()
        step = BlockStep(
            self.texts.config, command, False, before, self.facts, [], [], self.texts.bearers
        )
        found = broken_off(step, self.waived) if self.facts != before else []
        if not found:
            self.facts = before
            return Violation("BROKEN", index, failure)
        self.step = step
        return violation_of(found, index).with_break(failure)


def replay_engine(system: EngineSystem, trace: Trace) -> Run:
    """Run a trace and record what each command did, up to the first violation."""
    lockstep = EngineLockstep(system, trace.geometry, clause=trace.clause)
    stated, rows = dict(trace.expected), []
    history = deque([EngineMoment(lockstep.facts, None)], maxlen=KEPT)
    for index, command in enumerate(trace.commands):
        before = lockstep.facts
        outcome = lockstep.do(command)
        history.append(EngineMoment(lockstep.facts, lockstep.step))
        lines = _changes(before, lockstep.facts)
        if isinstance(command, ResetCache) and isinstance(outcome, Done):
            lines.insert(0, "the reset succeeds" if lockstep.facts.reset else "the reset fails")
        rows.append(Row(command, outcome, tree=tuple(lines)))
        if lockstep.violation is None and index in stated and type(stated[index]) is not type(outcome):
            want, got = (type(o).__name__.lower() for o in (stated[index], outcome))
            lockstep.violation = Violation(
                "TRACE", index, Failure(f"the trace states {want}", got)
            )
        if lockstep.violation is not None:
            break
    return Run(trace, system.name, tuple(rows), lockstep.violation, tuple(history), lockstep.waived)


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
        tokens = f"{len(output.tokens)} token{'s' * (len(output.tokens) != 1)}"
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
