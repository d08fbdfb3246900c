"""A real SGLang release as a system under test, in a worker process of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from impl.adapter import Capabilities, UnusableImplementation
from impl.loading.used_names import lost_names
from impl.process.remote_system import LIMITS, Limits, WorkerSystem
from impl.sglang.parts.fetch import STATES_ON_GPU, checkout_root, release_root
from impl.sglang.releases.catalogue import TABLE, detect, spec_of, supported_release
from impl.sglang.releases.copied import COPIED
from impl.sglang.releases.settings import OUR_WORDS, settings_of
from impl.sglang.releases.variants import variant
from impl.system_spec import SystemSpec
from reference.commands import Mode, Reason
from reference.system_kinds import ROWS

# Commands that the driver carries out. UnlockSwa is left out: the release itself decides, during decode and
# if a setting says so, when it releases the SWA part of a lock.
_DRIVEN = frozenset({
    "Open", "Submit", "Admit", "Extend", "Decode", "SpecDecode", "EvictSwa", "Finish", "Retract", "Abort",
    "Close", "CheckBusy", "CheckIdle", "Match", "Unlock", "Insert", "Evict",
})  # fmt: skip
_LATE = frozenset({"Launch", "Settle"})  # commands of the overlapped loop alone


class SGLangSystem(WorkerSystem):
    """A release (`version`) or a checkout (`path`) of SGLang behind the adapter.

    gpu: run on a CUDA device, with the release's own Triton kernels.
    overlap: use overlap scheduling, as servers do by default (see Driver).
    tree: name of a radix tree in VARIANTS (variants.py); None for the release's default.
    calls: after each command `noted.calls` has the driver's calls as Python (see call_log.py), and
        `noted.late` those that bring each request whose results wait into the state that the view shows.

    The constructor fetches the wheel; the worker starts with the first `reset`. Raises
    UnusableImplementation when the release is unavailable or not supported.
    """

    root: Path
    remark = ""  # for the user of a checkout: how it is driven
    capabilities = Capabilities(
        kind=ROWS.name,
        commands=_DRIVEN,
        mixed_decode=False,
        mixed_batches=True,
        answers=True,
        bigram=True,
        tree_policy_is_free=True,
        exact_reasons=False,
        lists_holders=False,
        new_views=True,  # each is read from a message of the worker
        modes=(Mode.FAITHFUL,),
        # A reserve of pages, and more slots ahead than were requested, are policy. UNFAITHFUL refuses what
        # this release's scheduler never does.
        may_refuse=frozenset(
            {
                Reason.OUT_OF_FULL,
                Reason.OUT_OF_SWA,
                Reason.OUT_OF_STATES,
                Reason.ROW_TOO_SHORT,
                Reason.UNFAITHFUL,
            }
        ),
    )

    def __init__(
        self,
        version: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        gpu: bool = False,
        overlap: bool = False,
        tree: str | None = None,
        calls: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        """Choose a release, or the checkout at `path`, and the capabilities that it has. Raises
        UnusableImplementation.

        tree: a variant of its tree.
        calls: each command's calls are logged.
        """
        super().__init__(limits)
        if (version is None) == (path is None):
            raise UnusableImplementation("sglang: give a version or the path of a checkout")
        if version is not None:
            release = supported_release(version)
        else:
            assert path is not None
            self.root = checkout_root(path)
            release, self.remark = detect(self.root)
            self.doubts = COPIED.doubts(self.root)
        if tree is not None:
            release = variant(release, tree)
        recurrent = release.recurrent and tree is None
        if version is not None:
            self.root = release_root(version, STATES_ON_GPU if gpu and recurrent else "")
        release.require(self.root)
        ways = []
        if tree:
            ways.append(tree)
        if overlap:
            ways.append("overlap")
        self.spec = SystemSpec("sglang", version, tuple(ways), checkout=path is not None)
        self.name = str(self.spec)
        settings = dict(settings_of(release.version, list(TABLE)))
        if path is not None:
            for lost_name in lost_names("sglang", self.root, release.version):
                name = lost_name.name
                if name in settings and name not in OUR_WORDS:
                    del settings[name]
                    self.doubts += (f"this tree does not read {name}: it is driven with its default",)
        self.capabilities = replace(
            self.capabilities,
            commands=self.capabilities.commands | (_LATE if overlap else frozenset()),
            swa_tail=release.swa_tail,
            uncounted=release.uncounted,
            recurrent=recurrent and not overlap,
            tracks=recurrent,
            lazy=recurrent and overlap,  # a server asks for both
            waived=release.waived,
            settings={name: values for name, values in settings.items() if name not in os.environ},
        )
        self.forked = not gpu  # a fork cannot use it
        flags = {"--gpu": gpu, "--overlap": overlap, "--calls": calls}
        self._options = [spec_of(release), *(option for option, wanted in flags.items() if wanted)]
        if tree is not None:
            self._options.append(f"--tree={tree}")
        self.kind = release
        self.release = release.version
        self.overlap = overlap

    def command_line(self) -> list[str]:
        return [sys.executable, "-m", "impl.sglang.process.worker", str(self.root), *self._options]
