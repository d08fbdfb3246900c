"""The worker process: one release, driven by messages on stdin, answered on stdout.

Started as `python -m impl.sglang.process.worker ROOT VERSION [OPTION...]`, options as system.py gives them; a
release's module state is global, so each worker has one release, and a broken one goes with its process.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path

import msgspec

from impl.adapter import UnusableImplementation, error_text
from impl.sglang.process import wire
from reference.commands import Done, Refused


def main(arguments: list[str]) -> int:
    """Serve until stdin ends. Returns an exit status."""
    root, version, options = Path(arguments[0]), arguments[1], arguments[2:]
    # Whatever a release prints must not get between the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    import torch  # here, so that --help and tests of the wire need no torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    from impl.sglang.releases.catalogue import supported
    from impl.sglang.releases.variants import VARIANTS, variant
    from impl.sglang.scheduler.driver import Driver

    try:
        release = supported(version)
        for tree in VARIANTS:
            if f"--tree={tree}" in options:
                release = variant(release, tree)
        driver = Driver(release(root), overlap="--overlap" in options)
        calls = None
        if "--calls" in options:
            from impl.sglang.scheduler.call_log import Calls

            calls = Calls(driver)
    except Exception as error:
        wire.send(out, failure(error, root))
        return 2
    wire.send(out, wire.Ready())
    while (body := wire.receive(0)) is not None:
        reply: wire.Reply
        try:
            ask = wire.ASKS.decode(body)
            if isinstance(ask, wire.Reset):
                reply = wire.StepReply(driver.reset(ask.geometry))
                if calls is not None:
                    calls.started()
            else:
                outcome, view = driver.apply(wire.unpack_command(ask))
                if isinstance(outcome, Refused):
                    reply = wire.StepReply(view, outcome.reason)
                else:
                    assert isinstance(outcome, Done)
                    reply = wire.StepReply(view, None, outcome.choices, outcome.report, outcome.freed)
                if calls is not None:
                    reply = msgspec.structs.replace(reply, calls=calls.take(), late=calls.late())
        except Exception as error:
            reply = failure(error, root)
            if calls is not None:
                reply = msgspec.structs.replace(reply, calls=calls.take())
        wire.send(out, reply)
    return 0


def failure(error: Exception, root: Path) -> wire.Failure:
    """One line: type, message, and the line of the release (else of the driver) that raised it."""
    if isinstance(error, UnusableImplementation):
        return wire.Failure(str(error), unusable=True)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(str(root))]
    line, where = None, ""
    if frames:
        frame = (own or frames)[-1]
        line = frame.line
        name = os.path.relpath(frame.filename, root) if own else f"kvspec:{Path(frame.filename).name}"
        where = f" at {name}:{frame.lineno}"
    return wire.Failure(f"{error_text(error, line)}{where}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
