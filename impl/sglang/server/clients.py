"""Actions of a server's clients, as data, and the loop that carries them out, without an import of the
server.

A client waits for answers, so what it does when depends on the server; what it does at all is written down.
So a run is repeated by its clients and configuration alone, and keeps its meaning when clients or turns are
taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from impl.choices import KeyedChoices

EOS = 2  # the token that ends a turn
FIRST, TOKENS = 10, 990  # token ids in use: [FIRST, FIRST + TOKENS)
POLICIES = "write_through", "write_through_selective", "write_back"  # when KV is copied to the host
# How long a request waits for a storage behind the host.
STORAGES = "", "best_effort", "wait_complete"
# The cache is emptied once nothing runs or waits; all requests are aborted; nothing is computed for a while;
# the same, and what runs is retracted before; the same, and the cache is emptied, as for new weights.
OPERATIONS = "flush", "abort", "pause", "retract", "update"
PRIORITIES = "", "greatest", "smallest"  # the number that goes first, "" without priorities
FLUSH = "flush"  # what is answered when the cache is empty
PATIENCE = 80  # rounds without a forward pass until a client that only occupies memory goes away


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server. tokens: of the full pool; chunk: of a prefill; window 0: none; swa: the SWA pool, in tenths
    of the full one; draft: tokens of a verify round, 0 without speculation; tree: prefixes are shared;
    pressure: admit as if no request went on for long, so that running ones are retracted; mixed: prefills
    share a batch with tokens that are decoded; states: slots of recurrent state, 0 of a model without;
    track: a text's state is kept at multiples of so many tokens (extra_buffer), 0: at its end alone
    (no_buffer); lazy: a request has a second slot for that state only while the next one is written
    (extra_buffer_lazy); hicache: there is a tier in host memory; host: its pools, in tenths of the
    device's; policy: which of POLICIES; storage: behind it, of STORAGES; rust: the core of its tree is the
    one in Rust; priority: who goes first, of PRIORITIES; threshold: a request that waits preempts one whose
    priority differs by more than this; queue: so many requests wait at most, 0 for any number; lowest: the
    running request of the lowest priority is retracted, not the one of the fewest outputs;
    pair: two servers, of which this one only computes prompts and the other only decodes; of that one
    decode_tokens: of its full pool, 0: as many; decode_overlap, decode_tree: as overlap and tree;
    deferred: it keeps pages that its peer may still write; optimistic: prompts that are computed this often
    before it has named pages; prefill_complete: it names pages only for prompts that are computed.
    prefill_draft: the first server has the draft model as well, and sends its KV; decode_hicache: the
    second has a host tier behind its tree, and hicache is that of the first; host_backup: KV that the second
    retracts waits in a host pool, not in tensors of its own."""

    page_size: int = 1
    tokens: int = 128
    running: int = 6
    chunk: int = 16
    window: int = 0
    swa: int = 8
    draft: int = 0
    overlap: bool = False
    tree: bool = True
    pressure: bool = True
    mixed: bool = False
    states: int = 0
    track: int = 0
    lazy: bool = False
    hicache: bool = False
    host: int = 20
    policy: int = 0
    storage: int = 0
    rust: bool = False
    priority: int = 0
    threshold: int = 0
    queue: int = 0
    lowest: bool = False
    pair: bool = False
    decode_tokens: int = 0
    decode_overlap: bool = False
    decode_tree: bool = False
    deferred: bool = True
    optimistic: int = 0
    prefill_complete: bool = False
    prefill_draft: bool = False
    decode_hicache: bool = False
    host_backup: bool = False


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """wait: rounds since the turn before was answered (of an impatient client: sent); tokens: of its prompt,
    the first `shared` of which are those of text number `text`; limit: outputs at most; stop: the output that
    is the end token, 0 for none; abort: rounds after it was sent until the client disconnects, 0 for
    never; ignore_eos: the end token does not end it; priority: that the client states, 0 for none."""

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
    """name: of its session, or of its requests; session False: each turn is an ordinary request. resends: its
    input begins with the conversation before it. impatient: sends without waiting, and closes at any moment.
    close: rounds after its last turn until it closes the session. operator: it is one instead, and what it
    has done once (OPERATIONS); a pause lasts `close` rounds."""

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
    """One thing that a client says: opens or closes a session, sends a turn, disconnects; or an operator:
    aborts all (mode), pauses the server (mode: how), has it go on, or has its cache emptied (mode: when)."""

    kind: Literal["open", "close", "submit", "abort", "pause", "go on", "flush"]
    name: str
    session: str | None = None
    tokens: tuple[int, ...] = ()
    limit: int = 0
    ignore_eos: bool = False
    mode: str = ""
    priority: int = 0


