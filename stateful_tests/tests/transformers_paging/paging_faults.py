"""Faults of transformers 5.23.0, and what sees each: clauses by name, found by random runs on small sizes.

`python -m stateful_tests.tests.transformers_paging.paging_faults` prints them as JSON; "" is the release
as it is.
"""

import json
import tomllib
from contextlib import nullcontext
from pathlib import Path

from impl.transformers_paging.driver import PagingDriver
from impl.transformers_paging.loading import PACKAGE, TransformersSystem
from reference.commands import Mode
from stateful_tests.check import driving, tiers
from stateful_tests.tests.support.patched_code import patched

VERSION = "5.23.0"
PAGING_FAULTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))


def seen(runs: int = 12) -> dict[str, str]:
    """The clause that sees each fault first, "" where none does."""
    system = PagingDriver(TransformersSystem(VERSION).root)
    plan = tiers.plan("smoke", presets=("full", "tight"), examples=runs)
    found = {}
    for name, fault in {"": {"file": ""}, **PAGING_FAULTS}.items():
        module = f"{PACKAGE}.{fault['file']}".replace("/", ".")
        path = Path(system.root, *module.split(".")).with_suffix(".py")
        found[name] = ""
        with patched(path, module, fault["old"], fault["new"]) if name else nullcontext():
            for example, preset in ((example, preset) for example in range(runs) for preset in plan.presets):
                config = driving.Configuration(tiers.CLIENTS, preset, Mode.FAITHFUL)
                batch = driving.RunBatch(config, range(example, example + 1))
                [(_, violations)] = driving.drive(system, plan, batch).runs
                if violations:
                    found[name] = violations[0][0].clause
                    break
    return found


if __name__ == "__main__":
    print(json.dumps(seen()))
