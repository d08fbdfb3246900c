"""A run of a pair: both servers are built, and a conductor says whose turn it is."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from impl.loading.optional import optional
from impl.sglang.server import whole_scheduler
from impl.sglang.server.build import build_scheduler, model_folder
from impl.sglang.server.clients import Client, Clients, Config, Message
from impl.sglang.server.fake_tier import FakeTier, PlacedHashes, before_storage
from impl.sglang.server.outcome import RunOutcome
from impl.sglang.server.pair import stand_ins
from impl.sglang.server.pair.choices import NetworkChoice
from impl.sglang.server.pair.judges import RESERVED, Judges
from impl.sglang.server.server_leftovers import held_tokens
from impl.sglang.server.pair.model import ServerModel
from impl.sglang.server.pair.network import PlayedNetwork
from impl.sglang.server.pair.turns import Stage, ServerThread
from impl.sglang.server.log import EventLog
from impl.sglang.server.reading import installed_release
from impl.sglang.server.watch import Watcher
from reference.pairs.config import DECODE, PREFILL, SERVERS

STEPS = 20_000  # of the conductor, at most
QUIET = 30  # steps without any event, after which only a timeout can change anything
HEARTBEAT = 50  # steps after the death of P until D's heartbeats have failed
PROBE = 40  # steps between two probes of a session that has failed
# Seconds by which the clock moves each time that everything is quiet. It moves past the release of pages that
# P may still write and past both servers' timeouts of a request, three times over, and then past retries of a
# lookup.
TIMEOUTS = (35.0, 310.0, 35.0, 310.0, 35.0, 310.0, *[1.1] * 20)
_DEFERRED = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
_NO_PREFIX = "HiCache local restore failed"  # what D answers who waits for a prefix of its host tier
Patch = Callable[[], object]


def prepare() -> None:
    """Import what only a pair needs, where the release has it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("sglang.srt.disaggregation.mooncake.conn")


def run(
    config: Config, clients: tuple[Client, ...], choices: tuple[NetworkChoice, ...], seed: int,
    watch: Mapping[str, str] | None = None,
) -> RunOutcome:  # fmt: skip
    """Serve these clients with a pair, whose environment makes these choices, watched if `watch` has the
    watcher's settings. Once in a process."""
    os.environ[_DEFERRED] = str(int(config.deferred))
    logging.disable(logging.CRITICAL)
    stage = Stage()
    script = Clients(clients, seed)
    network = PlayedNetwork(stage, choices)
    stand_ins.install(network)
    pair = Pair(stage, network, script)
    if config.storage:
        pair.hashes = before_storage()
    with tempfile.TemporaryDirectory() as folder:
        for server in SERVERS:
            try:
                pair.build(server, config, Path(folder) / server)
            except Exception as error:
                reason = f"{server} does not start: {whole_scheduler._one_line(error)}"
                return RunOutcome(0, 0, [], {}, reason, traceback.format_exc())
    pair.judges = Judges(network, pair.models, pair.managers, script, config.deferred)
    logs = [_start_log(pair, server, watch) for server in SERVERS] if watch else []
    outcome = Conductor(pair, choices).play()
    for log in logs:
        log.close()
    return outcome


def _start_log(pair: Pair, server: str, watch: Mapping[str, str]) -> EventLog:
    """Have a log of a server written, in a folder of its name."""
    watcher = Watcher(installed_release(), {**watch, "KVSPEC_WATCH": f"{watch['KVSPEC_WATCH']}/{server}"})
    hooks = whole_scheduler.TRANSFERS[SERVERS.index(server)]
    return watcher.watch_transfers(pair.schedulers[server], hooks)


