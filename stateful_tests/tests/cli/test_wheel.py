"""The wheel: one package with its fixtures, which does outside of the repository what a checkout does."""

import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from ci import packing
from stateful_tests.tests.support.night import at_night

pytest.importorskip("hatchling", reason="hatchling is not installed")
HOME = Path(__file__).parents[3]
# No .pth file is read, so the repository is out of sight. Blocked packages are as good as not installed.
RUN = """
import json, sys
site, wheel, blocked, lines = sys.argv[1:]
sys.path[:0] = [wheel, site]
sys.modules |= dict.fromkeys(filter(None, blocked.split(",")))
from kvspec.ci.cli import run
for line in json.loads(lines):
    print("\\nexit code", run(line.split()), end="\\0")
assert not {"reference", "impl", "stateful_tests", "ci"} & {*sys.modules}, "a top-level name of ours"
"""
ENGINE = "kvspec.impl.examples.example_engine:make"


def build_package(home: Path, kind: str, folder: Path) -> Path:
    line = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        kind,
        "--directory",
        str(folder),
    ]
    done = subprocess.run(line, cwd=home, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return build_package(HOME, "wheel", tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def unpacked_wheel(wheel):
    folder = wheel.with_name("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def run_installed(unpacked_wheel, tmp_path):
    """Return a function that runs command lines from the wheel, and returns the exit code and output of each.

    They run in an empty folder, in one process whose terminal has a narrow encoding.
    """

    def run(*lines, without=""):
        site = sysconfig.get_path("purelib")
        process = subprocess.run(
            [sys.executable, "-u", "-S", "-c", RUN, site, str(unpacked_wheel), without, json.dumps(lines)],
            cwd=tmp_path, check=False, timeout=300, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={"PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1"},
        )  # fmt: skip
        assert process.returncode == 0 and "Traceback" not in process.stdout, process.stdout
        parts = [part.rpartition("\nexit code ") for part in process.stdout.split("\0")[:-1]]
        return [(int(code), out) for out, _, code in parts]

    return run


def test_the_wheel_is_one_package_without_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {re.sub(r"kvspec-.*\.dist-info", "about", name.partition("/")[0]) for name in names} == {
        "kvspec",
        "about",
    }
    tests = [name for name in names if re.search(r"/tests/|/test_|conftest|/bench/", name)]
    assert not [name for name in tests if "/fixtures/" not in name]
    kept = {f"kvspec/{p.relative_to(HOME)}" for p in (HOME / "fixtures").rglob("*") if p.is_file()}
    assert len(kept) > 100 and kept <= {*names}
    assert {"kvspec/py.typed", "kvspec/ci/templates/replay.js", "kvspec/plugin.py"} <= {*names}


@at_night
def test_a_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    with tarfile.open(build_package(HOME, "sdist", tmp_path)) as packed:
        packed.extractall(tmp_path, filter="data")
    [home] = (path for path in tmp_path.iterdir() if path.is_dir())
    again = zipfile.ZipFile(build_package(home, "wheel", tmp_path / "dist"))
    first = zipfile.ZipFile(wheel)
    assert {n: first.read(n) for n in first.namelist()} == {
        n: again.read(n) for n in again.namelist()
    }


CHECK = "check --impl torch+pr22897 --preset page2 --machine sessions --seed 3 --examples 6"
FOUND = "traces/len-2-torch-pr22897.json"
REPLAY = "replay @a_trim_frees_the_tail"


def test_the_installed_commands_work_without_a_checkout(wheel, run_installed):
    """A real bug is found, and what was saved is replayed; not a byte is for a terminal."""
    version = re.findall(r"^## (\S+)$", (HOME / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert wheel.name == f"kvspec-{version}-py3-none-any.whl"
    expected = {
        "--version": (0, f"kvspec {version}\n"),
        f"{REPLAY} --impl torch+trim-frees-the-front --html page.html": (1, "FREE-1"),
        REPLAY: (0, "conforms after"),
        "export @a_trim_frees_the_tail --as story": (0, "## What happens"),
        CHECK: (1, f"replay  kvspec replay {FOUND} --impl torch+pr22897\n"),
        f"replay {FOUND} --impl torch+pr22897": (1, "LEN-2"),
        f"replay {FOUND} --impl torch": (0, "conforms"),
    }
    check_lines(run_installed, expected)


@at_night
def test_the_installed_commands_write_the_document_and_prove(run_installed, tmp_path):
    expected = {
        "prove contract/floor-page": (0, "proved"),
        "explore --scope late-two": (0, "a fixed point"),
        "spec --out SPEC.md": (0, ""),
        "spec --html": (0, "</html>"),
    }
    check_lines(run_installed, expected)
    assert (tmp_path / "SPEC.md").read_bytes() == (HOME / "SPEC.md").read_bytes()


def check_lines(run_installed, expected):
    seen = run_installed(*expected)
    for (line, (code, part)), (ended, out) in zip(expected.items(), seen, strict=True):
        assert ended == code and part in out and "\x1b" not in out, (line, out)


MISSING = {
    "torch": {
        "check": "--impl torch needs torch: pip install 'kvspec[torch]'",
        "check --impl sglang==0.5.23": "--impl sglang==0.5.23 needs torch: pip install",
        "export @a_trim_frees_the_tail --as pytest": "makes a test of a release's classes",
    },
    "z3": {
        "prove": "needs z3: pip install 'kvspec[prove]'",
        "spec": "needs z3: pip install 'kvspec[prove]'",
    },
    "ray": {f"check --impl {ENGINE} --ray x:1": "needs Ray: pip install 'kvspec[cluster]'"},
    "": {
        "replay @nothing_of_the_kind": "no fixture has that name",
        "tour --scope session-tin": "is it session-tiny",
        "spec --check": "SPEC.md",
    },
}


@pytest.mark.parametrize("missing", MISSING)
def test_a_missing_extra_is_reported_in_one_line(missing, run_installed):
    expected = MISSING[missing]
    outcomes = run_installed(*expected, without=missing)
    for (line, part), (code, out) in zip(expected.items(), outcomes, strict=True):
        assert code == 2 and part in out and len(out.splitlines()) == 1, (line, out)


def test_an_engine_needs_neither_torch_nor_a_solver(run_installed):
    [(code, out)] = run_installed(f"check --impl {ENGINE} --examples 1", without="torch,numpy,z3,ray")
    assert code == 0, out


def test_an_import_that_cannot_be_moved_stops_the_build(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("import impl.adapter\n")
    with pytest.raises(
        ValueError, match=r"module\.py: cannot be moved into kvspec: import impl\.adapter"
    ):
        packing.moved_source(module)
    module.write_text('from ci import Data\nHOME = "impl.adapter"\nwords = "ci. A reference."\n')
    assert packing.moved_source(module) == (
        'from kvspec.ci import Data\nHOME = "kvspec.impl.adapter"\nwords = "ci. A reference."\n'
    )
