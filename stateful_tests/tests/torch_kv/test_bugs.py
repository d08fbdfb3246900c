"""The register of named bugs, and that a wrong state is shown rather than an exception raised."""

from __future__ import annotations

import pytest

from impl.bugs import BUGS, broken
from reference.clauses import CLAUSES
from reference.commands import Mode
from reference.geometry import PRESETS
from stateful_tests.generate.choice_source import RandomChoices
from stateful_tests.generate.next_command import propose
from stateful_tests.generate.run_profile import draw_profile
from stateful_tests.lockstep.lockstep import Lockstep


def test_every_clause_has_a_bug() -> None:
    assert {bug.clause for bug in BUGS.values()} - {"BROKEN"} == set(CLAUSES)


@pytest.mark.parametrize("bug", BUGS)
def test_a_record_is_complete(bug: str) -> None:
    record = BUGS[bug]
    assert record.id == bug
    assert record.modes
    assert broken(bug).name == f"torch+{bug}"
    assert record.story.endswith(".")
    assert "Visible" in record.story
    assert "Fix: " in record.story


@pytest.mark.parametrize("bug", [b for b, record in BUGS.items() if record.clause != "BROKEN"])
def test_a_bug_shows_as_a_violation_not_as_an_exception(bug: str) -> None:
    system = broken(bug)
    for preset, size in PRESETS.items():
        source = RandomChoices(f"{bug} {preset}")
        profile = draw_profile(source, system.capabilities)
        lockstep = Lockstep(system, size, Mode.FREE)
        for _ in range(30):
            lockstep.do(propose(lockstep.state, source, profile))
            if lockstep.violation is not None:
                assert lockstep.violation.clause != "BROKEN", lockstep.violation
                break
