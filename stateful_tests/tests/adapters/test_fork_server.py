"""Workers that are forks: they behave as processes that were started by themselves."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from impl import HOME
from impl.process import child, fork_server

LAUNCHES = {"fork": fork_server.launch, "anew": fork_server.launch_anew}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@pytest.fixture
def server(monkeypatch):
    """The server of this test alone."""
    monkeypatch.setattr(fork_server, "_server", None)
    yield
    fork_server._forget_server()


NAMES = itertools.count()


def start_module(folder: Path, code: str, *arguments: str, launch=fork_server.launch, **variables):
    """Return the process of a module with this code. It prints errors to the file `errors`."""
    name = f"module_{next(NAMES)}"
    body = textwrap.indent(code.strip(), "    ")
    (folder / f"{name}.py").write_text(f"if __name__ == '__main__':\n{body}\n")
    command = [sys.executable, "-m", name, *arguments]
    with (folder / "errors").open("wb") as errors:
        return launch(command, env=child.environment([HOME, folder], **variables), stderr=errors)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_a_process_ends_with_its_status(tmp_path, launch, code, status):
    process = start_module(tmp_path, code, launch=launch)
    with process:
        assert process.wait(60) == process.poll() == process.returncode == status


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_a_process_has_arguments_streams_environment_folder_and_session(
    tmp_path, monkeypatch, launch
):
    monkeypatch.chdir(tmp_path)
    code = """
import os, sys
print(sys.argv[1:], os.environ["OF_WORKER"], os.getcwd(), os.getsid(0) == os.getpid())
print(sys.stdin.buffer.read())
raise ValueError("it ends")
"""
    process = start_module(tmp_path, code, "a b", launch=launch, OF_WORKER="1")
    with process:
        process.stdin.write(b"asked")
        process.stdin.close()
        printed = process.stdout.read().decode().splitlines()
        status = process.wait(60)
    assert printed == [f"['a b'] 1 {tmp_path} True", "b'asked'"]
    assert (tmp_path / "errors").read_bytes().endswith(b"ValueError: it ends\n")
    assert status == (2 if launch is fork_server.launch else 1)


def test_a_fork_has_torch_and_nothing_of_another_fork(tmp_path):
    code = "import sys; print('torch' in sys.modules, hasattr(sys, 'touched')); sys.touched = True"
    for _ in range(2):
        process = start_module(tmp_path, code)
        with process:
            assert process.stdout.read() == b"True False\n"


def test_a_running_fork_takes_signals(tmp_path):
    process = start_module(tmp_path, "import time; time.sleep(60)")
    with process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        process.send_signal(signal.SIGTERM)  # nobody takes it


def test_forks_of_a_killed_server_count_as_killed_and_the_next_process_starts(server, tmp_path):
    code = """
import os, time
from impl.process.worker import end_with_parent
end_with_parent()
print(os.getppid(), flush=True)
time.sleep(60)
"""
    process = start_module(tmp_path, code)
    with process:
        os.kill(int(process.stdout.readline()), signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    following = start_module(tmp_path, "print('as ever')")
    with following:
        assert following.stdout.read() == b"as ever\n"


def test_the_server_ends_with_its_last_user(server, tmp_path):
    process = start_module(tmp_path, "import os; print(os.getppid())")
    with process:
        parent = int(process.stdout.read())
    assert parent != os.getpid() and is_alive(parent)
    fork_server._forget_server()
    for _ in range(200):
        if not is_alive(parent):
            break
        time.sleep(0.05)
    assert not is_alive(parent)


def test_a_process_that_was_forked_from_a_user_uses_its_server(tmp_path):
    def server_of_process():
        process = start_module(tmp_path, "import os; print(os.getppid())")
        with process:
            return process.stdout.read()

    first = server_of_process()
    asks, answers = os.pipe()
    if not (user := os.fork()):
        try:
            os.write(answers, server_of_process())
        finally:
            os._exit(0)
    os.close(answers)
    with os.fdopen(asks, "rb") as answer:
        assert first and answer.read() == first
    os.waitpid(user, 0)


def test_the_mark_of_a_worker_does_not_end_the_server(tmp_path):
    process = start_module(tmp_path, "import os; print(os.getppid())", **{child.MARK: "first"})
    with process:
        parent = int(process.stdout.read())
    child.end_all("first")
    assert is_alive(parent)
