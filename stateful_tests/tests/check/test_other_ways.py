"""What changed decides in which other ways a tree is driven."""

import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from ci.commands import system_check
from ci.commands.shared import SystemSelector, Unusable
from ci.report.verdict import check_verdict
from impl import engines
from impl.adapter import Capabilities
from impl.system_spec import ENGINES, SystemSpec, ways_in
from stateful_tests.check import check_plans, plan_order
from stateful_tests.check.trees import way_map
from stateful_tests.check.trees.changed_functions import OUTSIDE
from stateful_tests.check.trees.other_ways import _relevant_ways, other_ways
from stateful_tests.check.trees.way_map import WayMap
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.check_results import CheckResult
from stateful_tests.tests.support.made_up_check import finding
from stateful_tests.tests.support.night import at_night

ALLOC, HOST, RUST = (("a.py", name) for name in ("alloc", "host", "rust"))
MAP = WayMap(
    ("", "overlap", "hicache", "rust", "rust+overlap", "rust+hicache"),
    {
        ALLOC: frozenset({"", "overlap", "hicache", "rust", "rust+overlap"}),
        HOST: frozenset({"hicache", "rust+hicache"}),
        RUST: frozenset({"rust", "rust+overlap", "rust+hicache"}),
    },
)
SMOKE = check_plans.plan("smoke")


def chosen(changed, uncalled=(), own="", plan=SMOKE, release="0.5.23"):
    return other_ways(MAP, "sglang", release, own, changed, uncalled, plan)


def test_ways_with_functions_of_their_own_come_first():
    ways = chosen([ALLOC, HOST], [HOST])
    assert ways.driven == ("hicache", "overlap", "rust")
    assert ways.named == ("rust+overlap", "rust+hicache"), "those have no room"
    assert ways.plan.commands == 20_000 and ways.each.commands == 3_333
    assert chosen([HOST, RUST], [HOST, RUST]).driven[0] == "rust+hicache", "it calls both"


def test_a_way_whose_own_file_has_changed_comes_before_the_plain_ones():
    told, kept, dropped = (("images.py", name) for name in ("told", "kept", "dropped"))
    everywhere = frozenset(MAP.ways)
    images = WayMap(
        (*MAP.ways, "images"),
        {
            ALLOC: everywhere | {"images"},
            told: everywhere | {"images"},
            kept: frozenset({"images"}),
            dropped: frozenset({"images"}),
        },
    )
    assert images.homes({"images.py"}, "")["images"] == 1
    assert images.homes({"a.py"}, "")["images"] == 0
    assert _relevant_ways(images, "", [told], [])[0] == "images"
    assert _relevant_ways(images, "", [ALLOC], [])[0] == "overlap"


def test_ways_share_most_of_a_plan_if_the_plain_way_calls_no_change():
    ways = chosen([HOST], [HOST])
    assert ways.driven == ("hicache", "rust+hicache")
    assert ways.plan.commands == ways.each.commands == 10_000


def test_the_named_way_is_not_among_the_others():
    assert chosen([ALLOC], own="overlap").driven == ("", "hicache", "rust")


def test_a_release_is_driven_in_ways_that_it_has():
    assert chosen([ALLOC], release="0.5.17").driven == ("overlap",)


def test_changes_that_run_in_no_other_way_leave_the_plan():
    assert chosen([("a.py", "new")]) == ((), (), SMOKE, SMOKE)


@pytest.mark.parametrize("more", [{"examples": 3}, {"presets": ["page1"]}, {"time_limit_s": 9.0}])
def test_a_plan_that_was_narrowed_has_no_room(more):
    plan = check_plans.plan("smoke", **more)
    ways = chosen([HOST], plan=plan)
    assert (ways.driven, ways.named, ways.plan) == ((), ("hicache", "rust+hicache"), plan)


def test_a_larger_plan_drives_all_ways():
    assert len(chosen([ALLOC, HOST, RUST], plan=check_plans.plan("pr")).driven) == 5


