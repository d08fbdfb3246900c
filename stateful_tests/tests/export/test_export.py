"""kvspec export: a trace as a bug report, and as a test that fails on one release and passes on another."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ci.export import unit_test as export
from ci.export.recorded_run import NotExportable
from ci.export.template_parts import SHARED
from impl.process import run_test
from impl.sglang.process.system import SGLangSystem
from impl.sglang.scheduler.call_log import ids_text, variable
from reference.commands import Open
from reference.token_ids import shared_serial, token_id
from stateful_tests.lockstep import system_names as registry
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.support.accepted import accepted_values
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.support.night import at_night, NIGHT
from stateful_tests.tests.support.planted_faults import checkout_with, planted_faults
from stateful_tests.tests.export.exports import ALIKE, assertions_in, root_of, run_alike, with_fixes
from stateful_tests.traces.trace_files import load


FIXTURES = Path(__file__).parents[3] / "fixtures"
PLANTED = planted_faults("export/faults.toml")
OLD = FIXTURES / "releases" / "sglang-0.5.10"
NEW = FIXTURES / "releases" / "sglang-0.5.11"
BUG = FIXTURES / "regressions" / "retract_then_retry_frees_the_reserved_token.json"
OVERSHOOT = OLD / "overshoot_stays_after_a_finish.json"
LAST = FIXTURES / "releases" / "sglang-0.5.15" / "a_slot_keeps_a_token_that_nobody_computed.json"
# Faults of 0.5.10 that 0.5.14 has fixed, or fixes.toml does.
_MENDED = (
    "a_busy_check_knows_one_pool", "a_finished_turn_is_counted_twice",
    "a_key_swept_to_its_end_becomes_a_live_leaf", "a_lent_slot_is_counted_twice",
    "a_lock_pins_a_leaf_of_any_length", "a_midway_abort_is_saved_as_a_turn",
    "a_recovered_tombstone_frees_slots_that_are_read",
    "a_rejected_request_writes_its_one_token_into_the_slot", "a_second_turn_is_accepted_while_one_runs",
    "a_session_forgets_its_namespace", "a_session_inserts_into_another_namespace",
    "admit_frees_no_tail", "an_aborted_turn_stays_in_the_history", "close_does_not_wait_for_the_turn",
    "eviction_reports_fewer_tokens_than_it_freed", "one_token_less_than_the_key_loses_a_page",
    "one_token_less_than_the_key_overwrites_the_trees_slots", "overshoot_stays_after_a_finish",
    "retract_keeps_what_was_allocated_ahead", "the_busy_check_of_a_tree_with_a_window_raises",
)  # fmt: skip
MENDED = _MENDED if NIGHT else _MENDED[::3]
# Faults of 0.5.23 that fixes.toml fixes.
NEWEST = (
    LAST,
    NEW / "a_retract_counts_as_a_finish.json",
    NEW / "a_turn_retracted_twice_loses_its_session.json",
    NEW / "aborting_a_retracted_turn_keeps_its_kv_and_its_text.json",
)

# The faults of a release that has no other fixtures here, and what the test of each asserts.
FAULTS = {
    "0.5.18": {
        "a_free_that_waits_takes_the_slots_of_a_recovered_tombstone":
            "self.assertEqual(node.component_data[ComponentType.SWA].value.tolist(), mapped)",
        "a_prompt_that_is_swept_too_far_has_two_owners":
            "self.assertEqual(owned & pages_of(server, slots_in_tree(server.cache)), set())",
    },
    "0.5.13+unified": {
        "a_leaf_split_at_a_window_frees_slots_that_are_read":
            "self.assertEqual(h1.prefix_indices.tolist(),"
            " tree_slots(server.cache, [*range(90000000, 90000002)]))",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """The tests that were made on a release with planted faults, by the name of the trace, of the fault that
    was planted, or of its clause; where they are, and what they are to pass on."""

    texts: dict[str, str]
    files: list[Path]
    system: SGLangSystem
    fixed: export.ReleaseTarget


def exports_on(version: str, traces: dict[str, Trace], folder: Path) -> Iterator[Exported]:
    planted = {name: fault for name, fault in PLANTED.items() if fault.edits_in(version)}
    faulty = checkout_with(root_of(version), folder / "faulty", *planted.values(), release=version)
    base = {"0.5.10": "0.5.14"}.get(version, version)
    fixed = export.target(str(with_fixes(base, folder / "checkout")))
    system = registry.resolve("sglang", checkout=str(faulty), calls=True)
    traces = {**traces, **{name: fault.trace() for name, fault in planted.items()}}
    texts = {n: export.unit_test(trace, f"{n}.json", system, fixed) for n, trace in traces.items()}
    files = [folder / f"test_{name}.py" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    together = folder / "together"
    together.mkdir()
    (together / f"{SHARED}.py").write_text(export.shared_module(system, fixed))
    for name in [*traces][::3]:  # the same in a folder, with one module
        text = export.unit_test(traces[name], f"{name}.json", system, fixed, shares_module=True)
        assert len(text.splitlines()) < 130, name
        files.append(together / f"test_{name}.py")
        files[-1].write_text(text, encoding="utf-8")
    yield Exported(texts, files, system, fixed)
    system.close()


def they_fail_and_pass(made: Exported, *alike: Path) -> None:
    """Assert that tests fail on the release and pass on the checkout that has fixed it.

    alike: fail at their end on the release.
    """
    (code, output), (fixed, fixed_output) = run_test.outcomes(
        (made.system.root, made.system.release, [*made.files, *alike]),
        (made.fixed.root, made.fixed.version, made.files),
    )
    assert code == run_test.FAILS, output
    assert output.count("FAIL: ") == len(made.files) + len(alike), output
    assert output.count(ALIKE) == 2 * len(alike), output
    assert fixed == 0, fixed_output


@pytest.fixture(scope="module")
def exported_tests(tmp_path_factory):
    traces = {name: load(OLD / f"{name}.json") for name in MENDED}
    yield from exports_on("0.5.10", traces, tmp_path_factory.mktemp("exported"))


def test_exported_tests_fail_on_the_faulty_release_and_pass_on_the_fixed_one(exported_tests, tmp_path):
    they_assert_one_fact(exported_tests)
    they_fail_and_pass(exported_tests, *run_alike_all(exported_tests.system, (1, 3, 7, 5), tmp_path))


@at_night
def test_exports_of_the_newest_release_fail_and_pass(tmp_path):
    traces = {path.stem: load(path) for path in NEWEST}
    twice = "a_turn_retracted_twice_loses_its_session"
    tree = replace(traces[twice].geometry, tree=True)
    # LEN-3 is violated as well
    traces[twice] = replace(traces[twice], clause="TREE-6", geometry=tree)
    for made in exports_on("0.5.23", traces, tmp_path):
        they_assert_one_fact(made)
        they_fail_and_pass(made, *run_alike_all(made.system, (1, 3, 49, 76), tmp_path))


def run_alike_all(system: SGLangSystem, numbers: tuple[int, ...], folder: Path) -> list[Path]:
    """Of which some have bigrams, and some a namespace."""
    files = [run_alike(system, number, folder) for number in numbers]
    texts = [file.read_text() for file in files]
    assert all(any(what in text for text in texts) for what in ("bigram=True", '="kvspec"'))
    return files


def they_assert_one_fact(made: Exported) -> None:
    """The fact that the clause is about, in the release's own terms; read what is accepted."""
    found = {
        f"{made.system.release} {name}": assertions_in(text) for name, text in made.texts.items()
    }
    assert found == accepted_values("exported_assertions", found)
    assert [
        line for text in made.texts.values() for line in text.splitlines() if len(line) > 110
    ] == []


