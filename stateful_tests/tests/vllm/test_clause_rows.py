"""Every branch of every clause of engines that schedule by themselves sees a fault that it alone sees first,
and what only resembles one conforms."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from impl.vllm.system import VLLMSystem
from reference.blocks.clauses import BLOCK_CLAUSES, BlockStep
from reference.all_clauses import ALL_CLAUSES
from reference.blocks.commands import Add, Fail, Schedule
from reference.system_kinds import BLOCKS
from reference.tiers.commands import Copy
from reference.blocks.facts import BlockFacts, HostFacts, HostKey, Output, Transfer
from reference.blocks.request_texts import RequestTexts
from reference.commands import Done, Mode
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.run_results import Trace
from stateful_tests.tests.support.places import in_words
from stateful_tests.tests.support.row_files import clause_rows
from stateful_tests.tests.vllm.scenes import ROWS as FILE
from stateful_tests.tests.vllm.scenes import SIZES, Scene, SceneInReverse
from stateful_tests.traces.notation import parse

ROWS = list(clause_rows(FILE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_the_last_line_violates_its_clause_and_no_line_before_does(row):
    scene = Scene(SIZES[row.on or "full"])
    for line in row.lines[:-1]:
        assert scene.violation(line) is None, line
    violation = scene.violation(row.lines[-1])
    if not row.clause:
        assert violation is None
        return
    assert violation is not None
    assert (violation.clause, {*violation.also}) == (row.clause, row.also)
    assert f"{violation.expected}; {violation.observed}".endswith(row.words)
    assert in_words(violation.failure.at) == row.places
    if row.clause in ("HOST-1", "HOST-2", "XFER-1", "XFER-2", "XFER-3"):
        assert ALL_CLAUSES[row.clause].trigger(scene.step), (
            "such a step could not have violated it"
        )


NOBODY = "RUN-4: no batch for nobody is no fault"
TWICE = "RUN-1: a request twice in a batch"
NOTHING_MOVES = {
    "HOST-1: a chunk is lost", "RUN-4: nobody is asked, and no batch comes",
    "XFER-3: blocks are kept for nobody", "PRO-1: a transfer that has completed is not",
}  # fmt: skip


def rows_beside_another_request():
    """Yield (row, what r0 does before anybody else, the lines of the row with that). It has blocks and a
    chunk that no row has.

    A reset takes the blocks of whoever runs. RUN-1 and PRO-2 count all of a batch."""
    for row in ROWS:
        sizes = SIZES[row.on or "full"]
        blocks = " | ".join(str(sizes.blocks - group) for group, _ in enumerate(sizes.groups, 1))
        *lines, last = row.lines
        command, _, facts = last.partition("; ")
        comes = "add r0 z3 for 9"
        runs = f"r0 runs 0-1 in {blocks}"
        if row.title != NOBODY:
            yield row, "waits", [comes, *row.lines]
            if not any(line.startswith(("reset_cache", "new_weights")) for line in row.lines):
                yield row, "has run", [comes, f"schedule; {runs}", "update", *row.lines]
        if sizes.host_chunks and row.title not in NOTHING_MOVES:
            copied = f"store 9 of {sizes.blocks} to {sizes.host_chunks - 1} copied"
            if sizes.storage:
                copied += f"; storage write 9 of {sizes.host_chunks - 1} done"
            yield row, "has stored", [comes, f"schedule; {copied}", *row.lines]
        if " runs " in facts and row.clause not in ("RUN-1", "PRO-2"):
            yield row, "is in the batch", [comes, *lines, f"{command}; {runs}; {facts}"]


def verdict(scene, lines, waived=()):
    """Return the headline of the last line, and what else it violates."""
    for line in lines[:-1]:
        assert scene.violation(line, waived) is None, line
    violation = scene.violation(lines[-1], waived)
    return (violation.clause, {*violation.also}) if violation else ("", set())


@pytest.mark.parametrize(
    ("row", "lines"),
    [
        pytest.param(row, lines, id=f"{row.title}, and another {does}")
        for row, does, lines in rows_beside_another_request()
    ],
)
def test_another_request_that_comes_first_changes_no_verdict(row, lines):
    """Whatever passes over one request still sees the next."""
    waived = () if row.clause == "RUN-1" else ("RUN-1",)
    assert verdict(Scene(SIZES[row.on or "full"]), lines, waived) == (row.clause, row.also)


@pytest.mark.parametrize("row", [row for row in ROWS if row.title != TWICE], ids=lambda row: row.title)
def test_records_are_judged_in_any_order(row):
    scene = SceneInReverse(SIZES[row.on or "full"])
    assert verdict(scene, row.lines) == (row.clause, row.also)


def test_every_clause_has_a_row():
    assert {row.clause for row in ROWS if row.clause} == {*BLOCK_CLAUSES}


def test_a_waived_clause_is_not_evaluated():
    scene = Scene(SIZES["full"])
    assert scene.violation("add r1 a5 for 4; refs 7 = 1; free - 7", waived=("BLK-1",)) is None


def test_nothing_is_sure_about_a_waiting_request():
    scene = Scene(SIZES["full"])
    assert scene.violation("add r1 a5 for 4") is None
    assert scene.expected.bearers["r1"].sure_count == 0


LOAD, STORE = (Transfer(0, load, ((0, 1, 0, 0),)) for load in (True, False))
DONE = {"copied": True, "completed": True}


@pytest.mark.parametrize(
    ("before", "after", "reached"),
    [
        ({}, {}, "HOST-1"),
        (
            {},
            {
                "free": (),
                "keys": (
                    HostKey(chunk=0, group=0, stamps=(7,), pins=-1),
                    HostKey(chunk=1, group=0, stamps=(7,), pins=0),
                ),
            },
            "HOST-2",
        ),
        ({}, {"transfers": (LOAD, STORE._replace(**DONE))}, "HOST-1 HOST-3 XFER-1 XFER-2"),
        ({"transfers": (LOAD,)}, {"transfers": (LOAD._replace(**DONE),)}, "HOST-1 HOST-3"),
        ({}, {"transfers": (STORE._replace(parts=()),)}, "HOST-1"),
        ({"transfers": (STORE,)}, {}, "HOST-1 XFER-3"),
        (None, None, ""),
    ],
)
def test_clauses_of_host_memory_apply_where_their_subject_exists(
    before, after, reached
):
    facts = Scene(SIZES["host"]).before
    hosts = (None if has is None else facts.host._replace(**has) for has in (before, after))
    sides = (facts._replace(host=host) for host in hosts)
    step = BlockStep(SIZES["host"], Copy(), False, *sides, lanes=[], outputs=[], bearers={})
    assert step.clauses_reached == {*reached.split()}


def test_a_reset_could_keep_what_host_memory_had_before():
    scene = Scene(SIZES["host"])
    lines = "add r1 a4 for 1", "schedule; r1 runs 0-4 samples 1 in 1 2; chunk 0 keeps 0-2 of r1"
    assert verdict(scene, [*lines, "reset_connector; no hashes in host memory"]) == ("", set())
    assert ALL_CLAUSES["HOST-4"].trigger(scene.step)


class Breaks:
    """An engine that does what the lines of a scene say, and raises in the last."""

    name = "breaks"
    capabilities = VLLMSystem.capabilities

    def __init__(self, *lines):
        self.lines = list(lines)

    def reset(self, config):
        self.scene = Scene(config)

    def apply(self, command):
        self.scene.violation(self.lines.pop(0))
        if not self.lines:
            raise RuntimeError("no such block")
        return Done()

    def view(self):
        return self.scene.before


def broken_at(*lines, waived=()):
    commands = tuple(parse(line.split(";")[0], BLOCKS) for line in lines)
    system = Breaks(*lines)
    system.capabilities = replace(system.capabilities, waived=dict.fromkeys(waived, "harmless"))
    return replay(system, Trace(SIZES["full"], Mode.FAITHFUL, commands)).violation


def test_facts_left_by_a_broken_engine_are_the_headline():
    batch = "add r1 a5 for 4", "schedule; r1 runs 0-3 in 1 2; hash 1"
    violation = broken_at(*batch, "update; hash 2 and more")
    assert violation.clauses == ("PUB-1", "BROKEN")
    assert violation.observed == "slot 1 of block 2 is not written"
    assert violation.failure_of("BROKEN").observed.startswith("RuntimeError: no such block")
    assert broken_at(*batch, "update").clauses == ("BROKEN",)
    assert broken_at(*batch, "update; hash 2 and more", waived=["PUB-1"]).clauses == ("BROKEN",)


def test_a_broken_batch_may_still_write_its_published_blocks():
    violation = broken_at("add r1 a5 for 4", "schedule; r1 is RUNNING 0 in 1 2; hash 2 and more")
    assert violation.clauses == ("BROKEN",)


@pytest.mark.parametrize(
    ("failed", "ends", "expected"),
    [(("r1",), True, None), ((), True, "r1 goes on"), (("r1",), False, "r1 goes on")],
)
def test_a_load_that_fails_ends_its_request(failed, ends, expected):
    """Where that is the policy: the end comes without a token, and nobody else's does."""
    texts = RequestTexts(replace(SIZES["full"], peer=True, fail_requests=ends))
    nothing = BlockFacts((), (), (), (), {}, {})
    ended = nothing._replace(outputs=(Output("r1", (), "error"),))
    quiet = nothing._replace(host=HostFacts(0, (), (), (), (), failed=failed))
    texts.follow(Add("r1", 1, 3, remote=2), quiet)
    texts.follow(Fail(), quiet)
    lanes, outputs = texts.follow(Schedule(), ended)
    step = SimpleNamespace(lanes=lanes, outputs=outputs, bearers=texts.bearers)
    found = BLOCK_CLAUSES["TXT-2"].check(step)
    assert (found and found.expected) == expected and ("r1" in texts.bearers) == bool(expected)
