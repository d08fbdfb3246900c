"""Files that are read of an SGLang release, and their source: the package index, or a checkout."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path, PurePosixPath

from impl.adapter import UnusableImplementation
from impl.loading import fetch

# What a folder of an older kvspec may lack: for a server that only decodes or prefills, for
# states on a GPU.
DECODES = "sglang/srt/disaggregation/base/conn.py"
PREFILLS = "sglang/srt/disaggregation/prefill.py"
STATES_ON_GPU = "sglang/kernels/ops/mamba/mamba_state_scatter_triton.py"
# Of a wheel of tens of megabytes these are read: the bookkeeping and what tells the version.
_NEEDED = (
    "sglang/version.py",
    "sglang/_version.py",
    "sglang/srt/constants.py",
    "sglang/srt/disaggregation/base/",
    "sglang/srt/disaggregation/decode.py",
    "sglang/srt/disaggregation/decode_hicache_mixin.py",
    "sglang/srt/disaggregation/decode_schedule_batch_mixin.py",
    PREFILLS,
    "sglang/srt/environ.py",
    "sglang/srt/managers/",
    "sglang/srt/mem_cache/",
    "sglang/srt/rust_extensions/",
    "sglang/srt/session/",
    "sglang/srt/speculative/",
    "sglang/srt/utils/",
    STATES_ON_GPU,
    "sglang/kernels/ops/memory/",
)
_COMPILED = "sglang/srt/mem_cache/rust_tree_core/"


def release_root(version: str, newer: str = "") -> Path:
    """Return the folder that holds `sglang/` of this release (`impl.loading.fetch`).

    newer: one of its files, which is added to a folder from before it was fetched.
    """
    downloaded = partial(_download, f"sglang=={version}")
    root = fetch.release_root("sglang", version, downloaded)
    if not (root / newer).exists():
        fetch.complete(root, downloaded)
    return root


def checkout_root(path: str | os.PathLike[str]) -> Path:
    """Return the folder that holds `sglang/` in a checkout (PATH/python/sglang), or PATH itself.

    Raises UnusableImplementation when neither has an `sglang/srt`.
    """
    folder = Path(path).expanduser()
    for root in (folder / "python", folder):
        if (root / "sglang" / "srt").is_dir():
            return root.resolve()
    reason = "has neither python/sglang/srt nor sglang/srt" if folder.is_dir() else "is no folder"
    raise UnusableImplementation(f"sglang checkout: {folder} {reason}")


def unpack(wheel: Path, target: Path) -> None:
    """Unpack what is needed of `wheel` into the new folder `target`. Raises UnusableImplementation."""
    fetch.unpack(wheel.name, wheel, target, _is_needed)
    if not any(target.iterdir()):
        raise UnusableImplementation(f"{wheel.name}: there is no sglang/srt in it")


def _is_needed(path: PurePosixPath) -> bool:
    return path.as_posix().startswith({".py": _NEEDED, ".so": (_COMPILED,)}.get(path.suffix, ()))


def _download(release: str, work: Path, target: Path) -> None:
    """Have pip put the wheel into `work`; the ways to ask are tried in turn."""
    output = ""
    for i, options in enumerate(_ways_to_ask()):
        folder = work / f"wheel{i}"
        done = fetch.ask_pip(["download", *options, "--dest", str(folder)], release)
        if wheels := sorted(folder.glob("*.whl")):
            unpack(wheels[0], target)
            return
        output = done.stderr + done.stdout
        if fetch.unreachable(output):
            break
    raise UnusableImplementation(f"{release}: {fetch.pip_trouble(output)}")


def _ways_to_ask() -> list[list[str]]:
    """Return pip options for this host, then for hosts of the wheels, because the Python files are the
    same."""
    ways: list[list[str]] = [[]]
    for python in ("311", "312", "310"):
        options = ["--implementation", "cp", "--python-version", python]
        for glibc in ("2_34", "2_28", "2_17"):
            options += ["--platform", f"manylinux_{glibc}_x86_64"]
        ways.append(options)
    return ways
