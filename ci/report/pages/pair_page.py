"""The page of a pair: tables of the requests of both servers, both pools, and the wire between them."""

from itertools import pairwise

from ci import Data
from ci.explain.block_places import blocks_of
from ci.explain.pair_places import on_server, wire
from ci.report.pages.engine_page import HUES, MAX_STEPS, draw_engine, template_values
from reference.failures import AtServer
from reference.pairs.config import SERVERS, PairConfig
from stateful_tests.lockstep.run_moments import PairMoment
from stateful_tests.lockstep.run_results import Run
from stateful_tests.traces.notation import format_command, format_outcome


def states(run: Run) -> list[Data]:
    """Return the data of the page, a step each: P's pool, and D's in the place of host memory."""
    history = run.moments(PairMoment)
    first_step = max(run.history_start, len(run.rows) - MAX_STEPS - 1)
    names = dict.fromkeys(
        name for moment in history for s in SERVERS for name in moment.facts.of(s).requests
    )
    hues = {name: f"o{at % HUES}" for at, name in enumerate(names)}
    pairs = enumerate(pairwise(history), run.history_start + 1)
    return [_state(run, at, was, now, hues) for at, (was, now) in pairs if at > first_step]


def _state(run: Run, step_index: int, was: PairMoment, now: PairMoment, hues: dict[str, str]) -> Data:
    """Return the template's data of the step `step_index`: the requests and block pools of both servers, and
    what is on the wire."""
    row = run.rows[step_index]
    config = run.trace.sizes(PairConfig)
    violation = run.violation if run.violation is not None and run.violation.step == step_index else None
    requests: list[Data] = []
    pools: dict[str, list[Data]] = {}
    places = violation.failure.at if violation is not None else ()
    for server in SERVERS:
        own_places = tuple(
            place.place for place in places if isinstance(place, AtServer) and place.server == server
        )
        before = on_server(was, server)
        after = on_server(now, server)
        failing_blocks = blocks_of(own_places, after)
        shown, pools[server] = draw_engine(config.of(server), before, after, failing_blocks, hues)
        requests += [request | {"name": f"{server}: {request['name']}"} for request in shown]
    prefill = now.facts.of("P")
    flying = sum(now.facts.of(server).steps_in_flight for server in SERVERS)
    return {
        "step": step_index, "command": format_command(row.command), "outcome": format_outcome(row.outcome),
        "violates": violation is not None, "changes": list(row.tree), "requests": requests,
        "pool": pools["P"], "free": list(prefill.free), "in_flight": flying,
        "host": pools["D"], "moving": list(wire(now)),
    }  # fmt: skip


def content(data: Data, run: Run) -> Data:
    """Return the values for the template besides the head of every page."""
    config = run.trace.sizes(PairConfig)
    return template_values(data, run, states(run), config.prefill) | {
        "pool_title": "the pool of P",
        "host_title": "the pool of D, and the wire between:",
    }
