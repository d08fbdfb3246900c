"""What a check has reported as found is on disk, however the check ends."""

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from ci.commands.saved_traces import Saved
from impl.process import remote_system
from stateful_tests.check.known_faults.masks import Standing
from stateful_tests.tests.adapters import bad_adapters
from stateful_tests.tests.support.night import some_at_night
from stateful_tests.traces import trace_files

REGRESSIONS = Path(__file__).parents[3] / "fixtures" / "regressions"
ADAPTER = f"{bad_adapters.__name__}:LeavesAtOnce"


ENDS = signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize("number", some_at_night(ENDS, {signal.SIGINT, signal.SIGHUP}.__contains__))
def test_a_check_that_is_ended(number, tmp_path):
    command = [sys.executable, "-m", "ci", "check", "--impl", ADAPTER, "--tier", "nightly"]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [*command, "--json", "report.json", "--junit", "report.xml"],
        cwd=tmp_path,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        reported = _found_line(process.stderr)
        process.send_signal(number)
        process.send_signal(number)  # as timeout(1) does
        out, _ = process.communicate(timeout=120)
    assert reported == "found BROKEN: a trace is saved in traces, and is being minimised\n"
    assert trace_files.load(tmp_path / "traces/broken-example.json").clause == "BROKEN"
    if number == signal.SIGKILL:
        assert process.returncode == -number and not out
        return
    assert process.returncode == 3
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["interrupted"] and [c["id"] for c in data["findings"][0]["clauses"]] == ["BROKEN"]
    assert "interrupted after" in out and "exit status 0" in out
    assert (tmp_path / "report.xml").read_bytes().startswith(b"<?xml")


def test_a_clause_is_said_once(tmp_path):
    """A smaller trace of one of its clauses is no other finding, and its file may go in the end."""
    one = trace_files.load(REGRESSIONS / "a_trim_inside_a_page_keeps_the_page.json")
    said: list[str] = []
    saved = Saved("torch", str(tmp_path), said.append)
    saved({"FREE-1": one, "OWN-3": one})
    saved({"FREE-1": one, "OWN-3": replace(one, commands=one.commands[1:])})
    assert said == [f"found FREE-1, OWN-3: a trace is saved in {tmp_path}, and is being minimised"]
    assert {path.name for path in tmp_path.iterdir()} == {"free-1-torch.json", "own-3-torch.json"}


@pytest.mark.parametrize(
    ("standings", "said"),
    [
        ((Standing.NEW, Standing.NEW), ", NEW against torch"),
        ((Standing.KNOWN, Standing.KNOWN), ", also in torch"),
        ((Standing.NEW, Standing.KNOWN), ""),
        ((Standing.UNTOLD, Standing.UNTOLD), ""),
    ],
)
def test_a_finding_beside_a_base_is_reported_after_the_replay_on_the_base(standings, said, tmp_path):
    """The trace is there before."""
    one = trace_files.load(REGRESSIONS / "a_trim_inside_a_page_keeps_the_page.json")
    lines: list[str] = []
    saved = Saved("torch+pr22900", str(tmp_path), lines.append, "torch")
    traces = {"FREE-1": one, "OWN-3": one}
    saved(traces)
    saved(traces, {"FREE-1": standings[0]})
    assert not lines and len([*tmp_path.iterdir()]) == 1
    saved(traces, (asked := dict(zip(traces, standings))))
    saved(traces, asked)
    assert lines == [f"found FREE-1, OWN-3{said}: a trace is saved in {tmp_path}, and is being minimised"]


def test_a_tour_that_is_ended(tmp_path):
    impl = f"{bad_adapters.__name__}:AdmitsNobody"
    options = ["--scope", "session-tiny", "--impl", impl, "--json", "report.json"]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-m", "ci", "tour", *options],
        cwd=tmp_path,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        clause, _, _ = _found_line(process.stderr).removeprefix("found ").partition(": ")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert trace_files.load(next((tmp_path / "traces").glob("*.json"))).clause == clause
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["tours"][0]["stopped"] == "an interrupt"
    assert process.returncode == data["exit_code"] == 1


def _found_line(lines: IO[str]) -> str:
    """Return the first line that says what was found; a slow machine tells of its progress before."""
    return next(line for line in lines if line.startswith("found "))


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "page.html"
    trace_files.write_atomically(file, "before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=str(file)):
            trace_files.write_atomically(file, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_text() == "before" and [*tmp_path.iterdir()] == [file]


def test_an_output_that_is_a_device_or_a_link_is_not_replaced(tmp_path):
    trace_files.write_atomically("/dev/null", "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="/dev/full"):
        trace_files.write_atomically("/dev/full", "text")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    trace_files.write_atomically(link, "text")
    assert link.is_symlink() and (tmp_path / "file").read_text() == "text"


QUICK = ("--examples", "1", "--steps", "5", "--mode", "faithful")


def test_a_report_that_cannot_be_written_keeps_the_verdict(kvspec):
    impl = f"{bad_adapters.__name__}:Raises"
    full = "/dev/full"
    code, out, err = kvspec("check", "--impl", impl, *QUICK, "--json", full, "--junit", full)
    assert code == 3 and "IndexError: page 99" in out
    assert {
        f"kvspec: {option} /dev/full: No space left on device" for option in ("--json", "--junit")
    } < {*err.splitlines()}


def test_a_listing_that_cannot_be_written_is_an_error(kvspec):
    code, _, err = kvspec("bugs", "--json", "/dev/full")
    assert code == 2 and "--json /dev/full: No space left on device" in err


def test_an_exception_of_close_is_reported(kvspec):
    impl = f"{bad_adapters.__name__}:ClosesBadly"
    code, _, err = kvspec("check", "--impl", impl, *QUICK, "-j", "1")
    said = [
        line for line in err.splitlines() if line.startswith(f"kvspec: --impl {impl}: close(): ")
    ]
    assert code == 4 and len(said) == 1 and "RuntimeError: no  [2J end" in said[0], err


def test_a_factory_that_hangs_obeys_the_limit(kvspec, monkeypatch):
    monkeypatch.setattr(remote_system, "_LEAST_START_S", 1.0)
    code, _, err = kvspec(
        "check", "--impl", f"{bad_adapters.__name__}:never_made", "--timeout", "0.5"
    )
    assert code == 2 and "never_made: hang: nothing to start in 1 s" in err
