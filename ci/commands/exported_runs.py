"""Runs of exported tests: a test must fail on the release of --impl, and pass on the one that --fixed
names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from ci.commands.base_choice import OF_HISTORY, commit_folder
from ci.commands.shared import SystemSelector, Unusable
from impl.process.run_test import FAILS, STOPS
from impl.system_spec import SystemSpec

if TYPE_CHECKING:
    from ci.export.unit_test import ReleaseTarget
    from impl.process.remote_system import WorkerSystem


class NoTest(Exception):
    """No test can be made of a trace: the reason."""


class Wanted(NamedTuple):
    """A release or a checkout that a test runs on, and the exit status that it must have."""

    name: str
    root: Path
    release: str
    code: int


def run_as_wanted(wanted: Sequence[Wanted], test: Path, hook: str, about: str = "") -> None:
    """Run a test on releases and report how it ends. Raises NoTest where a run ends in another way.

    about: the beginning of each line.
    """
    from impl.process.run_test import outcomes

    ends = outcomes(*((target.root, target.release, [test]) for target in wanted), hook=hook)
    messages = []
    for each, (code, output) in zip(wanted, ends, strict=True):
        if code != each.code:
            raise NoTest(_unwanted_end(each.name, code, output, each.code))
        messages.append(f"{about}{each.name}: the test {'fails' if code else 'passes'}, as it should")
    click.echo("\n".join(messages), err=True)


def fixed_system(
    fixed: str, selector: SystemSelector, system: WorkerSystem, opened: ExitStack
) -> WorkerSystem:
    """Return the release, the checkout or the commit that --fixed names, driven as --impl is."""
    from impl.process.remote_system import WorkerSystem

    folder, name = folder_and_name(fixed, selector, system, opened)
    if Path(folder).is_dir():
        other = SystemSelector(selector.spec.of_version(None), folder, selector.device)
    else:
        other = SystemSelector(_fixed_spec(fixed, selector.spec), None, selector.device)
    mended = opened.enter_context(closing(other.resolve(quiet=True)))
    assert isinstance(mended, WorkerSystem)
    if name:
        mended.name = name
    return mended


def folder_and_name(
    fixed: str, selector: SystemSelector, system: WorkerSystem, opened: ExitStack
) -> tuple[str, str]:
    """Return the folder of a commit that --fixed names, and the commit's name; for anything else its
    value, and no name."""
    if not fixed.startswith(OF_HISTORY):
        return fixed, ""
    return commit_folder(fixed, "--fixed", selector, system, opened)


def target_of(exporting: Any, fixed: str, name: str, spec: SystemSpec) -> ReleaseTarget:
    """Return the release, or the folder of a checkout, on which a test of `spec` has to pass.

    name: of a folder that is a commit.
    """
    if not Path(fixed).is_dir():
        version = _fixed_spec(fixed, spec).version
        return cast("ReleaseTarget", exporting.target(version))
    target = cast("ReleaseTarget", exporting.target(fixed))
    return target._replace(name=name) if name else target


def _fixed_spec(fixed: str, spec: SystemSpec) -> SystemSpec:
    """Return the release that --fixed names, driven as `spec` is."""
    fixed_spec = SystemSpec.parse(fixed if fixed.partition("==")[1] else f"{spec.engine}=={fixed}")
    if fixed_spec.engine != spec.engine or fixed_spec.ways not in ((), spec.ways):
        as_it_is = f"{spec.engine}==VERSION{''.join(f'+{way}' for way in spec.ways)}"
        raise Unusable(f"--fixed {fixed}: the test is run as --impl is: {as_it_is}, or a folder")
    return spec.of_version(fixed_spec.version)


def _unwanted_end(name: str, code: int, output: str, wanted_code: int) -> str:
    """Describe how a test ended on a release, and so shows nothing."""
    if code == 0:
        return (
            f"it passes on {name}: what shows the bug is no call of the release, and no value that a"
            " test can ask for"
        )
    too = " as well: the bug is there too" if wanted_code == 0 and code == FAILS else ""
    return f"it {ending_text(code)} on {name}{too}: {last_error(output)}"


def ending_text(code: int) -> str:
    """Return the end of a run of tests, in words."""
    ends = {0: "passes", FAILS: "fails", STOPS: "stops before its own assertion"}
    return ends.get(code, "cannot be run")


def last_error(output: str) -> str:
    """Return the line of a run that names the error."""
    lines = [line.strip() for line in output.split("\n") if "Error" in line]
    return lines[-1] if lines else "it says nothing"
