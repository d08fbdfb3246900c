"""One run of a tree with a host tier, beside the locks of its users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from impl.adapter import Capabilities, TieredSystem
from impl.engines import engine
from reference.clauses import Clause
from reference.commands import Broken, Done, Mode, Outcome
from reference.failures import Failure
from reference.prefix_cache import path_text
from reference.tiers.clauses import TIER_CLAUSES, TierStep, failed_clauses
from reference.tiers.commands import TierCommand
from reference.tiers.config import TIER_PRESETS, TierConfig
from reference.tiers.facts import METADATA, NO_SLOTS, Slots, TierFacts, TierNode
from reference.tiers.locks import TierUsers
from reference.tiers.progress import DecodeProgress
from stateful_tests.lockstep.any_lockstep import AnyLockstep
from stateful_tests.lockstep.run_moments import TierMoment
from stateful_tests.lockstep.check_results import Tally
from stateful_tests.lockstep.run_results import Row


_NOTHING = TierFacts((), NO_SLOTS, NO_SLOTS, {}, NO_SLOTS, NO_SLOTS)


class TierLockstep(AnyLockstep):
    """One run of a tree with a host tier.

    users: what uses the tree: locks, prompts and waiting requests.
    """

    system: TieredSystem
    facts: TierFacts
    step: TierStep | None
    judge = "the tree says"
    clauses = TIER_CLAUSES

    def __init__(
        self,
        system: TieredSystem,
        config: TierConfig,
        mode: Mode = Mode.FAITHFUL,
        *,
        tallies: dict[str, Tally] | None = None,
        refusals: Counter[str] | None = None,
        clause: str | None = None,
    ) -> None:
        del mode  # its users behave as a faithful scheduler
        super().__init__(system, tallies, refusals, clause)
        self.users = TierUsers(config)
        self._progress = DecodeProgress()
        self.facts = _NOTHING
        self._start(config)

    @staticmethod
    def unsupported(can: Capabilities, config: TierConfig, _: Sequence[TierCommand]) -> str:
        """Return why the tree cannot run these sizes: it lacks a storage, the queues of a server with one
        role, or recurrent state. "" if it can."""
        lacks = {
            "is not driven with a storage behind the host": config.storage and not can.storage,
            "is not driven as a server that only decodes": config.decode and not can.receives,
            "is not driven as a server that only prefills": config.prefill and not can.sends,
            "is not driven with recurrent state": config.states and not can.recurrent,
            "is not driven with states that are tracked": config.tracks and not can.tracks,
        }
        return next((words for words, unsupported in lacks.items() if unsupported), "")

    @staticmethod
    def presets_for(can: Capabilities) -> tuple[str, ...]:
        """Return the names of the presets that the tree can be built with."""
        return tuple(
            name for name, sizes in TIER_PRESETS.items() if not TierLockstep.unsupported(can, sizes, ())
        )

    @staticmethod
    def suitable_option(config: TierConfig) -> str:
        del config
        return f"--impl {engine('sglang').newest('hicache')}"

    @property
    def config(self) -> tuple[TierConfig, Mode]:
        return self.users.config, Mode.FAITHFUL

    def do(self, command: TierCommand) -> Outcome:
        """Run one command, and set `violation` if the outcome violates the specification."""
        self._begin()
        before = self.facts
        outcome = self._carry_out(command)
        if isinstance(outcome, Broken):
            failure = Failure("the tree carries it out", outcome.error)
            self.violation = self._break(
                failure, lambda: self._step(command, refused=False, before=before), _broken_off
            )
            return outcome
        done = isinstance(outcome, Done)
        if done:
            self.users.note(command)
        self.step = self._step(command, not done, before)
        if done:
            self.step.standstill = self._progress.follow(
                command, self.facts, self.users.greeted, self.users.arrived
            )
        self.step.admission_attempt = self.users.waits.follow(command, outcome, before, self.facts)
        self._judge(self.step, failed_clauses(self.step, self.waived), self.clauses.values())
        return self._count(outcome)

    def _step(self, command: TierCommand, refused: bool, before: TierFacts) -> TierStep:
        ranges = self.users.follow(self.facts)
        waiting = self.users.waiting.keys()
        return TierStep(
            self.users.config,
            command,
            refused=refused,
            before=before,
            after=self.facts,
            ranges=ranges,
            waiting=waiting,
        )

    def _read_facts(self) -> None:
        self.facts = self.system.view()

    def moment(self) -> TierMoment:
        """Return the present state of the tree."""
        return TierMoment(self.facts, self.step)

    def row(self, command: TierCommand, outcome: Outcome, before: TierMoment) -> Row:
        """Return the changes by a command."""
        was = before.facts
        now = self.facts
        lines = (
            *_request_changes(was, now, self.users.config.prefill),
            *_send_changes(was, now),
            *_node_changes(was, now),
            *_transfer_changes(was, now),
            *_operation_changes(was, now),
            *_read_text(now),
        )
        return Row(command, outcome, tree=lines)


def _broken_off(step: TierStep, waived: Collection[str]) -> list[tuple[Clause, Failure]]:
    """Return the clauses that fail after a command that was not completed. Locks, marks and slots may be
    inconsistent then, so only the KV is checked."""
    return failed_clauses(step, {*waived, *(TIER_CLAUSES.keys() - {"HOST-2"})})


def _node_changes(before: TierFacts, now: TierFacts) -> Iterator[str]:
    """Yield the changes of nodes."""
    were = {node.node: node for node in before.nodes}
    are = {node.node: node for node in now.nodes}
    for number in sorted(were | are):
        was = were.get(number)
        node = are.get(number)
        if node is None:
            yield f"node {number} is gone"
            continue
        state = _node_state(node)
        if was is None:
            yield f"node {number} under {_parent_text(node)}: {_node_text(node)} at {node.start}; {state}"
        elif (_node_state(was), was.start) != (state, node.start):
            cut = f"{_node_text(node)} at {node.start}; " if was.start != node.start else ""
            yield f"node {number}: {cut}{state}"


def _parent_text(node: TierNode) -> str:
    return f"node {node.parent}" if node.parent else "the root"


def _node_text(node: TierNode) -> str:
    return path_text(node.stamps)


def _node_state(node: TierNode) -> str:
    """Return the tiers with KV of a node, and the locks, pins and transfers that hold the node, in words."""
    tiers = [*_slot_lists("device", node.device), *_slot_lists("host", node.host)]
    parts = tiers or ["no KV"]
    for word, counts in (("locked", node.locks), ("pinned", node.pins)):
        amounts = ", ".join(f"{pool} {count}" for pool, count in counts.items() if count)
        if amounts:
            parts.append(f"{word} {amounts}")
    if node.storing >= 0:
        parts.append("waits for a store")
    if node.loading >= 0:
        parts.append("waits for a load")
    return ", ".join(parts)


def _slot_lists(tier: str, slots: Slots) -> list[str]:
    return [f"{tier} {pool} {_range_text(pool_slots)}" for pool, pool_slots in slots.items() if pool_slots]


def _range_text(slots: tuple[int, ...]) -> str:
    """Return slots as text with ranges, such as "3-7 9"."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return " ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs)


