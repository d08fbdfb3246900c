"""kvspec export: a trace as a bug report, and as a test that fails on one release and passes on another."""

import ast
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ci.export import unit_test as export
from ci.export.recorded_run import NotExportable
from ci.export.template_parts import SHARED
from impl.adapter import UnusableImplementation
from impl.process import run_test
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases.catalogue import ALIKE as SETS
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.scheduler.call_log import ids_text, variable
from reference.every_clause import EVERY_CLAUSE
from reference.commands import Open, shared_serial, token_id
from stateful_tests.lockstep import systems as registry
from stateful_tests.lockstep.results import Trace
from stateful_tests.tests.support.night import at_night
from stateful_tests.tests.support.accepted import accepted
from stateful_tests.tests.support.commands import script
from stateful_tests.tests.support.planted_faults import checkout_with, planted_faults
from stateful_tests.tests.export.exports import ALIKE, asserted_in, root_of, run_alike, with_fixes
from stateful_tests.traces.files import load, save

FIXTURES = Path(__file__).parents[3] / "fixtures"
PLANTED = planted_faults("export/faults.toml")
OLD, NEW = FIXTURES / "releases" / "sglang-0.5.10", FIXTURES / "releases" / "sglang-0.5.11"
BUG = FIXTURES / "regressions" / "retract_then_retry_frees_the_reserved_token.json"
OVERSHOOT = OLD / "overshoot_stays_after_a_finish.json"
LAST = FIXTURES / "releases" / "sglang-0.5.15" / "a_slot_keeps_a_token_that_nobody_computed.json"
# Faults of 0.5.10 that 0.5.14 has fixed, or fixes.toml does.
MENDED = (
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


def made_on(version: str, traces: dict[str, Trace], folder: Path) -> Iterator[Exported]:
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
    (together := folder / "together").mkdir()
    (together / f"{SHARED}.py").write_text(export.shared_module(system, fixed))
    for name in [*traces][::3]:  # the same in a folder, with one module
        text = export.unit_test(traces[name], f"{name}.json", system, fixed, beside=True)
        assert len(text.splitlines()) < 130
        files.append(together / f"test_{name}.py")
        files[-1].write_text(text, encoding="utf-8")
    yield Exported(texts, files, system, fixed)
    system.close()


def they_fail_and_pass(made: Exported, *alike: Path) -> None:
    """On the release, and on the checkout that has fixed it. alike: fail at their end on the release."""
    (code, output), (fixed, fixed_output) = run_test.outcomes(
        (made.system.root, made.system.release, [*made.files, *alike]),
        (made.fixed.root, made.fixed.version, made.files),
    )
    assert code == run_test.FAILS, output
    assert output.count("FAIL: ") == len(made.files) + len(alike), output
    assert output.count(ALIKE) == 2 * len(alike), output
    assert fixed == 0, fixed_output


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    traces = {name: load(OLD / f"{name}.json") for name in MENDED}
    yield from made_on("0.5.10", traces, tmp_path_factory.mktemp("exported"))


def test_they_fail_where_the_fault_is_and_pass_where_it_is_fixed(exported, tmp_path):
    they_assert_one_fact(exported)
    they_fail_and_pass(exported, *run_alike_all(exported.system, (1, 3, 7, 5), tmp_path))


def test_so_do_those_of_the_newest_release(tmp_path):
    traces = {path.stem: load(path) for path in NEWEST}
    twice = "a_turn_retracted_twice_loses_its_session"
    tree = replace(traces[twice].geometry, tree=True)
    # LEN-3 is violated as well
    traces[twice] = replace(traces[twice], clause="TREE-6", geometry=tree)
    for made in made_on("0.5.23", traces, tmp_path):
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
        f"{made.system.release} {name}": asserted_in(text) for name, text in made.texts.items()
    }
    assert found == accepted("exported_assertions", found)
    assert [
        line for text in made.texts.values() for line in text.splitlines() if len(line) > 110
    ] == []


def test_each_stands_by_itself(exported):
    """Python, torch and sglang alone; nothing that is not used; the story of the trace."""
    for name in MENDED:
        tree = ast.parse(exported.texts[name])
        imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
        modules = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports}
        own = {"array", "contextlib", "dataclasses", "os", "sglang", "torch", "unittest"}
        assert {m.split(".")[0] for m in modules} <= own
        defined = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        defined |= {alias.asname or alias.name for n in imports for alias in n.names}
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert {n for n in defined - used if not n.lower().startswith(("test", "__"))} == set()
        story = load(OLD / f"{name}.json").story.split(".")[0].replace('"', "'")
        assert story in " ".join((ast.get_docstring(tree) or "").split())


