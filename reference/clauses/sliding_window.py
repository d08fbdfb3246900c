"""The sliding window: window evictions, live windows (SWA)."""

from __future__ import annotations

from collections.abc import Iterator

from reference.clauses.registry import clause
from reference.clauses.cursor_bounds import cursors_off
from reference.clauses.step import Step, swa_start
from reference.commands import Decode, EvictSwa, Extend, Launch, SpecDecode
from reference.failures import AtCursor, AtPosition, Failure, failure
from reference.state import Request


@clause(
    "SWA-1",
    "window eviction leaves every window alone",
    "Window eviction with `length` moves swa_evicted_seqlen to a page boundary, never back, and "
    "at most to floor(length - window): what a token at `length` or later reads stays. Eviction "
    "inside a round counts the confirmed tokens only.",
    why="Evicted SWA KV does not come back.",
    decision=(
        "The bound is the window, `window` tokens back from the computed token (SGLang's "
        "sliding_window_size); stopping earlier is policy. The built-in implementation stops at "
        "floor(length - W - P), off the tree's insert boundary (#22470); 0.5.10 goes to "
        "floor(length - W). In unrestricted mode length may be up to kv_allocated_len. A request "
        "evicted past its commit may end, but not decode (window_lost)."
    ),
    assumption=(
        "A realistic scheduler uses at most kv_committed_len, and at most what a later finish or "
        "retract of the turn keeps: then no window is lost."
    ),
    rule="cursors.evict_window, cursors.eviction_limit",
    source="#22470",
    scope=(
        "EvictSwa, and window eviction inside prefill and rounds, with the length committed "
        "before; after the forward pass of a prefill if the system says so."
    ),
    of=(EvictSwa, Extend, Decode, SpecDecode, Launch),
    needs=("window",),
    trigger=lambda s: any(
        was.cursors is not None and s.frontier(was.name) > was.cursors.swa_evicted_seqlen
        for was, _ in window_evictions(s)
    ),
)
def _evictions_leave_windows(step: Step) -> Failure | None:
    eviction = evicted_too_far(step)
    if eviction is None:
        return None
    request, length, low, high, evicted_to = eviction
    window = step.config.geometry.window
    assert window is not None
    allowed = f"= {low}" if low == high else f"from {low} to {high}"
    expected = f"{request.name}: swa_evicted_seqlen {allowed}"
    if low <= evicted_to <= high:
        reason = f"inside a page of {step.config.geometry.page_size} tokens"
    elif evicted_to < low:
        reason = f"and what lies below {low} is gone"
    else:
        reason = f"and a token at {length} reads a window of {window} back"
    must = f"{low}" if low == high else f"{allowed} and whole pages"
    leaves = f"leaves the SWA KV of {request.name} from {evicted_to} on"
    head = f"{leaves}, {reason}; swa_evicted_seqlen must be {must}"
    return failure(expected, f"{evicted_to}", AtCursor(request.name, "swa_evicted_seqlen"), head=head)


def evicted_too_far(step: Step) -> tuple[Request, int, int, int, int] | None:
    """Return (request before, driving length, least and greatest allowed swa_evicted_seqlen, observed
    one) for the first window eviction out of bounds."""
    size = step.config.geometry.page_size
    window = step.config.geometry.window
    for was, length in window_evictions(step):
        assert was.cursors is not None and window is not None
        low = max(was.cursors.swa_evicted_seqlen, was.cursors.cache_protected_len)
        high = max(low, (length - window) // size * size)
        evicted_to = step.frontier(was.name)
        cursors = step.after.requests[was.name].cursors
        if step.tree_policy_is_free and cursors is not None and evicted_to <= cursors.cache_protected_len:
            continue  # the tree's by now: nothing of its own was evicted
        bad = not low <= evicted_to <= high or evicted_to % size
        if bad and evicted_to != was.cursors.swa_evicted_seqlen:
            return was, length, low, high, evicted_to
    return None


def window_evictions(step: Step) -> Iterator[tuple[Request, int]]:
    """Return (request before, driving length) for each window eviction that the command was or may
    contain."""
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
        elif isinstance(step.command, Extend) and name in step.window_evictions:
            length += step.progress[name][0]
        yield was, length


@clause(
    "SWA-2",
    "the window of the next token is live",
    "A token computed at position p finds an SWA slot for every position in [p - window, p). "
    "With rounds in flight p is where the oldest began.",
    why="A turn resumed behind its window reads SWA KV that is gone.",
    decision=(
        "The prefix p = min(C, key) is safe unless p > R and some eviction of the row used L >= "
        "W + 2P + floor(max(R, p - W)) tokens; then it is not safe. Both directions are proved "
        "(`kvspec prove`). For eviction up to floor(length - W), as in 0.5.10, the bound is a "
        "page less. In the unsafe case every later prefix has a hole behind it too, so the turn "
        "restarts at R. With page_size > 1 the rule also keeps the next extend out of a page whose "
        "SWA half was evicted."
    ),
    assumption="If every window eviction of the row had L <= p + P, the turn can always resume at p."
    " A realistic scheduler has L <= p.",
    rule="cursors.resume, cursors.window_live",
    source="kvspec",
    scope=(
        "Models with SWA; admitted, prefilling and running requests. A request whose window the "
        "reference has evicted (unrestricted mode) may only end."
    ),
    needs=("window",),
    trigger=lambda s: s.evicted_any,
)
def _next_window_is_live(step: Step) -> Failure | None:
    """Return the failure of the first request without SWA KV in the window of its next token."""
    window = step.config.geometry.window
    if window is None:
        return None
    for request in step.now.requests:
        facts = step.after.requests.get(request.name)
        holder_facts = step.after.holders.get(request.holder)
        c = request.cursors
        if c is None or facts is None or facts.cursors is None or holder_facts is None:
            continue
        if swa_start(c) > max(0, request.settled_len - window):
            continue  # free mode: may only end
        p = facts.cursors.kv_committed_len - (c.kv_committed_len - request.settled_len)
        start = max(0, p - window)
        if None in holder_facts.swa_read[start : max(start, p)]:
            dead = [
                q
                for q in range(start, min(p, len(holder_facts.swa_read)))
                if holder_facts.swa_read[q] is None
            ]
            off = cursors_off(request.name, c, facts.cursors)
            return failure(
                f"{request.name} at {p}: window from {start} live",
                f"no SWA KV for positions {dead}",
                *(AtPosition(request.holder, "swa", position) for position in dead),
                *(place for place in off if place.field == "kv_committed_len"),
                head=f"has {request.name} go on at position {p}, whose window starts at {start}",
            )
    return None
