"""Runs of releases with planted faults: what sees each fault first.

python -m stateful_tests.tests.support.fault_runs SUITE [NAME...]
    looks for each fault with random runs; prints how soon it is found and by what, and to stderr the
    fewest commands that show it; exits with 1 if a fault survives, with 2 without the server environment
    that whole schedulers need
python -m stateful_tests.tests.support.fault_runs SUITE --replay
    runs the commands of all faults, with the fault and without; prints what sees each as JSON (no suite of
    whole schedulers: clients show their faults, not commands)
"""

import json
import sys
import tempfile
import time
import unittest
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ci.export import engine_test
from ci.export.recorded_run import NotExportable
from impl.adapter import UnusableImplementation
from impl.sglang.server import environment
from impl.sglang.server.runs import WholeScheduler
from reference.commands import Mode
from reference.system_kinds import PAIRS, TIERS
from stateful_tests.check import run_driver, check_plans, run_batches
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace, Violation
from stateful_tests.shrink.minimise import failing_prefix, minimise, violation_of_clause
from stateful_tests.shrink.shrink_passes import shrink
from stateful_tests.tests.support.loaded_releases import loaded_release, plant_in
from stateful_tests.tests.support.planted_faults import (
    Edit,
    PlantedFault,
    PlantedFaultError,
    checkout_with,
    config_of,
    planted_faults,
    stated_sizes,
)
from stateful_tests.traces.notation import format_command
from stateful_tests.watched.servers import scheduler_runs
from stateful_tests.watched.servers.population import Population
from stateful_tests.watched.servers.server_pairs import PairPopulation


class Found(NamedTuple):
    """Random runs have seen a fault by these clauses or judges.

    by: clauses, the headline first, or judges; none if the fault survives.
    runs, steps: driven until then, or all in vain. A step is a command, or a pass of a scheduler.
    trace: the run of commands that shows the fault.
    """

    by: tuple[str, ...]
    runs: int
    steps: int
    trace: Trace | None = None


@dataclass(frozen=True)
class Suite:
    """The faults of a file, and how they are looked for.

    core: of a tree with a host tier, "rust" where it is in Rust.
    images: of an engine, those of prompts with images, which a process of their own loads.
    runs: random runs of each preset.
    seeds: how often they are drawn anew.
    exports: the unit tests that the commands export as are run too.
    """

    file: str
    core: str = ""
    images: bool = False
    runs: int = 60
    seeds: int = 1
    exports: bool = False

    @cached_property
    def faults(self) -> dict[str, PlantedFault]:
        """Those that the release has the code for; without mends."""
        others = "unified_cache/" if self.core else "rust_tree_core/"
        return {
            name: fault
            for name, fault in planted_faults(self.file).items()
            if not fault.mended
            and others not in fault.file
            and ("images" in fault.spec.ways) is self.images
        }

    @cached_property
    def mends(self) -> list[Edit]:
        """The mends are put in with every fault."""
        every = planted_faults(self.file).values()
        return [edit for fault in every if fault.mended for edit in fault.edits]

    def system(self, fault: PlantedFault) -> Any:
        """Return the release that a fault is put into."""
        ways = (self.core, *fault.spec.ways) if self.core else fault.spec.ways
        return loaded_release(fault.spec.in_way("+".join(ways)))

    def look_for(self, fault: PlantedFault, seed: int) -> Found:
        """Return the first random run that violates with a fault what it does not without."""
        system = self.system(fault)
        presets = presets_for(fault)
        plan = check_plans.plan("smoke", presets=presets, examples=self.runs, seed=seed)
        runs = commands = 0
        for example in range(self.runs):
            for preset in presets:
                config = run_batches.with_stated_sizes(fault.kind.machine, preset, Mode.FAITHFUL)
                batch = run_batches.RunBatch(config, range(example, example + 1))
                with plant_in(system, [*self.mends, *fault.edits]):
                    [(count, violations)] = run_driver.drive(system, plan, batch).runs
                runs += 1
                commands += count
                for violation, trace in violations:
                    if fault.kind is PAIRS and trace.geometry != config.sizes:
                        continue
                    with plant_in(system, self.mends):
                        conforms = violation_of_clause(system, trace, violation.clause) == ()
                    if conforms:
                        return Found(violation.clauses, runs, commands, trace)
        return Found((), runs, commands)


