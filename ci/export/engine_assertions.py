"""Assertions about objects of a scheduler that picks its batches, for each violated clause."""

from collections.abc import Callable, Sequence

from reference.blocks.clauses.step import window_start
from reference.blocks.clauses.kv_reads import max_blocks_behind_window
from reference.blocks.config import EngineConfig
from reference.commands import Refused
from reference.failures import AtBlock, AtChunk, AtCount, AtNamed, AtTable, AtText
from stateful_tests.lockstep.run_moments import EngineMoment
from stateful_tests.lockstep.run_results import Run

# What a clause says of a number, as an assertion. A number that is not here shows in no object of the
# scheduler's side: inputs of the model (RUN-3), what it sampled behind (TXT-1).
_COUNTS: dict[tuple[str, str], str] = {
    ("HIT-1", "start"): 'self.assertLess(engine.starts("{owner}"), {must})',
    ("BLK-5", "start"): 'self.assertGreaterEqual(engine.starts("{owner}"), {must})',
    ("RUN-1", "requests"): "self.assertLessEqual(len(engine.batch.num_scheduled_tokens), {must})",
    ("RUN-1", "tokens"): "self.assertLessEqual(sum(engine.batch.num_scheduled_tokens.values()), {must})",
    ("RUN-1", "computed"): 'self.assertLessEqual(engine.computed("{owner}"), {must})',
    ("RUN-2", "start"): 'self.assertEqual(engine.starts("{owner}"), {must})',
    ("RUN-4", "stall"):
        'self.assertTrue(engine.batch.num_scheduled_tokens, "somebody waits, and nothing is in flight")',
    ("PRO-1", "stall"):
        'self.assertTrue(engine.batches or not engine.scheduler.requests, "who waits is not run")',
    ("TXT-2", "ended"): 'self.assert{truth}(engine.ended("{owner}"))',
    ("BLK-4", "leftovers"): "self.assertEqual(engine.leftovers(), set())",
    ("HOST-4", "hashes"): "self.assertEqual(engine.kept(), [])",
    ("PUB-3", "hashes"): "self.assertEqual((engine.hashed_blocks(), len(engine.free())), (0, {blocks}))",
    ("PUB-3", "reset"): "self.assertTrue(engine.reset_done)",
    ("STA-1", "state"): 'self.assertEqual(*engine.continues("{owner}", {group}))',
    ("STA-2", "state"): 'self.assertEqual(*engine.continues("{owner}", {group}))',
    ("WIN-2", "computed"): 'self.assertGreaterEqual(engine.computed("{owner}"), {must})',
    ("WIN-2", "slots"): 'self.assertLessEqual(engine.computed("{owner}"), engine.slots("{owner}", {group}))',
}  # fmt: skip
_OF_STATES = "STA-1", "STA-2", "STA-3"


def assert_clause(run: Run, clause: str, tokens: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the lines that assert what a clause (not BROKEN) expects; none where no object of the
    scheduler shows it.

    tokens: as the test writes them.
    """
    violation = run.violation
    now = run.moments(EngineMoment)[-1]
    assert violation is not None and now.step is not None
    config = run.trace.sizes(EngineConfig)
    if clause in _OF_STATES and (config.drafts or config.checkpoints):
        return []  # the worker says which state of a round goes on, and where a chunk leaves one within it
    if clause == "PRO-1" and isinstance(run.rows[-1].outcome, Refused):
        return []  # the loop around the scheduler does not call it
    match violation.failure_of(clause).at:
        case (AtCount(_, name) as count, *_):
            line = _COUNTS.get((clause, name), "")
            numbers = {**count._asdict(), "truth": bool(count.must), "blocks": config.blocks}
            return [line.format(**numbers)] if line else []
        case (AtNamed(), *_):
            names = ", ".join(f'"{name}"' for name in sorted(now.step.bearers))
            return [f"self.assertEqual(sorted(engine.scheduler.requests), [{names}])"]
        case (AtText(who), *_):
            if clause == "TXT-1":
                expected_tokens = next((note.tokens for note in now.step.outputs if note.name == who), ())
                return [f'self.assertEqual(engine.given("{who}"), {tokens(expected_tokens)})']
            text = tokens(now.step.bearers[who].text)
            return [
                f'self.assertEqual(list(engine.scheduler.requests["{who}"]._all_token_ids), {text})'
            ]
        case (AtTable() as place, *_):
            return _place_assertions(now, clause, place, config)
        case (AtBlock(block), *_):
            return _key_assertions(now) if clause == "KEY-1" else _block_assertions(now, clause, block)
        case (AtChunk(chunk), *_) if clause == "HOST-2":
            return [f"held, named = engine.chunk({chunk})", "self.assertEqual(held, named)"]
    return []


def _place_assertions(now: EngineMoment, clause: str, place: AtTable, config: EngineConfig) -> list[str]:
    """Return the assertion about an entry of a block table that a clause is about. Empty where the request is
    not known any more, or the engine's objects do not show it."""
    owner_name = place.request
    group = place.group
    if owner_name not in now.facts.requests or now.step is None:
        return []
    if clause in ("WIN-1", "BLK-5"):
        row = f'engine.tables("{owner_name}")[{group}]'
        return [f"self.assertTrue(any({row}[{place.at}:{place.at + 1}]), {row})"]
    if clause == "WIN-3":
        layers = config.groups[group]
        first_block = window_start(layers, now.step.bearers[owner_name].sure_count) // layers.block_size
        behind = f'engine.tables("{owner_name}")[{group}][:{first_block}]'
        most = max_blocks_behind_window(config, layers)
        return [f"self.assertLessEqual(sum(map(bool, {behind})), {most}, {behind})"]
    first_query = end = now.step.bearers[owner_name].sure_count
    for lane in now.facts.lanes:
        if lane.request == owner_name:
            first_query = lane.start
            end = lane.start + len(lane.tokens) - lane.drafts
    start = window_start(config.groups[group], first_query)
    is_read = clause in ("HIT-1", "READ-3", "READ-4") and start < end
    reads = f'engine.reads("{owner_name}", {group}, {start}, {end})'
    text = f'engine.text("{owner_name}", {start}, {end})'
    return [f"self.assertEqual({reads}, {text})"] if is_read else []


def _key_assertions(now: EngineMoment) -> list[str]:
    """Return the assertion that the request finds no block in the prefix cache: those under its keys have
    another source. There is none where host memory alone has one."""
    owner, *_, block, _ = now.facts.foreign_keys[0]
    if block < 0:  # host memory has it alone
        return []
    return [f'self.assertEqual(engine.found("{owner}"), [])']


def _block_assertions(now: EngineMoment, clause: str, block: int) -> list[str]:
    block_lookup = f"engine.pool.blocks[{block}]"
    bears = next((f"({block}, {p.group})" for p in now.facts.published if p.block == block), "")
    lines = {
        "BLK-1": f"self.assertEqual({block_lookup}.ref_cnt, engine.holders({block}))",
        "BLK-2": f"self.assertEqual(engine.free().count({block}), int({block_lookup}.ref_cnt == 0))",
        "BLK-3": f"self.assertEqual(len(engine.places({block})), 1, engine.places({block}))",
        "BLK-5": f"self.assertEqual(engine.holders({block}), 1)",
        "PUB-1": (
            f"self.assertIn(engine.named{bears}, [None, engine.written{bears}])" if bears else ""
        ),
        "PUB-2": f"self.assertEqual(engine.mapped({block}), int({block_lookup}.block_hash is not None))",
    }
    lines["STA-3"] = lines["PUB-1"]
    return [lines[clause]] if lines.get(clause) else []
