"""Any command reports errors, interrupts and signals in one line, in a pipe and on a terminal."""

import io
import signal

import pytest

from ci.cli import interrupts
from ci.report import progress_line, text_output
from stateful_tests.check import campaign


def test_an_error_of_kvspec_itself_is_one_line(fake_system, kvspec, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("not deterministic")

    monkeypatch.setattr(campaign, "run", fail)
    code, _, err = kvspec("check")
    assert (code, fake_system.closed, err.count("\n")) == (3, 1, 1)
    assert "RuntimeError: not deterministic" in err


def test_an_interrupt_is_one_line(fake_system, kvspec, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "run", stop)
    code, _, err = kvspec("check")
    assert (code, err.strip()) == (130, "kvspec: interrupted")


def test_after_a_second_signal_the_report_still_comes(capfd):
    times = iter([0.0, 0.5, 3.0, 3.0, 5.0, 5.0])
    end = interrupts(lambda: next(times))
    with pytest.raises(KeyboardInterrupt):
        end(signal.SIGINT, None)
    end(signal.SIGTERM, None)  # the same, as timeout(1) sends it twice
    end(signal.SIGTERM, None)
    assert capfd.readouterr().err.startswith("kvspec: ends, and reports what it has found")
    with pytest.raises(KeyboardInterrupt):
        end(signal.SIGTERM, None)


def test_progress_in_a_pipe_is_a_plain_line_now_and_then(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: clock[0])
    with progress_line.Progress() as say:
        for _ in range(250):
            clock[0] += 0.1
            say("sessions on page1, free", 5, 1)
    assert capsys.readouterr().err.splitlines() == [
        f"{when} s: sessions on page1, free; 5 commands, 1 clause violated" for when in (10, 20)
    ]


@pytest.mark.parametrize("value, plain", [("1", True), ("", False)])
def test_no_color_means_no_escape_at_all(value, plain, monkeypatch):
    """Bold included: https://no-color.org."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("NO_COLOR", value)
    monkeypatch.setenv("TERM", "xterm-256color")
    text_output.say(text_output.console(out := Terminal()), "conforms", "bold green")
    assert ("\x1b" not in out.getvalue()) == plain
