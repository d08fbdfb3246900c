"""Have a process import a release for the tests in fixtures/releases/reports: hooks of `run_test`."""

import importlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from impl.sglang.parts import modules
from impl.sglang.process import testing
from impl.lmdeploy import loading as lmdeploy_loading
from impl.transformers_paging.loading import load
from impl.vllm.modules import with_connector

# What these tests call besides the bookkeeping that is driven.
MODULES = (
    "sglang.srt.disaggregation.decode",
    "sglang.srt.managers.scheduler_components.batch_result_processor",
    "sglang.srt.managers.schedule_policy",
    "sglang.srt.managers.scheduler",
)


def sglang(root: Path, version: str) -> None:
    absent = *modules.SGLANG.absent, "setproctitle"  # imported by the scheduler
    modules.SGLANG = replace(modules.SGLANG, real=(*modules.SGLANG.real, *MODULES), absent=absent)
    testing.hook(root, version)
    for name in MODULES:
        # the parent is inert: it gives a submodule that is loaded
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)


def transformers(root: Path, _: str) -> None:
    load(root)


def lmdeploy(root: Path, _: str) -> None:
    lmdeploy_loading.load(root)


def vllm(root: Path, _: str) -> None:
    with_connector(root)
