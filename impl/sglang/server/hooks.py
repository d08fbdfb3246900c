"""The places of the watcher's hooks in SGLang, and how they are put there."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from impl.adapter import UnusableImplementation
from impl.sglang.releases import names
from impl.sglang.releases.catalogue import TABLE
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.server.reading import installed_release
from impl.sglang.server.transfers import POINTS as POINTS_OF_PAIRS
from impl.sglang.server.transfers import TransferHooks
from impl.sglang.server.watch import Steps, Watcher

_LOG = logging.getLogger("kvspec")
CHECKPOINTS = sorted({release.checkpoints for release in TABLE.values()} - {""})
# Where each hook goes, under sglang.srt, as module and name. A release has one of the CHECKPOINTS.
POINTS: tuple[tuple[str, str, str], ...] = (
    ("session.session_controller", "SessionController.open", "open_session"),
    ("session.session_controller", "SessionController.close", "close_session"),
    ("session.session_controller", "SessionController._close", "session_gone"),
    ("session.session_controller", "Session.create_req", "create_request"),
    ("managers.scheduler", "Scheduler._add_request_to_queue", "queue"),
    ("managers.scheduler", "Scheduler._prefetch_kvcache", "ask_storage"),
    ("managers.schedule_batch", "Req.init_next_round_input", "admit"),
    ("managers.schedule_batch", "ScheduleBatch.prepare_for_extend", "extend"),
    ("managers.schedule_batch", "ScheduleBatch._evict_swa", "evict_window"),
    ("mem_cache.common", "release_kv_cache", "release"),
    ("managers.scheduler", "Scheduler.abort_request", "abort"),
    ("managers.scheduler", "Scheduler.flush_cache", "flush"),
    ("managers.scheduler", "Scheduler.get_next_batch_to_run", "step"),
    *(("mem_cache.common", name, "insert") for name in CHECKPOINTS),
    # late: where results are written
    ("managers.scheduler", "Scheduler.process_batch_result", "result"),
)


def around(watcher: Watcher | TransferHooks, name: str) -> Callable[..., Any]:
    """Return a hook around a function, by which the watcher notes what is before and after. Its failures harm
    nobody."""
    note: Callable[..., Any] = getattr(watcher, name)

    def after(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if watcher.on:
            try:
                note(result, *args, **kwargs)
            except Exception as error:
                watcher.note_failure(name, error)
        return result

    def both(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not watcher.on:
            return original(*args, **kwargs)
        noting: Steps | None = None
        try:
            noting = note(*args, **kwargs)
            next(noting)
        except Exception as error:
            noting = None
            watcher.note_failure(name, error)
        result = original(*args, **kwargs)
        if noting is not None:
            try:
                noting.send(result)
            except StopIteration:
                pass
            except Exception as error:
                watcher.note_failure(name, error)
        return result

    return functools.wraps(note)(both if inspect.isgeneratorfunction(note) else after)


def hook(watcher: Watcher) -> None:
    """Put the watcher's hooks into SGLang's registry; that of results once it is known to be needed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    names.alias(type(watcher.kind))
    hooked = list(targets(watcher.kind))

    def register(late: bool) -> None:
        for target, name in hooked:
            if late is (name == "result"):
                HookRegistry.register(target, around(watcher, name), HookType.AROUND)

    if watcher.kind.watches_pairs:
        hook_transfers(watcher.transfers)

    def tell_results() -> None:
        register(late=True)
        HookRegistry.apply_hooks()

    register(late=False)
    watcher.tell_results = tell_results


def hook_transfers(transfers: TransferHooks) -> None:
    """Put the hooks of a server of a pair into SGLang's registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for module, target, name in POINTS_OF_PAIRS:
        hook_of = around(transfers, name)
        HookRegistry.register(f"sglang.srt.{module}.{target}", hook_of, HookType.AROUND)


def targets(release: Release0510) -> Iterator[tuple[str, str]]:
    """Yield the places of the hooks in a release, and their names."""
    for module, target, name in POINTS:
        if name != "insert" or target == release.checkpoints:
            yield f"sglang.srt.{module}.{names.name_in_release(target, type(release))}", name


def register() -> None:
    """Hook the scheduler, if the environment asks for it. SGLang calls this in each of its processes.

    A release whose names are not known is not watched, nor is one with unusable settings: one line on the
    log says why.
    """
    if not os.environ.get("KVSPEC_WATCH"):
        return
    try:
        watcher = Watcher(installed_release(), dict(os.environ))
    except (UnusableImplementation, ValueError) as error:
        _LOG.error("KVSPEC_WATCH: this server is not watched: %s", error)
        return
    hook(watcher)
