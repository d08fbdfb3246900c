"""The worker: one system, driven by messages on stdin, answered on stdout.

`python -m impl.process.worker MODULE:FACTORY` drives an adapter; SGLang's worker calls `serve`. It has a
process of its own for what no exception handler stops: exits, crashes, hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from impl.adapter import AnySystem, Misfit, System, UnusableImplementation, View
from impl.process import wire
from impl.process.failures import FIRST_VIEW, RESET, VIEW, describe_error, failing_as
from impl.process.system_functions import SystemFunction
from reference.commands import Broken, Refused

WHERE = signal.SIGUSR1  # asks a worker to say on stderr where it is
_NOTHING = wire.Noted()
YOUNG = 50_000  # objects before a collection looks at them: a step makes thousands, and hardly a cycle
_OFFERED = ("name", "capabilities", "reset", "apply", "view", "close")


def serve(make: Callable[[], AnySystem], root: Path | None = None) -> int:
    """Drive what `make` gives until the messages end. Returns an exit status.

    root: see `describe_error`. What a system has `noted` of its last command is sent with the reply.
    """
    # Whatever a system prints or reads must not get between the messages.
    out = os.fdopen(os.dup(1), "wb")
    asks = os.dup(0)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(WHERE, all_threads=False)
    end_with_parent()
    # where memory ends, this process goes, not the one that reports it
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    gc.disable()  # what is imported stays
    try:
        system = make()
        wire.send(out, wire.Ready(system.name, wire.checked_capabilities(system.capabilities)))
    except BaseException as error:
        wire.send(out, _failure(error, root))
        return 2
    gc.freeze()
    gc.set_threshold(YOUNG)
    gc.enable()
    while (body := wire.receive(asks)) is not None:
        ask = wire.ASKS.decode(body)
        called = dict[str, dict[str, None]]()
        if ask.called:
            sys.setprofile(_noting(called, root or _folder_of(system)))
        try:
            reply = _answer(system, ask, root)
        except BaseException as error:
            reply = _failure(error, root)
        sys.setprofile(None)
        if isinstance(reply, wire.WorkerFailure) and not reply.unusable:
            with contextlib.suppress(Exception):
                reply = _failure_with_view(reply.error, _checked_view(system, root))
        noted = msgspec.structs.replace(
            getattr(system, "noted", _NOTHING),
            called=tuple(SystemFunction(file, name) for file in called for name in called[file]),
        )
        wire.send(out, msgspec.structs.replace(reply, noted=noted))
    try:
        system.close()
    except BaseException as error:
        os.write(2, f"{describe_error(error, root)}\n".encode())
        os._exit(1)
    os._exit(0)  # at once, whatever else it has running


def _noting(called: dict[str, dict[str, None]], root: Path) -> Callable[..., None]:
    """Return a profiler that notes the functions called of each file under `root` in `called`."""
    below = f"{root}{os.sep}"
    profiled = frozenset({"view", "apply"})

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(below):
            if "<" not in code.co_qualname and code.co_name not in profiled:
                file = code.co_filename.removeprefix(below)
                called.setdefault(file, {})[code.co_qualname] = None

    return note


def _folder_of(system: object) -> Path:
    return Path(sys.modules[type(system).__module__].__file__ or ".").resolve().parent


def _answer(system: Any, ask: wire.Ask, root: Path | None) -> wire.StepReply | wire.WorkerFailure:
    if not isinstance(ask, wire.Apply):
        with failing_as(RESET, root):
            system.reset(ask.geometry)
        return _reply(_checked_view(system, root, FIRST_VIEW))
    outcome = wire.checked_outcome(system.apply(wire.unpack_command(ask)))
    if isinstance(outcome, Broken):
        return wire.WorkerFailure(outcome.error)
    view = _checked_view(system, root)
    if isinstance(outcome, Refused):
        return _reply(view, refused=outcome.reason)
    return _reply(view, choices=outcome.choices, report=outcome.report, freed=outcome.freed)


def _reply(view: Any, **more: Any) -> wire.StepReply:
    return wire.MESSAGES_BY_FACTS[type(view)].reply(view=view, **more)


def _failure_with_view(error: str, view: Any) -> wire.WorkerFailure:
    """Return a failure, with what the system shows after it."""
    of_kind = wire.MESSAGES_BY_FACTS.get(type(view))
    failure = wire.WorkerFailure if of_kind is None else of_kind.failure
    return failure(error=error, view=view)


def _checked_view(system: Any, root: Path | None, occasion: str = VIEW) -> Any:
    """Return the view of a system. A driver of ours has made that of a release."""
    with failing_as(occasion, root):
        view: Any = system.view()
        judged = type(view) in wire.MESSAGES_BY_FACTS and type(view) is not View
        if judged and root is not None:
            return view
        return wire.copied_view(system.capabilities.system_kind, view)


def _failure(error: BaseException, root: Path | None) -> wire.WorkerFailure:
    if isinstance(error, UnusableImplementation):
        return wire.WorkerFailure(str(error), unusable=True, misfit=isinstance(error, Misfit))
    return wire.WorkerFailure(describe_error(error, root))


def end_with_parent() -> None:
    """Have the kernel end this process as soon as its parent is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def make_system(spec: str) -> System:
    """Return the system that the factory MODULE:NAME makes. Raises UnusableImplementation, and what it
    raises."""
    module, _, name = spec.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnusableImplementation(f"--impl {spec}: {error}") from error
    if not callable(factory):
        raise UnusableImplementation(f"--impl {spec}: {name} is no class or function")
    system: System = factory()
    missing = [name for name in _OFFERED if not hasattr(system, name)]
    if missing:
        raise UnusableImplementation(
            f"--impl {spec}: it offers no {', '.join(missing)} (see kvspec.System)"
        )
    try:
        wire.checked_capabilities(system.capabilities)
    except TypeError as error:
        raise UnusableImplementation(f"--impl {spec}: {error} (see kvspec.Capabilities)") from error
    return system


if __name__ == "__main__":
    sys.exit(serve(lambda: make_system(sys.argv[1])))
