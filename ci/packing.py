"""The build hook of the wheel: the folders of the repository become one package, `kvspec`.

Installed, `reference` is `kvspec.reference`, and so on; nothing else is a top-level name. A file is copied,
with the names that it imports, or spells in a string, changed to those. Hatchling calls `Packing`
(pyproject.toml). `python -m ci.packing tests FOLDER` writes the tests there, to run them on an installation.
"""

import ast
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("reference", "impl", "stateful_tests", "ci")
STAYS = (
    "ci/public", "ci/bench", "ci/mutants", "ci/pictures", "ci/README.md",
    "ci/constraints.txt", "ci/packing.py", "ci/test_wheel.sh", "stateful_tests/tests",
)  # fmt: skip
# The tests lie beside the package when it is tested, and the root of the repository is the package.
TESTS = {
    "stateful_tests.tests": "kvspec_tests",
    "Path(__file__).resolve().parents[3]": 'Path(*__import__("kvspec").__path__)',
    "Path(__file__).parents[3]": 'Path(*__import__("kvspec").__path__)',
}
_ANY = "|".join(PACKAGES)
# `from impl.adapter import`, `import reference`; and a string that begins with a module's name.
_FROM = re.compile(rf"(?<![\w.])from ({_ANY})(?=[. ])")
_IMPORT = re.compile(rf"(?<![\w.])(?<!from )import ({_ANY})$", re.MULTILINE)
_SPELLED = re.compile(rf"(?<=[\"'])({_ANY})(?=\.[a-z_{{])")


class Packing(BuildHookInterface[Any]):
    """Puts the files of the package into a wheel. An editable installation keeps the folders."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        home = Path(self.root)
        self._made = tempfile.TemporaryDirectory()
        for number, (path, target) in enumerate(files(home)):
            if path.suffix == ".py":
                moved_file = Path(self._made.name, str(number))
                moved_file.write_text(moved_source(path), encoding="utf-8")
                path = moved_file
            build_data["force_include"][str(path)] = target

    def finalize(self, *_: Any) -> None:
        if hasattr(self, "_made"):
            self._made.cleanup()


def files(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of the package, and its name in it."""
    yield home / "README.md", "kvspec/README.md"  # the page of `kvspec spec --html` has its limits
    for folder in (*PACKAGES, "fixtures", "ci/public/kvspec"):
        for path in sorted((home / folder).rglob("*")):
            name = path.relative_to(home).as_posix()
            inside = folder == "ci/public/kvspec" or not name.startswith(STAYS)
            if inside and path.is_file() and "__pycache__" not in name:
                yield path, "kvspec/" + name.removeprefix("ci/public/kvspec/")


def moved_source(path: Path, modules: dict[str, str] | None = None) -> str:
    """Return the text of a module with our packages' names as they are when installed."""
    text = path.read_text(encoding="utf-8")
    for name, becomes in (modules or {}).items():
        text = text.replace(name, becomes)
    text = _FROM.sub(r"from kvspec.\1", text)
    text = _IMPORT.sub(r"from kvspec import \1", text)
    text = _SPELLED.sub(r"kvspec.\1", text)
    for node in ast.walk(ast.parse(text)):
        module_names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        module_names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.partition(".")[0] in PACKAGES for name in module_names):
            raise ValueError(f"{path}: cannot be moved into kvspec: {ast.unparse(node)}")
    return text


def tests(home: Path, folder: Path) -> None:
    """Return the tests as a package of their own, kvspec_tests, which imports only kvspec."""
    source = home / "stateful_tests" / "tests"
    for path in sorted(source.rglob("*")):
        target = folder / "kvspec_tests" / path.relative_to(source)
        if path.is_file() and "__pycache__" not in path.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(
                moved_source(path, TESTS).encode() if path.suffix == ".py" else path.read_bytes()
            )


if __name__ == "__main__":
    tests(Path(__file__).parents[1], Path(sys.argv[2]))
