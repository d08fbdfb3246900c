"""The sizes of a system: page, window, pools, rows, radix tree, settings. They are validated once, here.

`page_size`, `window` and `width` are tokens. `full_pages` and `swa_pages` are pages that can be handed out;
the padding page 0 comes on top. `rows` are rows of req_to_token. `states` are slots of recurrent state that
can be handed out; the padding slot 0 comes on top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

# Bounds that keep a hostile trace cheap: no geometry inside them costs more than a few MiB.
LIMITS = {
    "page_size": 1024,
    "window": 1 << 20,
    "full_pages": 1 << 14,
    "swa_pages": 1 << 14,
    "rows": 1 << 10,
    "width": 1 << 14,
    "states": 1 << 10,
    "pool_tokens": 1 << 18,
    "row_cells": 1 << 20,
}
SETTING = r"[A-Za-z][A-Za-z0-9_.-]{0,79}", r"[A-Za-z0-9_.,:-]{1,40}"  # its name, its value


class GeometryError(ValueError):
    """A geometry that no system can be built with; names the field and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one system. `window` None means a model without SWA: one pool, `swa_pages` 0.

    Raises GeometryError when a size is out of bounds or the sizes do not fit together.
    """

    page_size: int
    window: int | None
    full_pages: int
    swa_pages: int
    rows: int
    width: int
    #: prefixes are kept in a radix tree (else nothing outlives its request but a session's slot)
    tree: bool = False
    #: names and values of switches of the system, sorted. A system ignores those that it lacks; the
    #: rules read none.
    settings: tuple[tuple[str, str], ...] = ()
    #: the tree knows each token together with the one that follows it (EAGLE)
    bigram: bool = False
    #: 0 of a model without recurrent layers. Only the state at the end of a text is kept, so a page
    #: has one token, and a key of the tree is no bigram.
    states: int = 0
    #: states inside a text are kept as well, at ends of pages, while its request goes on (SGLang's
    #: extra_buffer); pages may be longer then
    tracks: bool = False
    #: of the slots for those states a request has the second only while a batch may write into it
    #: (extra_buffer_lazy)
    lazy: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            self._check_alone(f.name, getattr(self, f.name))
        self._check_together()

    def _check_alone(self, name: str, value: object) -> None:
        """Raise GeometryError for a field whose value is out of bounds."""
        if name == "settings":
            for setting in self.settings:
                for pattern, text in zip(SETTING, setting, strict=True):
                    if not re.fullmatch(pattern, text):
                        raise GeometryError(name, f"must be like {pattern}, not {text!r:.60}")
            return
        if name in ("tree", "bigram", "tracks", "lazy"):
            if not isinstance(value, bool):
                raise GeometryError(name, f"must be true or false, not {value!r:.40}")
            return
        if name == "window" and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise GeometryError(name, f"must be a whole number, not {value!r:.40}")
        low = 0 if name == "states" or (name == "swa_pages" and self.window is None) else 1
        if not low <= value <= LIMITS[name]:
            raise GeometryError(name, f"must be in [{low}, {LIMITS[name]}], not {value}")

    def _check_together(self) -> None:
        """Raise GeometryError for fields that do not fit together."""
        if self.bigram and not self.tree:
            raise GeometryError("bigram", "needs a tree")
        if self.tracks and not self.states:
            raise GeometryError("tracks", "needs states")
        if self.lazy and not self.tracks:
            raise GeometryError("lazy", "needs tracks")
        if self.states and ((self.page_size > 1 and not self.tracks) or self.bigram):
            raise GeometryError(
                "states", "needs page_size 1 or tracks, and no bigram: a state is of one end"
            )
        if self.window is None and self.swa_pages:
            raise GeometryError("swa_pages", "must be 0 when window is null (no SWA pool)")
        for name in ("full_pages", "swa_pages"):
            if getattr(self, name) * self.page_size > LIMITS["pool_tokens"]:
                raise GeometryError(name, f"a pool may hold at most {LIMITS['pool_tokens']} tokens")
        if self.rows * self.width > LIMITS["row_cells"]:
            raise GeometryError("rows", f"rows * width may be at most {LIMITS['row_cells']} cells")

    @property
    def boundary(self) -> int:
        """Tokens between two states that are kept for the tree: a page, more than one token."""
        return max(2, self.page_size)

    @property
    def lazy_round(self) -> int:
        """The most tokens of a verify round on a lazy server. On short pages as many as a server may have, so
        that each of two rounds may reach a boundary; on longer ones few, so that a round may not."""
        return self.boundary if self.boundary <= 4 else 1 + (self.boundary - 1) // 3

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the pools that exist: ("full",) or ("full", "swa")."""
        return ("full",) if self.window is None else ("full", "swa")

    def pages(self, pool: str) -> int:
        """Return the number of pages of `pool` that can be handed out."""
        return self.full_pages if pool == "full" else self.swa_pages


