"""Explanations for cursors and the sliding window."""

from collections.abc import Callable, Iterator

from ci.compare.differences import CURSORS
from ci.explain.history import History, cursors_of, lent_to, of, some
from reference.clauses.window import lost_window, oversweep
from reference.commands import Admit, Finish
from reference.failures import AtCursor
from reference.ledger import ZERO, Cursors, Request
from stateful_tests.lockstep.results import Moment


def has_cursor(m: Moment, name: str, letter: str, value: int) -> bool:
    cursors = cursors_of(m, name)
    return cursors is not None and cursors[list(CURSORS).index(letter)] == value


def _off(past: History) -> Iterator[tuple[str, str, int, int]]:
    """(name, letter, by the rules, in the system) of the cursors that the violation is about."""
    for place in past.violation.failure.at:
        if isinstance(place, AtCursor):
            want, got = _by_the_rules(past.now, place.owner), cursors_of(past.now, place.owner)
            at = Cursors._fields.index(place.field)
            if want is not None and got is not None and want[at] != got[at]:
                yield place.owner, list(CURSORS)[at], want[at], got[at]


def _by_the_rules(m: Moment, name: str) -> Cursors | None:
    """Of "r1" or "slot of s1", as the reference has them."""
    request, session = m.state.request(name), m.state.session(name.removeprefix("slot of "))
    if request is not None:
        return request.cursors or ZERO
    return session.slot if session is not None else None


def _must_be(past: History, off: list[tuple[str, str, int, int]]) -> str:
    """What cursors are, since when, and what they must be: those of one fate together."""
    fates: dict[tuple[int, int, int, str], dict[str, list[str]]] = {}
    for name, letter, want, got in off:
        index = past.first_step(f"{letter} of {name} is {got}", has_cursor, name, letter, got)
        taken = _taken_over(past, name, letter, got) if index == past.violation.step else ""
        fates.setdefault((index, want, got, taken), {}).setdefault(name, []).append(f"\0{letter}\0")
    said = []
    for (index, want, got, taken), whose in fates.items():
        who = ", ".join(f"{' and '.join(k)} of {'the ' * (' ' in n)}{n}" for n, k in whose.items())
        each = [(n, letter.strip("\0")) for n, letters in whose.items() for letter in letters]
        several = len(each) > 1
        stays = all(has_cursor(past.before, lent_to(past.before, n) or n, k, want) for n, k in each)
        if index == past.violation.step:
            verb = f"{'become' if several else 'becomes'} {got}{taken}"
        else:
            verb = f"{'are' if several else 'is'} {got} {past.at(index)}"
        said.append(f"{who} {verb} and must {'stay' if stays else 'be'} {want}")
    return "; ".join(said)


def _taken_over(past: History, name: str, letter: str, value: int) -> str:
    """Since when the turn that had the row of a slot had the value that the slot shows now."""
    turn = lent_to(past.before, name)
    if turn is None or not has_cursor(past.before, turn, letter, value):
        return ""
    since = past.was_since(f"{letter} of {turn} was {value}", has_cursor, turn, letter, value)
    return f", which {turn} had {since},"


def lengths(past: History) -> str | None:
    """LEN-2 to LEN-4, REF-1: cursors that differ, and the rule that gives the right ones."""
    step, off = past.step, list(_off(past))
    if not off:
        return None
    head, request = f"after {past.here} ", step.acted
    if step.cut_at is not None and request is not None:
        target = step.cut_at[2]
        session, now = step.was.session(request.session), step.now.request(request.name)
        if not isinstance(step.command, Admit):
            told = f"{some(request.origin, 'token')} of input, {target - request.origin} of output"
            does = "ends the turn" if isinstance(step.command, Finish) else f"queues {request.name} again"
            head = f"{past.here} {does} at target {target} ({told}): "
        elif session is not None and session.slot is not None and now is not None and now.cursors is not None:
            c, tokens = session.slot.kv_committed_len, request.origin + request.output
            prefix = now.cursors.kv_committed_len
            key = f"a key of {tokens - 1} ({some(tokens, 'token')} of text less the last)"
            literal = prefix == min(c, tokens - 1)
            why = f"the smaller of C {c} and {key}" if literal else "for its window was swept"
            head = f"{past.here} resumes at {prefix}, {why}: "
    return head + _must_be(past, off[:6])


def _order(past: History) -> str | None:
    """LEN-1: two cursors that have passed each other."""
    place, size = past.violation.failure.at[0], past.page_size
    c = cursors_of(past.now, place.owner) if isinstance(place, AtCursor) else None
    if c is None or not isinstance(place, AtCursor):
        return None
    name, values = place.owner, dict(zip(CURSORS, c))

    def dated(letter: str) -> str:
        told = f"{letter} of {name} is {values[letter]}"
        return f"{told} {past.first_since(told, has_cursor, name, letter, values[letter])}"

    if c.cache_protected_len % size:
        return f"\0R\0 is whole pages of {some(size, 'token')}, but {dated('R')}"
    for low, high in (("R", "C"), ("C", "A"), ("E", "A")):
        if values[low] > values[high]:
            return f"\0{low}\0 may not pass \0{high}\0, but {dated(low)}, and {dated(high)}"
    return None


def _sweep(past: History, found: tuple[Request, int, int, int, int]) -> str | None:
    """SWA-1: a frontier past what a later token still reads, or inside a page."""
    (was, length, _, limit, got), geometry = found, past.step.config.geometry
    window = geometry.window
    if window is None or got <= limit:
        inside = f"inside a page of {some(geometry.page_size, 'token')}"
        return f"{past.here} sweeps {was.name} up to {got}, {inside}" if got % geometry.page_size else None
    return (
        f"{past.here} sweeps {was.name} up to {got}, and a token at {length} still reads"
        f" [{max(0, length - window)}, {length}), a window of {window} back: no sweep may pass {limit}"
    )


def _no_swa(m: Moment, holder: str, position: int) -> bool:
    facts = m.facts.holders.get(holder)
    return facts is not None and position < len(facts.swa_read) and facts.swa_read[position] is None


def _window(past: History, found: tuple[Request, int, int, list[int]]) -> str:
    """SWA-2: a token that would be computed without its window."""
    request, p, start, dead = found
    assert request.cursors is not None
    gone = f"SWA KV of {request.holder} at {dead[0]} is gone"
    since = past.first_since(gone, _no_swa, request.holder, dead[0])
    return (
        f"{request.name} goes on at position {p}, whose window starts at {start}, but it has no SWA KV at"
        f" position {dead[0]} {since}; by the rules it resumes at {request.cursors.kv_committed_len}"
    )


RULES: dict[str, Callable[[History], str | None]] = {
    "LEN-1": _order, "LEN-2": lengths, "LEN-3": lengths, "LEN-4": lengths, "LEN-5": lengths, "REF-1": lengths,
    "SWA-1": of(oversweep, _sweep), "SWA-2": of(lost_window, _window),
}  # fmt: skip
