"""What drivers of engines that schedule by themselves have in common: outcomes, requests, memory."""

from __future__ import annotations

from impl.adapter import Capabilities
from impl.vocabulary import CommandRefused, require, well_formed
from reference.blocks.commands import Add, EngineCommand, client_tokens
from reference.blocks.facts import Lane, Output
from reference.commands import Done, Outcome, Reason, Refused, prompt_len


class SelfSchedulingDriver:
    """Carries commands out on one engine in this process.

    name: of the system. lanes, outputs: of the last command. memory: for each block that was written, a stamp
    for each of its slots, 0 where none was. sent: requests that were accepted.
    """

    name: str
    capabilities: Capabilities

    def clear(self, block_size: int) -> None:
        """Forget all of the run before."""
        self.block_size, self.sent = block_size, 0
        self.memory: dict[int, list[int]] = {}
        self.lanes: list[Lane] = []
        self.outputs: list[Output] = []

    def apply(self, command: EngineCommand) -> Outcome:
        self.lanes, self.outputs = [], []
        try:
            self.carry_out(command)
        except CommandRefused as refused:
            return Refused(refused.reason)
        return Done()

    def carry_out(self, command: EngineCommand) -> None:
        """Raises CommandRefused, and changes nothing then."""
        raise NotImplementedError

    def close(self) -> None:
        """Holds nothing outside of this process."""

    def accept(self, command: Add, longest: int, known: bool) -> list[int]:
        """The tokens of a request whose text, outputs included, fits `longest`. known: it is there."""
        length = prompt_len(command.prompt) + command.tokens
        fits = command.max_tokens >= 1 <= length and length + command.max_tokens <= longest
        require(well_formed(command.prompt) and command.tokens >= 0 and fits, Reason.BAD_LENGTH)
        require(not command.resumable, Reason.UNFAITHFUL)
        require(not known, Reason.REQUEST_EXISTS)
        self.sent += 1
        return client_tokens(command.prompt, command.tokens, self.sent)

    def write(self, block: int, offset: int, stamp: int) -> None:
        """The model writes the KV of one position."""
        self.memory.setdefault(block, [0] * self.block_size)[offset] = stamp

    def written(self, block: int) -> tuple[int, tuple[int, ...]]:
        """What a block holds, as facts say it."""
        return (0, tuple(self.memory[block])) if block in self.memory else (-1, ())
