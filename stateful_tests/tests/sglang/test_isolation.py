"""SGLang behind the adapter: where releases come from, how they are loaded, and how workers fail.

Most of it runs on tiny fake trees and workers without a network; the last tests run the real
releases where they are cached or can be downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from impl import isolation as isolate
from impl.adapter import UnusableImplementation
from impl.sglang import SGLangSystem
from impl.sglang.parts import fetch
from impl.sglang.parts import memory_checks as checker
from impl.sglang.parts.doubles import Bag, ForwardMode
from impl.sglang.process import wire
from impl.sglang.releases import catalogue as releases
from reference.commands import (
    Abort,
    Account,
    Admit,
    Broken,
    CheckBusy,
    CheckIdle,
    Chunk,
    Close,
    Decode,
    Done,
    Draft,
    EvictSwa,
    Extend,
    Finish,
    Open,
    Reason,
    Refused,
    Retract,
    SpecDecode,
    Submit,
    token_id,
)  # fmt: skip
from reference.geometry import preset

# -- where the files come from --------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a pip that must not be asked."""
    monkeypatch.setenv("KVSPEC_CACHE", str(tmp_path / "cache"))

    def no_pip(*_, **__):
        raise AssertionError("pip was asked")

    monkeypatch.setattr(fetch.subprocess, "run", no_pip)
    return tmp_path / "cache"


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/") + ".py", text)
    return path


