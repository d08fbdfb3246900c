"""The file of known faults: fixtures/releases/known.toml."""

import re

import pytest

from impl.adapter import UnusableImplementation
from reference.all_clauses import ALL_CLAUSES
from stateful_tests.lockstep.known_faults import (
    FOLDER, PATH, known_faults, label, of_system, skipped_clauses, read,
)  # fmt: skip
from stateful_tests.traces.trace_files import load

FAULTS = known_faults().values()


def test_every_trace_belongs_to_one_fault_and_shows_a_clause_of_it():
    named = {path: fault for fault in FAULTS for path in fault.traces}
    trace_file = {str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*.json")}
    assert sum(len(fault.traces) for fault in FAULTS) == len(named) and named.keys() == trace_file
    for path, fault in named.items():
        trace = load(FOLDER / path)
        assert trace.clause in fault.clauses, path
        verdict = re.search(r"#\d{4}|New\b|[Ff]ixed in", trace.story)
        assert verdict is None, f"{path}: a verdict stands in known.toml alone"
    assert {clause for fault in FAULTS for clause in fault.clauses} <= {*ALL_CLAUSES, "BROKEN"}


@pytest.mark.parametrize(
    ("release", "fault", "has_it"),
    [
        ("0.5.14", "recovered-tombstone", True),
        ("0.5.15", "recovered-tombstone", False),
        ("0.5.15.post1", "lock-pins-a-whole-leaf", True),
        ("0.5.10.post1", "finish-keeps-overshoot", True),
        ("0.5.23.post1", "last-token", True),
        ("0.9.0", "last-token", False),
        ("0.5.14", "last-token", False),
        ("main", "last-token", False),
    ],
)
def test_a_release_has_a_fault_from_the_first_until_it_is_fixed(release, fault, has_it):
    assert label(release, fault) == (fault if has_it else None)


def test_a_check_avoids_known_faults_that_would_end_most_runs():
    assert skipped_clauses("sglang", "0.5.13").keys() == {"TREE-7", "MAP-4"}
    assert skipped_clauses("sglang", "0.5.13", ("unified",)).keys() == {"MAP-4"}
    assert skipped_clauses("sglang", "0.5.16") == skipped_clauses("vllm", "0.11.0") == {}


@pytest.mark.parametrize(
    ("engine", "release", "ways", "known"),
    [
        ("sglang", "0.5.14", ["unified"], ["recovered-tombstone", "split-leaf"]),
        ("sglang", "0.5.14", ["overlap"], ["recovered-tombstone"]),
        ("sglang", "0.5.15", [], []),
        ("vllm", "0.14.0", [], []),
    ],
)
def test_a_release_has_the_faults_of_its_ways(engine, release, ways, known):
    assert [
        fault.id for fault in of_system(engine, release, ways) if "TREE-4" in fault.clauses
    ] == known
    overlapped = [fault.id for fault in of_system("sglang", "0.5.23", ways)]
    assert ("first-token-drops-suffix" in overlapped) == ("overlap" in ways)


ENTRY = """
[[fault]]
id = "a"
engine = "sglang"
says = "s"
first = "0.5.10"
clauses = []
verdict = "none found"
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[fault]", "line 1"),
        (ENTRY.replace("0.5.10", "ten"), "'ten' is not a version .* `$.fault[0]`"),
        (ENTRY + "fixed = ''", "'' is not a version"),
        (ENTRY.replace("none found", "new"), "enum value 'new' - at `$.fault[0].verdict`"),
        (ENTRY.replace("none found", "known"), "`reports` goes with"),
        (ENTRY.replace("none found", "cause known"), "`cause` goes with"),
        (ENTRY.replace("none found", "fixed"), "`fixed` names no release"),
        (ENTRY + "with_another = ['x']", "`with_another` names a file that is not in `traces`"),
        (ENTRY + "colour = 1", "unknown field `colour` - at `$.fault[0]`"),
        (ENTRY * 2, "two faults"),
        (ENTRY + "note = 'as b-and-c'", "a names 'b-and-c', and there is none: words"),
        (ENTRY.replace('"s"', '"as-a-and"').replace('"a"', '"as-an-and"'), "is it as-an-and"),
    ],
)
def test_an_error_in_the_file_is_one_line(text, says, tmp_path):
    path = tmp_path / "known.toml"
    path.write_text(text)
    says = says.replace("$", r"\$").replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(UnusableImplementation, match=f"^{path}: .*{says}"):
        read(path)


def test_the_file_is_missing(tmp_path):
    with pytest.raises(UnusableImplementation, match=str(tmp_path / PATH.name)):
        read(tmp_path / PATH.name)
