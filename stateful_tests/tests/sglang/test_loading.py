"""Where the files of a release come from, how its kind is detected, and how they are loaded.

All of it runs on tiny fake trees, without a network.
"""

import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from impl.adapter import UnusableImplementation
from impl.loading.fetch import cache_folder
from impl.sglang import SGLangSystem
from impl.sglang.parts import fetch
from impl.sglang.releases.catalogue import detect
from impl.sglang.releases.variants import VARIANTS
from stateful_tests.lockstep.system_names import resolve


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a pip that must not be called."""
    monkeypatch.setenv("KVSPEC_CACHE", str(tmp_path / "cache"))

    def no_pip(*_, **__):
        raise AssertionError("pip was called")

    monkeypatch.setattr("subprocess.run", no_pip)
    return tmp_path / "cache"


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/") + ".py", text)
    return path


def answer(monkeypatch, stderr="", put=None):
    """Have pip fail with this output, or put a wheel in the folder it was given; counts the calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        if put is not None:
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir(parents=True)
            put(folder)
        return subprocess.CompletedProcess(command, 1 if put is None else 0, "", stderr)

    monkeypatch.setattr("subprocess.run", run)
    return calls


def unusable(action, *arguments, **named) -> str:
    with pytest.raises(UnusableImplementation) as error:
        action(*arguments, **named)
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


