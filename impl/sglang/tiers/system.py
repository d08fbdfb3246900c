"""A release's tree with its host tier as a system under test, in a worker process of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

from impl.adapter import Capabilities, UnusableImplementation
from impl.process.remote_system import LIMITS, Limits, WorkerSystem
from impl.sglang.parts.fetch import DECODES, PREFILLS, checkout_root, release_root
from impl.sglang.releases.catalogue import detect, spec_of
from impl.sglang.tiers.loading import tiered_release
from impl.sglang.tiers.api import require_tier_api
from impl.system_spec import SystemSpec
from reference.commands import Mode
from reference.system_kinds import TIERS
from reference.tiers.commands import TIER_COMMANDS, DecodeCommand, PrefillCommand, StorageCommand

STORAGE = frozenset(kind.__name__ for kind in get_args(StorageCommand))
DECODE = frozenset(kind.__name__ for kind in get_args(DecodeCommand))
PREFILL = frozenset({PrefillCommand.__name__})


class TierSystem(WorkerSystem):
    """A release (`version`) or a checkout (`path`) of SGLang, its tree with a host tier.

    core: "rust" for the tree's core that a wheel has compiled, else the one in Python.
    calls: as of SGLangSystem.

    The wheel is fetched here, the worker starts with the first `reset`. Raises UnusableImplementation when
    the release is unavailable, or is not driven with a host tier.
    """

    root: Path
    remark = ""  # what the user of a checkout should know about how it is driven
    overlap = False
    capabilities = Capabilities(
        kind=TIERS.name,
        commands=frozenset(kind.__name__ for kind in TIER_COMMANDS),
        modes=(Mode.FAITHFUL,),
        bigram=True,
        storage=True,
        receives=True,
        sends=True,
        recurrent=True,
        tracks=True,
    )

    def __init__(
        self,
        version: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        core: str = "",
        calls: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        """Choose a release, or the checkout at `path`, and the capabilities of its host tier. Raises
        UnusableImplementation.

        core: the tree in Rust.
        """
        super().__init__(limits)
        if (version is None) == (path is None):
            raise UnusableImplementation("sglang: give a version or the path of a checkout")
        self.core = core
        ways = (core, "hicache") if core else ("hicache",)
        self.spec = SystemSpec("sglang", version, ways, checkout=path is not None)
        self.name = str(self.spec)
        if path is not None:
            self.root = checkout_root(path)
            detected = detect(self.root)
            self.remark = detected.remark
            self.release = detected.release.version
            self._spec = spec_of(detected.release)
        else:
            assert version is not None
            self.release = self._spec = version
        self.calls = calls
        self.kind = kind = tiered_release(self._spec, core)
        without = frozenset[str]() if kind.stores else STORAGE
        without |= frozenset[str]() if kind.receives else DECODE
        without |= frozenset[str]() if kind.sends else PREFILL
        self.capabilities = replace(
            self.capabilities,
            commands=self.capabilities.commands - without,
            storage=kind.stores,
            receives=kind.receives,
            sends=kind.sends,
            recurrent=kind.keeps_states,
            tracks=kind.keeps_states,
        )
        if version is not None:
            newer = PREFILLS if kind.sends else DECODES
            self.root = release_root(version, newer if kind.receives else "")
        kind.require(self.root)
        if path is not None:  # a test looks up what releases have
            require_tier_api(self.root, self.name, self.release, detected.release_text(self.root))

    def command_line(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "impl.sglang.tiers.driver",
            str(self.root),
            self._spec,
            self.core,
            *(["--calls"] if self.calls else []),
        ]
