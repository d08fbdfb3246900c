"""SPEC.md is what the code says. That its tables are so: tests/reference/test_rules.py."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import cli
from ci.documents import spec
from impl.bugs import BUGS
from reference.clauses import CLAUSES, Clause
from reference.commands import COMMANDS, Reason
from reference.rules import RULES
from stateful_tests.coverage.situations import kind_name
from stateful_tests.traces import files as traces

ROOT = Path(__file__).parents[3]
DOCUMENTS = (
    "SPEC.md", "README.md", "CONTRIBUTING.md", "ci/README.md", "fixtures/README.md",
    "fixtures/releases/README.md",
)  # fmt: skip
Kvspec = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def text() -> str:
    return spec.text()


# The document.


def test_it_is_up_to_date(text: str) -> None:
    assert (ROOT / "SPEC.md").read_text(encoding="utf-8") == text, "kvspec spec --out SPEC.md"


def test_the_command_prints_writes_and_compares(
    kvspec: Kvspec, monkeypatch: pytest.MonkeyPatch, text: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(spec, "text", lambda: text)
    assert kvspec("spec") == (0, text, "")
    assert kvspec("spec", "--check") == (0, "", "")
    assert kvspec("spec", "--out", "S.md") == (0, "", "")
    assert (tmp_path / "S.md").read_text(encoding="utf-8") == text
    monkeypatch.setattr(spec, "text", lambda: text + "more")
    code, out, _ = kvspec("spec", "--out", "S.md", "--check")
    assert (code, out) == (1, "S.md is not what the code says: kvspec spec --out S.md\n")
    assert kvspec("spec", "--out", "missing.md", "--check")[0] == 2
    code, _, err = kvspec("spec", "--out", "no/folder.md")
    assert code == 2
    assert "no/folder.md" in err


def test_a_bug_without_a_fixture_is_said(
    kvspec: Kvspec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copy(spec.FIXTURES / f"{spec.EXAMPLE}.json", tmp_path)
    monkeypatch.setattr(spec, "FIXTURES", tmp_path)
    assert kvspec("spec") == (2, "", f"kvspec: spec: no fixture shows the bug {min(BUGS)}\n")


def test_it_has_every_command_reason_and_clause(text: str) -> None:
    for kind in COMMANDS:
        assert f"\n### {kind_name(kind)}\n" in text
    for clause in CLAUSES:
        assert f"\n### {clause}\n" in text
    for reason in Reason:
        assert any(reason in rule.refused for rule in RULES.values()), reason
        assert f"\n| `{reason.value}` | {reason.says} |" in text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    said = (ROOT / name).read_text(encoding="utf-8")
    headings = [spec.anchor(heading) for heading in re.findall(r"^#+ (.*)$", said, re.MULTILINE)]
    assert len(set(headings)) == len(headings), "a second heading of one name gets another anchor"
    for link in re.findall(r"\]\(([^)\s]+)\)", said):
        path, _, part = link.partition("#")
        if path.startswith("https:"):
            continue
        assert not path or (ROOT / name).parent.joinpath(path).exists(), link
        assert path or part in headings, link
    for command in re.findall(r"`kvspec ([\w-]+)", said):
        assert command in cli.cli.commands, command
    for test in re.findall(r"stateful_tests/test_\w+\.py", said):
        assert (ROOT / test).is_file(), test


def test_a_clause_is_told_with_its_assumption_and_its_rule(kvspec: Kvspec) -> None:
    code, out, _ = kvspec("clauses", "FREE-1")
    assert code == 0
    assert CLAUSES["FREE-1"].assumption in out
    assert CLAUSES["FREE-1"].rule in out
    for bug in BUGS.values():
        assert (f"{bug.id}:" in out) == (bug.clause == "FREE-1")


def test_tables_are_tables(text: str) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1, table


@pytest.fixture(scope="module")
def shown() -> dict[str | None, str | None]:
    """Bug -> the clause by which its fixture shows it; test_fixtures.py replays them."""
    return {(trace := traces.load(path)).bug: trace.clause for path in spec.FIXTURES.glob("*.json")}


@pytest.mark.parametrize("clause", CLAUSES.values(), ids=CLAUSES)
def test_a_clause_has_a_rule_a_property_and_a_fault_that_it_catches(
    clause: Clause, shown: dict[str | None, str | None]
) -> None:
    for rule in clause.rule.split(", "):
        module, _, name = rule.rpartition(".")
        assert hasattr(importlib.import_module(f"reference.{module}"), name), rule
    assert callable(clause.check)
    caught = {bug.id for bug in BUGS.values() if bug.clause == clause.id}
    assert caught, "no named bug violates it first"
    assert all(shown.get(bug) == clause.id for bug in caught), "a bug without a fixture that shows it"
