"""Recurrent state beside KV: what a batch goes on from, what a node and a slot hold, whose slots are (STA).

STA-1, STA-2, STA-3 and STA-5 say of rows and a radix tree what they say of blocks (reference/blocks/clauses).
The recurrent layers of a server are one group here, and a slot has one of its states for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from reference.clauses.registry import clause
from reference.clauses.facts import StateFacts
from reference.clauses.step import Step
from reference.commands import Abort, Admit, Close, Decode, Extend, Finish, Launch, Retract, SpecDecode
from reference.failures import AtNamed, AtNode, AtState, Failure, Place, failure
from reference.prefix_cache import path_text
from reference.state import Phase, Request, Text, state_lens, text_tokens
from reference.recurrent_states import (
    GOES_ON, HIT, KEPT, NAMED, chained, may_have_second_slot, describe_stamp, stamp_after,
)  # fmt: skip

RECURRENT = "Models with recurrent layers."
_BATCHES = Extend, Decode, SpecDecode, Launch


@clause(
    "STA-1",
    HIT.title,
    HIT.sentence,
    why=HIT.why,
    rule="radix_tree.usable_length, rules.admit.admit",
    source="sglang finalize_match_result_in_cache; #34043, #31099",
    scope=f"{RECURRENT} First batches of requests that continue where a prefix of the tree ends.",
    of=(Extend,),
    needs=("states",),
    trigger=lambda s: any(hit and start for _, start, hit in _batch_entries(s)),
)
def _hit_has_its_state(step: Step) -> Failure | None:
    return _wrong_continuation(step, hits=True)


@clause(
    "STA-2",
    GOES_ON.title,
    GOES_ON.sentence,
    why=GOES_ON.why,
    rule="rules.admit.admit, state.state_lens",
    source="sglang StreamingSession.try_match_prefix; #34043",
    scope=f"{RECURRENT} All batches but those of STA-1; admissions of turns that resume past R.",
    of=(*_BATCHES, Admit),
    needs=("states",),
    trigger=lambda s: (
        any(not hit and start for _, start, hit in _batch_entries(s)) or _resumed_turn(s) is not None
    ),
)
def _state_continues_text(step: Step) -> Failure | None:
    return _resumed_without_state(step) or _wrong_continuation(step, hits=False)


def _resumed_turn(step: Step) -> tuple[Request, int] | None:
    """Return the turn that an admission resumes past the tree's prefix, and its position."""
    if not (isinstance(step.command, Admit) and step.done and step.config.geometry.states):
        return None
    request = step.named_request
    assert request is not None
    session = step.was.session(request.session)
    facts = step.after.requests.get(request.name)
    if session is None or session.slot is None or facts is None or facts.cursors is None:
        return None
    committed = facts.cursors.kv_committed_len
    return (request, committed) if committed > session.slot.cache_protected_len else None


def _resumed_without_state(step: Step) -> Failure | None:
    resumed = _resumed_turn(step)
    states = step.after.states
    if resumed is None or states is None:
        return None
    request, committed = resumed
    stamps = _stamps(request.text)
    slot = states.holders.get(request.holder)
    if slot is not None and states.stamp(slot) == stamp_after(stamps, committed):
        return None
    observed = (
        "it has no state"
        if slot is None
        else f"slot {slot} {describe_stamp(states.stamp(slot), stamps)}"
    )
    places: list[Place] = [AtNamed("request", request.name)]
    places += [AtState(slot)] if slot is not None else []
    head = f"lets {request.name} resume at {committed} and must let it resume where its state is"
    return failure(
        f"{request.name} resumes at {committed} with the state after {committed} tokens",
        observed,
        *places,
        head=head,
    )


def _batch_entries(step: Step) -> Iterator[tuple[Request, int, bool]]:
    """Yield (request before the batch, its first position, whether a prefix of the tree ends there)."""
    if not step.config.geometry.states:
        return
    for name in step.progress:
        request = step.was.request(name)
        assert request is not None and request.cursors is not None
        start = request.computed_len
        prefix = request.cursors.cache_protected_len
        yield request, start, request.phase is Phase.ADMITTED and start == prefix > 0


