"""`import kvspec` in a project of somebody else: what pytest prints, and what the next run meets first."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext

from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec import structs
from hypothesis import Phase, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.internal.conjecture import engine

import kvspec
from kvspec import plugin
from impl.examples import block_engine
from impl.examples.block_engine import BlockEngine
from impl.examples.example_engine import ExampleEngine
from reference.blocks.commands import ENGINE_COMMANDS
from reference.commands import COMMANDS, Abort, Done, Finish, Mode, Reason, Retract
from reference.geometry import PRESETS
from stateful_tests.check import campaign, check_plans
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.machines import server_machine
from stateful_tests.tests.support.night import NIGHT, some_at_night

FAULTY = "torch+free-list-duplicate"
BLOCK_ENGINE = Path(block_engine.__file__).read_text(encoding="utf-8")
ENGINE = """
from impl.examples.example_engine import ExampleEngine

class MyEngine(ExampleEngine):
    name = "my-engine"
    def _finish(self, command):
        reason = super()._finish(command)
        if reason is None:
            self.free_pages.pop()  # a page is lost
        return reason
"""
AT_ONCE = """
from impl.examples.example_engine import ExampleEngine

class MyEngine(ExampleEngine):
    name = "my-engine"
    def reset(self, config):
        super().reset(config)
        self.free_pages.pop()  # a page is lost before the first command
