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
from stateful_tests.prove.path_exploration import assume, both, implies
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


@dataclass
class _Case:
    """Cursors in batch, swept, cut; p: where the next turn goes on."""

    c: Any
    slot: Any
    p: Any
    start: Any  # the first position at R or later that is read there
    swept: Any

    def hole(self, ref: SymbolicReference, position: Any) -> Any:
        """The turn reads `position`, and its page has no SWA half any more."""
        read = both(self.start <= position, position < self.p)
        return read & ~has(ref.ledger.swa_pages(self.slot, P), position // P)


def _case(ref: SymbolicReference, policy: Policy) -> _Case:
    """Any row that was fine before the sweep: E a page boundary, and no hole at p yet."""
    c, k = cursors(ref), ref.cursors
    assume(P >= 1, W >= 1)
    assume(k.in_order(c), c.cache_protected_len % P == 0, c.swa_evicted_seqlen % P == 0)
    assume(LENGTH >= 0, c.kv_allocated_len >= LENGTH)
    assume(c.cache_protected_len <= T, c.cache_protected_len <= KEY)
    swept = k.sweep(c, LENGTH, W, P)
    if policy.pages == 1:
        low = larger(c.swa_evicted_seqlen, c.cache_protected_len)
        swept = c._replace(swa_evicted_seqlen=larger(low, k.sweep_limit(LENGTH, W, P)))
    slot = k.cut(swept, T)
    p = smaller(slot.kv_committed_len, KEY)
    start = larger(c.cache_protected_len, p - W)
    assume(c.swa_evicted_seqlen <= start)
    return _Case(c, slot, p, start, swept)


def _bound(ref: SymbolicReference, policy: Policy, position: Any) -> Any:
    return W + policy.pages * P + ref.cursors.floor_page(position, P)


def _only_if(ref: SymbolicReference, policy: Policy) -> Any:
    case = _case(ref, policy)
    needed = both(case.p > case.c.cache_protected_len, _bound(ref, policy, case.start) <= LENGTH)
    return implies(case.hole(ref, POSITION), needed)


def _if(ref: SymbolicReference, policy: Policy) -> Any:
    case = _case(ref, policy)
    assume(case.p > case.c.cache_protected_len, _bound(ref, policy, case.start) <= LENGTH)
    return case.hole(ref, case.start)


def _resumes(ref: SymbolicReference, policy: Policy) -> Any:
    """The reference resumes short of p in just these cases."""
    case = _case(ref, policy)
    short = ref.cursors.resume(case.slot, KEY, W) != case.p
    needed = both(case.p > case.c.cache_protected_len, _bound(ref, policy, case.start) <= LENGTH)
    return implies(short, needed) & implies(needed, short)


def _never(ref: SymbolicReference, policy: Policy) -> Any:
    case = _case(ref, policy)
    return implies(case.p + (policy.pages - 1) * P >= LENGTH, ~case.hole(ref, POSITION))


def _least(ref: SymbolicReference, policy: Policy) -> Any:
    """One token more than `never` allows: a hole, where p - W is the last position of a page."""
    case = _case(ref, policy)
    back = case.p - W
    assume(case.p + (policy.pages - 1) * P + 1 == LENGTH)
    assume(back >= case.c.cache_protected_len, back % P == P - 1)
    return case.hole(ref, case.start)


def _always(ref: SymbolicReference, policy: Policy) -> Any:
    case = _case(ref, policy)
    assume(case.p + policy.pages * P <= LENGTH, case.p - W >= case.c.cache_protected_len)
    return case.hole(ref, case.start)


def _cap(ref: SymbolicReference, policy: Policy) -> Any:
    case = _case(ref, policy)
    assume(case.c.swa_evicted_seqlen <= T)
    moves, needed = case.swept.swa_evicted_seqlen > T, _bound(ref, policy, T) <= LENGTH
    return implies(moves, needed) & implies(needed, moves)


def _cap_is_late(ref: SymbolicReference, policy: Policy) -> Any:
    case = _case(ref, policy)
    moves = (case.swept.swa_evicted_seqlen > T) & (case.p > case.c.cache_protected_len)
    return implies(moves, case.hole(ref, case.start))


def _faithful(ref: SymbolicReference, policy: Policy) -> Any:
    """A sweep that saw at most what is kept: no hole, and nothing for the cap to do."""
    case = _case(ref, policy)
    assume(case.c.swa_evicted_seqlen <= T)
    kept = (case.p >= LENGTH) & (T >= LENGTH)
    return implies(kept, ~case.hole(ref, POSITION) & (case.swept.swa_evicted_seqlen <= T))


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


def _part(
    name: str, claim: str, of: Callable[[SymbolicReference, Policy], Any], policy: Policy
) -> TheoremPart:
    text = claim.format(hole=policy.hole, never=policy.never, always=policy.always, cap=policy.cap)
    claim = f"Sweeps to {policy.frontier}: {text}"
    return TheoremPart(f"{name}/{policy.name}", claim, lambda ref: of(ref, policy))


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
