"""Actions of a server's clients, as data, and the loop that carries them out, without an import of the
server.

A client waits for answers: its script says what it does, and the server decides when. So a run is repeated
by its clients and configuration alone, and keeps its meaning when clients or turns are taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from impl.choices import KeyedChoices

EOS = 2  # the token that ends a turn
# Token ids in use are [FIRST, FIRST + TOKENS).
FIRST = 10
TOKENS = 990
POLICIES = "write_through", "write_through_selective", "write_back"  # when KV is copied to the host
# How long a request waits for a storage behind the host.
STORAGES = "", "best_effort", "wait_complete", "timeout"
# flush: empty the cache once nothing runs or waits. abort: abort all. pause: compute nothing for a while.
# retract: pause, with what runs retracted before. update: that, and empty the cache, as for new weights.
OPERATIONS = "flush", "abort", "pause", "retract", "update"
PRIORITIES = "", "greatest", "smallest"  # the number that goes first, "" without priorities
FLUSH = "flush"  # in place of a request: the answer that an operator waits for
PATIENCE = 80  # rounds without a forward pass until a client that only occupies memory goes away


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server, or a pair of them: what `kvspec serve-check --set` names, and its `--help` describes."""

    page_size: Annotated[int, Meta(description="tokens of a page")] = 1
    tokens: Annotated[int, Meta(description="tokens of the full pool")] = 128
    running: Annotated[int, Meta(description="requests that run at once, at most")] = 6
    chunk: Annotated[int, Meta(description="tokens of a chunk of a prefill")] = 16
    window: Annotated[int, Meta(description="tokens of the sliding window; 0: none")] = 0
    swa: Annotated[int, Meta(description="the SWA pool, in tenths of the full one")] = 8
    draft: Annotated[int, Meta(description="tokens of a verify round; 0: no speculation")] = 0
    overlap: Annotated[bool, Meta(description="the next batch is scheduled while one runs")] = False
    tree: Annotated[bool, Meta(description="requests share prefixes in a radix tree")] = True
    pressure: Annotated[
        bool, Meta(description="requests are admitted with little room to go on, so that some are retracted")
    ] = True
    mixed: Annotated[bool, Meta(description="a prefill shares its batch with decodes")] = False
    states: Annotated[int, Meta(description="slots of recurrent state; 0: a model without")] = 0
    track: Annotated[
        int, Meta(description="tokens between kept states (extra_buffer); 0: at the end alone (no_buffer)")
    ] = 0
    lazy: Annotated[
        bool, Meta(description="a second slot only while the next state is written (extra_buffer_lazy)")
    ] = False
    hicache: Annotated[bool, Meta(description="the tree has a tier in host memory")] = False
    host: Annotated[int, Meta(description="the host's pools, in tenths of the device's")] = 20
    policy: Annotated[int, Meta(description="0 write_through, 1 write_through_selective, 2 write_back")] = 0
    storage: Annotated[
        int, Meta(description="storage behind the host: 0 none, 1 best_effort, 2 wait_complete, 3 timeout")
    ] = 0
    rust: Annotated[bool, Meta(description="the core of the tree is the one in Rust")] = False
    priority: Annotated[
        int, Meta(description="priorities: 0 none, 1 the greatest goes first, 2 the smallest")
    ] = 0
    threshold: Annotated[
        int, Meta(description="a waiting request preempts one whose priority differs by more")
    ] = 0
    queue: Annotated[int, Meta(description="requests that wait, at most; 0: any number")] = 0
    lowest: Annotated[
        bool, Meta(description="the lowest priority is retracted, not the fewest outputs")
    ] = False
    pair: Annotated[bool, Meta(description="a prefill server (P) and a decode server (D)")] = False
    decode_tokens: Annotated[int, Meta(description="tokens of D's full pool; 0: as many as P's")] = 0
    decode_overlap: Annotated[bool, Meta(description="overlap of D")] = False
    decode_tree: Annotated[bool, Meta(description="tree of D")] = False
    deferred: Annotated[
        bool, Meta(description="D keeps pages of an aborted request until P writes no more")
    ] = True
    optimistic: Annotated[
        int, Meta(description="attempts to compute a prompt in P before D has named pages")
    ] = 0
    prefill_complete: Annotated[
        bool, Meta(description="D names pages only for prompts that P has computed")
    ] = False
    prefill_draft: Annotated[
        bool, Meta(description="P has the draft model as well, and sends its KV")
    ] = False
    decode_hicache: Annotated[bool, Meta(description="host tier of the tree of D")] = False
    host_backup: Annotated[
        bool, Meta(description="KV that D retracts waits in a host pool, not in tensors")
    ] = False


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A turn of a client.

    wait: rounds since the turn before was answered (of an impatient client: sent).
    tokens: of its prompt, the first `shared` of which are those of text number `text`.
    limit: outputs at most.
    stop: the output that is the end token, 0 for none.
    abort: rounds after it was sent until the client disconnects, 0 for never.
    ignore_eos: the end token does not end it.
    priority: that the client states, 0 for none.
    """

    wait: int
    tokens: int
    limit: int
    stop: int = 0
    abort: int = 0
    shared: int = 0
    text: int = 0
    ignore_eos: bool = False
    priority: int = 0


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client of a server, or its operator.

    name: of its session, or of its requests.
    session: its turns are those of a session; otherwise each is an ordinary request.
    resends: its input begins with the conversation before it.
    impatient: sends without waiting, and closes at any moment.
    close: rounds after its last turn until it closes the session.
    start: rounds before its first turn.
    after: the client that must be done first.
    operator: the operation (OPERATIONS) that it carries out once, if it is an operator and no client; a pause
        lasts `close` rounds.
    """

    name: str
    start: int
    turns: tuple[Turn, ...]
    session: bool = True
    resends: bool = False
    impatient: bool = False
    close: int = 1
    after: str = ""
    operator: str = ""