def answer(monkeypatch, stderr="", put=None):
    """Have pip fail with this output, or put a wheel in the folder it was given; counts the calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        if put is not None:
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir(parents=True)
            put(folder)
        return subprocess.CompletedProcess(command, 1 if put is None else 0, "", stderr)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return calls


def unusable(action, *arguments, **named) -> str:
    with pytest.raises(UnusableImplementation) as caught:
        action(*arguments, **named)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 400
    return line


def test_what_is_cached_is_not_downloaded(cache):
    (cache / "sglang-0.5.10" / "sglang").mkdir(parents=True)
    assert fetch.release_root("0.5.10") == cache / "sglang-0.5.10"


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("KVSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / "kvspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_folder() == Path.home() / ".cache" / "kvspec"


@pytest.mark.parametrize("version", ["", "../../etc", "0.5.10; rm", "latest", "--help", "1" * 80])
def test_a_version_that_is_none_is_refused_before_anything_runs(cache, version):
    assert "not a version" in unusable(fetch.release_root, version)


def test_a_download_is_unpacked_once_and_leaves_nothing_else(cache, monkeypatch):
    calls = answer(
        monkeypatch,
        put=lambda folder: wheel(
            folder / "sglang-0.5.10-py3-none-any.whl",
            sglang__srt__environ="A = 1",
            sglang__srt__models__llama="unneeded",
            sglang__version="",
        ),
    )
    root = fetch.release_root("0.5.10")
    assert (root / "sglang/srt/environ.py").read_text() == "A = 1"
    assert not (root / "sglang/srt/models").exists()
    assert fetch.release_root("0.5.10") == root
    assert len(calls) == 1
    assert [p.name for p in cache.iterdir()] == ["sglang-0.5.10"]


def test_no_such_release_is_said_in_one_line(cache, monkeypatch):
    calls = answer(monkeypatch, "ERROR: No matching distribution found for sglang==9.9.9")
    assert "no such release" in unusable(fetch.release_root, "9.9.9")
    assert len(calls) > 1  # wheels of other hosts hold the same files, so those were asked for
    assert list(cache.iterdir()) == []


def test_no_index_is_said_in_one_line_and_not_asked_again(cache, monkeypatch):
    calls = answer(monkeypatch, "WARNING: NewConnectionError: Temporary failure in name resolution")
    assert "cannot be reached" in unusable(fetch.release_root, "0.5.10")
    assert len(calls) == 1


def test_a_cache_folder_that_cannot_be_written_is_said(cache, monkeypatch):
    cache.write_text("a file")
    assert "cannot write" in unusable(fetch.release_root, "0.5.10")


def test_two_processes_at_once_end_with_one_complete_folder(cache, monkeypatch):
    barrier = threading.Barrier(2)

    def put(folder):
        wheel(folder / "s.whl", sglang__srt__environ="A = 1")
        barrier.wait(timeout=10)

    answer(monkeypatch, put=put)
    roots = []
    threads = [threading.Thread(target=lambda: roots.append(fetch.release_root("0.5.10"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert roots == [cache / "sglang-0.5.10"] * 2
    assert [p.name for p in cache.iterdir()] == ["sglang-0.5.10"]


@pytest.mark.parametrize(
    "name",
    ["sglang/srt/managers/../../../../evil.py", "/sglang/srt/evil.py", "sglang/srt/managers/..\\evil.py"],
)
def test_an_archive_cannot_write_outside_its_folder(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "bad.whl", "w") as archive:
        archive.writestr(name, "evil")
        archive.writestr("sglang/srt/environ.py", "")
    fetch.unpack(tmp_path / "bad.whl", tmp_path / "a/b/c/d/e")
    assert [p.name for p in tmp_path.rglob("*evil*")] == []


def test_a_broken_archive_is_unusable(tmp_path):
    (tmp_path / "bad.whl").write_bytes(b"PK no zip")
    assert "not a readable wheel" in unusable(fetch.unpack, tmp_path / "bad.whl", tmp_path / "x")
    empty = wheel(tmp_path / "empty.whl", other__module="")
    assert "no sglang/srt" in unusable(fetch.unpack, empty, tmp_path / "y")


# -- checkouts and their versions -----------------------------------------------------------------

KINDS = {
    "0.5.10": ("mem_cache/session_aware_cache.py", "managers/session_controller.py"),
    "0.5.11": ("session/streaming_session.py", "mem_cache/allocator.py", "speculative/eagle_info_v2.py"),
}


def tree(root: Path, files=(), version: str | None = None) -> Path:
    (root / "sglang/srt").mkdir(parents=True)
    for name in files:
        file = root / "sglang/srt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    if version:
        (root / "sglang/version.py").write_text(f'__version__ = "{version}"\n')
    return root


def test_a_checkout_and_a_bare_folder_are_both_found(tmp_path):
    tree(tmp_path / "checkout/python")
    assert fetch.checkout_root(tmp_path / "checkout") == tmp_path / "checkout/python"
    assert fetch.checkout_root(tmp_path / "checkout/python") == tmp_path / "checkout/python"


def test_a_path_without_sglang_says_so(tmp_path):
    assert "has neither" in unusable(fetch.checkout_root, tmp_path)
    assert "is no folder" in unusable(fetch.checkout_root, tmp_path / "none")
    assert "has neither" in unusable(SGLangSystem, path=tmp_path)


@pytest.mark.parametrize("version", KINDS)
def test_a_checkout_is_recognised_by_its_modules(tmp_path, version):
    assert releases.detect(tree(tmp_path, KINDS[version])).version == version


def test_an_unknown_checkout_names_its_version_and_what_is_supported(tmp_path):
    line = unusable(releases.detect, tree(tmp_path, version="0.4.9"))
    assert "0.4.9" in line
    assert "0.5.10, 0.5.11" in line


def test_an_unsupported_version_is_refused_before_it_is_downloaded(cache):
    assert "0.5.10, 0.5.11" in unusable(SGLangSystem, version="0.4.9")


def test_a_version_or_a_path_must_be_given():
    assert "give a version" in unusable(SGLangSystem)


# -- loading alone --------------------------------------------------------------------------------


def test_inert_things_take_part_in_anything():
    inert = isolate.Inert()
    assert not inert
    assert list(inert) == []
    assert inert.a.b(1, c=2)[3] is not None

    @inert.decorator
    def kept() -> int:
        return 1

    class Child(inert.Base):
        pass

    assert kept() == 1
    assert Child()


def test_functions_are_cut_out_without_running_the_file(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(
        "import nothing_like_this\n"
        "@nothing_like_this.wrap\n"
        "def plus(a: Unknown, b): return a + b + OFFSET\n"
        "class K(Unknown):\n    def method(self): return 'm'\n"
    )
    found = isolate.cut(file, frozenset({"plus", "K.method", "absent"}), {"OFFSET": 10})
    assert sorted(found) == ["method", "plus"]
    assert found["plus"](1, 2) == 13


def test_a_release_that_does_not_load_is_unusable(tmp_path):
    root = tree(tmp_path, [*KINDS["0.5.11"], "utils/common.py"])
    system = SGLangSystem(path=root)
    line = unusable(system.reset, preset("page1"))
    assert line.startswith("sglang@checkout: ")
    assert "does not load" in line
    system.close()


# -- workers that fail ----------------------------------------------------------------------------

WORKER = """
import os, sys, time
from impl.adapter import View
from impl.sglang.process import wire
out = os.fdopen(1, "wb")
empty = View({}, {}, [], [], {}, [])
wire.send(out, wire.Ready())
while (body := wire.receive(0)) is not None:
    ask = wire.ASKS.decode(body)
    if isinstance(ask, wire.Apply):
        ACT
    wire.send(out, wire.StepReply(empty))
