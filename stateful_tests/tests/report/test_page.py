"""The page of a trace: both sides as data, where they differ, HTML that is well-formed and asks nobody."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ci.compare import snapshot
from ci.compare.step_table import step_table
from ci.compare.snapshot import snapshots
from ci.report import report_data as report
from ci.report.pages import trace_page
from reference.clauses import CLAUSES
from reference.commands import Insert
from reference.state import Free
from stateful_tests.lockstep import replays
from stateful_tests.lockstep.run_results import Run, Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.traces import trace_files as traces
from stateful_tests.traces.trace_files import prompt_of

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = sorted((ROOT / "fixtures/regressions").glob("*.json"))
UNCLOSED = {"meta", "input", "br"}


def replay_on(system: str, trace: Trace) -> Run:
    resolved = resolve(system)
    try:
        return replays.replay(resolved, trace)
    finally:
        resolved.close()


def fixture(name: str) -> Trace:
    return traces.load(ROOT / f"fixtures/regressions/{name}.json")


def page_of(run: Run) -> str:
    data = report.replay_data("t.json", run) | {"replay": "kvspec replay t.json --impl torch"}
    return trace_page.page(data, run)


class Reader(HTMLParser):
    """Parses a page, and fails for a tag that is not closed in its place."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in UNCLOSED:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self.open[-1:] != ["style"]:
            self.text += data


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_differences_are_there_where_a_clause_is_violated_and_nowhere_else(path):
    trace = traces.load(path)
    conforming = snapshots(replay_on("torch", trace), 99)
    assert not any(s["differences"] for s in conforming)
    if trace.bug is not None:
        *before, last = snapshots(replay_on(f"torch+{trace.bug}", trace), 99)
        assert last["differences"]
        assert not any(s["differences"] for s in before)


def test_a_snapshot_has_both_sides_and_their_differences():
    run = replay_on(
        "torch+lanes-share-new-pages", fixture("lanes_of_a_batch_get_pages_of_their_own")
    )
    last = json.loads(json.dumps(snapshots(run, 1)[-1]))
    ours = last["reference"]
    theirs = last["system"]
    assert ours["holders"]["r2"]["full"] == {"0": None}
    assert theirs["holders"]["r2"] == {
        "who": "r2 running", "target": 2, "cursors": {"C": 1, "A": 1, "E": 0, "R": 0}, "row": 0,
        "full": {"0": 1}, "swa": {"0": 1}, "prefix": [], "wrong": {"full": [0], "swa": [0]},
    }  # fmt: skip
    assert theirs["pools"]["full"] == {
        "1": {"owners": [["r1", 0], ["r2", 0]], "free": 0},
        "2": {"owners": [], "free": 0},
    }
    assert ours["free"] == theirs["free"] == {"full": 18, "swa": 12, "rows": 2}
    assert last["differences"][0] == {
        "key": ["pools", "full", "1"],
        "about": "full page 1",
        "reference": "free or owned, once",
        "system": "2 owners",
    }


def test_free_pages_by_the_rules_are_unknown_when_pages_are_shared(monkeypatch):
    """As in a release where row and tree share pages, after the reference has taken the tree over."""
    run = replay_on("torch+pr22862-tail", fixture("retract_then_retry_frees_the_reserved_token"))
    monkeypatch.setattr(snapshot, "free", lambda _: Free(-2, 0, 3))
    states = snapshots(run, 2)
    assert states[-1]["reference"]["free"] == {"full": None, "swa": None, "rows": 3}
    assert [d["about"] for d in states[-1]["differences"] if d["key"][0] == "free"] == []
    assert "free: full pages ? · SWA pages ? · rows 3" in Reader(page_of(run)).text
    wide = step_table(run, states, columns=99)
    free = wide["columns"].index("free")
    free_cells = [row["cells"][free] for row in wide["rows"][-2:]]
    assert free_cells == ["full ?* SWA ?* rows 3", "full 29 SWA 17 rows 3"]


PAGES = [
    ("torch+pr22900", "finish_behind_the_window_sweep_caps_all_three_lengths"),
    ("torch+unlock-finds-the-window-again", "an_unlock_remembers_where_its_lock_stopped"),
    ("torch+pr22213-double-count", "a_lent_slot_counts_once"),
    ("torch+pr21499", "each_pool_is_checked_by_itself"),
    ("torch", "three_turns_of_one_conversation"),
    ("reference", "three_turns_of_one_conversation"),
]


@pytest.mark.parametrize("system, name", PAGES)
def test_the_same_run_gives_the_same_page(system, name):
    run = replay_on(system, fixture(name))
    assert page_of(run) == page_of(run)


