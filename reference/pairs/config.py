"""The configuration of a pair: two engines of one release, and the behaviour of their environment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reference.blocks.config import EngineConfig, LayerGroup
from reference.geometry import GeometryError

PREFILL, DECODE = SERVERS = ("P", "D")
LEASE = 30  # seconds for which a prefill server keeps KV that nobody has read
RENEWAL = 20  # seconds from a heartbeat on, at least
HEARTBEAT = 5  # seconds between two of them


@dataclass(frozen=True, slots=True)
class PairConfig:
    """Sizes and switches of a pair.

    Raises GeometryError where the two do not fit together.
    """

    #: the two engines. The decode server has a peer (EngineConfig.peer), the other has none; both
    #: have the same groups of layers, in blocks of sizes of their own. Either may have host memory
    #: (host_chunks): it then has two connectors, to its peer and to its host.
    prefill: EngineConfig
    decode: EngineConfig
    #: asynchronous scheduling
    prefill_overlap: bool = False
    decode_overlap: bool = False
    #: the prefill server writes KV; else the decode server reads it
    push: bool = False
    #: clients and servers are slow, so that leases end while somebody waits; else time passes only
    #: once everybody has done what was due
    late: bool = False
    #: the proxy may forward an answer of P more than once, as for several samples of one prompt
    shared: bool = False
    #: D takes over the token that P has sampled: it stands at the end of the prompt that D is given
    first_token: bool = False
    #: of two connectors, that to the host comes first
    host_first: bool = False

    def __post_init__(self) -> None:
        """Check that the two engines fit together."""
        for name in ("prefill", "decode"):
            config: EngineConfig = getattr(self, name)
            for size in ("storage", "simple"):
                if getattr(config, size):
                    raise GeometryError(f"{name}.{size}", "goes without a peer")
            if config.host_chunks and config.recurrent:
                raise GeometryError(f"{name}.host_chunks", "goes without recurrent state in a pair")
        if self.host_first and not (self.prefill.host_chunks or self.decode.host_chunks):
            raise GeometryError("host_first", "needs host_chunks of a server")
        if self.prefill.peer or not self.decode.peer:
            raise GeometryError("decode.peer", "must be true, and prefill.peer false")
        windows = [[group.window for group in server.groups] for server in (self.prefill, self.decode)]
        if windows[0] != windows[1] or self.prefill.recurrent != self.decode.recurrent:
            raise GeometryError("decode.groups", "must have the windows and states of prefill.groups")
        if self.prefill.draft_group != self.decode.draft_group:
            raise GeometryError("decode.groups", "must have the drafter's layers where prefill.groups has")
        if len(self.prefill.recurrent) == len(self.prefill.groups):
            raise GeometryError("groups", "must have KV: states lie in pages of attention")
        if self.recurrent and self.prefill.drafts != self.decode.drafts:
            raise GeometryError("decode.drafts", "must be those of P: a state has a window for each")
        if (
            1 in windows[0]
        ):  # the last token of a prompt, which D computes again, would see itself alone
            raise GeometryError("groups", "must have windows of two tokens at least")

    def of(self, server: str) -> EngineConfig:
        """Return the engine configuration of a server."""
        return self.prefill if server == PREFILL else self.decode

    def overlaps(self, server: str) -> bool:
        """Return whether the scheduler of a server is asynchronous."""
        return self.prefill_overlap if server == PREFILL else self.decode_overlap

    @property
    def with_host(self) -> tuple[str, ...]:
        """The servers that have host memory."""
        return tuple(server for server in SERVERS if self.of(server).host_chunks)

    @property
    def recurrent(self) -> bool:
        """Whether layers have recurrent state: P then leaves the last token of a prompt to D."""
        return bool(self.prefill.recurrent)

    @property
    def max_prompt(self) -> int:
        """The longest prompt that both servers take (tokens)."""
        return min(self.prefill.max_model_len, self.decode.max_model_len) - 1


_TWO = LayerGroup(2)
_FOUR = LayerGroup(4)
_NEAR = LayerGroup(2, 3)
_FAR = LayerGroup(2, 5)


def _pair(prefill: EngineConfig, decode: EngineConfig | None = None, **how: bool) -> PairConfig:
    return PairConfig(prefill, replace(decode or prefill, peer=True), **how)


_FULL = EngineConfig((_TWO,), blocks=14, max_model_len=16, max_batched_tokens=8, max_seqs=3)
_LARGE = EngineConfig((_FOUR,), blocks=10, max_model_len=16, max_batched_tokens=8, max_seqs=3)
_TIGHT = EngineConfig((_TWO,), blocks=9, max_model_len=16, max_batched_tokens=8, max_seqs=3)
_HYBRID = EngineConfig((_TWO, _NEAR), blocks=22, max_model_len=16, max_batched_tokens=8, max_seqs=3)
_WINDOWS = EngineConfig(
    (_TWO, _NEAR, _FAR), blocks=34, max_model_len=16, max_batched_tokens=8, max_seqs=3
)
_DRAFTS = replace(_FULL, drafts=2, max_batched_tokens=12)
_EAGLE = EngineConfig(
    (_TWO, _NEAR), blocks=24, max_model_len=18, max_batched_tokens=12, max_seqs=3, drafts=2,
    eagle=True,
)
_HOST = replace(_FULL, host_chunks=8)
_HOST_TIGHT = replace(_TIGHT, host_chunks=5, chunk_blocks=2)
_HOST_HYBRID = replace(_HYBRID, host_chunks=10)
_PRIORITY = replace(_TIGHT, priority=True, long_prefill=3)
_STATES = LayerGroup(2, state=True)
_STATE = EngineConfig(
    (_TWO, _STATES), blocks=24, max_model_len=20, max_batched_tokens=8, max_seqs=3
)
_STATE_TIGHT = EngineConfig(
    (_TWO, _STATES), blocks=14, max_model_len=16, max_batched_tokens=8, max_seqs=3
)
_WIDE = (_FOUR, LayerGroup(4, state=True))
_STATE_FINE = EngineConfig(
    _WIDE, blocks=24, max_model_len=28, max_batched_tokens=12, max_seqs=3, match=2
)
_STATE_DRAFTS = EngineConfig(
    _WIDE, blocks=32, max_model_len=28, max_batched_tokens=12, max_seqs=3, drafts=2, match=2
)
_STATE_WINDOW = EngineConfig(
    (_TWO, _NEAR, _STATES, _STATES), blocks=40, max_model_len=20, max_batched_tokens=8, max_seqs=3
)
_STATE_EAGLE = EngineConfig(
    (LayerGroup(4, drafter=True), LayerGroup(4, state=True)), blocks=32, max_model_len=28,
    max_batched_tokens=12, max_seqs=3, drafts=2, eagle=True,
)  # fmt: skip
_DRAFTER = EngineConfig(
    (LayerGroup(2, drafter=True), _NEAR), blocks=24, max_model_len=18, max_batched_tokens=12,
    max_seqs=3, drafts=2, eagle=True,
)
_ALONE = EngineConfig(
    (_TWO, LayerGroup(20, state=True)), blocks=24, max_model_len=20, max_batched_tokens=8,
    max_seqs=3, caching=False,
)  # without caching a request has one state, whatever its length
_STATE_UNCACHED = EngineConfig(
    (_FOUR, LayerGroup(20, state=True)), blocks=24, max_model_len=20, max_batched_tokens=12,
    max_seqs=3, caching=False, drafts=2,
)
# Tiny on purpose. The names say what is special.
PAIR_PRESETS: dict[str, PairConfig] = {
    "pair": _pair(_FULL),
    "pair-tight": _pair(_TIGHT),
    "pair-uncached": _pair(_FULL, replace(_FULL, caching=False)),
    "pair-window": _pair(replace(_FULL, groups=(_NEAR,))),
    "pair-hybrid": _pair(_HYBRID),
    "pair-windows": _pair(_WINDOWS),
    "pair-drafts": _pair(_FULL, _DRAFTS),
    "pair-eagle": _pair(_EAGLE),
    "pair-drafter": _pair(_DRAFTER),
    "pair-priority": _pair(_TIGHT, _PRIORITY),
    "pair-small-blocks": _pair(_FULL, _LARGE),
    "pair-fails": _pair(_FULL, replace(_FULL, peer=True, fail_requests=True)),
    "pair-overlap": _pair(_FULL, prefill_overlap=True, decode_overlap=True),
    "pair-overlap-tight": _pair(_TIGHT, _PRIORITY, decode_overlap=True),
    "pair-overlap-drafts": _pair(_DRAFTS, _DRAFTS, prefill_overlap=True, decode_overlap=True),
    "pair-shared": _pair(_FULL, shared=True),
    "pair-late": _pair(_FULL, late=True),
    "pair-token": _pair(_FULL, first_token=True),
    "pair-token-tight": _pair(_TIGHT, first_token=True),
    "pair-token-uncached": _pair(_TIGHT, replace(_TIGHT, caching=False), first_token=True),
    "pair-token-window": _pair(replace(_FULL, groups=(_FAR,)), first_token=True),
    "pair-push": _pair(_FULL, push=True),
    "pair-host": _pair(_HOST),
    "pair-host-prefill": _pair(_HOST, _FULL),
    "pair-host-first": _pair(_TIGHT, _HOST_TIGHT, host_first=True),
    "pair-host-window": _pair(_HOST_HYBRID),
    "pair-host-fails": _pair(_HOST, replace(_HOST, peer=True, fail_requests=True), host_first=True),
    "pair-host-overlap": _pair(_HOST_TIGHT, _HOST, prefill_overlap=True, decode_overlap=True),
    "pair-host-push": _pair(_HOST, push=True, host_first=True),
    "pair-host-late": _pair(_HOST, late=True),
    "pair-state": _pair(_STATE),
    "pair-state-tight": _pair(_STATE_TIGHT, replace(_STATE_TIGHT, priority=True, long_prefill=3)),
    "pair-state-fine": _pair(_STATE_FINE),
    "pair-state-drafts": _pair(_STATE_DRAFTS),
    "pair-state-eagle": _pair(_STATE_EAGLE),
    "pair-state-window": _pair(_STATE_WINDOW),
    "pair-state-uncached": _pair(_STATE_UNCACHED),
    "pair-state-cached": _pair(_STATE, _ALONE),
    "pair-state-overlap": _pair(_STATE, prefill_overlap=True, decode_overlap=True),
    "pair-state-push": _pair(_STATE, push=True),
}
