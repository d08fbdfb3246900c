"""The worker process, its messages, and what the driver keeps of a scheduler: without a release."""

import subprocess
import sys

import pytest
from hypothesis import given

from impl.adapter import UnusableImplementation
from impl.process import child, wire
from impl.process.remote_system import Limits, StrangerSystem
from impl.sglang import SGLangSystem
from impl.sglang.parts import memory_checks
from impl.sglang.parts.stand_ins import Bag, ForwardMode
from impl.sglang.process import system as sglang
from impl.sglang.releases.catalogue import TABLE, Detected
from impl import vocabulary
from impl.sglang.scheduler import driver
from reference.commands import Admit, Broken, Done, Open, Piece, Reason, Submit
from reference.geometry import preset
from reference.token_ids import shared_serial, token_id
from stateful_tests.tests.support.commands import commands

WORKER = """
import os, sys, time
from impl.adapter import View
from impl.adapter import UnusableImplementation
from impl.process import wire
out = os.fdopen(1, "wb")
empty = View({}, {}, [], [], {}, [])
wire.send(out, wire.Ready())
while (body := wire.receive(0)) is not None:
    ask = wire.ASKS.decode(body)
    if isinstance(ask, wire.Apply):
        ACT
    wire.send(out, wire.MESSAGES['rows'].reply(view=empty))
"""


@pytest.mark.parametrize(
    ("act", "errors"),
    [
        ("sys.stderr.write('out of luck'); sys.exit(7)", ("exit status 7", "out of luck")),
        ("time.sleep(60)", ("hang: nothing in answer to Open in 0.3 s",)),
        (
            "wire.send(out, wire.WorkerFailure('ValueError: x at a.py:3')); continue",
            ("ValueError: x at a.py:3",),
        ),
        ("out.write(b'\\xff' * 400); out.flush()", ("unreadable",)),
    ],
    ids=["dies", "hangs", "raises", "talks nonsense"],
)
def test_a_worker_that_fails_is_broken_until_a_reset_replaces_it(
    tmp_path, monkeypatch, act, errors
):
    (tmp_path / "sglang/srt").mkdir(parents=True)
    monkeypatch.setattr(sglang, "detect", lambda _: Detected(TABLE["0.5.11"]))
    system = SGLangSystem(path=tmp_path)
    system.command_line = lambda: [sys.executable, "-c", WORKER.replace("ACT", act)]
    system.reset(preset("page1"))
    if "sleep" in act:
        system.limits = Limits(timeout_s=0.3)
    first = system.apply(Open("s"))
    assert isinstance(first, Broken)
    assert all(error in first.error for error in errors)
    assert system.apply(Open("s")) == first
    system.limits = Limits()
    system.reset(preset("page1"))
    assert system.view().sessions == {}
    system.close()


def test_the_functions_called_by_each_command_are_noted():
    system = StrangerSystem("impl.examples.example_engine:make")
    try:
        called = system.functions_called(preset("page1"), [Submit("a", None, 1), Admit("a")])
    finally:
        system.close()
    submit, admit = called
    assert "ExampleEngine._admit" in {function.name for function in admit}
    assert {function.file for function in submit} == {"example_engine.py"}
    names = {function.name for function in submit}
    assert "ExampleEngine._submit" in names and "ExampleEngine.view" not in names


def test_a_release_starts_by_its_command_line(monkeypatch, tmp_path):
    """Not as a fork. What lies in the current folder is not imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    try:
        system = SGLangSystem("0.5.23")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    system.forked = False
    system.reset(preset("page1"))
    assert system.apply(Open("s")) == Done()
    system.close()


def test_a_process_that_is_started_does_not_import_from_the_current_folder(tmp_path):
    (tmp_path / "stray.py").write_text("")
    command = [sys.executable, "-c", "import stray"]
    done = subprocess.run(
        command, cwd=tmp_path, env=child.environment([]), capture_output=True, check=False
    )
    assert done.returncode and b"No module named 'stray'" in done.stderr


def test_sets_have_the_same_order_in_each_process_that_is_started(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    command = [sys.executable, "-c", "print({*map(str, range(99))})"]
    first, second = (
        subprocess.run(command, env=child.environment([]), capture_output=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second


@given(commands)
def test_commands_survive_the_wire(command):
    ask = wire.ASKS.decode(wire.msgspec.msgpack.encode(wire.pack_command(command)))
    assert isinstance(ask, wire.Apply)
    assert wire.unpack_command(ask) == command


def test_the_driver_implements_the_declared_commands():
    late = {"Launch", "Settle"}  # of the overlapped loop alone
    assert {kind.__name__ for kind in driver._METHODS} == SGLangSystem.capabilities.commands | late


def test_a_prompt_is_spelled_by_position_and_other_ids_are_refused():
    spelled_tokens = vocabulary.spelled((Piece("a", 2), Piece("c", 3)), 4)
    at = [*((0, p) for p in (4, 5)), *((2, p) for p in (6, 7, 8))]
    assert spelled_tokens == [token_id(shared_serial("abc"[text]), position) for text, position in at]
    for piece in (Piece("a", 0), Piece("A", 1), Piece("ab", 1), Piece("", 1), Piece("ä", 1)):
        with pytest.raises(vocabulary.CommandRefused) as error:
            vocabulary.spelled((piece,))
        assert error.value.reason is Reason.EMPTY, piece


# -- the batches that memory checks go by


class Req:
    done = False

    def finished(self):
        return self.done


@pytest.fixture
def scheduler():
    return memory_checks.Scheduler(Bag, None, None, None, preset("page1"))


def listed(scheduler) -> list[list]:
    return [batch.reqs for batch in (scheduler.last_batch, scheduler.running_batch)]


def test_a_decode_makes_one_batch_of_everybody(scheduler):
    a = Req()
    b = Req()
    assert scheduler.last_batch is None
    scheduler.launch([a], ForwardMode.EXTEND)
    scheduler.launch([b], ForwardMode.EXTEND)
    assert listed(scheduler) == [[b], [a]]
    scheduler.launch([b], ForwardMode.DECODE)
    assert scheduler.last_batch is scheduler.running_batch
    assert listed(scheduler) == [[a, b], [a, b]]


def test_a_finished_request_is_listed_until_the_next_launch(scheduler):
    a = Req()
    b = Req()
    scheduler.launch([a], ForwardMode.EXTEND)
    a.done = True
    assert listed(scheduler) == [[a], []]
    scheduler.launch([b], ForwardMode.EXTEND)
    assert listed(scheduler) == [[b], []]


def test_a_retracted_request_leaves_at_once(scheduler):
    a = Req()
    b = Req()
    scheduler.launch([a, b], ForwardMode.EXTEND)
    scheduler.remove(a)
    assert listed(scheduler) == [[b], []]


@pytest.mark.parametrize("error", [AssertionError("two\n  lines"), ValueError("two lines")])
def test_the_verdict_of_a_release_is_one_line(scheduler, error):
    def check():
        raise error

    scheduler.launch([Req()], ForwardMode.EXTEND)
    scheduler.self_check_during_busy = check
    scheduler.busy_accounts = tuple
    assert scheduler.busy(1).alarm == "two lines"


def test_a_memory_check_that_cannot_run_is_no_alarm(scheduler):
    scheduler.launch([Req()], ForwardMode.EXTEND)
    with pytest.raises(AttributeError, match="read self_check_during_busy of the scheduler"):
        scheduler.busy(1)