def test_the_map_says_which_functions_run_in_which_way(tmp_path, monkeypatch):
    file = tmp_path / "ways.json"
    one = {"ways": ["", "hicache"], "functions": {"a.py": {"alloc": 3, "host": 2}}, "cut": []}
    one |= {"rare": {"a.py": {"host": 0}}, "sets": ["tiers tier, tiers tier-page2"]}
    file.write_text(json.dumps({"sglang": one}))
    monkeypatch.setattr(way_map, "FILE", file)
    way_map.way_map.cache_clear()
    way_map_of = way_map.way_map("sglang")
    way_map.way_map.cache_clear()
    both = frozenset({"", "hicache"})
    assert way_map_of.functions == {ALLOC: both, HOST: frozenset({"hicache"}), ("a.py", OUTSIDE): both}
    assert way_map_of.files == {"a.py"}
    assert way_map_of.calling([ALLOC, HOST]) == {"": {ALLOC}, "hicache": {ALLOC, HOST}}
    assert way_map_of.calls_rarely([ALLOC, HOST]) == {"tiers tier", "tiers tier-page2"}
    assert not way_map_of.calls_rarely([ALLOC, RUST])
    assert way_map_of.told(HOST, "", {}) == "a.py: host (in +hicache, on tiers tier, tiers tier-page2)"
    assert way_map_of.told(HOST, "hicache", {}) == "a.py: host (on tiers tier, tiers tier-page2)"
    assert way_map_of.told(ALLOC, "", {}) == "a.py: alloc"
    rest = "a.py", OUTSIDE
    assert way_map_of.loaded_in([rest, HOST], ["hicache"]) == {rest}, "it runs when its file is loaded"
    assert way_map_of.loaded_in([rest], ["overlap"]) == way_map_of.loaded_in([rest], []) == set()
    hint = "in +hicache, on tiers tier, tiers tier-page2"
    for had, more in (({"tiers page1"}, ", which no run on this tree had"), ({"tiers tier"}, ""), ((), "")):
        assert way_map_of.told(HOST, "", {}, {"hicache": had}) == f"a.py: host ({hint}{more})"
    few = frozenset(f"tiers tier-{index}" for index in range(5))
    text = way_map_of._replace(rare={ALLOC: few}).told(ALLOC, "", {})
    assert text == "a.py: alloc (on tiers tier-0, tiers tier-1, tiers tier-2 and 2 more)"
    assert way_map.way_map("torch") == way_map.NOTHING


def test_an_undriven_way_is_named_with_the_driven_ones():
    """A hint named presets of the host tier to a tree of June, which +hicache refuses."""
    way_map_of = way_map.way_map("sglang")
    queue = "sglang/srt/disaggregation/decode.py", "DecodePreallocQueue.pop_preallocated"
    first = engines.driven_in("sglang", ("hicache",))[0]
    older = engines.driven_in("sglang", ())[0]
    text = way_map_of.told(queue, "", way_map_of.undriven("sglang", older))
    assert text == f"{': '.join(queue)} (in +hicache, which is driven from {first} on)"
    assert "(in +hicache, on tiers decode, " in way_map_of.told(
        queue, "", way_map_of.undriven("sglang", first)
    )
    assert way_map_of.undriven("sglang", "0.0.1") == {} == way_map.NOTHING.undriven("torch", "")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_a_map(engine):
    """`python -m ci.ways` writes it."""
    way_map_of = way_map.way_map(engine)
    assert way_map_of.ways == engines.engine(engine).ways and len(way_map_of.functions) > 50
    for way in way_map_of.ways:
        assert str(engines.engine(engine).newest(way)).startswith(f"{engine}==")
        assert engines.driven_in(engine, ways_in(way)), way


@pytest.mark.parametrize(
    ("engine", "way", "commands"),
    [
        ("lmdeploy", "", 300),
        pytest.param("sglang", "overlap", way_map.COMMANDS, marks=at_night),
        pytest.param("vllm", "async", way_map.COMMANDS, marks=at_night),
    ],
)
def test_the_map_is_up_to_date(engine, way, commands):
    """What a short plan calls on the newest release stands in the map, and most of the map is called."""
    called = way_map.called_in(str(engines.engine(engine).newest(way)), commands)[0].keys()
    way_map_of = {name for name, ways in way_map.way_map(engine).functions.items() if way in ways}
    assert called <= way_map_of, "python -m ci.ways"
    assert len(called) > 0.8 * len({each for each in way_map_of if each[1] != OUTSIDE})


def test_the_newest_release_of_each_way_is_measured_in_all_ways():
    """What only 0.5.18+unified has is called without that way as well."""
    ways, driven_in = engines.engine("sglang").ways, engines.driven_in
    measured = [(release, ways[at]) for release, at in way_map.measured_in("sglang")]
    newest, last = driven_in("sglang", [])[-1], driven_in("sglang", ["unified"])[-1]
    assert {way for release, way in measured if release == newest} == {*ways} - {"unified"}
    assert {(last, ""), (last, "overlap"), (last, "unified")} <= {*measured}


def test_functions_that_few_configurations_call_name_those_configurations():
    both = way_map.Measured().also(0, {"a"}, "abcdef").also(1, {"b"}, "abcdef")
    assert (both.ways, both.few) == (3, ("a", "b"))
    assert both.also(1, {"c"}, "").few == (), "three of six are not few"


