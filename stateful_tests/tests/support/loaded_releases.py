"""Releases in this process, into whose code a fault can be put."""

import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from impl.lmdeploy.driver import LMDeployDriver
from impl.lmdeploy.loading import AS_PAIR
from impl.lmdeploy.pair.driver import LMDeployPair
from impl.lmdeploy.engine_methods import ENGINE, longest_session_of
from impl.sglang.parts import fetch as sglang_files
from impl.sglang.tiers.driver import TierDriver
from impl.sglang.tiers.loading import tiered_release
from impl.sglang.tiers.system import TierSystem
from impl.system_spec import SystemSpec
from impl.transformers_paging.driver import PagingDriver
from impl.vllm.copied import DRAFT_KERNELS, PROPOSER, SPECULATOR
from impl.vllm.driver import EngineDriver
from impl.vllm.fetch import release_root
from impl.vllm.images import UTILS
from impl.vllm.modules import RUNNER, runner_methods
from impl.vllm.pair.driver import PairDriver
from impl.vllm.sources import CORE, reset_caches
from impl.vllm.system import VLLMSystem
from reference.system_kinds import BLOCKS
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.planted_faults import Edit, plant_fault

DRAFTER = (PROPOSER, DRAFT_KERNELS, SPECULATOR)


class LoadedEngine(EngineDriver):
    """An adapter of vLLM, which also cuts functions out of files that it does not load."""

    def __init__(self, root: Path, overlap: bool, v2: bool, encodes: bool) -> None:
        super().__init__(root, overlap, v2, offloads=True, encodes=encodes, stores=True)
        self.capabilities = replace(
            VLLMSystem.capabilities,
            recurrent=True,
            encodes=encodes,
            commands=frozenset(kind.__name__ for kind in BLOCKS.commands),
        )

    @contextmanager
    def plant(self, edits: Iterable[Edit]) -> Iterator[None]:
        """Have the release run with these edits; as it was after the context."""
        cut_out = [edit for edit in edits if edit.file in (RUNNER, CORE)]
        methods = self._methods
        reset = self._reset_caches
        for edit in cut_out:
            with edited_folder(edit, self.root, UTILS) as folder:
                if edit.file == RUNNER:
                    self._methods = runner_methods(folder, {}, self._encodes)
                else:
                    self._reset_caches = reset_caches(folder)
        of_drafter = [edit for edit in edits if edit.file in DRAFTER]
        loaded_edits = [edit for edit in edits if edit not in (*cut_out, *of_drafter)]
        with ExitStack() as kept, plant_fault(self.root, loaded_edits):
            for edit in of_drafter:
                files = [file for file in DRAFTER if (self.root / file).is_file()]
                self.drafter_root = kept.enter_context(edited_folder(edit, self.root, *files))
            yield
            self.drafter_root = self.root
        self._methods = methods
        self._reset_caches = reset


class LoadedLMDeploy(LMDeployDriver):
    """An adapter of LMDeploy, which also cuts a function out of the engine's file, which it does not load."""

    root: Path

    @contextmanager
    def plant(self, edits: Iterable[Edit]) -> Iterator[None]:
        """Have the release run with these edits; as it was after the context."""
        longest_session = self._longest_session
        loaded_edits = []
        for edit in edits:
            if Path(edit.file) != ENGINE:
                loaded_edits.append(edit)
                continue
            with edited_folder(edit, self.root) as folder:
                self._longest_session = longest_session_of(folder)
        with plant_fault(self.root, loaded_edits):
            yield
        self._longest_session = longest_session


@contextmanager
def edited_folder(edit: Edit, root: Path, *others: str) -> Iterator[Path]:
    """Yield a folder with the file that an edit changes, edited, and with other files as they are."""
    with tempfile.TemporaryDirectory() as folder:
        for name in others:
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, copy)
        file = Path(folder, edit.file)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(edit.text(root), encoding="utf-8")
        yield Path(folder)


@cache
def loaded_release(spec: SystemSpec) -> Any:
    """Return a release that is loaded into this process, with its `root`."""
    logging.disable(logging.CRITICAL)
    version = spec.version or ""
    if spec.engine == "vllm" and "pair" in spec.ways:
        root = release_root(version, pair=True)
        system: Any = PairDriver(root)
        system.capabilities = VLLMSystem(version, pair=True).capabilities
    elif spec.engine == "vllm":
        encodes = "images" in spec.ways  # once per process: all that it loads have an encoder, or none
        root = release_root(version, v2=True, offloads=True, encodes=encodes)
        system = LoadedEngine(root, "async" in spec.ways, "v2" in spec.ways, encodes)
    elif spec.engine == "lmdeploy" and "pair" in spec.ways:
        root = resolve(str(spec)).root
        system = LMDeployPair(root, str(spec))
        system.capabilities = AS_PAIR
    elif "hicache" in spec.ways:
        root = sglang_files.release_root(version)
        core = "rust" if "rust" in spec.ways else ""
        system = TierDriver(tiered_release(version, core)(root), root)
        system.capabilities = TierSystem.capabilities
    else:
        root = resolve(str(spec)).root
        driver = {"lmdeploy": LoadedLMDeploy, "transformers": PagingDriver}[spec.engine]
        system = driver(root, str(spec))
    system.root = root
    system.name = str(spec)
    return system


def plant_in(system: Any, edits: Iterable[Edit]) -> Any:
    """Return a context in which a loaded release runs with these edits."""
    edits = list(edits)
    return system.plant(edits) if hasattr(system, "plant") else plant_fault(system.root, edits)
