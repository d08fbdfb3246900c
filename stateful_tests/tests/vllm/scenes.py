"""Engines by hand: a line of text is a command with the facts after it. clause_rows.txt documents the lines.

Facts that a line does not state are derived (engine_by_hand.py), so that a row spoils one fact only.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TypeVar

from reference.blocks.clauses import BlockStep, failed_clauses
from reference.blocks.commands import EngineCommand, Update
from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.facts import BlockFacts, HostFacts
from reference.commands import Reason
from reference.system_kinds import BLOCKS
from stateful_tests.lockstep.run_results import Violation, violation_of
from stateful_tests.tests.vllm.engine_by_hand import EngineByHand
from stateful_tests.tests.vllm.statements import STATEMENTS
from stateful_tests.traces.notation import parse

ROWS = Path(__file__).with_name("clause_rows.txt")
_Facts = TypeVar("_Facts", BlockFacts, HostFacts)
_FULL = LayerGroup(2)
_NEAR = LayerGroup(2, 3)
SIZES = {
    "full": EngineConfig((_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8),
    "near": EngineConfig((_NEAR,), blocks=12, max_model_len=12, max_batched_tokens=8),
    "ring": EngineConfig(
        (LayerGroup(2, 3, ring=True),), blocks=12, max_model_len=12, max_batched_tokens=8
    ),
    "forks": EngineConfig((_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, children=2),
    "swap": EngineConfig((_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, swap=3),
    "swap near": EngineConfig((_NEAR,), blocks=12, max_model_len=12, max_batched_tokens=8, swap=3),
    "small ring near": EngineConfig(
        (LayerGroup(2, 11, ring=True), _NEAR), blocks=24, max_model_len=24, max_batched_tokens=3
    ),
    "small": EngineConfig((_FULL,), blocks=12, max_model_len=24, max_batched_tokens=3),
    "small near": EngineConfig((_NEAR,), blocks=12, max_model_len=24, max_batched_tokens=3),
    "small wide": EngineConfig(
        (LayerGroup(4, 3),), blocks=12, max_model_len=24, max_batched_tokens=3
    ),
    "small both": EngineConfig((_FULL, _NEAR), blocks=24, max_model_len=24, max_batched_tokens=3),
    "both": EngineConfig((_FULL, _NEAR), blocks=12, max_model_len=12, max_batched_tokens=8),
    "drafts": EngineConfig((_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, drafts=2),
    "near drafts": EngineConfig(
        (_NEAR,), blocks=12, max_model_len=12, max_batched_tokens=8, drafts=2
    ),
    "eagle": EngineConfig(
        (LayerGroup(2, drafter=True),), blocks=12, max_model_len=12, max_batched_tokens=8, drafts=2,
        eagle=True,
    ),
    "eagle near": EngineConfig(
        (_FULL, LayerGroup(2, 3, drafter=True)), blocks=24, max_model_len=12, max_batched_tokens=8,
        drafts=2, eagle=True,
    ),
    "uncached": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=12, caching=False, chunked=False
    ),
    "host": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, host_chunks=4
    ),
    "simple": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, host_chunks=4, simple=True
    ),
    "storage": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, host_chunks=4, storage=True
    ),
    "state": EngineConfig(
        (_FULL, LayerGroup(2, state=True)), blocks=12, max_model_len=12, max_batched_tokens=8
    ),
    "state first": EngineConfig(
        (LayerGroup(2, state=True), _FULL), blocks=12, max_model_len=12, max_batched_tokens=8
    ),
    "state first near": EngineConfig(
        (LayerGroup(2, state=True), _NEAR), blocks=12, max_model_len=12, max_batched_tokens=8
    ),
    "peer": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, peer=True, fail_requests=True
    ),
    "in step": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, peer=True, sync_loads=True
    ),
    "in step fails": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, peer=True, sync_loads=True,
        fail_requests=True,
    ),
    "host state": EngineConfig(
        (LayerGroup(2, state=True),), blocks=12, max_model_len=12, max_batched_tokens=8,
        host_chunks=4,
    ),
    "host state first": EngineConfig(
        (LayerGroup(2, state=True), _FULL), blocks=12, max_model_len=12, max_batched_tokens=8,
        host_chunks=4,
    ),
    "host near": EngineConfig(
        (_NEAR,), blocks=12, max_model_len=12, max_batched_tokens=8, host_chunks=4, chunk_blocks=2
    ),
    "image": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, image=3, encoder_cache=6,
        encoder_budget=4,
    ),
    "whole image": EngineConfig(
        (_FULL,), blocks=12, max_model_len=12, max_batched_tokens=8, image=3, encoder_cache=6,
        encoder_budget=4, whole_images=True,
    ),
}


class Scene(EngineByHand):
    """An engine by hand whose steps are judged, line by line."""

    def violation(self, line: str, waived: Container[str] = ()) -> Violation | None:
        """Execute a line: a command, with the facts after it. Return the violation of the clauses that are
        not waived, None without one."""
        text, *statements = (part.strip() for part in line.split(";"))
        refused = text.startswith("refused ")
        reason = Reason.BAD_LENGTH if text.startswith("refused (length) ") else None
        command = parse(text.removeprefix("refused ").removeprefix("(length) "), BLOCKS)
        if not refused:
            self.send(command)
        after = self._facts_after(command, statements)
        self.step = self._step(command, after, refused=refused, reason=reason)
        self.before = after
        failures = failed_clauses(self.step, waived)
        return violation_of(failures, 0) if failures else None

    def _facts_after(self, command: EngineCommand, statements: Iterable[str]) -> BlockFacts:
        """Return the facts after a command, with what the statements say, and their spoilt facts."""
        self.outputs = []
        self.lanes = []
        self.spoilt = []
        self.batch = {}
        if isinstance(command, Update) and self.batches:
            self.batch = self.batches.popleft()
        for statement in statements:
            self._state(statement)
        if self.lanes:
            self.batches.append({lane.request: lane.sampled for lane in self.lanes})
        facts = self.facts()
        for spoil in self.spoilt:
            facts = spoil(facts)
        return facts

    def _step(
        self, command: EngineCommand, after: BlockFacts, *, refused: bool, reason: Reason | None
    ) -> BlockStep:
        """Have the expectation follow a command, and return the step that clauses judge."""
        if refused:
            lanes = []
            outputs = []
            self.expected.follow_refused(command, after)
        else:
            lanes, outputs = self.expected.follow(command, after)
        return BlockStep(
            self.config,
            command,
            refused=refused,
            before=self.before,
            after=after,
            lanes=lanes,
            outputs=outputs,
            bearers=self.expected.bearers,
            in_use=self.expected.in_use,
            standstill=self.expected.standstill,
            kv_sources=tuple(self.expected.sources),
            reason=reason,
        )

    def _state(self, statement: str) -> None:
        """Apply the first pattern of STATEMENTS that a statement matches."""
        for pattern, apply in STATEMENTS.items():
            if match := re.fullmatch(pattern, statement):
                apply(self, **match.groupdict())
                return
        raise AssertionError(f"no pattern of STATEMENTS matches {statement!r}")


class SceneInReverse(Scene):
    """A scene whose engine shows its records from the last to the first."""

    def _facts_after(self, command: EngineCommand, statements: Iterable[str]) -> BlockFacts:
        facts = super()._facts_after(command, statements)
        host = facts.host
        if host is not None:
            host = _reversed(host, "keys", "transfers", "jobs", "stored")
        facts = _reversed(facts, "published", "lanes", "outputs", "kept", "pinned", "copies")
        return facts._replace(host=host, requests=dict(reversed(facts.requests.items())))


def _reversed(facts: _Facts, *fields: str) -> _Facts:
    return facts._replace(**{field: getattr(facts, field)[::-1] for field in fields})
