"""The configuration of a radix tree with a host tier: pools on the device and on the host, policies."""

from __future__ import annotations

from dataclasses import dataclass

from reference.geometry import Geometry, GeometryError

POLICIES = ("write_through", "write_through_selective", "write_back")
STORAGE = ("", "best_effort", "wait_complete", "timeout")
WAIT_BASE_S = 1  # with "timeout" a request may be held back so long, and
WAIT_PER_PAGE_S = 1  # so much more for each page; a server's default is 0.25 s for 1024 tokens
DECODE = "", "radix", "plain"
PREFILL = "", "radix", "plain"
MAX_SLOTS = 1 << 12  # tokens of a pool: every slot is looked at after every command


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Sizes and switches of one tree with a host tier. Pages are whole pages of `page_size` tokens. Raises
    GeometryError when a size is out of bounds or the sizes do not fit together.

    window: positions that a query sees (tokens), None for one pool without SWA.
    full_pages, swa_pages: of the device.
    host_pages, host_swa_pages: of the host.
    width: the longest text (tokens).
    policy: when KV is copied to the host.
    namespaces: texts b, d, f are asked for in a namespace.
    bigram: the tree knows pairs of tokens.
    storage: how long a request waits for pages of a storage behind the host, "" for none.
    decode: the server only decodes, with a radix tree ("radix": no host tier) or without ("plain": the host
        keeps KV of retracted requests).
    prefill: the server only prefills, with a radix tree or without, and without a host tier.
    overlap: it processes a result one round late.
    attempts: how often it computes a prompt before the decode server has answered.
    rows: of a server that only decodes or prefills.
    states, host_states: slots of recurrent state on the device and on the host, 0 of a model without.
    tracks: a request keeps a state inside its text for the tree (SGLang's extra_buffer), in slots of its own.
        Without it the tree keeps the state at the end of a text.
    """

    page_size: int
    window: int | None
    full_pages: int
    swa_pages: int
    host_pages: int
    host_swa_pages: int
    width: int
    policy: str = "write_through"
    namespaces: bool = False
    bigram: bool = False
    storage: str = ""
    decode: str = ""
    rows: int = 0
    states: int = 0
    host_states: int = 0
    prefill: str = ""
    overlap: bool = False
    attempts: int = 0
    tracks: bool = False

    def __post_init__(self) -> None:
        for name, values in (
            ("policy", POLICIES), ("storage", STORAGE), ("decode", DECODE), ("prefill", PREFILL),
        ):  # fmt: skip
            if (value := getattr(self, name)) not in values:
                raise GeometryError(
                    name, f"must be one of {', '.join(map(repr, values))}, not {value!r:.40}"
                )
        for name in ("page_size", "window"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_SLOTS:
                raise GeometryError(name, f"must be in [1, {MAX_SLOTS}], not {value}")
        if self.window is None and (self.swa_pages or self.host_swa_pages):
            name = "swa_pages" if self.swa_pages else "host_swa_pages"
            raise GeometryError(name, "must be 0 when window is null (no SWA pool)")
        self._check_servers()
        self._check_pages()
        if not self.page_size <= self.width <= MAX_SLOTS:
            raise GeometryError("width", f"must be in [page_size, {MAX_SLOTS}], not {self.width}")

    def _check_servers(self) -> None:
        """Raise GeometryError for a server with one role, or a state, that other sizes rule out."""
        if bool(self.role) != (1 <= self.rows <= 64):
            raise GeometryError(
                "rows", f"must be in [1, 64] where decode or prefill is set, else 0, not {self.rows}"
            )
        if self.decode and self.prefill:
            raise GeometryError("prefill", "must be '' on a server that only decodes")
        if self.role and self.storage:
            raise GeometryError("storage", f"must be '' on a server that only {self.role}s")
        if self.overlap and not self.prefill:
            raise GeometryError("overlap", "must be false where prefill is not set")
        if not 0 <= self.attempts <= (8 if self.prefill else 0):
            raise GeometryError(
                "attempts", f"must be in [0, 8] where prefill is set, else 0, not {self.attempts}"
            )
        for name, value in (("states", self.states), ("host_states", self.host_states)):
            if not 0 <= value <= MAX_SLOTS:
                raise GeometryError(name, f"must be in [0, {MAX_SLOTS}], not {value}")
        if bool(self.states) != bool(self.host_states):
            raise GeometryError("host_states", "must be 0 where states is, and nowhere else")
        if self.tracks and not self.states:
            raise GeometryError("tracks", "needs states")
        if self.states and ((self.page_size > 1 and not self.tracks) or self.bigram or self.role):
            needs = "needs page_size 1 or tracks, no bigram, no decode and no prefill"
            raise GeometryError("states", needs)

    def _check_pages(self) -> None:
        """Raise GeometryError for a pool that is too small or too large."""
        for name in (
            "full_pages",
            "host_pages",
            *(("swa_pages", "host_swa_pages") if self.window else ()),
        ):
            most = MAX_SLOTS // self.page_size
            pages = getattr(self, name)
            without_host = self.decode == "radix" or bool(self.prefill)
            least = 0 if without_host and name.startswith("host") else 1
            if not least <= pages <= (most if least else 0):
                raise GeometryError(
                    name, f"must be in [{least}, {most if least else 0}], not {pages}"
                )

    @property
    def role(self) -> str:
        """The only role of the server: "decode", "prefill", or "" for both."""
        roles = {"decode": self.decode, "prefill": self.prefill}
        return next((role for role, how in roles.items() if how), "")

    @property
    def metadata_rows(self) -> int:
        """Slots of first tokens on a decode server, fewer than rows; rows of metadata on a prefill
        server, where a request has one before it has a row."""
        return self.rows + 1 if self.prefill else max(1, self.rows - 1)

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools that exist: "full", "swa" where there is a window, "state" where there are states."""
        pools: tuple[str, ...] = ("full",)
        if self.window is not None:
            pools += ("swa",)
        if self.states:
            pools += ("state",)
        return pools

    def pages(self, pool: str) -> int:
        """Return the pages of `pool` on the device."""
        return {"full": self.full_pages, "swa": self.swa_pages, "state": self.states}[pool]

    def slots_of_page(self, pool: str) -> int:
        """Return the slots of a page of `pool`: tokens, or one state."""
        return 1 if pool == "state" else self.page_size

    def device_slots(self, pool: str) -> range:
        """Return the slots of `pool` on the device, without those of the padding page."""
        size = self.slots_of_page(pool)
        return range(size, (self.pages(pool) + 1) * size)

    def host_slots(self, pool: str) -> int:
        """Return how many slots of `pool` the host has."""
        pages = {"full": self.host_pages, "swa": self.host_swa_pages, "state": self.host_states}
        return self.slots_of_page(pool) * pages[pool]

    @property
    def device(self) -> Geometry:
        """Return the sizes of the device alone. Texts share one row on a server with both roles."""
        return Geometry(
            self.page_size, self.window, self.full_pages, self.swa_pages, self.rows or 1, self.width,
            tree="plain" not in (self.decode, self.prefill),
            settings=(("namespaces", "extra_key"),) if self.namespaces else (), bigram=self.bigram,
            states=self.states, tracks=self.tracks,
        )  # fmt: skip


# Tiny on purpose. The names say what is special.
TIER_PRESETS: dict[str, TierConfig] = {
    "tier": TierConfig(1, None, 24, 0, 32, 0, 24),
    "tier-back": TierConfig(1, None, 24, 0, 32, 0, 24, "write_back"),
    "tier-selective": TierConfig(1, None, 24, 0, 32, 0, 24, "write_through_selective"),
    "tier-small-host": TierConfig(1, None, 32, 0, 12, 0, 24),
    "tier-back-small-host": TierConfig(1, None, 16, 0, 6, 0, 16, "write_back"),
    "tier-window": TierConfig(1, 3, 24, 16, 32, 24, 24),
    "tier-window-back": TierConfig(1, 3, 24, 16, 32, 24, 24, "write_back"),
    "tier-window-selective": TierConfig(1, 6, 32, 24, 40, 16, 24, "write_through_selective"),
    "tier-window-small-host": TierConfig(1, 3, 32, 24, 12, 8, 24),
    "tier-page2": TierConfig(2, 3, 16, 12, 20, 12, 28),
    "tier-page4-back": TierConfig(4, 6, 10, 8, 12, 8, 32, "write_back"),
    "tier-page16": TierConfig(16, 5, 6, 6, 6, 4, 64),
    "tier-names": TierConfig(1, 3, 24, 16, 32, 24, 24, namespaces=True),
    "tier-bigram": TierConfig(1, 3, 24, 16, 32, 24, 24, bigram=True),
    "tier-state": TierConfig(1, None, 24, 0, 32, 0, 24, states=8, host_states=8),
    "tier-state-back": TierConfig(1, None, 24, 0, 32, 0, 24, "write_back", states=8, host_states=8),
    "tier-state-small-host": TierConfig(1, None, 32, 0, 12, 0, 24, states=6, host_states=3),
    "tier-state-window": TierConfig(1, 3, 24, 16, 32, 24, 24, states=8, host_states=6),
    "tier-track": TierConfig(1, None, 24, 0, 32, 0, 24, states=14, host_states=8, tracks=True),
    "tier-track-page2-back": TierConfig(
        2, None, 12, 0, 16, 0, 24, "write_back", states=14, host_states=4, tracks=True
    ),
    "tier-track-window": TierConfig(
        2, 3, 14, 10, 18, 12, 24, states=14, host_states=6, tracks=True
    ),
    "storage": TierConfig(1, None, 16, 0, 12, 0, 16, storage="best_effort"),
    "storage-wait": TierConfig(1, None, 16, 0, 12, 0, 16, storage="wait_complete"),
    "storage-back": TierConfig(2, None, 10, 0, 8, 0, 20, "write_back", storage="best_effort"),
    "storage-window": TierConfig(1, 3, 20, 16, 14, 10, 16, storage="wait_complete"),
    "storage-window-page2": TierConfig(2, 3, 12, 10, 10, 6, 24, storage="best_effort"),
    "storage-names": TierConfig(
        1, None, 16, 0, 12, 0, 16, namespaces=True, storage="wait_complete"
    ),
    "storage-bigram": TierConfig(1, 3, 20, 16, 14, 10, 16, bigram=True, storage="best_effort"),
    "storage-timeout": TierConfig(1, None, 16, 0, 12, 0, 16, storage="timeout"),
    "storage-timeout-back": TierConfig(2, None, 10, 0, 8, 0, 20, "write_back", storage="timeout"),
    "storage-timeout-window": TierConfig(2, 3, 12, 10, 10, 6, 24, storage="timeout"),
    "storage-timeout-state": TierConfig(
        1, None, 16, 0, 12, 0, 16, storage="timeout", states=8, host_states=6
    ),
    "storage-track": TierConfig(
        2, None, 10, 0, 8, 0, 20, storage="wait_complete", states=14, host_states=6, tracks=True
    ),
    "decode": TierConfig(2, None, 24, 0, 0, 0, 32, decode="radix", rows=4),
    "decode-page1": TierConfig(1, None, 32, 0, 0, 0, 24, decode="radix", rows=4),
    "decode-window": TierConfig(2, 3, 24, 20, 0, 0, 32, decode="radix", rows=4),
    "decode-window-page4": TierConfig(4, 6, 14, 12, 0, 0, 40, decode="radix", rows=3),
    "decode-plain": TierConfig(2, None, 20, 0, 16, 0, 32, decode="plain", rows=4),
    "decode-plain-window": TierConfig(2, 3, 20, 16, 16, 8, 32, decode="plain", rows=4),
    "decode-plain-page4": TierConfig(4, 6, 12, 10, 8, 6, 40, decode="plain", rows=3),
    "prefill": TierConfig(2, None, 14, 0, 0, 0, 24, prefill="radix", rows=4),
    "prefill-page1": TierConfig(1, None, 24, 0, 0, 0, 20, prefill="radix", rows=4, attempts=1),
    "prefill-overlap": TierConfig(2, None, 14, 0, 0, 0, 24, prefill="radix", rows=4, overlap=True),
    "prefill-early": TierConfig(
        2, None, 14, 0, 0, 0, 24, prefill="radix", rows=4, overlap=True, attempts=2
    ),
    "prefill-window": TierConfig(
        2, 3, 16, 14, 0, 0, 24, prefill="radix", rows=4, overlap=True, attempts=1
    ),
    "prefill-window-page4": TierConfig(4, 6, 10, 9, 0, 0, 32, prefill="radix", rows=3),
    "prefill-bigram": TierConfig(2, None, 14, 0, 0, 0, 24, bigram=True, prefill="radix", rows=4),
    "prefill-plain": TierConfig(2, None, 14, 0, 0, 0, 24, prefill="plain", rows=4, overlap=True),
}


def tier_preset(name: str) -> TierConfig:
    """Return the preset called `name`. Raises GeometryError that lists the names."""
    try:
        return TIER_PRESETS[name]
    except KeyError:
        raise GeometryError(
            "preset", f"unknown {name!r:.40}; one of {', '.join(TIER_PRESETS)}"
        ) from None
