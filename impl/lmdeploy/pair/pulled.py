"""The migration loop of a decode server: the release's own coroutine, its waits, its transfers and messages.

The coroutine runs until it waits for something that has not happened. Commands decide when a transfer moves
its bytes and ends, and when a message arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from impl.process.failures import SystemFailed

_MAX_SPINS = 100  # passes of a loop that waits for nothing: the server does nothing else any more


class Wait:
    """A wait of a coroutine.

    is_over: returns whether the wait is over.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over

    def __await__(self) -> Generator[Wait, None, None]:
        yield self


class LoopEvent:
    """A stand-in for `asyncio.Event`: a wait for one that is set goes on without giving others a turn."""

    def __init__(self) -> None:
        self._set = False
        self._spins = 0

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def note_turn(self) -> None:
        """Note that its coroutine has given others a turn."""
        self._spins = 0

    async def wait(self) -> bool:
        self._spins += 1
        if self._spins > _MAX_SPINS:
            raise SystemFailed(
                "migration_loop waits for an event that stays set, and gives the server's other coroutines no"
                " turn any more"
            )
        if not self._set:
            await Wait(lambda: self._set)
        return True


@dataclass(eq=False)
class MigrationTransfer:
    """A transfer of KV blocks from the prefill server to the decode server.

    number: position in the order of posting.
    session: the decode server's session.
    moves: (block of P, block of D).
    copied: its bytes have moved.
    over: it has ended.
    failed: it has ended with an exception, as the backends have it (DLSlime and Mooncake raise RuntimeError).
    """

    number: int
    session: int
    moves: list[tuple[int, int]]
    copied: bool = False
    over: bool = False
    failed: bool = False


@dataclass
class MigrationLoop:
    """The migration loop of a server, with the part of its executor and its connection that it calls.

    transfers: those that have not ended, and the ended ones that a request of D still waits for.
    messages: sessions of P whose KV was read, in the order of sending.
    """

    event: LoopEvent = field(default_factory=LoopEvent)
    transfers: list[MigrationTransfer] = field(default_factory=list)
    messages: deque[int] = field(default_factory=deque)
    _posted_count: int = 0
    _wakes: int = 0
    _wait: Wait | None = None
    _coroutine: Any = None

    def begin(self, coroutine: Any) -> None:
        """Run the loop up to its first wait."""
        self._coroutine = coroutine
        self.run()

    def wake(self) -> None:
        """Let half a second pass."""
        self._wakes += 1

    def run(self) -> None:
        """Run the loop up to a wait that is not over."""
        while self._wait is None or self._wait.is_over():
            self._wait = self._coroutine.send(None)
            self.event.note_turn()

    async def sleep(self, _: float) -> None:
        """Wait until the server's clock has moved on."""
        since = self._wakes
        await Wait(lambda: self._wakes > since)

    async def migrate(self, session: int, blocks: list[tuple[int, int]]) -> None:
        """Wait for the end of a transfer. Raises SystemFailed where it fails and `migration_loop` does not
        catch that: `EngineLoop.wait_tasks` then cancels the engine's other loops."""
        transfer = MigrationTransfer(self._posted_count, session, blocks)
        self._posted_count += 1
        self.transfers.append(transfer)
        await Wait(lambda: transfer.over)
        if transfer.failed:
            raise SystemFailed("RuntimeError of a failed transfer ends migration_loop, and so the engine")

    async def send(self, remote_engine_id: str, remote_session_id: int) -> None:
        """Send the message that lets P free the KV of a session."""
        del remote_engine_id
        self.messages.append(remote_session_id)