def _wrong_continuation(step: Step, hits: bool) -> Failure | None:
    """Return the failure of the first entry that continues from another state than the one after its
    preceding tokens."""
    states = step.after.states
    if states is None:
        return None
    for request, start, hit in _batch_entries(step):
        if hit != hits:
            continue
        stamps = _stamps(request.computed_text)
        stamp = states.read.get(request.name)
        if stamp != stamp_after(stamps, start):
            due_state = f"the state after its first {start} tokens" if start else "an empty state"
            slot = states.holders.get(request.holder)
            places: list[Place] = [AtNamed("request", request.name)]
            places += [AtState(slot)] if slot is not None else []
            observed = "it has none" if stamp is None else f"it {describe_stamp(stamp, stamps)}"
            head = f"must let {request.name} continue from {due_state}"
            return failure(f"{request.name} continues from {due_state}", observed, *places, head=head)
    return None


def _stamps(text: Text) -> list[int]:
    return chained(text_tokens(text))


@clause(
    "STA-3",
    NAMED.title,
    NAMED.sentence,
    why=NAMED.why,
    rule="radix_tree.insert, rules.finish.finish",
    source="sglang prepare_for_caching_req; #37836",
    scope=f"{RECURRENT} Servers with a radix tree.",
    needs=("tree", "states"),
    trigger=lambda s: s.after.states is not None and bool(s.after.states.nodes),
)
def _node_has_its_state(step: Step) -> Failure | None:
    states = step.after.states
    if states is None:
        return None
    for path, slot in sorted(states.nodes.items()):
        stamps = chained(path)
        if states.stamp(slot) != stamps[-1]:
            name = path_text(path)
            observed = f"slot {slot} {describe_stamp(states.stamp(slot), stamps)}"
            head = f"must leave the state after {name} in its node"
            return failure(
                f"the node that ends {name} has the state after it",
                observed,
                AtNode(path, "state"),
                AtState(slot),
                head=head,
            )
    return None


@clause(
    "STA-5",
    KEPT.title,
    KEPT.sentence,
    why=KEPT.why,
    rule="state.state_lens",
    source="sglang HybridReqToTokenPool.alloc; #55178",
    scope=f"{RECURRENT} Requests that have extended, and idle sessions. An admission may copy later.",
    needs=("states",),
    trigger=lambda s: any(length for _, length, _ in _expected_states(s)),
)
def _holder_keeps_its_state(step: Step) -> Failure | None:
    """Return the failure of the first holder whose slot has not the state after its computed tokens."""
    states = step.after.states
    if states is None:
        return None
    for name, length, text in _expected_states(step):
        stamps = _stamps(text)
        slot = states.holders.get(name)
        if length > len(stamps) or (
            slot is not None and states.stamp(slot) == stamp_after(stamps, length)
        ):
            continue
        observed = (
            "it has no slot" if slot is None else f"slot {slot} {describe_stamp(states.stamp(slot), stamps)}"
        )
        places = [AtState(slot)] if slot is not None else [AtNamed(_holder_kind(step, name), name)]
        head = f"must keep the state of {name} after its first {length} tokens"
        return failure(
            f"{name} has the state after its first {length} tokens", observed, *places, head=head
        )
    return None


def _expected_states(step: Step) -> Iterator[tuple[str, int, Text]]:
    """Yield (holder, tokens before its state, its text) for each holder that must have a state."""
    lengths = state_lens(step.now)
    for holder in step.holders_now:
        waits = any(
            r.holder == holder.name and r.phase is Phase.ADMITTED for r in step.now.requests
        )
        if holder.name in lengths and not waits:
            text = holder.text if holder.request is None else holder.request.computed_text
            yield holder.name, lengths[holder.name], text


