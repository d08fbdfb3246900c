"""Writes the data of `impl.loading` on releases: their sketches, by which `nearest` finds the release nearest
to a checkout, the names that adapters use (`used_names`), and the statements of the rules that adapters copy
(`copied_rules`).

`python -m ci.sketches [ENGINE...]` reads every driven release of an engine; those that are not in the cache
are fetched. Run it when a release is added.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ci import adapter_names
from impl.engines import Engine, engine
from impl.loading import nearest, used_names
from impl.system_spec import ENGINES, release_name
from stateful_tests.check.trees.base_selection import root_of
from stateful_tests.check.trees.way_map import way_map
from stateful_tests.lockstep import system_names


def sketch_of(record: Engine) -> nearest.Sketch:
    """Return the sketch of all driven releases of an engine."""
    releases = record.releases
    roots = [*complete_roots(record)]
    files = sorted({file for root in roots for file in driven_files(record, root)})
    lines = dict[bytes, int]()
    for number, root in enumerate(roots):
        for line in nearest.checksums(root / file for file in files):
            lines[line] = lines.get(line, 0) | 1 << number
    return nearest.Sketch(releases, tuple(files), lines)


def names_of(record: Engine) -> used_names.NameSketch:
    """Return the names that an engine's adapter uses, with the driven releases that have them."""
    releases = record.releases
    roots = [*complete_roots(record)]
    files = {file for root in roots for file in driven_files(record, root)} | way_map(record.name).files
    words_by_release = [used_names.words(root / file for file in files) for root in roots]
    defaulted = adapter_names.names_with_defaults(roots[-1] / file for file in files)
    names = []
    for name, ways in adapter_names.names_given_to_releases(record.name, defaulted).items():
        if mask := sum(1 << number for number, words in enumerate(words_by_release) if name in words):
            names.append(used_names.UsedName(name, mask, ways))
    return used_names.NameSketch(releases, tuple(sorted(files)), tuple(names))


def driven_files(record: Engine, root: Path) -> Iterator[str]:
    """Return the files of a release that its sketch covers."""
    for pattern in record.sketched:
        yield from (file.relative_to(root).as_posix() for file in root.glob(pattern))


def complete_roots(record: Engine) -> Iterator[Path]:
    """Return the folders of all driven releases, with the files that all ways load and the rules that
    the adapter copies."""
    for release in record.releases:
        root = _release_root(release_name(record.name, release))
        record.complete(release, root)
        yield root


def _release_root(release: str) -> Path:
    with closing(system_names.resolve(release)) as system:
        root = root_of(system)
    assert root is not None
    return root


if __name__ == "__main__":
    for record in map(engine, sys.argv[1:] or ENGINES):
        sketch = nearest.sketch_text(sketch_of(record))
        (nearest.FOLDER / f"{record.name}.txt").write_text(sketch, "ascii")
        used_names.write(record.name, names_of(record))
        if record.copied is not None:
            record.copied.file.write_text(record.copied.rules_text(complete_roots(record)), "utf-8")
