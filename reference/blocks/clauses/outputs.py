"""Clauses on what clients get, and on the text that the engine keeps for them (TXT)."""

from __future__ import annotations

from reference.blocks.clauses.step import BlockStep, clause
from reference.failures import AtCount, AtNamed, AtText, Failure, failure


@clause(
    "TXT-1",
    "outputs are the model's chain",
    "Every token that a client gets was sampled by the model behind exactly the client's text, "
    "up to the stop, each once.",
    why="A token that is lost, doubled or sampled behind another text is a silent wrong answer.",
    rule="blocks.request_texts",
    source="vllm update_from_output",
    scope="Results of a step that a preemption or the end of a turn has made stale may be dropped; those of"
    " an entry that read what a load has not brought must be.",
    trigger=lambda s: bool(s.outputs),
)
def _outputs_are_sampled_behind_the_text(step: BlockStep) -> Failure | None:
    for note in step.outputs:
        output_tokens = note.given.tokens if note.given is not None else ()
        if output_tokens != note.tokens and not (note.optional and not output_tokens):
            expected = f"{note.name} gets {list(note.tokens)}"
            return failure(expected, f"it gets {list(output_tokens)}", AtText(note.name))
        if output_tokens and not note.current:
            expected = f"{note.name} gets what was sampled behind its text"
            observed = f"{list(output_tokens)} was sampled behind another"
            return failure(expected, observed, AtCount(note.name, "sampled behind"))
    return None


@clause(
    "TXT-2",
    "a turn ends when it is due",
    "A turn ends exactly at the stop token, its last output, or max_model_len. A load that fails ends its"
    " request where that is the policy.",
    why="A late end wastes work; an early one cuts an answer off.",
    rule="blocks.request_texts",
    source="vllm check_stop",
    trigger=lambda s: any(o.ends for o in s.outputs),
)
def _turn_ends_when_due(step: BlockStep) -> Failure | None:
    for note in step.lanes:
        name = note.lane.request
        if name in step.bearers and step.bearers[name].failed:
            place = AtCount(name, "ended", 1)
            return failure(f"{name} ends: its load has failed", "it goes on", place)
    for output in step.outputs:
        if output.given is None:
            continue
        finished = output.given.finished
        if finished and not output.ends:
            place = AtCount(output.name, "ended", 0)
            return failure(f"{output.name} goes on", f"it ends: {finished}", place)
        # An output that lacks its tokens is judged by TXT-1.
        if output.ends and not finished and output.given.tokens:
            place = AtCount(output.name, "ended", 1)
            return failure(f"{output.name} ends", "it goes on", place)
    return None


@clause(
    "TXT-3",
    "the scheduler has the client's text",
    "The scheduler knows exactly the requests that have not ended, each with its client's text. "
    "A session's next turn continues behind all but the last token of the one before.",
    why="Block hashes, lengths and the prompt of a session's next turn are made from it.",
    rule="blocks.request_texts",
    source="vllm Scheduler.requests, _update_request_as_session",
    scope="A child of a request (add, children) is there once its parent samples, with the same prompt. A"
    " parent that is aborted before has none.",
    trigger=lambda s: bool(s.bearers),
)
def _scheduler_has_the_clients_text(step: BlockStep) -> Failure | None:
    known = set(step.after.requests)
    running = set(step.bearers)
    if known != running:
        places = (AtNamed("request", name) for name in sorted(known ^ running))
        expected = f"it knows {sorted(running)}, as clients do"
        return failure(expected, f"it knows {sorted(known)}", *places)
    for name, fact in step.after.requests.items():
        text = step.bearers[name].text
        if fact.tokens != tuple(text):
            pairs = enumerate(zip(fact.tokens, text))
            position = next((i for i, (kept, sent) in pairs if kept != sent), None)
            observed = f"{len(fact.tokens)} tokens"
            if position is not None:
                observed += f", another one at position {position}"
            expected = f"{name}: the {len(text)} tokens that its client has"
            return failure(expected, observed, AtText(name, position))
    return None
