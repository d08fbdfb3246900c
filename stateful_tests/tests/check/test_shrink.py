"""Shrinking: what is left is minimal, still fails, and is the same every time."""

from dataclasses import replace
from pathlib import Path

import pytest

from impl.adapter import Capabilities
from impl.torch_kv.system import TorchKV
from impl.vocabulary import CommandRefused
from reference import model
from reference.commands import (
    Abort, Chunk, Close, Decode, Done, Evict, Extend, Finish, Insert, Match, Mode, Open, Reason, Submit,
    Unlock, prompt_len,
)  # fmt: skip
from reference.blocks.presets import engine_preset
from reference.geometry import Geometry, preset
from reference.tiers.commands import Poll, Query
from reference.tiers.config import tier_preset
from stateful_tests.check.campaign import run
from stateful_tests.check.fixtures import shrunk
from stateful_tests.check.check_plans import plan
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.shrink.minimise import _shrink_config, minimise, violation_of_clause
from stateful_tests.shrink.optional_parts import without_parts
from stateful_tests.shrink.shrink_passes import shrink
from stateful_tests.shrink.command_rewriting import with_scaled_lengths
from stateful_tests.tests.support.commands import script
from stateful_tests.traces.trace_files import load, prompt_of

NOISE = script(
    "open s1; open s2; submit r1 in s1 +9; decode r1, r2; extend r1 +7, r2 +4; close s2; finish r1 keep 5;"
    " abort r1 (marked)"
)


def test_only_needed_commands_are_left():
    def fails(commands):
        for index, command in enumerate(commands):
            if (
                isinstance(command, Finish)
                and command.finished_len >= 3
                and Open("s1") in commands[:index]
            ):
                return commands[: index + 1]
        return None

    assert shrink(NOISE, fails) == (Open("s1"), Finish("r1", 3))


def test_two_commands_that_need_each_other_are_dropped_together():

    def fails(commands):
        balanced = (Open("s2") in commands) == (Close("s2") in commands)
        return commands if balanced and Open("s1") in commands else None

    assert shrink(NOISE, fails) == (Open("s1"),)


def test_batch_entries_and_numbers_shrink():
    def fails(commands):
        lanes = [n for c in commands if isinstance(c, Extend) for n in c.lanes]
        return commands if any(n.request == "r2" and n.tokens >= 2 for n in lanes) else None

    assert shrink(NOISE, fails) == (Extend((Chunk("r2", 2),)),)


def test_matching_numbers_shrink_together():
    def fails(commands):
        submitted = sum(c.tokens for c in commands if isinstance(c, Submit))
        lanes = sum(n.tokens for c in commands if isinstance(c, Extend) for n in c.lanes)
        return commands if submitted == lanes >= 2 else None

    start = (Submit("r1", None, 9), Extend((Chunk("r1", 9),)))
    assert shrink(start, fails) == (Submit("r1", None, 2), Extend((Chunk("r1", 2),)))


def test_two_turns_become_one():
    """What needs a long conversation rarely needs its turns."""

    def fails(commands):
        state = model.initial(preset("page1"))
        for index, command in enumerate(commands):
            state, outcome = model.step(state, command)
            if isinstance(command, Decode) and outcome == Done():
                grown = state.requests[0].cursors
                if state.sessions and grown is not None and grown.kv_committed_len >= 9:
                    return commands[: index + 1]
        return None

    turn = script("submit r1 in s1 +5; admit r1; extend r1 +5; decode r1")
    later = script("submit r1 in s1 +2; admit r1; extend r1 +3; decode r1")
    smallest = shrink((Open("s1"), *turn, Finish("r1", 1), *later), fails)
    assert smallest == script("open s1; submit r1 in s1 +8; admit r1; extend r1 +8; decode r1")


def test_the_budget_bounds_the_candidates():
    ran = 0

    def fails(commands):
        nonlocal ran
        ran += 1
        return commands if commands == NOISE * 20 else None

    shrink(NOISE * 20, fails, budget=10)
    assert ran == 10


def test_lock_holders_and_texts_are_renamed_in_the_order_of_appearance():
    insert = Insert("h3", prompt_of("c2b1"))
    match = Match("r1", prompt_of("c2"))
    start = (insert, match, Submit("r1", None, 0), Unlock("h3"))

    def fails(commands):
        match commands:
            case (Insert(a, (c, b)), Match(r, (d,)), Submit(s, None), Unlock(o)):
                apart = c.text != b.text and c.tokens == d.tokens == 2 and b.tokens == 1
                return commands if a == o and r == s and c.text == d.text and apart else None
        return None

    insert = Insert("h1", prompt_of("a2b1"))
    match = Match("h2", prompt_of("a2"))
    assert shrink(start, fails) == (insert, match, Submit("h2", None, 0), Unlock("h1"))


