"""The table of what is driven has all that the newest releases have."""

import re
import tomllib

import pytest

from impl.adapter import UnusableImplementation
from impl.fetch import cache_folder
from stateful_tests.lockstep.known_faults import FOLDER
from stateful_tests.lockstep.systems import resolve

TABLES = tomllib.loads((FOLDER / "driven.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("engine", TABLES)
def test_a_class_or_flag_of_the_release_stands_in_the_table(engine):
    table = TABLES[engine]
    try:
        resolve(f"{engine}=={table['release']}").close()
    except UnusableImplementation as error:
        pytest.skip(str(error))
    root = cache_folder() / f"{engine}-{table['release']}"
    found = {
        name
        for files, pattern in table["found"]
        for file in root.glob(files)
        for name in re.findall(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    listed = [*table["driven"], *(name for names in table["not_driven"].values() for name in names)]
    assert sorted(listed) == sorted(found)


def test_the_command_shows_it(kvspec):
    code, out, _ = kvspec("driven", "vllm")
    assert code == 0 and "AsyncScheduler" in out and "FIFOScheduler" not in out