@clause(
    "STA-8",
    "tracked",
    "A slot that a request keeps for the tree holds the state after exactly as many tokens of its text as the"
    " request says, written.",
    why="The slot becomes that of a node: whoever matches the node continues from it.",
    rule="recurrent_states.stamp_after",
    source="sglang ReqKvInfo.mamba_last_track_seqlen; #29973, #19415, #27998",
    scope=(
        f"{RECURRENT} Requests whose text goes into the tree."
        " Not what a lazy server's round in flight writes."
    ),
    needs=("tree", "states", "tracks"),
    trigger=lambda s: any(True for _ in _tracked_states(s)),
)
def _tracked_state_is_right(step: Step) -> Failure | None:
    states = step.after.states
    for request, slot, length in _tracked_states(step):
        assert states is not None
        stamps = _stamps(request.computed_text)
        lengths = [length, *_lengths_in_flight(step, request, length)]
        if states.stamp(slot) not in [stamp_after(stamps, length) for length in lengths]:
            expected = (
                f"slot {slot} has the state of {request.name} after its first {length} tokens"
            )
            head = f"must track the state of {request.name} after its first {length} tokens"
            observed = f"it {describe_stamp(states.stamp(slot), stamps)}"
            return failure(
                expected, observed, AtState(slot), AtNamed("request", request.name), head=head
            )
    return None


def _lengths_in_flight(step: Step, request: Request, length: int) -> range:
    """Return the boundaries that verify rounds in flight have reached on a lazy server: one of them may have
    overwritten the state after `length` tokens."""
    states = step.after.states
    assert states is not None
    sizes = step.config.geometry
    reached = states.reached.get(request.name)
    if not (sizes.lazy and states.verifies) or reached is None:
        return range(0)
    processed, launched = reached
    first = max(length, processed) // sizes.boundary + 1
    return range(first * sizes.boundary, launched + 1, sizes.boundary)


def _tracked_states(step: Step) -> Iterator[tuple[Request, int, int]]:
    """Yield (request, slot, tokens before its state) for slots that requests keep for the tree. STA-7
    has the slots of requests that hold nothing."""
    tracked = step.after.states.tracked if step.after.states is not None else {}
    for request in step.now.requests:
        session = step.now.session(request.session)
        if request.cursors is not None and (session is None or session.slot is None):
            for slot, length in tracked.get(request.holder, ()):
                yield request, slot, length


@clause(
    "STA-9",
    "on demand",
    "On a lazy server a request or idle session has one slot for the tree. A request has a second until the"
    " result that may fill it is processed.",
    why="The pool has room for one: each second slot that stays costs a request.",
    rule="recurrent_states.may_have_second_slot",
    source="sglang mamba_lazy_prealloc_at_boundary, mamba_lazy_spec_prepare",
    scope=f"{RECURRENT} Lazy servers.",
    needs=("tree", "states", "tracks", "lazy"),
    trigger=lambda s: s.after.states is not None and any(s.after.states.buffers.values()),
)
def _second_slot_is_given_back(step: Step) -> Failure | None:
    states = step.after.states
    if states is None:
        return None
    sizes = step.config.geometry
    reach = 2 * sizes.lazy_round * states.verifies
    turns = {r.holder: r.name for r in step.now.requests}
    for holder, slots in sorted(states.buffers.items()):
        computed_lens = states.reached.get(turns.get(holder, holder))
        most = 1
        if computed_lens is not None and may_have_second_slot(*computed_lens, sizes.boundary, reach):
            most = 2
        if len(slots) > most:
            allowed = "at most two slots" if most == 2 else "one slot"
            computed = f" with results up to token {computed_lens[0]}" if computed_lens is not None else ""
            return failure(
                f"{holder}{computed} has {allowed} for the tree",
                f"it has slots {' and '.join(map(str, slots))}",
                *map(AtState, reversed(slots)),
                head=f"must leave {holder} one slot for the tree",
            )
    return None