def test_prompts_lose_pieces_and_flags_and_numbers_shrink():
    def fails(commands):
        inserted = any(isinstance(c, Insert) and prompt_len(c.prompt) >= 3 for c in commands)
        return (
            commands
            if inserted and any(isinstance(c, Evict) and c.full >= 5 for c in commands)
            else None
        )

    start = script("insert h1 b4c9a2 SWA from 7 (goes on); unlock h1; evict full 999 swa 999")
    assert shrink(start, fails) == (Insert("h1", prompt_of("a3")), Evict(5))


def test_a_shared_prefix_shrinks_in_all_commands_at_once():
    def fails(commands):
        prompts = [getattr(c, "prompt", ()) for c in commands]
        if len(prompts) != 3 or any(p.tokens < 1 for prompt in prompts for p in prompt):
            return None
        first = {prompt[:1] for prompt in prompts}
        shared = len(first) == 1 and prompt_len(first.pop()) >= 2
        return commands if shared and len(set(prompts)) == 3 else None

    start = script("insert h1 b8a4; insert h2 b8c4; match h3 b8")
    insert = Insert("h1", prompt_of("a2b1"))
    match = Match("h3", prompt_of("a2"))
    assert shrink(start, fails) == (insert, Insert("h2", prompt_of("a2a1")), match)


def test_a_turn_shrinks_to_an_insert_of_a_lock_holder():
    def fails(commands):
        computed = any(isinstance(c, (Finish, Insert)) for c in commands)
        submitted = any(prompt_len(getattr(c, "prompt", ())) >= 2 for c in commands)
        return commands if computed and submitted and Evict(1) in commands else None

    prompt = prompt_of("a9")
    turn = (Submit("r1", None, 1, 0, prompt), *script("admit r1; extend r1 +10; finish r1 keep 1"))
    assert shrink((*turn, Evict(1)), fails) == (Insert("h1", prompt_of("a2")), Evict(1))


def test_lengths_follow_the_page_size():
    whole = script("insert h1 a8b3 SWA from 4 (goes on); match h2 a9; evict full 5")
    match = Match("h2", prompt_of("a3"))
    assert with_scaled_lengths(whole, 1, 4) == (
        Insert("h1", prompt_of("a2b1"), 1, chunked=True),
        match,
        Evict(2),
    )


def test_a_page_has_a_size_that_servers_have_and_a_row_holds_one():
    """The cut is wrong inside a page: pages of one token do not show it, pages of three are not left."""
    name = "a_trim_inside_a_page_keeps_the_page"
    trace = load(Path(__file__).parents[3] / f"fixtures/regressions/{name}.json")
    system = resolve("torch+pr22862-align")
    for size in (3, 4, 5):
        start = replace(trace, geometry=replace(trace.geometry, page_size=size))
        shrunk = minimise(system, start, "FREE-1")
        assert "FREE-1" in (violation_of_clause(system, shrunk, "FREE-1") or ()), size
        page_size = shrunk.geometry.page_size
        width = shrunk.geometry.width
        assert page_size in (2, 4) and width >= page_size, size


class Rounds(TorchKV):
    """A chunk takes as many pages as it would from the start of one."""

    name = "rounds"

    def decode(self, command):
        if not len(self.store.full.free_pages()):
            raise CommandRefused(Reason.OUT_OF_FULL)
        return super().decode(command)


def test_commands_and_sizes_shrink_in_turns():
    """Without the pool that is full there is no need of r2; a length goes with the size that it fills."""
    commands = script(
        "submit r1 (no session) +5; submit r2 (no session) +9; admit r1; extend r1 +5; admit r2;"
        " extend r2 +9; decode r1"
    )
    start = Trace(
        Geometry(page_size=2, window=None, full_pages=8, swa_pages=0, rows=2, width=24),
        Mode.FAITHFUL,
        commands,
        clause="OUT-1",
    )
    shrunk = minimise(Rounds(), start, "OUT-1")
    assert shrunk.commands == script("submit r1 (no session) +1; admit r1; extend r1 +1; decode r1")
    assert shrunk.geometry == Geometry(page_size=2, window=None, full_pages=1, swa_pages=0, rows=1, width=2)


class Switched:
    """torch, with a fault that a setting brings."""

    name = "switched"
    capabilities = Capabilities(settings={"FAULT": ("1",), "OTHER": ("1",)})

    def __init__(self):
        self._ways = {True: resolve("torch+pr22900"), False: resolve("torch")}

    def reset(self, geometry):
        self._system = self._ways[("FAULT", "1") in geometry.settings]
        self._system.reset(geometry)

    def __getattr__(self, name):
        return getattr(self._system, name)


