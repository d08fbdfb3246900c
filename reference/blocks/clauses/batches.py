"""Clauses on what a batch computes (RUN)."""

from __future__ import annotations

from reference.blocks.clauses.step import BlockStep, clause
from reference.blocks.commands import Schedule
from reference.blocks.request_texts import LaneNote
from reference.failures import AtCount, AtNamed, Failure, count_text, failure


@clause(
    "RUN-1",
    "a batch keeps to its limits",
    "A batch holds a request once, at most max_seqs requests and one to max_batched_tokens tokens, and no"
    " position at or past max_model_len.",
    why="What lies past a limit has no row, no slot or no position encoding; a model fails without a token.",
    rule="blocks.config",
    source="vllm Scheduler.schedule",
    scope="Drafts of an engine that never cuts a round may be past max_model_len, in slots that it has. A"
    " batch that is padded may have no token.",
    trigger=lambda s: any(
        n.lane.start + len(n.lane.tokens) >= s.config.max_model_len - 1 for n in s.lanes
    ),
)
def _batch_within_limits(step: BlockStep) -> Failure | None:
    """Return the failure of a batch with too many requests or tokens, without any token, or past
    max_model_len."""
    lanes = step.after.lanes
    config = step.config
    names = [lane.request for lane in lanes]
    if len(set(names)) < len(names) or len(names) > config.max_seqs:
        place = AtCount("batch", "requests", config.max_seqs)
        return failure(f"at most {config.max_seqs} requests, each once", f"{names}", place)
    if (tokens := sum(len(lane.tokens) for lane in lanes)) > config.max_batched_tokens:
        place = AtCount("batch", "tokens", config.max_batched_tokens)
        return failure(f"at most {config.max_batched_tokens} tokens", f"{tokens}", place)
    if lanes and not tokens and not step.after.padded:
        place = AtCount("batch", "tokens", 1)
        return failure("the batch must have a token", "the batch has none", place)
    last = config.max_model_len + step.after.overrun
    for lane in lanes:
        if (end := lane.start + len(lane.tokens)) > last:
            expected = f"{lane.request} ends by {last}"
            place = AtCount(lane.request, "computed", last)
            return failure(expected, f"it computes [{lane.start}, {end})", place)
    return None


@clause(
    "RUN-2",
    "a batch continues where KV ends",
    "A running request continues at its first position without KV: no position is left out or "
    "computed twice. A session's next turn may start earlier.",
    why=(
        "Scheduler and runner count separately, and both take drafts back under asynchronous "
        "scheduling. A gap is KV that is never written and always read."
    ),
    rule="blocks.request_texts",
    source="vllm _update_states, num_computed_tokens",
    scope="A request that held nothing may start anywhere in the cached prefix: HIT-1.",
    trigger=lambda s: any(not n.fresh for n in s.lanes),
)
def _entry_starts_where_kv_ends(step: BlockStep) -> Failure | None:
    for note in step.lanes:
        start = note.lane.start
        if note.fresh:
            continue
        allowed = start <= note.computed if note.turned else start == note.computed
        if not allowed:
            name = note.lane.request
            expected = f"{name} goes on at {note.computed}"
            observed = f"it computes from {start}{_explain_low_start(step, note)}"
            return failure(expected, observed, AtCount(name, "start", note.computed))
    return None


def _explain_low_start(step: BlockStep, note: LaneNote) -> str:
    """Explain a start that is too low, where the request no longer has the blocks that it had."""
    name = note.lane.request
    had, has = (
        {block for row in tables for block in row if block}
        for tables in (
            step.before.requests[name].tables if name in step.before.requests else (),
            note.lane.tables,
        )
    )
    if note.lane.start >= note.computed or not had - has or name in step.after.released:
        return ""
    return f" in other blocks (if {name} was preempted and came back in this schedule, released names it)"


@clause(
    "RUN-3",
    "inputs are the text",
    "Inputs of a batch entry are the tokens of its request's text, in order, then drafts. The "
    "model samples exactly when the last token of the text is among them.",
    why="The runner keeps texts of its own, across preemptions, turns and rejected drafts.",
    rule="blocks.request_texts",
    source="vllm _update_states, _prepare_input_ids",
    scope="Drafts that no drafter proposed are padding.",
    trigger=lambda s: bool(s.lanes),
)
def _inputs_are_text(step: BlockStep) -> Failure | None:
    for note in step.lanes:
        lane = note.lane
        own_tokens = lane.tokens[: len(lane.tokens) - lane.drafts]
        end = lane.start + len(own_tokens)
        if list(own_tokens) != note.text[lane.start : end]:
            expected = f"{lane.request} computes its text at [{lane.start}, {end})"
            return failure(expected, "other tokens, or none", AtCount(lane.request, "inputs"))
        if bool(lane.sampled) != (end == len(note.text)):
            text_length = count_text(len(note.text), "token")
            expected = f"no token of {lane.request} is due: its text of {text_length} is computed up to {end}"
            if end == len(note.text):
                expected = f"a token of {lane.request} is due: its text of {text_length} is computed"
            sampled = count_text(len(lane.sampled), "sampled token")
            return failure(expected, sampled, AtCount(lane.request, "samples"))
        if lane.drafts and end != len(note.text):
            expected = f"drafts of {lane.request} follow the text of {len(note.text)} tokens"
            return failure(expected, f"they follow position {end}", AtCount(lane.request, "drafts"))
    return None


@clause(
    "RUN-4",
    "no stall",
    "While a request waits or runs, no session is between turns and neither step nor transfer is "
    "in flight, a schedule gives a batch or preempts a request.",
    why="Otherwise the server hangs, and every memory check passes.",
    rule="blocks.config",
    source="vllm Scheduler.schedule",
    scope=(
        "Sessions between turns hold blocks, which can stop others for as long. A grant that a pool does not"
        " hold raises: BROKEN."
    ),
    trigger=lambda s: isinstance(s.command, Schedule) and len(s.lanes) < len(s.bearers),
)
def _batch_makes_progress(step: BlockStep) -> Failure | None:
    if not isinstance(step.command, Schedule) or step.refused or step.after.lanes:
        return None
    if step.before.kv_moves or step.after.kv_moves:
        return None  # a request may wait for that KV
    if (
        step.before.steps_in_flight
        or any(b.idle for b in step.bearers.values())
        or not step.bearers
    ):
        return None
    if step.before.requests != step.after.requests:
        return None  # such as a preemption, whose blocks are free for the next schedule
    statuses = {name: fact.status for name, fact in step.after.requests.items()}
    those = ", ".join(f"{name} {status}" for name, status in statuses.items())
    observed = f"no batch comes, with {len(step.after.free)} blocks free and {those}"
    waiting = (AtNamed("request", name) for name in statuses)
    expected = "a batch must come, for somebody waits or runs and nothing is in flight"
    return failure(expected, observed, AtCount("batch", "stall"), *waiting)
