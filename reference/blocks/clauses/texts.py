"""Clauses on what clients get, and on the text that the engine keeps for them (TXT)."""

from __future__ import annotations

from reference.blocks.clauses.step import BlockStep, clause
from reference.failures import AtCount, AtNamed, AtText, Failure, failure

_SERVING = "kvspec"


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
def _chain(step: BlockStep) -> Failure | None:
    for note in step.outputs:
        given = note.given.tokens if note.given is not None else ()
        if given != note.tokens and not (note.optional and not given):
            got = f"it gets {list(given)}"
            return failure(f"{note.name} gets {list(note.tokens)}", got, AtText(note.name))
        if given and not note.current:
            got = f"{list(given)} was sampled behind another"
            want = f"{note.name} gets what was sampled behind its text"
            return failure(want, got, AtCount(note.name, "sampled behind"))
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
def _ends(step: BlockStep) -> Failure | None:
    for name in (note.lane.request for note in step.lanes):
        if name in step.bearers and step.bearers[name].failed:
            return failure(
                f"{name} ends: its load has failed", "it goes on", AtCount(name, "ended", 1)
            )
    for note in step.outputs:
        if note.given is None or not note.given.tokens:
            if note.given is not None and note.given.finished and not note.ends:
                at = AtCount(note.name, "ended", 0)
                return failure(f"{note.name} goes on", f"it ends: {note.given.finished}", at)
            continue
        if bool(note.given.finished) != note.ends:
            return failure(
                f"{note.name} {'ends' if note.ends else 'goes on'}",
                f"it {'ends: ' + note.given.finished if note.given.finished else 'goes on'}",
                AtCount(note.name, "ended", int(note.ends)),
            )
    return None


@clause(
    "TXT-3",
    "the scheduler has the client's text",
    "The scheduler knows exactly the requests that have not ended, each with its client's text. "
    "A session's next turn continues behind all but the last token of the one before.",
    why="Block hashes, lengths and the prompt of a session's next turn are made from it.",
    rule="blocks.request_texts",
    source="vllm Scheduler.requests, _update_request_as_session",
    trigger=lambda s: bool(s.bearers),
)
def _texts(step: BlockStep) -> Failure | None:
    known = set(step.after.requests)
    there = set(step.bearers)
    if known != there:
        wrong = (AtNamed("request", name) for name in sorted(known ^ there))
        return failure(
            f"it knows {sorted(there)}, as clients do", f"it knows {sorted(known)}", *wrong
        )
    for name, fact in step.after.requests.items():
        text = step.bearers[name].text
        if fact.tokens != tuple(text):
            at = next((i for i, (a, b) in enumerate(zip(fact.tokens, text)) if a != b), None)
            got = f"{len(fact.tokens)} tokens" + (
                "" if at is None else f", another one at position {at}"
            )
            return failure(
                f"{name}: the {len(text)} tokens that its client has", got, AtText(name, at)
            )
    return None
