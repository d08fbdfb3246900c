"""Whatever an adapter does, `kvspec check` ends with a finding, and its trace is on disk."""

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ci.report.check_data import check_data
from ci.report import text_output, check_text
from ci.report.pages.trace_page import page
from impl.adapter import UnusableImplementation
from impl.process.system_functions import SystemFunction
from reference.commands import Mode
from stateful_tests.check import campaign, caught_violations, finder, check_plans
from stateful_tests.check.trees.changed_functions import Changes
from stateful_tests.check.caught_violations import FLAKY, NOT_REPLAYED
from stateful_tests.lockstep.replays import replay
from stateful_tests.shrink import minimise
from stateful_tests.tests.adapters import bad_adapters
from stateful_tests.tests.support.night import at_night
from stateful_tests.traces import trace_files

QUICK = ("--examples", "1", "--steps", "9", "--mode", "faithful", "--memory", "200")


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ("Raises", "IndexError: page 99 at bad_adapters.py:"),
        ("Exits", "SystemExit: 0 at bad_adapters.py:"),
        ("LeavesAtOnce", "exit status 0: the process ended"),
        ("Aborts", "SIGABRT: the process crashed at bad_adapters.py:"),
        ("Segfaults", "SIGSEGV: the process crashed at bad_adapters.py:"),
        ("Hangs", "hang: nothing in answer to Submit in 0.4 s at bad_adapters.py:"),
        pytest.param(
            "Eats",
            "memory: more than 200 MB in answer to Submit at bad_adapters.py:",
            marks=at_night,
        ),
        ("WrongType", "TypeError: apply(): gave 'done', not Done, Refused or Broken"),
        ("Garbage", "TypeError: view().free_full[0]: expected int, got None"),
        ("RaisesInView", "KeyError: 'r1' at bad_adapters.py:"),
        ("RaisesInReset", "ValueError: no such sizes at bad_adapters.py:"),
    ],
)
def test_a_bad_adapter_breaks_with_a_reason(adapter, says, kvspec, monkeypatch):
    one_run = ()
    # sizes shrink, and runs follow, in the same way: with a process for each
    if adapter != "Raises":
        monkeypatch.setattr(minimise, "_shrink_size", lambda failing, trace, name: trace)
        one_run = "--preset", "page1", "--machine", "sessions"
    limit = ("--timeout", "0.4") if adapter == "Hangs" else ()
    code, out, _ = kvspec(
        "check", "--impl", f"{bad_adapters.__name__}:{adapter}", *QUICK, *limit, *one_run
    )
    text = " ".join(out.split())
    assert code == 3 and "the system broke" in text
    assert says in text, out
    [trace] = Path("traces").iterdir()
    assert len(trace_files.load(trace).commands) == 1
    again = f"kvspec replay {trace} --impl {bad_adapters.__name__}:{adapter}"
    assert " ".join([again, *limit, "--memory 200"]) in text


# What the report says of adapters that fail before the first command, and of those that fail in a later view.
FAIL_AT_START = {
    "RaisesInReset": "no command has a part in it: reset raises ValueError: no such sizes at",
    "EngineRaisesInReset": "no command has a part in it: reset raises ValueError: no such sizes at",
    "EngineRaisesInView": "no command has a part in it: the first view() raises KeyError: 'r1' at",
    "EngineShowsADictionary": "in it: TypeError: the first view(): expected array, got object",
    "EngineShowsNoRefs": "in it: TypeError: the first view().refs: expected array, got None",
}
FAIL_LATER = {
    "ViewRaisesAfterASubmit": "): view() raises AssertionError: no view of requests at bad_adapters.py",
    "EngineShowsOneTable": "): TypeError: view().requests['r1']: 1 in tables, for 2 groups",
}


@pytest.mark.parametrize("where", [(), ("--in-process",)], ids=["in a worker", "in process"])
@pytest.mark.parametrize("adapter", [*FAIL_AT_START, *FAIL_LATER])
def test_a_failure_outside_of_commands_blames_no_command(adapter, where, kvspec, monkeypatch):
    monkeypatch.setattr(minimise, "_shrink_size", lambda failing, trace, name: trace)
    smoke = replace(check_plans.plan("smoke"), after_finding=60)
    monkeypatch.setattr(check_plans, "_TIERS", {"smoke": smoke})
    options = ("-j", "1", "--json", "report.json", *where)
    code, out, _ = kvspec("check", "--impl", f"{bad_adapters.__name__}:{adapter}", *options)
    data = json.loads(Path("report.json").read_text())
    assert code == 3 and (FAIL_AT_START | FAIL_LATER)[adapter] in " ".join(out.split()), out
    assert "calls" not in out and not data["findings"][0]["called"]
    assert data["commands"] < (40 if adapter in FAIL_AT_START else 400)


