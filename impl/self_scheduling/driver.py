"""The common part of drivers of engines that schedule by themselves: outcomes, requests, the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from impl.self_scheduling.release_system import REQUESTS_ALONE
from impl.self_scheduling.toy_model import greedy
from impl.vocabulary import CommandRefused, require, well_formed
from reference.blocks.commands import STOP_TOKEN, Add, EngineCommand, Schedule, client_tokens
from reference.blocks.facts import BlockFacts, Lane, Output, Published
from reference.commands import Done, Outcome, Reason, Refused, prompt_len


class SelfSchedulingDriver:
    """Carries commands out on one engine in this process.

    name: of the system.
    block_size: of the first group (tokens).
    lanes, outputs: of the last command.
    memory: for each block that was written, the group that wrote it last, and a stamp for each of its slots,
        0 where none was.
    sent: requests that were accepted.
    stop: those that are sampled a stop token.
    """

    name: str
    capabilities = REQUESTS_ALONE
    block_size: int
    block_sizes: tuple[int, ...]
    sent: int
    memory: dict[int, tuple[int, list[int]]]
    lanes: list[Lane]
    outputs: list[Output]
    stop: tuple[str, ...]
    _delivered: dict[str, int]

    def clear(self, *block_sizes: int) -> None:
        """Forget all of the run before.

        block_sizes: of each group (tokens).
        """
        self.block_size = block_sizes[0]
        self.block_sizes = block_sizes
        self.sent = 0
        self.memory = {}
        self.lanes = []
        self.outputs = []
        self.stop = ()
        self._delivered = {}  # tokens of each request

    def apply(self, command: EngineCommand) -> Outcome:
        self.lanes = []
        self.outputs = []
        if isinstance(command, Schedule):
            self.stop = command.stop
        try:
            self.carry_out(command)
        except CommandRefused as refused:
            return Refused(refused.reason)
        return Done()

    def carry_out(self, command: EngineCommand) -> None:
        """Carry out a command. Raises CommandRefused, and then changes nothing."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: nothing outside this process is held."""

    def accept(self, command: Add, longest: int, known: bool) -> list[int]:
        """Return the tokens of a request whose text, outputs included, fits `longest`.

        known: it is there.
        """
        length = prompt_len(command.prompt) + command.tokens
        fits = command.max_tokens >= 1 <= length and length + command.max_tokens <= longest
        require(well_formed(command.prompt) and command.tokens >= 0 and fits, Reason.BAD_LENGTH)
        require(not command.resumable, Reason.UNFAITHFUL)
        require(not known, Reason.REQUEST_EXISTS)
        self.sent += 1
        self._delivered[command.request] = 0
        return client_tokens(command.prompt, command.tokens, self.sent)

    def sample(self, name: str, stamp: int) -> int:
        """Return the token of the model behind a text."""
        return STOP_TOKEN if name in self.stop else greedy(stamp)

    def deliver(self, name: str, tokens: Sequence[int], finished: bool) -> None:
        """Give a client the tokens that it does not have yet.

        tokens: all outputs of the request so far.
        """
        fresh = tuple(tokens[self._delivered[name] :])
        self._delivered[name] = len(tokens)
        ended = ""
        if finished:
            ended = "stop" if STOP_TOKEN in tokens[-1:] else "length"
        self.outputs.append(Output(name, fresh, ended))

    def write(self, block: int, offset: int, stamp: int, group: int = 0) -> None:
        """Write the KV of one position, for the layers of a group."""
        if block not in self.memory or self.memory[block][0] != group:
            self.memory[block] = group, [0] * self.block_sizes[group]
        self.memory[block][1][offset] = stamp

    def facts(
        self,
        refs: Sequence[int],
        published: Sequence[Published],
        states: Mapping[int, int] | None = None,
        **more: Any,
    ) -> BlockFacts:
        """Return facts, with what the model and the clients have seen.

        more: other fields of BlockFacts.
        states: the stamp in each block of a second group, which has recurrent state.
        """
        memory = {block: (group, tuple(slots)) for block, (group, slots) in self.memory.items()}
        memory |= {block: (1, (stamp, stamp)) for block, stamp in (states or {}).items()}
        return BlockFacts(
            refs=tuple(refs),
            memory=tuple(memory.get(block, (-1, ())) for block in range(len(refs))),
            published=tuple(published),
            lanes=tuple(self.lanes),
            outputs=tuple(self.outputs),
            **more,
        )
