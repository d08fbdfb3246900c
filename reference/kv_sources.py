"""Sources: what KV depends on besides the tokens of a text.

Another adapter, or new weights, compute other KV from the same tokens, and KV of one namespace must not be
found in another. The stamps of a text therefore begin at a number of its source, the origin: two texts of the
same tokens have no stamp in common where their sources differ. A clause that compares stamps thereby judges
the source.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.recurrent_states import chained


class KvSource(NamedTuple):
    """A source of KV."""

    #: name of a LoRA adapter, "" for the model without one
    adapter: str = ""
    #: number of times that the adapter's weights were loaded again under its name
    adapter_loads: int = 0
    #: namespace that a client asks for, "" for the common one
    salt: str = ""
    #: number of times that the model's weights were replaced
    weights: int = 0

    @property
    def origin(self) -> int:
        """The stamp of the empty text: 0 for the initial model without a namespace."""
        if self == PLAIN:
            return 0
        names = (int.from_bytes(name.encode(), "big") for name in (self.adapter, self.salt))
        return chained((*names, self.adapter_loads, self.weights))[-1]

    def __str__(self) -> str:
        loads = f" (load {self.adapter_loads + 1})" if self.adapter_loads else ""
        parts = [f"adapter {self.adapter}{loads}"] if self.adapter else []
        parts += [f"salt {self.salt}"] if self.salt else []
        parts += [f"weights of update {self.weights}"] if self.weights else []
        return ", ".join(parts) or "no adapter and no salt"


PLAIN = KvSource()


class LoadedWeights:
    """The weights that a server computes with."""

    def __init__(self) -> None:
        #: see KvSource
        self.weights = 0
        #: adapter -> see KvSource.adapter_loads
        self.loads: dict[str, int] = {}

    def load_adapter(self, adapter: str) -> None:
        """Replace the weights of an adapter."""
        self.loads[adapter] = self.loads.get(adapter, 0) + 1

    def replace_weights(self) -> None:
        """Replace the weights of the model."""
        self.weights += 1

    def source(self, adapter: str, salt: str) -> KvSource:
        """Return the source of KV for a request that arrives now."""
        return KvSource(adapter, self.loads.get(adapter, 0), salt, self.weights)
