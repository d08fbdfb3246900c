"""SPEC.md is what the code says. That its tables are so: tests/reference/test_rules.py."""

import importlib
import re
import shutil
from pathlib import Path

import pytest

from ci import cli
from ci.documents import spec
from impl.bugs import BUGS
from reference.clauses import CLAUSES
from reference.commands import COMMANDS, Mode, Reason
from reference.all_clauses import ALL_CLAUSES
from stateful_tests.coverage.situations import kind_name
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.traces import trace_files as traces

ROOT = Path(__file__).parents[3]
DOCUMENTS = (
    "SPEC.md", "SPEC-REFERENCE.md", "README.md", "CONTRIBUTING.md", "ci/README.md", "ci/COMMANDS.md",
    "fixtures/README.md", "fixtures/releases/README.md", "fixtures/releases/FINDINGS.md",
)  # fmt: skip


@pytest.fixture(scope="module")
def text():
    return spec.text()


@pytest.fixture(scope="module")
def full():
    """The specification as the page has it."""
    return spec.text(full=True)


# -- the document ---------------------------------------------------------------------------------


def test_spec_md_is_up_to_date(text):
    assert (ROOT / "SPEC.md").read_text(encoding="utf-8") == text, "kvspec spec --out SPEC.md"


def test_spec_reference_md_is_up_to_date_and_defines_the_names_of_spec_md(kvspec, text):
    code, out, err = kvspec("spec", "--reference", "--check")
    assert (code, out, err) == (0, "", ""), "kvspec spec --reference --out SPEC-REFERENCE.md"
    reference_text = spec.reference_text()
    for part in re.findall(rf"\]\({spec.REFERENCE}#([^)]+)\)", text):
        headings = map(spec.anchor, re.findall(r"^#+ (.*)$", reference_text, re.MULTILINE))
        assert part in {*headings}, part
    for clause in ALL_CLAUSES:
        assert f"\n### {clause}\n" in text + reference_text, clause
    for clause in CLAUSES.values():
        assert f"| [{clause.id}](SPEC.md#{spec.anchor(clause.id)}) |" in reference_text, clause
    assert all(f"| `{reason.value}` |" in reference_text for reason in Reason)
    assert kvspec("spec", "--reference", "--html")[0] == 2
    assert kvspec("spec", "--reference", "--findings")[0] == 2


def test_the_findings_are_those_of_known_toml(kvspec):
    assert kvspec("spec", "--findings", "--check") == (0, "", ""), (
        "kvspec spec --findings --out FINDINGS.md"
    )
    assert kvspec("spec", "--findings", "--html")[0] == 2


def test_the_command_prints_writes_and_compares(kvspec, monkeypatch, text, tmp_path):
    monkeypatch.setattr(spec, "text", lambda full: text)
    assert kvspec("spec") == (0, text, "")
    assert kvspec("spec", "--check") == (0, "", "")
    assert kvspec("spec", "--out", "S.md") == (0, "", "")
    assert (tmp_path / "S.md").read_text(encoding="utf-8") == text
    monkeypatch.setattr(spec, "text", lambda full: text + "more")
    code, out, _ = kvspec("spec", "--out", "S.md", "--check")
    assert (code, out) == (1, "S.md is not what the code says: kvspec spec --out S.md\n")
    assert kvspec("spec", "--out", "missing.md", "--check")[0] == 2
    code, _, err = kvspec("spec", "--out", "S.md/no.md")
    assert code == 2
    assert "S.md/no.md" in err


def test_a_bug_without_a_fixture_is_reported(kvspec, monkeypatch, tmp_path):
    shutil.copy(spec.FIXTURES / f"{spec.EXAMPLE}.json", tmp_path)
    monkeypatch.setattr(spec, "FIXTURES", tmp_path)
    assert kvspec("spec") == (2, "", f"kvspec: spec: no fixture shows the bug {min(BUGS)}\n")


def test_the_specification_is_short_and_says_every_clause_command_and_fault(text):
    front, _, rest = text.partition("\n## Commands\n")
    for part, limit in ((front, 3_000), (text, 16_000)):
        words = len(part.split())
        assert words <= limit, f"cut {words - limit} words of prose in ci/templates/SPEC.md.j2"
    for name in (*CLAUSES, *map(kind_name, COMMANDS)):
        assert f"\n### {name}\n" in rest, name
    for bug in (bug.id for bug in BUGS.values() if bug.clause in CLAUSES):
        assert f"[{bug}](fixtures/regressions/" in rest, bug


@pytest.fixture
def page(kvspec, tmp_path):
    """The HTML page of the specification."""
    assert kvspec("spec", "--html", "--out", "spec.html") == (0, "", "")
    return (tmp_path / "spec.html").read_text(encoding="utf-8")


def test_the_page_is_one_file_whose_links_lead_somewhere(full, page):
    assert not re.search(r"\b(src|href)=\"(?!#|https://)", page), "it needs no other file"
    anchors = re.findall(r'<h[123] id="([^"]+)"', page)
    assert len({*anchors}) == len(anchors)
    assert {"findings", "what-is-driven", "the-command-line"} <= {*anchors}
    assert {*map(spec.anchor, re.findall(r"^#+ (.*)$", full, re.MULTILINE))} <= {*anchors}
    assert {*re.findall(r'href="#([^"]+)"', page)} <= {*anchors}


