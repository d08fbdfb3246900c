"""State: the owner of each page of each pool, by role and position, never by slot id.

Everything here is an immutable value that compares and hashes by content. A holder (a session with
its running turn, or an ordinary request) owns full pages [R/P, ceil(A)/P) and SWA pages
[ceil(max(R, E))/P, ceil(A)/P) of its sequence, the radix tree those of its nodes; what nobody owns is
free.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, TypeVar

from reference.commands import Mode, DescribedEnum
from reference.cursors import Cursors as Cursors
from reference.geometry import Geometry
from reference.memoization import memoized
from reference.radix_tree import Tree, state_paths, tokens_held
from reference.token_ids import token_id

ZERO = Cursors(0, 0, 0, 0)

# A text as runs: ((serial, end), ...), each run reaching from the end of the one before.
Text = tuple[tuple[int, int], ...]


def text_len(text: Text) -> int:
    """Return the length of a text (tokens)."""
    return text[-1][1] if text else 0


@lru_cache(maxsize=1 << 12)
def text_tokens(text: Text, length: int | None = None) -> tuple[int, ...]:
    """Return the token ids of the first `length` tokens (all, by default)."""
    limit = text_len(text) if length is None else length
    tokens: list[int] = []
    for serial, end in text:
        tokens.extend(range(token_id(serial, len(tokens)), token_id(serial, min(end, limit))))
    return tuple(tokens)


def goes_on(text: Text, serial: int, end: int) -> Text:
    """Return `text` continued up to `end` with tokens of this serial."""
    before = text[:-1] if text and text[-1][0] == serial else text
    return (*before, (serial, end))


def text_cut(text: Text, length: int) -> Text:
    """Return the first `length` tokens, as runs."""
    spans: list[tuple[int, int]] = []
    for serial, end in text:
        if spans and spans[-1][1] >= length:
            break
        spans.append((serial, min(end, length)))
    return tuple(spans) if length else ()


class Phase(DescribedEnum):
    """The phase of a request."""

    QUEUED = "queued", "waits, holds nothing itself"
    ADMITTED = "admitted", "prefix matched, nothing computed since"
    EXTENDING = "extending", "part of its input is computed"
    RUNNING = "running", "decodes"


# A running batch lists the request, and its KV is its own.
IN_BATCH = (Phase.EXTENDING, Phase.RUNNING)


class Round(NamedTuple):
    """A verify round in flight.

    allocate: slots it has taken.
    accept: tokens that the device accepts.
    claimed: tokens that kv_committed_len counts already.
    """

    allocate: int
    accept: int
    claimed: int


class Request(NamedTuple):
    """A request that has not ended. Lengths are in tokens."""

    name: str
    session: str | None
    #: the serial of its own tokens
    serial: int
    #: the text before its own tokens, prompt included
    history: Text
    #: length of the input
    origin: int
    #: tokens generated, without those of rounds in flight
    output: int = 0
    phase: Phase = Phase.QUEUED
    #: it has written KV
    started: bool = False
    #: the largest length of a window eviction, or of one that released the SWA part of its
    #: session's lock
    evicted: int = 0
    #: outputs whose results were processed for certain when the last round was launched, and when
    #: the next one is: a scheduler runs at most one round ahead
    processed_outputs: tuple[int, int] = (0, 0)
    #: None while it holds no row and no prefix
    cursors: Cursors | None = None
    #: rounds whose results are to come, the oldest first
    in_flight: tuple[Round, ...] = ()

    @property
    def settled_len(self) -> int:
        """Tokens with KV by results that have arrived: kv_committed_len without the claims of rounds in
        flight."""
        assert self.cursors is not None
        committed = self.cursors.kv_committed_len
        return committed - sum(r.claimed for r in self.in_flight) if self.in_flight else committed

    @property
    def computed_len(self) -> int:
        """Tokens with KV on the device, which knows the accepted tokens of rounds in flight."""
        return self.settled_len + sum(r.accept for r in self.in_flight)

    @property
    def text(self) -> Text:
        """Input and outputs so far."""
        return goes_on(self.history, self.serial, self.origin + self.output)

    @property
    def computed_text(self) -> Text:
        """Input and outputs, including accepted tokens of rounds in flight. It has KV up to
        computed_len."""
        return goes_on(self.history, self.serial, max(self.computed_len, self.origin + self.output))

    @property
    def holder(self) -> str:
        """The name under which it owns pages and locks: its session's, or its own."""
        return self.session or self.name


class Session(NamedTuple):
    """An open session.

    slot: cursors of what it keeps between turns; None when it keeps nothing.
    state: number of tokens before its recurrent state, which no cut changes; 0 without one.
    """

    name: str
    history: Text = ()
    slot: Cursors | None = None
    turn: str | None = None
    closing: bool = False
    state: int = 0


Named = TypeVar("Named", Session, Request)
_NAME = attrgetter("name")


def _replace_named(those: tuple[Named, ...], one: Named) -> tuple[Named, ...]:
    """Return the values with `one` added, or in the place of that of its name, in the order of names."""
    others = [each for each in those if each.name != one.name]
    insort(others, one, key=_NAME)
    return tuple(others)


