"""Checks of whole schedulers, with a runner that pretends and, where it is installed, with the real one."""

import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace as Bag

import pytest
from msgspec.structs import replace

from ci.report import servers
from impl.adapter import UnusableImplementation
from impl.sglang.server import environment, progress
from impl.sglang.server.clients import EOS, Client, Clients, Config, Turn
from impl.sglang.server.outcome import Complaint, Misread, RunOutcome
from impl.sglang.server.progress import Room
from impl.sglang.server.runs import WholeScheduler
from impl.sglang.server.worker import Job
from stateful_tests.tests.support.night import NIGHT, at_night
from stateful_tests.tests.support.planted_faults import planted_faults
from stateful_tests.tests.support.served_faults import found_in_servers
from stateful_tests.watched import population, serving
from stateful_tests.watched.reader import WatchLog
from stateful_tests.watched.results import Validated
from stateful_tests.watched.validator import Validator

WATCHED = Path(__file__).parents[3] / "fixtures" / "watched"
LOG = WATCHED / "sglang-0.5.23-tree_under_overlap.jsonl"
RELEASE = "0.5.23"


class Pretends:
    """Has a fault that shows when a client in a session sends a second turn of three tokens or more."""

    runs = 0

    def run(self, job):
        self.runs += 1
        lines = LOG.read_text().splitlines(keepends=True)
        Path(job.watch["KVSPEC_WATCH"], "log.jsonl").write_text("".join(lines[:240]))
        bad = any(c.session and any(t.tokens >= 3 for t in c.turns[1:]) for c in job.clients)
        return RunOutcome(10, 20, [Misread(7, "c1.2", "full", 4, (11, 4), None)] if bad else [], {})


def test_a_finding_is_shrunk_to_its_clients_and_numbers():
    result = serving.check(Pretends(), RELEASE, 1, 5, count=6)
    assert list(result.found) == ["reads full"] and result.times["reads full"] >= 1
    judged = result.found["reads full"]
    (client,) = judged.run.clients
    first, second = client.turns
    assert (first.tokens, first.limit, second.tokens, second.limit) == (1, 1, 3, 1)
    assert (
        judged.run.config.draft == 0
        and not judged.run.config.tree
        and judged.run.config.page_size == 1
    )
    assert judged.run.key == "reads full" and "nothing that was written" in judged.findings[-1].says


@pytest.mark.parametrize("at", [0, 1, 2, 30])
def test_an_interrupt_loses_nothing_that_was_found(at):
    """at: while it shrinks, at so many tries; 0: between two runs."""
    kept, tries = [], 0

    def say(what, *_):
        nonlocal tries
        tries += what.startswith("shrinks")
        if kept and (tries == at if at else what.startswith("run")):
            raise KeyboardInterrupt

    result = serving.check(
        Pretends(), RELEASE, 1, 5, count=6, say=say, keep=lambda j: kept.append(j.run)
    )
    assert result.interrupted and result.found["reads full"].run == kept[-1]
    data = servers.served(result, None, 5)
    assert data["exit_code"] == 1 and data["interrupted"]


def test_shrinking_ends_with_the_time(monkeypatch):
    monkeypatch.setattr(serving.time, "monotonic", itertools.count().__next__)
    runner = Pretends()
    result = serving.check(runner, RELEASE, 1, 5, count=6, limit_s=20)
    assert result.found and runner.runs <= 20


def test_shrinking_one_finding_ends_with_its_time(monkeypatch):
    monkeypatch.setattr(serving.time, "monotonic", itertools.count().__next__)
    monkeypatch.setattr(serving, "SHRINK_S", 20)
    runner = Pretends()
    result = serving.check(runner, RELEASE, 1, 5, count=6)
    assert list(result.found) == ["reads full"] and result.runs == 5 and runner.runs <= 5 + 10


def test_a_conforming_check_finds_nothing_and_counts():
    runner = Pretends()
    result = serving.check(runner, RELEASE, 1, 3, count=1, fixed={"draft": 2})
    assert runner.runs >= result.runs == 3
    assert result.events > 0 and result.reached["a turn that resumes"] > 0


