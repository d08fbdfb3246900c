"""Commands of clients and of the model to an engine that schedules by itself.

A command names no batch: the engine picks it. A step is two commands, `Schedule` has the engine pick a batch
and the model run it, `Update` hands the engine the oldest results: aborts may come between them, and where
steps overlap the next `Schedule`. All else that clients do is read between steps. A command that does not
apply is refused and changes nothing, so that any part of a trace means something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union, get_args

from reference.commands import Abort, Prompt
from reference.tiers.commands import Backup, Complete, Copy, Fetch, ResetCache
from reference.token_ids import image_tokens, is_image, shared_serial, token_id


@dataclass(frozen=True, slots=True)
class Add:
    """A client sends a request: `prompt`, then `tokens` that no other request has.

    resumable: the first turn of a session, which waits for more turns when it ends.
    priority: requests of lower priority run first.
    remote: tokens of the prompt that a peer has computed.
    adapter: the LoRA adapter that computes it, "" for none.
    salt: its KV is shared only among requests of the same salt, "" for all.
    children: further answers to the prompt. Each is a request of its own (`child_name`), which the engine
        forks off before the request computes the last token of its prompt.
    """

    request: str
    max_tokens: int
    tokens: int = 0
    prompt: Prompt = ()
    priority: int = 0
    resumable: bool = False
    remote: int = 0
    adapter: str = ""
    salt: str = ""
    children: int = 0


@dataclass(frozen=True, slots=True)
class More:
    """The next turn of a session, whether or not the one before has ended."""

    request: str
    max_tokens: int
    tokens: int = 1
    prompt: Prompt = ()


@dataclass(frozen=True, slots=True)
class End:
    """The session ends after the turns that were sent."""

    request: str


@dataclass(frozen=True, slots=True)
class Schedule:
    """The engine picks a batch and the model runs it.

    accept: drafts that the model accepts, for the requests of the batch in order; the last number holds
        for the rest.
    stop: requests for which the model samples a stop token.
    """

    accept: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """The engine gets the results of the oldest batch. drafts: tokens that the drafter then proposes
    for each request, where it may propose fewer than configured."""

    drafts: int = 16


@dataclass(frozen=True, slots=True)
class Fail:
    """The oldest load fails after its first `blocks` blocks. Where a step does its loads itself, the
    next load fails."""

    blocks: int = 0


@dataclass(frozen=True, slots=True)
class ResetConnector:
    """Forget every copy in host memory."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Other weights replace those of an adapter. No request uses the adapter."""

    adapter: str


@dataclass(frozen=True, slots=True)
class NewWeights:
    """The model's weights are replaced between two steps: the server preempts running requests, empties
    the prefix cache and host memory, and loads the weights."""


EngineCommand = Union[
    Add, More, End, Abort, ResetCache, Schedule, Update, Copy, Complete, Fail, ResetConnector,
    LoadAdapter, NewWeights, Backup, Fetch,
]  # fmt: skip
ENGINE_COMMANDS: tuple[type, ...] = get_args(EngineCommand)
SOURCE_FIELDS = ("adapter", "salt")  # of Add
TRANSFER_COMMANDS = (Copy, Complete, Fail, ResetConnector, Backup, Fetch)  # of engines with a connector
STORAGE_COMMANDS = (Backup, Fetch)  # of those with a storage behind it
STOP_TOKEN = 1  # no other token is so small


def child_name(request: str, number: int) -> str:
    """Return the name of a further answer to the prompt of a request; numbers count from 0."""
    return f"{request}.{number}"


def client_tokens(prompt: Prompt, own: int, serial: int) -> list[int]:
    """Return the tokens of the `serial`-th accepted Add or More: those of shared texts, then `own`
    unique ones."""
    tokens: list[int] = []
    for piece in prompt:
        if is_image(piece.text):
            tokens += image_tokens(piece.text, piece.tokens)
            continue
        shared = shared_serial(piece.text)
        next_position = len(tokens)
        tokens += [
            token_id(shared, position)
            for position in range(next_position, next_position + piece.tokens)
        ]
    return tokens + [
        token_id(serial, next_position) for next_position in range(len(tokens), len(tokens) + own)
    ]
