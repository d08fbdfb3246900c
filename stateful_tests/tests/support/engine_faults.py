"""Faults of an engine's release, and what sees each: clauses by name, found by random runs on small sizes.

`python -m stateful_tests.tests.support.engine_faults lmdeploy` prints them as JSON; "" is the release without
one, and with those known faults mended that faults.toml has a way for.
"""

import json
import sys
import tomllib
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from reference.commands import Mode
from stateful_tests.check import driving, tiers
from stateful_tests.lockstep.systems import resolve
from stateful_tests.tests.support.patched_code import patched

TESTS = Path(__file__).parents[1]


class Engine(NamedTuple):
    """folder: of its tests, with faults.toml. package: where the files of the faults are. runs: of each
    preset."""

    folder: str
    version: str
    package: str
    presets: tuple[str, ...]
    runs: int

    @property
    def faults(self) -> dict[str, dict[str, Any]]:
        """Of faults.toml, by name."""
        return tomllib.loads((TESTS / self.folder / "faults.toml").read_text(encoding="utf-8"))

    @property
    def expected(self) -> dict[str, str]:
        """What `seen` must give."""
        return {
            "": "",
            **{name: each["clause"] for name, each in self.faults.items() if "clause" in each},
        }

    def driver(self, root: Path) -> Any:
        """The release in this process."""
        if self.folder == "lmdeploy":
            from impl.lmdeploy.driver import LMDeployDriver

            return LMDeployDriver(root)
        from impl.transformers_paging.driver import PagingDriver

        return PagingDriver(root)


ENGINES = {
    "transformers": Engine(
        "transformers_paging",
        "5.23.0",
        "transformers.generation.continuous_batching",
        ("full", "tight"),
        12,
    ),
    "lmdeploy": Engine(
        "lmdeploy", "0.18.0", "lmdeploy.pytorch", ("full", "window", "state", "state-tight"), 12
    ),
}


def seen(name: str) -> dict[str, str]:
    """The clause that sees each fault of an engine first, "" where none does."""
    engine = ENGINES[name]
    root = resolve(f"{name}=={engine.version}").root
    system = engine.driver(root)
    changes = engine.faults
    mended = [each for each in changes.values() if each.get("mended")]
    planted = {"": [], **{name: [change] for name, change in changes.items() if "clause" in change}}
    return {name: _first(system, engine, root, mended + change) for name, change in planted.items()}


def _first(system: Any, engine: Engine, root: Path, changes: list[dict[str, Any]]) -> str:
    plan = tiers.plan("smoke", presets=engine.presets, examples=engine.runs)
    with ExitStack() as stack:
        for change in changes:
            module = f"{engine.package}.{change['file']}".replace("/", ".")
            path = Path(root, *module.split(".")).with_suffix(".py")
            stack.enter_context(patched(path, module, change["old"], change["new"]))
        for example, preset in product(range(engine.runs), plan.presets):
            config = driving.unfitted(tiers.CLIENTS, preset, Mode.FAITHFUL)
            batch = driving.RunBatch(config, range(example, example + 1))
            [(_, violations)] = driving.drive(system, plan, batch).runs
            if violations:
                return str(violations[0][0].clause)
    return ""


if __name__ == "__main__":
    print(json.dumps(seen(sys.argv[1])))
