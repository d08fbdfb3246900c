"""The server environment: a Python of its own in which a release imports whole, made on demand and cached.

It stands on the environment of the kvspec that runs it: torch, numpy and msgspec are that one's, and pip is
held to its versions. So several clones share it. On top come the release's wheel and the plain ones of its
own requirements, with the release's own pins. What needs CUDA is never installed (boot.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PathDistribution, version
from pathlib import Path

from impl.adapter import UnusableImplementation
from impl.loading.fetch import cache_folder, pip_trouble
from impl.process import child

RELEASES = ("0.5.14", "0.5.18", "0.5.20", "0.5.23")  # what was tried
DISK_MB = 1500
DOWNLOAD_MB = 400
MINUTES = 2
# What a text-only scheduler and its HTTP server import, by the names of the release's own requirements.
_NAMES = """
    aiohttp anthropic apache-tvm-ffi einops fastapi interegular openai openai-harmony orjson
    packaging partial-json-parser pillow prometheus-client psutil pybase64 pydantic python-multipart
    pyzmq regex requests setproctitle tiktoken tokenizers tqdm transformers uvicorn uvloop
    watchfiles xgrammar xxhash zstandard
"""
_PLAIN = frozenset(_NAMES.split())
# Imported by releases that get them through a package that is left out.
_BESIDES = ("dill", "regex", "triton==3.9.0", "xxhash", "zstandard")
_SHARED = ("torch", "numpy", "msgspec")  # kvspec's own
# in a complete environment: what was installed, and for which Python and torch
_READY = "kvspec-server.json"
SITE = "KVSPEC_SITE"  # names the packages of the kvspec that starts a Python of the environment
_PIP_TIMEOUT_S = 1800

_PYTHON = ".".join(map(str, sys.version_info[:2]))

Say = Callable[[str], None]


def folder_of(release: str) -> Path:
    """Return the folder of a release's environment, which may not be there."""
    return cache_folder() / f"server-{release}"


def python_of(release: str) -> Path:
    """Return the Python of a release's environment.

    Raises UnusableImplementation when there is none, with the command that makes it.
    """
    supported_version(release)
    folder = folder_of(release)
    if not (folder / _READY).is_file():
        raise UnusableImplementation(
            f"sglang=={release}: a whole server needs an environment: kvspec setup-server {release}"
            f" (downloads some {DOWNLOAD_MB} MB, takes {DISK_MB} MB in {folder.parent})"
        )
    info = json.loads((folder / _READY).read_text())
    installed = (info.get("python", "another"), info["torch"])
    runs = (_PYTHON, version("torch"))
    if installed != runs:
        raise UnusableImplementation(
            f"sglang=={release}: its environment is for Python {installed[0]} and torch {installed[1]},"
            f" this is {runs[0]} and {runs[1]}: kvspec setup-server {release}"
        )
    if not (python := _python(folder)).exists():
        raise UnusableImplementation(
            f"sglang=={release}: the Python of {folder} is gone: kvspec setup-server {release}"
        )
    return python


def supported_version(release: str) -> str:
    """Return the release, if it can be installed as a whole server."""
    if release not in RELEASES:
        raise UnusableImplementation(
            f"sglang=={release:.40}: whole servers are there of {', '.join(RELEASES)}"
        )
    return release


def make(release: str, say: Say, *, again: bool = False) -> Path:
    """Make a release's environment, unless it is there; its Python.

    say: called with each progress line. One process makes it, others wait. Raises UnusableImplementation: no
    index, no space, no such wheel for this Python.
    """
    supported_version(release)
    folder = folder_of(release)
    try:
        with _alone(folder, say):
            if not again:
                with contextlib.suppress(UnusableImplementation):
                    return python_of(release)
            return _build(release, folder, say)
    except OSError as error:
        raise UnusableImplementation(f"{folder}: {error.strerror or error}") from None


