"""A release's own Scheduler with its own event loop, on a CPU: only sockets, forward pass and clock are
stand-ins.

Runs inside the server environment. `prepare` imports the release and may be followed by forks; `run` serves
one set of clients with one configuration, in a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pkgutil
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from impl.sglang.releases.names import name_in_release
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.server import boot
from impl.sglang.server.build import build_scheduler, model_folder
from impl.sglang.server.clients import FLUSH, Client, Clients, Config, Message
from impl.sglang.server.grants import broken_grant
from impl.sglang.server.hooks import hook, hook_transfers
from impl.sglang.server.outcome import RunOutcome
from impl.sglang.server.progress import explain_stall, stalled_flush
from impl.sglang.server.reading import Reader, installed_release
from impl.sglang.server.transfers import TransferHooks
from impl.sglang.server.watch import Watcher

ROUNDS = 20_000  # of the event loop, at most
REST = 60  # rounds after the last answer, so that deferred closes happen
ROUND_S = 0.05  # by the clock of the stand-ins
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "SGLANG_SWA_EVICTION_INTERVAL": "1",
}


def prepare() -> None:
    """Import the release, with strict checks on."""
    os.environ.update(STRICT)
    boot.install()
    import torch

    torch.set_num_threads(1)
    import sglang.srt.managers.scheduler as _scheduler
    from sglang.srt.managers import io_struct as _messages

    del _scheduler, _messages
    import sglang.srt.models.registry as _models

    del _models  # every model that there is, some seconds
    from sglang.srt.plugins.hook_registry import HookRegistry

    watcher = Watcher(installed_release())
    _stand_ins(watcher.kind)
    _WATCHERS.append(watcher)
    hook(watcher)
    TRANSFERS.append(watcher.transfers)
    if watcher.kind.watches_pairs:  # of which both servers are in this process
        TRANSFERS.append(TransferHooks(watcher.note_failure))
        hook_transfers(TRANSFERS[-1])
    HookRegistry.apply_hooks()
    gc.collect()
    gc.freeze()  # what is loaded stays; a scheduler collects several times when it starts


_SENT: list[Any] = []  # by the server
_SINK = SimpleNamespace(send_output=lambda output, *_: _SENT.append(output))
_WATCHERS: list[Watcher] = []  # the one of this process
TRANSFERS: list[TransferHooks] = []  # for each server of a pair
_FEED: list[Any] = []
_PREEMPTIONS: list[bool] = []  # whether a try succeeded


def _channels(cls: type[Any], /, **_: Any) -> Any:
    senders = ("send_to_tokenizer", "send_to_detokenizer")
    return cls(**{f: _SINK if f in senders else None for f in cls.__dataclass_fields__})


def replacements(release: Release0510) -> Iterator[tuple[str, Any]]:
    """Return, by this release's names, the methods that every release has and their replacements."""
    for method, double in (
        ("managers.scheduler_components.ipc_channels.SchedulerIpcChannels.create", classmethod(_channels)),
        ("managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
         lambda _: _FEED[0]()),
        ("speculative.spec_info.SpeculativeAlgorithm.create_worker", lambda *_: _spec_worker()),
    ):  # fmt: skip
        yield f"sglang.srt.{name_in_release(method, type(release))}", double


