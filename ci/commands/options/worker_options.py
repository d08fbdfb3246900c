"""Options for where work runs: `-j N` processes, `--ray ADDRESS` a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click

from ci.commands.shared import Unusable, unusable

if TYPE_CHECKING:
    from stateful_tests.check.executors import Executor


def parallel_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add -j and --ray, for a command that takes `where`: an `executor` that knows them."""

    @wraps(command)
    def run(*arguments: Any, jobs: int | None, ray_address: str | None, **options: Any) -> Any:
        return command(*arguments, where=partial(executor, jobs, ray_address), **options)

    ray = click.option(
        "--ray",
        "ray_address",
        metavar="ADDRESS",
        help="Use the Ray cluster at ADDRESS; auto: the one that runs here.",
    )
    return click.option(
        "-j",
        "--jobs",
        type=click.IntRange(1),
        metavar="N",
        help="Processes to use. No result depends on it. [default: the number of cores, where that pays]",
    )(ray(run))


@contextmanager
def executor(
    jobs: int | None, ray_address: str | None, *, pays: bool = True, fork: bool = True
) -> Iterator[Executor]:
    """Yield the executor of the work.

    pays: without -j all cores are used.
    fork: processes may be forked.
    """
    from stateful_tests.check.executors import SERIAL, Processes, cores

    if ray_address is not None:
        from stateful_tests.check.ray_cluster import NoCluster, RayCluster

        if jobs is not None:
            raise Unusable("--ray uses the cores of the cluster: without -j")
        with unusable("--ray ", NoCluster):
            workers: Executor = RayCluster(ray_address)
    else:
        count = jobs or (cores() if pays else 1)
        workers = Processes(count, fork=fork) if count > 1 else SERIAL
    try:
        yield workers
    finally:
        workers.close()
