"""driven.toml lists every class, field and default that the newest releases have."""

import json
import re
import tomllib

import pytest

from impl import engines
from impl.adapter import UnusableImplementation
from impl.loading.fetch import cache_folder
from stateful_tests.lockstep.known_faults import FOLDER
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.cli import registered

TABLES = tomllib.loads((FOLDER / "driven.toml").read_text(encoding="utf-8"))


def listed_names(table):
    return [
        name
        for groups in (table["driven"], table["not_driven"])
        for members in groups.values()
        for name in members
    ]


@pytest.mark.parametrize("engine", TABLES)
def test_the_table_lists_every_class_and_field_of_the_release(engine):
    table = TABLES[engine]
    try:
        resolve(f"{engine}=={table['release']}").close()
        of = engines.engine(engine)
        of.complete(table["release"], cache_folder() / f"{engine}-{table['release']}")
        roots = registered.folders(engine, table)
    except (UnusableImplementation, OSError) as error:
        pytest.skip(str(error))
    assert sorted(listed_names(table)) == sorted(registered.names(table, roots))


@pytest.mark.parametrize("engine", TABLES)
def test_each_listed_name_has_a_reason(engine):
    for groups in (TABLES[engine]["driven"], TABLES[engine]["not_driven"]):
        assert all(len(why) > 3 and names for why, names in groups.items()), groups


def test_registered_names_show_a_new_class_a_new_field_and_a_changed_default(tmp_path):
    table = {
        "found": [["a/*.py", r"^class (\w+)\b"]],
        "fields": [["a/b.py", "Sizes"], ["a/b.py", "Request"]],
    }
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "b.py"
    file.write_text(
        "class Sizes:\n    _seen = 1\n    LIMIT: int = 3\n    page: int = 1\n"
        "    kept: list = field(default_factory=list)\n"
        "class Request:\n    def __init__(self, name, *, priority=0): pass\n",
        encoding="utf-8",
    )
    first = registered.names(table, [tmp_path])
    assert first == {
        *("Sizes", "Request", "Sizes.page=1", "Sizes.kept=list()"),
        *("Request.name", "Request.priority=0"),
    }
    file.write_text(
        file.read_text(encoding="utf-8")
        .replace("page: int = 1", "page: int = Field(default=2, gt=0)")
        .replace("priority=0", "priority=0, salt=None")
        + "class Queue: pass\n",
        encoding="utf-8",
    )
    assert registered.names(table, [tmp_path]) - first == {
        *("Queue", "Sizes.page=2", "Request.salt=None"),
    }


def test_driven_command_counts_names_by_the_reason_what_is_not_driven_first(kvspec):
    code, out, err = kvspec("driven")
    lines = out.splitlines()
    first, second = (next(at for at, line in enumerate(lines) if re.search(rf" {word} ", line))
                     for word in ("no", "yes"))  # fmt: skip
    assert code == 0
    assert first < second
    assert "kvspec driven WORD" in err
    counts = [int(count) for count in re.findall(r"==\S+ +(?:yes|no) +(\d+)$", out, re.MULTILINE)]
    _, data, _ = kvspec("driven", "--json", "-")
    assert sum(counts) == len(json.loads(data)) > len(counts)


def test_driven_command_prints_the_names_that_match(kvspec):
    code, out, _ = kvspec("driven", "vllm")
    assert code == 0
    assert "AsyncScheduler" in out
    assert "FIFOScheduler" not in out
    code, out, _ = kvspec("driven", "cpu_offload_space_safety")
    assert code == 0 and "the size of host memory" in out
