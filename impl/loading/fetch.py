"""The source of an engine's Python files: a cache folder, else the package index.

Whatever goes wrong here is for the user to fix, so it is one line: UnusableImplementation.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

from impl.adapter import UnusableImplementation

VERSION = re.compile(r"\d+(\.\d+){1,3}((a|b|rc|\.?post|\.?dev)\d+)?")
_MAX_FILE = 16 << 20  # bytes of one unpacked file; the largest real one has less than a megabyte
_PIP_TIMEOUT_S = 300


def cache_folder() -> Path:
    """Return $KVSPEC_CACHE, else $XDG_CACHE_HOME/kvspec, else ~/.cache/kvspec. It need not exist."""
    if own := os.environ.get("KVSPEC_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvspec"
    return Path.home() / ".cache" / "kvspec"


def release_root(package: str, version: str, unpacked: Callable[[Path, Path], None]) -> Path:
    """Return the folder that holds the package's files of this release, fetched once and then kept.

    unpacked: puts them into a new folder, the second; the first is for its own use. Raises
    UnusableImplementation: not a version, no index to be reached, no such release, a cache folder that cannot
    be written, a broken wheel, files that were changed since they were fetched.
    """
    if not VERSION.fullmatch(version):
        raise UnusableImplementation(f"{package}=={version[:40]}: not a version number")
    root = cache_folder() / f"{package}-{version}"
    if (root / package).is_dir():
        if not _seal(root).is_file():  # from before seals were written
            seal(root)
        elif not _is_sealed(root):
            why = f"files in {root} were changed since they were fetched"
            remedy = f"delete that folder, or drive it as a checkout (--{package}-path {root})"
            raise UnusableImplementation(f"{package}=={version}: {why}; {remedy}")
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root.parent) as work:
            unpacked(Path(work), Path(work) / "unpacked")
            _move_in(Path(work) / "unpacked", root, package)
        seal(root)
    except OSError as error:
        why = f"cannot be fetched into {root.parent}: {error}"
        raise UnusableImplementation(f"{package}=={version}: {why}") from None
    return root


def _is_sealed(root: Path) -> bool:
    """Return whether a release's folder is what its seal says. Another process may complete it just now: its
    files and its seal are two."""
    for pause in (0.0, 0.3, 1.0):
        time.sleep(pause)
        if _seal(root).read_text(encoding="ascii") == _digest(root):
            return True
    return False


def complete(root: Path, unpacked: Callable[[Path, Path], None]) -> None:
    """Add what a release's folder lacks, which was fetched when less of it was needed. Files that are there
    stay. Raises UnusableImplementation as `release_root` does.

    unpacked: as in `release_root`. Several processes may do so at once: each file appears whole, and the seal
        of all is there beforehand.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root.parent) as work:
            whole = Path(work) / "unpacked"
            unpacked(Path(work), whole)
            new = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
            shutil.copytree(
                root, whole, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
            digest = _digest(whole)
            for name in new:
                if not (target := root / name).is_file():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (whole / name).replace(target)
            _note(root, digest)
    except OSError as error:
        why = f"{root} lacks files and cannot be completed: {error}"
        raise UnusableImplementation(why) from None


def seal(root: Path) -> None:
    """Note what is in the folder of a release, so that a change to it is seen; where it can be written."""
    with contextlib.suppress(OSError):
        _note(root, _digest(root))


def _note(root: Path, digest: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=root.parent, delete=False) as made:
        made.write(digest)
    os.replace(made.name, _seal(root))


def _seal(root: Path) -> Path:
    return root.with_name(f"{root.name}.sha256")


def _digest(root: Path) -> str:
    """Return the SHA-256 of the names and contents of all files but compiled ones."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(root).as_posix()}\0".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def unpack(
    content: str,
    wheel: Path | IO[bytes],
    target: Path,
    needed: Callable[[PurePosixPath], bool],
    announce: Callable[[int], None] = lambda _: None,
) -> None:
    """Unpack what is needed of `wheel` into the new folder `target`; a name that leaves it never is.

    announce: gets the compressed size (bytes) of that, before any of it is read. Raises
    UnusableImplementation for an archive that is broken or has a file that is too large.
    """
    target.mkdir(parents=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = [entry for entry in archive.infolist() if _is_wanted(entry, needed)]
            announce(sum(entry.compress_size for entry in entries))
            for entry in sorted(entries, key=lambda entry: entry.header_offset):
                if entry.file_size > _MAX_FILE:
                    raise UnusableImplementation(f"{content}: {entry.filename!r:.80} is too large")
                destination = target.joinpath(*PurePosixPath(entry.filename).parts)
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, KeyError) as error:
        raise UnusableImplementation(f"{content}: not a readable wheel: {error}") from None


def _is_wanted(entry: zipfile.ZipInfo, needed: Callable[[PurePosixPath], bool]) -> bool:
    path = PurePosixPath(entry.filename)
    strange = path.is_absolute() or ".." in path.parts or {"\\", ":"} & {*entry.filename}
    return not (entry.is_dir() or strange) and needed(path)


def _move_in(unpacked: Path, root: Path, package: str) -> None:
    """Put a complete folder in place at once; when another process was faster, its folder serves."""
    try:
        unpacked.rename(root)
    except OSError:
        if not (root / package).is_dir():
            # Half a folder that something else left there: it can only be replaced.
            shutil.rmtree(root, ignore_errors=True)
            unpacked.rename(root)


def ask_pip(arguments: list[str], release: str) -> subprocess.CompletedProcess[str]:
    """Run pip for a release such as "sglang==0.5.10", of which it must have a wheel."""
    plain = ["--no-deps", "--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    command = [*_pip(), arguments[0], *plain, *arguments[1:], release]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnusableImplementation(
            f"{release}: pip gave no answer in {_PIP_TIMEOUT_S} s"
        ) from None


def _pip() -> list[str]:
    """Return this Python's pip, else one on the path: environments are often made without."""
    if importlib.util.find_spec("pip") is None and (
        found := shutil.which("pip3") or shutil.which("pip")
    ):
        return [found]
    return [sys.executable, "-P", "-m", "pip"]


def unreachable(output: str) -> bool:
    """Return whether pip says that there is no index: asking for another platform would not help."""
    return any(
        sign in output
        for sign in ("NewConnectionError", "ConnectionError", "ConnectTimeout", "NameResolutionError",
                     "ProxyError", "SSLError", "Max retries exceeded", "No module named pip")
    )  # fmt: skip


def pip_trouble(output: str) -> str:
    """Return one line of pip's output that says what is wrong."""
    if "No module named pip" in output:
        return "not in the cache, and this Python has no pip to download it with"
    if unreachable(output):
        return "not in the cache, and the package index cannot be reached"
    if "No matching distribution" in output or "Could not find a version" in output:
        return "the package index has no such release (or no wheel of it)"
    errors = [line.strip() for line in output.splitlines() if line.startswith("ERROR")]
    return f"pip download failed: {errors[-1][:200] if errors else 'it said nothing'}"
