"""A few files of a wheel on the package index, without the rest of it.

A wheel of vLLM has half a gigabyte, of which two megabytes are read: by ranges, where the index allows it.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from impl.adapter import UnusableImplementation
from impl.loading import fetch

_TIMEOUT_S = 60


def unpack_parts(release: str, target: Path, needed: Callable[[PurePosixPath], bool]) -> None:
    """Unpack what is needed of the wheel of a release such as "vllm==0.33.0" into the new folder `target`. A
    line on stderr says how much that is, before it is downloaded.

    Raises UnusableImplementation: no index, no such release, a wheel that cannot be read.
    """
    try:
        ranges = _Ranges(_url(release))
    except (OSError, http.client.HTTPException) as error:
        raise UnusableImplementation(f"{release}: its wheel cannot be read: {error}") from None
    whole = ranges.seek(0, os.SEEK_END)

    def announce(size: int) -> None:
        parts = f"downloads {size / 1e6:.1f} MB of a wheel of {whole / 1e6:.0f} MB"
        print(f"kvspec: {release}: {parts} into {fetch.cache_folder()}", file=sys.stderr)

    try:
        fetch.unpack(release, io.BufferedReader(ranges, 1 << 20), target, needed, announce)
    except (OSError, http.client.HTTPException, zlib.error) as error:
        raise UnusableImplementation(f"{release}: its wheel cannot be read: {error}") from None


class _Ranges(io.RawIOBase):
    """A file on a server, of which only the requested part is read."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        with urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=_TIMEOUT_S
        ) as reply:
            size = reply.headers["Content-Length"]
        if size is None:
            raise OSError("the package index does not say how large it is")
        self._size = int(size)

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
                raise OSError("the package index does not support range requests")
            got = reply.read()
        view[: len(got)] = got
        self._at += len(got)
        return len(got)


def _url(release: str) -> str:
    """Return the index's address of the wheel, for this host or else for Linux: the Python files are the
    same."""
    output = ""
    target = ["--platform", "manylinux_2_31_x86_64", "--platform", "manylinux1_x86_64"]
    for options in ([], [*target, "--python-version", "312", "--target", tempfile.gettempdir()]):
        arguments = [
            "install",
            "--dry-run",
            "--quiet",
            "--ignore-installed",
            *options,
            "--report",
            "-",
        ]
        done = fetch.ask_pip(arguments, release)
        if done.returncode == 0:
            [wheel] = json.loads(done.stdout)["install"]
            return str(wheel["download_info"]["url"])
        output = done.stderr + done.stdout
    raise UnusableImplementation(f"{release}: {fetch.pip_trouble(output)}")
