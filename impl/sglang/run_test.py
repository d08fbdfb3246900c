"""Run exported tests on the files of a release, without installing the release.

`python -m impl.sglang.run_test ROOT VERSION FILE...` exits with 0 when all pass, with FAILS when all
fail; else they could not be run, or only part did. Where sglang is installed nothing of this is needed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import logging
import os
import runpy
import subprocess
import sys
import types
import unittest
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from impl.sglang import isolate

FAILS = 3
_HOME = Path(__file__).resolve().parents[2]


def outcome(root: Path, version: str, *files: Path, timeout_s: float = 180.0) -> tuple[int, str]:
    """The exit status of a process of its own that runs the tests, and what it said."""
    search = [str(_HOME), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "impl.sglang.run_test", str(root), version, *map(str, files)]
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout_s, text=True, errors="replace", check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, f"no end in {timeout_s:g} s"
    return done.returncode, done.stdout


class _Missing(importlib.abc.MetaPathFinder):
    """A module of the bookkeeping that the release does not have: a test may ask and do without."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> None:
        del path, target
        stem = self.root.joinpath(*fullname.split("."))
        if isolate.real(fullname) and not (stem.is_dir() or stem.with_suffix(".py").is_file()):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _hook(root: Path, version: str) -> None:
    from impl.sglang import doubles
    from impl.sglang.releases import UNIFIED, supported

    settings: list[Any] = []
    provided = doubles.provided()
    provided["sglang.srt.server_args"] = {
        "get_global_server_args": lambda: settings[-1],
        "set_global_server_args_for_scheduler": settings.append,
    }

    class SamplingParams(doubles.SamplingParams):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.normalize = lambda _: None

    provided["sglang.srt.sampling.sampling_params"] = {"SamplingParams": SamplingParams}
    provided["sglang.srt.managers.io_struct"] = {"AbortReq": doubles.Bag}
    isolate.install(root, provided)
    sys.meta_path.insert(0, _Missing(root))
    load = importlib.import_module
    context = provided["sglang.srt.runtime_context"]
    context["get_context"] = lambda: doubles.Bag(
        override_server_args=lambda **given: doubles.Bag(install=partial(_settings, given)),
        parallel=doubles.Bag(override_permanently=lambda **given: _settings(given)),
    )
    release = supported(version)
    module = release.spec_file.removesuffix(".py").replace("/", ".")
    names = ("common", "allocation", "allocation_sizing") if version in UNIFIED else ("common",)
    homes = [load(f"sglang.srt.mem_cache.{name}") for name in names]
    env = {name: value for home in homes for name, value in vars(home).items()}
    env |= {"torch": sys.modules["torch"], "get_spec": context["get_spec"]}
    for name in ("get_alloc_len_per_decode", "get_alloc_reserve_per_decode"):
        env[name] = lambda *_, name=name: getattr(sys.modules[module], name)()
    owner, _, name = release.spec_prepare.rpartition(".")
    prepare = isolate.cut(root / release.spec_file, frozenset({release.spec_prepare}), env)[name]
    provided[module] = {owner: type(owner, (), {name: prepare})} if owner else {name: prepare}
    env = {
        **vars(load("sglang.srt.mem_cache.base_prefix_cache")),
        "AbortReq": doubles.Bag, "DisaggregationMode": doubles.DisaggregationMode,
        "_make_abort_req": lambda *_, **__: None, "logger": logging.getLogger("sglang"),
    }  # fmt: skip
    methods = frozenset({"Scheduler.abort_request", "Scheduler._release_aborted_request"})
    aborts = isolate.cut(root / "sglang/srt/managers/scheduler.py", methods, env)
    provided["sglang.srt.managers.scheduler"] = {"Scheduler": type("Scheduler", (), aborts)}
    for name in (module, "sglang.srt.speculative.spec_utils"):
        load(name)


def _settings(given: dict[str, Any]) -> None:
    from impl.sglang.doubles import SERVER_ARGS

    vars(SERVER_ARGS).update(given)


def main(arguments: list[str]) -> int:
    _hook(Path(arguments[0]), arguments[1])
    tests = unittest.TestSuite()
    for file in arguments[2:]:
        module = types.ModuleType("exported")
        vars(module).update(runpy.run_path(file, run_name="exported"))
        tests.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
    result = unittest.TextTestRunner().run(tests)
    if result.errors or not result.testsRun:
        return 1
    return {0: 0, result.testsRun: FAILS}.get(len(result.failures), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
