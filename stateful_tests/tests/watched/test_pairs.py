"""Runs of two whole servers: their environment as data, what judges say, how a run is shrunk and shown."""

from pathlib import Path

import msgspec
import pytest

from ci.commands.options.server_settings import require_fitting
from ci.commands.shared import Unusable
from ci.report import pair_story, server_reports
from impl.adapter import UnusableImplementation
from impl.sglang.server import environment
from impl.sglang.server.clients import Client, Config, Turn
from impl.sglang.server.outcome import PairEvent, PairNote, RunOutcome
from impl.sglang.server.pair.choices import MESSAGES, NetworkChoice, NetworkChoices, can_fail
from impl.sglang.server.runs import WholeScheduler
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.watched.servers import server_pairs, scheduler_runs

RELEASE = "0.5.23"
HERE = Path(__file__)
RUNS = sorted((HERE.parents[3] / "fixtures" / "served").glob("*.json"))
SLOW = NetworkChoice("transfer", "c2.1", number=2, steps=100, at=5)


class Pretends:
    """Has a fault that shows when a transfer of c2.1 rests for ten steps or more."""

    def run(self, job):
        found = [
            c for c in job.choices if c.what == "transfer" and c.request == "c2.1" and c.steps >= 10
        ]
        asked = any(client.name == "c2" for client in job.clients)
        noted = (
            [PairNote("PD-1 full page of P is free", "c2.1", "page 3")] if found and asked else []
        )
        events = [
            PairEvent(1, "P", "gets the request c2.1"),
            PairEvent(2, "wire", "transfer 1 of c2.1 ends"),
        ]
        return RunOutcome(10, 20, [], {}, noted=noted, events=events)


@pytest.fixture(scope="module")
def runs():
    """120 runs behind the first of each kind."""
    population = server_pairs.PairPopulation(3)
    for _ in server_pairs.KINDS:
        population.draw()
    return [population.draw() for _ in range(120)]


def test_the_same_seed_gives_the_same_runs():
    one, two = (server_pairs.PairPopulation(3) for _ in range(2))
    assert [one.draw() for _ in range(9)] == [two.draw() for _ in range(9)]


def test_a_kind_of_run_has_its_failures_and_aborts_alone():
    population = server_pairs.PairPopulation(3)
    drawn = [population.draw() for _ in server_pairs.KINDS]
    assert drawn[0][3] == (), "a calm run"
    assert all(config.pair for config, *_ in drawn)
    for kind, (_, clients, _, choices) in zip(server_pairs.KINDS, drawn):
        assert can_fail(choices) <= (kind in ("failures", "time", "death"))
        assert any(t.abort for c in clients for t in c.turns) <= (kind in ("aborts", "alone"))
        assert server_pairs.choices_about(clients, choices) == choices


def test_choices_are_about_every_message(runs):
    choices = [choice for *_, choices in runs for choice in choices]
    assert {*MESSAGES} - {"register"} < {choice.what for choice in choices}
    assert max(c.steps for c in choices if c.what == "transfer") == 150


def test_every_value_of_a_setting_is_drawn(runs):
    for field in ("overlap", "decode_overlap", "tree", "decode_tree", "pressure", "mixed", "rust",
                  "prefill_draft", "hicache", "decode_hicache", "host_backup"):
        assert {getattr(config, field) for config, *_ in runs} == {False, True}
    assert {config.page_size for config, *_ in runs} == {1, 2, 4, 8}
    assert {config.priority for config, *_ in runs} == {0, 1, 2}
    assert {config.draft for config, *_ in runs} == {0, 2, 4}
    assert {(bool(config.states), config.track) for config, *_ in runs} == {
        (False, 0), (True, 0), (True, 8)
    }  # fmt: skip


def test_drawn_settings_fit_together(runs):
    for config, *_ in runs:
        settings = msgspec.structs.asdict(config).items()
        require_fitting(RELEASE, {name: n for name, n in settings if n != getattr(Config(), name)})
    late = [config for config, *_ in runs if config.prefill_complete]
    assert late and not any(config.window or config.decode_tree for config in late)
    assert {bool(turn.priority) for config, clients, *_ in runs if not config.priority
            for client in clients for turn in client.turns} == {False}


