"""What continuous integration reads and runs: the workflow, the action and its steps, JUnit output."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from junitparser import Error, Failure, JUnitXml, Skipped

from ci.cli import cli
from ci.report.check_data import check_data
from ci.report import junit
from impl.adapter import Capabilities
from impl.engines import engine
from reference.commands import Mode
from reference.failures import Failure as Failed
from stateful_tests.check import check_plans
from stateful_tests.check.trees.base_selection import Base, BaseKind
from stateful_tests.check.known_faults.masks import Mask
from stateful_tests.lockstep.known_faults import known_faults
from stateful_tests.lockstep.driven_kinds import new_tallies
from stateful_tests.lockstep.check_results import Tally
from stateful_tests.lockstep.run_results import Violation
from stateful_tests.tests.support.made_up_check import RUN, check_result, finding

HOME = Path(__file__).parents[3]
ACTION = HOME / ".github" / "actions" / "kvspec"
FAULTY = 'if [ "$1" = "$FAILS" ]; then exit 1; fi\n'


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_action_sets_all_variables_that_its_steps_read():
    action = read(ACTION / "action.yml")
    script = (ACTION / "run.sh").read_text()
    steps = action["runs"]["steps"]
    given = {name for step in steps for name in step.get("env", {})}
    assert given == set(re.findall(r"\bKVSPEC_[A-Z_]+", script))
    used = set(re.findall(r"inputs\.([a-z-]+)", yaml.safe_dump(steps)))
    assert used == set(action["inputs"])
    called = [
        match[1] for step in steps if (match := re.search(r'run\.sh" (\w+)', step.get("run", "")))
    ]
    assert called == ["key", "install", "check"]
    assert all(f"\n{name}() {{" in script for name in called)


def workflow() -> dict[str, Any]:
    jobs: dict[str, Any] = read(HOME / ".github" / "workflows" / "kvspec.yml")["jobs"]
    return jobs


def test_the_workflow_passes_only_inputs_of_the_action():
    jobs = workflow()
    inputs = read(ACTION / "action.yml")["inputs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    given = [step["with"] for step in steps if step.get("uses", "").endswith("actions/kvspec")]
    assert len(given) == 3
    assert all(set(options) <= set(inputs) for options in given)
    named = {options["tier"] for options in given} - {"${{ matrix.tier }}"}
    named |= set(jobs["pull-request"]["strategy"]["matrix"]["tier"])
    assert named == set(check_plans.TIERS)
    assert jobs["gpu"]["runs-on"] == ["self-hosted", "gpu"]
    assert all("timeout-minutes" in job for job in jobs.values())


def test_the_weekly_run_asks_for_the_newest_release():
    [job] = read(HOME / ".github" / "workflows" / "engines.yml")["jobs"].values()
    script = next(step["run"] for step in job["steps"] if "newest=" in step.get("run", ""))
    [code] = re.findall(r'python -c \\\n *"(.*)"\)', script)
    code = code.replace("$ENGINE", "sglang")
    done = subprocess.run([sys.executable, "-c", code], cwd=HOME, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [engine("sglang").newest("").version]


def test_the_example_for_a_fork_is_ten_lines_at_most():
    [example] = re.findall(r"```yaml\n(.*?)```", (HOME / "README.md").read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 10
    [_, step] = yaml.safe_load(example)["jobs"]["kvspec"]["steps"]
    assert step["uses"] == "./kvspec/.github/actions/kvspec"  # kvspec: this repository
    assert set(step["with"]) <= set(read(ACTION / "action.yml")["inputs"])


@pytest.fixture
def step(tmp_path):
    """Run a step of the action with programs that note how they are called; `kvspec FAILS` fails."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("kvspec", "python"):
        (programs / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{FAULTY}')
        (programs / name).chmod(0o755)

    def run(name, **environment):
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        env = {"PATH": f"{programs}:{os.environ['PATH']}", **environment}
        script = [ACTION / "run.sh", name]
        process = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True)
        lines = calls.read_text().splitlines() if calls.exists() else process.stdout.splitlines()
        lines = [call for call in lines if "annotations.py" not in call]
        for call in lines:
            if call.startswith("kvspec "):  # the real one knows these options
                command, *options = shlex.split(call)[1:]
                cli.commands[command].make_context(command, options)
        return process.returncode, lines

    return run