class Pair:
    """Both servers.

    inboxes: what clients have sent.
    taken: request -> step in which its server last took a message about it.
    hashes: of pages in a storage, which one of the servers has.
    """

    judges: Judges
    hashes: PlacedHashes | None = None

    def __init__(self, stage: Stage, network: PlayedNetwork, script: Clients) -> None:
        self.stage = stage
        self.network = network
        self.script = script
        self.schedulers: dict[str, Any] = {}
        self.managers: dict[str, Any] = {}
        self.models: dict[str, ServerModel] = {}
        self.loops: dict[str, ServerThread] = {}
        self.taken: dict[str, dict[str, int]] = {server: {} for server in SERVERS}
        self.inboxes: dict[str, list[Any]] = {server: [] for server in SERVERS}

    def build(self, server: str, config: Config, folder: Path) -> None:
        """Build one server, as its own process does."""
        self.stage.enter(server, anew=True)
        path = model_folder(folder, config.window, config=config)
        settings = _settings(server, config)
        server_config = _of_one(server, config)
        scheduler = build_scheduler(server_config, path, settings)
        queue = scheduler.disagg_prefill_bootstrap_queue
        if server == DECODE:
            queue = scheduler.disagg_decode_prealloc_queue
        self.schedulers[server] = scheduler
        self.managers[server] = queue.kv_manager
        self.models[server] = model = ServerModel(
            scheduler, installed_release(), self.script, server, self.network, server_config.draft,
            server_config.track, bool(config.draft and config.prefill_draft),
        )  # fmt: skip
        if server_config.draft:
            scheduler.draft_worker.model = model
        else:
            scheduler.tp_worker.forward_batch_generation = model
        if server_config.hicache or (server == DECODE and config.host_backup):
            seed = self.script.seed
            hashes = self.hashes if server_config.hicache and server_config.storage else None
            model.tier = FakeTier(scheduler, model.slots, seed, server_config, hashes)
        scheduler.gracefully_exit = False

    def start(self) -> None:
        """Let both event loops run as threads of the stage."""
        whole_scheduler._FEED[:] = [self._feed]
        for server, scheduler in self.schedulers.items():
            self.loops[server] = self.stage.add(server, "scheduler", scheduler.run_event_loop)

    def _feed(self) -> list[Any]:
        """Begin a round of an event loop: others run first. Returns the messages of clients."""
        self.stage.hand_over()
        server = self.stage.server
        if (tier := self.models[server].tier) is not None:
            tier.round(self.network.step, last=False)
        messages = self.inboxes[server]
        self.inboxes[server] = []
        self.taken[server].update((message.rid, self.network.step) for message in messages)
        if server == PREFILL:
            delivered = {("request", message.rid): self.network.step for message in messages}
            self.network.delivered.update({**delivered, **self.network.delivered})
        return messages


def _of_one(server: str, config: Config) -> Config:
    """Return what one server of the pair has of its configuration."""
    if server == PREFILL:
        storage = config.storage if config.hicache else 0
        draft = config.draft if config.prefill_draft else 0
        return msgspec.structs.replace(config, draft=draft, storage=storage)
    storage = config.storage if config.decode_hicache and not config.hicache else 0
    return msgspec.structs.replace(
        config, mixed=False, hicache=config.decode_hicache, storage=storage
    )


def _settings(server: str, config: Config) -> dict[str, Any]:
    """Return the further settings of a server of a pair."""
    settings: dict[str, Any] = {
        "disaggregation_mode": "prefill" if server == PREFILL else "decode",
        "disaggregation_transfer_backend": "mooncake",
        "num_reserved_decode_tokens": RESERVED,
        "enable_streaming_session": False,
        "log_level": "critical",
    }
    if config.prefill_complete:
        settings["disaggregation_decode_allocation_policy"] = "prefill_complete"
    if server == PREFILL:
        settings["optimistic_prefill_attempts"] = config.optimistic
        return settings
    settings |= {
        "disable_overlap_schedule": not config.decode_overlap,
        "disaggregation_decode_retraction_backup": "host_pool" if config.host_backup else "cpu_tensor",
        "disaggregation_decode_enable_radix_cache": config.decode_tree,
        "max_total_tokens": config.decode_tokens or config.tokens,
    }
    return settings


