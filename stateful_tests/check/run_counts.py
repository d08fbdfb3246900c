"""Counts of the commands and situations of a check's runs, and what among them speaks against a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from impl.adapter import AnySystem, Capabilities, UnusableImplementation
from reference import model
from reference.commands import kind_name
from reference.geometry import Geometry
from reference.system_kinds import kind_of_config
from stateful_tests.check.corpus import FIXTURE, CorpusLine
from stateful_tests.check.run_driver import lines_of
from stateful_tests.check.run_batches import Configuration, DeclinedCommands, BatchResult
from stateful_tests.check.check_plans import CORPUS, Plan
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep.driven_kinds import check_fits
from stateful_tests.lockstep.lockstep import check_offered
from stateful_tests.lockstep.check_results import OWN, CheckResult

# Runs in which a system refuses all commands of a kind: it does not serve it any more, or never has.
NO_MORE = 10
# What it refuses often it may refuse in all of the last runs by chance: one check in a million.
_BY_CHANCE = 1e-6
# commands: a shorter run takes as much effort; effort for each that is carried out
_SHORT = 30
_MOST = 3


@dataclass(slots=True)
class Counted:
    """The counts of all batches so far."""

    commands: int = 0
    #: commands, with a surcharge for runs that are shorter than _SHORT
    effort: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    carried_out: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    #: kinds that the system alone refuses since it last carried one out, with runs numbered from
    #: the start
    declined: dict[str, DeclinedCommands] = field(default_factory=dict)
    #: runs with a command of the kind that the system could carry out
    tried: Counter[str] = field(default_factory=Counter)
    #: runs that carried one out
    served: Counter[str] = field(default_factory=Counter)
    situations: Counter[str] = field(default_factory=Counter)
    #: situation -> why its line could not be driven
    unfit: dict[str, str] = field(default_factory=dict)
    #: runs that never ended, because a request got no answer
    unanswered: int = 0

    def add(self, driven: BatchResult) -> None:
        """Add the results of a batch. Its runs come one by one."""
        self.refusals += driven.refusals
        self.kinds += driven.kinds
        self.carried_out += driven.carried_out
        self.situations += driven.situations
        self.unfit |= driven.unfit
        self.unanswered += driven.unanswered
        for kind, runs in driven.runs_of.items():
            self.tried[kind] += len(runs)
            self.served[kind] += sum(runs.values())
        for kind in driven.carried_out:
            self.declined.pop(kind, None)
        for kind, declined in driven.declined.items():
            so_far = self.declined.setdefault(
                kind, DeclinedCommands(declined.name, self.commands + declined.since)
            )
            so_far.runs |= {self.runs + run for run in declined.runs}

    def count_run(self, commands: int, *, directed: bool = False) -> None:
        """Count a run.

        directed: it is a line of the corpus, which is as short as possible.
        """
        self.runs += 1
        self.commands += commands
        self.effort += commands if directed else max(commands, _SHORT)

    def enough(self, commands: int) -> bool:
        """Return whether enough commands were carried out, or more would take too much effort."""
        return self.carried_out.total() >= commands or self.effort >= _MOST * commands

    def enter(
        self, result: CheckResult, system: AnySystem, plan: Plan, configs: Iterable[Configuration]
    ) -> None:
        """Enter all counts into a result that has its tallies."""
        can = system.capabilities
        result.refusals = dict(self.refusals.most_common())
        result.commands_by_kind = dict(self.kinds.most_common())
        result.carried_out = dict(self.carried_out.most_common())
        result.situations = dict(sorted(self.situations.items()))
        result.required = self._required_situations(system, plan, configs)
        result.unfit = self.unfit
        result.never_done = self._never_carried_out(can, plan, configs)
        result.unanswered = self.unanswered
        for kind, declined in self.declined.items():
            refusing = len(declined.runs)
            once = kind in self.carried_out
            if refusing >= NO_MORE and (not once or self._has_stopped(kind, refusing)):
                result.declined[declined.name] = declined.since if once else 0
        came_up = [clause for clause, tally in result.tallies.items() if tally.reached]
        excused = tuple(clause for clause in came_up if clause in can.waived or clause in can.known)
        result.excused = excused if 2 * len(excused) > len(came_up) else ()
        result.unreached = tuple(clause for clause in result.tallies if clause not in came_up)
        # A narrowed run, or a system that offers less, need not trigger every clause.
        own = system.name in OWN or replace(can, kind="") == Capabilities()
        if own and plan.whole and plan.tier != "smoke" and not result.stopped:
            result.untriggered = result.unreached

    def _has_stopped(self, kind: str, refusing: int) -> bool:
        """Return whether the last runs refuse all commands of a kind: too many for a system that works
        as before."""
        before = max(self.tried[kind] - refusing, self.served[kind])
        return (1 - self.served[kind] / before) ** refusing < _BY_CHANCE

    def _required_situations(
        self, system: AnySystem, plan: Plan, configs: Iterable[Configuration]
    ) -> tuple[str, ...]:
        """Return the situations of the corpus that the system can be driven into, whether or not the
        plan came to them."""
        of_corpus = [config for config in configs if config.machine == CORPUS]
        lines = (line for config in of_corpus for line in lines_of(system, plan, config.mode))
        met = self.situations.keys()
        unfit = self.unfit.keys()
        return tuple(sorted({
            line.situation for line in lines
            if line.origin != FIXTURE
            and (line.situation in met or (line.situation not in unfit and offers_all(system, line)))
        }))  # fmt: skip

    def _never_carried_out(
        self, can: Capabilities, plan: Plan, configs: Iterable[Configuration]
    ) -> tuple[str, ...]:
        """Return the commands that the system offers and that it carried out in no run of a plan with
        the corpus."""
        if not can.system_kind.modelled or not plan.corpus:
            return ()
        machines = {config.machine for config in configs} - {CORPUS}
        offered = {kind for machine in machines for kind in MACHINES[machine]}
        return tuple(
            sorted(
                kind_name(kind)
                for kind in offered
                if kind.__name__ in can.commands and not self.carried_out[kind.__name__]
            )
        )


def offers_all(system: AnySystem, line: CorpusLine) -> bool:
    """Return whether the system offers everything that the line needs. Whether it can be built in its
    sizes is not tried."""
    on: Any = system
    try:
        check_fits(system, line.geometry, line.commands)
        if not kind_of_config(line.geometry).modelled:
            return True
        trace = line.trace
        state = model.initial(trace.sizes(Geometry), line.mode)
        for command in trace.row_commands:
            check_offered(on, state, command)
            state, _ = model.step(state, command)
    except UnusableImplementation:
        return False
    return True
