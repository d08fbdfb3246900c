"""Which releases can be driven, and how the kind of a checkout is detected.

A new release is a new class in _RELEASES; nothing else asks for a version.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import NamedTuple

from impl import probe
from impl.adapter import UnusableImplementation
from impl.sglang.releases.api import files
from impl.sglang.releases import v0_5_10_to_14 as v10, v0_5_15_to_21 as v15, v0_5_22_to_23 as v22
from impl.sglang.releases.v0_5_10_to_14 import Release0510

# Releases from old to new. Those of one group are so alike in their names that one file of Python can call
# any of them (ci/export/unit_test.py). A version alone: of its release every file that is loaded here is as
# in the one before it, or differs where nothing is driven.
_RELEASES: tuple[tuple[type[Release0510] | str, ...], ...] = (
    (
        v10.Release0510,
        "0.5.10.post1",
        v10.Release0511,
        v10.Release0512,
        "0.5.12.post1",
        v10.Release0513,
        "0.5.13.post1",
        v10.Release0514,
    ),
    (v15.Release0515, "0.5.15.post1"),
    (v15.Release0516,),
    (v15.Release0517, v15.Release0518),
    (v15.Release0519,),
    (v15.Release0520,),
    (v15.Release0521,),
    (v22.Release0522, v22.Release0523),
)
ALIKE = tuple(
    tuple(each if isinstance(each, str) else each.version for each in alike) for alike in _RELEASES
)
TABLE: dict[str, type[Release0510]] = {}
_last: type[Release0510] = Release0510
for _each in itertools.chain(*_RELEASES):
    if isinstance(_each, str):
        _each = type(_last.__name__, (_last,), {"version": _each, "__doc__": _last.__doc__})
    _last = TABLE[_each.version] = _each
SUPPORTED = ", ".join(TABLE)
_STRANGE = 20  # a checkout that lacks more than this of every kind is of none
# What is driven can be driven without these.
_CANNOT = {
    "watched": "the watcher cannot follow it",
    "exported": "exported tests may not run on it",
    "served": "serve-check cannot run it",
}


def supported(version: str) -> type[Release0510]:
    """The class of a release; raises UnusableImplementation that names those there are."""
    try:
        return TABLE[version]
    except KeyError:
        raise UnusableImplementation(
            f"sglang=={version[:40]} is not supported; these are: {SUPPORTED}"
        ) from None


class Kind(NamedTuple):
    """What a checkout is taken for, and what its user should know about that, in a line or not at all."""

    release: type[Release0510]
    remark: str = ""


def detect(root: Path) -> Kind:
    """The release whose kind the files under `root` (which holds `sglang/`) are of, by what they have.

    What `_version.py` states decides between those that they fit alike, as a checkout between two releases
    has often none of its own. The remark names what they lack of the API that is not driven. Raises
    UnusableImplementation that names all they lack, if that is.
    """
    checkout, order, stated = files(root, TABLE), list(TABLE), stated_version(root)
    missing = {version: checkout.missing(version, order) for version in order}
    fewest = min(map(len, missing.values()))
    alike = [version for version in order if len(missing[version]) == fewest]
    taken = stated if stated in alike else alike[-1]
    why = f"taken for {taken}"
    if stated != taken:
        why += f" by its files, which state {stated or 'no version'}"
    lacks = sorted(missing[taken], key=lambda each: each.by != "driven")
    if fewest > _STRANGE:
        first = f"{probe.named(lacks[:1])} (and {fewest - 1} more)"
        supports = f"supported are {order[0]} to {order[-1]}"
        raise UnusableImplementation(f"sglang checkout {root}: {first}; {why}; {supports}")
    if lacks and lacks[0].by == "driven":
        raise UnusableImplementation(
            f"sglang checkout {root}: {probe.named(lacks)}; {why}. Nothing was driven: CONTRIBUTING.md,"
            " 'A new release of SGLang', says how to follow it"
        )
    if stated is None and len(alike) > 1:
        why += f" (they fit {', '.join(alike)} alike)"
    for by, cannot in _CANNOT.items():
        if without := [each for each in lacks if each.by == by]:
            why += f"; {cannot} ({probe.named(without)})"
    return Kind(TABLE[taken], f"{root}: {why}" if lacks or stated != taken else "")


def stated_version(root: Path) -> str | None:
    """The version that the files state, if they do; nothing of them is run."""
    for name in ("_version.py", "version.py"):
        file = root / "sglang" / name
        if not file.is_file():
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = {t.id for t in node.targets if isinstance(t, ast.Name)}
                if names & {"version", "__version__"} and isinstance(node.value.value, str):
                    return node.value.value
    return None
