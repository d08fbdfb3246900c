"""Causes of a violation: what a trace needs of how turns end, and the same run without that.

A fault that is known must not hide another of its clause. The smallest trace of the first says what it needs:
a retract, a rejected turn, pools without room. A run that violates the clause without one of these
has another cause. That is asked where no base says more: of a release, of a replayed trace, of an engine that
schedules by itself, and for a second trace of a clause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product

from impl.adapter import AnySystem
from reference.blocks.commands import Add, LoadAdapter, More, NewWeights, ResetConnector
from reference.commands import Abort, Close, Finish, Launch, Retract, Settle, SpecDecode
from reference.system_kinds import kind_of_config
from reference.pairs.commands import Cancel, Drop, Forget
from reference.tiers.commands import Reattach, ResetCache
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.shrink.minimise import violation_of_clause

from stateful_tests.check.known_faults import trace_reductions as leave
from stateful_tests.check.known_faults import pair_reductions as pairs
from stateful_tests.check.known_faults.trace_reductions import Less

Needs = tuple[str, ...]  # names, in the order of _NEEDS

REJECTED = "a rejected turn"


def _reduction_by_kind(**less: Less) -> Less:
    """Return a reduction that applies only to traces of some kinds of systems."""

    def of_kind(system: AnySystem, trace: Trace) -> Trace:
        without = less.get(kind_of_config(trace.geometry).name)
        return trace if without is None else without(system, trace)

    return of_kind


# What a trace may need, and the trace without it. Which turns are rejected depends on the ends before.
_NEEDS: dict[str, Less] = {
    "a retract": partial(leave.none_of, Retract),
    "an abort": partial(leave.none_of, (Abort, Cancel)),
    "a finish": partial(leave.none_of, Finish),
    "a close": partial(leave.none_of, Close),
    "a verify round": partial(leave.none_of, (SpecDecode, Launch, Settle)),
    "a received prompt": leave.nothing_received,
    "a next turn": partial(leave.none_of, More),
    "a reset of the cache": partial(leave.none_of, (ResetCache, Forget, NewWeights)),
    "drafts": _reduction_by_kind(
        blocks=leave.no_drafts,
        pairs=pairs.no_drafts_of_servers,
    ),
    "a window": _reduction_by_kind(
        blocks=leave.no_window_of_groups, tiers=leave.no_window_of_a_tree, pairs=pairs.no_window_of_servers
    ),
    "blocks of two sizes": _reduction_by_kind(pairs=pairs.equal_blocks),
    "a cached prefix": _reduction_by_kind(pairs=pairs.uncached_servers),
    "push": _reduction_by_kind(pairs=partial(leave.sized, push=False)),
    "overlap": _reduction_by_kind(
        tiers=partial(leave.sized, overlap=False),
        pairs=partial(leave.sized, prefill_overlap=False, decode_overlap=False),
    ),
    "pairs of tokens": _reduction_by_kind(tiers=partial(leave.sized, bigram=False)),
    "an answer for two": _reduction_by_kind(pairs=partial(leave.sized, shared=False)),
    "a client that is late": _reduction_by_kind(pairs=partial(leave.sized, late=False)),
    "a dropped answer": partial(leave.none_of, Drop),
    "hits within a block": _reduction_by_kind(blocks=partial(leave.sized, match=0)),
    "checkpoints within a chunk": _reduction_by_kind(blocks=partial(leave.sized, checkpoints=0)),
    "chunks of several blocks": _reduction_by_kind(blocks=partial(leave.sized, chunk_blocks=1)),
    "chunks that go on": _reduction_by_kind(tiers=leave.no_chunks),
    "a prompt in chunks": _reduction_by_kind(
        blocks=leave.whole_prompts, pairs=pairs.whole_prompts_of_servers
    ),
    "a text near max_model_len": _reduction_by_kind(
        blocks=leave.no_text_near_the_limit, pairs=pairs.no_text_near_the_limit_of_servers
    ),
    "a small host": _reduction_by_kind(tiers=leave.host_room),
    "a storage that is detached": partial(leave.none_of, Reattach),
    "a storage": _reduction_by_kind(blocks=leave.no_storage, tiers=lambda *of: leave.no_storage(*of, Abort)),
    "recurrent state": _reduction_by_kind(
        rows=partial(leave.no_state, tracks=False, lazy=False),
        tiers=partial(leave.no_state, host_states=0, tracks=False),
        pairs=pairs.no_state_of_servers,
    ),
    "a host's memory": _reduction_by_kind(pairs=pairs.no_host_of_servers),
    "the host asked first": _reduction_by_kind(pairs=partial(leave.sized, host_first=False)),
    "a setting": _reduction_by_kind(rows=partial(leave.sized, settings=())),
    "a reset of host memory": partial(leave.none_of, (ResetConnector, NewWeights)),
    "a failed load": leave.no_failure,
    "a load for two": _reduction_by_kind(blocks=leave.no_shared_load),
    "adapters": partial(leave.with_fields, Add, adapter=""),
    "salts": partial(leave.with_fields, Add, salt=""),
    "children": partial(leave.with_fields, Add, children=0),
    "swapped requests": _reduction_by_kind(blocks=partial(leave.sized, swap=0)),
    "an adapter loaded again": partial(leave.none_of, LoadAdapter),
    "new weights": partial(leave.none_of, NewWeights),
    "priorities": _reduction_by_kind(
        blocks=partial(leave.sized, priority=False), pairs=partial(pairs.of_servers, priority=False)
    ),
    "a limit of a prefill": _reduction_by_kind(
        blocks=partial(leave.sized, long_prefill=0), pairs=partial(pairs.of_servers, long_prefill=0)
    ),
    "images": leave.no_images,
    "whole images": _reduction_by_kind(blocks=partial(leave.sized, whole_images=False)),
    "an encoder cache that runs full": _reduction_by_kind(blocks=leave.room_for_images),
    "a paused request": _reduction_by_kind(blocks=leave.no_paused_request),
    "a text longer than the model": leave.no_longer_text,
    "pools that run full": _reduction_by_kind(
        rows=leave.room_for_rows, blocks=leave.room_for_texts, pairs=pairs.room_for_servers
    ),
    REJECTED: leave.no_rejected_turn,
}


def without_needs(system: AnySystem, trace: Trace, without: Needs) -> Trace:
    """Return the trace without these needs, as far as they show when it runs on the system."""
    for name in without:
        trace = _NEEDS[name](system, trace)
    return trace


def lacks(system: AnySystem, without: Needs, trace: Trace) -> bool:
    """Return whether the trace has none of these needs."""
    return without_needs(system, trace, without) == trace


def needs(system: AnySystem, smallest: Trace, clause: str, among: Iterable[str] = _NEEDS) -> Needs:
    """Return the needs of a trace of a clause that has no superfluous command."""

    def needed(name: str) -> bool:
        less = without_needs(system, smallest, (name,))
        return less != smallest and clause not in (violation_of_clause(system, less, clause) or ())

    return tuple(filter(needed, among))


def traits(system: AnySystem, trace: Trace) -> set[str]:
    """Return the needs that a trace may have, needed or not; without a rejected turn, which shows only
    when it runs."""
    names = (name for name in _NEEDS if name != REJECTED)
    return {name for name in names if not lacks(system, (name,), trace)}


def to_avoid(known: Sequence[Needs]) -> list[Needs]:
    """Return sets of needs to avoid, the smallest first, so that each known trace lacks one of its
    needs."""
    each = dict.fromkeys(tuple(need for need in _NEEDS if need in one) for one in product(*known))
    by_size = sorted(each, key=len)
    return [
        one for index, one in enumerate(by_size) if not any({*less} < {*one} for less in by_size[:index])
    ]
