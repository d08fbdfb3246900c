"""The rules of `model.py`, written out for people: what a command does, frees, and is refused for.

Formulas are expressions over C, A, E, R (the four cursors before the command: those of the request, or of
the slot that it resumes), P (page_size), W (window) and the names under `where`. They are no comment:
tests evaluate them, and the refusals, against `model.step` on every transition of small scopes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reference.commands import (
    Abort,
    Admit,
    CheckBusy,
    CheckIdle,
    Close,
    Decode,
    Evict,
    EvictSwa,
    Extend,
    Finish,
    Insert,
    Match,
    Open,
    Reason,
    Retract,
    SpecDecode,
    Submit,
    Unlock,
)  # fmt: skip

Span = tuple[str, str]  # [start, end) in tokens; empty where end <= start
NOTHING: Span = ("0", "0")


@dataclass(frozen=True, slots=True)
class Case:
    """What a command does in one case, on a server without a radix tree.

    when: the case in words; holds: as an expression over `slot`, `session`, `closing`, `started`, `turn`
    (what there is before the command). after: cursor -> formula, of those that move; None where the
    row is given back. full, swa: positions whose pages of that pool are given back.
    """

    when: str
    holds: str = "True"
    after: dict[str, str] | None = field(default_factory=dict)
    full: Span = NOTHING
    swa: Span = NOTHING


@dataclass(frozen=True, slots=True)
class Rule:
    """One command. where: names used in the formulas. cases: none where no cursor moves and nothing goes.

    choice: what is left to the system. tree: what is different, or more, on a server with a radix tree.
    refused: every reason that there is, in the order of Reason, and when.
    """

    command: type
    does: str
    refused: dict[Reason, str]
    where: tuple[tuple[str, str], ...] = ()
    cases: tuple[Case, ...] = ()
    choice: str = ""
    tree: str = ""


# The two ways in which a row gives pages back.
_CAPPED = {"C": "min(C, target)", "A": "min(A, target)", "E": "min(E, target)"}


def _cut(when: str, holds: str) -> Case:
    """The row is kept up to target."""
    return Case(when, holds, _CAPPED, ("ceil(target)", "ceil(A)"), ("ceil(max(target, E))", "ceil(A)"))


def _end(when: str, holds: str) -> Case:
    """The row goes, with all that it owns."""
    return Case(when, holds, None, ("R", "ceil(A)"), ("ceil(max(R, E))", "ceil(A)"))


_ROOM = {
    Reason.OUT_OF_FULL: "the pages that the batch opens are not to be had",
    Reason.OUT_OF_SWA: "the same of the SWA pool",
}
_MEMORY = {Reason.ROW_TOO_SHORT: "A' > width", **_ROOM}
_BATCH = {
    Reason.EMPTY: "no lanes, or a lane with less than one token",
    Reason.DUPLICATE_LANE: "a request is named twice",
    Reason.UNKNOWN_REQUEST: "a lane's request is not there",
}
_NOT_RUNNING = "the request does not run (its input is not complete, or it waits)"
_PROMPT = "no prompt, or an ill-formed one"
_MISSING = "the request is not there"

_ALL = (
    Rule(
        Open, "It keeps nothing yet: no row, no slot.",
        {Reason.SESSION_EXISTS: "a session, request or lock holder is called that"},
    ),
    Rule(
        Submit,
        "The request is its session's turn from now on; origin is the length of its input. It holds no KV.",
        {
            Reason.EMPTY: "less than one new token, or an ill-formed prompt",
            Reason.UNKNOWN_SESSION: "the session is not open",
            Reason.REQUEST_EXISTS: "a session, request or lock holder is called that",
            Reason.SESSION_CLOSING: "the session was closed while a turn was in flight",
            Reason.TURN_IN_FLIGHT: "the turn before has not ended",
            Reason.SHRINKING_PREFIX: "rewind > 0: the client takes back history",
            Reason.BAD_LENGTH: "rewind < 0",
            Reason.ROW_TOO_SHORT: "origin > width",
        },
    ),
    Rule(
        Admit,
        "Request and slot both get the cursors below, and the slot goes on naming the row while it is lent:"
        " the scheduler may reject the admission and admit again. No row is taken and none is written.",
        {Reason.UNKNOWN_REQUEST: _MISSING, Reason.WRONG_PHASE: "it extends or runs already"},
        (
            ("key", "origin + output - 1"),
            ("q", "min(C, key)"),
            ("p", "q if live(q) else R"),
        ),
        (
            Case("its session has no slot, or it has no session", "not slot",
                 {"C": "0", "A": "0", "E": "0", "R": "0"}),
            Case("its session has a slot", "slot", {"C": "p", "A": "p", "E": "min(E, p)"},
                 ("ceil(p)", "ceil(A)"), ("ceil(max(p, E))", "ceil(A)")),
        ),
        tree="Who has no slot gets the longest usable prefix of its key, locked under the session's name or"
        " its own: C = A = R = the length of that, E = 0. Admitted again it locks anew, and once.",
    ),
    Rule(
        Extend,
        "The tokens are computed and written. A request that has no row takes one. The output that a complete"
        " input samples has no KV yet, and the request runs.",
        {
            **_BATCH,
            Reason.WRONG_PHASE: "a lane's request was not admitted, or runs already",
            Reason.BAD_LENGTH: "C + tokens > origin + output: more than the input has",
            Reason.ROW_TOO_SHORT: "C + tokens > width",
            Reason.NO_ROW: "fewer rows are free than the batch takes",
            **_ROOM,
        },
        cases=(Case("each lane", after={"C": "C + tokens", "A": "C + tokens"}),),
        choice="A server may sweep here, before the allocation with the length committed then, or after the"
        " forward pass with the length committed by it.",
        tree="A request without a slot inserts the whole pages of its input that are computed, if it can"
        " match all of them again, and moves its lock to their end: R = floor(C'). Duplicates are freed."
        " Pages that are missing are evicted first, if they all can be had.",
    ),
    Rule(
        Decode,
        "KV of the newest token is written at C, and one output is sampled.",
        {
            **_BATCH,
            Reason.EMPTY: "no requests",
            Reason.WRONG_PHASE: _NOT_RUNNING,
            Reason.WINDOW_LOST: "not live(C): a sweep has freed SWA KV that the next token reads",
            **_MEMORY,
        },
        cases=(Case("each request", after={"C": "C + 1", "A": "max(A, C + 1)"}),),
        choice="A server may sweep here, with the length committed before.",
        tree="Missing pages are evicted first.",
    ),
    Rule(
        SpecDecode,
        "What commits counts as output. Between C and A there are slots without tokens: the next round writes"
        " them again.",
        {
            **_BATCH,
            Reason.WRONG_PHASE: _NOT_RUNNING,
            Reason.BAD_LENGTH: "accept > allocate",
            Reason.WINDOW_LOST: "not live(C)",
            **_MEMORY,
        },
        cases=(Case("each lane", after={"C": "C + accept", "A": "max(A, C + allocate)"}),),
        choice="A server may allocate further ahead, up to the row's width, and sweep as in decode.",
        tree="Missing pages are evicted first.",
    ),
    Rule(
        EvictSwa,
        "L is that length: SWA KV that no token at L or later reads is given back. Full KV stays.",
        {
            Reason.UNKNOWN_REQUEST: _MISSING,
            Reason.WRONG_PHASE: "it has no KV of its own: it waits",
            Reason.NO_SWA: "the model has no window",
            Reason.BAD_LENGTH: "not 0 <= L <= A",
            Reason.UNFAITHFUL: "L > C",
        },
        (("F", "max(E, R, floor(L - W - P))"),),
        (Case("always", after={"E": "F"}, swa=("ceil(max(E, R))", "F")),),
        choice="How far: F may be E (nothing swept), or any page boundary from max(E, R) to"
        " floor(max(0, L - W)).",
    ),
    Rule(
        Finish,
        "The session's history is the text up to target, and the session slot keeps the row, cut there. The"
        " next turn's input will start with that history.",
        {
            Reason.UNKNOWN_REQUEST: _MISSING,
            Reason.WRONG_PHASE: _NOT_RUNNING,
            Reason.BAD_LENGTH: "not 1 <= finished_len <= output",
            Reason.UNFAITHFUL: "target is below a length that a sweep of the turn was driven with, or takes"
            " back more than two rounds",
        },
        (("target", "origin + finished_len"),),
        (
            _cut("a turn, and its session stays open", "session and not closing"),
            _end("the turn that a deferred close has waited for: the session goes", "closing"),
            _end("an ordinary request", "not session"),
        ),
        tree="An ordinary request inserts the whole pages of its text up to min(C, target) and drops its"
        " lock; what the tree takes over is not freed. A session's lock stays with its slot.",
    ),
    Rule(
        Retract,
        "It is queued again with the outputs that are left. Of a turn the session slot keeps the KV, cut as a"
        " finish would; an ordinary request keeps none.",
        {
            Reason.UNKNOWN_REQUEST: _MISSING,
            Reason.WRONG_PHASE: _NOT_RUNNING,
            Reason.BAD_LENGTH: "in_flight is not 0 or 1, or no output is left",
            Reason.UNFAITHFUL: "target - 1 is below a length that a sweep of the turn was driven with",
        },
        (("target", "origin + output - in_flight"),),
        (_cut("a turn", "session"), _end("an ordinary request", "not session")),
        tree="An ordinary request inserts nothing and drops its lock; a session keeps its lock.",
    ),
    Rule(
        Abort,
        "The request is gone and leaves no trace in the history. A turn that has written KV, also one that"
        " waits after a retract, is midway: all that its session keeps is wiped, once, and the next turn"
        " prefills from scratch. One that has written nothing leaves the slot alone.",
        {
            Reason.UNKNOWN_REQUEST: _MISSING,
            Reason.WRONG_PHASE: "marked, and it has been admitted before",
            Reason.NO_ROW: "marked, and no row is free for its one-token prefill",
            Reason.OUT_OF_FULL: "marked, and no page is to be had",
            Reason.OUT_OF_SWA: "marked, and no SWA page is to be had",
        },
        cases=(
            Case("nothing was written, and no close waits for it", "not started and not closing"),
            _end("midway", "started"),
            _end("nothing was written, and a close has waited for it: the session goes",
                 "not started and closing"),
        ),
        tree="The lock of a wiped session, or that an admission without a slot has taken, is dropped.",
    ),
    Rule(
        Close,
        "All that the session keeps is given back, once.",
        {
            Reason.UNKNOWN_SESSION: "the session is not open",
            Reason.SESSION_CLOSING: "it has been closed already",
        },
        cases=(
            Case("a turn is in flight: deferred", "turn"),
            _end("no turn is in flight", "not turn"),
        ),
        tree="The session's lock is dropped, once.",
    ),
    Rule(
        CheckBusy,
        "It adds up the pools and the rows, and nothing changes. Each row counts once: through its request"
        " while a batch lists that (uncached), else through its slot (session_held); ceil(A) - R tokens of"
        " the full pool, ceil(A) - ceil(max(R, E)) of the SWA pool, one row.",
        {Reason.BAD_LENGTH: "a level that is not 0, 1 or 2"},
    ),
    Rule(
        CheckIdle,
        "Sums as in a busy check.",
        {Reason.NOT_IDLE: "a request extends or runs"},
    ),
    Rule(
        Match,
        "The prefix ends with a node, or where the prompt leaves the tree: the node there is split.",
        {
            Reason.EMPTY: _PROMPT,
            Reason.REQUEST_EXISTS: "a session, request or lock holder is called that",
            Reason.NO_TREE: "the server has none",
            Reason.ROW_TOO_SHORT: "the prompt is longer than a row",
        },
    ),
    Rule(
        Unlock, "Exactly that, whatever was split since.",
        {Reason.UNKNOWN_REQUEST: "no lock holder is called that"},
    ),
    Rule(
        Insert,
        "The whole pages of the prompt are in the tree, live from ceil(evicted) on, tombstones below. Pages"
        " that were there are freed as duplicates, but for tombstones that no lock passes through: those take"
        " the inserter's.",
        {
            Reason.EMPTY: _PROMPT,
            Reason.REQUEST_EXISTS: "a session or request is called that",
            Reason.SHRINKING_PREFIX: "the prompt does not start with what the lock holder has locked",
            Reason.NO_SWA: "evicted, and the model has no window",
            Reason.NO_TREE: "the server has none",
            Reason.BAD_LENGTH: "evicted is negative, or past the prompt",
            Reason.UNFAITHFUL: "evicted is past the lock holder's prefix and past what a sweep of the"
            " prompt may reach",
            Reason.ROW_TOO_SHORT: "the prompt is longer than a row",
            Reason.OUT_OF_FULL: "the lock holder's own pages are not to be had",
            Reason.OUT_OF_SWA: "the same of the SWA pool",
        },
    ),
    Rule(
        Evict,
        "Least recently used first, until so many tokens of each pool are free or nothing is left that no"
        " lock pins. For the full pool leaves go, with their SWA KV; for the SWA pool a node becomes a"
        " tombstone, an unlocked leaf goes. A tombstone without children goes as well.",
        {
            Reason.EMPTY: "nothing is asked for",
            Reason.NO_SWA: "SWA tokens, and the model has no window",
            Reason.NO_TREE: "the server has none",
            Reason.BAD_LENGTH: "a negative number",
        },
    ),
)  # fmt: skip

RULES: dict[type, Rule] = {rule.command: rule for rule in _ALL}