@pytest.mark.parametrize("system, name", PAGES)
def test_the_page_refers_to_nothing_outside_of_itself(system, name):
    run = replay_on(system, fixture(name))
    text = page_of(run)
    read = Reader(text)
    assert len(set(read.ids)) == len(read.ids)
    assert [i for i in read.ids if i.startswith("step-")] == [
        f"step-{i}" for i in range(len(run.rows))
    ]
    for tag, attribute, value in read.attributes:
        assert tag != "link"
        assert attribute not in ("src", "action", "srcset", "style", "xlink:href"), (tag, attribute)
        assert not attribute.startswith("on"), "no script in attributes"
        if attribute == "href":
            assert value[:1] == "#" and value[1:] in read.ids, (tag, value)
        if attribute in ("aria-labelledby", "for"):
            assert value in read.ids, (tag, value)
    assert not re.search(r"url\(|@import|https?:|//[a-z]", text)


@pytest.mark.parametrize("system, name", PAGES)
def test_the_page_allows_its_own_script_alone(system, name):
    read = Reader(page_of(replay_on(system, fixture(name))))
    policy = next(
        v for t, a, v in read.attributes if (t, a) == ("meta", "content") and "default-src" in v
    )
    _, script = read.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


@pytest.mark.parametrize("system, name", PAGES)
def test_the_page_has_the_trace_and_its_verdict(system, name):
    run = replay_on(system, fixture(name))
    read = Reader(page_of(run))
    trace, _ = read.scripts
    assert traces.loads(trace.encode(), "page") == run.trace
    page_text = " ".join(read.text.split())
    assert report.run_data(run)["rows"][-1]["command"] in page_text
    assert ("In torch" in page_text) == (system != "reference")
    assert ("Conforms" in page_text) == (run.violation is None)


def test_differences_are_marked_on_both_sides():
    run = replay_on(
        "torch+pr22900", fixture("finish_behind_the_window_sweep_caps_all_three_lengths")
    )
    text = page_of(run)
    last = text[text.index('id="step-6"') : text.index('id="steps"')]
    earlier = text[text.index('id="step-0"') : text.index('id="step-6"')]
    assert "differs" not in earlier
    assert re.findall(r'<td class="number differs">(\d+)</td>', last) == ["38", "42"]
    assert "C A 38</text>" in last
    assert "E 42 ≠</text>" in last
    reason = report.run_data(run)["because"]
    assert reason[1:] in " ".join(Reader(text).text.split())


def test_the_page_quotes_the_clause_that_is_violated():
    """A page may lie anywhere: what SPEC.md says of the clause is in it, and what the others expected."""
    run = replay_on("torch+pr22862-align", fixture("a_trim_inside_a_page_keeps_the_page"))
    page_text = " ".join(Reader(page_of(run)).text.split())
    clause = CLAUSES["FREE-1"]
    data = report.run_data(run)
    for text in (clause.sentence, clause.why, clause.decision, clause.assumption, clause.source):
        assert page_text.count(text) == 1, text
    assert "pr22862-align freeing starts inside a page" in page_text
    assert "kvspec clauses FREE-1" in page_text
    for name, (expected, observed) in zip(data["violation"]["also"], data["violation"]["details"]):
        sentences = f"Rule{CLAUSES[name].sentence}Expected{expected}Observed{observed}"
        assert sentences.replace(" ", "") in page_text.replace(" ", ""), name
    assert page_text.count(data["because"][1:]) == 1


def test_both_sides_show_where_the_turn_resumes():
    name = "a_turn_behind_its_window_starts_again"
    text = page_of(replay_on("torch+resume-on-dead-window", fixture(name)))
    assert re.findall(r">(resumes at \d+)</text>", text)[-2:] == ["resumes at 0", "resumes at 2"]


@pytest.mark.parametrize("tree_policy_is_free", [False, True])
def test_the_page_says_whose_shape_the_reference_tree_has(monkeypatch, tree_policy_is_free):
    """A release's tree is taken over; then the story tells what the sentence cannot."""
    system = resolve("torch+pr26919")
    trace = fixture("a_fresh_leaf_pins_one_window")
    can = replace(system.capabilities, tree_policy_is_free=tree_policy_is_free)
    monkeypatch.setattr(type(system), "capabilities", can)
    run = replays.replay(system, trace)
    text = page_of(run)
    assert run.violation is not None
    rows_that_say_so = len(run.rows) if tree_policy_is_free else 0
    assert text.count("(the shape that the system's has)") == rows_that_say_so
    assert ('<details class="story" open>' in text) is tree_policy_is_free


