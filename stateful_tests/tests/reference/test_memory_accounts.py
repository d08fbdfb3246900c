"""The memory checks: a wrong report is seen, a false alarm explained, and none of them is blind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from impl.bugs import torch_with_bug
from impl.torch_kv import TorchKV
from reference.clauses.memory_checks import TERMS, expected_report, miscount_lines
from reference.clauses.step import Step
from reference.commands import (
    Admit, CheckBusy, CheckIdle, Chunk, Command, Done, Entry, Extend, Finish, Mode, Open, Reason, Refused,
    Report, Submit,
)  # fmt: skip
from reference.geometry import PRESETS
from stateful_tests.lockstep.lockstep import Lockstep
from stateful_tests.lockstep.replays import replay
from stateful_tests.tests.reference.spoilt_facts import (
    PLAIN,
    TREE,
    assert_clause,
    change_facts,
    step_of,
    text,
)
from stateful_tests.tests.support.commands import script
from stateful_tests.traces.trace_files import load

FIXTURES = Path(__file__).parents[3] / "fixtures" / "regressions"
PAGE4 = PRESETS["page4"]
TURN = script("open s1; submit r1 in s1 +10; admit r1; extend r1 +10")


# -- the clauses ----------------------------------------------------------------------------------


class AlteredReport(TorchKV):
    """Reports what `tell` makes of its report."""

    def __init__(self, tell):
        super().__init__()
        self.tell = tell

    def report(self, *, log=False):
        return self.tell(super().report(log=log))


def account(pool: str, **terms: int) -> Callable[[Report], Report]:
    def tell(report: Report) -> Report:
        changed = (replace(a, **terms) if a.pool == pool else a for a in report.accounts)
        return replace(report, accounts=tuple(changed))

    return tell


def violated_clauses(system: TorchKV, *commands: Command) -> tuple[str, ...]:
    lockstep = Lockstep(system, PAGE4, Mode.FREE)
    for command in commands:
        lockstep.do(command)
    return () if lockstep.violation is None else lockstep.violation.clauses


@pytest.mark.parametrize("check", [CheckBusy(1), CheckBusy(2), CheckIdle()], ids=repr)
@pytest.mark.parametrize(
    ("tell", "clauses"),
    [
        (lambda report: replace(report, alarm="leak"), ("CHK-1",)),
        (account("rows", available=0), ("CHK-1", "CHK-2")),
        (account("swa", available=0), ("CHK-1", "CHK-2")),
        (account("rows", available=2, evictable=1), ("CHK-2",)),
        (account("swa", available=20, protected=4), ("CHK-2",)),
        (lambda report: replace(report, accounts=report.accounts[:2]), ("CHK-2",)),
        (
            lambda report: replace(report, accounts=(*report.accounts, report.accounts[0])),
            ("CHK-2",),
        ),
        (
            lambda report: replace(report, entries=(Entry("full", "uncached", "r9", 12),)),
            ("CHK-2",),
        ),
        (lambda _: None, ("CHK-2",)),
        (lambda _: Report(({"pool": "full"},)), ("BROKEN",)),
        (lambda report: replace(report, accounts=report.accounts[::-1]), ()),
    ],
)
def test_a_wrong_report_is_seen(tell, clauses, check):
    end = (Finish("r1", 1),) if isinstance(check, CheckIdle) else ()
    assert violated_clauses(AlteredReport(tell), *TURN, *end, check) == clauses


@pytest.mark.parametrize(
    ("sizes", "text", "differ"),
    [
        (PLAIN, "submit r1 (no session) +5; admit r1; extend r1 +5", ()),
        (PLAIN, "submit r1 (no session) +9; admit r1; extend r1 +9; evict_swa r1 at length 9",
         ("available", "uncached")),
        (PLAIN, "open s1; submit r1 in s1 +9; admit r1; extend r1 +9; evict_swa r1 at length 9;"
         " finish r1 keep 1", ("available", "session_held")),
        (TREE, "insert h1 a8 (goes on); insert h2 b4; insert h3 c2", ("evictable", "protected")),
        (TREE, "insert h1 a8 (goes on); insert h2 b4; evict full 0 swa 2", ("available", "protected")),
        (TREE, "submit r1 (no session) a8 +1; admit r1; extend r1 +9", ()),
    ],
)  # fmt: skip
def test_the_rule_counts_what_the_clause_counts_from_facts(sizes, text, differ):
    step = step_of(sizes, f"{text}; check_busy level 2")
    full, swa, _ = step.expected.report.accounts
    assert expected_report(step) == step.expected.report
    assert {term for term in TERMS if getattr(full, term) != getattr(swa, term)} >= {*differ}


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_a_level_2_check_without_entries_violates_chk2_if_holders_are_listed(level, lists):
    class Silent(AlteredReport):
        @property
        def capabilities(self):
            return replace(super().capabilities, lists_holders=lists)

    silent = Silent(lambda report: replace(report, entries=()))
    assert violated_clauses(silent, *TURN, CheckBusy(level)) == (("CHK-2",) if level == 2 and lists else ())


@pytest.mark.parametrize(("alarm", "clauses"), [("", ("CHK-2",)), ("leak", ("CHK-1", "CHK-2"))])
def test_a_report_at_level_0_violates_chk2(alarm, clauses):
    class Eager(TorchKV):
        def check_busy(self, command):
            return replace(self.report(), alarm=alarm)

    assert violated_clauses(Eager(), *TURN, CheckBusy(0)) == clauses


def test_an_idle_check_that_changes_something_is_seen():
    class Tidy(TorchKV):
        def check_idle(self, command):
            report = super().check_idle(command)
            self.sessions["s1"].history.pop()
            return report

    assert violated_clauses(Tidy(), *TURN, Finish("r1", 1), CheckIdle())[0] == "CHK-3"


@pytest.mark.parametrize(("uncounted", "clauses"), [({"rows"}, ()), (set(), ("CHK-2",))])
def test_an_uncounted_pool_may_lack_an_account(uncounted, clauses):
    class NoRows(AlteredReport):
        @property
        def capabilities(self):
            return replace(super().capabilities, uncounted=frozenset(uncounted))

    def without_rows(report):
        return Report(report.accounts[:2], tuple(e for e in report.entries if e.pool != "rows"))

    assert violated_clauses(NoRows(without_rows), *TURN, CheckBusy(2)) == clauses


@pytest.mark.parametrize(
    ("fixture", "bug", "since", "expected"),
    [
        (
            "a_lent_slot_counts_once", "pr22213-double-count", 6,
            "full pages 1, 2, 3 of s1 at [0, 12): counted 2 times, as session_held of s1 (12 tokens) and as"
            " uncached of r1 (12 tokens)",
        ),
        (
            "a_rejected_admission_leaves_the_slot_held", "pr22753-stale-flag", 5,
            "the row of s1: counted nowhere, to be counted as session_held of s1",
        ),
        (
            "a_check_counts_whole_pages", "check-forgets-page-rounding", 2,
            "full pages 1, 2, 3 of r1 at [0, 12): counted with 10 as uncached of r1, it is 12",
        ),
    ],
)  # fmt: skip
def test_a_false_alarm_is_explained(fixture, bug, since, expected):
    """Which pages, as what and as what, since which command."""
    violation = replay(torch_with_bug(bug), load(FIXTURES / f"{fixture}.json")).violation
    assert violation.since == since
    assert expected in violation.observed.split("\n")


SEEN = step_of(
    PLAIN, Open("s1"), Submit("r1", "s1", 5), Admit("r1"), Extend((Chunk("r1", 5),)), Finish("r1", 1),
    Submit("r2", None, 3), Admit("r2"), Extend((Chunk("r2", 3),)), CheckBusy(2))  # fmt: skip
S1 = Entry("full", "session_held", "s1", 6)
R2 = Entry("full", "uncached", "r2", 4)
AS = {"s1": "as session_held of s1", "r2": "as uncached of r2"}
COUNTED_NOWHERE = {name: f"counted nowhere, to be counted {AS[name]}" for name in AS}
TO_BE_COUNTED_ONCE = {name: f"to be counted once, {AS[name]}" for name in AS}


@pytest.mark.parametrize(
    ("entries", "sums", "expected"),
    [
        ((S1, R2), (6, 4), {}),
        ((S1, R2, replace(R2, amount=0)), (6, 4), {}),
        ((S1,), (6, 0), {"r2": COUNTED_NOWHERE["r2"]}),
        ((S1, replace(R2, amount=3)), (6, 3), {"r2": "counted with 3 as uncached of r2, it is 4"}),
        (
            (S1, R2, replace(R2, term="session_held", amount=1)),
            (7, 4),
            {
                "r2": "counted 2 times, as uncached of r2 (4 tokens) and as session_held of r2 (1 token)"
            },
        ),
        ((S1, R2, replace(R2, holder="r9")), (6, 8), TO_BE_COUNTED_ONCE),  # r9 holds nothing
        ((), (5, 5), TO_BE_COUNTED_ONCE),
        ((), (6, 0), TO_BE_COUNTED_ONCE),
        ((), (0, 0), COUNTED_NOWHERE),
    ],
)
def test_a_wrongly_counted_owner_is_reported(entries, sums, expected):
    account = replace(SEEN.outcome.report.accounts[0], session_held=sums[0], uncached=sums[1])
    lines = [line.split(": ", 1) for line in miscount_lines(SEEN, Report((account,), entries), account)]
    assert {place.split(" of ")[1][:2]: line for place, line in lines} == expected
    assert all(where.endswith(("of s1 at [0, 6)", "of r2 at [0, 4)")) for where, _ in lines)


def test_a_request_whose_kv_is_all_the_trees_need_not_be_counted():
    given = (
        Submit("r1", None, 0, 0, text("a4")),
        *script("admit r1; extend r1 +4; check_busy level 2"),
    )
    step = step_of(TREE, *given)  # all of it is the tree's
    report = replace(step.outcome.report, entries=())
    assert miscount_lines(step, report, report.accounts[0]) == []


def test_chk1_says_how_many_tokens_are_missing_or_too_many():
    for pages, expected in ((0, "14 tokens too few"), (15, "1 token too many")):
        step = replace(
            SEEN, outcome=Done(report=account("full", available=pages)(SEEN.outcome.report))
        )
        assert_clause("CHK-1", step, f"of 24: {expected}")
        assert_clause("CHK-2", step, f"available {pages} ")


def with_report(report: Report, **changes: object) -> Step:
    return replace(SEEN, outcome=Done(report=report), **changes)


def test_which_terms_are_wrong_is_reported():
    report = account("full", available=0)(SEEN.outcome.report)
    assert_clause("CHK-2", with_report(report), "available is 0, not 14", "counter full available 14")
    fewer = with_report(replace(report, accounts=SEEN.outcome.report.accounts[1:]))
    assert_clause("CHK-2", fewer, "full: not counted; .")
    assert_clause("CHK-1", with_report(report), "has its one owner: available is 0, not 14")
    level_0 = with_report(report, expected=Done(), command=CheckBusy(0))
    assert_clause("CHK-1", level_0, "though every page has its one owner.")


def test_an_alarm_is_reported_verbatim():
    assert_clause("CHK-1", with_report(replace(SEEN.outcome.report, alarm="leak")), "a false alarm\nleak")


@pytest.mark.parametrize("clause", ["CHK-1", "CHK-2", "CHK-3"])
def test_memory_clauses_hold_for_refused_and_other_commands(clause):
    step = change_facts(SEEN, sessions={})
    refused = Refused(Reason.NOT_IDLE)
    done = Done()
    assert_clause(clause, replace(step, outcome=refused), None)
    assert_clause(clause, replace(step, expected=refused), None)
    assert_clause(clause, replace(step, command=Open("s9"), outcome=done, expected=done), None)
