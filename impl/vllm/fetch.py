"""Where the Python files of a vLLM release come from: a cache folder, the package index, or a checkout.

A wheel has half a gigabyte, of which two megabytes are read: by ranges, where the index allows it.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tempfile
import urllib.request
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from impl.adapter import UnusableImplementation
from impl.sglang.parts.fetch import PIP_TIMEOUT_S, VERSION, cache_folder, move_in, pip, pip_trouble
from impl.vllm.modules import RUNNER

_NEEDED = (
    "vllm/v1/core/", "vllm/v1/request.py", "vllm/v1/kv_cache_", "vllm/v1/hisparse/",
    "vllm/v1/engine/__init__.py", "vllm/v1/outputs.py", "vllm/v1/metrics/", "vllm/v1/kv_hints.py",
    "vllm/v1/spec_decode/", "vllm/utils/", RUNNER,
)  # fmt: skip
_MAX_FILE = 16 << 20
_TIMEOUT_S = 60


class _Ranges(io.RawIOBase):
    """A file on a server, of which only what is asked for is read."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_S) as reply:
            self._size = int(reply.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = min(len(view), self._size - self._at)
        if count <= 0:
            return 0
        wanted = {"Range": f"bytes={self._at}-{self._at + count - 1}"}
        asked = urllib.request.Request(self._url, headers=wanted)
        with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as reply:
            if reply.status != 206:
                raise OSError("the server gives no parts of files")
            got = reply.read()
        view[: len(got)] = got
        self._at += len(got)
        return len(got)


def release_root(version: str) -> Path:
    """The folder that holds `vllm/` of this release, fetched once and then kept. Raises
    UnusableImplementation."""
    if not VERSION.fullmatch(version):
        raise UnusableImplementation(f"vllm=={version[:40]}: not a version number")
    root = cache_folder() / f"vllm-{version}"
    if (root / RUNNER).is_file():
        return root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root.parent) as work:
            unpacked = Path(work) / "unpacked"
            _unpack(version, _url(version), unpacked)
            move_in(unpacked, root, "vllm")
    except OSError as error:
        raise UnusableImplementation(f"vllm=={version}: cannot be fetched: {error}") from None
    return root


def checkout_root(path: str | os.PathLike[str]) -> Path:
    """The folder that holds `vllm/` in a checkout. Raises UnusableImplementation."""
    given = Path(path).expanduser()
    for needed in ("vllm/v1/core/sched/scheduler.py", RUNNER):
        if not (given / needed).is_file():
            reason = f"has no {needed}" if given.is_dir() else "is no folder"
            raise UnusableImplementation(f"vLLM checkout: {given} {reason}")
    return given.resolve()


def _url(version: str) -> str:
    """Where the index has the wheel, for this host or else for Linux: the Python files are the same."""
    said = ""
    target = ["--platform", "manylinux_2_31_x86_64", "--platform", "manylinux1_x86_64"]
    for options in ([], [*target, "--python-version", "312", "--target", tempfile.gettempdir()]):
        command = [
            *pip(), "install", "--dry-run", "--no-deps", "--quiet", "--ignore-installed",
            "--disable-pip-version-check", "--no-input", "--only-binary=:all:", *options, "--report",
            "-", f"vllm=={version}",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            late = f"pip gave no answer in {PIP_TIMEOUT_S} s"
            raise UnusableImplementation(f"vllm=={version}: {late}") from None
        if done.returncode == 0:
            [wheel] = json.loads(done.stdout)["install"]
            return str(wheel["download_info"]["url"])
        said = done.stderr + done.stdout
    raise UnusableImplementation(f"vllm=={version}: {pip_trouble(said)}")


def _unpack(version: str, url: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(io.BufferedReader(_Ranges(url), 1 << 20)) as archive:
            for entry in sorted(archive.infolist(), key=lambda e: e.header_offset):
                name = PurePosixPath(entry.filename)
                if name.suffix != ".py" or not entry.filename.startswith(_NEEDED) or ".." in name.parts:
                    continue
                if entry.file_size > _MAX_FILE:
                    raise UnusableImplementation(f"vllm=={version}: {entry.filename!r:.80} is too large")
                path = target.joinpath(*name.parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(entry))
    except (zipfile.BadZipFile, EOFError, NotImplementedError, KeyError) as error:
        raise UnusableImplementation(f"vllm=={version}: not a readable wheel: {error}") from None
    if not (target / RUNNER).is_file():
        raise UnusableImplementation(f"vllm=={version}: there is no {RUNNER} in its wheel")
