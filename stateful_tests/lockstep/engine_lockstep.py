"""One run of an engine that schedules by itself, beside the texts and lengths of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from impl.adapter import Capabilities, EngineSystem
from impl.engines import engine
from impl.process.failures import SystemFailed
from impl.process.remote_system import StrangerSystem, WorkerSystem
from impl.process.wire import copied_view
from reference.blocks.clauses import BLOCK_CLAUSES, BlockStep, failed_clauses, broken_off
from reference.blocks.commands import EngineCommand
from reference.tiers.commands import ResetCache
from reference.blocks.config import EngineConfig
from reference.blocks.presets import ENGINE_PRESETS
from reference.blocks.facts import BlockFacts
from reference.blocks.request_texts import RequestTexts
from reference.commands import Broken, Done, Mode, Outcome, Reason, Refused
from reference.failures import Failure, count_text
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.run_moments import EngineMoment
from stateful_tests.lockstep.check_results import Tally
from stateful_tests.lockstep.run_results import Row


_NOTHING = BlockFacts((), (), (), (), {}, {})


class EngineLockstep(AnyLockstep):
    """One run of an engine.

    texts: the texts of its requests.
    """

    system: EngineSystem
    facts: BlockFacts
    step: BlockStep | None
    judge = "the engine says"
    clauses = BLOCK_CLAUSES

    def __init__(
        self,
        system: EngineSystem,
        config: EngineConfig,
        mode: Mode = Mode.FAITHFUL,
        *,
        tallies: dict[str, Tally] | None = None,
        refusals: Counter[str] | None = None,
        clause: str | None = None,
    ) -> None:
        del mode  # the engine has its own scheduler
        super().__init__(system, tallies, refusals, clause)
        self.texts = RequestTexts(config)
        self.facts = _NOTHING
        self._strange = not isinstance(system, WorkerSystem) or isinstance(system, StrangerSystem)
        self._start(config)

    @staticmethod
    def unsupported(can: Capabilities, config: EngineConfig, _: Sequence[EngineCommand]) -> str:
        """Return why the engine cannot run these sizes: it lacks recurrent state, a KV connector, images,
        rings, swaps or forks. "" if it can."""
        if config.recurrent and not can.recurrent:
            return "is driven without recurrent state: the trace has it"
        if config.connects and not can.connects:
            return "is driven without a KV connector: the trace has one (of vLLM: +offload)"
        if config.encodes and not can.encodes:
            return "is driven without images: the trace has some (of vLLM: +images)"
        if any(group.ring for group in config.groups) and not can.rings:
            return "is driven without rings: windows of the trace are rings"
        if config.swap and not can.swaps:
            return "is driven without host memory for requests that are swapped: the trace has some"
        if config.children and not can.forks:
            return "is driven without forks: a request of the trace may have children"
        return ""

    @staticmethod
    def presets_for(can: Capabilities) -> tuple[str, ...]:
        """Return the names of the presets that the engine can be built with. An engine with a connector or
        an encoder runs only presets that use it."""
        return tuple(
            name
            for name, config in ENGINE_PRESETS.items()
            if (config.connects, config.encodes) == (can.connects, can.encodes)
            and (can.drafter or config.draft_group is None)
            and not EngineLockstep.unsupported(can, config, ())
        )

    @staticmethod
    def suitable_option(config: EngineConfig) -> str:
        return f"--impl {engine('vllm').newest('offload' if config.connects else '')}"

    @property
    def config(self) -> tuple[EngineConfig, Mode]:
        return self.texts.config, Mode.FAITHFUL

    def do(self, command: EngineCommand) -> Outcome:
        """Run one command, and set `violation` if the outcome violates the specification."""
        self._begin()
        if not self._can.offers(command):
            # the engine lacks the command and does not receive it
            return self._count(Refused(Reason.UNFAITHFUL))
        texts = self.texts
        before = self.facts
        outcome = self._carry_out(command)
        if isinstance(outcome, Broken):
            self.violation = self._break(
                Failure("the engine carries it out", outcome.error),
                lambda: BlockStep(
                    texts.config,
                    command,
                    refused=False,
                    before=before,
                    after=self.facts,
                    lanes=[],
                    outputs=[],
                    bearers=texts.bearers,
                ),
                broken_off,
            )
            return outcome
        is_done = isinstance(outcome, Done)
        if is_done:
            lanes, outputs = texts.follow(command, self.facts)
        else:
            texts.follow_refused(command, self.facts)
            lanes = []
            outputs = []
        step = self.step = BlockStep(
            texts.config,
            command,
            refused=not is_done,
            before=before,
            after=self.facts,
            lanes=lanes,
            outputs=outputs,
            bearers=texts.bearers,
            in_use=texts.in_use,
            standstill=texts.standstill,
            kv_sources=tuple(texts.sources),
            reason=outcome.reason if isinstance(outcome, Refused) else None,
        )
        self._judge(step, failed_clauses(step, self.waived), self.clauses.values())
        return self._count(outcome)

    def _read_facts(self) -> None:
        facts: BlockFacts = self.system.view()
        if not isinstance(self.system, WorkerSystem):
            facts = copied_view(self._can.system_kind, facts)
        if self._strange and (wrong := misfit(facts, self.texts.config)):
            raise SystemFailed(f"TypeError: {wrong}")
        self.facts = facts

    def moment(self) -> EngineMoment:
        """Return the present state of the engine."""
        return EngineMoment(self.facts, self.step)

    def row(self, command: EngineCommand, outcome: Outcome, before: EngineMoment) -> Row:
        """Return the changes by a command."""
        lines = changes(before.facts, self.facts)
        if isinstance(command, ResetCache) and isinstance(outcome, Done):
            lines.insert(0, "the reset succeeds" if self.facts.reset else "the reset fails")
        return Row(command, outcome, tree=tuple(lines))


def misfit(facts: BlockFacts, config: EngineConfig) -> str:
    """Return why facts do not fit the sizes of this configuration, "" if they fit."""
    blocks = len(facts.refs)
    groups = len(config.groups)
    if len(facts.memory) != blocks:
        return f"view().memory: {len(facts.memory)} entries, for {blocks} in refs"
    tables = [(f"requests[{name!r}]", fact.tables) for name, fact in facts.requests.items()]
    tables += [(f"lanes, {lane.request}", lane.tables) for lane in facts.lanes]
    for where, rows in tables:
        if len(rows) != groups:
            return f"view().{where}: {len(rows)} in tables, for {groups} groups"
    block_lists = [(f"{where}, tables", [*chain(*rows)]) for where, rows in tables]
    block_lists += [("free", [*facts.free]), ("mapped", [*facts.mapped]), ("kept", [*facts.kept])]
    block_lists += [("published", [published.block for published in facts.published])]
    for where, numbers in block_lists:
        if outside := [block for block in numbers if not 0 <= block < blocks]:
            return f"view().{where}: block {outside[0]}, where refs has {blocks}"
    for block, (group, slots) in enumerate(facts.memory):
        if group >= groups:
            return f"view().memory[{block}]: group {group}, where there are {groups}"
        size = config.groups[group].block_size
        if group >= 0 and not config.groups[group].state and len(slots) != size:
            return f"view().memory[{block}]: {len(slots)} stamps, where a block of group {group} has {size}"
    for entry in facts.published:
        if not 0 <= entry.group < groups:
            return f"view().published: group {entry.group}, where there are {groups}"
    return ""


def changes(before: BlockFacts, now: BlockFacts) -> list[str]:
    """Return the changes by a command, one sentence each."""
    lines = []
    for lane in now.lanes:
        end = lane.start + len(lane.tokens)
        drafts = f", {lane.drafts} of them drafts" if lane.drafts else ""
        sampled = f"; samples {len(lane.sampled)}" if lane.sampled else ""
        lines.append(f"{lane.request} computes [{lane.start}, {end}){drafts}{sampled}")
    for output in now.outputs:
        ends = f" and ends: {output.finished}" if output.finished else ""
        tokens = count_text(len(output.tokens), "token")
        lines.append(f"{output.request} gets {tokens}{ends}")
    for name in {**before.requests, **now.requests}:
        was = before.requests.get(name)
        fact = now.requests.get(name)
        if fact is None:
            lines.append(f"{name} is gone")
        elif was is None or was._replace(tokens=()) != fact._replace(tokens=()):
            tables = "; ".join(" ".join(map(str, table)) or "none" for table in fact.tables)
            lines.append(f"{name} {fact.status}, computed {fact.computed}, blocks {tables}")
    was_named = {p.block for p in before.published}
    published_blocks = {p.block for p in now.published}
    changes = {"published": published_blocks - was_named, "forgotten": was_named - published_blocks}
    for word, blocks in changes.items():
        if blocks:
            lines.append(f"{word}: {' '.join(map(str, sorted(blocks)))}")
    return [*lines, *_encoder_changes(before, now), *_transfer_changes(before, now)]


def _encoder_changes(before: BlockFacts, now: BlockFacts) -> Iterator[str]:
    """Yield the images that a step has encoded, and the changes of the images that the scheduler keeps."""
    if now.encoder is None:
        return
    if now.encoder.encoded:
        yield f"encodes {' '.join(now.encoder.encoded)}"
    was = {entry.image: entry.users for entry in before.encoder.entries} if before.encoder else {}
    users_of_image = {entry.image: entry.users for entry in now.encoder.entries}
    for image in sorted(was.keys() | users_of_image.keys()):
        if image not in users_of_image:
            yield f"image {image} is no longer kept"
        elif was.get(image) != users_of_image[image]:
            yield f"image {image} kept, needed by {' '.join(users_of_image[image]) or 'nobody'}"


def _transfer_changes(before: BlockFacts, now: BlockFacts) -> Iterator[str]:
    """Yield the changes of transfers and of host memory."""
    were = {job.job: job for job in before.transfers}
    are = {job.job: job for job in now.transfers}
    for number in sorted(were | are):
        was = were.get(number)
        job = are.get(number) or were[number]
        transfer = f"{'load' if job.load else 'store'} {number}"
        if was is None:
            blocks = "blocks " + " ".join(str(part[1]) for part in job.parts)
            chunks = "chunks " + " ".join(str(part[2]) for part in job.parts)
            if job.load:
                source = chunks
                target = blocks
            else:
                source = blocks
                target = chunks
            yield f"{transfer}: {source} to {target}"
        if job.copied and not job.completed and not (was and was.copied):
            yield f"{transfer} has copied"
        if job.completed and not (was and was.completed):
            yield f"{transfer} completes"
        if number not in are:
            yield f"{transfer} has ended"
    were_kept = {(key.chunk, key.stamps) for key in before.host.keys} if before.host else set()
    are_kept = {(key.chunk, key.stamps) for key in now.host.keys} if now.host else set()
    for word, keys in (("under a hash", are_kept - were_kept), ("forgotten", were_kept - are_kept)):
        if keys:
            yield f"chunks {word}: {' '.join(str(chunk) for chunk, _ in sorted(keys))}"
    yield from _storage_changes(before, now)


def _storage_changes(before: BlockFacts, now: BlockFacts) -> Iterator[str]:
    """Yield the engine's requests to a storage, and the work of its threads."""
    if now.host is None:
        return
    if now.host.lookups:
        yield f"the storage is asked for {count_text(now.host.lookups, 'chunk')}"
    were = {job.job: job for job in before.host.jobs} if before.host is not None else {}
    are = {job.job: job for job in now.host.jobs}
    for number in sorted(were | are):
        was = were.get(number)
        job = are.get(number) or were[number]
        job_text = f"storage {'read' if job.load else 'write'} {number}"
        if was is None:
            yield f"{job_text}: chunks {' '.join(map(str, job.chunks))}"
        if job.done and not (was and was.done):
            yield f"{job_text} is done"
        if number not in are:
            yield f"{job_text} has ended"
