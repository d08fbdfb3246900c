"""Names of things that a release has renamed: `renamed` of its class (impl.loading.renamed)."""

from __future__ import annotations

import importlib

from impl.adapter import UnusableImplementation
from impl.loading import renamed
from impl.sglang.releases.api_lines import uses
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.releases.v0_5_10_to_14 import Release0510


def name_in_release(name: str, release: type[Release0510]) -> str:
    """Return a release's name for `Class.member`, or for a function or a class of a module."""
    return renamed.in_uses(name, release.renamed)


def alias(release: type[Release0510]) -> None:
    """Have what the release has renamed answer to the old name as well, in modules that are loaded here.

    Raises UnusableImplementation for a name that no table of the API has: nothing would answer to it.
    """
    for name in release.renamed:
        files = dict.fromkeys(
            f for f, use in uses(release, list(TABLE)) if renamed.name_of(use) == name
        )
        if not files:
            raise UnusableImplementation(
                f"sglang {release.version}: renamed has {name}, which no line of api.py has"
            )
        for file in files:
            stem = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            renamed.alias(importlib.import_module(f"sglang.srt.{stem}"), name, release.renamed)


def in_code(text: str, release: type[Release0510]) -> str:
    """Return lines of Python that use a release, with the names that it has."""
    return renamed.in_code(text, release.renamed, (use for _, use in uses(release, list(TABLE))))
