"""The clauses of a pair, in the order in which they are checked: its own (PD), then those of progress. Each
server is judged by the clauses of block-pool engines besides, but for progress: a server waits for its
peer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from reference.blocks.clauses import BLOCK_CLAUSES
from reference.blocks.clauses import failed_clauses as broken_on_server
from reference.blocks.clauses import broken_off as broken_off_on_server
from reference.clauses.registry import Clause, by_cause, in_order
from reference.clauses.disaggregation import HANDED_OVER
from reference.clauses.progress import PROGRESS
from reference.failures import AtServer, Failure
from reference.pairs.clauses import leftovers, stale_promises
from reference.pairs.clauses.registry import REGISTERED
from reference.pairs.config import PairConfig
from reference.pairs.step import PairStep

__all__ = ["OF_PAIRS", "PAIR_CLAUSES", "PairStep", "broken_off", "clauses_of", "failed_clauses"]
OF_PAIRS = (
    HANDED_OVER
    | in_order(REGISTERED, (stale_promises, leftovers))
    | {name: PROGRESS[name] for name in ("PRO-1", "PRO-2")}
)
# Both servers together have to make progress.
_SERVER_CLAUSES = {name: each for name, each in BLOCK_CLAUSES.items() if name not in PROGRESS}
_WITHOUT_HOST = {name: each for name, each in _SERVER_CLAUSES.items() if not name.startswith("HOST-")}
PAIR_CLAUSES = OF_PAIRS | _SERVER_CLAUSES


def clauses_of(config: PairConfig, server: str) -> Mapping[str, Clause]:
    """Return the clauses by which a server is judged alone: those of host memory only where it has some."""
    return _SERVER_CLAUSES if config.of(server).host_chunks else _WITHOUT_HOST


def _elsewhere(config: PairConfig, server: str) -> set[str]:
    return BLOCK_CLAUSES.keys() - clauses_of(config, server).keys()


def failed_clauses(step: PairStep, waived: Collection[str] = ()) -> list[tuple[Clause, Failure]]:
    """Return all clauses that fail at this step, without the waived ones, the headline first
    (by_cause). A clause that fails on both servers has the failure of the first."""
    failures: dict[str, tuple[Clause, Failure]] = {}
    for clause in OF_PAIRS.values():
        if clause.id not in waived and (failure := clause.check(step)) is not None:
            failures[clause.id] = clause, failure
    for server, side in step.sides.items():
        for clause, failure in broken_on_server(side, {*waived, *_elsewhere(step.config, server)}):
            failures.setdefault(clause.id, (clause, on_server(server, failure)))
    return by_cause(list(failures.values()))


def broken_off(step: PairStep, waived: Collection[str] = ()) -> list[tuple[Clause, Failure]]:
    """Return the clauses that fail in the facts left by a pair that has failed, the headline first."""
    failures: dict[str, tuple[Clause, Failure]] = {}
    for server, side in step.sides.items():
        for each, failure in broken_off_on_server(side, {*waived, *_elsewhere(step.config, server)}):
            failures.setdefault(each.id, (each, on_server(server, failure)))
    return by_cause(list(failures.values()))


def on_server(server: str, failure: Failure) -> Failure:
    """Return a server's failure as one of the pair: its texts and places name the server."""

    def places() -> tuple[AtServer, ...]:
        return tuple(AtServer(server, place) for place in failure.at)

    expected, observed = (f"{server}: {text}" for text in (failure.expected, failure.observed))
    return Failure(expected, observed, places, failure.head)
