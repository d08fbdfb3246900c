"""transformers as an engine."""

from __future__ import annotations

from impl.engines import Engine
from impl.self_scheduling.release_system import drive_release
from impl.transformers_paging.loading import TransformersSystem

ENGINE = Engine(
    name="transformers",
    title="transformers",
    repository="huggingface/transformers",
    about="Its continuous batching.",
    releases=TransformersSystem.releases,
    ways=("", *TransformersSystem.ways),
    drive=drive_release(TransformersSystem),
    test_hook=lambda _: "impl.transformers_paging.loading:for_tests",
    sketched=("transformers/generation/continuous_batching/**/*.py",),
)