@dataclass(frozen=True)
class ServedSuite:
    """Faults in whole schedulers, which clients drive until the judge that a fault names finds it.

    files: of a host tier's those faults alone that state a server; a judge of their logs finds them.
    first_seed: of the clients.
    """

    files: tuple[str, ...]
    first_seed: int
    pair: bool = False
    runs: int = 60
    seeds: int = 1

    @cached_property
    def faults(self) -> dict[str, PlantedFault]:
        """Those that clients reach."""
        every = [fault for file in self.files for fault in planted_faults(file).items()]
        return {name: fault for name, fault in every if fault.server or fault.kind is not TIERS}

    def look_for(self, fault: PlantedFault, seed: int) -> Found:
        """Return the judges, and the keys of their findings, of the runs until the named one is among them.

        Another judge alone says nothing: a busy machine may have cut a run short.
        """
        named = "log" if fault.kind is TIERS else fault.clause
        release = fault.spec.version or ""
        python = environment.python_of(release)
        [packages] = python.parents[1].glob("lib/python*/site-packages")
        draws: Population | PairPopulation
        if self.pair:
            draws = PairPopulation(self.first_seed + seed, fixed=fault.server)
        else:
            draws = Population(self.first_seed + seed, fixed=fault.server, impatient=fault.impatient)
        seen = set[str]()
        passes = 0
        with tempfile.TemporaryDirectory(prefix="kvspec-") as folder:
            checkout = checkout_with(packages, Path(folder), fault, package="sglang")
            with closing(WholeScheduler(python, checkout)) as runner:
                for number in range(self.runs):
                    run = scheduler_runs.ServedRun(release, *draws.draw())
                    judged = scheduler_runs.serve(runner, run)
                    draws.record_run(judged.validated.reached)
                    passes += judged.outcome.forwards
                    seen |= {name for each in judged.new for name in (each.judge, each.key)}
                    if named in seen:
                        return Found((named, *sorted(seen - {named})), number + 1, passes)
        return Found((), self.runs, passes)


SUITES: dict[str, Suite | ServedSuite] = {
    "vllm": Suite("vllm/faults.toml", exports=True),
    "vllm+images": Suite("vllm/faults.toml", images=True, seeds=3, exports=True),
    "tiers": Suite("tiers/faults.toml", runs=40, seeds=3),
    "tiers+rust": Suite("tiers/faults.toml", core="rust", runs=40, seeds=3),
    "pairs": Suite("pairs/faults.toml", seeds=3),
    "lmdeploy": Suite("lmdeploy/faults.toml", runs=12),
    "lmdeploy+pair": Suite("lmdeploy/pair_faults.toml", seeds=3),
    "transformers": Suite("transformers_paging/faults.toml", runs=12),
    "served": ServedSuite(("watched/faults.toml", "tiers/faults.toml"), first_seed=1),
    "served+pair": ServedSuite(("watched/pair_faults.toml",), first_seed=12, pair=True),
}


def presets_for(fault: PlantedFault) -> Sequence[str]:
    """Where random runs look for a fault: the presets that it states; else those of its sizes, of a host tier
    all of servers of its kind, with a storage or which only decode."""
    if fault.presets:
        return fault.presets
    if not fault.sizes:
        raise PlantedFaultError(f"{fault.name}: it has neither presets nor sizes to look for it on")
    if fault.kind is PAIRS:
        return [str(fault.sizes)]
    sizes: Any = config_of(fault.kind, fault.sizes)
    return [
        name
        for name, each in TIERS.presets.items()
        if (bool(each.storage), each.decode) == (bool(sizes.storage), sizes.decode)
    ]


