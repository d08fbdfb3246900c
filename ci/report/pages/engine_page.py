"""The page of an engine that schedules by itself: tables of each request, by group, and the pool."""

from itertools import pairwise

from ci import Data
from ci.explain.block_places import blocks_of, chunks_of
from ci.report import text_output
from reference.blocks.config import EngineConfig
from reference.blocks.facts import BlockFacts, Transfer
from stateful_tests.lockstep.run_moments import EngineMoment
from stateful_tests.lockstep.run_results import Run
from stateful_tests.traces.notation import format_command, format_outcome

HUES = 6
MAX_STEPS = 200  # a page of a long trace shows its end


def states(run: Run) -> list[Data]:
    """Return the data of the page, a step each."""
    history = run.moments(EngineMoment)
    first_step = max(run.history_start, len(run.rows) - MAX_STEPS - 1)
    names = list(dict.fromkeys(name for moment in history for name in moment.facts.requests))
    hues = {name: f"o{at % HUES}" for at, name in enumerate(names)}
    pairs = enumerate(pairwise(history), run.history_start + 1)
    return [_state(run, at, was, now, hues) for at, (was, now) in pairs if at > first_step]


def _state(run: Run, step_index: int, was: EngineMoment, now: EngineMoment, hues: dict[str, str]) -> Data:
    row = run.rows[step_index]
    config = run.trace.sizes(EngineConfig)
    facts = now.facts
    violation = run.violation if run.violation is not None and run.violation.step == step_index else None
    stake: set[int] = set()
    chunks_at_stake: set[int] = set()
    if violation is not None:
        stake = blocks_of(violation.failure.at, now)
        chunks_at_stake = chunks_of(violation.failure.at)
    requests, pool = draw_engine(config, was, now, stake, hues)
    return {
        "step": step_index, "command": format_command(row.command), "outcome": format_outcome(row.outcome),
        "violates": violation is not None, "changes": list(row.tree), "requests": requests, "pool": pool,
        "free": list(facts.free), "in_flight": facts.steps_in_flight,
        "host": _host_cells(facts, was.facts, chunks_at_stake),
        "moving": [_transfer_text(job) for job in facts.transfers],
    }  # fmt: skip


def draw_engine(
    config: EngineConfig,
    was: EngineMoment,
    now: EngineMoment,
    stake: set[int],
    hues: dict[str, str],
) -> tuple[list[Data], list[Data]]:
    """Return the requests of an engine with their tables, and its pool.

    stake: blocks of a failure.
    """
    facts = now.facts
    published = {block.block for block in facts.published}
    owners: dict[int, list[str]] = {}
    requests = []
    for name, fact in facts.requests.items():
        before = was.facts.requests.get(name)
        lane = next((lane for lane in facts.lanes if lane.request == name), None)
        ran = (
            f"computes [{lane.start}, {lane.start + len(lane.tokens)})" if lane is not None else ""
        )
        bearer = now.step.bearers.get(name) if now.step is not None else None
        groups = []
        for group, (layers, table) in enumerate(zip(config.groups, fact.tables)):
            blocks_before = before.tables[group] if before is not None else ()
            cells = []
            for index, block in enumerate(table):
                owners.setdefault(block, []).append(name)
                span = f"[{index * layers.block_size}, {(index + 1) * layers.block_size})"
                cells.append({
                    "number": span, "tags": [str(block)] if block else ["null"], "wrong": block in stake,
                    "hue": hues[name] if block else "free", "hash": block in published and block > 0,
                    "changed": index >= len(blocks_before) or blocks_before[index] != block,
                    "title": _block_content(facts, block),
                })  # fmt: skip
            title = "full" if layers.window is None else f"window {layers.window}"
            if layers.state:
                title = "state"
            groups.append({"title": f"group {group}, {title}", "cells": cells})
        requests.append({
            "name": name, "hue": hues[name], "status": fact.status, "computed": fact.computed,
            "tokens": len(fact.tokens), "sure": bearer.sure_count if bearer is not None else None, "ran": ran,
            "groups": groups,
        })  # fmt: skip
    pool = [
        {
            "number": block,
            "tags": owners.get(block, []),
            "wrong": block in stake,
            "hue": hues[owners[block][0]] if owners.get(block) else "free",
            "hash": block in published,
            "changed": refs != was.facts.refs[block],
            "title": _block_content(facts, block),
        }
        for block, refs in enumerate(facts.refs)
        if block
    ]
    return requests, pool