def _holder_kind(step: Step, name: str) -> str:
    return "session" if step.now.session(name) is not None else "request"


@clause(
    "STA-7",
    "given back",
    "A slot is held by requests that have computed something or were admitted behind a prefix, and by"
    " sessions that keep KV; by nobody else. A failed admission, an abort, a retract of an ordinary request,"
    " a finish and a close leave none.",
    why="Slots are few: with each that stays behind, one request less runs, until none does.",
    rule="state.state_lens",
    source="sglang Scheduler.abort_request, release_kv_cache; #16067, #20182, #23327",
    scope=RECURRENT,
    needs=("states",),
    trigger=lambda s: (
        bool(s.config.geometry.states)
        and s.done
        and isinstance(s.command, (Abort, Close, Finish, Retract))
    ),
)
def _ended_holders_have_no_slot(step: Step) -> Failure | None:
    """Return the failure of the first holder that ended and kept its slot, or whose slot was lost."""
    before = step.before.states
    states = step.after.states
    if before is None or states is None:
        return None
    holders = state_lens(step.now).keys()
    having = _slots_by_holder(states)
    for name in sorted(having.keys() - holders):
        slot = having[name][0]
        expected = f"{name} has no slot of recurrent state"
        head = f"must leave {name} without a slot"
        return failure(expected, f"it has slot {slot}", AtState(slot), head=head)
    free = {*states.free}
    had = _slots_by_holder(before)
    for name, slot in [(gone, slot) for gone in sorted(had.keys() - holders) for slot in had[gone]]:
        if slot not in free and not states.owners(slot):
            expected = f"slot {slot} of {name} is given back"
            head = f"must give slot {slot} of {name} back"
            return failure(expected, "nobody has it, and it is not free", AtState(slot), head=head)
    return None


def _slots_by_holder(states: StateFacts) -> dict[str, list[int]]:
    """Return all slots of each holder: its own, then its buffers."""
    slots = {name: [slot] for name, slot in states.holders.items()}
    for name, more in states.buffers.items():
        slots[name] = [*slots.get(name, ()), *more]
    return {name: those for name, those in slots.items() if those}


@clause(
    "STA-6",
    "slots add up",
    "Each slot of recurrent state is free, a node's, a request's or a session's: exactly one of these, once."
    " Slot 0, which padding writes to, is nobody's.",
    why="Two who share a slot fold their tokens into one state; a lost slot is never used again.",
    rule="state.free",
    source="sglang MambaSlotAllocator; #26941, #40250",
    scope=RECURRENT,
    needs=("states",),
    trigger=lambda s: (f := s.after.states) is not None and len(f.holders) + len(f.nodes) > 1,
)
def _slots_add_up(step: Step) -> Failure | None:
    """Return the failure of the first slot that is not exactly once in the free list or with an owner."""
    states = step.after.states
    if states is None:
        return None
    each_slot = range(1, states.size + 1)
    named_slots = [*_named_slots(states)]
    if sorted(named_slots) == [*each_slot]:
        return None
    for slot in sorted({*each_slot, *named_slots}):
        owners = states.owners(slot)
        times = list(states.free).count(slot)
        if not 1 <= slot <= states.size:
            odd = f"{' and '.join(owners) or 'the free list'} has slot {slot}"
            return failure(f"slots 1 to {states.size} are handed out", odd, AtState(slot))
        if len(owners) + times != 1:
            often = f" {times} times" if times > 1 else ""
            having = [*owners, *([f"the free list{often}"] if times else [])]
            observed = f"it is in {' and '.join(having)}" if having else "it is neither free nor owned"
            return failure(f"slot {slot} is free or has one owner", observed, AtState(slot))
    return None


def _named_slots(states: StateFacts) -> Iterator[int]:
    yield from states.free
    yield from (slot for slots in _slots_by_holder(states).values() for slot in slots)
    yield from states.nodes.values()
