"""Run exported tests on the files of a release, without installing the release.

A run exits with 0 when all tests pass, with FAILS when all fail; else they could not be run, or only part
did. Where sglang is installed nothing of this is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from impl import HOME
from impl.isolation import cut, source_of
from impl.sglang.parts.modules import SGLANG, install

FAILS = 3
Run = tuple[Path, str, Sequence[Path]]  # the files of a release, its version, and tests


def outcomes(*runs: Run, timeout_s: float = 180.0) -> list[tuple[int, str]]:
    """The exit status of each run in a process of its own, and what it said.

    The processes are forked from one that has imported torch, which takes longer than most tests.
    """
    search = [str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
    asked = [[str(root), version, *map(str, files)] for root, version, files in runs]
    with subprocess.Popen(
        [sys.executable, "-m", "impl.sglang.process.run_test", json.dumps(asked)], env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [(1, f"no end in {timeout_s:g} s")] * len(runs)
    if process.returncode:
        return [(1, f"no test was run: exit status {process.returncode}")] * len(runs)
    ends: list[tuple[int, str]] = [(code, text) for code, text in json.loads(said)]
    return ends


def _forked(arguments: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as said:
        if not (child := os.fork()):
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = 1
            try:
                code = main(arguments)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode(errors="replace")


class _Missing(importlib.abc.MetaPathFinder):
    """A module of the bookkeeping that the release does not have: a test may ask and do without."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> None:
        del path, target
        there = source_of(self.root, fullname) or self.root.joinpath(*fullname.split(".")).is_dir()
        if SGLANG.is_real(fullname) and not there:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _hook(root: Path, version: str) -> None:
    from impl.sglang.parts import doubles
    from impl.sglang.releases.catalogue import supported

    provided = doubles.provided()
    provided["sglang.srt.server_args"] = {
        "_global_server_args": None,
        "get_global_server_args": lambda: sys.modules["sglang.srt.server_args"]._global_server_args,
    }

    class SamplingParams(doubles.SamplingParams):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.normalize = lambda _: None

    provided["sglang.srt.sampling.sampling_params"] = {"SamplingParams": SamplingParams}
    provided["sglang.srt.managers.io_struct"] = {"AbortReq": doubles.Bag}
    install(root, provided)
    sys.meta_path.insert(0, _Missing(root))
    load = importlib.import_module
    context = provided["sglang.srt.runtime_context"]
    context["get_context"] = lambda: doubles.Bag(
        override_server_args=_settings, parallel=doubles.Bag(override=_settings),
        server_args=doubles.SERVER_ARGS,
    )  # fmt: skip
    release = supported(version)
    module = release.spec_file.removesuffix(".py").replace("/", ".")
    names = ("common", "allocation", "allocation_sizing")  # one module until 0.5.14
    there = [name for name in names if (root / f"sglang/srt/mem_cache/{name}.py").is_file()]
    homes = [load(f"sglang.srt.mem_cache.{name}") for name in there]
    env = {name: value for home in homes for name, value in vars(home).items()}
    env |= {"torch": sys.modules["torch"], "get_spec": context["get_spec"]}
    for name in ("get_alloc_len_per_decode", "get_alloc_reserve_per_decode"):
        env[name] = lambda *_, name=name: getattr(sys.modules[module], name)()
    owner, _, name = release.spec_prepare.rpartition(".")
    prepare = cut(root / release.spec_file, frozenset({release.spec_prepare}), env)[name]
    provided[module] = {owner: type(owner, (), {name: prepare})} if owner else {name: prepare}
    env = {
        **vars(load("sglang.srt.mem_cache.base_prefix_cache")),
        "AbortReq": doubles.Bag, "DisaggregationMode": doubles.DisaggregationMode,
        "_make_abort_req": lambda *_, **__: None, "logger": logging.getLogger("sglang"),
    }  # fmt: skip
    methods = frozenset({"Scheduler.abort_request", "Scheduler._release_aborted_request"})
    aborts = cut(root / "sglang/srt/managers/scheduler.py", methods, env)
    provided["sglang.srt.managers.scheduler"] = {"Scheduler": type("Scheduler", (), aborts)}
    for name in (module, "sglang.srt.speculative.spec_utils"):
        load(name)


@contextlib.contextmanager
def _settings(**given: Any) -> Iterator[None]:
    from impl.sglang.parts.doubles import SERVER_ARGS

    with mock.patch.dict(vars(SERVER_ARGS), given):
        yield


def main(arguments: list[str]) -> int:
    """Run tests in this process: ROOT VERSION FILE..."""
    _hook(Path(arguments[0]), arguments[1])
    tests = unittest.TestSuite()
    for file in arguments[2:]:
        sys.path.insert(0, str(Path(file).parent))  # for the module that tests of one folder share
        module = types.ModuleType("exported")
        vars(module).update(runpy.run_path(file, run_name="exported"))
        tests.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    result = unittest.TextTestRunner().run(tests)
    if result.errors or not result.testsRun:
        return 1
    return {0: 0, result.testsRun: FAILS}.get(len(result.failures), 1)


if __name__ == "__main__":
    importlib.import_module("torch")
    print(json.dumps([_forked(run) for run in json.loads(sys.argv[1])]))
