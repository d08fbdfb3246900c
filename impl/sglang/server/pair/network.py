"""The wire between the two servers of a run: messages, transfers and failures, as its choices say."""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from impl.sglang.server.outcome import PairEvent
from impl.sglang.server.pair.choices import RECEIVER, NetworkChoice, NetworkChoices, can_fail
from impl.sglang.server.pair.stand_ins import NamedPages
from impl.sglang.server.pair.turns import Stage
from reference.pairs.config import DECODE, PREFILL, SERVERS

STEP_S = 0.001  # of the clock
EVENTS = 3000  # that are kept of a run
READY = 2  # KVPoll.WaitingForInput
SUCCESS = 4  # KVPoll.Success
Block = tuple[int, int, int]  # source address, target address, length in bytes


class _Letter(NamedTuple):
    """A message on its way.

    due: the step from which on it can be taken.
    """

    due: int
    kind: str
    request: str
    parts: list[bytes]


class _Late(NamedTuple):
    """Blocks of a transfer that has already ended with an error."""

    due: int
    chunk: Any
    blocks: Sequence[Block]


class PlayedNetwork:
    """The wire of one run.

    rooms: room -> request.
    told_success: rooms of which P has told D success.
    harmed: something fails, or a timeout may end in the middle.
    harmed_by_time: a timeout may.
    seconds: of both servers' clocks.
    step: of the conductor.
    gone: servers that have died.
    promises: room -> what D keeps for its transfer.
    copies: called with each block before it is copied.
    names: called with each promise.
    carries_row: whether a transfer is that of a metadata row.
    delivered: (kind of message, request) -> last step.
    forgotten: (server, request) -> first step.
    events: what has happened, for a reader.
    """

    def __init__(self, stage: Stage, choices: Sequence[NetworkChoice]) -> None:
        self.stage = stage
        self.choices = NetworkChoices(choices)
        self.harmed = can_fail(choices)
        self.harmed_by_time = any(choice.what in ("clock", "death") for choice in choices)
        self.rooms: dict[int, str] = {}
        self.told_success: set[int] = set()
        self.seconds = 1000.0
        self.step = 0
        self.gone: set[str] = set()
        self.promises: dict[int, NamedPages] = {}
        self.copies: Callable[[Any, int, int, int], None] = lambda *_: None
        self.names: Callable[[NamedPages], None] = lambda _: None
        self.carries_row: Callable[[Sequence[Block]], bool] = lambda _: False
        self.delivered: dict[tuple[str, str], int] = {}
        self.forgotten: dict[tuple[str, str], int] = {}
        self.events: list[PairEvent] = []
        self.moves = self.transfers = (
            0  # whatever happens on the wire; calls of the transfer engine
        )
        self._inboxes: dict[str, deque[_Letter]] = {name: deque() for name in SERVERS}
        self._late: list[_Late] = []
        self._numbers: Counter[tuple[str, ...]] = Counter()
        self._resting: dict[str, int] = dict.fromkeys(SERVERS, 0)  # threads, until a step

    # -- what the conductor asks --------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step: copy blocks that come late."""
        self.step += 1
        self.seconds += STEP_S
        for late in [message for message in self._late if message.due <= self.step]:
            self._late.remove(late)
            self._copy(late.chunk, late.blocks)
            self.tell(
                "wire", f"the rest of a transfer that has failed is copied: {self._who(late.chunk)}"
            )

    @property
    def rests(self) -> bool:
        """Whether nothing is under way and no thread rests."""
        waiting = any(box for name, box in self._inboxes.items() if name not in self.gone)
        resting = any(n for name, n in self._resting.items() if name not in self.gone)
        return not (waiting or resting or self._late)

    def tell(self, where: str, says: str) -> None:
        """Note for a reader what happens on a server, or on the wire."""
        if len(self.events) < EVENTS:
            self.events.append(PairEvent(self.step, where, says))

    def end_server(self, server: str) -> None:
        """End a server: it sends and receives nothing more."""
        self.gone.add(server)
        self._inboxes[server].clear()
        self._late.clear()
        self.tell(server, "ends")

    # -- what the stand-ins ask ---------------------------------------------------------------------

    def is_gone(self, server: str) -> bool:
        return server in self.gone

    def send_message(self, receiver: str, parts: list[bytes]) -> None:
        """Send a message to a server."""
        kind, room = _kind(receiver, parts)
        request = self.rooms.get(room, "")
        if kind == "status" and int(parts[1]) == SUCCESS:
            self.told_success.add(room)
        delay = self.choices.steps(kind, request, "", self._number(kind, request))
        lost = receiver in self.gone
        self.moves += 1
        words = f"{kind} {request}{' goes nowhere' if lost else ''}"
        self.tell("wire", f"{words}{f' rests {delay} steps' if delay else ''}".replace("  ", " "))
        if not lost:
            box = self._inboxes[receiver]
            due = max(self.step + delay, box[-1].due if box else 0)
            box.append(_Letter(due, kind, request, parts))

    def has_arrived(self, server: str) -> bool:
        """Return whether a message has arrived at a server."""
        box = self._inboxes[server]
        return bool(box) and box[0].due <= self.step

    def next_message(self, server: str) -> list[bytes]:
        """Return the message that has arrived first."""
        letter = self._inboxes[server].popleft()
        self.moves += 1
        self.delivered[letter.kind, letter.request] = self.step
        self.tell(server, f"gets {letter.kind} {letter.request}".rstrip())
        return letter.parts

    def transfer(self, chunk: Any, blocks: Sequence[Block]) -> int:
        """Write blocks into D's memory for P's engine. Returns 0, or -1 if it fails."""
        receiver_name = self._who(chunk)
        number = self._number("transfer", receiver_name)
        self.transfers += 1
        self.moves += 1
        self.tell("wire", f"transfer {number} of {receiver_name} begins: {len(blocks)} blocks")
        if DECODE in self.gone:
            return -1
        done_count = 0
        choices = self.choices.of("transfer", receiver_name, "", number)
        if self.carries_row(blocks):
            choices = [*choices, *self.choices.of("row", receiver_name)]
        for choice in sorted(choices, key=lambda each: each.at):
            upto = max(done_count, len(blocks) * choice.at // 10)
            self._copy(chunk, blocks[done_count:upto])
            done_count = upto
            if choice.fails and choice.late:
                self._late.append(_Late(self.step + choice.steps, chunk, blocks[done_count:]))
            else:
                self._rest(choice.steps)
            if choice.fails:
                self.tell("wire", f"transfer {number} of {receiver_name} fails after {done_count} blocks")
                return -1
        if DECODE in self.gone:
            return -1
        self._copy(chunk, blocks[done_count:])
        self.tell("wire", f"transfer {number} of {receiver_name} ends")
        return 0

    def lookup_fails(self) -> bool:
        """Return whether P fails to learn the address of D."""
        choices = self.choices.of("lookup", number=self._number("lookup"))
        return any(choice.fails for choice in choices)

    def calls(self, room: int) -> None:
        """Let others run: a thread calls its sender or receiver for a request, or is about to."""
        if self.stage.current is None:
            return
        request = self.rooms.get(room, "")
        server = self.stage.server
        number = self._number("call", request, server)
        self._rest(self.choices.steps("call", request, server, number))

    def note_clear(self, room: int) -> None:
        """Note that a server has forgotten a room."""
        if (key := (self.stage.server, self.rooms.get(room, ""))) not in self.forgotten:
            self.forgotten[key] = self.step

    def note_promise(self, promise: NamedPages) -> None:
        """Note that D has named pages and a metadata row for a transfer."""
        self.promises[promise.room] = promise
        self.names(promise)
        self.tell(
            DECODE, f"names {len(promise.pages)} pages for {self.rooms.get(promise.room, '')}"
        )

    # -- inside -------------------------------------------------------------------------------------

    def _number(self, *what: str) -> int:
        self._numbers[what] += 1
        return self._numbers[what]

    def _who(self, chunk: Any) -> str:
        return self.rooms.get(chunk.room, "")

    def _copy(self, chunk: Any, blocks: Sequence[Block]) -> None:
        if PREFILL in self.gone or DECODE in self.gone:
            return
        for source, target, length in blocks:
            self.copies(chunk, source, target, length)
            ctypes.memmove(target, source, length)
            self.moves += 1

    def _rest(self, steps: int) -> None:
        """Rest the thread whose turn it is, and let others run."""
        if steps:
            until = self.step + steps
            server = self.stage.server
            self._resting[server] += 1
            self.stage.hand_over(lambda: self.step >= until)
            self._resting[server] -= 1


_TO_PREFILL = {b"ABORT": "notice", b"BOOTSTRAP": "endpoint"}


def _kind(receiver: str, parts: list[bytes]) -> tuple[str, int]:
    """Return which of MESSAGES this is, and its room, -1 for none."""
    if receiver == PREFILL:
        if parts[0] == b"None":
            return "register", -1
        if parts[0] in _TO_PREFILL:
            return _TO_PREFILL[parts[0]], int(parts[1])
        kind = "metadata"
        room = parts[0]
    elif parts[0] == b"ABORT_ACK":
        kind = "ack"
        room = parts[1]
    else:
        kind = "ready" if int(parts[1]) == READY else "status"
        room = parts[0]
    assert RECEIVER[kind] == receiver
    return kind, int(room)
