"""Loads the continuous batching of a release of transformers, without the rest of the package."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from impl.loading.isolation import Bookkeeping, install
from impl.self_scheduling.release_system import REQUESTS_ALONE, ReleaseSystem
from impl.transformers_paging.api import OVERLAP, RELEASES, TABLES

PACKAGE = "transformers.generation.continuous_batching"
_FOLDER = PACKAGE.replace(".", "/")


class TransformersSystem(ReleaseSystem):
    """Continuous batching of transformers."""

    package = "transformers"
    releases = RELEASES
    tables = TABLES
    ways = (OVERLAP,)
    capabilities = replace(REQUESTS_ALONE, forks=True, rings=True, swaps=True)
    modules = Bookkeeping("transformers", (PACKAGE,), imported_only=("tqdm", "psutil"))
    driver = "impl.transformers_paging.driver"
    kept_prefixes = (f"{_FOLDER}/",)
    required_path = f"{_FOLDER}/cache_allocators"  # which later releases have
    source = "src"


def load(root: Path) -> dict[str, Any]:
    """Return the release's modules by their last name, loaded in this process without their other imports."""
    import torch

    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    compiler: Any = torch.compiler
    compiler.disable = lambda function: function  # otherwise dynamo is imported, which takes seconds
    vars(torch)["_dynamo"] = type(
        "_Dynamo", (), {"mark_static_address": staticmethod(lambda _: None)}
    )
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    # requests look up the level of transformers' logging, which the standard module knows as well
    install(root, TransformersSystem.modules, {"transformers.utils.logging": {"logging": logging}})
    names = (
        "cache",
        "cache_allocators.cache_allocator",
        "requests",
        "scheduler",
        "offloading_manager",
        "input_outputs",
        "continuous_api",
    )
    return {name.rpartition(".")[2]: importlib.import_module(f"{PACKAGE}.{name}") for name in names}


def for_tests(root: Path, _: str) -> None:
    """Have this process import the release, for unit tests of its classes."""
    load(root)
