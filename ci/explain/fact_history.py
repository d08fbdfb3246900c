"""Since when something is so: a walk back through the moments of a run.

`History` gives words such as "since command 4 (finish s1 keep 3)" and notes each as a `Claim`, so that a test
can hold it against the moments again. Commands are counted as `kvspec replay` counts them.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from ci.compare.differences import CURSORS
from reference.clauses.step import Step
from reference.state import IN_BATCH, ZERO, Cursors
from stateful_tests.lockstep.run_moments import AnyMoment, Moment
from stateful_tests.lockstep.run_results import Run, Violation
from stateful_tests.traces.notation import format_command as describe

Holds = Callable[[Any], bool]  # of a moment
_Moment = TypeVar("_Moment", bound=AnyMoment, covariant=True)


class Claim(NamedTuple):
    """`holds` is true after every command from `since` on, and was false before it. -1: from the start.

    until: the claim is about the time before this command; None where it still holds.
    """

    what: str
    since: int
    holds: Holds
    until: int | None = None


class Past(Generic[_Moment]):
    """The history of a run that ended with a violation, seen from its last moment."""

    def __init__(self, run: Run, violation: Violation, moments: Sequence[_Moment]) -> None:
        self.run = run
        self.violation = violation
        self.moments = moments
        self.now = moments[-1]
        self.before = moments[-2]
        self.claims: list[Claim] = []

    def command(self, index: int) -> str:
        """Return a command by number, for `words`."""
        return f"\0{index}\0"

    def words(self, text: str) -> str:
        """Return the sentence with commands and cursors filled in: at first in full, then by number or
        letter."""
        explained: set[str] = set()

        def fill(match: re.Match[str]) -> str:
            name = match[1]
            description = CURSORS[name] if name in CURSORS else describe(self.run.rows[int(name)].command)
            short = name if name in CURSORS else f"command {name}"
            full = short if name in explained else f"{short} ({description})"
            explained.add(name)
            return full

        return re.sub("\0(.*?)\0", fill, text)

    @property
    def here(self) -> str:
        """The command that was violated."""
        return self.command(self.violation.step)

    def first_step(self, fact: str, holds: Callable[..., bool], *more: object) -> int:
        """Return the index of the command since which `holds` is true; it is true now.

        more: further arguments of `holds`.
        """
        return self._since(fact, partial(_still_holds, holds, more), len(self.moments) - 1, None)

    def was_since(self, fact: str, holds: Callable[..., bool], *more: object) -> str:
        """Return in words since when `holds` was true until the last command."""
        last = len(self.moments) - 2
        return self.at(self._since(fact, partial(_still_holds, holds, more), last, self.violation.step))

    def last_time(
        self, what: str, holds: Callable[..., bool], *more: object
    ) -> tuple[int, int] | None:
        """Return since and until which command `holds` was true for the last time before now, None if it
        never was."""
        fact = partial(_still_holds, holds, more)
        last = len(self.moments) - 2
        while last >= 0 and not fact(self.moments[last]):
            last -= 1
        if last < 0:
            return None
        until = last + 1 + self.run.history_start
        return self._since(what, fact, last, until), until

    def _since(self, what: str, fact: Holds, index: int, until: int | None) -> int:
        while index > 0 and fact(self.moments[index - 1]):
            index -= 1
        since = index + self.run.history_start
        self.claims.append(Claim(what, since, fact, until))
        return since

    def first_since(self, fact: str, holds: Callable[..., bool], *more: object) -> str:
        """Return `first_step` in words."""
        return self.at(self.first_step(fact, holds, *more))

    def at(self, index: int) -> str:
        if index < 0:
            return "from the start"
        # what was before is not known any more
        or_before = " or before" if index == self.run.history_start else ""
        return f"since {self.command(index)}{or_before}"

    def last_before(self, holds: Holds) -> _Moment | None:
        """Return the last earlier moment at which `holds` was true."""
        return next((m for m in reversed(self.moments[:-1]) if holds(m)), None)


class History(Past[Moment]):
    """The past of pages, rows and trees."""

    def __init__(self, run: Run, violation: Violation, step: Step) -> None:
        super().__init__(run, violation, run.moments(Moment))
        self.step = step
        self.page_size = step.config.geometry.page_size


def _still_holds(holds: Callable[..., bool], more: tuple[object, ...], moment: Any) -> bool:
    return holds(moment, *more)


def cursors_of(m: Moment, name: str) -> Cursors | None:
    """Return the cursors of "r1" or "slot of s1"; None for an unknown name, and for a slot that is
    lent."""
    session = name.removeprefix("slot of ")
    if session == name:
        facts = m.facts.requests.get(name)
        return facts.cursors or ZERO if facts is not None else None
    session_facts = m.facts.sessions.get(session)
    return session_facts.slot if session_facts is not None and borrower(m, name) is None else None


def borrower(m: Moment, name: str) -> str | None:
    """Return the turn that has the row of "slot of s1", if one has."""
    session = m.state.session(name.removeprefix("slot of "))
    turn = m.state.request(session.turn or "") if session is not None else None
    return turn.name if turn is not None and turn.phase in IN_BATCH else None
