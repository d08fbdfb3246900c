"""The source of the Python files of a vLLM release: a cache folder, the package index, or a checkout."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path, PurePosixPath

from impl.loading import fetch
from impl.adapter import UnusableImplementation
from impl.vllm.modules import RUNNER, RUNNER_V2, STATES, STATES_V2
from impl.vllm.api import RELEASES, drives
from impl.vllm.copied import FILES as COPIED
from impl.vllm.copied import SPECULATOR
from impl.vllm.images import FILES as IMAGES
from impl.vllm.images_v2 import FILES as IMAGES_V2
from impl.vllm.offload import CONNECTOR
from impl.vllm.offload import FILES as OFFLOAD
from impl.vllm.pair import CONNECTOR as NIXL
from impl.vllm.pair import FILES as PAIR
from impl.vllm.pair import MULTI_CONNECTOR
from impl.vllm.simple_offload import CONNECTOR as SIMPLE
from impl.loading.wheel_parts import unpack_parts

_NEEDED = (
    "vllm/v1/core/", "vllm/v1/request.py", "vllm/v1/kv_cache_", "vllm/v1/hisparse/",
    "vllm/v1/engine/__init__.py", "vllm/v1/outputs.py", "vllm/v1/metrics/", "vllm/v1/kv_hints.py",
    "vllm/v1/spec_decode/", "vllm/utils/", RUNNER, *RUNNER_V2, *OFFLOAD, *PAIR, *STATES, *STATES_V2, *COPIED,
    *IMAGES, *IMAGES_V2, SPECULATOR,
)  # fmt: skip

# A part of the API -> a file that stands for all files of the part.
OF_WAYS = {
    "v2": RUNNER_V2[0], "offload": CONNECTOR, "pair": NIXL, "images": IMAGES[0], "images+v2": IMAGES_V2[0],
    "state": STATES[0], "drafter+v2": SPECULATOR, "simple": SIMPLE, "both connectors": MULTI_CONNECTOR,
}  # fmt: skip
# A file -> the first release that has it, where the way of the file is driven only later.
_HAS = {NIXL: "0.20.0", IMAGES_V2[1]: "0.15.0", SIMPLE: "0.19.0", MULTI_CONNECTOR: "0.11.0"}


def release_root(
    version: str,
    v2: bool = False,
    offloads: bool = False,
    pair: bool = False,
    encodes: bool = False,
) -> Path:
    """Return the folder that holds `vllm/` of this release (see `impl.loading.fetch`).

    v2: with model runner V2. offloads, pair: with the connector. encodes: with the files of an encoder. A
    folder that was fetched before these files were needed is completed, also by the worker's code that
    copies recurrent states.
    """
    unpacked = partial(_unpack_wheel, f"vllm=={version}")
    root = fetch.release_root("vllm", version, unpacked)
    versions = {
        "v2": v2, "offload": offloads, "pair": pair, "images": encodes,
        "images+v2": encodes and v2, "state": drives(version, "state"),
        "drafter+v2": v2 and drives(version, "drafter+v2"),
        "simple": offloads and drives(version, "simple"),
        "both connectors": pair and drives(version, "both connectors"),
    }  # fmt: skip
    if not all((root / file).is_file() for part, file in OF_WAYS.items() if versions[part]):
        fetch.complete(root, unpacked)
    return root


def complete(version: str, root: Path) -> None:
    """Add the files of copied rules and of other ways to the folder of a release that was fetched before
    they were needed. The sketch of a release needs them, because a checkout has them."""
    of_ways = [file for part, file in OF_WAYS.items() if drives(version, part)]
    position = RELEASES.index(version)
    of_ways += [file for file, first in _HAS.items() if position >= RELEASES.index(first)]
    if not all((root / file).is_file() for file in (*COPIED, *of_ways)):
        fetch.complete(root, partial(_unpack_wheel, f"vllm=={version}"))


def checkout_root(path: str | os.PathLike[str]) -> Path:
    """Return the folder that holds `vllm/` in a checkout. Raises UnusableImplementation if the folder is no
    checkout of vLLM."""
    folder = Path(path).expanduser()
    for needed in ("vllm/v1/core/sched/scheduler.py", RUNNER):
        if not (folder / needed).is_file():
            reason = f"has no {needed}" if folder.is_dir() else "is no folder"
            raise UnusableImplementation(f"vLLM checkout: {folder} {reason}")
    return folder.resolve()


def _unpack_wheel(release: str, _: Path, target: Path) -> None:
    unpack_parts(release, target, _needed_files)
    if not (target / RUNNER).is_file():
        raise UnusableImplementation(f"{release}: there is no {RUNNER} in its wheel")


def _needed_files(path: PurePosixPath) -> bool:
    return path.suffix == ".py" and path.as_posix().startswith(_NEEDED)
