"""The worker of a release: `python -m impl.sglang.process.worker ROOT VERSION [OPTION...]`, options as
system.py gives them. A release's module state is global, so each worker has one release.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from impl.adapter import Capabilities, View
from impl.process import wire
from impl.process.worker import serve
from reference.commands import Command, Outcome
from reference.geometry import Geometry

if TYPE_CHECKING:
    from impl.sglang.scheduler.call_log import Calls
    from impl.sglang.scheduler.driver import Driver


class _Release:
    """A release as a worker drives it."""

    name, capabilities = "", Capabilities()  # SGLangSystem says both

    def __init__(self, driver: Driver, calls: Calls | None) -> None:
        self._driver, self._calls = driver, calls
        self._view: View
        self.noted = wire.Noted()

    def reset(self, geometry: Geometry) -> None:
        self._view = self._driver.reset(geometry)
        if self._calls is not None:
            self._calls.started()

    def apply(self, command: Command) -> Outcome:
        if self._calls is None:
            outcome, self._view = self._driver.apply(command)
            return outcome
        try:
            outcome, self._view = self._driver.apply(command)
        except BaseException:
            self.noted = wire.Noted(self._calls.take())
            raise
        self.noted = wire.Noted(self._calls.take(), self._calls.late())
        return outcome

    def view(self) -> View:
        return self._view

    def close(self) -> None:
        """Holds nothing outside of this process."""


def main(arguments: list[str]) -> int:
    """Serve until stdin ends. Returns an exit status."""
    root, version, options = Path(arguments[0]), arguments[1], arguments[2:]
    logging.disable(logging.CRITICAL)
    started: list[_Release] = []

    def make() -> _Release:
        import torch  # here, so that tests of the wire need no torch

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        from impl.sglang.releases.catalogue import supported
        from impl.sglang.releases.variants import VARIANTS, variant
        from impl.sglang.scheduler.call_log import Calls
        from impl.sglang.scheduler.driver import Driver

        release = supported(version)
        for tree in VARIANTS:
            if f"--tree={tree}" in options:
                release = variant(release, tree)
        driver = Driver(release(root), overlap="--overlap" in options)
        started.append(_Release(driver, Calls(driver) if "--calls" in options else None))
        return started[0]

    return serve(make, root, lambda: started[0].noted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
