"""One sentence explains each violation, and every "since" in it is held against the moments of the run."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from msgspec import structs

from ci import explain
from ci.compare import ledger
from ci.compare.snapshot import snapshots
from ci.explain import Explanation, explanation_of
from ci.report import data as report
from ci.report import render
from reference.clauses import CLAUSES
from reference.commands import Abort, Admit, Chunk, Extend, Mode, Retract, Submit
from reference.geometry import PRESETS
from stateful_tests.lockstep import lockstep
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.results import Run, Trace
from stateful_tests.lockstep.systems import resolve
from stateful_tests.traces import files as traces
from stateful_tests.traces.notation import format_command as describe

FOLDER = Path(__file__).parents[3] / "fixtures" / "regressions"
FIXTURES = {p.stem: p for p in sorted(FOLDER.glob("*.json"))}
BUGS = {name: trace for name, path in FIXTURES.items() if (trace := traces.load(path)).bug is not None}


@cache
def violated(name: str) -> Run:
    """A fixture on the implementation with its bug."""
    trace = BUGS[name]
    system = resolve(f"torch+{trace.bug}")
    try:
        return lockstep.replay(system, trace)
    finally:
        system.close()


def explained(name: str) -> Explanation:
    return explanation_of(violated(name))


@pytest.mark.parametrize("name", BUGS)
def test_what_is_said_of_the_past_is_so(name):
    run, explanation = violated(name), explained(name)
    for claim in explanation.claims:
        held = [claim.holds(moment) for moment in run.history]
        first = claim.since - run.first
        end = len(held) if claim.until is None else claim.until - run.first
        assert all(held[first:end]), claim.what
        assert first == 0 or not held[first - 1], claim.what
    dates = {claim.since for claim in explanation.claims}
    assert {int(index) for index in re.findall(r"since command (\d+)", explanation.text)} <= dates
    ends = {claim.until for claim in explanation.claims}
    assert {int(index) for index in re.findall(r"let go at command (\d+)", explanation.text)} <= ends
    for index, what in re.findall(r"command (\d+) \(((?:[^()]|\([^()]*\))*)\)", explanation.text):
        assert what == describe(run.trace.commands[int(index)])
    for index in re.findall(r"command (\d+)", explanation.text):
        assert f"command {index} (" in explanation.text, "told once in full"


@pytest.mark.parametrize("name", BUGS)
def test_a_clause_without_words_of_its_own_dates_its_places(name, monkeypatch):
    monkeypatch.setattr(explain, "_RULES", {})
    test_what_is_said_of_the_past_is_so(name)
    assert "the rules want:" in explained(name).text or violated(name).violation.clause == "BROKEN"


@pytest.mark.parametrize("name", BUGS)
def test_free_lists_say_the_same(name):
    """What can be read off the view by other means than the explanation's own."""
    run, text = violated(name), re.sub(r" \((?:[^()]|\([^()]*\))*\)", "", explained(name).text)
    page = r"(full|swa) page (\d+) is "
    for pool, number, since in re.findall(page + r"in the free list since command (\d+)", text.lower()):
        free = [int(number) in getattr(m.view, f"free_{pool}") for m in run.history]
        assert all(free[int(since) + 1 :])
        assert not free[int(since)]
    for pool, number, since in re.findall(page + r"neither free nor owned since command (\d+)", text.lower()):
        assert int(number) not in getattr(run.history[int(since) + 1].view, f"free_{pool}")


