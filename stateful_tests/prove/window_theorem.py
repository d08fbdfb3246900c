"""When a turn comes back behind its window: the exact condition, for every page size, window and length.

A row is swept with length L and then cut at a target by a finish or a retract; the next turn goes on at
p = min(C, key). Some position that it then reads, at R or later, has no SWA KV any more (a hole) just if

    p > R  and  L >= W + n * P + floor(max(R, p - W))

where a sweep goes to floor(L - W - P) for n = 2, and to floor(L - W), as in 0.5.10, for n = 1. `floor`
rounds down to pages. E passes the target, so that the cap of #22900 does something, just if
L >= W + n * P + floor(target). What is here is the statement; the sweep, the cut, the pages and where a
turn resumes are the reference's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reference.commands import Admit, Chunk, Draft, EvictSwa, Extend, Mode, Open, Retract, SpecDecode, Submit
from stateful_tests.prove.counterexamples import NoSuchRun, play
from stateful_tests.prove.integers import Int, has, larger, smaller
from stateful_tests.prove.path_exploration import assume, both, implies, same
from stateful_tests.prove.symbolic_reference import SymbolicReference
from stateful_tests.prove.transitions import LENGTH, POSITION, P, W, cursors


@dataclass(frozen=True)
class Policy:
    """How far a sweep goes, and n of the condition. Conditions are over p, L, P, W, R and target.

    never, always: overshoot with no hole, and with one (if p > R and p - W >= R), whatever the alignment.
    """

    name: str
    frontier: str
    pages: int
    hole: str
    never: str
    always: str
    cap: str

    @property
    def conditions(self) -> dict[str, str]:
        """What a clause may quote."""
        return {
            "frontier": self.frontier,
            "hole": self.hole,
            "never": self.never,
            "always": self.always,
            "cap_moves": self.cap,
        }


POLICIES = (
    Policy(
        "default", "floor(L - W - P)", 2, "p > R and L >= W + 2P + floor(max(R, p - W))",
        "L - p <= P", "L - p >= 2P", "L >= W + 2P + floor(target)",
    ),
    Policy(
        "0.5.10", "floor(L - W)", 1, "p > R and L >= W + P + floor(max(R, p - W))",
        "L - p <= 0", "L - p >= P", "L >= W + P + floor(target)",
    ),
)  # fmt: skip

PARAGRAPH = (
    "A sweep with length L stops at floor(L - W - P). The row is then cut by a finish or a retract, and"
    " its next turn goes on at p = min(C, key). A position that this turn reads has lost its SWA KV if,"
    " and only if, p > R and L >= W + 2P + floor(max(R, p - W)). So the sweep has to see more than P"
    " tokens past p. With L - p <= P nothing is lost, whatever the alignment; with P + 1 it is where p - W"
    " is the last position of a page, at R or later; from 2P on it is wherever p - W >= R. For page size"
    " 1: two tokens too many lose a position, one does not. A server that sweeps to floor(L - W), as"
    " 0.5.10 does, has one P less everywhere: a single token past p can do it. A faithful scheduler, whose"
    " L is at most what is committed and at most what a later finish or retract keeps, has L <= p and"
    " never meets it, with either policy. The cap of E at the target (#22900) changes E only if L >= W +"
    " 2P + floor(target), again one P less for 0.5.10. That is a window further: whenever the cap does"
    " something, the window at p is lost already and nothing past R can be resumed, so the cap by itself"
    " repairs no read. What it does: E <= A stays true in the slot, memory checks add up, and a server"
    " that resumes at p regardless does not leave [target, E), which the next turn writes to, below E,"
    " where nothing would ever free it."
)


@dataclass(frozen=True)
class TheoremPart:
    """One direction of the theorem, or what follows from it."""

    name: str
    claim: str
    holds: Callable[[SymbolicReference], Any]


T, KEY = Int.of("target"), Int.of("key")


class _Case:
    """Any row that was fine before the sweep: E a page boundary, and no hole at p yet.

    c: its cursors in batch; swept: after the sweep; slot: after the cut. p: where the next turn goes on;
    start: the first position at R or later that is read there.
    """

    def __init__(self, ref: SymbolicReference, policy: Policy) -> None:
        self.ref, self.policy, self.c = ref, policy, cursors(ref)
        c, k = self.c, ref.cursors
        assume(P >= 1, W >= 1)
        assume(k.in_order(c), c.cache_protected_len % P == 0, c.swa_evicted_seqlen % P == 0)
        assume(LENGTH >= 0, c.kv_allocated_len >= LENGTH)
        assume(c.cache_protected_len <= T, c.cache_protected_len <= KEY)
        self.swept = k.sweep(c, LENGTH, W, P)
        if policy.pages == 1:
            low = larger(c.swa_evicted_seqlen, c.cache_protected_len)
            self.swept = c._replace(swa_evicted_seqlen=larger(low, k.sweep_limit(LENGTH, W, P)))
        self.slot = k.cut(self.swept, T)
        self.p = smaller(self.slot.kv_committed_len, KEY)
        self.start = larger(c.cache_protected_len, self.p - W)
        assume(c.swa_evicted_seqlen <= self.start)

    def hole(self, position: Any) -> Any:
        """The turn reads `position`, and its page has no SWA half any more."""
        read = both(self.start <= position, position < self.p)
        return read & ~has(self.ref.ledger.swa_pages(self.slot, P), position // P)

    def bound(self, position: Any) -> Any:
        return _bound(self.ref, self.policy, position)

    @property
    def condition(self) -> list[Any]:
        """What the theorem says of when there is a hole."""
        return [self.p > self.c.cache_protected_len, self.bound(self.start) <= LENGTH]


def _bound(ref: SymbolicReference, policy: Policy, position: Any) -> Any:
    return W + policy.pages * P + ref.cursors.floor_page(position, P)


def _only_if(case: _Case) -> Any:
    return implies(case.hole(POSITION), both(*case.condition))


def _if(case: _Case) -> Any:
    assume(*case.condition)
    return case.hole(case.start)


def _resumes(case: _Case) -> Any:
    """The reference resumes short of p in just these cases."""
    return same(case.ref.cursors.resume(case.slot, KEY, W) != case.p, both(*case.condition))


def _never(case: _Case) -> Any:
    return implies(case.p + (case.policy.pages - 1) * P >= LENGTH, ~case.hole(POSITION))


def _least(case: _Case) -> Any:
    """One token more than `never` allows: a hole, where p - W is the last position of a page."""
    back = case.p - W
    assume(case.p + (case.policy.pages - 1) * P + 1 == LENGTH)
    assume(back >= case.c.cache_protected_len, back % P == P - 1)
    return case.hole(case.start)


def _always(case: _Case) -> Any:
    assume(case.p + case.policy.pages * P <= LENGTH, case.p - W >= case.c.cache_protected_len)
    return case.hole(case.start)


def _cap(case: _Case) -> Any:
    assume(case.c.swa_evicted_seqlen <= T)
    return same(case.swept.swa_evicted_seqlen > T, case.bound(T) <= LENGTH)


def _cap_is_late(case: _Case) -> Any:
    moves = (case.swept.swa_evicted_seqlen > T) & (case.p > case.c.cache_protected_len)
    return implies(moves, case.hole(case.start))


def _faithful(case: _Case) -> Any:
    """A sweep that saw at most what is kept: no hole, and nothing for the cap to do."""
    assume(case.c.swa_evicted_seqlen <= T)
    kept = (case.p >= LENGTH) & (T >= LENGTH)
    return implies(kept, ~case.hole(POSITION) & (case.swept.swa_evicted_seqlen <= T))


def _reached(ref: SymbolicReference) -> Any:
    """From the empty state, for every P, W, p >= 1 and L of the condition: a run that makes the hole.

    A first prompt of p tokens, a verify round that allocates as far as L and commits one token, the sweep,
    a retract that loses the output in flight. The retry would go on at p, and starts again from 0.
    """
    p: Any = Int.of("p")
    assume(P >= 1, W >= 1, p >= 1)
    assume(_bound(ref, POLICIES[0], larger(0, p - W)) <= LENGTH, Int.of("width") >= LENGTH)
    commands: list[Any] = [
        Open("s"), Submit("r", "s", p), Admit("r"), Extend((Chunk("r", p),)),
        SpecDecode((Draft("r", LENGTH - p, 1),)), EvictSwa("r", LENGTH), Retract("r", 1), Admit("r"),
    ]  # fmt: skip
    try:
        move = play(ref, Mode.FREE, commands)
    except NoSuchRun:
        return False
    literal = smaller(move.before.kv_committed_len, p)
    return both(literal == p, move.after.kv_committed_len == 0)


def _part(name: str, claim: str, of: Callable[[_Case], Any], policy: Policy) -> TheoremPart:
    text = claim.format(hole=policy.hole, never=policy.never, always=policy.always, cap=policy.cap)
    claim = f"Sweeps to {policy.frontier}: {text}"
    return TheoremPart(f"{name}/{policy.name}", claim, lambda ref: of(_Case(ref, policy)))


PARTS: tuple[TheoremPart, ...] = (
    *(
        _part(name, claim, of, policy)
        for policy in POLICIES
        for name, claim, of in (
            ("hole-only-if", "no hole at p unless {hole}.", _only_if),
            ("hole-if", "a hole at p, at max(R, p - W), if {hole}.", _if),
            ("hole-resume", "the reference resumes short of p just if {hole}.", _resumes),
            ("hole-never", "no hole if {never}, whatever the alignment.", _never),
            ("hole-least", "one token more, and p - W ends a page at R or later: a hole.", _least),
            ("hole-always", "a hole if {always} and p - W >= R, whatever the alignment.", _always),
            ("cap-moves", "E passes the target just if {cap}.", _cap),
            ("cap-is-late", "whenever E passes the target there is a hole at p, if p > R.", _cap_is_late),
            ("hole-faithful", "L at most p and the target: no hole, and E at most the target.", _faithful),
        )
    ),
    TheoremPart(
        "hole-reached",
        "For every P, W, p >= 1 and L of the condition a run from the empty state makes the hole.",
        _reached,
    ),
)  # fmt: skip
