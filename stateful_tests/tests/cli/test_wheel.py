"""The wheel: one package with its fixtures, which does outside of the repository what a checkout does."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import packing

pytest.importorskip("hatchling", reason="hatchling is not installed")
HOME = Path(__file__).parents[3]
# No .pth file is read, so the repository is out of sight. Blocked packages are as good as not installed.
RUN = """
import sys
site, wheel, blocked, *sys.argv[1:] = sys.argv[1:]
sys.path[:0] = [wheel, site]
sys.modules |= dict.fromkeys(filter(None, blocked.split(",")))
from kvspec.ci.cli import run
code = run()
assert not {"reference", "impl", "stateful_tests", "ci"} & {*sys.modules}, "a top-level name of ours"
sys.exit(code)
"""
ENGINE = "kvspec.impl.example_engine:make"
Installed = Callable[..., tuple[int, str]]


def built(home: Path, kind: str, folder: Path) -> Path:
    line = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)]
    done = subprocess.run(line, cwd=home, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(HOME, "wheel", tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def unpacked(wheel: Path) -> Path:
    folder = wheel.with_name("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def installed(unpacked: Path, tmp_path: Path) -> Installed:
    """Run `kvspec` from the wheel in an empty folder; gives the exit code and what it printed."""

    def run(*arguments: str, without: str = "") -> tuple[int, str]:
        line = [sys.executable, "-S", "-c", RUN, sysconfig.get_path("purelib"), str(unpacked), without]
        done = subprocess.run(
            [*line, *arguments], cwd=tmp_path, check=False, timeout=300, env={}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert "Traceback" not in done.stdout, done.stdout
        return done.returncode, done.stdout

    return run


def test_it_is_one_package_without_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {re.sub(r"kvspec-.*\.dist-info", "about", name.partition("/")[0]) for name in names} == {
        "kvspec", "about",
    }  # fmt: skip
    assert not [name for name in names if re.search(r"/tests/|/test_|conftest|/bench/", name)]
    kept = {f"kvspec/{p.relative_to(HOME)}" for p in (HOME / "fixtures").rglob("*") if p.is_file()}
    assert len(kept) > 100 and kept <= {*names}
    assert {"kvspec/py.typed", "kvspec/ci/templates/replay.js", "kvspec/plugin.py"} <= {*names}


def test_the_version_is_the_one_that_the_changelog_ends_with(wheel: Path, installed: Installed) -> None:
    version = re.findall(r"^## (\S+)$", (HOME / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert wheel.name == f"kvspec-{version}-py3-none-any.whl"
    assert installed("--version") == (0, f"kvspec {version}\n")


def test_a_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(built(HOME, "sdist", tmp_path)) as packed:
        packed.extractall(tmp_path, filter="data")
    [home] = (path for path in tmp_path.iterdir() if path.is_dir())
    again = zipfile.ZipFile(built(home, "wheel", tmp_path / "dist"))
    first = zipfile.ZipFile(wheel)
    assert {n: first.read(n) for n in first.namelist()} == {n: again.read(n) for n in again.namelist()}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("replay @a_trim_frees_the_tail", 0, "conforms after"),
        ("replay @a_trim_frees_the_tail --impl torch+trim-frees-the-front --html page.html", 1, "FREE-1"),
        (f"check --impl {ENGINE} --examples 5", 0, "example: conforms"),
        ("check --impl torch+pr22897 --preset page2 --machine sessions --seed 3 --examples 6", 1, "LEN-2"),
        ("prove contract/floor-page", 0, "proved"),
        ("explore --scope session-tiny", 0, "a fixed point"),
        ("spec --html", 0, "</html>"),
        ("export @a_trim_frees_the_tail --as story", 0, "## What happens"),
    ],
)
def test_what_works_without_a_checkout(
    arguments: str, code: int, says: str, installed: Installed
) -> None:  # fmt: skip
    seen, out = installed(*arguments.split())
    assert seen == code and says in out, out


def test_the_specification_is_the_same_one(installed: Installed) -> None:
    assert installed("spec") == (0, (HOME / "SPEC.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "missing", "line"),
    [
        ("check", "torch", "--impl torch needs torch: pip install 'kvspec[torch]'"),
        ("check --impl sglang==0.5.23", "torch", "--impl sglang==0.5.23 needs torch: pip install"),
        ("export @a_trim_frees_the_tail --as pytest", "torch", "needs torch: pip install 'kvspec[torch]'"),
        ("blindspots", "torch", "needs torch: pip install 'kvspec[torch]'"),
        ("prove", "z3", "needs z3: pip install 'kvspec[prove]'"),
        ("spec", "z3", "needs z3: pip install 'kvspec[prove]'"),
        (f"check --impl {ENGINE} --ray x:1", "ray", "needs Ray: pip install 'kvspec[cluster]'"),
        ("replay @nothing_of_the_kind", "", "no fixture has that name"),
        ("tour --scope session-tin", "", "is it session-tiny"),
        ("spec --check", "", "SPEC.md"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    arguments: str, missing: str, line: str, installed: Installed
) -> None:  # fmt: skip
    code, out = installed(*arguments.split(), without=missing)
    assert code == 2 and line in out and len(out.splitlines()) == 1, out


def test_an_engine_needs_neither_torch_nor_a_solver(installed: Installed) -> None:
    code, out = installed("check", "--impl", ENGINE, "--examples", "2", without="torch,numpy,z3,ray")
    assert code == 0, out


def test_an_import_that_cannot_be_moved_stops_the_build(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import impl.adapter\n")
    with pytest.raises(ValueError, match=r"module\.py: cannot be moved into kvspec: import impl\.adapter"):
        packing.moved(module)
    module.write_text('from ci import Data\nHOME = "impl.adapter"\nwords = "ci. A reference."\n')
    assert packing.moved(module) == (
        'from kvspec.ci import Data\nHOME = "kvspec.impl.adapter"\nwords = "ci. A reference."\n'
    )
