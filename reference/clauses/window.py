"""The sliding window: sweeps, live windows (SWA)."""

from __future__ import annotations

from collections.abc import Iterator

from reference.clauses.base import clause
from reference.clauses.lengths import cursors_off
from reference.clauses.step import Step, swept_below
from reference.commands import Decode, EvictSwa, Extend, Launch, SpecDecode
from reference.failures import AtCursor, AtPosition, Failure, failure
from reference.ledger import Request


@clause(
    "SWA-1",
    "sweeps leave every window alone",
    "A sweep driven with `length` moves swa_evicted_seqlen to a page boundary, never back, and at most to"
    " floor(length - window): what a token at `length` or later reads stays. A sweep inside a round sees what"
    " is committed by results that are there, and nothing of what rounds in flight have claimed.",
    why="SWA KV that was swept cannot be had back.",
    decision="Our default stops a page short, at floor(length - W - P), to stay off the tree's insert"
    " boundary (#22470); 0.5.10 sweeps to floor(length - W). Both are policy: the bound is the window,"
    " which reaches `window` tokens back from the one that is computed (SGLang's sliding_window_size)."
    " length may be anything up to kv_allocated_len (free mode). Whoever was swept past its commit may end,"
    " but not decode (window_lost).",
    assumption="A faithful scheduler drives with at most kv_committed_len, and never with more than a later"
    " finish or retract of the turn keeps: then nobody's window is lost.",
    rule="cursors.sweep, cursors.sweep_limit",
    source="#22470",
    scope="EvictSwa, and sweeps inside prefill and rounds, which see the length committed before; if a system"
    " says that it sweeps a prefill after its forward pass, the length committed then.",
    of=(EvictSwa, Extend, Decode, SpecDecode, Launch),
    needs=("window",),
    trigger=lambda s: any(
        was.cursors is not None and s.frontier(was.name) > was.cursors.swa_evicted_seqlen
        for was, _ in sweeps(s)
    ),
)
def _sweep_bounds(step: Step) -> Failure | None:
    found = oversweep(step)
    if found is None:
        return None
    (request, length, low, high, got), window = found, step.config.geometry.window
    assert window is not None
    told = f"{request.name}: swa_evicted_seqlen in [{low}, {high}]"
    if low <= got <= high:
        why = f"inside a page of {step.config.geometry.page_size} tokens"
    elif got < low:
        why = f"and what lies below {low} is gone"
    else:
        why = f"and a token at {length} reads a window of {window} back"
    head = f"leaves the SWA KV of {request.name} from {got} on, {why}"
    return failure(told, f"{got}", AtCursor(request.name, "swa_evicted_seqlen"), head=head)


def oversweep(step: Step) -> tuple[Request, int, int, int, int] | None:
    """(request before, driving length, least and most that swa_evicted_seqlen may be, what it is) of the
    first sweep out of bounds."""
    size, window = step.config.geometry.page_size, step.config.geometry.window
    for was, length in sweeps(step):
        assert was.cursors is not None and window is not None
        low = max(was.cursors.swa_evicted_seqlen, was.cursors.cache_protected_len)
        high = max(low, (length - window) // size * size)
        got = step.frontier(was.name)
        cursors = step.after.requests[was.name].cursors
        if step.tree_policy_is_free and cursors is not None and got <= cursors.cache_protected_len:
            continue  # the tree's by now: nothing of its own was swept
        bad = not low <= got <= high or got % size
        if bad and got != was.cursors.swa_evicted_seqlen:
            return was, length, low, high, got
    return None


def sweeps(step: Step) -> Iterator[tuple[Request, int]]:
    """(request before, driving length) for each sweep that the command was or may contain."""
    if not step.done or step.config.geometry.window is None:
        return
    names = dict.fromkeys(step.progress, None) | (
        {step.command.request: None} if isinstance(step.command, EvictSwa) else {}
    )
    for name in names:
        was = step.was.request(name)
        assert was is not None and was.cursors is not None
        if name not in step.after.requests:
            continue
        length = was.settled_len
        if isinstance(step.command, EvictSwa):
            length = step.command.length
        elif isinstance(step.command, Extend) and name in step.swept_after:
            length += step.progress[name][0]
        yield was, length


@clause(
    "SWA-2",
    "the window of the next token is live",
    "Whoever computes a token at position p finds an SWA slot for every position in [p - window, p). With"
    " rounds in flight p is where the oldest of them began.",
    of_state=True,
    why="A turn resumed behind its window reads SWA KV that is gone.",
    decision="The literal prefix p = min(C, key) is safe unless p > R and some sweep of the row was driven"
    " with L >= W + 2P + floor(max(R, p - W)) tokens, and then it is not: proved both ways (`kvspec prove`)."
    " Sweeps up to floor(length - W), as 0.5.10 has them, need a page less. Beyond that nothing past R can be"
    " resumed: every position below E is gone, so any later prefix has a hole behind it. The turn starts"
    " again from R (0 without a tree). Smallest: submit 1, admit, extend 1, spec_decode far ahead, evict_swa"
    " all of it, retract, admit. With page_size > 1 the same rule keeps the next extend out of a page whose"
    " SWA half was swept.",
    assumption="If every sweep of the row had L <= p + P, the turn can always resume at p. A faithful"
    " scheduler has L <= p.",
    rule="cursors.resume, cursors.window_live",
    source="kvspec",
    scope="Models with SWA; admitted, prefilling and running requests, but for those whose window a sweep in"
    " free mode has taken, by the reference: they may only end.",
    needs=("window",),
    trigger=lambda s: s.swept_any,
)
def _window(step: Step) -> Failure | None:
    window = step.config.geometry.window
    if window is None:
        return None
    for request in step.now.requests:
        facts, seen = step.after.requests.get(request.name), step.after.holders.get(request.holder)
        c = request.cursors
        if c is None or facts is None or facts.cursors is None or seen is None:
            continue
        if swept_below(c) > max(0, request.settled_len - window):
            continue  # free mode: may only end
        p = facts.cursors.kv_committed_len - (c.kv_committed_len - request.settled_len)
        start = max(0, p - window)
        if None in seen.swa_read[start : max(start, p)]:
            dead = [q for q in range(start, min(p, len(seen.swa_read))) if seen.swa_read[q] is None]
            off = cursors_off(request.name, c, facts.cursors)
            return failure(
                f"{request.name} at {p}: window from {start} live",
                f"no SWA KV for positions {dead}",
                *(AtPosition(request.holder, "swa", position) for position in dead),
                *(place for place in off if place.field == "kv_committed_len"),
                head=f"has {request.name} go on at position {p}, whose window starts at {start}",
            )
    return None
