"""A real SGLang release as a system under test, in a worker process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import IO

from impl import HOME
from impl.adapter import Capabilities, UnusableImplementation, View
from impl.sglang.parts.fetch import checkout_root, release_root
from impl.sglang.process import wire
from impl.sglang.releases.catalogue import detect, supported
from impl.sglang.releases.variants import variant
from reference.commands import Broken, Command, Done, Mode, Outcome, Reason, Refused
from reference.geometry import Geometry



class SGLangSystem:
    """A release (`version`) or a checkout (`path`) of SGLang behind the adapter.

    overlap: with overlap scheduling, which a server has unless it is started without (see Driver).
    tree: another radix tree than the release's usual one, by its name in VARIANTS (variants.py).
    calls: after each command `calls` has what the driver did, as Python (see call_log.py), and `late` what is
        to be done to each request whose results wait, to leave it as the view shows it.

    The wheel is fetched here, the worker starts with the first `reset`. Raises
    UnusableImplementation when the release cannot be had or is not supported.
    """

    _start_s = 180.0  # that loading the release may take
    _timeout_s = 60.0  # that one command may take before the worker counts as hung
    capabilities = Capabilities(
        mixed_decode=False,
        tree_policy_is_free=True,
        exact_reasons=False,
        modes=(Mode.FAITHFUL,),
        # A reserve of pages, and more slots ahead than were asked for, are policy; UNFAITHFUL is what
        # this release's scheduler never does.
        may_refuse=frozenset(
            {Reason.OUT_OF_FULL, Reason.OUT_OF_SWA, Reason.ROW_TOO_SHORT, Reason.UNFAITHFUL}
        ),
        waived={"MAP-4": "alloc writes the entry of every slot it hands out before it is read or freed"},
    )

    def __init__(
        self,
        version: str | None = None,
        path: str | os.PathLike[str] | None = None,
        *,
        overlap: bool = False,
        tree: str | None = None,
        calls: bool = False,
    ) -> None:
        if (version is None) == (path is None):
            raise UnusableImplementation("sglang: give a version or the path of a checkout")
        if version is not None:
            release = supported(version)
            name = f"sglang=={version}"
        else:
            assert path is not None
            self.root = checkout_root(path)
            release = detect(self.root)
            name = "sglang@checkout"
        if tree is not None:
            release = variant(release, tree)
            name += f"+{tree}"
        if version is not None:
            self.root = release_root(version)
        release.require(self.root)
        self._name = name + "+overlap" * overlap
        self.capabilities = replace(
            self.capabilities,
            uncounted=release.uncounted,
            waived={**self.capabilities.waived, **release.waived},
            known=release.known,
        )
        asked = {"--overlap": overlap, "--calls": calls}
        self._options = [release.version, *(option for option, wanted in asked.items() if wanted)]
        self._options += [] if tree is None else [f"--tree={tree}"]
        self.kind, self.release, self.overlap = release, release.version, overlap
        self.calls: tuple[str, ...] = ()
        self.late: tuple[tuple[str, str], ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._view: View | None = None
        self._broken: str | None = None

    @property
    def name(self) -> str:
        return self._name

    def reset(self, geometry: Geometry) -> None:
        """Start a server of these sizes, out of fresh objects; a worker that ended is replaced.

        Raises UnusableImplementation when the release does not load, RuntimeError when it cannot
        be started with these sizes.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._view, self._broken = None, None
        reply = self._ask(wire.Reset(geometry))
        if not isinstance(reply, wire.StepReply):
            raise RuntimeError(self._broken)
        self._view = reply.view

    def apply(self, command: Command) -> Outcome:
        """Play one command. Broken, and Broken again until `reset`, once the release failed.

        Raises UnusableImplementation for a run that mixes Decode and SpecDecode.
        """
        if self._broken is not None:
            return Broken(self._broken)
        if self._process is None:
            raise RuntimeError("reset comes first")
        reply = self._ask(wire.pack_command(command))
        if not isinstance(reply, wire.StepReply):
            return Broken(self._broken or "the worker answered out of turn")
        self._view, self.calls, self.late = reply.view, reply.calls, reply.late
        if reply.refused is not None:
            return Refused(reply.refused)
        return Done(reply.choices, reply.report, reply.freed)

    def view(self) -> View:
        """The facts after the last command that came to an end; costs nothing."""
        if self._view is None:
            raise RuntimeError(self._broken or "reset comes first")
        return self._view

    def close(self) -> None:
        """End the worker. The system can be used again after another `reset`."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    # -- the worker -------------------------------------------------------------------------------

    def _command_line(self) -> list[str]:
        return [sys.executable, "-m", "impl.sglang.process.worker", str(self.root), *self._options]

    def _start(self) -> None:
        self.close()
        search = [str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the worker)
        self._process = subprocess.Popen(
            self._command_line(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=environment,
        )  # fmt: skip
        reply = self._receive(self._start_s)
        if not isinstance(reply, wire.Ready):
            error = self._broken
            self.close()
            raise UnusableImplementation(f"{self.name}: {error}")

    def _ask(self, message: wire.Ask) -> wire.Reply | None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            wire.send(self._process.stdin, message)
        except OSError:
            self._break_off(f"the worker ended ({self._last_words()})")
            return None
        reply = self._receive(self._timeout_s)
        if isinstance(reply, wire.Failure) and reply.unusable:
            raise UnusableImplementation(reply.error)
        return reply

    def _receive(self, timeout_s: float) -> wire.Reply | None:
        """The worker's next reply; when it failed, why stands in `_broken`."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            body = wire.receive(self._process.stdout.fileno(), time.monotonic() + timeout_s)
            if body is None:
                self._break_off(f"the worker ended ({self._last_words()})")
                return None
            reply = wire.REPLIES.decode(body)
        except TimeoutError:
            self._break_off(f"no answer in {timeout_s:g} s: the worker hangs")
            return None
        except (ValueError, OSError) as error:
            self._break_off(f"the worker said something unreadable: {error}")
            return None
        if isinstance(reply, wire.Failure):
            self._broken, self.calls = reply.error, reply.calls
        return reply

    def _break_off(self, why: str) -> None:
        self.close()
        self._broken = why

    def _last_words(self) -> str:
        """Exit status and the last line on stderr of a worker that ended."""
        words = ""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                words = f"exit status {self._process.wait(timeout=5)}"
        if self._errors is not None:
            self._errors.seek(0)
            lines = self._errors.read()[-4000:].decode(errors="replace").split("\n")
            words += "".join(f": {line.strip()[:200]}" for line in lines if line.strip())[-203:]
        return words
