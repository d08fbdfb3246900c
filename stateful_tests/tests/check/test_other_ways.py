"""What changed decides in which other ways a tree is driven."""

import ast
import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import islice

import pytest

from ci.commands import system_check
from ci.commands.shared import SystemSelector, Unusable
from ci.report.verdict import check_verdict
from impl import engines
from impl.adapter import Capabilities
from impl.process.system_functions import SystemFunction
from impl.system_spec import ENGINES, SystemSpec, ways_in
from stateful_tests.check import check_plans, plan_order
from stateful_tests.check.trees import way_map, way_measurement
from stateful_tests.check.trees.base_selection import root_of
from stateful_tests.check.trees.changed_functions import _function_texts
from stateful_tests.check.trees.other_ways import _relevant_ways, other_ways
from stateful_tests.check.trees.way_map import OUTSIDE, WayMap
from stateful_tests.lockstep.reference_system import ReferenceSystem
from stateful_tests.lockstep.check_results import CheckResult
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.made_up_check import finding
from stateful_tests.tests.support.night import at_night

ALLOC, HOST, RUST = (SystemFunction("a.py", name) for name in ("alloc", "host", "rust"))
MAP = WayMap(
    ("", "overlap", "hicache", "rust", "rust+overlap", "rust+hicache"),
    {
        ALLOC: frozenset({"", "overlap", "hicache", "rust", "rust+overlap"}),
        HOST: frozenset({"hicache", "rust+hicache"}),
        RUST: frozenset({"rust", "rust+overlap", "rust+hicache"}),
    },
)
SMOKE = check_plans.plan("smoke")


def choose_ways(changed, uncalled=(), own="", plan=SMOKE, release="0.5.23"):
    return other_ways(MAP, "sglang", release, own, changed, uncalled, plan)


def test_ways_with_functions_of_their_own_come_first():
    ways = choose_ways([ALLOC, HOST], [HOST])
    assert ways.driven == ("hicache", "overlap", "rust")
    assert ways.named == ("rust+overlap", "rust+hicache"), "those have no room"
    assert ways.plan.commands == 20_000 and ways.each.commands == 3_333
    assert choose_ways([HOST, RUST], [HOST, RUST]).driven[0] == "rust+hicache", "it calls both"


def test_a_way_whose_own_file_has_changed_comes_before_the_plain_ones():
    names = ("load", "store", "drop")
    load, store, drop = (SystemFunction("images.py", name) for name in names)
    everywhere = frozenset(MAP.ways)
    images = WayMap(
        (*MAP.ways, "images"),
        {
            ALLOC: everywhere | {"images"},
            load: everywhere | {"images"},
            store: frozenset({"images"}),
            drop: frozenset({"images"}),
        },
    )
    assert images.own_files({"images.py"}, "")["images"] == 1
    assert images.own_files({"a.py"}, "")["images"] == 0
    assert _relevant_ways(images, "", [load], [])[0] == "images"
    assert _relevant_ways(images, "", [ALLOC], [])[0] == "overlap"


def test_ways_share_most_of_a_plan_if_the_plain_way_calls_no_change():
    ways = choose_ways([HOST], [HOST])
    assert ways.driven == ("hicache", "rust+hicache")
    assert ways.plan.commands == ways.each.commands == 10_000


def test_the_named_way_is_not_among_the_others():
    assert choose_ways([ALLOC], own="overlap").driven == ("", "hicache", "rust")


def test_a_release_is_driven_in_ways_that_it_has():
    assert choose_ways([ALLOC], release="0.5.17").driven == ("overlap",)


def test_changes_that_run_in_no_other_way_leave_the_plan():
    assert choose_ways([SystemFunction("a.py", "new")]) == ((), (), SMOKE, SMOKE)


@pytest.mark.parametrize("more", [{"examples": 3}, {"presets": ["page1"]}, {"time_limit_s": 9.0}])
def test_a_plan_that_was_narrowed_has_no_room(more):
    plan = check_plans.plan("smoke", **more)
    ways = choose_ways([HOST], plan=plan)
    assert (ways.driven, ways.named, ways.plan) == ((), ("hicache", "rust+hicache"), plan)


def test_a_larger_plan_drives_all_ways():
    assert len(choose_ways([ALLOC, HOST, RUST], plan=check_plans.plan("pr")).driven) == 5


REST = SystemFunction("a.py", OUTSIDE)


@pytest.fixture
def small_map(tmp_path, monkeypatch):
    """A map of two functions in two ways, read from a file."""
    file = tmp_path / "ways.json"
    one = {"ways": ["", "hicache"], "functions": {"a.py": {"alloc": 3, "host": 2}}, "cut": []}
    one |= {"rare": {"a.py": {"host": 0}}, "sets": ["tiers tier, tiers tier-page2"]}
    file.write_text(json.dumps({"sglang": one}))
    monkeypatch.setattr(way_map, "FILE", file)
    way_map.way_map.cache_clear()
    read_map = way_map.way_map("sglang")
    way_map.way_map.cache_clear()
    return read_map