def test_an_exported_test_imports_nothing_of_kvspec(exported_tests):
    """Python, torch and sglang alone; nothing that is not used; the story of the trace."""
    for name in MENDED:
        tree = ast.parse(exported_tests.texts[name])
        imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
        modules = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports}
        own = {"array", "contextlib", "dataclasses", "os", "sglang", "torch", "unittest"}
        assert {m.split(".")[0] for m in modules} <= own, name
        defined = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        defined |= {alias.asname or alias.name for n in imports for alias in n.names}
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert {n for n in defined - used if not n.lower().startswith(("test", "__"))} == set(), name
        story = load(OLD / f"{name}.json").story.split(".")[0].replace('"', "'")
        assert story in " ".join((ast.get_docstring(tree) or "").split()), name


def test_the_test_stands_first(exported_tests):
    """Under its imports, with a name that says what it is about; below is what stands in for a server."""
    for name in MENDED:
        text = exported_tests.texts[name]
        body = ast.parse(text).body
        [at] = [i for i, node in enumerate(body) if getattr(node, "name", "").startswith("Test")]
        assert all(isinstance(n, (ast.Expr, ast.Import, ast.ImportFrom, ast.Try)) for n in body[:at]), name
        [method] = body[at].body
        assert method.name == f"test_{name}", name
        assert method.end_lineno - method.lineno < 70, name
        assert "fmt: skip" not in text, name
        lines_said = [line for line in text.splitlines() if "expected " in line and name not in line]
        assert lines_said, text


