"""What a move has to do, and to leave alone: the clauses of cursors and owners for one row.

Each property is a function of a `Move`; it is proved for every path of every rule that it is about.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from reference.commands import Mode
from stateful_tests.prove.integers import SymbolicRange, has, larger
from stateful_tests.prove.path_exploration import both, implies, same
from stateful_tests.prove.transitions import INVARIANT, PAGE, POSITION, RULES, Move, P, W, live

GROWS = ("extend", "decode", "spec_decode")
CUTS = ("admit", "finish", "retract")
SWEEPS = ("own-sweep", "evict_swa")


@dataclass(frozen=True)
class Property:
    """holds: of a move. clauses: that it is the arithmetic of. any: it is said of any page, or position."""

    name: str
    claim: str
    clauses: tuple[str, ...]
    rules: tuple[str, ...]
    holds: Callable[[Move], Any]
    mode: Mode = Mode.FREE
    any: str = ""


def _invariant(name: str) -> Callable[[Move], Any]:
    return lambda move: INVARIANT[name](move.ref, move.now)


def _pages(pool: str, move: Move) -> Any:
    """Any page: owned before and after, given back and taken, as the rule says."""
    cursors, before, after = move.ref.cursors, move.before, move.after
    owned, owns = has(move.pages(pool, move.was), PAGE), has(move.pages(pool, move.now), PAGE)
    if move.target is not None:
        low, high = (cursors.owed_full if pool == "full" else cursors.owed_swa)(before, move.target, P)
        freed = SymbolicRange(low // P, high // P).has(PAGE)
        return both(implies(freed, owned), same(owns, owned & ~freed))
    if move.room is not None:
        first, end = (cursors.ceil_page(c.kv_allocated_len, P) // P for c in (before, after))
        taken = SymbolicRange(first, end).has(PAGE)
        return both(implies(taken, ~owned), same(owns, owned | taken), move.room == end - first)
    if move.swept is not None and pool == "swa":
        freed = owned & (after.swa_evicted_seqlen // P > PAGE)
        return same(owns, owned & ~freed)
    handed_over = after.cache_protected_len // P > PAGE  # to the tree; R moves in no other rule
    return same(owns, owned & ~handed_over)


def _capped(move: Move) -> Any:
    after, target = move.after, move.target
    caps = [
        now == (before if before <= target else target)
        for now, before in zip(after[:3], move.before[:3])
    ]
    slot = move.now.session("s").slot
    admitted = [after.kv_allocated_len == target] if move.request is not None and move.request.cursors else []
    return both(*caps, *admitted, after.cache_protected_len == move.before.cache_protected_len, slot == after)


def _sweep_bounds(move: Move) -> Any:
    """No token at `swept` or later loses what it reads: any such position, the furthest frontier."""
    before, after = move.before, move.after
    start = move.ref.cursors.window_start(POSITION, W)
    moved = after.swa_evicted_seqlen > larger(before.swa_evicted_seqlen, before.cache_protected_len)
    return both(
        after.swa_evicted_seqlen >= before.swa_evicted_seqlen,
        *(now == then for now, then in zip((*after[:2], after[3]), (*before[:2], before[3]))),
        implies((move.swept <= POSITION) & moved, after.swa_evicted_seqlen <= start),
    )


def _live(move: Move, c: Any) -> Any:
    return live(move.ref, c, c.kv_committed_len)


def _window(move: Move) -> Any:
    """Live after the move: always where the next token is sure to come, else if it was live before.

    A sweep past the commit may end it (free mode); nothing else does.
    """
    must = move.ref.ledger.Phase.RUNNING is not move.request.phase or move.room is not None
    past = move.swept is not None and move.swept > move.before.kv_committed_len
    if must:
        return _live(move, move.after)
    return implies(not past and _live(move, move.before), _live(move, move.after))


def _slots(move: Move) -> Any:
    """Any position that a token is written to has a page of the row in each pool."""
    written = both(move.before.kv_committed_len <= POSITION, move.after.kv_committed_len > POSITION)
    page = POSITION // P
    return implies(written, both(*(has(move.pages(pool, move.now), page) for pool in ("full", "swa"))))


def _reads(move: Move) -> Any:
    """Any position past R in the window of the token that is computed has an SWA page of the row.

    The first to be computed stands at the old C; later ones read further on. After an admission that is
    the new C. For every position below it, and past R, there is a full page.
    """
    c = move.after if move.room is None else move.before
    start = larger(c.cache_protected_len, move.ref.cursors.window_start(c.kv_committed_len, W))
    seen, page = c.kv_committed_len > POSITION, POSITION // P
    swa, full = has(move.pages("swa", move.now), page), has(move.pages("full", move.now), page)
    return both(
        implies((start <= POSITION) & seen, swa),
        implies((c.cache_protected_len <= POSITION) & seen, full),
    )


CONTRACT = re.compile(r"^\s*(pre|post): (.*)$", re.MULTILINE)


def contract(function: Any) -> dict[str, list[str]]:
    """Expressions of a function's contract: "pre" and "post"."""
    found: dict[str, list[str]] = {"pre": [], "post": []}
    for kind, expression in CONTRACT.findall(function.__doc__ or ""):
        found[kind].append(expression)
    return found