def _transfer_changes(before: TierFacts, now: TierFacts) -> Iterator[str]:
    """Yield the changes of transfers."""
    were = {job.job: job for job in before.transfers}
    are = {job.job: job for job in now.transfers}
    for number in sorted(were | are):
        was = were.get(number)
        job = are.get(number)
        if job is None:
            old = were[number]
            yield f"{old.label} {'is acknowledged' if old.sent else 'is sent with others'}"
            continue
        if was is None:
            nodes = ", ".join(dict.fromkeys(f"node {ack}" for ack in job.acks))
            count = len(job.parts)
            state = "sent" if job.sent else "queued"
            yield f"{job.label} of {nodes or 'no node'}, {count} slots: {state}"
        if job.copied and not job.completed and not (was and was.copied):
            yield f"{job.label} has copied"
        if job.completed and not (was and was.completed):
            yield f"{job.label} completes"


def _request_changes(before: TierFacts, now: TierFacts, prefill: str) -> Iterator[str]:
    """Yield the changes of requests on a decode or prefill server."""
    row_text = "row {} of metadata" if prefill else "first token in slot {}"
    for gone in {r.name for r in before.requests} - {r.name for r in now.requests}:
        yield f"{gone} is gone"
    for request in now.requests:
        if request in before.requests:
            continue
        device = _slot_lists("device", request.slots)
        writing = " ".join(_slot_lists("device", request.writing))
        parts: list[str] = [request.state]
        if request.row >= 0:
            parts.append(f"row {request.row}")
        if request.first >= 0:
            parts.append(row_text.format(request.first))
        parts += [*device, *_slot_lists("host", request.kept)]
        if writing:
            parts.append(f"the prefill server still writes {writing}")
        yield f"{request.name}: {', '.join(filter(None, parts))}"


def _send_changes(before: TierFacts, now: TierFacts) -> Iterator[str]:
    """Yield the changes of parts that the server sends to decode servers."""
    were = {send.job: send for send in before.sends}
    are = {send.job: send for send in now.sends}
    for job, send in are.items():
        if job not in were and send.pool != METADATA:
            end = send.position + len(send.wanted)
            sent = f"device {send.pool} {_range_text(send.slots)}"
            yield f"{sent} is handed in as [{send.position}, {end}) of {send.name}"
    for name in dict.fromkeys(send.name for job, send in were.items() if job not in are):
        yield f"what was handed in of {name} is read, or given up"


def _operation_changes(before: TierFacts, now: TierFacts) -> Iterator[str]:
    """Yield the changes of operations of the storage."""
    were = {op.job: op for op in before.operations}
    are = {op.job: op for op in now.operations}
    for number in sorted(were | are):
        was = were.get(number)
        operation = are.get(number)
        if operation is None:
            yield f"{were[number].label} is over"
        elif was is None or was != operation:
            has = " ".join(_slot_lists("host", operation.slots))
            moves = " ".join(_slot_lists("host", operation.moving))
            parts = [operation.state, has, f"the backend still moves {moves}" if moves else ""]
            yield f"{operation.label}: {', '.join(filter(None, parts))}"
    for page in now.stored:
        where = f"host {page.pool} {_range_text(page.slots)}"
        content = "a state" if page.pool == "state" else path_text(page.found)
        yield f"{where} is stored under hash {page.key}: {content}"
    for pool, slots in now.returned.items():
        if slots and slots != before.returned.get(pool):
            yield f"host {pool} {_range_text(slots)} waits to be freed"


def _read_text(now: TierFacts) -> Iterator[str]:
    if now.reads:
        last = max(read.position for read in now.reads)
        yield f"{now.reads[0].holder} reads [0, {last + 1})"
