"""One sentence explains each violation, and every "since" in it is held against the moments of the run."""

import re
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from ci.explain import refusal_reasons
from ci.compare import step_table
from ci.compare.snapshot import snapshots
from ci.explain import Because, because
from ci.explain.places import Fact
from ci.explain.place_history import story
from ci.report import report_data as report
from ci.report import text_output, run_text
from reference.clauses import CLAUSES
from reference.commands import Abort, Admit, Chunk, Done, Extend, Mode, Retract, Submit
from reference.failures import AtSlot
from reference.geometry import PRESETS
from stateful_tests.lockstep import replays
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.run_results import Run, Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.commands import script
from stateful_tests.traces import trace_files as traces
from stateful_tests.traces.notation import format_command as describe

FOLDER = Path(__file__).parents[3] / "fixtures" / "regressions"
FIXTURES = {p.stem: p for p in sorted(FOLDER.glob("*.json"))}
SENTENCES = Path(__file__).with_name("because.txt")
BUGS = {
    name: trace for name, path in FIXTURES.items() if (trace := traces.load(path)).bug is not None
}


@cache
def violating_run(name: str) -> Run:
    """Return the run of a fixture on the implementation with its bug."""
    trace = BUGS[name]
    system = resolve(f"torch+{trace.bug}")
    try:
        return replays.replay(system, trace)
    finally:
        system.close()


def explain_trace(name: str) -> Because:
    return because(violating_run(name))


@pytest.mark.parametrize("name", BUGS)
def test_statements_about_the_past_are_true(name):
    run = violating_run(name)
    explained_run = explain_trace(name)
    for claim in explained_run.claims:
        held = [claim.holds(moment) for moment in run.history]
        first = claim.since - run.history_start
        end = len(held) if claim.until is None else claim.until - run.history_start
        assert all(held[first:end]), claim.what
        assert first == 0 or not held[first - 1], claim.what
    dates = {claim.since for claim in explained_run.claims}
    assert {int(index) for index in re.findall(r"since command (\d+)", explained_run.text)} <= dates
    ends = {claim.until for claim in explained_run.claims}
    assert {int(index) for index in re.findall(r"let go at command (\d+)", explained_run.text)} <= ends
    for index, quoted in re.findall(r"command (\d+) \(((?:[^()]|\([^()]*\))*)\)", explained_run.text):
        assert quoted == describe(run.trace.commands[int(index)])
    for index in re.findall(r"command (\d+)", explained_run.text):
        assert f"command {index} (" in explained_run.text, "told once in full"


@pytest.mark.parametrize("name", BUGS)
def test_free_lists_say_the_same(name):
    """What can be read off the view by other means than the told's own."""
    run = violating_run(name)
    text = re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", explain_trace(name).text)
    page = r"(full|swa) page (\d+) is "
    for pool, number, since in re.findall(
        page + r"in the free list since command (\d+)", text.lower()
    ):
        free = [int(number) in getattr(m.view, f"free_{pool}") for m in run.history]
        assert all(free[int(since) + 1 :]), pool
        assert not free[int(since)], pool
    for pool, number, since in re.findall(
        page + r"neither free nor owned since command (\d+)", text.lower()
    ):
        assert int(number) not in getattr(run.history[int(since) + 1].view, f"free_{pool}"), pool


