"""The release's own Scheduler.abort_request, and what ends an aborted request between two chunks, on a
stand-in of a scheduler."""

from __future__ import annotations

import importlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

from impl.loading.function_cuts import cut
from impl.loading.isolation import Inert
from impl.loading.renamed import in_uses
from impl.sglang.parts.stand_ins import SERVER_ARGS, Bag, DisaggregationMode

_FILE = "sglang/srt/managers/scheduler.py"
_ABORT = "Scheduler.abort_request"
_RELEASE = "Scheduler._release_aborted_request"
_BETWEEN_CHUNKS = "Scheduler.process_pending_chunked_abort"
_PREFILL = "sglang.srt.disaggregation.prefill"


class Aborts:
    """The aborts of a scheduler.

    abort: the method, of a scheduler and what a client asks for.
    prefills: for a server that only prefills.
    """

    def __init__(self, root: Path, release: Any, prefills: bool = False) -> None:
        """Load the scheduler's methods for aborts from the release's file.

        prefills: those of a server that only prefills, too.
        """
        env = {
            **vars(importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")),
            **vars(release.common),
            **vars(release.batch),
            "AbortReq": Bag,
            "DisaggregationMode": DisaggregationMode,
            "_make_abort_req": lambda *_, **__: None,
            "get_disagg": lambda: SERVER_ARGS,
            "get_parallel": lambda: SERVER_ARGS,
            "logger": logging.getLogger("sglang"),
        }
        methods = [_ABORT, _RELEASE]
        if prefills:
            env |= vars(importlib.import_module(_PREFILL))
            env["AbortReq"] = Bag
            methods.append(_BETWEEN_CHUNKS)
        abort, *others = (in_uses(name, release.renamed) for name in methods)
        functions = cut(root / _FILE, frozenset({abort, *others}), env)
        self.abort = functions.pop(abort.rpartition(".")[2])
        self._others = functions  # from 0.5.20 on

    def lend(self, scheduler: Any) -> None:
        """Give the stand-in what the method calls."""
        for name, method in self._others.items():
            setattr(scheduler, name, partial(method, scheduler))

    def waiting(self, req: Any, cache: Any) -> None:
        """Abort the one request in the queue. No other part of the scheduler matters."""
        scheduler: Any = Inert()
        scheduler.waiting_queue = [req]
        scheduler.tree_cache = cache
        scheduler.disaggregation_mode = DisaggregationMode.NULL
        scheduler.chunked_req = None
        scheduler.cur_batch = None
        scheduler.running_batch = Bag(reqs=[])
        self.lend(scheduler)
        self.abort(scheduler, Bag(rid=req.rid))
