"""Explains each place of a failure, for all clauses: since when it has its value, what it had before, and
its other owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from typing import Any

from ci.explain import places
from ci.explain.fact_history import History, Past, cursors_of, borrower
from ci.explain.places import Fact, letter, token_text
from ci.shown_kinds import ExplainedPlaces, shown_kind_of
from reference.clauses.attention_reads import stamp_text
from reference.commands import Finish, Retract
from stateful_tests.lockstep.run_moments import AnyMoment, Moment
from reference.failures import (
    AtCounter, AtCursor, AtLock, AtNamed, AtNode, AtPosition, AtText, Place, count_text,
)  # fmt: skip

FactsAt = Callable[[Any, Any], list[Fact]]
# places of a kind that are reported; of other kinds the first
MOST = {AtCursor: 6, AtLock: 3, AtNamed: 3}


def stories(past: Past[AnyMoment]) -> list[str]:
    """Return a story for each place of the violation; cursors with the same history share one."""
    failure_places = past.violation.failure.at
    if not isinstance(past, History):
        told = of_kind(past)
        return [story(past, place, told.place_name, told.facts_at) for place in _at_most_few(failure_places)]
    texts: dict[str, None] = {}
    cursors = [place for place in failure_places if isinstance(place, AtCursor)][: MOST[AtCursor]]
    for place in _at_most_few(failure_places):
        if isinstance(place, AtCursor):
            texts[_cursor_stories(past, cursors)] = None
        for part in places.leads_to(place, past.now):
            texts[story(past, part, places.place_name, places.facts_at)] = None
    return [text for text in texts if text]


def of_kind(past: Past[AnyMoment]) -> ExplainedPlaces:
    """Return the explainer of the places of a system that only facts and clauses judge."""
    explainer = shown_kind_of(past.run.trace.geometry).explains()
    assert explainer is not None
    return explainer


def _at_most_few(places: Iterable[Place]) -> list[Place]:
    kinds: dict[type, list[Place]] = {}
    for place in places:
        kinds.setdefault(type(place), []).append(place)
    return [place for kind, each in kinds.items() for place in each[: MOST.get(kind, 1)]]


def story(past: Past[AnyMoment], place: Place, called: Callable[[Any, Any], str], facts_at: FactsAt) -> str:
    """Return the facts about a place now, each with its date; for a thing without an owner also the
    past ones. Empty for a kind of place that has no facts."""
    name = called(place, past.now)
    facts = facts_at(place, past.now)
    if not facts:
        return ""

    def since(fact: Fact) -> str:
        return past.first_since(f"{place}: {fact.now}", partial(_fact_holds, facts_at, place, fact))

    unowned_facts = [fact for fact in facts if not fact.owner]
    having = [f"{f.owner} {f.now} {since(f)}" for f in facts if f.owner]
    if not unowned_facts:
        # who reads or writes it owns nothing
        count = sum(fact.now.startswith("has ") for fact in facts)
        problem = f"has {count_text(count, 'owner')}" if count > 1 else "is not free"
        return f"{name} {problem}: {' and '.join(having)}"
    dated = [(fact.now, since(fact)) for fact in unowned_facts]
    texts = f"{name} {' and '.join(_joined_facts(dated))}{_expected_state(place)}"
    if having:
        return ", and ".join([texts, *having])
    return texts + _past_facts(past, place, unowned_facts[0], facts_at)


def _joined_facts(dated: list[tuple[str, str]]) -> list[str]:
    """Return facts with their dates, a date and a verb once: "is live and has 1 SWA slot since command
    2"."""
    texts = []
    for since, facts in groupby(dated, key=lambda each: each[1]):
        first, *more = [fact for fact, _ in facts]
        verb = first.split()[0] + " "
        texts.append(
            " and ".join([first, *(fact.removeprefix(verb) for fact in more)]) + f" {since}"
        )
    return texts


def _fact_holds(facts_at: FactsAt, place: Place, fact: Fact, m: Any) -> bool:
    return fact in facts_at(place, m)


def _expected_state(place: Place) -> str:
    """Return the state that the place must have now."""
    match place:
        case AtNode(must=int(must)):
            return f" and must count {must}"
        case AtCounter(must=int(must)):
            return f" and must be {must}"
        case AtPosition(must=int(must)):
            return f" and must find {stamp_text(must)}"
        case AtText(at=int(at), must=int(must)):
            return f" and must have {token_text(must)} at position {at}"
    return ""


