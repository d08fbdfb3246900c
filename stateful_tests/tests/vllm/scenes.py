"""Engines by hand: a line of text is a command and the facts after it. clause_rows.txt says how to write one.

What is not stated is derived (engine_by_hand.py). A row then spoils one fact alone.
"""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path

from reference.blocks.clauses import BlockStep, broken
from reference.blocks.commands import Update
from reference.blocks.config import EngineConfig, LayerGroup
from reference.commands import Reason
from reference.system_kinds import BLOCKS
from stateful_tests.lockstep.run_results import Violation, violation_of
from stateful_tests.tests.vllm.engine_by_hand import EngineByHand
from stateful_tests.tests.vllm.statements import STATEMENTS
from stateful_tests.traces.notation import parse

ROWS = Path(__file__).with_name("clause_rows.txt")
_FULL, _NEAR = LayerGroup(2), LayerGroup(2, 3)
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
        """Return what a command, with the facts after it, violates of the clauses that are not waived."""
        text, *stated = (part.strip() for part in line.split(";"))
        refused = text.startswith("refused ")
        for_length = text.startswith("refused (length) ")
        command = parse(text.removeprefix("refused ").removeprefix("(length) "), BLOCKS)
        if not refused:
            self.send(command)
        self.outputs = []
        self.lanes = []
        self.spoilt = []
        self.batch = {}
        if isinstance(command, Update) and self.batches:
            self.batch = self.batches.popleft()
        for part in stated:
            self._stated(part)
        if self.lanes:
            self.batches.append({lane.request: lane.sampled for lane in self.lanes})
        after = self.facts()
        for spoil in self.spoilt:
            after = spoil(after)
        lanes, outputs = ([], []) if refused else self.expected.follow(command, after)
        if refused:
            self.expected.follow_refused(command, after)
        step = BlockStep(
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
            reason=Reason.BAD_LENGTH if for_length else None,
        )
        self.before = after
        self.step = step
        failures = broken(step, waived)
        return violation_of(failures, 0) if failures else None

    def _stated(self, part: str) -> None:
        for pattern, state in STATEMENTS.items():
            if found := re.fullmatch(pattern, part):
                state(self, **found.groupdict())
                return
        raise AssertionError(f"no fact: {part!r}")
