"""Decisions of a system. The reference follows them as far as that is allowed, and compares the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from impl.adapter import Capabilities
from reference import model
from reference.clauses.facts import Facts
from reference.commands import CheckBusy, Command, Done, Outcome, Refused, Report, Submit
from reference.state import State
from stateful_tests.lockstep.tree_adoption import adopt_tree_shape, with_locks_as_taken


class Answers(NamedTuple):
    """The two answers to a command.

    now, expected: state and outcome of the reference.
    outcome: of the system.
    overreach: a choice of the system that the reference could not follow, in words.
    """

    now: State
    expected: Outcome
    outcome: Outcome
    overreach: str = ""


class ServerPolicy:
    """Decides which choices of a system with these capabilities are allowed."""

    def __init__(self, can: Capabilities) -> None:
        self._can = can

    def answers_to_compare(
        self, was: State, command: Command, answers: Answers, facts: Facts | None
    ) -> Answers:
        """Return the answers that are left to compare: the reference has followed the system's choices,
        and the shape of its tree where that has rules of its own.

        facts: the system's; None where the two differ already, and the reference follows nothing.
        """
        outcome = answers.outcome
        if facts is not None and isinstance(outcome, Done) and outcome.choices:
            try:
                now, expected = model.step(was, command, outcome.choices)
                answers = answers._replace(now=now, expected=expected)
            except model.ChoiceNotAllowed as error:
                answers = answers._replace(overreach=str(error))
        answers = self._with_allowed_differences(was, command, answers)
        if self._can.tree_policy_is_free and facts is not None and facts.tree is not None:
            done = isinstance(outcome, Done) and isinstance(answers.expected, Done)
            if done or isinstance(command, Submit):  # a rejected request may have run all the same
                answers = answers._replace(now=adopt_tree_shape(was, answers.now, command, facts))
        return answers

    def _with_allowed_differences(self, was: State, command: Command, answers: Answers) -> Answers:
        """Return the answers without differences that are allowed: refusals by the system's policy or
        by what its locks have pinned, reasons where it has others, and terms that its memory check does
        not count."""
        _, expected, outcome, _ = answers
        if isinstance(outcome, Refused):
            if isinstance(expected, Done) and (
                outcome.reason in self._can.may_refuse
                or model.step(with_locks_as_taken(was), command)[1] == outcome
            ):
                return answers._replace(now=was, expected=outcome)
            if isinstance(expected, Refused) and not self._can.exact_reasons:
                return answers._replace(outcome=expected)
        if (
            isinstance(command, CheckBusy)
            and isinstance(expected, Done)
            and expected.report is not None
        ):
            return answers._replace(expected=self._as_counted_by_system(expected, expected.report))
        return answers

    def _as_counted_by_system(self, expected: Done, report: Report) -> Done:
        """Return the expected report of a busy check without the pools or entries that the system's
        report lacks."""
        can = self._can
        if not can.uncounted and can.lists_holders:
            return expected
        accounts = tuple(a for a in report.accounts if a.pool not in can.uncounted)
        entries = tuple(e for e in report.entries if e.pool not in can.uncounted)
        return replace(expected, report=Report(accounts, entries if can.lists_holders else ()))
