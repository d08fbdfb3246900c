"""What a violated clause comes to as an assertion about objects of a scheduler that picks its batches."""

import re
from collections.abc import Callable, Sequence

from ci.explain.blocks import blocks_at_stake, place_at_stake
from reference.blocks.clauses.step import window_start
from reference.blocks.config import EngineConfig
from stateful_tests.lockstep.results import EngineMoment, Run

# Of clauses that are about no place of a table and no block: what they expect, and the assertion with what
# stands in it. A clause that is not here, or a sentence of it, shows in no object of the scheduler's side:
# inputs of the model (RUN-3), what it sampled behind (TXT-1), block tables where the worker's are others.
_SAID: tuple[tuple[str, str, str], ...] = (
    ("HIT-1", r"(\S+) computes at least the last of its (\d+) tokens",
     'self.assertLess(engine.starts("{0}"), {1})'),
    ("RUN-1", r"at most (\d+) requests, each once",
     "self.assertLessEqual(len(engine.batch.num_scheduled_tokens), {0})"),
    ("RUN-1", r"at most (\d+) tokens",
     "self.assertLessEqual(sum(engine.batch.num_scheduled_tokens.values()), {0})"),
    ("RUN-1", r"(\S+) ends by (\d+)", "self.assertLessEqual(engine.computed(\"{0}\"), {1})"),
    ("RUN-2", r"(\S+) goes on at (\d+)", 'self.assertEqual(engine.starts("{0}"), {1})'),
    ("RUN-4", "a batch",
     'self.assertTrue(engine.batch.num_scheduled_tokens, "somebody waits, and nothing is in flight")'),
    ("TXT-2", r"(\S+) ends", 'self.assertTrue(engine.ended("{0}"))'),
    ("TXT-2", r"(\S+) goes on", 'self.assertFalse(engine.ended("{0}"))'),
    ("BLK-4", "the manager keeps", "self.assertEqual(engine.leftovers(), set())"),
    ("PUB-3", "no hashes", "self.assertEqual((engine.hashed_blocks(), len(engine.free())), (0, {blocks}))"),
    ("PUB-3", "nobody holds", "self.assertTrue(engine.reset_done)"),
    ("WIN-2", r"(\S+): the scheduler counts at least (\d+)",
     'self.assertGreaterEqual(engine.computed("{0}"), {1})'),
    ("WIN-2", r"(\S+): slots for \d+ in group (\d+)",
     'self.assertLessEqual(engine.computed("{0}"), engine.slots("{0}", {1}))'),
)  # fmt: skip


def asserted(run: Run, clause: str, tokens: Callable[[Sequence[int]], str]) -> list[str]:
    """The lines that assert what a clause (not BROKEN) expects; none where no object of the scheduler shows
    it. tokens: as the test writes them."""
    violation, now = run.violation, run.history[-1]
    assert violation is not None
    at = violation.clauses.index(clause)
    wanted, observed = (violation.expected, violation.observed) if not at else violation.details[at - 1]
    config: EngineConfig = run.trace.geometry
    for of, pattern, line in _SAID:
        if of == clause and (found := re.match(pattern, wanted)):
            return [line.format(*found.groups(), blocks=config.blocks)]
    if clause in ("TXT-1", "TXT-3"):
        return _text(now, clause, wanted, observed, tokens)
    return _of_place(now, clause, wanted, config) or _of_block(now, clause, wanted, config)


def _text(
    now: EngineMoment, clause: str, wanted: str, observed: str, tokens: Callable[[Sequence[int]], str]
) -> list[str]:
    who = wanted.partition(" ")[0].rstrip(":")
    step = now.step
    assert step is not None
    if clause == "TXT-1":
        due = next((note.tokens for note in step.outputs if note.name == who), ())
        behind_another = "was sampled behind" in observed
        return [] if behind_another else [f'self.assertEqual(engine.given("{who}"), {tokens(due)})']
    if who not in step.bearers:
        names = ", ".join(f'"{name}"' for name in sorted(step.bearers))
        return [f"self.assertEqual(sorted(engine.scheduler.requests), [{names}])"]
    text = tokens(step.bearers[who].text)
    return [f'self.assertEqual(list(engine.scheduler.requests["{who}"]._all_token_ids), {text})']


def _of_place(now: EngineMoment, clause: str, wanted: str, config: EngineConfig) -> list[str]:
    place = place_at_stake(wanted, config)
    if place is None or place.who not in now.facts.requests or now.step is None:
        return []
    who, group = place.who, place.group
    if clause == "BLK-5" and wanted.endswith("alone"):
        return [f"self.assertEqual(engine.holders({place.block(now)}), 1)"]
    if clause in ("WIN-1", "BLK-5"):
        row = f'engine.tables("{who}")[{group}]'
        return [f"self.assertTrue(any({row}[{place.at}:{place.at + 1}]), {row})"]
    start = end = now.step.bearers[who].sure
    for lane in (lane for lane in now.facts.lanes if lane.request == who):
        start, end = lane.start, lane.start + len(lane.tokens) - lane.drafts
    start = window_start(config.groups[group], start)
    found = clause in ("HIT-1", "READ-3", "READ-4") and start < end
    reads, text = f'engine.reads("{who}", {group}, {start}, {end})', f'engine.text("{who}", {start}, {end})'
    return [f"self.assertEqual({reads}, {text})"] if found else []


def _of_block(now: EngineMoment, clause: str, wanted: str, config: EngineConfig) -> list[str]:
    for block in blocks_at_stake(wanted, config, now):
        known = f"engine.pool.blocks[{block}]"
        bears = next((f"({block}, {p.group})" for p in now.facts.published if p.block == block), "")
        lines = {
            "BLK-1": f"self.assertEqual({known}.ref_cnt, engine.holders({block}))",
            "BLK-2": f"self.assertEqual(engine.free().count({block}), int({known}.ref_cnt == 0))",
            "BLK-3": f"self.assertEqual(len(engine.places({block})), 1, engine.places({block}))",
            "PUB-1": f"self.assertIn(engine.named{bears}, [None, engine.written{bears}])" if bears else "",
            "PUB-2": f"self.assertEqual(engine.mapped({block}), int({known}.block_hash is not None))",
        }
        return [line] if (line := lines.get(clause)) else []
    return []
