"""The sources of requests' KV (reference.kv_sources), as a driver keeps them beside its engine."""

from __future__ import annotations

from collections.abc import Iterable

from reference.kv_sources import PLAIN, LoadedWeights, KvSource
from reference.recurrent_states import chained


class RequestSources:
    """The source of each request's KV, by the name or number that the engine has for the request.

    loaded: the weights now.
    """

    def __init__(self) -> None:
        self.loaded = LoadedWeights()
        self._sources: dict[str | int, KvSource] = {}

    @property
    def all_plain(self) -> bool:
        """Whether no request so far has had a source of its own."""
        return all(source == PLAIN for source in self._sources.values())

    def add(self, request: str | int, adapter: str, salt: str) -> None:
        """Add a request."""
        self._sources[request] = self.loaded.source(adapter, salt)

    def of(self, request: str | int) -> KvSource:
        """Return the source of a request."""
        return self._sources.get(request, PLAIN)

    def origin_of(self, request: str | int) -> int:
        """Return the origin of a request's text."""
        return self.of(request).origin

    def stamps_of(self, tokens: Iterable[int], request: str | int) -> list[int]:
        """Return the stamps of the first tokens of a request's text."""
        return chained(tokens, self.origin_of(request))

    def replace_weights(self) -> None:
        """Replace the weights of the model; running requests compute their further tokens with the new
        ones."""
        self.loaded.replace_weights()
        for request, source in self._sources.items():
            self._sources[request] = self.loaded.source(source.adapter, source.salt)
