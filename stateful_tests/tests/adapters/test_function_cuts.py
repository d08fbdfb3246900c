"""Functions cut out of a release's files, and what is kept of a parsed file."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from impl.loading import function_cuts
from impl.loading.function_cuts import cut, runnable_functions

SERVER = """
import a_package_that_nobody_has

def twice(n): return add(n, n)

class Scheduler(a_package_that_nobody_has.Base):
    @a_package_that_nobody_has.traced
    def pages(self, n) -> Unknown: return twice(n) + STEP

    def unused(self): return 0
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    return server


@pytest.fixture
def parsed_files(monkeypatch):
    """The files that were parsed, in order."""
    names: list[str] = []
    parse = ast.parse

    def note_cut(source, filename):
        names.append(Path(filename).name)
        return parse(source, filename)

    monkeypatch.setattr(function_cuts.ast, "parse", note_cut)
    return names


def pages_of(file, step=1):
    env = {"add": int.__add__, "STEP": step}
    return cut(file, frozenset({"twice", "Scheduler.pages", "gone"}), env)["pages"](None, 4)


def test_cut_functions_run_without_the_rest_of_the_file(file):
    functions = cut(
        file, frozenset({"twice", "Scheduler.pages", "gone"}), {"add": int.__add__, "STEP": 1}
    )
    assert sorted(functions) == ["pages", "twice"]
    assert functions["pages"](None, 4) == 9
    assert functions["pages"].__qualname__ == "Scheduler.pages"


def test_a_file_is_parsed_once_for_the_same_functions(file, parsed_files):
    assert (pages_of(file), pages_of(file, step=2)) == (9, 10)
    assert parsed_files == ["server.py"]
    assert cut(file, frozenset({"twice"}), {"add": int.__add__})["twice"](3) == 6
    assert parsed_files == ["server.py"] * 2


def test_a_changed_file_is_parsed_again(file, parsed_files):
    assert pages_of(file) == 9
    file.write_text(SERVER.replace("+ STEP", "- STEP"))
    assert (pages_of(file), pages_of(file)) == (7, 7)
    assert parsed_files == ["server.py"] * 2


@pytest.mark.parametrize(
    "damage", [lambda kept: kept[:40], lambda kept: b"", lambda kept: b"x" + kept]
)
def test_a_damaged_copy_is_made_anew(file, parsed_files, damage):
    assert pages_of(file) == 9
    [cached_file] = Path(sys.pycache_prefix).rglob("*.pyc")
    cached_file.write_bytes(damage(cached_file.read_bytes()))
    assert pages_of(file) == 9
    assert parsed_files == ["server.py"] * 2


def test_nothing_is_kept_where_python_writes_no_bytecode(file, parsed_files, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert (pages_of(file), pages_of(file)) == (9, 9)
    assert parsed_files == ["server.py"] * 2
    assert not Path(importlib.util.cache_from_source(str(file))).parent.exists()


def test_functions_that_need_nothing_of_a_server_are_plain(tmp_path):
    file = tmp_path / "common.py"
    file.write_text(
        "import torch\n"
        "def pages(n): return -(-n // SIZE)\n"
        "def ceil(n, size=16): return -(-n // size) * size\n"
        "def needed(lens: Tensor) -> Tensor: return torch.tensor([ceil(int(n)) for n in lens])\n"
        "def of_pages(n): return pages(n)\n"
        "def on_gpu(): return torch.cuda.is_available()\n"
        "def read(): return open('/etc/passwd')\n"
        "def late():\n    import psutil\n    return 1\n"
        "def default(n=SIZE): return n\n"
        "@wrapped\ndef wrapped_up(n): return n\n"
        "def set_flag(flag):\n    def inner(): return flag\n    return inner\n"
    )
    assert runnable_functions(file, {"torch"}) == {"ceil", "needed", "set_flag"}
    assert {"pages", "of_pages", "default"} <= runnable_functions(file, {"torch", "SIZE"})
