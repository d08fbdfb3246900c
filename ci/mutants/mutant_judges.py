"""Judges of a mutant: it is put into a process of its own, and its judges run until one notices it.

The code of one function is replaced where it is, so that each module that has imported it runs the mutant.
Nothing of it is left when the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import NamedTuple

import msgspec

from impl.adapter import UnusableImplementation
from impl.process.worker import end_with_parent
from stateful_tests.check.campaign import first_violation
from stateful_tests.check.check_plans import Plan
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from ci.mutants.mutation_operators import Mutant, files, mutants_of
from stateful_tests.traces.trace_files import load

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.json")
OWN_TREE = "impl.examples.own_tree_engine:make"
_MEMORY = 4 << 30  # bytes that a mutant may ask for beyond what there is


class Area(NamedTuple):
    """Files that are judged alike.

    systems: systems for random runs, in this order.
    fixtures: those of the named bugs are replayed first.
    tests: run last, on mutants that nothing else has noticed.
    without: beginnings of the names of mutants that are left out.
    """

    folder: str
    systems: tuple[str, ...]
    tests: tuple[str, ...]
    fixtures: bool = False
    without: tuple[str, ...] = ()


_TESTS = "stateful_tests/tests"
# What is counted, and judges nothing.
_SITUATIONS = tuple(
    f"reference/clauses/{name}:"
    for name in (
        "memory_checks.py _check_counts_something",
        "step.py Step.grew",
        "step.py Step.evicted_any",
        "step.py Step.freed_something",
        "tree_shape.py shrank",
        "tree_locks.py locks_anything",
    )
)
_OF_CLAUSES = tuple(
    f"{_TESTS}/reference/test_{name}.py"
    for name in ("memory_accounts", "clause_independence", "clauses", "clauses_of_owners")
) + (f"{_TESTS}/report/test_because.py",)
_OF_BLOCKS = (f"{_TESTS}/vllm/test_clause_rows.py",)
_OF_TIERS = (
    f"{_TESTS}/tiers/test_clauses.py", f"{_TESTS}/tiers/test_before_and_after.py",
    f"{_TESTS}/tiers/test_lock_ranges.py", f"{_TESTS}/tiers/test_storage_waits.py", *_OF_BLOCKS
)  # fmt: skip
_OF_PAIRS = tuple(f"{_TESTS}/pairs/test_{name}.py" for name in ("clauses", "host", "states"))
# Of systems that schedule by themselves: no random run on torch asks whether anybody is answered.
_OF_PROGRESS = (
    f"{_TESTS}/reference/test_standstill_detector.py", f"{_TESTS}/reference/test_standstill_states.py",
    *_OF_BLOCKS, f"{_TESTS}/tiers/test_clauses.py",
)  # fmt: skip
# What calls vLLM itself: the faults of `stateful_tests/tests/vllm` go through it.
_OF_RELEASES = (
    "impl/vllm/offload.py expose:",
    *(
        f"impl/vllm/bare_connectors.py {name}"
        for name in ("Offloads.__init__:", "peer:", "create_connector:", "worker_of:")
    ),
)
_OF_LOGS = tuple(
    f"{_TESTS}/watched/test_{name}.py"
    for name in (
        "noticed_changes",
        "explained_ends",
        "changes",
        "validation",
        "turns_in_logs",
        "host_tiers",
        "recurrent_states",
        "pages_in_logs",
        "log_files",
        "kept_states",
        "played_servers",
        "watcher",
        "transfers",
        "pairs",
        "pair_judges",
        "line_order",
    )
)
AREAS = (
    *(Area(f"reference/{name}.py", (), _OF_PROGRESS) for name in
      ("standstill_detector", "clauses/progress", "blocks/progress", "tiers/progress")),
    Area("impl/torch_kv/kernels.py", (), (f"{_TESTS}/torch_kv/test_kernels.py",)),
    Area("impl/torch_kv", ("torch",), (f"{_TESTS}/torch_kv",),
         without=("impl/torch_kv/system.py TorchKV.capabilities:",)),
    Area("reference/clauses", ("torch", OWN_TREE), _OF_CLAUSES, fixtures=True,
         without=("reference/clauses/registry.py", *_SITUATIONS)),
    Area("reference/blocks", (), _OF_BLOCKS,
         without=("reference/blocks/clauses/encoder_cache.py _batch_inputs:",  # what is counted
                  *(f"reference/blocks/{name}.py" for name in ("commands", "config", "facts")))),
    Area("reference/tiers", (), _OF_TIERS,
         # what is counted, and what test_releases.py and test_sizes.py test
         without=("reference/tiers/host_records.py HostRecords.clauses_reached",
                  *(f"reference/tiers/{name}.py" for name in ("commands", "config", "facts")))),
    Area("reference/pairs", (), _OF_PAIRS,
         without=tuple(f"reference/pairs/{name}.py" for name in ("commands", "config", "facts"))),
    *(Area(f"impl/vllm/{name}.py", (), (f"{_TESTS}/vllm/test_connectors.py",), without=_OF_RELEASES)
      for name in ("offload", "bare_connectors")),
    Area("stateful_tests/watched", (), _OF_LOGS,
         without=("stateful_tests/watched/servers", "stateful_tests/watched/server_situation.py")),
    Area("stateful_tests/lockstep/tree_adoption.py", (OWN_TREE,),
         (f"{_TESTS}/adapters/test_own_tree_engine.py",)),
    Area("reference/recurrent_states.py", ("torch",), (f"{_TESTS}/reference", *_OF_BLOCKS)),
    # The vocabulary is everybody's: two systems that share a fault agree.
    Area("reference", ("torch", OWN_TREE),
         (f"{_TESTS}/reference", f"{_TESTS}/adapters/test_own_tree_engine.py"),
         without=("reference/clauses", "reference/blocks", "reference/tiers", "reference/commands.py",
                  "reference/token_ids.py", "reference/geometry.py",
                  "reference/cursors.py owed_")),  # of which proofs alone ask
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Noticed:
    """A judge that has noticed a mutant.

    by: the clause, BROKEN, fixture, test or "no answer"; "" where nothing did.
    where: the system.
    after: commands of random runs before it.
    """

    by: str
    where: str = ""
    after: int = 0
    seconds: float = 0.0


class NoMutants(Exception):
    """The selection has none, a file cannot be used, or no verdict counts: one line says which."""


def area_of(mutant: Mutant) -> Area | None:
    """Return how a mutant is judged, None where it is not."""
    for area in AREAS:
        if mutant.name.startswith(area.folder) and not mutant.name.startswith(area.without):
            return area
    return None


def sample(only: tuple[str, ...], size: int | None, seed: int) -> tuple[list[Mutant], int]:
    """Return mutants of `only` (files or folders from the root, functions such as FILE:Class.name, or
    names of mutants; all that exist), and the total. The draw and its order follow from the seed and
    their names: changes elsewhere move none."""
    mutant_by_name: dict[str, Mutant] = {}
    for selection in only or [area.folder for area in AREAS]:
        place, _, name = selection.partition(" ")
        folder, _, function = place.partition(":")
        known = [m for path in files(ROOT, folder) for m in _mutants(path) if area_of(m)]
        if name:
            known = [m for m in known if m.name == selection]
        elif function:
            known = [m for m in known if m.function == function]
        wanted = {m.name: m for m in known}
        if not wanted:
            folders = ", ".join(area.folder for area in AREAS)
            raise NoMutants(
                f"--only {selection}: it has no mutant; they are in {folders}, from the root"
            )
        mutant_by_name |= wanted
    names = sorted(mutant_by_name, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return [mutant_by_name[name] for name in names[:size]], len(mutant_by_name)


def _mutants(path: str) -> list[Mutant]:
    return mutants_of(path, (ROOT / path).read_bytes())


def accepted_mutants() -> dict[str, str]:
    """Return mutants that nothing need notice, by name, with the reason. Raises NoMutants."""
    try:
        return msgspec.json.decode(ACCEPTED.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError) as error:
        raise NoMutants(f"{ACCEPTED}: {error}") from error


def prepare() -> None:
    """Load the modules of the judges, so that a forked process has them."""
    for name in dict.fromkeys(system for area in AREAS for system in area.systems):
        resolve(name)
    regressions()


def judge(plan: Plan, limit_s: float, mutant: Mutant) -> Noticed:
    """Find what notices the mutant, in a process that is forked for it."""
    area = area_of(mutant)
    assert area is not None
    return _ask_in_process(plan, limit_s, area, mutant)


def notice_unchanged(plan: Plan, limit_s: float, area: Area) -> Noticed:
    """Return what notices unchanged code: it would notice any mutant of the area."""
    return _ask_in_process(plan, limit_s, area, None)


def _ask_in_process(plan: Plan, limit_s: float, area: Area, mutant: Mutant | None) -> Noticed:
    context = get_context("fork")
    own_end, child_end = context.Pipe(duplex=False)
    process = context.Process(target=_judge, args=(plan, area, mutant, child_end))
    began = time.monotonic()
    process.start()
    child_end.close()
    try:
        verdict = own_end.recv() if own_end.poll(limit_s) else Noticed("no answer", f"in {limit_s:g} s")
    except EOFError:
        verdict = Noticed("no answer", "the process ended")
    finally:
        process.kill()
        process.join()
        own_end.close()
    if isinstance(verdict, Exception):
        raise verdict
    return Noticed(verdict.by, verdict.where, verdict.after, round(time.monotonic() - began, 2))


def _judge(plan: Plan, area: Area, mutant: Mutant | None, answer: Connection) -> None:
    end_with_parent()
    memory_in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory_in_use + _MEMORY,) * 2)
    try:
        if mutant is not None:
            put_in(mutant)
    except Exception as error:  # that is ours: nobody has noticed anything
        answer.send(error)
        return
    if area.fixtures:  # what is left to random runs then are false alarms, and those come soon
        plan = replace(plan, commands=plan.commands // 4)
    runs = [functools.partial(_random_runs, plan, system) for system in area.systems]
    tests = functools.partial(_test_runs, area.tests)
    judges: list[Callable[[], Noticed | None]]
    judges = [_fixture_runs, tests, *runs] if area.fixtures else [*runs, tests]
    answers = (ask() for ask in judges)
    answer.send(next(filter(None, answers), Noticed("")))


def put_in(mutant: Mutant) -> None:
    """Put a mutant into every function that has the code, loaded now or later, and clear memoized
    values."""
    file = str(ROOT / mutant.path)
    module = compile(mutant.apply_to(Path(file).read_bytes()), file, "exec")
    [new] = [c for c in _code_objects(module) if _is_same_function(c, mutant)]
    name = mutant.path.removesuffix(".py").replace("/", ".")
    loader = SourceFileLoader(name, file)
    loader.get_code = lambda _: module  # type: ignore[assignment, method-assign]
    spec = spec_from_file_location(name, file, loader=loader)
    sys.meta_path.insert(
        0, SimpleNamespace(find_spec=lambda wanted, *_: spec if wanted == name else None)
    )
    replaced = name not in sys.modules
    gc.unfreeze()  # else it leaves out what was frozen, as tests do
    for thing in gc.get_objects():
        if type(thing) is functools._lru_cache_wrapper:
            thing.cache_clear()
        elif type(thing) is FunctionType and thing.__code__.co_filename == file:
            old = thing.__code__
            if _is_same_function(old, mutant):
                # A `super()` may be gone, and with it the free variables.
                thing.__code__ = new if new.co_freevars else new.replace(co_freevars=old.co_freevars)
                replaced = True
    if not replaced:
        raise RuntimeError(f"{mutant.name}: nobody has this function")


def _is_same_function(code: CodeType, mutant: Mutant) -> bool:
    return (code.co_qualname, code.co_firstlineno) == (mutant.function, mutant.first)


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _code_objects(inner)


# -- the judges -----------------------------------------------------------------------------------


def _random_runs(plan: Plan, name: str) -> Noticed | None:
    """Drive random runs, as `kvspec check` does."""
    try:
        violation = first_violation(resolve(name), plan)
    except UnusableImplementation as error:
        return Noticed("BROKEN", f"{name}: {error}")
    except (
        Exception
    ) as error:  # of the reference, a clause or a generator: the check itself comes to an end
        return Noticed("the check breaks", f"on {name}: {type(error).__name__}: {error}")
    return violation and Noticed(violation[0].clause, f"random runs on {name}", violation[1])


@functools.lru_cache(maxsize=1)
def regressions() -> list[tuple[str, Trace]]:
    return [
        (path.stem, load(path))
        for path in sorted((ROOT / "fixtures" / "regressions").glob("*.json"))
    ]


def _fixture_runs() -> Noticed | None:
    """Replay fixtures: each conforms on the unchanged code, and its clause catches its bug."""
    for name, trace in regressions():
        impls = ["torch"]
        if trace.bug:
            impls.append(f"torch+{trace.bug}")
        for impl in impls:
            own_clause = trace.clause if "+" in impl else None
            try:
                violation = replay(resolve(impl), trace).violation
            except Exception as error:
                return Noticed("the check breaks", f"{name}: {type(error).__name__}: {error}")
            if (violation.clause if violation else None) != own_clause:
                clause = violation and violation.clause
                return Noticed("a fixture", f"{name}: {own_clause} expected, {clause} found")
    return None


def _test_runs(paths: tuple[str, ...]) -> Noticed | None:
    """Run tests in this process, up to the first that fails. Return it as what notices the mutant; None where
    all pass."""
    import pytest

    class _First:
        failed = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                self.failed = self.failed or report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                self.failed = self.failed or report.nodeid

    first_failure = _First()
    os.chdir(ROOT)
    # Asserts as they are: what pytest rewrites it loads itself, without what was put in.
    options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main([*options, *paths], [first_failure])
    return Noticed("a test", first_failure.failed) if first_failure.failed else None
