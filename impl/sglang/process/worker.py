"""The worker of a release: `python -m impl.sglang.process.worker ROOT VERSION [OPTION...]`, options as
system.py gives them. A release's module state is global, so each worker has one release.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from impl.adapter import UnusableImplementation
from impl.process.worker import serve

if TYPE_CHECKING:
    from impl.sglang.scheduler.driver import Driver

# for the process that workers are forked from
PRELOADED = ("impl.sglang.scheduler.call_log", "impl.sglang.scheduler.driver")


def main(arguments: list[str]) -> int:
    """Serve until stdin ends. Returns an exit status."""
    root = Path(arguments[0])
    spec = arguments[1]
    options = arguments[2:]
    logging.disable(logging.CRITICAL)

    def make() -> Driver:
        """Return the driver of the worker's release, with its options. Raises UnusableImplementation for a
        GPU that torch does not see."""
        import torch  # here, so that tests of the wire need no torch

        torch.set_num_threads(1)
        # as SGLANG_ENABLE_TORCH_INFERENCE_MODE has it: its small operators take a fifth less
        torch.inference_mode().__enter__()
        from impl.sglang.releases.catalogue import supported_release
        from impl.sglang.releases.variants import VARIANTS, variant
        from impl.sglang.scheduler.call_log import Calls
        from impl.sglang.scheduler.driver import Driver

        if "--gpu" in options:
            if not torch.cuda.is_available():
                raise UnusableImplementation("--device cuda: torch sees no CUDA device here")
            from impl.sglang.parts.stand_ins import use_gpu

            use_gpu()
        release = supported_release(spec)
        for tree in VARIANTS:
            if f"--tree={tree}" in options:
                release = variant(release, tree)
        driver = Driver(release(root), root, overlap="--overlap" in options)
        driver.calls = Calls(driver) if "--calls" in options else None
        return driver

    return serve(make, root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