def _past_facts(past: Past[AnyMoment], place: Place, fact: Fact, facts_at: FactsAt) -> str:
    before = past.last_before(lambda m: not _fact_holds(facts_at, place, fact, m))
    was = [f for f in facts_at(place, before) if f.was] if before is not None else []
    texts = " and ".join(f"{f.owner or 'it'} {f.was}" for f in was)
    # whether a lock is older than a split tells why it is miscounted
    if was and isinstance(place, AtLock):
        then = past.last_time(f"{place}: {was[0].was}", partial(_fact_holds, facts_at, place, was[0]))
        texts += f" {past.at(then[0])}" if then is not None else ""
    return f"; until then {texts}" if texts else ""


_COMMITTED = "kv_committed_len"


# -- cursors ---------------------------------------------------------------------------------------------


def _cursor_stories(past: History, wrong_cursors: list[AtCursor]) -> str:
    """Return what cursors are, since when, and what they must be: those with the same history together."""
    fates: dict[tuple[int, int, int | None, str], dict[str, list[str]]] = {}
    off: dict[tuple[int, int, int | None, str], list[AtCursor]] = {}
    for place in wrong_cursors:
        cursors = cursors_of(past.now, place.owner)
        if cursors is None:
            continue
        value = getattr(cursors, place.field)
        held = _holds_something(past.now, place.owner)
        index = past.first_step(
            f"{place.field} of {place.owner} is {value}", _value_since, place, value, held
        )
        taken = _turn_value_text(past, place, value) if index == past.violation.step else ""
        fate = index, value, place.must, taken
        fates.setdefault(fate, {}).setdefault(place.owner, []).append(letter(place.field))
        off.setdefault(fate, []).append(place)
    return "; ".join(_cursor_fate(past, fate, owners, off[fate]) for fate, owners in fates.items())


def _cursor_fate(
    past: History,
    fate: tuple[int, int, int | None, str],
    whose: dict[str, list[str]],
    off: list[AtCursor],
) -> str:
    """Return a clause of a sentence on cursors with a wrong value: whose they are, since when, and the value
    they must have.

    fate: (step, value, expected value, how it was taken).
    off: the places.
    """
    index, value, must, taken = fate
    several = len(off) > 1
    owners = {name: f"the {name}" if " " in name else name for name in whose}
    owners_text = ", ".join(f"{' and '.join(k)} of {owners[name]}" for name, k in whose.items())
    verb = f"{'are' if several else 'is'} {value} {past.at(index)}"
    if index == past.violation.step:
        verb = f"{'become' if several else 'becomes'} {value}{taken}"
    if must is None:
        return f"{owners_text} {verb}".rstrip(",")
    before = past.before
    stays = all(
        _has_value(before, place._replace(owner=_turn_with_row(before, place.owner)), must) for place in off
    )
    ends = stays and isinstance(past.run.rows[-1].command, Finish | Retract)
    written = _kv_consequence(value, must) if ends and {cell.field for cell in off} == {_COMMITTED} else ""
    return f"{owners_text} {verb} and must {'stay' if stays else 'be'} {must}{written}"


def _kv_consequence(committed: int, must: int) -> str:
    """Describe what a slot that counts more or fewer tokens than are committed does to their KV."""
    if committed > must:
        return f": KV of [{must}, {committed}) was never written"
    return f": KV of [{committed}, {must}), written or in flight, is computed again"


def _has_value(m: Moment, place: AtCursor, value: int) -> bool:
    cursors = cursors_of(m, place.owner)
    return cursors is not None and getattr(cursors, place.field) == value


def _holds_something(m: Moment, owner: str) -> bool:
    """Return whether a request holds something. One that does not shows no cursors; they count as 0."""
    request = m.facts.requests.get(owner)
    return request is None or request.cursors is not None


def _value_since(m: Moment, place: AtCursor, value: int, has_something: bool) -> bool:
    return _has_value(m, place, value) and _holds_something(m, place.owner) is has_something


def _turn_with_row(m: Moment, owner: str) -> str:
    """Return the turn that has a row, whose cursors it shows."""
    return borrower(m, owner) or owner


def _turn_value_text(past: History, place: AtCursor, value: int) -> str:
    """Return since when the turn that had the row of a slot had the value that the slot shows now."""
    turn = borrower(past.before, place.owner)
    if turn is None or not _has_value(past.before, place._replace(owner=turn), value):
        return ""
    was = place._replace(owner=turn)
    since = past.was_since(f"{place.field} of {turn} was {value}", _has_value, was, value)
    return f", which {turn} had {since},"
