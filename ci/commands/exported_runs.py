"""Where an exported test runs, and how it must end there: it fails on the release of --impl, and passes on
what --fixed names."""

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
    """A release or a checkout that a test is run on, and the exit status that it must have."""

    name: str
    root: Path
    release: str
    code: int


def run_as_wanted(wanted: Sequence[Wanted], test: Path, hook: str, about: str = "") -> None:
    """Run a test on releases. Says how it ends; raises NoTest where one run ends in another way. about: what
    stands before a line."""
    from impl.process.run_test import outcomes

    ends = outcomes(*((each.root, each.release, [test]) for each in wanted), hook=hook)
    said = []
    for each, (code, output) in zip(wanted, ends, strict=True):
        if code != each.code:
            raise NoTest(_unwanted_end(each.name, code, output, each.code))
        said.append(f"{about}{each.name}: the test {'fails' if code else 'passes'}, as it should")
    click.echo("\n".join(said), err=True)


def fixed_system(
    fixed: str, selector: SystemSelector, system: WorkerSystem, opened: ExitStack
) -> WorkerSystem:
    """The release, the checkout or the commit that --fixed names, driven as --impl is."""
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
    """The folder of a commit that --fixed names, and the commit's name; of anything else what is said, and
    no name."""
    if not fixed.startswith(OF_HISTORY):
        return fixed, ""
    return commit_folder(fixed, "--fixed", selector, system, opened)


def target_of(exporting: Any, fixed: str, name: str, spec: SystemSpec) -> ReleaseTarget:
    """The release, or the folder of a checkout, on which a test of `spec` has to pass. name: of a folder that
    is a commit."""
    if not Path(fixed).is_dir():
        version = _fixed_spec(fixed, spec).version
        return cast("ReleaseTarget", exporting.target(version))
    target = cast("ReleaseTarget", exporting.target(fixed))
    return target._replace(name=name) if name else target


def _fixed_spec(fixed: str, spec: SystemSpec) -> SystemSpec:
    """The release that --fixed names, driven as `spec` is."""
    named = SystemSpec.parse(fixed if fixed.partition("==")[1] else f"{spec.engine}=={fixed}")
    if named.engine != spec.engine or named.ways not in ((), spec.ways):
        as_it_is = f"{spec.engine}==VERSION{''.join(f'+{way}' for way in spec.ways)}"
        raise Unusable(f"--fixed {fixed}: the test is run as --impl is: {as_it_is}, or a folder")
    return spec.of_version(named.version)


def _unwanted_end(name: str, code: int, output: str, want: int) -> str:
    """Why a test says nothing: how it ended on a release."""
    if code == 0:
        return (
            f"it passes on {name}: what shows the bug is no call of the release, and no value that a"
            " test can ask for"
        )
    too = " as well: the bug is there too" if want == 0 and code == FAILS else ""
    return f"it {ending_text(code)} on {name}{too}: {last_error(output)}"


def ending_text(code: int) -> str:
    """How a run of tests ended, in words."""
    ends = {0: "passes", FAILS: "fails", STOPS: "stops before its own assertion"}
    return ends.get(code, "cannot be run")


def last_error(output: str) -> str:
    """The line of a run that says what went wrong."""
    lines = [line.strip() for line in output.split("\n") if "Error" in line]
    return lines[-1] if lines else "it says nothing"