@pytest.mark.parametrize(
    "name, says",
    [
        (
            "finish_behind_the_window_sweep_caps_all_three_lengths",
            "command 6 (finish r1 keep 12) ends the turn at target 38 (26 tokens of input, 12 of"
            " output): E (swa_evicted_seqlen) of the slot of s1 becomes 42, which r1 had since command 5"
            " (evict_swa r1 at length 44), and must be 38.",
        ),
        (
            "retract_gives_back_what_was_allocated_ahead",
            "command 5 (retract r1) queues r1 again at target 12 (10 tokens of input, 2 of output):"
            " A (kv_allocated_len) of the slot of s1 becomes 19, which r1 had since command 4"
            " (spec_decode r1 +9 accept 1), and must be 12.",
        ),
        (
            "a_swept_key_recovers_nothing_below_its_frontier",
            "node [0, 1) of a1 counts as live since command 2 (insert h1 a3 SWA from 1), but has 0 SWA"
            " slots for its 1 token since command 1 (evict full 0 swa 1); it must have all of them or be"
            " a tombstone.",
        ),
        (
            "retract_then_retry_frees_the_reserved_token",
            "command 6 (admit r1) resumes at 10, the smaller of C 11 and a key of 10 (11 tokens of"
            " text less the last): A (kv_allocated_len) of r1 becomes 11 and must be 10; C"
            " (kv_committed_len) and A of the slot of s1 are 11 since command 5 (retract r1 losing 1)"
            " and must be 10.",
        ),
        (
            "an_unlock_remembers_where_its_lock_stopped",
            "node [0, 1) of a1 still counts 2 SWA locks; now it is needed only by h3 since command 2"
            " (match h3 a1), and h2 let go at command 3 (unlock h2), whose lock is older than the split"
            " of the node at command 2.",
        ),
        (
            "what_is_handed_out_is_not_free",
            "full page 1 is in the free list from the start, and r1 has it at [0, 4) since command 2"
            " (extend r1 +1).",
        ),
        (
            "a_saved_slot_keeps_its_own_pages",
            "full page 2 has 2 owners: r2 has it at [0, 4) since command 5 (extend r1 +1, r2 +1) and"
            " s1 has it at [0, 4) since command 6 (finish r1 keep 1).",
        ),
        (
            "a_trim_frees_both_pools",
            "command 5 (retract r1) must free the SWA pages of s1 at [10, 12) and frees nothing: SWA"
            " page 6 is neither free nor owned since command 5; until then s1 had it at [10, 12).",
        ),
        (
            "freed_pages_are_unmapped",
            "full slot 1 is mapped to SWA slot 1 since command 2 (extend r1 +1); full page 1 is in the"
            " free list since command 3 (retract r1); until then r1 had it at [0, 1).",
        ),
        (
            "a_turn_behind_its_window_starts_again",
            "r1 goes on at position 2, whose window starts at 0, but it has no SWA KV at position 0"
            " since command 5 (evict_swa r1 at length 13); by the rules it resumes at 0.",
        ),
        (
            "later_turns_stay_outside_of_the_tree",
            "after command 7 (extend r2 +3) R (cache_protected_len) of r2 becomes 4 and must stay 2.",
        ),
        (
            "the_least_recently_used_goes_first",
            "command 2 (evict full 1) keeps a1 (full KV last used by command 0 (insert h1 a1)), which"
            " must go, and takes b1 (full KV last used by command 1 (insert h1 b1)), which must stay.",
        ),
        (
            "a_second_turn_while_one_runs_is_refused",
            "the system carries out command 2 (submit r2 in s1 +1); by the rules it is refused:"
            " turn_in_flight, for r1 is in flight in s1 since command 1 (submit r1 in s1 +1).",
        ),
        (
            "each_pool_is_checked_by_itself",
            "command 0 (check_busy level 2) makes the system fail, NotImplementedError:"
            " protected_size() of a cache with two pools; by the rules it is done.",
        ),
    ],
)  # fmt: skip
def test_the_sentence(name, says):
    assert re.sub(r" at \w+\.py:\d+ in \w+", "", explained(name).text) == says


class OwnShape:
    """A system whose tree splits and evicts as it likes: what is freed is asked of session slots alone."""

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
def test_what_is_freed_where_the_tree_policy_is_free(bug, name, says):
    trace = traces.load(FIXTURES[name])
    with_tree = replace(trace, geometry=replace(trace.geometry, tree=True), bug=None, clause=None)
    run = lockstep.replay(OwnShape(resolve(f"torch+{bug}")), with_tree)
    assert run.violation.clause in ("FREE-1", "FREE-2")
    found = explanation_of(run)
    assert found.text == says


def test_a_tail_that_is_cut_short_is_one_cause():
    """Nodes end where the SWA KV of an insert begins: TREE-13 says nothing beside SWA-1."""
    trace = traces.load(FIXTURES["a_received_tail_has_the_next_window"])
    with_tree = replace(trace, geometry=replace(trace.geometry, tree=True))
    run = lockstep.replay(resolve("torch+tail-cuts-the-window"), with_tree)
    assert run.violation.clauses == ("SWA-1", "SWA-2", "READ-2")


class Forgetful(OwnShape):
    """Knows how long the history of a session is, and not what is in it."""

    def view(self):
        view = self._system.view()
        blank = {name: structs.replace(s, history=[0] * len(s.history)) for name, s in view.sessions.items()}
        return structs.replace(view, sessions=blank)


def test_a_history_of_other_tokens():
    trace = traces.load(FIXTURES["three_turns_of_one_conversation"])
    found = explanation_of(lockstep.replay(Forgetful(resolve("torch")), trace))
    assert found.text == (
        "position 0 of the history of s1 is a token that nobody sent since command 5 (finish r1 keep 3); the"
        " client saw token 0 of the text that Submit number 1 wrote."
    )


class ObeysAll(ReferenceSystem):
    """Carries out every abort, marked ones too."""

    def apply(self, command):
        return super().apply(replace(command, marked=False) if isinstance(command, Abort) else command)


def test_a_refusal_is_explained_by_the_condition_that_failed():
    """The request is queued, as a marked abort wants it; it was so before as well."""
    extend = Extend((Chunk("r1", 2),))
    commands = (Submit("r1", None, 2), Admit("r1"), extend, Retract("r1"), Abort("r1", marked=True))
    run = lockstep.replay(ObeysAll(), Trace(PRESETS["page1"], Mode.FAITHFUL, commands))
    found = explanation_of(run)
    assert found.text == (
        "the system carries out command 4 (abort r1 (marked)); by the rules it is refused: wrong_phase"
        " (marked, and it has been admitted before), for r1 is queued again since command 3 (retract r1)."
    )