"""


@pytest.fixture
def system(tmp_path, request):
    """A system whose worker does what the test says when it gets a command."""
    made = SGLangSystem(path=tree(tmp_path, KINDS["0.5.11"]), timeout_s=1.0)
    code = WORKER.replace("ACT", request.param)
    made._command_line = lambda: [sys.executable, "-c", code]
    yield made
    made.close()


def breaks(system) -> str:
    """The error of a command after which the system stays broken, until a reset mends it."""
    system.reset(preset("page1"))
    first = system.apply(Open("s"))
    assert isinstance(first, Broken)
    assert system.apply(Open("s")) == first
    system.reset(preset("page1"))
    assert system.view().sessions == {}
    return first.error


@pytest.mark.parametrize("system", ["sys.stderr.write('out of luck'); sys.exit(7)"], indirect=True)
def test_a_worker_that_dies_is_broken_and_replaced(system):
    error = breaks(system)
    assert "exit status 7" in error
    assert "out of luck" in error


@pytest.mark.parametrize("system", ["time.sleep(60)"], indirect=True)
def test_a_worker_that_hangs_is_broken_and_replaced(system):
    system._timeout_s = 0.3
    assert "hangs" in breaks_with_time_to_start(system)


def breaks_with_time_to_start(system) -> str:
    """As `breaks`, where the reset may take longer than the command may."""
    system._timeout_s = 20.0
    system.reset(preset("page1"))
    system._timeout_s = 0.3
    first = system.apply(Open("s"))
    assert isinstance(first, Broken)
    system._timeout_s = 20.0
    system.reset(preset("page1"))
    return first.error


@pytest.mark.parametrize(
    "system", ["wire.send(out, wire.Failure('ValueError: x at a.py:3')); continue"], indirect=True
)
def test_an_exception_in_the_release_is_broken_with_its_line(system):
    assert breaks(system) == "ValueError: x at a.py:3"


@pytest.mark.parametrize("system", ["out.write(b'\\xff' * 400); out.flush()"], indirect=True)
def test_a_worker_that_talks_nonsense_is_broken(system):
    assert "unreadable" in breaks(system)


def test_commands_survive_the_wire():
    commands = [
        Open("s"), Submit("r", None, 3, 1), Admit("r"), Extend((Chunk("r", 2), Chunk("q", 1))),
        Decode(("r", "q")), SpecDecode((Draft("r", 3, 2),)), EvictSwa("r", 5), Finish("r", 1),
        Retract("r", 1), Abort("r", marked=True), Close("s"), CheckBusy(2), CheckIdle(),
    ]  # fmt: skip
    for command in commands:
        body = wire.msgspec.msgpack.encode(wire.pack_command(command))
        ask = wire.ASKS.decode(body)
        assert isinstance(ask, wire.Apply)
        assert wire.unpack_command(ask) == command


# -- the batches that memory checks go by ---------------------------------------------------------


class Req:
    done = False

    def finished(self) -> bool:
        return self.done


@pytest.fixture
def scheduler():
    return checker.Scheduler(Bag, None, None, None, preset("page1"))


def listed(scheduler) -> list[list]:
    return [batch.reqs for batch in (scheduler.last_batch, scheduler.running_batch)]


def test_a_decode_makes_one_batch_of_everybody(scheduler):
    a, b = Req(), Req()
    assert scheduler.last_batch is None
    scheduler.launch([a], ForwardMode.EXTEND)
    scheduler.launch([b], ForwardMode.EXTEND)
    assert listed(scheduler) == [[b], [a]]
    scheduler.launch([b], ForwardMode.DECODE)
    assert scheduler.last_batch is scheduler.running_batch
    assert listed(scheduler) == [[a, b], [a, b]]


def test_a_finished_request_is_listed_until_the_next_launch(scheduler):
    a, b = Req(), Req()
    scheduler.launch([a], ForwardMode.EXTEND)
    a.done = True
    assert listed(scheduler) == [[a], []]
    scheduler.launch([b], ForwardMode.EXTEND)
    assert listed(scheduler) == [[b], []]


def test_a_retracted_request_leaves_at_once(scheduler):
    a, b = Req(), Req()
    scheduler.launch([a, b], ForwardMode.EXTEND)
    scheduler.leave(a)
    assert listed(scheduler) == [[b], []]


@pytest.mark.parametrize("error", [AssertionError("two\n  lines"), ValueError("two lines")])
def test_the_verdict_of_a_release_is_one_line(scheduler, error):
    def check() -> None:
        raise error

    scheduler.launch([Req()], ForwardMode.EXTEND)
    scheduler.self_check_during_busy = check
    scheduler.busy_accounts = tuple
    assert scheduler.busy(1).alarm == "two lines"


def test_what_is_no_verdict_is_no_alarm(scheduler):
    scheduler.launch([Req()], ForwardMode.EXTEND)
    with pytest.raises(AttributeError, match="read self_check_during_busy of the scheduler"):
        scheduler.busy(1)


# -- the real releases ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(releases.TABLE))
def real(request, release):
    return release(request.param)


def play(system, geometry, *commands):
    system.reset(preset(geometry))
    for command in commands:
        outcome = system.apply(command)
        assert isinstance(outcome, Done), (command, outcome)
    return system.view()


FIRST_TURN = (
    Open("s"), Submit("a", "s", 5), Admit("a"), Extend((Chunk("a", 2),)), Extend((Chunk("a", 3),)),
    Decode(("a",)), Decode(("a",)), Finish("a", 3),
)  # fmt: skip


@pytest.mark.parametrize("geometry", ["page1", "page2", "page4", "no-swa"])
def test_a_session_keeps_its_tokens_between_turns(real, geometry):
    view = play(real, geometry, *FIRST_TURN)
    session = view.sessions["s"]
    assert list(session.history) == [token_id(1, p) for p in range(8)]
    assert session.cursors is not None
    assert session.cursors.kv_committed_len == 7
    assert view.requests == {}
    slots = view.rows[session.row][:7]
    assert [view.full_stamps[s] for s in slots] == list(session.history[:7])
    if view.swa_stamps:
        live = range(max(session.cursors.swa_evicted_seqlen, 5), 7)
        assert [view.swa_stamps[view.full_to_swa[slots[p]]] for p in live] == [token_id(1, p) for p in live]


def test_everything_comes_back_when_all_is_closed(real):
    rest = (
        Submit("b", "s", 2), Admit("b"), Admit("b"), Extend((Chunk("b", 3),)), Decode(("b",)),
        Finish("b", 2), Submit("o", None, 4), Admit("o"), Extend((Chunk("o", 4),)), Finish("o", 1),
        Close("s"),
    )  # fmt: skip
    view = play(real, "page4", *FIRST_TURN, *rest)
    geometry = preset("page4")
    assert sorted(view.free_full) == list(range(1, geometry.full_pages + 1))
    assert sorted(view.free_swa) == list(range(1, geometry.swa_pages + 1))
    assert len(view.free_rows) == geometry.rows
    assert not any(view.full_to_swa)


def test_sweeps_of_its_own_are_reported(real):
    begin = (Open("s"), Submit("a", "s", 8), Admit("a"), Extend((Chunk("a", 7),)))
    play(real, "page1", *begin)
    outcome = real.apply(Extend((Chunk("a", 1),)))  # a chunk cache sweeps what the last chunk left behind
    assert isinstance(outcome, Done)
    [choice] = outcome.choices
    assert choice.swa_evicted_seqlen == real.view().requests["a"].cursors.swa_evicted_seqlen
    assert 3 <= choice.swa_evicted_seqlen <= 5


def test_a_verify_round_commits_what_was_accepted(real):
    begin = (Open("s"), Submit("a", "s", 3), Admit("a"), Extend((Chunk("a", 3),)))
    play(real, "page2", *begin)
    outcome = real.apply(SpecDecode((Draft("a", 3, 2),)))
    assert isinstance(outcome, Done)
    [choice] = outcome.choices
    request = real.view().requests["a"]
    assert request.cursors.kv_committed_len == 5
    assert request.cursors.kv_allocated_len == choice.kv_allocated_len >= 6
    assert len(request.text) == 6
    stamps = [real.view().full_stamps[s] for s in real.view().rows[request.row][:7]]
    assert stamps == [*(token_id(1, p) for p in range(5)), 0, 0]
    with pytest.raises(UnusableImplementation, match="cannot mix"):
        real.apply(Decode(("a",)))


@pytest.mark.parametrize(
    "command",
    [
        Open("s"), Close("t"), Submit("a", "t", 1), Submit("a", "s", 0), Submit("a", "s", 1, -1),
        Submit("a", "s", 2, 1), Submit("a", "s", 99), Admit("x"), Extend(()), Decode(("x",)),
        Decode(()), EvictSwa("x", 1), Finish("x", 1), Retract("x"), Abort("x"), CheckBusy(3),
    ],
    ids=repr,
)  # fmt: skip
def test_a_refused_command_changes_nothing(real, command):
    before = play(real, "page2", *FIRST_TURN)
    assert isinstance(real.apply(command), Refused)
    assert real.view() == before


def test_memory_is_refused_before_the_release_is_touched(real):
    play(real, "tight", Submit("o", None, 9), Admit("o"))
    before = real.view()
    assert isinstance(real.apply(Extend((Chunk("o", 16),))), Refused)  # longer than its input
    play(real, "tight", Submit("o", None, 12), Admit("o"))
    before = real.view()
    assert isinstance(real.apply(Extend((Chunk("o", 12),))), Refused)  # 6 pages of 5
    assert real.view() == before


def accounts(system, command) -> dict[str, Account]:
    outcome = system.apply(command)
    assert isinstance(outcome, Done)
    assert outcome.report is not None
    assert all(a.balances for a in outcome.report.accounts) is (outcome.report.alarm == "")
    return {a.pool: a for a in outcome.report.accounts}


def test_the_idle_check_counts_what_sessions_hold(real):
    play(real, "page4", *FIRST_TURN)
    found = accounts(real, CheckIdle())
    assert found == {
        "full": Account("full", 40, 0, 0, 8, 0, 48),
        "swa": Account("swa", 28, 0, 0, 8, 0, 36),
        "rows": Account("rows", 3, 0, 0, 1, 0, 4),
    }
    assert accounts(real, CheckBusy()) == found  # nothing ran since
    assert real.apply(CheckBusy(0)) == Done()


def test_the_busy_check_counts_requests_that_still_prefill(real):
    play(real, "no-swa", Submit("o", None, 9), Submit("p", None, 1), Admit("o"), Admit("p"))
    real.apply(Extend((Chunk("o", 3),)))
    real.apply(Extend((Chunk("p", 1),)))
    assert accounts(real, CheckBusy(2))["full"] == Account("full", 32, 0, 0, 0, 8, 40)
    assert real.apply(CheckIdle()) == Refused(Reason.NOT_IDLE)
    real.apply(Retract("p"))
    assert accounts(real, CheckBusy())["full"] == Account("full", 36, 0, 0, 0, 4, 40)