class Conforms(Pretends):
    """Has no fault."""

    def run(self, job):
        return replace(super().run(job), misread=[])


def test_what_the_base_shows_in_the_same_run_is_not_new():
    before = serving.Before(Pretends(), {})
    same = serving.check(Pretends(), RELEASE, 1, 5, count=6, before=before)
    assert not same.found and same.old["reads full"]
    new = serving.check(Pretends(), RELEASE, 1, 5, count=6, before=serving.Before(Conforms(), {}))
    assert list(new.found) == ["reads full"] and not new.old


@pytest.mark.parametrize(
    ("there", "was", "saved", "known"),
    [
        ({}, "last-token", "", "last-token"),
        ({}, "", "", ""),
        ({"last-token": True}, "", "", "last-token"),
        ({"last-token": False}, "last-token", "last-token", ""),
        ({}, "", "last-token", "last-token"),
        ({}, "", "another", ""),
    ],
)
def test_a_label_of_a_tree_holds_while_its_fault_is_there(monkeypatch, there, was, saved, known):
    """By its traces; without traces by the same run on the release, or by the saved run on the tree."""

    def judged(name, key=""):
        found = [serving.ServedFinding("log", "log LEN-2 release", "says", name)]
        return serving.JudgedRun(
            serving.ServedRun(RELEASE, Config(), (), 1, key=key), None, Validated(), found
        )

    tree, release = Pretends(), Pretends()
    shows = {(tree, "saved"): saved, (release, ""): was}
    monkeypatch.setattr(serving, "serve", lambda at, run: judged(shows[at, run.key]))
    runs = {"last-token": judged("", "saved").run} if saved else {}
    compared = serving.Before(release, dict(there), runs).compared(judged("last-token"), tree)
    assert [each.known for each in compared.findings] == [known]
    assert len(compared.new) == (not known)


def test_the_same_seed_gives_the_same_population():
    def made():
        rng = random.Random(5)
        config = population.configuration(rng, window=8)
        return config, population.clients(rng, config, count=9, impatient=True)

    assert made() == made()
    assert made()[0].window == 8 and len(made()[1]) == 9


def test_every_second_run_is_a_scene():
    runs = population.Population(1, fixed={"running": 4}, count=5)
    for scene in population.scenes():
        assert sum(not each.operator for each in runs.draw()[1]) == 5
        config, clients, _ = runs.draw()
        assert config.running == 4 and len(clients) > len(scene["clients"])
        fields = {**scene["server"], "running": 4}
        assert all(getattr(config, name) == value for name, value in fields.items())


def test_runs_between_scenes_are_storms_floods_texts_talks_and_random_clients():
    runs = population.Population(1)
    drawn = [runs.draw() for _ in range(12)][::2]
    servers = [config for config, _, _ in drawn]
    of_storms = [servers[at] for at in (0, 1, 4)]
    assert [each.tokens for each in of_storms] == [64, 192, 64]
    assert all(each.pressure for each in of_storms) and servers[1].chunk == 8
    shared = [
        sum(turn.shared for client in clients for turn in client.turns) for _, clients, _ in drawn
    ]
    assert max(shared) == shared[2], "texts come back"
    asking = [[each for each in clients if not each.operator] for _, clients, _ in drawn]
    assert all(client.resends and not client.session for client in asking[3])
    of_others = [client for at in (0, 1, 2, 5) for client in asking[at]]
    assert {each.resends for each in of_others if not each.session} == {False, True}
    assert not any(each.resends for each in of_others if each.session)
    again, other = population.Population(1), population.Population(2)
    assert again.draw()[0] == servers[0] and again.draw()[1:] != other.draw()[1:]


