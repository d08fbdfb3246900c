"""An invented release that has renamed what the adapter uses: lines of RENAMED are all that it takes.

Run as a script this is its worker.
"""

import re
import runpy
import shutil
import sys
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


class OfInvented(VLLMSystem):
    def command_line(self) -> list[str]:
        return [sys.executable, "-m", __name__, *super().command_line()[3:]]


@pytest.fixture
def root(vllm, tmp_path):
    """The files of 0.33.0 with other names."""
    folder = shutil.copytree(vllm("0.33.0").root, tmp_path / "checkout")
    words = {name.rpartition(".")[2]: new for name, new in NAMES.items()}
    old = re.compile(rf"\b({'|'.join(words)})\b")
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(old.sub(lambda found: words[found[1]], text), encoding="utf-8")
    return folder


def test_all_renamed_names_are_reported_together_and_table_lines_suffice(root, monkeypatch, tmp_path):
    with pytest.raises(UnusableImplementation) as caught:
        VLLMSystem(path=root)
    for name in NAMES:
        assert " has no ".join(name.split(".")) in str(caught.value)
    monkeypatch.setattr(api, "RENAMED", NAMES)
    system = OfInvented(path=root)
    run, trace = replay(system, load(TRACE)), load(TRACE)
    assert run.violation is not None and run.violation.clause == trace.clause
    text = export.unit_test(trace, "x.json", system)
    system.close()
    (file := tmp_path / "test_x.py").write_text(text)
    [(code, output)] = run_test.outcomes((root, "", [file]), hook=export.hook(trace))
    assert code == run_test.FAILS, output


if __name__ == "__main__":
    api.RENAMED.update(NAMES)
    runpy.run_module("impl.vllm.driver", run_name="__main__")
