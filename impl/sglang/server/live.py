"""A release's HTTP server on a CPU, whole: its processes, its real forward pass, a model of dummy weights.

    PYTHON -m impl.sglang.server.live CONFIG FOLDER PORT        PYTHON is the server environment's

SGLang's processes are spawned and import this module first, so what is inert is inert in each of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from impl.sglang.server import boot

boot.install()


def main(config_json: str, folder: str, port: str) -> None:
    """Serve until a signal ends it."""
    import msgspec
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    from impl.sglang.server.build import NEVER, model_folder
    from impl.sglang.server.clients import Config

    config = msgspec.json.decode(config_json, type=Config)
    wanted = {
        "model-path": model_folder(Path(folder), eos=NEVER), "load-format": "dummy", "device": "cpu",
        "attention-backend": "torch_native", "sampling-backend": "pytorch", "dtype": "float32",
        "max-total-tokens": config.tokens, "max-running-requests": config.running,
        "chunked-prefill-size": config.chunk, "page-size": config.page_size, "context-length": 2048,
        "schedule-conservativeness": 0.05 if config.pressure else 1.0, "mem-fraction-static": 0.3,
        "host": "127.0.0.1", "port": port, "log-level": "warning",
    }  # fmt: skip
    flags = ["skip-tokenizer-init", "enable-streaming-session", "skip-server-warmup"]
    flags += [] if config.overlap else ["disable-overlap-schedule"]
    flags += [] if config.tree else ["disable-radix-cache"]
    flags += ["enable-mixed-chunk"] if config.mixed else []
    arguments = [f"--{name}={value}" for name, value in wanted.items()]
    run_server(prepare_server_args([*arguments, *(f"--{flag}" for flag in flags)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