def test_in_some_runs_clients_state_priorities():
    """Always where the server has them by a setting, never where it has none by a setting."""

    def drawn(**fixed):
        runs = population.Population(1, fixed=fixed)
        for config, clients, _ in (runs.draw() for _ in range(30)):
            yield config, {turn.priority for client in clients for turn in client.turns}

    preempting = [config for config, stated in drawn() if config.priority and stated - {0}]
    assert 5 <= len(preempting) <= 15
    assert {each.priority for each in preempting} == {1, 2} and {e.lowest for e in preempting} == {
        True,
        False,
    }
    assert {bool(each.queue) for each in preempting} == {True, False}
    assert all(config.priority == 2 and stated - {0} for config, stated in drawn(priority=2))
    assert not any(config.priority for config, _ in drawn(priority=0))
    without = population.Population(1, lowest=False)
    assert not any(without.draw()[0].lowest for _ in range(30))


def test_in_some_runs_a_server_has_operators():
    """With a storage half of the clients come after a flush."""
    runs = population.Population(1, fixed={"hicache": True, "storage": 1})
    drawn = [clients for _, clients, _ in (runs.draw() for _ in range(12))]
    flushed = [each for each in drawn if any(client.operator for client in each)]
    assert 2 <= len(flushed) <= 6
    for clients in flushed:
        after = {each.name for each in clients if each.after == "o1"}
        assert 0 < len(after) < len(clients) / 2 + 1
        assert "o1" in {each.name for each in clients}


def test_a_client_without_a_session_resends_its_conversation():
    """Up to the end token of an answer, which is a part of it."""
    turns = Turn(0, 3, 5), Turn(0, 2, 4, stop=2), Turn(0, 1, 1)
    own, whole = (
        Clients((Client("c1", 0, turns, session=False, resends=resends),), seed=7)
        for resends in (False, True)
    )
    said = [tuple(own.says("c1.1", at) for at in range(1, 6))]
    said += [tuple(own.says("c1.2", at) for at in range(1, 3))]
    first, second, third = (own.prompt(f"c1.{number}") for number in (1, 2, 3))
    assert [len(each) for each in (first, second, third)] == [3, 2, 1] and said[1][-1] == EOS
    assert whole.prompt("c1.1") == first and whole.prompt("c1.2") == first + said[0] + second
    assert whole.prompt("c1.3") == first + said[0] + second + said[1] + third


def test_a_smaller_run_is_one_that_a_server_can_have():
    """States at the end of a text alone go with neither overlap nor pages."""
    for given in ({"overlap": True}, {"page_size": 2}, {}):
        run = serving.ServedRun(
            RELEASE, Config(states=30, track=8, **{"overlap": False, **given}), (), 1
        )
        smaller = [each.config for each in serving._smaller(run)]
        assert any(not each.track for each in smaller) == (not given)
        assert any(not each.states for each in smaller)


def test_servers_with_recurrent_layers_have_what_goes_with_them():
    """A scene of theirs, and one run of eight; where a release or what is fixed has no states, none."""
    runs = population.Population(1)
    drawn = [runs.draw()[0] for _ in range(40)]
    between = [config.states for config in drawn[6::8]]
    assert {*between} <= {*population.SLOTS} and len({*between}) > 1
    assert [bool(config.states) for config in drawn].count(True) == len(between) + 1
    for more in ({"states": False}, {"fixed": {"window": 6}}):
        runs = population.Population(1, **more)
        assert not any(runs.draw()[0].states for _ in range(20))
    runs = population.Population(1, fixed={"states": 30})
    drawn = [runs.draw()[0] for _ in range(80)]
    assert {config.states for config in drawn} == {30} and not any(c.window for c in drawn)
    assert {(config.track, config.draft) for config in drawn} >= {
        *itertools.product((0, 8), (2, 4)),
        (4, 2),
    }
    assert all(config.track >= 2 * config.draft for config in drawn if config.track)
    assert not any(config.overlap or config.page_size > 1 for config in drawn if not config.track)
    runs = population.Population(1, fixed={"states": 30, "overlap": True})
    assert {runs.draw()[0].track for _ in range(9)} == {4, 8}
    runs = population.Population(1, fixed={"states": 30, "page_size": 8})
    assert {runs.draw()[0].track for _ in range(9)} == {8}, "whole pages"
    runs = population.Population(1, fixed={"states": 30, "track": 8, "lazy": True})
    assert all(runs.draw()[0].overlap for _ in range(9))


