"""How long Hypothesis shrinks a failing run before ours goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hypothesis import reporting
from hypothesis.internal.conjecture import engine

SECONDS = 3  # in which it leaves half of a run, about; ours needs a second for the rest


@contextmanager
def bounded_shrinking() -> Iterator[None]:
    """Hypothesis shrinks for `SECONDS` instead of five minutes, and does not ask to report that.

    It has no setting for this. The constants of its engine may be patched, as a comment there says.
    """
    report = reporting.current_reporter()

    def without_warning(text: object) -> None:
        if not any(said in str(text) for said in ("working to shrink", "too long to shrink")):
            report(text)

    bound = patch.object(engine, "MAX_SHRINKING_SECONDS", SECONDS)
    with bound, reporting.with_reporter(without_warning):
        yield
