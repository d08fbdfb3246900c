"""The watcher on a release that the driver plays: a log of each run, as a whole scheduler would write it.

The hooks sit where they do in a server, but for the four on methods of the Scheduler itself. Of that class
nothing is driven here; this module calls their hooks where the driver does what those methods do.
"""

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from impl.sglang.process import worker
from impl.sglang.process.system import SGLangSystem
from impl.sglang.releases.catalogue import supported_release
from impl.sglang.server import reading
from impl.sglang.server.hooks import POINTS, around, targets
from impl.sglang.server.watch import Watcher
from impl.vocabulary import RequestPhase
from reference.commands import Command, Outcome, Retract
from reference.geometry import Geometry

ONLY_IN_A_SERVER = ("queue", "abort", "result", "step")
_DECODE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode"
NO_SCHEDULERS = {"Match", "Unlock", "Insert", "Evict", "CheckBusy", "CheckIdle", "Launch", "Settle"}


class WatchedRelease(SGLangSystem):
    """A played release whose runs are watched, each into a folder of its own under `folder`.

    spec: its rounds are verify rounds, else plain ones.
    """

    def __init__(self, version: str, folder: Path, *, spec: bool, overlap: bool = False) -> None:
        super().__init__(version, overlap=overlap)
        self.folder = folder
        self.spec = spec
        commands = self.capabilities.commands - NO_SCHEDULERS - {"Decode" if spec else "SpecDecode"}
        # A prompt that another server has computed comes by hooks that nobody watches.
        self.capabilities = replace(self.capabilities, commands=commands, swa_tail=False)

    def command_line(self) -> list[str]:
        own = str(self.folder), str(int(self.spec))
        return [sys.executable, "-m", __name__, *own, *super().command_line()[3:]]


class _Scheduler:
    """What the watcher reads of a Scheduler, of the server that a driver plays."""

    running_batch = SimpleNamespace(reqs=[])
    last_batch = chunked_req = None
    is_mixed_chunk = False

    def __init__(self, driver: Any, spec_algorithm: Any) -> None:
        server = driver.server
        self.prepared = list[Any]()
        self.server = server
        self.spec_algorithm = spec_algorithm
        self.token_to_kv_pool_allocator = server.allocator
        self.req_to_token_pool = server.rows
        self.tree_cache = server.cache
        self.session_controller = server.controller
        self.is_hybrid_swa = server.swa_pool is not None
        self.enable_overlap = driver.overlap
        self.page_size = server.geometry.page_size
        self.sliding_window_size = server.geometry.window

    @property
    def waiting_queue(self) -> list[Any]:
        waits = (RequestPhase.QUEUED, RequestPhase.ADMITTED)
        waiting_reqs = [turn.req for turn in self.server.turns.values() if turn.phase in waits]
        return [req for req in waiting_reqs if all(req is not each for each in self.prepared)]