def test_the_map_says_which_functions_run_in_which_way(small_map):
    both = frozenset({"", "hicache"})
    assert small_map.functions == {ALLOC: both, HOST: frozenset({"hicache"}), REST: both}
    assert small_map.files == {"a.py"}
    assert small_map.by_way([ALLOC, HOST]) == {"": {ALLOC}, "hicache": {ALLOC, HOST}}


def test_the_map_names_the_few_configurations_that_call_a_function(small_map):
    assert small_map.calls_rarely([ALLOC, HOST]) == {"tiers tier", "tiers tier-page2"}
    assert not small_map.calls_rarely([ALLOC, RUST])


def test_the_rest_of_a_file_has_run_where_the_file_is_loaded(small_map):
    assert small_map.rest_loaded_in([REST, HOST], ["hicache"]) == {REST}
    assert small_map.rest_loaded_in([REST], ["overlap"]) == small_map.rest_loaded_in([REST], []) == set()


def test_an_uncalled_function_is_printed_with_its_way_and_its_configurations(small_map):
    hint = "in +hicache, on tiers tier, tiers tier-page2"
    assert small_map.function_text(HOST, "", {}) == f"a.py: host ({hint})"
    assert small_map.function_text(HOST, "hicache", {}) == "a.py: host (on tiers tier, tiers tier-page2)"
    assert small_map.function_text(ALLOC, "", {}) == "a.py: alloc"
    few = frozenset(f"tiers tier-{index}" for index in range(5))
    text = small_map._replace(rare={ALLOC: few}).function_text(ALLOC, "", {})
    assert text == "a.py: alloc (on tiers tier-0, tiers tier-1, tiers tier-2 and 2 more)"


@pytest.mark.parametrize(
    ("configurations", "remark"),
    [({"tiers page1"}, ", which no run on this tree had"), ({"tiers tier"}, ""), ((), "")],
)
def test_configurations_that_no_run_had_are_said_to_be_missing(small_map, configurations, remark):
    hint = f"in +hicache, on tiers tier, tiers tier-page2{remark}"
    assert small_map.function_text(HOST, "", {}, {"hicache": configurations}) == f"a.py: host ({hint})"


def test_an_engine_that_was_not_measured_has_an_empty_map():
    assert way_map.way_map("torch") == way_map.NOTHING


def test_an_undriven_way_is_named_with_the_driven_ones():
    """A hint named presets of the host tier to a tree of June, which +hicache refuses."""
    way_map_of = way_map.way_map("sglang")
    queue = SystemFunction(
        "sglang/srt/disaggregation/decode.py", "DecodePreallocQueue.pop_preallocated"
    )
    first = engines.driven_releases("sglang", ("hicache",))[0]
    older = engines.driven_releases("sglang", ())[0]
    text = way_map_of.function_text(queue, "", way_map_of.undriven("sglang", older))
    assert text == f"{queue} (in +hicache, which is driven from {first} on)"
    assert "(in +hicache, on tiers decode, " in way_map_of.function_text(
        queue, "", way_map_of.undriven("sglang", first)
    )
    assert way_map_of.undriven("sglang", "0.0.1") == {} == way_map.NOTHING.undriven("torch", "")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_a_map(engine):
    """`python -m ci.ways` writes it."""
    way_map_of = way_map.way_map(engine)
    assert way_map_of.ways == engines.engine(engine).ways and len(way_map_of.functions) > 50
    for way in way_map_of.ways:
        assert str(engines.engine(engine).newest(way)).startswith(f"{engine}=="), way
        assert engines.driven_releases(engine, ways_in(way)), way


@pytest.mark.parametrize(
    ("engine", "way", "commands"),
    [
        ("lmdeploy", "", 300),
        pytest.param("sglang", "overlap", way_measurement.COMMANDS, marks=at_night),
        pytest.param("vllm", "async", way_measurement.COMMANDS, marks=at_night),
    ],
)
def test_the_map_is_up_to_date(engine, way, commands):
    """The map has what a plan calls on the newest release. The plan calls most of its functions there."""
    newest = str(engines.engine(engine).newest(way))
    called, _ = way_measurement.functions_of_release(newest, commands)
    in_map = {function for function, ways in way_map.way_map(engine).functions.items() if way in ways}
    assert called.keys() <= in_map, "python -m ci.ways"
    with closing(resolve(newest)) as system:
        root = root_of(system)
    files = {file for file, _ in in_map if (root / file).is_file()}
    defined = {file: _function_texts(ast.parse((root / file).read_text("utf-8"))) for file in files}
    assert len(called) > 0.8 * len([name for file, name in in_map if name in defined.get(file, ())])


