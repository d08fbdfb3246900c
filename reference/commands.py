"""The vocabulary: commands as data, and what can come of one.

A command names sessions and requests by small symbolic names, so that a trace keeps its meaning
when steps are deleted: a command that no longer applies is refused, with a reason, and changes
nothing. Lengths are tokens. Sessions and requests share one space of names; a name may be reused once
its bearer is gone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, Union, get_args


class Mode(StrEnum):
    """How far the environment may go.

    FREE: a window eviction may be driven with any length up to kv_allocated_len.
    FAITHFUL: as a scheduler does it: window eviction never past kv_committed_len, and never past what a later
    finish or retract of the same turn keeps; a finish is seen at most one round late (overlap), so
    it takes back less than two rounds. What is reachable here can happen in a server.
    """

    FREE = "free"
    FAITHFUL = "faithful"


class DescribedEnum(StrEnum):
    """Names that say in words what they stand for."""

    says: str
    __hash__ = str.__hash__  # those of enums run in Python

    def __new__(cls, value: str, says: str) -> Self:
        name = str.__new__(cls, value)
        name._value_ = value
        name.says = says
        return name


class Reason(DescribedEnum):
    """Why a command is refused. When several apply, the first in this order is the reason."""

    EMPTY = "empty", "no batch entries, or fewer than one token where one is needed"
    DUPLICATE_LANE = "duplicate_lane", "a batch names a request twice"
    UNKNOWN_SESSION = "unknown_session", "no open session is called that"
    SESSION_EXISTS = "session_exists", "the name is taken"
    UNKNOWN_REQUEST = "unknown_request", "nobody is called that"
    REQUEST_EXISTS = "request_exists", "the name is taken"
    SESSION_CLOSING = "session_closing", "the session was closed while a turn was in flight"
    TURN_IN_FLIGHT = "turn_in_flight", "a second turn while one runs"
    SHRINKING_PREFIX = "shrinking_prefix", "a prompt that takes back earlier tokens"
    WRONG_PHASE = "wrong_phase", "the request is not where the command needs it"
    NOT_IDLE = "not_idle", "an idle check while a batch holds a request"
    NO_SWA = "no_swa", "window eviction, or SWA lengths, on a model without a window"
    NO_STATES = "no_states", "recurrent states, on a model without"
    NO_TREE = "no_tree", "a command for the radix tree on a server without one"
    BAD_LENGTH = "bad_length", "a length (or level) outside what the command allows"
    UNFAITHFUL = "unfaithful", "no scheduler would do it; realistic mode, but for locks of turns"
    WINDOW_LOST = (
        "window_lost",
        "window eviction went past the commit: the request may end, not go on",
    )
    ROW_TOO_SHORT = "row_too_short", "the row of req_to_token is too narrow"
    NO_ROW = "no_row", "too few rows are free"
    OUT_OF_FULL = "out_of_full", "too few pages of the full pool are free or evictable"
    OUT_OF_SWA = "out_of_swa", "too few pages of the SWA pool are free or evictable"
    OUT_OF_STATES = "out_of_states", "too few slots of recurrent state are free or evictable"


# Refusals that depend on sizes; all others depend on the rules alone.
_MEMORY = (
    Reason.ROW_TOO_SHORT,
    Reason.NO_ROW,
    Reason.OUT_OF_FULL,
    Reason.OUT_OF_SWA,
    Reason.OUT_OF_STATES,
)
MEMORY_REASONS = frozenset(_MEMORY)


@dataclass(frozen=True, slots=True)
class Open:
    """Open a streaming session."""

    session: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The next `tokens` tokens of a prompt are those that the shared text `text` (a to z) has there, or those
    of an image (A to Z), of which an engine with an encoder makes as many embeddings.

    Two prompts have a prefix in common as far as their pieces name the same text.
    """

    text: str
    tokens: int


Prompt = tuple[Piece, ...]