def _stand_ins(release: Release0510) -> None:
    """Install stand-ins for sockets, and for functions that have only a CUDA kernel or are forbidden on a
    CPU."""
    import torch

    from impl.sglang.parts.stand_ins import assign_rows, without_kernels
    from impl.sglang.server import fake_tier
    from impl.sglang.tiers.copy_engine import CopyEngine

    for method, double in replacements(release):
        owner, _, name = method.rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, double)
    adder = importlib.import_module("sglang.srt.managers.schedule_policy").PrefillAdder
    adder.preempt_to_schedule = _count_preemptions(adder.preempt_to_schedule)
    without_kernels(importlib.import_module("sglang.srt.mem_cache.allocator.paged"))
    setattr(torch.Tensor, "record_stream", lambda *_: None)  # noqa: B010  (a CPU has no streams)
    setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010  (nor an accelerator)
    for target, double in (
        ("mem_cache.allocation.assign_req_to_token_pool_cpu", assign_rows),
        ("speculative.spec_utils.assign_req_to_token_pool_cpu", assign_rows),
        ("speculative.spec_utils.assign_req_to_token_pool_func", assign_rows),
        ("arg_groups.speculative_hook._disable_overlap_schedule_for_cpu", lambda _: None),
        ("managers.overlap_utils.gather_spec_extras", _gather),
        ("arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer", lambda: True),
        ("mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", lambda _: None),
        ("mem_cache.pool_host.common._cuda_host_register", lambda *_: None),
        ("managers.cache_controller.L2TransferEngine", CopyEngine),
        ("managers.cache_controller.device_module", fake_tier.DEVICE),
    ):
        path, _, name = f"sglang.srt.{target}".rpartition(".")
        with contextlib.suppress(ImportError, AttributeError):  # releases have some of these
            owner = pkgutil.resolve_name(path)
            getattr(owner, name)
            setattr(owner, name, double)


def _count_preemptions(preempt: Callable[..., bool]) -> Callable[..., bool]:
    """Return the function that decides on a preemption, with a count of the preemptions."""

    def preempts(adder: Any, *requests: Any) -> bool:
        done = preempt(adder, *requests)
        _PREEMPTIONS.append(done)
        return done

    return preempts


def _gather(index: Any, *buffers: Any) -> tuple[Any, ...]:
    return tuple(None if b is None else b[index] for b in buffers)


def _spec_worker() -> type:
    """Return an EAGLE v2 worker without a draft model: verify rounds accept as many tokens as the script
    says."""
    import torch
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    from impl.sglang.server.fake_model import result_of

    class Worker(BaseSpecWorker):  # type: ignore[misc]
        def __init__(self, *ranks: Any, **named: Any) -> None:
            super().__init__()
            target_worker = named["target_worker"] if "target_worker" in named else ranks[-1]
            self._target_worker = target_worker
            self.model = None
            self._draft_worker = SimpleNamespace(
                draft_runner=target_worker.model_runner,
                draft_runners=(),
                weight_load_time=0.0,
                graph_time_usage={},
                graph_memory_usage={},
                preloaded_weights_bytes=0,
            )

        def _nothing(self, *_: Any, **__: Any) -> None:
            pass

        alloc_memory_pool = init_attention_backends = init_cuda_graphs = _nothing
        init_hicache_draft_plan = on_verify_complete_cpu = _nothing

        def _draft_model_runners(self) -> tuple[()]:
            return ()

        @property
        def target_worker(self) -> Any:
            return self._target_worker

        @property
        def draft_worker(self) -> Any:
            return self._draft_worker

        @property
        def model_runner(self) -> Any:
            return self._target_worker.model_runner

        def forward_batch_generation(
            self, batch: Any, on_publish: Any = None, *_: Any, **__: Any
        ) -> Any:
            model: Any = self.model
            model.begin_round(batch)
            count = len(batch.reqs)
            draft = model.draft
            if batch.forward_mode.is_extend():
                tokens = torch.tensor(model.extend(batch), dtype=torch.int64)
                newest = tokens
                lengths = batch.seq_lens
                accepted = {}
            else:
                sampled, counts = model.verify(batch, draft)
                accepts = torch.tensor(counts, dtype=torch.int32)
                tokens = torch.zeros(count, draft, dtype=torch.int64)
                for at, some in enumerate(sampled):
                    tokens[at, : len(some)] = torch.tensor(some)
                newest = tokens[torch.arange(count), accepts.long() - 1]
                lengths = batch.seq_lens + accepts
                accepted = {"accept_lens": accepts}
                tokens = tokens.flatten()
            if on_publish:
                on_publish(lengths)
            hidden = torch.zeros(count, 16)  # of the newest token, before its own KV
            hidden[:, 0] = newest
            hidden[:, 1] = lengths
            following = EagleDraftInput(
                topk_p=torch.ones(count, 1),
                topk_index=torch.zeros(count, 1, dtype=torch.int64),
                hidden_states=hidden,
                bonus_tokens=newest.to(torch.int32),
            )
            return result_of(
                tokens,
                next_draft_input=following,
                new_seq_lens=lengths,
                speculative_num_draft_tokens=draft,
                **accepted,
            )

    Worker.__abstractmethods__ = frozenset()
    return Worker


