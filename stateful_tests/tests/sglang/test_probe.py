"""A checkout that differs from every release: one line reports what is missing, before anything is driven.

Each mutant is a copy of 0.5.23 with one change.
"""

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from impl.adapter import UnusableImplementation
from impl.sglang import SGLangSystem
from impl.sglang.parts.fetch import release_root
from impl.sglang.releases.catalogue import TABLE, detect
from reference.commands import Admit, Broken, Chunk, Extend, Submit
from reference.geometry import preset
from stateful_tests.tests.support import release_faults
from stateful_tests.tests.support.night import some_at_night

BATCH = "managers/schedule_batch.py"
COMMON = "mem_cache/common.py"
SESSION = "session/session_controller.py"
SLOTS = "session/streaming_session.py"
TREE = "mem_cache/unified_radix_cache.py"
ALLOCATION = "mem_cache/allocation.py"


class Mutant(NamedTuple):
    """One change: `old` becomes `new` in a file, or in all where none is named; and what is reported."""

    file: str
    old: str
    new: str
    reported: str


REFUSED = {
    "a method renamed": Mutant(BATCH, "def prepare_for_extend(", "def prepare_for_prefill(",
        f"{BATCH}: ScheduleBatch has no prepare_for_extend"),
    "a function renamed": Mutant(COMMON, "release_kv_cache", "give_back_kv_cache",
        f"{COMMON}: there is no release_kv_cache"),
    "a field renamed": Mutant(BATCH, "kv_committed_len", "kv_done_len",
        f"{BATCH}: ReqKvInfo has no kv_committed_len"),
    "a kernel that a stand-in takes the place of": Mutant(ALLOCATION, "assign_req_to_token_pool_func",
        "assign_rows", f"{ALLOCATION}: there is no assign_req_to_token_pool_func"),
    "a field of a request renamed": Mutant(BATCH, "extend_end", "chunk_end",
        f"{BATCH}: Req has no extend_end"),
    "a class renamed": Mutant(SESSION, "SessionController", "SessionRegistry",
        f"{SESSION}: there is no SessionController"),
    "a slot's field renamed": Mutant(SLOTS, "    kv: ReqKvInfo", "    record: ReqKvInfo",
        f"{SLOTS}: SessionSlot has no kv"),
    "a new required argument": Mutant(COMMON, "*, checkpoint: bool)", "*, checkpoint: bool, why: str)",
        f"{COMMON}: release_kv_cache wants a why, which the adapter does not give"),
    "a new required argument of a method": Mutant(SESSION, "def maybe_reap(self, now: float,",
        "def maybe_reap(self, now: float, limit: int,",
        f"{SESSION}: SessionController.maybe_reap wants a limit, which the adapter does not give"),
    "an argument renamed": Mutant(COMMON, "*, checkpoint: bool)", "*, keep: bool)",
        f"{COMMON}: release_kv_cache takes no checkpoint"),
    "an argument less": Mutant(TREE, "def lock(\n        self,",
        "def lock(self, *, at): ...\n    def lock_old(\n        self,",
        f"{TREE}: UnifiedRadixCache.lock takes 0 arguments, not 1"),
    "a function that comes from a module that is not loaded": Mutant(ALLOCATION, "def alloc_token_slots(",
        "from sglang.srt.layers.paging import alloc_token_slots\n\n\ndef old_alloc_token_slots(",
        f"{ALLOCATION}: there is no alloc_token_slots"),
}  # fmt: skip


@pytest.fixture
def copy(tmp_path):
    """A copy of 0.5.23, of links to its files; skips where it is unavailable."""
    try:
        root = release_root("0.5.23")
    except UnusableImplementation as error:
        pytest.skip(str(error))
    target = tmp_path / "checkout"
    shutil.copytree(
        root, target, ignore=shutil.ignore_patterns("__pycache__"), copy_function=os.symlink
    )
    return target


def write(file: Path, text: str) -> None:
    file.unlink()  # the link, not what it leads to
    file.write_text(text)


def change(root: Path, file: str, old: str, new: str) -> None:
    path = root / "sglang/srt" / file
    text = path.read_text()
    assert old in text
    write(path, text.replace(old, new))


def refusal(action: Callable[..., object], *arguments: object, **named: object) -> str:
    with pytest.raises(UnusableImplementation) as error:
        action(*arguments, **named)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", REFUSED)
def test_a_missing_name_is_reported_with_its_file(name, copy):
    mutant = REFUSED[name]
    change(copy, *mutant[:3])
    line = refusal(SGLangSystem, path=copy)
    assert f"sglang/srt/{mutant.reported}" in line
    assert "taken for 0.5.23" in line
    assert "'A new release of SGLang'" in line


def test_a_syntax_error_is_an_error_of_the_checkout(copy):
    change(copy, "mem_cache/memory_pool.py", "class ReqToTokenPool:", "class ReqToTokenPool")
    at = "sglang/srt/mem_cache/memory_pool.py:"
    line = refusal(SGLangSystem, path=copy)
    assert re.fullmatch(rf"{copy}: {at}\d+: SyntaxError: expected ':'. Nothing was driven", line)


@pytest.mark.parametrize(
    "gone", ["session/session_controller.py", "mem_cache/allocator", "session"]
)
def test_a_module_or_a_folder_that_has_moved(gone, copy):
    (copy / "sglang/srt" / gone).rename(copy / "sglang/srt/moved")
    line = refusal(SGLangSystem, path=copy)
    assert f"sglang/srt/{gone}" in line
    assert "there is no such file" in line
    assert "taken for 0.5.23" in line