class Conductor:
    """Says whose turn it is, and what clients and environment do meanwhile."""

    def __init__(self, pair: Pair, choices: Sequence[NetworkChoice]) -> None:
        self.pair = pair
        self.network = pair.network
        self.script = pair.script
        self.answers: dict[str, dict[str, str]] = {server: {} for server in SERVERS}
        self.outputs: dict[str, list[int]] = {}
        self.asked: dict[str, set[str]] = {server: set() for server in SERVERS}
        self._router: list[
            tuple[int, str, Message]
        ] = []  # on their way to a server, from a step on
        self._timed = [choice for choice in choices if choice.what in ("clock", "death")]
        self._paused: dict[str, int] = {}  # until which step
        self._rounds = dict.fromkeys(SERVERS, 0)
        self._heartbeat = 0
        self.error = self.traceback = ""

    def play(self) -> RunOutcome:
        """Play the whole run."""
        pair = self.pair
        network = self.network
        pair.start()
        started = time.process_time()
        quiet = 0
        before = 0
        timeouts = deque(TIMEOUTS)
        while network.step < STEPS and not self.error:
            network.begin_step()
            moved = self._environment() | self._clients() | self._threads() | self._schedulers()
            waits = self._router or self._paused or not network.rests or not self._tiers_rest()
            quiet = 0 if moved or waits else quiet + 1
            if quiet <= QUIET or self._timed or self._heartbeat:
                continue
            quiet = 0
            unanswered = self._unanswered_requests()
            waiting = any(unanswered.values()) or any(
                held_tokens(pair.schedulers[at]) for at in self._alive()
            )
            if not waiting and self.script.done:
                break
            if (answered := sum(map(len, self.answers.values()))) > before:
                before = answered
                timeouts = deque(TIMEOUTS)  # others may wait for timeouts of their own
            if not timeouts:
                break
            pair.judges.waiting(unanswered)
            seconds = timeouts.popleft()
            network.seconds += seconds
            network.tell("wire", f"nothing happens: the clock moves by {seconds:g} s")
        if not self.error and network.step < STEPS:
            pair.judges.judge_end(self._unanswered_requests())
        return self._outcome(time.process_time() - started)

    def _outcome(self, cpu_s: float) -> RunOutcome:
        pair = self.pair
        network = self.network
        return RunOutcome(
            sum(model.forwards for model in pair.models.values()), network.step,
            [misread for model in pair.models.values() for misread in model.misread.values()],
            self.answers[DECODE], self.error, self.traceback, network.step >= STEPS, cpu_s=cpu_s,
            noted=list(pair.judges.noted.values()), events=network.events,
        )  # fmt: skip

    def _tiers_rest(self) -> bool:
        tiers = [self.pair.models[server].tier for server in self._alive()]
        return all(tier is None or tier.rests for tier in tiers)

    def _alive(self) -> list[str]:
        return [server for server in SERVERS if server not in self.network.gone]

    def _unanswered_requests(self) -> dict[str, list[str]]:
        """Return the requests without an answer, by server."""
        return {at: sorted(self.asked[at] - self.answers[at].keys()) for at in self._alive()}

    # -- a step -------------------------------------------------------------------------------------

    def _environment(self) -> bool:
        """Advance the clock, and decide on deaths, heartbeats and probes."""
        network = self.network
        moved = False
        for each in [choice for choice in self._timed if choice.number <= network.step]:
            self._timed.remove(each)
            moved = True
            if each.what == "clock":
                network.seconds += each.steps
                network.tell("wire", f"the clock moves by {each.steps} s")
            else:
                network.end_server(each.side)
                self._paused.pop(each.side, None)
                if each.side == PREFILL:
                    self._heartbeat = network.step + HEARTBEAT
        if self._heartbeat and self._heartbeat <= network.step:
            self._heartbeat = 0
            self.pair.stage.enter(DECODE)
            address = f"{stand_ins.HOST}:{stand_ins.PORT}"
            self.pair.managers[DECODE]._handle_node_failure(address)
            network.tell(DECODE, "hears no heartbeat of P")
        manager = self.pair.managers[PREFILL]
        if manager.failed_sessions and not network.gone and not network.step % PROBE:
            self.pair.stage.enter(PREFILL)
            manager._run_one_probe_pass()
            network.tell(PREFILL, "probes D, which has failed before")
        return moved

    def _clients(self) -> bool:
        """Send the messages of clients, and pass them on as the router does."""
        step = self.network.step
        network = self.network
        for message in self.script.round(step, 1):
            for server in SERVERS:
                self._sends(message, server)
        due = [sending for sending in self._router if sending[0] <= step]
        self._router = [sending for sending in self._router if sending[0] > step]
        for _, server, message in due:
            if server in network.gone:
                continue
            if message.kind == "submit":
                self.asked[server].add(message.name)
            else:
                self.pair.judges.aborted[server].add(message.name)
            network.tell(server, f"gets the {_WORDS[message.kind]} {message.name}")
            self.pair.inboxes[server].append(self._in_its_words(message))
        return bool(due)

    def _sends(self, message: Message, server: str) -> None:
        what = "request" if message.kind == "submit" else "abort"
        choices = self.network.choices.of(what, message.name, server)
        if any(choice.fails for choice in choices):
            return
        due = self.network.step + sum(choice.steps for choice in choices)
        if what == "abort":  # an abort does not overtake its request
            before = [
                at for at, to, each in self._router if (to, each.name) == (server, message.name)
            ]
            due = max([due, *(at + 1 for at in before)])
        self._router.append((due, server, message))

    def _in_its_words(self, message: Message) -> Any:
        request = whole_scheduler._message(message)
        if message.kind == "submit":
            names = {name: room for room, name in self.network.rooms.items()}
            room = names.get(message.name, len(names) + 1)
            self.network.rooms[room] = message.name
            request.bootstrap_host = stand_ins.HOST
            request.bootstrap_port = stand_ins.PORT
            request.bootstrap_room = room
        return request

    def _threads(self) -> bool:
        """Run every other thread until it waits."""
        moved = False
        for turn in self.pair.stage.turns:
            while turn.name != "scheduler" and turn.ready and turn.server not in self.network.gone:
                moved = True
                turn.take()
                if turn.error is not None:
                    self._broke(turn)
                    return True
        return moved

    def _schedulers(self) -> bool:
        """Run a round of each server's event loop, unless it rests."""
        pair = self.pair
        network = self.network
        step = self.network.step
        before = sum(model.forwards for model in pair.models.values()), network.moves
        answered = False
        for server in self._alive():
            turn = pair.loops[server]
            if self._paused.get(server, 0) > step or not turn.ready:
                continue
            self._paused.pop(server, None)
            turn.take()
            answered |= self._answers(server)
            if turn.error is not None or turn.over:
                self._broke(turn)
                return True
            if turn.may_run is None:
                self._rounds[server] += 1
                if rest_rounds := network.choices.steps("round", "", server, self._rounds[server]):
                    self._paused[server] = step + rest_rounds
                    network.tell(server, f"rests {rest_rounds} steps")
        after = sum(model.forwards for model in pair.models.values()), network.moves
        return answered or before != after

    def _answers(self, server: str) -> bool:
        """Return whether a server has answered since its last round."""
        found = False
        for output in whole_scheduler._SENT:
            if server == DECODE:
                # An output of another kind has no requests.
                names = optional(output, "BatchTokenIDOutput.rids") or ()
                all_outputs = optional(output, "BatchTokenIDOutput.output_ids")
                ids = all_outputs or optional(output, "BatchTokenIDOutput.decode_ids") or ()
                for name, tokens in zip(names, ids):
                    self.outputs.setdefault(name, []).extend(tokens)
                ends = optional(output, "BatchTokenIDOutput.finished_reasons") or ()
                for name, end in zip(names, ends):
                    if isinstance(end, dict) and _NO_PREFIX in str(end.get("message")):
                        self.pair.judges.prefix_is_gone(name)
        for name, reason in whole_scheduler._answers():
            found = True
            known = self.answers[server].get(name)
            self.network.tell(server, f"answers {name}: {reason}")
            if known not in (None, "abort"):
                says = f"{server} answers {name} twice: {known}, then {reason}"
                self.pair.judges.note(f"TXT-1 {server} answers twice", name, says)
            self.answers[server][name] = reason
            at_once = self.network.step - self.pair.taken[server].get(name, 0) <= 1
            if reason == "abort" and at_once and name not in self.pair.judges.aborted[server]:
                self.pair.judges.refused[server].add(name)
            if server == PREFILL:
                self.pair.judges.answered_at.setdefault(name, self.network.step)
            if server == DECODE:
                self.script.note_answer(name, self.network.step)
                self.pair.judges.judge_answer(name, self.outputs.get(name, []), reason)
        return found

    def _broke(self, turn: ServerThread) -> None:
        """End the server one of whose threads has ended."""
        error: Any = turn.error or RuntimeError("the loop has ended")
        root = error.__cause__ or error.__context__ or error
        where = f"{turn.server}'s {turn.name}"
        self.error = f"{where}: {whole_scheduler._one_line(root)}"
        self.traceback = "".join(traceback.format_exception(error))
        self.network.tell(turn.server, f"ends: {self.error}")


_WORDS = {"submit": "request", "abort": "abort of"}
