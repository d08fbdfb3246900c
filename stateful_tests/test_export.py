"""kvspec export: a trace as a bug report, and as a test that fails on one release and passes on another."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ci import export
from impl.adapter import UnusableImplementation
from impl.sglang import run_test
from impl.sglang.calls import ids_text, variable
from impl.sglang.releases import TOLD
from impl.sglang.system import SGLangSystem
from reference.commands import Open, shared_serial, token_id
from stateful_tests.results import Trace
from stateful_tests.traces import load

FIXTURES = Path(__file__).parent.parent / "fixtures"
OLD = FIXTURES / "releases" / "sglang-0.5.10"
OVERSHOOT = OLD / "overshoot_stays_after_a_finish.json"
# Faults of 0.5.10 that a later release has mended, and what the test of each asserts.
MENDED = {
    "a_midway_abort_is_saved_as_a_turn": ['self.assertFalse(holds_kv(server, "s1"))'],
    "a_rejected_request_writes_its_one_token_into_the_slot": ['self.assertFalse(holds_kv(server, "s1"))'],
    "a_second_turn_is_accepted_while_one_runs": ["self.assertFalse(r2.to_finish is None)"],
    "admit_frees_no_tail": [
        'self.assertEqual(server.cache.slots["s1"].kv_committed_len, 4)',
        'self.assertEqual(server.cache.slots["s1"].kv_allocated_len, 4)',
    ],
    "close_does_not_wait_for_the_turn": ['self.assertTrue("s1" in server.sessions)'],
    "one_token_less_than_the_key_loses_a_page": [
        "self.assertEqual(server.full_pool.available_size(), 34)"
    ],
    "overshoot_stays_after_a_finish": [
        'self.assertEqual(server.cache.slots["s1"].kv_committed_len, 6)',
        'self.assertEqual(server.cache.slots["s1"].kv_allocated_len, 6)',
    ],
    "retract_keeps_what_was_allocated_ahead": [
        'self.assertEqual(server.cache.slots["s1"].kv_allocated_len, 6)'
    ],
}
Kvspec = Callable[..., tuple[int, str, str]]


def root_of(version: str) -> Path:
    try:
        return export.root_of(version)
    except UnusableImplementation as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Exported:
    """The tests that were made on 0.5.10, by name, and where they are."""

    texts: dict[str, str]
    files: list[Path]
    system: SGLangSystem


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    root_of("0.5.10")
    system = SGLangSystem("0.5.10", calls=True)
    texts = {n: export.unit_test(load(OLD / f"{n}.json"), f"{n}.json", system) for n in MENDED}
    folder = tmp_path_factory.mktemp("exported")
    files = [folder / f"test_{name}.py" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    yield Exported(texts, files, system)
    system.close()


def test_they_fail_on_the_release_that_has_the_fault(exported: Exported) -> None:
    code, said = run_test.outcome(root_of("0.5.10"), "0.5.10", *exported.files)
    assert code == run_test.FAILS, said
    assert said.count("AssertionError") == len(MENDED)


def test_they_pass_on_a_release_that_has_mended_it(exported: Exported) -> None:
    code, said = run_test.outcome(root_of("0.5.14"), "0.5.14", *exported.files)
    assert code == 0, said


@pytest.mark.parametrize("name", MENDED)
def test_each_asserts_one_fact(exported: Exported, name: str) -> None:
    text = exported.texts[name]
    assert re.findall(r"^ +(self\.assert.*)$", text, re.MULTILINE) == MENDED[name]
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("name", MENDED)
def test_each_stands_by_itself(exported: Exported, name: str) -> None:
    """Python, torch and sglang alone; nothing that is not used."""
    tree = ast.parse(exported.texts[name])
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    modules = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports}
    assert {m.split(".")[0] for m in modules} <= {"array", "contextlib", "sglang", "torch", "unittest"}
    defined = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert {name for name in defined - used if not name.startswith("Test")} == set()
    story = load(OLD / f"{name}.json").story.split(".")[0].replace('"', "'")
    assert story in " ".join((ast.get_docstring(tree) or "").split())


def changed(path: Path, **changes: object) -> Trace:
    return replace(load(path), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a_lock_pins_a_leaf_of_any_length", "a test can be made of traces without a radix tree"),
        ("a_busy_check_knows_one_pool", "a memory check is the scheduler's own"),
        ("an_aborted_turn_stays_in_the_history", "abort r1: that is done by the scheduler"),
    ],
)
def test_what_is_in_no_class_of_the_release_is_refused(exported: Exported, name: str, says: str) -> None:
    with pytest.raises(export.NotExportable, match=says):
        export.unit_test(load(OLD / f"{name}.json"), name, exported.system)


def test_a_trace_that_conforms_is_refused(exported: Exported) -> None:
    with pytest.raises(export.NotExportable, match=r"conforms on sglang==0\.5\.10"):
        export.unit_test(changed(OVERSHOOT, commands=(Open("s1"),), expected=()), "x", exported.system)


@pytest.mark.parametrize(
    ("bodies", "code"),
    [
        (["pass"], 0), (["self.fail()"], run_test.FAILS), (["self.fail()", "pass"], 1), (["1 / 0"], 1),
        ([], 1),
    ],
)  # fmt: skip
def test_all_pass_or_all_fail_or_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bodies: list[str], code: int
) -> None:
    monkeypatch.setattr(run_test, "_hook", lambda *_: None)
    files = []
    for body in bodies:
        head = "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n        "
        files.append(tmp_path / f"{len(files)}.py")
        files[-1].write_text(f"{head}{body}\n")
    assert run_test.main([str(tmp_path), "0.5.10", *map(str, files)]) == code


def test_names_and_tokens_in_the_lines() -> None:
    assert [variable(name) for name in ("r1", "turn-2", "class")] == ["r1", "req_turn_2", "req_class"]
    tokens = [token_id(shared_serial("b"), p) for p in (0, 1)] + [token_id(3, p) for p in (2, 3, 5)]
    assert ids_text(tokens) == "[*range(90100000, 90100002), *range(300002, 300004), 300005]"
    assert ids_text([]) == "[]"


# -- the command line ----------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, str]]:
    """The command without releases: what each is said to come to."""
    ends = {"0.5.10": (run_test.FAILS, ""), "0.5.13": (0, "")}
    monkeypatch.setattr(export, "unit_test", lambda *_: "# the test\n")
    monkeypatch.setattr(export, "root_of", Path)
    monkeypatch.setattr(run_test, "outcome", lambda root, version, file: ends[version])
    root_of_release = "impl.sglang.system.release_root"
    monkeypatch.setattr(root_of_release, Path)
    return ends


def test_a_test_is_run_before_it_is_written(kvspec: Kvspec, made: object) -> None:
    options = ("export", str(OVERSHOOT), "--as", "pytest", "--impl", "sglang==0.5.10", "--fixed", "0.5.13")
    code, out, err = kvspec(*options)
    assert (code, out) == (0, "# the test\n")
    assert err.splitlines() == [
        "sglang==0.5.10: the test fails, as it should", "sglang==0.5.13: the test passes, as it should",
    ]  # fmt: skip
    assert kvspec(*options, "--out", "t.py")[0] == 0
    assert Path("t.py").read_text() == "# the test\n"
    assert kvspec(*options, "--out", "t.py")[0] == 2


@pytest.mark.parametrize(
    ("version", "end", "says"),
    [
        ("0.5.10", (0, ""), "the test passes on sglang==0.5.10"),
        ("0.5.13", (run_test.FAILS, "AssertionError: 1"), "fails on sglang==0.5.13: AssertionError: 1"),
        ("0.5.13", (1, "ImportError: no"), "the test cannot be run on sglang==0.5.13: ImportError: no"),
    ],
)
def test_a_test_that_says_nothing_is_not_written(
    kvspec: Kvspec, made: dict[str, tuple[int, str]], version: str, end: tuple[int, str], says: str
) -> None:
    made[version] = end
    options = ("--impl", "sglang==0.5.10", "--fixed", "0.5.13", "--out", "t.py")
    code, _, err = kvspec("export", str(OVERSHOOT), "--as", "pytest", *options)
    assert (code, Path("t.py").exists()) == (2, False)
    assert says in err


def test_only_some_releases_can_be_told(kvspec: Kvspec) -> None:
    code, _, err = kvspec("export", str(OVERSHOOT), "--as", "pytest", "--impl", "torch")
    assert (code, "--impl sglang==VERSION, not torch" in err) == (2, True)
    assert TOLD == ("0.5.10", "0.5.11", "0.5.12", "0.5.13", "0.5.14")


def test_a_bug_report(kvspec: Kvspec) -> None:
    trace = FIXTURES / "regressions" / "retract_then_retry_frees_the_reserved_token.json"
    code, out, _ = kvspec("export", str(trace), "--as", "story")
    assert code == 0
    assert out.startswith("# Retract then retry frees the reserved token (LEN-3)\n")
    for part in (
        "the key is one shorter than committed",
        "> LEN-3: After admit, request and slot hold the same cursors",
        "| LEN-3 | request and slot both at prefix 10: kv_committed_len 10",
        "| **6** | **admit r1** | **done** | **s1 kv_committed_len 11 -> 10;",
        "Sizes: page_size 1, window 3, full_pages 40,",
        f"kvspec replay {trace.name} --impl torch+pr22862-tail",
        "* torch+pr22862-tail\n",
    ):
        assert part in out
    [text] = re.findall(r"```json\n(.*?)```", out, re.DOTALL)
    assert json.loads(text) == json.loads(trace.read_text())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--impl", "torch"], "conforms on torch: there is nothing to report"),
        (["--fixed", "0.5.13"], "--fixed goes with --as pytest"),
    ],
)
def test_no_bug_report(kvspec: Kvspec, options: list[str], says: str) -> None:
    trace = FIXTURES / "regressions" / "retract_then_retry_frees_the_reserved_token.json"
    code, out, err = kvspec("export", str(trace), "--as", "story", *options)
    assert (code, out, says in err) == (2, "", True)
