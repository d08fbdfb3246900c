"""The notation of systems under test, and the records of engines."""

import pytest

from impl.engines import engine, every_release
from impl.system_spec import ENGINES, SystemSpec, system_spec

NAMES = (
    "torch", "torch+pr22862-tail", "reference", "module:factory", "sglang", "sglang==", "sglang==0.5.23",
    "vllm@checkout+async", "sglang==0.5.23+rust+overlap", "sglang==all+overlap", "", "+",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_round_trips(name):
    assert str(SystemSpec.parse(name)) == name


def test_a_name_is_parsed_into_engine_version_and_ways():
    spec = SystemSpec.parse("sglang==0.5.23+rust+overlap")
    assert spec == SystemSpec("sglang", "0.5.23", ("rust", "overlap"))
    assert (spec.way, spec.short) == ("rust+overlap", "0.5.23+rust+overlap")
    assert str(spec.of_version(None).in_way("")) == "sglang"
    assert SystemSpec.parse("torch+a-b").bug == "a-b" and spec.bug is None
    assert SystemSpec.parse("m.n:f").stranger and not spec.stranger


def test_a_checkout_has_no_version():
    spec = SystemSpec.parse("sglang@checkout+unified")
    assert spec == SystemSpec("sglang", ways=("unified",), checkout=True)
    assert str(spec.of_version("0.5.18")) == "sglang==0.5.18+unified"


def test_the_spec_of_a_system_is_stated_or_parsed_from_the_name():
    class Other:
        name = "torch+a-b"

    class Release:
        name = "git:3f2a1b9ab"
        spec = SystemSpec("vllm", checkout=True)

    assert system_spec(Other()).bug == "a-b"
    assert system_spec(Release()).checkout


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_record_drives_only_its_own_releases(name):
    record = engine(name)
    assert record.name == name
    assert record.ways[0] == ""
    assert record.driven_releases(()) == record.releases
    for way in record.ways:
        assert {*record.driven_releases(record.newest(way).ways)} <= {*record.releases}, way
    assert every_release(SystemSpec(name, "all"))[-1] == record.newest("")


def test_only_all_selects_every_release():
    assert every_release(SystemSpec.parse("sglang==0.5.23")) == []
    assert every_release(SystemSpec.parse("torch==all")) == []
    with pytest.raises(KeyError):
        engine("torch")


def test_a_version_of_two_numbers_is_the_release_of_three():
    assert SystemSpec.parse("vllm==0.33+async") == SystemSpec.parse("vllm==0.33.0+async")
    assert SystemSpec.parse("vllm==0.33rc1").version == "0.33rc1"
    assert SystemSpec.parse("torch==2.9").version == "2.9"
