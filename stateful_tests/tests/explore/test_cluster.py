"""Many machines: a cluster of two nodes on this one, and one store of failures.

Skipped where Ray, or Redis and its server, are not installed (extra `cluster`).
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from impl.system_spec import SystemSpec
from stateful_tests.check import campaign, check_plans, run_batches
from stateful_tests.check.ray_cluster import RayCluster
from stateful_tests.coverage.scopes import SCOPES
from stateful_tests.explore import search
from stateful_tests.lockstep import system_names as registry


@pytest.fixture
def nodes(monkeypatch):
    """A cluster of two nodes with a core each; `executor` runs on it."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvspec[cluster]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.other = made.add_node(num_cpus=1)
    made.executor = RayCluster(made.address)
    yield made
    made.executor.close()
    made.shutdown()


def test_a_cluster_that_loses_a_node_agrees_with_one_process(nodes, monkeypatch):
    monkeypatch.setattr(search, "SPREAD", 1)
    lost = []

    def lose(_where, _steps, _found):
        if not lost:
            lost.append(nodes.remove_node(nodes.other, allow_graceful=False))

    assert nodes.executor.at_once == 2
    result = search.run(SCOPES["tree-tiny"], progress=lose, executor=nodes.executor)
    assert lost and not nodes.other.any_processes_alive()  # Ray itself may take longer to notice
    here = search.run(SCOPES["tree-tiny"])
    for name in ("states", "transitions", "refused", "depth", "complete", "situations", "reached"):
        assert getattr(result, name) == getattr(here, name), name


def test_a_check_on_a_cluster_is_the_same_check(nodes):
    plan = check_plans.plan("smoke", examples=4, presets=["page1"], machines=["sessions"], seed=5)
    named = run_batches.Named(SystemSpec("torch", ways=("pr22862-tail",)))
    system = registry.driven_system(named.spec)
    result = campaign.run(system, plan, executor=nodes.executor, named=named)
    here = campaign.run(system, plan)
    assert result.findings and [f.run for f in result.findings] == [f.run for f in here.findings]
    assert (result.tallies, result.situations) == (here.tallies, here.situations)


def test_a_missing_cluster_is_reported_in_a_line(kvspec):
    code, out, err = kvspec("explore", "--scope", "tree-tiny", "--ray", "127.0.0.1:1")
    assert code == 2 and not out
    assert err.startswith("kvspec: --ray ") and err.count("\n") == 1


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
def redis_url(tmp_path):
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


def test_processes_try_each_others_failures_first(redis_url, tmp_path):
    (tmp_path / "fails.py").write_text(_FAILS)
    env = {
        **os.environ,
        "KVSPEC_REDIS": redis_url,
        "KVSPEC_HYPOTHESIS_PROFILE": "nightly",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    outputs = []
    for machine in ("one", "another"):
        folder = tmp_path / machine
        folder.mkdir()
        command = [sys.executable, str(tmp_path / "fails.py")]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
        assert done.stdout, done.stderr
        outputs.append(done.stdout.split())
    (tried, smallest), (again, _) = outputs
    assert tried != smallest == again == "1000"
