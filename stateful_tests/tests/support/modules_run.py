"""Modules run in a process of their own, which has torch already."""

import subprocess
import sys
import tempfile

from impl import HOME
from impl.process import child, fork_server


def output_of(module: str, *arguments: str, limit_s: float = 300) -> str:
    """Return what `python -m MODULE ARGUMENT...` prints. Raises CalledProcessError for another end than 0."""
    command = [sys.executable, "-m", module, *arguments]
    environment = child.environment([HOME, *sys.path], OMP_NUM_THREADS="1")
    with tempfile.TemporaryFile() as errors:
        with fork_server.launch(command, env=environment, stderr=errors) as process:
            output = process.stdout.read()
            code = process.wait(timeout=limit_s)
        errors.seek(0)
        if code:
            raise subprocess.CalledProcessError(code, command, output, errors.read())
    return output.decode()
