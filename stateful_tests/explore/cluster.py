"""Exploration and checks on many machines, through Ray (optional: `pip install 'kvspec[cluster]'`).

Everything that runs over there is a pure function of its arguments: a lost worker, or a lost node with
what it had stored, costs the time to run those functions again, never a count. States travel as the
values of their units, because the numbers of a `Quotient` mean something in one process alone. They are
told apart by a digest of 8 bytes: of ten million states two are taken for one with a probability of 3 in
a million.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from reference import model
from reference.commands import Command, Done, Mode
from stateful_tests.check import campaign
from stateful_tests.check.campaign import Plan
from stateful_tests.coverage.scopes import SCOPES, Scope
from stateful_tests.coverage.situations import situation
from stateful_tests.explore.canonical_state import Quotient, relabel
from stateful_tests.explore.inductive_check import Checker
from stateful_tests.explore.search_base import Exploration, Progress, explored, memory
from stateful_tests.explore.stepwise import finding_of
from stateful_tests.lockstep import systems as registry
from stateful_tests.lockstep.results import CheckResult, Finding, MachineResult, Tally, Violation, add_tallies

# A state as it travels: sessions, ordinary requests and lock holders by their units, and the nodes of the
# tree.
Wire = tuple[tuple[tuple[Any, ...], ...], Any]
Found = dict[int, tuple[int, Wire]]  # digest -> (digest of a state that leads there, state)

# One level of one shard: the digests that are new there, ascending, and whence each was reached.
_KNOWN = np.dtype([("digest", "u8"), ("parent", "u8")])


class NoCluster(Exception):
    """Ray is not installed, or the cluster does not answer."""


def connect(address: str) -> Any:
    """The module ray, connected. Our own packages are sent along: all nodes run this very code."""
    try:
        import ray
    except ImportError as error:
        raise NoCluster(f"{address}: needs Ray: pip install 'kvspec[cluster]'") from error
    _reachable(address)
    import impl
    import reference
    import stateful_tests

    modules = [m.__path__[0] for m in (reference, impl, stateful_tests)]
    try:
        ray.init(
            address=address, runtime_env={"py_modules": modules}, log_to_driver=False, logging_level="ERROR",
            ignore_reinit_error=True,
        )  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise NoCluster(f"{address}: {str(error).splitlines()[0]:.160}") from error
    return ray


def _reachable(address: str) -> None:
    """Ray itself waits for minutes for whoever does not answer, and then ends the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # auto, local
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NoCluster(f"{address}: no cluster answers there ({error})") from error


