"""The worker of a release: `python -m impl.sglang.process.worker ROOT VERSION [OPTION...]`, options as
system.py gives them. A release's module state is global, so each worker has one release.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from impl.adapter import Capabilities, UnusableImplementation, View
from impl.process import wire
from impl.process.failures import fault_of_adapter
from impl.process.worker import serve
from reference.commands import Command, Outcome
from reference.geometry import Geometry

if TYPE_CHECKING:
    from impl.sglang.scheduler.call_log import Calls
    from impl.sglang.scheduler.driver import Driver


class _Release:
    """A release as a worker drives it."""

    name, capabilities = "", Capabilities()  # SGLangSystem says both

    def __init__(self, driver: Driver, calls: Calls | None, root: Path) -> None:
        self._driver, self._calls, self._root = driver, calls, root
        self._view: View
        self.noted = wire.Noted()

    def reset(self, geometry: Geometry) -> None:
        with self._own_errors():
            self._view = self._driver.reset(geometry)
        if self._calls is not None:
            self._calls.started()

    def apply(self, command: Command) -> Outcome:
        with self._own_errors():
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

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """What goes wrong in the adapter is said of the adapter, never of the release."""
        try:
            yield
        except UnusableImplementation:
            raise
        except Exception as error:
            from impl.sglang.parts.doubles import UNSET

            unset = rf"\b({'|'.join(map(re.escape, sorted(UNSET))) or '(?!)'})\b"
            files = "parts/modules.py", unset, "parts/doubles.py"
            if (why := fault_of_adapter(error, self._root, *files)) is not None:
                raise UnusableImplementation(
                    f"{self._root} is not of the {self._driver.release.version} kind: {why}"
                    " (CONTRIBUTING.md, 'A new release of SGLang')"
                ) from error
            raise

    def view(self) -> View:
        return self._view

    def close(self) -> None:
        """Holds nothing outside of this process."""


def main(arguments: list[str]) -> int:
    """Serve until stdin ends. Returns an exit status."""
    root, version, options = Path(arguments[0]), arguments[1], arguments[2:]
    logging.disable(logging.CRITICAL)

    def make() -> _Release:
        import torch  # here, so that tests of the wire need no torch

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        from impl.sglang.releases.catalogue import supported
        from impl.sglang.releases.variants import VARIANTS, variant
        from impl.sglang.scheduler.call_log import Calls
        from impl.sglang.scheduler.driver import Driver

        if "--gpu" in options:
            if not torch.cuda.is_available():
                raise UnusableImplementation("--device cuda: torch sees no CUDA device here")
            from impl.sglang.parts.doubles import use_gpu

            use_gpu()
        release = supported(version)
        for tree in VARIANTS:
            if f"--tree={tree}" in options:
                release = variant(release, tree)
        driver = Driver(release(root), overlap="--overlap" in options)
        return _Release(driver, Calls(driver) if "--calls" in options else None, root)

    return serve(make, root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