def prompt_len(prompt: Prompt) -> int:
    """Return the length in tokens."""
    return sum(piece.tokens for piece in prompt)


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as files and reports have it, such as "a8b4"."""
    return "".join(f"{piece.text}{piece.tokens}" for piece in prompt)


def prompt_of(text: str) -> Prompt:
    """Return the prompt that a text such as "a8b4" stands for."""
    return tuple(
        Piece(letter, int(tokens)) for letter, tokens in re.findall(r"([a-zA-Z])(-?[0-9]+)", text)
    )


@dataclass(frozen=True, slots=True)
class Submit:
    """A client sends a turn (`session` None: an ordinary request), and it is queued. Its input is
    the session's history, then `prompt`, then `tokens` tokens of its own. `rewind` > 0 takes back
    that many tokens of the history; streaming sessions reject it. `answers`: its own tokens and its
    outputs are those of this shared text (a to z), as where a model answers the same question alike; "" for
    a text that nobody else has.
    """

    request: str
    session: str | None
    tokens: int
    rewind: int = 0
    prompt: Prompt = ()
    answers: str = ""


@dataclass(frozen=True, slots=True)
class Admit:
    """match_prefix: a later turn gets its slot's KV back, tail freed; another request locks the
    prefix that the radix tree has. Repeatable until it extends.
    """

    request: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A batch entry (lane) of Extend: `tokens` of the request's input still to prefill; 1 if it runs.

    `tail`: their KV comes from another server, which sends SWA KV of the last window alone; no SWA slots are
    taken for what is before.
    """

    request: str
    tokens: int
    tail: bool = False


@dataclass(frozen=True, slots=True)
class Extend:
    """Prefill a batch of chunks, all or nothing. The last chunk of an input samples one token. Requests that
    run may decode in the same batch (a mixed batch: --enable-mixed-chunk)."""

    lanes: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """One token for each running request of a batch, all or nothing."""

    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A batch entry of a verify round: slots for `allocate` tokens past the commit; `accept` commit."""

    request: str
    allocate: int
    accept: int


@dataclass(frozen=True, slots=True)
class SpecDecode:
    """A verify round of speculative decoding for a batch, all or nothing."""

    lanes: tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """A verify round whose result arrives later, by Settle (overlap scheduling). The device
    accepts `accept` tokens of a batch entry and continues behind them; the server does not know
    how many. All or nothing.
    """

    lanes: tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """The oldest result in flight of a request is there: so many tokens were accepted."""

    request: str


@dataclass(frozen=True, slots=True)
class EvictSwa:
    """Window eviction for one request, driven with `length` tokens."""

    request: str
    length: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The turn ends and `finished_len` of its outputs count (1 <= finished_len <= output)."""

    request: str
    finished_len: int


@dataclass(frozen=True, slots=True)
class Retract:
    """Memory pressure: a running request leaves its batch and waits for another admission.
    `in_flight` (0 or 1) outputs are lost: their round committed, but its result was not processed
    (overlap), so the committed length is that much ahead of the text.
    """

    request: str
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """The client or the server gives a request up. `marked`: the server keeps the queued request,
    marks it aborted and runs it through a one-token prefill (input too long); only for a request
    that was never admitted.
    """

    request: str
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """A client or a timeout closes a session; while a turn is in flight, as soon as that ends."""

    session: str


@dataclass(frozen=True, slots=True)
class Match:
    """match_prefix and inc_lock_ref on the radix tree, in one step. `holder` then has the longest
    usable prefix of `prompt` locked. `full_only`: the owner reads full KV alone (a backup, a
    transfer), passes over tombstones and pins no SWA KV.
    """

    holder: str
    prompt: Prompt
    full_only: bool = False


@dataclass(frozen=True, slots=True)
class Unlock:
    """dec_lock_ref: the lock owner gives back what its lock took, and is gone."""

    holder: str


@dataclass(frozen=True, slots=True)
class UnlockSwa:
    """dec_swa_lock_only: a lock owner, or a request whose window is past its prefix, releases the
    SWA part of its lock first. A turn's lock is its session's.
    """

    holder: str


