"""Tests of an engine beside the reference: a Hypothesis machine, a check of some volume, a saved trace."""

import io
import os
import re
import sys
import time
import unittest
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Union, cast

from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from ci.commands.saved_traces import save_traces
from ci.commands.shared import SystemSelector
from ci.report import report_data as report
from ci.report import text_output, run_text
from impl.adapter import AnySystem, System, UnusableImplementation
from impl.engines import DriveOptions
from impl.system_spec import SystemSpec
from kvspec import plugin
from reference.commands import Mode
from reference.geometry import PRESETS, Geometry, preset
from stateful_tests.check import campaign, check_plans
from stateful_tests.check.finder import Finder
from stateful_tests.generate.run_profile import MACHINES
from stateful_tests.lockstep import replays
from stateful_tests.lockstep.check_results import CheckResult, Finding
from stateful_tests.lockstep.run_results import Run, Trace
from stateful_tests.lockstep.system_names import as_base, driven_system
from stateful_tests.machines.server_machine import ServerMachine, Violated
from stateful_tests.machines.shrinking import bounded_shrinking
from stateful_tests.machines.targets import MachineTarget
from stateful_tests.traces import trace_files

# A factory, a system, or what `kvspec check --impl` takes. None stands for torch. `--kvspec-impl` overrides
# all.
Make = Union[Callable[[], System], System, str, None]

_EXAMPLES = {"smoke": 50, "pr": 500, "nightly": 5000}  # runs of a machine, where a tier is given


class ClauseViolated(AssertionError):
    """A system violates the specification. The message has the smallest trace of each violated clause.

    runs: the replays of these traces.
    """

    def __init__(self, message: str, runs: Sequence[Run]) -> None:
        super().__init__(message)
        self.runs = tuple(runs)


class Incomplete(AssertionError):
    """Nothing was violated, and the plan was not done: the message says why."""


def machine(
    make: Make = None,
    *,
    machines: Sequence[str] = tuple(MACHINES),
    presets: Sequence[str] | None = None,
    geometry: Geometry | None = None,
    modes: Sequence[Mode] = (),
) -> type[ServerMachine]:
    """Return a Hypothesis machine that drives what `make` returns beside the reference. Its `TestCase` is a
    test.

    machines: sessions, tree, both.
    presets: names of sizes, which are fitted to the system; by default all, and drawn sizes.
    geometry: the only sizes; a system that refuses them fails the test.
    modes: free, faithful; by default those of the system.

    What the system cannot do is left out. Hypothesis's settings hold, given as ever (a profile, `@settings`),
    but for deadlines. Its shrinker runs first, for three seconds at most; then commands, sizes and lengths
    are shrunk until none can be spared. An engine that schedules by itself has no machine: `check` is its
    test.
    """
    sizes = [geometry] if geometry is not None else [preset(name) for name in presets or PRESETS]
    vary = presets is None and geometry is None
    check_plans.plan("smoke", machines=machines)  # raises ValueError for an unknown name
    exactly = geometry is not None
    target = MachineTarget(lambda: _beside_a_model(make), machines, sizes, modes, vary, exactly)
    # The name is what Hypothesis's database knows a machine by.
    name = " ".join(
        [_name_of_system(make) or "local", *machines, *(() if vary else map(str, sizes)), *modes]
    )
    driven = type(name, (ServerMachine,), {"target": target, "__doc__": ServerMachine.__doc__})
    body = {"machine": driven, "make": staticmethod(lambda: make), "settings": settings()}
    driven.TestCase = type(f"{name}.TestCase", (_MachineTest,), body)  # type: ignore[attr-defined]
    return driven


class _MachineTest(unittest.TestCase):
    """A machine as a test."""

    machine: ClassVar[type[ServerMachine]]
    make: ClassVar[Callable[[], Make]]
    settings: ClassVar[settings]

    def runTest(self) -> None:  # noqa: N802
        """Drive the machine. Fail with the smallest trace of each violated clause that the base does not show
        as well."""
        __tracebackhide__ = True
        target = self.machine.target
        self._skip_if_unusable(target)
        target.base = _base()
        machine_class = self.machine
        began = time.monotonic()
        machine_class.forget()
        notes: list[str] = []
        try:
            with bounded_shrinking():
                run_state_machine_as_test(machine_class, settings=_for_one_failure(self.settings))
        except (Violated, Flaky) as error:
            if not machine_class.found:
                raise
            notes = getattr(error, "__notes__", [])
        if not machine_class.found:
            return
        finder = Finder(target.system, target.base, once=True)
        finder.started = began
        finder.commands = machine_class.driven
        for clause, (violation, trace) in machine_class.found.items():
            finder.take(violation.only(clause), trace)
        findings = sorted(finder.findings(), key=lambda found: [*machine_class.found].index(found.clause))
        blob = re.search(r"reproduce_failure\(.*?\)", "\n".join(notes))
        again = f"again   {blob[0]}(kvspec.machine(...)).TestCase" if blob else ""
        raise _failure(findings, type(self).make(), again) from None

    runTest.is_hypothesis_test = True  # type: ignore[attr-defined]

    def _skip_if_unusable(self, target: MachineTarget) -> None:
        try:
            assert target.configurations
        except UnusableImplementation as error:
            if plugin.chosen.impl is None:
                raise
            self.skipTest(str(error))

    @classmethod
    def tearDownClass(cls) -> None:
        _close(cls.machine.target)