def arguments(function: Any) -> tuple[str, ...]:
    """Names of a function's parameters."""
    return tuple(function.__code__.co_varnames[: function.__code__.co_argcount])


def _calls(move: Move) -> Any:
    """Every call that the rule makes keeps the contract of what it calls."""
    for name, values in move.calls:
        function = getattr(move.ref.cursors, name)
        named = dict(zip(arguments(function), values))
        for expression in contract(function)["pre"]:
            if not eval(expression, function.__globals__, named):
                return False
    return True


def _literal(move: Move) -> Any:
    """The literal rule: the turn resumes at min(C, key), whatever was swept."""
    turn = move.was.request("r")
    key = turn.origin + turn.output - 1
    c = move.before.kv_committed_len
    return move.after.kv_committed_len == (c if c <= key else key)


def _below_target(move: Move) -> Any:
    return move.before.swa_evicted_seqlen <= move.target


def _whole_frontier(move: Move) -> Any:
    return move.after.swa_evicted_seqlen % P == 0


def _next_window(move: Move) -> Any:
    return implies(_live(move, move.before), _live(move, move.after))


ALL = tuple(RULES)
PROPERTIES: dict[str, Property] = {
    p.name: p
    for p in (
        Property(
            "order", "The cursors stay in order, within the row, and R is whole pages.", ("LEN-1",),
            ALL, _invariant("order"),
        ),
        Property(
            "text", "C is where the text says, nothing is allocated ahead while a prompt is prefilled,"
            " and R ends in the prompt.", ("LEN-4",), ALL, _invariant("text"),
        ),
        Property(
            "caps", "C, A and E are each the smaller of what they were and where the cut stops, R is what it"
            " was, slot and turn say the same; an admitted turn has nothing ahead.", ("LEN-2", "LEN-3"),
            CUTS, _capped,
        ),
        Property(
            "full-pages", "Full pool: what is freed was owned and is not owned any more, what is taken was"
            " not owned and is, nothing else changes hands.", ("OWN-1", "OWN-2", "OWN-3", "FREE-1"),
            ALL, partial(_pages, "full"), any="page",
        ),
        Property(
            "swa-pages", "SWA pool: the same.", ("OWN-1", "OWN-2", "OWN-3", "FREE-2"),
            ALL, partial(_pages, "swa"), any="page",
        ),
        Property(
            "sweep", "A sweep moves E alone, never back, and takes nothing that a token at its length or"
            " later reads.", ("SWA-1",), SWEEPS, _sweep_bounds, any="position",
        ),
        Property(
            "frontier", "E is a page boundary; in a slot it may be cut inside a page, and then nothing past"
            " R can be resumed.", ("SWA-1", "SWA-2"), ALL, _invariant("frontier"),
        ),
        Property(
            "window", "The window of the next token is live: after an admission and while a prompt is"
            " prefilled always, after a round too, and nothing but a sweep past C ends it.", ("SWA-2",),
            ("admit", *GROWS, "tree-takes-prompt", *SWEEPS), _window,
        ),
        Property(
            "slots", "Every position that a token is written to has a page in both pools.", ("MAP-1",),
            GROWS, _slots, any="position",
        ),
        Property(
            "reads", "Every position past R that the next token reads has its page.", ("READ-1", "SWA-2"),
            ("admit", *GROWS), _reads, any="position",
        ),
        Property(
            "calls", "Every call keeps the contract of what it calls.", (), ALL, _calls,
        ),
        Property(
            "faithful", "Faithful mode: a live window where a turn resumes, and no sweep past what is kept.",
            ("SWA-2",), ALL, _invariant("faithful"), Mode.FAITHFUL,
        ),
        Property(
            "literal-resume", "Faithful mode: a turn resumes at min(C, key).", ("LEN-3", "SWA-2"),
            ("admit",), _literal, Mode.FAITHFUL,
        ),
        Property(
            "cap-moves-nothing", "Faithful mode: E is at most the target before it is capped (#22900).",
            ("LEN-2", "LEN-3"), CUTS, _below_target, Mode.FAITHFUL,
        ),
        Property(
            "whole-frontier", "Faithful mode: E stays a page boundary, in slots too, so that the literal"
            " rule of memory checks, ceil(A) - max(R, E), is right.", ("CHK-2",),
            CUTS, _whole_frontier, Mode.FAITHFUL,
        ),
        Property(
            "next-window", "Faithful mode: a sweep keeps the window of the next token.", ("SWA-2",),
            SWEEPS, _next_window, Mode.FAITHFUL,
        ),
    )
}  # fmt: skip