def test_the_page_has_every_known_fault(page):
    rows = re.findall(r'<tr data-in="([^"]+)"', page)
    assert len(rows) == len(known_faults())
    assert sum("sglang==0.5.23 " in row for row in rows) == sum(
        fault.engine == "sglang" and fault.is_in("0.5.23") for fault in known_faults().values()
    )


def test_the_page_draws_what_the_text_draws(full, page):
    assert page.count('class="drawing"') >= full.count("```text\n") and "stateDiagram" not in page
    assert page.count('<svg class="states"') == full.count("```mermaid\n") == 2
    drawings = "\n".join(re.findall(r"```text\n(.*?)```", full, re.DOTALL))
    drawn = len(re.findall(r"\|[-#+t.|]+\|", drawings))
    assert drawn > 50
    assert len(re.findall(r'\|(?:<i class="\w+">.</i>|\|)+\|', page)) == drawn


def test_the_page_is_not_checked(kvspec):
    code, _, err = kvspec("spec", "--html", "--check")
    assert code == 2 and "without --html" in err


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    headings = [spec.anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    assert len(set(headings)) == len(headings), "a second heading of one name gets another anchor"
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, part = link.partition("#")
        if path.startswith("https:"):
            continue
        assert not path or (ROOT / name).parent.joinpath(path).exists(), link
        assert path or part in headings, link
    for command in re.findall(r"`kvspec ([\w-]+)", text):
        assert command in cli.cli.commands, command
    for test in re.findall(r"stateful_tests/test_\w+\.py", text):
        assert (ROOT / test).is_file(), test


def test_the_page_of_commands_has_each_command_and_options_that_exist():
    text = (ROOT / "ci/COMMANDS.md").read_text(encoding="utf-8")
    table = text.partition("\n## ")[0]
    assert {*re.findall(r"`kvspec ([\w-]+)`", table)} == {*cli.cli.commands}
    parameters = [
        parameter for command in cli.cli.commands.values() for parameter in command.params
    ]
    options = {name for parameter in parameters for name in parameter.opts}
    options |= {"--help", "--kvspec-impl", "--kvspec-tier", "--kvspec-save", "--kvspec-base"}
    for document in (text, (ROOT / "README.md").read_text(encoding="utf-8")):
        used = {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", document)}
        assert used <= options, used - options


def test_lines_of_the_readme_can_be_pasted():
    """Fixtures that it names are there, its first bug is one that a real scheduler meets, nothing is to be
    filled in first."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {*re.findall(r"kvspec \w+ (@\w+)", text)}
    assert len(names) >= 2 and all(traces.load(name).commands for name in names)
    [shown] = {*re.findall(r"check --impl torch\+([\w-]+) --mode faithful", text)}
    assert Mode.FAITHFUL in BUGS[shown].modes
    assert BUGS[shown].source.startswith(
        "sgl-project/sglang#"
    )
    assert "OWNER" not in text


def test_the_readme_is_two_pages():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1500


def test_a_clause_is_shown_with_its_assumption_and_its_rule(kvspec):
    code, out, _ = kvspec("clauses", "FREE-1")
    assert code == 0
    assert CLAUSES["FREE-1"].assumption in out
    assert CLAUSES["FREE-1"].rule in out
    for bug in BUGS.values():
        assert (f"{bug.id}:" in out) == (bug.clause == "FREE-1"), bug


@pytest.fixture(scope="module")
def shown():
    """Bug -> the clause by which its fixture shows it; test_fixtures.py replays them."""
    return {(trace := traces.load(path)).bug: trace.clause for path in spec.FIXTURES.glob("*.json")}


@pytest.mark.parametrize("clause", CLAUSES.values(), ids=CLAUSES)
def test_a_clause_has_a_rule_a_property_and_a_fault_that_it_catches(clause, shown):
    for rule in clause.rule.split(", "):
        module, _, name = rule.rpartition(".")
        assert hasattr(importlib.import_module(f"reference.{module}"), name), rule
    assert callable(clause.check)
    if clause.id == "STA-9":
        return  # torch takes no slot on demand; sglang/test_states.py has faults of a release
    caught = {bug.id for bug in BUGS.values() if bug.clause == clause.id}
    assert caught, "no named bug violates it first"
    assert all(shown.get(bug) == clause.id for bug in caught), (
        "a bug without a fixture that shows it"
    )


def test_clauses_of_pairs_and_of_progress_have_headings_in_order(full):
    """A report says "SPEC-REFERENCE.md under PRO-3", which has an example."""
    for of_all in (spec.reference_text(), full):
        for family, last in (("PD", 6), ("PRO", 3)):
            headings = re.findall(rf"^### ({family}-\d+)$", of_all, re.MULTILINE)
            assert headings == [f"{family}-{number}" for number in range(1, last + 1)], family
        _, _, about = of_all.partition("### PRO-3\n")
        assert "```text\n" in about.partition("\n## ")[0]