def test_the_newest_release_of_each_way_is_measured_in_all_ways():
    """What only 0.5.18+unified has is called without that way as well."""
    ways = engines.engine("sglang").ways
    driven_releases = engines.driven_releases
    measured = [
        (release, ways[index]) for release, index in way_measurement.measured_releases("sglang")
    ]
    newest = driven_releases("sglang", [])[-1]
    last = driven_releases("sglang", ["unified"])[-1]
    assert {way for release, way in measured if release == newest} == {*ways} - {"unified"}
    assert {(last, ""), (last, "overlap"), (last, "unified")} <= {*measured}


def test_functions_that_few_configurations_call_name_those_configurations():
    none = way_measurement.FunctionCallers()
    both = none.add_way(0, {"a"}, "abcdef").add_way(1, {"b"}, "abcdef")
    assert (both.way_bits, both.few) == (3, ("a", "b"))
    assert both.add_way(1, {"c"}, "").few == (), "three of six are not few"


def test_configurations_that_call_a_change_get_half_of_the_runs():
    system = ReferenceSystem()
    fitted_plan = check_plans.for_system(SMOKE, ReferenceSystem())
    fitted_plan = replace(fitted_plan, corpus=False, favoured=frozenset({"both state", "both tight"}))
    configs = plan_order.configurations(system, fitted_plan)
    runs = Counter[bool]()
    for batch in islice(plan_order.batches(system, fitted_plan, configs), 4 * len(configs)):
        runs[batch.config.name in fitted_plan.favoured] += len(batch.examples)
    assert 0.4 < runs[True] / runs.total() < 0.6
    assert plan_order.times_favoured(replace(fitted_plan, favoured=frozenset()), configs) == 1


class Tree:
    name = "sglang@checkout"
    release = "0.5.23"


class Driven(list):
    """Systems that were driven, and with which exit code they end."""

    code = 0
    interrupts = ()


@pytest.fixture
def driven_ways(monkeypatch):
    """Ways end with an exit code; says which were driven, and with which plans."""
    driven = Driven()

    def drive(selector, plan, options):
        name = str(selector.spec)
        driven.append((name, plan.commands, options.other_ways, options.base))
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
    reports = []
    saves = []
    others = choose_ways([ALLOC, HOST], [HOST])
    options = system_check.CheckOptions(lambda: None, "traces", base, None, html=False)
    selector = SystemSelector(SystemSpec("sglang"), "../sglang")
    system_check._drive_ways(result, others, selector, Tree, options, reports, saves)
    return reports


def test_some_ways_are_driven_and_the_others_named(driven_ways):
    result = CheckResult("sglang@checkout", "smoke", 0)
    reports = drive_ways(result, "sglang==0.5.22")
    assert driven_ways[0] == ("sglang+hicache", 3_333, False, "sglang==0.5.22")
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
    ways_alike = f"+hicache, +rust+overlap ({command.format('WAY')})"
    assert f"{left} {ways_alike}, +rust (no compiled core), plain (no time)" in verdict
    del result.not_driven["rust+overlap"]
    assert f"+hicache ({command.format('hicache')})" in check_verdict(
        result, (), Capabilities(), None
    )


def test_a_way_that_finds_something_is_the_last(driven_ways):
    driven_ways.code = 1
    result = CheckResult("sglang@checkout", "smoke", 0)
    assert len(drive_ways(result)) == 1 and "overlap" in result.not_driven


def test_an_interrupt_in_another_way_reports_all_findings(driven_ways):
    driven_ways.interrupts = ("sglang+overlap",)
    result = CheckResult("sglang@checkout", "smoke", 0)
    assert len(drive_ways(result)) == 1 and result.interrupted
    assert {*result.not_driven} >= {"overlap", "rust"}


def test_earlier_findings_come_first(driven_ways):
    result = CheckResult("sglang@checkout", "smoke", 0, findings=[finding()])
    assert drive_ways(result) == [] and not driven_ways
    assert [*result.not_driven] == ["hicache", "overlap", "rust", "rust+overlap", "rust+hicache"]


def test_only_the_cut_functions_of_a_cut_file_are_loaded():
    with_cut_file = MAP._replace(cut=frozenset({"a.py"}))
    new = SystemFunction("a.py", "new")
    assert with_cut_file.loads(ALLOC)
    assert not with_cut_file.loads(new)
    assert MAP.loads(new)
    assert not MAP.loads(SystemFunction("b.py", "new"))
    scheduler = "sglang/srt/managers/scheduler.py"
    assert scheduler in way_map.way_map("sglang").cut
    assert not way_map.way_map("sglang").loads(SystemFunction(scheduler, "Scheduler.run_batch"))
    assert way_measurement._is_loaded("lmdeploy", "lmdeploy/pytorch/paging/scheduler.py")
