"""One line that says why a system broke. The text before the first colon is the kind of failure, which must
stay the same while a trace is shrunk."""

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
from types import FunctionType
from typing import Any

from impl.adapter import Misfit, UnusableImplementation
from impl.bare import is_bare
from reference.commands import Outcome
from reference.system_kinds import AnyCommand, AnyConfig

# The folder of the adapters, and the prefix of their modules: `impl.`, or `kvspec.impl.` in a wheel.
_IMPL = Path(__file__).resolve().parents[1]
_OUR_PREFIX = __name__.removesuffix("process.failures")

# What failed, if it was no command.
RESET = "reset"
VIEW = "view()"
FIRST_VIEW = "the first view()"
Place = tuple[str, int, str]  # file, line, function
_DEVICE = str(_IMPL / "torch_kv" / "counting_device.py")  # its exceptions are the caller's
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), _DEVICE)


class SystemFailed(RuntimeError):
    """A system failed in another process: one line says why."""


class WrongShape(TypeError):
    """A system returned a value of the wrong shape. The message says where in it."""


@contextmanager
def failing_as(occasion: str, root: Path | None = None) -> Iterator[None]:
    """Return a context whose exceptions are failures of `occasion`, not of a command. Raises SystemFailed."""
    try:
        yield
    except (UnusableImplementation, SystemFailed):
        raise
    except WrongShape as error:
        raise SystemFailed(f"TypeError: {str(error).replace('view()', occasion, 1)}") from error
    except (Exception, SystemExit) as error:
        raise SystemFailed(f"{occasion} raises {describe_error(error, root)}") from error


def fails_at_start(failure: str) -> bool:
    """Return whether a system failed before its first command."""
    return failure.removeprefix("TypeError: ").startswith((f"{RESET} raises", FIRST_VIEW))


def failed_in_command(failure: str) -> bool:
    """Return whether a command failed, not the view after it and nothing before it."""
    return not (fails_at_start(failure) or failure.removeprefix("TypeError: ").startswith(VIEW))


_LATER_PANIC = "after an earlier panic"  # in the message of an extension that has panicked before


def describe_error(error: BaseException, root: Path | None = None) -> str:
    """Return the type and message of an exception, and the line that raised it.

    That line is the last one in a file below `root`, or without a root the last one outside of libraries.
    Its source is the message of an exception that has none, such as a bare assert.
    """
    while _LATER_PANIC in str(error) and error.__context__ is not None:
        error = error.__context__  # the first panic of an extension is the cause
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the caller of the system
    places = [(f.filename, f.lineno or 0, f.name) for f in frames]
    if isinstance(error, SystemFailed):
        return str(error)
    if isinstance(error, WrongShape):
        return f"TypeError: {error}"
    message = " ".join(str(error).split())[:300]
    if not message and places:
        file, line, _ = _innermost_place(places, root)
        message = linecache.getline(file, line).strip()
    return f"{type(error).__name__}: {message}{_location(places, root)}"


@contextmanager
def raising_misfit(
    root: Path, misfit: str, engine: str, modules: str, unset: str, values: str
) -> Iterator[None]:
    """Return a context in which an error of the adapter is no failure of the release: it raises Misfit
    instead.

    root: folder of the release.
    misfit: what the message says of that folder.
    engine: name of the engine.
    modules: file of the adapter that says which modules are loaded.
    unset: pattern of a source line that reads a setting, for errors about None.
    values: file of the adapter with its stand-ins and settings.
    """
    try:
        yield
    except (UnusableImplementation, SystemFailed):
        raise
    except Exception as error:
        misfit_reason = _fault_of_adapter(error, root, modules, unset, values)
        if misfit_reason is None:
            raise
        where = f"CONTRIBUTING.md, 'A new release of {engine}'"
        raise Misfit(f"{root} {misfit}: {misfit_reason} ({where})") from error


def refuses(error: Exception, root: Path) -> bool:
    """Return whether the release under `root` refuses a configuration: a line of its own raised the error."""
    files = [
        Path(frame.filename)
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(root) or Path(frame.filename).is_relative_to(_IMPL)
    ]
    if not isinstance(error, AssertionError | ValueError | NotImplementedError):
        return False
    return bool(files) and files[-1].is_relative_to(root)


SETTING = r"\w*config\.\w+"  # a line that asks for a setting