@dataclass(frozen=True, slots=True)
class Insert:
    """A request that has computed `prompt` hands its whole pages to the radix tree. The tree
    already owns what `holder` has locked; the request computed the other pages, and window
    eviction has freed its SWA pages below `evicted`. The request has finished and unlocks, or
    continues (`chunked`): then it inserts only if it can match all of it again, and its lock moves
    to the end of that.
    """

    holder: str
    prompt: Prompt
    evicted: int = 0
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    """Memory pressure on the radix tree: free so many evictable tokens of each pool at least, and states."""

    full: int
    swa: int = 0
    states: int = 0


@dataclass(frozen=True, slots=True)
class CheckBusy:
    """The server's memory check between two steps. `level`: 0 off, 1 check, 2 check and log."""

    level: int = 1


@dataclass(frozen=True, slots=True)
class CheckIdle:
    """The server's memory check when no batch holds a request: nothing may be uncached."""


Command = Union[
    Open, Submit, Admit, Extend, Decode, SpecDecode, Launch, Settle, EvictSwa, Finish, Retract, Abort, Close,
    CheckBusy, CheckIdle, Match, Unlock, UnlockSwa, Insert, Evict,
]  # fmt: skip
COMMANDS: tuple[type, ...] = get_args(Command)
TREE_COMMANDS = (Match, Unlock, UnlockSwa, Insert, Evict)


def kind_name(kind: type) -> str:
    """Return the name of a kind of command in files and reports, such as "spec_decode"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


@dataclass(frozen=True, slots=True)
class Choice:
    """A system's choice for one request where the specification leaves one.

    `swa_evicted_seqlen` after a window eviction (its own, or one inside Extend, Decode, SpecDecode, Launch);
    `kv_allocated_len` after allocating ahead, or of what a Finish or Retract keeps of a turn that nothing can
    be resumed from; `kv_committed_len` after a Launch that claims less than it allocates. None: the default
    of the specification. `after`: window eviction inside an Extend came after the forward pass, and saw the
    length committed then.
    """

    request: str
    swa_evicted_seqlen: int | None = None
    kv_allocated_len: int | None = None
    after: bool = False
    kv_committed_len: int | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """A memory check's count of one pool ("full", "swa": tokens) or of the request rows ("rows").

    It balances when the terms add up to `total`. evictable and protected belong to the radix tree;
    session_held to slots whose KV no batch uses; uncached to the requests of the running batches.
    """

    pool: str
    available: int
    evictable: int
    protected: int
    session_held: int
    uncached: int
    total: int

    @property
    def counted(self) -> int:
        """The sum of the terms."""
        return self.available + self.evictable + self.protected + self.session_held + self.uncached

    @property
    def balances(self) -> bool:
        return self.counted == self.total


@dataclass(frozen=True, slots=True)
class Entry:
    """One part of a term in `pool`: what the session (session_held) or the request (uncached) called
    `holder` adds to it."""

    pool: str
    term: str
    holder: str
    amount: int


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of a memory check. entries: of systems that can tell, at any level. alarm: its own
    verdict in its own words, empty when it is satisfied."""

    accounts: tuple[Account, ...]
    entries: tuple[Entry, ...] = ()
    alarm: str = ""


@dataclass(frozen=True, slots=True)
class Freed:
    """Tokens of each pool that an eviction gave back, and states."""

    full: int
    swa: int
    states: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The command was carried out.

    report: of a memory check that is switched on.
    freed: of Evict.
    """

    choices: tuple[Choice, ...] = ()
    report: Report | None = None
    freed: Freed | None = None


DONE = Done()  # and nothing to say


@dataclass(frozen=True, slots=True)
class Refused:
    """The rules forbid the command; nothing changed."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Broken:
    """The system itself failed (an exception, a dead worker): neither done nor refused."""

    error: str


Outcome = Union[Done, Refused, Broken]
