"""Checks of whole schedulers, with a played runner and, where it is installed, with the real one."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace as Bag

import pytest
from msgspec.structs import replace
from rich.console import Console

from ci.report import server_reports
from impl.adapter import UnusableImplementation
from impl.sglang.server.clients import Config
from impl.sglang.server.outcome import Complaint, Misread, RunOutcome
from impl.sglang.server.runs import WholeScheduler
from stateful_tests.watched.servers import scheduler_runs
from stateful_tests.watched.validation_results import Validated


WATCHED = Path(__file__).parents[3] / "fixtures" / "watched"
LOG = WATCHED / "sglang-0.5.23-tree_under_overlap.jsonl"
RELEASE = "0.5.23"


class FaultyRunner:
    """Has a fault that shows when a client in a session sends a second turn of three tokens or more."""

    runs = 0

    def run(self, job):
        self.runs += 1
        lines = LOG.read_text().splitlines(keepends=True)
        Path(job.watch["KVSPEC_WATCH"], "log.jsonl").write_text("".join(lines[:240]))
        bad = any(c.session and any(t.tokens >= 3 for t in c.turns[1:]) for c in job.clients)
        return RunOutcome(10, 20, [Misread(7, "c1.2", "full", 4, (11, 4), None)] if bad else [], {})


def test_a_finding_is_shrunk_to_its_clients_and_numbers():
    result = scheduler_runs.check(FaultyRunner(), RELEASE, 1, 5, count=6)
    assert list(result.found) == ["reads full"] and result.times["reads full"] >= 1
    judged = result.found["reads full"]
    (client,) = judged.run.clients
    first, second = client.turns
    assert (first.tokens, first.limit, second.tokens, second.limit) == (1, 1, 3, 1)
    assert judged.run.config.draft == 0
    assert not judged.run.config.tree
    assert judged.run.config.page_size == 1
    assert judged.run.key == "reads full" and "nothing that was written" in judged.findings[-1].says


@pytest.mark.parametrize("at", [0, 1, 2, 30])
def test_an_interrupt_loses_nothing_that_was_found(at):
    """at: interrupts at that try of the shrinking; 0: between two runs."""
    runs_kept = []
    tries = 0

    def say(what, *_):
        nonlocal tries
        tries += what.startswith("shrinks")
        if runs_kept and (tries == at if at else what.startswith("run")):
            raise KeyboardInterrupt

    result = scheduler_runs.check(
        FaultyRunner(), RELEASE, 1, 5, count=6, say=say, keep=lambda j: runs_kept.append(j.run)
    )
    assert result.interrupted and result.found["reads full"].run == runs_kept[-1]
    data = server_reports.served_report(result, None, 5)
    assert data["exit_code"] == 1 and data["interrupted"]


def test_shrinking_ends_with_the_time(monkeypatch):
    monkeypatch.setattr(scheduler_runs.time, "monotonic", itertools.count().__next__)
    runner = FaultyRunner()
    result = scheduler_runs.check(runner, RELEASE, 1, 5, count=6, limit_s=20)
    assert result.found and runner.runs <= 20


def test_shrinking_one_finding_ends_with_its_time(monkeypatch):
    monkeypatch.setattr(scheduler_runs.time, "monotonic", itertools.count().__next__)
    monkeypatch.setattr(scheduler_runs, "SHRINK_S", 20)
    runner = FaultyRunner()
    result = scheduler_runs.check(runner, RELEASE, 1, 5, count=6)
    assert list(result.found) == ["reads full"]
    assert result.runs == 5
    assert runner.runs <= 5 + 10


def test_a_conforming_check_finds_nothing_and_counts():
    runner = ConformingRunner()
    result = scheduler_runs.check(runner, RELEASE, 1, 3, count=1, fixed={"draft": 2})
    assert not result.found
    assert runner.runs >= result.runs == 3
    assert result.events > 0 and result.reached["a turn that resumes"] > 0


def test_known_faults_are_a_sentence_each_and_where_to_read_on(capsys):
    result = scheduler_runs.Served(RELEASE, 1, 2, 10)
    result.known.update({"last-token": 1, "retract-ends-turn": 2})
    server_reports.served_text(Console(width=100), server_reports.served_report(result, None, 2))
    output = capsys.readouterr().out
    assert "known last-token, 1 time: After a verify round" in output
    assert "known retract-ends-turn, 2 times: " in output
    assert "#40252" not in output and "kvspec bugs NAME" in output


class ConformingRunner(FaultyRunner):
    """Has no fault."""

    def run(self, job):
        return replace(super().run(job), misread=[])


def test_a_finding_that_the_base_shows_in_the_same_run_is_not_new():
    before = scheduler_runs.Before(FaultyRunner(), {})
    same = scheduler_runs.check(FaultyRunner(), RELEASE, 1, 5, count=6, before=before)
    assert not same.found and same.old["reads full"]
    before = scheduler_runs.Before(ConformingRunner(), {})
    new = scheduler_runs.check(FaultyRunner(), RELEASE, 1, 5, count=6, before=before)
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
def test_a_label_holds_for_a_tree_that_still_has_the_fault(monkeypatch, there, was, saved, known):
    """By its traces; without traces by the same run on the release, or by the saved run on the tree."""

    def judge_run(name, key=""):
        found = [scheduler_runs.ServedFinding("log", "log LEN-2 release", "says", name)]
        return scheduler_runs.JudgedRun(
            scheduler_runs.ServedRun(RELEASE, Config(), (), 1, key=key), None, Validated(), found
        )

    tree = FaultyRunner()
    release = FaultyRunner()
    shows = {(tree, "saved"): saved, (release, ""): was}
    monkeypatch.setattr(scheduler_runs, "serve", lambda at, run: judge_run(shows[at, run.key]))
    runs = {"last-token": judge_run("", "saved").run} if saved else {}
    compared = scheduler_runs.Before(release, dict(there), runs).compare(judge_run("last-token"), tree)
    assert [finding.known for finding in compared.findings] == [known]
    assert len(compared.new) == (not known)


def test_a_wrong_state_is_known_where_the_log_shows_why():
    misread = Misread(7, "c1.2", "state", 4, (11, 3), None, found="slot 2 is another's")
    outcome = RunOutcome(9, 9, [misread], {})
    run = scheduler_runs.ServedRun(RELEASE, Config(), (), 1)
    seen = Validated(wrong_states={("c1.2", 4): "retried-turn-folds-twice"}, holes={("c1", 4)})
    (known,) = scheduler_runs._findings(run, outcome, seen)
    (new,) = scheduler_runs._findings(
        run, outcome, Validated(wrong_states={("c1.2", 5): "x"}, holes={("c1", 4)})
    )
    assert (known.known, new.known, new.key) == ("retried-turn-folds-twice", "", "reads state")
    says = "c1.2 must go on at position 4 from the state after the tokens before it"
    assert new.says == f"{says}, and slot 2 is another's"


def test_a_part_of_the_package_is_no_server(tmp_path):
    """Python would run the environment's own package instead."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    with pytest.raises(UnusableImplementation, match="a server needs the whole package"):
        WholeScheduler(Path(sys.executable), tmp_path)


