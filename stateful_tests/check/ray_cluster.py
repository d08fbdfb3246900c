"""Work on many machines, through Ray (optional: `pip install 'kvspec[cluster]'`).

Tasks depend on nothing but their arguments, so Ray runs one again where a worker or a node was lost.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Iterable
from importlib import import_module
from typing import Any

from stateful_tests.check.executors import Result, Task, submit_ahead


class NoCluster(Exception):
    """Ray is not installed, or the cluster does not answer."""


class RayCluster:
    """An executor (see `executors`) on the cores of a cluster."""

    def __init__(self, address: str) -> None:
        """Connect. Our own packages are sent along, so that all nodes run this very code. Raises
        NoCluster."""
        try:
            import ray
        except ImportError as error:
            raise NoCluster(f"{address}: needs Ray: pip install 'kvspec[cluster]'") from error
        _reachable(address)
        import impl
        import reference
        import stateful_tests

        # installed: kvspec
        tops = {m.__name__.partition(".")[0] for m in (reference, impl, stateful_tests)}
        modules = [import_module(top).__path__[0] for top in sorted(tops)]
        try:
            ray.init(
                address=address,
                runtime_env={"py_modules": modules},
                log_to_driver=False,
                logging_level="ERROR",
                ignore_reinit_error=True,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise NoCluster(f"{address}: {str(error).splitlines()[0]:.160}") from error
        self._ray: Any = ray
        self.at_once = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def map(
        self, work: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Generator[Result, None, None]:
        run = self._ray.remote(max_retries=-1)(_run)
        shared = self._ray.put(work)
        return submit_ahead(
            lambda task: run.remote(shared, task),
            self._ray.get,
            self._ray.cancel,
            tasks,
            3 * self.at_once,
        )

    def close(self) -> None:
        self._ray.shutdown()


def _run(work: Callable[[Task], Result], task: Task) -> Result:
    return work(task)


def _reachable(address: str) -> None:
    """Return whether an address answers. Ray itself waits for minutes for one that does not, and then
    ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # auto, local
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NoCluster(f"{address}: no cluster answers there ({error})") from error