class Guarded:
    """A driver whose own errors raise Misfit: see `raising_misfit`, also for the arguments."""

    def __init__(self, driver: Any, root: Path, engine: str, modules: str, values: str) -> None:
        self.driver = driver
        self.name = driver.name
        self.capabilities = driver.capabilities
        self.close = driver.close
        self._guard_arguments = (
            root, "does not fit the adapter", engine, modules, SETTING, values
        )  # fmt: skip

    def reset(self, geometry: AnyConfig) -> None:
        with raising_misfit(*self._guard_arguments):
            self.driver.reset(geometry)

    def apply(self, command: AnyCommand) -> Outcome:
        with raising_misfit(*self._guard_arguments):
            outcome: Outcome = self.driver.apply(command)
        return outcome

    def view(self) -> Any:
        with raising_misfit(*self._guard_arguments):
            return self.driver.view()


def _fault_of_adapter(
    error: Exception, root: Path, modules: str, unset: str, values: str
) -> str | None:
    """Return why the adapter does not fit the release; None if `error` is no fault of the adapter."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    asked = getattr(error, "obj", None)
    is_stand_in = _is_ours(type(asked)) or is_bare(asked)
    # Arguments that a stand-in does not take, or a stand-in that a library was given.
    if named := re.search(r"^TypeError: (\w+)[\w.<>]*\(\)|\bgot (\w+)|'(\w+)' object", message):
        is_stand_in |= _names_a_stand_in(named[named.lastindex or 0], root)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if is_stand_in and frame.name == "__getattr__" and file.is_relative_to(_IMPL):
            continue  # the caller is the place
        if file.is_relative_to(_IMPL):
            return f"{message} at {file.relative_to(_IMPL.parent)}:{frame.lineno}, in the adapter"
        if file.is_relative_to(root):
            place_text = f"at {file.relative_to(root)}:{frame.lineno}"
            if is_stand_in:
                return f"{message} {place_text}, which asks more of the adapter's stand-in ({values})"
            if "'Inert" in message:
                return f"{message} {place_text}, which uses a module that is not loaded ({modules})"
            if "NoneType" in message and (found := re.search(unset, frame.line or "")):
                missing = f"the adapter has no value for the setting {found[0]} ({values})"
                return f"{message} {place_text}: {missing}"
            return None
    return None


def _names_a_stand_in(name: str, root: Path) -> bool:
    """Return whether a class or function of the adapters has this name. A function of the release under
    `root` may have it as well: that one is meant then."""
    found = False
    for module_name, module in [*sys.modules.items()]:
        named = vars(module).get(name)
        home = getattr(named, "__module__", None) or ""
        if module_name.startswith(_OUR_PREFIX):
            found |= home.startswith(_OUR_PREFIX)
        elif isinstance(named, FunctionType) and not home.startswith(_OUR_PREFIX):
            if (getattr(module, "__file__", None) or "").startswith(str(root)):
                return False
    return found


def _is_ours(kind: type) -> bool:
    """Return whether a class is one of the adapters', which may run as the main module of a worker."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__.startswith(_OUR_PREFIX) or (
        kind.__module__ == "__main__"
        and file is not None
        and Path(file).resolve().is_relative_to(_IMPL)
    )


def kind_of_failure(failure: str) -> str:
    """Return the type of the exception, or another way in which a system ended, such as "SIGSEGV" or
    "hang"."""
    return failure.partition(":")[0]


def stack(output: str, root: Path | None = None) -> str:
    """Return the place of a worker's innermost call, from the output of faulthandler."""
    _, _, last = output.rpartition("(most recent call first):")
    places = re.findall(r'^ +File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
    return _location([(file, int(line), name) for file, line, name in reversed(places)], root)


def _innermost_place(places: list[Place], root: Path | None) -> Place:
    """Return the last place below `root`, or without a root outside of libraries; else the last of all."""
    if root:
        own = [place for place in places if place[0].startswith(str(root))]
    else:
        own = [place for place in places if not place[0].startswith(_LIBRARIES)]
    return (own or places)[-1]


def _location(places: list[Place], root: Path | None) -> str:
    if not places:
        return ""
    file, line, name = _innermost_place(places, root)
    if root is None:
        return f" at {Path(file).name}:{line} in {name}"
    if file.startswith(str(root)):
        return f" at {os.path.relpath(file, root)}:{line}"
    return f" at kvspec:{Path(file).name}:{line}"