def test_a_server_that_broke_has_a_key_without_numbers():
    one = RunOutcome(1, 1, [], {}, "AssertionError: leak of 3 at srt/mem_cache/common.py:403")
    two = RunOutcome(1, 1, [], {}, "AssertionError: leak of 4 at srt/mem_cache/common.py:403")
    run = scheduler_runs.ServedRun(RELEASE, Config(), (), 1)
    keys = {f.key for o in (one, two) for f in scheduler_runs._findings(run, o, scheduler_runs.Validated())}
    assert len(keys) == 1 and "AssertionError" in keys.pop()


@pytest.mark.parametrize("fires, of_reads, of_log", [
    ([], "is silent in 10 forward passes", "is silent in 10 forward passes"),
    ([("c1.2", 4)], "sees it: forward pass 7, position 4 of c1.2: hash",
     "fires in this run: forward pass 7, position 4 of c1.2: hash"),
    ([("", -1)], "does not see it, and fires elsewhere: forward pass 7, position -1 of no request: hash",
     "fires in this run: forward pass 7, position -1 of no request: hash"),
])  # fmt: skip
def test_the_canary_agrees_with_each_finding_or_not(fires, of_reads, of_log):
    outcome = RunOutcome(9, 9, [Misread(7, "c1.2", "full", 4, (11, 4), None)], {})
    keys = ("reads", "reads full"), ("log", "log LEN-2")
    findings = [scheduler_runs.ServedFinding(judge, key, "") for judge, key in keys]
    run = scheduler_runs.ServedRun(RELEASE, Config(), (), 1)
    seen = [Complaint(7, name, position, "hash") for name, position in fires]
    runner = Bag(run=lambda job: RunOutcome(10, 10, [], {}, canary=seen if job.canary else None))
    judged = scheduler_runs.JudgedRun(run, outcome, Validated(), findings)
    says = scheduler_runs.second_opinion(runner, judged)
    assert says == {"reads full": of_reads, "log LEN-2": of_log}