@contextlib.contextmanager
def _alone(folder: Path, say: Say) -> Iterator[None]:
    """Keep other processes from making this environment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process makes {folder}: waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(release: str, folder: Path, say: Say) -> Path:
    began = time.monotonic()
    say(
        f"sglang {release} into {folder}: some {DOWNLOAD_MB} MB to download, {DISK_MB} MB on disk,"
        f" {MINUTES} minutes"
    )
    free = shutil.disk_usage(folder.parent).free >> 20
    if free < DISK_MB:
        raise UnusableImplementation(
            f"{folder.parent}: {DISK_MB} MB are needed and {free} MB are free"
        )
    shutil.rmtree(folder, ignore_errors=True)
    say("1/4  an environment that stands on kvspec's own")
    _venv(folder)
    say(f"2/4  the wheel of sglang {release}")
    _pip(folder, ["--no-deps", f"sglang=={release}"])
    wanted = requirements(_site(folder))
    say(f"3/4  {len(wanted)} packages, transformers first of all")
    _pip(folder, wanted)
    say("4/4  import of its scheduler")
    _try(folder)
    shared = next((name for name in _SHARED if (_site(folder) / name).exists()), None)
    if shared is not None:
        raise UnusableImplementation(
            f"pip has put another {shared} into {folder}: it would not be kvspec's"
        )
    info = {"release": release, "python": _PYTHON, "torch": version("torch"), "installed": wanted}
    (folder / _READY).write_text(json.dumps(info, indent=1))
    size = (
        sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink()) >> 20
    )
    say(f"ready: {size} MB, {time.monotonic() - began:.0f} s")
    return _python(folder)


def requirements(site: Path) -> list[str]:
    """Return what is installed on top: of the requirements that the release's wheel states those that are
    plain."""
    stated = PathDistribution(next(site.glob("sglang-*.dist-info"))).requires or []
    wanted = {
        _name(line): line for line in stated if _name(line) in _PLAIN and "extra ==" not in line
    }
    return [*sorted(wanted.values()), *(line for line in _BESIDES if _name(line) not in wanted)]


def _name(requirement: str) -> str:
    """Return the package's name, as the index compares it."""
    return re.sub(
        r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
    ).lower()


def packages() -> str:
    """Return the folder of the packages that kvspec runs with."""
    return sysconfig.get_paths()["purelib"]


def packages_line() -> str:
    """Return a line of a .pth file that adds them, of the kvspec that starts the Python, or else of this
    one."""
    return f"import os, site; site.addsitedir(os.environ.get({SITE!r}, {packages()!r}))\n"


def _python(folder: Path) -> Path:
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def _site(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def _venv(folder: Path) -> None:
    _run([sys.executable, "-P", "-m", "venv", str(folder)], "no virtual environment can be made")
    # After its own packages come kvspec's, with whatever their .pth files add.
    (_site(folder) / "zz_kvspec.pth").write_text(packages_line())


def _pip(folder: Path, packages: Sequence[str]) -> None:
    held = folder / "constraints.txt"
    held.write_text("".join(f"{name}=={version(name)}\n" for name in _SHARED))
    command = [
        str(_python(folder)), "-P", "-m", "pip", "install", "--disable-pip-version-check", "--no-input",
        "--quiet", "--only-binary=:all:", "--constraint", str(held), *packages,
    ]  # fmt: skip
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnusableImplementation(f"pip did not end in {_PIP_TIMEOUT_S} s") from None
    if process.returncode:
        raise UnusableImplementation(f"{packages[-1]}: {pip_trouble(process.stderr + process.stdout)}")


def _try(folder: Path) -> None:
    """Import the release's scheduler, which must work."""
    home = Path(__file__).resolve().parents[3]
    code = (
        "from impl.sglang.server import boot; boot.install(); import sglang.srt.managers.scheduler"
    )
    environment = child.environment([home], PYTHONWARNINGS="ignore", **{SITE: packages()})
    _run([str(_python(folder)), "-c", code], "its scheduler does not import", environment)


def _run(command: list[str], trouble: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        words = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise UnusableImplementation(
            f"{trouble}: {words[-1][:300] if words else 'no reason was given'}"
        )
