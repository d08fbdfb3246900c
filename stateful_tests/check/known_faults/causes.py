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

from stateful_tests.check.known_faults import trace_reductions as reductions
from stateful_tests.check.known_faults import pair_reductions
from stateful_tests.check.known_faults.trace_reductions import Reduction

Needs = tuple[str, ...]  # names, in the order of _NEEDS

REJECTED = "a rejected turn"


def _reduction_by_kind(**reductions_by_kind: Reduction) -> Reduction:
    """Return a reduction that applies only to traces of some kinds of systems."""

    def reduce(system: AnySystem, trace: Trace) -> Trace:
        reduction = reductions_by_kind.get(kind_of_config(trace.geometry).name)
        return trace if reduction is None else reduction(system, trace)

    return reduce


# What a trace may need, and the trace without it. Which turns are rejected depends on the ends before.
_NEEDS: dict[str, Reduction] = {
    "a retract": partial(reductions.remove_commands, Retract),
    "an abort": partial(reductions.remove_commands, (Abort, Cancel)),
    "a finish": partial(reductions.remove_commands, Finish),
    "a close": partial(reductions.remove_commands, Close),
    "a verify round": partial(reductions.remove_commands, (SpecDecode, Launch, Settle)),
    "a received prompt": reductions.receive_nothing,
    "a next turn": partial(reductions.remove_commands, More),
    "a reset of the cache": partial(reductions.remove_commands, (ResetCache, Forget, NewWeights)),
    "drafts": _reduction_by_kind(
        blocks=reductions.remove_drafter,
        pairs=pair_reductions.remove_drafters_of_servers,
    ),
    "a window": _reduction_by_kind(
        blocks=reductions.remove_windows_of_groups,
        tiers=reductions.remove_window_of_tree,
        pairs=pair_reductions.remove_windows_of_servers,
    ),
    "blocks of two sizes": _reduction_by_kind(pairs=pair_reductions.equalise_blocks),
    "a cached prefix": _reduction_by_kind(pairs=pair_reductions.disable_caching_of_servers),
    "push": _reduction_by_kind(pairs=partial(reductions.set_sizes, push=False)),
    "overlap": _reduction_by_kind(
        tiers=partial(reductions.set_sizes, overlap=False),
        pairs=partial(reductions.set_sizes, prefill_overlap=False, decode_overlap=False),
    ),
    "pairs of tokens": _reduction_by_kind(tiers=partial(reductions.set_sizes, bigram=False)),
    "an answer for two": _reduction_by_kind(pairs=partial(reductions.set_sizes, shared=False)),
    "a client that is late": _reduction_by_kind(pairs=partial(reductions.set_sizes, late=False)),
    "a dropped answer": partial(reductions.remove_commands, Drop),
    "hits within a block": _reduction_by_kind(blocks=partial(reductions.set_sizes, match=0)),
    "checkpoints within a chunk": _reduction_by_kind(blocks=partial(reductions.set_sizes, checkpoints=0)),
    "chunks of several blocks": _reduction_by_kind(blocks=partial(reductions.set_sizes, chunk_blocks=1)),
    "chunks that go on": _reduction_by_kind(tiers=reductions.join_chunks),
    "a prompt in chunks": _reduction_by_kind(
        blocks=reductions.prefill_in_one_chunk, pairs=pair_reductions.prefill_in_one_chunk_on_servers
    ),
    "a text near max_model_len": _reduction_by_kind(
        blocks=reductions.raise_longest_text, pairs=pair_reductions.raise_longest_text_of_servers
    ),
    "a small host": _reduction_by_kind(tiers=reductions.make_room_on_host),
    "a storage that is detached": partial(reductions.remove_commands, Reattach),
    "a storage": _reduction_by_kind(
        blocks=reductions.remove_storage,
        tiers=lambda *system_and_trace: reductions.remove_storage(*system_and_trace, Abort),
    ),
    "recurrent state": _reduction_by_kind(
        rows=partial(reductions.remove_states, tracks=False, lazy=False),
        tiers=partial(reductions.remove_states, host_states=0, tracks=False),
        pairs=pair_reductions.remove_states_of_servers,
    ),
    "a host's memory": _reduction_by_kind(pairs=pair_reductions.remove_host_of_servers),
    "ARC": _reduction_by_kind(
        blocks=partial(reductions.set_sizes, arc=False),
        pairs=partial(pair_reductions.set_sizes_of_servers, arc=False),
    ),
    "the host asked first": _reduction_by_kind(pairs=partial(reductions.set_sizes, host_first=False)),
    "a setting": _reduction_by_kind(rows=partial(reductions.set_sizes, settings=())),
    "a reset of host memory": partial(reductions.remove_commands, (ResetConnector, NewWeights)),
    "a failed load": reductions.remove_failures,
    "a load for two": _reduction_by_kind(blocks=reductions.separate_prompts),
    "adapters": partial(reductions.set_fields, Add, adapter=""),
    "salts": partial(reductions.set_fields, Add, salt=""),
    "children": partial(reductions.set_fields, Add, children=0),
    "swapped requests": _reduction_by_kind(blocks=partial(reductions.set_sizes, swap=0)),
    "an adapter loaded again": partial(reductions.remove_commands, LoadAdapter),
    "new weights": partial(reductions.remove_commands, NewWeights),
    "priorities": _reduction_by_kind(
        blocks=partial(reductions.set_sizes, priority=False),
        pairs=partial(pair_reductions.set_sizes_of_servers, priority=False),
    ),
    "a limit of a prefill": _reduction_by_kind(
        blocks=partial(reductions.set_sizes, long_prefill=0),
        pairs=partial(pair_reductions.set_sizes_of_servers, long_prefill=0),
    ),
    "images": reductions.remove_images,
    "whole images": _reduction_by_kind(blocks=partial(reductions.set_sizes, whole_images=False)),
    "an encoder cache that runs full": _reduction_by_kind(blocks=reductions.make_room_for_images),
    "a paused request": _reduction_by_kind(blocks=reductions.remove_paused_requests),
    "a text longer than the model": reductions.remove_too_long_turns,
    "pools that run full": _reduction_by_kind(
        rows=reductions.make_room_for_rows,
        blocks=reductions.make_room_for_texts,
        pairs=pair_reductions.make_room_on_servers,
    ),
    REJECTED: reductions.remove_rejected_turns,
}


