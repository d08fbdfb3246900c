"""Releases with another radix tree than their usual one: `+unified`, and what it takes to have `+rust`.

Skips, with the reason, where a release can be neither found nor fetched. The tree of +rust is driven in
test_sglang_tree.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from impl.adapter import UnusableImplementation
from impl.sglang import SGLangSystem
from impl.sglang.parts import fetch
from impl.sglang.releases.variants import VARIANTS
from reference.commands import Mode
from reference.geometry import preset
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.results import Trace
from stateful_tests.lockstep.systems import resolve
from stateful_tests.tests.sglang.test_overlap import BEGIN, ENDS, NOT_YET
from stateful_tests.tests.sglang.test_releases import PATHS, RELEASES, UNIFIED, first, last
from stateful_tests.traces.files import load

# The first, and the first that splits a fresh leaf.
SYSTEMS = "0.5.11+unified", "0.5.13+unified+overlap"
# Faults of the older trees that this one does not have, and since when.
NEVER = {
    "eviction_reports_fewer_tokens_than_it_freed": "0.5.11",
    "a_lock_pins_a_leaf_of_any_length": "0.5.13",
}


# -- without a release ----------------------------------------------------------------------------


@pytest.mark.parametrize("tree", VARIANTS)
@pytest.mark.parametrize("version", ["0.5.10", "0.5.11", "0.5.23"])
def test_a_release_without_the_choice_says_where_it_is(version: str, tree: str) -> None:
    if version not in VARIANTS[tree]:
        with pytest.raises(UnusableImplementation, match=f"it is in {', '.join(VARIANTS[tree])}"):
            resolve(f"sglang=={version}+{tree}")


@pytest.mark.parametrize("ways", ["+unifed", "+overlap+unified", "+unified+rust", "+"])
def test_what_may_follow_a_release_is_named(ways: str) -> None:
    with pytest.raises(UnusableImplementation, match=r"\+unified or \+rust, then \+overlap"):
        resolve(f"sglang==0.5.11{ways}")


def test_of_what_is_compiled_the_core_is_unpacked(tmp_path: Path) -> None:
    core = "sglang/srt/mem_cache/rust_tree_core/mem_cache.so"
    with zipfile.ZipFile(tmp_path / "s.whl", "w") as archive:
        for name in (core, "sglang/srt/rust_extensions/_server.so", "sglang/srt/environ.py", "sglang/a.so"):
            archive.writestr(name, "")
    fetch.unpack(tmp_path / "s.whl", tmp_path / "x")
    found = {str(p.relative_to(tmp_path / "x")) for p in (tmp_path / "x").rglob("*") if p.is_file()}
    assert found == {core, "sglang/srt/environ.py"}


def test_a_folder_without_the_tree_says_so(tmp_path: Path) -> None:
    """As a checkout is, or a cache from before what is compiled was unpacked."""
    with pytest.raises(UnusableImplementation, match=f"{tmp_path} has no compiled core"):
        VARIANTS["rust"]["0.5.23"].require(tmp_path)
    with pytest.raises(UnusableImplementation, match=r"has no sglang\.srt\.mem_cache\.unified"):
        VARIANTS["unified"]["0.5.11"].require(tmp_path)


# -- the real releases ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SYSTEMS)
def real(request: pytest.FixtureRequest, release: Callable[[str], SGLangSystem]) -> SGLangSystem:
    return release(request.param)


def found(system: SGLangSystem, trace: Trace) -> tuple[str, int] | None:
    """The clause that a trace violates there, and the step."""
    violation = replay(system, trace).violation
    return None if violation is None else (violation.clause, violation.step)


def test_it_is_asked_for_by_name(real: SGLangSystem) -> None:
    assert real.name.removeprefix("sglang==") in SYSTEMS


def test_the_faults_of_a_release_are_there(real: SGLangSystem) -> None:
    """But for those of the older trees; and the fault of this one."""
    at, overlap = RELEASES.index(real.release), real.name.endswith("+overlap")
    seen, known = {}, {}
    for path in PATHS:
        if first(path) > at or (overlap and path.stem in NOT_YET):
            continue
        trace = load(path)
        never = path.stem in NEVER and at >= RELEASES.index(NEVER[path.stem])
        mended = at > last(path) or never
        seen[path.stem] = found(real, trace)
        known[path.stem] = None if mended else (trace.clause, len(trace.commands) - 1)
    for path in UNIFIED:
        trace = load(path)
        mended = at < RELEASES.index(path.parent.name.removeprefix("sglang-").removesuffix("+unified"))
        seen[path.stem] = found(real, trace)
        known[path.stem] = None if mended else (trace.clause, len(trace.commands) - 1)
    assert seen == known


def test_turns_in_a_tree_that_has_the_sessions_conform(real: SGLangSystem) -> None:
    sizes = replace(preset("page4"), width=40, tree=True)
    for end, rest in ENDS.items():
        assert found(real, Trace(sizes, Mode.FAITHFUL, (*BEGIN, *rest))) is None, end