WRITES = "--save .kvspec/failures --html --json .kvspec/report.json --junit .kvspec/junit.xml"


def test_torch_is_installed_first_from_where_it_has_no_cuda(step):
    code, [torch, kvspec] = step("install", KVSPEC_TORCH_INDEX="https://there")
    assert code == 0
    assert re.search(r"--index-url https://there torch==[0-9.]+$", torch)
    assert f"-c {HOME}/ci/constraints.txt -e {HOME}[torch]" in kvspec
    assert len(step("install", KVSPEC_TORCH_INDEX="")[1]) == 1


def test_the_check_of_a_fork(step):
    code, calls = step(
        "check", KVSPEC_SGLANG_PATH="fork", KVSPEC_TIER="pr", KVSPEC_ARGS="--mode both"
    )
    assert code == 0
    fork = "--impl sglang --sglang-path fork --device cpu"
    assert calls == [f"kvspec check {fork} --tier pr {WRITES} --mode both"]


@pytest.mark.parametrize(
    "given, impl",
    [
        ({"KVSPEC_VLLM_PATH": "."}, "vllm --vllm-path ."),
        ({"KVSPEC_VLLM_PATH": ".", "KVSPEC_IMPL": "vllm+async"}, "vllm+async --vllm-path ."),
        ({"KVSPEC_SGLANG_PATH": ".", "KVSPEC_IMPL": "torch"}, "sglang --sglang-path ."),
        ({"KVSPEC_SGLANG_PATH": ".", "KVSPEC_IMPL": "sglang+overlap"}, "sglang+overlap --sglang-path ."),
    ],
)
def test_a_checkout_of_each_engine_in_a_way_that_impl_names(step, given, impl):
    code, calls = step("check", **given)
    assert code == 0
    assert calls == [f"kvspec check --impl {impl} --device cpu --tier smoke {WRITES}"]


@pytest.mark.parametrize("base", ["", "sglang==0.5.23"])
def test_earlier_failures_come_first_and_count(step, tmp_path, base):
    failures = tmp_path / ".kvspec" / "failures"
    failures.mkdir(parents=True)
    (failures / "len-2.json").touch()
    code, calls = step("check", FAILS="replay", KVSPEC_BASE=base)
    assert code == 1
    before = f" --base {base}" if base else ""
    assert calls == [
        f"kvspec replay .kvspec/failures/len-2.json --impl torch --device cpu{before}",
        f"kvspec check --impl torch --device cpu{before} --tier smoke {WRITES}",
    ]


def test_a_night_has_a_fresh_seed(step, tmp_path):
    summary = tmp_path / "summary"
    code, calls = step(
        "check", KVSPEC_TIER="nightly", FAILS="check", GITHUB_STEP_SUMMARY=str(summary)
    )
    assert code == 1
    found = re.search(r"--seed (\d+)$", calls[0])
    assert f"tier nightly, seed {found[1]}" in summary.read_text()


def test_findings_are_annotated(tmp_path):
    report_file = tmp_path / "report.json"
    found = {"clauses": [{"id": "LEN-2"}], "replay": "r"}
    found["violation"] = {"expected": "C 5", "observed": "C 6\n%"}
    script = [sys.executable, ACTION / "annotations.py", report_file]
    report_file.write_text(json.dumps({"findings": [found], "exit_code": 1, "verdict": "v"}))
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.stdout == "::error title=kvspec: LEN-2::expected C 5; observed C 6%0A%25. r\n"
    report_file.write_text(json.dumps({"findings": [], "exit_code": 4, "verdict": "half"}))
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.stdout == "::warning title=kvspec: incomplete::half\n"


# -- JUnit ---------------------------------------------------------------------------------------------


