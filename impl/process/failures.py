"""Why a system broke, in one line. What stands before the first colon is the kind of failure: it stays the
same while a trace shrinks."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from impl.adapter import Misfit, UnusableImplementation
from impl.bare import is_bare
from reference.commands import Outcome
from reference.kinds import AnyCommand, AnyConfig

# Our own folder, and what its modules are called: `impl`, or `kvspec.impl` where that is installed.
_IMPL = Path(__file__).resolve().parents[1]
_OURS = __name__.removesuffix("process.failures")

RESET, VIEW, FIRST_VIEW = "reset", "view()", "the first view()"  # what fails where no command does
Place = tuple[str, int, str]  # file, line, function
_DEVICE = str(_IMPL / "counting_device.py")  # raises for whoever called an operator
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), _DEVICE)


class SystemFailed(RuntimeError):
    """A system failed in another process: one line says why."""


class WrongShape(TypeError):
    """A system returned a value of the wrong shape. The message says where in it."""


@contextmanager
def said_of(what: str, root: Path | None = None) -> Iterator[None]:
    """A failure in here is one of `what`, neither of a command nor of ours. Raises SystemFailed."""
    try:
        yield
    except (UnusableImplementation, SystemFailed):
        raise
    except WrongShape as error:
        raise SystemFailed(f"TypeError: {str(error).replace('view()', what, 1)}") from error
    except (Exception, SystemExit) as error:
        raise SystemFailed(f"{what} raises {described(error, root)}") from error


def fails_at_start(failure: str) -> bool:
    """Whether a system failed before its first command."""
    return failure.removeprefix("TypeError: ").startswith((f"{RESET} raises", FIRST_VIEW))


def of_a_command(failure: str) -> bool:
    """Whether a command failed, not the view after it and nothing before it."""
    return not (fails_at_start(failure) or failure.removeprefix("TypeError: ").startswith(VIEW))


_AFTER_ANOTHER = "after an earlier panic"


def described(error: BaseException, root: Path | None = None) -> str:
    """Type, message, and the line that raised it: the last one below `root`, else outside of libraries. That
    line is the message of an exception without one, such as a bare assert."""
    # the first is of whoever called the system
    while _AFTER_ANOTHER in str(error) and error.__context__ is not None:
        error = error.__context__  # what follows a panic of an extension tells nothing
    frames = traceback.extract_tb(error.__traceback__)[1:]
    places = [(f.filename, f.lineno or 0, f.name) for f in frames]
    if isinstance(error, SystemFailed):
        return str(error)
    if isinstance(error, WrongShape):
        return f"TypeError: {error}"
    message = " ".join(str(error).split())[:300]
    if not message and places:
        file, line, _ = _own(places, root)
        message = linecache.getline(file, line).strip()
    return f"{type(error).__name__}: {message}{_at(places, root)}"


@contextmanager
def own_errors(
    root: Path, misfit: str, engine: str, modules: str, unset: str, values: str
) -> Iterator[None]:
    """An error in the adapter of the files under `root` is reported as the adapter's, never as the release's:
    it raises Misfit.

    modules: its file that says what is loaded; values: the one with settings; unset: a pattern of a line that
    asks for one that is None.
    """
    try:
        yield
    except (UnusableImplementation, SystemFailed):
        raise
    except Exception as error:
        if (why := _fault_of_adapter(error, root, modules, unset, values)) is None:
            raise
        where = f"CONTRIBUTING.md, 'A new release of {engine}'"
        raise Misfit(f"{root} {misfit}: {why} ({where})") from error


def refuses(error: Exception, root: Path) -> bool:
    """Whether the files under `root` refuse a configuration: it is their own line that says no."""
    places = [
        Path(frame.filename)
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(root) or Path(frame.filename).is_relative_to(_IMPL)
    ]
    said = isinstance(error, AssertionError | ValueError | NotImplementedError)
    return said and bool(places) and places[-1].is_relative_to(root)


SETTING = r"\w*config\.\w+"  # a line that asks for a setting


class Guarded:
    """A driver of the files under `root` whose own errors are none of theirs: see `own_errors`.

    engine, modules, values: as there.
    """

    def __init__(self, driver: Any, root: Path, engine: str, modules: str, values: str) -> None:
        self.driver, self.name = driver, driver.name
        self.capabilities, self.close = driver.capabilities, driver.close
        self._of = root, "does not fit the adapter", engine, modules, SETTING, values

    def reset(self, geometry: AnyConfig) -> None:
        with own_errors(*self._of):
            self.driver.reset(geometry)

    def apply(self, command: AnyCommand) -> Outcome:
        with own_errors(*self._of):
            outcome: Outcome = self.driver.apply(command)
        return outcome

    def view(self) -> Any:
        with own_errors(*self._of):
            return self.driver.view()


def _fault_of_adapter(
    error: Exception, root: Path, modules: str, unset: str, values: str
) -> str | None:
    """Why the adapter does not fit, where that is what raised `error`."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    asked = getattr(error, "obj", None)
    stands_in = _is_ours(type(asked)) or is_bare(asked)
    # Arguments that a stand-in does not take, or a stand-in that a library was given.
    if named := re.search(r"^TypeError: (\w+)\.\w+\(\)|\bgot (\w+)|'(\w+)' object", message):
        ours = [vars(module) for name, module in sys.modules.items() if name.startswith(_OURS)]
        kinds = (names.get(named[named.lastindex or 0]) for names in ours)
        stands_in |= any(getattr(each, "__module__", "").startswith(_OURS) for each in kinds)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if stands_in and frame.name == "__getattr__" and file.is_relative_to(_IMPL):
            continue  # whoever asked is what counts
        if file.is_relative_to(_IMPL):
            return f"{message} at {file.relative_to(_IMPL.parent)}:{frame.lineno}, in the adapter"
        if file.is_relative_to(root):
            at = f"at {file.relative_to(root)}:{frame.lineno}"
            if stands_in:
                return f"{message} {at}, which asks more of the adapter's stand-in ({values})"
            if "'Inert" in message:
                return f"{message} {at}, which uses a module that is not loaded ({modules})"
            if "NoneType" in message and (found := re.search(unset, frame.line or "")):
                return f"{message} {at}: the adapter has no value for the setting {found[0]} ({values})"
            return None
    return None


def _is_ours(kind: type) -> bool:
    """Whether a class is the adapter's; its driver may be what the worker runs."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__.startswith(_OURS) or (
        kind.__module__ == "__main__"
        and file is not None
        and Path(file).resolve().is_relative_to(_IMPL)
    )


def kind_of(failure: str) -> str:
    """The exception's type, or how else a system ended: "SIGSEGV", "hang"."""
    return failure.partition(":")[0]


def stack(output: str, root: Path | None = None) -> str:
    """Return the stack of a worker when faulthandler wrote this, the last call first."""
    _, _, last = output.rpartition("(most recent call first):")
    places = re.findall(r'^ +File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
    return _at([(file, int(line), name) for file, line, name in reversed(places)], root)


def _own(places: list[Place], root: Path | None) -> Place:
    own = [
        p
        for p in places
        if (p[0].startswith(str(root)) if root else not p[0].startswith(_LIBRARIES))
    ]
    return (own or places)[-1]


def _at(places: list[Place], root: Path | None) -> str:
    if not places:
        return ""
    file, line, name = _own(places, root)
    if root is None:
        return f" at {Path(file).name}:{line} in {name}"
    below = file.startswith(str(root))
    return f" at {os.path.relpath(file, root) if below else f'kvspec:{Path(file).name}'}:{line}"
