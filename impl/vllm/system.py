"""A real vLLM release as the engine under test, in a worker process."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from impl.loading import parts
from impl.loading.used_names import lost_names
from impl.adapter import Capabilities, UnusableImplementation
from impl.process.remote_system import LIMITS, Limits, WorkerSystem
from impl.system_spec import SystemSpec
from impl.vllm.fetch import checkout_root, release_root
from impl.vllm.storage import OPTION as STORAGE
from impl.vllm.copied import COPIED, PROPOSER, SPECULATOR
from impl.vllm.api import (
    KEPT_BY_CORE, KEPT_BY_SCHEDULER, KEPT_BY_WORKER, RELEASES, TABLES, WAYS, facts,
)  # fmt: skip
from reference.blocks.commands import (
    ENGINE_COMMANDS, SOURCE_FIELDS, STORAGE_COMMANDS, TRANSFER_COMMANDS,
)  # fmt: skip
from reference.commands import Mode
from reference.system_kinds import BLOCKS, PAIRS
from reference.pairs.commands import HOST_COMMANDS, PAIR_COMMANDS


class VLLMSystem(WorkerSystem):
    """A release (`version`) or a checkout (`path`) of vLLM.

    overlap: with the asynchronous scheduler.
    v2: with model runner V2.
    offloads: with its OffloadingConnector.
    pair: two servers, joined by its NixlConnector.
    encodes: prompts have images.

    The constructor fetches the files, and the first `reset` starts the worker. Raises UnusableImplementation
    when the release is unavailable.
    """

    remark = ""  # a note for the user of a checkout on how it is driven
    capabilities = Capabilities(
        kind=BLOCKS.name,
        commands=frozenset(
            kind.__name__ for kind in (*set(ENGINE_COMMANDS) - set(TRANSFER_COMMANDS),)
        ),
        modes=(Mode.FAITHFUL,),
        sources=frozenset(SOURCE_FIELDS),
    )

    def __init__(
        self,
        version: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        overlap: bool = False,
        v2: bool = False,
        offloads: bool = False,
        pair: bool = False,
        encodes: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        """Choose a release, or the checkout at `path`, in one of its ways, and the capabilities that its
        parts give. Raises UnusableImplementation that lists what a checkout lacks."""
        super().__init__(limits)
        if (version is None) == (path is None):
            raise UnusableImplementation("vllm: give a version or the path of a checkout")
        self.ways = {
            "overlap": overlap, "v2": v2, "offloads": offloads, "pair": pair, "encodes": encodes,
        }  # fmt: skip
        if pair and (overlap or v2 or offloads or encodes):
            raise UnusableImplementation(
                "vllm: +pair goes alone; its sizes say which server is asynchronous"
            )
        words = tuple(WAYS[way] for way, is_set in self.ways.items() if is_set)
        self.spec = SystemSpec("vllm", version, words, checkout=path is not None)
        self.name = str(self.spec)
        self.overlap = overlap
        self.v2 = v2
        if path is not None:
            self.root = checkout_root(path)
            self.doubts = COPIED.doubts(self.root)
        else:
            assert version is not None
            self.root = release_root(version, v2, offloads, pair, encodes)
        checkout_facts = facts(self.root, version, **self.ways)
        parts.require(checkout_facts, TABLES, str(self.spec.in_way("")), self.root)
        self.release = checkout_facts.near.release
        self.parts = checkout_facts.parts
        if version not in RELEASES:
            self.remark = parts.driving_text(checkout_facts, self.root)
        if pair and path is not None:
            kept_names = {*KEPT_BY_WORKER, *KEPT_BY_SCHEDULER, *KEPT_BY_CORE}
            lost = {lost_name.name for lost_name in lost_names("vllm", self.root, self.release)} & kept_names
            self.doubts += tuple(
                f"this tree has no {name}: what is kept there is not seen" for name in sorted(lost)
            )
        of_states = {"state", "state+v2"} if v2 else {"state"}
        if of_states <= self.parts:
            self.capabilities = replace(self.capabilities, recurrent=True)
        if encodes:
            self.capabilities = replace(self.capabilities, encodes=True)
        if (self.root / (SPECULATOR if v2 else PROPOSER)).is_file():
            self.capabilities = replace(self.capabilities, drafter=True)
        if offloads:
            every = frozenset(kind.__name__ for kind in ENGINE_COMMANDS)
            self.capabilities = replace(self.capabilities, commands=every)
        if pair:
            every = frozenset(kind.__name__ for kind in PAIR_COMMANDS)
            of_server = self.capabilities
            self.capabilities = Capabilities(
                PAIRS.name, every, modes=(Mode.FAITHFUL,), recurrent=of_server.recurrent,
                drafter=of_server.drafter,
            )  # fmt: skip
        for part, kinds in (
            ("sessions", {"More", "End"}), ("reset", {"ResetConnector"}),
            ("both connectors", {kind.__name__ for kind in HOST_COMMANDS}),
            ("storage", {kind.__name__ for kind in STORAGE_COMMANDS}),
        ):
            if part not in self.parts:
                commands = self.capabilities.commands - kinds
                self.capabilities = replace(self.capabilities, commands=commands)

    def command_line(self) -> list[str]:
        if self.ways["pair"]:
            return [sys.executable, "-m", "impl.vllm.pair.driver", str(self.root)]
        options = [f"--{WAYS[way]}" for way, is_set in self.ways.items() if is_set]
        if "storage" in self.parts:
            options.append(STORAGE)
        return [sys.executable, "-m", "impl.vllm.driver", str(self.root), *options]
