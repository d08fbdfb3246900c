"""An invented release that has renamed what the adapter uses: lines of RENAMED are all that it takes.

Run as a script this is its worker.
"""

import re
import runpy
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from ci.export import engine_test as export
from impl.adapter import UnusableImplementation
from impl.process import run_test
from impl.vllm import api
from impl.vllm.system import VLLMSystem
from stateful_tests.lockstep.replays import replay
from stateful_tests.traces.trace_files import load

TRACE = Path(__file__).parents[3] / "fixtures/releases/vllm-0.23.0"
TRACE /= "a_turn_longer_than_the_model_fails_an_assertion.json"
NAMES = {
    "KVCacheBlock.ref_cnt": "holders_count",
    "SingleTypeKVCacheManager.num_cached_block": "cached_blocks_of",
    "GPUModelRunner._update_states": "_update_batch",
    "CachedRequestData.resumed_req_ids": "resumed_ids",
}


class RenamedRelease(VLLMSystem):
    """Runs this file as its worker, so that RENAMED is set there too."""

    def command_line(self) -> list[str]:
        python, _, _, *arguments = super().command_line()
        return [python, "-m", __name__, *arguments]


@pytest.fixture
def root(vllm, tmp_path):
    """A copy of vLLM 0.33.0 in which every name of NAMES is replaced."""
    folder = shutil.copytree(vllm("0.33.0").root, tmp_path / "checkout")
    words = {name.rpartition(".")[2]: new for name, new in NAMES.items()}
    old = re.compile(rf"\b({'|'.join(words)})\b")
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(old.sub(lambda found: words[found[1]], text), encoding="utf-8")
    return folder


@pytest.fixture
def renamed(root, monkeypatch):
    """The system of that copy, with the names in RENAMED."""
    monkeypatch.setattr(api, "RENAMED", NAMES)
    with closing(RenamedRelease(path=root)) as system:
        yield system


def test_a_release_with_unknown_names_is_refused_with_every_one_of_them(root):
    with pytest.raises(UnusableImplementation) as caught:
        VLLMSystem(path=root)
    for name in NAMES:
        assert " has no ".join(name.split(".")) in str(caught.value)


def test_a_trace_replays_with_renamed_alone(renamed):
    trace = load(TRACE)
    run = replay(renamed, trace)
    assert run.violation is not None and run.violation.clause == trace.clause


def test_an_exported_test_fails_with_renamed_alone(renamed, tmp_path):
    trace = load(TRACE)
    file = tmp_path / "test_x.py"
    file.write_text(export.unit_test(trace, "x.json", renamed))
    [(code, output)] = run_test.outcomes((renamed.root, "", [file]), hook=export.hook(trace))
    assert code == run_test.FAILS, output


if __name__ == "__main__":
    api.RENAMED.update(NAMES)
    runpy.run_module("impl.vllm.driver", run_name="__main__")
