"""The worker of a release: `python -m impl.vllm.worker ROOT [--async] [--v2]`. A release's module state is
global, so each worker has one release."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from impl.process.worker import serve

if TYPE_CHECKING:
    from impl.vllm.driver import EngineDriver


def main(arguments: list[str]) -> int:
    """Serve until stdin ends. Returns an exit status."""
    root = Path(arguments[0])
    logging.disable(logging.CRITICAL)

    def make() -> EngineDriver:
        import torch  # dtypes of the specs; here, so that tests of the wire need none

        torch.set_num_threads(1)
        from impl.vllm.driver import EngineDriver

        return EngineDriver(root, overlap="--async" in arguments, v2="--v2" in arguments)

    return serve(make, root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
