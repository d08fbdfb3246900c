"""The lines of the tables of the API (api.py), by the names that each release has."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from impl.loading import probe
from impl.loading.renamed import in_uses
from impl.sglang.parts.modules import WITH_TIERS
from impl.sglang.releases.api import BY
from impl.sglang.releases.v0_5_10_to_14 import Release0510


def files(root: Path, releases: Mapping[str, type[Release0510]]) -> probe.Checkout:
    """Return the files under `root`, which holds `sglang/`.

    releases: all, by version, from old to new.
    """
    return probe.Checkout(root, "sglang/srt", WITH_TIERS, tuple(_entries(releases)))


def _entries(releases: Mapping[str, type[Release0510]]) -> Iterator[probe.ApiLine]:
    """Yield the tables, with the names that each release has for the things in braces, and those that it
    has renamed."""
    order = [*releases, "..."]
    words = {version: _names(kind) for version, kind in releases.items()}
    for line in lines():
        reached = order[order.index(line.since) : order.index(line.before)]
        spelling = {v: in_uses(line.text.format_map(words[v]), releases[v].renamed) for v in reached}
        for text, alike in itertools.groupby(reached, key=spelling.__getitem__):
            versions = list(alike)
            end = order[order.index(versions[-1]) + 1]
            yield from probe.entries(f"{versions[0]} {end} {text}", line.by, line.fact)


def all_lines(releases: Mapping[str, type[Release0510]]) -> str:
    """Return the lines of all tables, by the names of each release, as the text of a table."""
    words = [_names(kind) for kind in releases.values()]
    texts = {
        f"{line.since} {line.before} {line.text.format_map(of)}"
        for line in lines()
        for of in words
        if not _unknown(line.text, of)
    }
    return "\n".join(sorted(texts))


def _unknown(text: str, words: Mapping[str, str]) -> bool:
    """Return whether a line has a name in braces that a release does not have."""
    return any(not words.get(name) for name in re.findall(r"\{(\w+)\}", text))


class WrittenLine(NamedTuple):
    """A line of a table as it is written.

    text: "file | uses", with names in braces.
    """

    by: str
    fact: str
    since: str
    before: str
    text: str


def lines() -> Iterator[WrittenLine]:
    """Yield the lines of all tables."""
    for by, table in BY.items():
        fact = ""
        for line in table.strip().splitlines():
            if line.startswith("["):
                fact = line.strip("[]")
            else:
                since, before, text = line.split(maxsplit=2)
                yield WrittenLine(by, fact, since, before, text)


def uses(release: type[Release0510], order: Sequence[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield file and use, by the names that the code here has.

    order: all versions.
    """
    words = _names(release)
    for line in lines():
        release_index = order.index(release.facts.get(line.fact, release.version))
        if order.index(line.since) <= release_index and (
            line.before == "..." or release_index < order.index(line.before)
        ):
            file, _, names = line.text.format_map(words).partition(" | ")
            for use in names.split(";"):
                yield file, ast.parse(use.strip(), mode="eval").body


def _names(release: type[Release0510]) -> dict[str, str]:
    """Return the values of the names that the table has in braces: modules as files, classes, and where a
    request has its cursors."""
    names = {
        "looks": release.looks,
        "chunks": release.chunks,
        "checkpoints": release.checkpoints,
        "controller": _file(release.session_controller),
    }
    classes = {
        "sessions": ("SessionCache", release.session_cache),
        "checker": ("Checker", release.checker),
        "observer": ("Observer", release.observer),
    }
    for file, (kind, home) in classes.items():
        if home is not None:
            module, class_name = home
            names |= {file: _file(module), kind: class_name}
    for name, place in release.places.items():
        record, _, attribute = place.rpartition(".")
        names[name] = f"{'ReqKvInfo' if record else 'Req'}.{attribute}"
    return names


def _file(module: str) -> str:
    """Return the file of a module, below `sglang/srt`."""
    return module.removeprefix("sglang.srt.").replace(".", "/") + ".py"
