"""Many machines: a cluster of two nodes on this one, and one store of failures.

Skipped where Ray, or Redis and its server, are not installed (extra `cluster`).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from impl.torch_kv import TorchKV
from reference.clauses import CLAUSES, Failure
from reference.clauses.step import Step
from reference.commands import Finish
from stateful_tests.check import campaign
from stateful_tests.coverage.scopes import SCOPES
from stateful_tests.explore import cluster
from stateful_tests.explore import runner as search
from stateful_tests.explore.search_base import Exploration
from stateful_tests.lockstep import systems as registry


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of two nodes with a core each; Ray is connected to it."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvspec[cluster]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.other = made.add_node(num_cpus=1)
    made.ray = cluster.connect(made.address)
    yield made
    made.ray.shutdown()
    made.shutdown()


def counts(e: Exploration) -> tuple[object, ...]:
    # How often a situation was met depends on page ids, thus on which of equal states was placed.
    asked = {clause: tally.evaluated for clause, tally in (e.tallies or {}).items()}
    return e.states, e.transitions, e.refused, e.depth, e.complete, e.situations, asked


def test_a_cluster_counts_what_one_process_counts_though_a_node_is_lost(nodes: Any) -> None:
    scope, lost = SCOPES["tree-tiny"], []

    def lose(_where: str, _steps: int, _found: int) -> None:
        if not lost:
            lost.append(nodes.remove_node(nodes.other, allow_graceful=False))

    assert cluster.shards_of(nodes.ray) == 2
    seen = cluster.explore(scope, nodes.ray, progress=lose)
    assert lost and not nodes.other.any_processes_alive()  # Ray itself may take longer to notice
    assert counts(seen) == counts(search.run(scope))


def test_checks_on_a_cluster_are_those_of_their_seeds(nodes: Any) -> None:
    plan = campaign.plan("smoke", examples=1, presets=["page1"], machines=["sessions"], seed=5)
    whole = cluster.check("torch", {"device": "cpu"}, plan, nodes.ray)
    alone = [campaign.run(TorchKV(), replace(plan, seed=seed)) for seed in (5, 6)]
    assert whole.commands == sum(result.commands for result in alone)
    assert whole.tallies == cluster.together(alone).tallies


def test_a_missing_cluster_is_said_in_a_line(kvspec: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = kvspec("explore", "--scope", "tree-tiny", "--ray", "127.0.0.1:1")
    assert code == 2 and not out
    assert err.startswith("kvspec: --ray ") and err.count("\n") == 1


# What runs over there, here.


class Here:
    """As much of the module ray as `cluster` uses, without any cluster: every task runs at once."""

    def __init__(self, cores: int) -> None:
        self.cores = cores

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cores}

    def put(self, value: object) -> object:
        return value

    get = put

    def remote(self, **_options: object) -> Callable[[Callable[..., object]], Any]:
        return lambda function: SimpleNamespace(remote=function)


@pytest.mark.parametrize("name", ["tree-tiny", "session-no-window"])
@pytest.mark.parametrize("shards", [1, 3])
def test_any_number_of_shards_counts_the_same(name: str, shards: int) -> None:
    seen = cluster.explore(SCOPES[name], Here(shards))
    assert counts(seen) == counts(search.run(SCOPES[name]))


def test_clauses_are_asked_on_a_cluster_and_a_violation_is_told_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clause that nothing keeps: whoever finishes two tokens violates it."""
    scope = SCOPES["ordinary"]

    def never(step: Step) -> Failure | None:
        return ("no finish", "one") if isinstance(step.command, Finish) and step.done else None

    monkeypatch.setitem(CLAUSES, "REF-1", replace(CLAUSES["REF-1"], check=never))
    here, there = search.run(scope), cluster.explore(scope, Here(2))
    assert here.finding is not None and there.finding is not None
    assert there.stopped == here.stopped == "a clause was violated"
    assert len(there.finding.run.trace.commands) == len(here.finding.run.trace.commands)
    assert there.finding.run.violation is not None
    assert there.finding.clause == "REF-1"


def test_of_several_findings_the_smallest_is_told() -> None:
    plan = campaign.plan("smoke", examples=4, presets=["page2"], machines=["sessions"], seed=0)
    system = registry.resolve("torch+pr22862-tail")
    results = [campaign.run(system, replace(plan, seed=seed)) for seed in (0, 1)]
    whole = cluster.together(results)
    assert whole.examples == sum(result.examples for result in results)
    assert sum(whole.situations.values()) == sum(sum(r.situations.values()) for r in results) > 0
    clauses = {f.clause for result in results for f in result.findings}
    assert "LEN-3" in clauses
    assert clauses == {f.clause for f in whole.findings}
    for told in whole.findings:
        found = [f for result in results for f in result.findings if f.clause == told.clause]
        assert told.times == sum(f.times for f in found)
        assert campaign.rank(told.run.trace) == min(campaign.rank(f.run.trace) for f in found)


_FAILS = """
from hypothesis import given, strategies
from stateful_tests.tests import conftest
tried = []
@given(strategies.integers())
def low(number):
    tried.append(number)
    assert number < 1000
try:
    low()
except AssertionError:
    print(tried[0], min(n for n in tried if n >= 1000))
"""


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis server that is there for one test."""
    pytest.importorskip("redis", reason="redis is not installed: pip install 'kvspec[cluster]'")
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([program, "--port", str(port), "--save", "", "--dir", str(tmp_path)])
    for _ in range(100):
        with socket.socket() as asking:
            if not asking.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    yield f"redis://127.0.0.1:{port}"
    server.terminate()
    server.wait()


def test_a_failure_of_one_process_is_what_another_tries_first(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(_FAILS)
    env = {
        **os.environ, "KVSPEC_REDIS": redis_url, "KVSPEC_HYPOTHESIS_PROFILE": "nightly",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }  # fmt: skip
    told = []
    for machine in ("one", "another"):
        (folder := tmp_path / machine).mkdir()
        command = [sys.executable, str(tmp_path / "fails.py")]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
        assert done.stdout, done.stderr
        told.append(done.stdout.split())
    (tried, smallest), (again, _) = told
    assert tried != smallest == again == "1000"