def smallest(suite: Suite, fault: PlantedFault, trace: Trace, clause: str) -> Trace:
    """The fewest commands that show a fault; of two servers on the sizes of its preset."""
    system = suite.system(fault)
    with plant_in(system, [*suite.mends, *fault.edits]):
        if fault.kind is not PAIRS:
            return minimise(system, trace, clause, budget=300)

        def still_fails(commands: Any) -> Any:
            return failing_prefix(system, clause, replace(trace, commands=commands))

        return replace(trace, commands=shrink(trace.commands, still_fails, budget=500))


def see_by_commands(suite: Suite, fault: PlantedFault) -> dict[str, Any]:
    """Run the commands of a fault with it and without it, and the unit tests that they export as."""
    system = suite.system(fault)
    trace = fault.trace()
    ends = []
    text = ""
    with plant_in(system, [*suite.mends, *fault.edits]):
        violation = replay(system, trace).violation
        if suite.exports:
            text = _export_suite(system, trace)
            ends.append(_test_text(text))
    with plant_in(system, suite.mends):
        healthy = replay(system, trace).violation
        if suite.exports:
            ends.append(_test_text(text))
    return {"with": _clauses(violation), "without": _clauses(healthy), "exported": ends}


def faults_seen(suite: Suite) -> dict[str, dict[str, Any]]:
    """Do that for each fault of the suite, by its name."""
    return {name: see_by_commands(suite, fault) for name, fault in suite.faults.items()}


def _clauses(violation: Violation | None) -> list[str]:
    return [] if violation is None else [*violation.clauses]


def _export_suite(system: Any, trace: Trace) -> str:
    try:
        return engine_test.unit_test(trace, "trace.json", system)
    except NotExportable as why:
        return f"# {why}"


def _test_text(text: str) -> str:
    """How an exported test ends in this process."""
    if text.startswith("#"):
        return text
    space: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), space)
    case = next(
        kind
        for kind in space.values()
        if isinstance(kind, type)
        and kind.__module__ == "exported"
        and issubclass(kind, unittest.TestCase)
    )
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if result.errors:
        return result.errors[0][1]
    return "fails" if result.failures else "passes"


def _print_smallest(suite: Suite, fault: PlantedFault, trace: Trace, clause: str) -> None:
    """Print, as lines of the fault's table, the fewest commands that show it."""
    small = smallest(suite, fault, trace, clause)
    shown = "; ".join(map(format_command, small.commands))
    print(f"[{fault.name}]\ncaught_by = {clause!r}", file=sys.stderr)
    print(f"sizes = {stated_sizes(small.geometry)}\ncommands = {shown!r}", file=sys.stderr)


def _is_found(suite: Suite | ServedSuite, fault: PlantedFault) -> bool:
    """Look for a fault with each seed, and print what was found. False if it survives one."""
    verdicts = []
    survives = False
    for seed in range(suite.seeds):
        began = time.monotonic()
        found = suite.look_for(fault, seed)
        survives = survives or not found.by
        seen = f"{', '.join(found.by)} after" if found.by else "survives"
        steps = "commands" if isinstance(suite, Suite) else "passes"
        took = f"{time.monotonic() - began:.1f} s"
        verdicts.append(f"{seen} {found.runs} runs, {found.steps} {steps}, {took}")
        if isinstance(suite, Suite) and found.trace is not None and seed == 0:
            _print_smallest(suite, fault, found.trace, found.by[0])
    print(f"| {fault.name} | {' | '.join(verdicts)} |", flush=True)
    return not survives


def main(name: str = "", *names: str) -> int:
    """Run a suite; 0 unless a fault survives."""
    if name not in SUITES:
        raise SystemExit(f"no suite is called {name!r}; one of {', '.join(SUITES)}")
    suite = SUITES[name]
    if names == ("--replay",):
        if isinstance(suite, ServedSuite):
            raise SystemExit(f"{name}: clients show these faults, not commands")
        print(json.dumps(faults_seen(suite)))
        return 0
    for each in names:
        if each not in suite.faults:
            raise SystemExit(f"suite {name} has no fault {each!r}")
    try:
        found = [_is_found(suite, suite.faults[each]) for each in names or suite.faults]
    except UnusableImplementation as error:
        print(f"no server environment: {error}", file=sys.stderr)
        return 2
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
