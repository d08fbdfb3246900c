"""Whole schedulers under random clients: a run is served, checked by four judges, and shrunk.

The judges are the KV that attention would read (`reads`), the server's own strict checks (`server`), the
validation of its log (`log`), and clients that wait for ever although there is room (`progress`). A run is
determined by its configuration, its clients and a seed.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Container, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from impl.sglang.server.outcome import Misread, RunOutcome
from impl.sglang.server.tried_releases import LOWEST, STATES
from impl.sglang.server.worker import Job
from stateful_tests.shrink.candidate_search import Search, first_improvement
from stateful_tests.watched import deviations
from stateful_tests.watched.servers import server_pairs, population
from stateful_tests.watched.servers.served_run import ServedRun, smaller_parts
from stateful_tests.watched.log_reader import logs_of
from stateful_tests.watched.validation_results import Mismatch, Validated
from stateful_tests.watched.server_situation import situation
from stateful_tests.watched.validator import Validator

SHRINKS = 100  # runs that shrinking one finding may take
SHRINK_S = 60.0  # seconds that shrinking one finding may take


class Runner(Protocol):
    """The interface of impl.sglang.server.runs.WholeScheduler, which serves jobs."""

    def run(self, job: Job) -> RunOutcome: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ServedFinding:
    """A judge's finding about a run.

    key: equal keys of two runs mean the same fault.
    known: the known fault of this release that causes it, "" for none.
    old: the base shows it in the same run.
    """

    judge: str
    key: str
    says: str
    known: str = ""
    mismatch: Mismatch | None = None
    old: bool = False


@dataclass(slots=True)
class JudgedRun:
    """One run and its judges' findings.

    tail: the last lines of its log.
    """

    run: ServedRun
    outcome: RunOutcome
    validated: Validated
    findings: list[ServedFinding]
    tail: list[str] = field(default_factory=list)

    @property
    def new(self) -> list[ServedFinding]:
        """The findings that neither a known fault nor the base explains."""
        return [finding for finding in self.findings if not finding.known and not finding.old]


@dataclass(slots=True)
class Served:
    """The results of a whole check."""

    release: str
    seed: int
    runs: int = 0
    #: number of forward passes
    forwards: int = 0
    #: number of log events
    events: int = 0
    #: duration (s)
    seconds: float = 0.0
    #: decisions of the scheduler, with their numbers
    reached: Counter[str] = field(default_factory=Counter)
    #: findings that known faults explain, with their numbers
    known: Counter[str] = field(default_factory=Counter)
    #: findings that the base shows too, with their numbers
    old: Counter[str] = field(default_factory=Counter)
    #: key of a new finding -> its smallest run
    found: dict[str, JudgedRun] = field(default_factory=dict)
    #: key of a new finding -> number of runs that show it
    times: Counter[str] = field(default_factory=Counter)
    #: a signal ended the check
    interrupted: bool = False


def serve(runner: Runner, run: ServedRun, level: str = "") -> JudgedRun:
    """Serve one run, and judge it.

    level: level of its log. The levels `pages` and those with lines about a host tier show which states the
    tree gets. A pair writes no log.
    """
    if run.config.pair:
        outcome = runner.run(Job(run.config, run.clients, run.seed, choices=run.choices))
        validated = Validated(reached=server_pairs.count_reached(outcome.events))
        return JudgedRun(run, outcome, validated, list(_findings(run, outcome, validated)))
    level = level or ("pages" if run.config.states and not run.config.hicache else "lengths")
    with tempfile.TemporaryDirectory(prefix="kvspec-") as folder:
        watch = {"KVSPEC_WATCH": folder, "KVSPEC_WATCH_LEVEL": level, "KVSPEC_WATCH_SNAPSHOT": "64"}
        watch["KVSPEC_WATCH_TIER"] = str(int(run.config.hicache))
        outcome = runner.run(Job(run.config, run.clients, run.seed, watch))
        validated = Validated()
        tail = []
        if any(Path(folder).iterdir()):
            (log,) = logs_of([folder])
            validator = Validator(log.header)
            validated = validator.run(log.lines())
            validated.situation = situation(validator)
            tail = log.files[-1].read_text().splitlines()[-12:]
    validated.reached.update([deviations.PREEMPTION] * outcome.preemptions)
    return JudgedRun(run, outcome, validated, list(_findings(run, outcome, validated)), tail)


@dataclass(slots=True)
class Before:
    """The release that a tree was taken from.

    there: known fault -> whether the tree has it too, by the traces of the fault.
    saved: known fault -> a run that shows it.

    The tree has a fault without traces if the release shows it in the same run, or if the tree shows it in
    the saved run: the order of events may differ between tree and release.
    """

    runner: Runner
    there: dict[str, bool]
    saved: Mapping[str, ServedRun] = field(default_factory=dict)

    def compare(self, judged: JudgedRun, tree: Runner) -> JudgedRun:
        """Return the run of the tree, with its findings compared with the same run of the release."""
        if not judged.findings:
            return judged
        was = serve(self.runner, judged.run).findings
        keys = {finding.key for finding in was}
        known = {finding.known for finding in was}
        compared = []
        for finding in judged.findings:
            if not finding.known:
                finding = replace(finding, old=finding.key in keys)
            elif not self._has(tree, finding.known, known):
                finding = replace(finding, known="")
            compared.append(finding)
        judged.findings = compared
        return judged

    def _has(self, tree: Runner, fault: str, shown: Container[str]) -> bool:
        """Return whether the tree has a known fault.

        shown: faults that the release has shown in the same run.
        """
        if fault not in self.there:
            if fault in shown:
                return True
            run = self.saved.get(fault)
            if run is None:
                return False
            self.there[fault] = any(finding.known == fault for finding in serve(tree, run).findings)
        return self.there[fault]


def second_opinion(runner: Runner, judged: JudgedRun) -> dict[str, str]:
    """Return the verdict of the release's own KV canary on each finding of a run, by key.

    The same run is served once more. A wrong read is seen if the canary fires at its request and
    position.
    """
    run = judged.run
    outcome = runner.run(Job(run.config, run.clients, run.seed, canary=True))
    wrong: dict[str, set[tuple[str, int]]] = {}
    for misread in judged.outcome.misread:
        wrong.setdefault(f"reads {misread.pool}", set()).add((misread.request, misread.position))
    says = {}
    for finding in judged.findings:
        matching = [
            v for v in outcome.canary or () if (v.request, v.position) in wrong.get(finding.key, ())
        ]
        first_misread = next(iter(matching or outcome.canary or ()), None)
        words = f"is silent in {outcome.forwards} forward passes"
        if first_misread is not None:
            request = first_misread.request or "no request"
            place = f"forward pass {first_misread.forward}, position {first_misread.position} of {request}"
            words = "fires in this run"
            if finding.judge == "reads":
                words = "sees it" if matching else "does not see it, and fires elsewhere"
            words += f": {place}: {first_misread.says}"
        says[finding.key] = words
    return says


def judge(runner: Runner, run: ServedRun, before: Before | None = None) -> JudgedRun:
    """Serve one run, judge it, and compare it with the release before the change."""
    judged = serve(runner, run)
    return judged if before is None else before.compare(judged, runner)


def _findings(run: ServedRun, outcome: RunOutcome, validated: Validated) -> Iterator[ServedFinding]:
    """Yield what a run shows: mismatches of its log, misread KV, judgements on a pair, how it ended and what
    stalled. Each has the known fault that explains it, if any."""
    ended = validated.ended or ""
    for mismatch in validated.mismatches:
        key = f"log {mismatch.clause} {mismatch.event}"
        yield ServedFinding("log", key, mismatch.sentence, mismatch.known or "", mismatch)
    reads: dict[tuple[str, str], list[Misread]] = {}
    for misread in outcome.misread:
        hole = (misread.request.rpartition(".")[0], misread.position) in validated.holes
        known_fault = "last-token" if hole else ended
        if misread.pool == "state":
            known_fault = validated.wrong_states.get((misread.request, misread.position), ended)
        elif run.config.pair:
            config = run.config
            pool = misread.pool
            known_fault = deviations.fault_of_pair_read(run.release, misread.found, pool, config)
        reads.setdefault((misread.pool, known_fault), []).append(misread)
    for (pool, known_fault), (first_misread, *more) in reads.items():
        if pool == "state":
            says = f"{first_misread.request} must go on at position {first_misread.position}"
            says += f" from the state after the tokens before it, and {first_misread.found}"
            yield ServedFinding("reads", "reads state", says, known_fault)
            continue
        read_token = "nothing that was written"
        if first_misread.got is not None:
            token, position = first_misread.got
            read_token = f"token {token} of position {position}, which {first_misread.writer} wrote"
        says = f"{first_misread.request} at position {first_misread.position} of the {pool} pool"
        says += f" reads {read_token}"
        says += f"; its text has token {first_misread.want[0]} ({1 + len(more)} positions are wrong)"
        says += f"; it is {first_misread.found}" if first_misread.found else ""
        yield ServedFinding("reads", f"reads {pool}", says, known_fault)
    for noted in outcome.noted:
        known_fault = deviations.fault_of_pair(run.release, noted.key, run.config, run.choices)
        yield ServedFinding("pair", noted.key, noted.says, known_fault)
    if outcome.error:
        grant = outcome.grant
        pool = grant.pool if grant is not None else ""
        known_fault = ended or deviations.fault_of_end(
            run.release, outcome.error, run.config, validated, pool
        )
        situations = filter(None, (outcome.error, validated.situation))
        if grant is not None:
            says = "; ".join((grant.says, *situations))
            yield ServedFinding("grants", f"grants: {pool}", says, known_fault)
        else:
            where = re.sub(r"[0-9]+(?=[^:]*$)|(?<=at ).*/", "", outcome.error.rpartition(" at ")[2])
            key = f"server {outcome.error.partition(':')[0]} {where or 'ended'}"
            yield ServedFinding("server", key, "; ".join(situations), known_fault)
    for kind, stall in {stall.kind: stall for stall in reversed(outcome.stalls)}.items():
        known_fault = (
            deviations.fault_of_stall(run.release, kind, run.config, outcome.preemptions) or ended
        )
        says = f"{stall.clause}: {stall.says}" if stall.clause else stall.says
        yield ServedFinding("progress", f"stalls: {kind}", says, known_fault)
    if outcome.stuck:
        yield ServedFinding("server", "server stuck", f"{outcome.rounds} rounds and no end", ended)


def check(
    runner: Runner, release: str, seed: int, runs: int, *, fixed: dict[str, int | bool] | None = None,
    count: int = 12, impatient: bool = False, limit_s: float | None = None, before: Before | None = None,
    say: Callable[[str, int, int], None] = lambda *_: None, keep: Callable[[JudgedRun], object] = id,
) -> Served:  # fmt: skip
    """Serve random runs until their number or the time limit is reached. Shrink each new finding at once.

    keep: called with the run of a new finding, and with each smaller run. An interrupt ends the check with
    the findings up to then.
    """
    began = time.monotonic()
    checking = _Check(
        runner, before, say, keep, Served(release, seed), began + (limit_s or math.inf)
    )
    result = checking.result
    drawn_population: population.Population | server_pairs.PairPopulation = population.Population(
        seed, fixed=fixed, count=count, impatient=impatient, states=release in STATES,
        lowest=release in LOWEST,
    )  # fmt: skip
    if fixed and fixed.get("pair"):
        drawn_population = server_pairs.PairPopulation(seed, fixed=fixed, count=count)
    try:
        for number in range(runs):
            if checking.over():
                break
            drawn_population.record_run(checking.take(ServedRun(release, *drawn_population.draw())))
            checking.tell(f"run {number + 1} of {runs}")
    except KeyboardInterrupt:
        result.interrupted = True
    result.seconds = time.monotonic() - began
    return result


@dataclass(slots=True)
class _Check:
    runner: Runner
    before: Before | None
    say: Callable[[str, int, int], None]
    keep: Callable[[JudgedRun], object]
    result: Served
    ends: float  # by the monotonic clock

    def over(self) -> bool:
        return time.monotonic() > self.ends

    def tell(self, event: str) -> None:
        self.say(event, self.result.forwards, len(self.result.found))

    def take(self, run: ServedRun) -> Counter[str]:
        """Serve a run, and keep and shrink a new finding. Return the decisions that the run reached."""
        judged = judge(self.runner, run, self.before)
        result = self.result
        result.runs += 1
        result.forwards += judged.outcome.forwards
        result.events += judged.validated.events
        result.reached.update(judged.validated.reached)
        for finding in judged.findings:
            if finding.known:
                result.known[finding.known] += 1
            if finding.old:
                result.old[finding.key] += 1
        if judged.new:
            key = judged.new[0].key
            result.times[key] += 1
            if key not in result.found:
                judged.run = msgspec.structs.replace(run, key=key)
                self._note_finding(judged)
                self._shrink(judged.run)
        return judged.validated.reached

    def _note_finding(self, judged: JudgedRun) -> None:
        self.result.found[judged.run.key] = judged
        self.keep(judged)

    def _shrink(self, run: ServedRun) -> None:
        """Shrink a run that shows a finding, within a limit of tries and of time."""
        tries = itertools.count(1)
        ends = time.monotonic() + SHRINK_S

        def still_shows(smaller: ServedRun) -> ServedRun | None:
            if self.over() or time.monotonic() > ends:
                return None
            self.tell(f"shrinks {run.key}, try {next(tries)} of {SHRINKS} at most")
            judged = judge(self.runner, smaller, self.before)
            if all(finding.key != run.key for finding in judged.new):
                return None
            self._note_finding(judged)
            return smaller

        first_improvement(run, Search(still_shows, SHRINKS), smaller_parts)
