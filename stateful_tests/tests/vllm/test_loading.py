"""Where the files of a vLLM come from, and what cannot be used: one line each, without a network."""

import os
import shutil
import subprocess
import types
import zipfile
from functools import partial

import numpy
import pytest

import impl.loading.fetch
from impl.loading import wheel_parts
from impl.adapter import UnusableImplementation
from impl.vllm import bare_scheduler, fetch
from impl.vllm.bare_scheduler import results
from impl.vllm.engine import Stamps
from impl.vllm.api import facts
from impl.vllm.modules import RUNNER, RUNNER_V2, STATES
from impl.self_scheduling.toy_model import greedy
from reference.blocks.commands import ResetConnector, Schedule
from reference.blocks.presets import engine_preset
from reference.blocks.facts import chain
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.night import NIGHT


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def unusable(action, *arguments, **named) -> str:
    with pytest.raises(UnusableImplementation) as raised:
        action(*arguments, **named)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def wheel(path, *names):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "x = 1\n")
    return path


def serve_wheel(monkeypatch, path):
    """Have the index know one wheel, and the server give it by ranges."""
    report = '{"install": [{"download_info": {"url": "https://index/w.whl"}}]}'
    monkeypatch.setattr(
        "subprocess.run", lambda c, **_: subprocess.CompletedProcess(c, 0, report, "")
    )
    monkeypatch.setattr(wheel_parts, "_Ranges", lambda _: path.open("rb", buffering=0))


def test_only_the_python_files_that_are_needed_are_kept(monkeypatch, tmp_path, cache, capsys):
    pool = "vllm/v1/core/block_pool.py"
    others = ("vllm/v1/core/x.so", "vllm/models/big.py", "../vllm/v1/core/a.py")
    names = (RUNNER, pool, STATES[0], *others)
    serve_wheel(monkeypatch, wheel(tmp_path / "w.whl", *names))
    root = fetch.release_root("0.33.0")
    kept = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert kept == {RUNNER, pool, STATES[0]}
    said = f"kvspec: vllm==0.33.0: downloads 0.0 MB of a wheel of 0 MB into {cache}\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr("subprocess.run", None)  # the second time pip is not called
    assert fetch.release_root("0.33.0") == root == cache / "vllm-0.33.0"


def test_model_runner_v2_is_added_to_a_folder_from_before_it_was_fetched(monkeypatch, tmp_path):
    serve_wheel(monkeypatch, wheel(tmp_path / "old.whl", RUNNER))
    root = fetch.release_root("0.33.0")
    serve_wheel(monkeypatch, wheel(tmp_path / "w.whl", RUNNER, *RUNNER_V2))
    assert fetch.release_root("0.33.0", v2=True) == root
    assert all((root / file).is_file() for file in RUNNER_V2)
    assert {p.name for p in root.parent.iterdir()} == {root.name, f"{root.name}.sha256"}
    assert fetch.release_root("0.33.0") == root


def test_the_copies_of_states_are_added_while_others_use_the_folder(monkeypatch, tmp_path, cache):
    serve_wheel(monkeypatch, wheel(tmp_path / "old.whl", RUNNER))
    root = fetch.release_root("0.26.0")
    kept = root / RUNNER
    kept.write_text("x = 2\n")
    impl.loading.fetch.seal(root)
    serve_wheel(monkeypatch, wheel(tmp_path / "w.whl", RUNNER, *STATES))
    replaced = os.replace
    seen = []

    def before_the_seal(*names):
        seen.append(all((root / file).is_file() for file in STATES))
        replaced(*names)

    monkeypatch.setattr("os.replace", before_the_seal)
    impl.loading.fetch.complete(root, partial(fetch._unpack_wheel, "vllm==0.26.0"))
    assert seen[-1]
    assert not any(seen[:-1])
    assert kept.read_text() == "x = 2\n"
    assert fetch.release_root("0.26.0") == root
    (root / STATES[0]).write_text("x = 3\n")
    assert "were changed" in unusable(fetch.release_root, "0.26.0")


def test_a_wheel_without_a_runner_is_refused(monkeypatch, tmp_path, cache):
    serve_wheel(monkeypatch, wheel(tmp_path / "w.whl", "vllm/v1/core/block_pool.py"))
    assert RUNNER in unusable(fetch.release_root, "0.33.0")
    assert not (cache / "vllm-0.33.0").exists()


def test_an_unknown_release_is_one_line(monkeypatch):
    output = "ERROR: No matching distribution found for vllm==9.9"
    monkeypatch.setattr(
        "subprocess.run", lambda c, **_: subprocess.CompletedProcess(c, 1, "", output)
    )
    assert "no such release" in unusable(fetch.release_root, "9.9")
    assert "not a version number" in unusable(fetch.release_root, "newest")


def test_a_checkout_names_its_missing_parts(tmp_path):
    assert "is no folder" in unusable(resolve, "vllm", checkout=str(tmp_path / "none"))
    assert "has no vllm/v1/core/sched/scheduler.py" in unusable(
        resolve, "vllm", checkout=str(tmp_path)
    )
    assert "after a release goes +async" in unusable(resolve, "vllm==0.33.0+overlap")
    assert "--vllm-path" in unusable(resolve, "vllm")