@at_night
def test_a_check_ends_with_the_second_hang_at_one_place(kvspec, monkeypatch):
    monkeypatch.setattr(finder, "minimise", lambda system, trace, clause, **_: trace)
    options = ("--timeout", "0.4", "-j", "1", "--json", "report.json")
    assert kvspec("check", "--impl", f"{bad_adapters.__name__}:Hangs", *options)[0] == 3
    data = json.loads(Path("report.json").read_text())
    [found] = data["findings"]
    assert (found["clauses"][0]["times"], data["stopped_early"]) == (2, True)


@pytest.mark.parametrize(
    "adapter, says", [("Forgets", "violates"), ("ComesAndGoes", "not in every replay")]
)
def test_intermittent_violations_are_found(adapter, says, kvspec):
    spec = f"{bad_adapters.__name__}:{adapter}"
    options = ("--examples", "13", *QUICK[2:], "-v", "--json", "report.json")
    code, out, _ = kvspec("check", "--impl", spec, *options)
    verdict = " ".join(out.split())
    flaky = adapter == "ComesAndGoes"
    assert (
        code == 1 and says in verdict and ("flaky: OUT-1, not in every replay" in verdict) is flaky
    ), out
    assert {each["flaky"] for each in json.loads(Path("report.json").read_text())["findings"]} == {
        flaky
    }
    assert list(Path("traces").iterdir())


@pytest.mark.parametrize("where", [(), ("--in-process",)], ids=["in a worker", "in process"])
def test_an_unsupported_command_is_no_finding(where, kvspec):
    code, _, err = kvspec(
        "check", "--impl", f"{bad_adapters.__name__}:CannotBeAsked", *QUICK, *where
    )
    assert code == 2 and "this checkout has no such thing" in err
    assert not Path("traces").exists()


@pytest.mark.parametrize("where", [(), ("--in-process",)], ids=["in a worker", "in process"])
def test_wrong_pages_after_a_failure_are_the_headline(where, kvspec):
    spec = f"{bad_adapters.__name__}:RaisesAtADoubleFree"
    code, out, _ = kvspec("check", "--impl", spec, "--examples", "4", "-j", "1", *where)
    assert code == 3
    clauses = {file.name: trace_files.load(file).clause for file in Path("traces").iterdir()}
    assert "violation: OWN-1, BROKEN" in out
    assert {*clauses.values()} <= {"BROKEN", "OWN-1"}
    for file in clauses:
        code, out, _ = kvspec("replay", f"traces/{file}", "--impl", spec, *where)
        text = " ".join(out.split())
        assert code == 3 and "OWN-1. No page is owned twice" in text, out
        assert re.search("makes the system fail, .*, and leaves this: full page 1 is in", text), out
        assert "full page 1 is in the free list" in text and "RuntimeError: double free" in text, (
            out
        )


def test_an_adapter_that_offers_no_command_is_unusable(kvspec):
    code, _, err = kvspec("check", "--impl", f"{bad_adapters.__name__}:OffersTooLittle")
    assert code == 2 and "capabilities.commands: Submt; one or more of Open, Submit" in err


@pytest.mark.parametrize("where", [(), ("--in-process",)], ids=["in a worker", "in process"])
def test_a_crash_of_a_partial_adapter_shrinks_to_what_it_offers(where, kvspec):
    options = ("--examples", "2", "--seed", "1", "-j", "1", *where)
    code, out, _ = kvspec("check", "--impl", f"{bad_adapters.__name__}:OffByOne", *options)
    assert code == 3 and "IndexError: pop from empty list" in " ".join(out.split())
    [file] = Path("traces").iterdir()
    trace = trace_files.load(file)
    assert {type(c).__name__ for c in trace.commands} <= bad_adapters.OffByOne.capabilities.commands
    assert len(trace.commands) <= 4
    seen = replay(bad_adapters.OffByOne(), trace).violation
    assert seen is not None and seen.observed.startswith("IndexError: pop from empty list")


def test_processes_of_an_adapter_end_with_it(kvspec):
    adapter = f"{bad_adapters.__name__}:LeavesAChild"
    assert kvspec("check", "--impl", adapter, *QUICK[:2], "-j", "1")[0] in (0, 4)
    child = Path("/proc", Path("child").read_text())
    for _ in range(100):
        if not child.exists() or "Z (zombie)" in (child / "status").read_text():
            return
        time.sleep(0.01)
    pytest.fail("it is still running")


