"""Arithmetic on the four cursors: pure functions on integers, with contracts CrossHair checks.

C kv_committed_len, A kv_allocated_len, E swa_evicted_seqlen, R cache_protected_len, P page_size,
W window; all in tokens, W 0 standing for a model without SWA. The contracts (`pre:`, `post:`) are
written for arbitrary integers: `crosshair check reference/cursors.py` searches them symbolically.
"""

from __future__ import annotations

from typing import NamedTuple


class Cursors(NamedTuple):
    """The four cursors of a row, in tokens: C, A, E and R of the specification."""

    kv_committed_len: int
    kv_allocated_len: int
    swa_evicted_seqlen: int
    cache_protected_len: int


def ceil_page(length: int, page_size: int) -> int:
    """`length` rounded up to whole pages.

    pre: page_size > 0
    post: _ >= length
    post: _ < length + page_size
    post: _ % page_size == 0
    """
    return -(-length // page_size) * page_size


def floor_page(length: int, page_size: int) -> int:
    """`length` rounded down to whole pages.

    pre: page_size > 0
    post: _ <= length
    post: _ > length - page_size
    post: _ % page_size == 0
    """
    return length // page_size * page_size


def page_ends(length: int, page_size: int, start: int = 0) -> range:
    """Return the ends of the whole pages in [start, length).

    start: a page boundary.
    """
    return range(start + page_size, length + 1, page_size)


def in_order(c: Cursors) -> bool:
    """0 <= R <= C <= A and 0 <= E <= A (LEN-1, without width and alignment)."""
    return (
        0 <= c.cache_protected_len <= c.kv_committed_len <= c.kv_allocated_len
        and 0 <= c.swa_evicted_seqlen <= c.kv_allocated_len
    )


def cut(c: Cursors, target: int) -> Cursors:
    """Cap C, A and E at `target` (LEN-2, LEN-3; #22862, #22897, #22900).

    pre: in_order(c)
    pre: target >= c.cache_protected_len
    post: in_order(_)
    post: max(_[0], _[1], _[2]) <= target
    post: _[1] == target or _[1] == c[1]
    post: _[3] == c[3]
    """
    return Cursors(
        min(c.kv_committed_len, target),
        min(c.kv_allocated_len, target),
        min(c.swa_evicted_seqlen, target),
        c.cache_protected_len,
    )


def may_stop_at(c: Cursors, target: int, stop: int, window: int, page_size: int) -> bool:
    """A cut at `target` may keep less, up to `stop`: a page boundary from R on, if the window behind what it
    would keep was evicted. Nothing past R can be resumed then, and the page that `target` falls into may have
    lost its SWA half.

    pre: window >= 0 and page_size > 0
    pre: in_order(c) and c.cache_protected_len % page_size == 0
    pre: target >= c.cache_protected_len
    post: not _ or resume(cut(c, target), target, window) == c[3]
    post: not _ or in_order(cut(c, stop))
    """
    if window == 0 or window_live(lost_below(c), min(c.kv_committed_len, target), window):
        return False
    return c.cache_protected_len <= stop <= target and stop % page_size == 0


def has_all_kv(c: Cursors, target: int, stop: int) -> bool:
    """A cut at `target` may stop at `stop` already: what it gives back besides has no KV.

    pre: in_order(c)
    pre: target >= c.cache_protected_len
    post: not _ or in_order(cut(c, stop))
    post: not _ or cut(c, stop)[0] == cut(c, target)[0]
    """
    slot = cut(c, target)
    return max(slot.kv_committed_len, slot.swa_evicted_seqlen) <= stop <= slot.kv_allocated_len


def owed_full(c: Cursors, target: int, page_size: int) -> tuple[int, int]:
    """Positions whose full pages a cut at `target` frees: [ceil(target), ceil(A)), may be empty.

    The page that `target` falls into holds committed tokens and stays (#22862 review).

    pre: page_size > 0
    pre: in_order(c)
    pre: target >= c.cache_protected_len
    post: _[0] >= target
    post: _[0] % page_size == 0 and _[1] % page_size == 0
    post: _[1] >= c[1]
    post: _[0] >= _[1] or ceil_page(cut(c, target)[1], page_size) == _[0]
    """
    return ceil_page(target, page_size), ceil_page(c.kv_allocated_len, page_size)


def owed_swa(c: Cursors, target: int, page_size: int) -> tuple[int, int]:
    """Positions whose SWA pages a cut at `target` frees: from ceil(E) on, if that is beyond.

    What lies below E was freed by a window eviction and must not be freed twice.

    pre: page_size > 0
    pre: in_order(c)
    pre: target >= c.cache_protected_len
    post: _[0] >= target
    post: _[0] >= c.swa_evicted_seqlen
    post: _[0] < max(target, c[2], c[3]) + page_size
    post: _[0] % page_size == 0 and _[1] % page_size == 0
    post: _[1] >= c[1]
    """
    live = max(target, c.swa_evicted_seqlen, c.cache_protected_len)
    return ceil_page(live, page_size), ceil_page(c.kv_allocated_len, page_size)


def counted_full(c: Cursors, page_size: int) -> int:
    """Tokens of the full pool that a memory check counts for a row: ceil(A) - R (CHK-2; #21499).

    pre: page_size > 0
    pre: in_order(c)
    pre: c.cache_protected_len % page_size == 0
    post: _ == page_size * len(range(c[3] // page_size, -(-c[1] // page_size)))
    """
    return ceil_page(c.kv_allocated_len, page_size) - c.cache_protected_len


def counted_swa(c: Cursors, page_size: int) -> int:
    """Tokens of the SWA pool that a memory check counts for a row: ceil(A) - ceil(max(R, E)).

    The literal rule, ceil(A) - max(R, E), is safe while E is a page boundary. A cut caps E at any
    target, which a faithful scheduler never evicts past.

    pre: page_size > 0
    pre: in_order(c)
    post: _ == page_size * len(range(-(-max(c[2], c[3]) // page_size), -(-c[1] // page_size)))
    """
    dead = max(c.cache_protected_len, c.swa_evicted_seqlen)
    return ceil_page(c.kv_allocated_len, page_size) - ceil_page(dead, page_size)


def window_start(position: int, window: int) -> int:
    """First position that attention at `position` reads in SWA layers: `window` back, as SGLang counts.

    pre: window > 0
    pre: position >= 0
    post: 0 <= _ <= position
    post: _ == 0 or position - _ == window
    """
    return max(0, position - window)


def window_live(evicted: int, position: int, window: int) -> bool:
    """Return whether a token can be computed at `position`: no SWA slot it reads was evicted (SWA-2).

    Its own page then has its SWA half too: a window eviction ends at a page boundary below `position`.

    pre: window > 0
    pre: evicted >= 0 and position >= 0
    post: not _ or evicted <= position
    post: _ or evicted > 0
    """
    return evicted <= window_start(position, window)


def lost_below(c: Cursors) -> int:
    """Position below which a row has no SWA KV: E, unless that lies in the radix tree's prefix.

    A window eviction starts at R, so E <= R says that nothing of the row's own was evicted; what the tree has
    there stays for as long as it is locked (TREE-5).

    pre: in_order(c)
    post: _ == 0 or _ > c[3]
    """
    return c.swa_evicted_seqlen if c.swa_evicted_seqlen > c.cache_protected_len else 0


def eviction_limit(length: int, window: int, page_size: int) -> int:
    """Furthest page boundary below which no window of a token at `length` or later reaches (SWA-1).

    pre: window > 0 and page_size > 0
    pre: length >= 0
    post: 0 <= _ and _ % page_size == 0
    post: window_live(_, length, window)
    """
    return floor_page(window_start(length, window), page_size)


def evict_window(c: Cursors, length: int, window: int, page_size: int) -> Cursors:
    """Window eviction's new E: floor(length - W - P), never back (#22470 for the extra page).

    pre: window > 0 and page_size > 0
    pre: in_order(c)
    pre: c.cache_protected_len % page_size == 0
    pre: 0 <= length <= c.kv_allocated_len
    post: in_order(_)
    post: _[2] == max(c[2], c[3]) or _[2] <= eviction_limit(length, window, page_size)
    post: _[2] == max(c[2], c[3]) or _[2] % page_size == 0
    """
    frontier = floor_page(length - window - page_size, page_size)
    return c._replace(swa_evicted_seqlen=max(c.swa_evicted_seqlen, c.cache_protected_len, frontier))


def resume(c: Cursors, key: int, window: int) -> int:
    """Prefix that a later turn resumes at: min(C, key), or R when its window was evicted (SWA-3).

    `key` is the input less one token. The literal rule, min(C, key) alone, is safe when no window eviction
    ran more than P tokens past the prefix, which a faithful scheduler guarantees.

    pre: window >= 0
    pre: in_order(c)
    pre: key >= c.cache_protected_len
    post: _ == c[3] or _ == min(c[0], key)
    post: _ == min(c[0], key) or not window_live(lost_below(c), min(c[0], key), window)
    post: _ == c[3] or window == 0 or window_live(lost_below(c), _, window)
    """
    prefix = min(c.kv_committed_len, key)
    if window == 0 or window_live(lost_below(c), prefix, window):
        return prefix
    return c.cache_protected_len
