"""The environment of whole servers: how it is made, and one that is not there or does not fit."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest

from impl.adapter import UnusableImplementation
from impl.sglang.server import environment


def test_a_missing_environment_is_one_line_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSPEC_CACHE", str(tmp_path))
    with pytest.raises(UnusableImplementation, match=r"kvspec setup-server 0\.5\.23 \(downloads"):
        environment.python_of("0.5.23")
    with pytest.raises(UnusableImplementation, match=r"whole servers are there of 0\.5\.14, "):
        environment.python_of("0.4")


def test_an_environment_serves_each_clone_with_its_own_packages(tmp_path):
    line = environment.packages_line()
    (tmp_path / "zz_kvspec.pth").write_text(line)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "its_own.py").write_text(f"print({name!r})")
        code = f"import site; site.addsitedir({str(tmp_path)!r}); import its_own"
        env = {environment.SITE: str(tmp_path / name)}
        assert (
            subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == f"{name}\n"
        )


def test_of_two_that_make_an_environment_one_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSPEC_CACHE", str(tmp_path))
    waits = threading.Event()
    releases_made = []
    lines = []

    def build(release, folder, say):
        assert waits.wait(20)
        info = {"python": environment._PYTHON, "torch": version("torch")}
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()
        (folder / "kvspec-server.json").write_text(json.dumps(info))
        releases_made.append(release)
        return folder / "bin" / "python"

    def say(line):
        lines.append(line)
        waits.set()

    monkeypatch.setattr(environment, "_build", build)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(environment.make, "0.5.23", say) for _ in range(2)]
        assert len({future.result() for future in futures}) == 1
    assert releases_made == ["0.5.23"] and [line.split(": ")[-1] for line in lines] == ["waiting"]


def test_an_environment_for_another_torch_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSPEC_CACHE", str(tmp_path))
    folder = tmp_path / "server-0.5.23"
    folder.mkdir()
    (folder / "kvspec-server.json").write_text('{"python": "3.9", "torch": "2.0"}')
    with pytest.raises(
        UnusableImplementation, match=r"for Python 3\.9 and torch 2\.0, this is 3\.\d+ and"
    ):
        environment.python_of("0.5.23")


def test_plain_requirements_keep_the_releases_pins(tmp_path):
    info = tmp_path / "sglang-9.dist-info"
    info.mkdir()
    plain = ("transformers==5.19.0", "pyzmq>=25")
    others = ("torch==2.99", "flashinfer_python[cu13]==0.7")
    lines = (*plain, *others, 'tqdm; extra == "test"')
    metadata = "".join(f"Requires-Dist: {line}\n" for line in lines)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: 9\n{metadata}")
    wanted = environment.requirements(tmp_path)
    assert set(plain) <= set(wanted)
    assert not [line for line in wanted if line.startswith(("torch", "flashinfer", "tqdm"))]