def test_a_setting_is_drawn_and_stays_in_the_trace_where_it_takes_part():
    plain = plan("smoke", presets=("page2",), machines=("sessions",), examples=8, seed=5)
    findings = run(Switched(), plain).findings
    assert "LEN-2" in {found.clause for found in findings}
    assert {found.run.trace.geometry.settings for found in findings} == {(("FAULT", "1"),)}


def test_the_first_of_two_requests_of_one_name_becomes_an_insert():
    first = script("submit r1 (no session) a2; extend r1 +3; finish r1 keep 1")
    again = (Submit("r1", None, 7), Abort("r1"))

    def fails(commands):
        before = {type(c) for c in commands[:-2]}
        cached = Insert in before or {Submit, Extend, Finish} <= before
        lives = [c.request for c in commands if isinstance(c, (Submit, Abort))][-2:]
        alive = (
            commands and isinstance(commands[-1], Abort) and len(lives) == 2 and len({*lives}) == 1
        )
        return commands if cached and alive and len(commands) > 2 else None

    small = shrink((*first, *again), fails)
    assert [type(c) for c in small] == [Insert, Submit, Abort]


def test_an_eviction_stands_for_requests_that_only_need_room():
    press = script("submit r1 (no session) +9; admit r1; extend r1 +9")
    commands = (Insert("h1", prompt_of("a3")), *press, Insert("h2", prompt_of("a3"), 2))

    def fails(commands):
        pressed = Evict(0, 1) in commands or {Submit, Extend} <= {type(c) for c in commands}
        first = commands[0]
        last = commands[-1]
        ends = isinstance(first, Insert) and isinstance(last, Insert) and last.evicted > 1
        return commands if pressed and ends and len(commands) > 2 else None

    small = shrink(commands, fails)
    assert [type(c) for c in small] == [Insert, Evict, Insert]


def test_a_shrunk_trace_keeps_its_story():
    name = "retract_then_retry_frees_the_reserved_token"
    trace = load(Path(__file__).parents[3] / f"fixtures/regressions/{name}.json")
    system = resolve(f"torch+{trace.bug}")
    short = shrunk(system, replay(system, trace), "LEN-3").trace
    assert len(short.commands) < len(trace.commands)
    assert short.story == trace.story != ""


# Sizes with a part that may be dropped, and the field that it is in.
OPTIONAL_PARTS = [
    (tier_preset("storage-names"), "storage"),
    (tier_preset("tier-names"), "namespaces"),
    (tier_preset("tier-state"), "states"),
    (preset("state-track"), "states"),
    (preset("page4"), "window"),
    (replace(preset("page1"), settings=(("namespaces", "extra_key"),)), "settings"),
    (engine_preset("state-fine"), "groups"),
]


@pytest.mark.parametrize(("sizes", "part"), OPTIONAL_PARTS)
def test_a_part_that_a_fault_does_not_need_is_dropped_before_anything_else(sizes, part):
    """All of it: a storage goes with what its threads do."""
    commands = (Poll(), Query(-1)) if part == "storage" else (Poll(),)
    sizes_tried = []

    def fails(candidate):
        sizes_tried.append(candidate.geometry)
        return candidate.commands

    simpler = without_parts(fails, Trace(sizes, Mode.FAITHFUL, commands))
    assert getattr(sizes_tried[0], part) != getattr(sizes, part)
    assert getattr(simpler.geometry, part) != getattr(sizes, part)
    assert simpler.commands == (Poll(),)


@pytest.mark.parametrize(("sizes", "part"), OPTIONAL_PARTS)
def test_a_part_that_a_fault_needs_stays(sizes, part):
    trace = Trace(sizes, Mode.FAITHFUL, (Poll(),))

    def needs_it(candidate):
        same = getattr(candidate.geometry, part) == getattr(sizes, part)
        return candidate.commands if same else None

    assert getattr(without_parts(needs_it, trace).geometry, part) == getattr(sizes, part)


def test_switches_of_a_connector_are_dropped_with_it():
    """Without ARC, or with smaller chunks, the trace passes unless the connector goes as well."""
    trace = Trace(engine_preset("host-chunks"), Mode.FAITHFUL, (Poll(),))

    def fails(candidate):
        config = candidate.geometry
        violates = config.host_chunks == 0 or (config.arc and config.chunk_blocks == 2)
        return candidate.commands if violates else None

    config = _shrink_config(resolve("reference"), fails, trace).geometry
    assert (config.host_chunks, config.chunk_blocks, config.arc) == (0, 1, False)
