"""The reference's own modules once more, with arithmetic on symbolic integers.

The text is that of the files in reference/, the builtins are those of `symbolic`. `edits` changes the text on
the way: a fault to be refuted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stateful_tests.prove import integers as symbolic
from stateful_tests.prove.instrumented import SecondCopy, edited

# What computes with lengths. The vocabulary, the tree and the clauses stay as they are.
MODULES = ("reference.cursors", "reference.ledger", "reference.prefix_cache", "reference.model")
Edits = Mapping[str, Sequence[tuple[str, str]]]  # module: (text, what it is replaced by), each found once


class SymbolicReference(SecondCopy):
    """The modules of the reference on symbolic integers, by their last names: cursors, ledger, ..."""

    def __init__(self, edits: Edits | None = None) -> None:
        super().__init__(symbolic.BUILTINS)
        for name in MODULES:
            self.load(name, edited(name, (edits or {}).get(name, ())))