def test_servers_with_a_host_tier_have_what_goes_with_it():
    """Texts or talks come back in every second run, every fourth is a scene; each policy is drawn."""
    runs = population.Population(1, fixed={"hicache": True})
    drawn = [runs.draw() for _ in range(80)]
    configs = [config for config, *_ in drawn]
    assert all(c.hicache and c.tree and not c.states for c in configs)
    assert {c.draft for c in configs} == {0, 2, 4}
    assert {c.policy for c in configs} == {0, 1, 2} and {c.host for c in configs} == {6, 12, 20, 40}
    for clients in (clients for _, clients, _ in drawn[::2]):
        assert sum(not each.operator for each in clients) == 12
        assert {t.text for c in clients for t in c.turns} <= {*range(8)}
    assert {c.storage for c in configs} == {0, 1, 2} and {c.rust for c in configs} == {False, True}
    for number, (config, clients, _) in enumerate(drawn):
        sessions = any(client.session for client in clients)
        assert not (sessions and config.storage) or number % 8 == population.SESSIONS_AT
    plain = population.Population(1, fixed={"hicache": True, "storage": 0, "priority": 0})
    drawn = [plain.draw() for _ in range(6)]
    scene = population.of_scene(population.scenes()[0])
    assert drawn[1][1] == scene and drawn[5][1] == population.of_scene(population.scenes()[1])
    states = population.Population(1, fixed={"hicache": True, "states": 20})
    configs = [states.draw()[0] for _ in range(9)]
    assert all(c.states and not (c.track or c.storage or c.mixed or c.overlap) for c in configs)
    fixed = population.Population(1, fixed={"hicache": True, "policy": 2, "host": 6})
    assert {(c.policy, c.host) for c, *_ in (fixed.draw() for _ in range(9))} == {(2, 6)}


def test_a_wrong_state_is_known_where_the_log_shows_why():
    misread = Misread(7, "c1.2", "state", 4, (11, 3), None, found="slot 2 is another's")
    outcome = RunOutcome(9, 9, [misread], {})
    run = serving.ServedRun(RELEASE, Config(), (), 1)
    seen = Validated(wrong_states={("c1.2", 4): "retried-turn-folds-twice"}, holes={("c1", 4)})
    (known,) = serving._findings(run, outcome, seen)
    (new,) = serving._findings(
        run, outcome, Validated(wrong_states={("c1.2", 5): "x"}, holes={("c1", 4)})
    )
    assert (known.known, new.known, new.key) == ("retried-turn-folds-twice", "", "reads state")
    says = "c1.2 must go on at position 4 from the state after the tokens before it"
    assert new.says == f"{says}, and slot 2 is another's"


def test_a_triple_of_switches_is_at_work_once_each_has_done_something():
    runs, config = (
        population.Population(1),
        Config(window=4, draft=4, tree=False, chunk=64, pressure=False),
    )
    runs._config, fresh = config, runs._news(config)
    triple = (("window", 3), ("draft", 4), ("tree", False))
    assert triple in population.triples(config)
    runs.ran({"a window eviction": 3})
    assert not runs._at_work[triple] and runs._news(config) < fresh
    assert runs._at_work[("page", 0), ("window", 3), ("overlap", False)] == 1
    tried = runs._news(config)
    runs.ran({"a window eviction": 1, "a verify round that accepts several": 1})
    assert runs._at_work[triple] == 1 and runs._news(config) < tried


