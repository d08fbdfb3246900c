"""Where the Python files of a release come from: a cache folder, the package index, or a checkout.

Whatever goes wrong here is the user's to mend, so it is one line: UnusableImplementation.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from impl.adapter import UnusableImplementation

VERSION = re.compile(r"\d+(\.\d+){1,3}((a|b|rc|\.?post|\.?dev)\d+)?")
# Of a wheel of tens of megabytes these are read: the bookkeeping and what tells the version.
_NEEDED = (
    "sglang/version.py",
    "sglang/_version.py",
    "sglang/srt/constants.py",
    "sglang/srt/environ.py",
    "sglang/srt/managers/",
    "sglang/srt/mem_cache/",
    "sglang/srt/rust_extensions/",
    "sglang/srt/session/",
    "sglang/srt/speculative/",
    "sglang/srt/utils/",
    "sglang/kernels/ops/memory/",
)
_COMPILED = "sglang/srt/mem_cache/rust_tree_core/"
_MAX_FILE = 16 << 20  # bytes of one unpacked file; the largest real one has half a megabyte
PIP_TIMEOUT_S = 300


def cache_folder() -> Path:
    """$KVSPEC_CACHE, else $XDG_CACHE_HOME/kvspec, else ~/.cache/kvspec. It need not exist."""
    if own := os.environ.get("KVSPEC_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvspec"
    return Path.home() / ".cache" / "kvspec"


def cached_root(version: str) -> Path | None:
    """The folder that holds `sglang/` of this release if it was fetched before, else None."""
    root = cache_folder() / f"sglang-{version}"
    return root if (root / "sglang").is_dir() else None


def release_root(version: str) -> Path:
    """The folder that holds `sglang/` of this release, downloaded once and then kept.

    Raises UnusableImplementation: not a version, no index to be reached, no such release, a cache
    folder that cannot be written, a broken wheel.
    """
    if not VERSION.fullmatch(version):
        raise UnusableImplementation(f"sglang=={version[:40]}: not a version number")
    if (root := cached_root(version)) is not None:
        return root
    root = cache_folder() / f"sglang-{version}"
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root.parent) as work:
            wheel = _download(version, Path(work))
            unpacked = Path(work) / "unpacked"
            unpack(wheel, unpacked)
            move_in(unpacked, root)
    except OSError as error:
        raise UnusableImplementation(f"sglang=={version}: cannot write {root.parent}: {error}") from None
    return root


def checkout_root(path: str | os.PathLike[str]) -> Path:
    """The folder that holds `sglang/` in a checkout (PATH/python/sglang), or PATH itself.

    Raises UnusableImplementation when neither has an `sglang/srt`.
    """
    given = Path(path).expanduser()
    for root in (given / "python", given):
        if (root / "sglang" / "srt").is_dir():
            return root.resolve()
    reason = "has neither python/sglang/srt nor sglang/srt" if given.is_dir() else "is no folder"
    raise UnusableImplementation(f"sglang checkout: {given} {reason}")


def unpack(wheel: Path, target: Path) -> None:
    """Unpack what is needed of `wheel` into the new folder `target`.

    Raises UnusableImplementation for an archive that is broken, would write outside `target`, or
    holds no SGLang.
    """
    target.mkdir(parents=True)
    found = False
    try:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if entry.is_dir() or not _needed(entry.filename):
                    continue
                if entry.file_size > _MAX_FILE:
                    raise UnusableImplementation(f"{wheel.name}: {entry.filename!r:.80} is too large")
                destination = target.joinpath(*PurePosixPath(entry.filename).parts)
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes(archive.read(entry))
                found = True
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise UnusableImplementation(f"{wheel.name}: not a readable wheel: {error}") from None
    if not found:
        raise UnusableImplementation(f"{wheel.name}: there is no sglang/srt in it")


def _needed(name: str) -> bool:
    """Whether an archive's entry is wanted; one whose name leaves the folder never is."""
    path = PurePosixPath(name)
    if not name.startswith({".py": _NEEDED, ".so": (_COMPILED,)}.get(path.suffix, ())):
        return False
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name


def move_in(unpacked: Path, root: Path, package: str = "sglang") -> None:
    """Put a complete folder in place at once; when another process was faster, its folder serves."""
    try:
        unpacked.rename(root)
    except OSError:
        if not (root / package).is_dir():
            # Half a folder that something else left there: it can only be replaced.
            shutil.rmtree(root, ignore_errors=True)
            unpacked.rename(root)


def _download(version: str, work: Path) -> Path:
    """Have pip put the wheel into `work`; the ways to ask are tried in turn."""
    last = ""
    for i, options in enumerate(_ways_to_ask()):
        folder = work / f"wheel{i}"
        command = [
            *pip(), "download", "--no-deps", "--disable-pip-version-check",
            "--no-input", "--only-binary=:all:", *options, "--dest", str(folder), f"sglang=={version}",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise UnusableImplementation(
                f"sglang=={version}: pip gave no answer in {PIP_TIMEOUT_S} s"
            ) from None
        if wheels := sorted(folder.glob("*.whl")):
            return wheels[0]
        last = done.stderr + done.stdout
        if _unreachable(last):
            break  # asking for another platform would not help
    raise UnusableImplementation(f"sglang=={version}: {pip_trouble(last)}")


def pip() -> list[str]:
    """This Python's pip, else one on the path: environments are often made without."""
    if importlib.util.find_spec("pip") is None and (found := shutil.which("pip3") or shutil.which("pip")):
        return [found]
    return [sys.executable, "-m", "pip"]


def _ways_to_ask() -> list[list[str]]:
    """pip options: for this host; then, as the Python files are the same, for hosts of the wheels."""
    ways: list[list[str]] = [[]]
    for python in ("311", "312", "310"):
        options = ["--implementation", "cp", "--python-version", python]
        for glibc in ("2_34", "2_28", "2_17"):
            options += ["--platform", f"manylinux_{glibc}_x86_64"]
        ways.append(options)
    return ways


def _unreachable(output: str) -> bool:
    return any(
        sign in output
        for sign in ("NewConnectionError", "ConnectionError", "ConnectTimeout", "NameResolutionError",
                     "ProxyError", "SSLError", "Max retries exceeded", "No module named pip")
    )  # fmt: skip


def pip_trouble(output: str) -> str:
    """One line out of pip's many."""
    if "No module named pip" in output:
        return "not in the cache, and this Python has no pip to download it with"
    if _unreachable(output):
        return "not in the cache, and the package index cannot be reached"
    if "No matching distribution" in output or "Could not find a version" in output:
        return "the package index has no such release (or no wheel of it)"
    errors = [line.strip() for line in output.splitlines() if line.startswith("ERROR")]
    return f"pip download failed: {errors[-1][:200] if errors else 'it said nothing'}"