def watched_driver(version: str, folder: Path, spec: bool) -> type:
    """Return the driver's class, with the watcher's hooks in the release that it plays."""
    from impl.sglang.parts.stand_ins import Bag, SpecAlgorithm
    from impl.sglang.scheduler.driver import Driver

    names = supported_release(version)()
    watcher = Watcher(names)
    hooks: dict[str, Callable[..., Any]] = {name: around(watcher, name) for *_, name in POINTS}

    def note_extend(original: Callable[..., Any], batch: Any) -> Any:
        result = hooks["extend"](original, batch)
        watched[-1].ends_step(batch, decodes=False)
        lengths = zip(batch.reqs, batch.prefix_lens, batch.extend_lens)
        chunks = [
            r for r, had, new in lengths if had + new < len(r.origin_input_ids) + len(r.output_ids)
        ]
        # the driver has no result of these
        hooks["result"](_nothing, None, SimpleNamespace(reqs=chunks))
        return result

    def note_open(original: Callable[..., Any], *args: Any) -> Any:
        return hooks["open_session"](lambda *_: (original(*args), Bag(success=True))[1], *args)

    own = {"open_session": note_open, "extend": note_extend}
    watched: list[Any] = []  # the driver
    count = reading.Reader.counts

    def counts(reader: Any) -> tuple[int, ...]:
        """Return the counts of a reader. No server waits with a lock, as a driver does between an
        admission and its prefill."""
        *others, locked = count(reader)
        server = reader.scheduler.server
        owners = {name: reader.slot(name) for name in server.controller.sessions}
        for turn in server.turns.values():
            if reader.holds(turn.req):
                name = reading.session_of(turn.req) or turn.req.rid
                owners[name] = None if turn.locked else turn.req
        protected = sum(names.cursors(owner)[3] for owner in owners.values() if owner is not None)
        return (*others, min(locked, protected))

    reading.Reader.counts = counts  # type: ignore[assignment, method-assign]

    class WatchedDriver(Driver):
        runs = 0

        def __init__(self, release: Any, *where: Any, **how: Any) -> None:
            super().__init__(release, *where, **how)
            watched.append(self)
            reading.version = lambda _: release.version  # type: ignore[assignment]
            for target, name in targets(names):
                if name not in ONLY_IN_A_SERVER:
                    _hook(target, own.get(name, hooks[name]))
            _after(release, "abort_queued", lambda _, req, __: self._aborted(req))
            _after(
                release, "prepare_spec", lambda _, batch, *__: self.ends_step(batch, decodes=True)
            )
            _hook(_DECODE, self._prepared)

        def reset(self, geometry: Geometry) -> None:
            if watcher.log is not None:
                watcher.log.close()
            super().reset(geometry)
            self.runs += 1
            watcher.__init__(names, {"KVSPEC_WATCH": str(folder / f"{self.runs:04}")})  # type: ignore[misc]
            self.scheduler = _Scheduler(self, SpecAlgorithm(spec))
            _after(self.server, "new_request", lambda req, *_: hooks["queue"](_nothing, None, req))
            process = self.results.process

            def processed(turn: Any, result: Any) -> None:
                batch = Bag(reqs=[turn.req], spec_algorithm=self.scheduler.spec_algorithm)
                hooks["result"](lambda *_: process(turn, result), None, batch)

            self.results.process = processed  # type: ignore[method-assign]

        def apply(self, command: Command) -> Outcome:
            outcome = super().apply(command)
            if isinstance(command, Retract) and (turn := self.server.turns.get(command.request)):
                if turn.phase is RequestPhase.QUEUED:
                    hooks["queue"](_nothing, None, turn.req, True)
            hooks["step"](lambda _: self.plan(None), self.scheduler)
            return outcome

        def _prepared(self, original: Callable[..., Any], batch: Any) -> Any:
            result = original(batch)
            self.ends_step(batch, decodes=True)
            return result

        def ends_step(self, batch: Any, *, decodes: bool) -> None:
            """End the step of a server, as it does where a round is prepared."""
            self.scheduler.prepared = batch.reqs
            hooks["step"](lambda _: self.plan(_round(batch, decodes=decodes)), self.scheduler)
            self.scheduler.prepared = []

        def plan(self, batch: Any) -> Any:
            """A batch, or none, as this release's scheduler says that it has decided on it."""
            plan = SimpleNamespace(batch_to_run=batch)
            return plan if names.planned_batch(plan) is batch else batch

        def _aborted(self, req: Any) -> None:
            recv_req = Bag(rid=req.rid, abort_all=False)
            hooks["abort"](_nothing, Bag(waiting_queue=[req]), recv_req)

    return WatchedDriver


def _round(batch: Any, *, decodes: bool) -> SimpleNamespace:
    """Return what the scheduler has decided on, as the watcher reads it."""
    mode = SimpleNamespace(is_decode=lambda: decodes)
    return SimpleNamespace(reqs=batch.reqs, forward_mode=mode, decoding_reqs=batch.decoding_reqs)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _after(owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Have something done after each call of a method, with its result and its arguments."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def calls(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then(result, *args, **kwargs)
        return result

    setattr(owner, name, calls)


def _hook(target: str, hook: Callable[..., Any]) -> None:
    """Hook a function as SGLang's registry does, also where other modules have imported it."""
    path, _, name = target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
        original = getattr(owner, name)
    except (ImportError, AttributeError):
        return
    hooked = functools.wraps(original)(lambda *args, **kwargs: hook(original, *args, **kwargs))
    setattr(owner, name, hooked)
    for module in [m for n, m in sys.modules.items() if n.startswith("sglang.")]:
        for at, value in list(vars(module).items()):
            if value is original:
                setattr(module, at, hooked)


if __name__ == "__main__":
    drivers = importlib.import_module("impl.sglang.scheduler.driver")
    drivers.Driver = watched_driver(sys.argv[4], Path(sys.argv[1]), sys.argv[2] == "1")  # type: ignore[attr-defined]
    sys.exit(worker.main(sys.argv[3:]))