def test_a_row_with_an_unknown_node_is_drawn():
    name = "a_row_names_the_slots_of_the_tree"
    text = page_of(replay_on(f"torch+{fixture(name).bug}", fixture(name)))
    marked = r"<g class=\"tree differs\"><rect[^>]*><title>(.*?)</title>"
    assert re.findall(marked, text) == [
        "full [2, 4): the radix tree&#39;s, page 3 (not the page that the tree has)"
    ]


def test_a_trace_of_a_stranger_stays_text():
    hostile = "</script><script>alert(1)</script> <!-- <b title='x\">& {{ 7 * 7 }} {% raw %} \u2028"
    trace = replace(fixture("finish_behind_the_window_sweep_caps_all_three_lengths"), story=hostile)
    text = page_of(replay_on("torch+pr22900", trace))
    read = Reader(text)
    assert len(read.scripts) == 2
    assert "<" not in read.scripts[0], "nothing there can begin or end an element"
    assert traces.loads(read.scripts[0].encode(), "page").story == hostile
    assert hostile in read.text
    assert "alert(1)</script>" not in text.replace("&lt;/script&gt;", "")
    assert "49" not in read.text[read.text.index("alert(1)") :][:60]


def test_a_large_system_makes_no_large_page():
    trace = fixture("a_trim_frees_both_pools")
    large = replace(trace, geometry=replace(trace.geometry, full_pages=1 << 14, swa_pages=1 << 14))
    text = page_of(replay_on("reference", large))
    assert len(text) < 200_000
    run = replay_on("torch", large)
    assert len(page_of(run)) < 300_000
    assert "are left out here" in page_of(run)


def test_a_deep_tree_is_drawn():
    trace = fixture("an_unlock_remembers_where_its_lock_stopped")
    geometry = replace(trace.geometry, full_pages=200, swa_pages=200, width=200)
    deep = tuple(Insert("h1", prompt_of(f"a{n}")) for n in range(1, 61))
    deep_trace = replace(trace, geometry=geometry, commands=deep, bug=None, clause=None)
    read = Reader(page_of(replay_on("reference", deep_trace)))
    assert "reference: + [59, 60)" in read.text
    assert read.text.count("[59, 60)") == 2, "in the tree as well"


def test_the_page_of_a_trace_without_commands_says_so():
    trace = fixture("an_unlock_remembers_where_its_lock_stopped")
    read = Reader(page_of(replay_on("torch", replace(trace, commands=()))))
    assert "The trace has no commands." in read.text


def test_the_page_of_a_long_trace_shows_its_end(monkeypatch):
    monkeypatch.setattr(trace_page, "MAX_STEPS", 3)
    run = replay_on("torch", fixture("three_turns_of_one_conversation"))
    read = Reader(page_of(run))
    assert [i for i in read.ids if i.startswith("step-")] == ["step-14", "step-15", "step-16"]
    assert "Commands 0 to 13 are left out here" in read.text


def test_replay_writes_the_page(kvspec):
    trace = fixture("overshoot_is_taken_back_when_the_turn_ends")
    traces.save(trace, Path("a trace.json"))
    arguments = ("replay", "a trace.json", "--impl", "torch+pr22897", "--json", "r.json")
    code, out, err = kvspec(*arguments, "--html", "p.html")
    assert (code, err) == (1, "")
    text = Path("p.html").read_text()
    assert "kvspec replay &#39;a trace.json&#39; --impl torch+pr22897" in text
    [data] = json.loads(Path("r.json").read_text())["replays"]
    assert [s["step"] for s in data["states"]] == list(range(len(data["rows"])))
    assert data["because"] in " ".join(out.split())
    kvspec(*arguments)
    assert "states" not in json.loads(Path("r.json").read_text())["replays"][0]


def test_check_writes_a_page_beside_each_trace(kvspec):
    options = ("--examples", "1", "--preset", "page2", "--mode", "free", "--machine", "sessions", "--html")
    code, out, _ = kvspec("check", "--impl", "torch+padding-page-handed-out", *options)
    assert code == 1
    saved = sorted(Path("traces").iterdir())
    assert {p.suffix for p in saved} == {".html", ".json"}
    pages = [p for p in saved if p.suffix == ".html"]
    assert {p.with_suffix(".json") for p in pages} <= {*saved}
    for path in pages:
        assert f"page    {path}" in out, path
        assert f"kvspec replay {path.with_suffix('.json')}" in Reader(path.read_text()).text, path