class _Blocks:
    """Takes the watcher's hooks out and puts them back, and notes what each block of rounds took."""

    def __init__(self, rounds: int, watched: bool) -> None:
        self.rounds = rounds
        self.watched = watched
        self.spent = list[float]()
        self._places: list[tuple[Any, str, Any]] = []  # with what is there while it is watched
        registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
        modules = [m for n, m in sys.modules.items() if n.startswith("sglang.")]
        for target in registry._patched:
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            hooked = getattr(owner, name)
            owners = [owner] if isinstance(owner, type) else modules
            for each in owners:
                names = [at for at, value in vars(each).items() if value is hooked]
                self._places += [(each, at, hooked) for at in names]
        self._switch()
        self._started_at = time.process_time()

    def round(self, now: int) -> None:
        """Begin a round of the event loop."""
        if now % self.rounds:
            return
        if self.watched and (log := _WATCHERS[0].log) is not None:
            log.flush()
        self.spent.append(time.process_time() - self._started_at)
        self.watched = not self.watched
        self._switch()
        self._started_at = time.process_time()

    def _switch(self) -> None:
        for owner, name, hooked in self._places:
            setattr(owner, name, hooked if self.watched else hooked.__wrapped__)


def run(
    config: Config,
    clients: tuple[Client, ...],
    seed: int,
    watch: dict[str, str] | None,
    every: tuple[int, bool] | None = None,
    canary: bool = False,
) -> RunOutcome:
    """Serve these clients, watched if `watch` has the watcher's settings, in blocks (Job) if `every` says so,
    before the eyes of the release's own KV canary. Once in a process."""
    from impl.sglang.server import canary as kv_canary
    from impl.sglang.server import fake_tier
    from impl.sglang.server.fake_model import FakeModel

    [watcher] = _WATCHERS
    if watch:
        watcher.start(watch)
    now = [0]
    answers = {}
    stalls = []

    def note_stall(waited_for: list[str]) -> None:
        if found := explain_stall(Reader(scheduler, watcher.kind), waited_for):
            stalls.append(found)

    script = Clients(clients, seed, note_stall)
    if canary:
        kv_canary.install()
    hashes = fake_tier.before_storage() if config.storage else None
    with tempfile.TemporaryDirectory() as folder:
        more = kv_canary.SETTINGS if canary else {}
        scheduler = build_scheduler(
            config, model_folder(Path(folder), config.window, config=config), more
        )
    logging.disable(logging.WARNING)
    model = FakeModel(scheduler, watcher.kind, script, config.draft, config.track)
    if config.hicache:
        model.tier = fake_tier.FakeTier(scheduler, model.slots, seed, config, hashes)
    if canary:
        model.canary = kv_canary.Canary(scheduler, watcher.kind, config.draft)
    if config.draft:
        scheduler.draft_worker.model = model
    else:
        scheduler.tp_worker.forward_batch_generation = model
    controller = scheduler.session_controller
    reap = type(controller).maybe_reap
    controller.maybe_reap = lambda _=0.0, interval=1.0: reap(
        controller, 2.0 + now[0] * ROUND_S, interval
    )
    last = [0]
    rest = [0]
    blocks = _Blocks(*every) if every else None

    def pull() -> list[Any]:
        now[0] += 1
        if blocks is not None:
            blocks.round(now[0])
        for request, reason in _answers():
            if request != FLUSH:
                answers[request] = reason
            script.note_answer(request, now[0])
        computed = model.forwards - last[0]
        last[0] = model.forwards
        rest[0] = rest[0] + 1 if script.done and not computed else 0
        if model.tier is not None:
            # A request that waits for slow copies has not stalled: they complete before that is judged.
            model.tier.round(now[0], last=rest[0] > 0 or script.loses_patience)
        if found := model.headway.livelock(model.forwards):
            stalls.append(found)
            rest[0] = REST + 1
        if rest[0] == REST + 1:
            note_stall([])  # an impatient client may have left a request behind
            if script.awaits_flush and (found := stalled_flush(scheduler)):
                stalls.append(found)
        if rest[0] > REST or now[0] > ROUNDS:
            scheduler.gracefully_exit = True
            return []
        return [_message(message) for message in script.round(now[0], computed)]

    _FEED[:] = [pull]
    scheduler.gracefully_exit = False
    error = ""
    traceback_text = ""
    grant = None
    started = time.process_time()
    try:
        scheduler.run_event_loop()
    except Exception as raised:
        error = _one_line(raised)
        traceback_text = traceback.format_exc()
        grant = broken_grant(Reader(scheduler, watcher.kind), raised)
    if watcher.log is not None:
        watcher.log.close()
    cpu_s = time.process_time() - started
    misread = list(model.misread.values())
    stalls += [model.excess] if model.excess else []
    return RunOutcome(
        model.forwards, now[0], misread, answers, error, traceback_text, now[0] > ROUNDS, stalls, cpu_s,
        [] if blocks is None else blocks.spent, model.canary.seen if model.canary else None,
        sum(_PREEMPTIONS), grant,
    )  # fmt: skip


