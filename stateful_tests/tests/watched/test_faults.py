"""Faults put into a copy of a release's scheduler: each is caught, and by the judges that are named here.

Takes minutes and the server environment, so it runs at night (KVSPEC_EVERY_RELEASE) alone.
"""

import os
import random
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from impl.adapter import UnusableImplementation
from impl.sglang.server import environment
from impl.sglang.server.runs import WholeScheduler
from stateful_tests.watched import population, serving

RELEASE, RUNS = "0.5.23", 60


class Fault(NamedTuple):
    """A table of faults.toml, which says what its fields are."""

    name: str
    file: str
    old: str
    new: str
    sees: str
    fixed: dict[str, int | bool] = {}  # noqa: RUF012
    impatient: bool = False


_TABLES = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))["fault"]
FAULTS = [Fault(**table) for table in _TABLES]


def copy_of(package: Path, fault: Fault, folder: Path) -> None:
    """A package `sglang` of links, but for the one file that has the fault."""
    at, parts = folder / "sglang", ("srt", *fault.file.split("/"))
    for part in parts:
        at.mkdir()
        for each in package.iterdir():
            if each.name not in (part, "__pycache__"):
                (at / each.name).symlink_to(each)
        at, package = at / part, package / part
    text = package.read_text()
    assert text.count(fault.old) == 1, f"{fault.name}: {text.count(fault.old)} places in {fault.file}"
    at.write_text(text.replace(fault.old, fault.new))


@pytest.mark.skipif(not os.environ.get("KVSPEC_EVERY_RELEASE"), reason="takes minutes: at night")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_fault_in_the_scheduler_is_caught(fault, tmp_path):
    try:
        python = environment.python_of(RELEASE)
    except UnusableImplementation as error:
        pytest.skip(f"no server environment: {error}")
    copy_of(next(python.parents[1].glob("lib/python*/site-packages/sglang")), fault, tmp_path)
    runner = WholeScheduler(python, tmp_path)
    try:
        for number in range(RUNS):
            rng = random.Random(f"{fault.name} {number}")
            config = population.configuration(rng, **fault.fixed)
            clients = population.clients(rng, config, count=12, impatient=fault.impatient)
            judged = serving.serve(runner, serving.ServedRun(RELEASE, config, clients, number))
            if fault.sees in {each.judge for each in judged.new}:
                break  # a run that a busy machine has cut short is seen by another judge, and says nothing
    finally:
        runner.close()
    assert fault.sees in {each.judge for each in judged.new}, judged.findings
