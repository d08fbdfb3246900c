"""The command line: what it prints, into a pipe, and what it returns."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci.commands import release_row
from ci.report import data as report
from ci.report import progress
from impl.adapter import Capabilities
from impl.sglang.releases.catalogue import TABLE
from reference.commands import Mode, Open, Reason, Refused
from reference.failures import Failure
from stateful_tests.check import campaign, tiers
from stateful_tests.coverage import required as coverage
from stateful_tests.lockstep import lockstep
from stateful_tests.lockstep import systems as registry
from stateful_tests.lockstep.results import Row, Run, Violation
from stateful_tests.lockstep.systems import resolve
from stateful_tests.tests.support.checks import BAD, ROWS, RUN, TRACE, checked, finding
from stateful_tests.traces import files as traces


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def coverage_of(kvspec, options):
    kvspec(*options, "--json", "coverage.json")
    return json.loads(Path("coverage.json").read_text())["situations"]


def test_check_that_conforms(finds, fake, kvspec):
    plans = finds(checked())
    options = ("check", "--tier", "pr", "--seed", "7", "--examples", "10", "--mode", "both")
    code, out, err = kvspec(*options)
    assert (code, err, fake.closed) == (0, "", 1)
    assert plans == [tiers.plan("pr", seed=7, examples=10, modes=tuple(Mode))]
    asked = coverage_of(kvspec, options)["asked"]
    head = ["torch+pr22900: conforms (400 commands in 2.0 s)", ""]
    last = f"smoke, seed 7: 10 of 10 runs; 0 of {asked} situations, 1 of 2 clauses met"
    assert lines(out) == [*head, f"{last} (-v)"]
    seen = lines(kvspec(*options, "-v")[1])
    assert (seen[:2], seen[-1]) == (head, last)
    assert "sessions page2 free 10 400 800" in seen
    assert "all 10 400 800" in seen
    assert any(line.startswith("LEN-2 ") and line.endswith(" 400 21") for line in seen)
    assert any(line.startswith("FREE-2 ") and line.endswith(" 400 never") for line in seen)
    assert "refusals met: out_of_full 30, no_row 2" in seen
    assert max(map(len, out.splitlines())) <= 100
    assert not os.path.exists("traces")


def test_check_that_fails(finds, kvspec):
    other = replace(RUN, trace=replace(TRACE, clause="FREE-2"))
    faithful = finding("FREE-2", other, tuple(Mode))
    finds(checked(finding(), faithful))
    code, out, _ = kvspec("check", "--impl", "torch+pr22900")
    assert code == 1
    assert lines(out)[:6] == [
        "torch+pr22900: violates LEN-2, FREE-2 (400 commands in 2.0 s)", "", "violation: LEN-2, FREE-2",
        "rule finish and retract cap at target; met in free mode alone so far; polite clients",
        "because swa_evicted_seqlen 40, not swa_evicted_seqlen 38", "",
    ]  # fmt: skip
    assert out.splitlines()[-4:-1] == [
        "saved   traces/len-2-torch-pr22900.json",
        "replay  kvspec replay traces/len-2-torch-pr22900.json --impl torch+pr22900",
        "",
    ]
    assert report.sentence("LEN-2") not in " ".join(out.split())

    code, text, _ = kvspec("check", "--impl", "torch+pr22900", "-v")
    assert code == 1
    assert max(map(len, text.splitlines())) <= 100
    text = text[: text.index("  plan ")]
    flat = " ".join(text.split())
    assert report.sentence("LEN-2") in flat
    assert report.sentence("FREE-2") in flat
    assert "met in free mode alone so far (modes: free); polite clients; met 3 times" in flat
    assert "first after 1234 commands, 1.2 s" in flat
    assert "reachable by a faithful scheduler (modes: free, faithful);" in flat
    assert [line for line in lines(text) if re.match("[0-9] |>", line)] == [
        "0 open s1 done",
        "1 submit r1 in s1 +40 done",
        "2 admit r1 refused: out_of_full",
        "3 extend r1 +40 done s1 kv_committed_len 0 -> 40",
        "4 spec_decode r1 +4 accept 3 done s1 kv_allocated_len 40 -> 44",
        "> 5 finish r1 keep 1 done s1 kv_allocated_len 44 -> 38",
    ]
    assert "s1 freed full [38, 44) swa [42, 44) violates LEN-2, FREE-2" in flat
    assert "violated at step 5: LEN-2." in flat
    assert "expected swa_evicted_seqlen 38 observed swa_evicted_seqlen 40" in flat
    assert "also FREE-2 at the same step" in flat
    saved = traces.load("traces/len-2-torch-pr22900.json")
    assert saved == replace(TRACE, clause="LEN-2", bug="pr22900")


def test_a_finding_that_cannot_be_saved_is_reported(finds, kvspec, monkeypatch):
    finds(checked(finding()))

    def fail(trace, path):
        raise OSError("disk full")

    monkeypatch.setattr(traces, "save", fail)
    code, out, _ = kvspec("check")
    assert code == 1
    assert "the trace could not be saved: traces/len-2-torch-pr22900.json: disk full" in out


def test_options_of_the_implementation_are_in_the_replay_command(finds, kvspec):
    finds(checked(finding()))
    _, out, _ = kvspec("check", "--impl", "sglang", "--sglang-path", "a b", "--device", "cuda")
    assert "json --impl sglang --sglang-path 'a b' --device cuda\n" in out


def test_json_has_every_figure(finds, kvspec):
    finds(checked(finding()))
    code, out, err = kvspec("check", "--json", "-")
    data = json.loads(out)
    assert data["exit_code"] == code == 1
    assert "violation: LEN-2" in err, "the text goes to stderr"
    assert data["machines"][0]["commands_per_s"] == 800
    told = {"id": "FREE-2", "title": "SWA pages freed as owed", "sentence": report.sentence("FREE-2")}
    told |= {"waived": None}
    assert data["clauses"][1] == {**told, "evaluated": 400, "runs_reached": 0, "reached": False}
    [found] = data["findings"]
    assert found["saved"] == "traces/len-2-torch-pr22900.json"
    assert found["violation"]["observed"] == BAD.observed
    assert found["rows"][5]["freed"][1] == {"holder": "s1", "pool": "swa", "start": 42, "end": 44}
    assert traces.loads(json.dumps(found["trace"]).encode(), "json") == TRACE
    assert kvspec("check", "--json", "out.json")[1].startswith(f"{data['verdict']}\n")
    assert json.loads(Path("out.json").read_text()) == data


def test_known_faults_that_were_passed_over_are_named(finds, fake, kvspec):
    fake.capabilities = Capabilities(waived={"LEN-2": "harmless"}, known={"FREE-2": "#1, some_trace.json"})
    finds(checked())
    code, out, _ = kvspec("check", "--json", "out.json")
    assert code == 0
    assert "conforms; known faults were passed over: FREE-2 (400 commands" in " ".join(lines(out))
    told = [c["waived"] for c in json.loads(Path("out.json").read_text())["clauses"]]
    assert told == ["harmless", "known fault: #1, some_trace.json"]


@pytest.mark.parametrize(
    ("base", "code", "says"),
    [
        ("torch+pr22900", 0, "torch+pr22900: nothing new; LEN-2 also in torch+pr22900 ("),
        ("torch", 1, "torch+pr22900: violates LEN-2 ("),
    ],
)
def test_what_was_there_before_is_no_failure(finds, kvspec, monkeypatch, base, code, says):
    """By the smallest traces, so that nothing depends on how far a check of the base would have come."""
    name = "finish_behind_the_window_sweep_caps_all_three_lengths"
    trace = traces.load(Path(__file__).parents[3] / f"fixtures/regressions/{name}.json")
    run = lockstep.replay(resolve("torch+pr22900"), trace)
    monkeypatch.setattr(registry, "resolve", resolve)
    finds(checked(finding("LEN-2", run)))
    found, out, _ = kvspec("check", "--impl", "torch+pr22900", "--base", base, "--html")
    assert found == code
    assert says in " ".join(out.split())
    heads = {0: "also in torch+pr22900 (what else breaks the same may hide behind it)", 1: "NEW: LEN-2"}
    assert [line for line in out.splitlines() if line in heads.values()] == [heads[code]]
    assert ("\n  LEN-2: traces/len-2-torch-pr22900.json\n" in out, "because" in out) == (not code, bool(code))
    badge = {0: ">also in torch+pr22900<", 1: ">NEW: not in torch<"}
    assert badge[code] in Path("traces/len-2-torch-pr22900.html").read_text()
    traces.save(trace, "t.json")
    found, out, _ = kvspec("replay", "t.json", "--impl", "torch+pr22900", "--base", base)
    assert (found, "(torch+pr22900 violates it as well)" in out) == (code, code == 0)


@pytest.mark.parametrize(
    ("command", "base", "says"),
    [
        (("check",), "no_such", "--base no_such: --impl 'no_such': not one of"),
        (("replay", "t.json"), "no_such", "--base no_such: --impl 'no_such': not one of"),
        (("check",), "broken", "--base broken: sglang checkout "),
    ],
)
def test_a_base_that_is_none_is_refused_before_anything_starts(kvspec, monkeypatch, command, base, says):
    traces.save(TRACE, "t.json")
    for name in ("session_aware_cache", "../managers/session_controller"):  # enough to look like 0.5.10
        file = Path("broken/sglang/srt/mem_cache", f"{name}.py").resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    asked: list[str] = []
    find = registry.resolve
    monkeypatch.setattr(registry, "resolve", lambda spec, **more: asked.append(spec) or find(spec, **more))
    code, _, err = kvspec(*command, "--base", base)
    assert (code, len(asked), err.count("\n")) == (2, 1, 1)
    assert err.startswith(f"kvspec: {says}")


ALL = dict.fromkeys(coverage.load().required, 1)
BROKE = replace(RUN, violation=Violation("BROKEN", 5, Failure("done", "\x1b[2JIndexError")))


@pytest.mark.parametrize(
    ("result", "code", "says"),
    [
        (checked(timed_out=True), 0, "nothing was found until the time limit of 60 s, after 10 of 13 runs"),
        (checked(finding("LEN-2"), timed_out=True), 1, "violates LEN-2; the time limit of 60 s, after 10 of"),
        (checked(finding("BROKEN", BROKE)), 3, "torch+pr22900: the system broke"),
        (checked(tier="nightly"), 1, "never reached the situation of FREE-2"),
        (checked(tier="pr", system="torch", situations=ALL), 1, "never reached the situation of FREE-2 ("),
        (checked(tier="nightly", timed_out=True), 0, "never reached the situation of FREE-2"),
    ],
    ids=["timed out", "with a finding", "broke", "not reached", "not in tier pr", "not reached in time"],
)
def test_other_ends(finds, kvspec, result, code, says):
    finds(result)
    found, out, _ = kvspec("check", "--tier", result.tier)
    assert found == code
    assert says in " ".join(out.split())


@pytest.mark.parametrize(
    ("tier", "name", "more", "options", "code"),
    [
        ("pr", "torch", {}, (), 1),
        ("pr", "reference", {}, ("--seed", "3", "--mode", "both"), 1),
        ("smoke", "torch", {}, (), 0),
        ("pr", "sglang==0.5.23", {}, (), 0),
        ("pr", "torch", {}, ("--machine", "tree"), 0),
        ("pr", "torch", {"timed_out": True}, (), 0),
        ("pr", "torch", {"situations": ALL, "unreached": ()}, (), 0),
    ],
)
def test_missed_situations_fail_the_whole_check_of_our_own(finds, kvspec, tier, name, more, options, code):
    result = checked(tier=tier, system=name, **more)
    finds(result)
    found, out, _ = kvspec("check", "--tier", tier, *options, "--json", "out.json", "-v")
    assert found == code
    told = json.loads(Path("out.json").read_text())["situations"]
    assert f"{told['reached']} of {told['asked']} situations" in " ".join(out.split())
    assert told["reached"] + len(told["missing"]) == told["asked"] > 0
    count = len(told["missing"])
    assert (f"misses {count} of {told['asked']} situations" in " ".join(out.split())) == bool(code)
    assert out.count("\nsituation never reached: ") == count
    brief = " ".join(kvspec("check", "--tier", tier, *options)[1].split())
    assert brief.count("situation never reached: ") == (10 if code else 0)
    if code:
        assert f"situation never reached: {told['missing'][9]} and {count - 10} more (-v)" in brief


def unusable(*arguments: str, says: str) -> Any:
    return pytest.param(arguments, says, id=" ".join(arguments)[:60])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        unusable("fly", says="No such command 'fly'"),
        unusable("check", "--examples", "0", says="--examples"),
        unusable("check", "--examples", "99999999999", says="--examples: must be between"),
        unusable("explore", "--situations", "no/such/list.json", says="list.json: there is no folder"),
        unusable("check", "--preset", "page\n3", says="--preset: unknown"),
        unusable("check", "--machine", "m", says="--machine: unknown"),
        unusable("check", "--json", "no/such/folder.json", says="folder.json: there is no folder"),
        unusable("check", "--json", ".", says="--json .: is a directory"),
        unusable("check", "--save", "file", says="--save file: is not a directory"),
        unusable("bugs", "--json", "pr22900", says="--json pr22900: is a bug, not a file"),
        unusable("clauses", "LEN2", says="unknown clause 'LEN2'; without a name all are listed; is it LEN-2"),
        unusable("replay", "missing.json", says="missing.json: No such file"),
        unusable("replay", "file", says="file: is not JSON"),
    ],
)
def test_unusable_input_is_one_line(fake, kvspec, arguments, says):
    Path("file").write_text("text")
    code, out, err = kvspec(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("kvspec: ")
    assert err.count("\n") == 1
    assert says in err
    assert len(err) < 700


@pytest.mark.parametrize(
    ("impl", "says"),
    [
        ("nothing", "--impl 'nothing'"),
        ("torch+nothing", "torch+nothing: unknown bug"),
        ("no.such.module:factory", "no.such.module:factory: No module"),
        ("bad_module:factory", "--impl bad_module:factory: ZeroDivisionError"),
    ],
)
def test_unusable_implementations(kvspec, monkeypatch, tmp_path, impl, says):
    monkeypatch.chdir(tmp_path)
    Path("bad_module.py").write_text("1 / 0")
    code, out, err = kvspec("check", "--impl", impl)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_what_should_not_break_is_no_traceback_either(fake, kvspec, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("not deterministic")

    monkeypatch.setattr(campaign, "run", fail)
    code, _, err = kvspec("check")
    assert (code, fake.closed, err.count("\n")) == (3, 1, 1)
    assert "RuntimeError: not deterministic" in err


def test_an_interrupt_is_one_line(fake, kvspec, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "run", stop)
    code, _, err = kvspec("check")
    assert (code, err.strip()) == (130, "kvspec: interrupted")


def test_replay(fake, kvspec, monkeypatch):
    traces.save(replace(TRACE, bug="pr22900", clause="LEN-2", story="First this.\nThen that."), "t.json")
    broke = Violation("BROKEN", 5, Failure("done", "KeyError: 1"))
    runs = iter([BAD, None, replace(BAD, clause="OWN-1"), broke])

    def run(system, trace):
        return Run(trace, system.name, ROWS, next(runs))

    monkeypatch.setattr(lockstep, "replay", run)
    code, out, err = kvspec("replay", "t.json", "t.json", "t.json", "t.json", "--json", "r.json")
    assert (code, err, fake.closed) == (3, "", 1)
    seen = lines(out)
    assert seen[:3] == ["t.json on torch+pr22900", "bug pr22900, clause LEN-2", "First this. Then that."]
    assert [line for line in seen if " of 6 steps" in line or "conforms" in line] == [
        "violates LEN-2, FREE-2 after 6 of 6 steps",
        "t.json: conforms (the trace is there to show pr22900, and does not)",
        "violates OWN-1, FREE-2 after 6 of 6 steps (the trace names LEN-2)",
        "broke after 6 of 6 steps",
    ]
    assert "".join(seen).endswith("4 traces: 1 conform, 3 do not: t.json, t.json, t.json")
    data = json.loads(Path("r.json").read_text())
    assert [one["exit_code"] for one in data["replays"]] == [1, 0, 1, 3]
    assert data["exit_code"] == 3


def test_long_traces_show_their_end(fake, kvspec, monkeypatch):
    trace = replace(TRACE, commands=(Open("s1"),) * 1000)
    traces.save(trace, "t.json")
    rows = (Row(Open("s1"), Refused(Reason.SESSION_EXISTS)),) * 1000
    monkeypatch.setattr(lockstep, "replay", lambda system, trace: Run(trace, system.name, rows, None))
    code, out, _ = kvspec("replay", "t.json")
    assert code == 0
    assert "steps 0 to 939 are left out here" in out
    assert "  999   open s1" in out
    assert len(out.splitlines()) < 80


def test_lists(kvspec):
    for command, first in (("bugs", "bug"), ("clauses", "clause")):
        code, out, err = kvspec(command)
        assert (code, err) == (0, "")
        data = json.loads(kvspec(command, "--json")[1])
        assert kvspec(command, "--json", "l.json")[1] == out
        assert json.loads(Path("l.json").read_text()) == data
        assert lines(out)[0].startswith(first)
        assert max(map(len, out.splitlines())) <= 100
        ids = {line.split(" ")[0] for line in out.splitlines()}
        assert {row["id"] for row in data} <= ids
        assert all(row["source"] for row in data)


def test_progress_in_a_pipe_is_a_plain_line_now_and_then(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.Progress() as say:
        for _ in range(250):
            clock[0] += 0.1
            say("sessions on page1, free", 5, 1)
    assert capsys.readouterr().err.splitlines() == [
        f"{when} s: sessions on page1, free; 5 commands, 1 clauses violated" for when in (10, 20)
    ]


# kvspec check --impl sglang==all: the row of releases, and what ends it.

SMALL = ("--examples", "20", "--seed", "5", "--preset", "page2", "--machine", "sessions", "-j1")
ASKED = ("check", "--impl", "sglang==all", *SMALL)


def test_it_stands_for_all_releases_or_for_those_that_have_a_tree():
    assert release_row.names("sglang==all") == [f"sglang=={version}" for version in TABLE]
    assert release_row.names("sglang==all+overlap")[-1] == "sglang==0.5.23+overlap"
    rust = release_row.names("sglang==all+rust+overlap")
    assert rust[0] == "sglang==0.5.19+rust+overlap" and len(rust) == 5
    assert release_row.names("sglang==0.5.23") == []


def test_what_cannot_be_had_is_a_line_and_the_worst_exit_code_counts(kvspec, monkeypatch, tmp_path):
    systems = ["torch+pr22900", "sglang==9.9.9", "torch"]
    monkeypatch.setattr(release_row, "names", lambda impl: systems)
    code, out, err = kvspec(*ASKED, "--json", "row.json")
    assert code == 2
    assert "kvspec: sglang==9.9.9 is not supported" in err
    rows = [line.split("|") for line in out.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[2:]] == ["torch+pr22900", "9.9.9", "torch"]
    assert "-" not in rows[2][4].split() and rows[4][4].strip() == "-"
    assert "9.9.9 is not supported" in rows[3][5]
    data = json.loads((tmp_path / "row.json").read_text())
    assert [row["exit_code"] for row in data["releases"]] == [1, 2, 0]
    assert data["releases"][2]["check"]["implementation"] == "torch"
    monkeypatch.setattr(release_row, "names", lambda impl: ["torch+pr22900", "torch"])
    assert kvspec(*ASKED)[0] == 1


def test_what_is_of_one_system_is_refused(kvspec):
    code, _, err = kvspec(*ASKED, "--junit", "x.xml")
    assert (code, err) == (2, "kvspec: --junit: goes with one system, not with --impl sglang==all\n")
