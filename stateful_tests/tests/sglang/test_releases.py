"""What was found in real releases, replayed on them: the fixtures under fixtures/releases.

A folder is the first release that can be driven and has the fault. Skips, with the reason, where a release
can be neither found nor fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ci.explain import explanation_of
from impl.adapter import System
from impl.sglang.releases.catalogue import TABLE
from stateful_tests.lockstep.lockstep import replay
from stateful_tests.lockstep.systems import resolve
from stateful_tests.traces.files import load

FOLDER = Path(__file__).parents[3] / "fixtures" / "releases"
PATHS = sorted(FOLDER.glob("*[0-9]/*.json"))
UNIFIED = sorted(FOLDER.glob("*+unified/*.json"))  # of a tree that is a choice: see test_sglang_variants
RELEASES = list(TABLE)
# The last release that has it; one that is not here is in the release of its folder alone.
LAST = {
    "a_lock_pins_a_leaf_of_any_length": "0.5.14",
    "a_recovered_tombstone_frees_slots_that_are_read": "0.5.14",
    "eviction_reports_fewer_tokens_than_it_freed": "0.5.14",
    "a_close_after_an_abort_in_the_queue_never_happens": "0.5.20",
    "an_abort_in_the_queue_leaves_the_session_busy": "0.5.20",
    "a_prompt_that_is_swept_too_far_has_two_owners": "0.5.20",
    "a_retract_counts_as_a_finish": "0.5.23",
    "a_turn_retracted_twice_loses_its_session": "0.5.23",
    "aborting_a_retracted_turn_keeps_its_kv_and_its_text": "0.5.23",
    "aborting_a_retried_turn_keeps_its_text": "0.5.23",
    "a_slot_keeps_a_token_that_nobody_computed": "0.5.23",
}
# Mended, but another fault breaks the same clause there: a_slot_keeps_a_token_that_nobody_computed.
ANOTHER = {
    ("retract_keeps_what_was_allocated_ahead", version) for version in RELEASES[RELEASES.index("0.5.16") :]
}


def first(path: Path) -> int:
    return RELEASES.index(path.parent.name.removeprefix("sglang-"))


def last(path: Path) -> int:
    return RELEASES.index(LAST.get(path.stem, RELEASES[first(path)]))


def cases(after: bool) -> list[object]:
    """Fixtures with the releases that have the fault, or with those after that."""
    return [
        pytest.param(path, version, id=f"{version}/{path.stem}")
        for at, version in enumerate(RELEASES)
        for path in PATHS
        if (first(path) <= at <= last(path)) is not after
        and first(path) <= at
        and (path.stem, version) not in ANOTHER
    ]


@pytest.mark.parametrize("path", [*PATHS, *UNIFIED], ids=lambda path: path.stem)
def test_torch_conforms(path: Path) -> None:
    assert replay(resolve("torch"), load(path)).violation is None


@pytest.mark.parametrize(("path", "version"), cases(after=False))
def test_a_release_still_violates_the_clause(
    path: Path, version: str, release: Callable[[str], System]
) -> None:
    trace = load(path)
    run = replay(release(version), trace)
    assert run.violation is not None
    assert (run.violation.clause, run.violation.step) == (trace.clause, len(trace.commands) - 1)
    argument = explanation_of(run)
    assert argument is not None
    assert "the rules want:" not in argument.text, "told from the facts of the run"


@pytest.mark.parametrize(("path", "version"), cases(after=True))
def test_a_later_release_has_mended_it(path: Path, version: str, release: Callable[[str], System]) -> None:
    assert replay(release(version), load(path)).violation is None


def test_of_a_page_that_row_and_tree_own_the_cause_is_told(release: Callable[[str], System]) -> None:
    trace = load(FOLDER / "sglang-0.5.18" / "a_prompt_that_is_swept_too_far_has_two_owners.json")
    argument = explanation_of(replay(release("0.5.18"), trace))
    assert argument is not None
    assert argument.text == (
        "full page 1 has 2 owners: r1 has it at [0, 3) since command 2 (extend r1 +8) and the tree has it at"
        " [0, 3) of #1:3 since command 2; r1 owns its row from R (cache_protected_len) on, which is 0."
    )


# -- faults that a check passes over -----------------------------------------------------------------


KNOWN = [(version, clause) for version, made in TABLE.items() for clause in made.known]


@pytest.mark.parametrize(("version", "clause"), KNOWN)
def test_what_is_passed_over_is_shown_by_a_fixture_of_this_release(version: str, clause: str) -> None:
    [path] = [p for p in PATHS if str(p.relative_to(FOLDER)) in TABLE[version].known[clause]]
    assert load(path).clause == clause
    assert first(path) <= RELEASES.index(version) <= last(path)


@pytest.mark.parametrize(("version", "clause"), KNOWN[:1])
def test_only_a_trace_that_names_the_clause_is_asked_for_it(
    version: str, clause: str, release: Callable[[str], System]
) -> None:
    [path] = [p for p in PATHS if str(p.relative_to(FOLDER)) in TABLE[version].known[clause]]
    assert replay(release(version), replace(load(path), clause=None)).violation is None


class Known:
    """A system that is known to violate a clause, and splits nodes as it likes."""

    def __init__(self, system: System, clause: str) -> None:
        self._system = system
        self.capabilities = replace(
            system.capabilities, tree_policy_is_free=True, known={clause: "#1, some_trace.json"}
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._system, name)


def test_a_run_goes_on_past_a_known_fault() -> None:
    trace = load(FOLDER.parent / "regressions" / "a_fresh_leaf_pins_one_window.json")
    faulty = cast(System, Known(resolve(f"torch+{trace.bug}"), "TREE-7"))
    assert replay(faulty, replace(trace, clause=None)).violation is None
    violation = replay(faulty, trace).violation
    assert violation is not None
    assert violation.clause == "TREE-7"
