"""What the arithmetic of the cursors has to obey, page by page: statements for two engines.

Each function is a statement with a contract (`pre:`, `post:`) over the reference's own functions. `kvspec
prove` proves it for all integers, `crosshair check` searches for a counterexample; both read the same text.
`page` is any page index of a sequence, `position` any position: what holds for one of which nothing is
known holds for all.
"""

from __future__ import annotations

from reference.cursors import (  # noqa: F401 - some are named in contracts alone
    Cursors,
    counted_full,
    counted_swa,
    cut,
    in_order,
    lost_below,
    owed_full,
    owed_swa,
    resume,
    sweep,
    window_live,
    window_start,
)  # fmt: skip
from reference.ledger import full_pages, swa_pages


def a_cut_frees_full_pages(c: Cursors, target: int, page_size: int, page: int) -> bool:
    """Owned before is owned after or freed, never both: full pool, cut at `target`.

    pre: page_size > 0
    pre: in_order(c) and c[3] % page_size == 0
    pre: target >= c[3]
    post: _
    """
    low, high = owed_full(c, target, page_size)
    freed = page in range(low // page_size, high // page_size)
    kept = page in full_pages(cut(c, target), page_size)
    return (page in full_pages(c, page_size)) == (freed or kept) and not (freed and kept)


def a_cut_frees_swa_pages(c: Cursors, target: int, page_size: int, page: int) -> bool:
    """The same in the SWA pool.

    pre: page_size > 0
    pre: in_order(c) and c[3] % page_size == 0
    pre: target >= c[3]
    post: _
    """
    low, high = owed_swa(c, target, page_size)
    freed = page in range(low // page_size, high // page_size)
    kept = page in swa_pages(cut(c, target), page_size)
    return (page in swa_pages(c, page_size)) == (freed or kept) and not (freed and kept)


def a_cut_frees_as_many_swa_pages(c: Cursors, target: int, page_size: int) -> bool:
    """As many SWA tokens are freed as are counted no more.

    pre: page_size > 0
    pre: in_order(c) and c[3] % page_size == 0
    pre: target >= c[3]
    post: _
    """
    low, high = owed_swa(c, target, page_size)
    return counted_swa(c, page_size) == counted_swa(cut(c, target), page_size) + max(0, high - low)


def a_sweep_ends_at_a_page(c: Cursors, length: int, window: int, page_size: int) -> bool:
    """Whatever the length, if the frontier was at one before.

    pre: window > 0 and page_size > 0
    pre: in_order(c) and c[3] % page_size == 0 and c[2] % page_size == 0
    pre: 0 <= length <= c[1]
    post: _
    """
    return sweep(c, length, window, page_size)[2] % page_size == 0


def a_sweep_frees_swa_pages(c: Cursors, length: int, window: int, page_size: int, page: int) -> bool:
    """A sweep frees the SWA pages below the new E and keeps the others.

    pre: window > 0 and page_size > 0
    pre: in_order(c) and c[3] % page_size == 0 and c[2] % page_size == 0
    pre: 0 <= length <= c[1]
    post: _
    """
    swept = sweep(c, length, window, page_size)
    before, after = page in swa_pages(c, page_size), page in swa_pages(swept, page_size)
    freed = before and page < swept[2] // page_size
    return before == (freed or after) and not (freed and after)


def a_sweep_leaves_windows(c: Cursors, length: int, window: int, page_size: int, position: int) -> bool:
    """A token at `length` or later loses nothing that it reads to a sweep driven with `length`.

    pre: window > 0 and page_size > 0
    pre: in_order(c) and c[3] % page_size == 0
    pre: 0 <= length <= c[1] and position >= length
    post: _
    """
    swept = sweep(c, length, window, page_size)
    return max(c[2], c[3]) <= swept[2] <= max(c[2], c[3], window_start(position, window))


def a_live_window_has_its_pages(
    c: Cursors, position: int, window: int, page_size: int, read: int  # noqa: ARG001 - asked for below
) -> bool:
    """What a token at `position` reads past R has an SWA page, if its window is live.

    pre: window > 0 and page_size > 0
    pre: in_order(c) and c[3] % page_size == 0 and c[2] % page_size == 0
    pre: c[3] <= position <= c[0] and max(c[3], window_start(position, window)) <= read < position
    pre: window_live(lost_below(c), position, window)
    post: _
    """
    return read // page_size in swa_pages(c, page_size)


def a_turn_resumes_at_its_prefix(c: Cursors, key: int, window: int) -> bool:
    """min(C, key) where its window is live or there is none, else R.

    pre: window >= 0
    pre: in_order(c)
    pre: key >= c[3]
    post: _
    """
    prefix = min(c[0], key)
    live = window == 0 or c[2] <= max(c[3], prefix - window, 0)
    return resume(c, key, window) == (prefix if live else c[3])


def a_check_counts_full_pages(c: Cursors, page_size: int) -> bool:
    """What a memory check counts is what the row owns: full pool.

    pre: page_size > 0
    pre: in_order(c) and c[3] % page_size == 0
    post: _
    """
    return counted_full(c, page_size) == page_size * len(full_pages(c, page_size))


def a_check_counts_swa_pages(c: Cursors, page_size: int) -> bool:
    """The same in the SWA pool.

    pre: page_size > 0
    pre: in_order(c) and c[3] % page_size == 0
    post: _
    """
    return counted_swa(c, page_size) == page_size * len(swa_pages(c, page_size))