def _message(message: Message) -> Any:
    """Return a client's message as an object of the release."""
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    if message.kind == "open":
        return io_struct.OpenSessionReqInput(
            capacity_of_str_len=1 << 20, session_id=message.name, streaming=True, timeout=None
        )
    if message.kind == "close":
        return io_struct.CloseSessionReqInput(session_id=message.name)
    if message.kind == "abort":
        return io_struct.AbortReq(rid=message.name, abort_all=message.mode == "all")
    if message.kind == "pause":
        return io_struct.PauseGenerationReqInput(mode=message.mode)
    if message.kind == "go on":
        return io_struct.ContinueGenerationReqInput()
    if message.kind == "flush":
        return io_struct.FlushCacheReqInput(timeout_s=0 if message.mode == "now" else 1e9)
    sampling = SamplingParams(
        max_new_tokens=message.limit, temperature=0, ignore_eos=message.ignore_eos
    )
    sampling.normalize(None)
    params: Any = getattr(io_struct, "SessionParams", None)
    if params is None:
        params = importlib.import_module("sglang.srt.managers.schedule_batch").SessionParams
    session = None if message.session is None else params(id=message.session)
    return io_struct.TokenizedGenerateReqInput(
        rid=message.name, input_text="", input_ids=array("q", message.tokens), input_embeds=None,
        mm_inputs=None, priority=message.priority or None,
        token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
        top_logprobs_num=0, token_ids_logprob=None, stream=False, session_params=session,
    )  # fmt: skip


def _answers() -> list[tuple[str, str]]:
    """Return requests whose end was reported since the last call, and why they ended."""
    found = []
    for output in _SENT:
        if type(output).__name__ == "AbortReq":
            found.append((output.rid, "abort"))
        if type(output).__name__ == "FlushCacheReqOutput" and output.success:
            found.append((FLUSH, ""))
        for request, reason in zip(
            getattr(output, "rids", None) or (), getattr(output, "finished_reasons", ())
        ):
            if reason is not None:
                found.append(
                    (
                        request,
                        str(reason.get("type", reason) if isinstance(reason, dict) else reason),
                    )
                )
    _SENT.clear()
    return found


def _one_line(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "sglang" in f.filename]
    at = f" at {frames[-1].filename.rpartition('sglang/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{at}"
