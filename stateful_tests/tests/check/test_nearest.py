"""The release that a checkout is nearest to: impl/loading/nearest.py and its sketches."""

import pytest

from ci.sketches import driven_files
from impl import engines
from impl.loading import nearest
from impl.system_spec import ENGINES
from impl.loading.fetch import cache_folder
from stateful_tests.check.trees.way_map import way_map
from stateful_tests.lockstep.known_faults import releases


@pytest.fixture
def two_releases(tmp_path, monkeypatch):
    """A sketch of releases 1.0 and 2.0 of an engine whose package is one file."""
    monkeypatch.setattr(nearest, "FOLDER", tmp_path)
    nearest.read.cache_clear()
    texts = {"1.0": "shared = 1\nfirst = 1\nalso_first = 1\n", "2.0": "shared = 1\nsecond = 1\n"}
    lines = {}
    for number, (release, text) in enumerate(texts.items()):
        (tmp_path / release).mkdir()
        (tmp_path / release / "a.py").write_text(text)
        for line in nearest.checksums([tmp_path / release / "a.py"]):
            lines[line] = lines.get(line, 0) | 1 << number
    sketch = nearest.Sketch(tuple(texts), ("a.py",), lines)
    (tmp_path / "engine.txt").write_text(nearest.sketch_text(sketch))
    yield tmp_path
    nearest.read.cache_clear()


def test_the_nearest_release_has_the_fewest_differing_lines(two_releases):
    checkout = two_releases / "checkout"
    checkout.mkdir()
    (checkout / "a.py").write_text("shared = 1\n  second = 1\n# a comment\nx = 1\nof_its_own = 1\n")
    assert nearest.nearest("engine", checkout) == ("2.0", 1)
    assert nearest.distances("engine", checkout) == {"1.0": 4, "2.0": 1}


def test_a_sketch_is_read_as_it_was_written(two_releases):
    sketch = nearest.read("engine")
    assert nearest.sketch_text(sketch) == (two_releases / "engine.txt").read_text()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_driven_release_is_in_the_sketch(engine):
    assert nearest.read(engine).releases == tuple(releases(engine))


@pytest.mark.parametrize("engine", ENGINES)
def test_each_release_is_nearest_to_itself(engine):
    cached = [v for v in releases(engine) if (cache_folder() / f"{engine}-{v}").is_dir()]
    if not cached:
        pytest.skip(f"no release of {engine} is in the cache")
    for release in (cached[0], cached[-1]):
        root = cache_folder() / f"{engine}-{release}"
        engines.engine(engine).complete(release, root)  # it may be from before
        assert {*driven_files(engines.engine(engine), root)} <= {*nearest.read(engine).files}, release
        assert nearest.distances(engine, root)[release] == 0, release


@pytest.mark.parametrize(
    "file",
    [
        "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
        "distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py",
        "v1/kv_offload/cpu/manager.py",
        "v1/worker/gpu/states.py",
    ],
)
def test_a_line_added_to_a_file_of_another_way_is_a_distance_of_one(file, tmp_path):
    newest = nearest.read("vllm").releases[-1]
    root = cache_folder() / f"vllm-{newest}"
    if not (root / "vllm" / file).is_file():
        pytest.skip(f"vLLM {newest} is not in the cache, or without {file}")
    for each in nearest.read("vllm").files:
        if (root / each).is_file():
            copy = tmp_path / each
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(root / each)
    changed = (root / "vllm" / file).read_text(encoding="utf-8") + "a_line_of_the_fork = 1\n"
    (tmp_path / "vllm" / file).unlink()
    (tmp_path / "vllm" / file).write_text(changed, encoding="utf-8")
    assert nearest.nearest("vllm", tmp_path) == (newest, 1)


OTHER_REASONS = "it changes for other reasons"
# Files that runs call and no sketch has: beginnings of their names, with the reason.
UNSKETCHED = {
    "sglang": {
        "sglang/srt/utils/poll_timer.py": "how long a wait lasts, which a trace decides",
        "sglang/srt/environ.py": OTHER_REASONS,
        "sglang/srt/mem_cache/layout/": OTHER_REASONS,
        "sglang/srt/mem_cache/ple_state_pool.py": OTHER_REASONS,
        "sglang/srt/speculative/spec_utils.py": OTHER_REASONS,
        "sglang/srt/utils/common.py": OTHER_REASONS,
    },
    "vllm": {
        "vllm/distributed/kv_transfer/kv_connector/utils.py": OTHER_REASONS,
        "vllm/v1/engine/core.py": "of which `_reset_caches` alone runs",
        "vllm/v1/worker/gpu_model_runner.py": "a few functions are cut out of it",
        "vllm/v1/worker/mamba_utils.py": "a few functions are cut out of it",
        "vllm/v1/spec_decode/": "a few functions are cut out of it",
        "vllm/v1/worker/gpu/spec_decode/": "a few functions are cut out of it",
        "vllm/model_executor/": OTHER_REASONS,
        "vllm/utils/": OTHER_REASONS,
        "vllm/v1/metrics/": OTHER_REASONS,
        "vllm/v1/simple_kv_offload/metrics.py": OTHER_REASONS,
        "vllm/v1/simple_kv_offload/sizing.py": "how many blocks the bytes of host memory are",
    },
    "lmdeploy": {
        "lmdeploy/messages.py": OTHER_REASONS,
        "lmdeploy/pytorch/": "a few lines each, which the scheduler imports",
    },
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_driven_file_is_in_the_sketch_or_excused(engine):
    """Else a fork's change there is "0 lines away": so it was of the queues of SGLang's decode server."""
    left = {*way_map(engine).files} - {*nearest.read(engine).files}
    accepted = UNSKETCHED.get(engine, {})
    assert {file for file in left if not file.startswith(tuple(accepted))} == set()
    assert [start for start in accepted if not any(file.startswith(start) for file in left)] == []
