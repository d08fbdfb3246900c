"""Where the Python files of a vLLM release come from: a cache folder, the package index, or a checkout.

A wheel has half a gigabyte, of which two megabytes are read: by ranges, where the index allows it.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import urllib.request
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from impl import fetch
from impl.adapter import UnusableImplementation
from impl.vllm.modules import RUNNER, RUNNER_V2
from impl.vllm.offload import CONNECTOR
from impl.vllm.offload import FILES as OFFLOAD

_NEEDED = (
    "vllm/v1/core/", "vllm/v1/request.py", "vllm/v1/kv_cache_", "vllm/v1/hisparse/",
    "vllm/v1/engine/__init__.py", "vllm/v1/outputs.py", "vllm/v1/metrics/", "vllm/v1/kv_hints.py",
    "vllm/v1/spec_decode/", "vllm/utils/", RUNNER, *RUNNER_V2, *OFFLOAD,
)  # fmt: skip
_TIMEOUT_S = 60


class _Ranges(io.RawIOBase):
    """A file on a server, of which only the requested part is read."""

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
        request = urllib.request.Request(self._url, headers=wanted)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            if reply.status != 206:
                raise OSError("the server gives no parts of files")
            got = reply.read()
        view[: len(got)] = got
        self._at += len(got)
        return len(got)


def release_root(version: str, v2: bool = False, offloads: bool = False) -> Path:
    """The folder that holds `vllm/` of this release (see `impl.fetch`). v2: with model runner V2; offloads:
    with its connector. Both are added to a folder from before they were fetched."""
    unpacked = partial(_unpacked, f"vllm=={version}")
    root = fetch.release_root("vllm", version, unpacked)
    wanted = [RUNNER_V2[0]] * v2 + [CONNECTOR] * offloads
    if not all((root / file).is_file() for file in wanted):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root.parent) as work:
            unpacked(Path(work), whole := Path(work) / "unpacked")
            for file in filter(Path.is_file, whole.rglob("*")):
                (target := root / file.relative_to(whole)).parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
            fetch.seal(root)
    return root


def checkout_root(path: str | os.PathLike[str]) -> Path:
    """The folder that holds `vllm/` in a checkout. Raises UnusableImplementation."""
    given = Path(path).expanduser()
    for needed in ("vllm/v1/core/sched/scheduler.py", RUNNER):
        if not (given / needed).is_file():
            reason = f"has no {needed}" if given.is_dir() else "is no folder"
            raise UnusableImplementation(f"vLLM checkout: {given} {reason}")
    return given.resolve()


def _url(release: str) -> str:
    """Where the index has the wheel, for this host or else for Linux: the Python files are the same."""
    output = ""
    target = ["--platform", "manylinux_2_31_x86_64", "--platform", "manylinux1_x86_64"]
    for options in ([], [*target, "--python-version", "312", "--target", tempfile.gettempdir()]):
        arguments = ["install", "--dry-run", "--quiet", "--ignore-installed", *options, "--report", "-"]
        done = fetch.ask_pip(arguments, release)
        if done.returncode == 0:
            [wheel] = json.loads(done.stdout)["install"]
            return str(wheel["download_info"]["url"])
        output = done.stderr + done.stdout
    raise UnusableImplementation(f"{release}: {fetch.pip_trouble(output)}")


def _unpacked(release: str, _: Path, target: Path) -> None:
    fetch.unpack(release, io.BufferedReader(_Ranges(_url(release)), 1 << 20), target, _needed)
    if not (target / RUNNER).is_file():
        raise UnusableImplementation(f"{release}: there is no {RUNNER} in its wheel")


def _needed(path: PurePosixPath) -> bool:
    return path.suffix == ".py" and path.as_posix().startswith(_NEEDED)