def without_needs(system: AnySystem, trace: Trace, without: Needs) -> Trace:
    """Return the trace without these needs, as far as they show when it runs on the system."""
    for name in without:
        trace = _NEEDS[name](system, trace)
    return trace


def has_none_of(system: AnySystem, without: Needs, trace: Trace) -> bool:
    """Return whether the trace has none of these needs."""
    return without_needs(system, trace, without) == trace


def needs(system: AnySystem, smallest: Trace, clause: str, among: Iterable[str] = _NEEDS) -> Needs:
    """Return the needs of a trace of a clause that has no superfluous command."""

    def needed(name: str) -> bool:
        reduced = without_needs(system, smallest, (name,))
        if reduced == smallest:
            return False
        return clause not in (violation_of_clause(system, reduced, clause) or ())

    return tuple(filter(needed, among))


def possible_needs(system: AnySystem, trace: Trace) -> set[str]:
    """Return the needs that a trace may have, needed or not; without a rejected turn, which shows only
    when it runs."""
    names = (name for name in _NEEDS if name != REJECTED)
    return {name for name in names if not has_none_of(system, (name,), trace)}


def needs_to_avoid(known: Sequence[Needs]) -> list[Needs]:
    """Return sets of needs to avoid, the smallest first, so that each known trace lacks one of its
    needs."""
    choices = (tuple(need for need in _NEEDS if need in chosen) for chosen in product(*known))
    by_size = sorted(dict.fromkeys(choices), key=len)
    return [
        names
        for index, names in enumerate(by_size)
        if not any({*smaller} < {*names} for smaller in by_size[:index])
    ]
