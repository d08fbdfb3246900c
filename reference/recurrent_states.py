"""Recurrent state (Mamba, linear attention): slots, stamps, boundaries, owners. Both kinds of engines use it.

A recurrent layer folds each token into one state of a fixed size. The state after n tokens comes from the one
after n - 1 and the n-th token, and from nothing else. No token can be taken out of it again: it cannot be cut
back. A request that continues at position n needs the state after exactly n tokens, as well as the KV of
those n tokens: KV and state agree on one position.

- A **slot** holds one state: a block of a recurrent group (vLLM), an index of `MambaSlotAllocator` (SGLang).
- Its **stamp** is the `chain` of the tokens that were folded into the state. So the stamp tells the text, and
  how much of it. A copy of a state has the stamp of its source.
- A **boundary** is a position whose state is kept in a slot of its own, a checkpoint, when the running state
  goes on. A hit can end only at a boundary, whatever KV there is behind it.
- The **owners** of a slot are who may continue from it: a request, a session, the prefix cache. A slot in
  which a state runs has one owner, for every other one would be left with tokens that are not its own.

A state has parts: the recurrent state itself, and the window of a convolution over the last tokens. They move
together, so each part has a stamp, and all stamps of a state are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

EMPTY = 0  # the stamp of what was never written, and of the state before a text
NOWHERE = -1  # instead of a slot: an entry that begins a text continues from no state


class Words(NamedTuple):
    """The wording of a clause that both kinds of engines have."""

    title: str
    sentence: str
    why: str


HIT = Words(
    "a hit has the state of its boundary",
    "A request that starts behind a cached prefix of n tokens continues, in every recurrent group, from the"
    " state after exactly the first n tokens of its text, written.",
    "KV of the prefix does not replace the state, and a state of another length is another prefix.",
)
GOES_ON = Words(
    "a state goes on where its text does",
    "An entry that starts at position n continues, in every recurrent group, from the state after exactly"
    " the first n tokens of its request's text: no token twice, none left out, no rejected draft.",
    "A state cannot be cut back: what is wrong in it stays to the end of the request.",
)
NAMED = Words(
    "a name tells its state",
    "A slot that the prefix cache names, by a hash or as a node, holds the state after exactly the last token"
    " of that name, written.",
    "Who matches the name continues from that state, and no later query can tell that it was another.",
)
KEPT = Words(
    "kept",
    "Between batches a slot of a request's own holds, in every recurrent group, the state after all its"
    " computed tokens, accepted drafts included.",
    "A state that is gone comes back in one way: the text is computed again from an earlier boundary.",
)
PARTS = ("its recurrent state", "its convolution window")


def chain(stamp: int, token: int) -> int:
    """Return the stamp of `token` after the prefix with this stamp; the empty prefix is 0. 61 bits."""
    return hash((stamp, token)) & (1 << 61) - 1


def chained(tokens: Iterable[int], stamp: int = 0) -> list[int]:
    """Return the stamp of each token, after the prefix with this stamp."""
    return list(accumulate(tokens, chain, initial=stamp))[1:]


def stamp_after(stamps: Sequence[int], count: int) -> int:
    """Return the stamp of the state after the first `count` tokens of a text with these stamps; NOWHERE
    past its end."""
    if count > len(stamps):
        return NOWHERE
    return stamps[count - 1] if count else EMPTY


def may_have_second_slot(processed: int, launched: int, boundary: int, reach: int) -> bool:
    """Return whether a request of a lazy server may have a second slot for the tree.

    A decode that ends at a boundary needs it from its launch until its result is processed; a verify round,
    from where it may end behind one, until the result of the one that does.

    processed, launched: tokens that the request has computed, of processed results and of all batches.
    boundary: tokens between two boundaries.
    reach: tokens of the verify rounds that may be in flight, 0 on a server that decodes one token at a time.
    """
    end = max(launched, processed + reach)
    return processed // boundary != end // boundary


def describe_stamp(stamp: int, stamps: Sequence[int]) -> str:
    """Describe a part with this stamp, for the owner of a text with these stamps."""
    if stamp == EMPTY:
        return "was not written"
    if stamp in stamps:
        return f"is that after token {stamps.index(stamp) + 1}"
    return "is that after other tokens, or more"


def misread(stamps_found: Sequence[int], expected: int, stamps: Sequence[int]) -> str | None:
    """Describe the fault of a state whose parts have these stamps; None if all are `expected`."""
    for part, stamp in zip(PARTS, stamps_found):
        if stamp != expected:
            return f"{part} {describe_stamp(stamp, stamps)}"
    return None