def _for_one_failure(user_settings: settings) -> settings:
    """Return the user's settings, for a run that ends with its first failure and shows it in our words."""
    return settings(
        user_settings,
        phases=[phase for phase in user_settings.phases if phase is not Phase.explain],
        max_examples=_EXAMPLES.get(plugin.chosen.tier or "", user_settings.max_examples),
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def check(
    make: Make = None,
    *,
    tier: str | None = None,
    machines: Sequence[str] | None = None,
    presets: Sequence[str] | None = None,
    modes: Sequence[Mode] | None = None,
    examples: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    allow_incomplete: bool = False,
) -> CheckResult:
    """Check a system as `kvspec check` does. Raises ClauseViolated with the smallest trace of every
    violated clause, and Incomplete where nothing was found, but the plan was not done: a system that
    refuses all violates nothing.
    """
    __tracebackhide__ = True
    plan = check_plans.plan(
        plugin.chosen.tier or tier or "smoke",
        machines=machines,
        presets=presets,
        modes=modes,
        examples=examples,
        steps=steps,
        seed=seed,
    )
    system = _system(make)
    base = _base()
    try:
        result = campaign.run(system, plan, base=base)
        if new := [found for found in result.findings if not found.old]:
            raise _failure(new, make)
        if result.incomplete and not allow_incomplete:
            raise Incomplete(
                f"{system.name}: {'; '.join(result.incomplete)} (allow_incomplete=True passes)"
            )
        return result
    finally:
        for opened in (system, base):
            if opened is not None and opened is not make:
                _close(opened)


def replay(trace: Trace | str | os.PathLike[str], make: Make = None) -> Run:
    """Run a trace, or a file with one. Raises ClauseViolated where the system leaves the specification."""
    __tracebackhide__ = True
    loaded = trace if isinstance(trace, Trace) else trace_files.load(trace)
    system = _system(make)
    try:
        run = replays.replay(system, loaded)
    finally:
        if system is not make:
            _close(system)
    if run.violation is not None:
        text = io.StringIO()
        name = "a trace" if loaded is trace else str(trace)
        run_text.replay(text_output.console(text), report.replay_data(name, run))
        raise ClauseViolated(text.getvalue(), [run])
    return run


def _close(opened: AnySystem | MachineTarget) -> None:
    """Close a system. An exception becomes a warning, as in `kvspec check`: it hides no finding."""
    try:
        opened.close()
    except Exception as error:
        warnings.warn(f"close() raises {type(error).__name__}: {error}", stacklevel=2)


def _system(make: Make) -> AnySystem:
    chosen = plugin.chosen
    if chosen.impl is not None or make is None or isinstance(make, str):
        spec = chosen.impl or (make if isinstance(make, str) else "torch")
        return _resolve_target(spec, chosen.sglang_path)
    return make() if callable(make) else make


def _beside_a_model(make: Make) -> System:
    """Return the system of `make`. Raises ValueError for one that a machine cannot drive."""
    system = _system(make)
    kind = system.capabilities.system_kind
    if not kind.modelled:
        if system is not make:
            system.close()
        drives = "kvspec.machine drives systems that are given each batch; kvspec.check(make) checks this one"
        raise ValueError(f"{system.name} {kind.words}: {drives}")
    return cast(System, system)


def _resolve_target(name: str, checkout: str | None = None, *, base_of: str | None = None) -> AnySystem:
    try:
        spec = SystemSpec.parse(name)
        if base_of is not None:
            spec = as_base(spec, SystemSpec.parse(base_of))
        system: AnySystem = driven_system(spec, DriveOptions(checkout, plugin.chosen.device))
    except UnusableImplementation as error:
        raise ValueError(str(error)) from None  # an unknown name is an error, never a skipped test
    return system


def _base() -> AnySystem | None:
    """Return the base, where the command line names one."""
    chosen = plugin.chosen
    return None if chosen.base is None else _resolve_target(chosen.base, base_of=chosen.impl)


def _name_of_system(make: Make) -> str | None:
    """Return the name that `--impl` takes; None when only Python can make it."""
    if plugin.chosen.impl is not None or make is None or isinstance(make, str):
        return plugin.chosen.impl or (make if isinstance(make, str) else "torch")
    name = getattr(make, "__qualname__", "<>")
    return f"{make.__module__}:{name}" if name.isidentifier() else None


def _failure(findings: Sequence[Finding], make: Make, again: str = "") -> ClauseViolated:
    """Save the traces and report the clause, the steps, because, where the trace is and how to replay it."""
    spelled = _name_of_system(make)
    chosen = plugin.chosen
    reports = [report.finding_data(group) for group in report.group_by_cause(findings)]
    selector = SystemSelector(SystemSpec.parse(spelled or ""), chosen.sglang_path, chosen.device)
    save_traces(findings, reports, chosen.save, selector.options)
    text = io.StringIO()
    out = text_output.console(text)
    for number, finding in enumerate(reports, 1):
        if finding["replay"] is not None:
            python = f"kvspec.replay({finding['saved']!r}, make)"
            finding["replay"] = _python_path(spelled) + finding["replay"] if spelled else python
        which = f" (violation {number} of {len(reports)})" if len(reports) > 1 else ""
        run_text.finding(out, finding, f"{finding['implementation']} violates{which}")
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return ClauseViolated("\n".join([*lines, again]).rstrip(), [f.run for f in findings])


def _python_path(spelled: str) -> str:
    """Return the path of a factory's module, if that is below this folder: `kvspec replay` looks only
    here."""
    module = sys.modules.get(spelled.partition(":")[0])
    if ":" not in spelled or module is None or module.__file__ is None:
        return ""
    folder = Path(module.__file__).absolute().parents[module.__name__.count(".")]
    here = Path.cwd()
    if folder == here or not folder.is_relative_to(here):
        return ""
    return f"PYTHONPATH={folder.relative_to(here)} "