def test_a_part_of_the_package_is_no_server(tmp_path):
    """Python would run the environment's own package instead."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    with pytest.raises(UnusableImplementation, match="a server needs the whole package"):
        WholeScheduler(Path(sys.executable), tmp_path)


def test_a_server_that_broke_has_a_key_without_numbers():
    one = RunOutcome(1, 1, [], {}, "AssertionError: leak of 3 at srt/mem_cache/common.py:403")
    two = RunOutcome(1, 1, [], {}, "AssertionError: leak of 4 at srt/mem_cache/common.py:403")
    run = serving.ServedRun(RELEASE, Config(), (), 1)
    keys = {f.key for o in (one, two) for f in serving._findings(run, o, serving.Validated())}
    assert len(keys) == 1 and "AssertionError" in keys.pop()


@pytest.mark.parametrize("fires, of_reads, of_log", [
    ([], "is silent in 10 forward passes", "is silent in 10 forward passes"),
    ([("c1.2", 4)], "sees it: forward pass 7, position 4 of c1.2: hash",
     "fires in this run: forward pass 7, position 4 of c1.2: hash"),
    ([("", -1)], "does not see it, and fires elsewhere: forward pass 7, position -1 of no request: hash",
     "fires in this run: forward pass 7, position -1 of no request: hash"),
])  # fmt: skip
def test_a_second_opinion(fires, of_reads, of_log):
    outcome = RunOutcome(9, 9, [Misread(7, "c1.2", "full", 4, (11, 4), None)], {})
    keys = ("reads", "reads full"), ("log", "log LEN-2")
    findings = [serving.ServedFinding(judge, key, "") for judge, key in keys]
    run = serving.ServedRun(RELEASE, Config(), (), 1)
    seen = [Complaint(7, name, position, "hash") for name, position in fires]
    runner = Bag(run=lambda job: RunOutcome(10, 10, [], {}, canary=seen if job.canary else None))
    says = serving.second_opinion(runner, serving.JudgedRun(run, outcome, Validated(), findings))
    assert says == {"reads full": of_reads, "log LEN-2": of_log}


class RunsOut(Pretends):
    """Ends out of memory after so many lines of a log."""

    lines = 0

    def run(self, job):
        lines = (
            (WATCHED / "sglang-0.5.23-mixed_batches.jsonl").read_text().splitlines(keepends=True)
        )
        Path(job.watch["KVSPEC_WATCH"], "log.jsonl").write_text("".join(lines[: self.lines]))
        error = "RuntimeError: Prefill out of memory. at srt/mem_cache/allocation.py:9"
        return RunOutcome(10, 20, [], {}, error)


def test_an_end_is_told_with_what_led_there():
    lines = (WATCHED / "sglang-0.5.23-mixed_batches.jsonl").read_text().splitlines()
    runner, said = RunsOut(), {}
    for kind in ("admit", "extend", "step"):
        runner.lines = max(at for at, line in enumerate(lines, 1) if line.startswith(f'["{kind}"'))
        (found,) = serving.serve(runner, serving.ServedRun(RELEASE, Config(), (), 1)).new
        assert found.key == "server RuntimeError srt/mem_cache/allocation.py:"
        said[kind] = found.says.partition("; ")[2]
    assert said["admit"] == (
        "since step 52 admission looked at c5.2 (from the queue, input 46); a batch of 1 has run, in which"
        " c6.2 decode; 1 wait; tokens of KV: c6 40, c5 37; 12 were free at that step, SWA 12, 36 evictable"
    )
    assert said["extend"].startswith(
        "since step 52 a batch of c5.2 (runs, 46 tokens) was prepared; 0 wait"
    )
    assert said["step"].startswith(
        "since step 59 0 wait; tokens of KV: nobody holds any; 92 were free"
    )


SMALL, ROOM, NOTHING = Room(4, 4, 1), Room(9, 9, 1), Room(0, 0, 0)
ALL, MORE = Room(10, 10, 2), Room(11, 11, 1)


@pytest.mark.parametrize(
    "queue, runs, free, idle, prompt, kind",
    [
        (("a.1",), (), ROOM, SMALL, SMALL, "room"),
        (("a.1", "b.1"), (), SMALL, ROOM, SMALL, "sessions"),
        (("a.1",), (), Room(9, 4, 1), Room(0, 9, 0), SMALL, "sessions"),
        (("a.1",), (), SMALL, SMALL, SMALL, "sessions"),
        (("a.1",), (), SMALL, NOTHING, ROOM, "alone"),
        (("a.1",), ("a.1",), SMALL, NOTHING, ROOM, "alone"),
        (("a.1",), ("b.1",), SMALL, NOTHING, ROOM, "held"),
        (("a.1",), (), SMALL, NOTHING, Room(11, 9, 1), "never"),
        (("a.1",), (), SMALL, NOTHING, Room(9, 11, 1), "chunks"),
        (("a.1",), (), ALL, NOTHING, ROOM, "margin"),
        (("a.1",), (), ALL, NOTHING, SMALL, "strict"),
        (("a.1",), (), SMALL, SMALL, Room(9, 11, 1), "sessions"),
        (("a.1",), (), ROOM, SMALL, Room(11, 1, 1), "room"),
        (("b.1",), (), ROOM, SMALL, SMALL, "lost"),
        ((), ("a.1",), SMALL, SMALL, SMALL, None),
    ],
)
def test_why_a_client_waits(queue, runs, free, idle, prompt, kind, monkeypatch):
    sizes = {"_free": free, "_idle": idle, "_size": ALL, "_input": prompt}
    sizes["_needed"] = MORE if free == ALL else ROOM
    sizes["_asked"] = ALL if prompt == SMALL else MORE
    for name, found in sizes.items():
        monkeypatch.setattr(progress, name, lambda *_, found=found: found)
    waiting, running = ([Bag(rid=name) for name in names] for names in (queue, runs))
    server = Bag(
        waiting_queue=waiting, chunked_req=None, running_batch=Bag(reqs=running), last_batch=None
    )
    found = progress.stall(Bag(scheduler=server), ["a.1"])
    assert (found and found.kind) == kind


@pytest.mark.parametrize("lengths, found", [
    ([8] * 301, None), ([8] * 302, "livelock"), ([8, 16] + [8, 16] * 150, None), ([8, 16] * 152, "livelock"),
    ([*range(400)], None),
])  # fmt: skip
def test_a_chunk_that_is_computed_again_and_again(lengths, found):
    headway = progress.RequestHeadway()
    for forwards, length in enumerate(lengths, 1):
        headway.computes("a.1", length, forwards)
    stall = headway.stall(len(lengths))
    assert (stall and stall.kind) == found
    headway.computes("b.1", 1, len(lengths))
    assert headway.stall(len(lengths)) is None, "another request got further"


@pytest.mark.parametrize("release, kind, window, known", [
    (RELEASE, "sessions", 0, "idle-sessions-keep-all"), (RELEASE, "room", 0, ""),
    ("9.9.9.dev", "sessions", 0, ""), ("0.5.20", "room", 0, "admission-stays-shut"),
    ("0.5.20", "swa", 0, ""), ("0.5.20", "never", 4, ""), (RELEASE, "alone", 4, ""),
    ("0.5.14", "chunks", 4, "prompt-above-the-swa-pool-waits"), ("0.5.14", "never", 4, ""),
    (RELEASE, "chunks", 4, "own-prefix-is-waited-for"), (RELEASE, "chunks", 0, ""),
    (RELEASE, "chunks", -4, ""),
    ("0.5.14", "margin", 4, "prompt-above-the-swa-pool-waits"),
    ("0.5.14", "margin", 0, "prompt-a-page-below-the-pool-waits"),
    (RELEASE, "margin", 0, "prompt-a-page-below-the-pool-waits"), ("9.9.9.dev", "margin", 0, ""),
])  # fmt: skip
def test_known_faults_say_why_a_client_waits(release, kind, window, known):
    """window: without a tree where it is below 0."""
    outcome = RunOutcome(1, 1, [], {}, stalls=[progress.Stall(kind, "a.1", "waits")])
    run = serving.ServedRun(release, Config(window=abs(window), tree=window >= 0), (), 1)
    (found,) = serving._findings(run, outcome, serving.Validated())
    assert (found.judge, found.key, found.known) == ("progress", f"stalls: {kind}", known)
    clause = {"never": "PRO-3: waits", "swa": "waits"}.get(kind, "PRO-1: waits")
    assert found.says == clause


def test_who_waits_for_long_is_reported():
    stalled = []
    waiting = Client("a", 0, (Turn(0, 3, 3),)), Client("b", 500, (Turn(0, 3, 3),))
    clients = Clients(waiting, 1, stalled.append)
    for now in range(90):
        clients.round(now, 0)
    assert stalled == [["a.1"]]


@pytest.fixture(scope="module")
def scheduler():
    """A whole scheduler. It takes half a minute to start, and an environment that few have: at night."""
    if not NIGHT:
        pytest.skip("at night (KVSPEC_NIGHT=1)")
    try:
        runner = WholeScheduler(environment.python_of(RELEASE))
    except UnusableImplementation as error:
        pytest.skip(f"no server environment: {error}")
    yield runner
    runner.close()


TURNS = (Turn(0, 20, 6), Turn(1, 5, 9, stop=4), Turn(0, 7, 5, abort=2), Turn(2, 4, 3))


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
    run = serving.ServedRun(RELEASE, config, clients, 1)
    one, two = serving.serve(scheduler, run, "pages"), serving.serve(scheduler, run, "pages")
    assert not one.findings and one.outcome.forwards > 15, one.findings
    same = [replace(judged.outcome, cpu_s=0.0) for judged in (one, two)]
    assert same[0] == same[1] and len(one.tail) == len(two.tail)
    assert one.outcome.answers["a.3"] == "abort" and one.outcome.answers["a.4"] == "length"


def test_a_known_fault_is_reported_by_name(scheduler):
    second = Client(
        "a", 0, (Turn(0, 20, 30), Turn(4, 3, 3), Turn(4, 3, 3)), impatient=True, close=30
    )
    judged = serving.serve(scheduler, serving.ServedRun(RELEASE, Config(), (second,), 1))
    assert {each.known for each in judged.findings} == {"rejection-ends-turn"}
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
    client = Client("a", 0, (Turn(0, 3, limit), Turn(0, 3, 3)))
    judged = serving.serve(scheduler, serving.ServedRun(RELEASE, Config(draft=4), (client,), 1))
    assert {each.known for each in judged.findings} == {"last-token"}
    opinions = serving.second_opinion(scheduler, judged)
    assert {key: each.partition(" fail_reason")[0] for key, each in opinions.items()} == says


def test_a_log_may_begin_at_any_part(scheduler, tmp_path):
    rng = random.Random("parts")
    config = population.configuration(rng, draft=4, overlap=True)
    watch = {"KVSPEC_WATCH": str(tmp_path), "KVSPEC_WATCH_MB": "0", "KVSPEC_WATCH_FILES": "1000"}
    scheduler.run(Job(config, population.clients(rng, config, count=30), 1, watch))
    files = sorted(tmp_path.glob("*.jsonl"))
    for at in (0, 1, *range(2, len(files), 5)):
        log = WatchLog(files[at:])
        found = Validator(log.header).run(log.lines())
        assert not found.found, (at, found.found)


# Faults put into a copy of a release's scheduler: each is caught, and by the judges that are named here. That
# takes minutes and the server environment, so it is for the night.

# Those of the host tier that clients reach as well, on servers that have it.
OF_A_TIER = [fault for fault in planted_faults("tiers/faults.toml").values() if fault.server]
FAULTS = [*planted_faults("watched/faults.toml").values(), *OF_A_TIER]


@at_night
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_fault_in_the_scheduler_is_caught(fault, tmp_path):
    judge = "log" if fault in OF_A_TIER else fault.clause
    runs = population.Population(1, fixed=fault.server, impatient=fault.impatient)
    # a run that a busy machine has cut short is seen by another judge, and says nothing
    assert judge in found_in_servers(fault, runs, judge, tmp_path)
