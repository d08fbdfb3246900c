"""Whole schedulers of a release, at night: they conform, and faults in them are caught."""

import pytest
from msgspec.structs import replace

from impl.adapter import UnusableImplementation
from impl.choices import RandomChoices
from impl.sglang.server import environment, worker
from impl.sglang.server.clients import Client, Config, Turn
from impl.sglang.server.runs import WholeScheduler
from impl.sglang.server.worker import Job
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.tests.support.fault_runs import SUITES
from stateful_tests.tests.support.modules_run import output_of
from stateful_tests.watched.servers import population, random_clients, scheduler_runs
from stateful_tests.watched.log_reader import WatchLog
from stateful_tests.watched.validator import Validator
from stateful_tests.tests.watched.test_scheduler_runs import RELEASE


@pytest.fixture(scope="module")
def server_python():
    """The Python of the server environment, which few have: at night."""
    if not NIGHT:
        pytest.skip("at night (KVSPEC_NIGHT=1)")
    try:
        return environment.python_of(RELEASE)
    except UnusableImplementation as error:
        pytest.skip(f"no server environment: {error}")


@pytest.fixture(scope="module")
def scheduler(server_python):
    """A whole scheduler. It takes half a minute to start."""
    runner = WholeScheduler(server_python)
    yield runner
    runner.close()


TURNS = (
    Turn(wait=0, tokens=20, limit=6),
    Turn(wait=1, tokens=5, limit=9, stop=4),
    Turn(wait=0, tokens=7, limit=5, abort=2),
    Turn(wait=2, tokens=4, limit=3),
)


@pytest.mark.parametrize(
    "config",
    [
        Config(page_size=4, window=8, tree=False),
        Config(overlap=True, mixed=True),
        Config(window=4, overlap=True, tokens=64, hicache=True),
        Config(window=4, overlap=True, tokens=64, hicache=True, rust=True),
        Config(tokens=64, states=20, hicache=True, policy=2),
    ],
)
def test_a_real_scheduler_conforms_and_repeats_itself(scheduler, config):
    clients = (Client("a", 0, TURNS), Client("b", 3, TURNS[:2], session=False))
    run = scheduler_runs.ServedRun(RELEASE, config, clients, 1)
    one = scheduler_runs.serve(scheduler, run, "pages")
    two = scheduler_runs.serve(scheduler, run, "pages")
    assert not one.findings and one.outcome.forwards > 15, one.findings
    same = [replace(judged.outcome, cpu_s=0.0) for judged in (one, two)]
    assert same[0] == same[1] and len(one.tail) == len(two.tail)
    assert one.outcome.answers["a.3"] == "abort" and one.outcome.answers["a.4"] == "length"


def test_a_known_fault_is_reported_by_name(scheduler):
    second = Client(
        "a",
        0,
        (
            Turn(wait=0, tokens=20, limit=30),
            Turn(wait=4, tokens=3, limit=3),
            Turn(wait=4, tokens=3, limit=3),
        ),
        impatient=True,
        close=30,
    )
    judged = scheduler_runs.serve(scheduler, scheduler_runs.ServedRun(RELEASE, Config(), (second,), 1))
    assert {finding.known for finding in judged.findings} == {"rejection-ends-turn"}
    assert not judged.new


@pytest.mark.parametrize("limit, says", [
    (5, {"log LEN-2 release": "is silent in 5 forward passes"}),
    (6, {
        "log LEN-2 release": "fires in this run: forward pass 4, position 8 of a.2: launch_tag=HEAD_K_FULL",
        "reads full": "sees it: forward pass 4, position 8 of a.2: launch_tag=HEAD_K_FULL",
    }),
])  # fmt: skip
def test_the_release_s_own_canary_sees_a_token_that_was_never_computed(scheduler, limit, says):
    """5: a draft that was right has left its KV there."""
    client = Client("a", 0, (Turn(0, 3, limit), Turn(wait=0, tokens=3, limit=3)))
    judged = scheduler_runs.serve(scheduler, scheduler_runs.ServedRun(RELEASE, Config(draft=4), (client,), 1))
    assert {finding.known for finding in judged.findings} == {"last-token"}
    opinions = scheduler_runs.second_opinion(scheduler, judged)
    assert {key: each.partition(" fail_reason")[0] for key, each in opinions.items()} == says


def test_a_log_may_begin_at_any_part(scheduler, tmp_path):
    choices = RandomChoices("parts")
    config = population.configuration(choices, draft=4, overlap=True)
    watch = {"KVSPEC_WATCH": str(tmp_path), "KVSPEC_WATCH_MB": "0", "KVSPEC_WATCH_FILES": "1000"}
    scheduler.run(Job(config, random_clients.clients(choices, config, count=30), 1, watch))
    files = sorted(tmp_path.glob("*.jsonl"))
    for at in (0, 1, *range(2, len(files), 5)):
        log = WatchLog(files[at:])
        validated = Validator(log.header).run(log.lines())
        assert not validated.unexplained, (at, validated.unexplained)


# Faults put into a copy of a release's scheduler, which clients reach. That takes minutes and the server
# environment, so it is for the night.
SERVED = [(suite, name) for suite in ("served", "served+pair") for name in SUITES[suite].faults]


@pytest.mark.parametrize(("suite", "name"), SERVED, ids=lambda text: text.replace(" ", "_"))
def test_a_fault_in_the_scheduler_is_caught_by_the_judge_that_it_names(suite, name, server_python):
    output_of("stateful_tests.tests.support.fault_runs", suite, name, limit_s=1200)


def test_code_of_kvspec_that_fails_accuses_no_server(monkeypatch):
    """The outcome names the place, and the check ends as unusable."""

    def own_code(_):
        raise AttributeError("Manager has no rooms")

    def code_of_the_release(_):
        exec(compile("raise KeyError(3)", "/site-packages/sglang/srt/a.py", "exec"))

    monkeypatch.setattr(worker, "_run", own_code)
    told = worker._run_or_unusable(Job(Config(), (), 0)).unusable
    assert told.startswith("AttributeError: Manager has no rooms at stateful_tests/tests/watched/")
    monkeypatch.setattr(worker, "_run", code_of_the_release)
    with pytest.raises(KeyError):
        worker._run_or_unusable(Job(Config(), (), 0))