def check_document(
    tmp_path: Path, *findings: Any, base: str | None = None, masks: Sequence[Mask] = (), **more: Any
) -> Any:
    """Return the document of a check in which one machine met what was found, and what the known
    faults explain."""
    result = check_result(*findings, **more)
    result.machines[0].tallies = {"LEN-2": Tally(400, 21)}
    masked = {clause for mask in masks for clause in mask.fault.clauses}
    result.machines[0].violated = {f.clause for f in findings} | masked
    result.masked = {((mask.fault.id,), mask.fault.clauses[0]): 3 for mask in masks}
    plan = check_plans.plan("smoke", modes=[Mode.FREE])
    can = Capabilities(waived={"MAP-4": "harmless"})
    result.tallies = new_tallies()
    before = base and Base(SimpleNamespace(name=base), BaseKind.STATED)
    data = check_data(result, plan, capabilities=can, masks=masks, base=before)
    for found in data["findings"]:
        found["saved"] = "t.json"
        found["replay"] = "kvspec replay t.json"
    (tmp_path / "junit.xml").write_bytes(junit.text_of(data))
    document = JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    cases = {case.name: case for suite in document for case in suite}
    return document, cases


def test_control_characters_of_an_adapter_are_no_xml(tmp_path):
    document, _ = check_document(tmp_path, system="ev\x1b[31mil\x07")
    assert document.name == "kvspec check ev [31mil "


def test_a_clause_is_a_test_case_of_its_machine(tmp_path):
    document, cases = check_document(tmp_path, finding())
    assert (document.failures, document.errors) == (1, 0)
    case = cases["LEN-2 finish and retract cap at target"]
    assert case.classname == "kvspec.sessions"
    [failed] = case.result
    assert isinstance(failed, Failure)
    assert failed.message.startswith("LEN-2: After finish and retract,")
    assert "\n>   5 finish r1 keep 1: done; s1 kv_allocated_len 44 -> 38" in failed.text
    assert "\nobserved swa_evicted_seqlen 40" in failed.text
    assert "replay kvspec replay t.json" in failed.text


def test_unchecked_clauses_are_skipped_test_cases(tmp_path):
    _, cases = check_document(tmp_path)
    messages = {name.split()[0]: [r.message for r in case.result] for name, case in cases.items()}
    assert messages["LEN-2"] == []
    assert messages["MAP-4"] == ["not checked: harmless"]
    assert messages["TREE-1"] == ["never evaluated"]
    assert messages["verdict"] == []
    assert all(isinstance(r, Skipped) for case in cases.values() for r in case.result)


def test_findings_of_the_base_are_skipped_test_cases(tmp_path):
    document, cases = check_document(tmp_path, replace(finding("LEN-2"), old=True), base="torch+pr22900")
    (skipped,) = next(case for name, case in cases.items() if name.startswith("LEN-2")).result
    assert isinstance(skipped, Skipped) and skipped.message == "torch+pr22900 violates it as well"
    assert (document.failures, document.errors) == (0, 0)


def test_findings_of_known_faults_are_skipped_test_cases(tmp_path):
    last_token = Mask(known_faults()["last-token"], ())
    document, cases = check_document(tmp_path, masks=[last_token])
    (skipped,) = next(case for name, case in cases.items() if name.startswith("LEN-2")).result
    assert isinstance(skipped, Skipped) and skipped.message == "known: last-token"
    assert (document.failures, document.errors) == (0, 0)


def test_a_system_that_broke_is_an_error_and_half_a_plan_is_a_failure(tmp_path):
    run = replace(RUN, violation=Violation("BROKEN", 5, Failed("done", "\x1b[1m")))
    document, cases = check_document(tmp_path, finding("BROKEN", run))
    assert isinstance(cases["BROKEN the system fails nowhere"].result[0], Error)
    assert document.errors == 1
    _, cases = check_document(tmp_path, timed_out=True)
    assert [type(result).__name__ for result in cases["verdict"].result] == ["Failure"]


# -- what is installed ---------------------------------------------------------------------------------


def test_every_folder_has_a_description():
    for name in ("reference", "impl", "stateful_tests", "ci"):
        for folder in {path.parent for path in (HOME / name).rglob("*.py")}:
            docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
            assert docstring, folder