POOL = "vllm/v1/core/block_pool.py"
QUEUE = "vllm/v1/core/kv_cache_utils.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
SESSIONS = "    def has_requests(self) -> bool:\n"


@pytest.fixture
def changed(vllm, monkeypatch, tmp_path):
    """Makes a copy of 0.33.0 in which a file says something else."""
    monkeypatch.delenv("KVSPEC_CACHE")
    root = vllm("0.33.0").root

    def change(file, old, new):
        target = tmp_path / "checkout"
        shutil.copytree(root, target, copy_function=os.symlink)
        text = (root / file).read_text(encoding="utf-8")
        assert old in text
        (target / file).unlink()
        (target / file).write_text(text.replace(old, new), encoding="utf-8")
        return str(target)

    return change


@pytest.mark.parametrize(
    ("file", "old", "new", "reported"),
    [
        (QUEUE, "def get_all_free_blocks", "def list_free", f"{QUEUE}: FreeKVCacheBlockQueue has no get_all"),
        (SCHEDULER, "class Scheduler(", "class Planner(", f"{SCHEDULER}: there is no Scheduler"),
        (SCHEDULER, "def add_request(self, request: Request)", "def add_request(self, request, *, lane)",
         f"{SCHEDULER}: Scheduler.add_request wants a lane, which the adapter does not give"),
        (RUNNER, "def _update_states(", "def _sync(", f"{RUNNER}: GPUModelRunner has no _update_states"),
        (POOL, "cached_block_hashes_by_block", "further_hashes", f"{POOL}: BlockPool has no cached_block_h"),
    ],
)  # fmt: skip
def test_a_newer_checkout_names_its_missing_parts(changed, file, old, new, reported):
    line = unusable(resolve, "vllm", checkout=changed(file, old, new))
    assert reported in line and "'A new release of vLLM'" in line


@pytest.mark.parametrize(
    ("new", "reported"),
    [
        ("        from vllm.models import tables\n        assert tables.count(self) + 1\n",
         "which uses a module that is not loaded (modules.py)"),
        ("        self.structured_output_manager.validate_tokens(self)\n", "the adapter's stand-in"),
        ("        assert self.vllm_config.new_config.size > 0\n", "has no new_config at vllm/v1/core/sched"),
    ],
)  # fmt: skip
def test_a_misfit_during_a_run_is_reported_as_the_adapters(changed, new, reported):
    system = resolve("vllm", checkout=changed(SCHEDULER, SESSIONS, SESSIONS + new))
    system.reset(engine_preset("full"))
    assert reported in unusable(system.apply, Schedule())
    system.close()


def test_a_checkout_without_a_version_is_driven_by_its_files(vllm, monkeypatch):
    monkeypatch.delenv("KVSPEC_CACHE")
    versions = ("0.11.0", "0.23.0", "0.28.0", "0.33.0") if NIGHT else ("0.11.0", "0.28.0")
    kept = [facts(vllm(version).root).near.release for version in versions]
    assert kept == [*versions]


def test_a_reset_of_host_memory_that_fails_is_not_taken_as_done(changed):
    path = changed(SCHEDULER, "if self.connector.reset_cache() is False:", "if True:")
    system = resolve("vllm+offload", checkout=path)
    system.reset(engine_preset("host"))
    assert "returns False" in system.apply(ResetConnector()).error
    system.close()


def test_an_error_of_the_release_is_its_own(changed):
    new = SESSIONS + "        assert self.max_model_len < 0\n"
    system = resolve("vllm", checkout=changed(SCHEDULER, SESSIONS, new))
    system.reset(engine_preset("full"))
    assert system.apply(Schedule()).error.startswith("AssertionError")
    system.close()


def test_a_hash_tells_its_tokens():
    stamps = Stamps()
    empty = stamps("seed")
    first = stamps((empty, (5, 6), None))
    second = stamps((first, (7, 8), None))
    a = chain(0, 5)
    b = chain(chain(0, 5), 6)
    c = chain(b, 7)
    assert stamps.of_block(first, 2) == (a, b)
    assert stamps.of_block(second, 4) == (a, b, c, chain(c, 8))
    assert stamps.of_block(stamps((first, (7,), None)), 2) == (c,)  # a part of a block
    # further keys make another hash of the same tokens
    assert stamps((first, (7, 8), (None, 9))) != second
    assert greedy(a) != greedy(b)


def test_sampled_tokens_are_arrays_where_a_release_has_them_so(monkeypatch):
    """Between 0.11 and 0.12 the scheduler calls `tolist` on them."""

    class ModelRunnerOutput:
        __annotations__ = {"sampled_token_ids": "list[np.ndarray]"}

        def __init__(self, sampled_token_ids):
            self.sampled = sampled_token_ids

    module = types.SimpleNamespace(ModelRunnerOutput=ModelRunnerOutput)
    monkeypatch.setattr(
        bare_scheduler.importlib, "import_module", lambda n: {"numpy": numpy}.get(n, module)
    )
    assert [tokens.tolist() for tokens in results({"r1": [5], "r2": []}).sampled] == [[5], []]
