"""When a turn comes back behind its window: the exact condition, for every page size, window and length.

Window eviction runs with length L. A finish or a retract then cuts the row at a target, and the next turn
resumes at p = min(C, key). Some position that this turn reads, at R or later, has lost its SWA KV (a hole) if
and only if

    p > R  and  L >= W + (1 + margin) * P + floor(max(R, p - W))

margin is 1 where eviction stops at floor(L - W - P), and 0 where it stops at floor(L - W), as in SGLang
0.5.10. The functions below are statements. Each returns whether it holds for a row, and its contract says
that it always does. z3 proves the contracts; a test evaluates them on every small case.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.cursors import (
    Cursors, ceil_page, cut, evict_window, eviction_limit, floor_page, in_order, resume,
)  # fmt: skip

MARGINS = (1, 0)


@dataclass(frozen=True)
class Policy:
    """How far window eviction goes, and the conditions as a clause may quote them.

    They are over p, L, P, W, R and target.

    never: no hole, whatever the alignment.
    cap: when the cap of E at target changes E (#22900).
    """

    name: str
    frontier: str
    hole: str
    never: str
    cap: str


POLICIES = {
    1: Policy(
        "default", "floor(L - W - P)", "p > R and L >= W + 2P + floor(max(R, p - W))", "L - p <= P",
        "L >= W + 2P + floor(target)",
    ),
    0: Policy(
        "0.5.10", "floor(L - W)", "p > R and L >= W + P + floor(max(R, p - W))", "L - p <= 0",
        "L >= W + P + floor(target)",
    ),
}  # fmt: skip

PARAGRAPH = (
    "Window eviction with length L stops at floor(L - W - P). A finish or a retract then cuts the "
    "row, and the next turn resumes at p = min(C, key). A position that this turn reads has lost "
    "its SWA KV if, and only if, p > R and L >= W + 2P + floor(max(R, p - W)). So eviction must "
    "count more than P tokens past p. With L - p <= P nothing is lost, whatever the alignment. "
    "With P + 1 something is lost where p - W is the last position of a page, at R or later; from "
    "2P on, wherever p - W >= R. For page size 1, two tokens too many lose a position and one "
    "does not. A server that evicts to floor(L - W), as 0.5.10 does, has one P less everywhere: a "
    "single token past p can lose a position. A faithful scheduler evicts with an L that is at "
    "most what a later finish or retract keeps, so L <= p, and nothing is lost with either "
    "policy. The cap of E at the target (#22900) changes E only if L >= W + 2P + floor(target), "
    "again one P less for 0.5.10. Whenever the cap changes E, the window at p is lost already and "
    "nothing past R can be resumed, so the cap repairs no read by itself. It keeps E <= A true in "
    "the slot and memory checks balanced, and a server that resumes at p regardless does not "
    "leave [target, E), which the next turn writes to, below E, where nothing would ever free it."
)


def evicted(c: Cursors, length: int, window: int, page_size: int, margin: int) -> Cursors:
    """Return the cursors after window eviction."""
    if margin == 1:
        return evict_window(c, length, window, page_size)
    start = max(c.swa_evicted_seqlen, c.cache_protected_len)
    return c._replace(swa_evicted_seqlen=max(start, eviction_limit(length, window, page_size)))


def slot(c: Cursors, length: int, target: int, window: int, page_size: int, margin: int) -> Cursors:
    """Return the cursors after eviction and cut."""
    return cut(evicted(c, length, window, page_size, margin), target)


def resumes_at(c: Cursors, target: int, key: int) -> int:
    """p: where the next turn would resume by the literal rule."""
    return min(c.kv_committed_len, target, key)


def first_read(c: Cursors, target: int, key: int, window: int) -> int:
    """Return the first position at R or later that the turn reads."""
    return max(c.cache_protected_len, resumes_at(c, target, key) - window)


def has_swa(c: Cursors, position: int, page_size: int) -> bool:
    """Return whether the row owns the SWA page of a position (state.swa_pages)."""
    start = ceil_page(max(c.cache_protected_len, c.swa_evicted_seqlen), page_size)
    return start <= floor_page(position, page_size) < ceil_page(c.kv_allocated_len, page_size)


def is_row(c: Cursors, length: int, target: int, key: int, window: int, page_size: int) -> bool:
    """Return whether it is a row without a hole, before eviction with `length`."""
    return (
        page_size >= 1
        and window >= 1
        and in_order(c)
        and c.cache_protected_len % page_size == 0
        and c.swa_evicted_seqlen % page_size == 0
        and 0 <= length <= c.kv_allocated_len
        and c.cache_protected_len <= target
        and c.cache_protected_len <= key
        and c.swa_evicted_seqlen <= first_read(c, target, key, window)
    )


def hole(
    c: Cursors,
    length: int,
    target: int,
    key: int,
    position: int,
    window: int,
    page_size: int,
    margin: int,
) -> bool:
    """Return whether the next turn reads `position`, and its SWA KV is gone."""
    left = slot(c, length, target, window, page_size, margin)
    read = first_read(c, target, key, window) <= position < resumes_at(c, target, key)
    return read and not has_swa(left, position, page_size)


def bound(position: int, window: int, page_size: int, margin: int) -> int:
    """Return the length from which eviction reaches `position`."""
    return window + (2 * page_size if margin == 1 else page_size) + floor_page(position, page_size)


def condition(
    c: Cursors, length: int, target: int, key: int, window: int, page_size: int, margin: int
) -> bool:
    """Return whether the theorem says that there is a hole."""
    read_begin = first_read(c, target, key, window)
    behind = resumes_at(c, target, key) > c.cache_protected_len
    return behind and length >= bound(read_begin, window, page_size, margin)


def hole_only_if(
    c: Cursors,
    length: int,
    target: int,
    key: int,
    position: int,
    window: int,
    page_size: int,
    margin: int,
) -> bool:
    """There is no hole unless the condition holds.

    pre: is_row(c, length, target, key, window, page_size)
    post: _
    """
    is_hole = hole(c, length, target, key, position, window, page_size, margin)
    return not is_hole or condition(c, length, target, key, window, page_size, margin)


def hole_if(
    c: Cursors, length: int, target: int, key: int, window: int, page_size: int, margin: int
) -> bool:
    """If the condition holds there is a hole, at max(R, p - W).

    pre: is_row(c, length, target, key, window, page_size)
    pre: condition(c, length, target, key, window, page_size, margin)
    post: _
    """
    return hole(
        c, length, target, key, first_read(c, target, key, window), window, page_size, margin
    )


def hole_resume(
    c: Cursors, length: int, target: int, key: int, window: int, page_size: int, margin: int
) -> bool:
    """The reference resumes short of p if, and only if, the condition holds.

    pre: is_row(c, length, target, key, window, page_size)
    post: _
    """
    prefix = resume(slot(c, length, target, window, page_size, margin), key, window)
    short = prefix != resumes_at(c, target, key)
    return short == condition(c, length, target, key, window, page_size, margin)


def hole_never(
    c: Cursors,
    length: int,
    target: int,
    key: int,
    position: int,
    window: int,
    page_size: int,
    margin: int,
) -> bool:
    """With L - p <= margin * P there is no hole, whatever the alignment.

    pre: is_row(c, length, target, key, window, page_size)
    pre: length <= resumes_at(c, target, key) + (page_size if margin == 1 else 0)
    post: _
    """
    return not hole(c, length, target, key, position, window, page_size, margin)


def hole_least(
    c: Cursors, length: int, target: int, key: int, window: int, page_size: int, margin: int
) -> bool:
    """One token more, and p - W is the last position of a page, at R or later: a hole.

    pre: is_row(c, length, target, key, window, page_size)
    pre: length == resumes_at(c, target, key) + (page_size if margin == 1 else 0) + 1
    pre: resumes_at(c, target, key) - window >= c.cache_protected_len
    pre: (resumes_at(c, target, key) - window) % page_size == page_size - 1
    post: _
    """
    return hole(
        c, length, target, key, first_read(c, target, key, window), window, page_size, margin
    )


def hole_always(
    c: Cursors, length: int, target: int, key: int, window: int, page_size: int, margin: int
) -> bool:
    """With L - p >= (1 + margin) * P and p - W >= R there is a hole, whatever the alignment.

    pre: is_row(c, length, target, key, window, page_size)
    pre: length >= resumes_at(c, target, key) + (2 * page_size if margin == 1 else page_size)
    pre: resumes_at(c, target, key) - window >= c.cache_protected_len
    post: _
    """
    return hole(
        c, length, target, key, first_read(c, target, key, window), window, page_size, margin
    )


def cap_moves(
    c: Cursors,
    length: int,
    target: int,
    key: int,  # noqa: ARG001
    window: int,
    page_size: int,
    margin: int,
) -> bool:
    """E passes the target if, and only if, L >= W + (1 + margin) * P + floor(target).

    pre: is_row(c, length, target, key, window, page_size)
    pre: c.swa_evicted_seqlen <= target
    post: _
    """
    passes = evicted(c, length, window, page_size, margin).swa_evicted_seqlen > target
    return passes == (length >= bound(target, window, page_size, margin))


def cap_is_late(
    c: Cursors, length: int, target: int, key: int, window: int, page_size: int, margin: int
) -> bool:
    """Whenever E passes the target there is a hole at p, if p > R.

    pre: is_row(c, length, target, key, window, page_size)
    pre: evicted(c, length, window, page_size, margin).swa_evicted_seqlen > target
    pre: resumes_at(c, target, key) > c.cache_protected_len
    post: _
    """
    return hole(
        c, length, target, key, first_read(c, target, key, window), window, page_size, margin
    )


def hole_faithful(
    c: Cursors,
    length: int,
    target: int,
    key: int,
    position: int,
    window: int,
    page_size: int,
    margin: int,
) -> bool:
    """With L at most p and the target there is no hole, and E stays at most the target.

    pre: is_row(c, length, target, key, window, page_size)
    pre: c.swa_evicted_seqlen <= target
    pre: length <= resumes_at(c, target, key) and length <= target
    post: _
    """
    capped = evicted(c, length, window, page_size, margin).swa_evicted_seqlen <= target
    return capped and not hole(c, length, target, key, position, window, page_size, margin)
