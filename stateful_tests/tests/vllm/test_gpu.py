"""impl.vllm.triton and Triton itself leave the same memory after each kernel of model runner V2."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch

from impl.process.remote_system import Limits
from impl.vllm.system import VLLMSystem
from reference.blocks.presets import ENGINE_PRESETS
from reference.commands import Mode
from stateful_tests.check import check_plans
from stateful_tests.check.run_driver import drive
from stateful_tests.check.run_batches import RunBatch, failure_text, with_stated_sizes

WORKER = "stateful_tests.tests.support.triton_beside"
# how the release breaks by itself
KNOWN = re.compile(
    r"AssertionError: assert num_new_tokens ==|illegal memory access in _post_update"
)
PRESETS = [
    name
    for name, config in ENGINE_PRESETS.items()
    if not config.connects and not config.encodes
]
COMPILING = Limits(timeout_s=300)  # Triton compiles kernels within a command
RUNS = 6 if torch.cuda.is_available() else 1  # of each preset; Triton's interpreter is slow


class LogFollower(VLLMSystem):
    """vLLM whose worker launches each kernel by Triton too."""

    launch = subprocess.Popen  # Triton is loaded anew: whether it interprets is settled by then
    counts = ""

    def command_line(self):
        options = ["--async"] if self.overlap else []
        return [sys.executable, "-m", WORKER, str(self.root), str(self.counts), *options]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("overlap", [False, True], ids=["+v2", "+async+v2"])
def test_kernels_leave_what_triton_leaves(overlap, vllm, tmp_path):
    vllm("0.33.0+v2")  # else it is skipped
    system = LogFollower("0.33.0", overlap=overlap, v2=True, limits=COMPILING)
    system.counts = tmp_path / "counts"
    plan = check_plans.plan("smoke", presets=PRESETS)
    commands = 0
    for preset in PRESETS:
        batch = RunBatch(with_stated_sizes(check_plans.CLIENTS, preset, Mode.FAITHFUL), range(RUNS))
        for done, found in drive(system, plan, batch).runs:
            commands += done
            texts = [text for result in found if (text := failure_text(result))]
            assert [text for text in texts if not KNOWN.match(text)] == []
    system.close()
    launches = json.loads(system.counts.read_text())
    assert len(launches) == 13 and min(launches.values()) > commands // 25