def change_trace(path: Path, **changes: object) -> Trace:
    return replace(load(path), **changes)


def test_a_trace_that_no_class_of_the_release_shows_is_refused(exported_tests):
    """A node that ends inside a page shares it with the next, yet each slot has one node."""
    trace = replace(PLANTED["TREE-1"].trace(), clause="OWN-1")
    with pytest.raises(
        NotExportable, match="OWN-1 shows in nothing that the release's classes offer"
    ):
        export.unit_test(trace, "x", exported_tests.system)


def test_a_received_prompt_is_refused(exported_tests):
    commands = script("submit r1 (no session) +9; admit r1; extend r1 +9 tail")
    with pytest.raises(NotExportable, match="a prompt that another server has computed"):
        export.unit_test(change_trace(OVERSHOOT, commands=commands, expected=()), "x", exported_tests.system)


def test_a_trace_that_conforms_is_refused(exported_tests):
    with pytest.raises(NotExportable, match="conforms on sglang@checkout"):
        export.unit_test(
            change_trace(OVERSHOOT, commands=(Open("s1"),), expected=()), "x", exported_tests.system
        )


RELEASE = "def admit():\n    assert False, 'a row that is reused has KV'\n"


@pytest.mark.parametrize(
    ("bodies", "code"),
    [
        (["pass"], 0),
        (["self.fail()"], run_test.FAILS),
        (["self.fail()", "pass"], 1),
        (["1 / 0"], run_test.STOPS),
        (["self.fail()", "1 / 0"], run_test.STOPS),
        ([], 1),
        (["release.admit()"], run_test.STOPS),
        (["release.admit()", "self.fail()"], run_test.STOPS),
        (["self.assertRaises(AssertionError, release.admit)"], 0),
        (["self.assertRaises(KeyError, dict)"], run_test.FAILS),
    ],
)
def test_a_test_fails_only_at_its_own_assertion(monkeypatch, tmp_path, bodies, code):
    """An assertion inside the release is an error of the test, which made the state by hand."""
    monkeypatch.setattr("impl.sglang.process.testing.hook", lambda *_: None)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "invented_release.py").write_text(RELEASE)
    files = []
    for body in bodies:
        head = "import unittest\nimport invented_release as release\n"
        head += "class Test(unittest.TestCase):\n    def test(self):\n        "
        files.append(tmp_path / f"{len(files)}.py")
        files[-1].write_text(f"{head}{body}\n")
    arguments = ["impl.sglang.process.testing:hook", str(tmp_path), "0.5.10", *map(str, files)]
    assert run_test.main(arguments) == code


def test_names_and_tokens_in_the_lines():
    assert [variable(name) for name in ("r1", "turn-2", "class")] == [
        "r1",
        "req_turn_2",
        "req_class",
    ]
    tokens = [token_id(shared_serial("b"), p) for p in (0, 1)] + [token_id(3, p) for p in (2, 3, 5)]
    assert ids_text(tokens) == "[*range(90100000, 90100002), *range(300002, 300004), 300005]"
    assert ids_text([]) == "[]"