class ServerGeometry(Geometry):
    """Sizes of a real server, which is watched and not built: no size has an upper bound."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in ("page_size", "full_pages", "rows", "width"):
            if getattr(self, name) < 1:
                raise GeometryError(name, f"must be at least 1, not {getattr(self, name)}")
        if (self.window is None) != (self.swa_pages == 0):
            raise GeometryError("window", "a model has a window and an SWA pool, or neither")


# Tiny on purpose: every transition is reached with a handful of pages. The names say what is special.
PRESETS: dict[str, Geometry] = {
    "page1": Geometry(page_size=1, window=3, full_pages=40, swa_pages=28, rows=4, width=24),
    "no-swa": Geometry(page_size=4, window=None, full_pages=10, swa_pages=0, rows=3, width=32),
    "page2": Geometry(page_size=2, window=3, full_pages=20, swa_pages=14, rows=4, width=24),
    "page4": Geometry(page_size=4, window=6, full_pages=12, swa_pages=9, rows=4, width=32),
    "page16": Geometry(page_size=16, window=5, full_pages=8, swa_pages=7, rows=3, width=64),
    "window1": Geometry(page_size=4, window=1, full_pages=10, swa_pages=8, rows=3, width=32),
    "window-of-one-page": Geometry(
        page_size=4, window=4, full_pages=10, swa_pages=8, rows=3, width=32
    ),
    "tight": Geometry(page_size=2, window=4, full_pages=7, swa_pages=5, rows=2, width=16),
    "state": Geometry(
        page_size=1, window=None, full_pages=30, swa_pages=0, rows=3, width=24, states=6
    ),
    "state-window": Geometry(
        page_size=1, window=3, full_pages=24, swa_pages=16, rows=3, width=20, states=5
    ),
    "state-track": Geometry(
        page_size=2,
        window=None,
        full_pages=16,
        swa_pages=0,
        rows=3,
        width=24,
        states=13,
        tracks=True,
    ),
    "state-track-window": Geometry(
        page_size=2, window=3, full_pages=14, swa_pages=11, rows=3, width=20, states=11, tracks=True
    ),
    "state-lazy": Geometry(
        page_size=4,
        window=None,
        full_pages=14,
        swa_pages=0,
        rows=3,
        width=32,
        states=13,
        tracks=True,
        lazy=True,
    ),
    "state-lazy-window": Geometry(
        page_size=6,
        window=5,
        full_pages=10,
        swa_pages=8,
        rows=3,
        width=36,
        states=12,
        tracks=True,
        lazy=True,
    ),
    "state-lazy-tight": Geometry(
        page_size=2,
        window=None,
        full_pages=14,
        swa_pages=0,
        rows=2,
        width=20,
        states=4,
        tracks=True,
        lazy=True,
    ),
}


def preset(name: str) -> Geometry:
    """Return the preset called `name`. Raises GeometryError that lists the names."""
    try:
        return PRESETS[name]
    except KeyError:
        raise GeometryError(
            "preset", f"unknown {name!r:.40}; one of {', '.join(PRESETS)}"
        ) from None


__all__ = ["LIMITS", "PRESETS", "Geometry", "GeometryError", "ServerGeometry", "preset"]