def shards_of(ray: Any) -> int:
    """One for each core of the cluster."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


# Exploration: by levels; a shard is the states whose digests are equal modulo the number of shards.


@dataclass(slots=True)
class Level:
    """What one shard saw when it expanded its states of one level."""

    transitions: int = 0
    situations: Counter[str] = field(default_factory=Counter)
    tallies: dict[str, Tally] = field(default_factory=dict)
    violated: tuple[int, Violation] | None = None


@lru_cache(maxsize=2)
def _quotient(name: str) -> Quotient:
    return Quotient(SCOPES[name])


def wire(quotient: Quotient, key: int) -> tuple[int, Wire]:
    """A state as it travels, and its digest: the same in every process."""
    groups, tree = quotient.unpack(key)
    forms = [(groups, tree)]
    for order in range(quotient.orders):
        other = [[quotient.exchanged(n, order) for n in numbers] for numbers in groups]
        forms.append((other, quotient.exchanged(tree, order) if tree else 0))
    spelt, at = min((_spelt(quotient, *form), at) for at, form in enumerate(forms))
    groups, tree = forms[at]
    values = tuple(tuple(quotient.values[n] for n in numbers) for numbers in groups)
    digest = int.from_bytes(hashlib.blake2b(spelt.encode(), digest_size=8).digest(), "big")
    return digest, (values, quotient.values[tree])


_words = lru_cache(maxsize=1 << 20)(repr)  # of units and trees: most states share theirs


def _spelt(quotient: Quotient, groups: list[list[int]], tree: int) -> str:
    values = quotient.values
    units = (";".join(sorted(_words(values[n]) for n in numbers)) for numbers in groups)
    return "|".join([*units, _words(values[tree])])


def _key(quotient: Quotient, state: Wire) -> int:
    groups, tree = state
    numbers = [sorted(map(quotient.number, group), reverse=True) for group in groups]
    return quotient.pack(numbers, 0 if tree is None else quotient.number(tree))


def _expand(name: str, clauses: bool, shards: int, states: Found) -> tuple[Level | Found, ...]:
    """Every command in every one of some states; what was seen, and what was found for each shard."""
    quotient, level = _quotient(name), Level()
    checker = Checker() if clauses else None
    found: list[Found] = [{} for _ in range(shards)]
    for digest in sorted(states):
        key = _key(quotient, states[digest][1])
        state = quotient.state(key)
        if checker is not None:
            checker.begin(state)
        for command in quotient.commands(key):
            if checker is not None and level.violated is None:
                violation = checker.violation(command)
                if violation is not None:
                    level.violated = digest, violation
            now, outcome = model.step(state, command)
            level.situations[situation(state, command, outcome, now)] += 1
            if not isinstance(outcome, Done):
                continue
            level.transitions += 1
            reached, travels = wire(quotient, quotient.key(now))
            place = found[reached % shards]
            if reached not in place:  # states are taken in order: the first parent is the least
                place[reached] = digest, travels
    if checker is not None:
        level.tallies = checker.tallies
    return level, *found


def _merge(levels: int, *parts: Any) -> tuple[np.ndarray, Found, int]:
    """What is new to a shard of what was found (`parts` after so many levels): a level and its states."""
    known, found = parts[:levels], parts[levels:]
    new: Found = {}
    for part in found:
        for digest, (parent, state) in part.items():
            if digest not in new or parent < new[digest][0]:
                new[digest] = parent, state
    digests = np.array(sorted(new), dtype="u8")
    for level in known:
        digests = digests[~np.isin(digests, level["digest"], assume_unique=True)]
    states = {int(d): new[int(d)] for d in digests}
    level = np.array([(d, parent) for d, (parent, _) in states.items()], dtype=_KNOWN)
    return level, states, len(level)


def explore(
    scope: Scope, ray: Any, *, progress: Progress | None = None
) -> Exploration:
    """Explore a scope to its fixed point, or to the level of the first violation."""
    began, before = time.monotonic(), memory()
    shards = shards_of(ray)
    # Tasks depend on nothing but their arguments, so Ray may run one again whenever its result was lost.
    expanding = ray.remote(num_returns=shards + 1, max_retries=-1)(_expand)
    merging = ray.remote(num_returns=3, max_retries=-1)(_merge)

    quotient = _quotient(scope.name)
    root, state = wire(quotient, quotient.key(quotient.initial))
    first = np.array([(root, root)], dtype=_KNOWN)
    empty = np.array([], dtype=_KNOWN)
    mine = root % shards
    known = [[ray.put(first if s == mine else empty)] for s in range(shards)]
    waiting = [ray.put({root: (root, state)} if s == mine else {}) for s in range(shards)]
    total, states, depth = Level(), 1, 0
    tallies: dict[str, Tally] = {}
    violated = None
    while violated is None:
        told = [expanding.remote(scope.name, True, shards, w) for w in waiting]
        for seen in ray.get([level for level, *_ in told]):
            total.transitions += seen.transitions
            total.situations += seen.situations
            add_tallies(tallies, seen.tallies)
            if seen.violated is not None and (violated is None or seen.violated[0] < violated[0]):
                violated = seen.violated
        merged = [
            merging.remote(len(known[s]), *known[s], *(found[s] for _, *found in told)) for s in range(shards)
        ]
        waiting = [found for _, found, _ in merged]
        new = sum(ray.get([count for _, _, count in merged]))
        if progress is not None:
            where = f"{scope.name}, depth {depth}, {states} states"
            progress(where, total.transitions, int(violated is not None))
        if not new:
            break
        states, depth = states + new, depth + 1
        for s, (level, _, _) in enumerate(merged):
            known[s].append(level)
    seconds = time.monotonic() - began
    found = None
    if violated is not None:
        digest, violation = violated
        parents = {int(d): int(p) for shard in known for level in ray.get(shard) for d, p in level}
        commands = _way(quotient, parents, digest)
        found = finding_of(scope, commands, violation, seconds, total.transitions)
    stopped = "fixed point" if violated is None else "a clause was violated"
    return explored(
        scope, "one step after the other, by Ray", states=states, expanded=states,
        transitions=total.transitions, depth=depth, stopped=stopped, seconds=seconds, had_mb=before,
        situations=total.situations, tallies=tallies, finding=found,
    )  # fmt: skip


def _way(quotient: Quotient, parents: dict[int, int], digest: int) -> tuple[Command, ...]:
    """The commands from the empty state to the one with this digest, and the one there that breaks a clause.

    Each is found by trying: how units are called in a state is the business of the process that reached it.
    """
    way = [digest]
    while parents[way[-1]] != way[-1]:
        way.append(parents[way[-1]])
    state, said = quotient.initial, []
    for wanted in reversed(way[:-1]):
        key = quotient.key(state)
        renaming = quotient.renaming(state)
        for command in quotient.commands(key):
            real = relabel(command, renaming, state)
            now, _ = model.step(state, real)
            if wire(quotient, quotient.key(now))[0] == wanted:
                state = now
                said.append(real)
                break
    checker, key = Checker(), quotient.key(state)
    checker.begin(quotient.state(key))
    last = next(c for c in quotient.commands(key) if checker.violation(c) is not None)
    return (*said, relabel(last, quotient.renaming(state), state))


# Checks: a seed for each shard.


def check(impl: str, options: dict[str, Any], plan: Plan, ray: Any) -> CheckResult:
    """Carry the plan out once for each core of the cluster, with seeds that follow `plan.seed`.

    impl, options: as `registry.resolve` takes them; each worker builds a system of its own.
    """
    checking = ray.remote(max_retries=-1)(_check)
    seeds = range(plan.seed, plan.seed + shards_of(ray))
    return together(ray.get([checking.remote(impl, options, replace(plan, seed=seed)) for seed in seeds]))


def _check(impl: str, options: dict[str, Any], plan: Plan) -> CheckResult:
    system = registry.resolve(impl, **options)
    try:
        return campaign.run(system, plan)
    finally:
        system.close()


def together(results: list[CheckResult]) -> CheckResult:
    """Several checks as one: everything is added up, of each clause the smallest trace is kept."""
    first = results[0]
    whole = CheckResult(first.system, first.tier, first.seed)
    machines: dict[tuple[Any, ...], MachineResult] = {}
    found: dict[str, Finding] = {}
    for result in results:
        for m in result.machines:
            kept = machines.setdefault((m.name, m.preset, m.mode), MachineResult(m.name, m.preset, m.mode))
            kept.examples += m.examples
            kept.commands += m.commands
            kept.seconds += m.seconds
            kept.violated |= m.violated
            add_tallies(kept.tallies, m.tallies)
        add_tallies(whole.tallies, result.tallies)
        for mine, more in (
            (whole.refusals, result.refusals), (whole.commands_by_kind, result.commands_by_kind),
            (whole.situations, result.situations),
        ):  # fmt: skip
            for name, count in more.items():
                mine[name] = mine.get(name, 0) + count
        for f in result.findings:
            found[f.clause] = _either(found[f.clause], f) if f.clause in found else f
        whole.timed_out |= result.timed_out
        whole.stopped |= result.stopped
    whole.machines = list(machines.values())
    whole.findings = [found[c] for c in sorted(found, key=campaign.evaluation_order)]
    whole.unreached = tuple(c for c, t in whole.tallies.items() if not t.reached)
    whole.seconds = max(result.seconds for result in results)
    return whole


def _either(one: Finding, other: Finding) -> Finding:
    """Two findings of a clause as one, with the smaller trace."""
    best = min(one, other, key=lambda f: campaign.rank(f.run.trace))
    return replace(
        best,
        modes=tuple(m for m in Mode if m in one.modes or m in other.modes),
        times=one.times + other.times,
        found_after_s=min(one.found_after_s, other.found_after_s),
        found_after_commands=min(one.found_after_commands, other.found_after_commands),
    )
