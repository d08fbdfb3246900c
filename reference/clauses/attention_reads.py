"""Clauses on what attention reads (READ), and the backstop (REF)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat

from reference.clauses.registry import clause
from reference.clauses.facts import HolderFacts
from reference.clauses.cursor_bounds import cursors_off
from reference.clauses.step import Step, cursors_text, swa_start
from reference.failures import AtLock, AtNode, AtPage, AtPosition, AtState, Failure, Place, failure
from reference.radix_tree import state_paths
from reference.state import (
    IN_BATCH, ZERO, Holder, full_pages, state_lens, swa_pages, text_len, text_tokens,
)  # fmt: skip
from reference.prefix_cache import NO_PAGES, lock_holders, pages_of, path_text
from reference.token_ids import POSITION_BITS, SHARED

POOL = {"full": "full", "swa": "SWA"}  # how they are called in sentences


@clause(
    "READ-1",
    "full reads are right",
    "Every position below kv_committed_len reads the full KV of exactly that token of that text, as far as"
    " the text goes.",
    why="This is what the bookkeeping is for.",
    rule="state.text_tokens",
    source="#22897",
    scope=(
        "Running and prefilling requests, and idle slots. Of the tokens that rounds in flight "
        "count as committed, only the first is known."
    ),
    trigger=lambda s: any(h.cursors.kv_committed_len > 0 for h in s.holders_before),
)
def _full_reads(step: Step) -> Failure | None:
    return _read_failure(step, "full")


def _read_failure(step: Step, pool: str) -> Failure | None:
    misread_position = misread(step, pool)
    if misread_position is None:
        return None
    name, start, tokens, stamps = misread_position
    if len(stamps) != len(tokens):
        place = AtPosition(name, pool, start + len(stamps))
        return failure(f"{name} reads {len(tokens)} positions", f"its row has {len(stamps)}", place)
    offset = next(i for i, (a, b) in enumerate(zip(tokens, stamps)) if a != b)
    return failure(
        f"{name} reads its own {POOL[pool]} KV at position {start + offset}",
        stamp_text(stamps[offset]),
        AtPosition(name, pool, start + offset, tokens[offset]),
    )


def misread(
    step: Step, pool: str
) -> tuple[str, int, tuple[int, ...], tuple[int | None, ...]] | None:
    """Return (holder, position, tokens, stamps) for the first holder that reads other tokens than its own;
    see `reads`."""
    window = step.config.geometry.window
    if pool != "full" and window is None:
        return None
    for holder in step.holders_now:
        start, tokens, stamps = reads(holder, step.after.holders.get(holder.name), pool, window)
        if stamps != tokens:
            return holder.name, start, tokens, stamps
    return None


def reads(
    holder: Holder, facts: HolderFacts | None, pool: str, window: int | None
) -> tuple[int, tuple[int, ...], tuple[int | None, ...]]:
    """Return a position, the tokens that a holder must read from there on, and the tokens that it
    reads."""
    length = min(holder.cursors.kv_committed_len, text_len(holder.text))
    start = 0
    if pool == "swa":
        assert window is not None
        protected = min(holder.cursors.cache_protected_len, length - window)
        start = max(swa_start(holder.cursors), protected, 0)
    tokens = text_tokens(holder.text, length)[start:]
    if facts is None:
        return start, tokens, ()
    stamps = facts.full_read if pool == "full" else facts.swa_read
    return start, tokens, tuple(stamps[start:length])


def stamp_text(stamp: int | None) -> str:
    if stamp is None:
        return "no slot"
    if stamp == 0:
        return "a slot that holds no committed token"
    serial = stamp >> POSITION_BITS
    position = stamp & (1 << POSITION_BITS) - 1
    if serial >= SHARED:
        return f"token {position} of the shared text {chr(ord('a') + serial - SHARED)}"
    return f"token {position} of the text of submit {serial}"


@clause(
    "READ-2",
    "SWA reads are right",
    "Every position from swa_evicted_seqlen to kv_committed_len reads the SWA KV of exactly that "
    "token; in the radix tree's prefix, every position in the next token's window.",
    why="Every window of a later token lies in there.",
    rule="state.text_tokens, cursors.lost_below",
    source="kvspec",
    scope="As READ-1, on models with SWA.",
    needs=("window",),
    trigger=lambda s: s.evicted_any and bool(s.progress),
)
def _swa_reads(step: Step) -> Failure | None:
    return _read_failure(step, "swa")


@clause(
    "REF-1",
    "system and reference agree",
    "The system's cursors, texts, owned positions and lock owners are the reference's.",
    why="A rule that no clause states is still a rule of the operational model.",
    rule="model.step",
    source="kvspec",
    concerns="outcomes, choices and order",
    scope="A lent slot's own cursors are compared only while its request has not extended.",
    trigger=lambda s: bool(s.after.holders),
)
def _agrees_with_reference(step: Step) -> Failure | None:
    """Return the first difference from the reference: cursors, session slots, lock holders, owners of pages,
    then recurrent states."""
    page_size = step.config.geometry.page_size
    for request in step.now.requests:
        cursors = step.after.requests[request.name].cursors
        # admitted without a slot: nothing either way
        if (cursors or ZERO) != (request.cursors or ZERO):
            return failure(
                f"{request.name}: {cursors_text(request.cursors)}",
                cursors_text(cursors),
                *cursors_off(request.name, request.cursors, cursors),
            )
    for session in step.now.sessions:
        turn = step.now.request(session.turn)
        if turn is not None and turn.phase in IN_BATCH:
            continue
        slot = step.after.sessions[session.name].slot
        if slot != session.slot:
            name = f"slot of {session.name}"
            return failure(
                f"{name}: {cursors_text(session.slot)}",
                cursors_text(slot),
                *cursors_off(name, session.slot, slot),
            )
    cached = pages_of(step.now.tree) if step.now.tree is not None else NO_PAGES
    if step.after.tree is not None:
        locked = {name: len(key) for name, key in lock_holders(step.now).items()}
        got_locked = {name: len(slots) for name, slots in step.after.tree.lock_holders.items()}
        if locked != got_locked:
            names = sorted({*locked.items()} ^ {*got_locked.items()})
            return failure(
                f"lock owners and what they have locked: {locked}",
                f"{got_locked}",
                *(AtLock(name) for name in dict.fromkeys(name for name, _ in names)),
            )
    for pool, pages_of_holder in (("full", full_pages), ("swa", swa_pages)):
        if pool in step.after.pools:
            expected = {*cached[pool]}
            for holder in step.holders_now:
                expected.update(zip(repeat(holder.name), pages_of_holder(holder.cursors, page_size)))
            owned = step.after.pools[pool].places
            if expected != owned:
                wrong = sorted(expected ^ owned)
                return Failure(
                    f"{POOL[pool]} pages owned as in the reference",
                    f"differ at {wrong[:4]}",
                    partial(_ownership_differences, step, pool, wrong),
                )
    return _state_differences(step)


def _state_differences(step: Step) -> Failure | None:
    states = step.after.states
    if states is None:
        return None
    holders = state_lens(step.now).keys()
    if holders != states.holders.keys():
        wrong = sorted(holders ^ states.holders.keys())
        places = [AtState(states.holders[name]) for name in wrong if name in states.holders]
        expected = f"slots of recurrent state of {', '.join(sorted(holders)) or 'nobody'}"
        return failure(expected, f"differ for {wrong}", *places)
    paths = state_paths(step.now.tree) if step.now.tree is not None else frozenset()
    if paths != states.nodes.keys():
        path = min(paths ^ states.nodes.keys())
        expected = "nodes with a state as in the reference"
        return failure(expected, f"differ at {path_text(path)}", AtNode(path, "state"))
    return None


def _ownership_differences(step: Step, pool: str, places: list[tuple[str, int]]) -> Iterator[Place]:
    """Return the pages at these places of sequences; where the system has none, the place in the row."""
    pages = {(o.holder, o.at): o.page for o in step.after.pools[pool].owned}
    for holder, index in places:
        if (holder, index) in pages:
            yield AtPage(pool, pages[holder, index])
        elif not holder.startswith("tree "):
            yield AtPosition(holder, pool, index * step.config.geometry.page_size)