"""
TESTS = """
import kvspec
from hypothesis import settings
from my_engine import MyEngine
TestMyEngine = kvspec.machine(MyEngine).TestCase
TestMyEngine.settings = settings(print_blob=True)
"""


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run Python there, with nothing of this session's environment but where programs are."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, text=True, check=False, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={"PATH": os.environ["PATH"]} | environment,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_pytest_reports_a_fault_of_a_strangers_engine(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "my_engine.py").write_text(ENGINE)
    (tmp_path / "tests" / "test_engine.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    code, out = run(tmp_path, "pytest", "-q", "--hypothesis-show-statistics")
    assert code == 1 and re.search(r"Tried \d+ shrinks of which [1-9]", out), out
    out = out[: out.index("Hypothesis Statistics")]
    assert "Traceback" not in out and "hypothesis/" not in out and len(out.splitlines()) < 60, out
    assert "my-engine violates: FREE-1" in out
    assert re.search(r"^  because +command \d+ \(finish r1 keep 1\) must free", out, re.M)
    steps = re.findall(r"^[ >]+\d+ +(?!observed)\w+ r1", out, re.M)
    assert len(steps) <= 5, out
    assert "observed" in out, "the step table"
    [trace] = (tmp_path / "traces").iterdir()
    replay = f"PYTHONPATH=tests kvspec replay traces/{trace.name} --impl my_engine:MyEngine"
    assert f"saved   traces/{trace.name}\nreplay  {replay}\n" in out

    code, out = run(tmp_path, *replay.split()[1:], PYTHONPATH="tests")  # python -m kvspec
    assert code == 1 and "violates FREE-1" in out, out

    code, out = run(tmp_path, "pytest", "-q", "--hypothesis-show-statistics")
    assert code == 1 and "during reuse phase" in out and "0 passing, 1 failing" in out, out
    assert "during generate phase" not in out

    if not NIGHT:
        return
    [again] = set(re.findall(r"^again   (.*)$", out, re.M))
    tests = TESTS.replace("kvspec.machine(MyEngine).TestCase", again.replace("...", "MyEngine"))
    (tmp_path / "tests" / "test_engine.py").write_text(
        f"from hypothesis import reproduce_failure\n{tests}"
    )
    code, out = run(tmp_path, "pytest", "-q", CI="true")  # without its database
    assert code == 1 and "my-engine violates: FREE-1" in out, out


def test_options_select_the_system_that_a_machine_drives(tmp_path):
    (tmp_path / "my_engine.py").write_text(AT_ONCE)
    (tmp_path / "test_it.py").write_text("import kvspec\nTestIt = kvspec.machine().TestCase\n")
    options = ("--kvspec-impl", "my_engine:MyEngine", "--kvspec-tier", "pr", "--kvspec-save", "found")
    code, out = run(tmp_path, "pytest", "-q", *options)
    assert code == 1
    assert "replay  kvspec replay found/end-1-my-engine.json --impl my_engine:MyEngine\n" in out, (
        out
    )


@pytest.mark.parametrize("base", some_at_night([FAULTY, "reference"], FAULTY.__eq__))
def test_a_violation_that_the_base_has_too_fails_no_test(base, tmp_path, monkeypatch):
    monkeypatch.setattr(
        plugin, "chosen", plugin.Options(impl=FAULTY, base=base, save=str(tmp_path))
    )
    machine = kvspec.machine(machines=["sessions"], presets=["page2"]).TestCase
    machine.settings = settings(
        max_examples=10, database=None, derandomize=True, phases=[Phase.generate]
    )
    for test in machine().runTest, partial(kvspec.check, presets=["page2"], examples=4, seed=1):
        with (
            nullcontext() if base == FAULTY else pytest.raises(kvspec.ClauseViolated, match="OWN-2")
        ):
            test()
    machine.tearDownClass()


def test_a_run_that_hypothesis_gives_up_is_no_run(monkeypatch):
    """It gives up in the middle of a draw; nothing may be drawn, found or rejected after that."""
    monkeypatch.setattr(engine, "BUFFER_SIZE", 70)  # of the decisions of a run
    monkeypatch.setattr(server_machine, "finale", Mock())
    machine = kvspec.machine(presets=["page1"], machines=["sessions"])
    with pytest.raises(Unsatisfiable):
        machine.TestCase().runTest()
    assert machine.driven > 0 and not server_machine.finale.called


@pytest.mark.parametrize(
    ("option", "code", "line"),
    [
        ("--kvspec-impl=nonsense", 1, "'nonsense': not one of"),
        ("--kvspec-tier=huge", 4, "huge: smoke, pr or nightly"),
    ],
)
def test_an_unusable_option_is_no_green_run(option, code, line, tmp_path):
    (tmp_path / "test_it.py").write_text("import kvspec\nTestIt = kvspec.machine().TestCase\n")
    seen, out = run(tmp_path, "pytest", "-q", option)
    assert seen == code and line in out, out


def test_a_given_geometry_is_not_fitted():
    """An engine without a window is not driven on other sizes than those that its author asks for."""
    driven = kvspec.machine(ExampleEngine, geometry=PRESETS["page2"]).TestCase()
    with pytest.raises(kvspec.UnusableImplementation, match="window"):
        driven.runTest()


def test_every_command_is_public():
    assert {kind.__name__ for kind in (*COMMANDS, *ENGINE_COMMANDS)} <= set(kvspec.__all__)


def test_an_adapter_of_an_engine_that_schedules_imports_kvspec_alone():
    names = set(re.findall(r"^from (?:impl|reference)[\w.]* import (.*)$", BLOCK_ENGINE, re.M))
    needed = {name.strip() for line in names for name in line.split(",")}
    assert (
        {"BlockFacts", "Schedule", "SelfSchedulingDriver", "chained"}
        <= needed
        <= set(kvspec.__all__)
    )


def test_an_engine_that_schedules_has_no_machine_and_its_error_names_the_check():
    with pytest.raises(
        ValueError, match=r"block-engine schedules by itself: .*kvspec\.check\(make\)"
    ):
        kvspec.machine(BlockEngine).TestCase().runTest()
    assert kvspec.check(BlockEngine, examples=6, presets=["hybrid"]).exit_code == 0


@pytest.mark.parametrize("module", ["kvspec", "kvspec.plugin"])
def test_importing_kvspec_imports_nothing_heavy(module, tmp_path):
    heavy = "[m for m in ('torch', 'hypothesis', 'impl', 'reference') if m in sys.modules]"
    (tmp_path / "loads.py").write_text(f"import sys, {module}\nprint({heavy})\n")
    assert run(tmp_path, "loads") == (0, "[]\n")


FEW = {"examples": 20, "presets": ["page1"]}


class RefusesExtends(ExampleEngine):
    """May refuse a prompt that others share, and refuses all."""

    def _extend(self, c):
        return Reason.NO_TREE


def test_an_engine_that_refuses_all_passes_no_test():
    with pytest.raises(kvspec.Incomplete, match="refused every time: extend"):
        kvspec.check(RefusesExtends, **FEW)
    result = kvspec.check(RefusesExtends, **FEW, allow_incomplete=True)
    assert result.exit_code == 4


class ClosesBadly(ExampleEngine):
    def close(self):
        raise OSError("the worker is gone")


def test_a_close_that_raises_is_a_warning_and_hides_nothing():
    with pytest.warns(UserWarning, match="close.. raises OSError: the worker is gone"):
        kvspec.check(ClosesBadly, **FEW)


class LosesRows(ReferenceSystem):
    """Loses every row that is released."""

    lost = 0

    def reset(self, geometry):
        super().reset(geometry)
        self.lost = 0

    def apply(self, command):
        outcome = super().apply(command)
        if isinstance(command, Finish | Retract | Abort) and isinstance(outcome, Done):
            self.lost += 1
        return outcome

    def view(self):
        view = super().view()
        return structs.replace(view, free_rows=[*view.free_rows][self.lost :])


def test_commands_of_a_scheduler_are_not_limited_to_free_mode():
    """Also a second trace of a clause."""
    chosen = check_plans.plan("smoke", presets=["no-swa"], modes=[Mode.FREE], machines=["sessions"])
    findings = campaign.run(LosesRows(), chosen).findings
    assert any(found.number > 1 for found in findings)
    assert all(Mode.FAITHFUL in found.modes for found in findings)