def test_the_sentences_and_the_end_of_the_step_tables(request):
    """Of every fixture, as text: read them. `*` is what the command changed, `!` what differs."""
    texts = []
    for name, trace in BUGS.items():
        text = re.sub(r" at \w+\.py:\d+ in \w+", "", explain_trace(name).text)
        lines = textwrap.wrap(
            text, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        table = report.run_data(violating_run(name))["step_table"]
        rows = [table["columns"], *(row["cells"] for row in table["rows"][-3:])]
        lines += [f"    {' | '.join(row)}".rstrip() for row in rows]
        texts.append("\n".join([f"{name} [{trace.clause}]", *lines, ""]))
    if request.config.getoption("accept"):
        SENTENCES.write_text("\n".join(texts), encoding="utf-8")
    expected = SENTENCES.read_text(encoding="utf-8")
    assert "\n".join(texts) == expected, (
        f"accept what is true: pytest {Path(__file__).parent} --accept"
    )


class OwnShape:
    """A system whose tree splits and evicts as it likes: what is freed is checked for session slots alone."""

    def __init__(self, system):
        self._system = system
        self.capabilities = replace(system.capabilities, tree_policy_is_free=True)

    def __getattr__(self, name):
        return getattr(self._system, name)


@pytest.mark.parametrize(
    "bug, name, says",
    [
        (
            "free-repeats-a-page",
            "three_turns_of_one_conversation",
            "command 16 (close s1) must free the full pages of s1 at [8, 24) and frees [8, 12): full page"
            " 4 is neither free nor owned since command 16; until then s1 had it at [12, 16).",
        ),
        (
            "trim-forgets-swa",
            "retract_then_retry_frees_the_reserved_token",
            "command 6 (admit r1) must free the SWA pages of s1 at [10, 11) and frees nothing: SWA page"
            " 11 is neither free nor owned since command 6; until then s1 had it at [10, 11).",
        ),
    ],
)
def test_frees_are_explained_under_a_free_tree_policy(bug, name, says):
    trace = traces.load(FIXTURES[name])
    with_tree = replace(trace, geometry=replace(trace.geometry, tree=True), bug=None, clause=None)
    run = replays.replay(OwnShape(resolve(f"torch+{bug}")), with_tree)
    assert run.violation.clause in ("FREE-1", "FREE-2")
    explanation = because(run)
    assert explanation.text == says


def test_a_tail_that_is_cut_short_is_one_cause():
    """Nodes end where the SWA KV of an insert begins: TREE-13 says nothing beside SWA-1."""
    trace = traces.load(FIXTURES["a_received_tail_has_the_next_window"])
    with_tree = replace(trace, geometry=replace(trace.geometry, tree=True))
    run = replays.replay(resolve("torch+tail-cuts-the-window"), with_tree)
    assert run.violation.clauses == ("SWA-1", "SWA-2", "READ-2")


class Forgetful(OwnShape):
    """Knows how long the history of a session is, and not what is in it."""

    def view(self):
        view = self._system.view()
        blank = {
            name: structs.replace(s, history=[0] * len(s.history))
            for name, s in view.sessions.items()
        }
        return structs.replace(view, sessions=blank)


def test_the_first_other_token_of_a_history_is_named():
    trace = traces.load(FIXTURES["three_turns_of_one_conversation"])
    explanation = because(replays.replay(Forgetful(resolve("torch")), trace))
    assert explanation.text == (
        "command 5 (finish r1 keep 3) must leave the history of s1 with 13 tokens: the history of s1 has 13"
        " tokens, a token that nobody sent at position 0, since command 5 and must have token 0 of the"
        " text of submit 1 at position 0."
    )


class ObeysAll(ReferenceSystem):
    """Carries out every abort, marked ones too."""

    def apply(self, command):
        return super().apply(
            replace(command, marked=False) if isinstance(command, Abort) else command
        )


@pytest.mark.parametrize(
    ("script_of", "says"),
    [
        ("submit r1 (no session) +3; decode r1",
         "r1 is queued since command 0 (submit r1 (no session) +3): admit r1 comes first"),
        ("submit r1 (no session) +3; admit r1; extend r1 +2; finish r1 keep 1",
         "r1 is extending since command 2 (extend r1 +2): extend r1 +1 comes first"),
        ("submit r1 (no session) +3; admit r1; extend r1 +3; admit r1",
         "it extends or runs already; r1 is running since command 2 (extend r1 +3)"),
        ("submit r1 in s1 +3; admit r1", "command 0 (submit r1 in s1 +3) was refused"),
        ("submit r1 (no session) +3; abort r1; admit r1", "r1 has ended with command 1 (abort r1)"),
        ("submit r1 (no session) +3; admit r1; extend r1 +3; decode r1, r9", "no command submits r9"),
        ("submit r1 (no session) +3; admit r1; extend r1 +5",
         "C + tokens > origin + output: more than there is to compute; r1 has 3 tokens of input and 0 of"
         " output; 3 of them without KV"),
        ("open s1; submit r1 in s1 +3; submit r2 in s1 +1",
         "r1 is in flight in s1 since command 1 (submit r1 in s1 +3)"),
        ("submit r1 (no session) +3; admit r1; extend r1 +3; decode r1; decode r1; decode r1;"
         " finish r1 keep 1",
         "a stop within the last two rounds keeps more than 2 outputs, and the finish keeps 1"),
        ("submit r1 (no session) +12; admit r1; extend r1 +12; decode r1; decode r1;"
         " evict_swa r1 at length 14; finish r1 keep 1",
         "window eviction has counted 14 tokens, and the finish keeps 13"),
        ("unlock h1", "no lock owner is called that"),
        ("open s1; open s1", "a session, request or lock owner is called that"),
    ],
)  # fmt: skip
def test_a_refused_command_names_the_reason(script_of, says):
    run = replays.replay(
        ReferenceSystem(), Trace(PRESETS["page1"], Mode.FAITHFUL, script(script_of))
    )
    assert refusal_reasons.refusal(run, len(run.rows) - 1) == says


def test_an_outcome_that_contradicts_the_rules_has_the_reason_of_the_rules():
    commands = script("submit r1 (no session) +3; admit r1; extend r1 +3; finish r1 keep 2")
    trace = Trace(PRESETS["page1"], Mode.FAITHFUL, commands, expected=((3, Done()),))
    assert because(replays.replay(ReferenceSystem(), trace)).text == (
        "command 3 (finish r1 keep 2): the trace states done, the rules say refused: bad_length: not 1 <="
        " finished_len <= output; r1 has 3 tokens of input and 1 of output; 1 of them without KV."
    )


def test_a_refusal_is_explained_by_the_condition_that_failed():
    """The request is queued, as a marked abort wants it; it was so before as well."""
    extend = Extend((Chunk("r1", 2),))
    commands = (Submit("r1", None, 2), Admit("r1"), extend, Retract("r1"), Abort("r1", marked=True))
    run = replays.replay(ObeysAll(), Trace(PRESETS["page1"], Mode.FAITHFUL, commands))
    explanation = because(run)
    assert explanation.text == (
        "the system carries out command 4 (abort r1 (marked)) and must refuse it as wrong_phase"
        " (marked, and it has been admitted before), for r1 is queued again since command 3 (retract r1)."
    )


# Their sentences say what is counted, reported or allowed beside what is, or why it is no page.
SAID_BESIDE = "CHK-1", "CHK-2", "OUT-3", "TREE-1", "TREE-7", "TREE-10", "TREE-15", "MAP-1", "OWN-5"


def test_each_clause_names_its_subject_and_the_expected_value():
    assert [name for name in BUGS if "; observed: " in explain_trace(name).text] == []
    due = re.compile(r" must | expected: ")
    without = {
        violating_run(name).violation.clause for name in BUGS if not due.search(explain_trace(name).text)
    }
    assert without <= {*SAID_BESIDE}


class AddsToTheInput(ReferenceSystem):
    """The input of a request begins with two tokens that its client did not send."""

    def view(self):
        view = super().view()
        requests = view.requests.items()
        more = {
            n: structs.replace(r, origin=r.origin + 2, text=[*r.text, 1, 1]) for n, r in requests
        }
        return structs.replace(view, requests=more)


def test_a_longer_input_is_explained_by_its_length():
    trace = Trace(PRESETS["page1"], Mode.FAITHFUL, script("open s1; submit r1 in s1 +3"))
    text = because(replays.replay(AddsToTheInput(), trace)).text
    assert text.startswith(
        "command 1 (submit r1 in s1 +3) must leave r1 in s1 with 3 tokens of input, and leaves it in s1 with"
        " 5 tokens of input: the text of r1 has 5 tokens"
    )


def test_the_step_table_fits_and_marks_wrong_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in BUGS:
        data = report.replay_data(name, violating_run(name))
        rows = data["step_table"]["rows"]
        assert [row["step"] for row in rows[-2:]] == [len(data["rows"]) - 1] * 2, name
        assert any("!" in cell for cell in rows[-1]["cells"]), name
        assert not any("!" in cell for row in rows[:-1] for cell in row["cells"]), name
        run_text.run(text_output.console(), data)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80, name
        cells = " ; ".join(cell for row in rows for cell in row["cells"])
        parts = set(re.findall(r"\[\d+, \d+\)|\b[CAER] !?\d+\*?|full \S+", cells))
        assert {part for part in parts if part not in out} == set(), "nothing wraps inside a cursor"
        assert " ".join(out.split()).count("because") == 1, name
        if data["violation"]["clause"] in CLAUSES:
            assert f"more      kvspec clauses {data['violation']['clause']};" in out, name


def test_both_parts_of_a_split_count_as_changed():
    run = replays.replay(resolve("torch"), traces.load(FIXTURES["a_split_keeps_pages_whole"]))
    assert step_table.changed_nodes(snapshots(run, 9)) == ["a4", "a2"], (
        "not the new leaf beside them"
    )


def test_a_conforming_run_has_nothing_to_argue():
    system = resolve("reference")
    run = replays.replay(system, BUGS["a_trim_frees_both_pools"])
    assert because(run) is None
    data = report.run_data(run)
    assert (data["because"], data["differences"], data["step_table"]) == (None, [], None)


def test_the_history_of_a_long_run_keeps_its_end(monkeypatch):
    monkeypatch.setattr(replays, "HISTORY_LIMIT", 2)
    violating_run.cache_clear()
    try:
        run = violating_run("finish_behind_the_window_sweep_caps_all_three_lengths")
        assert run.history_start == 5
        text = explain_trace("finish_behind_the_window_sweep_caps_all_three_lengths").text
        since = "since command 5 (evict_swa r1 at length 44) or before"
        assert f"becomes 42, which r1 had {since}, and must be 38" in text
    finally:
        violating_run.cache_clear()


def test_a_view_that_is_odd_leaves_expected_and_observed(monkeypatch):
    def odd(_):
        raise KeyError("a name that nobody knows")

    monkeypatch.setitem(refusal_reasons._REASONS, "SES-1", odd)
    assert explain_trace("history_ends_where_the_client_stopped").text == (
        "after command 5 (finish r1 keep 1) expected: history of s1: 2 tokens; observed: 3 tokens."
    )


@pytest.mark.parametrize(
    ("second", "says"),
    [(Fact("load 2", "writes it"), "is not free"), (Fact("node 2", "has it"), "has 2 owners")],
)
def test_a_writer_of_a_slot_is_no_owner(second, says):
    facts = [Fact("node 1", "has it"), second]
    past: Any = SimpleNamespace(now=None, first_since=lambda *_: "since command 2")
    text = story(past, AtSlot("full", 1, host=False), lambda *_: "slot 1", lambda *_: facts)
    both = f"node 1 has it since command 2 and {second.owner} {second.now} since command 2"
    assert text == f"slot 1 {says}: {both}"
