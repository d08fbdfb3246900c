"""The releases that can be driven, and the release that a checkout is driven as.

A new release is a new class in _RELEASES; nothing else asks for a version.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from impl.loading import probe, used_names
from impl.adapter import UnusableImplementation
from impl.loading.nearest import Nearest, differing, distances, nearest_of
from impl.sglang.releases.api_lines import files
from impl.sglang.releases.facts import compose_release, facts_of
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
    tuple(one if isinstance(one, str) else one.version for one in alike) for alike in _RELEASES
)
TABLE: dict[str, type[Release0510]] = {}
_last: type[Release0510] = Release0510
for _each in itertools.chain(*_RELEASES):
    if isinstance(_each, str):
        _each = type(_last.__name__, (_last,), {"version": _each, "__doc__": _last.__doc__})
    _last = TABLE[_each.version] = _each
SUPPORTED = ", ".join(TABLE)
_STRANGE = 30  # a checkout that lacks more than this is named by the first
# What is driven can be driven without these.
_CANNOT = {
    "tiered": "+hicache cannot be driven",
    "watched": "the watcher cannot follow it",
    "exported": "exported tests may not run on it",
    "served": "serve-check cannot run it",
}


def supported_release(spec: str) -> type[Release0510]:
    """Return the class of a release by its version, or of a tree by `spec_of` its class; raises
    UnusableImplementation that names the releases there are."""
    version, *others = spec.split(",")
    if version not in TABLE:
        raise UnusableImplementation(
            f"sglang=={version[:40]} is not supported; these are: {SUPPORTED}"
        )
    pairs = [other.partition("=") for other in others]
    return compose_release(TABLE, version, {fact: as_in for fact, _, as_in in pairs})


def spec_of(release: type[Release0510]) -> str:
    """Return the argument of `supported_release` for this class, such as "0.5.14,chunks=0.5.12"."""
    return ",".join(
        [release.version, *(f"{fact}={as_in}" for fact, as_in in release.facts.items())]
    )


class Detected(NamedTuple):
    """The release that a checkout is taken for, and a line for its user about that, if there is need for
    one."""

    release: type[Release0510]
    remark: str = ""

    def release_text(self, root: Path) -> str:
        """Return the first part of the remark, such as "taken for 0.5.14 (435 lines differ)"; "" without a
        remark."""
        return self.remark.removeprefix(f"{root}: ").partition(";")[0]


def detect(root: Path) -> Detected:
    """Return how the files under `root` (which holds `sglang/`) are driven: as the nearest release, and in
    each fact of the API as the release that they have it of.

    What `_version.py` states decides between releases that are equally near. The remark says how near, which
    facts are of other releases, and what is missing of the API that is not driven. Raises
    UnusableImplementation that names all that is missing, if that is.
    """
    checkout = files(root, TABLE)
    order = list(TABLE)
    differing_lines = distances("sglang", root)
    near = nearest_of(differing_lines)
    stated = stated_version(root)
    taken = near.release
    if stated in TABLE and differing_lines[stated] == near.lines:
        taken = stated
    near = Nearest(taken, near.lines)
    others, missing = facts_of(checkout, order, near)
    missing += used_names.not_given("sglang", root, near, renamed=TABLE[taken].renamed)
    reason = _why_taken(taken, near.lines, stated, others)
    lacks = [missing for missing in checkout.missing(taken, order) if missing.by in _CANNOT]
    if missing:
        reason = _refusal([*missing, *lacks], reason, taken, root)
        raise UnusableImplementation(f"sglang checkout {root}: {reason}")
    release = compose_release(TABLE, taken, others)
    for by, cannot in _CANNOT.items():
        if without := [missing for missing in lacks if missing.by == by]:
            reason += f"; {cannot} ({probe.missing_text(without)})"
    exact = near.lines == 0 and stated in (None, taken) and not lacks and not others
    return Detected(release, "" if exact else f"{root}: {reason}")


def _why_taken(taken_for: str, lines: int, stated: str | None, others: Mapping[str, str]) -> str:
    """Return the reason in words, such as "taken for 0.5.14 (435 lines differ), with chunks, token ids as
    in 0.5.12"."""
    reason = f"taken for {taken_for} ({differing(lines)})"
    by_release: dict[str, list[str]] = {}
    for fact, as_in in others.items():
        by_release.setdefault(as_in, []).append(fact)
    if others:
        facts = "; ".join(
            f"{', '.join(facts)} as in {as_in}" for as_in, facts in by_release.items()
        )
        reason += f", with {facts}"
    if stated not in (None, taken_for) and not str(stated).startswith("0.0.0"):
        reason += f"; its files state {stated}"
    return reason


def _refusal(missing: list[probe.Missing], taken_for: str, taken: str, root: Path) -> str:
    """Say what is missing, and where to read on."""
    order = list(TABLE)
    missing_names = probe.missing_text(missing)
    if len(missing) > _STRANGE:
        missing_names = f"{probe.missing_text(missing[:1])} (and {len(missing) - 1} more)"
    age = ""
    if taken == order[0]:
        age = f"; it may be older than {taken}, the first release that is driven"
    elif taken == order[-1]:
        age = f"; it may be newer than {taken}, the last release that is driven"
    others = used_names.also_lost("sglang", root, taken, missing_names)
    follow = "CONTRIBUTING.md, 'A new release of SGLang', says how to follow it"
    return f"{missing_names}; {taken_for}{age}{others}. Nothing was driven: {follow}"


def stated_version(root: Path) -> str | None:
    """Return the version that the files state, if they do; nothing of them is run."""
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