def _host_cells(facts: BlockFacts, was: BlockFacts, stake: set[int]) -> list[Data]:
    """Return host memory, a cell each chunk: whether a hash names it, and the blocks whose KV it holds."""
    if facts.host is None:
        return []
    cells = []
    before = was.host.memory if was.host is not None else ()
    keys = {key.chunk: key for key in facts.host.keys}
    for chunk, chunk_facts in enumerate(facts.host.memory):
        key = keys.get(chunk)
        pins = ""
        if key is not None and key.pins:
            pins = "writing" if key.pins < 0 else f"pinned {key.pins}"
        groups = ", ".join("nothing" if group < 0 else f"KV of group {group}" for group, _ in chunk_facts)
        cells.append({
            "number": chunk, "tags": [pins or ("kept" if key else "free")], "wrong": chunk in stake,
            "hue": f"o{key.group % HUES}" if key else "free", "hash": key is not None,
            "changed": before[chunk : chunk + 1] != (chunk_facts,), "title": f"chunk {chunk}: {groups}",
        })  # fmt: skip
    return cells


def _transfer_text(job: Transfer) -> str:
    """Return a transfer in flight, in words."""
    if job.completed:
        state = "completed"
    else:
        state = "copied" if job.copied else "waits"
    parts = ", ".join(f"block {block}, chunk {chunk}" for _, block, chunk, _ in job.parts)
    return f"{'load' if job.load else 'store'} {job.job} ({state}): {parts}"


def _block_content(facts: BlockFacts, block: int) -> str:
    """Return the content of a block, and its users."""
    group, slots = facts.memory[block]
    written = (
        f"{sum(map(bool, slots))} slots of group {group} are written" if slots else "never written"
    )
    return f"block {block}: ref count {facts.refs[block]}, {written}"


def content(data: Data, run: Run) -> Data:
    """Return the values for the template besides the head of every page."""
    config = run.trace.sizes(EngineConfig)
    return template_values(data, run, states(run), config)


def template_values(data: Data, run: Run, steps: list[Data], config: EngineConfig) -> Data:
    """Return the values for the template of a page with such steps.

    config: tells whether windows are shown.
    """
    return {
        "steps": steps,
        "left_out": len(run.rows) - len(steps),
        "start": max(0, len(steps) - 1),
        "step_table": step_table(steps),
        "story_open": True,
        "sizes": dict.fromkeys(
            text_output.sizes(text_output.sizes_of_trace(data["trace"])).split(", "), True
        ),
        "windows": any(group.window for group in config.groups),
        "tree": False,
    }


def step_table(steps: list[Data]) -> Data:
    """Return a row for each command, a column for each request: its count, and its blocks group by
    group."""
    names = list(dict.fromkeys(request["name"] for step in steps for request in step["requests"]))
    rows = []
    before = dict.fromkeys([*names, ""], "")
    for step in steps:
        request_by_name = {request["name"]: request for request in step["requests"]}
        now = {
            name: _request_cell(request_by_name[name]) if name in request_by_name else ""
            for name in names
        }
        now[""] = str(len(step["free"]))
        cells = [
            f"{text}*" if text and text != before[name] else text for name, text in now.items()
        ]
        wrong = {str(cell["number"]) for cell in step["pool"] if cell["wrong"]}
        cells = [f"!{cell}" if wrong & {*cell.rstrip("*").split()} else cell for cell in cells]
        rows.append({"step": step["step"], "what": step["command"], "cells": cells})
        before = now
    return {"columns": [*names, "free"], "rows": rows}


def _request_cell(request: Data) -> str:
    tables = ["".join(f" {c['tags'][0]}" for c in g["cells"]) for g in request["groups"]]
    return f"{request['status'].lower()} {request['computed']}:{' |'.join(tables) or ' none'}"