@pytest.mark.parametrize("adapter", ["CannotBeResetAgain", "CannotBeClosed"])
@pytest.mark.parametrize("where", [(), ("--in-process",)], ids=["in a worker", "in process"])
def test_findings_are_reported_whatever_comes_after(adapter, where, kvspec):
    options = ("--examples", "20", "--seed", "1", "-j", "1", *where)
    code, out, _ = kvspec("check", "--impl", f"{bad_adapters.__name__}:{adapter}", *options)
    assert code == 1 and "violates OWN-2" in " ".join(out.split())
    assert [path.name for path in Path("traces").iterdir()] == ["own-2-example.json"]


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ("WaivesNothingKnown", "waives NOPE-1, which is no clause"),
        ("KnowsNothingKnown", "waives NOPE-2, which is no clause"),
        ("SaysADictionary", "capabilities: expected Capabilities, got dict"),
        ("EvictsWithoutAWindow", "capabilities.commands: EvictSwa goes with swa=True"),
        ("MatchesWithoutATree", "capabilities.commands: Match: goes with tree=True"),
        ("IsNoModel", "capabilities.swa, full_only: one of them is True"),
        ("EndsNoSession", "capabilities.commands: More and End go together"),
        (
            "SchedulesAndAdmits",
            "capabilities.commands: Schedule (it picks its batches) goes without Admit",
        ),
    ],
)
def test_capabilities_that_mean_nothing_are_refused(adapter, says, kvspec):
    code, _, err = kvspec("check", "--impl", f"{bad_adapters.__name__}:{adapter}", *QUICK)
    assert code == 2 and says in err


def test_the_verdict_names_waived_clauses(kvspec):
    adapter = f"{bad_adapters.__name__}:WaivesReads"
    _, out, _ = kvspec("check", "--impl", adapter, "--examples", "2", "-j", "1")
    assert "not checked  READ-1 (harmless)" in out


@pytest.mark.parametrize("adapter", ["RefusesNowAndThen", "LosesAPageNowAndThen"])
def test_random_violations_are_flaky(adapter):
    """Whatever replays show: a report is made, and nothing is explained that this replay does not show."""
    system = getattr(bad_adapters, adapter)()
    plan = check_plans.plan("smoke", examples=3, steps=20)
    result = campaign.run(system, plan)
    data = check_data(result, plan, capabilities=system.capabilities)
    assert data["exit_code"] == 1 and f"{system.name}: flaky: " in data["verdict"]
    check_text.check(text_output.console(io.StringIO()), data)
    for found in data["findings"]:
        assert found["flaky"] and FLAKY in found["violation"]["observed"]
        if found["because"] is not None:
            assert found["because"]
            assert found["rows"][-1]["step"] == found["violation"]["step"]


@pytest.mark.parametrize("cut", ["conforms", "ends early", "cannot be driven"])
def test_a_report_names_commands_to_which_no_replay_came(cut, monkeypatch):
    """A fork's change runs in the last command of a finding, and the replay that is shown ends before it."""

    def replayed(system, trace):
        run = replay(system, trace)
        half = len(trace.commands) // 2
        if cut == "cannot be driven":
            raise UnusableImplementation("its worker does not start any more")
        rows = run.rows[:half] if cut == "ends early" else run.rows
        return replace(run, violation=None, rows=rows, history=run.history[: len(rows) + 1])

    def with_calls(_, run):
        return replace(run, called=((SystemFunction("a.py", "f"),),) * (run.violation.step + 1))

    system = bad_adapters.AdmitsNobody()
    plan = check_plans.plan(
        "smoke",
        examples=1,
        steps=8,
        modes=[Mode.FAITHFUL],
        machines=["sessions"],
        presets=["page1"],
    )
    with monkeypatch.context() as patch:
        patch.setattr(finder.Finder, "_smallest", lambda _, trace, *__: trace)
        patch.setattr(finder.Finder, "_prefer_faithful", lambda *_: None)
        patch.setattr(finder, "replay", replayed)
        patch.setattr(caught_violations, "replay", replayed)
        patch.setattr(caught_violations, "with_calls", with_calls)
        result = campaign.run(system, plan)
    changed = Changes("HEAD", frozenset(), {SystemFunction("a.py", "f"): 1}, ())
    data = check_data(result, plan, capabilities=system.capabilities, changed=changed)
    for detailed in (False, True):
        check_text.check(text_output.console(io.StringIO()), data, detailed=detailed)
    for finding, found in zip(result.findings, data["findings"], strict=True):
        last = found["violation"]["step"]
        assert found["rows"][-1]["step"] == last and found["rows"][-1]["violates"]
        assert f"at command {last}, {found['rows'][last]['command']}" in page(found, finding.run)
        unseen = [row for row in found["rows"] if NOT_REPLAYED in row["outcome"]]
        assert bool(unseen) is (cut != "conforms")


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (
            "ShowsATreeThatIsNotThere",
            "view().tree: a tree, and there is none in this run (geometry.tree)",
        ),
        ("ShowsNoTree", "view().tree: None, and there is a tree in this run (geometry.tree)"),
        ("MapsTooLittle", "view().full_to_swa: 3 entries, for "),
    ],
)
def test_a_view_of_other_sizes_is_a_finding(adapter, says):
    plan = check_plans.plan("smoke", examples=1, steps=3, modes=[Mode.FAITHFUL])
    result = campaign.run(getattr(bad_adapters, adapter)(), plan)
    assert result.exit_code == 3 and says in result.findings[0].run.violation.observed