class RunConfig(NamedTuple):
    """The configuration of a run. It does not change."""

    geometry: Geometry
    mode: Mode


class _State(NamedTuple):
    config: RunConfig
    sessions: tuple[Session, ...] = ()
    requests: tuple[Request, ...] = ()
    serial: int = 0
    tree: Tree | None = None


class State(_State):
    """The whole state. sessions and requests are sorted by name; serial counts Submits.

    tree: None where the geometry has none. A lock in it belongs to a session or a request by its name,
        or to a lock owner.
    """

    def __getstate__(self) -> None:
        """Leave out memoized values: they do not travel with a state."""

    def __hash__(self) -> int:
        return self._hash

    @memoized
    def _hash(self) -> int:
        return hash(self[1:])

    def session(self, name: str | None) -> Session | None:
        for s in self.sessions:
            if s.name == name:
                return s
        return None

    def request(self, name: str | None) -> Request | None:
        for r in self.requests:
            if r.name == name:
                return r
        return None

    def with_session(self, session: Session) -> State:
        return State(
            self.config, _replace_named(self.sessions, session), self.requests, self.serial, self.tree
        )

    def without_session(self, name: str) -> State:
        return self._replace(sessions=tuple(s for s in self.sessions if s.name != name))

    def with_request(self, request: Request) -> State:
        return State(
            self.config, self.sessions, _replace_named(self.requests, request), self.serial, self.tree
        )

    def with_those(self, moved: Mapping[str, Request]) -> State:
        """Return the state with these requests in the place of those of their names."""
        requests = tuple(moved.get(r.name, r) for r in self.requests)
        return State(self.config, self.sessions, requests, self.serial, self.tree)

    def without_request(self, name: str) -> State:
        return self._replace(requests=tuple(r for r in self.requests if r.name != name))


def state_of(state: State, request: Request) -> int:
    """Return the number of tokens before the recurrent state of a request in a batch; 0 on a model
    without."""
    return request.computed_len if state.config.geometry.states else 0


class Holder(NamedTuple):
    """One owner of pages and of a row: a session (lent or not) or a request without a slot."""

    name: str
    cursors: Cursors
    text: Text  # what its first kv_committed_len positions hold
    request: Request | None


@memoized
def holders(state: State) -> tuple[Holder, ...]:
    """Return all holders that have a row. A session and its running turn are one holder, under the
    session's name."""
    return tuple(_holders(state))


def _holders(state: State) -> Iterator[Holder]:
    requests = {request.name: request for request in state.requests}
    for session in state.sessions:
        turn = requests.get(session.turn or "")
        if turn is not None and turn.cursors is not None:
            if session.slot is not None or turn.phase in IN_BATCH:
                yield Holder(session.name, turn.cursors, turn.text, turn)
        elif session.slot is not None:
            text = turn.text if turn is not None and turn.started else session.history
            yield Holder(session.name, session.slot, text, None)
    for request in state.requests:
        if request.session is None and request.cursors is not None and request.phase in IN_BATCH:
            yield Holder(request.holder, request.cursors, request.text, request)


def full_pages(cursors: Cursors, page_size: int) -> range:
    """Return the page indices of the sequence whose full pages the row owns."""
    return range(
        cursors.cache_protected_len // page_size, -(-cursors.kv_allocated_len // page_size)
    )


def swa_pages(cursors: Cursors, page_size: int) -> range:
    """Return the page indices of the sequence whose SWA pages the row owns."""
    dead = max(cursors.cache_protected_len, cursors.swa_evicted_seqlen)
    return range(-(-dead // page_size), -(-cursors.kv_allocated_len // page_size))


class Free(NamedTuple):
    """Free pages per pool, rows, and slots of recurrent state."""

    full: int
    swa: int
    rows: int
    states: int = 0


@memoized
def state_lens(state: State) -> dict[str, int]:
    """Return the length of each recurrent state, in tokens, by the name of its holder.

    A request has one from its first tokens on, and an admission that has matched a prefix; a session has one
    as long as it has a slot, and lends it with that.
    """
    lengths: dict[str, int] = {}
    if not state.config.geometry.states:
        return lengths
    lengths = {session.name: session.state for session in state.sessions if session.slot is not None}
    for request in state.requests:
        if request.cursors is not None and request.computed_len:
            lengths[request.holder] = request.computed_len
    return lengths


@memoized
def free(state: State) -> Free:
    """Return what is free: the total less what is owned."""
    geometry = state.config.geometry
    full = geometry.full_pages
    swa = geometry.swa_pages
    rows = geometry.rows
    for _, cursors, _, _ in holders(state):
        full -= len(full_pages(cursors, geometry.page_size))
        if geometry.window is not None:
            swa -= len(swa_pages(cursors, geometry.page_size))
        rows -= 1
    if state.tree is not None:
        cached_full, cached_swa = tokens_held(state.tree)
        full -= cached_full // geometry.page_size
        swa -= cached_swa // geometry.page_size
    states = geometry.states - len(state_lens(state))
    if state.tree is not None and state.tree.states:
        states -= len(state_paths(state.tree))
    return Free(full, swa, rows, states)
