"""What tells two states of a server apart, of which one may come again, and what is still due there."""

import pytest

from reference.blocks import progress as of_blocks
from reference.blocks.commands import Schedule, Update
from reference.blocks.facts import (
    BlockFacts, HostFacts, HostKey, Output, Published, RequestFact, StorageJob, Transfer,
)  # fmt: skip
from reference.tiers import progress as of_tiers
from reference.tiers.commands import Poll
from reference.tiers.facts import TierPart, TierTransfer
from stateful_tests.tests.tiers.scenes import RECEIVED

JOB = Transfer(1, load=False, parts=((0, 1, 0, 0),), submitted=True)
HOST = HostFacts(1, (2,), (), (HostKey(chunk=0, group=0, stamps=(5,), pins=0),), (JOB,))
REQUEST = RequestFact("RUNNING", (5, 6), 1, ((1, 0),))
NOTHING = Output("r1", (), "")
TOKEN = Output("r2", (5,), "")
BLOCKS = BlockFacts((0, 1, 0), (2,), (), (), {}, {"r1": REQUEST}, steps_in_flight=1, host=HOST)


def with_job(**changed):
    return BLOCKS._replace(host=HOST._replace(transfers=(JOB._replace(**changed),)))


def with_request(**changed):
    return BLOCKS._replace(requests={"r1": REQUEST._replace(**changed)})


@pytest.mark.parametrize(
    "other",
    [
        with_job(load=True), with_job(parts=()), with_job(submitted=False), with_job(copied=True),
        with_job(completed=True), with_job(stale=True), BLOCKS._replace(host=HOST._replace(transfers=())),
        BLOCKS._replace(host=HOST._replace(free=())), BLOCKS._replace(host=HOST._replace(keys=())),
        with_request(status="WAITING"), with_request(tokens=(5,)), with_request(computed=2),
        with_request(tables=((1, 2),)), BLOCKS._replace(requests={"r2": REQUEST}),
        BLOCKS._replace(free=()), BLOCKS._replace(published=(Published(1, 0, (5,)),)),
        BLOCKS._replace(pinned=(("r1", 1),)), BLOCKS._replace(steps_in_flight=0),
    ],
)  # fmt: skip
def test_two_states_of_an_engine_are_apart(other):
    assert of_blocks.state_of(BLOCKS) != of_blocks.state_of(other)


def test_a_storage_has_work_until_each_job_is_done():
    jobs = [StorageJob(number, load=False, chunks=(0,), done=False) for number in (1, 2)]
    due, *some_done = (
        BLOCKS._replace(host=HOST._replace(jobs=tuple(job._replace(done=job.job == done) for job in jobs)))
        for done in (0, 1, 2)
    )
    for number, facts in enumerate(some_done, 1):
        assert of_blocks.state_of(due) != of_blocks.state_of(facts)
        work = [{*of_blocks.EngineProgress()._pending_work(each)} for each in (due, facts)]
        assert work[0] - work[1] == {("storage", number)}


def test_a_state_of_an_engine_has_no_numbers_of_blocks_or_jobs():
    same = with_job(job=7, parts=((0, 2, 1, 0),))
    same = same._replace(requests={"r1": REQUEST._replace(tables=((2, 0),))}, free=(1,))
    assert of_blocks.state_of(BLOCKS) == of_blocks.state_of(same)


@pytest.mark.parametrize(
    "outputs, begins_anew",
    [((), False), ((NOTHING, NOTHING), False), ((NOTHING, TOKEN), True), ((TOKEN, NOTHING), True),
     ((NOTHING._replace(finished="length"),), True)],
)  # fmt: skip
def test_an_output_for_anybody_is_an_answer(outputs, begins_anew):
    progress = of_blocks.EngineProgress()
    at_rest = BLOCKS._replace(host=None, steps_in_flight=0)
    for command, facts in ((Schedule(), at_rest), (Update(), at_rest._replace(outputs=outputs))):
        progress.follow(command, facts, waits=True, idle=False)
    still = progress.follow(Schedule(), at_rest, waits=True, idle=False)
    assert still is not None
    assert still.times == (1 if begins_anew else 2)


def test_an_engine_without_waiting_requests_has_no_standstill():
    nobody = TIER._replace(requests=(), transfers=())
    assert of_tiers.DecodeProgress().follow(Poll(), nobody, (), ()) is None


QUEUED = TierTransfer(1, load=False, parts=(TierPart("full", 1, 1),), acks=(1,))
TIER = RECEIVED._replace(transfers=(QUEUED,))
ONE, *OTHERS = TIER.requests


def with_transfer(**changed):
    return TIER._replace(transfers=(QUEUED._replace(**changed),))


def with_receiver(**changed):
    return TIER._replace(requests=(ONE._replace(**changed), *OTHERS))


@pytest.mark.parametrize(
    "other",
    [
        with_transfer(load=True), with_transfer(parts=()), with_transfer(sent=True),
        with_transfer(completed=True), TIER._replace(transfers=()),
        with_receiver(name="h9"), with_receiver(state="waits"), with_receiver(row=-1),
        with_receiver(first=-1), with_receiver(slots={}), with_receiver(kept={"full": (1,)}),
        with_receiver(slots={**ONE.slots, "full": (3, 9)}),
        TIER._replace(free={"full": (6,), "swa": (6, 7, 8)}), TIER._replace(host_free={"full": (1,)}),
        TIER._replace(free_rows=()), TIER._replace(nodes=()), TIER._replace(evictable={"full": 1, "swa": 2}),
    ],
)  # fmt: skip
def test_two_states_of_a_decode_server_are_apart(other):
    assert of_tiers.state_of(TIER) != of_tiers.state_of(other)


def test_each_request_counts_and_row_0_is_a_row():
    last = OTHERS[-1]._replace(state="runs")
    assert of_tiers.state_of(TIER) != of_tiers.state_of(TIER._replace(requests=(ONE, last)))
    rows = [of_tiers.state_of(with_receiver(row=row)) for row in (-1, 0, 1)]
    assert rows[0] != rows[1] == rows[2]


def test_a_copy_that_grows_is_another_state():
    first_state, second_state = (with_receiver(kept={"full": slots}) for slots in ((1,), (1, 2)))
    assert of_tiers.state_of(first_state) != of_tiers.state_of(second_state)


@pytest.mark.parametrize(
    "changed, due",
    [({"sent": True}, True), ({"sent": True, "completed": True}, False), ({}, False),
     ({"sent": True, "stale": True}, True)],
)  # fmt: skip
def test_a_transfer_is_due_until_the_engine_completes_it(changed, due):
    facts = with_transfer(**changed)._replace(requests=())
    assert (("transfer", 1) in of_tiers._pending_work(facts, (), ())) is due
    as_block = {("submitted" if name == "sent" else name): value for name, value in changed.items()}
    job = JOB._replace(submitted=False)._replace(**as_block)
    engine = BLOCKS._replace(host=HOST._replace(transfers=(job,)), steps_in_flight=0)
    progress = of_blocks.EngineProgress()
    assert (("transfer", 1) in progress._pending_work(engine)) is due