def test_a_fixed_setting_is_that_of_every_run():
    fixed = server_pairs.PairPopulation(3, fixed={"page_size": 8, "window": 0, "deferred": False})
    assert {(c.page_size, c.window, c.deferred) for c, *_ in (fixed.draw() for _ in range(9))} == {
        (8, 0, False)
    }


def test_choices_are_found_by_their_request():
    made = NetworkChoices(
        (SLOW, NetworkChoice("status", "c1.1", steps=3), NetworkChoice("status", "c1.1", steps=4))
    )
    assert made.of("transfer", "c2.1", number=2) == [SLOW] and not made.of("transfer", "c2.1")
    assert made.steps("status", "c1.1") == 7 and made.steps("status", "c2.1") == 0


def test_a_run_is_shrunk_to_one_request_and_one_choice():
    result = scheduler_runs.check(Pretends(), RELEASE, 1, 60, fixed={"pair": True})
    judged = result.found["PD-1 full page of P is free"]
    run = judged.run
    assert [client.name for client in run.clients] == ["c2"]
    (choice,) = run.choices
    assert (choice.what, choice.request, choice.steps, choice.at) == ("transfer", "c2.1", 10, 0)
    assert not run.config.window
    assert not run.config.decode_tree
    assert run.config.pair
    assert judged.findings[0].judge == "pair" and judged.validated.reached["a transfer"] == 1
    again = msgspec.json.decode(msgspec.json.encode(run), type=scheduler_runs.ServedRun)
    assert again == run


def test_a_report_shows_both_servers_and_the_wire(capsys):
    from rich.console import Console

    run = scheduler_runs.ServedRun(
        RELEASE,
        Config(pair=True, window=4),
        (Client("c2", 1, (Turn(wait=1, tokens=3, limit=2),)),),
        1,
        (SLOW,),
        key="PD-1 full page of P is free",
    )
    judged = scheduler_runs.serve(Pretends(), run)
    result = scheduler_runs.Served(RELEASE, 1, 1, 10, found={run.key: judged})
    server_reports.served_text(Console(width=100), server_reports.served_report(result, None, 1))
    output = capsys.readouterr().out
    assert "P and D: page_size 1" in output and "window 4" in output
    assert "transfer 2 of c2.1, when 5 tenths are copied, rests 100 steps" in output
    columns = [
        line.split("gets the request")[0]
        for line in output.splitlines()
        if "gets the request" in line
    ]
    assert columns == [f"  {1:>6}  "]
    assert any(line.startswith(f"  {2:>6}  {' ' * 34}transfer 1") for line in output.splitlines())


def test_each_choice_has_words():
    text = {
        pair_story.choice_text(msgspec.to_builtins(choice)): choice
        for choice in (
            NetworkChoice("clock", number=9, steps=310), NetworkChoice("death", side="P", number=7),
            NetworkChoice("lookup", number=2, fails=True), NetworkChoice("round", "", "D", 4, 5),
            NetworkChoice("call", "c1.1", "P", 3, 2), NetworkChoice("request", "c1.1", "D", steps=5),
            NetworkChoice("abort", "c1.1", "P", fails=True), NetworkChoice("ack", "c1.1", steps=5),
            NetworkChoice("transfer", "c1.1", steps=5, at=3, fails=True),
            NetworkChoice("transfer", "c1.1", steps=5, at=3, fails=True, late=True),
        )
    }  # fmt: skip
    assert "the abort of c1.1 does not reach P" in text and "the ack of c1.1 rests 5 steps" in text
    assert "the clock moves by 310 s at step 9" in text and "P ends at step 7" in text
    late = (
        "transfer 1 of c1.1, when 3 tenths are copied, fails, and the rest is copied 5 steps later"
    )
    assert len(text) == 10 and late in text