class _Doing:
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

    seed: of the clients' and the model's tokens. stalled: called with the requests that clients wait for,
    when nothing has happened for long.
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
        self._doing = [_Doing(client) for client in clients]
        self._named = {each.client.name: each for each in self._doing}
        self._numbers = {name: at for at, name in enumerate(self.turns, 1)}
        self._idle = 0

    def says(self, request: str, position: int) -> int:
        """The token that the model samples for output number `position` (from 1) of a turn."""
        turn = self.turns[request]
        if turn.stop and position >= turn.stop:
            return EOS
        choices = KeyedChoices(self.seed, 1, self._numbers[request], position)
        return FIRST + choices.upto(TOKENS - 1)

    def accepts(self, request: str, outputs: int, most: int) -> int:
        """How many tokens of a verify round count."""
        choices = KeyedChoices(self.seed, 2, self._numbers[request], outputs)
        return 1 + choices.upto(most - 1)

    def prompt(self, request: str) -> tuple[int, ...]:
        """Return the prompt of a turn: the tokens after its session's text, or the whole conversation."""
        client, _, number = request.rpartition(".")
        before = f"{client}.{int(number) - 1}"
        if not self._named[client].client.resends or before not in self.turns:
            return self._appends(request)
        turn = self.turns[before]
        answer = range(1, 1 + min(turn.limit, turn.stop or turn.limit))
        said = tuple(self.says(before, position) for position in answer)
        return self.prompt(before) + said + self._appends(request)

    def _appends(self, request: str) -> tuple[int, ...]:
        """Return the tokens that a turn adds to the conversation."""
        turn = self.turns[request]
        number = self._numbers[request]
        keys = (
            (4, turn.text, at) if at < turn.shared else (3, number, at) for at in range(turn.tokens)
        )
        return tuple(FIRST + KeyedChoices(self.seed, *key).upto(TOKENS - 1) for key in keys)

    @property
    def done(self) -> bool:
        """Every client has sent its whole script and has been answered. A flush may wait for ever."""
        return all(each.done or each.waits == FLUSH for each in self._doing)

    @property
    def awaits_flush(self) -> bool:
        """A client has asked for a flush and is not answered."""
        return any(each.waits == FLUSH for each in self._doing)

    def answered(self, request: str, now: int) -> None:
        """The server has reported the end of a request."""
        for each in self._doing:
            each.disconnects.pop(request, None)
            if each.waits == request:
                each.waits, each.due = None, now + self._wait(each)

    def round(self, now: int, forwards: int) -> list[Message]:
        """Return the messages of clients in this round; forwards: 0 if the server computed nothing since
        the last one."""
        messages = [message for each in self._doing for message in self._says(each, now)]
        self._idle = 0 if forwards or messages else self._idle + 1
        if self._idle > PATIENCE:
            self._idle = 0
            waits = [each.waits for each in self._doing if each.waits not in (None, FLUSH)]
            self.stalled(waits)
            return self._one_gives_up()
        return messages

    def _wait(self, each: _Doing) -> int:
        turns = each.client.turns
        return turns[each.turn].wait if each.turn < len(turns) else each.client.close

    def _says(self, each: _Doing, now: int) -> Iterator[Message]:
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

    def _operates(self, each: _Doing, now: int) -> Iterator[Message]:
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

    def _one_gives_up(self) -> list[Message]:
        """Memory is full of idle sessions, and nobody can go on: the first who can disconnects."""
        for each in self._doing:
            if not each.done and not each.client.operator:
                each.done = True
                waits = each.waits
                each.waits = None
                gone = [Message("abort", waits)] if waits is not None else []
                return [*gone, *([Message("close", each.client.name)] if each.opened else [])]
        return []
