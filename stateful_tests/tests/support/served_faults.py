"""Planted faults in whole schedulers, which clients drive until a judge finds the fault."""

from pathlib import Path

import pytest

from impl.adapter import UnusableImplementation
from impl.sglang.server import environment
from impl.sglang.server.runs import WholeScheduler
from stateful_tests.tests.support.planted_faults import PlantedFault, checkout_with
from stateful_tests.watched.servers import scheduler_runs
from stateful_tests.watched.servers.server_pairs import PairPopulation
from stateful_tests.watched.servers.population import Population

RUNS = 60


def faults_in_servers(
    fault: PlantedFault, runs: Population | PairPopulation, judge: str, folder: Path
) -> set[str]:
    """Return the judges, and the keys of their new findings, in runs until `judge` is among them."""
    release = fault.spec.version or ""
    try:
        python = environment.python_of(release)
    except UnusableImplementation as error:
        pytest.skip(f"no server environment: {error}")
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    checkout_with(packages, folder, fault, package="sglang")
    runner = WholeScheduler(python, folder)
    faults_seen = set[str]()
    try:
        for _ in range(RUNS):
            judged = scheduler_runs.serve(runner, scheduler_runs.ServedRun(release, *runs.draw()))
            if isinstance(runs, Population):
                runs.record_run(judged.validated.reached)
            faults_seen |= {name for each in judged.new for name in (each.judge, each.key)}
            if judge in faults_seen:
                break
    finally:
        runner.close()
    return faults_seen
