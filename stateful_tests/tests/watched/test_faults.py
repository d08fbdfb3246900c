"""Faults put into a copy of a release's scheduler: each is caught, and by the judges that are named here.

Takes minutes and the server environment, so it runs at night (KVSPEC_EVERY_RELEASE) alone.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from impl.adapter import UnusableImplementation
from impl.sglang.server import environment
from impl.sglang.server.runs import WholeScheduler
from stateful_tests.watched import population, serving

RELEASE, RUNS = "0.5.23", 60


class Fault(NamedTuple):
    """file: under sglang/srt, where old is replaced by new. sees: the judge that must; fixed: fields of all
    servers; impatient: clients that do not wait."""

    name: str
    file: str
    old: str
    new: str
    sees: str
    fixed: dict[str, int | bool] = {}  # noqa: RUF012
    impatient: bool = False


SESSION, CONTROLLER = "session/streaming_session.py", "session/session_controller.py"
COMMON, ALLOCATION = "mem_cache/common.py", "mem_cache/allocation.py"
FAULTS = (
    Fault("finish keeps the tail", SESSION,
          "        self._trim_overshoot(req, finished_len)\n", "", "log", {"draft": 4}),
    Fault("a lock that a finished request keeps", COMMON,
          "    tree_cache.unlock(req.lock)\n", "", "log", {"tree": True}),
    Fault("a lock that a closed session keeps", SESSION,
          "        self.cache.unlock(slot.lock)\n", "", "log", {"tree": True}),
    Fault("a retract keeps the tail", SESSION,
          "        self._trim_overshoot(req, finished_len)\n",
          "        if req.finished_reason is not None:\n"
          "            self._trim_overshoot(req, finished_len)\n", "log", {"draft": 4, "tokens": 64}),
    Fault("a restore that frees no tail", SESSION,
          "        self._free_kv_aligned(kv, prefix_len, kv.kv_allocated_len)\n", "", "log",
          {"tokens": 64, "page_size": 1, "tree": False}),
    Fault("a close that does not wait", CONTROLLER,
          "            has_unfinished_request = True\n        elif", "            pass\n        elif", "log",
          impatient=True),
    Fault("a closed session keeps its row", SESSION,
          "            self.cache.req_to_token_pool.free(slot)\n", "", "log"),
    Fault("overshoot that no release frees", COMMON,
          "    if start_p < end_p:\n", "    if False:\n", "server", {"draft": 4}),
    Fault("a sweep that goes two tokens too far", "mem_cache/base_prefix_cache.py",
          "            pre_len,\n            sliding", "            pre_len + 2,\n            sliding",
          "log", {"window": 4, "page_size": 1}),
    Fault("a history without the last output", CONTROLLER,
          "sampling_params.max_new_tokens]\n\n        input_ids = last_req.origin_input_ids\n",
          "sampling_params.max_new_tokens][:-1]\n\n        input_ids = last_req.origin_input_ids\n", "log"),
    Fault("decode writes its row one position late", ALLOCATION,
          "        locs = seq_lens_gpu.clone()\n", "        locs = seq_lens_gpu + 1\n", "reads",
          {"draft": 0}),
    Fault("an aborted turn whose KV stays the session's", SESSION,
          "        if isinstance(req.finished_reason, FINISH_ABORT):\n", "        if False:\n", "log"),
    Fault("a queue that keeps its aborted requests' mark", "managers/scheduler.py",
          "            self._release_aborted_request(req)\n            self.beam",
          "            self.beam", "log"),
)  # fmt: skip


def copy_of(package: Path, fault: Fault, folder: Path) -> None:
    """A package `sglang` of links, but for the one file that has the fault."""
    at, parts = folder / "sglang", ("srt", *fault.file.split("/"))
    for part in parts:
        at.mkdir()
        for each in package.iterdir():
            if each.name not in (part, "__pycache__"):
                (at / each.name).symlink_to(each)
        at, package = at / part, package / part
    text = package.read_text()
    assert text.count(fault.old) == 1, f"{fault.name}: {text.count(fault.old)} places in {fault.file}"
    at.write_text(text.replace(fault.old, fault.new))


@pytest.mark.skipif(not os.environ.get("KVSPEC_EVERY_RELEASE"), reason="takes minutes: at night")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_fault_in_the_scheduler_is_caught(fault: Fault, tmp_path: Path) -> None:
    try:
        python = environment.python_of(RELEASE)
    except UnusableImplementation as error:
        pytest.skip(f"no server environment: {error}")
    copy_of(next(python.parents[1].glob("lib/python*/site-packages/sglang")), fault, tmp_path)
    runner = WholeScheduler(python, tmp_path)
    try:
        for number in range(RUNS):
            rng = random.Random(f"{fault.name} {number}")
            config = population.configuration(rng, **fault.fixed)
            clients = population.clients(rng, config, count=12, impatient=fault.impatient)
            judged = serving.serve(runner, serving.ServedRun(RELEASE, config, clients, number))
            if fault.sees in {each.judge for each in judged.new}:
                break  # a run that a busy machine has cut short is seen by another judge, and says nothing
    finally:
        runner.close()
    assert fault.sees in {each.judge for each in judged.new}, judged.findings
