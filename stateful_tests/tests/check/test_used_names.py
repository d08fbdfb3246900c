"""A name that the adapter uses, and that a tree has renamed, is told before anything is driven."""

import re

import pytest

from ci.adapter_names import names_given_to_releases, names_with_defaults
from impl.adapter import UnusableImplementation
from impl.bare import bare, is_bare
from impl.loading import used_names
from impl.loading.fetch import cache_folder
from impl.loading.nearest import Nearest, neighbours
from impl.loading.used_names import NameSketch, UsedName, lost_names
from impl.process.failures import Guarded
from impl.system_spec import ENGINES
from stateful_tests.lockstep.known_faults import releases
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.night import at_night

# engine and way, release -> new names: the refusal tells all of the old ones.
RENAMES = (
    ("sglang", "0.5.23", {"alloc_extend": "allocate_extend", "dllm_config": "diffusion"}),
    (
        "sglang+hicache",
        "0.5.23",
        {
            "prefetch_threshold": "least_prefetch",
            "_kvcache": "_kv",
            "retraction_backup": "kept_copy",
            "io_backend": "copies_by",
            "PoolName": "NameOfPool",
            "_evict_swa_for_device_alloc": "_room_for_swa",
        },
    ),
    (
        "vllm",
        "0.33.0",
        {
            "num_speculative_blocks": "draft_blocks",
            "observability_config": "observed",
            "PREEMPTED": "SET_BACK",
            "use_eagle_block_drop": "use_block_drop",
            "use_v2_model_runner": "is_second_runner",
        },
    ),
    (
        "lmdeploy",
        "0.18.0",
        {
            "is_ssm": "has_state",
            "resp_queue": "answers",
            "state_offsets": "slots_of_states",
            "READY": "FIT",
            "_get_max_session_len": "_longest",
        },
    ),
    ("lmdeploy+pair", "0.18.0", {"MIGRATION_READY": "CAN_MIGRATE"}),
    ("transformers", "5.23.0", {"logit_processor": "processor_of_logits", "sliding_window": "window"}),
)


@pytest.fixture
def renamed_checkout(tmp_path):
    """Makes a checkout of a release in which names are others."""

    def make(engine, release, names):
        root = cache_folder() / f"{engine}-{release}"
        if not root.is_dir():
            pytest.skip(f"{engine} {release} is not in the cache")
        source = tmp_path / ("src" if engine == "transformers" else ".")
        old = re.compile(rf"\b({'|'.join(names)})\b")
        for file in root.rglob("*"):
            if not file.is_file():
                continue
            target = source / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".py" and old.search(text := file.read_text("utf-8")):
                target.write_text(old.sub(lambda found: names[found[0]], text), "utf-8")
            else:
                target.symlink_to(file)
        return tmp_path

    return make


@pytest.mark.parametrize(("name", "release", "names"), RENAMES)
def test_renamed_names_are_told_together(name, release, names, renamed_checkout):
    checkout = renamed_checkout(name.partition("+")[0], release, names)
    with pytest.raises(UnusableImplementation) as refused:
        resolve(name, checkout=str(checkout))
    message = str(refused.value)
    assert f"taken for {release}" in message and all(name in message for name in names), message


def test_names_that_only_one_way_has_refuse_no_other_way(renamed_checkout):
    checkout = renamed_checkout("sglang", "0.5.23", {"prefetch_threshold": "least_prefetch"})
    resolve("sglang", checkout=str(checkout)).close()


def test_a_setting_that_a_tree_does_not_read_makes_a_check_incomplete(renamed_checkout):
    setting = "SGLANG_SWA_EVICTION_INTERVAL"
    system = resolve("sglang", checkout=str(renamed_checkout("sglang", "0.5.23", {setting: "SGLANG_EVERY"})))
    assert setting not in system.capabilities.settings
    assert [setting in doubt for doubt in system.doubts] == [True]
    system.close()


