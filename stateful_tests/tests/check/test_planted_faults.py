"""The notation of planted faults: what it holds, what is refused, and that a fault is taken out again."""

import re
import sys
import tomllib
from dataclasses import replace

import pytest

from reference.blocks.config import EngineConfig, LayerGroup
from reference.blocks.presets import engine_preset
from reference.system_kinds import BLOCKS, PAIRS, ROWS, TIERS
from reference.pairs.config import PAIR_PRESETS
from reference.tiers.config import tier_preset
from stateful_tests.tests.support.planted_faults import (
    TESTS, PlantedFaultError, checkout_with, config_of, plant_fault, read_faults, stated_sizes,
)  # fmt: skip

FILES = sorted(TESTS.rglob("*faults.toml"))
TABLE = """
system = "vllm==0.33.0"
presets = ["full"]

[lost-block]
caught_by = "BLK-1"
sizes = { groups = [[2], [2, 4]], blocks = 9, max_model_len = 8, max_batched_tokens = 4 }
commands = "add r1 a2 for 1; schedule"
file = "some/module.py"
old = "return 1"
new = "return 2"
"""


@pytest.fixture
def faults_of_text(tmp_path):
    def faults(text):
        (tmp_path / "faults.toml").write_text(text)
        return read_faults(tmp_path / "faults.toml")

    return faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_file_is_in_the_notation(path):
    faults = read_faults(path).values()
    assert faults
    assert all(
        fault.caught_by or fault.gone or fault.mended or not fault.system for fault in faults
    )


def test_a_fault_inherits_the_fields_of_its_file(faults_of_text):
    [fault] = faults_of_text(TABLE).values()
    assert (fault.clause, fault.presets, fault.kind) == ("BLK-1", ("full",), BLOCKS)
    trace = fault.trace()
    assert [group.window for group in trace.geometry.groups] == [None, 4]
    assert [type(command).__name__ for command in trace.commands] == ["Add", "Schedule"]
    [other] = faults_of_text(TABLE.replace('"BLK-1"', '["A", "B"]\nway = "async+v2"')).values()
    assert (other.caught_by, str(other.spec)) == (("A", "B"), "vllm==0.33.0+async+v2")


@pytest.mark.parametrize("kind, sizes", [
    (BLOCKS, engine_preset("tight")), (TIERS, tier_preset("tier")), (PAIRS, PAIR_PRESETS["pair"]),
    (BLOCKS, EngineConfig(
        (LayerGroup(2), LayerGroup(2, 3), LayerGroup(2, state=True)), blocks=20, max_model_len=8,
        max_batched_tokens=4, drafts=1,
    )),
    (TIERS, replace(tier_preset("tier-window"), host_pages=3, policy="write_back")),
])  # fmt: skip
def test_printed_sizes_are_read_back(kind, sizes):
    assert config_of(kind, tomllib.loads(f"sizes = {stated_sizes(sizes)}")["sizes"]) == sizes


@pytest.mark.parametrize("system, kind", [
    ("sglang==0.5.23", ROWS), ("sglang==0.5.23+hicache", TIERS), ("vllm==0.33.0+pair", PAIRS),
    ("lmdeploy==0.18.0", BLOCKS),
])  # fmt: skip
def test_the_system_of_a_fault_has_its_kind(faults_of_text, system, kind):
    text = f'system = "{system}"\n[x]\nfile = "a.py"\nold = "1"\nnew = "2"\n'
    assert faults_of_text(text)["x"].kind is kind


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('old = "return 1"', 'olld = "return 1"'), "unknown field `olld`"),
        (('old = "return 1"', 'old = "return 1"\nmethod = "A.b"'), "one of `old` and `method`"),
        (('old = "return 1"\n', ""), "one of `old` and `method`"),
        (("blocks = 9", "block = 9"), "unexpected keyword argument 'block'"),
        (("schedule", "shedule"), "'shedule' is no command"),
        (('new = "return 2"', "new = 2"), r"Expected `str`, got `int`.*edits\[0\]\.new"),
        (("[lost-block]", "[lost-block"), "Expected ']'"),
    ],
)
def test_an_unreadable_entry_names_the_file_and_the_fault(faults_of_text, change, says):
    with pytest.raises(PlantedFaultError, match=says) as error:
        faults_of_text(TABLE.replace(*change))
    assert re.match(r".*faults\.toml: (lost-block: )?[^\n]*$", str(error.value))


@pytest.fixture
def release_root(tmp_path, monkeypatch):
    """The root of a system with one module, which is loaded."""
    (tmp_path / "root" / "some").mkdir(parents=True)
    (tmp_path / "root" / "some" / "module.py").write_text(
        "class A:\n    page_size = 6\n    def b(self):\n        return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "root")
    yield tmp_path / "root"
    sys.modules.pop("some.module", None)
    sys.modules.pop("some", None)


def test_a_fault_in_loaded_code_is_taken_out_again(faults_of_text, release_root):
    from some.module import A

    [fault] = faults_of_text(TABLE).values()
    with plant_fault(release_root, fault.edits):
        assert A().b() == 2
    assert A().b() == 1


def test_text_that_is_not_there_once_is_named(faults_of_text, release_root):
    [fault] = faults_of_text(TABLE.replace("return 1", "return 3")).values()
    with pytest.raises(AssertionError, match=r"'return 3' is in 0 places of .*module\.py"):
        checkout_with(release_root, release_root.with_name("copy"), fault)


def test_a_checkout_has_the_fault_and_the_release_does_not(faults_of_text, release_root):
    gate = '''
method = "A.b"
release = "9"
new = "def fault(right, this): return right(this) + 4"'''
    head, _, _ = TABLE.replace("vllm==0.33.0", "sglang==9").partition("old = ")
    [gated] = faults_of_text(
        re.sub(r"sizes = .*\ncommands = .*", "sizes = { page_size = 6 }", head) + gate
    ).values()
    [plain] = faults_of_text(TABLE).values()

    def result(folder):
        space = {}
        exec((folder / "some" / "module.py").read_text(), space)
        return space["A"]().b()

    copies = iter(release_root.with_name(name) for name in "abcd")
    assert result(checkout_with(release_root, next(copies), plain)) == 2
    assert result(checkout_with(release_root, next(copies), gated)) == 1
    assert result(checkout_with(release_root, next(copies), gated, release="9")) == 5
    assert result(checkout_with(release_root, next(copies), plain, gated, release="9")) == 6
    assert result(release_root) == 1