def test_a_cached_release_is_not_downloaded(cache):
    (cache / "sglang-0.5.10" / "sglang").mkdir(parents=True)
    assert fetch.release_root("0.5.10") == cache / "sglang-0.5.10"


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("KVSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "kvspec"


@pytest.mark.parametrize("version", ["", "../../etc", "0.5.10; rm", "latest", "--help", "1" * 80])
def test_a_version_that_is_none_is_refused_before_anything_runs(cache, version):
    assert "not a version" in unusable(fetch.release_root, version)


def test_a_download_is_unpacked_once_and_leaves_nothing_else(cache, monkeypatch):
    calls = answer(
        monkeypatch,
        put=lambda folder: wheel(
            folder / "sglang-0.5.10-py3-none-any.whl",
            sglang__srt__environ="A = 1",
            sglang__srt__models__llama="unneeded",
            sglang__version="",
        ),
    )
    root = fetch.release_root("0.5.10")
    assert (root / "sglang/srt/environ.py").read_text() == "A = 1"
    assert not (root / "sglang/srt/models").exists()
    assert fetch.release_root("0.5.10") == root
    assert len(calls) == 1
    assert {p.name for p in cache.iterdir()} == {"sglang-0.5.10", "sglang-0.5.10.sha256"}
    (root / "sglang/srt/environ.py").write_text("A = 2")
    assert "were changed since they were fetched" in unusable(fetch.release_root, "0.5.10")


@pytest.mark.parametrize(
    ("output", "line", "pip_calls"),
    [  # wheels of other hosts hold the same files, so those are requested
        ("ERROR: No matching distribution found for sglang==9.9.9", "no such release", 4),
        (
            "WARNING: NewConnectionError: Temporary failure in name resolution",
            "cannot be reached",
            1,
        ),
    ],
)
def test_a_failed_download_is_reported_in_one_line(
    cache, monkeypatch, output, line, pip_calls
):
    calls = answer(monkeypatch, output)
    assert line in unusable(fetch.release_root, "9.9.9")
    assert len(calls) == pip_calls
    assert list(cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_reported(cache, monkeypatch):
    cache.write_text("a file")
    assert "cannot be fetched into" in unusable(fetch.release_root, "0.5.10")


def test_two_processes_at_once_end_with_one_complete_folder(cache, monkeypatch):
    barrier = threading.Barrier(2)

    def put(folder):
        wheel(folder / "s.whl", sglang__srt__environ="A = 1")
        barrier.wait(timeout=10)

    answer(monkeypatch, put=put)
    roots = []
    threads = [
        threading.Thread(target=lambda: roots.append(fetch.release_root("0.5.10")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert roots == [cache / "sglang-0.5.10"] * 2
    assert {p.name for p in cache.iterdir()} == {"sglang-0.5.10", "sglang-0.5.10.sha256"}


@pytest.mark.parametrize(
    "name",
    [
        "sglang/srt/managers/../../../../evil.py",
        "/sglang/srt/evil.py",
        "sglang/srt/managers/..\\evil.py",
    ],
)
def test_an_archive_cannot_write_outside_its_folder(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "bad.whl", "w") as archive:
        archive.writestr(name, "evil")
        archive.writestr("sglang/srt/environ.py", "")
    fetch.unpack(tmp_path / "bad.whl", tmp_path / "a/b/c/d/e")
    assert [p.name for p in tmp_path.rglob("*evil*")] == []


def test_a_broken_archive_is_unusable(tmp_path):
    (tmp_path / "bad.whl").write_bytes(b"PK no zip")
    assert "not a readable wheel" in unusable(fetch.unpack, tmp_path / "bad.whl", tmp_path / "x")
    empty = wheel(tmp_path / "empty.whl", other__module="")
    assert "no sglang/srt" in unusable(fetch.unpack, empty, tmp_path / "y")


# -- checkouts, their kinds, and what they lack


def tree(root: Path, files=(), version: str | None = None) -> Path:
    (root / "sglang/srt").mkdir(parents=True)
    for name in files:
        file = root / "sglang/srt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    if version:
        (root / "sglang/version.py").write_text(f'__version__ = "{version}"\n')
    return root


def test_a_checkout_and_a_bare_folder_are_both_found(tmp_path):
    tree(tmp_path / "checkout/python")
    assert fetch.checkout_root(tmp_path / "checkout") == tmp_path / "checkout/python"
    assert fetch.checkout_root(tmp_path / "checkout/python") == tmp_path / "checkout/python"


def test_a_path_without_sglang_says_so(tmp_path):
    assert "has neither" in unusable(fetch.checkout_root, tmp_path)
    assert "is no folder" in unusable(fetch.checkout_root, tmp_path / "none")
    assert "has neither" in unusable(SGLangSystem, path=tmp_path)


def test_an_unknown_checkout_names_its_version_and_what_is_supported(tmp_path):
    line = unusable(detect, tree(tmp_path, version="0.4.9"))
    assert "0.4.9" in line
    assert "it may be older than 0.5.10, the first release that is driven" in line


def test_an_unsupported_version_is_refused_before_it_is_downloaded(cache):
    assert "0.5.10, 0.5.10.post1, 0.5.11" in unusable(SGLangSystem, version="0.4.9")


def test_a_version_or_a_path_must_be_given():
    assert "give a version" in unusable(SGLangSystem)


@pytest.mark.parametrize("tree", VARIANTS)
@pytest.mark.parametrize("version", ["0.5.10", "0.5.11", "0.5.23"])
def test_a_release_without_a_way_names_the_releases_that_have_it(version, tree):
    if version not in VARIANTS[tree]:
        with pytest.raises(UnusableImplementation, match=f"it is in {', '.join(VARIANTS[tree])}"):
            resolve(f"sglang=={version}+{tree}")


@pytest.mark.parametrize("ways", ["+unifed", "+overlap+unified", "+unified+rust", "+"])
def test_the_ways_of_a_release_are_named(ways):
    with pytest.raises(UnusableImplementation, match=r"\+unified or \+rust, then \+overlap"):
        resolve(f"sglang==0.5.11{ways}")


def test_only_the_core_of_the_compiled_files_is_unpacked(tmp_path):
    core = "sglang/srt/mem_cache/rust_tree_core/mem_cache.so"
    with zipfile.ZipFile(tmp_path / "s.whl", "w") as archive:
        for name in (core, "sglang/srt/rust_extensions/_server.so", "sglang/srt/environ.py", "sglang/a.so"):
            archive.writestr(name, "")
    fetch.unpack(tmp_path / "s.whl", tmp_path / "x")
    unpacked_files = {str(p.relative_to(tmp_path / "x")) for p in (tmp_path / "x").rglob("*") if p.is_file()}
    assert unpacked_files == {core, "sglang/srt/environ.py"}


def test_a_folder_without_the_tree_says_so(tmp_path):
    """As a checkout is, or a cache from before what is compiled was unpacked."""
    with pytest.raises(UnusableImplementation, match=f"{tmp_path} has no compiled core"):
        VARIANTS["rust"]["0.5.23"].require(tmp_path)
    with pytest.raises(UnusableImplementation, match=r"has no sglang\.srt\.mem_cache\.unified"):
        VARIANTS["unified"]["0.5.11"].require(tmp_path)
