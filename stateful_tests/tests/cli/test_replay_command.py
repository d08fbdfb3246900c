"""`kvspec replay`: what a trace does on one system, and in every release."""

import json
from dataclasses import replace
from pathlib import Path


from impl import engines
from impl.adapter import UnusableImplementation
from impl.sglang.releases.catalogue import TABLE
from impl.system_spec import SystemSpec
from reference.commands import Open, Reason, Refused
from reference.failures import Failure
from stateful_tests.check.known_faults import explanation
from stateful_tests.lockstep import replays
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.lockstep.run_results import Row, Run, Violation
from stateful_tests.tests.support.made_up_check import printed_lines, BAD, ROWS, TRACE
from stateful_tests.traces import trace_files as traces


RELEASES = [f"sglang==0.5.{patch}" for patch in (10, 11, 12, 13)]


def test_replay(fake_system, kvspec, monkeypatch):
    traces.save(
        replace(TRACE, bug="pr22900", clause="LEN-2", story="First this.\nThen that."), "t.json"
    )
    broke = Violation("BROKEN", 5, Failure("done", "KeyError: 1"))
    runs = iter([BAD, None, replace(BAD, clause="OWN-1"), broke])

    def run(system, trace):
        return Run(trace, system.name, ROWS, next(runs))

    monkeypatch.setattr(replays, "replay", run)
    code, out, err = kvspec("replay", "t.json", "t.json", "t.json", "t.json", "--json", "r.json")
    assert (code, err, fake_system.closed) == (3, "", 1)
    lines = printed_lines(out)
    assert lines[:3] == [
        "t.json on torch+pr22900",
        "bug pr22900, clause LEN-2",
        "First this. Then that.",
    ]
    assert [line for line in lines if " of 6 steps" in line or "conforms" in line] == [
        "violates LEN-2, FREE-2 after 6 of 6 steps",
        "t.json: conforms (the trace is there to show pr22900, and does not;"
        " 1 of 6 commands refused, and not stated so)",
        "violates OWN-1, FREE-2 after 6 of 6 steps (first; the trace names LEN-2)",
        "broke after 6 of 6 steps",
    ]
    assert "".join(lines).endswith("4 traces: 1 conform, 3 do not: t.json, t.json, t.json")
    data = json.loads(Path("r.json").read_text())
    assert [one["exit_code"] for one in data["replays"]] == [1, 0, 1, 3]
    assert data["exit_code"] == 3


def test_long_traces_show_their_end(fake_system, kvspec, monkeypatch):
    trace = replace(TRACE, commands=(Open("s1"),) * 1000)
    traces.save(trace, "t.json")
    rows = (Row(Open("s1"), Refused(Reason.SESSION_EXISTS)),) * 1000
    monkeypatch.setattr(
        replays, "replay", lambda system, trace: Run(trace, system.name, rows, None)
    )
    code, out, _ = kvspec("replay", "t.json")
    assert code == 0
    assert "steps 0 to 939 are left out here" in out
    assert "  999   open s1" in out
    assert len(out.splitlines()) < 80


def test_replay_says_what_a_trace_does_in_every_release(fake_system, kvspec, monkeypatch):
    """A line each; what cannot be driven says why, and does not decide the exit code."""
    traces.save(replace(TRACE, clause="LEN-2"), "t.json")
    monkeypatch.setattr(engines, "every_release", lambda _: [*map(SystemSpec.parse, RELEASES)])
    ends = iter([None, BAD, UnusableImplementation("sglang==0.5.12 has no tree of bigrams"), BAD])
    fault = next(iter(known_faults().values()))
    labels = iter([None, fault, None])

    def run(system, trace):
        if isinstance(end := next(ends), Exception):
            raise end
        return Run(trace, system.name, ROWS, end)

    monkeypatch.setattr(replays, "replay", run)
    monkeypatch.setattr(explanation, "known_fault", lambda system, run: next(labels))
    code, out, err = kvspec("replay", "t.json", "--impl", "sglang==all", "--json", "r.json")
    assert (code, fake_system.closed) == (1, 4)
    assert printed_lines(err)[-1] == "kvspec: 4 of 4 releases: sglang==0.5.13"
    said = " ".join(printed_lines(out)[:3])
    assert said.startswith(
        "t.json 1 of 6 commands refused, and not stated so. The first: command 2 ("
    )
    assert printed_lines(out)[printed_lines(out).index("release what the trace does there") + 2 :] == [
        "sglang==0.5.10 conforms (1 of 6 commands refused)",
        f"sglang==0.5.11 violates LEN-2, FREE-2 at command 5 (known: {fault.id})",
        "sglang==0.5.12 cannot be driven: has no tree of bigrams",
        "sglang==0.5.13 violates LEN-2, FREE-2 at command 5 (no known fault)",
        "conforms: 0.5.10; violates LEN-2, FREE-2: 0.5.11, 0.5.13; cannot be driven: 0.5.12",
        "",
    ]
    data = json.loads(Path("r.json").read_text())
    assert [row["exit_code"] for row in data["traces"][0]["releases"]] == [0, 1, 2, 1]


def test_releases_that_cannot_be_driven_are_no_green(fake_system, kvspec, monkeypatch):
    def refuse(system, trace):
        raise UnusableImplementation("has no tree")

    monkeypatch.setattr(replays, "replay", refuse)
    traces.save(TRACE, "t.json")
    code, out, _ = kvspec("replay", "t.json", "--impl", "sglang==all")
    assert (code, printed_lines(out)[-2]) == (2, f"cannot be driven: {next(iter(TABLE))} to {[*TABLE][-1]}")
    code, _, err = kvspec("replay", "t.json", "--impl", "sglang==all", "--html", "t.html")
    assert (code, err) == (2, "kvspec: --html: goes with one system, not with --impl sglang==all\n")