def test_configurations_that_call_a_change_get_half_of_the_runs():
    system, asked = ReferenceSystem(), check_plans.for_system(SMOKE, ReferenceSystem())
    asked = replace(asked, corpus=False, favoured=frozenset({"both state", "both tight"}))
    configs = plan_order.configurations(system, asked)
    runs = Counter[bool]()
    for batch in islice(plan_order.batches(system, asked, configs), 4 * len(configs)):
        runs[batch.config.name in asked.favoured] += len(batch.examples)
    assert 0.4 < runs[True] / runs.total() < 0.6
    assert plan_order.times_favoured(replace(asked, favoured=frozenset()), configs) == 1


class Tree:
    name, release = "sglang@checkout", "0.5.23"


class Driven(list):
    """Systems that were driven, and with which exit code they end."""

    code = 0
    interrupts = ()


@pytest.fixture
def drives(monkeypatch):
    """Ways end with an exit code; says which were driven, and with which plans."""
    driven = Driven()

    def drive(selector, plan, how):
        name = str(selector.spec)
        driven.append((name, plan.commands, how.other_ways, how.base))
        if name.endswith("rust"):
            raise Unusable("no compiled core")
        if name in driven.interrupts:
            raise KeyboardInterrupt
        since = {"called": ["a.py: host"] if "hicache" in name else []}
        text = "violates HOST-1" if "hicache" in name else "conforms"
        data = {"said": text, "since": since, "interrupted": False, "exit_code": driven.code}
        return data, lambda: driven.append("saved")

    monkeypatch.setattr(system_check, "check_system", drive)
    return driven


def drive_ways(result, base=None):
    reports, saves = [], []
    others = chosen([ALLOC, HOST], [HOST])
    how = system_check.CheckOptions(lambda: None, "traces", base, None, html=False)
    selector = SystemSelector(SystemSpec("sglang"), "../sglang")
    system_check._drive_ways(result, others, selector, Tree, how, reports, saves)
    return reports


def test_some_ways_are_driven_and_the_others_named(drives):
    result = CheckResult("sglang@checkout", "smoke", 0)
    reports = drive_ways(result, "sglang==0.5.22")
    assert drives[0] == ("sglang+hicache", 3_333, False, "sglang==0.5.22")
    assert result.ways == {"hicache": "violates HOST-1", "overlap": "conforms"}
    assert result.not_driven["rust"] == "no compiled core"
    command = "kvspec check --impl sglang+rust+overlap --sglang-path ../sglang"
    assert result.not_driven["rust+overlap"] == command
    assert system_check._functions_called(reports) == {HOST}


def test_undriven_ways_with_one_reason_are_named_together():
    result = CheckResult("sglang@checkout", "smoke", 0)
    command = "kvspec check --impl sglang+{} --sglang-path ../sglang"
    result.not_driven = {way: command.format(way) for way in ("hicache", "rust+overlap")}
    result.not_driven |= {"rust": "no compiled core", "": "no time"}
    verdict = check_verdict(result, (), Capabilities(), None)
    left = "not driven: what changed runs in"
    alike = f"+hicache, +rust+overlap ({command.format('WAY')})"
    assert f"{left} {alike}, +rust (no compiled core), plain (no time)" in verdict
    del result.not_driven["rust+overlap"]
    assert f"+hicache ({command.format('hicache')})" in check_verdict(
        result, (), Capabilities(), None
    )


def test_a_way_that_finds_something_is_the_last(drives):
    drives.code = 1
    result = CheckResult("sglang@checkout", "smoke", 0)
    assert len(drive_ways(result)) == 1 and "overlap" in result.not_driven


def test_an_interrupt_in_another_way_reports_all_findings(drives):
    drives.interrupts = ("sglang+overlap",)
    result = CheckResult("sglang@checkout", "smoke", 0)
    assert len(drive_ways(result)) == 1 and result.interrupted
    assert {*result.not_driven} >= {"overlap", "rust"}


def test_earlier_findings_come_first(drives):
    result = CheckResult("sglang@checkout", "smoke", 0, findings=[finding()])
    assert drive_ways(result) == [] and not drives
    assert [*result.not_driven] == ["hicache", "overlap", "rust", "rust+overlap", "rust+hicache"]


def test_only_the_cut_functions_of_a_cut_file_are_loaded():
    of = MAP._replace(cut=frozenset({"a.py"}))
    assert of.loads(ALLOC) and not of.loads(("a.py", "new")) and MAP.loads(("a.py", "new"))
    assert not MAP.loads(("b.py", "new"))
    scheduler = "sglang/srt/managers/scheduler.py"
    assert scheduler in way_map.way_map("sglang").cut
    assert not way_map.way_map("sglang").loads((scheduler, "Scheduler.run_batch"))
    assert way_map._is_loaded("lmdeploy", "lmdeploy/pytorch/paging/scheduler.py")