def test_a_table_of_records_that_a_tree_lacks_makes_a_check_incomplete(renamed_checkout):
    checkout = renamed_checkout("vllm", "0.33.0", {"_reqs_need_recv": "_reqs_to_pull"})
    system = resolve("vllm+pair", checkout=str(checkout))
    assert ["_reqs_need_recv" in doubt for doubt in system.doubts] == [True]
    system.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_sketch_has_the_names_that_the_adapter_uses(engine):
    """Else `python -m ci.sketches` was not run after the adapter had changed."""
    sketch = used_names.read(engine)
    try:
        root = resolve(f"{engine}=={sketch.releases[-1]}").root
    except UnusableImplementation as error:
        pytest.skip(str(error))
    ways_in_sketch = {used.name: used.ways for used in sketch.names}
    now = names_given_to_releases(engine, names_with_defaults(root / file for file in sketch.files))
    assert {name: now.get(name) for name in ways_in_sketch} == ways_in_sketch
    root = cache_folder() / f"{engine}-{releases(engine)[-1]}"
    if not root.is_dir():
        pytest.skip(f"the newest release of {engine} is not in the cache")
    words = used_names.words(root / file for file in used_names.read(engine).files)
    given = {name for name, ways in now.items() if ways}
    assert (given & words) - ways_in_sketch.keys() == set()


@at_night
@pytest.mark.parametrize("engine", ENGINES)
def test_no_release_has_lost_a_name_of_one_nearby(engine):
    """A tree between two releases lacks names of one of them and has renamed none."""
    order = releases(engine)
    for release in order:
        root = cache_folder() / f"{engine}-{release}"
        for near in neighbours(engine, release) if root.is_dir() else ():
            assert used_names.not_given(engine, root, Nearest(near, 0)) == () or near == order[-1]


def test_a_name_is_lost_where_the_releases_nearby_have_it(tmp_path, monkeypatch):
    monkeypatch.setattr(used_names, "FOLDER", tmp_path)
    monkeypatch.setattr(used_names, "neighbours", lambda *_: ("1.0", "3.0"))
    used_names.read.cache_clear()
    names = (
        UsedName("always", 0b111, frozenset({"plain"})),
        UsedName("new", 0b110, frozenset({"plain", "tiers"})),
        UsedName("read", 0b111, frozenset()),
    )
    used_names.write("engine", NameSketch(("1.0", "2.0", "3.0"), ("a.py", "b.py"), names))
    assert used_names.read("engine").names == names
    (tmp_path / "a.py").write_text("other = 1\n")
    assert [lost.name for lost in lost_names("engine", tmp_path, "1.0")] == ["always", "read"]
    assert [lost.name for lost in lost_names("engine", tmp_path, "2.0")] == ["always", "new", "read"]
    near = Nearest("2.0", 7)
    [missing] = used_names.not_given("engine", tmp_path, near)
    assert missing.what == "there is no always"  # the tree may be older than the new name
    assert used_names.not_given("engine", tmp_path, near, renamed=["Class.always"]) == ()
    assert used_names.not_given("engine", tmp_path, Nearest("1.0", 301)) == ()
    assert used_names.also_lost("engine", tmp_path, "1.0", missing.what).endswith("uses: read")
    (tmp_path / "b.py").write_text("always = read = new\n")
    assert [*lost_names("engine", tmp_path, "2.0")] == [*lost_names("engine", tmp_path, "4.0")] == []
    used_names.read.cache_clear()


def test_a_word_of_ours_in_a_comment_of_a_release_is_nothing_that_a_tree_reads(renamed_checkout):
    """0.5.17 has "config namespaces" in a comment; the adapter sets namespaces by fields of requests."""
    checkout = renamed_checkout("sglang", "0.5.17", {"namespaces": "parts"})
    system = resolve("sglang", checkout=str(checkout))
    assert [doubt for doubt in system.doubts if "does not read" in doubt] == []
    system.close()


def test_an_attribute_that_the_adapter_did_not_set_is_its_own_omission(tmp_path):
    file = tmp_path / "of_release.py"
    file.write_text(
        "class Loop:\n    def run(self): return self.queue\n"
    )
    scope = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    loop = bare(scope["Loop"], other=1)
    assert is_bare(loop) and loop.other == 1

    class Driver:
        name = "engine"
        capabilities = None
        close = None

        def view(self):
            return loop.run()

    with pytest.raises(
        UnusableImplementation, match=r"no attribute 'queue' at of_release\.py:2, which asks"
    ):
        Guarded(Driver(), tmp_path, "Engine", "modules.py", "driver.py").view()