def changed(path: Path, **changes: object) -> Trace:
    return replace(load(path), **changes)


def test_what_no_class_of_the_release_shows_is_refused(exported):
    """A node that ends inside a page shares it with the next, yet each slot has one node."""
    trace = replace(PLANTED["TREE-1"].trace(), clause="OWN-1")
    with pytest.raises(
        NotExportable, match="OWN-1 shows in nothing that the release's classes offer"
    ):
        export.unit_test(trace, "x", exported.system)


def test_a_received_prompt_is_refused(exported):
    commands = script("submit r1 (no session) +9; admit r1; extend r1 +9 tail")
    with pytest.raises(NotExportable, match="a prompt that another server has computed"):
        export.unit_test(changed(OVERSHOOT, commands=commands, expected=()), "x", exported.system)


def test_a_trace_that_conforms_is_refused(exported):
    with pytest.raises(NotExportable, match="conforms on sglang@checkout"):
        export.unit_test(
            changed(OVERSHOOT, commands=(Open("s1"),), expected=()), "x", exported.system
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
def test_a_test_fails_at_its_own_assertion_alone(monkeypatch, tmp_path, bodies, code):
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


# -- releases between the oldest and the newest, and other ways to run one ---------------------------------


def driven(implementation: str) -> SGLangSystem:
    """A release that notes its calls; skips where it is unavailable."""
    try:
        system = registry.resolve(f"sglang=={implementation}", calls=True)
    except UnusableImplementation as error:
        pytest.skip(str(error))
    assert isinstance(system, SGLangSystem)
    return system


@at_night
def test_those_of_releases_between_and_of_other_ways_to_run_one(tmp_path):
    """And where the driver has come to, the test comes to; also under overlap."""
    runs: list[run_test.Run] = []
    wanted = []  # exit status, and random runs
    for implementation in (*FAULTS, "0.5.20+overlap"):
        system, faults = driven(implementation), FAULTS.get(implementation, {})
        (folder := tmp_path / implementation).mkdir()
        alike = run_alike_all(system, (14, 19), folder)
        assert any("late=" in file.read_text() for file in alike) is system.overlap
        files = []
        if faults:
            fixed = export.target(str(with_fixes(system.release, folder / "checkout")))
            for name, asserted in faults.items():
                trace = load(FIXTURES / "releases" / f"sglang-{implementation}" / f"{name}.json")
                text = export.unit_test(trace, f"{name}.json", system, fixed)
                assert (asserted_in(text), max(map(len, text.splitlines())) <= 110) == (
                    [asserted],
                    True,
                )
                files.append(folder / f"{name}.py")
                files[-1].write_text(text)
            runs.append((fixed.root, fixed.version, files))
            wanted.append((0, 0))
        runs.append((system.root, system.release, [*files, *alike]))
        wanted.append((run_test.FAILS, len(alike)))
        system.close()
    for (code, output), want in zip(run_test.outcomes(*runs), wanted, strict=True):
        assert (code, output.count(ALIKE) // 2) == want, output


def test_a_crash_is_a_call_that_must_not_raise(tmp_path):
    """And a node of bigrams is known by its tokens, with the one that follows."""
    folder, (of_bigrams, crash) = (
        FIXTURES / "releases" / "sglang-0.5.22",
        (
            "an_insert_of_bigrams_frees_a_page_that_the_tree_keeps",
            "a_shorter_answer_to_the_same_prompt_fails_an_assertion",
        ),
    )
    system, fixed, files = driven("0.5.22"), export.target("0.5.23"), []
    for name in (of_bigrams, crash):
        text = export.unit_test(load(folder / f"{name}.json"), f"{name}.json", system, fixed)
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(text)
    raised = (
        "    hand_in(server, h1)",
        "except Exception as error:",
        '    self.fail(f"it raises {error!r}")',
    )
    assert "\n".join(" " * 8 + line for line in ("try:", *raised)) in text
    runs = [
        (where.root, version, files) for where, version in ((system, "0.5.22"), (fixed, "0.5.23"))
    ]
    (code, output), (passes, _) = run_test.outcomes(*runs)
    assert (code, output.count("FAIL: "), passes) == (run_test.FAILS, 2, 0)
    system.close()


def test_with_the_core_in_rust(tmp_path):
    """What needs its nodes is refused."""
    system = driven("0.5.23+rust")
    files = [run_alike(system, number, tmp_path) for number in (0, 10)]
    twice = load(NEW / "a_turn_retracted_twice_loses_its_session.json")
    twice = replace(twice, clause="TREE-6", geometry=replace(twice.geometry, tree=True))
    with pytest.raises(NotExportable, match="TREE-6: the tree's core in Rust hands out no nodes"):
        export.unit_test(twice, "x", system)
    system.close()
    ((code, output),) = run_test.outcomes((system.root, system.release, files))
    assert (code, output.count(ALIKE) // 2) == (run_test.FAILS, len(files)), output


@at_night
def test_an_older_core_in_rust_tells_no_slots():
    trace = load(OLD / "a_finish_caches_overshoot.json")
    system = driven("0.5.20+rust")
    with pytest.raises(NotExportable, match="TREE-15: the tree's core in Rust hands out no nodes"):
        export.unit_test(trace, "x", system)
    system.close()


def test_what_stands_in_no_one_file_is_refused():
    """Before anything runs."""
    assert [version for alike in SETS for version in alike] == list(TABLE)
    for alike in SETS:
        assert all(TABLE[version].renamed == TABLE[alike[0]].renamed for version in alike)
    for alike, others in itertools.pairwise(SETS):
        newer = export.ReleaseTarget(others[0], others[0], Path())
        with pytest.raises(
            NotExportable, match=f"no one test runs on {alike[-1]} and {others[0]}: too many"
        ):
            export.unit_test(load(OVERSHOOT), "x", driven(alike[-1]), newer)


# -- the command line ----------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch):
    """The command without releases, with given outcomes."""
    ends = {"0.5.10": (run_test.FAILS, ""), "0.5.13": (0, "")}
    monkeypatch.setattr(export, "unit_test", lambda *_: "# the test\n")
    monkeypatch.setattr(export, "shared_module", lambda *_: "# the server\n")
    monkeypatch.setattr(export, "release_root", Path)
    monkeypatch.setattr(
        run_test, "outcomes", lambda *runs, hook: [ends[version] for _, version, _ in runs]
    )
    root_of_release = "impl.sglang.process.system.release_root"
    monkeypatch.setattr(root_of_release, Path)
    return ends


def test_a_test_is_run_before_it_is_written(kvspec, made):
    options = (
        "export",
        str(OVERSHOOT),
        "--as",
        "pytest",
        "--impl",
        "sglang==0.5.10",
        "--fixed",
        "0.5.13",
    )
    code, out, err = kvspec(*options)
    assert (code, out) == (0, "# the test\n")
    assert err.splitlines() == [
        "sglang==0.5.10: the test fails, as it should",
        "sglang==0.5.13: the test passes, as it should",
    ]
    assert kvspec(*options, "--out", "t.py")[0] == 0
    assert Path("t.py").read_text() == "# the test\n"
    assert kvspec(*options, "--out", "t.py")[0] == 2


def test_tests_in_a_folder_share_one_module(kvspec, made, monkeypatch):
    options = (
        "export",
        str(OVERSHOOT),
        "--as",
        "pytest",
        "--impl",
        "sglang==0.5.10",
        "--out",
        "tests/",
    )
    for name in ("test_a", "test_b"):
        monkeypatch.setattr(export, "unit_test", lambda *_, name=name: f"def {name}(self): ...\n")
        assert kvspec(*options)[0] == 0
    assert sorted(p.name for p in Path("tests").iterdir()) == [
        f"{SHARED}.py",
        "test_a.py",
        "test_b.py",
    ]
    assert Path("tests", f"{SHARED}.py").read_text() == "# the server\n"
    assert "test_b.py: exists already; --force overwrites it" in kvspec(*options)[2]

    monkeypatch.setattr(export, "unit_test", lambda *_: "def test_c(self): ...\n")
    monkeypatch.setattr(export, "shared_module", lambda *_: "# another server\n")
    code, _, err = kvspec(*options)
    assert (code, f"--out tests/{SHARED}.py: is for other releases: another folder, or" in err) == (
        2,
        True,
    )
    assert not Path("tests/test_c.py").exists()
    assert kvspec(*options, "--force")[0] == 0
    code, _, err = kvspec("export", str(BUG), "--as", "story", "--out", "tests")
    assert (code, "--out tests: is a folder; a bug report is one file" in err) == (2, True)


@pytest.mark.parametrize(
    ("version", "end", "says"),
    [
        ("0.5.10", (0, ""), "no test is made: it passes on sglang==0.5.10: what shows"),
        ("0.5.13", (run_test.FAILS, "AssertionError: 1"), "it fails on sglang==0.5.13 as well: the bug"),
        ("0.5.13", (1, "ImportError: no"), "it cannot be run on sglang==0.5.13: ImportError: no"),
        (
            "0.5.10", (run_test.STOPS, "AssertionError: its row"),
            "it stops before its own assertion on sglang==0.5.10: AssertionError: its row",
        ),
    ],
)  # fmt: skip
def test_a_test_that_says_nothing_is_not_written(kvspec, made, version, end, says):
    made[version] = end
    options = ("--impl", "sglang==0.5.10", "--fixed", "0.5.13", "--out", "t.py")
    code, _, err = kvspec("export", str(OVERSHOOT), "--as", "pytest", *options)
    assert (code, Path("t.py").exists()) == (2, False)
    assert says in err


def test_the_next_trace_of_a_bug_makes_the_test(kvspec, made, monkeypatch):
    """Of a finding, whose traces lie beside each other, and of a known fault."""
    made["0.5.10"] = (run_test.FAILS, "")

    def unit_test(trace, file, *_):
        if file in refused:
            raise NotExportable("nothing of the release shows it")
        return f"# {file}\n"

    monkeypatch.setattr(export, "unit_test", unit_test)
    for number in ("", "2-"):
        save(load(OVERSHOOT), f"len-2-{number}sglang-0.5.10.json")
    options = "--as", "pytest", "--impl", "sglang==0.5.10"
    refused = ["len-2-sglang-0.5.10.json", f"@{OVERSHOOT.stem}"]
    code, out, err = kvspec("export", refused[0], *options)
    assert (code, out) == (0, "# len-2-2-sglang-0.5.10.json\n"), err
    assert "nothing of the release shows it. The test is of another trace of the same bug" in err
    code, out, err = kvspec("export", refused[1], *options)
    assert (code, out) == (0, "# @overshoot_stays_in_the_history\n"), err


@pytest.mark.parametrize(
    ("trace", "impl", "says"),
    [
        ("a_retracted_turn_goes_on_below_its_state", "sglang==0.5.22+overlap", "test_retried_turn_resumes_"),
        ("a_server_that_slept_names_lost_kv", "lmdeploy==0.18.0", "classes of SGLang and vLLM, not of"),
        ("two_readers_of_an_answer_and_the_first_frees_it", "vllm==0.33.0+pair", "this trace has two"),
        ("a_next_turn_takes_another_row", "sglang==0.5.23+hicache", "Nor of 1 other trace of this bug."),
    ],
)
def test_where_no_test_is_made_it_says_why_and_what_there_is(kvspec, trace, impl, says):
    code, out, err = kvspec("export", f"@{trace}", "--as", "pytest", "--impl", impl)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert says in err and "Ran 1 test" not in err
    assert err.endswith(f"The text of a bug report: kvspec export @{trace} --as story --impl {impl}\n")


@pytest.mark.parametrize("fixed", ["0.5.13+overlap", "vllm==0.33.0", "sglang==0.5.13+unified"])
def test_what_is_fixed_runs_in_the_ways_of_the_test(kvspec, made, fixed):
    options = "--as", "pytest", "--impl", "sglang==0.5.10"
    code, _, err = kvspec("export", str(OVERSHOOT), *options, "--fixed", fixed)
    assert code == 2 and f"--fixed {fixed}: the test is run as --impl is: sglang==VERSION" in err
    assert kvspec("export", str(OVERSHOOT), *options, "--fixed", "sglang==0.5.13")[0] == 0


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ((0, "OK"), "the test passes on sglang==0.5.10"),
        ((run_test.FAILS, "AssertionError: 1"), "the test fails on sglang==0.5.10: AssertionError: 1"),
        ((run_test.STOPS, "KeyError: 'x'"), "the test stops before its own assertion on sglang==0.5.10: K"),
    ],
)
def test_an_exported_test_is_run_here(kvspec, made, end, says):
    made["0.5.10"] = end
    Path("test_a.py").write_text("# Made by kvspec\n")
    code, out, _ = kvspec("run-test", "test_a.py", "--impl", "sglang==0.5.10")
    assert out.startswith(f"test_a.py: {says}")
    assert code == {0: 0, run_test.FAILS: 1, run_test.STOPS: 3}[end[0]]
    assert kvspec("run-test", "no.py", "--impl", "sglang==0.5.10")[0] == 2
    assert "runs on a release or a checkout" in kvspec("run-test", "test_a.py", "--impl", "torch")[2]


def test_a_test_in_upstreams_shape_is_run_here_too(kvspec):
    """It fails on the release, at its own assertion."""
    report = FIXTURES / "releases" / "reports" / "test_finish_commits_only_what_has_kv.py"
    code, out, _ = kvspec("run-test", str(report), "--impl", "sglang==0.5.23")
    assert code == 1 and "the test fails on sglang==0.5.23: TestAssertionError: 5 != 4" in out


def test_names_and_titles_without_folders_of_this_machine(kvspec, monkeypatch, tmp_path):
    """By clause and command, where the file's name says nothing; Markdown shows the story as it is."""
    story = "A <b>story</b> | with *stars*, [links](http://x) and s_evicted.\n# None is a heading."
    save(replace(load(BUG), story=story), "len-3-torch.json")
    code, out, _ = kvspec("export", "len-3-torch.json", "--as", "story")
    assert (code, out.split("\n")[0]) == (0, "# Admit: restore caps at the prefix (LEN-3)")
    assert r"A \<b>story\</b> \| with \*stars\*, [links\](http://x) and s_evicted. # None is" in out
    assert f"> Why it matters: {EVERY_CLAUSE['LEN-3'].why}\n" in out and "pip install" in out
    out = kvspec("export", f"@{BUG.stem}", "--as", "story")[1]
    assert f"Save this as `{BUG.name}`" in out
    out = kvspec("export", "len-3-torch.json", "--as", "story", "--title", "So it is")[1]
    assert out.startswith("# So it is (LEN-3)\n")
    code, _, err = kvspec("export", "len-3-torch.json", "--as", "story", "--name", "a-b")
    assert (code, "--name: 'a-b' is no name of a test" in err) == (2, True)

    for command in (
        "init -q",
        "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x",
        "tag v1.2",
    ):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    resolve = "ci.commands.shared.SystemSelector.resolve"
    monkeypatch.setattr(resolve, lambda _: registry.resolve("torch+pr22862-tail"))
    path = str(tmp_path)
    out = kvspec(
        "export", "len-3-torch.json", "--as", "story", "--impl", "sglang", "--sglang-path", path
    )[1]
    assert "--impl sglang --sglang-path CHECKOUT\n" in out and path not in out
    assert "* torch+pr22862-tail (v1.2)\n" in out


def test_other_implementations_are_refused(kvspec):
    code, _, err = kvspec("export", str(OVERSHOOT), "--as", "pytest", "--impl", "torch")
    assert (code, "--impl sglang==VERSION, not torch" in err) == (2, True)


def test_a_bug_report(kvspec):
    code, out, _ = kvspec("export", str(BUG), "--as", "story")
    assert code == 0
    assert out.startswith("# Retract then retry frees the reserved token (LEN-3)\n")
    for part in (
        "the key is one shorter than committed",
        "\n\nCommand 6 (admit r1) must resume at 10, the smaller of kv_committed_len 11 and a",
        "> LEN-3: After admit, request and slot hold the same cursors",
        "| LEN-3 | request and slot both at prefix 10: kv_committed_len 10",
        "| **6** | **admit r1** | **done** | **s1 kv_committed_len 11 -> 10;",
        "Sizes: page_size 1, window 3, full_pages 40,",
        f"kvspec replay {BUG.name} --impl torch+pr22862-tail",
        "* torch+pr22862-tail\n",
    ):
        assert part in out
    [text] = re.findall(r"```json\n(.*?)```", out, re.DOTALL)
    assert json.loads(text) == json.loads(BUG.read_text())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--impl", "torch"], "conforms on torch: there is nothing to report; try another --impl"),
        (["--fixed", "0.5.13"], "--fixed goes with --as pytest"),
    ],
)
def test_no_bug_report(kvspec, options, says):
    code, out, err = kvspec("export", str(BUG), "--as", "story", *options)
    assert (code, out, says in err) == (2, "", True)
