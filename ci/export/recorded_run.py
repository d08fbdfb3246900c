"""A trace run on a release, and the lines with which an exported test asks it."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from impl.sglang.parts import namespaces
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.scheduler.call_log import ids_text, quote, variable
from reference.clauses.step import Step
from reference.commands import Outcome
from reference.failures import Place
from reference.geometry import Geometry
from reference.system_kinds import AnyCommand
from reference.token_ids import tokens_of
from stateful_tests.lockstep.run_moments import AnyMoment, Moment
from stateful_tests.lockstep.run_results import Violation


class NotExportable(ValueError):
    """No test can be made of this trace: one line gives the reason."""


def not_raising(calls: Sequence[str]) -> list[str]:
    """Return lines of a test that fails where the calls raise any exception."""
    tried = [f"    {line}" for call in calls for line in call.split("\n")]
    return ["try:", *tried, "except Exception as error:", '    self.fail(f"it raises {error!r}")']


def namespace_argument(geometry: Geometry, tokens: Sequence[int]) -> str:
    """Return the namespace in which a text is looked up, as a further argument."""
    setting = dict(geometry.settings).get(namespaces.SETTING, "")
    names = namespaces.key_fields_of(setting, tokens)
    return "".join(f", {field}={quote(name)}" for field, name in names.items())


def tokens_of_release(geometry: Geometry, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return tokens as the release has them: in a namespace those of another text."""
    other = dict(geometry.settings).get(namespaces.SETTING) and namespaces.begins_other(tokens)
    return tuple(namespaces.exchange_texts(tokens) if other else tokens)


def in_tree(geometry: Geometry, path: Sequence[int]) -> str:
    """Return a key of the tree as arguments: its tokens, and its namespace."""
    tokens = tokens_of(path)
    return ids_text(tokens_of_release(geometry, tokens)) + namespace_argument(geometry, tokens)


class RecordedRun(NamedTuple):
    """A trace run on a release up to its violation: the calls of each command."""

    steps: list[tuple[str, Outcome, tuple[str, ...]]]
    last: AnyCommand
    violation: Violation
    #: the violated clause to assert
    clause: str
    was: AnyMoment  # before the last command
    now: AnyMoment
    #: the kind of the release
    kind: type[Release0510]
    #: the server's cache is one for all, and a node of its tree has a component for each pool
    unified: bool
    geometry: Geometry

    @property
    def before(self) -> Moment:
        """`was`, for a server that is given each batch."""
        assert isinstance(self.was, Moment)
        return self.was

    @property
    def after(self) -> Moment:
        """`now`, for such a server."""
        assert isinstance(self.now, Moment)
        return self.now

    @property
    def step(self) -> Step:
        """The last command, as the clauses see it."""
        assert self.after.step is not None
        return self.after.step

    @property
    def at(self) -> tuple[Place, ...]:
        """The places that the clause's failure is about."""
        return self.violation.failure_of(self.clause).at

    @property
    def holder(self) -> str:
        """Return the expression for the row of a request, or of a session's slot."""
        return f".{record}" if (record := self.kind.record()) else ""

    @property
    def page_size(self) -> int:
        return self.geometry.page_size

    @property
    def window(self) -> int | None:
        return self.geometry.window

    def slot(self, session: str) -> str:
        return f"server.cache.{'session.' if self.unified else ''}slots[{quote(session)}]{self.holder}"

    def cursor(self, holder: str, name: str) -> str:
        """Return the row, or a cursor, of the holder that has its row at `holder`."""
        return f"{holder}.{self.kind.in_record()[name]}"

    def row(self, holder: str, start: str = "", end: str = "") -> str:
        """Return slots of a row, by its cursors.

        start, end: positions.
        """
        span = f"{start} : {end}".strip() if "." in end else f"{start}:{end}"
        return f"server.rows.req_to_token[{self.cursor(holder, 'req_pool_idx')}, {span}]"

    def holder_cursors(self, holder: str, moment: Moment) -> str:
        """Return the expression for the cursors of a row, by the name of its request or session."""
        for name, request in moment.view.requests.items():
            if request.row is not None and holder in (
                name,
                request.session,
                f"{request.session}/{name}",
            ):
                return f"{variable(name)}{self.holder}"
        return self.slot(holder)

    def of_cursors(self, owner: str) -> str:
        """Return the expression for the cursors of an AtCursor's owner."""
        session = owner.removeprefix("slot of ")
        return self.slot(session) if session != owner else f"{variable(owner)}{self.holder}"

    def cursors_expression(self, owner: str) -> tuple[list[str], str]:
        """Return a short expression for the cursors of an owner, and the lines that must precede it."""
        held = self.of_cursors(owner)
        return ([f"slot = {held}"], "slot") if owner.startswith("slot of ") else ([], held)

    def slot_at(self, holder: str, position: int) -> str:
        """Return the slot of a position of a row."""
        return f"server.rows.req_to_token[{self.cursor(holder, 'req_pool_idx')}, {position}]"

    def holder_expression(self, holder: str, moment: Moment) -> tuple[list[str], str]:
        """Return a short expression for the holder of a row, and the lines that must precede it."""
        held = self.holder_cursors(holder, moment)
        return ([f"slot = {held}"], "slot") if held == self.slot(holder) else ([], held)

    def of_node(self, node: str, pool: str, what: str) -> str:
        """Return an attribute of a node of the tree: `value` or `lock_ref`."""
        if self.unified:
            return f"{node}.component_data[ComponentType.{pool.upper()}].{what}"
        return f"{node}.{what if what == 'value' or self.window is None else f'{pool}_{what}'}"

    def in_order(self, slots: str) -> list[str]:
        """Return lines that test whether the slots of a page are in order."""
        page = f"page = slots[0] // {self.page_size} * {self.page_size}"
        assertion = "self.assertEqual(slots, [*range(page, page + len(slots))])"
        return [f"slots = {slots}", page, assertion]


class Asserts(NamedTuple):
    """The assertions after the last command; notes are lines before the first of its calls like `at`."""

    assertions: list[str]
    notes: Sequence[str] = ()
    at: str = ""

    def calls_with_notes(self, calls: Sequence[str]) -> tuple[str, ...]:
        """Return the calls of the last command, with the notes."""
        first = next((i for i, call in enumerate(calls) if re.match(self.at, call)), 0)
        return (*calls[:first], *self.notes, *calls[first:])
