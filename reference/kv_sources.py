"""Sources: what KV depends on beside the tokens of a text.

Another adapter, or new weights, compute other KV from the same tokens, and KV of one namespace must not be
found in another. So the stamps of a text begin at a number of its source, the **origin**: two texts of the
same tokens have no stamp in common where their sources differ, and a clause that compares stamps judges the
source.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.recurrent_states import chained


class KvSource(NamedTuple):
    """A source of KV.

    adapter: the name of a LoRA adapter, "" for the model alone.
    load: how often the weights of the adapter were loaded again under its name.
    salt: the namespace that a client asks for, "" for the common one.
    weights: how often the weights of the model were replaced.
    """

    adapter: str = ""
    load: int = 0
    salt: str = ""
    weights: int = 0

    @property
    def origin(self) -> int:
        """The stamp of the empty text: 0 for the initial model without a namespace."""
        if self == PLAIN:
            return 0
        names = (int.from_bytes(name.encode(), "big") for name in (self.adapter, self.salt))
        return chained((*names, self.load, self.weights))[-1]

    def __str__(self) -> str:
        loads = f" (load {self.load + 1})" if self.load else ""
        parts = [f"adapter {self.adapter}{loads}"] if self.adapter else []
        parts += [f"salt {self.salt}"] if self.salt else []
        parts += [f"weights of update {self.weights}"] if self.weights else []
        return ", ".join(parts) or "no adapter and no salt"


PLAIN = KvSource()


class LoadedWeights:
    """The weights that a server computes with. weights, loads: see KvSource; loads are by adapter."""

    def __init__(self) -> None:
        self.weights = 0
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