class Message(msgspec.Struct, frozen=True):
    """One thing that a client or an operator says. A client opens or closes a session, sends a turn, or
    disconnects. An operator aborts all (mode), pauses the server (mode: how), has it go on, or has its cache
    emptied (mode: when)."""

    kind: Literal["open", "close", "submit", "abort", "pause", "go on", "flush"]
    name: str
    session: str | None = None
    tokens: tuple[int, ...] = ()
    limit: int = 0
    ignore_eos: bool = False
    mode: str = ""
    priority: int = 0


class _ClientState:
    """How far a client is."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.turn = 0
        self.due = client.start
        self.waits: str | None = None  # the request whose answer it waits for
        self.started = self.opened = self.done = False
        self.disconnects: dict[str, int] = {}


class Clients:
    """All clients of a run.

    seed: of the clients' and the model's tokens.
    stalled: called with the requests that clients wait for, when nothing has happened for long.
    """

    def __init__(
        self,
        clients: tuple[Client, ...],
        seed: int,
        stalled: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        self.seed = seed
        self.stalled = stalled
        self.turns = {f"{c.name}.{n}": t for c in clients for n, t in enumerate(c.turns, 1)}
        self._doing = [_ClientState(client) for client in clients]
        self._named = {state.client.name: state for state in self._doing}
        self._numbers = {name: at for at, name in enumerate(self.turns, 1)}
        self._idle = 0

    def sampled_token(self, request: str, position: int) -> int:
        """Return the token that the model samples for output number `position` (from 1) of a turn."""
        turn = self.turns[request]
        if turn.stop and position >= turn.stop:
            return EOS
        choices = KeyedChoices(self.seed, 1, self._numbers[request], position)
        return FIRST + choices.upto(TOKENS - 1)

    def accepts(self, request: str, outputs: int, most: int) -> int:
        """Return how many tokens of a verify round count."""
        choices = KeyedChoices(self.seed, 2, self._numbers[request], outputs)
        return 1 + choices.upto(most - 1)

    def prompt(self, request: str) -> tuple[int, ...]:
        """Return the prompt of a turn: the tokens after its session's text, or the whole conversation."""
        client, _, number = request.rpartition(".")
        before = f"{client}.{int(number) - 1}"
        if not self._named[client].client.resends or before not in self.turns:
            return self._added_tokens(request)
        turn = self.turns[before]
        answer = range(1, 1 + min(turn.limit, turn.stop or turn.limit))
        said = tuple(self.sampled_token(before, position) for position in answer)
        return self.prompt(before) + said + self._added_tokens(request)

    def _added_tokens(self, request: str) -> tuple[int, ...]:
        """Return the tokens that a turn adds to the conversation."""
        turn = self.turns[request]
        number = self._numbers[request]
        keys = (
            (4, turn.text, at) if at < turn.shared else (3, number, at) for at in range(turn.tokens)
        )
        return tuple(FIRST + KeyedChoices(self.seed, *key).upto(TOKENS - 1) for key in keys)

    @property
    def done(self) -> bool:
        """Whether every client has sent its whole script and has its answers. A flush may wait for ever."""
        return all(state.done or state.waits == FLUSH for state in self._doing)

    @property
    def awaits_flush(self) -> bool:
        """Whether a client has asked for a flush and has no answer."""
        return any(state.waits == FLUSH for state in self._doing)

    @property
    def loses_patience(self) -> bool:
        """Whether nothing was computed in half of the rounds after which a client goes away."""
        return self._idle > PATIENCE // 2

    def note_answer(self, request: str, now: int) -> None:
        """Note that the server has reported the end of a request."""
        for state in self._doing:
            state.disconnects.pop(request, None)
            if state.waits == request:
                state.waits = None
                state.due = now + self._wait(state)

    def round(self, now: int, forwards: int) -> list[Message]:
        """Return the messages of clients in this round.

        forwards: 0 if the server computed nothing since the last one.
        """
        messages = [message for state in self._doing for message in self._messages_of(state, now)]
        self._idle = 0 if forwards or messages else self._idle + 1
        if self._idle > PATIENCE:
            self._idle = 0
            waits = [state.waits for state in self._doing if state.waits not in (None, FLUSH)]
            self.stalled(waits)
            return self._disconnect_one()
        return messages

    def _wait(self, each: _ClientState) -> int:
        turns = each.client.turns
        return turns[each.turn].wait if each.turn < len(turns) else each.client.close

    def _messages_of(self, each: _ClientState, now: int) -> Iterator[Message]:
        client = each.client
        for request, at in list(each.disconnects.items()):
            if at <= now:
                del each.disconnects[request]
                yield Message("abort", request)
        if each.done or each.waits is not None:
            return
        before = self._named.get(client.after)
        if not each.started:
            if before is not None and not before.done:
                return
            each.started = True
            each.due = now + client.start
        if now < each.due:
            return
        if client.operator:
            yield from self._operates(each, now)
            return
        if client.session and not each.opened:
            each.opened = True
            yield Message("open", client.name)
        if each.turn < len(client.turns):
            turn = client.turns[each.turn]
            each.turn += 1
            request = f"{client.name}.{each.turn}"
            if turn.abort:
                each.disconnects[request] = now + turn.abort
            if client.impatient:
                each.due = now + self._wait(each)
            else:
                each.waits = request
            session = client.name if client.session else None
            yield Message(
                "submit", request, session, self.prompt(request), turn.limit, turn.ignore_eos,
                priority=turn.priority,
            )  # fmt: skip
        else:
            each.done = True
            if client.session:
                yield Message("close", client.name)

    def _operates(self, each: _ClientState, now: int) -> Iterator[Message]:
        name = each.client.name
        kind = each.client.operator
        each.turn += 1
        if each.turn > 1:
            each.done = True
            if kind in ("pause", "retract", "update"):
                yield Message("go on", name)
        elif kind == "flush":
            each.waits = FLUSH
            yield Message("flush", name, mode="when it is idle")
        elif kind == "abort":
            yield Message("abort", name, mode="all")
        else:
            each.due = now + each.client.close
            yield Message("pause", name, mode="in_place" if kind == "pause" else "retract")
            if kind == "update":
                yield Message("flush", name, mode="now")

    def _disconnect_one(self) -> list[Message]:
        """Disconnect the first client that can, because idle sessions fill the memory and nobody can
        continue."""
        for state in self._doing:
            if not state.done and not state.client.operator:
                state.done = True
                waits = state.waits
                state.waits = None
                aborts = [Message("abort", waits)] if waits is not None else []
                return [*aborts, *([Message("close", state.client.name)] if state.opened else [])]
        return []
