"""Validation of one log: each event is one guarded action beside the reference, which follows what the server
chose.

The server chooses whom it runs, how long, whom it retracts, what its tree holds and how far it evicts. All
else is judged: outcomes, cursors after every command, histories, and at each step that every page and row
has an owner. After a mismatch that leaves whole cursors the reference goes on with those that the server
shows. After another, and after a gap, no state is known: lines are skipped until a snapshot, or until a step
of an empty server. A known fault has an effect that is known, too: the reference follows it.
"""

from __future__ import annotations

from collections.abc import Iterable

from impl.sglang.server import events as log
from stateful_tests.watched.actions import (
    request_ends, prefill, batch_rounds, snapshots, host_tier, transfers, sessions,
)  # fmt: skip
from stateful_tests.watched.log_follower import AFTER_A_MISMATCH, TABLE, LogFollower, Diverged
from stateful_tests.watched.log_reader import Line
from stateful_tests.watched.validation_results import Validated
from stateful_tests.watched.log_facts import TransfersSeen

# They fill TABLE.
ACTIONS = (request_ends, prefill, batch_rounds, snapshots, host_tier, transfers, sessions)


class Validator(LogFollower):
    """Reads the events of one log."""

    def run(self, lines: Iterable[Line]) -> Validated:
        """Read the whole log."""
        for line in lines:
            self.read(line)
        return self.result

    def read(self, line: Line) -> None:
        """Read one line."""
        self._line = line
        event = line.event
        self.result.events += 1
        if line.lost:
            self.lose_lines(line.lost)
        if self.header.role:
            self._reads_transfer(event, lost=line.lost > 0)
            return
        try:
            if (
                self.result.events == 1
                and self.header.part > 1
                and not isinstance(event, log.Snapshot)
            ):
                self.lose_steps("the beginning of the log is missing")
            batch_rounds.note_gaps(self, event)
            if self.follows and not isinstance(event, log.Tiered):
                batch_rounds.check_event_order(self, event)
            if not self.follows and isinstance(event, log.Stepped):
                snapshots.resume_when_idle(self, event)
            if self.follows or isinstance(event, log.Snapshot | log.HookFailed | log.Tiered):
                TABLE[type(event)].act(self, event)
            else:
                self.result.skipped[self.skipping] += 1
        except Diverged as found:
            self.report(found)
            self.follows = False
            self.skipping = AFTER_A_MISMATCH
            self.result.ended = found.known
            if isinstance(event, log.Snapshot) and not found.known:
                snapshots.resume_at_snapshot(self, event)

    def _reads_transfer(self, event: log.Event, *, lost: bool) -> None:
        """Read a line of a server of a pair. Lost lines may have opened a room, or closed one."""
        if lost or (isinstance(event, log.Snapshot) and event.dropped):
            self.transfers = TransfersSeen()
        if not isinstance(event, log.Snapshot):
            TABLE[type(event)].act(self, event)