def test_each_clause_has_words_of_its_own():
    plain = {BUGS[name].clause for name in BUGS if "the rules want:" in explained(name).text}
    assert plain == {"TREE-1"}, "expected and observed show a shape that is wrong"


def test_the_ledger_fits_and_marks_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in BUGS:
        data = report.replay_data(name, violated(name))
        rows = data["ledger"]["rows"]
        assert [row["step"] for row in rows[-2:]] == [len(data["rows"]) - 1] * 2
        assert any("!" in cell for cell in rows[-1]["cells"]), name
        assert not any("!" in cell for row in rows[:-1] for cell in row["cells"]), name
        render.run(render.console(), data)
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80
        cells = " ; ".join(cell for row in rows for cell in row["cells"])
        parts = set(re.findall(r"\[\d+, \d+\)|\b[CAER] !?\d+\*?|full \S+", cells))
        assert {part for part in parts if part not in out} == set(), "nothing wraps inside a cursor"
        assert " ".join(out.split()).count("because") == 1
        if data["violation"]["clause"] in CLAUSES:
            assert f"more      kvspec clauses {data['violation']['clause']};" in out


def columns(name: str) -> dict[str, list[str]]:
    found = report.run_data(violated(name))["ledger"]
    return {title: [row["cells"][at] for row in found["rows"]] for at, title in enumerate(found["columns"])}


def test_a_node_that_is_split_evicted_or_made_a_tombstone_has_a_column():
    split = columns("an_unlock_remembers_where_its_lock_stopped")
    assert split["node a1"] == [
        "-", "-", "[0, 1) live* locks 2/2*", "[0, 1) live locks 1/1*", "[0, 1) live locks !1/2*",
    ]  # fmt: skip
    assert split["node a2"][1:3] == ["[0, 2) live locks 1/1*", "[1, 2) live* locks 1/1"]
    evicted = columns("a_tombstone_goes_with_its_last_child")
    assert evicted["node a1"][1:] == ["[0, 1) tombstone* locks 0/0", "gone*", "![0, 1) tombstone locks !0/0"]
    assert evicted["node a2"][2:] == ["gone*", "gone*"]
    revived = columns("a_recovered_tombstone_gives_its_own_pages_back")
    assert revived["node a1"][1:3] == ["[0, 1) tombstone* locks 0/0", "[0, 1) live* locks 0/0"]


@pytest.mark.parametrize(
    "name, first",
    [
        ("a_locked_leaf_stays", "node a2"),
        ("a_saved_slot_keeps_its_own_pages", "full page 2"),
        ("what_waits_is_looked_up_when_it_is_freed", "SWA page 1"),
        ("each_slot_of_a_page_has_its_own_swa_slot", "SWA slots of r1 at [0, 2)"),
    ],
)
def test_what_the_violation_is_about_has_the_first_column(name, first):
    assert next(iter(columns(name))) == first


def test_a_queued_turn_is_the_turn_of_its_slot_on_both_sides():
    """No `!` where the sides agree."""
    assert columns("a_trim_frees_both_pools")["s1"][-2:] == ["r1 C 9 A 10* E 0"] * 2


def test_both_parts_of_a_split_count_as_changed():
    run = lockstep.replay(resolve("torch"), traces.load(FIXTURES["a_split_keeps_pages_whole"]))
    assert ledger.changed_nodes(snapshots(run, 9)) == ["a4", "a2"], "not the new leaf beside them"


def test_the_ledger_of_a_trace_has_columns_with_a_past():
    assert list(columns("a_trim_inside_a_page_keeps_the_page")) == ["full page 3", "free", "s1"]
    alone = "history_ends_where_the_client_stopped"
    assert list(columns(alone)) == ["history of session s1", "s1", "free"], "if there is one"


def test_a_conforming_run_has_nothing_to_argue():
    system = resolve("reference")
    run = lockstep.replay(system, BUGS["a_trim_frees_both_pools"])
    assert explanation_of(run) is None
    data = report.run_data(run)
    assert (data["argument"], data["differences"], data["ledger"]) == (None, [], None)


def test_of_a_long_run_the_end_is_kept(monkeypatch):
    monkeypatch.setattr(lockstep, "KEPT", 2)
    violated.cache_clear()
    try:
        run = violated("finish_behind_the_window_sweep_caps_all_three_lengths")
        assert run.first == 5
        text = explained("finish_behind_the_window_sweep_caps_all_three_lengths").text
        since = "since command 5 (evict_swa r1 at length 44) or before"
        assert f"becomes 42, which r1 had {since}, and must be 38" in text
    finally:
        violated.cache_clear()


def test_a_view_that_is_odd_leaves_expected_and_observed(monkeypatch):
    def odd(_):
        raise KeyError("a name that nobody knows")

    monkeypatch.setitem(explain._RULES, "SES-1", odd)
    assert explained("history_ends_where_the_client_stopped").text == (
        "after command 5 (finish r1 keep 1) the rules want: history of s1: 2 tokens; the system shows: 3"
        " tokens."
    )