DRIVEN = {
    "an optional argument": Mutant(COMMON, "*, checkpoint: bool)", "*, checkpoint: bool, why: str = '')", ""),
    "a setting that is off by the tree's own default": Mutant(BATCH, "    def prepare_for_extend(self):\n",
        "    def prepare_for_extend(self):\n        get_exec().new_setting and 1 / 0\n", ""),
    "a private function renamed": Mutant(SLOTS, "_free_tail", "_cut", ""),
}  # fmt: skip
# What parts of kvspec use besides: a check names what is missing, and drives all the same.
WITHOUT = {
    "the watcher cannot follow it": (
        Mutant("managers/scheduler.py", "_add_request_to_queue", "_enqueue",
               "managers/scheduler.py: Scheduler has no _add_request_to_queue"),
        Mutant(BATCH, "decoding_reqs", "decoders", f"{BATCH}: ScheduleBatch has no decoding_reqs"),
    ),
    "exported tests may not run on it": (
        Mutant("mem_cache/unified_radix_cache.py", "self.tree_core", "self.core",
               "mem_cache/unified_radix_cache.py: UnifiedRadixCache has no tree_core"),
    ),
    "serve-check cannot run it": (
        Mutant("managers/utils.py", "class GenerationBatchResult", "class Result",
               "managers/utils.py: there is no GenerationBatchResult"),
        Mutant("managers/scheduler_components/request_receiver.py", "_pull_raw_reqs", "_pull",
               "managers/scheduler_components/request_receiver.py: SchedulerRequestReceiver has no"
               " _pull_raw_reqs"),
    ),
}  # fmt: skip
FAILS = {
    "a setting of which nothing states a default": (
        Mutant(BATCH, "    def prepare_for_extend(self):\n",
               "    def prepare_for_extend(self):\n        assert get_exec().new_setting > 0\n", ""),
        "which asks more of the adapter's stand-in (parts/stand_ins.py)"),
    "a function of a module that is not loaded": (
        Mutant(BATCH, "    def prepare_for_extend(self):\n",
               "    def prepare_for_extend(self):\n        from sglang.srt.layers import pages\n"
               "        assert pages.count(self) + 1\n", ""),
        "which uses a module that is not loaded (parts/modules.py)"),
    "what a library is given that is no tensor": (
        Mutant(BATCH, "    def prepare_for_extend(self):\n",
               "    def prepare_for_extend(self):\n        from sglang.srt.layers import pages\n"
               "        torch.cat([pages.count(self)])\n", ""),
        "but got Inert at sglang/srt/managers/schedule_batch.py"),
}  # fmt: skip


def begin(system: SGLangSystem) -> object:
    """Return the outcome of the first prefill."""
    system.reset(preset("page1"))
    for command in (Submit("r", None, 2), Admit("r")):
        assert not isinstance(system.apply(command), Broken), command
    return system.apply(Extend((Chunk("r", 2),)))


def test_changes_that_do_not_concern_the_adapter_are_driven(copy):
    for mutant in DRIVEN.values():
        for path in (copy / "sglang/srt/session").glob("*.py") if mutant.file == SLOTS else ():
            write(path, path.read_text().replace(mutant.old, mutant.new))
        if mutant.file != SLOTS:
            change(copy, *mutant[:3])
    (copy / "sglang/srt/server_args.py").write_text("class Args:\n    new_setting: bool = False\n")
    system = SGLangSystem(path=copy)
    assert not isinstance(begin(system), Broken)
    assert re.search(r": taken for 0\.5\.23 \(\d+ lines differ\)$", system.remark)
    system.close()


def test_undriven_parts_are_named_before_the_run(copy):
    for mutant in itertools.chain(*WITHOUT.values()):
        change(copy, *mutant[:3])
    kind = detect(copy)
    assert kind.release is TABLE["0.5.23"]
    remarks = [
        f"{cannot} ({'; '.join(f'sglang/srt/{mutant.reported}' for mutant in mutants)})"
        for cannot, mutants in WITHOUT.items()
    ]
    taken, *cannot = kind.remark.removeprefix(f"{copy}: ").split("; ", 1)
    assert re.fullmatch(r"taken for 0\.5\.23 \(\d+ lines differ\)", taken)
    assert cannot == ["; ".join(remarks)]


@pytest.mark.parametrize("name", FAILS)
def test_a_misfit_during_a_run_is_reported_as_the_adapters(name, copy):
    mutant, reported = FAILS[name]
    change(copy, *mutant[:3])
    system = SGLangSystem(path=copy)
    line = refusal(begin, system)
    assert reported in line
    assert "is not of the 0.5.23 kind" in line
    system.close()


def test_files_and_version_that_disagree_are_reported(copy):
    file = copy / "sglang/_version.py"
    write(file, "__version__ = version = '0.5.20'\n")
    kind = detect(copy)
    assert kind.release is TABLE["0.5.23"]
    assert kind.remark.endswith("taken for 0.5.23 (no new line of code); its files state 0.5.20")


@pytest.mark.parametrize(
    "version",
    some_at_night(release_faults.DRIVEN, release_faults.DRIVEN[1:-2].__contains__),
)
def test_every_release_fits_the_adapter_and_is_recognised(version):
    try:
        root = release_root(version)
    except UnusableImplementation as error:
        pytest.skip(str(error))
    assert detect(root) == (TABLE[version], "")