@pytest.mark.parametrize(
    ("release", "given", "says"),
    [
        (RELEASE, {"deferred": False}, "a setting of a pair; needs --set pair=1"),
        ("0.5.20", {"pair": True}, "a pair runs in 0.5.23"),
        (RELEASE, {"pair": True, "queue": 2}, "not in a pair: a server of a pair has no limit"),
        (RELEASE, {"pair": True, "states": 12, "track": 8, "lazy": True}, "not in a pair: SGLang has"),
        (RELEASE, {"pair": True, "draft": 0, "prefill_draft": True}, "needs --set draft=N"),
        (RELEASE, {"pair": True, "decode_hicache": True, "decode_tree": False}, "--set decode_tree=1"),
        (RELEASE, {"pair": True, "decode_hicache": True, "window": 4}, "with --set decode_hicache"),
        (RELEASE, {"pair": True, "host_backup": True, "priority": 1}, "with --set host_backup"),
        (RELEASE, {"pair": True, "prefill_complete": True, "states": 9}, "no prefill_complete with"),
        (RELEASE, {"pair": True, "prefill_complete": True, "hicache": True, "policy": 0}, "policy=2"),
        (RELEASE, {"pair": True, "prefill_complete": True, "window": 4}, "no prefill_complete with"),
        (RELEASE, {"prefill_complete": True}, "a setting of a pair; needs --set pair=1"),
    ],
)
def test_settings_that_do_not_go_with_a_pair(release, given, says):
    with pytest.raises(Unusable, match=says):
        require_fitting(release, given)
    require_fitting(RELEASE, {"pair": True, "window": 8, "draft": 0})
    given = {"pair": True, "prefill_complete": True}
    require_fitting(RELEASE, given)
    assert not given["window"] and not given["decode_tree"], "left to chance, they might be drawn"


@pytest.fixture(scope="module")
def runner():
    """Whole schedulers of the release: they take half a minute to start, and an environment that few have."""
    if not NIGHT:
        pytest.skip("at night (KVSPEC_NIGHT=1)")
    try:
        found = WholeScheduler(environment.python_of(RELEASE))
    except UnusableImplementation as error:
        pytest.skip(f"no server environment: {error}")
    yield found
    found.close()


CLIENTS = (
    Client(
        "c1",
        1,
        (Turn(wait=1, tokens=9, limit=4), Turn(wait=2, tokens=12, limit=3)),
        session=False,
        resends=True,
    ),
    Client("c2", 3, (Turn(wait=1, tokens=40, limit=6),), session=False),
    Client("c3", 4, (Turn(wait=1, tokens=20, limit=3, shared=9),), session=False),
)
SERVERS = {
    "plain": {},
    "overlap": {"overlap": True, "decode_overlap": True},
    "window": {"window": 8, "swa": 10},
    "tree of decode": {"decode_tree": True},
    "optimistic": {"optimistic": 2},
    "pages of one": {"page_size": 1},
    "named late": {"prefill_complete": True},
    "priorities": {"priority": 1, "lowest": True},
    "mixed": {"mixed": True},
    "drafts of D": {"draft": 2},
    "drafts of both": {"draft": 4, "prefill_draft": True, "overlap": True, "decode_overlap": True},
    "drafts with a window": {"draft": 2, "prefill_draft": True, "window": 8, "swa": 10},
    "tier of P": {"hicache": True},
    "tier of D": {"decode_hicache": True, "decode_tree": True},
    "host pool of D": {"host_backup": True},
    "states": {"states": 12, "track": 8, "decode_tree": True},
    "states at the end": {"states": 12, "page_size": 1},
}


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(
    "choices", [(), (SLOW, NetworkChoice("status", "c1.1", steps=20))], ids=["calm", "slow"]
)
def test_a_real_pair_conforms_and_repeats_itself(runner, name, choices):
    config = Config(pair=True, **{"page_size": 4, "pressure": False, "running": 4, **SERVERS[name]})
    run = scheduler_runs.ServedRun(RELEASE, config, CLIENTS, 3, choices)
    one = scheduler_runs.serve(runner, run)
    two = scheduler_runs.serve(runner, run)
    assert not one.findings and set(one.outcome.answers.values()) == {"length"}
    assert len(one.outcome.answers) == 4 and one.outcome.forwards > 10
    assert one.outcome.events == two.outcome.events


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_saved_run_shows_its_finding_again(runner, path):
    run = msgspec.json.decode(path.read_bytes(), type=scheduler_runs.ServedRun)
    found = {finding.key: finding.known for finding in scheduler_runs.serve(runner, run).findings}
    assert found.get(run.key), "no known fault"
