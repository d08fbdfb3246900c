"""`kvspec check`: what it prints, into a pipe, and what it returns."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ci.report import report_data as report
from ci.report import text_output, check_text, run_text, verdict
from impl import engines
from impl.adapter import Capabilities
from impl.sglang.releases.catalogue import TABLE
from impl.system_spec import SystemSpec
from impl.process.system_functions import SystemFunction
from reference.failures import Failure
from stateful_tests.check.trees.changed_functions import Changes
from stateful_tests.lockstep import system_names as registry
from stateful_tests.check.check_plans import CORPUS
from stateful_tests.lockstep.check_results import LookedUp, MachineResult
from stateful_tests.lockstep.run_results import Run, Violation
from stateful_tests.tests.support.made_up_check import (
    printed_lines,
    BAD,
    COMMANDS,
    ROWS,
    RUN,
    TRACE,
    check_result,
    finding,
)
from stateful_tests.traces import trace_files as traces
from stateful_tests.tests.support.night import at_night


def test_a_finding_that_cannot_be_saved_is_reported(make_check_find, kvspec, monkeypatch):
    make_check_find(check_result(finding()))

    def fail(trace, path):
        raise OSError("disk full")

    monkeypatch.setattr(traces, "save", fail)
    code, out, _ = kvspec("check")
    assert code == 1
    assert "the trace could not be saved: traces/len-2-torch-pr22900.json: disk full" in out


def test_options_of_the_implementation_are_in_the_replay_command(make_check_find, kvspec):
    make_check_find(check_result(finding()))
    _, out, _ = kvspec("check", "--impl", "sglang", "--sglang-path", "a b", "--device", "cuda")
    assert "json --impl sglang --sglang-path 'a b' --device cuda\n" in out


def test_a_verdict_counts_no_presets_where_the_corpus_alone_was_driven():
    corpus = MachineResult(CORPUS, "", "faithful", examples=21)
    result = check_result(machines=[corpus], carried_out={"Open": 49})
    assert verdict.driven_text(result).startswith("49 commands of 1 kind in 21 runs, ")
    assert verdict.driven_text(check_result(machines=[], carried_out={})).startswith("0 commands, ")


@pytest.mark.parametrize("named, impl", [((), "vllm"), (("--impl", "vllm+async"), "vllm+async")])
def test_a_checkout_selects_its_engine(named, impl, make_check_find, kvspec):
    make_check_find(check_result(finding()))
    _, out, _ = kvspec("check", *named, "--vllm-path", "clone")
    assert f"json --impl {impl} --vllm-path clone\n" in out


def test_json_has_the_verdict_and_the_text_goes_to_stderr(make_check_find, kvspec):
    make_check_find(check_result(finding()))
    code, out, err = kvspec("check", "--json", "-")
    data = json.loads(out)
    assert data["exit_code"] == code == 1
    assert data["ended"] == "violated"
    assert "violation: LEN-2" in err


def test_json_has_the_figures_of_machines_and_clauses(make_check_find, kvspec):
    make_check_find(check_result(finding()))
    data = json.loads(kvspec("check", "--json", "-")[1])
    assert data["machines"][0]["commands_per_s"] == 800
    clause = {
        "id": "FREE-2",
        "title": "SWA pages freed as owed",
        "sentence": report.sentence("FREE-2"),
    }
    clause |= {"waived": None}
    assert data["clauses"][1] == {**clause, "evaluated": 400, "runs_reached": 0, "reached": False}


def test_json_has_the_trace_of_a_finding(make_check_find, kvspec):
    make_check_find(check_result(finding()))
    [found] = json.loads(kvspec("check", "--json", "-")[1])["findings"]
    assert found["saved"] == "traces/len-2-torch-pr22900.json"
    assert found["violation"]["observed"] == BAD.observed
    assert found["rows"][5]["freed"][1] == {"holder": "s1", "pool": "swa", "start": 42, "end": 44}
    assert traces.loads(json.dumps(found["trace"]).encode(), "json") == TRACE


def test_json_in_a_file_leaves_the_text_on_stdout(make_check_find, kvspec):
    make_check_find(check_result(finding()))
    data = json.loads(kvspec("check", "--json", "-")[1])
    assert kvspec("check", "--json", "out.json")[1].startswith(f"torch+pr22900: {data['said']}\n")
    assert json.loads(Path("out.json").read_text()) == data


def test_the_first_line_names_what_another_way_has_found(make_check_find, kvspec):
    make_check_find(check_result())
    kvspec("check", "--json", "out.json")
    green = json.loads(Path("out.json").read_text())
    red = green | {"implementation": "vllm@checkout+offload", "exit_code": 1}
    ways = [green, red | {"said": "violates PUB-1; 2 known faults"}]
    check_text.check(text_output.console(output := io.StringIO()), green | {"ways": ways})
    first, *_ = output.getvalue().splitlines()
    assert first == "torch+pr22900: conforms; +offload violates PUB-1, below"


def test_clauses_that_fail_at_the_step_of_another_are_one_finding(make_check_find, kvspec):
    """A trace of more commands that violates the same clause at the same step has no cause of its own."""
    longer = Run(replace(TRACE, commands=(*COMMANDS, *COMMANDS[:1])), "torch+pr22900", ROWS, BAD)
    shorter = replace(longer, trace=replace(TRACE, commands=COMMANDS[:-1]))
    apart = replace(finding("READ-1", shorter), number=2)
    findings = (finding("LEN-2"), finding("FREE-2", longer), finding("OWN-1", longer), apart)
    make_check_find(check_result(*findings))
    output, _ = kvspec("check", "--json", "out.json")[1:]
    first, second = json.loads(Path("out.json").read_text())["findings"]
    traces = ["len-2-torch-pr22900", "len-2-torch-pr22900", "own-1-torch-pr22900"]
    assert [c["saved"] for c in first["clauses"]] == [f"traces/{name}.json" for name in traces]
    assert [c["name"] for c in second["clauses"]] == ["READ-1 (2)"]
    assert "violation 1 of 2: LEN-2, FREE-2, OWN-1" in output
    assert "saved traces/own-1-torch-pr22900.json, for OWN-1" in " ".join(output.split())
    # The first has its steps, the others how they are replayed; with -v all have them.
    assert output.count("minimised trace, mode") == 1 and output.count("replay  kvspec") == 2
    assert "-v has the steps of all" in output
    output = kvspec("check", "-v")[1]
    assert output.count("minimised trace, mode") == 2 and "has the steps" not in output


def test_known_faults_that_were_passed_over_are_named(make_check_find, fake_system, kvspec):
    fake_system.capabilities = Capabilities(
        waived={"LEN-2": "harmless"}, known={"FREE-2": "#1, some_trace.json"}
    )
    make_check_find(check_result())
    code, out, _ = kvspec("check", "--json", "out.json")
    assert code == 0
    not_checked = "not checked LEN-2 (harmless) FREE-2 (known fault: #1, some_trace.json)"
    assert not_checked in " ".join(printed_lines(out))
    data = json.loads(Path("out.json").read_text())
    assert "conforms; not checked: LEN-2, FREE-2 (400" in data["verdict"]
    waivers = [clause["waived"] for clause in data["clauses"]]
    assert waivers == ["harmless", "known fault: #1, some_trace.json"]


@pytest.mark.parametrize(
    ("command", "base", "says"),
    [
        (("check",), "no_such", "--base no_such: --impl 'no_such': not one of"),
        (("replay", "t.json"), "no_such", "--base no_such: --impl 'no_such': not one of"),
        (("check",), "broken", "--base broken: sglang checkout "),
    ],
)
def test_a_base_that_is_none_is_refused_before_anything_starts(
    kvspec, monkeypatch, command, base, says
):
    traces.save(TRACE, "t.json")
    # enough to look like 0.5.10
    for name in ("session_aware_cache", "../managers/session_controller"):
        file = Path("broken/sglang/srt/mem_cache", f"{name}.py").resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    resolved: list[str] = []
    find = registry.driven_system
    monkeypatch.setattr(
        registry, "driven_system", lambda spec, *more: resolved.append(str(spec)) or find(spec, *more)
    )
    code, _, err = kvspec(*command, "--base", base)
    assert (code, len(resolved), err.count("\n")) == (2, 1, 1)
    assert err.startswith(f"kvspec: {says}")


@pytest.mark.parametrize(
    ("base", "impl", "runs"),
    [
        ("vllm==0.33.0", "vllm+async", "vllm==0.33.0+async"),
        ("vllm==0.33.0+async", "vllm+async", "vllm==0.33.0+async"),
        ("sglang==0.5.22", "sglang==0.5.23+rust+overlap", "sglang==0.5.22+rust+overlap"),
        ("sglang", "sglang+overlap", "sglang+overlap"),
        ("sglang==0.5.22", "sglang", "sglang==0.5.22"),
        ("torch", "sglang+overlap", "torch"),
        ("torch+pr22900", "torch+pr22862-tail", "torch+pr22900"),
    ],
)
def test_a_base_runs_as_the_tree_does(base, impl, runs):
    assert str(registry.as_base(*map(SystemSpec.parse, (base, impl)))) == runs


@pytest.mark.parametrize(
    ("base", "impl"),
    [("vllm==0.33.0+async", "vllm==0.32.0"), ("vllm==0.33.0+async", "vllm==0.32.0+async+offload")],
)
def test_a_base_that_names_another_way_is_refused(kvspec, base, impl):
    code, _, err = kvspec("check", "--impl", impl, "--base", base)
    says = f"--impl {impl} does not run as +async; without it the base runs as --impl"
    assert (code, err) == (2, f"kvspec: --base {base}: {says}\n")


BROKE = replace(RUN, violation=Violation("BROKEN", 5, Failure("done", "\x1b[2JIndexError")))
MISSED = tuple(f"open, case {number}" for number in range(10, 22))


@pytest.mark.parametrize(
    ("result", "code", "says"),
    [
        (
            check_result(timed_out=True),
            4,
            "nothing was found, but the time limit came after 10 of 10 runs",
        ),
        (
            check_result(finding("LEN-2"), timed_out=True),
            1,
            "violates LEN-2; 10 of 10 runs until the time limit",
        ),
        (check_result(finding("BROKEN", BROKE)), 3, "torch+pr22900: the system broke"),
        (
            check_result(timed_out=True, asked=30_000),
            4,
            "the time limit came after 400 of 30,000 commands",
        ),
        (
            check_result(asked=30_000),
            4,
            "nothing was found, but only 400 of 30,000 commands were carried out",
        ),
        (
            check_result(finding("LEN-2"), stopped=True, asked=30_000),
            1,
            "LEN-2 driven 400 commands of 2 kinds in",
        ),
        (
            check_result(interrupted=True, asked=30_000),
            130,
            "interrupted after 400 of 30,000 commands",
        ),
        (
            check_result(untriggered=("FREE-2",)),
            4,
            "incomplete: nothing was found, but never triggered FREE-2",
        ),
        (check_result(excused=("LEN-2",)), 4, "known or waived are 1 of the 1 clauses that came up"),
        (
            check_result(declined={"admit": 312, "abort": 0}),
            4,
            "refused from command 312 on: admit; refused every time: abort",
        ),
        (
            check_result(carried_out={"Open": 3}),
            4,
            "nothing was found, but only 3 commands were carried out",
        ),
        (
            check_result(never_done=("close",)),
            4,
            "incomplete: nothing was found, but never carried out: close",
        ),
        (check_result(system="torch", required=MISSED), 4, "12 of 12 situations were not met"),
        (check_result(system="sglang==0.5.23", required=MISSED), 0, "conforms"),
    ],
)
def test_other_ends(make_check_find, kvspec, result, code, says):
    make_check_find(result)
    found, out, _ = kvspec("check", "--tier", result.tier)
    assert found == code
    assert says in " ".join(out.split())


def test_situations_that_were_not_reached_are_named(make_check_find, kvspec):
    make_check_find(check_result(system="torch", required=MISSED))
    brief = " ".join(kvspec("check")[1].split())
    assert brief.count("situation never reached: ") == 10
    assert f"situation never reached: {MISSED[9]} and 2 more (-v)" in brief
    assert kvspec("check", "-v")[1].count("situation never reached: ") == 12


def test_a_finding_is_not_buried_under_situations(make_check_find, kvspec):
    make_check_find(check_result(finding(), system="torch", required=MISSED))
    assert "situation never reached: " not in kvspec("check")[1]
    assert kvspec("check", "-v")[1].count("situation never reached: ") == 12


@pytest.mark.parametrize("detailed", [False, True])
def test_a_detailed_finding_names_the_edit_and_the_releases_too(detailed):
    edited = SystemFunction("pool.py", "free")
    found = replace(
        finding(run=replace(RUN, called=((),) * 5 + ((edited,),))),
        looked_up=LookedUp(conform=2, driven=2),
    )
    data = report.finding_data([found], None, Changes("HEAD", frozenset(), {edited: 1}, ()))
    run_text.finding(text_output.console(out := io.StringIO()), data, "NEW", detailed=detailed)
    printed = " ".join(out.getvalue().split())
    assert "looked up first seen here: none of 2 releases violates it" in printed
    assert "changed pool.py: free ran in command 5 (finish r1 keep 1)" in printed
    assert printed.count("because ") == (0 if detailed else 1)


# kvspec check --impl sglang==all: the row of releases, and what ends it.

SMALL = ("--examples", "8", "--seed", "5", "--preset", "page2", "--machine", "sessions", "-j1")
ASKED = ("check", "--impl", "sglang==all", *SMALL)


def specs_of(names):
    return [SystemSpec.parse(name) for name in names]


def names_of(impl):
    return [str(spec) for spec in engines.every_release(SystemSpec.parse(impl))]


@pytest.mark.parametrize(
    ("name", "first", "last", "count"),
    [
        ("sglang==all", "sglang==0.5.10", "sglang==0.5.23", len(TABLE)),
        ("sglang==all+overlap", "sglang==0.5.10+overlap", "sglang==0.5.23+overlap", len(TABLE)),
        ("sglang==all+rust+overlap", "sglang==0.5.19+rust+overlap", "sglang==0.5.23+rust+overlap", 5),
        ("sglang==all+rust+hicache", "sglang==0.5.20+rust+hicache", "sglang==0.5.23+rust+hicache", 4),
        ("vllm==all+offload", "vllm==0.21.0+offload", "vllm==0.33.0+offload", None),
        ("lmdeploy==all", None, "lmdeploy==0.18.0", None),
        ("transformers==all", "transformers==5.23.0", "transformers==5.24.0", 2),
    ],
)
def test_all_stands_for_the_releases_that_have_the_way(name, first, last, count):
    names = names_of(name)
    assert first in (None, names[0])
    assert names[-1] == last
    assert count in (None, len(names))


@pytest.mark.parametrize("name", ["sglang==0.5.23", "torch==all"])
def test_other_names_stand_for_one_system(name):
    assert names_of(name) == []


@pytest.mark.parametrize(
    ("systems", "exit_code"),
    [
        (["torch+pr22900", "sglang==9.9.9", "torch"], 1),
        pytest.param(["torch+pr22900", "reference"], 1, marks=at_night),
        pytest.param(["sglang==9.9.9", "reference"], 2, marks=at_night),
    ],
)
def test_the_gravest_exit_code_of_the_releases_counts(kvspec, monkeypatch, systems, exit_code):
    monkeypatch.setattr(engines, "every_release", lambda _: specs_of(systems))
    assert kvspec(*ASKED)[0] == exit_code


def test_an_unavailable_release_is_one_line(kvspec, monkeypatch, tmp_path):
    systems = ["torch+pr22900", "sglang==9.9.9", "torch"]
    monkeypatch.setattr(engines, "every_release", lambda _: specs_of(systems))
    _, out, err = kvspec(*ASKED, "--json", "row.json")
    assert "kvspec: sglang==9.9.9 is not supported" in err
    rows = [line.split("|") for line in out.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[2:]] == ["torch+pr22900", "9.9.9", "torch"]
    assert "-" not in rows[2][4].split(), "the faulty one has findings"
    assert rows[4][4].strip() == "-", "the other has none"
    assert "9.9.9 is not supported" in rows[3][5]
    data = json.loads((tmp_path / "row.json").read_text())
    assert [row["exit_code"] for row in data["releases"]] == [1, 2, 0]
    assert data["releases"][2]["check"]["implementation"] == "torch"


def test_known_faults_are_named_in_their_line():
    """Those that are alike, the first of them."""
    fault = {"state": "still there", "masked": True, "elsewhere": False, "instead": "", "fixed_in_part": ""}
    data = {"known": [fault | {"id": f"fault-{at}"} for at in range(8)]}
    console = text_output.console(out := io.StringIO())
    check_text._print_known_faults(console, data, "vllm==0.33.0", detailed=False)
    printed = " ".join(out.getvalue().split())
    assert printed.startswith("8 known faults of vllm==0.33.0 are still there: fault-0, fault-1, ")
    assert printed.endswith("fault-5 and 2 more (-v)")
