"""An invented release that has renamed what the adapter uses: a class with `renamed` is all that it takes.

Run as a script this is its worker.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest

from ci.export import unit_test as export
from impl.adapter import UnusableImplementation
from impl.process import run_test
from impl.sglang.parts.fetch import release_root
from impl.sglang.process import worker
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases.catalogue import TABLE, detect
from impl.sglang.server.hooks import targets
from impl.sglang.server.whole_scheduler import replacements
from stateful_tests.lockstep.replays import replay
from stateful_tests.traces.trace_files import load

FIXTURES = Path(__file__).parents[3] / "fixtures/releases"
RENAMED = {
    "Req.prefix_len": "matched_len",
    "Req.extend_end": "chunk_end",
    "ScheduleBatch.prepare_for_extend": "prepare_for_prefill",
    "ScheduleBatch.decoding_reqs": "decoding_entries",
    "release_kv_cache": "give_back_kv_cache",
    "SessionController": "SessionRegistry",
    "Scheduler._add_request_to_queue": "_enqueue",
    "SchedulerRequestReceiver._pull_raw_reqs": "_pull",
    "UnifiedRadixCache.path_device_indices": "slots_up_to",
}


class Invented(TABLE["0.5.23"]):
    """As 0.5.23, which it takes the place of: what runs an exported test knows no other version."""

    renamed = RENAMED


class OfInvented(SGLangSystem):
    def command_line(self) -> list[str]:
        return [sys.executable, "-m", __name__, *super().command_line()[3:]]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The files of 0.5.23 with other names; skips where it is unavailable."""
    try:
        release_folder = release_root("0.5.23")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("renamed") / "checkout"
    shutil.copytree(release_folder, folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    words = {name.rpartition(".")[2]: new for name, new in RENAMED.items()}
    old = re.compile(rf"\b({'|'.join(words)})\b")
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(old.sub(lambda found: words[found[1]], text), encoding="utf-8")
    return folder


def test_all_renamed_names_are_reported_together(root):
    with pytest.raises(UnusableImplementation) as error:
        detect(root)
    for name in RENAMED:
        kind, _, member = name.rpartition(".")
        lacks = f"{kind} has no {member}" if kind else f"there is no {member}"
        assert lacks in str(error.value), name


def test_a_class_that_says_the_new_names_is_enough(root, monkeypatch, tmp_path):
    monkeypatch.setitem(TABLE, "0.5.23", Invented)
    assert detect(root).release is Invented
    system = OfInvented(path=root, calls=True)
    trace = load(FIXTURES / "sglang-0.5.15/a_slot_keeps_a_token_that_nobody_computed.json")
    run = replay(system, trace)
    assert run.violation is not None and run.violation.clause == trace.clause
    text = export.unit_test(trace, "x.json", system)
    system.close()
    file = tmp_path / "test_x.py"
    file.write_text(text)
    [(code, output)] = run_test.outcomes((root, "0.5.23", [file]))
    assert code == run_test.FAILS, output


def test_hooks_and_stand_ins_go_where_the_functions_are():
    places = dict(map(reversed, targets(Invented())))
    assert places["release"] == "sglang.srt.mem_cache.common.give_back_kv_cache"
    assert places["queue"] == "sglang.srt.managers.scheduler.Scheduler._enqueue"
    assert places["open_session"] == "sglang.srt.session.session_controller.SessionRegistry.open"
    receiver = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
    assert f"{receiver}._pull" in dict(replacements(Invented()))


if __name__ == "__main__":
    TABLE["0.5.23"] = Invented
    sys.exit(worker.main(sys.argv[1:]))
